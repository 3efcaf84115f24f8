"""What does one exchange cost the processor, compiled and by numpy? Both ends of it, without a network, in turn.

    python benchmarks/exchange.py [--parameters 1.1e6,25e6] [--codec sign] [--threads 2]

Two cores of `gossip`, each on a model of its own in eight tensors that all move, in one process: from the copy that
fires the trigger to both corrections, the robust merge included. With `--threads`: how long it takes, compiled, by so
many threads and by one, in turn.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from peerd.training.codecs.vector import Layout
from peerd.training.effects import Apply, Effect, Send, StepReport, Vector
from peerd.training.kernels import library
from peerd.training.kernels.cores import spread
from peerd.training.kernels.passes import correct
from peerd.training.mode_settings import ModeSettings
from peerd.training.modes.gossip import Gossip
from peerd.transport.ids import NodeId
from peerd.transport.messages import Message

Context = AbstractContextManager[Any]
NAMES = (NodeId("a" * 32), NodeId("b" * 32))


class Node:
    """A core, its model, and what it sends."""

    def __init__(self, index: int, layout: Layout, codec: str, sent: deque[tuple[int, Message]]) -> None:
        self.index, self._sent = index, sent
        self.model = np.random.default_rng(index).standard_normal(layout.total).astype(np.float32)
        self._read = np.empty_like(self.model)
        settings = ModeSettings(codec=codec, trigger="period:1", view=1)
        self.core = Gossip(NAMES[index], layout, random.Random(index), settings, self._values)

    def _values(self) -> Vector:
        np.copyto(self._read, self.model)
        return self._read

    def perform(self, effects: Iterable[Effect]) -> None:
        """Send, and be corrected."""
        for effect in effects:
            match effect:
                case Send(_, message):
                    self._sent.append((1 - self.index, message))
                case Apply(correction):
                    correct(self.model, correction)


class Pair:
    """Two nodes with a link."""

    def __init__(self, parameters: int, codec: str) -> None:
        stops = tuple(parameters * tensor // 8 for tensor in range(1, 9))
        layout = Layout(parameters, parameters, tensors=stops)
        self._sent: deque[tuple[int, Message]] = deque()
        self._nodes = [Node(index, layout, codec, self._sent) for index in (0, 1)]
        self._moves = 1e-3 * np.random.default_rng(2).standard_normal(parameters).astype(np.float32)
        self._now = 0.0
        for node in self._nodes:
            node.perform(node.core.on_peers(frozenset({NAMES[1 - node.index]}), self._now))
        self._deliver()

    def exchange(self, clock: Callable[[], float]) -> float:
        """One, by a node whose model has moved; its seconds."""
        self._now += 1.0
        first = self._nodes[0]
        first.model += self._moves
        before, began = first.core.counts["exchanges"], clock()
        first.perform(first.core.on_step(StepReport(int(self._now), 1e3, 1.0, published=True, finishing=False), 1.0))
        self._deliver()
        took = clock() - began
        assert first.core.counts["exchanges"] == before + 1, "it was an exchange"
        return took

    def _deliver(self) -> None:
        while self._sent:
            to, message = self._sent.popleft()
            node = self._nodes[to]
            node.perform(node.core.on_message(NAMES[1 - to], message, self._now))


def in_turn(pair: Pair, rounds: int, clock: Callable[[], float], *ways: Callable[[], Context]) -> list[float]:
    """Median milliseconds of an exchange in each of these contexts, in turn; the first of each does not count."""
    took: list[list[float]] = [[] for _ in ways]
    for turn in range(rounds + 1):
        for way, seconds in zip(ways, took, strict=True):
            with way():
                found = pair.exchange(clock)
            if turn:
                seconds.append(found)
    return [1e3 * statistics.median(seconds) for seconds in took]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", default="1.1e6,25e6")
    parser.add_argument("--codec", default="sign")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    told = parser.parse_args()
    if library.LIBRARY is None:
        raise SystemExit("there are no compiled kernels here: install peerd with a C compiler")
    for parameters in map(float, told.parameters.split(",")):
        pair, row = Pair(int(parameters), told.codec), f"{parameters / 1e6:6.1f}M parameters, {told.codec}:"
        if told.threads > 1:
            several = partial(spread, told.threads, lambda: None)
            ours, theirs = in_turn(pair, told.rounds, time.perf_counter, several, nullcontext)
            print(
                f"{row} one thread {theirs:.1f} ms, {told.threads} threads {ours:.1f} ms, "
                f"{theirs / ours:.2f} times as fast",
                flush=True,
            )
            continue
        by_numpy = partial(patch.object, library, "LIBRARY", None)
        theirs, ours = in_turn(pair, told.rounds, time.process_time, by_numpy, nullcontext)
        print(
            f"{row} compiled {ours:.1f} ms "
            f"({1e6 * ours / parameters / 2:.2f} ns a value and end), numpy {theirs:.1f} ms, {theirs / ours:.2f} times",
            flush=True,
        )


if __name__ == "__main__":
    main()
