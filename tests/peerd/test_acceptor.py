"""Who speaks in this node's own name is not heard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from peerd.daemon.acceptor import Acceptor
from peerd.transport.connection import Connection, ConnectionLost
from peerd.transport.hello import greet
from peerd.transport.memory import MemoryNetwork
from peerd.transport.messages import Hello, LinkOpen, Member, MemberTable, Message, ModelRequest, Plan, State

pytestmark = pytest.mark.trio(clock="autojump")
ME = Member("me", "me", "b", 1, 1, 0, State.ALIVE, "", b"")


def hello(node: str) -> Hello:
    return Hello(1, "swarm", "", node, node, 1, "a", 1, "gossip", "", ())


@pytest.mark.parametrize("message", [LinkOpen(1), ModelRequest(), Plan(1, "a"), MemberTable("a", ())], ids=repr)
@pytest.mark.parametrize("node", ["me", "other"])
async def test_in_ones_own_name_there_are_only_tables(message: Message, node: str) -> None:
    heard: list[str] = []

    async def on_message(sender: str, message: Message, plan: Plan) -> None:
        await trio.lowlevel.checkpoint()
        heard.append(sender)

    async def on_table(link: Connection, table: MemberTable) -> None:
        await trio.lowlevel.checkpoint()
        heard.append(table.sender)

    peers = SimpleNamespace(count=lambda link: None, close=lambda link: link.aclose())
    service = SimpleNamespace(on_message=on_message, layout=None)
    acceptor = Acceptor(
        ME, lambda: hello("me"), cast(Any, peers), cast(Any, service), cast(Any, SimpleNamespace(answer=on_table))
    )
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery)
        await nursery.start(network.transport("b").listen, ("b", 1), acceptor.accept)
        link = await network.transport("a").dial(("b", 1))
        await greet(link, hello(node))
        await link.send(message)
        with trio.move_on_after(1) as waited:
            with pytest.raises(ConnectionLost):
                await link.receive()
        dropped = not waited.cancelled_caught
        nursery.cancel_scope.cancel()
    allowed = node == "other" or isinstance(message, MemberTable)
    assert dropped == (not allowed)
    if not allowed:
        assert heard == []
