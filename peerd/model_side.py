"""The half of a daemon that has a model: how a trainer comes, trains with the swarm, and goes.

What a trainer waits for is catch_up.py's, what it says trainer_session.py's, what the mode does exchanges.py's, and how
one mode follows another plan_keeper.py's.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

from peerd.catch_up import CatchUp
from peerd.control import LocalConnection
from peerd.effects import Address, NodeId, PeerError, UserError
from peerd.exchanges import Exchanges
from peerd.logs import LOGGER
from peerd.messages import AS_STARTED, Member, Message, ModelRequest, ModelSnapshot, Plan
from peerd.peers import Peers
from peerd.plan_keeper import PlanKeeper
from peerd.replica import Replica
from peerd.roles import About, partners
from peerd.settings import Settings
from peerd.shared_memory import SharedMemory
from peerd.trainer_session import TrainerFacts, TrainerGone, TrainerSession, is_attach, report_of
from peerd.training import delta
from peerd.training.delta import Layout, NotFinite
from peerd.training.modes import Mode, parse_mode
from peerd.training.modes.average import Average

SETTLE_SHARE = 0.1  # of the run's own duration: how long its end waits for members that still train
SETTLE_LEAST_S = 10.0
STOP_STEPS = 10  # step times that a leaving trainer has to come to its next step
STOP_LEAST_S = 3.0
VALUES_MAX = 1000 * delta.PIECE_VALUES  # a message has at most 1024 chunks


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
        awaited: Collection[Address] = (),
        awaited_until: float = 0.0,
    ) -> None:
        """`say_about` spreads what this node says of itself; for the awaited see catch_up.py."""
        self.about = About(founder=not settings.join)
        self.signature = ""
        self.tensors: list[str] = []
        self.layout: Layout | None = None
        self.facts: TrainerFacts | None = None
        self.fatal: str | None = None  # why this node cannot be part of its swarm
        self.failed = trio.Event()
        self.snapshots = 0
        self.attaches = 0
        self.on_layout: Callable[[], None] = lambda: None
        self._me = me
        self._settings = settings
        self._members = members
        self._say_about = say_about
        self._rng = rng
        self._exchanges = Exchanges(peers)
        self._catch_up = CatchUp(
            me, peers, members, has_seeds=bool(settings.join), awaited=awaited, awaited_until=awaited_until
        )
        self.plans = PlanKeeper(me, settings, self._exchanges, members, self._change_plan, self._say_averaged)
        self._leaving = False
        self._lr_most = 0.0  # the trigger's threshold follows the learning rate, across restarts of the trainer too

    async def run(self) -> None:
        """Work until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._exchanges.run)
            nursery.start_soon(self.plans.run)

    @property
    def mode(self) -> Mode | None:
        """How models are combined, once there is one."""
        return self._exchanges.lane.mode

    # ---------------------------------------------------------------- from the swarm

    def on_members(self) -> None:
        """The membership changed: the mode's partners may have."""
        self._catch_up.on_members()
        self.plans.on_members()
        if self.mode is not None:
            plan = self._exchanges.plan
            self._exchanges.on_partners(partners(self._members(), self._me, self.signature, plan))

    def on_reconnected(self, peer: NodeId) -> None:
        """Messages to this peer flow again."""
        self._exchanges.on_reconnected(peer)

    async def on_message(self, sender: NodeId, message: Message, plan: Plan = AS_STARTED) -> None:
        """A peer's message, of the mode under this plan or about a whole model. Raises PeerError."""
        match message:
            case ModelRequest():
                await self._give_model(sender)
            case ModelSnapshot():
                self._catch_up.on_snapshot(sender, message)
            case _:
                await self._exchanges.on_message(sender, message, plan)

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
        try:
            await self._exchanges.give_model(sender, self.layout, self.facts.step if self.facts else 0)
            self.snapshots += 1
        except NotFinite:
            LOGGER.warning("a newcomer asked for the model, but it holds a value that is not finite")

    # ---------------------------------------------------------------- a trainer comes

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
        facts = self.facts = TrainerFacts(pid=message["pid"], step=self.facts.step if self.facts else 0)
        session = self._exchanges.session = TrainerSession(connection, facts)
        self.attaches += 1
        try:
            await self._start(session, message, memory)
            await self._serve(session)
        except TrainerGone:
            if not self._leaving:
                LOGGER.info("the trainer went away before its first step")
        finally:
            self._exchanges.on_trainer_gone()
            session.ended.set()
            facts.phase = "finished" if facts.phase == "finished" else "gone"
            self._join_average()

    def _refuse(self, message: dict[str, Any], connection: LocalConnection) -> str | None:
        if self._exchanges.session is not None:
            return f"a trainer (pid {self._exchanges.session.facts.pid}) is attached to this node already"
        if not is_attach(message) or not connection.fds:
            return "the script's peerd and the daemon's do not understand each other: are they of one version?"
        if message["total"] > VALUES_MAX:
            return f"the model has {message['total']:,} values; peerd takes at most {VALUES_MAX:,}"
        if self.signature and message["signature"] != self.signature:
            theirs, ours = list(message["tensors"]), self.tensors
            differing = next((a, b) for a, b in zip([*theirs, "nothing"], [*ours, "nothing"], strict=False) if a != b)
            return f"this node holds another model: {differing[1]} here, {differing[0]} in the script"
        return None

    async def _start(self, session: TrainerSession, message: dict[str, Any], memory: SharedMemory) -> None:
        """From the attach to a trainer that holds the swarm's model. Raises TrainerGone."""
        settings, facts = self._settings, session.facts
        self.signature = message["signature"]
        self.tensors = list(message["tensors"])
        self.layout = Layout(message["parameters"], message["total"])
        self.on_layout()
        await self._tell(model=self.signature, expects=True)
        await session.tell(
            "welcome",
            checkpoints=str(settings.state_path / "checkpoints"),
            checkpoint_every_s=settings.checkpoint_every_s,
        )
        ready = await session.receive()
        if ready is None or ready["kind"] != "ready":
            raise TrainerGone
        LOGGER.info("a trainer attached: %s values in %d tensors", f"{self.layout.total:,}", len(self.tensors))
        if self.mode is None:
            await session.attended(self.plans.none_averages)
        load, step = await self._first_model(session, self.layout, Replica(memory), ready["step"])
        facts.step = facts.first_step = step
        if self.mode is None:
            await self._begin_mode()
        await self._tell(ready=True)
        self.on_members()
        self._join_average()
        barrier = self.mode.barrier if self.mode is not None else 0
        session.started = True
        await session.tell("start", load=load, step=step, lr_most=self._lr_most, barrier=barrier)
        self._exchanges.ask_publish()  # the mode may still wait for a copy from the trainer before this one

    async def _first_model(
        self, session: TrainerSession, layout: Layout, fresh: Replica, step: int
    ) -> tuple[int | None, int]:
        """Which copy the trainer must load, and the step to start from. The replica is ready afterwards."""
        if self._exchanges.lane.replica is not None:  # a trainer that came back: the daemon went on with its model
            await self._exchanges.move(fresh)
            return 0, max(step, session.facts.step)
        fetched = await session.attended(lambda: self._catch_up.fetch(layout))
        self._exchanges.lane.replica = fresh
        if fetched is None:
            return None, step
        values, donor_step = fetched
        return await trio.to_thread.run_sync(fresh.load, values), max(step, donor_step)

    # ---------------------------------------------------------------- a trainer trains, and ends

    async def _serve(self, session: TrainerSession) -> None:
        """Do what the trainer's messages say until it is gone."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._release, session)
            while (said := await session.receive()) is not None:
                match said["kind"]:
                    case "step":
                        session.facts.note(said)
                        self._lr_most = max(self._lr_most, said["lr"])
                        report = report_of(said)
                        self._exchanges.on_report(report, said["published"])
                        if report.finishing:
                            session.ended.set()
                            if not self._leaving:
                                nursery.start_soon(self._end_run, session)
                    case "taken":
                        self._exchanges.on_taken(said["half"])
                    case "slot":
                        self._exchanges.ask_publish()
                    case "barrier":
                        self._exchanges.on_told()
            nursery.cancel_scope.cancel()

    async def _release(self, session: TrainerSession) -> None:
        """Let the trainer make its first step once enough members can join in."""
        await self._catch_up.enough_members(self._settings.wait_for, self.signature)
        await self.plans.none_averages()
        session.facts.phase, session.facts.began = "training", trio.current_time()
        LOGGER.info("training from step %d", session.facts.step)
        await session.tell("go")

    async def _end_run(self, session: TrainerSession) -> None:
        """Let a finishing trainer go when all agree, or when the others take much longer than this run did."""
        facts = session.facts
        patience_s = max(SETTLE_LEAST_S, SETTLE_SHARE * (trio.current_time() - facts.began))
        with trio.move_on_after(patience_s) as patience:
            await self._exchanges.settled.wait()
        if patience.cancelled_caught:
            LOGGER.info("other members still train after %.0f s: this run ends with the model as it is", patience_s)
        while not self._exchanges.all_taken:
            await trio.sleep(0.01)
        facts.phase = "finished"
        await session.tell("finished")
        LOGGER.info("training finished at step %d; still a member, with the model", facts.step)

    async def hand_over(self) -> None:
        """For a node that leaves: have the trainer publish once more and end, then give what is not yet given."""
        self._leaving = True
        session, facts = self._exchanges.session, self.facts
        if self.mode is None or facts is None:
            return
        if session is not None and facts.phase in ("training", "finishing"):
            step_s = (trio.current_time() - facts.began) / max(1, facts.step - facts.first_step)
            await session.tell("stop")
            with trio.move_on_after(max(STOP_LEAST_S, STOP_STEPS * step_s)):
                await session.ended.wait()
        if facts.phase != "finished":
            await self._exchanges.hand_over(facts.step)

    async def expect_none(self) -> None:
        """No trainer comes: members without a model need not wait for this one to go first."""
        await self._tell(expects=False)

    async def _tell(self, **changes: Any) -> None:
        self.about = replace(self.about, **changes)
        await self._say_about(self.about)

    # ---------------------------------------------------------------- the mode

    async def _begin_mode(self) -> None:
        """That of the plan in force, which may change meanwhile."""
        while self.mode is None or self._exchanges.plan != self.plans.plan:
            assert self.layout is not None, "known once a trainer has attached"
            plan, settings = self.plans.plan, self.plans.settings
            make = Average if plan.once else parse_mode(settings.mode)
            known = self._members() if self.about.ready else {}  # a newcomer hears of the others once it may exchange
            alive = partners(known, self._me, self.signature, plan)
            await self._exchanges.begin(plan, alive, make, self._me, self.layout, self._rng, settings.mode_settings)

    async def _change_plan(self, plan: Plan) -> None:
        """Another plan is in force."""
        if self.mode is not None:
            await self._begin_mode()
        await self._tell(plan=plan, averaged=False)
        self.on_members()
        if self.mode is not None:
            self._exchanges.go_on_finishing(self.facts.step if self.facts else 0, stands=False)
        self._join_average()

    def _join_average(self) -> None:
        """Where no trainer trains, none will come to the barrier: the model as it stands is this node's part."""
        trains = self.facts is not None and self.facts.phase == "training"
        if self._exchanges.plan.once and self.mode is not None and not trains:
            self._exchanges.go_on_finishing(self.facts.step if self.facts else 0, stands=True)

    async def _say_averaged(self) -> None:
        await self._tell(averaged=True)

    # ---------------------------------------------------------------- for the export

    async def model_values(self) -> npt.NDArray[np.float32]:
        """The model as it stands, shape (total,). Raises UserError when there is none."""
        if self._exchanges.lane.replica is None:
            raise UserError("this node has no model yet: no trainer has attached")
        return await self._exchanges.values()
