"""What does a trainer wait for before its first step? The swarm's model, and enough members to train with."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import numpy as np
import trio

from peerd.effects import Address, NodeId, PeerError, Vector
from peerd.logs import LOGGER
from peerd.messages import Member, ModelRequest, ModelSnapshot, State
from peerd.peers import Peers
from peerd.roles import FetchFrom, OwnModel, WaitFor, donors, partners, whose_model
from peerd.training import delta
from peerd.training.delta import Layout

WAIT_TOLD_EVERY_S = 10.0
ASK_SOON_S = 1.0  # the first answer is lost if the donor has not yet heard of us, or still dials our former life
ASK_AGAIN_S = 10.0  # a donor from which nothing has come for so long is asked again,
ASKS_MAX = 4  # so many times; then another one is
SLOWEST_DONOR = 1000  # bytes a second: fewer are probes and tables, not a model


class CatchUp:
    """A newcomer's way into the swarm's training."""

    def __init__(
        self,
        me: NodeId,
        peers: Peers,
        members: Callable[[], dict[NodeId, Member]],
        *,
        has_seeds: bool,
        awaited: Collection[Address] = (),
        awaited_until: float = 0.0,
    ) -> None:
        """`awaited` are members known before a restart: they have until then to answer."""
        self._me = me
        self._peers = peers
        self._members = members
        self._has_seeds = has_seeds
        self._awaited = awaited
        self._awaited_until = awaited_until
        self._news = trio.Event()
        self._donor: NodeId | None = None
        self._snapshot: ModelSnapshot | None = None

    def on_members(self) -> None:
        """The membership changed."""
        self._news.set()
        self._news = trio.Event()

    def on_snapshot(self, sender: NodeId, snapshot: ModelSnapshot) -> None:
        """A model came; one that was not asked for is dropped."""
        if sender == self._donor:
            self._snapshot = snapshot
            self._news.set()
            self._news = trio.Event()

    async def enough_members(self, count: int, model: str) -> None:
        """Wait until so many members, this one among them, hold `model` and can exchange."""
        told_at = -WAIT_TOLD_EVERY_S
        while (ready := 1 + len(partners(self._members(), self._me, model))) < count:
            told_at = await self._wait(f"{ready} of {count} members are ready", told_at)

    async def fetch(self, layout: Layout) -> tuple[Vector, int] | None:
        """The swarm's current model and its step, or None to start from the trainer's own."""
        told_at = -WAIT_TOLD_EVERY_S
        unwilling: set[NodeId] = set()
        while True:
            awaited = self._awaited if trio.current_time() < self._awaited_until else ()
            match whose_model(self._members(), self._me, has_seeds=self._has_seeds, awaited=awaited):
                case OwnModel():
                    if self._awaited and self._alone():
                        LOGGER.warning("no member known before the restart answers: this node goes on alone")
                    return None
                case FetchFrom(givers):
                    donor = next((giver for giver in givers if giver not in unwilling), givers[0])
                    if (fetched := await self._fetch_from(donor, layout)) is not None:
                        return fetched
                    unwilling = unwilling | {donor} if len(unwilling) < len(givers) else set()
                case WaitFor(reason):
                    told_at = await self._wait(reason, told_at)

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

    async def _fetch_from(self, donor: NodeId, layout: Layout) -> tuple[Vector, int] | None:
        """Ask one donor and wait as long as it is alive; None when it went away first."""
        self._donor = donor
        asked_at, asks, received = -math.inf, 0, self._peers.bytes_received
        try:
            while donor in donors(self._members(), self._me):  # of another model, too: it refuses, saying what differs
                waited_s = trio.current_time() - asked_at
                if waited_s >= (ASK_SOON_S if asks == 1 else ASK_AGAIN_S):
                    arriving = self._peers.bytes_received - received > waited_s * SLOWEST_DONOR
                    if asks == ASKS_MAX and not arriving:
                        return None
                    asked_at, received = trio.current_time(), self._peers.bytes_received
                    if not arriving:  # the request may be lost with a connection
                        asks += 1
                        self._peers.send(donor, ModelRequest())
                with trio.move_on_after(1.0):
                    await self._news.wait()
                if (snapshot := self._take_snapshot()) is not None:
                    values = np.empty(layout.total, np.float32)
                    await trio.to_thread.run_sync(delta.decode, snapshot.codec, layout, snapshot.chunks, values)
                    LOGGER.info("the model of step %d came from %s", snapshot.step, self._members()[donor].name)
                    return values, snapshot.step
        except PeerError as error:
            LOGGER.warning("the model from %s: %s; asking another member", donor, error)
        finally:
            self._donor = self._snapshot = None
        return None

    def _take_snapshot(self) -> ModelSnapshot | None:
        snapshot, self._snapshot = self._snapshot, None
        return snapshot
