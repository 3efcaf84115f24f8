"""The honest nodes of a hostile test, and whether an attack has harmed them: what they answer is all that is asked."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from machine import Machine, Node, eventually
from papers import Papers
from safetensors.torch import load_file
from scripts import TRAIN
from stranger import Stranger

from peerd.settings import parse_address
from peerd.training.codecs.vector import Layout
from peerd.transport.errors import PeerError, UserError
from peerd.transport.ids import Address
from peerd.transport.messages import Member, Plan

PROBE_EVERY_S = 0.02
BLOCKED_MAX_S = 0.25  # of the processor's time; attacks took 16 ms at most, 2,800 members 20 to 70 beside other tests
GROWN_MAX = 64 << 20  # bytes
ROOM = 2 << 30  # bytes that a daemon may take beyond what it has: an attack must not take the machine along
LEARNED = 0.5  # the loss of a model that has: 4.0 before, below 0.1 at the end
POINT = 0.01  # of accuracy, which an attack may cost at most
NEAR = 0.5  # of its norm: further than training moves one that has learned, or two differ, within a test

TENSORS = ["0.bias", "0.weight", "2.bias", "2.weight"]  # but for the padding
PADDED = TRAIN.replace(
    "optimizer =", 'model.register_parameter("pad", nn.Parameter(torch.zeros(int(os.environ["PAD"]))))\noptimizer ='
)

# Names that take long to look up: what a resolver out of reach does
SLOW_NAMES = """\
import socket, time
_look_up = socket.getaddrinfo
def getaddrinfo(host, *arguments, **options):
    if isinstance(host, str) and host.endswith(".slow"):
        time.sleep(3)
        raise socket.gaierror(-3, "try again")
    return _look_up(host, *arguments, **options)
socket.getaddrinfo = getaddrinfo
"""


class Victims:
    """Two nodes that train together; anew for each test that finds one of them dead."""

    def __init__(self, pad: int, sealed: bool) -> None:
        """`pad` is of values that the model has and training leaves as they are."""
        self._pad = str(pad)
        self._sealed = sealed
        self.blocked_s = 0.0  # the longest that one was, in the last attack
        self.grown = 0  # bytes, of the one that grew most
        self._start()

    def _start(self) -> None:
        self._harmed = False
        self.machine = Machine()
        folder = self.machine.path / "names"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(SLOW_NAMES)
        self.machine.environment |= {"PYTHONPATH": str(folder), "PAD": self._pad}
        self.machine.environment |= {"PEERD_INSECURE_PLAINTEXT": str(not self._sealed).lower()}
        self.script = self.machine.script("train.py", PADDED)
        a = self.machine.start("a", self.script)
        b = self.machine.start("b", self.script, join=a, SEED="1")
        self.nodes = [a, b]
        for node in self.nodes:
            node.trains()
            node.sees(a="alive", b="alive")
        for node in self.nodes:
            node.eventually(lambda node=node: loss(self.model(node)) < LEARNED)  # type: ignore[misc]
            pid = node.process.pid
            resource.prlimit(pid, resource.RLIMIT_DATA, (_status_bytes(pid, "VmData") + ROOM,) * 2)

    def end(self) -> None:
        self.machine.__exit__(None, None, None)

    def revive(self) -> Victims:
        """As before the first attack, if that went on after one that did harm."""
        if self._harmed or any(node.process.poll() is not None for node in self.nodes):
            self.end()
            self._start()
        return self

    @property
    def addresses(self) -> list[Address]:
        return [parse_address(node.address, "test") for node in self.nodes]

    def papers(self) -> Papers | None:
        """Those of another insider; None where nobody has any."""
        return Papers(self.machine.state / "peerd" / ".authority") if self._sealed else None

    def rows(self) -> list[Member]:
        """What each says of itself to a stranger; where they are sealed, to one who could be a member."""
        with Stranger(papers=self.papers()) as stranger:
            return [
                stranger.learn(address)[node.name] for node, address in zip(self.nodes, self.addresses, strict=True)
            ]

    def layout(self) -> Layout:
        status = self.nodes[0].ask("status")
        return Layout(status["parameters"], status["values"])

    def model(self, node: Node) -> npt.NDArray[np.float32]:
        """All parameters that are trained, as the node exports them."""
        path = self.machine.path / f"{node.name}.safetensors"
        node.ask("export", path=str(path))
        return np.concatenate([load_file(path)[name].numpy().ravel() for name in TENSORS])

    def work_under(self, text: str) -> Plan:
        """Have them train in this mode from now on; returns the plan as messages are to name it."""
        answer = self.nodes[0].ask("mode_set", text=text)
        for node in self.nodes:
            node.eventually(lambda node=node: node.ask("mode")["plan"] == answer["plan"])  # type: ignore[misc]
            node.trains(beyond=node.step + 5)
        return Plan(answer["plan"], answer["author"], True, text)

    @contextmanager
    def unharmed(self, settle_s: float = 1.0) -> Iterator[None]:
        """Whatever happens in the block, and for a moment after it, is none of their business.

        What it has cost them is printed (`pytest -s`).
        """
        self._harmed = True
        pids = [node.ask("info")["pid"] for node in self.nodes]
        sizes = [_status_bytes(pid, "VmRSS") for pid in pids]
        models = [self.model(node) for node in self.nodes]
        traces = self.machine.logs().count("Traceback")
        probes = [_Probe(node, pid) for node, pid in zip(self.nodes, pids, strict=True)]
        try:
            yield  # what fails in the block has done harm, too
            time.sleep(settle_s)
            steps = []
            for node in self.nodes:
                assert node.process.poll() is None, f"{node.name} ended\n{self.machine.logs()}"
                steps.append(node.step)
            for node, step in zip(self.nodes, steps, strict=True):
                node.trains(beyond=step)
        finally:
            self.blocked_s = max(probe.end() for probe in probes)
        self.grown = max(_status_bytes(pid, "VmRSS") - size for pid, size in zip(pids, sizes, strict=True))
        assert [node.ask("info")["pid"] for node in self.nodes] == pids
        after = [self.model(node) for node in self.nodes]
        points = 100 * min(accuracy(now) - accuracy(before) for before, now in zip(models, after, strict=True))
        cost = f"{self.grown / (1 << 20):+.1f} MiB, {1e3 * self.blocked_s:.0f} ms, {points:+.2f} points"
        print(f"{os.environ.get('PYTEST_CURRENT_TEST', '')} {cost}")  # noqa: T201
        for node in self.nodes:
            node.sees(a="alive", b="alive")
            assert node.ask("status")["name"] == node.name
        assert self.machine.logs().count("Traceback") == traces, self.machine.logs()
        assert self.grown < GROWN_MAX, f"{self.grown >> 20} MiB more"
        assert self.blocked_s < BLOCKED_MAX_S, f"the loop stood still for {self.blocked_s:.2f} s"
        for before, now in zip(models, after, strict=True):
            assert distance(before, now) < NEAR, "the model is another"
            assert loss(now) < 2 * LEARNED
            assert accuracy(now) > accuracy(before) - POINT, f"{100 * accuracy(before):.2f} % before, {cost}"
        assert distance(*after) < NEAR, "the models differ"
        self._harmed = False


def victims(pad: int = 1, *, sealed: bool = False) -> Iterator[Victims]:
    """A fixture's body. Plain ones are what strangers can say most to."""
    them = Victims(pad, sealed)
    yield them
    them.end()


