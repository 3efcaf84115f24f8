"""All members step by one gradient, the mean of theirs, and so hold one model: an all-reduce of gradients.

The rounds are all-reduce's. A round may begin while backward passes are under way: a part of a gradient is summed when
it is there. A trainer that has all of its gradient waits with it; the round's mean, weighted by samples, is what every
optimizer steps by. Members that were in the same rounds hold the same model and optimizer state, to the bit.
Those who were not (a newcomer, one that was away or was restarted, both sides of a healed partition) have no mean to
take part in: then a round carries the whole model and optimizer state of one of those who hold the same, to which the
others add zeros, so that it comes to all as the same bits. Who had another model takes these over, and its gradient,
which is of the other model, counts nothing in the round that follows.

Float buffers are those of the first member whose gradient counts (torch's DDP has rank 0's). A gradient that is not
finite makes the mean so for all: every scaler of mixed precision skips the step and backs off alike.

A lossy codec adds what a member's encoding drops to its next gradient, but for bfloat16, which drops only bits.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

import numpy as np

from peerd.training.codecs.difference import norm_of_sum
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Averaged, Become, Effect, Proceed, StepReport, Vector
from peerd.training.kernels.passes import is_finite, mean
from peerd.training.mode import LinkStatus, Mode, ModeClass, not_finite
from peerd.training.mode_settings import GRADIENTS, ModeSettings
from peerd.training.model.quiet import Quiet
from peerd.training.rounds.attempt import EXACT_CODEC
from peerd.training.rounds.lengths import shortening
from peerd.training.rounds.member import WHOLE, Committed, Offer, Outcome, Rounds, Withdrawn
from peerd.training.rounds.weights import scales
from peerd.transport.ids import NodeId
from peerd.transport.messages import NO_MEAN, Connected, Message, RoundBegin, RoundPhase

AGAIN_S = 1.0  # after a model could not be given, for it is not finite
WITHOUT_FEEDBACK = (EXACT_CODEC, "bfloat16")


class GradientAllReduce(ModeClass):
    """The mode's core for one node."""

    NAME = "allreduce"
    TAKES = ("codec", "topology", "min_peers", "exchange")
    EXCHANGES: ClassVar[tuple[str, ...]] = (GRADIENTS,)
    SHARES_OPTIMIZER = True

    def __init__(
        self, me: NodeId, layout: Layout, rng: random.Random, settings: ModeSettings, values: Callable[[], Vector]
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.deadline = math.inf
        self.barrier = 0
        self._me = me
        self._layout = layout
        self._values = values
        self._feeds_back = settings.codec not in WITHOUT_FEEDBACK
        self._robust = settings.robust
        self._make: Callable[[], Rounds] = lambda: Rounds(
            me, layout, rng, settings, self._contribution, self.counts, differences=True, fragments=1
        )
        self._rounds = self._make()
        self._alive: frozenset[NodeId] = frozenset()
        self._gradient: Vector | None = None  # the trainer's, lent from its first part on while it waits with it
        self._first = 0  # from here on its parameters' are there
        self._is_whole = False  # all is, what follows them, too
        self._tail: Vector = np.empty(0)  # which is this, as the trainer has it
        self._squares = 0.0  # of what would be contributed of what is there
        self._summand: _Summand | None = None  # of the last attempt at a round of gradients
        self._offer = Offer()
        self._outdated: int | None = None  # the trainer may not have the model yet that it took over, as of this step
        self._basis = 0  # the attempt that we agreed in last
        self._averaged_at = -1  # of which step of our trainer's the last mean was
        self._lost: Vector | None = None  # what our encoding dropped, to be contributed
        self._again_at = math.inf  # when to come to a round again, after we had to withdraw
        self._partners: list[NodeId] = []
        self._distance = 0.0

    def succeeds(self, last: Mode) -> None:
        """See `Mode`: all go on from the model that they hold together, so each one's gradient counts."""
        if isinstance(last, GradientAllReduce):
            self._basis, self._outdated, self._averaged_at = last._basis, last._outdated, last._averaged_at
            self._rounds.go_on_from(last._rounds)

    # ---------------------------------------------------------------- events

    def on_gradient(
        self, gradient: Vector, samples: float, step: int, now: float, rate: float, *, anew: bool = False
    ) -> list[Effect]:
        """See `Mode`."""
        return self.on_part(gradient, 0, samples, step, now, anew=anew)

    def on_part(
        self, gradient: Vector, first: int, samples: float, step: int, now: float, *, anew: bool
    ) -> list[Effect]:
        """See `Mode`."""
        effects = self._anew(now) if self._rounds.finished else []  # a new run, of whatever model
        is_new, cut = anew or self._is_whole or self._gradient is None, self._layout.parameters
        if is_new:
            self._gradient, self._first, self._is_whole, self._squares = gradient, cut, False, 0.0
            self._offer = Offer(step, samples if 0 < samples < math.inf else 1.0)
            if self._outdated is not None:
                self._offer = Offer(self._outdated, weight=0.0)
        self._see(first)
        if first == 0:
            self._tail, self._is_whole = gradient[cut:].copy(), True
        fits = math.isfinite(self._squares) and (first > 0 or is_finite(self._tail))
        if not fits and self._offer.weight > 0:
            self._offer = replace(self._offer, nonfinite=True)
        if self._rounds.phase == RoundPhase.IDLE:
            return effects + self._perform(self._come(now), now)
        self._measure()
        self._fill()
        if is_new:
            return effects + self._perform(self._rounds.void(now, self._offer, self._there), now)
        return effects + self._perform(self._rounds.come(self._there, now, self._offer), now)

    def _see(self, first: int) -> None:
        """The values from here on are there, too."""
        assert self._gradient is not None, "there is a part of it"
        part, self._first = slice(min(first, self._first), self._first), min(first, self._first)
        length = norm_of_sum(self._gradient[part], None if self._lost is None else self._lost[part])
        self._squares += length * length

    @property
    def _there(self) -> tuple[int, int]:
        return WHOLE if self._is_whole else (self._first, self._layout.parameters)

    def on_trainer_lost(self, now: float) -> list[Effect]:
        """See `Mode`. One that has ended is not lost."""
        return [] if self._rounds.finished else self._anew(now)

    def _anew(self, now: float) -> list[Effect]:
        """To the others this member has just restarted: the model of the furthest comes to it."""
        self._gradient, self._lost, self._basis, self._again_at = None, None, 0, math.inf
        self._summand, self._outdated, self._averaged_at = None, None, -1
        self._offer = Offer()
        last, self._rounds = self._rounds, self._make()
        self._rounds.succeeds(last)
        return self._perform(self._rounds.on_peers(self._alive, now), now)

    def on_step(self, report: StepReport, now: float) -> list[Effect]:
        """A copy that was asked for is here, or the run is over; of other steps nothing follows."""
        outcomes: list[Outcome] = []
        if report.finishing and not self._rounds.finished:
            self._gradient = None
            self._offer = Offer(report.step, copied=True)  # no later step will come
            if report.step <= self._averaged_at:  # nor has that by the last mean
                self._basis = 0
            outcomes += [Proceed(settled=False), *self._rounds.finish(True, now, self._offer)]
        elif report.published and self._gradient is not None:
            outcomes += self._rounds.copied(now)
        return self._perform(outcomes, now)

    def on_message(self, sender: NodeId, message: Message | Connected, now: float) -> list[Effect]:
        """One message of a round."""
        return self._perform(self._rounds.on_message(sender, message, now), now)

    def on_peers(self, alive: frozenset[NodeId], now: float) -> list[Effect]:
        """Members came or went."""
        self._alive = alive
        return self._perform(self._rounds.on_peers(alive, now), now)

    def on_unreached(self, peer: NodeId, now: float) -> list[Effect]:
        """Rounds may have to go on without one of the two."""
        return self._perform(self._rounds.on_unreached(peer, now), now)

    def on_timer(self, now: float) -> list[Effect]:
        """Repeat what waits."""
        outcomes = self._come(now) if now >= self._again_at else []
        return self._perform(outcomes + self._rounds.on_timer(now), now)

    # ---------------------------------------------------------------- what there is to see

    def links(self) -> list[LinkStatus]:
        """One row a member of the last round."""
        share, said = 1 / (1 + len(self._partners)), f"round {self._rounds.round}"
        return [LinkStatus(peer, self.counts["rounds"], self._distance, share, said) for peer in self._partners]

    @property
    def quiet(self) -> Quiet:
        """No step is news: what the swarm must know it hears before."""
        return Quiet()

    def end(self) -> Vector | None:
        """Nothing is missing in the model."""
        return None

    @property
    def under_way(self) -> bool:
        """Whether an attempt at a round is."""
        return self._rounds.phase in (RoundPhase.RUNNING, RoundPhase.HELD)

    @property
    def consensus_distance(self) -> float:
        """All hold one model."""
        return 0.0

    # ---------------------------------------------------------------- contributing

    def _come(self, now: float) -> list[Outcome]:
        self._again_at = math.inf
        if self._gradient is None or self._rounds.phase != RoundPhase.IDLE:
            return []
        self._measure()
        return self._rounds.reach(now, self._offer, self._there)

    def _measure(self) -> None:
        """The report that the result is held says how long our part of it was."""
        if self._robust and self._is_whole:
            counts = self._offer.weight > 0 and not self._offer.nonfinite
            self._rounds.measured((math.sqrt(self._squares) if counts else 0.0, 0.0))

    def _contribution(self, begin: RoundBegin, where: slice) -> Vector:
        """This member's summand, as far as it is there.

        A gradient that counts as it stands is lent: what it would be copied for is a pass through memory, and room.
        Its tail is what the round asks for then, until the mean has come.
        """
        self._summand = None
        if begin.whole:
            gives = begin.source == self._me and len(begin.roster) > 1
            return self._values().copy() if gives else np.full(self._layout.total, -0.0, self._values().dtype)
        assert self._gradient is not None, "nobody is in a round without a gradient"
        rank, parameters = begin.roster.index(self._me), self._layout.parameters
        scale = 0.0 if begin.nonfinite else scales(begin.weights)[rank]
        lends = scale == 1 and self._lost is None
        values = self._gradient if lends else np.empty_like(self._gradient)
        gives_buffers = rank == _first(begin.weights) and not begin.nonfinite
        self._summand = _Summand(
            values, scale, parameters, lends=lends, counts=not begin.nonfinite, buffers=gives_buffers
        )
        self._fill()
        given = values.view()
        given.flags.writeable = not lends
        return given

    def _fill(self) -> None:
        """Make of what has come what is summed. What adds nothing is -0.0, which leaves the sign of every zero."""
        summand, gradient, parameters = self._summand, self._gradient, self._layout.parameters
        if summand is None or gradient is None:
            return
        part, summand.first = slice(self._first, summand.first), self._first
        if summand.scale == 0 or self._offer.nonfinite:  # no mean comes of what is not, which would stop the sum
            summand.values[part] = -0.0
        elif not summand.lends:
            np.multiply(gradient[part], gradient.dtype.type(summand.scale), out=summand.values[part])
        if self._lost is not None and summand.counts and not self._offer.nonfinite:
            summand.values[part] += self._lost[part]
        if not self._is_whole:
            return
        buffers, tail = self._layout.total - self._layout.states - parameters, summand.values[parameters:]
        tail[:] = -0.0
        if summand.buffers and not self._offer.nonfinite:
            tail[:buffers] = self._tail[:buffers]
        if summand.scale > 0:
            tail[buffers:] = self._tail[buffers:]

    # ---------------------------------------------------------------- what a round brings

    def _perform(self, outcomes: list[Outcome], now: float) -> list[Effect]:
        effects: list[Effect] = []
        waiting = list(outcomes)
        while waiting:
            match outcome := waiting.pop(0):
                case Committed():
                    brought, more = self._on_committed(outcome, now)
                    effects += brought
                    waiting += more
                case Withdrawn():
                    waiting += self._on_withdrawn(now)
                case _:
                    effects.append(outcome)
        self.deadline = max(now, min(self._rounds.deadline(), self._again_at))
        return effects

    def _on_committed(self, committed: Committed, now: float) -> tuple[list[Effect], list[Outcome]]:
        begin = committed.begin
        effects: list[Effect] = []
        if begin.whole and begin.source != self._me and (begin.basis == 0 or begin.basis != self._basis):
            effects += self._take_over(committed.mean, begin.step)
        # who has ended takes no step by this mean
        self._basis = begin.attempt if begin.whole or self._gradient is not None else 0
        self._partners = [peer for peer in begin.roster if peer != self._me]
        if not begin.whole:  # a trainer that was told to end waits for no mean
            return ([Averaged(self._mean(committed))] if self._gradient is not None else []), []
        if begin.final and self._rounds.finished:
            effects.append(Proceed(settled=True))
        return effects, self._come(now)

    def _take_over(self, model: Vector, step: int) -> list[Effect]:
        """Unless it is our own already, as when all have just started from one: our copy says so until we step."""
        mine, states = self._values(), slice(self._layout.total - self._layout.states, None)
        same = all(np.array_equal(mine[where], model[where]) for where in (slice(self._layout.parameters), states))
        if same and self._basis == 0 and not self._rounds.finished:
            return []
        self._lost = None
        self._offer, self._outdated = Offer(step, weight=0.0), step
        self.counts["models_taken_over"] += 1
        return [Become(model, step)]

    def _mean(self, committed: Committed) -> Vector:
        """What the trainer goes on with, from the sum, put where its gradient was."""
        begin, summed, gradient = committed.begin, committed.mean, self._gradient
        assert gradient is not None, "nobody is in a round without a gradient"
        self._averaged_at = self._offer.step
        self._gradient = self._summand = self._outdated = None
        self._offer = Offer()
        parameters = self._layout.parameters
        if committed.limit == NO_MEAN:
            self.counts["gradients_not_finite"] += 1
            gradient[:parameters] = np.nan  # where it has any: the flags are its own
            gradient[parameters:] = self._tail
            return gradient
        if self._feeds_back:
            self._lost = committed.lost
        shares = scales(begin.weights)
        length, apart = mean(gradient[:parameters], summed[:parameters], sum(shares))
        gradient[parameters:] = summed[parameters:]
        self._distance = math.sqrt(apart)
        limit = committed.limit or math.inf
        if (length := math.sqrt(length)) > limit:
            gradient[:parameters] *= shortening(limit, length)
            self.counts["rounds_shortened"] += 1
        return gradient

    def _on_withdrawn(self, now: float) -> list[Outcome]:
        """Finite gradients have a sum that is not; or this member's model is not finite, and nobody can have it."""
        order = self._rounds.order
        if order is not None and order.whole:
            self._again_at = now + AGAIN_S
            return [*not_finite(self.counts)]
        self._offer = replace(self._offer, nonfinite=True)
        return self._come(now)


@dataclass(slots=True, eq=False)
class _Summand:
    """What one attempt at a round sums of this member's, made as its gradient comes."""

    values: Vector
    scale: float
    first: int  # from here on it is made
    _: KW_ONLY
    lends: bool  # it is the gradient itself
    counts: bool  # what encoding dropped is added
    buffers: bool  # the float buffers are this member's


def _first(weights: tuple[float, ...]) -> int:
    """The rank whose buffers all take over."""
    return next((rank for rank, weight in enumerate(weights) if weight > 0), 0)
