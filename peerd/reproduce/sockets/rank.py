"""One process of E6: a peerd mode over real connections, a step at a time, with no trainer beside it.

    python -m peerd.reproduce.sockets.rank --rank 0 --addresses '[["127.0.0.1", 7946], ...]' --values 1000
        --mode allreduce --topology ring

The path is production's from the mode's contribution to the model that all agree on: the mode's core in the compute
thread, its messages over TCP. Each line on stdin is an order: `step` moves the model by this rank's own vector and
answers, when the mode lets the trainer go on, with a line of JSON: when that began and ended (monotonic seconds, the
same clock for all processes of a machine), bytes sent, and how far the model is `off` what it should be. After the
first step it may be: a server drops a push that was made from no weights.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import trio

from peerd.process.allocator import keep_freed_chunks
from peerd.reproduce.sockets.without_trainer import name_of, without_trainer
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Apply, Effect, Proceed, Resume, StepReport, Vector
from peerd.training.modes import LinkStatus, Mode, ModeClass, ModeSettings, Quiet, parse_mode
from peerd.transport.errors import UserError
from peerd.transport.ids import Address, NodeId
from peerd.transport.messages import Chunk, Connected, Message
from peerd.transport.tcp import TcpStream, TcpTransport

CHECKED = 1024  # values of the model
BURST_S = 0.005  # of the line's rate that may pass at once


class SlowLine:
    """A node's line, one direction: so many bytes a second, for all connections together."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._allowance = 0.0
        self._at = time.monotonic()

    def allowance(self) -> int:
        """How many bytes may pass now."""
        now = time.monotonic()
        most = max(1500.0, self._rate * BURST_S)
        self._allowance = min(most, self._allowance + (now - self._at) * self._rate)
        self._at = now
        return int(self._allowance)

    def took(self, count: int) -> None:
        """So many have passed."""
        self._allowance -= count

    async def wait(self) -> None:
        """Until something may pass again."""
        await trio.sleep(BURST_S / 2)


class SlowStream(TcpStream):
    """A TCP stream behind this process's slow line: for where no rate can be set on an interface."""

    up: ClassVar[SlowLine]
    down: ClassVar[SlowLine]

    def send_some(self, pieces: Sequence[Chunk]) -> int:
        """See `ByteStream.send_some`."""
        left = self.up.allowance()
        if left <= 0:
            raise BlockingIOError
        fitting: list[Chunk] = []
        for piece in pieces:
            fitting.append(memoryview(piece).cast("B")[:left])
            left -= len(fitting[-1])
            if left <= 0:
                break
        sent = super().send_some(fitting)
        self.up.took(sent)
        return sent

    def receive_some(self, buffer: memoryview) -> int:
        """See `ByteStream.receive_some`."""
        left = self.down.allowance()
        if left <= 0:
            raise BlockingIOError
        received = super().receive_some(buffer[:left])
        self.down.took(received)
        return received

    async def wait_sendable(self) -> None:
        """See `ByteStream.wait_sendable`."""
        await super().wait_sendable()
        await self.up.wait()

    async def wait_receivable(self, due: int = 1) -> None:
        """See `ByteStream.wait_receivable`."""
        await super().wait_receivable()
        await self.down.wait()


