"""Is that member there? One probe at a time, and probes on behalf of others.

How this works. Members are probed in turn (`probe_rounds`), but for one that seems dead. A probe goes through

    opened --ack--> answered                          the target is there
       |
    timeout, ask a few others to probe it --ack--> answered
       |
    end of the interval --> accused                   the caller suspects the target

Someone asked says Nack when the target is late with its answer too. A probe that fails with a Nack missing is a hint
that the trouble is ours: the local health score ("awareness") rises, and slows the prober down (Lifeguard, Dadgar,
Phillips and Currey 2018, arXiv:1707.00788, section IV-A). Each peer's round trip is measured as in TCP (RFC 6298), and
no probe times out sooner than it suggests.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from peerd.membership.effects import MembershipEffect, SendDatagram
from peerd.membership.probe_rounds import ProbeRounds
from peerd.membership.roster import Roster, address
from peerd.membership.timing import Timing
from peerd.transport.ids import Address, NodeId
from peerd.transport.messages import Ack, Member, Nack, Ping, PingRequest, State

NEWS_SEQ = 0
"""The number of an Ack that answers no probe and only carries news."""

ROUND_TRIP_MAX_S = 4.0
"""No measurement makes a probe wait longer: a peer that delays its answers must not silence its probers."""

RELAYED_MAX = 1024
"""Probes under way for others: more are ignored."""

UNPINGED_ROUNDS = 4  # of the slowest prober: who is asked by nobody for longer than these is not reached

_LATE_MAX = 16  # probes given up on whose answers still teach us the round trip
_NACK_SHARE = 0.8  # of the plain timeout, so that the Nack arrives before the asker's interval ends

Carry = Callable[[int, NodeId, Address], tuple[Member, ...]]
"""News for a message with so many bytes of ids, to this member there, who is told first what is said of itself."""


@dataclass(slots=True)
class RoundTrip:
    """Smoothed round trip and its deviation (RFC 6298)."""

    smoothed_s: float
    deviation_s: float

    def add(self, sample_s: float) -> None:
        """Take in one measurement."""
        self.deviation_s += (abs(self.smoothed_s - sample_s) - self.deviation_s) / 4
        self.smoothed_s += (sample_s - self.smoothed_s) / 8

    @property
    def timeout_s(self) -> float:
        """How long an answer may reasonably take."""
        return min(ROUND_TRIP_MAX_S, self.smoothed_s + 4 * self.deviation_s)


@dataclass(slots=True)
class _Probe:
    target: NodeId
    seq: int
    sent: float
    timeout: float  # then others are asked
    answered: bool = False
    asked: set[NodeId] | None = None
    nacked: set[NodeId] = field(default_factory=set)


@dataclass(slots=True)
class _Relayed:
    asker: Address
    seq: int  # the asker's number
    at_home: bool  # the asker is a member, and asks from where it lives
    nacked: bool = False


class Prober:
    """The probe under way, those relayed for others, the measured round trips and the local health score."""

    def __init__(
        self, roster: Roster, carry: Carry, counts: Counter[str], rng: random.Random, timing: Timing, now: float,
        numbers: random.Random | None,
    ) -> None:  # fmt: skip
        self._roster = roster
        self._carry = carry
        self._counts = counts
        self._rng = rng
        self._timing = timing
        self.awareness = 0
        seed = rng.getrandbits(32)
        self._numbers = numbers or random.Random(seed)  # nobody may answer for others, not even who was asked before
        self._next = now + rng.random() * timing.probe_interval_s
        self._probe: _Probe | None = None
        self._rounds = ProbeRounds(roster, rng)
        self._urgent: list[NodeId] = []
        self._was_urgent = False  # the last one probed
        self._relayed: dict[int, _Relayed] = {}
        self._relay_heap: list[tuple[float, int]] = []
        self._late: OrderedDict[int, tuple[NodeId, float]] = OrderedDict()
        self._round_trips: dict[NodeId, RoundTrip] = {}
        self._usual: RoundTrip | None = None  # over all peers: stands in for one never measured
        self._unpinged = 0  # answers to us since a member has asked us
        self._is_accused = False  # of being dead, since then

    @property
    def deadline(self) -> float:
        """When on_timer has something to do."""
        due, probe = self._next, self._probe
        if probe is not None and not probe.answered and probe.asked is None and probe.timeout < due:
            due = probe.timeout
        return min(due, self._relay_heap[0][0]) if self._relay_heap else due

    def adjust_awareness(self, change: int) -> None:
        """Move the local health score: up means worse."""
        self.awareness = min(self._timing.awareness_max, max(0, self.awareness + change))

    def accused(self) -> None:
        """Others took us for dead: we may be late."""
        self._is_accused = True
        self.adjust_awareness(+1)

    def welcome(self, id: NodeId) -> None:
        """A member entered, or has proved itself: it is probed soon."""
        self._rounds.welcome(id)

    def hasten(self, id: NodeId, now: float) -> None:
        """Probe this one next, as soon as the probe under way is answered; then again one whose turn it is."""
        asked = self._probe if self._probe is not None and not self._probe.answered else None
        if id not in self._urgent and (asked is None or id != asked.target):
            self._urgent.append(id)
        if asked is None and not self._was_urgent:
            self._next = min(self._next, now)

    @property
    def is_asked_by_nobody(self) -> bool:
        """Whether members answer, and none comes to ask, though one took us for dead: that asked us in vain."""
        return self._is_accused and self._unpinged > UNPINGED_ROUNDS * (self._timing.awareness_max + 1)

    def has_answered(self, id: NodeId) -> bool:
        """Whether this member has answered a probe of ours."""
        return id in self._round_trips

    def abandon(self, now: float) -> None:
        """We stood still: whether our probes were answered, we cannot know."""
        self._probe = None
        self._late.clear()
        self._relayed.clear()
        self._relay_heap.clear()
        self._next = now + self._rng.random() * self._timing.probe_interval_s

    def on_timer(self, now: float) -> tuple[list[MembershipEffect], NodeId | None]:
        """What to send, and whom to suspect."""
        effects = self._nack_overdue(now)
        probe = self._probe
        if probe is not None and not probe.answered and probe.asked is None and now >= probe.timeout:
            effects += self._ask_others(probe)
        accused = None
        if now >= self._next:
            accused = self._close()
            effects += self._open(now)
        return effects, accused

    def on_ping(self, ping: Ping, source: Address) -> list[MembershipEffect]:
        """Answer, if it is really us who are meant: an address may have changed hands."""
        me = self._roster.me.id
        if ping.target != me:
            self._counts["misdirected_pings"] += 1
            return []
        self._unpinged, self._is_accused = 0, False
        news = self._carry(len(me), ping.sender, source) if self._roster.is_at_home(ping.sender, source) else ()
        return [SendDatagram(source, Ack(ping.seq, me, news))]

    def on_ping_request(self, request: PingRequest, source: Address, now: float) -> list[MembershipEffect]:
        """Probe for someone else, where we know that member to be."""
        target = self._roster.rows.get(request.target)
        known = target is not None and address(target) == (request.host, request.port)
        if not known or len(self._relay_heap) >= RELAYED_MAX:
            self._counts["relays_refused"] += 1
            return []
        seq = self._take_seq()
        at_home = self._roster.is_at_home(request.sender, source)
        self._relayed[seq] = _Relayed(source, request.seq, at_home)
        heapq.heappush(self._relay_heap, (now + _NACK_SHARE * self._timing.probe_timeout_s, seq))
        return [self._ping(request.target, (request.host, request.port), seq, with_news=at_home)]

    def on_ack(self, ack: Ack, now: float) -> list[MembershipEffect]:
        """An answer: to our probe, to one relayed, or one that we no longer waited for."""
        probe = self._probe
        if probe is not None and ack.seq == probe.seq and not probe.answered:
            if ack.sender == probe.target:
                self._rounds.answered(probe.target)
                self._measure(probe.target, now - probe.sent, in_time=True)
                self._unpinged += 1
            elif probe.asked is None or ack.sender not in probe.asked:
                return []
            probe.answered = True
            self._counts["acks"] += 1
        elif ack.seq in self._relayed:
            relayed = self._relayed.pop(ack.seq)  # its heap entry goes when it surfaces
            if relayed.nacked and not relayed.at_home:
                return []  # a second answer: the two would be larger than the question
            me = self._roster.me.id
            news = self._carry(len(me), "", relayed.asker) if relayed.at_home else ()
            return [SendDatagram(relayed.asker, Ack(relayed.seq, me, news))]
        elif ack.seq in self._late and self._late[ack.seq][0] == ack.sender:
            target, sent = self._late.pop(ack.seq)
            self._measure(target, now - sent, in_time=False)
        return []

    def on_nack(self, nack: Nack) -> None:
        """Someone whom we asked is well, and so are we."""
        if self._probe is not None and nack.seq == self._probe.seq and self._probe.asked:
            self._probe.nacked.add(nack.sender)

    def _open(self, now: float) -> list[MembershipEffect]:
        self._next = now + self._timing.probe_interval_s * (self.awareness + 1)
        target = self._next_target()
        if target is None:
            return []
        round_trip_s = self._round_trip_s(target)
        timeout_s = max(self._timing.probe_timeout_s, round_trip_s) * (self.awareness + 1)
        # Time for the others to be asked, to probe and to answer, where that is longer than the interval leaves.
        patience_s = timeout_s + 2 * round_trip_s * (self.awareness + 1)
        self._next = max(self._next, now + patience_s)
        self._probe = _Probe(target, self._take_seq(), now, now + timeout_s)
        self._counts["probes"] += 1
        return [self._ping(target, address(self._roster.rows[target]), self._probe.seq)]

    def _next_target(self) -> NodeId | None:
        """Who is urgent takes every other turn at most: some that come and go again and again must not hide a death."""
        self._urgent = [id for id in self._urgent if self._roster.is_live(id)]
        self._was_urgent = bool(self._urgent) and not self._was_urgent
        return self._urgent.pop(0) if self._was_urgent else self._rounds.next()

    def _close(self) -> NodeId | None:
        probe, self._probe = self._probe, None
        if probe is None:
            return None
        if probe.answered:
            self.adjust_awareness(-1)
            return None
        self._late[probe.seq] = (probe.target, probe.sent)
        if len(self._late) > _LATE_MAX:
            self._late.popitem(last=False)
        self._counts["probes_failed"] += 1
        # Only those still held alive could have said Nack: half a swarm lost at once is no fault of ours, nor are those
        # who may never have been there.
        rows, is_stranger = self._roster.rows, self._roster.is_stranger
        expected = {
            id for id in probe.asked or () if id in rows and rows[id].state == State.ALIVE and not is_stranger(id)
        }
        if not expected or expected - probe.nacked:
            self.adjust_awareness(+1)
        return probe.target

    def _ask_others(self, probe: _Probe) -> list[MembershipEffect]:
        target = self._roster.rows.get(probe.target)
        probe.asked = set()
        if target is None:
            return []
        me = self._roster.me.id
        ids_bytes = len(me) + len(target.id) + len(target.host)
        effects: list[MembershipEffect] = []
        for relay in self._roster.pick(self._timing.indirect_probes, self._rng, without=target.id, alive_only=True):
            probe.asked.add(relay.id)
            news = self._carry(ids_bytes, relay.id, address(relay))
            request = PingRequest(probe.seq, me, target.id, target.host, target.port, news)
            effects.append(SendDatagram(address(relay), request))
        self._counts["indirect_probes"] += len(effects)
        return effects

    def _nack_overdue(self, now: float) -> list[MembershipEffect]:
        effects: list[MembershipEffect] = []
        while self._relay_heap and self._relay_heap[0][0] <= now:
            _, seq = heapq.heappop(self._relay_heap)
            relayed = self._relayed.get(seq)
            if relayed is None:
                continue
            if relayed.nacked:  # far too late
                del self._relayed[seq]
                continue
            relayed.nacked = True  # a late answer is still passed on
            heapq.heappush(self._relay_heap, (now + ROUND_TRIP_MAX_S, seq))
            effects.append(SendDatagram(relayed.asker, Nack(relayed.seq, self._roster.me.id)))
        return effects

    def _ping(self, target: NodeId, where: Address, seq: int, *, with_news: bool = True) -> SendDatagram:
        me = self._roster.me.id
        news = self._carry(len(me) + len(target), target, where) if with_news else ()
        return SendDatagram(where, Ping(seq, me, target, news))

    def _measure(self, id: NodeId, sample_s: float, in_time: bool) -> None:
        known = self._round_trips.get(id)
        if known is not None:
            known.add(sample_s)
        elif self._roster.is_live(id):
            if len(self._round_trips) > 2 * len(self._roster.live):
                self._round_trips = {id: known for id, known in self._round_trips.items() if self._roster.is_live(id)}
            self._round_trips[id] = RoundTrip(sample_s, sample_s / 2)
        # A late answer tells of one stopped process, unless no answer was ever in time.
        if self._usual is None:
            self._usual = RoundTrip(sample_s, sample_s / 2)
        elif in_time:
            self._usual.add(sample_s)

    def _round_trip_s(self, id: NodeId) -> float:
        measured = self._round_trips.get(id, self._usual)
        return measured.timeout_s if measured is not None else 0.0

    def _take_seq(self) -> int:
        while (seq := self._numbers.getrandbits(32)) == NEWS_SEQ or seq in self._relayed:
            pass
        return seq
