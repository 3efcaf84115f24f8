"""Real daemons in one process: memory for the network, virtual time, and a schedule that one seed decides.

Or loopback TCP and UDP in real time (`live`), and chunks over UCX (`live_over_ucx`), where no seed decides anything.
"""

from __future__ import annotations

import math
import os
import random
import socket
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
import trio
import trio.testing

from peerd.daemon.control import LocalConnection
from peerd.daemon.node import Daemon
from peerd.daemon.verbs import Verbs
from peerd.local.local_socket import pack, take
from peerd.local.node_key import NodeKey
from peerd.local.shared_memory import SharedMemory
from peerd.local.signing import NodeSigning
from peerd.node.meta import NodeMeta
from peerd.protocol import trainer as protocol
from peerd.protocol.trainer_client import ClientState, TrainerClient
from peerd.settings import Settings
from peerd.transport import framing
from peerd.transport.connection import Transport
from peerd.transport.ids import Address, NodeId
from peerd.transport.memory import MemoryNetwork
from peerd.transport.messages import AS_STARTED, Delta, Member, Message, Plan, State
from peerd.transport.rdma import ucx
from peerd.transport.rdma.fabric import UcxFabric
from peerd.transport.same_host import SameHost
from peerd.transport.secure.signing import Signing
from peerd.transport.tcp import TcpTransport
from peerd.transport.udp import bind_udp

T = TypeVar("T")
Model = npt.NDArray[np.float32]
Event = tuple[float, NodeId, str]  # virtual time, whose daemon, what

KEY = NodeKey.generate()  # of all: their ids are their names, which no key is asked to prove
PORT = 7946
VALUES = 300
STEP_S = 0.25  # of every trainer: they step at the same instants, and the schedule decides who is first
LIVE_STEP_S = 0.02
PATIENCE_S = 300.0  # of virtual time: whatever takes longer does not come
LIVE_PATIENCE_S = 60.0


class Connection(LocalConnection):
    """The daemon's end of a trainer's connection, without a socket; its messages are packed all the same."""

    def __init__(self, fd: int) -> None:
        self.fds = [fd]
        self._said, self.from_daemon = trio.open_memory_channel[bytearray](math.inf)
        self.to_daemon, self._heard = trio.open_memory_channel[bytearray](math.inf)

    async def receive(self) -> dict[str, Any] | None:
        try:
            return take(await self._heard.receive())
        except trio.EndOfChannel:
            return None

    async def send(self, message: dict[str, Any]) -> None:
        try:
            await self._said.send(bytearray(pack(message)))
        except trio.BrokenResourceError:
            return

    def has_lost_its_process(self) -> bool:
        """It has none of its own."""
        return False

    def close(self) -> None:
        """As the control socket does when a session is over."""
        self.close_fds()
        self._said.close()
        self._heard.close()


Expected = TypeVar("Expected", bound=protocol.Said)


