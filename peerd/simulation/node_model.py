"""How does a simulated node come by its first model, and what does it know of its model between two copies?

The first is found in virtual time as peerd/daemon/catch_up.py does. Later a node has the last copy, every correction
since, and who moved it: own steps and what others made of the model are kept apart, each by the weight that the model
had then, so that a run can say how far exchanges have moved the mean of a swarm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

import numpy as np

from peerd.node.donors import ASK_SOON_S, SLOWEST_DONOR, DonorChoice
from peerd.node.meta import FetchFrom, OwnModel, whose_model
from peerd.node.second_opinion import OWN, SecondOpinion
from peerd.simulation.checkers import Watched
from peerd.simulation.problems import Learner
from peerd.training.codecs import vector
from peerd.training.codecs.difference import digest, digest_of_chunks
from peerd.training.effects import Vector
from peerd.training.sketch import sketch
from peerd.transport.errors import PeerError
from peerd.transport.ids import Address, NodeId
from peerd.transport.messages import Message, ModelEqual, ModelPromise, ModelRequest, ModelSketch, ModelSnapshot

LOOK_AGAIN_S = 1.0  # how often a newcomer looks whether somebody has a model

Answer = ModelPromise | ModelSketch | ModelSnapshot | ModelEqual


class Newcomer(Watched, Protocol):
    """A node that looks for a model, or did."""

    @property
    def now(self) -> float:
        """What the node believes the time is."""
        ...

    def later(self, delay_s: float, event: Callable[[], None]) -> None:
        """In this life only; not before it is resumed."""
        ...

    def send(self, peer: NodeId, message: Message) -> None:
        """To a member that lives."""
        ...

    def arriving(self, peer: NodeId) -> bool:
        """Whether bytes come from there."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Offered:
    """A model, and when it came."""

    donor: NodeId
    values: Vector
    step: int
    seed: bytes
    at: float


class FirstModel:
    """The search of one node, from its first look until it has a model."""

    def __init__(
        self,
        node: Newcomer,
        learner: Learner,
        rng: Random,
        *,
        seeds: Sequence[Address],
        taken: Callable[[Vector | None, int], None],
    ) -> None:
        """`taken` is told the model and its step; None: it goes first, with its own."""
        self._node = node
        self._learner = learner
        self._seeds = seeds
        self._taken = taken
        self._choice, self._opinion = DonorChoice(), SecondOpinion(rng)
        self._givers: Sequence[NodeId] = ()
        self._offered: _Offered | None = None  # what the others are asked about
        self._arrived = 0  # bytes of it: a second in which it is on its way counts as fast enough
        self._has = False

    def seek(self) -> None:
        """Look whose model this node starts from, until it has one."""
        if self._has:
            return
        match whose_model(self._node.membership.members, self._node.id, seeds=self._seeds):
            case OwnModel():
                self._take(None, 0)
                return
            case FetchFrom(givers):
                self._givers = givers
                if (asked := self._choice.donor) in givers and self._node.arriving(asked):
                    self._arrived += round(2 * SLOWEST_DONOR * LOOK_AGAIN_S)
                asks = self._opinion.can_ask(self._node.now)
                if asks and (donor := self._choice.ask(givers, self._arrived, self._node.now)) is not None:
                    self._opinion.donor_asked(donor)
                    self._node.send(donor, ModelRequest(digest(self._learner.values(), self._learner.layout)))
        self._node.later(LOOK_AGAIN_S, self.seek)

    def receive(self, source: NodeId, message: Answer) -> None:
        """What a donor, or who is asked about its model, says. Raises PeerError."""
        if isinstance(message, ModelSketch):
            self._opinion.heard(source, message)
            self._judge(self._offered)
        elif not self._has and source in self._choice.asked:
            if isinstance(message, ModelPromise):
                self._ask_others(source, message.digest)
            else:
                self._hear_model(source, message)

    def _ask_others(self, donor: NodeId, promise: bytes) -> None:
        for witness, request in self._opinion.ask(donor, promise, self._givers, self._node.now):
            self._node.send(witness, request)

    def _hear_model(self, source: NodeId, message: ModelSnapshot | ModelEqual) -> None:
        values, promise = self._learner.values().copy(), OWN
        if isinstance(message, ModelSnapshot):
            vector.decode(message.codec, self._learner.layout, message.chunks, values)
            promise = digest_of_chunks(message.chunks)
        else:
            self._ask_others(source, promise)
        try:
            seed = self._opinion.seed(source, promise)
        except PeerError:
            self._choice.reject(source)
            return
        self._offered = _Offered(source, values, message.step, seed, self._node.now)
        self._judge(self._offered)

    def _judge(self, offered: _Offered | None) -> None:
        """Take the model that came, if those who were asked about it find it the swarm's."""
        if self._has or offered is None or offered is not self._offered:
            return
        if self._opinion.waits(offered.donor, offered.at, self._node.now, len(offered.values)):
            self._node.later(ASK_SOON_S, lambda: self._judge(offered))
            return
        self._offered = None
        if self._opinion.accepts(offered.donor, sketch(offered.values, self._learner.layout, offered.seed)):
            self._take(offered.values, offered.step)
        else:
            self._choice.reject(offered.donor)

    def _take(self, values: Vector | None, step: int) -> None:
        self._has = True
        self._taken(values, step)


class LearnersModel:
    """The learner's last copy and all corrections since: what production shares between trainer and daemon."""

    def __init__(self, learner: Learner, weight: Callable[[], float]) -> None:
        """`weight`: that of the model in what the swarm keeps, of modes that do."""
        self.step = 0
        self.kept = learner.publish()
        self.put_in = self.kept.astype(np.float64)  # to the swarm's sum: the start, and own steps by their weight
        self._weight = weight
        self.gradient: Vector = np.empty(0, self.kept.dtype)
        self._learner = learner
        self._lent = np.empty_like(self.kept)

    def values(self) -> Vector:
        """See `Model`."""
        np.copyto(self._lent, self.kept)
        return self._lent

    def look(self) -> Vector:
        """See `Model`."""
        values = self.kept.view()
        values.flags.writeable = False
        return values

    def spares(self) -> list[Vector]:
        """See `Model`; nothing is shared."""
        return []

    def add(self, correction: Vector) -> None:
        """See `Model`."""
        self.kept += correction

    def published(self, copy: int, step: int, *, apart: bool) -> None:
        """See `Model`; there is one copy."""
        self.keep(self._learner.publish(), step)

    def keep(self, values: Vector, step: int) -> None:
        """`values` has every correction, and own steps that the last copy had not."""
        self.put_in += self._weight() * (values - self.kept)
        self.kept, self.step = values, step

    def received(self) -> Vector:
        """What others have put into w x, and taken out of it."""
        return self._weight() * self.kept - self.put_in

    def load(self, values: Vector, step: int) -> int:
        """See `Model`."""
        self._learner.load(values)
        self.kept, self.step = self._learner.publish(), step
        return 0
