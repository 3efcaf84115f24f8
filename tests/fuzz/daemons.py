"""Two real daemons and their trainers, in virtual time, and somebody who can reach the first one's port.

Everything is run at the end of an episode. An item is one byte that says by whom and what, then bytes: of a datagram,
of a stream, of a question on the control socket, or a seed for what becomes of a message that one daemon has said to
the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
import trio
from attacked import ROWS
from decoders import ALL, mutated_header, mutated_stream, nearly_right_header, stream
from material import on_the_wire, pick, samples
from mutate import altered, packed
from target import Drawn
from thin import Swarm, simulate

from peerd.daemon.control import _answer
from peerd.daemon.node import PROTOCOL
from peerd.daemon.verbs import Verbs
from peerd.local import local_socket
from peerd.transport import framing, wire
from peerd.transport.connection import ConnectionLost
from peerd.transport.ids import Address
from peerd.transport.messages import Ack, Hello, Member, Message, Plan, State

DATAGRAM, STREAM, SAID, PAUSE, VERB = 0x00, 0x40, 0x80, 0xC0, 0x20
WHO = ("x", "b", "m", "a")  # a stranger; the name of the other one; a member; the attacked one's own name
DATAGRAMS = [sample for kind, each in samples().items() if kind < wire.FIRST_HANDSHAKE_KIND for sample in each]
STEPS_MAX = 1 << 20
VERBS: tuple[dict[str, Any], ...] = (  # but for what ends a node, or writes where it is told
    {"kind": "members"}, {"kind": "status"}, {"kind": "info"}, {"kind": "mode"}, {"kind": "nothing"},
    {"kind": "join", "address": "10.9.0.1:7946"}, {"kind": "forgive", "member": "b"}, {"kind": "revoke", "node": "b"},
    {"kind": "token", "uses": 1, "expires": "1h", "issuer": False}, {"kind": "mode_set", "text": "gossip view=2"},
)  # fmt: skip


class Daemons(Drawn):
    """The first item names the mode."""

    def __init__(self) -> None:
        self._items: list[bytes] = []

    def draw(self, rng: Random) -> bytes:
        if not self._items:
            return bytes([int(rng.random() * len(ROWS))])
        what, who = rng.random(), int(rng.random() * len(WHO))
        if what < 0.1:
            return bytes([PAUSE, int(rng.random() * 256)])
        if what < 0.15:
            asked = dict(pick(rng, VERBS))
            name = pick(rng, list(asked))
            asked[name] = altered(rng, asked[name]) if rng.random() < 0.7 else asked[name]
            return bytes([VERB]) + packed(asked)
        if what < 0.3:
            sample = pick(rng, DATAGRAMS)
            return bytes([DATAGRAM | who, *wire.DATAGRAM_PREFIX, sample.kind]) + mutated_header(rng, sample)
        if what < 0.6:
            return bytes([STREAM | who]) + mutated_stream(rng, pick(rng, ALL))
        return bytes([SAID | who]) + rng.randbytes(8)

    def take(self, item: bytes) -> None:
        self._items.append(item)

    def close(self) -> None:
        items, self._items = [item for item in self._items if item], []
        if items:
            logging.getLogger("peerd").setLevel(logging.CRITICAL)
            simulate(1, partial(_attack, items))


async def _attack(items: list[bytes], swarm: Swarm) -> None:
    mode, options = ROWS[items[0][0] % len(ROWS)]
    await swarm.start("ab", steps=STEPS_MAX, wait_for=2, mode=mode, **options)
    await swarm.eventually(lambda: all(node.trainer.step > 2 for node in swarm.nodes.values()))
    attacker = Attacker(swarm)
    for item in items[1:]:
        await attacker.do(item)
    await trio.sleep(1.0)
    for node in swarm.nodes.values():
        assert node.runs
        assert node.daemon.model.fatal is None
        assert np.isfinite(node.trainer._model).all(), "a model is not finite"
    if attacker.unforeseen:
        raise attacker.unforeseen[0]


class Attacker:
    """It has another name each time that it is cut off, for who breaks the rules is not heard for long."""

    def __init__(self, swarm: Swarm) -> None:
        self.unforeseen: list[Exception] = []
        self._network: Any = swarm.network
        self._target: Address = swarm.nodes["a"].address
        self._lines: dict[str, Any] = {}
        self._cut = 0  # how often it was
        self._said: list[Message] = []
        self._row = swarm.nodes["b"].daemon.me
        self._verbs = Verbs(swarm.nodes["a"].daemon).table()
        for node in swarm.nodes.values():
            runner = node.daemon.model.runner
            runner.on_message = self._listening(runner.on_message)  # type: ignore[method-assign]
            node.daemon.peers.offences.unforeseen = self._note  # type: ignore[method-assign]
        about = swarm.nodes["b"].daemon.view.membership.me.meta
        self._member = Member("m", "m", "10.9.0.1", 7946, 1, 0, State.ALIVE, "", about)

    def _note(self, error: Exception, what: str) -> None:
        self.unforeseen.append(error)

    def _listening(self, heard: Callable[..., Any]) -> Callable[..., Any]:
        async def hear(sender: str, message: Message, plan: Plan) -> None:
            if len(self._said) < 64:
                self._said.append(message)
            await heard(sender, message, plan)

        return hear

    async def do(self, item: bytes) -> None:
        """One item."""
        what, who, data = item[0] & 0xE0, WHO[item[0] % len(WHO)], item[1:]
        if what == VERB:
            await self._ask(data)
        elif what == PAUSE:
            await trio.sleep(0.1 * (1 + data[0] % 16) if data else 1.0)
        elif what == DATAGRAM:
            self._network.deliver((f"10.9.0.{ord(who[0])}", 7946), self._target, data)
        elif what == STREAM:
            self._say(who, data)
        elif self._said:
            rng = Random(data)
            sample = on_the_wire(pick(rng, self._said))
            self._say(who, stream(rng, sample, nearly_right_header(rng, sample), sample.chunks))
        await trio.sleep(0.01)

    async def _ask(self, body: bytes) -> None:
        """A question of this user's; what cannot be answered is said, and no other verb is asked than those above."""
        try:
            question = local_socket.take(bytearray(len(body).to_bytes(4, "little") + body))
        except ValueError:
            return
        if question is not None and question.get("kind") in [verb["kind"] for verb in VERBS]:
            with trio.move_on_after(5.0):  # who joins nobody waits
                local_socket.pack(await _answer(self._verbs, question))

    def _say(self, who: str, data: bytes) -> None:
        try:
            if who not in self._lines:
                name = f"{who}{self._cut}" if who in "xm" else who
                if who == "m":
                    self._become_member(name)
                self._lines[who] = self._network.connect(f"{name}.host", self._target)
                hello = Hello(PROTOCOL, "peerd", "", name, name, 1, "10.9.0.1", 7946, "", "", ())
                data = b"".join(map(bytes, framing.frames(hello))) + data
            self._lines[who]._stream.send_some([data])
        except (ConnectionLost, BlockingIOError):
            self._cut += 1
            if (line := self._lines.pop(who, None)) is not None:
                line.drop(ConnectionLost("cut off"))

    def _become_member(self, name: str) -> None:
        """By a datagram, as good as any member's; the one before has gone."""
        before = replace(self._member, state=State.LEFT)
        self._member = replace(self._member, id=name, name=name, port=self._member.port + 1)
        tell = Ack(0, name, (before, self._member))
        self._network.deliver(("10.9.0.1", 7946), self._target, wire.encode_datagram(tell))
