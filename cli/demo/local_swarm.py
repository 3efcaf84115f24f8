"""How does one machine run a whole swarm? Real daemons, each a process with its own trainer, in a temporary folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from peerd.daemon.supervisor import OUTPUT_ABOVE, started
from peerd.local.local_socket import request
from peerd.transport.errors import UserError

START_S = 60.0  # a cold Python import on a busy machine; a daemon that dies is noticed at once
END_S = 30.0
AT_ONCE_S = 3.0
_OF_ALL = ("PEERD_DATA", "PEERD_UCX_LIBRARY")  # the user's others are for a node of theirs
_LOGGED = re.compile(r"\d\d:\d\d:\d\d |peerd: ")  # how a line of ours begins


class LocalSwarm:
    """`count` nodes called node-0, node-1 ...; leaving the block ends them all and removes every trace."""

    def __init__(self, count: int, settings: dict[str, str], command: list[str]) -> None:
        """`settings` are options of `peerd start`, with "" for those without a value; each node launches `command`."""
        self.names = [f"node-{index}" for index in range(count)]
        self._settings = settings
        self._command = command
        self._folder = tempfile.TemporaryDirectory(prefix="peerd-demo-")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> LocalSwarm:
        try:
            self._start(self.names[0], None)
            address = self._ask(self.names[0], "info")["address"]
            for name in self.names[1:]:
                self._start(name, address)
            for name in self.names[1:]:
                self._ask(name, "info")
        except BaseException:
            self.end_at_once()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.end_at_once()
        else:
            self._end(signal.SIGTERM)

    def end_at_once(self) -> None:
        """Without what nodes say and write as they leave: nobody will look at it."""
        self._end(signal.SIGTERM, signal.SIGINT, within_s=AT_ONCE_S)  # the second, whatever it is, is a second wish

    def _end(self, *signals: signal.Signals, within_s: float = END_S) -> None:
        for process in self._processes.values():
            for number in signals:
                if process.poll() is None:
                    process.send_signal(number)
        deadline = time.monotonic() + within_s
        for process in self._processes.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def status(self, name: str) -> dict[str, Any]:
        """What the node says now. Raises UserError when it is gone."""
        return request(self._socket(name), "status")

    def export(self, name: str) -> Path:
        """Have the node write its model; returns the file."""
        path = self.folder / f"{name}.safetensors"
        request(self._socket(name), "export", path=str(path))
        return path

    def kill(self, name: str) -> None:
        """SIGKILL, as a crash would."""
        self._processes[name].send_signal(signal.SIGKILL)
        self._processes[name].wait()

    def ended(self) -> dict[str, int]:
        """Exit codes of the nodes that are gone."""
        codes = {name: process.poll() for name, process in self._processes.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def last_words(self, name: str) -> str:
        """The last line of a node's log, with that of its script where it refers to it."""
        lines = self._log(name).read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        scripts = [line for line in lines[:-1] if not _LOGGED.match(line)] or [OUTPUT_ABOVE]
        return lines[-1].removeprefix("peerd: ").replace(OUTPUT_ABOVE, scripts[-1].removeprefix("error: "))

    @property
    def folder(self) -> Path:
        """Everything the swarm writes is below."""
        return Path(self._folder.name)

    def _start(self, name: str, join: str | None) -> None:
        options = {"--name": name, "--bind": "127.0.0.1:0", "--log": "human", **self._settings}
        if join is not None:
            options["--join"] = join
        flags = [part for option in options.items() for part in option if part]
        rank = {"PEERD_RANK": str(self.names.index(name)), "PEERD_PEERS": str(len(self.names))}
        folders = {"XDG_RUNTIME_DIR": self._folder.name, "XDG_STATE_HOME": str(self.folder / "state")}
        ours = {name: value for name, value in os.environ.items() if name in _OF_ALL or not name.startswith("PEERD_")}
        with self._log(name).open("wb") as log:
            command = [sys.executable, "-m", "peerd.cli.main", "start", *flags, "--", *self._command]
            # in a session of its own: Ctrl-C reaches this process alone, which ends the nodes in good order
            self._processes[name], told = started(command, {**ours, **folders, **rank}, log.fileno(), log.fileno())
            os.close(told)  # that Python cannot be run is no question here

    def _ask(self, name: str, verb: str) -> dict[str, Any]:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if name in self.ended():
                raise UserError(f"{name} did not start: {self.last_words(name)}")
            if self._socket(name).exists():
                try:
                    return request(self._socket(name), verb)
                except UserError:
                    pass  # bound but not yet listening
            time.sleep(0.05)
        raise UserError(f"{name} did not start within {START_S:.0f} s: {self.last_words(name)}")

    def _socket(self, name: str) -> Path:
        return self.folder / "peerd" / f"{name}.sock"

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"