class Trainer:
    """A trainer's side of a session, as peerd/trainer/swarm.py says it, for a model that has a target of its own."""

    def __init__(self, name: str, steps: int, step_s: float) -> None:
        self.step = self.first_step = self.resumes_at = 0
        self.steps = steps  # when its run ends
        self.finished = trio.Event()
        self.learns = True
        self.rests = False  # a step that takes long
        self._step_s = step_s
        self.target = targets(name)
        self._random = np.random.default_rng(list(name.encode()))
        self._model = (1 + self._random.normal(size=VALUES)).astype(np.float32)
        self._base = self._model.copy()
        self._client = TrainerClient()

    async def run(self, daemon: Daemon) -> None:
        """Attach, train, take part in the flush, and go."""
        self._memory = SharedMemory.create(VALUES)
        connection = Connection(os.dup(self._memory.fd))
        self._memory.close_fd()
        self._tell, self._told = connection.to_daemon, connection.from_daemon
        comes = protocol.Attach(1, "thin", VALUES, VALUES, [f"x float32 {VALUES}"], [], [], 0, 0)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._session)
                await daemon.model.attach(connection, protocol.encoded(comes))
                nursery.cancel_scope.cancel()
        finally:
            connection.close()

    async def _session(self) -> None:
        with self._tell, self._told:
            await self._expect(protocol.Welcome)
            self._publish(0)
            await self._say(protocol.Ready(self.resumes_at))
            start = await self._expect(protocol.Start)
            self._client.hear(start)
            if start.load is not None:
                self._model = self._memory.copies[start.load].copy()
                self._base = self._model.copy()
            self.step = self.first_step = start.step
            await self._wait()
            while self.step < self.steps and not self._client.leaves:
                self.step += 1
                noise = self._random.normal(size=VALUES)
                if self.learns:
                    self._model += np.float32(0.03 * (self.target - self._model) + 0.01 * noise)
                await self._obey_all()
                at_barrier = self._memory.board.quiet.stands_at(self.step, self._client.barrier)
                if at_barrier:
                    self._client.enter(ClientState.AT_BARRIER)
                    await self._wait_for_spare()
                await self._report(copies=at_barrier, stands=at_barrier and self._client.waits)
                await self._wait()
                await trio.sleep(self._step_s)
                while self.rests:
                    await trio.sleep(self._step_s)
            self._client.enter(ClientState.FINISHING)
            await self._wait_for_spare()
            await self._report(copies=True, finishing=True)
            await self._wait()

    async def _wait(self) -> None:
        while self._client.waits:
            await self._obey(await self._next())

    async def _wait_for_spare(self) -> None:
        """Asked, not looked at: when a thread writes the board is not the seed's to decide."""
        await self._say(protocol.SpareWanted())
        await self._expect(protocol.Spare)

    async def _report(self, *, copies: bool, finishing: bool = False, stands: bool = False) -> None:
        change = float(np.linalg.norm(self._model - self._base))
        self._memory.board.note(self.step, 0, 0.0, math.nan, 0.03, 0.03, {})
        copy = None
        board = self._memory.board
        may_copy = board.current == self._client.published_to
        if copies or (may_copy and (self._client.copy_asked or board.quiet.wants_copy(change, self.step))):
            copy = self._client.next_copy
            self._publish(copy)
        await self._say(protocol.Stepped(self.step, change, 1.0, stands, copy, finishing=finishing))

    def _publish(self, copy: int) -> None:
        self._client.published(copy)
        np.copyto(self._memory.copies[copy], self._model)
        self._base = self._model.copy()

    async def _obey_all(self) -> None:
        while self._told.statistics().current_buffer_used:
            await self._obey(await self._next())

    async def _obey(self, said: protocol.Said) -> None:
        if isinstance(said, protocol.Corrections):
            correction = self._memory.corrections[said.half]
            self._model += correction
            self._base += correction
        if (answer := self._client.hear(said)) is not None:
            await self._say(answer)
        if self._client.state is ClientState.FINISHED:
            self.finished.set()

    async def _expect(self, kind: type[Expected]) -> Expected:
        while not isinstance(said := await self._next(), kind):
            await self._obey(said)
        return said

    async def _next(self) -> protocol.Said:
        message = take(await self._told.receive())
        assert message is not None
        assert "error" not in message, message
        return protocol.decoded(message, protocol.FROM_DAEMON)

    async def _say(self, said: protocol.Said) -> None:
        await self._tell.send(bytearray(pack(protocol.encoded(said))))


def targets(name: str) -> Model:
    """Where the trainer of a node would end without the others."""
    return (2 + np.random.default_rng([1, *name.encode()]).normal(size=VALUES)).astype(np.float32)


class NamedSigning(NodeSigning):
    """Real keys, for nodes whose ids are their names."""

    names: ClassVar[dict[bytes, NodeId]] = {}

    def __init__(self, name: str, settings: Settings) -> None:
        super().__init__(NodeKey.generate(), settings.swarm, settings.run)
        self.names[self.key] = name

    def id_of(self, key: bytes) -> NodeId:
        """By whom the key was made."""
        return self.names.get(key, key.hex())


class WatchedDaemon(Daemon):
    """Notes what its node comes to know, and every half of an exchange that it takes in."""

    def __init__(
        self, note: Callable[[str], None], settings: Settings, me: Member, *rest: Any, signing: Signing | None = None
    ) -> None:
        self.latency_s = 0.0  # of a mode's messages
        self._note = note
        self._known: dict[NodeId, str] = {}
        rng = random.Random(f"{me.id}/{me.epoch}")
        nursery, transport, datagrams, kept = (*rest, ())[:4]
        super().__init__(
            settings, me, KEY, (me.host, me.port), nursery, transport, datagrams, kept, rng, signing=signing
        )
        runner = self.model.runner
        self._to_mode, runner.on_message = runner.on_message, self._on_message  # type: ignore[method-assign]

    def _on_members(self) -> None:
        super()._on_members()
        for id, member in self.members().items():
            ready = "ready" if NodeMeta.unpack(member.meta).ready else "without a model"
            known = f"{id} in life {member.epoch} is {member.state.name}, {ready}"
            if self._known.get(id) != known:
                self._known[id] = known
                self._note(known)

    async def _on_message(self, sender: NodeId, message: Message, plan: Plan = AS_STARTED) -> None:
        await trio.sleep(self.latency_s)
        await self._to_mode(sender, message, plan)
        if isinstance(message, Delta):
            self._note(f"exchange {message.seq} with {sender}")


