"""Which member serves which shard, and how does that change hands?

How this works. A shard's owner is the member with the largest hash of (shard, member): a death moves the dead one's
shards alone. Whoever finds itself the owner claims the shard under the next term. Every member answers a claim with
the newest weights that it has pulled or serves, and from then on heeds no lower bid (a term, then an id), as in Paxos'
first phase; a member that served stops. When all alive have answered, the claimant serves from the highest clock.

Nothing that counts is in the server alone: a worker keeps each push until it has pulled weights that hold it, weights
travel with the last push of each worker in them, and one of those answers is the highest clock. So pushes said again
to the new server are in its weights once. Two halves of a partition each serve; when they meet, the claim after it
takes the higher clock, and the other half's updates are lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from peerd.effects import NodeId, PeerError, Vector
from peerd.messages import Applied, Chunks, Claim, Message, Replica, Serves, ShardPull, ShardPush, Weights
from peerd.training import delta
from peerd.training.delta import Layout
from peerd.training.modes.shard_server import Rule, ShardServer
from peerd.training.modes.worker import NEVER, NOBODY, Bid, Part, Worker

WEIGHTS_CODEC = "float32"  # what it dropped would be lost: an answer has no error feedback
COUNT_MAX = 1 << 53  # of terms, clocks and numbers that a peer may say
HEARD_S = 30.0  # how long a claimant counts as alive that membership does not name

Newest = tuple[int, dict[NodeId, Applied], Vector]
"""Clock, what of each worker is in the weights, and the weights."""


@dataclass(slots=True, eq=False)
class _Claiming:
    waiting: set[NodeId]
    best: Newest
    asked_at: float


@dataclass(slots=True, eq=False)
class Seat:
    """One shard, and who serves it."""

    part: Part
    leader: Bid = NOBODY  # the highest bid that was heard
    announced: bool = False  # and it serves
    server: ShardServer | None = None  # here
    claim: _Claiming | None = None
    encoded: tuple[int, Chunks] = (-1, ())  # the weights at this clock
    final_clock: int = NEVER  # of the weights that went as final ones
    final_to: set[NodeId] = field(default_factory=set)  # to these


class Seats:
    """The seats of all shards, as one node sees them, and the servers that it holds."""

    def __init__(
        self,
        me: NodeId,
        rule: Rule,
        worker: Worker,
        send: Callable[[NodeId, Message], None],
        answer_here: Callable[[Seat, ShardServer, bool], None],
        counts: Counter[str],
        staleness: Counter[int],
    ) -> None:
        """`answer_here` gives this node's own worker the weights of a seat that is served here."""
        self.all = [Seat(part) for part in worker.parts]
        self.alive: frozenset[NodeId] = frozenset()
        self.finished: set[NodeId] = set()  # those whose run has ended, this node too
        self._me = me
        self._rule = rule
        self._worker = worker
        self._send = send
        self._answer_here = answer_here
        self._counts = counts
        self._staleness = staleness
        self._heard: dict[NodeId, float] = {}  # claimants that membership does not name, and when they last spoke

    @property
    def training(self) -> frozenset[NodeId]:
        """Workers that will push again."""
        return (self.alive | {self._me}) - self.finished

    def seat(self, shard: int, *counts: int) -> Seat:
        """The seat that a message names, whose other numbers are in bounds. Raises PeerError."""
        if not 0 <= shard < len(self.all):
            raise PeerError(f"shard {shard} of {len(self.all)}")
        if not all(0 <= count <= COUNT_MAX for count in counts):
            raise PeerError(f"a number out of bounds: {counts}")
        return self.all[shard]

    def owner(self, seat: Seat) -> NodeId:
        """Who should serve it, of those who are alive."""
        return max(self.alive | self._heard.keys() | {self._me}, key=lambda id: _hash(seat.part.number, id))

    def heard(self, peer: NodeId, now: float) -> None:
        """A peer spoke."""
        if peer in self._heard:
            self._heard[peer] = now

    # ---------------------------------------------------------------- who is there

    def on_peers(self, alive: frozenset[NodeId], now: float) -> None:
        """Members came or went."""
        come, gone = alive - self.alive, self.alive - alive
        self.alive = alive
        self.finished -= gone
        for id in alive & self._heard.keys():
            del self._heard[id]
        for seat in self.all:
            if seat.server is not None:
                for id in gone:
                    seat.server.owed.pop(id, None)
                    seat.server.dropped.discard(id)
                for id in sorted(come):
                    self._announce(seat, id)
            if seat.claim is not None:
                seat.claim.waiting -= gone
                seat.claim.waiting |= come
                for id in sorted(come):
                    self._ask(seat, id)
            self._reconsider(seat, now)

    def on_connected(self, peer: NodeId) -> None:
        """What was said to this peer may be lost."""
        for seat in self.all:
            seat.final_to.discard(peer)
            if seat.server is not None:
                self._announce(seat, peer)
            if seat.claim is not None and peer in seat.claim.waiting:
                self._ask(seat, peer)

    def on_timer(self, now: float, repeat_s: float) -> None:
        """Ask again those who have not answered a claim."""
        for id in [id for id, at in self._heard.items() if now - at >= HEARD_S]:
            del self._heard[id]
            for seat in self.all:
                if seat.claim is not None:
                    seat.claim.waiting.discard(id)
        for seat in self.all:
            if seat.claim is not None and now - seat.claim.asked_at >= repeat_s:
                seat.claim.asked_at = now
                for id in sorted(seat.claim.waiting):
                    self._ask(seat, id)
            self._reconsider(seat, now)

    def deadline(self, repeat_s: float) -> float:
        """When `on_timer` has something to do."""
        claims = [seat.claim.asked_at + repeat_s for seat in self.all if seat.claim is not None]
        return min([*claims, *(at + HEARD_S for at in self._heard.values())], default=float("inf"))

    # ---------------------------------------------------------------- claims

    def _reconsider(self, seat: Seat, now: float) -> None:
        """Claim what is ours, and leave a claim to what is not."""
        if self.owner(seat) != self._me:
            if seat.claim is not None:
                seat.claim = None  # the owner claims it above our bid
        elif seat.server is None and seat.claim is None:
            self._claim(seat, now)
        if seat.claim is not None and not seat.claim.waiting:
            self._serve(seat)

    def _claim(self, seat: Seat, now: float, above: int = 0) -> None:
        best = self._newest(seat)
        seat.leader, seat.announced, seat.server = (max(seat.leader[0], above) + 1, self._me), False, None
        seat.claim = _Claiming({*self.alive, *self._heard}, best, now)
        self._counts["claims"] += 1
        for id in sorted(seat.claim.waiting):
            self._ask(seat, id)

    def _ask(self, seat: Seat, peer: NodeId) -> None:
        assert seat.claim is not None, "only of a claim"
        self._send(peer, Claim(seat.part.number, seat.leader[0], seat.claim.best[0]))

    def _serve(self, seat: Seat) -> None:
        assert seat.claim is not None, "a claim was answered"
        best, applied, weights = seat.claim.best
        clock = max(0, best)
        seat.server = ShardServer(self._rule, weights.copy(), clock, dict(applied), self._counts, self._staleness)
        seat.claim, seat.announced, seat.encoded = None, True, (-1, ())
        seat.final_to.clear()
        for id in sorted(self.alive | {self._me}):
            self._announce(seat, id)

    def _announce(self, seat: Seat, peer: NodeId) -> None:
        term, server = seat.leader
        self._send(peer, Serves(seat.part.number, term, server))

    def _newest(self, seat: Seat) -> Newest:
        if seat.claim is not None:
            return seat.claim.best
        if seat.server is not None:
            return seat.server.clock, seat.server.applied, seat.server.weights
        return seat.part.clock, seat.part.applied, self._worker.base[seat.part.where]

    def heed(self, seat: Seat, bid: Bid, *, announced: bool) -> bool:
        """Whether a bid is the highest so far; whoever serves or claims by a lower one stops."""
        if bid < seat.leader:
            return False
        if bid > seat.leader:
            seat.leader, seat.announced, seat.server, seat.claim = bid, False, None, None
        seat.announced |= announced
        return True

    def on_claim(self, sender: NodeId, message: Claim, now: float) -> None:
        """Tell the claimant what we have, and follow it."""
        seat = self.seat(message.shard, message.term, message.clock - NEVER)
        if sender not in self.alive:
            self._heard[sender] = now
        clock, applied, weights = self._newest(seat)
        if not self.heed(seat, (message.term, sender), announced=False):
            self._announce(seat, sender)  # a higher bid is known: it claims again above that
            return
        chunks: Chunks = ()
        if clock > message.clock:
            chunks, _ = delta.encode(WEIGHTS_CODEC, exact(seat), weights)
        marks = tuple(applied.values()) if chunks else ()
        self._send(sender, Replica(message.shard, message.term, clock, marks, chunks))
        self._reconsider(seat, now)

    def on_replica(self, sender: NodeId, message: Replica, now: float) -> None:
        """One answer to our claim. Raises PeerError."""
        seat = self.seat(message.shard, message.term, message.clock - NEVER)
        claim = seat.claim
        if claim is None or seat.leader != (message.term, self._me) or sender not in claim.waiting:
            return
        if message.clock > claim.best[0] and message.chunks:
            weights = np.empty_like(claim.best[2])
            delta.decode(WEIGHTS_CODEC, exact(seat), message.chunks, weights)
            claim.best = message.clock, {mark.worker: mark for mark in message.applied}, weights
        claim.waiting.discard(sender)
        self._reconsider(seat, now)

    def on_serves(self, sender: NodeId, message: Serves, now: float) -> bool:
        """Somebody says who serves a shard. Says whether that is news to our worker."""
        seat = self.seat(message.shard, message.term)
        bid = (message.term, message.server)
        if message.server == self._me and bid != seat.leader:  # of an earlier life: we claim above it
            if bid > seat.leader and self.owner(seat) == self._me:
                self._claim(seat, now, above=bid[0])
                self._reconsider(seat, now)
            return False
        if seat.server is not None and bid != seat.leader:  # two serve: only a claim, which asks both, ends it
            if self.owner(seat) == self._me:
                if sender not in self.alive:
                    self._heard[sender] = now
                self._claim(seat, now, above=bid[0])
                self._reconsider(seat, now)
            elif bid > seat.leader:
                self._announce(seat, message.server)
        elif self.heed(seat, bid, announced=True):
            self._reconsider(seat, now)
            return True
        elif sender == message.server:
            self._announce(seat, sender)
        return False

    # ---------------------------------------------------------------- serving

    def on_push(self, sender: NodeId, message: ShardPush) -> None:
        """A worker's update. Raises PeerError."""
        seat = self.seat(message.shard, message.seq, message.oldest, message.clock - NEVER, message.life)
        server = seat.server
        if server is None:
            self._redirect(seat, sender)
            return
        server.meet(sender, message.life)
        if server.is_next(sender, message.life, message.seq, message.oldest):
            update = np.empty_like(server.weights)
            delta.decode(message.codec, seat.part.layout, message.chunks, update)
            (self.finished.add if message.finishing else self.finished.discard)(sender)
            server.take(Applied(sender, message.life, message.seq), message.clock, update, self.training)
        if message.wants_answer:
            server.owed[sender] = None

    def on_pull(self, sender: NodeId, message: ShardPull) -> None:
        """A worker that has waited for long, here or elsewhere. Raises PeerError."""
        seat = self.seat(message.shard, message.seq, message.life)
        if seat.server is None:
            self._redirect(seat, sender)
        else:
            seat.server.meet(sender, message.life)
            seat.server.owed[sender] = None
            if message.passes:
                seat.server.passed.add(sender)

    def _redirect(self, seat: Seat, sender: NodeId) -> None:
        if seat.announced and seat.leader[1] not in (self._me, sender):
            self._announce(seat, sender)

    def serve(self) -> None:
        """Update what is due, and answer whom it is time to answer."""
        training = self.training
        for seat in self.all:
            if seat.server is None:
                continue
            for worker in seat.server.due(training):
                self._answer(seat, worker, final=False)
            if training or seat.final_clock != seat.server.clock:  # who trains again ends again
                seat.final_clock = seat.server.clock
                seat.final_to.clear()
            if not training and not seat.server.pushers:
                for peer in sorted((self.alive | {self._me}) - seat.final_to):
                    seat.final_to.add(peer)
                    self._answer(seat, peer, final=True)

    def _answer(self, seat: Seat, worker: NodeId, *, final: bool) -> None:
        server = seat.server
        assert server is not None, "only of one that is served here"
        if worker == self._me:
            self._answer_here(seat, server, final)
            return
        if seat.encoded[0] != server.clock:
            seat.encoded = server.clock, delta.encode(WEIGHTS_CODEC, exact(seat), server.weights)[0]
        last = server.come.get(worker)
        self._send(
            worker,
            Weights(
                seat.part.number, seat.leader[0], server.clock, last.seq if last is not None else 0, final,
                tuple(server.applied.values()), seat.encoded[1],
            ),
        )  # fmt: skip


def exact(seat: Seat) -> Layout:
    """Of weights that travel: float buffers too are exact."""
    count = seat.part.layout.total
    return Layout(count, count)


def _hash(shard: int, id: NodeId) -> tuple[bytes, NodeId]:
    return blake2b(f"{shard} {id}".encode(), digest_size=8).digest(), id
