"""What do trainer and daemon of a node know of each other at every step, with no message? One page of shared memory.

Each field has one writer. A number of 8 bytes is written at once; the trainer's figures, which belong together, have a
version that is odd while they change, and are for those who look: nothing is decided by them.

    the daemon writes   which steps it wants to hear of; how many messages it has sent; which copy it reads;
                        how far most others are in their runs
    the trainer writes  its figures: step, when, loss, learning rate, samples, metrics; how long its run is
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import msgpack

from peerd.training.model.over import parts_of
from peerd.training.model.quiet import Quiet

PAGE_BYTES = 4096
_CHANGE, _REST, _COPY_STEP, _STEP, _SENT, _CURRENT, _STAND_STEP, _OTHERS = range(8)  # the daemon's, of 8 bytes
_VERSION = 8  # in the trainer's half, in another cache line
_TOTAL = PAGE_BYTES // 8 - 1
_FIGURES_AT = (_VERSION + 1) * 8
_FIGURES = struct.Struct("@qqddddI")
METRICS_BYTES_MAX = 8 * _TOTAL - _FIGURES_AT - _FIGURES.size
NUMBER_MAX = 1 << 62  # a number has 8 bytes
LOOKS_MAX = 10  # at figures that change meanwhile


@dataclass(frozen=True, slots=True)
class LastStep:
    """What a trainer says of its last step."""

    step: int  # or that of the swarm's model, which it has taken over since
    samples: int  # since it came
    at: float  # when, on the machine's monotonic clock
    loss: float  # NaN: it said none
    lr: float
    lr_max: float  # the largest so far
    metrics: Mapping[str, float]


class Board:
    """One side's view of the page."""

    def __init__(self, page: memoryview) -> None:
        """`page` has PAGE_BYTES, zeros at first."""
        self._page = page
        self._reals = page.cast("d")
        self._numbers = page.cast("q")
        self._metrics: dict[str, float] = {}
        self._packed_bytes = 0

    # ---------------------------------------------------------------- the daemon's

    @property
    def quiet(self) -> Quiet:
        """Which steps the trainer says, and which of them with a copy."""
        numbers = self._numbers
        return Quiet(self._reals[_CHANGE], numbers[_REST], numbers[_COPY_STEP], numbers[_STEP], numbers[_STAND_STEP])

    def be_quiet(self, quiet: Quiet) -> None:
        """Tell the trainer so."""
        self._reals[_CHANGE] = quiet.change
        self._numbers[_REST] = min(quiet.rest_until, NUMBER_MAX)
        self._numbers[_COPY_STEP] = min(quiet.copy_step, NUMBER_MAX)
        self._numbers[_STEP] = min(quiet.step, NUMBER_MAX)
        self._numbers[_STAND_STEP] = min(quiet.stand_step, NUMBER_MAX)

    @property
    def sent(self) -> int:
        """Messages that the daemon has sent, or is about to send."""
        return self._numbers[_SENT]

    def sends(self) -> None:
        """One more."""
        self._numbers[_SENT] += 1

    @property
    def current(self) -> int:
        """The copy that the daemon reads; the trainer may write the other one if this is the one it wrote last."""
        return self._numbers[_CURRENT]

    def reads(self, copy: int) -> None:
        """The daemon goes on with this copy."""
        self._numbers[_CURRENT] = copy

    @property
    def others(self) -> int:
        """How many parts of their runs most other nodes have made, or that these are over (training/model/over.py)."""
        return self._numbers[_OTHERS]

    def say_others(self, parts: int) -> None:
        """Tell the trainer so."""
        self._numbers[_OTHERS] = parts

    # ---------------------------------------------------------------- the trainer's

    @property
    def made(self) -> int:
        """Parts of its run that the trainer has made (training/model/over.py); 0: it has not said how long that is."""
        last = self.last_step()
        return 0 if last is None else parts_of(last.step, self._numbers[_TOTAL])

    def say_total(self, total: int) -> None:
        """Tell the daemon so."""
        self._numbers[_TOTAL] = min(total, NUMBER_MAX)

    def note(
        self, step: int, samples: int, at: float, loss: float, lr: float, lr_max: float, metrics: Mapping[str, float]
    ) -> None:
        """The figures of a step. Metrics that it has not stay; those for which there is no room are left out."""
        self._numbers[_VERSION] |= 1  # odd already where the last one was interrupted (Ctrl-C in a notebook)
        if metrics and not self._takes(metrics):
            for name, number in metrics.items():
                self._takes({name: number})
        _FIGURES.pack_into(self._page, _FIGURES_AT, step, samples, at, loss, lr, lr_max, self._packed_bytes)
        self._numbers[_VERSION] += 1

    def go_on_from(self, step: int) -> None:
        """The model is of this step now, which it has not made; before its first one it has no figures to say so in."""
        if self._numbers[_VERSION]:
            self._numbers[_FIGURES_AT // 8] = step

    def _takes(self, metrics: Mapping[str, float]) -> bool:
        """Whether there is room for these beside those that are there; then they are."""
        all_of_them = {**self._metrics, **metrics}
        packed = msgpack.packb(all_of_them)
        if len(packed) > METRICS_BYTES_MAX:
            return False
        start = _FIGURES_AT + _FIGURES.size
        self._page[start : start + len(packed)] = packed
        self._metrics, self._packed_bytes = all_of_them, len(packed)
        return True

    def last_step(self) -> LastStep | None:
        """The trainer's, or None: it has not noted any, or notes them just now and ever again."""
        for _ in range(LOOKS_MAX):
            version = self._numbers[_VERSION]
            step, samples, at, loss, lr, lr_max, length = _FIGURES.unpack_from(self._page, _FIGURES_AT)
            start = _FIGURES_AT + _FIGURES.size
            packed = bytes(self._page[start : start + min(length, METRICS_BYTES_MAX)])
            if version % 2 == 0 and self._numbers[_VERSION] == version:
                return LastStep(step, samples, at, loss, lr, lr_max, _metrics(packed)) if version else None
        return None


def _metrics(packed: bytes) -> dict[str, float]:
    """Of a trainer that may be of another version of peerd, or broken."""
    try:
        found = msgpack.unpackb(packed) if packed else {}
    except (msgpack.UnpackException, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        name: float(number)
        for name, number in found.items()
        if isinstance(name, str) and isinstance(number, float | int) and math.isfinite(number)
    }
