"""ARCHITECTURE.md lists the files on the path of a delta: this follows one, and compares.

Two real daemons, each with a real trainer (`peerd.attach`): one makes an optimizer step and calls `swarm.step()` once,
then the other calls it, once. Meanwhile every call and every return of the package is seen, in the trainers' threads,
on the loop and in the compute threads.

What travels is one thing in changing forms: what the trainer says of its step, the event, the half of an exchange, the
effect that sends it; on the other side that half, the event, the correction, and the word of it. Between files of
`transport/` its chunks count too, and where it enters `training/model/` the vector.

The rule: **a file is a station if it gives what travels on to another file, by a call or by what it returns.** Who only
looks at it (a counter, a checksum) is none. The ends, which give it to the socket or to the model, are stations.

No station may be entered again after the path has gone on from it; a queue and a socket have two ends, which follow
each other, and count as one visit. Only the shell of the mode is there twice: it posts the event, and performs what
follows from it.
"""

from __future__ import annotations

import contextvars
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
import trio
from thin import Loopback, Memory
from torch import nn

import peerd
from peerd.daemon import control
from peerd.daemon.node import Daemon
from peerd.local import local_socket
from peerd.local.node_key import NodeKey
from peerd.node.core import Nothing, TakeBuffer
from peerd.node.meta import NodeMeta
from peerd.protocol.trainer import Corrections
from peerd.protocol.trainer import Stepped as SaidStep
from peerd.settings import Settings
from peerd.trainer import session
from peerd.training.effects import Apply, Send, StepReport
from peerd.training.mode_core import Received, Stepped
from peerd.training.pairs.reference import Outcome
from peerd.transport.messages import Delta, Member, State

ROOT = Path(__file__).parent.parent
OUT_MAX, IN_MAX = 20, 17  # stations; a connection that is sealed has one more either way
SHELL = "peerd/daemon/mode_runner.py"
MODEL = "training/model/flat.py"
CARRIERS = {"tcp": "transport/tcp.py", "memory": "transport/memory_stream.py"}
FORMS = (SaidStep, Stepped, StepReport, Send, Delta, Received, Outcome, Apply, TakeBuffer, Corrections)

here_is: contextvars.ContextVar[str] = contextvars.ContextVar("here_is", default="")  # which node


# ------------------------------------------------------------------------------------------------ what is seen


@dataclass(frozen=True)
class HandedOn:
    """A function of one file gives something to one of another."""

    node: str
    leg: FrameType  # what runs: the first function of a thread, or of a task
    giver: str
    taker: str
    what: list[Any]


class Trace:
    """All that one file of the package gives to another, in the order in which it happens."""

    def __init__(self) -> None:
        self.is_on = False
        self.handed_on: list[HandedOn] = []
        self._files: dict[str, str | None] = {}
        self._known: set[tuple[object, str, int]] = set()

    def begin(self) -> None:
        """Forget what was seen."""
        self.handed_on, self._known = [], set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """This thread is seen."""
        before = sys.getprofile()
        sys.setprofile(self._on)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _on(self, frame: FrameType, event: str, result: object) -> None:
        if not self.is_on or event not in ("call", "return") or (here := self._file(frame)) is None:
            return
        frames = [frame]
        while (outer := frames[-1].f_back) is not None:
            frames.append(outer)
        ours = [each for each in frames if self._file(each) is not None]
        if len(ours) < 2 or (beneath := self._file(ours[1])) is None or beneath == here:
            return
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        value = [frame.f_locals.get(name) for name in names] if event == "call" else result
        giver, taker = (beneath, here) if event == "call" else (here, beneath)
        what = [form for form in _forms(value, giver, taker) if self._is_news(code, event, form)]
        if what:
            self.handed_on.append(HandedOn(here_is.get(), ours[-1], giver, taker, what))

    def _is_news(self, code: object, event: str, form: object) -> bool:
        """A coroutine that goes on is called once more with what it had."""
        known = (code, event, id(form))  # nothing here is freed, so no id is another's
        is_news = known not in self._known
        self._known.add(known)
        return is_news

    def _file(self, frame: FrameType) -> str | None:
        """Its path in the repository, if it is of the package."""
        name = frame.f_code.co_filename
        if name not in self._files:
            file = Path(os.path.realpath(name))
            of_package = any(file.is_relative_to(ROOT / room) for room in ("peerd", "training", "transport"))
            self._files[name] = str(file.relative_to(ROOT)) if of_package else None
        return self._files[name]


