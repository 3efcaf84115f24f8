"""Which member serves which shard, and how does that change hands?

How this works. A shard's owner is the member with the largest hash of (shard, member): a death moves the dead one's
shards alone. Whoever finds itself the owner claims the shard under the next term. Every member answers a claim with
the newest weights that it has pulled or serves, and from then on heeds no lower bid (a term, then an id), as in Paxos'
first phase; a member that served stops. When all alive have answered, the claimant serves from the highest clock.

Nothing that counts is in the server alone: a worker keeps each push until it has pulled weights that hold it, weights
travel with the last push of each worker in them, and one of those answers is the highest clock. So pushes said again
to the new server are in its weights once. Two halves of a partition each serve; when they meet, the claim after it
takes the higher clock, and the other half's updates are lost. Such a half is also a server that membership has not
named and of which nothing has come for HEARD_S.

With a tree (tree.py), a server that loses an aggregator claims its own shard again, and lays another tree out: all that
was on its way in the old one is void, and said again in the new one. So it does when a member of the tree comes back in
another life, and when a quarter of the workers is not in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np

from peerd.training.codecs import vector
from peerd.training.counts import COUNT_END, within_step
from peerd.training.effects import Vector
from peerd.training.parameter_server.limits import PushLimits
from peerd.training.parameter_server.optimizer import Optimizer
from peerd.training.parameter_server.shard_server import Rule, ShardServer
from peerd.training.parameter_server.shard_state import WEIGHTS_CODEC, Members, Newest, Preparing, ShardState, exact
from peerd.training.parameter_server.tree import TREE_MAX, Tree, tree_of
from peerd.training.parameter_server.tree_node import TreeRelay
from peerd.training.parameter_server.worker import NEVER, Ballot, Worker
from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId
from peerd.transport.messages import (
    Applied,
    Chunks,
    Message,
    Prepare,
    Promise,
    ShardLeader,
    ShardPull,
    ShardPush,
    Weights,
)

NO_TREE = Tree(0, ())
BIDDERS_MAX = 64  # of one shard, that we do not know to own it
HEARD_S = 30.0  # how long a claimant counts as alive that membership does not name


class Leadership:
    """The seats of all shards, as one node sees them, and the servers that it holds."""

    def __init__(
        self,
        members: Members,
        branches: TreeRelay,
        rule: Rule,
        worker: Worker,
        send: Callable[[NodeId, Message], None],
        answer_here: Callable[[ShardState, ShardServer, bool], None],
        counts: Counter[str],
        staleness: Counter[int],
        arity: int,
        *,
        robust: bool,
        optimizer: Optimizer | None = None,
    ) -> None:
        """`arity` is of the trees that are laid out here, 0 for none; `robust`: pushes and models have limits.

        `optimizer` is what servers step the weights with, where workers push gradients.

        `answer_here` gives this node's own worker the weights of a seat that is served here.
        """
        self.all = [ShardState(part) for part in worker.parts]
        self._members = members
        self._me = members.me
        self._branches = branches
        self._rule = rule
        self._worker = worker
        self._send = send
        self._answer_here = answer_here
        self._counts = counts
        self._staleness = staleness
        self._arity = arity
        self._robust = robust
        self._optimizer = optimizer
        self._heard: dict[NodeId, float] = {}  # claimants that membership does not name, and when they last spoke

    def seat(self, shard: int, *counts: int, term: int = 0, clock: int = NEVER) -> ShardState:
        """The seat that a message names, whose other numbers are in bounds. Raises PeerError."""
        if not 0 <= shard < len(self.all):
            raise PeerError(f"shard {shard} of {len(self.all)}")
        if not all(0 <= count < COUNT_END for count in counts):
            raise PeerError(f"a number out of bounds: {counts}")
        seat = self.all[shard]
        within_step("a term", term, seat.leader[0])
        within_step("a clock", clock - NEVER, self._newest(seat)[0] - NEVER)
        return seat

    def owner(self, seat: ShardState) -> NodeId:
        """Who should serve it, of those who are alive."""
        return max(self._members.everyone | self._heard.keys(), key=lambda id: _hash(seat.part.number, id))

    def heard(self, peer: NodeId, now: float) -> None:
        """A peer spoke."""
        if peer in self._heard:
            self._heard[peer] = now

    # ---------------------------------------------------------------- who is there

    def on_peers(self, alive: frozenset[NodeId], now: float) -> None:
        """Members came or went."""
        members = self._members
        come, gone = alive - members.alive, members.alive - alive
        members.alive = alive
        members.finished -= gone
        for id in alive & self._heard.keys():
            del self._heard[id]
        for seat in self.all:
            if seat.server is not None:
                for id in gone:
                    seat.server.owed.pop(id, None)
                    seat.server.dropped.discard(id)
                    if seat.server.limits is not None:
                        seat.server.limits.forget(id)
                for id in sorted(come):
                    self._announce(seat, id)
                seat.outdated |= self._branches.has_gaps(seat)
            if seat.claim is not None:
                seat.claim.waiting -= gone
                seat.claim.waiting |= come
                for id in sorted(come):
                    self._ask(seat, id)
            self._reconsider(seat, now)
            self._hear_owner(seat, now)

    def on_connected(self, peer: NodeId) -> None:
        """What was said to this peer may be lost."""
        for seat in self.all:
            seat.final_to.discard(peer)
            if seat.server is not None:
                self._announce(seat, peer)
            if seat.aggregator is not None and peer == seat.parent(self._me):
                self._branches.send_up(seat, seat.aggregator.repeat())
            if seat.parent(peer) == self._me and seat.tree is not None:
                for id in sorted({peer, *seat.tree.below(peer)}):  # answers to them may be lost
                    seat.final_to.discard(id)
                    self._announce(seat, id)
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
            self._hear_owner(seat, now)

    def deadline(self, repeat_s: float) -> float:
        """When `on_timer` has something to do."""
        claims = [seat.claim.asked_at + repeat_s for seat in self.all if seat.claim is not None]
        return min([*claims, *(at + HEARD_S for at in self._heard.values())], default=float("inf"))

    # ---------------------------------------------------------------- claims

    def _reconsider(self, seat: ShardState, now: float) -> None:
        """Claim what is ours, and leave a claim to what is not."""
        if self.owner(seat) != self._me:
            if seat.claim is not None:
                seat.claim = None  # the owner claims it above our bid
        elif seat.claim is None and (seat.server is None or seat.outdated):
            self._claim(seat, now)
        if seat.claim is not None and not seat.claim.waiting:
            self._serve(seat)

    def _claim(self, seat: ShardState, now: float, above: int = 0) -> None:
        best = self._newest(seat)
        self._follow(seat, (max(seat.leader[0], above) + 1, self._me))
        seat.claim = Preparing({*self._members.alive, *self._heard}, best, now, {self._me: self._worker.life})
        self._counts["claims"] += 1
        for id in sorted(seat.claim.waiting):
            self._ask(seat, id)

    def _ask(self, seat: ShardState, peer: NodeId) -> None:
        assert seat.claim is not None, "only of a claim"
        self._send(peer, Prepare(seat.part.number, seat.leader[0], seat.claim.best[0]))

    def _serve(self, seat: ShardState) -> None:
        assert seat.claim is not None, "a claim was answered"
        if seat.claim.best[0] == NEVER and seat.claim.doubted:  # ours came from no server: any is better
            seat.claim.best = max(seat.claim.doubted, key=lambda model: model[0])
        best, applied, held = seat.claim.best
        clock, layout = max(0, best), seat.part.layout
        seat.server = ShardServer(
            self._rule, held.copy(), clock, dict(applied), self._counts, self._staleness, layout.variances,
            PushLimits(self._me, layout) if self._robust else None, self._optimizer, layout.parameters,
        )  # fmt: skip
        seat.tree = self._lay_out(seat, seat.claim.lives, applied)
        seat.claim, seat.announced, seat.encoded = None, True, (-1, ())
        seat.final_to.clear()
        for id in sorted(self._members.everyone):
            self._announce(seat, id)

    def _lay_out(self, seat: ShardState, lives: dict[NodeId, int], applied: dict[NodeId, Applied]) -> Tree:
        """Of those who have answered our claim; a shard's own order, so that not all shards burden the same members."""
        if not self._arity:
            return NO_TREE
        others = sorted(
            (id for id in self._members.alive if id in lives), key=lambda id: _hash(seat.part.number, id), reverse=True
        )
        members = []
        for id in [self._me, *others][:TREE_MAX]:
            mark = applied.get(id)
            taken = mark.seq if mark is not None and mark.life == lives[id] else 0
            members.append(Applied(id, lives[id], taken))
        return Tree(self._arity, tuple(members))

    def _announce(self, seat: ShardState, peer: NodeId) -> None:
        term, server = seat.leader
        tree = seat.tree or NO_TREE
        self._send(peer, ShardLeader(seat.part.number, term, server, seat.announced, tree.arity, tree.members))

    def _follow(self, seat: ShardState, bid: Ballot) -> None:
        """From now on this is the highest bid: what was of another reign is void."""
        seat.leader, seat.announced, seat.server, seat.claim = bid, False, None, None
        seat.tree = seat.aggregator = None
        seat.outdated = False
        seat.asked.clear()
        seat.sums.clear()
        seat.early = [(sender, early) for sender, early in seat.early if (early.term, early.server) >= bid]

    def _newest(self, seat: ShardState) -> Newest:
        if seat.claim is not None:
            return seat.claim.best
        if seat.server is not None:
            return seat.server.clock, seat.server.applied, seat.server.held
        return seat.part.clock, seat.part.applied, self._worker.held(seat.part)

    def _accept_ballot(self, seat: ShardState, bid: Ballot, *, announced: bool) -> bool:
        """Whether a bid is the highest so far; whoever serves or claims by a lower one stops."""
        if bid < seat.leader:
            return False
        if bid > seat.leader:
            self._follow(seat, bid)
        seat.announced |= announced
        return True

    def on_claim(self, sender: NodeId, message: Prepare, now: float) -> None:
        """Tell the claimant what we have, and follow it."""
        seat = self.seat(message.shard, term=message.term, clock=message.clock)
        if sender not in self._members.alive:
            self._heard[sender] = now
        if not self._may_bid(seat, sender, message):
            return
        clock, applied, held = self._newest(seat)
        bid = (message.term, sender)
        if (seat.announced and bid == seat.leader) or not self._accept_ballot(seat, bid, announced=False):
            self._announce(seat, sender)  # a higher bid, or its own of another life: it claims again above that
            return
        chunks: Chunks = ()
        if clock > message.clock:
            chunks, _ = vector.encode(WEIGHTS_CODEC, exact(seat), held)
        marks = tuple(applied.values()) if chunks else ()
        self._send(sender, Promise(message.shard, message.term, self._worker.life, clock, marks, chunks))
        self._reconsider(seat, now)

    def on_replica(self, sender: NodeId, message: Promise, now: float) -> None:
        """One answer to our claim. Raises PeerError."""
        seat = self.seat(message.shard, term=message.term, clock=message.clock)
        claim = seat.claim
        if claim is None or seat.leader != (message.term, self._me) or sender not in claim.waiting:
            return
        if message.clock > claim.best[0] and message.chunks:
            newer = message.clock, {mark.worker: mark for mark in message.applied}, self.held(seat, message.chunks)
            sure = not self._robust or len(self._members.everyone) <= 2
            self._counts["replicas_doubted"] += not claim.weigh(newer, seat.part, sure=sure)
        claim.waiting.discard(sender)
        claim.lives[sender] = message.life
        self._reconsider(seat, now)

    def held(self, seat: ShardState, chunks: Chunks) -> Vector:
        """Weights that came, and what the optimizer remembers. Raises PeerError."""
        layout = seat.part.layout
        held = np.empty(exact(seat).total, self._worker.base.dtype)
        vector.decode(WEIGHTS_CODEC, exact(seat), chunks, held)
        if self._optimizer is not None:
            state = held[layout.total :].reshape(self._optimizer.rows, layout.parameters)
            if not self._optimizer.is_possible(state):
                raise PeerError("an optimizer's state that no gradients make")
        return held

    def _may_bid(self, seat: ShardState, bidder: NodeId, message: Prepare | ShardLeader) -> bool:
        """Whether it owns the shard, or leads already. If not, it may own it by the next news of the members."""
        if bidder == self.owner(seat) or bidder == seat.leader[1]:
            return True
        if bidder in seat.not_owners or len(seat.not_owners) < BIDDERS_MAX:
            seat.not_owners[bidder] = message
        self._counts["bids_refused"] += 1
        return False

    def _hear_owner(self, seat: ShardState, now: float) -> None:
        """What it said before we knew that it owns the shard."""
        owner = self.owner(seat)
        message = seat.not_owners.pop(owner, None)
        if isinstance(message, Prepare):
            self.on_claim(owner, message, now)
        elif message is not None:
            self.on_serves(owner, message, now)

    def on_serves(self, sender: NodeId, message: ShardLeader, now: float) -> bool:
        """Somebody says who serves a shard. Says whether that is news to our worker."""
        seat = self.seat(message.shard, term=message.term)
        bid, tree = (message.term, message.server), tree_of(message)
        is_of_now = bid == seat.leader and (seat.server is not None or not message.serving)
        if message.server == self._me and not is_of_now:  # of an earlier life: we claim above it
            if bid >= seat.leader and self.owner(seat) == self._me:
                self._claim(seat, now, above=bid[0])
                self._reconsider(seat, now)
            return False
        if seat.server is not None and bid != seat.leader:  # two serve: only a claim, which asks both, ends it
            if self.owner(seat) == self._me:
                if sender not in self._members.alive:
                    self._heard[sender] = now
                self._claim(seat, now, above=bid[0])
                self._reconsider(seat, now)
            elif bid > seat.leader and message.serving:  # who claims asks us itself
                self._announce(seat, message.server)
        elif bid > seat.leader and not self._may_bid(seat, message.server, message):
            if self.owner(seat) == self._me:
                self._claim(seat, now, above=bid[0])
                self._reconsider(seat, now)
        elif self._accept_ballot(seat, bid, announced=message.serving):
            held = seat.tree
            if sender == message.server and message.serving and held is not None and held.members != tree.members:
                self._follow(seat, bid)  # others told of its earlier life, which bade the same
                seat.announced = True
            if seat.tree is None and message.serving:
                self._branches.enter(seat, tree)
            self._reconsider(seat, now)
            return seat.announced
        elif sender == message.server and seat.claim is not None and sender in seat.claim.waiting:
            self._ask(seat, sender)  # it has not had our claim
        elif sender == message.server:
            self._announce(seat, sender)
        return False

    def on_weights(self, sender: NodeId, message: Weights) -> Applied | None:
        """Heed the server, and pass on what is for those below; returns our own worker's answer. Raises PeerError."""
        seat = self.seat(message.shard, term=message.term, clock=message.clock)
        bid = (message.term, message.server)
        if sender == message.server:
            is_known = bid <= seat.leader or sender == self.owner(seat)
            if not is_known or not self._accept_ballot(seat, bid, announced=False):
                return None
        elif bid != seat.leader or sender != seat.parent(self._me):
            return None
        self._branches.pass_down(seat, sender, message)
        return next((mark for mark in message.answers if mark.worker == self._me), None)

    # ---------------------------------------------------------------- serving

    def on_push(self, sender: NodeId, message: ShardPush) -> None:
        """A worker's update. Raises PeerError."""
        seat = self.seat(message.shard, message.seq, message.oldest, message.life, clock=message.clock)
        server = seat.server
        if server is None:
            if sender == self._me and seat.aggregator is not None:
                seat.aggregator.take_push(message)
            else:
                self._redirect(seat, sender)
            return
        server.note_incarnation(sender, message.life)
        self._branches.note_incarnation(seat, sender, message.life)
        if self._branches.carries(seat, sender, message.life):
            self._announce(seat, sender)  # it did not know; there must be one way for its pushes
            return
        if server.is_next(sender, message.life, message.seq, message.oldest):
            update = np.empty_like(server.weights)
            vector.decode(message.codec, seat.part.layout, message.chunks, update)
            self._members.hear(sender, finishing=message.finishing)
            mark, training = Applied(sender, message.life, message.seq), self._members.training
            server.take([mark], message.clock, update, training, message.rate)
        if message.wants_answer:
            server.owed[sender] = None

    def on_pull(self, sender: NodeId, message: ShardPull) -> None:
        """A worker that has waited for long, here or elsewhere. Raises PeerError."""
        seat = self.seat(message.shard, message.seq, message.life)
        if seat.server is None:
            if seat.aggregator is None:
                self._redirect(seat, sender)
            elif message.passes:
                seat.aggregator.passed.add(sender)
            else:
                seat.aggregator.hurries = True
                self._branches.send_up(seat, seat.aggregator.repeat())  # that they were taken may be what was lost
        else:
            seat.server.note_incarnation(sender, message.life)
            self._branches.note_incarnation(seat, sender, message.life)
            if not message.knows:
                self._announce(seat, sender)
            seat.final_to.discard(sender)
            seat.server.owed[sender] = None
            seat.asked.add(sender)
            if message.passes:
                seat.server.passed.add(sender)

    def _redirect(self, seat: ShardState, sender: NodeId) -> None:
        if seat.announced and seat.leader[1] not in (self._me, sender):
            self._announce(seat, sender)

    def serve(self, now: float) -> None:
        """Update what is due, and answer whom it is time to answer."""
        training = self._members.training
        for seat in self.all:
            if seat.outdated:
                self._reconsider(seat, now)
            if seat.server is None:
                if seat.aggregator is not None:
                    self._branches.send_up(seat, seat.aggregator.due(training))
                continue
            self._answer(seat, seat.server.due(training), final=False)
            self._end(seat, training)

    def _end(self, seat: ShardState, training: frozenset[NodeId]) -> None:
        """When nobody trains, all get the final weights."""
        server = seat.server
        if server is None:
            return
        if training or seat.final_clock != server.clock:  # who trains again ends again
            seat.final_clock = server.clock
            seat.final_to.clear()
        if not training and not server.pushers:
            left = sorted(self._members.everyone - seat.final_to)
            seat.final_to |= set(left)
            self._answer(seat, left, final=True)

    def _answer(self, seat: ShardState, workers: Sequence[NodeId], *, final: bool) -> None:
        """Our own worker last: it may claim, and there is no server any more."""
        server = seat.server
        assert server is not None, "only of one that is served here"
        answers = tuple(server.come.get(worker, Applied(worker, 0, 0)) for worker in workers if worker != self._me)
        if answers:
            if seat.encoded[0] != server.clock:
                seat.encoded = server.clock, vector.encode(WEIGHTS_CODEC, exact(seat), server.held)[0]
            marks = tuple(server.applied.values())
            term, me = seat.leader
            self._branches.send_down(
                seat, Weights(seat.part.number, term, me, server.clock, answers, final, marks, seat.encoded[1])
            )
        if self._me in workers:
            self._answer_here(seat, server, final)


def _hash(shard: int, id: NodeId) -> tuple[bytes, NodeId]:
    return blake2b(f"{shard} {id}".encode(), digest_size=8).digest(), id
