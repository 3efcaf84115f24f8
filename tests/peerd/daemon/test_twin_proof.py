"""Who can make a node believe that another runs with its key: a newer life of it, and nobody else."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from connection_ends import receive_a
from thin import KEY, Swarm, simulate

from peerd.daemon.node import Daemon, running
from peerd.daemon.twin_proof import TwinProof
from peerd.local import identity
from peerd.local.node_key import NodeKey
from peerd.settings import Settings
from peerd.transport.connection import Connection, ConnectionLost
from peerd.transport.errors import PeerError
from peerd.transport.hello import answer
from peerd.transport.ids import Address
from peerd.transport.memory import MemoryNetwork
from peerd.transport.messages import Challenge, Member, Proof, SpeedRequest, State, Welcome

pytestmark = pytest.mark.trio(clock="autojump")

OURS, OTHERS = NodeKey.generate(), NodeKey.generate()
LIAR: Address = ("liar", 1)


class Life:
    """One process of a node, listening at its own address."""

    def __init__(
        self, network: MemoryNetwork, host: str, epoch: int, key: NodeKey = OURS, swarm: str = "swarm"
    ) -> None:
        self.address = host, 7946
        me = Member(key.id, "n", *self.address, epoch, 0, State.ALIVE, "", b"")
        self.twin_proof = TwinProof(key, lambda: me, swarm, "run", network.transport(host))
        self.ends: list[type[Exception]] = []

    async def accept(self, connection: Connection) -> None:
        try:
            await answer(connection, lambda _: None, Welcome("", "", 0), {Challenge: self.twin_proof.answer})
        except (PeerError, ConnectionLost) as error:
            self.ends.append(type(error))


class Setting:
    """A network, and who is on it."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.network = MemoryNetwork(nursery)
        self._nursery = nursery

    async def life(self, host: str, epoch: int, **other: Any) -> Life:
        life = Life(self.network, host, epoch, **other)
        await self.listen(life.address, life.accept)
        return life

    async def listen(self, address: Address, accept: Callable[[Connection], Awaitable[None]]) -> None:
        await self._nursery.start(self.network.transport(address[0]).listen, address, accept)

    async def ask(self, address: Address, challenge: Challenge) -> Proof:
        """As the liar, who passes on what was asked."""
        connection = await self.network.transport("liar").dial(address)
        try:
            await connection.send(challenge)
            return await receive_a(Proof, connection)
        finally:
            await connection.aclose()

    async def relay(self, target: Address, change: Callable[[Proof], Proof] = lambda proof: proof) -> None:
        """Answer at LIAR with what `target` says."""

        async def accept(connection: Connection) -> None:
            challenge = await receive_a(Challenge, connection)
            await connection.send(change(await self.ask(target, challenge)))

        await self.listen(LIAR, accept)


@asynccontextmanager
async def setting() -> AsyncIterator[Setting]:
    async with trio.open_nursery() as nursery:
        yield Setting(nursery)
        nursery.cancel_scope.cancel()


async def test_the_newer_of_two_lives_is_proved_to_the_older_and_not_the_other_way() -> None:
    async with setting() as there:
        older, newer = await there.life("b", 4), await there.life("a", 5)
        assert await older.twin_proof.prove(newer.address)
        assert not await newer.twin_proof.prove(older.address)
        assert newer.ends == [ConnectionLost], "who asked has its answer, and is no member"


async def test_of_two_lives_with_one_epoch_the_higher_address_is_proved() -> None:
    async with setting() as there:
        low, high = await there.life("a", 4), await there.life("b", 4)
        assert await low.twin_proof.prove(high.address)
        assert not await high.twin_proof.prove(low.address)


async def test_who_has_another_key_proves_nothing() -> None:
    async with setting() as there:
        mine, other = await there.life("a", 4), await there.life("b", 5, key=OTHERS)
        assert not await mine.twin_proof.prove(other.address)
        assert other.ends == [PeerError]


async def test_a_signature_of_another_key_proves_nothing() -> None:
    """The liar even takes our id for its own."""

    class Forged(NodeKey):
        def __init__(self) -> None:
            self.private, self.public, self.id = OTHERS.private, OTHERS.public, OURS.id

    async with setting() as there:
        mine, liar = await there.life("a", 4), await there.life("b", 5, key=Forged())
        assert not await mine.twin_proof.prove(liar.address)
        assert liar.ends == [ConnectionLost], "it has answered"


async def test_our_own_answer_proves_nothing() -> None:
    async with setting() as there:
        mine = await there.life("a", 4)
        await there.relay(mine.address)
        assert not await mine.twin_proof.prove(LIAR)
        assert mine.ends == [PeerError]
        assert not await mine.twin_proof.prove(mine.address)


