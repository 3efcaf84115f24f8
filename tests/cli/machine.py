"""A machine for tests: real `peerd` processes in folders of their own, and nothing left of them afterwards."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from forks import PEERD, Forked, Program, forks

from peerd.daemon.supervisor import started
from peerd.local.local_socket import request
from peerd.transport.errors import UserError

PATIENCE_S = 60.0  # a bound on waiting, never a measurement: imports of torch take 3 s on an idle machine
PORTS = range(16000, 32768)  # below those that the kernel gives to whoever asks for any: another test would have them
MARK = "MACHINE_OF_PEERD_TESTS"  # an environment variable by which every process of a machine is found again

T = TypeVar("T")


def eventually(look: Callable[[], T], why: Callable[[], str] = str, patience_s: float = PATIENCE_S) -> T:
    """The first true value of `look`, asked again and again; a UserError of a node that is not there yet is false."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        with suppress(UserError):
            if value := look():
                return value
        time.sleep(0.05)
    raise AssertionError(f"not within {patience_s:.0f} s: {look.__code__.co_names}\n{why()}")


class Node:
    """One process of a machine: a daemon, or a script attached by hand."""

    def __init__(self, machine: Machine, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.machine = machine
        self.name = name
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        """What it and its script have said so far, in whole lines: an unbuffered print comes in pieces."""
        return "".join(self._log.read_text(errors="replace").rpartition("\n")[:2])

    @property
    def socket(self) -> Path:
        return self.machine.runtime / "peerd" / f"{self.name}.sock"

    def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Raises UserError when it is gone."""
        return request(self.socket, verb, **arguments)

    def eventually(self, look: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
        """As the function, but ends early when the process does, and shows the log of every node."""

        def alive_look() -> T:
            ended = self.process.poll() is not None  # first: what it did at its end counts
            try:
                value = look()
            except UserError:  # nobody answers
                assert not ended, f"{self.name} ended: {self.machine.logs()}"
                raise
            assert value or not ended, f"{self.name} ended: {self.machine.logs()}"
            return value

        return eventually(alive_look, self.machine.logs, patience_s)

    @property
    def address(self) -> str:
        return str(self.eventually(lambda: self.socket.exists() and self.ask("info"))["address"])  # type: ignore[index]

    @property
    def step(self) -> int:
        trainer = self.ask("status")["trainer"]
        return int(trainer["step"]) if trainer else 0

    @property
    def trainer_pid(self) -> int:
        return int(self.ask("status")["trainer"]["pid"])

    def says(self, text: str, times: int = 1) -> None:
        """Wait for a line."""
        self.eventually(lambda: self.log.count(text) >= times)

    def trains(self, beyond: int = 0) -> int:
        """Wait until it trains at a step beyond this one."""
        self.eventually(lambda: self.ask("status")["phase"] == "training" and self.step > beyond)
        return self.step

    def members(self) -> dict[str, str]:
        """State by name, as this node sees it; a name may come twice, the live one then counts."""
        rows = self.ask("members")["members"]
        return {row["name"]: row["state"] for row in sorted(rows, key=lambda row: str(row["state"]), reverse=True)}

    def sees(self, **states: str) -> None:
        """Wait until it believes this of these members."""
        self.eventually(lambda: {**self.members(), **states} == self.members())

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for its end; the exit code."""
        eventually(lambda: self.process.poll() is not None, self.machine.logs)
        return self.process.returncode


def free_ports(count: int) -> list[int]:
    """Some on which nobody listens on loopback, by TCP or UDP."""
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, 64 + count):
        with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp, suppress(OSError):
            tcp.bind(("127.0.0.1", port))
            udp.bind(("127.0.0.1", port))
            found.append(port)
    return found[:count]


class Machine:
    """A machine with its own runtime and state folders; leaving the block kills all that ran on it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pd-")  # short: a Unix socket's path has 108 bytes
        self.path = Path(self._folder.name)
        self.runtime = self.path / "run"
        self.state = self.path / "state"
        self.runtime.mkdir(mode=0o700)
        self.nodes: list[Node] = []
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("PEERD_")},
            "XDG_RUNTIME_DIR": str(self.runtime),
            "XDG_STATE_HOME": str(self.state),
            "OMP_NUM_THREADS": "1",  # torch's threads of several trainers would fight over two cores
            MARK: self.path.name,
        }

    def __enter__(self) -> Machine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for node in self.nodes:
            node.process.wait(PATIENCE_S)
        self._folder.cleanup()

    def end(self) -> None:
        """Interrupt all that runs, and wait for its end."""
        for node in self.nodes:
            if node.process.poll() is None:
                node.signal(signal.SIGINT)
        for node in self.nodes:
            node.end()

    @staticmethod
    def free_port() -> int:
        """A port on which nobody listens."""
        return free_ports(1)[0]

    def script(self, name: str, text: str) -> Path:
        """A file of the user's."""
        path = self.path / name
        path.write_text(text)
        return path

    def start(
        self,
        name: str,
        *arguments: str | Path,
        join: Node | str | None = None,
        output: int | None = None,
        **environment: str,
    ) -> Node:
        """`peerd start --name NAME --bind 127.0.0.1:0 ARGUMENTS`; what it says goes to `output` (its own log)."""
        seed = join.address if isinstance(join, Node) else join
        flags = [*(["--join", seed] if seed else []), "--log", "human"]
        flags += [] if "--name" in arguments else ["--name", name]
        flags += [] if "--bind" in arguments else ["--bind", "127.0.0.1:0"]
        command = [*PEERD, "start", *flags, *map(str, arguments)]
        return self.spawn(name, command, output=output, **environment)

    def three(self, script: Path) -> tuple[Node, Node, Node]:
        """Nodes a, b and c, which train together."""
        a = self.start("a", script)
        b = self.start("b", script, join=a, SEED="1")
        c = self.start("c", script, join=a, SEED="2")
        for node in (a, b, c):
            node.trains()
        return a, b, c

    def spawn(self, name: str, python: list[str], *, output: int | None = None, **environment: str) -> Node:
        """A process that goes on."""
        log = self.path / f"{name}.log"
        with log.open("ab") as own:
            said = own.fileno() if output is None else output
            process = self._run(python, {**self.environment, **environment}, said, said)
        node = Node(self, name, process, log)
        self.nodes.append(node)
        return node

    def peerd(self, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """One command, to its end."""
        command = [*PEERD, *map(str, arguments)]
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = self._run(command, {**self.environment, **environment}, output.fileno(), errors.fileno())
            code = process.wait(PATIENCE_S)
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(command, code, output.read().decode(), errors.read().decode())

    def _run(self, python: list[str], environment: dict[str, str], output: int, errors: int) -> subprocess.Popen[bytes]:
        """`python PYTHON` in the machine's folder; where it is peerd or a script, nobody waits for imports."""
        of_its_start = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        if (python[:2] == PEERD or python[0].endswith(".py")) and not of_its_start:
            return Forked(forks(), Program(python, environment, str(self.path)), output, errors)
        process, told = started([sys.executable, *python], environment, output, errors, self.path)
        os.close(told)
        return process

    def logs(self) -> str:
        """Every log, for a failure's report."""
        return "\n".join(f"--- {path.stem}\n{path.read_text(errors='replace')}" for path in self.path.glob("*.log"))

    def processes(self) -> list[int]:
        """Pids of all processes that came from here, grandchildren and orphans too; zombies are none."""
        mark = f"{MARK}={self.path.name}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # of those that are forked the kernel knows another environment
                here = (folder / "cwd").readlink() == self.path
                if here or mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found


def alive(pid: int) -> bool:
    """Whether there is such a process that is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
