"""Whole models for newcomers, what others say of theirs, and which plan the messages after it were meant under."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from peerd.transport.messages.base import Chunks, Message, Name, NameOrNone, VisibleText, Within

PLAN_NUMBER_MAX = 1 << 32  # of proposals that people make


@dataclass(frozen=True, slots=True)
class ModelRequest(Message):
    """Send me your current model, unless mine is the same: I am about to train."""

    KIND: ClassVar[int] = 32
    repeated: ClassVar[bool] = False
    digest: bytes = b""  # of mine: 16 bytes of SHA-256; empty: of nothing


@dataclass(frozen=True, slots=True)
class ModelEqual(Message):
    """My model is the one of the digest that asked for it."""

    KIND: ClassVar[int] = 37
    repeated: ClassVar[bool] = False
    step: int


@dataclass(frozen=True, slots=True)
class ModelSnapshot(Message):
    """A whole model, encoded with `codec`."""

    KIND: ClassVar[int] = 33
    repeated: ClassVar[bool] = False  # the connection that broke may have led to the newcomer's former life
    key_fields: ClassVar[tuple[str, ...]] = ("KIND",)  # of any step: one that waits is enough
    step: int
    codec: Name
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class ModelPromise(Message):
    """The model that follows has this digest: whoever learns later by what it is judged cannot make it another."""

    KIND: ClassVar[int] = 40
    repeated: ClassVar[bool] = False
    digest: bytes


@dataclass(frozen=True, slots=True)
class SketchRequest(Message):
    """Send me a sketch of your current model by this seed: somebody offers me one."""

    KIND: ClassVar[int] = 38
    repeated: ClassVar[bool] = False
    seed: bytes


@dataclass(frozen=True, slots=True)
class ModelSketch(Message):
    """A few numbers of a model (training/sketch.py)."""

    KIND: ClassVar[int] = 39
    repeated: ClassVar[bool] = False
    seed: bytes  # by which they were made
    sums: bytes


ModelMessage = ModelRequest | ModelEqual | ModelPromise | ModelSnapshot | SketchRequest | ModelSketch


@dataclass(frozen=True, slots=True, order=True)
class Plan(Message):
    """How a swarm combines models (plan.py); on a connection: what the messages after it were meant under."""

    KIND: ClassVar[int] = 34
    number: Annotated[int, Within(0, PLAN_NUMBER_MAX)] = 0  # 0: as each node was started
    author: NameOrNone = ""
    done: bool = True  # False: one exact average of all models comes first
    text: VisibleText = ""  # the mode, and its settings as key=value, with blanks between; "": as each node was started
    proof: bytes = field(default=b"", compare=False)  # the author's key and signature (plan.py); plain swarms: none

    @property
    def once(self) -> bool:
        """Whether what goes on now is that average."""
        return not self.done


AS_STARTED = Plan()
