"""What of a shard's tree goes through this member? Sums on their way up, taken once and in order; weights going down.

The tree is laid out by the server (tree.py); what a member sums, and when it sends that on, is in aggregator.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from peerd.training.parameter_server.aggregator import Aggregator
from peerd.training.parameter_server.shard_state import Members, ShardState
from peerd.training.parameter_server.tree import TREE_MAX, Tree
from peerd.training.parameter_server.worker import Worker, pushed_values
from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId
from peerd.transport.messages import Applied, Message, ShardSum, SumTaken, Weights

EARLY_MAX = 64  # sums of a tree that is not known yet: one from each who may be below
OUTSIDE_SHARE = 4  # a tree is laid out anew when a quarter as many workers are outside as are in it


class TreeRelay:
    """This member's place in the trees of all shards."""

    def __init__(
        self, members: Members, worker: Worker, send: Callable[[NodeId, Message], None], counts: Counter[str], *,
        waits: bool,
    ) -> None:  # fmt: skip
        """`waits`: for all who are below, as hardsync does."""
        self._members = members
        self._me = members.me
        self._worker = worker
        self._send = send
        self._counts = counts
        self._waits = waits

    # ---------------------------------------------------------------- of our own pushes

    def ours_go_to(self, shard: ShardState) -> NodeId:
        """Where our own pushes begin their way: at our own place in the tree, or at the server."""
        return self._me if shard.aggregator is not None else shard.leader[1]

    def taken_up_to(self, shard: ShardState) -> int:
        """The last of our pushes that need not be said again, as the tree has it."""
        return (shard.tree.seq(self._me, self._worker.life) if shard.tree is not None else None) or 0

    def above(self, shard: ShardState) -> list[NodeId]:
        """Who waits for our pushes beside the server: our own place in the tree, and those between."""
        if shard.aggregator is None or shard.tree is None:
            return []
        return [self._me, *shard.tree.above(self._me)[:-1]]

    # ---------------------------------------------------------------- the tree

    def enter(self, shard: ShardState, tree: Tree) -> None:
        """Take our place in the leader's tree."""
        shard.tree = tree
        part, worker = shard.part, self._worker
        if shard.leader[1] != self._me and tree.seq(self._me, worker.life) is not None:
            shard.aggregator = Aggregator(self._me, part, shard.leader, tree, self._waits, self._counts, worker.base)
        early, shard.early = shard.early, []
        for sender, message in early:
            with suppress(PeerError):  # the one to blame is not the server, whom we hear now; it will say it again
                self.on_sum(shard, sender, message)

    def note_incarnation(self, shard: ShardState, worker: NodeId, life: int) -> None:
        """Who was in the tree in another life cuts its branch off."""
        assert shard.tree is not None, "laid out with the server"
        if shard.parent(worker) is not None and shard.tree.seq(worker, life) is None:
            shard.outdated = True

    def has_gaps(self, shard: ShardState) -> bool:
        """Whether aggregators have died, or many have come who are not in the tree."""
        if shard.tree is None or not shard.tree.members:
            return False
        inside = {member.worker for member in shard.tree.members}
        outside = len(self._members.alive - inside) if len(inside) < TREE_MAX else 0
        return OUTSIDE_SHARE * outside >= len(inside) or not shard.tree.aggregators() <= self._members.alive

    def carries(self, shard: ShardState, worker: NodeId, life: int) -> bool:
        """Whether its pushes come by the tree."""
        return shard.tree is not None and worker != self._me and shard.tree.seq(worker, life) is not None

    # ---------------------------------------------------------------- up

    def on_sum(self, shard: ShardState, sender: NodeId, message: ShardSum) -> None:
        """From the next below us. Raises PeerError."""
        ballot = (message.term, message.server)
        if ballot > shard.leader or (ballot == shard.leader and shard.tree is None):
            if len(shard.early) < EARLY_MAX:  # it will be said again
                shard.early.append((sender, message))
            return
        if ballot != shard.leader or shard.tree is None or shard.parent(sender) != self._me:
            return
        last = shard.sums.get(sender, 0)
        if message.seq > last + 1:
            return
        if message.seq == last + 1:
            if not message.parts or not {part.worker for part in message.parts} <= {sender, *shard.tree.below(sender)}:
                raise PeerError("a sum of pushes that are not below its sender")
            shard.sums[sender] = message.seq
            self._take(shard, message)
        elif shard.aggregator is not None:
            self.send_up(shard, shard.aggregator.repeat())
        self._send(sender, SumTaken(message.shard, message.term, message.server, message.seq))

    def on_taken(self, shard: ShardState, sender: NodeId, message: SumTaken) -> None:
        """Our sums have come."""
        is_ours = (message.term, message.server) == shard.leader and sender == shard.parent(self._me)
        if is_ours and shard.aggregator is not None:
            shard.aggregator.taken(message.seq)

    def send_up(self, shard: ShardState, sums: list[ShardSum]) -> None:
        """To the next above us."""
        parent = shard.parent(self._me)
        assert parent is not None, "who has an aggregator is not the root"
        for each in sums:
            self._send(parent, each)

    def _take(self, shard: ShardState, message: ShardSum) -> None:
        for part in message.parts:
            self._members.hear(part.worker, finishing=message.finishing)
        if shard.aggregator is not None:
            shard.aggregator.take_sum(message)
        elif shard.server is not None:
            server = shard.server
            if any(part.seq <= server.last_of(part.worker, part.life) for part in message.parts):
                self._counts["sums_refused"] += 1  # one of them has another way: only another tree mends that
                shard.outdated = True
                return
            update = pushed_values(shard.part, message.codec, message.chunks, server.weights, len(message.parts))
            members = self._members
            server.take(message.parts, message.clock, update, members.training, message.rate, ended=members.ended)
            server.owed |= dict.fromkeys(part.worker for part in message.parts)

    # ---------------------------------------------------------------- down

    def pass_down(self, shard: ShardState, sender: NodeId, message: Weights) -> None:
        """What came from above is for those below, too."""
        if shard.aggregator is not None and sender == shard.parent(self._me):
            shard.aggregator.answered(message)
            self.send_down(shard, message)

    def send_down(self, shard: ShardState, message: Weights) -> None:
        """One message to each who is next below us, and to those outside the tree."""
        assert shard.tree is not None, "known with the server"
        ways: dict[NodeId, list[Applied]] = {}
        for mark in message.answers:
            way = mark.worker if mark.worker in shard.asked else shard.tree.next_down(self._me, mark.worker)
            ways.setdefault(way, []).append(mark)
        shard.asked -= {mark.worker for mark in message.answers}
        for way, answers in ways.items():
            is_root = shard.server is not None
            if way != self._me and (is_root or shard.parent(way) == self._me):
                self._send(way, replace(message, answers=tuple(answers)))