class Timed(ModeClass):
    """A mode of peerd, as it is, whose trainer is this process: what it asks of a trainer is done here."""

    NAME = "timed"
    TAKES = ()

    def __init__(self, mode: Mode, model: Vector) -> None:
        self.ended = 0.0  # when the trainer was last let go on
        self._mode = mode
        self._model = model

    @property
    def deadline(self) -> float:
        """See `Mode`."""
        return self._mode.deadline

    @property
    def counts(self) -> Counter[str]:
        """See `Mode`."""
        return self._mode.counts

    @property
    def barrier(self) -> int:
        """See `Mode`."""
        return self._mode.barrier

    @property
    def quiet(self) -> Quiet:
        """See `Mode`."""
        return self._mode.quiet

    @property
    def under_way(self) -> bool:
        """See `Mode`."""
        return self._mode.under_way

    @property
    def consensus_distance(self) -> float:
        """See `Mode`."""
        return self._mode.consensus_distance

    def on_step(self, report: StepReport, now: float) -> list[Effect]:
        """See `Mode`."""
        return self._done(self._mode.on_step(report, now))

    def on_message(self, sender: NodeId, message: Message | Connected, now: float) -> list[Effect]:
        """See `Mode`."""
        return self._done(self._mode.on_message(sender, message, now))

    def on_peers(self, alive: frozenset[NodeId], now: float) -> list[Effect]:
        """See `Mode`."""
        return self._done(self._mode.on_peers(alive, now))

    def on_timer(self, now: float) -> list[Effect]:
        """See `Mode`."""
        return self._done(self._mode.on_timer(now))

    def links(self) -> list[LinkStatus]:
        """See `Mode`."""
        return self._mode.links()

    def end(self) -> Vector | None:
        """See `Mode`."""
        return self._mode.end()

    def _done(self, effects: list[Effect]) -> list[Effect]:
        others: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Apply):
                self._model += effect.correction
            elif isinstance(effect, Resume):
                self.ended = time.monotonic()
                others.append(Proceed())
            else:
                others.append(effect)
        return others


async def serve(rank: int, addresses: list[Address], count: int, mode: str, topology: str, mbit: float) -> None:
    """Be this rank until stdin ends. `mbit` above 0 limits the line here, both ways."""
    layout = Layout(count, count)
    settings = ModeSettings(
        codec="float32", overlap="blocking", topology=topology, min_peers=len(addresses), robust=False
    )
    mine = np.random.default_rng(rank).standard_normal(count, dtype=np.float32)
    model = np.zeros(count, np.float32)
    first = [
        np.random.default_rng(other).standard_normal(min(count, CHECKED), dtype=np.float32)
        for other in range(len(addresses))
    ]
    expected = np.asarray(first, np.float64).mean(axis=0)
    timed = Timed(parse_mode(mode)(name_of(rank), layout, random.Random(rank), settings, lambda: model.copy()), model)
    if mbit:
        SlowStream.up, SlowStream.down = SlowLine(mbit * 125_000), SlowLine(mbit * 125_000)

    def transport(nursery: trio.Nursery) -> TcpTransport:
        return TcpTransport(nursery, stream=SlowStream if mbit else TcpStream)

    async with without_trainer(rank, addresses, layout, timed, transport) as node:

        async def step(number: int) -> None:
            model[:] += mine
            await node.step(number)

        def obey() -> None:
            for number, _ in enumerate(sys.stdin, 1):
                before = model[: len(expected)].copy()
                began = time.monotonic()
                trio.from_thread.run(step, number)
                off = float(np.abs(model[: len(expected)] - before - expected).max())
                tell(json.dumps({"began": began, "ended": timed.ended, "sent": node.bytes_sent, "off": off}))

        tell("ready")
        await trio.to_thread.run_sync(obey)


def tell(line: str) -> None:
    """To whoever gives the orders."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Understand the command line, and serve."""
    parser = argparse.ArgumentParser(prog="python -m peerd.reproduce.sockets.rank")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--addresses", type=json.loads, required=True)
    parser.add_argument("--values", type=int, required=True)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--topology", default="auto")
    parser.add_argument("--mbit", type=float, default=0.0)
    told = parser.parse_args()
    keep_freed_chunks()  # as a daemon does
    addresses = [(host, port) for host, port in told.addresses]
    try:
        trio.run(serve, told.rank, addresses, told.values, told.mode, told.topology, told.mbit)
    except* UserError as errors:
        sys.exit("; ".join(str(error) for error in errors.exceptions))


if __name__ == "__main__":
    main()
