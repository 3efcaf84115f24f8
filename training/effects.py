"""What a mode asks its shell to do, and what the trainer says to the mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from peerd.transport.ids import NodeId
from peerd.transport.messages import Message

Vector = npt.NDArray[np.floating[Any]]
"""A flat model or model difference: one dimension, float32 in production, float64 in exactness tests."""


class Sliced(Protocol):
    """A vector that is read and written in slices: an array, or one that takes less memory (pairs/block_floats.py)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(total,)."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of its slices."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""

    def __getitem__(self, where: slice, /) -> Vector:
        """The values there: a view or a copy, so write them back after a change."""

    def __setitem__(self, where: slice, values: Vector, /) -> None: ...

    def copy(self) -> Self:
        """Another of the same values."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send over the reliable connection to `peer`, in order; lost only when the connection breaks."""

    peer: NodeId
    message: Message


@dataclass(frozen=True, slots=True, eq=False)
class Apply:
    """Add `correction` (the flat model's size and dtype) to the model, between two steps; it is lent, not given."""

    correction: Vector


@dataclass(frozen=True, slots=True)
class Publish:
    """Ask the trainer for a fresh copy of its model; the next step report says `published`."""


@dataclass(frozen=True, slots=True)
class Proceed:
    """The trainer may go on: a barrier is an effect. In a final flush it comes twice: once when every partner has
    what this node had not yet sent (settled False), once when all models agree."""

    settled: bool = True


@dataclass(frozen=True, slots=True)
class Resume:
    """The trainer, which waits at its mode's barrier, may go on, once it has taken every correction so far."""


@dataclass(frozen=True, slots=True, eq=False)
class Averaged:
    """The trainer, which waits with its gradient, goes on with this one, to the bit, after all corrections so far.

    As `Model.gradient` has it: gradients, buffers, flags. It is the vector that the trainer's came in, overwritten.
    None: it goes on without any, and must not step by itself, for somebody else has.
    """

    gradient: Vector | None


@dataclass(frozen=True, slots=True, eq=False)
class Become:
    """The model is `values` (the flat model's size and dtype; lent), to the bit, as after this step; while it waits."""

    values: Vector
    step: int


@dataclass(frozen=True, slots=True)
class Log:
    """A warning for whoever reads the log."""

    text: str


Effect = Send | Apply | Publish | Proceed | Resume | Averaged | Become | Log


@dataclass(frozen=True, slots=True)
class StepReport:
    """What the trainer says after an optimizer step (or at the end of its run)."""

    step: int
    change: float  # ||x - x at the last publish||, parameters only
    lr_ratio: float  # learning rate / the largest learning rate so far
    published: bool  # a fresh copy of the model has just arrived
    finishing: bool  # no further step will come: flush
    stands: bool = False  # the trainer waits at its mode's barrier for a Resume
    samples: float = 0.0  # a step, of late; 0: it does not say
