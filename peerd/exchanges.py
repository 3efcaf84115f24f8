"""How do the mode's decisions become deeds? Events go to it through the lane, effects to the peers and the trainer.

A mode may be followed by another one on the same replica. Before, the old one begins nothing new for a while, so that
what is under way comes to its end; after, the trainer is told the new barrier, and what it reported before it knew is
not the new mode's: it may have gone on since.
"""

from __future__ import annotations

import logging
import math
import random
import threading

import numpy as np
import numpy.typing as npt
import trio

from peerd.effects import Effect, Log, NodeId, Proceed, Publish, Resume, Send, StepReport
from peerd.lane import HandOver, Lane
from peerd.logs import LOGGER
from peerd.messages import AS_STARTED, Connected, Message, ModelSnapshot, Plan
from peerd.peers import Peers
from peerd.replica import Replica
from peerd.trainer_session import TrainerSession
from peerd.training import delta
from peerd.training.delta import Layout
from peerd.training.modes import Mode, ModeMaker, ModeSettings

SNAPSHOT_CODEC = "float32"  # a newcomer starts from exactly the donor's model
EXCHANGE_SHARE = 4  # times the slowest exchange so far: how long a leaving node's hand-over may take
HAND_OVER_LEAST_S = 3.0
WIND_UP_LEAST_S, WIND_UP_MOST_S = 3.0, 60.0  # the same for what is under way when the mode changes
WIND_UP_LOOK_S = 0.02
LOOK_LEAST_S, LOOK_MOST_S = 0.05, 0.5  # how often the mode's deadline is looked at, which every event may move


