"""A node's whole receive path: frames, plans and messages of members, of every mode, while three nodes train."""

from __future__ import annotations

from contextlib import suppress
from random import Random

import numpy as np
from attacked import ROWS, Attacked
from decoders import fed, mutated_stream, nearly_right_header, stream
from material import on_the_wire, pick, samples
from target import Drawn

from peerd.training.codecs import vector
from peerd.training.codecs.vector import Layout
from peerd.training.mode_core import ModelAsked, PeersChanged, Received, SketchAsked
from peerd.training.sketch import unpacked
from peerd.transport.errors import PeerError
from peerd.transport.framing import FrameReader
from peerd.transport.hello import first_difference
from peerd.transport.messages import (
    AS_STARTED,
    Hello,
    Message,
    ModelEqual,
    ModelPromise,
    ModelRequest,
    ModelSketch,
    ModelSnapshot,
    Plan,
    SketchRequest,
)

HONEST = "abc"
SENDERS = "abcx"  # x is nobody
ROUND = 0xFF  # the first byte of an item that is a round of honest steps
EVERYTHING = [sample for each in samples().values() for sample in each]
OF_MODES = [sample for kind, each in samples().items() if 48 <= kind < 128 for sample in each]
MINE = Hello(1, "peerd", "", "a", "a", 1, "127.0.0.1", 7000, "gossip", "m", ("w float32 9", "b float32 3"))


class Connection:
    """What one sender has open to one receiver."""

    def __init__(self, limit: int) -> None:
        self.reader = FrameReader(limit)
        self.plan = AS_STARTED


class Nodes(Drawn):
    """Three that train, in the mode that the first item names. An item is who sends to whom, and bytes of a stream."""

    def __init__(self) -> None:
        self._swarm: Attacked | None = None
        self._heard = set(HONEST)
        self._connections: dict[tuple[str, str], Connection] = {}

    def draw(self, rng: Random) -> bytes:
        swarm = self._swarm
        if swarm is None:
            return bytes([int(rng.random() * len(ROWS))])
        if rng.random() < 0.1:
            return bytes([ROUND, int(rng.random() * 256)])
        sender = int(rng.random() * (4 if rng.random() < 0.1 else 3))
        target = (sender + 1 + int(rng.random() * 2)) % 3 if sender < 3 else int(rng.random() * 3)
        sample = None
        if swarm.said and rng.random() < 0.8:
            sample = on_the_wire(pick(rng, swarm.said))
        else:
            sample = pick(rng, OF_MODES if rng.random() < 0.8 else EVERYTHING)
        if rng.random() < 0.8:
            data = stream(rng, sample, nearly_right_header(rng, sample), sample.chunks)
        else:
            data = mutated_stream(rng, sample)
        return bytes([sender << 4 | target, 0 if rng.random() < 0.8 else int(rng.random() * 256)]) + data

    def take(self, item: bytes) -> None:
        if not item:
            return
        if self._swarm is None:
            self._swarm = Attacked(ROWS[item[0] % len(ROWS)])
            self._swarm.all_hear()
        elif item[0] == ROUND:
            self._round(self._swarm, item[-1])
        elif len(item) > 1:
            sender, target = SENDERS[(item[0] >> 4) % 4], HONEST[(item[0] & 15) % 3]
            if sender != target:
                self._hear(self._swarm, sender, target, item)

    def _round(self, swarm: Attacked, how: int) -> None:
        """Everybody makes a step, and some of what waits comes."""
        for name in HONEST:
            swarm.step(name, swarm.rng.normal(size=swarm.layout.total) * 0.1)
        for _ in range(how % 5):
            for link in swarm.waiting():
                swarm.deliver(*link)
        if how >= 190:
            swarm.pass_time(70.0 if how > 230 else 1.0)
        if how in (186, 187):  # a run ends, or another begins
            (swarm.finish if how == 186 else swarm.begin_again)(HONEST[swarm.messages % 3])
        if how in (188, 189):  # x comes, or goes: what it said before is heard then
            for name in HONEST:
                alive = frozenset(HONEST) - {name} | ({"x"} if how == 188 else set())
                swarm.perform(name, swarm.nodes[name].core.tell(PeersChanged(alive), swarm.now))
            self._heard |= {"x"}  # who has gone is heard for a while
        for name in HONEST:
            assert np.isfinite(swarm.nodes[name].x).all(), "a model is not finite"

    def _hear(self, swarm: Attacked, sender: str, target: str, item: bytes) -> None:
        """As the acceptor does: what breaks a rule ends this connection, and the honest one of this sender."""
        link = sender, target
        if link not in self._connections:
            self._connections[link] = Connection(vector.payload_limit(swarm.layout))
        try:
            for message in fed(self._connections[link].reader, item[2:], item[1]):
                self._dispatch(swarm, sender, target, message)
        except PeerError:
            del self._connections[link]
            if sender in HONEST:
                swarm.cut(sender, target)

    def _dispatch(self, swarm: Attacked, sender: str, target: str, message: Message) -> None:
        core = swarm.nodes[target].core
        connection = self._connections[sender, target]
        match message:
            case Plan():
                connection.plan = message
            case Hello():
                difference = first_difference(MINE, message)
                if difference is not None:
                    on_the_wire(difference)
            case ModelRequest(told):
                swarm.perform(target, core.tell(ModelAsked(sender, swarm.layout, told), swarm.now))
            case ModelSnapshot():
                _decode_model(swarm.layout, message)
            case SketchRequest(seed):
                swarm.perform(target, core.tell(SketchAsked(sender, swarm.layout, seed), swarm.now))
            case ModelSketch(_, sums):
                with suppress(ValueError):
                    unpacked(sums)
            case ModelEqual() | ModelPromise():
                pass
            case _:
                before = swarm.sent
                effects = core.tell(Received(sender, message, connection.plan), swarm.now)
                swarm.perform(target, effects)
                assert sender in self._heard or swarm.sent == before, "a stranger was answered"


def _decode_model(layout: Layout, message: ModelSnapshot) -> None:
    vector.decode(message.codec, layout, message.chunks, np.empty(layout.total, np.float32))
