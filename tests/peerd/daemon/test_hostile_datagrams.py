"""What can one datagram from anywhere do to a whole daemon?"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from peerd.daemon.node import Daemon, running
from peerd.local.identity import Identity
from peerd.local.node_key import NodeKey
from peerd.settings import load
from peerd.transport.messages import Ack, Message, PingRequest, State
from peerd.transport.udp import UdpDatagrams, bind_udp

KEY = NodeKey.generate()


def node(folder: Path) -> Any:
    told = {"name": "me", "bind": "127.0.0.1:0", "state_dir": str(folder), "insecure_plaintext": True}
    settings = load(told, {}, None)
    return running(settings, Identity(KEY, 3, -1), expects=False)


async def tell(stranger: UdpDatagrams, daemon: Daemon, *messages: Message) -> None:
    """Send these, and wait until they are read."""
    before = daemon.datagrams.bytes_received
    for message in messages:
        await stranger.send((daemon.me.host, daemon.me.port), message)
    with trio.fail_after(5):
        while daemon.datagrams.bytes_received - before < stranger.bytes_sent:
            await trio.sleep(0.005)
    for _ in range(10):  # what was read last is taken in
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("state", State)
async def test_a_datagram_with_our_id_and_another_life_ends_nothing(tmp_path: Path, state: State) -> None:
    async with node(tmp_path) as (daemon, _):
        stranger = await bind_udp(("127.0.0.1", 0))
        lie = replace(daemon.me, epoch=(1 << 53) - 1, state=state, port=stranger.address[1])
        await tell(stranger, daemon, Ack(0, "x", (lie,)), Ack(0, "x", (replace(lie, epoch=4),)))
        assert daemon.view.membership.counts["identity_conflict"] == 2
        assert daemon.model.fatal is None
        assert not daemon.model.failed.is_set()
        assert daemon.view.membership.me.epoch == 3
        await stranger.aclose()


async def test_no_name_is_looked_up_for_a_peer(tmp_path: Path) -> None:
    async with node(tmp_path) as (daemon, _):

        class Names(trio.abc.HostnameResolver):
            async def getaddrinfo(self, *what: Any) -> Any:
                raise AssertionError(f"looked up {what}")

            async def getnameinfo(self, *what: Any) -> Any:
                raise AssertionError(f"looked up {what}")

        trio.socket.set_custom_hostname_resolver(Names())
        stranger = await bind_udp(("127.0.0.1", 0))
        row = replace(daemon.me, id="x", host="nosuch.invalid")
        asked = PingRequest(1, "x", "x", "nosuch.invalid", 7946, (row,))
        await tell(stranger, daemon, Ack(0, "x", (row,)), asked)
        await daemon.datagrams.send(("nosuch.invalid", 7946), asked)
        assert set(daemon.members()) == {KEY.id}
        assert daemon.view.membership.counts["relays_refused"] == 1
        await stranger.aclose()


async def test_random_numbers_do_not_follow_from_the_identity(tmp_path: Path) -> None:
    drawn = []
    for _ in range(2):
        async with node(tmp_path) as (daemon, _):
            assert isinstance(daemon.model._rng, random.SystemRandom)
            drawn.append(daemon.view.membership._prober._take_seq())
    assert drawn[0] != drawn[1]
