"""What do a trainer and its daemon say to each other? Maps over a Unix socket, each one of these dataclasses.

trainer                                       daemon
Attach, with the shared memory        ->
                                      <-      Welcome: where checkpoints are     (or an error: refused)
(loads one; publishes copy 0) Ready   ->
                                      <-      Start: which copy to load, the barrier
                                      <-      Go: enough members are ready
each step beyond what the board says,
    with a copy: Stepped(published)   ->
                                      <-      Publish: a copy at your next step, please (a newcomer waits for it)
SpareWanted                           ->      (is the other copy free?)
                                      <-      Spare: it is, as the board says
                                      <-      Corrections: add this buffer
Added                                 ->
at a barrier it stands after Stepped  ->
                                      <-      Resume, once it has taken every correction
                                      <-      BarrierIs: the mode has changed, nobody waits at the old one's
BarrierHeard                          ->
CheckpointFailed, when that changes   ->
Drew, once, if that is known          ->
in a backward pass: GradientPart      ->
with gradients, after GradientReady   ->
                                      <-      Load: your model is this copy now (it was away)
                                      <-      GradientIs: go on with what stands in the memory, or with none
Stepped(finishing=True)               ->
                                      <-      Finished: all models agree; or Stop, at any time: the node leaves
(lets go, and writes its last checkpoint; whether that failed it says as the command line asks, by `last_checkpoint`)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

DRAWS_BYTES = 8  # that say by which batches a model began
VALUES_MAX = 1 << 38  # of a model: four terabytes of shared memory; nothing else ends before


@dataclass(frozen=True, slots=True)
class Said:
    """One of them; KIND is its name on the socket."""

    KIND: ClassVar[str]

    def __post_init__(self) -> None:
        """Raises ValueError: a field is not of its type, or out of its range."""
        for name, hint in _hints(type(self)).items():
            if not _fits(getattr(self, name), hint):
                raise ValueError(f"{self.KIND}: {name} is {getattr(self, name)!r:.40}")
        self.check()

    def check(self) -> None:
        """What types do not say. Raises ValueError."""


# ---------------------------------------------------------------- from the trainer


@dataclass(frozen=True, slots=True)
class Attach(Said):
    """A trainer comes: `tensors` as "name dtype shape", `variances` and `padding` as starts and stops in the vector."""

    KIND = "attach"
    pid: int
    signature: str
    parameters: int
    total: int
    tensors: list[str]
    variances: list[Any]
    ends: list[Any]  # of the tensors in the vector, in order
    states: int  # values at its end that are the optimizer's
    gradients: int  # values of the gradient's vector; 0: weights are exchanged
    daemon: str = ""  # the one that has started the script, by what that has in its environment
    padding: list[Any] = field(default_factory=list)  # rows that stay zeros while they are (training/model/padding.py)

    def check(self) -> None:
        """See `Said`."""
        if not 0 < self.parameters <= self.total:
            raise ValueError(f"attach: {self.parameters} parameters of {self.total} values")
        if not 0 <= self.states <= self.total - self.parameters:
            raise ValueError(f"attach: {self.states} values of the optimizer's in {self.total}")
        if not all(type(end) is int and 0 <= end <= self.total for end in self.ends):
            raise ValueError("attach: a tensor ends outside of the model")
        for name, ranges in (("variances", self.variances), ("padding", self.padding)):
            for each in ranges:
                if not (isinstance(each, list | tuple) and len(each) == 2 and all(type(one) is int for one in each)):
                    raise ValueError(f"attach: a range of {name} is no pair of numbers")
                if not 0 <= each[0] <= each[1] <= self.total:
                    raise ValueError(f"attach: a range of {name} lies outside of the model")


@dataclass(frozen=True, slots=True)
class Ready(Said):
    """Copy 0 is the model that the trainer has, after this step."""

    KIND = "ready"
    step: int


@dataclass(frozen=True, slots=True)
class Stepped(Said):
    """The optimizer moved, or the run ended. `change` is the L2 norm since the last copy, over the parameters."""

    KIND = "step"
    step: int
    change: float
    lr_ratio: float
    stands: bool  # at its mode's barrier; a trainer that does not say so would wait in vain
    published: int | None = None  # the copy that was written
    rolled_back: bool = False
    finishing: bool = False
    at_exit: bool = False  # only because the interpreter ends
    samples: float = 0.0  # a step, of late; 0: it does not say

    def check(self) -> None:
        """See `Said`."""
        if self.published not in (None, 0, 1):
            raise ValueError(f"step: there is no copy {self.published}")


@dataclass(frozen=True, slots=True)
class Added(Said):
    """This buffer of corrections is in the model now."""

    KIND = "taken"
    half: int

    def check(self) -> None:
        """See `Said`."""
        if self.half not in (0, 1):
            raise ValueError(f"taken: there is no buffer {self.half}")


@dataclass(frozen=True, slots=True)
class GradientReady(Said):
    """I wait with the gradient of this step, of so many samples: it is in the memory."""

    KIND = "gradient_ready"
    step: int
    samples: float
    rate: float  # the optimizer's learning rate
    anew: bool = True  # what was said of a part of one is void

    def check(self) -> None:
        """See `Said`."""
        _check_samples(self)
        if not 0 <= self.rate < math.inf:
            raise ValueError(f"gradient_ready: at a learning rate of {self.rate}")


@dataclass(frozen=True, slots=True)
class GradientPart(Said):
    """The gradient of this step, of so many samples, is in the memory from the value `first` on, and will stay so."""

    KIND = "gradient_part"
    step: int
    samples: float
    first: int
    anew: bool  # what was said of a part of one is void

    def check(self) -> None:
        """See `Said`."""
        _check_samples(self)
        if self.first < 1:
            raise ValueError(f"gradient_part: from {self.first} on")


@dataclass(frozen=True, slots=True)
class SpareWanted(Said):
    """Tell me when I may write the other copy."""

    KIND = "spare"


@dataclass(frozen=True, slots=True)
class BarrierHeard(Said):
    """I know the new barrier."""

    KIND = "barrier"


@dataclass(frozen=True, slots=True)
class CheckpointFailed(Said):
    """Why the last checkpoint was not written; None: it was."""

    KIND = "checkpoint"
    why: str | None


@dataclass(frozen=True, slots=True)
class Drew(Said):
    """By these inputs my model began (peerd/trainer/inputs.py): a digest."""

    KIND = "drew"
    digest: bytes

    def check(self) -> None:
        """See `Said`."""
        if len(self.digest) != DRAWS_BYTES:
            raise ValueError(f"drew: a digest of {len(self.digest)} bytes")


# ---------------------------------------------------------------- from the daemon


@dataclass(frozen=True, slots=True)
class Welcome(Said):
    """The node takes this model."""

    KIND = "welcome"
    checkpoints: str
    checkpoint_every_s: float


@dataclass(frozen=True, slots=True)
class Start(Said):
    """Train from here."""

    KIND = "start"
    load: int | None  # the copy to load; None: what the trainer has
    step: int
    lr_max: float
    barrier: int


@dataclass(frozen=True, slots=True)
class Go(Said):
    """Enough members are ready for the first step."""

    KIND = "go"


@dataclass(frozen=True, slots=True)
class Publish(Said):
    """Write a copy at your next step."""

    KIND = "publish"


@dataclass(frozen=True, slots=True)
class Spare(Said):
    """Your last copy has been read."""

    KIND = "spare"


@dataclass(frozen=True, slots=True)
class Corrections(Said):
    """Add this buffer to the model."""

    KIND = "corrections"
    half: int


@dataclass(frozen=True, slots=True)
class Resume(Said):
    """Go on after the barrier's step."""

    KIND = "resume"


