"""One run of one method on lines of a known rate: start the workers, count what they send, disturb, wait, judge."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

from benchmarks.versus.environments import PACKAGES, python_of
from benchmarks.versus.judge import Look, looks, reached
from benchmarks.versus.rivals import OURS, RIVALS
from peerd.reproduce.sockets.lines import free_ports, namespaces
from peerd.transport.errors import UserError

DISTURBANCES = ("none", "slow", "thin", "kill", "join")
VICTIM = 1  # whom the disturbance meets
PORT = 7946
COUNT_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Cell:
    """What is run: the same for all rows but for the row, its learning rate and the seed."""

    row: str
    seed: int
    task: str = "digits"
    shard: str = "sorted"
    peers: int = 4
    steps: int = 400
    pace: float = 0.02  # seconds that a step takes at least
    mbit: float = 10.0  # of each worker's line, both ways; 0: loopback, where nothing is counted
    disturb: str = "none"
    lr: str = ""  # the task's own
    patience: float = 50.0  # times what the steps take alone, until a run counts as one that hangs

    def key(self) -> str:
        """What names its result."""
        return json.dumps(asdict(self), sort_keys=True)


def run(cell: Cell, target: float) -> dict[str, Any]:
    """Its outcome; `ended` is how: well, not begun, killed for taking too long, or with what was said last."""
    if cell.disturb == "join" and cell.row in RIVALS and cell.row not in PACKAGES:
        return _outcome(cell, target, "a process group takes no newcomer", [])
    try:
        python = python_of(cell.row)
    except UserError as error:
        return _outcome(cell, target, str(error), [])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pv-")))
        within: list[list[str]] = [[] for _ in range(cell.peers)]
        hosts = ["127.0.0.1"] * cell.peers
        if cell.mbit:
            within = stack.enter_context(namespaces(cell.peers, cell.mbit))
            hosts = [f"10.77.0.{rank + 1}" for rank in range(cell.peers)]
            if cell.disturb == "thin":
                _thin(within[VICTIM][-1], cell.mbit / 10)
        counter = Counter([prefix[-1] for prefix in within if prefix])
        stack.callback(counter.stop)
        workers = Workers(cell, python, folder, within, hosts)
        stack.callback(workers.kill)
        ended, deaths = workers.wait()
        counter.stop()
        found = looks(folder, cell.task, counter.sent, deaths, _joiners(cell))
    return _outcome(cell, target, ended, found)


def _joiners(cell: Cell) -> list[int]:
    return [VICTIM] if cell.disturb == "join" else []


def _outcome(cell: Cell, target: float, ended: str, found: list[Look]) -> dict[str, Any]:
    crossed = reached(found, target)
    return {
        **asdict(cell), "target": target, "ended": ended,
        "seconds": crossed and crossed[0], "bytes": crossed[1] if crossed and cell.mbit else None,
        "accuracy": found[-1].accuracy if found else None,
        "bytes_in_all": found[-1].bytes_sent if found and cell.mbit else None,
        "looks": [[look.seconds, look.bytes_sent, look.accuracy] for look in found],
    }  # fmt: skip


class Workers:
    """The processes of one run."""

    def __init__(self, cell: Cell, python: str, folder: Path, within: list[list[str]], hosts: list[str]) -> None:
        self._cell, self._python, self._folder, self._within = cell, python, folder, within
        self._hosts = hosts
        self._ports = [PORT + rank for rank in range(cell.peers)] if cell.mbit else free_ports(cell.peers)
        self._all = {rank: self._start(rank) for rank in range(cell.peers) if rank not in _joiners(cell)}

    def wait(self) -> tuple[str, dict[int, float]]:
        """Until all are done; how that ended, and who was killed when."""
        cell, deaths = self._cell, dict[int, float]()
        began, most = time.monotonic(), 60.0 + cell.patience * cell.steps * max(cell.pace, 0.02)
        while time.monotonic() - began < most:
            if cell.disturb == "kill" and not deaths and self._half_way():
                deaths[VICTIM] = time.monotonic()
                _kill(self._all[VICTIM])
            for rank in _joiners(cell):
                if rank not in self._all and self._half_way():
                    self._all[rank] = self._start(rank)
            left = [rank for rank in range(cell.peers) if rank not in deaths]
            if all((self._folder / f"{rank}.done").exists() for rank in left):
                return "well", deaths
            if failed := [rank for rank in left if rank in self._all and self._all[rank].poll()]:
                return self._last_words(failed[0]), deaths
            time.sleep(0.05)
        return f"hangs: not done after {most:.0f} s", deaths

    def kill(self) -> None:
        for process in self._all.values():
            _kill(process)
        for process in self._all.values():
            process.wait()

    def _half_way(self) -> bool:
        return len(list(self._folder.glob("0.*.npy"))) > self._cell.steps // self._look // 2

    @property
    def _look(self) -> int:
        return max(1, self._cell.steps // 80)

    def _last_words(self, rank: int) -> str:
        lines = (self._folder / f"{rank}.log").read_text(errors="replace").strip().splitlines()
        return f"worker {rank} ended: {lines[-1][:120] if lines else 'without a word'}"

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        cell, hosts, ports = self._cell, self._hosts, self._ports
        late = 3 * cell.pace if cell.disturb == "slow" and rank == VICTIM else 0.0
        told = {"row": cell.row, "task": cell.task, "shard": cell.shard, "steps": cell.steps, "lr": cell.lr,
                "seed": cell.seed, "rank": rank, "peers": cell.peers, "pace": cell.pace, "late": late,
                "look": self._look, "out": self._folder, "host": hosts[rank], "port": ports[rank],
                "joins": int(rank in _joiners(cell))}  # fmt: skip
        script = [self._python, "-m", "benchmarks.versus.worker", *(f"--{key}={told[key]}" for key in told)]
        runtime = self._folder / f"node{rank}"
        runtime.mkdir(mode=0o700)
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("PEERD_")},
            "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(runtime), "XDG_STATE_HOME": str(runtime / "state"),
            "MASTER_ADDR": hosts[0], "MASTER_PORT": str(ports[0]),
            "GLOO_SOCKET_IFNAME": "eth0" if cell.mbit else "lo",
        }  # fmt: skip
        if cell.row not in RIVALS:
            daemon = [sys.executable, "-m", "peerd.cli.main", "start", "--name", f"n{rank}", "--insecure-plaintext"]
            daemon += ["--bind", f"{hosts[rank]}:{ports[rank]}", *OURS[cell.row]]
            daemon += ["--wait-for", str(cell.peers - len(_joiners(cell)))]
            daemon += ["--join", f"{hosts[0]}:{ports[0]}"] if rank else []
            script = [*daemon, "--", *script]
        with (self._folder / f"{rank}.log").open("wb") as log:
            return subprocess.Popen(
                [*self._within[rank], *script], env=environment, stdout=log, stderr=log, start_new_session=True
            )


class Counter:
    """What each worker's interface has sent: read where its line comes to the switch."""

    def __init__(self, names: Sequence[str]) -> None:
        self.sent: list[tuple[float, list[int]]] = []
        self._files = [Path(f"/sys/class/net/{name}/statistics/rx_bytes") for name in names]
        self._end = Event()
        self._thread = Thread(target=self._count, daemon=True)
        if names:
            self._thread.start()

    def stop(self) -> None:
        if not self._end.is_set() and self._files:
            self._end.set()
            self._thread.join()

    def _count(self) -> None:
        while not self._end.wait(COUNT_EVERY_S):
            self.sent.append((time.monotonic(), [int(file.read_text()) for file in self._files]))


def _thin(namespace: str, mbit: float) -> None:
    shape = f"root tbf rate {mbit}mbit burst 64kb latency 100ms".split()
    subprocess.run(["tc", "-n", namespace, "qdisc", "replace", "dev", "eth0", *shape], check=True)
    subprocess.run(["tc", "qdisc", "replace", "dev", namespace, *shape], check=True)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
