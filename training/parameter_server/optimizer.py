"""How does a shard's server step its weights by a gradient? SGD and AdamW as torch defines them, in numpy.

The daemon needs no torch for it, and every formula is torch.optim's own: a swarm in hardsync makes the steps of one
trainer that has the batch of all. What an optimizer remembers is `rows` vectors as long as the shard's parameters. It
travels behind the weights wherever they go, so it outlives its server as they do. The number of steps is the shard's
clock. Float buffers have no gradient: by how much they moved is added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from peerd.training.codecs.difference import norm_of_difference
from peerd.training.effects import Vector
from peerd.training.plain_numbers import number
from peerd.transport.errors import PeerError, wrong

CLIP_EPS = 1e-6  # torch's
RATE_MAX = 1e3
"""Of a learning rate that a peer may say."""
DIFFERENCE = -1.0
"""As a push's rate: it is no gradient, but by how much a step moved the model."""
SLACK = 1e-15
"""Of a first moment whose square float32 cannot hold; far below any epsilon."""


@dataclass(frozen=True, slots=True)
class Sgd:
    """torch.optim.SGD with dampening 0."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    clip: float = 0.0

    ADAPTIVE: ClassVar[bool] = False
    """Whether a step is as long as the rate says, however long the gradient."""

    def __post_init__(self) -> None:
        """Raises UserError."""
        _share("momentum", self.momentum)
        _positive("weight_decay", self.weight_decay)
        _positive("clip", self.clip)
        if self.nesterov and not self.momentum:
            raise wrong("server_optimizer", "nesterov needs a momentum")

    @property
    def rows(self) -> int:
        """Vectors that it remembers."""
        return 1 if self.momentum else 0

    def step(self, weights: Vector, gradient: Vector, state: Vector, rate: float, number: int) -> None:
        """Step `weights`, shape (n,), by `gradient`, of that shape, and `state`, shape (rows, n), in place."""
        if self.weight_decay:
            gradient = gradient + self.weight_decay * weights
        if self.momentum:
            state[0] *= self.momentum
            state[0] += gradient
            gradient = gradient + self.momentum * state[0] if self.nesterov else state[0]
        weights -= rate * gradient

    def is_possible(self, state: Vector) -> bool:
        """Whether gradients could have made this state."""
        return bool(np.isfinite(state).all())


@dataclass(frozen=True, slots=True)
class AdamW:
    """torch.optim.AdamW without amsgrad (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip: float = 0.0

    ADAPTIVE: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raises UserError."""
        _share("beta1", self.beta1)
        _share("beta2", self.beta2)
        _positive("eps", self.eps)
        _positive("weight_decay", self.weight_decay)
        _positive("clip", self.clip)
        if not self.eps:
            raise wrong("server_optimizer", "eps=0 makes no number of a weight without a gradient")
        if not self.beta1 * self.beta1 < self.beta2:
            raise wrong("server_optimizer", "the square of beta1 must be below beta2, or one gradient makes any step")

    @property
    def rows(self) -> int:
        """See `Sgd`."""
        return 2

    def step(self, weights: Vector, gradient: Vector, state: Vector, rate: float, number: int) -> None:
        """See `Sgd`; this is step `number`, the first is 1."""
        mean, square = state
        if self.weight_decay:
            weights *= 1 - rate * self.weight_decay
        mean += (1 - self.beta1) * (gradient - mean)
        square *= self.beta2
        square += (1 - self.beta2) * gradient * gradient
        spread = np.sqrt(square)
        spread /= math.sqrt(1 - self.beta2**number)
        spread += self.eps
        weights -= rate / (1 - self.beta1**number) * (mean / spread)

    def is_possible(self, state: Vector) -> bool:
        """By Cauchy and Schwarz no gradients make a mean larger than this share of the root of their mean square."""
        mean, square = state
        if not (np.isfinite(state).all() and (square >= 0).all()):
            return False
        most = (1 - self.beta1) / math.sqrt((1 - self.beta2) * (1 - self.beta1 * self.beta1 / self.beta2))
        return bool((np.abs(mean) <= 1.01 * most * np.sqrt(square) + SLACK).all())


Optimizer = Sgd | AdamW


def clip(optimizer: Optimizer, gradient: Vector) -> None:
    """Shorten `gradient`, shape (n,), to the length `clip` in place, if that is above 0: torch's clip_grad_norm_."""
    if optimizer.clip:
        gradient *= min(1.0, optimizer.clip / (norm_of_difference(gradient) + CLIP_EPS))


def check_rate(rate: float, optimizer: Optimizer | None) -> None:
    """Of a push to a server that has this optimizer, or none. Raises PeerError."""
    if optimizer is None and rate != DIFFERENCE:
        raise PeerError(f"a gradient of rate {rate:g} to a server of steps")
    if optimizer is not None and not 0 <= rate <= RATE_MAX:
        raise PeerError(f"a learning rate of {rate:g} is not from 0 to {RATE_MAX:g}")


OPTIMIZERS: dict[str, type[Sgd] | type[AdamW]] = {"sgd": Sgd, "adamw": AdamW}


def parse_optimizer(text: str) -> Optimizer:
    """NAME, or NAME:KEY=VALUE,KEY=VALUE. Raises UserError."""
    name, _, options = text.partition(":")
    if name not in OPTIMIZERS:
        raise wrong("server_optimizer", f"{name[:40]!r} is not one of {', '.join(OPTIMIZERS)}")
    known = {field.name: field.default for field in fields(OPTIMIZERS[name])}
    given: dict[str, Any] = {}
    for option in options.split(",") if options else []:
        key, _, value = option.partition("=")
        if key not in known:
            raise wrong("server_optimizer", f"{name} has no {key[:40]!r}; it has {', '.join(known)}")
        given[key] = _truth(key, value) if isinstance(known[key], bool) else _number(key, value)
    return OPTIMIZERS[name](**given)


def text_of(optimizer: Optimizer) -> str:
    """How all would write it."""
    name = next(name for name, kind in OPTIMIZERS.items() if isinstance(optimizer, kind))
    values = {field.name: (getattr(optimizer, field.name), field.default) for field in fields(optimizer)}
    given = [f"{key}={str(value).lower()}" for key, (value, usual) in values.items() if value != usual]
    return f"{name}:{','.join(given)}" if given else name


def _number(key: str, text: str) -> float:
    try:
        return number(text)
    except ValueError:
        raise wrong("server_optimizer", f"{key}={text[:40]} is not a number") from None


def _truth(key: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise wrong("server_optimizer", f"{key}={text[:40]} is neither true nor false")
    return text == "true"


def _share(key: str, value: float) -> None:
    if not 0 <= value < 1:
        raise wrong("server_optimizer", f"{key}={value:g} must be at least 0 and below 1")


def _positive(key: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise wrong("server_optimizer", f"{key}={value:g} must be at least 0")
