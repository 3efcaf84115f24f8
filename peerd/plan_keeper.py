"""How does a node come from one plan to the next? It hears of a greater one, winds up its mode, and begins the other.

What a plan is, and which one wins, is plan.py's. A node whose trainer has not come yet only takes note. The change
needs no round of messages: each node makes it when it hears of it, at a boundary of its own (what it has under way is
finished first, where that is quick), and exchanges from then on with those that have made it, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from peerd.effects import NodeId, UserError
from peerd.exchanges import Exchanges
from peerd.logs import LOGGER
from peerd.messages import AS_STARTED, Member, Plan, State
from peerd.plan import after, is_over, newest, proposal
from peerd.roles import About, partners
from peerd.settings import Settings, planned

LOOK_S = 0.02  # while an average is under way, in which trainers stand still
LINGER_S = 15.0  # how long we are there for the others after our own part of an average; a death is known after 11 s
ONCE_MOST_S = 400.0  # of an average: its leader's patience with a trainer that does not come (300 s), and the round


@dataclass(frozen=True, slots=True)
class Average:
    """What an average was, seen from one of its members."""

    plan: Plan
    members: tuple[NodeId, ...]  # the others in it
    distance: float  # of this member's model from the mean before, relative


class PlanKeeper:
    """The plan of one node."""

    def __init__(
        self,
        me: NodeId,
        started: Settings,
        exchanges: Exchanges,
        members: Callable[[], dict[NodeId, Member]],
        change: Callable[[Plan], Awaitable[None]],
        say_averaged: Callable[[], Awaitable[None]],
    ) -> None:
        """`change` begins the mode of a plan and spreads the word."""
        self.plan = AS_STARTED
        self.settings = started  # with what the plan changes
        self.average: Average | None = None  # the last one
        self._me = me
        self._started = started
        self._exchanges = exchanges
        self._members = members
        self._change = change
        self._say_averaged = say_averaged
        self._proposed = AS_STARTED
        self._unusable = AS_STARTED
        self._news = trio.Event()

    async def run(self) -> None:
        """Follow the swarm until cancelled."""
        while True:
            if (wanted := self._newest()) > self.plan:
                await self._adopt(wanted)
            elif self.plan.once:
                await self._while_averaging()
                await self._adopt(max(after(self.plan), self._newest()))
            else:
                await self._news.wait()

    def on_members(self) -> None:
        """Somebody may have said something new."""
        self._news.set()
        self._news = trio.Event()

    def propose(self, text: str, *, once: bool = False) -> Plan:
        """Have the swarm work under this from now on. Raises UserError."""
        planned(self._started, text)
        self._proposed = proposal(newest([self.plan, self._newest(), self._unusable]), self._me, text, once=once)
        self.on_members()
        return self._proposed

    async def average_all(self) -> Average:
        """Propose one exact average of all models; what it was, when it is over. Raises UserError."""
        if self._exchanges.lane.mode is None:
            raise UserError("this node has no model yet: no trainer has attached")
        if self.plan.once or self._newest().once:
            raise UserError("an average is under way already")
        plan = self.propose(self._newest().text, once=True)
        while self.plan <= plan:
            await trio.sleep(LOOK_S)
        if self.average is None or self.average.plan != plan:
            raise UserError("this node is not in the average: its trainer did not come to it, or another plan did")
        return self.average

    async def none_averages(self) -> None:
        """A newcomer brings nothing to an average: wait for its end."""
        while self.plan.once or self._newest().once:
            await trio.sleep(LOOK_S)

    def said(self) -> dict[Member, Plan]:
        """Under which plan each living member says it works."""
        live = (member for member in self._members().values() if member.state <= State.SUSPECT)
        return {member: About.unpack(member.meta).plan for member in live}

    # ---------------------------------------------------------------- following

    def _newest(self) -> Plan:
        """The greatest plan that anyone has told of, those too who are gone."""
        said = newest(About.unpack(member.meta).plan for member in self._members().values())
        wanted = newest([said, self._proposed])
        return self.plan if wanted == self._unusable else wanted

    async def _adopt(self, plan: Plan) -> None:
        try:
            settings = planned(self._started, plan.text)
        except UserError as error:  # of another version of peerd: it asks for what this one does not know
            self._unusable = plan
            LOGGER.warning("the swarm's plan %d cannot be followed: %s; this node stays as it is", plan.number, error)
            return
        await self._exchanges.wind_up()
        self.plan, self.settings = plan, settings
        await self._change(plan)
        what = "one exact average of all models" if plan.once else f"mode {plan.text or settings.mode}"
        LOGGER.info("plan %d of the swarm: %s", plan.number, what)

    async def _while_averaging(self) -> None:
        """Until all who live have the average, or some other plan is on."""
        plan, until, said = self.plan, trio.current_time() + ONCE_MOST_S, False
        while trio.current_time() < until and self._newest() == plan:
            if not said and self._exchanges.averaged.is_set() and self._exchanges.all_taken:
                said, until = True, trio.current_time() + LINGER_S
                self._note(plan)
                await self._say_averaged()
            if said and is_over(plan, self._others()):
                return
            await trio.sleep(LOOK_S)

    def _others(self) -> list[tuple[Plan, bool]]:
        """Those who hold the model and live."""
        members = self._members()
        model = About.unpack(members[self._me].meta).model
        abouts = [About.unpack(members[id].meta) for id in partners(members, self._me, model)]
        return [(about.plan, about.averaged) for about in abouts]

    def _note(self, plan: Plan) -> None:
        mode = self._exchanges.lane.mode
        assert mode is not None, "an average is its mode's"
        self.average = Average(plan, tuple(link.peer for link in mode.links()), mode.consensus_distance)