class Node:
    """One node through its lives; its name is its host's and its id, too."""

    daemon: WatchedDaemon
    trainer: Trainer

    def __init__(self, swarm: Swarm, name: str, join: Address | None, **settings: Any) -> None:
        self.name = name
        self.epoch = 0
        self.address = swarm.network.place(name)
        self._swarm = swarm
        if "state_dir" in settings:
            settings["state_dir"] = f"{settings['state_dir']}/{name}"
            Path(settings["state_dir"]).mkdir()
        self._settings = Settings(name=name, join=(f"{join[0]}:{join[1]}",) if join else (), **settings)
        self.signing = NamedSigning(name, self._settings) if swarm.signed else None

    async def start(self, steps: int) -> None:
        """A new life, that ends with `crash`."""
        self.epoch += 1
        self._scope, self._over = trio.CancelScope(), trio.Event()
        self.trainer = Trainer(self.name, steps, self._swarm.network.step_s)
        await self._swarm.nursery.start(self._live)

    async def crash(self) -> None:
        """Daemon and trainer are gone at once; what they sent is still read, as after a kill."""
        self._scope.cancel()
        await self._over.wait()

    async def leave(self) -> None:
        """Hand over, say goodbye, go."""
        await self.daemon.leave()
        await self.crash()

    async def _live(self, task_status: trio.TaskStatus[None]) -> None:
        network, (host, port) = self._swarm.network, self.address
        about = NodeMeta(expects=True, founder=not self._settings.join).pack()
        me = Member(self.name, self.name, host, port, self.epoch, 0, State.ALIVE, "", about)
        with self._scope:
            async with aclosing(await network.bind(self.address)) as datagrams, trio.open_nursery() as nursery:
                carriers = nursery, network.carrier(nursery, host), datagrams
                self.daemon = WatchedDaemon(self._note, self._settings, me, *carriers, signing=self.signing)
                if self._settings.state_dir:
                    self.daemon.model.plans.keep(trio.Event())
                await self.daemon.start()
                task_status.started()
                nursery.start_soon(self.trainer.run, self.daemon)
        self._over.set()

    def _note(self, what: str) -> None:
        self._swarm.trace.append((trio.current_time(), self.name, what))

    @property
    def runs(self) -> bool:
        """Whether it has not crashed."""
        return not self._over.is_set()

    def sees(self) -> dict[NodeId, State]:
        """Its members."""
        return {id: member.state for id, member in self.daemon.view.membership.members.items()}

    @property
    def plan(self) -> Plan:
        """What it works under."""
        return self.daemon.model.plans.plan

    @property
    def model(self) -> Model:
        """Its trainer's own, as it is at this instant."""
        return self.trainer._model.copy()

    async def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """A verb of the control socket."""
        answer: dict[str, Any] = await Verbs(self.daemon).table()[verb](arguments)
        return answer

    async def carriers(self) -> set[str]:
        """What carries the bulk of its links."""
        members = (await self.ask("members"))["members"]
        return {member["carrier"] for member in members if member["carrier"]}

    async def counts(self) -> dict[str, int]:
        """What its status counts."""
        counts: dict[str, int] = (await self.ask("status"))["counts"]
        return counts


class Memory(MemoryNetwork):
    """The memory network, in virtual time."""

    step_s, patience_s = STEP_S, PATIENCE_S

    def place(self, name: str) -> Address:
        """Where this node is."""
        return f"10.0.0.{ord(name[0])}", PORT

    def carrier(self, nursery: trio.Nursery, host: str) -> Transport:
        """Its connections."""
        return self.transport(host)


