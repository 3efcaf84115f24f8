"""How does a mode run over real connections with no trainer? As in a daemon: compute thread, peers, acceptor."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import cast

import trio

from peerd.daemon.mode_runner import ModeRunner
from peerd.daemon.peers import Peers
from peerd.local.shared_memory import SharedMemory
from peerd.node.model_copy import ModelCopy
from peerd.training.codecs import vector
from peerd.training.codecs.vector import Layout
from peerd.training.effects import StepReport
from peerd.training.mode_core import ModeBegins
from peerd.training.modes import Mode, ModeClass
from peerd.transport.connection import Connection, ConnectionLost
from peerd.transport.hello import Refused, answer
from peerd.transport.ids import Address, NodeId
from peerd.transport.messages import AS_STARTED, Hello, Welcome
from peerd.transport.tcp import TcpTransport


class WithoutTrainer:
    """One node, whose steps are made here."""

    def __init__(self, runner: ModeRunner, peers: Peers) -> None:
        self._runner = runner
        self._peers = peers

    @property
    def bytes_sent(self) -> int:
        """Over all connections."""
        return self._peers.bytes_sent

    async def step(self, number: int) -> None:
        """Make this step, and wait until the mode lets the trainer go on."""
        self._runner.on_report(StepReport(number, 0.0, 1.0, published=True, finishing=False, stands=True), 0)
        await self._runner.settled.wait()


def name_of(rank: int) -> NodeId:
    """The id of its node."""
    return f"r{rank}"


@asynccontextmanager
async def without_trainer(
    rank: int,
    addresses: Sequence[Address],
    layout: Layout,
    mode: ModeClass,
    transport: Callable[[trio.Nursery], TcpTransport],
) -> AsyncIterator[WithoutTrainer]:
    """The node of this rank, which listens at its address while the block runs; all others count as alive.

    Raises UserError where it cannot listen, in an ExceptionGroup.
    """
    me, where = name_of(rank), {name_of(other): address for other, address in enumerate(addresses)}
    hello = Hello(1, "swarm", "run", me, me, 1, *addresses[rank], mode.NAME, "", ())

    async def accept(connection: Connection) -> None:
        peers.count(connection)
        try:
            theirs = await answer(connection, lambda _: None, Welcome(me, me, 1))
            connection.payload_limit = vector.payload_limit(layout)
            while True:
                await runner.on_message(theirs.node, await connection.receive())
        except ConnectionLost:
            pass  # at the end
        finally:
            await peers.close(connection)

    async with trio.open_nursery() as nursery:
        carried = transport(nursery)
        peers = Peers(carried, lambda: hello, where.get, lambda peer: runner.on_reconnected(peer), _refused)
        runner = ModeRunner(peers)
        runner.core.model = ModelCopy(SharedMemory.create(layout.total))
        await nursery.start(peers.run)
        nursery.start_soon(runner.run)
        others = frozenset(where.keys() - {me})
        await runner.compute.call(ModeBegins(AS_STARTED, others, lambda _: cast(Mode, mode)))
        await nursery.start(carried.listen, addresses[rank], accept)
        yield WithoutTrainer(runner, peers)
        nursery.cancel_scope.cancel()


def _refused(peer: NodeId, why: Refused) -> None:
    """By who should take it: that is for people to see, and stdout is for who gives the orders."""
    sys.stderr.write(f"{peer}: {why}\n")
