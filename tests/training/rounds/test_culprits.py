"""A member that lives, reports and keeps rounds from their end: it holds the others up for a while, not for ever."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from round_swarm import Lie, RoundSwarm, formed

from peerd.training.mode_settings import ModeSettings
from peerd.training.rounds import collective
from peerd.training.rounds import leader as leader_module
from peerd.training.rounds.attempt import Pace
from peerd.training.rounds.culprits import MISSES_MAX, TRIES_APART, Culprits
from peerd.training.rounds.leader import PATIENCE_MIN_S, Leader
from peerd.training.rounds.member import REPEAT_S
from peerd.transport.errors import PeerError
from peerd.transport.messages import (
    Message,
    PiecesTaken,
    RoundBegin,
    RoundCommit,
    RoundPhase,
    RoundPieces,
    RoundReport,
    RoundsWithout,
)

STEP_S = 3
MISS_S = PATIENCE_MIN_S + 2 * REPEAT_S + STEP_S
"""How long an attempt in vain lasts where rounds are short."""
SECONDS = 500


@pytest.mark.parametrize("field", ["round", "attempt"])
@pytest.mark.parametrize("others", ["b", "bcd"])
def test_a_count_that_is_made_up_for_a_newcomer_that_leads_stops_no_rounds(field: str, others: str) -> None:
    """It has none of its own yet; what it ordered by that all others would refuse it for."""
    swarm = formed(f"{others}e", 12, overlap="blocking", robust=True)
    deliver, refused = swarm.deliver, set[str]()

    def guarded(source: str, target: str) -> bool:
        try:
            return deliver(source, target)
        except PeerError:
            refused.add(source)
            swarm.lose(source, target)
            return True

    def train(steps: int) -> None:
        for _ in range(steps):
            for name in sorted(swarm.nodes):
                swarm.step(name, swarm.rng.normal(size=12) * 0.01)
            swarm.settle()
            swarm.pass_time(2.0)
            swarm.settle()

    train(3)
    swarm.lies["e"] = lambda to, said: (
        replace(said, **{field: 2**47}) if isinstance(said, RoundReport) and to == "a" else said  # type: ignore[arg-type]
    )
    swarm.live("a", swarm.nodes["b"].x)
    swarm.all_hear()
    swarm.settle()
    before = {name: len(swarm.nodes[name].rounds) for name in others}
    swarm.deliver = guarded  # type: ignore[method-assign]
    train(6)
    assert refused <= {"e"}
    assert all(len(swarm.nodes[name].rounds) >= before[name] + 5 for name in others)


def no_pieces(culprit: str) -> Lie:
    return lambda to, message: None if isinstance(message, RoundPieces) else message


def pieces_to_some(culprit: str) -> Lie:
    return lambda to, message: None if isinstance(message, RoundPieces) and to in "acd" else message


def pieces_in_turn(culprit: str) -> Lie:
    """One attempt in three goes well."""

    def lie(to: str, message: Message) -> Message | None:
        return None if isinstance(message, RoundPieces) and random.Random(message.attempt).random() > 0.33 else message

    return lie


def nothing_confirmed(culprit: str) -> Lie:
    return lambda to, message: None if isinstance(message, PiecesTaken) else message


def nothing_held(culprit: str) -> Lie:
    def lie(to: str, message: Message) -> Message | None:
        if isinstance(message, RoundReport) and message.phase == RoundPhase.HELD:
            return replace(message, phase=RoundPhase.RUNNING)
        return message

    return lie


def held_at_once(culprit: str) -> Lie:
    """And for ever: it applies nothing, and sends no pieces."""
    said = set[int]()

    def lie(to: str, message: Message) -> Message | None:
        if isinstance(message, RoundReport) and message.attempt:
            new = message.attempt not in said
            said.add(message.attempt)
            return replace(message, phase=RoundPhase.HELD, round=0, agreed=0) if new else None
        return no_pieces(culprit)(to, message)

    return lie


def held_of_an_attempt_that_nobody_made(culprit: str) -> Lie:
    def lie(to: str, message: Message) -> Message | None:
        if isinstance(message, RoundReport):
            return replace(message, phase=RoundPhase.HELD, attempt=message.attempt + (1 << 34))
        return message

    return lie


def always_further(culprit: str) -> Lie:
    """It sends nothing, and says that it gets ever more."""
    count = iter(range(10**6))

    def lie(to: str, message: Message) -> Message | None:
        if isinstance(message, RoundReport):
            return replace(message, progress=next(count))
        return no_pieces(culprit)(to, message)

    return lie


def begins_nothing(culprit: str) -> Lie:
    """It has a contribution, and says no more."""

    def lie(to: str, message: Message) -> Message | None:
        if isinstance(message, RoundReport) and message.phase in (RoundPhase.RUNNING, RoundPhase.HELD):
            return None
        return no_pieces(culprit)(to, message)

    return lie


def gives_up(culprit: str) -> Lie:
    def lie(to: str, message: Message) -> Message | None:
        if isinstance(message, RoundReport) and message.phase != RoundPhase.IDLE:
            return replace(message, phase=RoundPhase.READY)
        return no_pieces(culprit)(to, message)

    return lie


LIES = [
    no_pieces, pieces_to_some, pieces_in_turn, nothing_confirmed, nothing_held, held_at_once,
    held_of_an_attempt_that_nobody_made, always_further, begins_nothing, gives_up,
]  # fmt: skip


def live_through(swarm: RoundSwarm, seconds: float) -> None:
    for _ in range(int(seconds / STEP_S)):
        for name in sorted(swarm.nodes):
            swarm.step(name)
        swarm.settle()
        swarm.pass_time(STEP_S)
        swarm.settle()


def steps(swarm: RoundSwarm) -> dict[str, int]:
    return {name: node.steps for name, node in swarm.nodes.items()}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than a window has."""
    monkeypatch.setattr(collective, "PIECE_VALUES", 1)