class Loopback:
    """TCP and UDP of this machine, in its own time."""

    step_s, patience_s = LIVE_STEP_S, LIVE_PATIENCE_S

    def place(self, name: str) -> Address:
        """A port that is free for both now."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            return "127.0.0.1", taken.getsockname()[1]

    async def bind(self, address: Address) -> Any:
        """Its datagrams."""
        return await bind_udp(address)

    def carrier(self, nursery: trio.Nursery, host: str) -> Transport:
        """Its connections."""
        return TcpTransport(nursery)


class LoopbackShared(Loopback):
    """The same, with all chunks through shared memory."""

    def carrier(self, nursery: trio.Nursery, host: str) -> Transport:
        """Its connections, which are upgraded at once."""
        return TcpTransport(nursery, SameHost())


class CountingFabric(UcxFabric):
    """Counts the chunks that go over it."""

    chunks = 0

    def post(self, operation: Any) -> None:
        """See `UcxFabric`."""
        self.chunks += operation.queue is not None
        super().post(operation)


class LoopbackUcx(Loopback):
    """The same, with all chunks over UCX's tcp."""

    def __init__(self) -> None:
        self.fabrics: list[CountingFabric] = []

    def carrier(self, nursery: trio.Nursery, host: str) -> Transport:
        """Its connections, which are upgraded at once."""
        fabric = CountingFabric(ucx.load(), "tcp", without_rdma=True)
        self.fabrics.append(fabric)
        nursery.start_soon(fabric.run)
        return TcpTransport(nursery, fabric)


class Swarm:
    """A network and its nodes. `trace` is what happened, in order."""

    def __init__(self, nursery: trio.Nursery, network: Memory | Loopback) -> None:
        self.nursery = nursery
        self.network = network
        self.signed = False  # of nodes that start from now on: whether their records and plans are
        self.nodes: dict[str, Node] = {}
        self.trace: list[Event] = []

    async def start(self, names: str, *, steps: int, **settings: Any) -> None:
        """Start a node for each letter; all join through the first there ever was."""
        for name in names:
            first = next(iter(self.nodes.values()), None)
            self.nodes[name] = Node(self, name, first.address if first is not None else None, **settings)
            await self.nodes[name].start(steps)

    async def agree(self, **states: State) -> None:
        """Wait until every running node sees these members, and no others, in these states."""
        await self.eventually(lambda: all(node.sees() == states for node in self.nodes.values() if node.runs))

    async def finish(self) -> dict[str, Model]:
        """Every model, once the trainers of all who run have finished."""
        running = {name: node for name, node in self.nodes.items() if node.runs}
        with trio.fail_after(self.network.patience_s):
            for node in running.values():
                await node.trainer.finished.wait()
        return {name: (await node.daemon.model.model_values())[0] for name, node in running.items()}

    async def eventually(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds."""
        with trio.fail_after(self.network.patience_s):
            while not condition():
                await trio.sleep(0.2 * self.network.step_s)


def simulate(seed: int, scenario: Callable[[Swarm], Awaitable[T]]) -> T:
    """Run the scenario on virtual time; the same seed runs every task in the same order."""
    with pytest.MonkeyPatch.context() as patch:
        # under an autojump clock a thread counts as idle: time would run away while it works
        patch.setattr(trio.to_thread, "run_sync", _run_inline)
        patch.setattr(os, "setpriority", lambda *_: None)  # the compute thread is this one, which must not turn nice
        patch.setattr(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
        patch.setattr(trio._core._run, "_r", random.Random(seed))
        return trio.run(_within, scenario, Memory, clock=trio.testing.MockClock(autojump_threshold=0))


def live(scenario: Callable[[Swarm], Awaitable[T]]) -> T:
    """Run the scenario over this machine's network, as its schedule comes."""
    return trio.run(_within, scenario, lambda _: Loopback())


def live_over_shm(scenario: Callable[[Swarm], Awaitable[T]]) -> T:
    """The same through shared memory, however small a chunk is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framing, "OUT_OF_BAND_MIN", 1)
        return trio.run(_within, scenario, lambda _: LoopbackShared())


def live_over_ucx(scenario: Callable[[Swarm], Awaitable[T]]) -> T:
    """The same over UCX, however small a chunk is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framing, "OUT_OF_BAND_MIN", 1)
        network = LoopbackUcx()
        result = trio.run(_within, scenario, lambda _: network)
        assert sum(fabric.chunks for fabric in network.fabrics) > 0
        return result


async def _run_inline(work: Callable[..., T], *arguments: Any, **_: Any) -> T:
    await trio.lowlevel.checkpoint()
    return work(*arguments)


async def _within(scenario: Callable[[Swarm], Awaitable[T]], network: Callable[[trio.Nursery], Memory | Loopback]) -> T:
    async with trio.open_nursery() as nursery:
        result = await scenario(Swarm(nursery, network(nursery)))
        nursery.cancel_scope.cancel()
    return result
