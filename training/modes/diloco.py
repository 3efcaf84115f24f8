"""Many local steps, then one outer step: DiLoCo (Douillard et al. 2023, arXiv:2311.08105).

The rounds are all-reduce's. The outer gradient is the last agreed model less the mean of the contributions, and goes
through Nesterov momentum; all members hold the same agreed model and momentum, so the outer step is theirs alone.
A round with a member that was away or is new, and the first one unless all have begun with the same model, averages
whole models instead and begins the momentum anew: only then do all have the same again. A round comes every 50 steps
unless `every` says otherwise.

Where a mean turns against the momentum, that begins anew: the sevenfold progress that it makes of a lasting one has
gone too far then, and a run of few rounds would end there (adaptive restart: O'Donoghue and Candes 2015,
arXiv:1204.3982).

Float buffers take the mean of the contributions: they have no gradient, and momentum would make variances negative.

`diloco:P` streams (Douillard et al. 2025, arXiv:2501.18512): the model is cut into P fragments, and a round comes P
times as often with a P-th of the bytes. Round r is of fragment r mod P, with that fragment's outer step; the progress
of the others stays where it is until their turn. The number says it all, so no member keeps a schedule, and members
whose last applied round is the same hold the same agreed values of every fragment, whenever each was agreed. Where all
models are summed (above, and at the end) all fragments are. The paper's fragments are whole layers, strided; these are
contiguous in the flat model, so that all rounds cost the same bytes and a core need not know where a tensor begins.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from peerd.training.effects import Vector
from peerd.training.kernels.passes import parts
from peerd.training.mode import ModeMaker
from peerd.training.mode_settings import WEIGHTS, ModeSettings, outer_step, with_outer_step
from peerd.training.modes.allreduce import AllReduce
from peerd.training.plain_numbers import count
from peerd.transport.errors import WrongSetting
from peerd.transport.messages import RoundBegin

OUTER_LR = 0.7  # the paper's
OUTER_MOMENTUM = 0.9
FRAGMENTS_MAX = 1024


class DiLoCo(AllReduce):
    """The mode's core for one node."""

    NAME = "diloco"
    ARGUMENT = f"P with P from 1 to {FRAGMENTS_MAX}"

    TAKES = (*AllReduce.TAKES[:-1], "outer_lr", "outer_momentum")
    EXCHANGES = (WEIGHTS,)
    EVERY = 50
    OVERLAP = "delayed"
    CHOOSES = False
    DIFFERENCES = True
    _momentum: Vector | None = None

    @classmethod
    def of(cls, argument: str) -> ModeMaker | None:
        """See `ModeClass`."""
        if not argument:
            return super().of(argument)
        fragments = count(argument, FRAGMENTS_MAX)
        return partial(cls, fragments=fragments) if fragments else None

    @classmethod
    def in_one_form(cls, argument: str) -> str:
        """See `ModeClass`."""
        fragments = count(argument, FRAGMENTS_MAX)
        return str(fragments) if fragments > 1 else ""

    @classmethod
    def check(cls, argument: str, told: ModeSettings) -> None:
        """See `ModeClass`."""
        super().check(argument, told)
        outer_step(told, OUTER_LR, OUTER_MOMENTUM)
        if argument and told.overlap == "hpsgd":
            raise WrongSetting(
                "overlap hpsgd: not with diloco:P, it would roll a fragment back that has no round for long", "overlap"
            )

    @classmethod
    def in_force(cls, told: ModeSettings) -> ModeSettings:
        """See `ModeClass`."""
        return with_outer_step(super().in_force(told), OUTER_LR, OUTER_MOMENTUM)

    def __init__(self, *arguments: Any, **fragments: Any) -> None:
        super().__init__(*arguments, **fragments)
        self._lr, self._mu = outer_step(self._settings, OUTER_LR, OUTER_MOMENTUM)

    def _agree(self, mean: Vector, where: slice, begin: RoundBegin) -> Vector:
        """The outer step; a run ends with none."""
        if begin.whole or begin.final or self._agreed is None:
            self._momentum = None
            return super()._agree(mean, where, begin)
        if self._momentum is None:
            self._momentum = np.zeros_like(self._agreed)
        agreed, momentum = self._agreed[where], self._momentum[where]
        if self._mu and _turns_back(mean, momentum, self._layout.parameters - where.start):
            momentum[:] = 0.0
            self.counts["momentum_restarts"] += 1
        for part in parts(len(mean)):  # so that no array of a step on the way is as large as a model
            gradient = np.negative(mean[part])
            momentum[part] *= self._mu
            momentum[part] += gradient
            stepped = agreed[part] - self._lr * (gradient + self._mu * momentum[part])
            buffers = slice(max(0, self._layout.parameters - where.start - part.start), None)
            stepped[buffers] = mean[part][buffers] + agreed[part][buffers]
            mean[part] = stepped
        return mean


def _turns_back(progress: Vector, momentum: Vector, parameters: int) -> bool:
    """Whether the members go back where the momentum, which points against their progress so far, has carried them.

    Both are of one fragment, shape (values,), with the parameters before index `parameters`, which may lie outside.
    All must find the same: the sum is one addition after the other, which no machine and no library does otherwise.
    """
    ahead = 0.0
    for part in parts(max(0, min(parameters, len(progress)))):
        ahead += float(np.cumsum(np.multiply(progress[part], momentum[part], dtype=np.float64))[-1])
    return ahead > 0.0
