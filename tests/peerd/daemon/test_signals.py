"""What does a signal do to a daemon that has just begun?"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import trio

from peerd.daemon import main
from peerd.daemon.supervisor import Supervisor
from peerd.local.identity import Identity
from peerd.local.node_key import NodeKey
from peerd.settings import load


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_by_the_script_as_it_starts_leaves_in_good_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    async def interrupts(*_: Any) -> None:
        os.kill(os.getpid(), number)

    monkeypatch.setattr(Supervisor, "run", interrupts)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    told = {"name": "me", "bind": "127.0.0.1:0", "state_dir": str(tmp_path / "me"), "insecure_plaintext": True}
    tmp_path.chmod(0o700)
    for epoch in range(10):  # trio runs the tasks of a turn in an order that is drawn
        mine = Identity(NodeKey.generate(), epoch, -1)
        assert trio.run(main.run, load(told, {}, None), mine, ["true"]) == 0
