"""One delta from one model into another, walked by hand: a palindrome of six rooms.

    trainer -> mode -> node -> codec -> wire -> tcp  ||  tcp -> wire -> codec -> node -> mode -> trainer

Read `walk` first, then the rooms in its order: each is one function, and its first line names the file of the room.
All of it is the real code, with real sockets on loopback; only the two processes of a node are one here.
"""

from __future__ import annotations

import math
import os
import random
from typing import TypeVar

import numpy as np
import torch
import trio
from torch import nn

from peerd.effects import Effect, Publish, Send, StepReport, Vector
from peerd.lane import HandOver, Lane
from peerd.messages import Delta, LinkOpen, LinkSnapshot, Message
from peerd.replica import Replica
from peerd.shared_memory import SharedMemory
from peerd.training import delta
from peerd.training.delta import Layout
from peerd.training.flat import FlatModel
from peerd.training.modes import ModeSettings
from peerd.training.modes.gossip import Gossip
from peerd.training.trigger import parse_trigger
from peerd.transport import wire
from peerd.transport.link import Link
from peerd.transport.tcp import TcpTransport

M = TypeVar("M", bound=Message)
ROUNDING = 2.0**-22  # of float32 values below 4


async def walk(here: Node, there: Node, road: Road) -> None:
    await a_link_is_opened(here, there, road)
    start = there.parameters()  # what both ends' references hold now

    change = trainer_takes_an_optimizer_step(here)
    await mode_asks_for_a_copy(here, change)
    trainer_publishes(here)
    half = await node_begins_an_exchange(here, change)
    codec_made_chunks_of_the_difference(half, here.parameters() - start)
    wire_keeps_every_field(half)
    half = await tcp_carries(half, road.out)
    # ------------------------------------------------------------------------ the other machine
    stepped = here.parameters()
    answer = await node_completes_the_exchange(there, half)
    taken = trainer_takes_the_correction(there)

    # the answer walks back, so that the partner is corrected by exactly the opposite
    answer = await tcp_carries(answer, road.back)
    await node_hears_the_answer(here, answer)
    given = trainer_takes_the_correction(here)

    # by hand: x_i += gain * (r_j - r_i), where the references are the models, for this codec loses nothing
    gain = np.float32(min(half.gain, answer.gain))
    assert 0 < gain <= 0.5
    assert (taken == gain * (stepped - start)).all()
    assert (given == -taken).all()
    assert (there.parameters() == start + taken).all()
    assert (here.parameters() == stepped - taken).all()
    mean_before = (stepped.astype(np.float64) + start) / 2
    mean_after = (here.parameters().astype(np.float64) + there.parameters()) / 2
    assert np.abs(mean_after - mean_before).max() <= ROUNDING


# ----------------------------------------------------------------------------------------------------- the six rooms


def trainer_takes_an_optimizer_step(node: Node) -> float:
    """training/flat.py: the optimizer moves the model; how far is measured where the model lives."""
    before = node.parameters()
    node.model(torch.tensor([[1.0, 2.0, 3.0]])).sum().backward()
    node.optimizer.step()
    change = float(node.flat.change())
    assert math.isclose(change, np.linalg.norm(node.parameters() - before), rel_tol=1e-6)
    return change


async def mode_asks_for_a_copy(node: Node, change: float) -> None:
    """training/modes/gossip.py: the trigger fires for the partner drawn. Not a byte has moved so far."""
    report = StepReport(1, change, 1.0, published=False, finishing=False)
    await node.lane.call(lambda now: node.mode.on_step(report, now))
    assert node.only_effect() == Publish()


def trainer_publishes(node: Node) -> None:
    """peerd/shared_memory.py, peerd/replica.py: one copy, into memory that both processes map."""
    copy = node.replica.spare_copy
    node.publish(copy)
    node.replica.published(copy)
    assert (node.replica.values() == node.parameters()).all()


async def node_begins_an_exchange(node: Node, change: float) -> Delta:
    """peerd/lane.py around training/reference.py: our half of exchange 1 is under way, and nothing applied yet."""
    report = StepReport(1, change, 1.0, published=True, finishing=False)
    await node.lane.call(lambda now: node.mode.on_step(report, now))
    effect = node.only_effect()
    assert isinstance(effect, Send)
    assert isinstance(effect.message, Delta)
    assert (effect.peer, effect.message.seq, effect.message.wants_answer) == (node.partner, 1, True)
    return effect.message


def codec_made_chunks_of_the_difference(half: Delta, difference: Vector) -> None:
    """training/delta.py: the model less what the partner knows of it, in chunks of bytes."""
    decoded = np.empty_like(difference)
    delta.decode(half.codec, Layout(len(difference), len(difference)), half.chunks, decoded)
    assert (decoded == difference).all()


def wire_keeps_every_field(half: Delta) -> None:
    """transport/wire.py: fields into a header, chunks beside it and not copied."""
    header, chunks = wire.encode(half)
    assert wire.decode(Delta.KIND, header, payload_limit=1 << 20).message(chunks) == half


async def tcp_carries(message: M, lane: Direction) -> M:
    """transport/tcp.py, transport/framing.py: one frame, checksummed, from one socket to the other."""
    await lane.dialled.send(message)
    arrived = await lane.accepted.receive()
    assert type(arrived) is type(message)
    return arrived


