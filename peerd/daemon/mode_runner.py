"""How do the mode's decisions become deeds? Events go to the core in its thread, effects to peers and trainer."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import trio

from peerd.daemon.compute_thread import ComputeThread
from peerd.daemon.cures import told_of_own
from peerd.daemon.peers import Peers
from peerd.daemon.trainer_session import TrainerPhase, TrainerSession
from peerd.node.core import (
    BufferTaken,
    CopyRead,
    GoOn,
    LoadCopy,
    ModelComes,
    ModelIs,
    ModelMoves,
    ModelWanted,
    NodeCore,
    NodeEffect,
    NodeEvent,
    Nothing,
    TakeBuffer,
    TrainerGone,
)
from peerd.node.model_copy import ModelCopy
from peerd.process.logs import LOGGER
from peerd.protocol import trainer as protocol
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Log, Proceed, Publish, Resume, Send, StepReport
from peerd.training.mode import ModeMaker
from peerd.training.mode_core import (
    BarrierKnown,
    CopyWanted,
    GradientCame,
    ModeBegins,
    ModeEnds,
    ModelAsked,
    ModePhase,
    NodeLeaves,
    PeersChanged,
    Received,
    Reconnected,
    RunStands,
    SketchAsked,
    Stepped,
    TimerDue,
    TrainerLost,
    Unreached,
)
from peerd.training.mode_settings import ModeSettings
from peerd.training.room import is_large
from peerd.transport.errors import UserError
from peerd.transport.ids import NodeId
from peerd.transport.messages import AS_STARTED, Delta, Member, Message, Plan

EXCHANGE_SHARE = 4  # times the slowest exchange so far: how long a leaving node's hand-over may take
DRAIN_MIN_S = 3.0
WIND_UP_MIN_S, WIND_UP_MAX_S = 3.0, 60.0  # the same for what is under way when the mode changes
WIND_UP_LOOK_S = 0.02
GIVE_WITHIN_S = 5.0  # to a newcomer, who else asks another
TAKES = (TrainerPhase.TRAINING, TrainerPhase.FINISHING)  # when a trainer takes corrections
TAKEN_MAX_S = 5.0  # for which this peer's other messages wait, too; a stream that stands for 10 s is thought broken
WAITING_MAX = 1024  # events for the compute thread
SHORT_MAX = 1 << 18  # values of a model: an exchange's event takes 1 to 2 ms, mostly the interpreter's
MAY_SURFACE = (  # at which an error may be what a peer said earlier
    PeersChanged, Reconnected, Unreached, TimerDue, Stepped, GradientCame, TrainerGone, TrainerLost, RunStands,
    NodeLeaves, BarrierKnown,
)  # fmt: skip
REST_S = 0.005  # between two looks at the mode's deadline, at least
IGNORED_S = 0.05  # where nothing has come of one
LOOK_MAX_S = 0.5  # of a mode that has moved it with no event
WORD = re.compile(r"\w+")


class ModeRunner:
    """The shell around one node's mode and its copy of the model."""

    def __init__(self, peers: Peers, members: Callable[[], Mapping[NodeId, Member]] = dict) -> None:
        self.core = NodeCore()
        self.compute: ComputeThread[NodeEvent, list[NodeEffect]] = ComputeThread(
            self.core.handle_all, self._perform, self._forgiven, self._is_short
        )
        self.next_copy = trio.Event()  # a copy has come, or none will
        self.averaged = trio.Event()  # the model is the average with which the plan begins
        self.session: TrainerSession | None = None
        self.settled = trio.Event()  # all models agree
        self._told_plan = AS_STARTED
        self._sooner = trio.Event()  # the mode wants to be woken before it is looked at next
        self._looks_at = math.inf
        self._drained = trio.Event()  # every partner has what this node had not yet sent
        self._peers = peers
        self._members = members
        self._late: dict[NodeId, PeersChanged | Reconnected | Unreached] = {}  # the last that there was no room for
        self._publish_asked = False
        self._resume_asked = False
        self._go_on: GoOn | None = None  # what the trainer, which waits with its gradient, is to be told
        self._taken = trio.Event()  # the trainer has the last correction that it was offered
        self._taken.set()
        self._in_turn = trio.Lock()
        self._hurries = False  # what is under way is to end soon

    def _is_short(self) -> bool:
        return self.core.model is not None and self.core.model.total <= SHORT_MAX

    async def run(self) -> None:
        """Work until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.compute.run)
            while True:
                mode = self.core.mode
                self._sooner = trio.Event()
                self._looks_at = trio.current_time() + LOOK_MAX_S
                if mode is not None:
                    self._looks_at = min(self._looks_at, mode.deadline)
                await trio.sleep(REST_S)
                with trio.move_on_at(self._looks_at):
                    await self._sooner.wait()
                self._post_late()
                if mode is not None and trio.current_time() >= mode.deadline:
                    due = mode.deadline
                    self.compute.post(TimerDue())
                    await self.compute.call(Nothing())
                    if mode.deadline == due:  # it hears nothing any more, or failed
                        await trio.sleep(IGNORED_S)

    async def begin(
        self,
        plan: Plan,
        alive: frozenset[NodeId],
        make: ModeMaker,
        me: NodeId,
        layout: Layout,
        rng: random.Random,
        settings: ModeSettings,
    ) -> None:
        """From now on there is this mode, on the model that the node has."""
        self._hurries = False
        try:
            await self.compute.call(ModeBegins(plan, alive, lambda values: make(me, layout, rng, settings, values)))
        except Exception as error:
            if isinstance(error, UserError) or (told := told_of_own(error)) is None:
                raise
            raise UserError(told) from None

    async def wind_up(self) -> None:
        """Have the mode begin nothing new, and wait for the end of what is under way, if that comes soon."""
        if self.core.mode is None:
            return
        self._hurry()
        with trio.move_on_after(min(WIND_UP_MAX_S, max(WIND_UP_MIN_S, EXCHANGE_SHARE * self.core.slowest_s))):
            while True:
                try:
                    await self.compute.call(ModeEnds())
                except UserError:
                    raise
                except Exception as error:
                    self._peers.offences.unforeseen(error, "the mode could not be ended in good order")
                    return
                if self.core.phase is ModePhase.ENDED:
                    return
                await trio.sleep(WIND_UP_LOOK_S)

    # ---------------------------------------------------------------- from the swarm

    def on_partners(self, alive: frozenset[NodeId]) -> None:
        """These members, and no others, can exchange."""
        self._post("", PeersChanged(alive))

    def on_reconnected(self, peer: NodeId) -> None:
        """Messages to this peer flow again."""
        self._post(peer, Reconnected(peer))

    def on_unreached(self, peer: NodeId) -> None:
        """No connection to this peer can be made."""
        self._post(peer, Unreached(peer))

    def _post(self, peer: NodeId, event: PeersChanged | Reconnected | Unreached) -> None:
        """In order, unless so much waits that only the last of what peers cause can be kept."""
        if self._late or self.compute.waiting >= WAITING_MAX:
            self._late.pop(peer, None)
            self._late[peer] = event
        else:
            self.compute.post(event)

    def _post_late(self) -> None:
        if self.compute.waiting < WAITING_MAX:
            late, self._late = self._late, {}
            for event in late.values():
                self.compute.post(event)

    def _forgiven(self, event: NodeEvent, error: Exception) -> bool:
        """What a peer said earlier may surface at any event of the mode: then nobody knows whom to drop."""
        if isinstance(error, UserError) or not isinstance(event, MAY_SURFACE):
            return False
        self._peers.offences.unforeseen(error, f"{type(event).__name__} could not be handled")
        return True

    async def on_message(self, sender: NodeId, message: Message, plan: Plan = AS_STARTED) -> None:
        """A peer's message to the mode, meant under this plan. Raises PeerError.

        The half of an exchange corrects the model. One of a large model waits until the trainer has taken the
        correction before it: the two would need memory for one each. While it trains that is its next step, for which
        all wait that have come, so that waits do not add up (of several, all but one then need the memory); at its
        run's end it takes them as they come.
        """
        model, session = self.core.model, self.session
        turn: AbstractAsyncContextManager[object] = nullcontext()
        corrects = isinstance(message, Delta) and model is not None and is_large(model.total)
        if corrects and session is not None and session.facts.phase is TrainerPhase.FINISHING:
            turn = self._in_turn
        async with turn:
            if corrects:
                await self._wait_for_taken()
            if self.core.mode is not None:
                await self.compute.call(Received(sender, message, plan))

    async def _wait_for_taken(self) -> None:
        session, taken = self.session, self._taken
        if session is None or session.facts.phase not in TAKES or self._hurries:
            return
        session.look()
        with trio.move_on_after(min(session.patience_s, TAKEN_MAX_S)):
            await taken.wait()
        taken.set()  # who did not take it for so long is not waited for again

    def _hurry(self) -> None:
        self._hurries = True
        self._taken.set()

    def no_model(self) -> UserError:
        """What to say of a node that has none."""
        why = "no trainer has attached" if self.session is None else "its trainer waits for the swarm's"
        return UserError(f"this node has no model yet: {why}")

    async def give_model(self, peer: NodeId, layout: Layout, digest: bytes) -> None:
        """Send the whole model as it stands, with the step that it is of; or that it is the one of this digest.

        Raises NotFinite.
        """
        await self.catch_up(GIVE_WITHIN_S)
        await self.compute.call(ModelAsked(peer, layout, digest))

    async def give_sketch(self, peer: NodeId, layout: Layout, seed: bytes) -> None:
        """Send a sketch of the model as it stands, as a model that is given is: the two are to be compared."""
        await self.catch_up(GIVE_WITHIN_S)
        await self.compute.call(SketchAsked(peer, layout, seed))

    # ---------------------------------------------------------------- from the trainer

    def on_report(self, report: StepReport, copy: int | None) -> None:
        """The optimizer moved, or the run ended; `copy` is the one that was published."""
        if not report.finishing and self._drained.is_set():  # the mode says it again only after a new run's steps
            self.settled, self._drained = trio.Event(), trio.Event()
        self.compute.post(Stepped(report, copy))
        if report.published or report.finishing:
            self._copy_came()

    def _copy_came(self) -> None:
        """Whatever the compute thread does from now on knows it."""
        self.next_copy.set()
        self.next_copy = trio.Event()

    def on_taken(self, buffer: int) -> None:
        """The trainer has added this buffer of corrections."""
        self.compute.post(BufferTaken(buffer))
        self._taken.set()

    def on_gradient(self, came: GradientCame) -> None:
        """The trainer waits with its gradient, or has a part of it."""
        self.compute.post(came)

    def on_rolled_back(self) -> None:
        """The trainer's model is an earlier one of its own."""
        self.compute.post(TrainerLost())

    def on_told(self) -> None:
        """The trainer knows of a change of the mode."""
        self.compute.post(BarrierKnown())

    def go_on_finishing(self, step: int, *, stands: bool) -> None:
        """Tell a new mode that the run ended under the one before; or that no trainer trains, if it `stands` still."""
        self.compute.post(RunStands(step, stands))

    def ask_publish(self) -> None:
        """Have the trainer publish a copy at its next step."""
        self.compute.post(CopyWanted())

    async def catch_up(self, at_most_s: float = math.inf) -> None:
        """Have a copy of the trainer's model as it is after its next step.

        One that makes no step is waited for as long as some steps take it, then the last copy stands.
        """
        session = self.session
        if session is None or self.core.model is None or session.facts.phase is not TrainerPhase.TRAINING:
            return
        session.look()
        if session.facts.step == self.core.model.step:
            return
        patience_s = min(at_most_s, session.patience_s)
        with trio.move_on_after(patience_s) as patience:
            next_copy = self.next_copy
            self.ask_publish()
            await next_copy.wait()
        if patience.cancelled_caught:
            LOGGER.info("no new copy from the trainer within %.0f s: that of step %d stands", patience_s, self.step)

    @property
    def step(self) -> int:
        """Which step of the trainer the model is of."""
        return self.core.model.step if self.core.model is not None else 0

    async def say_spare(self) -> None:
        """Tell the trainer when its last copy has been taken in: it may write the other one."""
        await self.compute.call(Nothing())
        if self.session is not None:
            await self.session.tell(protocol.Spare())

    def on_trainer_gone(self) -> None:
        """The session is over."""
        self.session = None
        self._copy_came()
        self._publish_asked = self._resume_asked = False
        self._go_on = None
        self._taken.set()
        self.compute.post(TrainerGone())

    async def move(self, fresh: ModelCopy) -> None:
        """Go on with the same model in another trainer's memory."""
        await self.compute.call(ModelMoves(fresh))

    async def go_on_from(self, fresh: ModelCopy, step: int) -> None:
        """Go on with the model that another trainer brings, which is of a later step."""
        await self.compute.call(ModelComes(fresh, step))

    @property
    def all_taken(self) -> bool:
        """Whether the trainer has every correction so far."""
        return self.core.model is None or not self.core.model.waiting

    # ---------------------------------------------------------------- what the mode asks

    async def _perform(self, effects: list[NodeEffect]) -> None:
        if self.core.plan != self._told_plan:
            await self._tell_change()
        if self.core.mode is not None and self.core.mode.deadline < self._looks_at:
            self._sooner.set()
        session = self.session
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self.core.sent(peer, message, trio.current_time())
                    self._peers.send(peer, message)
                case TakeBuffer(buffer) if session is not None and self._shares_memory_with(session):
                    if self.session is session:
                        self._taken = trio.Event()
                    await session.tell(protocol.Corrections(buffer))
                case LoadCopy(copy, step) if session is not None and self._shares_memory_with(session):
                    await session.tell(protocol.Load(copy, step))
                case GoOn() if session is not None and self._shares_memory_with(session):
                    self._go_on = effect
                case CopyRead():
                    self._publish_asked = False
                case Publish() if session is not None and not self._publish_asked:
                    self._publish_asked = True
                    await session.tell(protocol.Publish())
                case Resume():
                    self._resume_asked = True
                case Proceed(settled):
                    self._drained.set()
                    if settled:
                        (self.averaged if self.core.plan.once else self.settled).set()
                case Log(text):
                    LOGGER.warning("%s", self._with_names(text))
        if self._resume_asked and self.session is not None and self.all_taken:
            self._resume_asked = False
            await self.session.tell(protocol.Resume())
        if self._go_on is not None and self.session is not None and self.all_taken:
            go_on, self._go_on = self._go_on, None
            await self.session.tell(protocol.GradientIs(go_on.gradient))

    def _with_names(self, text: str) -> str:
        """A mode knows its peers by their ids alone; names are not certain, so some of the id stays."""
        members = self._members()
        return WORD.sub(
            lambda word: f"{members[word[0]].name} ({word[0][:8]})" if word[0] in members else word[0], text
        )

    def _shares_memory_with(self, session: TrainerSession) -> bool:
        return self.core.model is not None and self.core.model.is_shared_with(session.board)

    async def _tell_change(self) -> None:
        """To whoever sends for the mode, and to a trainer that trains: one that waits at the old barrier goes on."""
        self._peers.plan = self._told_plan = self.core.plan
        self.averaged = trio.Event()
        self._resume_asked = False
        if self.session is not None and self.session.started and self.core.mode is not None:
            self.core.untold += 1
            await self.session.tell(protocol.BarrierIs(self.core.mode.barrier))

    # ---------------------------------------------------------------- for who leaves or looks

    async def drain(self, step: int) -> None:
        """Give every partner what it has not yet seen."""
        self._hurry()
        self.compute.post(NodeLeaves(step))
        with trio.move_on_after(max(DRAIN_MIN_S, EXCHANGE_SHARE * self.core.slowest_s)) as patience:
            await self._drained.wait()
            await self._peers.drain()
        if patience.cancelled_caught:
            LOGGER.warning("not every partner took what this node had not yet sent")

    async def values(self) -> tuple[npt.NDArray[np.float32], int]:
        """A copy of the model as it stands, shape (total,), and the step that it is of."""
        (found,) = [each for each in await self.compute.call(ModelWanted()) if isinstance(each, ModelIs)]
        return found.values, found.step
