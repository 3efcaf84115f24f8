"""Keys change while nodes crash, come back from their disks and cannot reach each other: who is in stays in, who is
revoked stays out."""

from __future__ import annotations

import random
import tempfile
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from secret_swarm import KEYS, Node, inline_threads, push_pull

from peerd.security import shared_secrets, wall_clock
from peerd.security.keyring import SPREAD_S
from peerd.transport.errors import PeerError, UserError

pytestmark = pytest.mark.trio(clock="autojump")
NOW = wall_clock.now()
NODES = range(len(KEYS))
ISSUERS = (0, 1)
node = st.sampled_from(NODES)
event = st.one_of(
    st.tuples(st.just("push_pull"), node, node),
    st.tuples(st.just("push_pull"), node, node),
    st.tuples(st.just("crash"), node, node),
    st.tuples(st.just("part"), node, node),  # those below from those above
    st.tuples(st.just("heal"), node, node),
    st.tuples(st.just("revoke"), st.sampled_from(ISSUERS), st.sampled_from(NODES[2:])),
    st.tuples(st.just("replace"), st.just(0), st.sampled_from([1, 4])),  # in force so many hours more
    st.tuples(st.just("wait"), st.sampled_from([1, 60, 3600, 86400]), node),
)


class World:
    """A few nodes, and who reaches whom."""

    def __init__(self, folder: Path, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.nodes = [Node(folder, index) for index in NODES]
        self.parted = 0
        self.out: set[int] = set()
        self.issuers = set(ISSUERS)
        for one in self.nodes:
            one.start(nursery)

    async def do(self, what: str, one: int, other: int) -> None:
        here, there = self.nodes[one] if one in NODES else self.nodes[0], self.nodes[other]
        if what == "push_pull":
            await self.meet(here, there)
        elif what == "crash" and here.runs:
            here.crash()
        elif what == "crash":
            self.start(here)
        elif what in ("part", "heal"):
            self.parted = one if what == "part" else 0
        elif what == "revoke" and here.runs and one in self.issuers:
            await here.secrets.revoke(there.id)
            self.out.add(other)
        elif what == "replace" and here.runs and self.nodes[1].runs and not self.parted:
            await self.meet(self.nodes[1], here)  # whose revocations the new authority is to sign
            with suppress(UserError):  # one after the other
                await here.secrets.replace_authority(here.authority, wall_clock.now() + timedelta(hours=other))
                self.issuers = {0}
        elif what == "wait":
            await trio.sleep(one)

    def start(self, one: Node) -> None:
        try:
            one.start(self.nursery)
        except UserError:
            assert one.index in self.out

    async def meet(self, here: Node, there: Node) -> None:
        one_side = (here.index < self.parted) == (there.index < self.parted)
        if here is not there and here.runs and there.runs and one_side:
            try:
                await push_pull(here, there)
            except PeerError:
                assert self.out & {here.index, there.index} or not believe_each_other(here, there)

    async def settle(self) -> None:
        """All run and reach each other, for as long as it takes the keys to settle."""
        self.parted = 0
        for one in self.nodes:
            if not one.runs:
                self.start(one)
        for _ in range(4):
            for here in self.nodes:
                for there in self.nodes:
                    await self.meet(here, there)
            await trio.sleep(1.3 * SPREAD_S)


def believe_each_other(one: Node, other: Node) -> bool:
    """As the handshake has it."""
    return bool(set(one.trust.authorities) & set(other.trust.authorities))


@settings(max_examples=60)
@given(st.lists(event, max_size=25))
async def test_nobody_is_locked_out_but_who_is_revoked(events: list[tuple[str, int, int]]) -> None:
    with inline_threads(), patch.object(wall_clock, "now", by_trio), tempfile.TemporaryDirectory() as folder:
        async with trio.open_nursery() as nursery:
            world = World(Path(folder), nursery)
            for one in events:
                await world.do(*one)
            await world.settle()
            check(world)
            nursery.cancel_scope.cancel()


def by_trio() -> datetime:
    """Virtual time on the wall, too."""
    return NOW + timedelta(seconds=int(trio.current_time()))


def check(world: World) -> None:
    believed = [one for one in world.nodes if believe_each_other(one, world.nodes[0])]
    newest = world.nodes[0].secrets.succession.known
    assert all(one.secrets.succession.known < newest for one in world.nodes if one not in believed), "it was off"
    inside = [one for one in believed if one.index not in world.out]
    outside = [one for one in world.nodes if one.index in world.out and one.runs]
    assert len({one.secrets.keyring.digest for one in inside}) == 1
    assert len({one.secrets.revocations.digest for one in inside}) == 1
    assert len({one.trust.authorities for one in inside}) == 1
    assert all(one.secrets.is_revoked(KEYS[other].id) for one in inside for other in world.out)
    for here in inside:
        assert all(here.is_heard_by(there) for there in inside if there is not here)
        assert not any(here.is_heard_by(there) for there in outside), "it opens what it must not"
        assert not any(there.is_heard_by(here) for there in outside), "it is heard"


async def test_a_change_of_the_key_is_noticed_by_nobody(tmp_path: Path) -> None:
    """Each node exchanges tables twice a minute; at every moment everybody hears everybody."""
    with inline_threads(), patch.object(shared_secrets, "ROTATE_S", 6 * SPREAD_S):
        async with trio.open_nursery() as nursery:
            world, rng = World(tmp_path, nursery), random.Random(3)
            await world.settle()
            numbers = set()
            for _ in range(100):
                for here in world.nodes:
                    await world.meet(here, rng.choice(world.nodes))
                numbers.add(world.nodes[5].secrets.counts["datagram_key_number"])
                assert all(one.is_heard_by(other) for one in world.nodes for other in world.nodes if one != other)
                await trio.sleep(SPREAD_S / 4)
            assert len(numbers) >= 3
            nursery.cancel_scope.cancel()