async def node_completes_the_exchange(node: Node, half: Delta) -> Delta:
    """peerd/lane.py, training/reference.py: both halves are known here; the correction waits for the trainer."""
    await node.lane.call(lambda now: node.mode.on_message(node.partner, half, now))
    reply, hand_over = node.effects()
    assert isinstance(reply, Send)
    assert isinstance(reply.message, Delta)
    assert isinstance(hand_over, HandOver)
    node.handed = hand_over.half
    return reply.message


async def node_hears_the_answer(node: Node, answer: Delta) -> None:
    """The same room, for whoever began."""
    await node.lane.call(lambda now: node.mode.on_message(node.partner, answer, now))
    hand_over = node.only_effect()
    assert isinstance(hand_over, HandOver)
    node.handed = hand_over.half


def trainer_takes_the_correction(node: Node) -> Vector:
    """training/flat.py: between two steps, by the model's only owner. Returns what was added."""
    correction = node.memory.corrections[node.handed].copy()
    expected = node.replica.values().copy()
    node.flat.add(correction)
    node.replica.taken(node.handed)
    assert (node.replica.values() == expected).all(), "taking a correction changes nothing of what the daemon knows"
    assert (node.parameters() == expected).all()
    assert float(node.flat.change()) == 0, "a correction is not the trainer's own change: nothing echoes"
    return correction


# ----------------------------------------------------------------------------------------------------- what they need


class Node:
    """The trainer's half, the daemon's half, and the memory between them."""

    def __init__(self, name: str, partner: str, weight: float) -> None:
        self.name, self.partner = name, partner
        # the trainer's process
        self.model = nn.Linear(3, 2)
        nn.init.constant_(self.model.weight, weight)
        nn.init.constant_(self.model.bias, 1.0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125)
        self.flat = FlatModel(self.model)
        self.memory = SharedMemory.create(self.flat.total)
        self.publish(0)
        # the daemon's process
        self.handed = -1
        self._asked: list[Effect | HandOver] = []
        mapped = SharedMemory(os.dup(self.memory.fd), self.flat.total)
        mapped.close_fd()
        self.memory.close_fd()
        self.replica = Replica(mapped)
        layout = Layout(self.flat.parameters, self.flat.total)
        settings = ModeSettings("float32", parse_trigger("change:0.05"), view=1)
        self.mode = Gossip(name, layout, random.Random(1), settings, self.replica.values)
        self.lane = Lane(self._note)
        self.lane.replica, self.lane.mode = self.replica, self.mode

    def publish(self, copy: int) -> None:
        torch.from_numpy(self.memory.copies[copy]).copy_(self.flat.gather())

    def parameters(self) -> Vector:
        """As the optimizer sees them."""
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().numpy().copy()

    def effects(self) -> list[Effect | HandOver]:
        """What the mode asked for since the last call; corrections are in the replica already."""
        asked, self._asked = self._asked, []
        return asked

    def only_effect(self) -> Effect | HandOver:
        (effect,) = self.effects()
        return effect

    async def _note(self, effects: list[Effect | HandOver]) -> None:
        self._asked += effects


class Direction:
    """One connection, used in one direction, as peerd/peers.py does."""

    def __init__(self, dialled: Link, accepted: Link) -> None:
        self.dialled, self.accepted = dialled, accepted


class Road:
    """A connection each way."""

    def __init__(self, out: Direction, back: Direction) -> None:
        self.out, self.back = out, back


async def a_link_is_opened(here: Node, there: Node, road: Road) -> None:
    """Before any delta: `there` sends its model, and both references of both ends start from those bits."""
    await here.lane.call(lambda now: here.mode.on_peers(frozenset({"there"}), now))
    effect = here.only_effect()
    assert isinstance(effect, Send)
    assert isinstance(effect.message, LinkOpen)
    asked = await tcp_carries(effect.message, road.out)
    await there.lane.call(lambda now: there.mode.on_message("here", asked, now))
    effect = there.only_effect()
    assert isinstance(effect, Send)
    assert isinstance(effect.message, LinkSnapshot)
    snapshot = await tcp_carries(effect.message, road.back)
    await here.lane.call(lambda now: here.mode.on_message("there", snapshot, now))
    assert not here.effects()


async def connect(transport: TcpTransport, nursery: trio.Nursery) -> Direction:
    give, take = trio.open_memory_channel[Link](1)

    async def accepted(link: Link) -> None:
        await give.send(link)
        await trio.sleep_forever()

    address = await nursery.start(transport.listen, ("127.0.0.1", 0), accepted)
    return Direction(await transport.dial(address), await take.receive())


def test_a_delta_walks_a_straight_line() -> None:
    async def main() -> None:
        here, there = Node("here", "there", weight=0.5), Node("there", "here", weight=-0.25)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                transport = TcpTransport(nursery)
                road = Road(await connect(transport, nursery), await connect(transport, nursery))
                nursery.start_soon(here.lane.run)
                nursery.start_soon(there.lane.run)
                await walk(here, there, road)
                nursery.cancel_scope.cancel()

    trio.run(main)