async def test_our_own_answer_to_a_changed_question_proves_nothing() -> None:
    async with setting() as there:
        mine = await there.life("a", 4)

        async def accept(connection: Connection) -> None:
            challenge = await receive_a(Challenge, connection)
            await connection.send(await there.ask(mine.address, replace(challenge, life=bytes(16), epoch=3)))

        await there.listen(LIAR, accept)
        assert not await mine.twin_proof.prove(LIAR)
        assert mine.ends == [ConnectionLost], "it has answered"


async def test_a_twin_is_a_twin_whoever_passes_its_word_on() -> None:
    async with setting() as there:
        older, newer = await there.life("b", 4), await there.life("a", 5)
        await there.relay(newer.address)
        assert await older.twin_proof.prove(LIAR)
        assert not await newer.twin_proof.prove(LIAR)


@pytest.mark.parametrize(
    "change",
    [{"epoch": 9}, {"host": "z"}, {"port": 7947}, {"life": bytes(16)}, {"signature": bytes(64)}, {"signature": b""}],
)
async def test_what_a_twin_said_cannot_be_made_to_say_more(change: dict[str, Any]) -> None:
    async with setting() as there:
        mine, older = await there.life("b", 5), await there.life("a", 5)
        await there.relay(older.address, lambda proof: replace(proof, **change))
        assert not await mine.twin_proof.prove(LIAR)


async def test_an_earlier_proof_proves_nothing() -> None:
    async with setting() as there:
        older, newer = await there.life("b", 4), await there.life("a", 5)
        proofs: list[Proof] = []

        def record(proof: Proof) -> Proof:
            proofs.append(proof)
            return proofs[0]

        await there.relay(newer.address, record)
        assert await older.twin_proof.prove(LIAR)
        assert not await older.twin_proof.prove(LIAR)
        assert len(proofs) == 2


async def test_a_copy_in_another_swarm_is_no_twin() -> None:
    async with setting() as there:
        mine, other = await there.life("a", 4), await there.life("b", 5, swarm="other")
        assert not await mine.twin_proof.prove(other.address)


async def test_silence_something_else_and_nobody_prove_nothing() -> None:
    async def silent(connection: Connection) -> None:
        await trio.sleep_forever()

    async def strange(connection: Connection) -> None:
        await connection.send(SpeedRequest())
        await connection.receive()

    async with setting() as there:
        mine = await there.life("a", 4)
        await there.listen(("silent", 1), silent)
        await there.listen(("strange", 1), strange)
        for host in ("silent", "strange", "nobody"):
            assert not await mine.twin_proof.prove((host, 1))


@pytest.mark.parametrize("change", [{"nonce": b""}, {"nonce": bytes(400)}, {"life": bytes(17)}, {"node": OTHERS.id}])
async def test_only_questions_of_one_form_are_signed(change: dict[str, Any]) -> None:
    async with setting() as there:
        mine = await there.life("a", 4)
        question = replace(Challenge(OURS.id, bytes(32), bytes(16), 5), **change)
        with pytest.raises(ConnectionLost):
            await there.ask(mine.address, question)
        assert mine.ends == [PeerError]
        assert await there.ask(mine.address, Challenge(OURS.id, bytes(32), bytes(16), 5))


def test_a_running_node_answers_strangers_before_any_greeting() -> None:
    """Its id there is its name."""

    async def scenario(swarm: Swarm) -> None:
        await swarm.start("a", steps=100_000)
        node = swarm.nodes["a"]
        earlier = replace(node.daemon.me, epoch=node.daemon.me.epoch - 1, host="stranger")
        twin_proof = TwinProof(KEY, lambda: earlier, "peerd", "", swarm.network.carrier(swarm.nursery, "stranger"))
        assert await twin_proof.prove(node.address)
        assert not await node.daemon.twin_proof.prove(node.address)

    simulate(1, scenario)


async def test_of_two_nodes_with_copies_of_one_state_folder_the_older_has_the_proof(tmp_path: Path) -> None:
    """Over the network of this machine."""
    os.close(identity.take(tmp_path / "one").lock)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    os.close(identity.take(tmp_path / "copy").lock)

    @asynccontextmanager
    async def node(name: str) -> AsyncIterator[tuple[Daemon, Address]]:
        mine = identity.take(tmp_path / name)
        async with running(Settings(name=name, bind="127.0.0.1:0"), mine, expects=False) as (daemon, address):
            yield daemon, address
        os.close(mine.lock)

    async with node("one") as (one, where_one), node("copy") as (copy, where_copy):
        assert one.me.id == copy.me.id
        assert await one.twin_proof.prove(where_copy)
        assert not await copy.twin_proof.prove(where_one)
        assert not await one.twin_proof.prove(where_one)