def _forms(value: object, giver: str, taker: str) -> Iterator[Any]:
    match value:
        case list() | tuple():
            for each in value:
                yield from _forms(each, giver, taker)
        case bytes() | memoryview() if giver.startswith("transport/") and taker.startswith("transport/"):
            yield _memory(value)
        case np.ndarray() if taker.startswith("training/model/"):
            yield value
        case dict() if "kind" in value:  # packed for the Unix socket
            yield value
        case _ if isinstance(value, FORMS):
            yield value


def _memory(chunk: Any) -> object:
    return chunk.obj if isinstance(chunk, memoryview) else chunk


# ------------------------------------------------------------------------------------------------ what is made of it


@dataclass(frozen=True)
class Way:
    """The stations that one thing came through, and those to which it came again."""

    stations: set[str]
    entered_again: set[str]


def way_of(trace: Trace, node: str, travels: Callable[[Any], bool], *ends: str) -> Way:
    """Of what `travels`, until it has come to the last of `ends`."""
    here = [each for each in trace.handed_on if each.node == node and any(map(travels, each.what))]
    last = max(index for index, each in enumerate(here) if each.taker == ends[-1])
    way = here[: last + 1]
    assert {each.taker for each in way} >= set(ends)
    stations = {each.giver for each in way} | set(ends)
    visits: dict[str, list[int]] = {file: [] for file in stations}
    legs: list[FrameType] = []
    for each in way:
        if stations >= {each.giver, each.taker}:
            if each.leg not in legs:
                legs.append(each.leg)
            visits[each.giver].append(legs.index(each.leg))
            visits[each.taker].append(legs.index(each.leg))
    again = {file for file, at in visits.items() if any(b - a > 1 for a, b in pairwise(sorted(at)))}
    return Way(stations, again)


def on_the_page() -> tuple[set[str], set[str]]:
    """The stations in ARCHITECTURE.md, out and in."""
    page = (ROOT / "ARCHITECTURE.md").read_text()
    drawing = page.split("## The path of a delta")[1].split("```")[1]
    out, into = drawing.split("node B")
    return stations_in(out), stations_in(into)


def stations_in(drawing: str) -> set[str]:
    """The files with which its lines begin, behind what is drawn at the margin."""
    found: set[str] = set()
    for line in drawing.splitlines():
        while (file := re.match(r"(?:node A)?[\W]*([a-z_/]+\.py),?", line)) is not None:
            found.add(file[1])
            line = line[file.end() :]
    return found


# ------------------------------------------------------------------------------------------------ what happens


class Over(Exception):
    """Leaves the script without a flush."""


class Script:
    """What a user writes, in a thread of its own; it goes on when it is told to."""

    def __init__(self, trace: Trace) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(1000, 600)  # its chunk is longer than what a connection reads ahead
        self.gradient = 0.0  # of each value, up to
        self.stands, self.may_go_on = threading.Event(), threading.Semaphore(0)
        self.published = 0  # which copy it wrote last
        self.over = False
        self._trace = trace

    def run(self) -> None:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        with suppress(Over), peerd.attach(self.model, optimizer) as swarm:
            while self._waits():
                for values in self.model.parameters():
                    values.grad = self.gradient * torch.randn_like(values)
                optimizer.step()
                with self._trace.watching():
                    swarm.step()
                assert swarm._session is not None
                self.published = swarm._session._client.published_to
        self.stands.set()

    def _waits(self) -> bool:
        self.stands.set()
        self.may_go_on.acquire()
        if self.over:
            raise Over
        return True

    async def step_until_it_publishes(self) -> None:
        """The trace is that of the last step."""
        before = self.published
        while self.published == before:
            self._trace.begin()
            await self.go_on()

    async def go_on(self) -> None:
        self.stands.clear()
        self.may_go_on.release()
        await until(self.stands.is_set)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await trio.sleep(0.001)


