"""Whom does a newcomer ask for the swarm's model, and when again? Donors in turns, each until it is surely silent."""

from __future__ import annotations

from collections.abc import Sequence

from peerd.transport.ids import NodeId

ASK_SOON_S = 1.0  # the first request or its answer may be lost, with a connection that broke or a donor that forgot us
ASK_AGAIN_S = 10.0  # a donor from which nothing has come for so long is asked again,
ASKS_MAX = 4  # so many times; then another one is
MAKES_S = 15e-9  # what a value takes a donor before it sends any: two digests and the encoding, by one thread
SLOWEST_DONOR = 1000  # bytes a second: fewer are probes and tables, not a model

EARLY_SHARE = 0.5  # of the time between two requests: what was late on its way makes the next one seem early


class RequestLimit:
    """How often one member is shown the model: as often as an honest newcomer asks. Each time costs a copy and more."""

    def __init__(self, again_s: float = ASK_AGAIN_S) -> None:
        """A newcomer asks for the same thing again after ASK_SOON_S, and later after this."""
        self._again_s = again_s
        self._given: dict[NodeId, tuple[int, float]] = {}  # how often in a row, and when last

    def admits(self, peer: NodeId, now: float) -> bool:
        """Whether it is given one now; counted, if so."""
        self._given = {id: (count, at) for id, (count, at) in self._given.items() if now - at < ASKS_MAX * ASK_AGAIN_S}
        count, at = self._given.get(peer, (0, float("-inf")))
        if now - at < EARLY_SHARE * (ASK_SOON_S if count == 1 else self._again_s):
            return False
        self._given[peer] = count + 1, now
        return True


class DonorChoice:
    """The requests of one newcomer, from the first until it has a model."""

    def __init__(self) -> None:
        self.donor: NodeId | None = None  # who was asked last
        self.asked: set[NodeId] = set()  # a model of anybody else was not asked for; a slow donor's comes after all
        self._silent: set[NodeId] = set()  # those passed over in this turn
        self._asks = 0  # of this donor
        self._looked_at, self._received = 0.0, 0  # when it was last asked, or seen to send, and the bytes by then

    def ask(self, givers: Sequence[NodeId], received: int, now: float, values: int = 0) -> NodeId | None:
        """Return to whom a request is to be sent now; None: wait, and ask again in a second or so.

        `givers` are the live members that have a model, whom to prefer first; `received` counts all bytes that came. Of
        a model of so many `values` a donor may be silent for minutes, and a second one would send all of it, too.
        """
        if self.donor is not None and self.donor in givers:
            waited_s = now - self._looked_at
            again_s = max(ASK_AGAIN_S, MAKES_S * values / (ASKS_MAX - 1))
            if waited_s < (ASK_SOON_S if self._asks == 1 else again_s):
                return None
            if received - self._received > waited_s * SLOWEST_DONOR:
                self._looked_at, self._received = now, received
                return None
        if self.donor is not None and (self.donor not in givers or self._asks == ASKS_MAX):
            self.pass_over()
        if self.donor is None:
            if self._silent.issuperset(givers):
                self._silent.clear()
            self.donor, self._asks = next(giver for giver in givers if giver not in self._silent), 0
        self._asks += 1
        self._looked_at, self._received = now, received
        self.asked.add(self.donor)
        return self.donor

    def pass_over(self) -> None:
        """Ask another one next: this one is silent or gone."""
        if self.donor is not None:
            self._silent.add(self.donor)
        self.donor = None

    def reject(self, donor: NodeId) -> None:
        """What it sent was no model, or it refuses: nothing more of it counts in this turn."""
        self.asked.discard(donor)
        self._silent.add(donor)
        if self.donor == donor:
            self.donor = None
