"""Who is in the swarm, and who is alive: SWIM with Lifeguard, as a pure core.

SWIM: Das, Gupta and Motivala 2002. Lifeguard: Dadgar, Phillips and Currey 2018, arXiv:1707.00788.

How this works. What is believed of a member moves along

    ALIVE --a probe failed--> SUSPECT --its time is up--> FAILED          LEFT: said by the member itself
      ^-----------------------'---------------------------'----------------'
         the member itself speaks with a higher incarnation, or comes back with a higher epoch

`roster` says which record wins, `dissemination` what rides on the next datagram, `suspicion` when a suspicion becomes a
verdict, `probing` who is probed and whether the trouble is ours, `table_exchange` whom whole tables are exchanged with,
`lives` which life of an identity counts, `proofs` who has signed a record, `timing` every interval. This file joins
them: it merges what is heard, speaks for this node, and minds the clock.

News without a probe to ride on travels in an `Ack` numbered 0, which answers nothing.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from peerd.membership.dissemination import DATAGRAM_BYTES, ENVELOPE_BYTES, News, record_bytes
from peerd.membership.effects import (
    AskTwin,
    MemberChanged,
    MembershipEffect,
    PushPull,
    SendDatagram,
)
from peerd.membership.lives import Disowned, TwinQuestions
from peerd.membership.probing import NEWS_SEQ, Prober
from peerd.membership.proofs import UNKNOWN_ACCUSERS, VERIFICATION_ROWS, Proofs, claim, claimed
from peerd.membership.roster import (
    INCARNATION_JUMP,
    META_BYTES,
    NUMBER_END,
    TABLE_MEMBERS,
    Roster,
    address,
    fault,
    name_of,
    order,
)
from peerd.membership.suspicion import Suspicions
from peerd.membership.table_budget import TableBudget
from peerd.membership.table_exchange import FOLLOW_UP_S, TableExchange
from peerd.membership.timing import LAN, WAN, Timing
from peerd.training.effects import Log
from peerd.transport.ids import Address, NodeId, shown
from peerd.transport.messages import Ack, Member, MemberTable, Message, Nack, Ping, PingRequest, State
from peerd.transport.secure.signing import Signing

__all__ = ["LAN", "WAN", "Membership", "Timing"]

_WATCH_S = 0.5  # while someone is suspected, wake at least this often: a stall between two timers must not go unseen
WAS_AT_MAX = 64
_LONG_STALL_S = 5.0  # longer than this, others may have buried us: fetch what we missed


class Membership:
    """One node's view of the swarm. Every method takes the time and returns what to do; `deadline` asks to be woken."""

    def __init__(
        self,
        me: Member,
        seeds: Sequence[Address],
        rng: random.Random,
        now: float,
        timing: Timing = LAN,
        known: Sequence[Member] = (),
        numbers: random.Random | None = None,
        signing: Signing | None = None,
        *,
        handshakes: bool = False,
    ) -> None:
        """`known` are live members that everybody knows already: none of them is news.

        Probes are numbered from `numbers`, which nobody may guess; without them, from `rng`. With `signing` records
        are signed, and none is believed that is not (proofs.py); without, the swarm is plain. With `handshakes`,
        `met` and `missed` say who has shown a certificate here.
        """
        self.counts: Counter[str] = Counter()
        self._rng = rng
        self._timing = timing
        self._roster = Roster(
            me if signing is None else claimed(me, signing), handshakes=handshakes, signed=signing is not None
        )
        self.members: Mapping[NodeId, Member] = MappingProxyType(self._roster.rows)
        self._proofs = None if signing is None else Proofs(signing, self.members)
        self._budget = TableBudget()  # of what is verified for those who send datagrams
        self._news = News()
        self._rumours = News()  # of members that have not proved themselves: told where there is room
        self.hearsay: dict[NodeId, Member] = {}  # strangers said to live whom we suspect, or hold dead: go and see
        self._suspicions = Suspicions(timing)
        self._prober = Prober(self._roster, self._carry, self.counts, rng, timing, now, numbers)
        self._exchange = TableExchange(self._roster, seeds, self.counts, rng, timing, now)
        self._twins = TwinQuestions()
        self._disowned = Disowned()
        self._vacant: dict[NodeId, float] = {}  # members at whose address nobody listened, and when
        self._was_at: list[Address] = []  # in this life
        self._leaving = False
        self._started = False
        self._gossip_at = math.inf
        self._gossiped = -math.inf
        self.deadline = now
        for member in known:
            if member.id != me.id:
                self._roster.put(member)
        if self._roster.live:
            self._exchange.company_changed(now)

    @property
    def me(self) -> Member:
        """Our own record."""
        return self._roster.me

    @property
    def awareness(self) -> int:
        """Lifeguard's local health score: 0 is well."""
        return self._prober.awareness

    @property
    def is_asked_by_nobody(self) -> bool:
        """Whether members answer our datagrams, and none of theirs comes to where we say that we are."""
        return self._prober.is_asked_by_nobody

    @property
    def left_spread(self) -> bool:
        """Whether our leaving was told often enough (or there is nobody to tell)."""
        return self._leaving and (not self._roster.live or not self._news.is_fresh(self.me.id))

    @property
    def asked(self) -> set[Address]:
        """Where the suspects live whose last word is awaited: a few, who are not to wait for others' push-pulls."""
        return {address(self._roster.rows[id]) for id in self._suspicions.asked()}

    @property
    def verifications(self) -> int:
        """Signatures of others that were verified."""
        return self._proofs.verifications if self._proofs is not None else 0

    @property
    def forgeries(self) -> int:
        """Records heard that were not signed, or not by whom they are said to be."""
        return self.counts["bad_signatures"] + self.counts["unsigned_records"]

    def table(self) -> MemberTable:
        """Our side of a push-pull. Build it after `on_table` of the other side where possible: it then refutes.

        Who is accused comes after those who may be the accusers: of whom nobody is known, no accusation is believed.
        """
        revoked = self._roster.revoked
        rows = (row for id, row in self._roster.rows.items() if id not in revoked)
        return MemberTable(self.me.id, tuple(sorted(rows, key=_state)))

    # What happens -----------------------------------------------------------------------------------------------------

    def on_timer(self, now: float) -> list[MembershipEffect]:
        """Do whatever is due."""
        effects = self._notice_stall(now)
        self._started = True
        if not self._leaving:
            probes, accused = self._prober.on_timer(now)
            effects += probes
            if accused is not None:
                self._accuse(accused, now, effects)
            if self._suspicions:
                self._end_suspicions(now, effects)
            effects += self._exchange.on_timer(now)
        if now >= self._gossip_at:
            effects += self._gossip(now)
        return self._ask_wake(now, effects)

    def on_datagram(self, message: Message, source: Address, now: float) -> list[MembershipEffect]:
        """Take in one datagram."""
        effects = self._notice_stall(now)
        if getattr(message, "sender", "") in self._roster.revoked:
            self.counts["revoked_datagrams"] += 1
        elif isinstance(message, Ping):
            self._hear_news(message, source, now, effects)
            effects += self._prober.on_ping(message, source)
        elif isinstance(message, Ack):
            self._hear_news(message, source, now, effects)
            if message.seq != NEWS_SEQ:
                effects += self._prober.on_ack(message, now)
        elif isinstance(message, PingRequest):
            self._hear_news(message, source, now, effects)
            effects += self._prober.on_ping_request(message, source, now)
        elif isinstance(message, Nack):
            self._prober.on_nack(message)
        else:
            self.counts["unexpected_datagrams"] += 1
        return self._ask_wake(now, effects)

    def on_table(self, table: MemberTable, now: float, dialled: Address | None = None) -> list[MembershipEffect]:
        """Take in the other side of a push-pull, or a part of it; `dialled` is where it was fetched from."""
        effects = self._notice_stall(now)
        if len(table.members) > TABLE_MEMBERS:
            self.counts["oversized_tables"] += 1
            return self._ask_wake(now, effects)
        self.counts["tables"] += 1
        self._suspicions.spoke(table.sender, now)
        differ, known, revoked = False, self._roster.rows.get, self._roster.revoked
        for record in table.members:
            if known(record.id) is record:
                continue
            if record.id in revoked:
                self.counts["revoked_records"] += 1
            else:
                if record.id == table.sender:
                    self._hear_own_word(record, dialled, now, effects)
                differ |= self._hear_told(record, table.sender, now, effects)
        if differ:
            self._exchange.disagreed(table.sender, now)
        else:
            self._exchange.agreed()
        return self._ask_wake(now, effects)

    def on_unreachable(self, where: Address, now: float) -> list[MembershipEffect]:
        """A push-pull dial failed; the retries go on by themselves."""
        effects = self._notice_stall(now)
        effects += self._exchange.on_unreachable(where)
        for id in self._suspicions.asked():
            if address(self._roster.rows[id]) == where:
                self._suspicions.clear(id)
                self._declare_failed(id, now, effects)
        return self._ask_wake(now, effects)

    def revoke(self, id: NodeId, now: float) -> list[MembershipEffect]:
        """This member is out for ever: it has failed, and nothing is heard of it, or said of it, any more."""
        effects = self._notice_stall(now)
        self._roster.revoked.add(id)
        known = self._roster.rows.get(id)
        if known is not None and id != self.me.id:
            if known.state < State.FAILED:
                self._accept(replace(known, state=State.FAILED, accuser=self.me.id), known, False, now, effects)
            self._forget(id)
        return self._ask_wake(now, effects)

    def is_revoked(self, id: NodeId) -> bool:
        """Whether it is out for ever."""
        return id in self._roster.revoked

    def spread(self, now: float) -> list[MembershipEffect]:
        """Something that goes beside tables is new here: exchange some soon, as everybody does to whom it comes."""
        effects = self._notice_stall(now)
        self._exchange.spread(now)
        return self._ask_wake(now, effects)

    def met(self, id: NodeId, now: float) -> list[MembershipEffect]:
        """This member has shown its certificate here."""
        effects = self._notice_stall(now)
        self._roster.prove(id)
        self._rumours.pass_to(id, self._news)
        if self._roster.is_live(id):
            self._prober.welcome(id)
        if (said := self.hearsay.pop(id, None)) is not None:
            self._hear(said, now, effects)
        return self._ask_wake(now, effects)

    def missed(self, id: NodeId, now: float) -> list[MembershipEffect]:
        """This member was dialled in vain: that is a probe which failed, of one that never answered any."""
        effects = self._notice_stall(now)
        if self._roster.is_stranger(id) and not self._prober.has_answered(id):
            self._accuse(id, now, effects)
        return self._ask_wake(now, effects)

    def vacant(self, id: NodeId, now: float) -> list[MembershipEffect]:
        """Nobody listens at this member's address: it is probed soon, and where that fails its time is short.

        Not that alone is a reason to suspect it: what lies between may say so, and others still hear it.
        """
        effects = self._notice_stall(now)
        if self._roster.is_live(id) and now - self._vacant.get(id, -math.inf) >= self._timing.probe_interval_s:
            self._vacant = {each: at for each, at in self._vacant.items() if self._roster.is_live(each)}
            self._vacant[id] = now
            if self._roster.rows[id].state == State.SUSPECT:
                self._suspicions.shorten(id)
            else:
                self._prober.hasten(id, now)
        return self._ask_wake(now, effects)

    def _is_vacant(self, id: NodeId, now: float) -> bool:
        lately_s = self._timing.suspicion_min_s(self._roster.population)
        return now - self._vacant.get(id, -math.inf) < lately_s

    def drop_seed(self, where: Address) -> None:
        """This seed is not of our swarm."""
        self._exchange.drop_seed(where)

    def set_meta(self, meta: bytes, now: float) -> list[MembershipEffect]:
        """Say something else of ourselves."""
        assert len(meta) <= META_BYTES, len(meta)
        effects = self._notice_stall(now)
        if meta != self.me.meta:
            self._speak(replace(self.me, meta=meta, incarnation=self.me.incarnation + 1), now)
            effects.append(MemberChanged(self.me.id))
        return self._ask_wake(now, effects)

    def move(self, where: Address, now: float) -> list[MembershipEffect]:
        """We are reached elsewhere from now on."""
        effects = self._notice_stall(now)
        if where != address(self.me):
            self._was_at = [*self._was_at, address(self.me)][-WAS_AT_MAX:]
            host, port = where
            self._speak(replace(self.me, host=host, port=port, incarnation=self.me.incarnation + 1), now)
            effects.append(MemberChanged(self.me.id))
        return self._ask_wake(now, effects)

    def leave(self, now: float) -> list[MembershipEffect]:
        """Say goodbye; on_timer goes on telling it until `left_spread`."""
        effects = self._notice_stall(now)
        if not self._leaving:
            self._leaving = True
            self._prober.abandon(now)
            self._speak(replace(self.me, state=State.LEFT), now)
            effects.append(MemberChanged(self.me.id))
        return self._ask_wake(now, effects)

    # Merging ----------------------------------------------------------------------------------------------------------

    def _hear_news(
        self, message: Ping | Ack | PingRequest, source: Address, now: float, effects: list[MembershipEffect]
    ) -> None:
        for record in message.news:
            self._hear(record, now, effects, message.sender, source[0])

    def _hear(
        self, record: Member, now: float, effects: list[MembershipEffect], teller: NodeId = "", host: str = ""
    ) -> None:
        """Merge one record; `teller` has it in a datagram from `host`."""
        roster = self._roster
        known = roster.rows.get(record.id)
        if known is record or known == record:
            return
        if record.id == self.me.id:
            self._hear_of_self(record, teller, host, now, effects)
            return
        if record.id in roster.revoked or record.accuser in roster.revoked:
            self.counts["revoked_records"] += 1
            return
        if self._is_early(record, known, now):
            record = replace(record, state=State.SUSPECT)
        again = known is not None and order(known)[:3] == order(record)[:3]
        wins = known is None or order(record) > order(known)
        if not wins and not (again and record.state == State.SUSPECT):
            return
        hearsay = known is not None and self._is_hearsay(record, known)
        if hearsay and record.id in self.hearsay and order(record)[:2] <= order(self.hearsay[record.id])[:2]:
            return
        accused_again = self._proofs is not None and again and record.accuser
        if accused_again and not self._suspicions.lacks(record.id, record.accuser):
            return  # which of several accusers a row names is not worth a verification
        reason = roster.refusal(record) or ("disowned" if self._disowned.has(record, known, now) else "")
        if reason:
            self.counts[reason] += 1
            return
        reason = self._doubt(record, host, now)
        if reason == UNKNOWN_ACCUSERS and record.state == State.SUSPECT:
            self._hear(claim(record), now, effects, teller, host)
        if reason:
            return
        if hearsay:
            self.hearsay[record.id] = claim(record)
            return
        if wins:
            self._accept(record, known, again, now, effects)
        if again and record.state == State.SUSPECT and self._suspicions.confirm(record.id, record.accuser):
            self._tell(record, now)

    def _is_early(self, record: Member, known: Member | None, now: float) -> bool:
        """Whether this is a verdict on one who, as far as we know, has not had the time to refute.

        In a signed swarm nobody else's word takes a live member away: it begins a suspicion, or confirms ours.
        """
        if self._proofs is None or record.state != State.FAILED or known is None or known.state >= State.FAILED:
            return False
        return order(record)[:2] != order(known)[:2] or not self._suspicions.is_ripe(record.id, now)

    def _is_hearsay(self, record: Member, known: Member) -> bool:
        """Whether one that is suspected or dead here is said to live, of whom we know nothing but what is said.

        Whoever made it up can say so for ever. One that is there is dialled, and then believed.
        """
        if record.state >= State.FAILED or known.state == State.ALIVE or order(record)[:2] <= order(known)[:2]:
            return False
        return self._roster.is_stranger(record.id) and not self._prober.has_answered(record.id)

    def _doubt(self, record: Member, host: str, now: float) -> str:
        """Why the record is not to be believed (counted under this), or "": who has signed what?

        A source of datagrams for which much was verified waits, by being told again; tables wait in the shell.
        """
        if self._proofs is None:
            return ""
        before = self._proofs.verifications
        reason = "unverified" if host and self._budget.wait_s(host, 0, now) else self._proofs.fault(record)
        if (made := self._proofs.verifications - before) and host:
            self._budget.wait_s(host, VERIFICATION_ROWS * made, now)
        if reason:
            self.counts[reason] += 1
        return reason

    def _accept(
        self, record: Member, known: Member | None, again: bool, now: float, effects: list[MembershipEffect]
    ) -> None:
        """Store a winning record; `again` if it says nothing new but how a tie is broken."""
        roster = self._roster
        had_company, was_live = bool(roster.live), roster.is_live(record.id)
        self._forget(roster.put(record))
        if (said := self.hearsay.get(record.id)) is not None and order(said) <= order(record):
            del self.hearsay[record.id]
        if known is None or _appearance(known) != _appearance(record):
            effects.append(MemberChanged(record.id))
        if again:
            return
        self._tell(record, now)
        self._suspicions.clear(record.id)
        if record.state == State.ALIVE:  # a new life, or a refutation: what was seen before says nothing of it
            self._vacant.pop(record.id, None)
        if record.state == State.SUSPECT:
            vacant = self._is_vacant(record.id, now)
            self._suspicions.begin(record.id, record.accuser, roster.population, now, vacant=vacant)
        if not was_live and roster.is_live(record.id):
            self._prober.welcome(record.id)
        if had_company != bool(roster.live):
            self._exchange.company_changed(now)

    def _hear_told(self, record: Member, teller: NodeId, now: float, effects: list[MembershipEffect]) -> bool:
        """Merge a row of someone's table; True if we and they differ about whether the member lives.

        A death we missed is heard as a suspicion. After a partition either side holds the other dead, and its own
        healthy half is told so: as a verdict this would empty every view until the refutations are through.
        """
        known = self._roster.rows.get(record.id)
        if known is None or record.id == self.me.id:
            self._hear(record, now, effects)
            return record.state == State.FAILED and known is not None
        told, held = order(record)[:2], order(known)[:2]
        if record.state == State.FAILED and known.state < State.FAILED and told >= held:
            self._hear(replace(record, state=State.SUSPECT, accuser=record.accuser or teller), now, effects)
            if self._proofs is None:
                self._suspicions.confirm(record.id, teller)  # who tells it believes it
            return True
        self._hear(record, now, effects)
        return record.state < State.FAILED and known.state == State.FAILED and told == held

    def _hear_own_word(
        self, record: Member, dialled: Address | None, now: float, effects: list[MembershipEffect]
    ) -> None:
        """A member says over a stream that it lives in a life which, by what we hold, is over.

        Where it cannot refute that (an epoch is no node's to raise, and a leap of incarnations not to be believed),
        it is dialled where it says that it lives. Who answers there, in that life, is believed: against a death, and
        against a newer life at the same address, where no two can listen.
        """
        known = self._roster.rows.get(record.id)
        if known is None or record.id == self.me.id or record.state != State.ALIVE or fault(record):
            return
        where = address(record)
        leap = known.incarnation - record.incarnation if known.epoch == record.epoch else 0
        if (known.epoch == record.epoch and leap <= INCARNATION_JUMP) or self._doubt(record, "", now):
            return
        if known.epoch < record.epoch:
            self._disowned.forget(record.id)
            return
        if dialled != where:
            self._exchange.visit(where, now)
        elif known.state >= State.FAILED or address(known) == where:
            self.counts["revived"] += 1
            self._disowned.add(known, now)
            self._accept(record, known, False, now, effects)

    def _hear_of_self(
        self, record: Member, teller: NodeId, host: str, now: float, effects: list[MembershipEffect]
    ) -> None:
        """Nobody but us speaks for us: outbid whatever beats our own record (refutation, SWIM section 4.2).

        What cannot be outbid is denied over streams, to whom tells it and then to all: see `_hear_own_word`.
        """
        me = self.me
        if fault(record):
            self.counts["malformed"] += 1
            return
        where, ours = address(record), address(me)
        moved = where in self._was_at  # what is said of it was true
        twin = record.epoch > me.epoch or (record.epoch == me.epoch and where > ours and not moved)
        if (order(record) <= order(me) and not twin) or self._doubt(record, host, now):
            return
        if twin:
            self._suspect_twin(record, now, effects)
        if order(record) <= order(me):
            return
        leap = record.incarnation - me.incarnation > INCARNATION_JUMP or record.incarnation + 1 >= NUMBER_END
        if record.epoch > me.epoch or leap:
            self.counts["incarnation_jump"] += record.epoch == me.epoch
            self._exchange.deny(now)
            if teller in self._roster.rows:  # first to whom tells it
                self._exchange.visit(address(self._roster.rows[teller]), now)
            return
        self.counts["refutations"] += 1
        self._prober.accused()
        self._speak(replace(me, incarnation=record.incarnation + 1), now)
        if record.state >= State.FAILED and not self._leaving:
            who = name_of(record.accuser, self._roster.rows)
            effects.append(Log(f"we were declared {record.state.name} by {who!r}: refuting"))
            self._exchange.hasten(now + FOLLOW_UP_S)

    def _suspect_twin(self, record: Member, now: float, effects: list[MembershipEffect]) -> None:
        """Does a copy of this node run, and is it the newer one? Anybody can say so: only its key proves it."""
        me, where = self.me, address(record)
        self.counts["identity_conflict"] += 1
        if self._twins.may_ask(where, now):
            said = f"{shown(where)}, epoch {record.epoch}; ours is {me.epoch}"
            effects.append(Log(f"another node is said to run under our identity ({said})"))
            if where != address(me) or record.epoch > me.epoch:  # a relay gives one port to both
                effects.append(AskTwin(where))

    def _accuse(self, id: NodeId, now: float, effects: list[MembershipEffect]) -> None:
        """Our probe of this member failed."""
        if self._roster.is_live(id):
            self.counts["suspicions"] += 1
            self._hear(self._accused(self._roster.rows[id], State.SUSPECT), now, effects)

    def _end_suspicions(self, now: float, effects: list[MembershipEffect]) -> None:
        """Ask for last words, and pass the verdicts that are due."""
        for id in self._suspicions.last_words(now, unasked=self._roster.is_stranger):
            self.counts["last_words"] += 1
            effects.append(PushPull(address(self._roster.rows[id])))
        for id in self._suspicions.expired(now):
            self._declare_failed(id, now, effects)

    def _declare_failed(self, id: NodeId, now: float, effects: list[MembershipEffect]) -> None:
        """The suspicion was never refuted. Unsigned, the record keeps its accuser: so most verdicts read alike."""
        suspect = self._roster.rows[id]
        self.counts["failures"] += 1
        plain = self._proofs is None
        verdict = replace(suspect, state=State.FAILED) if plain else self._accused(suspect, State.FAILED)
        self._accept(verdict, suspect, False, now, effects)

    def _accused(self, subject: Member, state: State) -> Member:
        if self._proofs is not None:
            return self._proofs.accused(subject, state, self.me.id)
        return replace(subject, state=state, accuser=self.me.id)

    # Telling ----------------------------------------------------------------------------------------------------------

    def _speak(self, record: Member, now: float) -> None:
        """Change our own record."""
        record = record if self._proofs is None else self._proofs.claimed(record)
        self._roster.put(record)
        self._tell(record, now)

    def _tell(self, record: Member, now: float) -> None:
        (self._news if self._roster.has_proved(record.id) else self._rumours).add(record)
        if self._gossip_at == math.inf:  # at once after a pause: the first wave crosses the swarm in a few latencies
            self._gossip_at = max(now, self._gossiped + self._timing.gossip_interval_s)

    def _forget(self, id: NodeId) -> None:
        """What was said of this member goes no further, and nobody is suspected by it."""
        self._suspicions.clear(id)
        self._news.forget(id)
        self._rumours.forget(id)
        self.hearsay.pop(id, None)

    def _carry(self, ids_bytes: int, id: NodeId, where: Address) -> tuple[Member, ...]:
        """News to ride on a message to member `id` at `where`.

        It hears first what is held against it (Lifeguard's buddy system), or that another node goes by its name.
        """
        space = DATAGRAM_BYTES - ENVELOPE_BYTES - ids_bytes
        row = self._roster.rows.get(id)
        lead: tuple[Member, ...] = ()
        amiss = row is not None and (row.state != State.ALIVE or row.host != where[0] or row.port != where[1])
        if row is not None and amiss and record_bytes(row) <= space:
            lead = (row,)
            space -= record_bytes(row)
        for told in (self._news, self._rumours):
            if told:
                taken = told.take(space, self._timing.retransmissions(self._roster.population))
                space -= sum(map(record_bytes, taken))
                lead += taken
        return lead

    def _gossip(self, now: float) -> list[MembershipEffect]:
        """One round: the news to a few members at random, to each its own selection."""
        effects: list[MembershipEffect] = []
        self._gossiped = now
        me = self.me.id
        for member in self._roster.pick(self._timing.gossip_fanout, self._rng):
            news = self._carry(len(me), member.id, address(member))
            if news:
                effects.append(SendDatagram(address(member), Ack(NEWS_SEQ, me, news)))
        self.counts["gossips"] += len(effects)
        more = bool(self._news or self._rumours) and bool(self._roster.live)
        self._gossip_at = now + self._timing.gossip_interval_s if more else math.inf
        return effects

    # Time -------------------------------------------------------------------------------------------------------------

    def _notice_stall(self, now: float) -> list[MembershipEffect]:
        """Lifeguard's blind spot: a node that stood still accuses healthy members when it wakes.

        In a toy of 128 nodes, a quarter of them stopped for 2 s every 4 s, Lifeguard alone declared healthy members
        dead 81 times and with this rule never.
        """
        late_s = now - self.deadline
        if late_s <= self._timing.stall_s or not self._started:
            return []
        self.counts["stalls"] += 1
        self._prober.abandon(now)
        self._suspicions.postpone(now)
        if late_s <= _LONG_STALL_S:
            return []
        self._exchange.hasten(now + self._rng.random())
        return [Log(f"stood still for {late_s:.1f} s")]

    def _ask_wake(self, now: float, effects: list[MembershipEffect]) -> list[MembershipEffect]:
        """Every entry ends here: never ask for the past, so that lateness always means a stall."""
        due = self._gossip_at
        if not self._leaving:
            due = min(due, self._prober.deadline, self._exchange.deadline)
            if self._suspicions:
                due = min(due, self._suspicions.deadline, now + _WATCH_S)
        self.deadline = due if due > now else now
        return effects


def _state(record: Member) -> State:
    return record.state


def _appearance(record: Member) -> tuple[object, ...]:
    """What the rest of the daemon sees of a member."""
    return record.epoch, record.state, record.name, record.host, record.port, record.meta
