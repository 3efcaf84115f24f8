"""When does what happen? One heap of (time, sequence, event), one seed, and a digest of everything that happened."""

from __future__ import annotations

import hashlib
import heapq
import json
import random
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import TextIO

_ROW = struct.Struct("<dBiid")
_FLUSH_BYTES = 1 << 16
END = "end"  # of a trace: one without this line was cut


class Kind(IntEnum):
    """What can happen; the numbers are hashed, so a new kind goes to the end. docs/simulation.md has their fields."""

    START = 0
    CRASH = 1
    PAUSE = 2
    RESUME = 3
    CUT = 4
    HEAL = 5
    DATAGRAM = 6
    LOST = 7
    MESSAGE = 8
    TABLES = 9
    STEP = 10
    APPLY = 11
    PHASE = 12
    STATE = 13
    BROKEN = 14
    WEATHER = 15
    SLOW = 16
    FINISHED = 17


class Violation(Exception):
    """An invariant did not hold. The text says which, when, and how to see it again."""


class World:
    """Virtual time for one run."""

    def __init__(self, seed: int, trace: TextIO | None = None) -> None:
        """`trace` gets every event as a line of JSON."""
        self.seed = seed
        self.now = 0.0
        self.events = 0
        self._trace = trace
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._unhashed = bytearray()

    def rng(self, *name: object) -> random.Random:
        """A stream of its own for whatever is so named: one more draw here changes nothing there."""
        return random.Random(f"{self.seed}/{'/'.join(map(str, name))}")

    def later(self, delay_s: float, event: Callable[[], None]) -> None:
        """Call `event` in so many seconds; of two at one time, the first that was asked for goes first."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + delay_s if delay_s > 0 else self.now, self._sequence, event))

    def note(self, kind: Kind, node: int, other: int = -1, value: float = 0.0) -> None:
        """Something happened: it enters the digest, and the trace if there is one."""
        self.events += 1
        self._unhashed += _ROW.pack(self.now, kind, node, other, value)
        if len(self._unhashed) >= _FLUSH_BYTES:
            self._hash.update(self._unhashed)
            self._unhashed.clear()
        if self._trace is not None:
            row = {"t": round(self.now, 6), "event": kind.name.lower(), "node": node}
            row |= {"other": other} if other >= 0 else {}
            row |= {"value": value} if value else {}
            self._trace.write(json.dumps(row) + "\n")

    def end(self, violations: int) -> None:
        """The run is over: the last line of the trace says so, with what the others are to add up to."""
        if self._trace is not None:
            row = {"t": round(self.now, 6), "event": END, "events": self.events, "violations": violations}
            self._trace.write(json.dumps({**row, "digest": self.digest}) + "\n")

    def run(self, until: float) -> None:
        """Let time pass."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until:
            self.now, _, event = pop(heap)
            event()
        self.now = max(self.now, until)

    @property
    def digest(self) -> str:
        """32 hex digits: the same for the same seed and settings, in any process."""
        whole = self._hash.copy()
        whole.update(self._unhashed)
        return whole.hexdigest()