def assert_costs_little(swarm: RoundSwarm, culprit: str, lie: Callable[[str], Lie]) -> None:
    """The others lose what it takes to find it, and a fifth of their time at most from then on; it may come back."""
    swarm.all_hear()
    live_through(swarm, 30)
    before = steps(swarm)
    assert min(before.values()) >= 8
    swarm.lies[culprit] = lie(culprit)
    live_through(swarm, SECONDS)
    after = steps(swarm)
    search = math.log2(len(swarm.nodes)) + 2 * MISSES_MAX
    least = (SECONDS - search * MISS_S) * (1 - 2 / TRIES_APART)
    made = {name: STEP_S * (after[name] - before[name]) for name in after if name != culprit}
    assert min(made.values()) >= least > 0, f"{made} s of {SECONDS}"
    del swarm.lies[culprit]
    live_through(swarm, (TRIES_APART + 4) * MISS_S)
    assert_all_are_in_rounds(swarm)


def assert_all_are_in_rounds(swarm: RoundSwarm) -> None:
    before = {name: len(node.rounds) for name, node in swarm.nodes.items()}
    live_through(swarm, 30)
    assert all(len(node.rounds) - before[name] >= 8 for name, node in swarm.nodes.items())


@pytest.mark.cases(3)
@pytest.mark.parametrize("lie", LIES)
def test_who_keeps_rounds_from_their_end_costs_the_others_little(lie: Callable[[str], Lie]) -> None:
    assert_costs_little(RoundSwarm("abc", overlap="blocking"), "b", lie)


def test_one_of_two_that_sends_nothing_leaves_the_other_to_train_alone() -> None:
    assert_costs_little(RoundSwarm("ab", overlap="blocking"), "b", no_pieces)


@pytest.mark.one_run_in(3)
@given(st.integers(3, 6), st.integers(1, 5), st.sampled_from(LIES), st.sampled_from(["ring", "tree", "halving"]))
@settings(max_examples=3, deadline=None, print_blob=True)
def test_whoever_it_is_among_any_number(count: int, place: int, lie: Callable[[str], Lie], topology: str) -> None:
    names = "abcdef"[:count]
    culprit = names[max(1, place % count)]
    assert_costs_little(RoundSwarm(names, overlap="blocking", topology=topology, seed=place), culprit, lie)


@pytest.mark.parametrize("late", [False, True], ids=["while all train", "at the end of a run"])
def test_the_runs_of_the_others_end(late: bool) -> None:
    swarm = RoundSwarm("abcd", overlap="delayed", every=2)
    swarm.all_hear()
    live_through(swarm, 20)
    swarm.lies["c"] = no_pieces("c")
    if not late:
        live_through(swarm, 200)
    for _ in range(int(8 * MISS_S)):
        for name in "abcd":
            swarm.finish(name)
        swarm.settle()
        swarm.pass_time(1.0)
    assert all(swarm.nodes[name].proceeded[-1:] == [True] for name in "abd")