class Node:
    """A daemon with its script."""

    daemon: Daemon
    address: str

    def __init__(self, name: str, folder: Path, trace: Trace) -> None:
        self.name = name
        self.script = Script(trace)
        self._folder = folder

    async def live(
        self, network: Memory | Loopback, *join: str, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        here_is.set(self.name)
        host, port = place = network.place(self.name)
        self.address = f"{host}:{port}"
        settings = Settings(  # not robust: b makes no steps, and would not follow
            name=self.name, join=join, state_dir=str(self._folder / self.name), robust=False
        )
        about = NodeMeta(expects=True, founder=not join).pack()
        me = Member(self.name, self.name, host, port, 1, 0, State.ALIVE, "", about)
        async with aclosing(await network.bind(place)) as datagrams, trio.open_nursery() as nursery:
            self.daemon = Daemon(
                settings, me, NodeKey.generate(), place, nursery, network.carrier(nursery, host), datagrams
            )
            await self.daemon.start()
            socket = local_socket.socket_path(self.name)
            await nursery.start(control.serve, socket, {}, self.daemon.model.attach)
            os.environ["PEERD_SOCKET"] = str(socket)
            threading.Thread(target=contextvars.copy_context().run, args=(self.script.run,), daemon=True).start()
            await until(lambda: self.daemon.model.attaches > 0)
            task_status.started()

    @property
    def has_link(self) -> bool:
        """Whether an exchange may begin, as far as it knows."""
        mode = self.daemon.model.mode
        return mode is not None and math.isfinite(mode.quiet.change)

    async def takes_a_correction(self) -> None:
        """One is there, and its script steps on until it has taken it: it may hear of it late."""
        runner, before = self.daemon.model._runner, self.script.model.weight.detach().clone()
        await until(lambda: runner.core.model is not None and bool(runner.core.model.waiting))
        await runner.compute.call(Nothing())
        while torch.equal(self.script.model.weight, before):
            await self.script.go_on()


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_the_page_has_the_files_on_the_path_of_a_delta(
    carrier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PEERD_SOCKET", "")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(session, "COPY_EVERY_MIN_S", math.inf)  # no copy but for the exchange
    trace = Trace()
    in_thread = trio.to_thread.run_sync

    async def in_thread_that_is_seen(work: Callable[..., Any], *arguments: Any, **rest: Any) -> Any:
        def seen() -> Any:
            with trace.watching():
                return work(*arguments)

        return await in_thread(seen, **rest)

    a, b = Node("a", tmp_path, trace), Node("b", tmp_path, trace)
    async with trio.open_nursery() as nursery:
        network = Memory(nursery) if carrier == "memory" else Loopback()
        await nursery.start(a.live, network)
        await nursery.start(b.live, network, a.address)
        await until(lambda: a.script.stands.is_set() and b.script.stands.is_set() and a.has_link and b.has_link)
        a.script.gradient = 1.0
        await a.script.step_until_it_publishes()  # it may have been asked to: b has just come
        await b.takes_a_correction()
        await until(lambda: a.has_link)
        monkeypatch.setattr(trio.to_thread, "run_sync", in_thread_that_is_seen)
        trace.is_on = True
        with trace.watching():
            await a.script.step_until_it_publishes()
            await b.takes_a_correction()
        trace.is_on = False
        for node in (a, b):
            node.script.over = True
            await node.script.go_on()
        nursery.cancel_scope.cancel()

    given, taken = half_of(trace, "a"), half_of(trace, "b")

    def goes_out(form: object) -> bool:
        match form:
            case SaidStep() | StepReport() | Stepped() | {"kind": SaidStep.KIND}:
                return True
            case Send(_, message):
                return message is given
        return form is given or any(form is _memory(chunk) for chunk in given.chunks)

    def comes_in(form: object) -> bool:
        match form:
            case Apply() | TakeBuffer() | Corrections() | {"kind": Corrections.KIND}:
                return True
            case Outcome(_, exchanged):
                return exchanged is not None
            case np.ndarray():
                return form.dtype == np.float32 or any(form is _memory(chunk) for chunk in taken.chunks)
            case Received(_, message):
                return message is taken
        return form is taken or any(form is _memory(chunk) for chunk in taken.chunks)

    out = way_of(trace, "a", goes_out, CARRIERS[carrier])
    into = way_of(trace, "b", comes_in, CARRIERS[carrier], MODEL)
    out_on_page, into_on_page = on_the_page()
    for found, listed, most in ((out, out_on_page, OUT_MAX), (into, into_on_page, IN_MAX)):
        assert {CARRIERS["tcp"] if file == CARRIERS[carrier] else file for file in found.stations} == listed
        assert len(listed) <= most
        assert found.entered_again == {SHELL}


def half_of(trace: Trace, node: str) -> Delta:
    """The half of an exchange that node a began, as it is at this node."""
    seen = [form for each in trace.handed_on if each.node == node for form in each.what if isinstance(form, Delta)]
    found = {id(half): half for half in seen if half.wants_answer}
    (half,) = found.values()
    return half
