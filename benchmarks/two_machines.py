"""How long does it take from nothing to a training swarm of two machines?

Two network namespaces, each with its own folders, and one line pasted from one to the other, as docs/security.md has
it: `peerd start` on the first, `peerd token`, `peerd start` with the token on the second. The clock starts with the
first command and ends when the second node has made a step from the first one's model. Needs Linux's `unshare`, `ip`
and `nsenter`, and no root.

    python benchmarks/two_machines.py [--format json]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from peerd.local.local_socket import request
from peerd.transport.errors import UserError

PATIENCE_S = 300.0
INSIDE = "PEERD_BENCHMARK_INSIDE"
FIRST, SECOND = "10.77.0.1", "10.77.0.2"
PEERD = [sys.executable, "-m", "peerd.cli.main"]
SCRIPT = """
import time, torch, peerd
torch.set_num_threads(1)
model = torch.nn.Linear(64, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with peerd.attach(model, optimizer) as swarm:
    while True:
        x = torch.randn(8, 64)
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        swarm.step(loss=loss.item())
        time.sleep(0.01)
"""


class Machine:
    """A namespace, a runtime folder and a state folder."""

    def __init__(self, folder: Path, name: str, inside: list[str]) -> None:
        self.name = name
        self._inside = inside
        self._folder = folder / name
        self._folder.mkdir(mode=0o700)
        self._environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("PEERD_")},
            "XDG_RUNTIME_DIR": str(self._folder),
            "XDG_STATE_HOME": str(self._folder / "state"),
        }

    def start(self, script: Path, address: str, token: str = "") -> subprocess.Popen[bytes]:
        told = {"PEERD_TOKEN": token} if token else {}
        with (self._folder / "log").open("wb") as log:
            return subprocess.Popen(
                [*self._inside, *PEERD, "start", str(script), "--name", self.name, "--bind", address, "--log", "human"],
                env={**self._environment, **told},
                stdout=log,
                stderr=log,
            )

    def token(self) -> str:
        ran = subprocess.run([*PEERD, "token"], env=self._environment, capture_output=True, text=True)
        return ran.stdout.strip()

    def status(self) -> dict[str, Any]:
        with suppress(UserError):
            return request(self._folder / "peerd" / f"{self.name}.sock", "status")
        return {}

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()


def until(look: Callable[[], Any], machines: list[Machine]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.05)
    raise SystemExit("it takes too long:\n" + "\n".join(machine.log for machine in machines))


def trains(machine: Machine) -> bool:
    status = machine.status()
    return bool(
        status and status["phase"] == "training" and status["trainer"]["step"] and status["members"]["alive"] == 2
    )


def measure(folder: Path, inside_second: list[str]) -> dict[str, float]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    a, b = Machine(folder, "a", []), Machine(folder, "b", inside_second)
    nodes = []
    try:
        began = time.monotonic()
        nodes.append(a.start(script, f"{FIRST}:7946"))
        token = until(a.token, [a])
        told = time.monotonic()
        nodes.append(b.start(script, SECOND, token))
        until(lambda: trains(b), [a, b])
        ended = time.monotonic()
        let_in = re.search(r"let in with a token in ([\d.]+) s", b.log)
        assert let_in is not None
        return {"token_after_s": told - began, "enrolment_s": float(let_in[1]), "both_train_after_s": ended - began}
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=["text", "json"], default="text")
    options = parser.parse_args()
    if INSIDE not in os.environ:
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "-rn", sys.executable, *sys.argv])
    other = subprocess.Popen(["unshare", "-n", "sleep", "1000"])
    time.sleep(0.5)  # until it has a namespace of its own
    enter = ["nsenter", "-t", str(other.pid), "-n"]
    for command in (
        "ip link set lo up",
        "ip link add one type veth peer name two",
        f"ip link set two netns {other.pid}",
        f"ip addr add {FIRST}/24 dev one",
        "ip link set one up",
        f"{' '.join(enter)} ip addr add {SECOND}/24 dev two",
        f"{' '.join(enter)} ip link set two up",
        f"{' '.join(enter)} ip link set lo up",
    ):
        subprocess.run(command.split(), check=True)
    try:
        with tempfile.TemporaryDirectory(prefix="pd-") as folder:
            found = measure(Path(folder), enter)
    finally:
        other.kill()
        other.wait()
    print(
        json.dumps(found)
        if options.format == "json"
        else "\n".join(f"{key} {value:.2f}" for key, value in found.items())
    )


if __name__ == "__main__":
    main()
