"""What is left of links that have ended, and what is there to say of them?

However a link goes, an exchange is applied on both ends or on neither, while both live. What one end has applied and
the other may not have outlives the link (reference.Unfinished), and is said when the peer is there:

    I have applied v, and you may not have        Delta v, LinkClosed at v
    I wait for your half of v + 1                 Delta v + 1, which whoever has applied it, or can, answers
    I have applied v, and no more will follow     LinkClosed at v: the last word on a link, true for ever

It ends when both ends are known to be at one version, or when the peer knows nothing of the link: it has crashed, and
what it had applied is lost with it, or what it had not is not known. That is counted: exchanges_cut.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from peerd.training.effects import Effect, Send
from peerd.training.mode import ENDED_MAX
from peerd.training.pairs.reference import Exchanged, PairedReference, Unfinished
from peerd.transport.ids import NodeId
from peerd.transport.messages import Delta, LinkClosed

UNKNOWN = -1  # the version of a link that this end knows nothing of: it was another life's
UNFINISHED_MAX = 64


@dataclass(slots=True, eq=False)
class Remnant:
    """What is left of a link that ended here before both ends were known to have applied the same exchanges."""

    peer: NodeId
    unfinished: Unfinished
    said_at: float = float("-inf")


class EndedLinks:
    """Those of one node."""

    def __init__(self, models_max: float, counts: Counter[str]) -> None:
        """`models_max`: whole models that the remnants may take."""
        self.remnants: dict[int, Remnant] = {}  # by link number, the oldest first
        self._versions: OrderedDict[int, int] = OrderedDict()  # by link number: LinkClosed was, or can be, said
        self._models_max = models_max
        self._counts = counts

    def knows(self, number: int) -> bool:
        """Whether this was one."""
        return number in self.remnants or number in self._versions

    def numbers(self) -> list[int]:
        """Of all, the oldest first."""
        return [*self._versions, *self.remnants]

    def of(self, peer: NodeId) -> dict[int, Unfinished]:
        """What is left of links with it, by link number."""
        return {number: one.unfinished for number, one in self.remnants.items() if one.peer == peer}

    def said_at(self) -> Iterator[tuple[NodeId, float]]:
        """To whom there is something to say, and when it was last said."""
        return ((one.peer, one.said_at) for one in list(self.remnants.values()))

    # ---------------------------------------------------------------- links that end

    def let_go(self, peer: NodeId, reference: PairedReference) -> None:
        """This link ends here: what must outlive it is kept."""
        if (unfinished := reference.end()) is None:
            self.remember(reference.link, reference.version)
        else:
            self.remnants[reference.link] = Remnant(peer, unfinished)

    def remember(self, number: int, version: int) -> None:
        """Of this link nothing is kept but its last version."""
        self._versions[number] = version
        if len(self._versions) > ENDED_MAX:
            self._versions.popitem(last=False)

    def ends_at(self, ended: PairedReference | Unfinished, version: int) -> None:
        """The peer has applied so many exchanges of this link, and no other will follow."""
        if version == ended.version + 1 and ended.under_way is not None:
            ended.taken(ended.version)
            return  # its half is what we wait for
        self._counts["exchanges_cut"] += version != ended.version and not ended.settled
        ended.taken(ended.version)
        ended.cancel()

    def make_room(self) -> None:
        """Keep what there is room for."""
        left = self.remnants.values()
        while len(left) > UNFINISHED_MAX or sum(one.unfinished.models for one in left) > self._models_max:
            self._counts["exchanges_cut"] += 1
            del self.remnants[next(iter(self.remnants))]

    # ---------------------------------------------------------------- what is said of them

    def last_word(self, peer: NodeId, number: int, now: float) -> list[Effect]:
        """What there is to say of a link that is not held."""
        remnant = self._remnant(peer, number)
        if remnant is None:
            return [Send(peer, LinkClosed(number, self._versions.get(number, UNKNOWN)))]
        remnant.said_at = now
        return [Send(peer, message) for message in remnant.unfinished.said()]

    def taken(self, peer: NodeId, number: int, seq: int) -> None:
        """The peer has applied an exchange of which it had our half."""
        if remnant := self._remnant(peer, number):
            remnant.unfinished.taken(seq)
            self._settle(remnant)

    def closed(self, peer: NodeId, message: LinkClosed, now: float) -> list[Effect] | None:
        """It lets go of a link, too; None where nothing is left of that."""
        if (remnant := self._remnant(peer, message.link)) is None:
            return None
        self.ends_at(remnant.unfinished, message.version)
        self._settle(remnant)
        return self.last_word(peer, message.link, now) if message.link in self.remnants else []

    def receive(
        self, peer: NodeId, message: Delta, now: float, value_max: float
    ) -> tuple[Exchanged | None, list[Effect]]:
        """A half of a link that is not held: perhaps one that we waited for. Raises PeerError."""
        remnant = self._remnant(peer, message.link)
        if remnant is None:
            return None, self.last_word(peer, message.link, now)
        exchanged = remnant.unfinished.receive(message, value_max)
        answer = exchanged is not None or message.seq >= remnant.unfinished.version
        self._settle(remnant)
        return exchanged, self.last_word(peer, message.link, now) if answer else []

    def _remnant(self, peer: NodeId, number: int) -> Remnant | None:
        remnant = self.remnants.get(number)
        return remnant if remnant is not None and remnant.peer == peer else None

    def _settle(self, remnant: Remnant) -> None:
        """Forget it, if both ends are known to have applied the same exchanges."""
        unfinished = remnant.unfinished
        if unfinished.settled:
            self.remnants.pop(unfinished.link, None)
            self.remember(unfinished.link, unfinished.version)
