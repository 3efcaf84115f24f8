"""The life of a mode with partners: it decides on each copy, is never silent for long, and ends its run with a flush.

What a partner is, how one comes and goes, and what an exchange with it is are the mode's own: training/modes/gossip.py
(both ways at once) and training/one_way/core.py.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from peerd.training.codecs.difference import norm_of_difference
from peerd.training.codecs.vector import GAIN_MAX, Gain, Layout
from peerd.training.effects import Effect, Log, Proceed, StepReport, Vector
from peerd.training.flush import FLUSH_CODEC, FLUSH_TOLERANCE, WHILE_ONE_TRAINS, Progress
from peerd.training.mode import LinkedMode, LinkStatus
from peerd.training.mode_settings import ModeSettings
from peerd.training.model.quiet import EVERY_STEP, Quiet
from peerd.training.sample import sample_of
from peerd.training.scratch import Scratch
from peerd.training.trigger import SILENCE_MAX_S, WAKE_AFTER_S, parse_trigger
from peerd.training.trigger_check import PartnerState, TriggerPolicy, distance_from_mean

P = TypeVar("P", bound=PartnerState)


class PartneredMode(LinkedMode, Generic[P]):
    """A core without what its partners are."""

    barrier = 0
    tolerance = FLUSH_TOLERANCE

    def __init__(
        self,
        layout: Layout,
        rng: random.Random,
        settings: ModeSettings,
        values: Callable[[], Vector],
        counts: Counter[str] | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter() if counts is None else counts
        self.deadline = float("inf")
        self.gain_limit = GAIN_MAX  # of an exchange while this node trains
        self.drained = False  # at the end of a run: every partner has what this node had not yet sent
        self.settled = False  # and all models agree
        self._one_trains = False  # of the partners, after our own run has ended
        self._layout = layout
        self._settings = settings
        self._values = values
        self._sample = sample_of(layout)
        self._scratch = Scratch()
        self._gains: dict[str, Gain] = {}
        self._seen: Vector | None = None  # the model with what this event has corrected
        self._lent: list[Vector] = []  # corrections in the effects of this event: applied by the next one
        self._report = StepReport(0, 0.0, 1.0, published=False, finishing=False)
        self._policy: TriggerPolicy[P] = TriggerPolicy(layout, rng, parse_trigger(settings.trigger), self.counts)

    # ---------------------------------------------------------------- what a mode adds

    def _held(self) -> list[P]:
        """All partners, absent ones too; a list of its own, as `peerd status` asks for it from another thread."""
        raise NotImplementedError

    def _live(self) -> list[P]:
        """Those who are alive."""
        return self._held()

    def _idle(self) -> list[P]:
        """Partners that may begin an exchange now."""
        raise NotImplementedError

    def _codec(self, partner: P) -> str:
        """What an exchange with it is encoded by, while this node trains."""
        return self._settings.codec

    def _begin(self, partner: P, values: Vector, reason: str, now: float) -> list[Effect]:
        """The trigger has found a reason for an exchange."""
        raise NotImplementedError

    def _say_again(self, now: float) -> list[Effect]:
        """What has had no answer for long."""
        raise NotImplementedError

    def _say_again_at(self, now: float) -> float:
        """When that will be so."""
        raise NotImplementedError

    def _end_run(self, now: float) -> list[Effect]:
        """The run has just ended: what others must hear."""
        return []

    def _flush(self, now: float) -> list[Effect]:
        """At a run's end exchange with whoever does not yet agree; before it nothing."""
        raise NotImplementedError

    def works_in_place(self, spares: Callable[[], list[Vector]]) -> bool:
        """See `Mode`."""
        self._scratch.spares = spares
        return True

    # ---------------------------------------------------------------- events

    def on_step(self, report: StepReport, now: float) -> list[Effect]:
        """Decide on the copy that came, and perhaps begin an exchange."""
        self._reclaim()
        ends = report.finishing and not self._report.finishing
        begins = self._report.finishing and not report.finishing
        stays = not (report.published or report.finishing or self._report.finishing or self.drained)
        self._report = report
        if stays:
            return []  # of the model as it was nothing else is due
        if report.published:
            self._shifted(report.change)
        if report.finishing:
            said = self._end_run(now) if ends else []
            effects = said + self._flush(now)
            self._rearm(now)
            return effects
        if begins or self.drained:  # a new run follows a flush, perhaps one that it broke off
            self.drained = self.settled = False
            for partner in self._held():
                partner.flushed, partner.progress = False, Progress()
        due = self._policy.due(report, now) if report.published else None
        effects = self._decide(due, now) if due is not None else []
        self._rearm(now)
        return effects

    def on_timer(self, now: float) -> list[Effect]:
        """Never silence: repeat what has had no answer for long, and send what the trigger calls overdue."""
        self._reclaim()
        effects = self._say_again(now)
        if not self._report.finishing:
            for partner in self._idle():
                if now - _silent_since(partner) >= SILENCE_MAX_S:
                    partner.declined_at = now
                    effects += self._decide(partner, now)
        self._rearm(now)
        return effects

    # ---------------------------------------------------------------- what there is to see

    def links(self) -> list[LinkStatus]:
        """One row a live partner."""
        return [self._link_status(partner) for partner in self._live()]

    def _link_status(self, partner: P) -> LinkStatus:
        codec = FLUSH_CODEC if self._report.finishing else self._codec(partner)
        gain = min(self._gains.get(codec, Gain()).value, self.gain_limit)
        return LinkStatus(partner.peer, partner.exchanges, partner.distance, gain, partner.last_reason, codec)

    @property
    def quiet(self) -> Quiet:
        """By the partner drawn. After a run's end each step is news: another one has begun."""
        if self._report.finishing or self.drained:
            return EVERY_STEP
        return self._policy.quiet(self._report)

    def end(self) -> Vector | None:
        """What partners remember only says who knows what of the model."""
        return None

    @property
    def consensus_distance(self) -> float:
        """See `distance_from_mean`."""
        return distance_from_mean(self._live())

    # ---------------------------------------------------------------- deciding

    def _decide(self, partner: P, now: float) -> list[Effect]:
        values = self._current()
        reason = self._policy.reason(partner, values, self._report, now)
        if reason is None:
            return []
        effects = self._begin(partner, values, reason, now)
        self.counts[f"trigger_{reason}"] += bool(effects)
        return effects

    def _gain(self, codec: str) -> Gain:
        return self._gains.setdefault(codec, Gain())

    def _rearm(self, now: float) -> None:
        """The end of an event: draw the next partner, and say when something is due."""
        idle = self._idle()
        self._policy.draw(idle)
        due_at = self._say_again_at(now)
        if idle and not self._report.finishing:
            due_at = min(due_at, min(map(_silent_since, idle)) + WAKE_AFTER_S)
        self.deadline = max(now, due_at)

    # ---------------------------------------------------------------- the model

    def _current(self) -> Vector:
        """With what this event has already corrected."""
        values = self._values()
        if not self._lent:
            return values
        if self._seen is None:
            self._seen = self._scratch.take_for_event(values)
        np.add(values, self._lent[0], out=self._seen)
        for correction in self._lent[1:]:
            np.add(self._seen, correction, out=self._seen)
        return self._seen

    def _lend(self, correction: Vector, but: P | None = None, length: float | None = None) -> None:
        """The correction leaves in an effect: the model then differs more from what all partners but this one know.

        `length` is its norm over the parameters, if that is known.
        """
        self._shifted(norm_of_difference(correction[: self._layout.parameters]) if length is None else length, but)
        self._lent.append(correction)

    def _shifted(self, by: float, but: P | None = None) -> None:
        """The model has moved by so much: by the triangle inequality a bound, exact for the partner decided on."""
        for partner in self._held():
            if partner is not but:
                partner.moved += by

    def _reclaim(self) -> None:
        """Take back the corrections of the last event, which its shell has applied by now."""
        for correction in self._lent:
            self._scratch.give(correction)
        self._lent.clear()
        if self._seen is not None:
            self._scratch.give(self._seen)
            self._seen = None
        self._scratch.event_over()

    # ---------------------------------------------------------------- the final flush

    def _note_progress(self, partner: P, apart: float) -> None:
        """An exchange with it is over, before which its model was so far from ours."""
        if not self._report.finishing:
            partner.progress = Progress()
        elif partner.peer_finishing:  # who still trains is waited for
            partner.progress.note(apart, agree=self._is_close(partner))

    def _agrees(self, partner: P) -> bool:
        """Or never will: one that lies, or that may be moved no further."""
        return (partner.flushed and partner.progress.is_stuck) or self._is_close(partner)

    @property
    def _tolerance(self) -> float:
        return self.tolerance * (WHILE_ONE_TRAINS if self._one_trains else 1.0)

    def _is_close(self, partner: P) -> bool:
        close = partner.distance + partner.moved <= self._tolerance * partner.anchor_norm
        return partner.flushed and partner.peer_finishing and close

    def _proceed(self, partners: list[P], *, expects_more: bool, under_way: bool) -> list[Effect]:
        """Say when all have what this node held, unless it expects more of them, and when all agree."""
        effects: list[Effect] = []
        if not self.drained and not expects_more and all(partner.flushed for partner in partners):
            self.drained = True
            effects.append(Proceed(settled=False))
        if not self.settled and self.drained and not under_way and all(map(self._agrees, partners)):
            self.settled = True
            effects += [*self._tell_who_is_apart(partners), Proceed(settled=True)]
        return effects

    def _tell_who_is_apart(self, partners: list[P]) -> list[Effect]:
        apart = sorted(partner.peer for partner in partners if not self._is_close(partner))
        if not apart:
            return []
        return [Log(f"this run has ended though models differ: {', '.join(apart)} came no closer")]


def _silent_since(partner: PartnerState) -> float:
    exchanged, declined = partner.last_exchange, partner.declined_at
    return exchanged if exchanged > declined else declined