def distance(before: npt.NDArray[np.float32], now: npt.NDArray[np.float32]) -> float:
    """Relative to the norm of the first."""
    return float(np.linalg.norm(now - before) / np.linalg.norm(before))


def loss(values: npt.NDArray[np.float32]) -> float:
    """Of the task's model."""
    found, wanted = predicted(values, 256)
    return float(np.mean((found - wanted) ** 2))


def accuracy(values: npt.NDArray[np.float32]) -> float:
    """How often its sign is right."""
    found, wanted = predicted(values, 8192)
    return float(np.mean((found > 0) == (wanted > 0)))


def predicted(values: npt.NDArray[np.float32], samples: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """What the model (scripts.TRAIN) says, and what is right; tensors come by name: a bias before a weight."""
    hidden = (len(values) - 1) // 6
    b0, w0, b2, w2 = np.split(values.astype(np.float64), np.cumsum([hidden, 4 * hidden, 1]))
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0)).double().numpy()
    return np.maximum(x @ w0.reshape(hidden, 4).T + b0, 0) @ w2 + b2[0], x.sum(1)


class _Probe:
    """How long a daemon leaves a question unanswered, less the time in which it was the machine that had no time."""

    def __init__(self, node: Node, pid: int) -> None:
        self._node = node
        self._pid = pid
        self._ended = threading.Event()
        self._worst_s = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> float:
        self._ended.set()
        self._thread.join()
        return self._worst_s

    def _run(self) -> None:
        while not self._ended.wait(PROBE_EVERY_S):
            with suppress(UserError, OSError):
                began, worked = time.monotonic(), _processor_s(self._pid)
                self._node.ask("info")
                self._worst_s = max(self._worst_s, min(time.monotonic() - began, _processor_s(self._pid) - worked))


def _processor_s(pid: int) -> float:
    """Of the thread that runs the loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def _status_bytes(pid: int, key: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key + ":"))


def gets_in(them: Victims) -> bool:
    """Whether a node that has its papers is greeted by the first of them."""
    with Stranger(name="newcomer", papers=them.papers()) as newcomer, suppress(OSError, PeerError):
        newcomer.greet(them.addresses[0])
        return True
    return False


def comes_true(look: Callable[[], object], within_s: float) -> bool:
    """Whether it does, rather than an AssertionError."""
    try:
        eventually(look, patience_s=within_s)
    except AssertionError:
        return False
    return True
