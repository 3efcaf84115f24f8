"""Who sums whose pushes on their way to a shard's server? The tree of aggregators of Rudra-adv, one for each term.

The server is the root; the member of rank r gives its sums to rank (r - 1) // arity, and what the server answers
comes back the same way. The server lays the tree out anew with every ballot of its own, and says it with
`ShardLeader`: who is in it, in which life, and the last push of each that is in the weights. So all who accept a ballot
see one tree, and each push has one way through it. Who is not in it, such as a newcomer, speaks with the server
itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from peerd.training.mode_settings import AUTO
from peerd.training.plain_numbers import count
from peerd.transport.errors import PeerError, WrongSetting
from peerd.transport.ids import NodeId
from peerd.transport.messages import Applied, ShardLeader

ARITY_MAX = 64
TREE_MAX = 256
"""Members of a tree: what a header (64 KiB) holds at 50 bytes each, beside the marks of WORKERS_MAX."""


def parse_arity(text: str) -> int:
    """`adv:K`, or `auto`: 0, no tree. Raises UserError."""
    name, _, arity = text.partition(":")
    if text == AUTO:
        return 0
    if name == "adv" and (children := count(arity, ARITY_MAX)) >= 2:
        return children
    raise WrongSetting(
        f"topology {text[:40]!r}: a parameter server has auto (no tree) or adv:K, K from 2 to {ARITY_MAX}", "topology"
    )


@dataclass(slots=True, eq=False)
class Tree:
    """One shard's tree; without members there is none."""

    arity: int
    members: tuple[Applied, ...]
    _ranks: dict[NodeId, int] = field(init=False)

    def __post_init__(self) -> None:
        self._ranks = {member.worker: rank for rank, member in enumerate(self.members)}

    def seq(self, id: NodeId, life: int) -> int | None:
        """The last push of this life that was in the weights when the tree was made; None: it is not in the tree."""
        rank = self._ranks.get(id)
        member = self.members[rank] if rank is not None else None
        return member.seq if member is not None and member.life == life else None

    def parent(self, id: NodeId) -> NodeId | None:
        """To whom it gives its sums; None: it is the root, or not in the tree."""
        rank = self._ranks.get(id, 0)
        return self.members[(rank - 1) // self.arity].worker if rank > 0 else None

    def above(self, id: NodeId) -> list[NodeId]:
        """By whom its pushes come to the root, which is the last."""
        found = []
        while (parent := self.parent(id)) is not None:
            found.append(parent)
            id = parent
        return found

    def below(self, top: NodeId) -> set[NodeId]:
        """All whose pushes come through `top`, which is not among them."""
        return {id for id in self._ranks if top in self.above(id)}

    def aggregators(self) -> set[NodeId]:
        """Whose death would cut others off: those between the root and the leaves."""
        inner = {self.parent(id) for id in self._ranks}
        return {id for id in self._ranks if id in inner and self.parent(id) is not None}

    def next_down(self, top: NodeId, id: NodeId) -> NodeId:
        """To whom `top` gives what is for `id`; itself, if it is not below."""
        way = [id, *self.above(id)]
        return way[way.index(top) - 1] if top in way[1:] else id


def tree_of(message: ShardLeader) -> Tree:
    """As a server says it. Raises PeerError."""
    ids = [member.worker for member in message.tree]
    if ids and (not 1 <= message.arity <= ARITY_MAX or len(set(ids)) < len(ids) or ids[0] != message.server):
        raise PeerError(f"a tree of arity {message.arity} whose root is {ids[0]!r}, served by {message.server!r}")
    return Tree(message.arity, message.tree)
