"""Which member serves which shard, and how does that change hands?

How this works. A shard's owner is the member with the largest hash of (shard, member): a death moves the dead one's
shards alone. Whoever finds itself the owner proposes itself with a ballot of the next term. Every member answers
with a promise: the newest weights that it has pulled or serves, and from then on it accepts no lower ballot (a term,
then an id), as in Paxos' first phase; a member that served stops. When all alive have promised, the proposer serves
from the highest clock.

Nothing that counts is in the server alone: a worker keeps each push until it has pulled weights that hold it, weights
travel with the last push of each worker in them, and one of those answers is the highest clock. So pushes said again
to the new server are in its weights once. Two halves of a partition each serve; when they meet, the ballot after
it takes the higher clock, and the other half's updates are lost. Such a half is also a server that membership has not
named and of which nothing has come for HEARD_S.

With a tree (tree.py), a server that loses an aggregator proposes itself again, and lays another tree out: all that
was on its way in the old one is void, and said again in the new one. So it does when a member of the tree comes back in
another life, and when a quarter of the workers is not in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b

import numpy as np

from peerd.training.codecs import vector
from peerd.training.counts import COUNT_END, REPORTED_STEP, STEP_MAX, within_step
from peerd.training.effects import Vector
from peerd.training.parameter_server.limits import PushLimits
from peerd.training.parameter_server.optimizer import Optimizer
from peerd.training.parameter_server.shard_server import Rule, ShardServer
from peerd.training.parameter_server.shard_state import (
    WEIGHTS_CODEC,
    Lead,
    Members,
    Newest,
    Preparing,
    ShardState,
    exact,
)
from peerd.training.parameter_server.tree import TREE_MAX, Tree, tree_of
from peerd.training.parameter_server.tree_node import TreeRelay
from peerd.training.parameter_server.worker import NEVER, Ballot, Worker, pushed_values
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
PROPOSERS_MAX = 64  # of one shard, that we do not know to own it
HEARD_S = 30.0  # how long a proposer counts as alive that membership does not name


class Leadership:
    """Who leads each shard, as one node sees them, and the servers that it holds."""

    def __init__(
        self,
        members: Members,
        relay: TreeRelay,
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

        `answer_here` gives this node's own worker the weights of a shard that is served here.
        """
        self.shards = [ShardState(part) for part in worker.parts]
        self._members = members
        self._me = members.me
        self._relay = relay
        self._rule = rule
        self._worker = worker
        self._send = send
        self._answer_here = answer_here
        self._counts = counts
        self._staleness = staleness
        self._arity = arity
        self._robust = robust
        self._optimizer = optimizer
        self._heard: dict[NodeId, float] = {}  # proposers that membership does not name, and when they last spoke

    def shard(self, number: int, *counts: int, term: int = 0, clock: int = NEVER) -> ShardState:
        """The shard that a message names, whose other numbers are in bounds. Raises PeerError."""
        if not 0 <= number < len(self.shards):
            raise PeerError(f"shard {number} of {len(self.shards)}")
        if not all(0 <= count < COUNT_END for count in counts):
            raise PeerError(f"a number out of bounds: {counts}")
        shard = self.shards[number]
        within_step("a term", term, shard.leader[0])
        within_step("a clock", clock - NEVER, self._newest(shard)[0] - NEVER)
        return shard

    def owner(self, shard: ShardState) -> NodeId:
        """Who should serve it, of those who are alive."""
        return max(self._members.everyone | self._heard.keys(), key=lambda id: _hash(shard.part.number, id))

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
        for shard in self.shards:
            if shard.server is not None:
                for id in gone:
                    shard.server.owed.pop(id, None)
                    shard.server.dropped.discard(id)
                    shard.server.pulled.discard(id)
                    shard.server.passed.pop(id, None)
                if shard.server.limits is not None:
                    shard.server.limits.keep(members.everyone)
                for id in sorted(come):
                    self._announce(shard, id)
                shard.outdated |= self._relay.has_gaps(shard)
            if shard.preparing is not None:
                shard.preparing.waiting -= gone
                shard.preparing.waiting |= come
                for id in sorted(come):
                    self._ask(shard, id)
            self._reconsider(shard, now)
            self._hear_owner(shard, now)

    def on_connected(self, peer: NodeId) -> None:
        """What was said to this peer may be lost."""
        for shard in self.shards:
            shard.final_to.discard(peer)
            if shard.server is not None:
                self._announce(shard, peer)
            if shard.aggregator is not None and peer == shard.parent(self._me):
                self._relay.send_up(shard, shard.aggregator.repeat())
            if shard.parent(peer) == self._me and shard.tree is not None:
                for id in sorted({peer, *shard.tree.below(peer)}):  # answers to them may be lost
                    shard.final_to.discard(id)
                    self._announce(shard, id)
            if shard.preparing is not None and peer in shard.preparing.waiting:
                self._ask(shard, peer)

    def on_timer(self, now: float, repeat_s: float) -> None:
        """Ask again those who have not promised."""
        for id in [id for id, at in self._heard.items() if now >= at + HEARD_S]:  # as in `deadline`, rounded alike
            del self._heard[id]
            for shard in self.shards:
                if shard.preparing is not None:
                    shard.preparing.waiting.discard(id)
        for shard in self.shards:
            if shard.preparing is not None and now >= shard.preparing.asked_at + repeat_s:
                shard.preparing.asked_at = now
                for id in sorted(shard.preparing.waiting):
                    self._ask(shard, id)
            self._reconsider(shard, now)
            self._hear_owner(shard, now)

    def deadline(self, repeat_s: float) -> float:
        """When `on_timer` has something to do."""
        asked_again = [shard.preparing.asked_at + repeat_s for shard in self.shards if shard.preparing is not None]
        return min([*asked_again, *(at + HEARD_S for at in self._heard.values())], default=float("inf"))

    def missing(self, shard: ShardState) -> frozenset[NodeId]:
        """Whom the server waits for, if it is here or is to be."""
        if shard.preparing is not None:
            return frozenset(shard.preparing.waiting)
        return shard.server.missing(self._members.training) if shard.server is not None else frozenset()

    # ---------------------------------------------------------------- ballots

    def _reconsider(self, shard: ShardState, now: float) -> None:
        """Prepare to lead what is ours, and nothing else."""
        if self.owner(shard) != self._me:
            if shard.preparing is not None:
                shard.enter(Lead.VACANT)  # the owner's ballot will be above ours
        elif shard.preparing is None and (shard.server is None or shard.outdated):
            self._prepare(shard, now)
        if shard.preparing is not None and not shard.preparing.waiting:
            self._serve(shard)

    def _prepare(self, shard: ShardState, now: float, above: int = 0) -> None:
        """Bid, `above` the term that a peer has told of, or as near to it as those believe who have not heard of it.

        Who has will tell again, and the next bid is above it.
        """
        best, term = self._newest(shard), shard.leader[0]
        self._follow(shard, (max(term, min(above, term + REPORTED_STEP)) + 1, self._me))
        shard.enter(Lead.PREPARING)
        shard.preparing = Preparing({*self._members.alive, *self._heard}, best, now, {self._me: self._worker.life})
        self._counts["claims"] += 1
        for id in sorted(shard.preparing.waiting):
            self._ask(shard, id)

    def _ask(self, shard: ShardState, peer: NodeId) -> None:
        assert shard.preparing is not None, "only while we prepare"
        self._send(peer, Prepare(shard.part.number, shard.leader[0], shard.preparing.best[0]))

    def _serve(self, shard: ShardState) -> None:
        assert shard.preparing is not None, "all have promised"
        if shard.preparing.best[0] == NEVER and shard.preparing.doubted:  # ours came from no server: any is better
            shard.preparing.best = max(shard.preparing.doubted, key=lambda model: model[0])
        (best, applied, held), lives = shard.preparing.best, shard.preparing.lives
        clock, layout = max(0, best), shard.part.layout
        shard.enter(Lead.SERVING)
        shard.server = ShardServer(
            self._rule, held.copy(), clock, dict(applied), self._counts, self._staleness, layout.variances,
            PushLimits(self._me, layout) if self._robust else None, self._optimizer, layout.parameters,
            shard.part.flagged,
        )  # fmt: skip
        shard.tree = self._lay_out(shard, lives, applied)
        shard.encoded = (-1, ())
        shard.final_to.clear()
        for id in sorted(self._members.everyone):
            self._announce(shard, id)

    def _lay_out(self, shard: ShardState, lives: dict[NodeId, int], applied: dict[NodeId, Applied]) -> Tree:
        """Of those who have promised; a shard's own order, so that not all shards burden the same members."""
        if not self._arity:
            return NO_TREE
        others = sorted(
            (id for id in self._members.alive if id in lives), key=lambda id: _hash(shard.part.number, id), reverse=True
        )
        members = []
        for id in [self._me, *others][:TREE_MAX]:
            mark = applied.get(id)
            taken = mark.seq if mark is not None and mark.life == lives[id] else 0
            members.append(Applied(id, lives[id], taken))
        return Tree(self._arity, tuple(members))

    def _announce(self, shard: ShardState, peer: NodeId) -> None:
        term, server = shard.leader
        tree = shard.tree or NO_TREE
        self._send(peer, ShardLeader(shard.part.number, term, server, shard.announced, tree.arity, tree.members))

    def _follow(self, shard: ShardState, ballot: Ballot) -> None:
        """From now on this is the highest ballot: what was of another term is void."""
        shard.enter(Lead.VACANT)
        shard.leader = ballot
        shard.tree = shard.aggregator = None
        shard.outdated = False
        shard.asked.clear()
        shard.sums.clear()
        shard.early = [(sender, early) for sender, early in shard.early if (early.term, early.server) >= ballot]

    def _newest(self, shard: ShardState) -> Newest:
        if shard.preparing is not None:
            return shard.preparing.best
        if shard.server is not None:
            return shard.server.clock, shard.server.applied, shard.server.held
        return shard.part.clock, shard.part.applied, self._worker.held(shard.part)

    def _accept_ballot(self, shard: ShardState, ballot: Ballot, *, announced: bool) -> bool:
        """Whether a ballot is the highest so far; whoever serves or prepares by a lower one stops."""
        if ballot < shard.leader:
            return False
        if ballot > shard.leader:
            self._follow(shard, ballot)
        if announced and shard.lead is Lead.VACANT:
            shard.enter(Lead.FOLLOWING)
        return True

    def on_prepare(self, sender: NodeId, message: Prepare, now: float) -> None:
        """Tell the proposer what we have, and follow it."""
        shard = self.shard(message.shard, message.term, clock=message.clock)
        if shard.leader[0] > 0 and sender == self.owner(shard) and message.term > shard.leader[0] + STEP_MAX:
            within_step("a term", near := shard.leader[0] + STEP_MAX, shard.leader[0])
            self._accept_ballot(shard, (near, sender), announced=False)  # it was told so, and asks again: we come there
            return
        within_step("a term", message.term, shard.leader[0])
        if sender not in self._members.alive:
            self._heard[sender] = now
        if not self._may_lead(shard, sender, message):
            return
        clock, applied, held = self._newest(shard)
        ballot = (message.term, sender)
        if (shard.announced and ballot == shard.leader) or not self._accept_ballot(shard, ballot, announced=False):
            self._announce(shard, sender)  # a higher ballot, or its own of another life: its next is above that
            return
        chunks: Chunks = ()
        if clock > message.clock:
            chunks, _ = vector.encode(WEIGHTS_CODEC, exact(shard), held)
        marks = tuple(applied.values()) if chunks else ()
        self._send(sender, Promise(message.shard, message.term, self._worker.life, clock, marks, chunks))
        self._reconsider(shard, now)

    def on_promise(self, sender: NodeId, message: Promise, now: float) -> None:
        """One answer to our ballot. Raises PeerError."""
        shard = self.shard(message.shard, term=message.term, clock=message.clock)
        preparing = shard.preparing
        if preparing is None or shard.leader != (message.term, self._me) or sender not in preparing.waiting:
            return
        if message.clock > preparing.best[0] and message.chunks:
            newer = message.clock, {mark.worker: mark for mark in message.applied}, self.held(shard, message.chunks)
            sure = not self._robust or len(self._members.everyone) <= 2
            self._counts["replicas_doubted"] += not preparing.weigh(newer, shard.part, sure=sure)
        preparing.waiting.discard(sender)
        preparing.lives[sender] = message.life
        self._reconsider(shard, now)

    def held(self, shard: ShardState, chunks: Chunks) -> Vector:
        """Weights that came, and what the optimizer remembers. Raises PeerError."""
        layout = shard.part.layout
        held = np.empty(exact(shard).total, self._worker.base.dtype)
        vector.decode(WEIGHTS_CODEC, exact(shard), chunks, held)
        if self._optimizer is not None:
            state = held[layout.total :].reshape(self._optimizer.rows, layout.parameters)
            if not self._optimizer.is_possible(state):
                raise PeerError("an optimizer's state that no gradients make")
        return held

    def _may_lead(self, shard: ShardState, proposer: NodeId, message: Prepare | ShardLeader) -> bool:
        """Whether it owns the shard, or leads already. If not, it may own it by the next news of the members."""
        if proposer == self.owner(shard) or proposer == shard.leader[1]:
            return True
        if proposer in shard.not_owners or len(shard.not_owners) < PROPOSERS_MAX:
            shard.not_owners[proposer] = message
        self._counts["bids_refused"] += 1
        return False

    def _hear_owner(self, shard: ShardState, now: float) -> None:
        """What it said before we knew that it owns the shard."""
        owner = self.owner(shard)
        message = shard.not_owners.pop(owner, None)
        with suppress(PeerError):  # a number may be too far ahead by now; this event is not its sender's
            if isinstance(message, Prepare):
                self.on_prepare(owner, message, now)
            elif message is not None:
                self.on_leader(owner, message, now)

    def on_leader(self, sender: NodeId, message: ShardLeader, now: float) -> bool:
        """Somebody says who serves a shard. Says whether that is news to our worker."""
        shard, term = self.shard(message.shard, message.term), message.term
        if self.owner(shard) == self._me:  # others may have been told so: its bids come there one by one
            term = min(term, shard.leader[0] + STEP_MAX)
        within_step("a term", term, shard.leader[0])
        ballot, tree = (term, message.server), tree_of(message)
        is_of_now = ballot == shard.leader and (shard.server is not None or not message.serving)
        if message.server == self._me and not is_of_now:  # of an earlier life: our next ballot is above it
            if ballot >= shard.leader and self.owner(shard) == self._me:
                self._prepare(shard, now, above=ballot[0])
                self._reconsider(shard, now)
            return False
        if (
            shard.server is not None and ballot != shard.leader
        ):  # two serve: only a new ballot, which asks both, ends it
            if self.owner(shard) == self._me:
                if sender not in self._members.alive:
                    self._heard[sender] = now
                self._prepare(shard, now, above=ballot[0])
                self._reconsider(shard, now)
            elif ballot > shard.leader and message.serving:  # who prepares asks us itself
                self._announce(shard, message.server)
        elif ballot > shard.leader and not self._may_lead(shard, message.server, message):
            if self.owner(shard) == self._me:
                self._prepare(shard, now, above=ballot[0])
                self._reconsider(shard, now)
        elif self._accept_ballot(shard, ballot, announced=message.serving):
            held = shard.tree
            if sender == message.server and message.serving and held is not None and held.members != tree.members:
                self._follow(shard, ballot)  # others told of its earlier life, which had the same ballot
                shard.enter(Lead.FOLLOWING)
            if shard.tree is None and message.serving:
                self._relay.enter(shard, tree)
            self._reconsider(shard, now)
            return shard.announced
        elif sender == message.server and shard.preparing is not None and sender in shard.preparing.waiting:
            self._ask(shard, sender)  # it has not had our ballot
        elif sender == message.server:
            self._announce(shard, sender)
        return False

    def on_weights(self, sender: NodeId, message: Weights) -> Applied | None:
        """Follow the server, and pass on what is for those below; returns our own worker's answer. Raises PeerError."""
        shard = self.shard(message.shard, term=message.term, clock=message.clock)
        ballot = (message.term, message.server)
        if sender == message.server:
            is_known = ballot <= shard.leader or sender == self.owner(shard)
            if not is_known or not self._accept_ballot(shard, ballot, announced=False):
                if sender == shard.leader[1]:  # it has not heard of the ballot that we were told it has
                    self._announce(shard, sender)
                return None
        elif ballot != shard.leader or sender != shard.parent(self._me):
            return None
        self._relay.pass_down(shard, sender, message)
        return next((mark for mark in message.answers if mark.worker == self._me), None)

    # ---------------------------------------------------------------- serving

    def on_push(self, sender: NodeId, message: ShardPush) -> None:
        """A worker's update. Raises PeerError."""
        shard = self.shard(message.shard, message.seq, message.oldest, message.life, clock=message.clock)
        server = shard.server
        if server is None:
            if sender == self._me and shard.aggregator is not None:
                shard.aggregator.take_push(message)
            else:
                self._redirect(shard, sender)
            return
        server.note_incarnation(sender, message.life)
        self._relay.note_incarnation(shard, sender, message.life)
        if self._relay.carries(shard, sender, message.life):
            self._announce(shard, sender)  # it did not know; there must be one way for its pushes
            return
        if server.is_next(sender, message.life, message.seq, message.oldest):
            update = pushed_values(shard.part, message.codec, message.chunks, server.weights)
            self._members.hear(sender, finishing=message.finishing)
            mark, training = Applied(sender, message.life, message.seq), self._members.training
            server.take([mark], message.clock, update, training, message.rate, ended=self._members.ended)
        if message.wants_answer:
            server.owed[sender] = None

    def on_pull(self, sender: NodeId, message: ShardPull) -> None:
        """A worker that has waited for long, here or elsewhere. Raises PeerError."""
        shard = self.shard(message.shard, message.seq, message.life)
        if shard.server is None:
            if shard.aggregator is None:
                self._redirect(shard, sender)
            elif message.passes:
                shard.aggregator.take_pass(sender, message.seq, message.passes)
            else:
                shard.aggregator.hurries = True
                self._relay.send_up(shard, shard.aggregator.repeat())  # that they were taken may be what was lost
        else:
            shard.server.note_incarnation(sender, message.life)
            self._relay.note_incarnation(shard, sender, message.life)
            if not message.knows:
                self._announce(shard, sender)
            if message.passes:
                last = shard.server.last_of(sender, message.life)  # by a tree it may have overtaken this
                if sender in self._members.everyone and message.seq >= last:
                    shard.server.passed[sender] = message.passes
                return
            shard.final_to.discard(sender)
            shard.server.owed[sender] = None
            shard.asked.add(sender)

    def _redirect(self, shard: ShardState, sender: NodeId) -> None:
        if shard.announced and shard.leader[1] not in (self._me, sender):
            self._announce(shard, sender)

    def serve(self, now: float) -> None:
        """Update what is due, and answer whom it is time to answer."""
        training = self._members.training
        for shard in self.shards:
            if shard.outdated:
                self._reconsider(shard, now)
            if shard.server is None:
                if shard.aggregator is not None:
                    self._relay.send_up(shard, shard.aggregator.due(training))
                continue
            self._answer(shard, shard.server.due(training), final=False)
            self._end(shard, training)

    def _end(self, shard: ShardState, training: frozenset[NodeId]) -> None:
        """When nobody trains, all get the final weights."""
        server = shard.server
        if server is None:
            return
        if training or shard.final_clock != server.clock:  # who trains again ends again
            shard.final_clock = server.clock
            shard.final_to.clear()
        if not training and not server.pushers:
            left = sorted(self._members.everyone - shard.final_to)
            shard.final_to |= set(left)
            self._answer(shard, left, final=True)

    def _answer(self, shard: ShardState, workers: Sequence[NodeId], *, final: bool) -> None:
        """Our own worker last: it may prepare a ballot, and there is no server any more."""
        server = shard.server
        assert server is not None, "only of one that is served here"
        answers = tuple(server.come.get(worker, Applied(worker, 0, 0)) for worker in workers if worker != self._me)
        if answers:
            if shard.encoded[0] != server.clock:
                shard.encoded = server.clock, vector.encode(WEIGHTS_CODEC, exact(shard), server.held)[0]
            marks = tuple(server.applied.values())
            term, me = shard.leader
            self._relay.send_down(
                shard, Weights(shard.part.number, term, me, server.clock, answers, final, marks, shard.encoded[1])
            )
        if self._me in workers:
            self._answer_here(shard, server, final)


def _hash(number: int, id: NodeId) -> tuple[bytes, NodeId]:
    return blake2b(f"{number} {id}".encode(), digest_size=8).digest(), id
