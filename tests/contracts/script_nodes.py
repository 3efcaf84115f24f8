"""Real daemons on this machine's network with real scripts: all in this process, a script a thread."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import thin
import torch
import trio

from peerd.daemon import control
from peerd.daemon.node import Daemon
from peerd.daemon.verbs import Verbs
from peerd.local.local_socket import LocalSocket
from peerd.trainer import swarm as trainer_swarm

Script = Callable[[], None]
PATIENCE_S = 240.0


class ScriptTrainer:
    """In the place of thin.Trainer: the control socket, and a script that attaches to it."""

    here = threading.local()  # whose thread this is

    def __init__(self, path: Path, script: Script) -> None:
        self.path = path
        self.ended = trio.Event()
        self.links: list[LocalSocket] = []
        self._script = script

    async def run(self, daemon: Daemon) -> None:
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(control.serve, self.path, Verbs(daemon).table(), daemon.model.attach)
                await trio.to_thread.run_sync(self._run, abandon_on_cancel=True)
                self.ended.set()
                await trio.sleep_forever()
        finally:  # as the kernel does it for a process that is killed
            for link in self.links:
                with suppress(OSError):
                    link._socket.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        self.here.trainer = self
        torch.set_num_threads(1)
        self._script()


class Swarm:
    """Nodes a, b, ... that exchange gradients."""

    def __init__(self, inner: thin.Swarm, folder: Path, **settings: Any) -> None:
        self._inner = inner
        self._folder = folder
        self._settings = settings

    @property
    def nodes(self) -> dict[str, thin.Node]:
        return self._inner.nodes

    async def start(self, name: str, script: Script, **settings: Any) -> None:
        first = next(iter(self.nodes.values()), None)
        node = thin.Node(
            self._inner, name, first.address if first is not None else None, **{**self._settings, **settings}
        )
        self.nodes[name] = node
        trainer = ScriptTrainer(self._folder / f"{name}.sock", script)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(thin, "Trainer", lambda *_: trainer)
            await node.start(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds."""
        with trio.fail_after(PATIENCE_S):
            while not condition():
                await trio.sleep(0.02)

    async def ended(self, names: str) -> None:
        """Wait for these scripts."""
        with trio.fail_after(PATIENCE_S):
            for name in names:
                await self.nodes[name].trainer.ended.wait()  # type: ignore[attr-defined]


@contextmanager
def scripts_find_their_nodes() -> Iterator[None]:
    def connect() -> LocalSocket:
        link = LocalSocket(ScriptTrainer.here.trainer.path)
        ScriptTrainer.here.trainer.links.append(link)
        return link

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_swarm, "_connect", connect)
        yield


def run(folder: Path, scenario: Callable[[Swarm], Awaitable[None]], **settings: Any) -> None:
    """The scenario over TCP on this machine."""

    async def within(inner: thin.Swarm) -> None:
        await scenario(Swarm(inner, folder, **{"mode": "allreduce", "exchange": "gradients", **settings}))

    folder.chmod(0o700)
    with scripts_find_their_nodes(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "setpriority", lambda *_: None)  # a nice thread waits for all else on a busy machine
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.delenv("LOCAL_RANK", raising=False)
        thin.live(within)