@pytest.mark.parametrize("seconds", [40, 150])
def test_an_honest_member_that_stands_still_for_a_while_is_in_rounds_again(seconds: int) -> None:
    swarm = RoundSwarm("abcd", overlap="blocking")
    swarm.all_hear()
    live_through(swarm, 20)
    for _ in range(seconds):
        for name in "abd":
            swarm.step(name)
        while links := [link for link in swarm.waiting() if "c" not in link]:
            swarm.deliver(*links[0])
        swarm.now += 1.0
        for name in "abd":
            if swarm.nodes[name].core.deadline <= swarm.now:
                swarm.perform(name, swarm.nodes[name].core.on_timer(swarm.now))
    swarm.settle()
    live_through(swarm, (TRIES_APART if seconds > 2 * MISS_S else 1) * MISS_S)
    assert_all_are_in_rounds(swarm)


@pytest.mark.parametrize("topology", ["ring", "tree", "halving"])
def test_a_slow_line_is_no_reason_to_begin_again(topology: str) -> None:
    """A message in 10 s comes from it and to it, of reports the last: all that others do is wait."""
    swarm = RoundSwarm("abcd", overlap="blocking", topology=topology)
    swarm.all_hear()
    live_through(swarm, 5)
    rounds = len(swarm.nodes["a"].rounds)
    for name in "abcd":
        swarm.step(name)
    for second in range(2000):
        while links := [link for link in swarm.waiting() if "d" not in link]:
            swarm.deliver(*links[0])
        for link in [link for link in swarm.waiting() if "d" in link]:
            queue = swarm.queues[link]
            reports = [message for message in queue if isinstance(message, RoundReport)]
            for older in reports[:-1]:
                queue.remove(older)
            if second % 10 == 0:
                swarm.deliver(*link)
        swarm.pass_time(1.0)
    assert len(swarm.nodes["a"].rounds) == rounds + 1
    counts = swarm.nodes["a"].core.counts
    assert counts["attempts"] == counts["rounds"], "none was in vain"


def test_who_ends_no_round_is_counted_and_told_once() -> None:
    swarm = RoundSwarm("abcd", overlap="blocking")
    swarm.all_hear()
    live_through(swarm, 20)
    swarm.lies["d"] = no_pieces("d")
    live_through(swarm, 250)
    assert swarm.nodes["a"].core.counts["members_set_aside"] == 1
    said = [(name, text.partition(" for a while")[0]) for name, text in swarm.logged]
    assert said == [("a", "rounds go on without member d"), ("d", "rounds go on without this node")]


def test_a_leader_that_says_so_without_end_fills_no_log() -> None:
    swarm = formed("ab")
    core, told = swarm.nodes["b"].core, RoundsWithout(swarm.nodes["b"].core._rounds._life, again=True)
    for second in range(121):
        swarm.perform("b", core.on_message("a", told, swarm.now + second))
    assert len(swarm.logged) == 3, "one a minute"


# ---------------------------------------------------------------- the search alone


class Trial:
    """Attempts of one leader, `a`, of which those may fail that have the culprit."""

    def __init__(self, count: int, seed: int) -> None:
        self.members = frozenset("abcdefghijklmnopqrstuvwxyz"[:count])
        self.culprits = Culprits("a", random.Random(seed))
        self.now = 0.0

    def attempt(self, fails: Callable[[frozenset[str]], bool]) -> bool:
        """Whether it ended well."""
        roster = self.members - self.culprits.aside(PATIENCE_MIN_S, self.now)
        if fails(roster):
            self.now += PATIENCE_MIN_S
            self.culprits.failed(roster, PATIENCE_MIN_S, self.now)
            return False
        self.now += 1.0
        self.culprits.committed()
        return True


@given(st.integers(2, 26), st.integers(0, 2**16), st.lists(st.booleans(), max_size=80))
def test_nobody_else_is_ever_told_apart(count: int, seed: int, course: list[bool]) -> None:
    """Whichever of the attempts with it the culprit lets go well."""
    trial = Trial(count, seed)
    for good in course:
        trial.attempt(lambda roster, good=good: "b" in roster and not good)  # type: ignore[misc]
        assert trial.culprits.found(PATIENCE_MIN_S, trial.now) <= {"b"}


