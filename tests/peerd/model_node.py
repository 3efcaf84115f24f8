"""A node's model side in this process: its peers are a list, its members a dict, its trainer a script of words."""

from __future__ import annotations

import math
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from peerd.daemon.control import LocalConnection
from peerd.daemon.offences import Offences
from peerd.daemon.trainer_service import TrainerService
from peerd.local.shared_memory import SharedMemory
from peerd.node.meta import NodeMeta
from peerd.settings import Settings
from peerd.transport.ids import NodeId
from peerd.transport.messages import Member, Message, State

TENSORS = ["weight float32 2x2", "bias float32 2"]
SIGNATURE = "5" * 64


class Node:
    """What a daemon builds around a model side."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.bytes_received = 0
        self.offences = Offences()
        self.far: list[NodeId] = []  # whom nobody can dial
        self.sent: list[tuple[NodeId, Message]] = []
        self.members: dict[NodeId, Member] = {}
        told = Settings(**{"name": "me", "state_dir": str(folder), "codec": "float32", "trigger": "always", **settings})
        self.side = TrainerService("me", told, self, lambda: dict(self.members), self._say, random.Random(1))  # type: ignore[arg-type]
        self.member("me", self.side.meta)

    @property
    def attached(self) -> bool:
        """Whether there is a trainer."""
        return self.side._runner.session is not None

    def member(self, id: NodeId, about: NodeMeta) -> None:
        self.members[id] = Member(id, id, "h", 1, 1, 0, State.ALIVE, "", about.pack())
        self.side.on_members()

    async def _say(self, about: NodeMeta) -> None:
        await trio.lowlevel.checkpoint()
        self.member("me", about)

    # the peers

    def send(self, peer: NodeId, message: Message) -> None:
        self.sent.append((peer, message))

    def unreached(self) -> dict[NodeId, float]:
        return dict.fromkeys(self.far, 31.0)

    async def drain(self) -> None:
        await trio.lowlevel.checkpoint()

    async def sent_to(self, peer: NodeId, kind: type[Message]) -> Message:
        """The first message of this kind to `peer`, once there is one."""
        while True:
            for target, message in self.sent:
                if target == peer and isinstance(message, kind):
                    return message
            await trio.sleep(0.001)


class Script:
    """A trainer that says what the test makes it say."""

    def __init__(self, total: int = 6) -> None:
        self.memory = SharedMemory.create(total)
        ours, theirs = socket.socketpair()
        self._socket = trio.socket.from_stdlib_socket(ours)
        self._connection = LocalConnection(self._socket)
        self.daemons_end = LocalConnection(trio.socket.from_stdlib_socket(theirs))
        self._their_socket = theirs
        self.samples = 0
        self.lr_max = 0.0
        self.loss = math.nan
        self.heard: list[dict[str, Any]] = []
        self.served = trio.Event()
        self.attach = {
            "kind": "attach", "pid": 1234, "tensors": TENSORS, "parameters": total, "total": total,
            "signature": SIGNATURE, "variances": [], "ends": [], "states": 0, "gradients": 0,
        }  # fmt: skip

    async def serve(self, node: Node) -> None:
        """The daemon's side of the session, until it is over."""
        self.daemons_end.fds = [os.dup(self.memory.fd)]
        try:
            await node.side.attach(self.daemons_end, self.attach)
        finally:
            self.daemons_end.close_fds()
            self.daemons_end._socket.close()
            self.served.set()

    async def say(self, kind: str, **content: Any) -> None:
        await self._connection.send({"kind": kind, **content})

    async def step(
        self,
        step: int,
        *,
        lr: float = 0.1,
        published: int | None = None,
        loss: float = math.nan,
        samples: int = 0,
        metrics: Mapping[str, float] | None = None,
        **rest: Any,
    ) -> None:
        self.samples += samples
        self.loss = loss if math.isfinite(loss) else self.loss
        self.lr_max = max(lr, self.lr_max)
        self.memory.board.note(step, self.samples, time.monotonic(), self.loss, lr, self.lr_max, metrics or {})
        report = {"step": step, "change": 0.5, "lr": lr, "lr_ratio": 1.0, "stands": False, "published": published}
        await self.say("step", **report, **rest)

    async def say_bytes(self, data: bytes) -> None:
        await self._socket.send(data)

    async def hear(self, kind: str) -> dict[str, Any]:
        """The next message of this kind; the others before it are kept in `heard`."""
        while (message := await self._connection.receive()) is not None:
            if message.get("kind", "error") == kind:
                return message
            self.heard.append(message)
        raise EOFError(kind)

    async def trains(self, step: int = 0) -> dict[str, Any]:
        """Come as far as the first step; what `start` said."""
        await self.hear("welcome")
        await self.say("ready", step=step)
        start = await self.hear("start")
        await self.hear("go")
        return start

    async def asked_to_publish(self) -> int:
        """Wait for it, if it has not come already; the copy to write."""
        if not any(message["kind"] == "publish" for message in self.heard):
            await self.hear("publish")
        return 1 - self.memory.board.current

    async def silent(self) -> bool:
        """Whether nothing more comes for a moment."""
        with trio.move_on_after(0.05):
            await self._connection.receive()
            return False
        return True

    def leave(self) -> None:
        self._socket.close()

    def close(self) -> None:
        self._socket.close()
        self._their_socket.close()
        self.memory.close_fd()


@asynccontextmanager
async def running(node: Node) -> AsyncIterator[trio.Nursery]:
    """With the node's tasks."""
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.side.run)
            yield nursery
            nursery.cancel_scope.cancel()


async def until(condition: Any) -> None:
    while not condition():
        await trio.sleep(0.001)
