"""What of a shard's tree goes through this member? Sums on their way up, taken once and in order; weights going down.

The tree is laid out by the server (tree.py); what a member sums, and when it sends that on, is in aggregator.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np

from peerd.training.codecs import vector
from peerd.training.parameter_server.aggregator import Aggregator, layout_of
from peerd.training.parameter_server.shard_state import Members, ShardState
from peerd.training.parameter_server.tree import TREE_MAX, Tree
from peerd.training.parameter_server.worker import Worker
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

    def ours_go_to(self, seat: ShardState) -> NodeId:
        """Where our own pushes begin their way: at our own place in the tree, or at the server."""
        return self._me if seat.aggregator is not None else seat.leader[1]

    def taken_up_to(self, seat: ShardState) -> int:
        """The last of our pushes that need not be said again, as the tree has it."""
        return (seat.tree.seq(self._me, self._worker.life) if seat.tree is not None else None) or 0

    def above(self, seat: ShardState) -> list[NodeId]:
        """Who waits for our pushes beside the server: our own place in the tree, and those between."""
        if seat.aggregator is None or seat.tree is None:
            return []
        return [self._me, *seat.tree.above(self._me)[:-1]]

    # ---------------------------------------------------------------- the tree

    def enter(self, seat: ShardState, tree: Tree) -> None:
        """Take our place in the leader's tree."""
        seat.tree = tree
        part, worker = seat.part, self._worker
        if seat.leader[1] != self._me and tree.seq(self._me, worker.life) is not None:
            seat.aggregator = Aggregator(
                self._me, part.number, seat.leader, tree, part.layout, self._waits, self._counts,
                worker.base[part.where], part.clock,
            )  # fmt: skip
        early, seat.early = seat.early, []
        for sender, message in early:
            with suppress(PeerError):  # the one to blame is not the server, whom we hear now; it will say it again
                self.on_sum(seat, sender, message)

    def note_incarnation(self, seat: ShardState, worker: NodeId, life: int) -> None:
        """Who was in the tree in another life cuts its branch off."""
        assert seat.tree is not None, "laid out with the server"
        if seat.parent(worker) is not None and seat.tree.seq(worker, life) is None:
            seat.outdated = True

    def has_gaps(self, seat: ShardState) -> bool:
        """Whether aggregators have died, or many have come who are not in the tree."""
        if seat.tree is None or not seat.tree.members:
            return False
        inside = {member.worker for member in seat.tree.members}
        outside = len(self._members.alive - inside) if len(inside) < TREE_MAX else 0
        return OUTSIDE_SHARE * outside >= len(inside) or not seat.tree.aggregators() <= self._members.alive

    def carries(self, seat: ShardState, worker: NodeId, life: int) -> bool:
        """Whether its pushes come by the tree."""
        return seat.tree is not None and worker != self._me and seat.tree.seq(worker, life) is not None

    # ---------------------------------------------------------------- up

    def on_sum(self, seat: ShardState, sender: NodeId, message: ShardSum) -> None:
        """From the next below us. Raises PeerError."""
        bid = (message.term, message.server)
        if bid > seat.leader or (bid == seat.leader and seat.tree is None):
            if len(seat.early) < EARLY_MAX:  # it will be said again
                seat.early.append((sender, message))
            return
        if bid != seat.leader or seat.tree is None or seat.parent(sender) != self._me:
            return
        last = seat.sums.get(sender, 0)
        if message.seq > last + 1:
            return
        if message.seq == last + 1:
            if not message.parts or not {part.worker for part in message.parts} <= {sender, *seat.tree.below(sender)}:
                raise PeerError("a sum of pushes that are not below its sender")
            seat.sums[sender] = message.seq
            self._take(seat, message)
        elif seat.aggregator is not None:
            self.send_up(seat, seat.aggregator.repeat())
        self._send(sender, SumTaken(message.shard, message.term, message.server, message.seq))

    def on_taken(self, seat: ShardState, sender: NodeId, message: SumTaken) -> None:
        """Our sums have come."""
        is_ours = (message.term, message.server) == seat.leader and sender == seat.parent(self._me)
        if is_ours and seat.aggregator is not None:
            seat.aggregator.taken(message.seq)

    def send_up(self, seat: ShardState, sums: list[ShardSum]) -> None:
        """To the next above us."""
        parent = seat.parent(self._me)
        assert parent is not None, "who has an aggregator is not the root"
        for each in sums:
            self._send(parent, each)

    def _take(self, seat: ShardState, message: ShardSum) -> None:
        for part in message.parts:
            self._members.hear(part.worker, finishing=message.finishing)
        if seat.aggregator is not None:
            seat.aggregator.take_sum(message)
        elif seat.server is not None:
            server = seat.server
            if any(part.seq <= server.last_of(part.worker, part.life) for part in message.parts):
                self._counts["sums_refused"] += 1  # one of them has another way: only another tree mends that
                seat.outdated = True
                return
            update = np.empty_like(server.weights)
            vector.decode(message.codec, layout_of(message, seat.part.layout), message.chunks, update)
            server.take(message.parts, message.clock, update, self._members.training, message.rate)
            server.owed |= dict.fromkeys(part.worker for part in message.parts)

    # ---------------------------------------------------------------- down

    def pass_down(self, seat: ShardState, sender: NodeId, message: Weights) -> None:
        """What came from above is for those below, too."""
        if seat.aggregator is not None and sender == seat.parent(self._me):
            seat.aggregator.answered(message)
            self.send_down(seat, message)

    def send_down(self, seat: ShardState, message: Weights) -> None:
        """One message to each who is next below us, and to those outside the tree."""
        assert seat.tree is not None, "known with the server"
        ways: dict[NodeId, list[Applied]] = {}
        for mark in message.answers:
            way = mark.worker if mark.worker in seat.asked else seat.tree.next_down(self._me, mark.worker)
            ways.setdefault(way, []).append(mark)
        seat.asked -= {mark.worker for mark in message.answers}
        for way, answers in ways.items():
            is_root = seat.server is not None
            if way != self._me and (is_root or seat.parent(way) == self._me):
                self._send(way, replace(message, answers=tuple(answers)))