@given(st.integers(2, 26), st.integers(0, 2**16))
def test_a_culprit_is_found_by_halves(count: int, seed: int) -> None:
    trial = Trial(count, seed)
    failed = 0
    while not trial.culprits.found(PATIENCE_MIN_S, trial.now):
        failed += not trial.attempt(lambda roster: "b" in roster)
        assert failed <= math.ceil(math.log2(count)) + MISSES_MAX
    spoilt, began = 0.0, trial.now
    for _ in range(2000):
        before = trial.now
        if not trial.attempt(lambda roster: "b" in roster):
            spoilt += trial.now - before
    assert spoilt <= (trial.now - began) / TRIES_APART + PATIENCE_MIN_S


@given(st.integers(2, 26), st.integers(0, 2**16), st.integers(1, MISSES_MAX - 1))
def test_after_a_moments_reason_all_are_in_the_next_two_rounds_and_then_in_each(
    count: int, seed: int, failures: int
) -> None:
    trial = Trial(count, seed)
    for _ in range(failures):
        trial.attempt(lambda roster: True)
    within = set[str]()
    for _ in range(2):
        within |= trial.members - trial.culprits.aside(PATIENCE_MIN_S, trial.now)
        assert trial.attempt(lambda roster: False)
    assert within == trial.members
    assert not trial.culprits.aside(PATIENCE_MIN_S, trial.now)


@given(st.integers(2, 26), st.integers(0, 2**16), st.lists(st.booleans(), min_size=1, max_size=30))
def test_nobody_is_left_aside_for_ever(count: int, seed: int, course: list[bool]) -> None:
    """Be it that nobody else ever comes to a round."""
    trial = Trial(count, seed)
    for good in course:
        trial.attempt(lambda roster, good=good: not good)  # type: ignore[misc]
    assert not trial.culprits.aside(PATIENCE_MIN_S, trial.now + (TRIES_APART + 1) * PATIENCE_MIN_S)


# ---------------------------------------------------------------- what a leader makes of reports


def _leader(**settings: Any) -> Leader:
    return Leader("a", random.Random(1), ModeSettings(robust=False, **settings), 400, differences=True)


REPORT = RoundReport(1, RoundPhase.HELD, 3, 30, 40, 0, False, False, False)


def test_an_attempt_of_one_that_rounds_do_without_hides_none_that_the_others_hold() -> None:
    """An earlier leader may have committed theirs."""
    leader = _leader()
    for id in "ab":
        leader.heard(id, REPORT, 0.0)
    leader.heard("c", replace(REPORT, phase=RoundPhase.READY, attempt=99), 0.0)
    leader._done_without.add("c")
    assert leader.decide(frozenset("abc"), Pace(), 0.0) == [(id, RoundCommit(4, 40)) for id in "ab"]


@pytest.mark.parametrize("exchange", ["weights", "gradients"])
def test_of_more_members_than_a_roster_has_all_have_a_turn_but_those_who_are_to_be_alike(
    exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_module, "ROSTER_MAX", 2)
    leader, rosters = _leader(exchange=exchange), []
    for number in range(4):
        ready = replace(REPORT, phase=RoundPhase.READY, round=number, agreed=1 + number, attempt=1 + number, weight=1.0)
        for id in "abc":
            leader.heard(id, ready, float(number))
        (begin,) = {order for _, order in leader.decide(frozenset("abc"), Pace(), float(number))}
        assert isinstance(begin, RoundBegin)
        rosters.append(begin.roster)
        leader.begun = None
    assert {id for roster in rosters for id in roster} == set("ab" if exchange == "gradients" else "abc")


def test_where_too_few_could_go_on_the_round_is_of_all_and_as_for_all() -> None:
    """It went by what is best for those few."""
    leader = _leader(min_peers=5)
    leader._lines._apart = {("a", id) for id in "cde"}
    for id in "abcde":
        unreached = tuple("cde") if id == "a" else ()
        ready = replace(REPORT, phase=RoundPhase.READY, agreed=40, weight=1.0, unreached=unreached)
        leader.heard(id, ready, 0.0)
    ((_, begin), *_) = leader.decide(frozenset("abcde"), Pace(), 0.0)
    assert isinstance(begin, RoundBegin)
    assert (begin.roster, begin.topology) == (tuple("abcde"), "halving")