class Exchanges:
    """The shell around one mode and its replica of the model."""

    def __init__(self, peers: Peers) -> None:
        self.lane = Lane(self._perform)
        self.plan = AS_STARTED  # what the mode belongs to
        self._told_plan = AS_STARTED
        self.averaged = trio.Event()  # the model is the average with which the plan begins
        self.session: TrainerSession | None = None
        self.settled = trio.Event()  # all models agree
        self._handed_over = trio.Event()  # every partner has what this node had not yet sent
        self._peers = peers
        self._publish_asked = False
        self._resume_asked = False
        self._last_report: StepReport | None = None  # the lane's
        self._winds_up = False
        self._untold = 0  # changes of the mode that the trainer does not know of yet; the lane's
        self._pending_report: StepReport | None = None
        self._report_lock = threading.Lock()
        self._began: dict[NodeId, float] = {}  # the lane's, like the mode: halves cross
        self._slowest_s = 0.0

    async def run(self) -> None:
        """Work until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.lane.run)
            while True:
                mode = self.lane.mode
                deadline = mode.deadline if mode is not None else math.inf
                await trio.sleep(min(LOOK_MOST_S, max(LOOK_LEAST_S, deadline - trio.current_time())))
                if mode is not None and trio.current_time() >= mode.deadline:
                    await self.lane.call(self._on_timer)

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
        """From now on there is this mode, on the replica that the lane has.

        It knows its partners from the beginning: alone, a mode of rounds would have its first round by itself.
        """

        def begin(now: float) -> list[Effect]:
            if self.lane.mode is not None and (left := self.lane.mode.end()) is not None:
                self._replica.add(left)
            self.lane.mode = make(me, layout, rng, settings, lambda: self._replica.values())
            self.plan = plan
            self._winds_up = False
            self._began.clear()
            return self._mode.on_peers(alive, now)

        await self.lane.call(begin)

    async def wind_up(self) -> None:
        """Have the mode begin nothing new, and wait for the end of what is under way, if that comes soon."""
        self._winds_up = True
        busy = self.lane.mode is not None

        def look(_: float) -> list[Effect]:
            nonlocal busy
            busy = self._mode.under_way
            return []

        with trio.move_on_after(min(WIND_UP_MOST_S, max(WIND_UP_LEAST_S, EXCHANGE_SHARE * self._slowest_s))):
            while busy:
                await self.lane.call(look)
                await trio.sleep(WIND_UP_LOOK_S if busy else 0)

    # ---------------------------------------------------------------- from the swarm

    def on_partners(self, alive: frozenset[NodeId]) -> None:
        """These members, and no others, can exchange."""

        def changed(now: float) -> list[Effect]:
            for gone in self._began.keys() - alive:
                del self._began[gone]
            return self._mode.on_peers(alive, now)

        self.lane.post(changed)

    def on_reconnected(self, peer: NodeId) -> None:
        """Messages to this peer flow again."""
        if self.lane.mode is None:
            return

        def again(now: float) -> list[Effect]:
            self._began.pop(peer, None)
            return self._mode.on_message(peer, Connected(), now)

        self.lane.post(again)

    async def on_message(self, sender: NodeId, message: Message, plan: Plan = AS_STARTED) -> None:
        """A peer's message to the mode, meant under this plan. Raises PeerError."""
        if self.lane.mode is None:
            return

        def heard(now: float) -> list[Effect]:
            if plan != self.plan:
                return []
            self._slowest_s = max(self._slowest_s, now - self._began.pop(sender, now))
            return self._mode.on_message(sender, message, now)

        await self.lane.call(heard)

    async def give_model(self, peer: NodeId, layout: Layout, step: int) -> None:
        """Send the whole model as it stands. Raises NotFinite."""

        def encode(_: float) -> list[Effect]:
            chunks = delta.encode(SNAPSHOT_CODEC, layout, self._replica.values())[0]
            return [Send(peer, ModelSnapshot(step, SNAPSHOT_CODEC, chunks))]

        await self.lane.call(encode)

    # ---------------------------------------------------------------- from the trainer

    def on_report(self, report: StepReport, copy: int | None) -> None:
        """The optimizer moved, or the run ended; `copy` is the one that was published."""
        if not report.finishing and self._handed_over.is_set():  # the mode says it again only after a new run's steps
            self.settled, self._handed_over = trio.Event(), trio.Event()
        if report.published or report.finishing:
            self.lane.post(lambda now: self._on_step(report, copy, now))
        elif self._replace_report(report) is None:  # a later one replaces it: the mode wants the newest change

            def tell_newest(now: float) -> list[Effect]:
                newest = self._replace_report(None)
                return [] if newest is None else self._on_step(newest, None, now)

            self.lane.post(tell_newest)

    def on_taken(self, half: int) -> None:
        """The trainer has added this half of the corrections."""

        def taken(_: float) -> list[Effect]:
            self._replica.taken(half)
            return []

        self.lane.post(taken)

    def on_told(self) -> None:
        """The trainer knows of a change of the mode: what it reports from now on is for the new one."""

        def told(_: float) -> list[Effect]:
            self._untold = max(0, self._untold - 1)
            return []

        self.lane.post(told)

    def go_on_finishing(self, step: int, *, stands: bool) -> None:
        """Tell a new mode that the run ended under the one before; or that no trainer trains, if it `stands` still."""

        def say(now: float) -> list[Effect]:
            last = self._last_report
            if stands and (last is None or not last.finishing):
                last = StepReport(step, 0.0, 1.0, published=False, finishing=True)
            return self._mode.on_step(last, now) if last is not None and last.finishing else []

        self.lane.post(say)

    def ask_publish(self) -> None:
        """Have the trainer publish a copy at its next step."""
        self.lane.post(lambda _: [Publish()])

    def on_trainer_gone(self) -> None:
        """The session is over: the daemon owns the model now."""
        self.session = None
        self._publish_asked = self._resume_asked = False

        def owned_here(_: float) -> list[Effect]:
            self._untold = 0
            if self.session is None and self.lane.replica is not None:
                self.lane.replica.owned_here()
            return []

        self.lane.post(owned_here)

    async def move(self, fresh: Replica) -> None:
        """Go on with the same model in another trainer's memory."""

        def load(_: float) -> list[Effect]:
            fresh.load(self._replica.values())
            self.lane.replica = fresh
            return []

        await self.lane.call(load)

    @property
    def all_taken(self) -> bool:
        """Whether the trainer has every correction so far."""
        return not self._replica.has_corrections

    def _on_step(self, report: StepReport, copy: int | None, now: float) -> list[Effect]:
        if copy is not None:
            self._publish_asked = False
            self._replica.published(copy)
        self._last_report = report
        waits = (self._winds_up or self._untold > 0) and not report.finishing
        return [] if waits else self._mode.on_step(report, now)

    def _on_timer(self, now: float) -> list[Effect]:
        """The mode may have changed since its deadline came."""
        return self._mode.on_timer(now) if now >= self._mode.deadline else []

    def _replace_report(self, report: StepReport | None) -> StepReport | None:
        """Swap the report that waits for the lane; the loop and the lane's thread both do."""
        with self._report_lock:
            before, self._pending_report = self._pending_report, report
            return before

    # ---------------------------------------------------------------- what the mode asks

    async def _perform(self, effects: list[Effect | HandOver]) -> None:
        if self.plan != self._told_plan:
            await self._tell_change()
        for effect in effects:
            match effect:
                case Send():
                    if getattr(effect.message, "wants_answer", False):
                        self._began[effect.peer] = trio.current_time()
                    self._peers.send(effect.peer, effect.message)
                case HandOver() if self.session is not None:
                    await self.session.tell("corrections", half=effect.half)
                case Publish() if self.session is not None and not self._publish_asked:
                    self._publish_asked = True
                    await self.session.tell("publish", slot=self._replica.spare_copy)
                case Resume():
                    self._resume_asked = True
                case Proceed() if self.plan.once:
                    self._handed_over.set()
                    if effect.settled:
                        self.averaged.set()
                case Proceed():
                    self._handed_over.set()
                    if effect.settled:
                        self.settled.set()
                case Log():
                    LOGGER.log(logging.getLevelNamesMapping()[effect.level.upper()], "%s", effect.text)
        if self._resume_asked and self.session is not None and self.all_taken:
            self._resume_asked = False
            await self.session.tell("resume")

    async def _tell_change(self) -> None:
        """To whoever sends for the mode, and to a trainer that trains: one that waits at the old barrier goes on."""
        self._peers.plan = self._told_plan = self.plan
        self.averaged = trio.Event()
        self._resume_asked = False
        if self.session is not None and self.session.started:
            self._untold += 1
            await self.session.tell("barrier", barrier=self._mode.barrier)

    # ---------------------------------------------------------------- for who leaves or looks

    async def hand_over(self, step: int) -> None:
        """Give every partner what it has not yet seen."""
        last = StepReport(step, 0.0, 1.0, published=False, finishing=True)
        self.lane.post(lambda now: self._mode.on_step(last, now))
        with trio.move_on_after(max(HAND_OVER_LEAST_S, EXCHANGE_SHARE * self._slowest_s)) as patience:
            await self._handed_over.wait()
            await self._peers.drain()
        if patience.cancelled_caught:
            LOGGER.warning("not every partner took what this node had not yet sent")

    async def values(self) -> npt.NDArray[np.float32]:
        """A copy of the model as it stands, shape (total,)."""
        found: list[npt.NDArray[np.float32]] = []

        def read(_: float) -> list[Effect]:
            found.append(self._replica.values().astype(np.float32))
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
