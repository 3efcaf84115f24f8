"""Outgoing connections over the memory carrier, in virtual time: what arrives, what is dropped, and who is told."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from peerd.daemon.peers import IDLE_S, REFUSED_RETRY_S, UNREACHED_S, Peers
from peerd.transport.connection import Connection
from peerd.transport.hello import Refused, answer
from peerd.transport.ids import Address, NodeId
from peerd.transport.memory import MemoryNetwork
from peerd.transport.messages import (
    Hello,
    LinkOpen,
    LinkSnapshot,
    Message,
    ModelSnapshot,
    Plan,
    Refuse,
    RoundCommit,
    RoundPhase,
    RoundReport,
    Welcome,
)
from peerd.transport.patience import DIAL_TIMEOUT_S, RETRY_MAX_S
from peerd.transport.peer_queue import QUEUE_MAX

pytestmark = pytest.mark.trio(clock="autojump")

FAR: Address = ("far", 1)
BULK = ModelSnapshot(1, "float32", (bytes(1 << 20),))


class FarNode:
    """Who answers at an address, and what it hears."""

    def __init__(self, id: NodeId) -> None:
        self.id = id
        self.heard: list[Message] = []
        self.connections: list[Connection] = []
        self.closed = 0
        self.refuses = False

    async def accept(self, connection: Connection) -> None:
        await answer(connection, self._check, Welcome(self.id, self.id, 1))
        connection.payload_limit = 1 << 30
        self.connections.append(connection)
        try:
            while True:
                self.heard.append(await connection.receive())
        finally:
            self.closed += 1

    def _check(self, hello: Hello) -> Refuse | None:
        return Refuse("swarm", "theirs", hello.swarm) if self.refuses else None


class Setting:
    """One node's `Peers`, the network, and the node `far` at FAR."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.network = MemoryNetwork(nursery)
        self.addresses: dict[NodeId, Address] = {"far": FAR}
        self.reconnected: list[NodeId] = []
        self.refusals: list[Refused] = []
        self.reach: list[tuple[NodeId, str]] = []
        self.unreached: list[tuple[NodeId, float]] = []  # and when
        self.far = FarNode("far")
        self.peers = Peers(
            self.network.transport("here"),
            lambda: Hello(1, "swarm", "", "here", "here", 1, "here", 1, "gossip", "", ()),
            self.addresses.get,
            self.reconnected.append,
            lambda _, refusal: self.refusals.append(refusal),
            reach=lambda peer, error: self.reach.append((peer, str(error or "can"))),
            unreached=lambda peer: self.unreached.append((peer, trio.current_time())),
            named="node-{}".format,
        )

    async def listen(self, node: FarNode) -> trio.CancelScope:
        """Have `node` answer at FAR until the scope is cancelled."""

        async def listen(task_status: trio.TaskStatus[trio.CancelScope]) -> None:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    await nursery.start(self.network.transport("far").listen, FAR, node.accept)
                    task_status.started(scope)

        scope: trio.CancelScope = await self.nursery.start(listen)
        return scope


@asynccontextmanager
async def setting() -> AsyncIterator[Setting]:
    async with trio.open_nursery() as nursery:
        there = Setting(nursery)
        await nursery.start(there.peers.run)
        yield there
        nursery.cancel_scope.cancel()


def opens(*numbers: int) -> list[Message]:
    return [LinkOpen(number) for number in numbers]


async def test_messages_arrive_in_order_over_one_connection() -> None:
    async with setting() as there:
        await there.listen(there.far)
        for message in (*opens(1), BULK, *opens(2)):
            there.peers.send("far", message)
        await trio.sleep(1)
        there.peers.send("far", LinkOpen(3))
        await there.peers.drain()
        await trio.sleep(1)
        assert [type(message) for message in there.far.heard] == [LinkOpen, ModelSnapshot, LinkOpen, LinkOpen]
        assert len(there.far.connections) == 1
        assert there.reconnected == [], "a first connection is no reconnection"
        assert there.peers.bytes_sent > 1 << 20


async def test_what_is_said_after_the_end_is_dropped() -> None:
    """The compute thread may be about to say something as the daemon ends."""
    async with setting() as there:
        peers = there.peers
    peers.send("far", LinkOpen(1))


async def test_a_queue_is_bounded() -> None:
    async with setting() as there:
        await there.listen(there.far)
        for number in range(QUEUE_MAX + 9):
            there.peers.send("far", LinkOpen(number))
        await trio.sleep(1)
        assert there.far.heard == opens(*range(QUEUE_MAX))


async def test_a_peer_that_asks_for_models_and_hears_none_does_not_fill_the_memory() -> None:
    async with setting() as there:
        await there.listen(there.far)
        there.peers.bulk_max = 3 << 20
        for link in range(20):
            there.peers.send("far", LinkSnapshot(link, "bfloat16", (bytes(1 << 20),)))
        there.peers.send("far", LinkOpen(1))
        await there.peers.drain()
        await trio.sleep(1)
        kinds = [type(message) for message in there.far.heard]
        assert kinds == 3 * [LinkSnapshot] + [LinkOpen]


