"""When does a round begin, begin anew, or count? The leader's side of the round protocol, decided from reports alone.

How this works. The leader is the member with the smallest id of those that the others have not passed by (passing.py);
it keeps nothing that the members' reports would not tell its successor, which may be its own next life (one that
restarts again and again must not begin to wait anew each time), but for whom it waits for no longer.
It orders one attempt at a time and commits it when all survivors of its roster hold the result. Every rule that a
change of leader needs follows from two facts:

- A member obeys one leader at a time, and gives up an unfinished attempt before it reports to another one.
- An attempt is committed only when every living member of it has reported to hold its result.

A leader decides nothing new before every living member has reported: one that knows less might number a round again.
So if some survivor reports to hold no result of the newest attempt, nobody has committed that attempt, and beginning
another is safe. If all who took part in it hold it, or one has applied it, it is the one result of this round.

A member that lives may hold all others up for a while, not for ever. Who does not report for as long as the leader is
patient is done without (a round may be numbered again, then, and the next sums whole models), and is not waited for
until it has been in a round; nor is one that has kept MISSES_MAX rounds in turn waiting for its contribution, or that
says to hold a result and does not apply it. An attempt whose members come no further is begun again without some of
them (culprits.py).
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from statistics import median_low
from typing import Any

from peerd.training.batch_sizes import Work, shares
from peerd.training.counts import REPORTED_STEP
from peerd.training.mode_settings import AUTO, GRADIENTS, ROSTER_MAX, STANDING, ModeSettings
from peerd.training.rounds.attempt import EXACT_CODEC, LAST_CODEC, Pace, ends_whole
from peerd.training.rounds.choice import Choice, is_left_to_leader
from peerd.training.rounds.culprits import MISSES_MAX, Culprits
from peerd.training.rounds.lengths import GROUPS, TOO_FAR, FarRounds, far_off, longest_mean
from peerd.training.rounds.lines import Lines
from peerd.training.rounds.topology import choose
from peerd.training.rounds.weights import capped, scales
from peerd.transport.ids import NodeId
from peerd.transport.messages import NO_MEAN, RoundBegin, RoundCommit, RoundPhase, RoundReport

FIRST_STEP = 1 << 20  # is drawn of as many, so that two who both lead for a while do not number attempts alike
PATIENCE_FIRST_S = 300.0  # before anything was measured
PATIENCE_MIN_S = 30.0
PATIENCE_SHARE = 4  # times the usual round
STOOD_SHARE = 0.5  # of its patience without a look: a leader that stood itself has not heard who spoke meanwhile
CUT_MIN_S = 4.0  # two reports of each member
CUT_SHARE = 4  # times the slowest confirmation so far
TINY = 1e-300  # the length of what should have none

Order = tuple[NodeId, RoundBegin | RoundCommit]


class Leader:
    """What one leadership knows, from its beginning to its end."""

    def __init__(
        self, me: NodeId, rng: random.Random, settings: ModeSettings, size_bytes: int, *, differences: bool,
        every: int = 0,
    ) -> None:  # fmt: skip
        """`differences`: from an agreed model on, contributions are differences from it. `every`: see `Choice`."""
        self.begun: RoundBegin | None = None
        self.left_out: dict[NodeId, int] = {}  # whose contribution was far too long, in this life
        self._blames: dict[NodeId, NodeId] = {}  # whom each member blamed first
        self._far: set[NodeId] = set()  # whose contribution to the next round is too long
        self._far_rounds = FarRounds()
        self._me = me
        self._rng = rng
        self._settings = settings
        self._size_bytes = size_bytes
        self._differences = differences
        self._gradients = settings.exchange == GRADIENTS
        self._reports: dict[NodeId, RoundReport] = {}
        self._heard_at: dict[NodeId, float] = {}
        self._since: dict[NodeId, float] = {}  # when each member came to the round
        self._taken_in: dict[NodeId, int] = {}  # the last round that each was ordered to
        self._told: dict[NodeId, RoundBegin | RoundCommit] = {}  # since its last report
        self._silent: dict[NodeId, float] = {}  # since when each living member has not reported
        self._done_without: set[NodeId] = set()  # who was silent for too long, until it has been in a round
        self._missed = Counter[NodeId]()  # rounds in turn that each kept waiting for its contribution, in vain
        self._left_behind: set[NodeId] = set()  # by the attempt that was begun last
        self._culprits = Culprits(me, rng)
        self._lines = Lines(me, rng)
        self._choice = Choice(every)
        self._fell_apart = 0  # attempts in turn that a living member has left
        self._final_misses = 0  # attempts in turn at the last round of a run that have failed
        self._owing: dict[NodeId, float] = {}  # since when each holds a result that it was told to apply
        self._said: dict[NodeId, RoundReport] = {}  # of the attempt, by who holds its result, be it alive or not
        self._committed: RoundCommit | None = None
        self._newest = 0  # the highest attempt begun: of one that died before it reported it, nobody else knows
        self._shuffle = False
        self._wanted_at: float | None = None
        self._moved: dict[NodeId, float] = {}  # when each member of the attempt came further
        self._begun_at: float | None = None
        self._looked_at = self._awake_since = -math.inf
        self._open_since: float | None = None  # when the last attempt that was committed began

    @property
    def waits(self) -> bool:
        """Whether time alone may change what it decides."""
        slow = (self._silent.keys() | self._owing.keys()) - self._done_without
        return self.begun is not None or self._wanted_at is not None or bool(slow)

    def set_aside(self, pace: Pace, now: float) -> frozenset[NodeId]:
        """Without whom rounds go on for a while, as no attempt with it ends."""
        return self._culprits.found(patience_s(pace), now)

    def life(self, member: NodeId) -> int:
        """Of one that has been heard; 0: none."""
        report = self._reports.get(member)
        return report.life if report is not None else 0

    def heard(self, sender: NodeId, report: RoundReport, now: float) -> None:
        """A member said where it is; said again, what it was told has not reached it."""
        changed = self._reports.get(sender) != report
        if changed:
            self._moved[sender] = now
        if changed or sender != self._me:
            self._told.pop(sender, None)
        self._reports[sender], self._heard_at[sender] = report, now
        if self.begun is not None and _holds(report, self.begun.attempt):
            self._said.setdefault(sender, report)
        waits_s = max(0.0, report.waits_s)
        if self._open_since is not None:  # a contribution that was there by then is in that round's result
            waits_s = min(waits_s, now - self._open_since)
        self._since[sender] = now - waits_s

    def forget(self, peer: NodeId) -> None:
        """This member is gone, or messages to it were lost."""
        self._reports.pop(peer, None)
        self._heard_at.pop(peer, None)
        self._since.pop(peer, None)
        self._taken_in.pop(peer, None)
        self._told.pop(peer, None)
        self._waits_again_for(peer)

    def untold(self, peer: NodeId) -> None:
        """What this member was told may be lost."""
        self._told.pop(peer, None)

    def decide(self, everyone: frozenset[NodeId], pace: Pace, now: float) -> list[Order]:
        """What to tell whom now."""
        limit_s = patience_s(pace)
        if self.waits and now - self._looked_at > STOOD_SHARE * limit_s:
            self._awake_since = now
        self._looked_at = now
        reports = self._reports_of(everyone)
        orders = self._late_commits(reports)
        if self.begun is not None:
            if (told := self._go_on(self.begun, reports, pace, now)) is not None:
                return orders + told
            self.begun = None
            reports = self._reports_of(everyone)
        self._silent = {id: self._silent.get(id, now) for id in everyone - reports.keys()}
        self._owing = {id: self._owing.get(id, now) for id in self._owe(reports)}
        waited = [*self._silent.items(), *self._owing.items()]
        self._done_without |= {id for id, since in waited if now - max(since, self._awake_since) > limit_s}
        if self._silent.keys() <= self._done_without:
            commits = self._unfinished_commit(reports)
            orders += self._begin(reports, pace, now) if commits is None else commits
        return orders

    def _reports_of(self, everyone: frozenset[NodeId]) -> dict[NodeId, RoundReport]:
        return {id: report for id, report in sorted(self._reports.items()) if id in everyone}

    def _go_on(
        self, begun: RoundBegin, reports: dict[NodeId, RoundReport], pace: Pace, now: float
    ) -> list[Order] | None:
        """Commit this attempt, or wait for its end; None: it has failed."""
        members = zip(begun.roster, begun.lives, strict=True)
        survivors = [id for id, life in members if self._survives(reports.get(id), life, begun)]
        held = bool(survivors) and all(_holds(reports[id], begun.attempt) for id in survivors)
        is_void = held and any(report.is_void for report in self._said.values())
        if held and not is_void:
            return self._commit(begun, survivors, pace, now)
        stuck, cut = self._is_stuck(begun, patience_s(pace), now), self._note_cut(begun, reports, pace, now)
        if not is_void and len(survivors) == len(begun.roster) and not (stuck or cut):
            late = [id for id in survivors if reports[id].attempt < begun.attempt]
            return self._tell(late, begun)
        left = is_void or len(survivors) < sum(id in reports for id in begun.roster)  # it lives
        self._note_failure(begun, reports, patience_s(pace), now, left=left, stuck=stuck, cut=cut)
        return None

    def _note_failure(
        self, begun: RoundBegin, reports: dict[NodeId, RoundReport], limit_s: float, now: float,
        *, left: bool, stuck: bool, cut: bool,
    ) -> None:  # fmt: skip
        """Of an attempt that a living member has left, that comes no further, or that needs a broken line."""
        self._shuffle = stuck or cut  # other neighbours may reach each other
        self._fell_apart += left
        self._final_misses += cut and begun.final and not stuck
        if stuck:
            silent = self._unheard(begun, reports, limit_s, now)
            for id in silent:
                del self._reports[id]
            self._done_without |= silent
        if stuck or (left and self._fell_apart >= MISSES_MAX):
            self._culprits.failed(begun.roster, limit_s, now)
            self._final_misses += begun.final

    def _is_stuck(self, begun: RoundBegin, limit_s: float, now: float) -> bool:
        """Nobody has come further for so long; or one alone says so, for longer than the last of a chain may lag."""
        assert self._begun_at is not None
        moved = sorted((self._moved_at(id) for id in begun.roster), reverse=True)
        last, before = moved[0], moved[min(1, len(moved) - 1)]
        return now - last > limit_s or now - before > limit_s + PATIENCE_SHARE * (before - self._begun_at)

    def _moved_at(self, id: NodeId) -> float:
        """When it came further in the attempt, as far as this leader can know."""
        assert self._begun_at is not None
        return max(self._moved.get(id, self._begun_at), self._awake_since)

    def _unheard(
        self, begun: RoundBegin, reports: dict[NodeId, RoundReport], limit_s: float, now: float
    ) -> set[NodeId]:
        """Who is in this attempt, which it says again and again, and has said nothing for so long."""
        told = {id for id in begun.roster if id in reports and reports[id].phase != RoundPhase.IDLE}
        return {id for id in told - {self._me} if now - max(self._heard_at[id], self._awake_since) > limit_s}

    def _note_cut(self, begun: RoundBegin, reports: dict[NodeId, RoundReport], pace: Pace, now: float) -> bool:
        """Nobody has come further for a moment, and a line that the attempt needs is broken."""
        limit_s = patience_s(pace)
        still_s = now - max(self._moved_at(id) for id in begun.roster)
        if still_s <= min(limit_s, max(CUT_MIN_S, CUT_SHARE * pace.slowest_s)):
            return False
        unreached = {id: reports[id].unreached for id in {*begun.roster, self._me} if id in reports}
        return self._lines.note_stuck(begun.roster, begun.topology, unreached, limit_s, now, early=still_s <= limit_s)

    def _waits_again_for(self, id: NodeId) -> None:
        self._done_without.discard(id)
        self._missed.pop(id, None)

    def _late_commits(self, reports: dict[NodeId, RoundReport]) -> list[Order]:
        """Whoever holds what another has applied missed the word."""
        applied: dict[int, list[tuple[int, float]]] = {}
        for report in reports.values():
            applied.setdefault(report.agreed, []).append((report.round, report.limit))
        if self.begun is not None:
            applied.pop(self.begun.attempt, None)  # nobody can have that
        orders: list[Order] = []
        for id, report in reports.items():
            if report.phase != RoundPhase.HELD or report.attempt not in applied:
                continue
            commit = self._committed
            if commit is None or commit.attempt != report.attempt:
                (number, limit), _ = Counter(sorted(applied[report.attempt])).most_common(1)[0]  # one may say anything
                commit = RoundCommit(number, report.attempt, limit)
            orders += self._tell([id], commit)
        return orders

    def _owe(self, reports: dict[NodeId, RoundReport]) -> set[NodeId]:
        """Whose word that they have applied what they hold is waited for."""
        applied = {report.agreed for report in reports.values()}
        held = {id: report.attempt for id, report in reports.items() if report.phase == RoundPhase.HELD}
        return {id for id, attempt in held.items() if attempt in applied} | self._holders(reports)

    def _holders(self, reports: dict[NodeId, RoundReport]) -> set[NodeId]:
        """Who holds the newest attempt, if all who took part in it do and that may have been committed."""
        newest = max((report.attempt for id, report in reports.items() if id not in self._done_without), default=0)
        part = {id: one for id, one in reports.items() if one.attempt == newest and id not in self._done_without}
        held = all(_holds(report, newest) for report in part.values())
        return {id for id, report in part.items() if held and report.phase == RoundPhase.HELD}

    def _unfinished_commit(self, reports: dict[NodeId, RoundReport]) -> list[Order] | None:
        """What an earlier leader may have committed, somewhere: all who took part in the newest attempt hold it.

        None: there is no such attempt. While there is one, its members have yet to say that they have its result, and
        nothing else begins, be they told or not.

        How long a mean of gradients may be, and whether there is one, only its own leader knew. If somebody applied it
        who is away, the others' next attempt is another one, and who is away takes over their model.
        """
        holders = sorted(self._holders(reports))
        if not holders:
            return None
        report = reports[holders[0]]
        if self._committed is not None and self._committed.attempt == report.attempt:
            return self._tell(holders, self._committed)
        if self._gradients:
            return None
        return self._tell(holders, RoundCommit(report.round + 1, report.attempt))

    def _survives(self, report: RoundReport | None, life: int, begun: RoundBegin) -> bool:
        """Whether who says so is still part of the attempt: not restarted, not gone on to something else."""
        if report is None or report.life != life:
            return False
        if report.attempt < begun.attempt:  # it takes none that it has had already
            if self._gradients and report.finished and not begun.whole:
                return False
            return report.phase != RoundPhase.IDLE and report.round < begun.round
        return report.attempt == begun.attempt and (
            report.phase in (RoundPhase.RUNNING, RoundPhase.HELD) or report.agreed == report.attempt
        )

    def _commit(self, begun: RoundBegin, survivors: list[NodeId], pace: Pace, now: float) -> list[Order]:
        self._choice.committed(pace.latency_s, now)
        self.begun = self._wanted_at = None
        self._culprits.committed()
        self._fell_apart = 0
        if not begun.final:
            self._final_misses = 0
        self._missed.update(self._left_behind)
        for id in survivors:
            self._waits_again_for(id)
        self._open_since = self._begun_at
        self._committed = RoundCommit(begun.round, begun.attempt, self._longest_mean(begun))
        return self._tell(survivors, self._committed)

    def _longest_mean(self, begun: RoundBegin) -> float:
        """As a commit says it."""
        if begun.nonfinite or any(report.nonfinite for report in self._said.values()):
            return NO_MEAN
        if not (self._gradients and self._settings.robust and begun.weights):
            return 0.0
        said = [self._said[id].lengths if id in self._said else () for id in begun.roster]
        return longest_mean([lengths[0] if lengths else math.inf for lengths in said], scales(begun.weights)) or TINY

    def _begin(self, reports: dict[NodeId, RoundReport], pace: Pace, now: float) -> list[Order]:
        """Begin a round when all have come to it; a newcomer to a swarm that has had rounds comes to the next one."""
        reports, newest, attempt = self._believed(reports)
        reports = self._near(reports)
        applied = {report.agreed for report in reports.values()}
        late = {id for id, report in reports.items() if report.phase == RoundPhase.HELD and report.attempt in applied}
        late -= self._done_without
        final = not late and all(report.finished for report in reports.values())
        reports = self._without_culprits(reports, pace, now, final=final)
        roster, way = self._roster(reports, pace, final=final)
        if not self._is_wanted(roster, reports, final=final):
            self._wanted_at = None
            return []
        idle = {id for id, report in reports.items() if _is_waited_for(report, newest)}
        if late or self._waits_for(idle, pace, now):
            return []
        self._left_behind = idle
        self.begun = self._order(roster, way, reports, newest + 1, self._next_attempt(attempt), now, final=final)
        self._begun_at = now
        self._taken_in |= dict.fromkeys(roster, newest + 1)
        self._moved.clear()
        self._said.clear()
        self._far_rounds.note(self._far, roster)
        return self._tell(roster, self.begun)

    def _roster(self, reports: dict[NodeId, RoundReport], pace: Pace, *, final: bool) -> tuple[list[NodeId], str]:
        """Who has come to the round and can be in one, and the way in which they sum."""
        roster = [
            id
            for id, report in reports.items()
            if report.phase != RoundPhase.IDLE and (final or not (self._gradients and report.finished))
        ]
        if len(roster) > ROSTER_MAX and not self._gradients:  # in turn; those who give gradients are to be alike
            taken = set(sorted(roster, key=lambda id: (self._taken_in.get(id, 0), self._rng.random()))[:ROSTER_MAX])
            roster = [id for id in roster if id in taken]
        roster = roster[:ROSTER_MAX]
        if self._shuffle:
            self._rng.shuffle(roster)

        def topology(size: int) -> str:
            told = self._settings.topology
            return choose(self._size_bytes, max(1, size), pace.latency_s, pace.bytes_per_s) if told == AUTO else told

        unreached = {id: report.unreached for id, report in self._reports.items()}
        fitting, way = self._lines.fitting(roster, unreached, topology)
        return (fitting, way) if len(fitting) >= self._settings.min_peers else (roster, topology(len(roster)))

    def _is_wanted(self, roster: list[NodeId], reports: dict[NodeId, RoundReport], *, final: bool) -> bool:
        """Whether these are enough, and one of them needs a round; notes since when that is so."""
        wanting = [
            id
            for id in roster
            if (not reports[id].given and not reports[id].early) or (final and not reports[id].settled)
        ]
        if not wanting or len(roster) < self._settings.min_peers:
            return False
        enough_at = sorted(self._since[id] for id in roster)[self._settings.min_peers - 1]
        self._wanted_at = max(enough_at, min(self._since[id] for id in wanting))
        return True

    def _waits_for(self, idle: set[NodeId], pace: Pace, now: float) -> bool:
        """Whether the round that is wanted does, for the contribution of one of these."""
        assert self._wanted_at is not None
        awaited = {id for id in idle - self._done_without if self._missed[id] < MISSES_MAX}
        return bool(awaited) and now - max(self._wanted_at, self._awake_since) <= waits_s(pace, self._settings)

    def _next_attempt(self, newest: int) -> int:
        """Above the newest one that members report."""
        if newest > self._newest or not self._newest:  # another led meanwhile, or does
            self._newest = newest + self._rng.randrange(FIRST_STEP)
        self._newest += 1
        return self._newest

    def _order(
        self, roster: list[NodeId], way: str, reports: dict[NodeId, RoundReport], number: int, attempt: int, now: float,
        *, final: bool,
    ) -> RoundBegin:  # fmt: skip
        """What the round sums, and how."""
        in_common = {(reports[id].agreed, reports[id].start) for id in roster}
        alike = len(in_common) == 1 and (0, b"") not in in_common
        whole = (final and ends_whole(self._settings)) or not self._differences or not alike
        lengths = [length for id in roster for length in reports[id].lengths] if alike and not self._gradients else []
        codec = EXACT_CODEC if len(roster) == 1 else self._settings.codec  # where nothing travels nothing need be lost
        if codec == AUTO:
            codec = self._choice.codec(reports[id].concentration for id in roster)
        self._choice.begins(now, usual=codec == EXACT_CODEC or not (whole or final))
        return RoundBegin(
            number,
            attempt,
            EXACT_CODEC if whole else LAST_CODEC if final and len(roster) > 1 else codec,
            way,
            whole,
            final,
            tuple(roster),
            tuple(reports[id].life for id in roster),
            tuple(lengths) if len(lengths) == GROUPS * len(roster) else (),
            waited=tuple(max(0.0, now - self._since[id]) for id in roster),
            every=self._choice.every(codec) if is_left_to_leader(self._settings) else 0,
            shares=()
            if whole or final or self._gradients
            else shares([Work(reports[id].samples, reports[id].steps) for id in roster]),
            **(self._of_gradients(roster, reports, whole=whole) if self._gradients else {}),
        )

    @staticmethod
    def _of_gradients(roster: list[NodeId], reports: dict[NodeId, RoundReport], *, whole: bool) -> dict[str, Any]:
        """What the order of a round says of gradients, or whose model those take over who do not all hold one."""
        if whole:
            alike = Counter(reports[id].agreed for id in roster)
            alike[0] = 0  # they have agreed with nobody
            source = max(
                roster,
                key=lambda id: (alike[reports[id].agreed], reports[id].round, reports[id].step, reports[id].agreed),
            )  # who stands alone with what it says takes over nobody
            return {"source": source, "basis": reports[source].agreed, "step": reports[source].step}
        weights = capped(reports[id].weight for id in roster)
        return {"weights": weights, "nonfinite": not any(weights) or any(reports[id].nonfinite for id in roster)}

    def _without_culprits(
        self, reports: dict[NodeId, RoundReport], pace: Pace, now: float, *, final: bool
    ) -> dict[NodeId, RoundReport]:
        """Who may be in the next round. The last one of a run should have all, and is tried with all first."""
        if final and self._final_misses < MISSES_MAX:
            aside = self._culprits.found(patience_s(pace), now)
        else:
            aside = self._culprits.aside(patience_s(pace), now)
        kept = {id: report for id, report in reports.items() if id not in aside}
        ended = final and all(report.settled for report in kept.values())
        return reports if ended or len(kept) < self._settings.min_peers else kept

    def _believed(self, reports: dict[NodeId, RoundReport]) -> tuple[dict[NodeId, RoundReport], int, int]:
        """Without who is further than others would believe an order to be; and what its round and attempt are above.

        Each order goes as far as they do believe, so one that a lie of an earlier leader has taken ahead is in again
        after a few. Where no round is without it, an order goes beyond it at once, which they may believe still.
        """
        rounds = [report.round for report in reports.values()]
        attempts = [report.attempt for report in reports.values()]
        last, newest = _near_usual(rounds), _near_usual(attempts)
        near = {id: report for id, report in reports.items() if report.round <= last and report.attempt <= newest}
        if len(near) < self._settings.min_peers:
            return reports, max(rounds, default=0), max(attempts, default=0)
        return near, last, newest

    def _near(self, reports: dict[NodeId, RoundReport]) -> dict[NodeId, RoundReport]:
        """Without those who are left out: for the rest of a life, as a round without them is one that they lack."""
        if not self._settings.robust:
            return reports
        here = {id: one for id, one in reports.items() if self.left_out.get(id) != one.life}
        blamed = {}
        for id, one in here.items():
            if one.blames in here and one.blames != self._me and self._blames.setdefault(id, one.blames) == one.blames:
                blamed[one.blames] = here[one.blames].life  # one member a member: a liar gets one other out at most
        ready = {
            id: one.lengths
            for id, one in here.items()
            if one.phase != RoundPhase.IDLE and len(one.lengths) == GROUPS and id != self._me
        }
        silent = {id for id, one in here.items() if one.phase != RoundPhase.IDLE and len(one.lengths) != GROUPS}
        out: set[NodeId] = set()
        if not self._gradients:
            self._far = far_off(ready)
            out = far_off(ready, TOO_FAR) | self._far_rounds.worn_out(self._far) | (silent - {self._me})
        self.left_out |= blamed | {id: here[id].life for id in out}
        return {id: one for id, one in here.items() if id not in out | blamed.keys()}

    def _tell(self, members: list[NodeId], order: RoundBegin | RoundCommit) -> list[Order]:
        """Once for each report."""
        untold = [id for id in members if self._told.get(id) != order]
        self._told |= dict.fromkeys(untold, order)
        return [(id, order) for id in untold]


def _near_usual(counts: Sequence[int]) -> int:
    """The highest, or as near to it as those believe who have counted so far as is usual.

    Zeros count: in a swarm that has just begun a single one that tells of more is one that lies.
    """
    return min(max(counts, default=0), median_low(counts or [0]) + REPORTED_STEP)


def patience_s(pace: Pace) -> float:
    """For how long a leader waits for what one member alone holds up."""
    if pace.usual_round_s is None:
        return PATIENCE_FIRST_S
    return max(PATIENCE_MIN_S, PATIENCE_SHARE * pace.usual_round_s)


def waits_s(pace: Pace, settings: ModeSettings) -> float:
    """For a member without a contribution. Who does not stand meanwhile comes by its own steps, be they slow."""
    if settings.overlap in STANDING or settings.exchange == GRADIENTS:
        return patience_s(pace)
    return max(patience_s(pace), PATIENCE_SHARE * pace.usual_period_s)


def _is_waited_for(report: RoundReport, newest: int) -> bool:
    """Whether a round waits for this contribution: not for that of a newcomer to a swarm that has had rounds."""
    return report.phase == RoundPhase.IDLE and not report.finished and (report.round > 0 or newest == 0)


def _holds(report: RoundReport, attempt: int) -> bool:
    """Whether it has this attempt's result, applied or not."""
    return report.agreed == attempt or (report.phase == RoundPhase.HELD and report.attempt == attempt)
