"""What does a trainer wait for before its first step? The swarm's model, and enough members to train with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from random import Random

import numpy as np
import trio

from peerd.daemon.peers import Peers
from peerd.membership.roster import name_of
from peerd.node.acquaintances import Acquaintances
from peerd.node.donors import DonorChoice
from peerd.node.meta import FetchFrom, NodeMeta, OwnModel, WaitFor, donors, partners, whose_model
from peerd.node.second_opinion import OWN, SecondOpinion
from peerd.process.logs import LOGGER
from peerd.process.threads import in_thread
from peerd.training.codecs import vector
from peerd.training.codecs.difference import digest, digest_of_chunks
from peerd.training.codecs.vector import Layout
from peerd.training.counts import within_step
from peerd.training.effects import Vector
from peerd.training.sketch import sketch
from peerd.transport.errors import PeerError
from peerd.transport.ids import Address, NodeId, shown
from peerd.transport.messages import Member, ModelEqual, ModelPromise, ModelRequest, ModelSketch, ModelSnapshot, State

NEWS_S = 3.0  # in which news crosses a swarm of a hundred members, over wide networks, too
WAIT_TOLD_EVERY_S = 10.0


class CatchUp:
    """A newcomer's way into the swarm's training."""

    def __init__(
        self,
        me: NodeId,
        peers: Peers,
        members: Callable[[], dict[NodeId, Member]],
        acquaintances: Acquaintances,
        rng: Random,
        *,
        seeds: Sequence[Address],
        awaited: Collection[Address],
        awaited_until: float,
    ) -> None:
        """`awaited` are members known before a restart: they have until then to answer."""
        self._me = me
        self._peers = peers
        self._members = members
        self._acquaintances = acquaintances
        self._seeds = seeds
        self._awaited = awaited
        self._awaited_until = awaited_until
        self._news = trio.Event()
        self._rng = rng
        self._choice, self._opinion = DonorChoice(), SecondOpinion(rng)
        self._givers: Sequence[NodeId] = ()
        self._refused: set[NodeId] = set()  # donors that will not have us
        self._came: tuple[NodeId, ModelSnapshot | ModelEqual] | None = None  # and who sent it
        self._alone_among: set[NodeId] | None = None  # members known while only this one has a model, its own

    def on_members(self) -> None:
        """The membership changed."""
        self._wake()
        if self._alone_among is not None:
            self._tell_of_another_swarm(self._alone_among)

    def _tell_of_another_swarm(self, known: set[NodeId]) -> None:
        """Who takes our model is known before it has one."""
        members = self._members()
        having = partners(members, self._me, NodeMeta.unpack(members[self._me].meta).model)
        if met := [members[id] for id in sorted(having - known)]:
            text = (
                "%s trains already, with another model than this node, which began alone with its own: both go "
                "together from now on; to take the swarm's in place of it, stop this node and start it with --join %s"
            )
            LOGGER.warning(text, met[0].name, shown((met[0].host, met[0].port)))
        known.update(members)
        if having:
            self._alone_among = None

    def _wake(self) -> None:
        self._news.set()
        self._news = trio.Event()

    def on_promise(self, sender: NodeId, promise: ModelPromise) -> None:
        """A model is on its way: ask others about theirs."""
        self._ask_others(sender, promise.digest)

    def _ask_others(self, donor: NodeId, promise: bytes) -> None:
        if donor in self._choice.asked:  # and not rejected since
            for witness, request in self._opinion.ask(donor, promise, self._givers, trio.current_time()):
                self._peers.send(witness, request)

    def on_model(self, sender: NodeId, model: ModelSnapshot | ModelEqual) -> None:
        """A model came, or the word that ours is the same; one that was not asked for is dropped."""
        if sender in self._choice.asked:
            if isinstance(model, ModelEqual):
                self._ask_others(sender, OWN)
            self._came = sender, model
            self._wake()

    def on_sketch(self, sender: NodeId, sketch: ModelSketch) -> None:
        """What a member says of its model. Raises PeerError."""
        self._opinion.heard(sender, sketch)
        self._wake()

    def others_after(self, refusing: NodeId) -> bool:
        """Whether somebody else has a model to give, who has not refused us either; it is asked then."""
        self._refused.add(refusing)
        self._choice.reject(refusing)
        return not self._refused.issuperset(donors(self._acquaintances.of(self._members()), self._me))

    async def enough_members(self, count: int, model: str) -> None:
        """Wait until so many members, this one among them, hold `model` and can exchange."""
        told_at = -WAIT_TOLD_EVERY_S
        me = self._members()[self._me]
        joined = f"others join through {shown((me.host, me.port))}"
        while (ready := 1 + len(partners(self._acquaintances.of(self._members()), self._me, model))) < count:
            told_at = await self._wait(f"{ready} of {count} members are ready; {joined}", told_at)

    async def fetch(self, layout: Layout, own: Vector, *, is_news: bool = False) -> tuple[Vector, int] | None:
        """The swarm's current model, shape (layout.total,), and its step, or None to start from the trainer's own.

        It does not travel where it is the same as the trainer's `own`: all have just begun. That there is a trainer
        `is_news` to the others: whoever goes first at this moment has not heard of it, nor this node of that.
        """
        goes_at = trio.current_time() + (NEWS_S if is_news else 0.0)
        told_at, told = -WAIT_TOLD_EVERY_S, b""
        before: int | None = None  # bytes that had come when somebody was asked first
        try:
            while True:
                awaited = self._awaited if trio.current_time() < self._awaited_until else ()
                match whose_model(self._members(), self._me, seeds=self._seeds, awaited=awaited):
                    case OwnModel():
                        if trio.current_time() < goes_at and not self._alone():
                            await trio.sleep_until(goes_at)
                            continue
                        if self._awaited and self._alone():
                            LOGGER.warning("no member known before the restart answers: this node goes on alone")
                        self._alone_among = set(self._members())
                        return None
                    case FetchFrom(givers):  # of another model, too: it refuses, saying what differs
                        if before is None:
                            told_at, before = trio.current_time(), self._peers.bytes_received
                        told = told or await in_thread(partial(digest, own, layout))
                        willing = [giver for giver in givers if giver not in self._refused] or givers
                        willing = [giver for giver in willing if not self._acquaintances.doubtful(giver)] or willing
                        self._givers, now = willing, trio.current_time()
                        if self._opinion.can_ask(now):
                            donor = self._choice.ask(willing, self._peers.bytes_received, now, layout.total)
                            if donor is not None:
                                self._opinion.donor_asked(donor)
                                self._peers.send(donor, ModelRequest(told))
                        if (fetched := await self._received(layout, own)) is not None:
                            return fetched
                        told_at = self._tell_asked(told_at, before)
                    case WaitFor(reason):
                        told_at = await self._wait(reason, told_at)
        finally:
            self._choice, self._opinion, self._came = DonorChoice(), SecondOpinion(self._rng), None

    def _alone(self) -> bool:
        return all(member.state > State.SUSPECT for id, member in self._members().items() if id != self._me)

    async def _wait(self, reason: str, told_at: float) -> float:
        """Until a member changes; `reason` is told now and then. Returns when it was last told."""
        if trio.current_time() - told_at >= WAIT_TOLD_EVERY_S:
            told_at = trio.current_time()
            LOGGER.info("the trainer waits: %s", reason)
        with trio.move_on_after(1.0):
            await self._news.wait()
        return told_at

    def _tell_asked(self, told_at: float, before: int) -> float:
        """Who is slow to give its model, now and then; a quick one is not told of. Returns when it was last told."""
        if not self._choice.asked or trio.current_time() - told_at < WAIT_TOLD_EVERY_S:
            return told_at
        names = ", ".join(sorted(self._name_of(donor) for donor in self._choice.asked))
        came_mb = (self._peers.bytes_received - before) / 1e6
        LOGGER.info("the trainer waits: for the swarm's model, asked of %s; %.1f MB came so far", names, came_mb)
        return trio.current_time()

    async def _received(self, layout: Layout, own: Vector) -> tuple[Vector, int] | None:
        """Wait for a second; the model that has come by then, and its step."""
        with trio.move_on_after(1.0):
            await self._news.wait()
        came, self._came = self._came, None
        if came is None:
            return None
        donor, model = came
        try:
            within_step("a model of step", model.step, 0)
            values, promise = own, OWN
            if isinstance(model, ModelSnapshot):
                promise = await in_thread(partial(digest_of_chunks, model.chunks))
                values = np.empty(layout.total, np.float32)
                await in_thread(partial(vector.decode, model.codec, layout, model.chunks, values))
            await self._judge(donor, layout, values, self._opinion.seed(donor, promise))
        except PeerError as error:
            LOGGER.warning("the model from %s: %s; asking another member", self._name_of(donor), error)
        except Exception as error:
            self._peers.offences.unforeseen(error, f"dropped the model from {donor}")
        else:
            how = "came from" if isinstance(model, ModelSnapshot) else "is that of"
            LOGGER.info("the model of step %d %s %s", model.step, how, self._name_of(donor))
            return values, model.step
        self._reject(donor)
        return None

    def _name_of(self, donor: NodeId) -> str:
        """A slow one may be gone by now."""
        return name_of(donor, self._members())

    def _reject(self, donor: NodeId) -> None:
        self._choice.reject(donor)
        if self._came is not None and self._came[0] == donor:  # it has said it twice
            self._came = None

    async def _judge(self, donor: NodeId, layout: Layout, values: Vector, seed: bytes) -> None:
        """Raises PeerError: it is not the swarm's."""
        came_at = told_at = trio.current_time()
        while self._opinion.waits(donor, came_at, trio.current_time(), layout.total):
            told_at = await self._wait(f"until others have looked at the model from {self._name_of(donor)}", told_at)
        offered = await in_thread(partial(sketch, values, layout, seed))
        if not self._opinion.accepts(donor, offered):
            raise PeerError("it is far from those of most others")
        if lacks := self._opinion.lacks(donor):
            LOGGER.warning("the model from %s is taken without a second opinion: %s", self._name_of(donor), lacks)