async def test_a_connection_says_under_which_plan_its_messages_were_meant() -> None:
    async with setting() as there:
        await there.listen(there.far)
        there.peers.send("far", LinkOpen(1))  # as started: nothing need be said
        first, second = Plan(1, "here", True, "allreduce"), Plan(2, "far", False, "gossip")
        there.peers.plan = first
        for message in opens(2, 3, 3):
            there.peers.send("far", message)
        there.peers.plan = second
        there.peers.send("far", LinkOpen(3))  # to another mode it is no repetition
        await trio.sleep(1)
        assert there.far.heard == [*opens(1), first, *opens(2, 3), second, *opens(3)]

        there.network.cut("here", "far")
        await trio.sleep(1)
        there.network.heal("here", "far")
        await trio.sleep(RETRY_MAX_S)
        there.peers.send("far", LinkOpen(4))
        await trio.sleep(1)
        assert there.far.heard[-2:] == [second, *opens(4)], "a new connection knows nothing yet"


async def test_after_a_cut_what_was_queued_is_dropped_and_the_mode_is_told() -> None:
    async with setting() as there:
        await there.listen(there.far)
        there.peers.send("far", LinkOpen(1))
        await trio.sleep(1)
        sent = there.peers.bytes_sent
        there.network.cut("here", "far")
        await trio.sleep(0)
        there.peers.send("far", LinkOpen(2))
        await trio.sleep(10 * RETRY_MAX_S)
        assert there.reconnected == []
        with trio.fail_after(1):
            await there.peers.drain()  # a node that leaves does not wait for who is out of reach
        there.peers.send("far", LinkOpen(3))  # a later exchange must not overtake what is said again
        there.network.heal("here", "far")
        await trio.sleep(RETRY_MAX_S)
        assert there.reconnected == ["far"]
        there.peers.send("far", LinkOpen(4))
        await trio.sleep(1)
        assert there.far.heard == opens(1, 4)
        assert len(there.far.connections) == 2
        assert there.peers.bytes_sent > sent, "those of the broken connection still count"


async def test_another_node_at_the_address_hears_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with setting() as there:
        stranger = FarNode("stranger")
        scope = await there.listen(stranger)
        there.peers.send("far", LinkOpen(1))
        await trio.sleep(10 * RETRY_MAX_S)
        assert len(stranger.connections) > 5, "it is tried again and again"
        assert stranger.heard == []
        scope.cancel()
        await trio.sleep(0)
        await there.listen(there.far)
        await trio.sleep(RETRY_MAX_S)
        there.peers.send("far", LinkOpen(2))
        await trio.sleep(1)
        assert there.far.heard == opens(2)
        assert there.reconnected == ["far"]
    assert [record.message for record in caplog.records].count("node-far: another node answers at far:1") == 1


async def test_who_cannot_be_dialled_for_long_is_told_of_until_it_can() -> None:
    async with setting() as there:
        there.peers.send("far", LinkOpen(1))
        await trio.sleep(UNREACHED_S - 1)
        assert there.peers.unreached() == {}
        assert there.reach == []
        await trio.sleep(2 * UNREACHED_S)
        ((_, why),) = there.reach
        assert "far:1" in why
        assert there.peers.unreached()["far"] > 2 * UNREACHED_S
        scope = await there.listen(there.far)
        await trio.sleep(RETRY_MAX_S)
        assert there.reach[1:] == [("far", "can")]
        assert there.peers.unreached() == {}
        scope.cancel()  # a connection that breaks is no dial that fails
        await trio.sleep(UNREACHED_S / 2)
        await there.listen(there.far)
        await trio.sleep(2 * UNREACHED_S)
        assert len(there.reach) == 2


async def test_the_mode_hears_of_each_dial_in_vain_but_for_the_first_seconds() -> None:
    """And of the first connection after it. One that breaks and is made again at once is told of as that alone."""
    async with setting() as there:
        began = trio.current_time()
        there.peers.send("far", LinkOpen(1))
        await trio.sleep(UNREACHED_S)
        assert {peer for peer, _ in there.unreached} == {"far"}
        first, *more = (at - began for _, at in there.unreached)
        assert DIAL_TIMEOUT_S <= first <= DIAL_TIMEOUT_S + RETRY_MAX_S
        assert more, "a mode that begins meanwhile hears of it, too"
        assert there.reconnected == []
        scope = await there.listen(there.far)
        await trio.sleep(RETRY_MAX_S)
        assert there.reconnected == ["far"]
        there.unreached.clear()
        await trio.sleep(UNREACHED_S)
        scope.cancel()
        await trio.sleep(1)
        await there.listen(there.far)
        await trio.sleep(UNREACHED_S)
        assert there.reconnected == ["far", "far"]
        assert there.unreached == []