@dataclass(frozen=True, slots=True)
class Load(Said):
    """The model, and the optimizer's state, are this copy now, as after this step."""

    KIND = "load"
    copy: int
    step: int


@dataclass(frozen=True, slots=True)
class GradientIs(Said):
    """Go on with the gradient that is in the memory; without `mean` with none."""

    KIND = "gradient"
    mean: bool


@dataclass(frozen=True, slots=True)
class BarrierIs(Said):
    """Steps that are multiples of this wait, from `Quiet.stand_step` on; 0: none does."""

    KIND = "barrier"
    barrier: int


@dataclass(frozen=True, slots=True)
class Finished(Said):
    """The end of the run is known to all."""

    KIND = "finished"


@dataclass(frozen=True, slots=True)
class Stop(Said):
    """The node leaves: publish once more, and end."""

    KIND = "stop"


FROM_TRAINER: dict[str, type[Said]] = {
    each.KIND: each
    for each in (
        Attach, Ready, Stepped, Added, GradientPart, GradientReady, SpareWanted, BarrierHeard, CheckpointFailed, Drew,
    )
}  # fmt: skip
FROM_DAEMON: dict[str, type[Said]] = {
    each.KIND: each
    for each in (Welcome, Start, Go, Publish, Spare, Corrections, Resume, Load, GradientIs, BarrierIs, Finished, Stop)
}


def _check_samples(said: GradientPart | GradientReady) -> None:
    if not 0 < said.samples < math.inf:
        raise ValueError(f"{said.KIND}: of {said.samples} samples")


def encoded(said: Said) -> dict[str, Any]:
    """The map that travels."""
    return {"kind": said.KIND, **{item.name: getattr(said, item.name) for item in fields(said)}}


def decoded(message: Mapping[str, Any], known: Mapping[str, type[Said]]) -> Said:
    """What a map says; fields that are not known are left out. Raises ValueError with what is wrong."""
    kind = message.get("kind")
    cls = known.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ValueError(f"{kind!r:.40} is nothing that is said here")
    names = {item.name for item in fields(cls)}
    try:
        return cls(**{name: value for name, value in message.items() if name in names})
    except TypeError:
        raise ValueError(f"{kind}: it lacks a field") from None


_known_hints: dict[type, dict[str, Any]] = {}


def _hints(cls: type) -> dict[str, Any]:
    if cls not in _known_hints:
        hints = get_type_hints(cls)
        _known_hints[cls] = {item.name: hints[item.name] for item in fields(cls)}
    return _known_hints[cls]


def _fits(value: Any, hint: Any) -> bool:
    """Whether it is of the type; a bool is no number, an int is a float."""
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if get_origin(hint) is list:
        (inner,) = get_args(hint)  # a large model has 200,000 names: no look at the hint for each
        return isinstance(value, list | tuple) and (inner is Any or all(type(one) is inner for one in value))
    if hint is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    return type(value) is hint
