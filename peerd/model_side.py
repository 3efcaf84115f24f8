"""The half of a daemon that has a model: the trainer's session, the mode in its lane, and a newcomer's first model."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import trio

from peerd.control import LocalConnection
from peerd.effects import Effect, Log, NodeId, PeerError, Proceed, Publish, Send, StepReport, UserError
from peerd.lane import HandOver, Lane
from peerd.logs import LOGGER
from peerd.messages import Connected, Member, Message, ModelRequest, ModelSnapshot
from peerd.peers import Peers
from peerd.replica import Replica
from peerd.roles import About, FetchFrom, OwnModel, WaitFor, donors, partners, whose_model
from peerd.settings import Settings
from peerd.shared_memory import SharedMemory
from peerd.training import delta
from peerd.training.delta import Layout, NotFinite
from peerd.training.modes import MODES, Mode, ModeSettings
from peerd.training.trigger import parse_trigger

SNAPSHOT_CODEC = "float32"  # a newcomer starts from exactly the donor's model
SETTLE_SHARE = 0.1  # of the run's own duration: how long its end waits for members that still train
SETTLE_LEAST_S = 10.0
STOP_STEPS = 10  # step times that a leaving trainer has to come to its next step
STOP_LEAST_S = 3.0
EXCHANGE_SHARE = 4  # times the slowest exchange so far: how long a leaving node's hand-over may take
HAND_OVER_LEAST_S = 3.0
WAIT_TOLD_EVERY_S = 10.0
VALUES_MAX = 1000 * delta.PIECE_VALUES  # a message has at most 1024 chunks
ASK_AGAIN_S = 10.0  # a donor from which nothing has come for so long is asked again,
ASKS_MAX = 3  # so many times; then another one is
SLOWEST_DONOR = 1000  # bytes a second: fewer are probes and tables, not a model


T = TypeVar("T")


class TrainerGone(Exception):
    """The trainer's connection ended while it waited for the swarm."""


@dataclass(slots=True)
class TrainerFacts:
    """What the status shows of a trainer."""

    pid: int
    step: int = 0
    first_step: int = 0
    samples: int = 0
    loss: float | None = None
    lr: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    rollbacks: int = 0
    phase: str = "starting"  # then training, finishing, finished, gone
    began: float = 0.0  # when it trained first, on the loop's clock