async def test_who_refuses_is_reached() -> None:
    async with setting() as there:
        there.far.refuses = True
        await there.listen(there.far)
        there.peers.send("far", LinkOpen(1))
        await trio.sleep(3 * UNREACHED_S)
        assert len(there.refusals) > 1
        assert there.reach == []
        assert there.unreached == []


async def test_what_cannot_be_said_is_dropped_and_told_and_the_daemon_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async with setting() as there:
        await there.listen(there.far)
        there.peers.send("far", RoundCommit(1, 1, math.inf))
        await trio.sleep(1)
        there.peers.send("far", LinkOpen(1))
        await trio.sleep(RETRY_MAX_S)
        assert there.far.heard == opens(1)
        assert there.peers.offences.counts["unforeseen_errors"] == 1
        assert there.reconnected == []
    assert "a message to far that cannot be written is left out: a bug in peerd" in caplog.text


async def test_who_refuses_is_asked_again_later() -> None:
    async with setting() as there:
        await there.listen(there.far)
        there.far.refuses = True
        there.peers.send("far", LinkOpen(1))
        await trio.sleep(REFUSED_RETRY_S / 2)
        (refusal,) = there.refusals
        assert (refusal.field, refusal.here, refusal.there) == ("swarm", "theirs", "swarm")
        there.far.refuses = False  # it was restarted with the right model
        await trio.sleep(REFUSED_RETRY_S)
        assert len(there.refusals) == 1
        assert there.reconnected == ["far"]
        there.peers.send("far", LinkOpen(2))
        await trio.sleep(1)
        assert there.far.heard == opens(2)


async def test_an_idle_connection_is_closed_and_made_anew() -> None:
    async with setting() as there:
        await there.listen(there.far)
        there.peers.send("far", LinkOpen(1))
        await trio.sleep(IDLE_S / 2)
        there.peers.send("far", LinkOpen(2))
        await trio.sleep(IDLE_S * 0.9)
        assert len(there.far.connections) == 1, "a message puts it off"
        await trio.sleep(IDLE_S)
        assert there.far.closed == 1
        there.peers.send("far", LinkOpen(3))
        await trio.sleep(1)
        assert there.far.heard == opens(1, 2, 3)
        assert len(there.far.connections) == 2
        assert there.reconnected == [], "nothing was lost"


async def test_a_peer_that_answers_on_our_connection_is_cut_off() -> None:
    async with setting() as there:
        await there.listen(there.far)
        there.peers.send("far", LinkOpen(1))
        await trio.sleep(1)
        await there.far.connections[0].send(LinkOpen(9))
        await trio.sleep(RETRY_MAX_S)
        assert len(there.far.connections) == 2
        assert there.reconnected == ["far"]


@pytest.mark.parametrize("how", ["forgotten", "without an address"])
async def test_a_peer_that_is_gone_is_no_longer_dialled(how: str) -> None:
    async with setting() as there:
        scope = await there.listen(there.far)
        there.peers.send("far", LinkOpen(1))
        await trio.sleep(1)
        address = there.addresses.pop("far")
        if how == "forgotten":
            there.peers.forget("far")
            there.peers.forget("far")
        else:
            scope.cancel()
        await trio.sleep(RETRY_MAX_S)
        assert there.far.closed == 1
        if how == "without an address":
            await there.listen(there.far)
        await trio.sleep(10 * RETRY_MAX_S)
        assert len(there.far.connections) == 1
        there.addresses["far"] = address  # it is back: the next message finds it
        there.peers.send("far", LinkOpen(2))
        await trio.sleep(1)
        assert there.far.heard == opens(1, 2)


async def test_what_has_not_left_is_not_queued_again() -> None:
    async with setting() as there:
        await there.listen(there.far)
        for message in opens(1, 1, 2):
            there.peers.send("far", message)
        await trio.sleep(1)
        assert there.far.heard == opens(1, 2)
        there.peers.send("far", LinkOpen(1))
        await trio.sleep(1)
        assert there.far.heard == opens(1, 2, 1)


async def test_a_report_that_waits_makes_way_for_a_newer_one() -> None:
    def report(progress: int) -> RoundReport:
        return RoundReport(1, RoundPhase.RUNNING, 0, 0, 1, progress, False, False, False)

    async with setting() as there:
        await there.listen(there.far)
        for message in (LinkOpen(1), report(1), LinkOpen(2), report(2), report(3)):
            there.peers.send("far", message)
        await trio.sleep(1)
        assert there.far.heard == [LinkOpen(1), report(3), LinkOpen(2)]
        for progress in range(4, 7):
            there.peers.send("far", report(progress))
        await trio.sleep(1)
        assert there.far.heard[3:] == [report(6)]
