"""The half of a daemon that has a model: how a trainer comes, trains with the swarm, and goes.

What a trainer waits for is catch_up.py's, what it says trainer_session.py's, what the mode does mode_runner.py's,
and how one mode follows another plan_follower.py's.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

from peerd.daemon.catch_up import CatchUp
from peerd.daemon.control import LocalConnection
from peerd.daemon.cures import ALONE, ONE_AFTER_THE_OTHER, cure_of_buffers, cure_of_model
from peerd.daemon.mode_runner import ModeRunner
from peerd.daemon.peers import Peers
from peerd.daemon.plan_follower import PlanFollower
from peerd.daemon.trainer_session import TrainerGone, TrainerPhase, TrainerSession, TrainerStatus, report_of
from peerd.local.shared_memory import SharedMemory
from peerd.node.acquaintances import Acquaintances
from peerd.node.donors import ASK_SOON_S, RequestLimit
from peerd.node.meta import FIRST, FOUNDS, NodeMeta, partners, partners_said
from peerd.node.model_copy import ModelCopy
from peerd.node.run_ends import RunEnds
from peerd.node.same_batches import SameBatches
from peerd.process import host_memory
from peerd.process.logs import LOGGER
from peerd.process.threads import in_thread
from peerd.protocol import trainer as protocol
from peerd.protocol.trainer import FROM_TRAINER, VALUES_MAX, Attach, Said, Stepped, decoded
from peerd.settings import Settings
from peerd.training.codecs.vector import Layout, NotFinite
from peerd.training.mode import LinkedMode
from peerd.training.mode_core import GradientCame
from peerd.training.mode_settings import AUTO, GRADIENTS
from peerd.training.modes import Mode, class_of, parse_mode
from peerd.training.modes.average import Average
from peerd.training.partnered import PartneredMode
from peerd.transport.errors import PeerError, cause
from peerd.transport.ids import Address, NodeId
from peerd.transport.messages import (
    Member,
    ModelEqual,
    ModelMessage,
    ModelPromise,
    ModelRequest,
    ModelSketch,
    ModelSnapshot,
    Plan,
    SketchRequest,
    State,
)
from peerd.transport.secure.signing import Signing

SETTLE_SHARE = 0.1  # of the run's own duration: how long its end waits for members that still train
SETTLE_MIN_S = 10.0
SAME_BATCHES = (
    "%s trains on the same batches as this node: in their first steps both models were given the same inputs, so the "
    "two learn no more than one; have each node's script read its own part of the data, or make its seed from "
    'PEERD_NAME (README, "Your own training")'
)
LETS_GO_WITHIN_S = 0.5  # a script may have closed its session just now, and attach anew: it is refused so much later


class TrainerService:
    """See the module; one a daemon."""

    def __init__(
        self,
        me: NodeId,
        settings: Settings,
        peers: Peers,
        members: Callable[[], dict[NodeId, Member]],
        say_meta: Callable[[NodeMeta], Awaitable[None]],
        rng: random.Random,
        awaited: Collection[Address] = (),
        awaited_until: float = 0.0,
        signing: Signing | None = None,
        acquaintances: Acquaintances | None = None,
    ) -> None:
        """`say_meta` spreads what this node says of itself; for the awaited see catch_up.py, for signing plan.py.

        Of the `members` those count that are `acquaintances`; without, all.
        """
        known = acquaintances or Acquaintances(me, rng, lambda _: None, sealed=False)
        self.meta = NodeMeta(founder=not settings.seeds)
        self.signature = ""
        self.tensors: list[str] = []
        self.layout: Layout | None = None
        self._status: TrainerStatus | None = None
        self.fatal: str | None = None  # why this node cannot be part of its swarm
        self._differs: tuple[str, ...] = ()  # for what a donor has refused this newcomer
        self.failed = trio.Event()
        self.snapshots = 0
        self.attaches = 0
        self._me = me
        self._settings = settings
        self._members: Callable[[], dict[NodeId, Member]] = lambda: known.of(members())
        self._say_meta = say_meta
        self._rng = rng
        self._peers = peers
        peers.offences.on_refused = self._on_refused
        self._runner = ModeRunner(peers, self._members)
        self._catch_up = CatchUp(
            me, peers, members, known, rng, seeds=settings.seeds, awaited=awaited, awaited_until=awaited_until
        )
        self.plans = PlanFollower(me, settings, self._runner, self._members, self._change_plan, self._tell, signing)
        self._nursery: trio.Nursery | None = None  # while it runs
        self._requests, self._sketches = RequestLimit(), RequestLimit(ASK_SOON_S)
        self._ends = RunEnds()
        self._same_batches = SameBatches()
        self._giving: set[NodeId] = set()  # members to whom the model is about to be sent
        self._leaving = False
        self._begins = trio.Lock()
        self._is_left = False  # its trainer ended in the middle of a run, and none comes
        self._has_trained = False  # a trainer here was let go once
        self._took_the_swarms = False  # the first model was
        self._view_max: int | None = None  # where the host has no memory for more

    async def run(self) -> None:
        """Work until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._runner.run)
            nursery.start_soon(self.plans.run)
            self._nursery = nursery

    @property
    def status(self) -> TrainerStatus | None:
        """What is known of the trainer, the last one if there is none."""
        if self._runner.session is not None:
            self._runner.session.look()
        return self._status

    @property
    def runner(self) -> ModeRunner:
        """Who hears what peers say to the mode."""
        return self._runner

    @property
    def mode(self) -> Mode | None:
        """How models are combined, once there is one."""
        return self._runner.core.mode

    @property
    def same_batches(self) -> frozenset[NodeId]:
        """Who trains on the batches that this node trains on."""
        return self._same_batches.found

    # ---------------------------------------------------------------- from the swarm

    def on_members(self) -> None:
        """The membership changed: the mode's partners may have."""
        self._catch_up.on_members()
        self.plans.on_members()
        known = self._members()
        if self.mode is not None:
            self._runner.on_partners(self._partners(known, self._runner.core.plan, type(self.mode)))
        said = partners_said(known, self._me, self.signature)
        # who is not alive may be back by now under another name; and one of our name is this node's former life, whose
        # id was lost with its folder, as in a container
        own = self._settings.name
        alive = {id: meta for id, meta in said.items() if known[id].state == State.ALIVE and known[id].name != own}
        for id in self._same_batches.heard(self.meta, alive):
            LOGGER.warning(SAME_BATCHES, known[id].name)
        others = self._ends.heard(said)
        if (session := self._runner.session) is not None:
            session.board.say_others(others)

    def _partners(self, known: Mapping[NodeId, Member], plan: Plan, mode: type) -> frozenset[NodeId]:
        """Who can exchange. Who is refused has no link: its place is another's, and no run's end waits for it. Nor has
        who cannot be dialled, where partners are anybody.

        In modes without links all must name the same ones. Who shares a model to the bit makes no step without
        those who have not come to the plan yet.
        """
        found = partners(known, self._me, self.signature, None if self._shares_all else plan)
        if not issubclass(mode, LinkedMode):
            return found
        refused_s = self._peers.offences.refused_s
        unreached = self._peers.unreached() if issubclass(mode, PartneredMode) else {}
        return frozenset(id for id in found if id not in unreached and not refused_s(id, known[id].host))

    def _on_refused(self, node: NodeId, seconds: float) -> None:
        if self._nursery is not None and node in self._members():
            self.on_members()
            self._nursery.start_soon(self._hear_again, seconds)

    async def _hear_again(self, after_s: float) -> None:
        await trio.sleep(after_s)
        self.on_members()

    def on_reconnected(self, peer: NodeId) -> None:
        """Messages to this peer flow again."""
        self._runner.on_reconnected(peer)

    def on_unreached(self, peer: NodeId) -> None:
        """No connection to this peer can be made."""
        self._runner.on_unreached(peer)

    def on_message(self, sender: NodeId, message: ModelMessage) -> None:
        """A peer's message about a whole model. Raises PeerError."""
        match message:
            case ModelRequest() if sender not in self._giving and self._may_ask(sender, self._requests):
                self._giving.add(sender)
                self._begin(self._give_model, sender, message.digest)
            case SketchRequest() if self._may_ask(sender, self._sketches):
                self._begin(self._give_sketch, sender, message.seed)
            case ModelSketch():
                self._catch_up.on_sketch(sender, message)
            case ModelPromise():
                self._catch_up.on_promise(sender, message)
            case ModelEqual() | ModelSnapshot():
                self._catch_up.on_model(sender, message)

    def _begin(self, work: Callable[[NodeId, bytes], Awaitable[None]], sender: NodeId, told: bytes) -> None:
        assert self._nursery is not None, "that it runs was asked"
        self._nursery.start_soon(work, sender, told)

    def _may_ask(self, sender: NodeId, limit: RequestLimit) -> bool:
        """Whether the model is shown: to a living member, and not too often, as it asks again meanwhile."""
        member = self._members().get(sender)
        if self._nursery is None or not self.meta.ready:
            return False
        lives = member is not None and member.state <= State.SUSPECT
        return lives and limit.admits(sender, trio.current_time())

    def on_refused(
        self, refusal: PeerError, *, newcomer: bool, peer: NodeId | None = None, differs: tuple[str, ...] = (),
        is_news: bool = True,
    ) -> None:  # fmt: skip
        """A peer will not have us. Before we are part of the swarm that is our own failure; then a line, if `is_news`.

        Unless it is only one of several that have a model: then another one is asked, and said to refuse us, too, only
        where that is for something else; `differs` says for what.
        """
        if self.meta.ready or not newcomer:
            if is_news:
                LOGGER.warning("%s", refusal)
        elif peer is not None and self._catch_up.others_after(peer):
            if not differs or differs != self._differs:
                LOGGER.warning("%s", refusal)
            self._differs = differs
        elif self.fatal is None:
            self.fatal = str(refusal)
            self.failed.set()

    async def tell_failed(self, why: str) -> None:
        """To a script that waits to start, and that nobody here looks after."""
        if self._runner.session is not None:
            await self._runner.session.refuse(why)

    async def _give_model(self, sender: NodeId, digest: bytes) -> None:
        try:
            if self.meta.ready and self.layout is not None:
                await self._runner.give_model(sender, self.layout, digest)
                self.snapshots += 1
        except NotFinite:
            LOGGER.warning("a newcomer asked for the model, but it holds a value that is not finite")
        except Exception as error:
            self._peers.offences.unforeseen(error, "a newcomer asked for the model, which could not be given")
        finally:
            self._giving.remove(sender)

    async def _give_sketch(self, sender: NodeId, seed: bytes) -> None:
        try:
            if self.layout is not None:
                await self._runner.give_sketch(sender, self.layout, seed)
        except Exception as error:
            self._peers.offences.unforeseen(error, "a newcomer asked for a sketch, which could not be given")

    # ---------------------------------------------------------------- a trainer comes

    async def attach(
        self,
        connection: LocalConnection,
        message: dict[str, Any],
        comes_again: Callable[[], bool] = lambda: False,
        tell_unfit: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve one trainer until it is gone; one that dies `comes_again` where somebody starts it then.

        `tell_unfit` is called before one is refused that will be refused whenever it comes.
        """
        earlier = self._runner.session
        if earlier is not None:
            with trio.move_on_after(math.inf if earlier.cut_if_dead() else LETS_GO_WITHIN_S):
                while self._runner.session is earlier:
                    await trio.sleep(0.01)
        try:
            comes = decoded(message, FROM_TRAINER)
        except ValueError:
            comes = None
        passing = self._not_now(comes, connection)
        refusal = passing or self._busy(comes)
        if refusal is None and (refusal := self._unfit(comes)) is not None:
            tell_unfit()
        if not isinstance(comes, Attach) or refusal is not None:
            await connection.send({"error": refusal, "passes": passing is not None})
            return
        if self.mode is None:  # later what there is to take is taken
            self._tell_memory(comes.total)
        try:
            memory = SharedMemory(connection.fds[0], comes.total, comes.gradients)
        except (OSError, ValueError) as error:
            why = f"the daemon cannot map the script's memory: {cause(error)}"
            await connection.send({"error": why, "passes": isinstance(error, OSError)})
            return
        connection.close_fds()  # the mapping stays; the connection closes them itself when the memory is refused
        before = self.status or TrainerStatus(0)
        if before.phase is TrainerPhase.FINISHED:  # another run: one that died goes on with its own
            self._ends = RunEnds()
        status = self._status = TrainerStatus(pid=comes.pid, step=before.step, lr_max=before.lr_max)
        session = self._runner.session = TrainerSession(connection, status, memory.board)
        self.attaches += 1
        self._is_left = False
        try:
            await self._start(session, comes, memory)
            await self._serve(session)
        except TrainerGone:
            if self._runner.core.model is None:
                self.signature, self.tensors, self.layout = "", [], None
            if not self._leaving:
                LOGGER.info("the trainer went away before its first step")
        finally:
            session.look()
            self._runner.on_trainer_gone()
            session.ended.set()
            if status.phase is not TrainerPhase.FINISHED:
                status.enter(TrainerPhase.GONE)
            self._join_average()
        if not comes_again():
            await self.expect_none()

    def _tell_memory(self, values: int) -> None:
        plan = self.plans.settings
        if (told := host_memory.told(plan.mode, plan.view, values)) is not None:
            LOGGER.log(logging.WARNING if told.warns else logging.INFO, "%s", told.line)
            self._view_max = told.view if told.view < plan.view else None

    def _not_now(self, comes: Said | None, connection: LocalConnection) -> str | None:
        """Why this node takes no trainer for the moment: later it may, or the next daemon."""
        if self._leaving:  # its script died, and was being started again
            return "this node is leaving the swarm"
        if isinstance(comes, Attach) and not connection.fds:
            return "the script's memory did not come with its word: has the daemon as many files open as it may?"
        return None

    def _busy(self, comes: Said | None) -> str | None:
        """Why this node takes no trainer beside the one that it has."""
        if self._runner.session is not None:
            if isinstance(comes, Attach) and comes.pid == self._runner.session.facts.pid:
                several = "several models go in one attach([a, b], [optimizer_a, optimizer_b])"
                # it may be bound to no name, and then nothing can be called on it any more
                under = 'put the earlier one under "with peerd.attach(...) as swarm:"'
                earlier = f"for another training {under}, or call its swarm.finish() first"
                cures = (earlier, several) if comes.signature == self.signature else (several, earlier)
                return f"this script is attached already: {'; '.join(cures)}"
            there = f"a trainer (pid {self._runner.session.facts.pid}) is attached to this node already"
            return f"{there}: end that one, or {ALONE}"
        return None

    def _unfit(self, comes: Said | None) -> str | None:
        """Why this node takes no such trainer."""
        if not isinstance(comes, Attach):
            return "the script's peerd and the daemon's do not understand each other: are they of one version?"
        if comes.total > VALUES_MAX:
            return f"the model has {comes.total:,} values; peerd takes at most {VALUES_MAX:,}"
        wanted = _layout_of(comes).gradients.total if self._settings.exchange == GRADIENTS else 0
        if comes.gradients != wanted:
            here = self._settings.exchange
            return f"this node exchanges {here}, and the script's peerd does not: are they of one version?"
        if self.signature and comes.signature != self.signature:
            theirs, ours = comes.tensors, self.tensors
            lines = zip([*theirs, "nothing"], [*ours, "nothing"], strict=False)
            differing = next(((a, b) for a, b in lines if a != b), ("another signature", "one"))
            cure = cure_of_buffers(theirs, ours) or cure_of_model(*differing)
            if self.status is not None and self.status.pid == comes.pid:
                cure = ONE_AFTER_THE_OTHER  # what other nodes have is not the cause
            cure = f"{cure}, or peerd leave and start this node anew"
            return f"this node holds another model: {differing[1]} here, {differing[0]} in the script; {cure}"
        return None

    async def _start(self, session: TrainerSession, comes: Attach, memory: SharedMemory) -> None:
        """From the attach to a trainer that holds the swarm's model. Raises TrainerGone."""
        settings, status = self._settings, session.facts
        self.signature, self.tensors = comes.signature, list(comes.tensors)
        variances = tuple((start, stop) for start, stop in comes.variances)
        self.layout = _layout_of(comes)
        is_news = not self.meta.expects
        await self._tell(model=self.signature, expects=True, ended=False, made=0, draws=b"")
        await session.tell(protocol.Welcome(str(settings.checkpoints), settings.checkpoint_every_s))
        ready = await session.receive()
        if not isinstance(ready, protocol.Ready):
            raise TrainerGone
        LOGGER.info("a trainer attached: %s values in %d tensors", f"{self.layout.total:,}", len(self.tensors))
        if self.mode is None:
            await session.attended(self.plans.none_averages)
        model_copy = ModelCopy(memory, variances, [(start, stop) for start, stop in comes.padding])
        load, step = await self._first_model(session, self.layout, model_copy, ready.step, is_news=is_news)
        status.step = status.first_step = step
        if self.mode is None:
            await self._begin_mode()
        await self._tell(ready=True, resumes_at=0)
        self.on_members()
        self._join_average()
        barrier = self.mode.barrier if self.mode is not None else 0
        session.started = True
        await session.tell(protocol.Start(load, step, status.lr_max, barrier))
        self._runner.ask_publish()  # the mode may still wait for a copy from the trainer before this one

    async def _first_model(
        self, session: TrainerSession, layout: Layout, fresh: ModelCopy, step: int, *, is_news: bool
    ) -> tuple[int | None, int]:
        """Which copy the trainer must load, and the step to start from. The replica is ready afterwards."""
        if self._runner.core.model is not None:  # a trainer that came back: the daemon went on with its model
            if step > self._runner.step:
                newer = (
                    "the trainer goes on from its checkpoint of step %d, as the copy here is of step %d, and with what "
                    "came since it ended; what it took from others between that checkpoint and its end is lost"
                )
                LOGGER.info(newer, step, self._runner.step)
                await self._runner.go_on_from(fresh, step)
                return None, step
            await self._runner.move(fresh)
            return 0, self._runner.step
        # the script before may have lowered it, or died as it went first
        if is_news and self.meta.resumes_at != FOUNDS:
            await self._tell(resumes_at=step)
        elif self.meta.resumes_at < FOUNDS:
            # less if the newest checkpoint is damaged, or of another model; never more: who goes first has not heard it
            await self._tell(resumes_at=min(step, self.meta.resumes_at))
        own = fresh.look()
        fetched = await session.attended(lambda: self._catch_up.fetch(layout, own, is_news=is_news))
        self._runner.core.model = fresh
        if fetched is None:
            await self._tell(resumes_at=FIRST)  # before the mode is made, which may take a large model seconds
            fresh.step = step
            return None, step
        values, donor_step = fetched
        self._took_the_swarms = True
        if values is own and step == donor_step:  # all have just begun: the script need not write what it has
            fresh.step = step
            return None, step
        if step > donor_step:
            older = (
                "the swarm's model is of step %d, this node's own of step %d: training goes on from the former. "
                "If it should be the latter, and that is a checkpoint's, stop all nodes, move what is in "
                "checkpoints-passed of this node's state folder back to checkpoints, start this one first, without "
                "--join and --token, and the others with --join to it"
            )
            LOGGER.warning(older, donor_step, step)
        return await in_thread(partial(fresh.load, values, donor_step)), donor_step

    # ---------------------------------------------------------------- a trainer trains, and ends

    async def _serve(self, session: TrainerSession) -> None:
        """Do what the trainer's messages say until it is gone."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._release, session)
            while (said := await session.receive()) is not None:
                match said:
                    case Stepped():
                        ends = said.finishing and session.facts.phase is not TrainerPhase.FINISHING
                        goes_on = session.ended.is_set() and not said.finishing
                        session.facts.note(said)
                        self._runner.on_report(report_of(said), said.published)
                        if said.rolled_back and self._settings.exchange == GRADIENTS:
                            self._runner.on_rolled_back()
                        if said.finishing:
                            session.ended.set()
                            if ends and not self._leaving:
                                session.waits_for_others = trio.CancelScope()
                                nursery.start_soon(self._end_run, session)
                                await self._tell(ended=True)
                        elif goes_on:  # the script caught what interrupted swarm.finish()
                            session.waits_for_others.cancel()
                            session.ended = trio.Event()
                            await self._tell(ended=False)
                    case protocol.Added(half):
                        self._runner.on_taken(half)
                    case protocol.GradientPart(step, samples, first, anew):
                        self._runner.on_gradient(GradientCame(step, samples, 0.0, first, anew))
                    case protocol.GradientReady(step, samples, rate, anew):
                        self._runner.on_gradient(GradientCame(step, samples, rate, 0, anew))
                    case protocol.SpareWanted():
                        await self._runner.say_spare()
                    case protocol.BarrierHeard():
                        self._runner.on_told()
                    case protocol.Drew(digest):
                        await self._tell(draws=digest)
            nursery.cancel_scope.cancel()

    async def _release(self, session: TrainerSession) -> None:
        """Let the trainer make its first step once enough members can join in.

        One that comes after another has trained here goes on without them: they may have ended.
        """
        if not self._has_trained:
            await self._catch_up.enough_members(self._settings.wait_for, self.signature)
        self._has_trained = True
        await self.plans.none_averages()
        session.facts.enter(TrainerPhase.TRAINING)
        session.facts.began = trio.current_time()
        LOGGER.info("training from step %d", session.facts.step)
        await session.tell(protocol.Go())

    async def _end_run(self, session: TrainerSession) -> None:
        """Let a finishing trainer go when all agree, or when the others take much longer than this run did."""
        status = session.facts
        patience_s = max(SETTLE_MIN_S, SETTLE_SHARE * (trio.current_time() - status.began))
        with session.waits_for_others as given_up:
            with trio.move_on_after(patience_s) as patience:
                await self._runner.settled.wait()
            if patience.cancelled_caught:
                late = "not all members have ended their runs after %.0f s: this one ends with the model as it is"
                LOGGER.info(late, patience_s)
            while not self._runner.all_taken:
                await trio.sleep(0.01)
        if given_up.cancel_called:
            return
        status.enter(TrainerPhase.FINISHED)
        await session.tell(protocol.Finished())
        LOGGER.info("training finished at step %d; still a member, with the model", status.step)
        if status.step == status.first_step > 0 and not self._ends.are_over:  # else it ends with the others' runs
            complete = "the script made no step: it went on from step %d, and had none left"
            cure = ": let the script make more in all" + ("" if self._took_the_swarms else ", or start it with --fresh")
            LOGGER.warning(f"{complete}{cure}", status.step)

    async def drain(self) -> None:
        """For a node that leaves: have the trainer publish once more and end, then give what is not yet given."""
        self._leaving = True
        session, status = self._runner.session, self.status
        if self.mode is None or status is None or (status.phase is TrainerPhase.STARTING and self.attaches == 1):
            return  # there is nothing that the others do not have
        if session is not None and session.cut_if_dead():
            await session.ended.wait()
        if session is not None and status.phase in (TrainerPhase.TRAINING, TrainerPhase.FINISHING):
            await session.tell(protocol.Stop())
            with trio.move_on_after(session.patience_s):
                await session.ended.wait()
        if status.phase is not TrainerPhase.FINISHED:
            await self._runner.drain(status.step)

    async def expect_none(self) -> None:
        """No trainer comes: members without a model need not wait for it to go first, nor the others for its steps."""
        died = self.status is not None and self.status.phase is TrainerPhase.GONE
        if died and self.mode is not None and not (self._leaving or self._is_left):
            self._is_left = True
            LOGGER.warning(
                "no script trains here any more: members go on with the model as it is, and need no step of it"
            )
            self._tell_end()
        await self._tell(expects=False)

    async def tell_stalled(self, stalled: bool) -> None:
        """Whether the trainer has made no step for long."""
        await self._tell(stalled=stalled)

    async def tell_made(self) -> None:
        """How far the trainer is in its run, if that has changed."""
        if (session := self._runner.session) is not None and (made := session.board.made) != self.meta.made:
            await self._tell(made=made)

    async def _tell(self, **changes: Any) -> None:
        self.meta = replace(self.meta, **changes)
        await self._say_meta(self.meta)

    # ---------------------------------------------------------------- the mode

    async def _begin_mode(self) -> None:
        """That of the plan in force, which may change meanwhile: then it is begun once."""
        async with self._begins:
            while self.mode is None or self._runner.core.plan != self.plans.plan:
                assert self.layout is not None, "known once a trainer has attached"
                plan, settings = self.plans.plan, self.plans.settings
                used = settings.mode_settings
                if self._view_max is not None:
                    used = replace(used, view=min(used.view, self._view_max))
                if settings.codec not in (AUTO, used.codec):
                    LOGGER.warning(
                        "mode %s takes codec %s in place of %s, which drops too much",
                        settings.mode,
                        used.codec,
                        settings.codec,
                    )
                make = Average if plan.once else parse_mode(settings.mode, settings.exchange)
                # a newcomer hears of the others once it may exchange
                known = self._members() if self.meta.ready else {}
                alive = self._partners(known, plan, Average if plan.once else class_of(settings.mode))
                await self._runner.begin(plan, alive, make, self._me, self.layout, self._rng, used)

    async def _change_plan(self, plan: Plan) -> None:
        """Another plan is in force."""
        if self.mode is not None:
            await self._begin_mode()
        await self._tell(plan=plan, averaged=False, stands=False)
        self.on_members()
        if self.mode is not None:
            self._tell_end()
        self._join_average()

    def _tell_end(self) -> None:
        """A mode that has not heard of it hears that the run has ended, if it has, or that its trainer is gone."""
        self._runner.go_on_finishing(self.status.step if self.status else 0, stands=self._is_left)

    def _join_average(self) -> None:
        """Where no trainer trains, none will come to the barrier: the model as it stands is this node's part."""
        trains = self.status is not None and self.status.phase is TrainerPhase.TRAINING
        if self._runner.core.plan.once and self.mode is not None and not trains:
            self._runner.go_on_finishing(self.status.step if self.status else 0, stands=True)

    # ---------------------------------------------------------------- for the export

    def exchange(self) -> dict[str, Any]:
        """What members give each other, whether the optimizer's state is a part of the model for it, and who steps."""
        told = self._settings
        servers_step = told.exchange == GRADIENTS and "server_optimizer" in class_of(told.mode).TAKES
        return {
            "exchange": told.exchange,
            "optimizer": self._shares_all,
            "server_optimizer": told.server_optimizer if servers_step else "",
        }

    @property
    def _shares_all(self) -> bool:
        settings = self._settings
        shares = class_of(settings.mode).exchanging(settings.exchange).SHARES_OPTIMIZER
        return shares and settings.exchange == GRADIENTS

    async def model_values(self) -> tuple[npt.NDArray[np.float32], int]:
        """The model as it stands, shape (total,), and the step that it is of. Raises UserError when there is none."""
        if self._runner.core.model is None:
            raise self._runner.no_model()
        await self._runner.catch_up()
        return await self._runner.values()


def _layout_of(comes: Attach) -> Layout:
    variances = tuple((start, stop) for start, stop in comes.variances)
    return Layout(comes.parameters, comes.total, variances, tuple(comes.ends), comes.states)