class ModelSide:
    """See the module; one a daemon."""

    def __init__(
        self,
        me: NodeId,
        settings: Settings,
        peers: Peers,
        members: Callable[[], dict[NodeId, Member]],
        say_about: Callable[[About], Awaitable[None]],
        rng: random.Random,
    ) -> None:
        """`say_about` spreads what this node says of itself."""
        self.about = About(founder=not settings.join)
        self.signature = ""
        self.tensors: list[str] = []
        self.layout: Layout | None = None
        self.facts: TrainerFacts | None = None
        self.lane = Lane(self._perform)
        self.fatal: str | None = None  # why this node cannot be part of its swarm
        self.failed = trio.Event()
        self.handed_over = trio.Event()
        self.settled = trio.Event()
        self.snapshots = 0
        self.attaches = 0
        self.on_layout: Callable[[], None] = lambda: None
        self._me = me
        self._settings = settings
        self._peers = peers
        self._members = members
        self._say_about = say_about
        self._rng = rng
        self._session: LocalConnection | None = None
        self._leaving = False
        self._lr_most = 0.0  # the trigger's threshold follows the learning rate, across restarts of the trainer too
        self._asked_publish = False
        self._final_report = trio.Event()
        self._members_changed = trio.Event()
        self._snapshot: ModelSnapshot | None = None
        self._waiting_for: NodeId | None = None
        self._pending_report: dict[str, Any] | None = None
        self._report_lock = threading.Lock()
        self._exchange_began: dict[NodeId, float] = {}
        self._slowest_exchange_s = 0.0
        self._nursery: trio.Nursery | None = None

    # ---------------------------------------------------------------- from the swarm

    def on_members(self) -> None:
        """The membership changed: the mode's partners may have."""
        self._members_changed.set()
        self._members_changed = trio.Event()
        if self.lane.mode is not None:
            alive = partners(self._members(), self._me, self.signature)
            for gone in self._exchange_began.keys() - alive:
                del self._exchange_began[gone]
            self.lane.post(lambda now: self._mode.on_peers(alive, now))

    def on_reconnected(self, peer: NodeId) -> None:
        """Messages to this peer flow again."""
        self._exchange_began.pop(peer, None)
        if self.lane.mode is not None:
            self.lane.post(lambda now: self._mode.on_message(peer, Connected(), now))

    async def on_message(self, sender: NodeId, message: Message) -> None:
        """A peer's message, of the mode or about a whole model. Raises PeerError."""
        match message:
            case ModelRequest():
                await self._give_model(sender)
            case ModelSnapshot():
                if sender == self._waiting_for:
                    self._snapshot = message
                    self._members_changed.set()
                    self._members_changed = trio.Event()
            case _ if self.lane.mode is not None:
                if sender in self._exchange_began:
                    took = trio.current_time() - self._exchange_began.pop(sender)
                    self._slowest_exchange_s = max(self._slowest_exchange_s, took)
                await self.lane.call(lambda now: self._mode.on_message(sender, message, now))

    def on_refused(self, refusal: PeerError, *, newcomer: bool) -> None:
        """A peer will not have us. Before we are part of the swarm that is our own failure."""
        if self.about.ready or not newcomer:
            LOGGER.warning("%s", refusal)
        elif self.fatal is None:
            self.fatal = str(refusal)
            self.failed.set()

    async def _give_model(self, sender: NodeId) -> None:
        if not self.about.ready or self.layout is None:
            return
        layout = self.layout
        step = self.facts.step if self.facts else 0

        def encode(_: float) -> list[Effect]:
            chunks = delta.encode(SNAPSHOT_CODEC, layout, self._replica.values())[0]
            return [Send(sender, ModelSnapshot(step, SNAPSHOT_CODEC, chunks))]

        try:
            await self.lane.call(encode)
            self.snapshots += 1
        except NotFinite:
            LOGGER.warning("a newcomer asked for the model, but it holds a value that is not finite")

    # ---------------------------------------------------------------- the trainer's session

    async def attach(self, connection: LocalConnection, message: dict[str, Any]) -> None:
        """Serve one trainer until it is gone."""
        refusal = self._refuse(message, connection)
        if refusal is not None:
            await connection.send({"error": refusal})
            return
        try:
            memory = SharedMemory(connection.fds[0], message["total"])
        except (OSError, ValueError) as error:
            await connection.send({"error": f"the daemon cannot map the script's memory: {error}"})
            return
        connection.close_fds()  # the mapping stays; the connection closes them itself when the memory is refused
        self._session = connection
        self.attaches += 1
        facts = self.facts = TrainerFacts(pid=message["pid"], step=self.facts.step if self.facts else 0)
        try:
            await self._start(connection, message, memory)
            while (said := await connection.receive()) is not None:
                if not _is_understood(said):
                    LOGGER.warning("the trainer said what this daemon does not understand: cut off")
                    return
                self._on_trainer(said)
        except TrainerGone:
            if not self._leaving:
                LOGGER.info("the trainer went away before its first step")
        finally:
            self._session = None
            self._asked_publish = False
            self._final_report.set()
            facts.phase = "finished" if facts.phase == "finished" else "gone"
            self.lane.post(lambda _: self._trainer_gone())

    def _refuse(self, message: dict[str, Any], connection: LocalConnection) -> str | None:
        if self._session is not None and self.facts is not None:
            return f"a trainer (pid {self.facts.pid}) is attached to this node already"
        if not _is_attach(message) or not connection.fds:
            return "the script's peerd and the daemon's do not understand each other: are they of one version?"
        if message["total"] > VALUES_MAX:
            return f"the model has {message['total']:,} values; peerd takes at most {VALUES_MAX:,}"
        if self.signature and message["signature"] != self.signature:
            theirs, ours = list(message["tensors"]), self.tensors
            differing = next((a, b) for a, b in zip([*theirs, "nothing"], [*ours, "nothing"], strict=False) if a != b)
            return f"this node holds another model: {differing[1]} here, {differing[0]} in the script"
        return None

    async def _start(self, connection: LocalConnection, message: dict[str, Any], memory: SharedMemory) -> None:
        self.signature = message["signature"]
        self.tensors = list(message["tensors"])
        self.layout = Layout(message["parameters"], message["total"])
        self.on_layout()
        await self._tell(model=self.signature, expects=True)
        settings = self._settings
        await connection.send(
            {
                "kind": "welcome",
                "checkpoints": str(settings.state_path / "checkpoints"),
                "checkpoint_every_s": settings.checkpoint_every_s,
            }
        )
        ready = await connection.receive()
        if ready is None:
            return
        LOGGER.info("a trainer attached: %s values in %d tensors", f"{self.layout.total:,}", len(self.tensors))
        load, step = await self._first_model(connection, memory, int(ready["step"]))
        assert self.facts is not None, "set by attach"
        self.facts.step = self.facts.first_step = step
        if self.lane.mode is None:
            mode_settings = ModeSettings(settings.codec, parse_trigger(settings.trigger), settings.view)
            self.lane.mode = MODES[settings.mode](
                self._me, self.layout, self._rng, mode_settings, lambda: self._replica.values()
            )
        await self._tell(ready=True)
        self.on_members()
        await connection.send({"kind": "start", "load": load, "step": step, "lr_most": self._lr_most})
        self.lane.post(lambda _: [Publish()])  # the mode may still wait for a copy from the trainer before this one
        assert self._nursery is not None, "run started before any trainer came"
        self._nursery.start_soon(self._release, connection, self.facts)

    async def _release(self, connection: LocalConnection, facts: TrainerFacts) -> None:
        """Let the trainer make its first step once enough members can join in."""
        told_at = -WAIT_TOLD_EVERY_S
        while (ready := 1 + len(partners(self._members(), self._me, self.signature))) < self._settings.wait_for:
            if self._session is not connection:
                return
            told_at = await self._wait(f"{ready} of {self._settings.wait_for} members are ready", told_at)
        if self._session is connection:
            facts.phase, facts.began = "training", trio.current_time()
            LOGGER.info("training from step %d", facts.step)
            await connection.send({"kind": "go"})

    async def _wait(self, reason: str, told_at: float) -> float:
        """Until a member changes; `reason` is told now and then. Returns when it was last told."""
        if trio.current_time() - told_at >= WAIT_TOLD_EVERY_S:
            told_at = trio.current_time()
            LOGGER.info("the trainer waits: %s", reason)
        with trio.move_on_after(1.0):
            await self._members_changed.wait()
        return told_at

    async def _first_model(
        self, connection: LocalConnection, memory: SharedMemory, step: int
    ) -> tuple[int | None, int]:
        """Which copy the trainer must load, and the step to start from. The replica is ready afterwards."""
        fresh = Replica(memory)
        if self.lane.replica is not None:  # a trainer that came back: the daemon went on with its model
            await self.lane.call(lambda _: _move(self.lane, fresh))
            assert self.facts is not None, "set by attach"
            return 0, max(step, self.facts.step)
        fetched = await _attended(connection, self._fetch_model)
        self.lane.replica = fresh
        if fetched is None:
            return None, step
        values, donor_step = fetched
        return await trio.to_thread.run_sync(fresh.load, values), max(step, donor_step)

    async def _fetch_model(self) -> tuple[np.ndarray[Any, Any], int] | None:
        """The swarm's current model, or None to start from the trainer's own."""
        told_at = -WAIT_TOLD_EVERY_S
        unwilling: set[NodeId] = set()
        while True:
            match whose_model(self._members(), self._me, has_seeds=bool(self._settings.join)):
                case OwnModel():
                    return None
                case FetchFrom(givers):
                    donor = next((giver for giver in givers if giver not in unwilling), givers[0])
                    if (fetched := await self._fetch_from(donor)) is not None:
                        return fetched
                    unwilling = unwilling | {donor} if len(unwilling) < len(givers) else set()
                case WaitFor(reason):
                    told_at = await self._wait(reason, told_at)

    async def _fetch_from(self, donor: NodeId) -> tuple[np.ndarray[Any, Any], int] | None:
        """Ask one donor and wait as long as it is alive; None when it went away first."""
        assert self.layout is not None, "known since the attach"
        self._waiting_for, self._snapshot = donor, None
        asked_at, asks, received = -ASK_AGAIN_S, 0, self._peers.bytes_received
        try:
            while donor in donors(self._members(), self._me):  # of another model, too: it refuses, saying what differs
                if trio.current_time() - asked_at >= ASK_AGAIN_S:
                    arriving = self._peers.bytes_received - received > ASK_AGAIN_S * SLOWEST_DONOR
                    if asks == ASKS_MAX and not arriving:
                        return None
                    asked_at, received = trio.current_time(), self._peers.bytes_received
                    if not arriving:  # the request may be lost with a connection
                        asks += 1
                        self._peers.send(donor, ModelRequest())
                with trio.move_on_after(1.0):
                    await self._members_changed.wait()
                if (snapshot := self._take_snapshot()) is not None:
                    values = np.empty(self.layout.total, np.float32)
                    await trio.to_thread.run_sync(delta.decode, snapshot.codec, self.layout, snapshot.chunks, values)
                    LOGGER.info("the model of step %d came from %s", snapshot.step, self._members()[donor].name)
                    return values, snapshot.step
        except PeerError as error:
            LOGGER.warning("the model from %s: %s; asking another member", donor, error)
        finally:
            self._waiting_for = self._snapshot = None
        return None

    def _take_snapshot(self) -> ModelSnapshot | None:
        snapshot, self._snapshot = self._snapshot, None
        return snapshot

    def _on_trainer(self, said: dict[str, Any]) -> None:
        match said["kind"]:
            case "step":
                self._note(said)
                if said["published"] is not None or said.get("finishing"):
                    self.lane.post(lambda now: self._step(said, now))
                elif self._replace_report(said) is None:  # a later one replaces it: the mode wants the newest change
                    self.lane.post(lambda now: self._step(self._replace_report(None), now))
            case "taken":
                half = int(said["half"])
                self.lane.post(lambda _: self._taken(half))
            case "finish":
                self.lane.post(lambda _: [Publish()])

    def _replace_report(self, said: dict[str, Any] | None) -> dict[str, Any] | None:
        """Swap the report that waits for the lane; the loop and the lane's thread both do."""
        with self._report_lock:
            before, self._pending_report = self._pending_report, said
            return before

    def _step(self, said: dict[str, Any] | None, now: float) -> list[Effect]:
        if said is None:
            return []
        report = StepReport(
            step=said["step"],
            change=said["change"],
            lr_ratio=said["lr_ratio"],
            published=said["published"] is not None,
            finishing=bool(said.get("finishing")),
        )
        if report.published:
            self._asked_publish = False
            self._replica.published(said["published"])
        return self._mode.on_step(report, now)

    def _note(self, said: dict[str, Any]) -> None:
        facts = self.facts
        assert facts is not None, "a session has facts"
        facts.step = said["step"]
        facts.samples += int(said.get("samples") or 0)
        facts.loss = said["loss"] if said.get("loss") is not None else facts.loss
        facts.lr = said["lr"]
        self._lr_most = max(self._lr_most, said["lr"])
        facts.metrics.update(said.get("metrics") or {})
        facts.rollbacks += bool(said.get("rolled_back"))
        if said.get("finishing"):
            facts.phase = "finishing"
            self._final_report.set()
            self.settled, self.handed_over = trio.Event(), trio.Event()
            if self._nursery is not None and not self._leaving:
                self._nursery.start_soon(self._end_run, self._session, facts)

    def _taken(self, half: int) -> list[Effect]:
        self._replica.taken(half)
        return []

    def _trainer_gone(self) -> list[Effect]:
        if self._session is None and self.lane.replica is not None:
            self._replica.owned_here()
        return []

    # ---------------------------------------------------------------- what the mode asks

    async def _perform(self, effects: list[Effect | HandOver]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    if getattr(effect.message, "wants_answer", False):
                        self._exchange_began[effect.peer] = trio.current_time()
                    self._peers.send(effect.peer, effect.message)
                case HandOver() if self._session is not None:
                    await self._session.send({"kind": "corrections", "half": effect.half})
                case Publish() if self._session is not None and not self._asked_publish:
                    self._asked_publish = True
                    await self._session.send({"kind": "publish", "slot": self._replica.spare_copy})
                case Proceed():
                    self.handed_over.set()
                    if effect.settled:
                        self.settled.set()
                case Log():
                    LOGGER.log(logging.getLevelNamesMapping()[effect.level.upper()], "%s", effect.text)

    async def run(self) -> None:
        """Work until cancelled: the lane, the mode's timer, and the end of each run."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self.lane.run)
            nursery.start_soon(self._watch_timer)

    async def _watch_timer(self) -> None:
        while True:
            await trio.sleep(1.0)  # the mode's deadlines are tens of seconds
            mode = self.lane.mode
            if mode is not None and trio.current_time() >= mode.deadline:
                await self.lane.call(self._mode.on_timer)

    async def _end_run(self, session: LocalConnection | None, facts: TrainerFacts) -> None:
        """Let a finishing trainer go when all agree, or when the others take much longer than this run did."""
        patience_s = max(SETTLE_LEAST_S, SETTLE_SHARE * (trio.current_time() - facts.began))
        with trio.move_on_after(patience_s) as patience:
            await self.settled.wait()
        if patience.cancelled_caught:
            LOGGER.info("other members still train after %.0f s: this run ends with the model as it is", patience_s)
        while session is not None and session is self._session:
            if not self._replica.has_corrections:
                facts.phase = "finished"
                await session.send({"kind": "finished"})
                LOGGER.info("training finished at step %d; still a member, with the model", facts.step)
                return
            await trio.sleep(0.01)

    # ---------------------------------------------------------------- leaving

    async def hand_over(self) -> None:
        """Have the trainer publish once more and end, then give every partner what it has not yet seen."""
        self._leaving = True
        if self.lane.mode is None:
            return
        facts = self.facts
        if self._session is not None and facts is not None and facts.phase in ("training", "finishing"):
            if facts.phase == "training":
                self._final_report = trio.Event()
            steps = max(1, facts.step - facts.first_step)
            step_s = (trio.current_time() - facts.began) / steps
            await self._session.send({"kind": "stop"})
            with trio.move_on_after(max(STOP_LEAST_S, STOP_STEPS * step_s)):
                await self._final_report.wait()
        if facts is not None and facts.phase != "finished":
            last = StepReport(facts.step, 0.0, 1.0, published=False, finishing=True)
            self.lane.post(lambda now: self._mode.on_step(last, now))
            with trio.move_on_after(max(HAND_OVER_LEAST_S, EXCHANGE_SHARE * self._slowest_exchange_s)) as patience:
                await self.handed_over.wait()
                await self._peers.drain()
            if patience.cancelled_caught:
                LOGGER.warning("not every partner took what this node had not yet sent")

    async def expect_none(self) -> None:
        """No trainer comes: members without a model need not wait for this one to go first."""
        await self._tell(expects=False)

    async def _tell(self, **changes: Any) -> None:
        self.about = replace(self.about, **changes)
        await self._say_about(self.about)

    # ---------------------------------------------------------------- for the status and export

    async def model_values(self) -> np.ndarray[Any, Any]:
        """The model as it stands, shape (total,). Raises UserError when there is none."""
        if self.lane.replica is None:
            raise UserError("this node has no model yet: no trainer has attached")
        found: list[np.ndarray[Any, Any]] = []

        def read(_: float) -> list[Effect]:
            found.append(self._replica.values().copy())
            return []

        await self.lane.call(read)
        return found[0]

    @property
    def _mode(self) -> Mode:
        assert self.lane.mode is not None, "checked before the job was posted"
        return self.lane.mode

    @property
    def _replica(self) -> Replica:
        assert self.lane.replica is not None, "a mode runs only on a replica"
        return self.lane.replica


async def _attended(connection: LocalConnection, work: Callable[[], Awaitable[T]]) -> T:
    """Do `work` for a trainer that waits and is silent meanwhile. Raises TrainerGone when it is not."""
    done: list[T] = []

    async def watch() -> None:
        with suppress(ValueError):
            await connection.receive()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        done.append(await work())
        nursery.cancel_scope.cancel()
    if not done:
        raise TrainerGone
    return done[0]


def _is_attach(message: dict[str, Any]) -> bool:
    parameters, total, tensors = message.get("parameters"), message.get("total"), message.get("tensors")
    return (
        isinstance(message.get("pid"), int)
        and isinstance(message.get("signature"), str)
        and isinstance(parameters, int)
        and isinstance(total, int)
        and 0 < parameters <= total
        and isinstance(tensors, list)
        and all(isinstance(tensor, str) for tensor in tensors)
    )


def _move(lane: Lane, fresh: Replica) -> list[Effect]:
    assert lane.replica is not None
    fresh.load(lane.replica.values())
    lane.replica = fresh
    return []


def _is_understood(said: dict[str, Any]) -> bool:
    """Whether a message of an attached trainer has what `_on_trainer` reads."""
    number = (int, float)
    match said.get("kind"):
        case "step":
            published = said.get("published", "")
            return (
                isinstance(said.get("step"), int)
                and all(isinstance(said.get(key), number) for key in ("change", "lr", "lr_ratio"))
                and (published is None or published in (0, 1))
                and isinstance(said.get("metrics") or {}, dict)
                and isinstance(said.get("samples") or 0, int)
            )
        case "taken":
            return said.get("half") in (0, 1)
        case kind:
            return kind == "finish"
