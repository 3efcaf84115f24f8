"""How does a node come from one plan to the next? It hears of a greater one, winds up its mode, and begins the other.

What a plan is, and which one wins, is plan.py's. Of what others say only that counts which can be followed: a number
not far ahead, a text that `peerd start` would take, and an average only while averages leave time to train. A node
whose trainer has not come yet only takes note. The change needs no round of messages: each node makes it when it hears
of it, at a boundary of its own (what it has under way is finished first, where that is quick), and exchanges from then
on with those that have made it, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import trio

from peerd.daemon import known_members
from peerd.daemon.mode_runner import ModeRunner
from peerd.membership.roster import name_of
from peerd.node.meta import NodeMeta, partners
from peerd.process.logs import LOGGER
from peerd.process.threads import in_thread
from peerd.protocol.plan import NUMBER_MAX, after, is_over, is_signed, newest, proposal, reach
from peerd.settings import Settings, planned
from peerd.training.mode_settings import WEIGHTS
from peerd.training.modes.average import Average as ExactAverage
from peerd.transport.errors import UserError
from peerd.transport.ids import NodeId
from peerd.transport.messages import AS_STARTED, Member, Plan, State
from peerd.transport.secure.signing import Signing

LOOK_S = 0.02  # while an average is under way, in which trainers stand still
TEXTS_MAX = 4096  # as many as members
LINGER_S = 15.0  # how long we are there for the others after our own part of an average; a death is known after 11 s
ONCE_MAX_S = 400.0  # of an average: its leader's patience with a trainer that does not come (300 s), and the round
STANDS_SHARE = 0.2  # of the time, beyond the first ONCE_MAX_S: how long trainers may stand still for averages


@dataclass(frozen=True, slots=True)
class Average:
    """What an average was, seen from one of its members."""

    plan: Plan
    members: tuple[NodeId, ...]  # the others in it
    distance: float  # of this member's model from the mean before, relative


class PlanFollower:
    """The plan of one node."""

    def __init__(
        self,
        me: NodeId,
        started: Settings,
        runner: ModeRunner,
        members: Callable[[], dict[NodeId, Member]],
        change: Callable[[Plan], Awaitable[None]],
        say: Callable[..., Awaitable[None]],
        signing: Signing | None = None,
    ) -> None:
        """`change` begins the mode of a plan and spreads the word, `say` what is new of this member (NodeMeta).

        With `signing`, only what its author has signed is a plan.
        """
        self.plan = AS_STARTED
        self.settings = started  # with what the plan changes
        self.average: Average | None = None  # the last one
        self._me = me
        self._started = started
        self._runner = runner
        self._members = members
        self._change = change
        self._say = say
        self._signing = signing
        self._signed: dict[tuple[Plan, bytes], bool] = {}  # of plans with their proofs, whether it is one
        self._proposed = AS_STARTED
        self._kept = AS_STARTED  # in the state folder
        self._keeps_until: trio.Event | None = None
        self._told = AS_STARTED  # of those that cannot be followed
        self._usable: dict[str, str] = {}  # texts of plans that others proposed, and what is wrong with each
        self._may_stand_s, self._stood_at = ONCE_MAX_S, 0.0  # for averages, from that time on
        self._news = trio.Event()

    def keep(self, until: trio.Event) -> None:
        """Take up the plan that the state folder has, and have it follow the plan in force until this event.

        It is a proposal like any: the swarm's own beats it if that is newer.
        """
        self._keeps_until = until
        plan = known_members.read_plan(self._started)
        if self._is_signed(plan):
            self._kept = self._proposed = plan
        else:
            LOGGER.warning(
                "plan %d of the last run is not signed, as this swarm's are: it is not taken up", plan.number
            )

    async def run(self) -> None:
        """Follow the swarm until cancelled."""
        while True:
            if (wanted := self._newest()) > self.plan:
                await self._follow_to(wanted)
            elif self.plan.once:
                began = trio.current_time()
                await self._while_averaging()
                self._note_stood(began)
                await self._follow_to(max(after(self.plan), self._newest()))
            else:
                await self._news.wait()

    def on_members(self) -> None:
        """Somebody may have said something new."""
        self._news.set()
        self._news = trio.Event()

    def set_mode(self, text: str) -> Plan:
        """Propose this for whoever asks this node. Raises UserError."""
        ready = {member.id for member, meta in self.said().items() if meta.ready}
        if ready and self._me not in ready:  # nobody would hear of it until this node has the swarm's model
            raise self._runner.no_model()
        return self.propose(text)

    def propose(self, text: str, *, once: bool = False) -> Plan:
        """Have the swarm work under this from now on. Raises UserError."""
        planned(self._started, text)
        if once and (wait_s := self._stands_again_in_s()) > 0:
            raise UserError(
                f"averages have kept the trainers waiting for long: the next one may begin in {wait_s:.0f} s"
            )
        if once and self._started.exchange != WEIGHTS:
            raise UserError("members exchange gradients: their models are one already")
        known = newest([self.plan, self._proposed, *self._heard()])
        if known.number >= NUMBER_MAX:
            raise UserError(f"plan {known.number} is the last: stop all nodes, and start the swarm anew")
        self._proposed = proposal(known, self._me, text, once=once, signing=self._signing)
        self.on_members()
        return self._proposed

    async def average_all(self) -> Average:
        """Propose one exact average of all models; what it was, when it is over. Raises UserError.

        Of one model nothing is proposed.

        Cancelled, for nobody waits for it any more, it is taken back: the swarm goes on in the mode that was.
        """
        if self._runner.core.mode is None:
            raise self._runner.no_model()
        if self.plan.once or self._newest().once:
            raise UserError("an average is under way already")
        if not self._others() and self._started.exchange == WEIGHTS:
            return Average(self.plan, (), 0.0)
        plan = self.propose(self._newest().text, once=True)
        try:
            while self.plan <= plan:
                await trio.sleep(LOOK_S)
        except trio.Cancelled:
            if self._newest() == plan:
                LOGGER.warning("whoever asked for the average has gone: it is taken back")
                self.propose(plan.text)
            raise
        if self.average is None or self.average.plan != plan:
            raise UserError("this node is not in the average: its trainer did not come to it, or another plan did")
        return self.average

    async def none_averages(self) -> None:
        """A newcomer brings nothing to an average: wait for its end."""
        while self.plan.once or self._newest().once:
            await trio.sleep(LOOK_S)

    def said(self) -> dict[Member, NodeMeta]:
        """What each living member says of itself."""
        live = (member for member in self._members().values() if member.state <= State.SUSPECT)
        return {member: NodeMeta.unpack(member.meta) for member in live}

    # ---------------------------------------------------------------- following

    def _heard(self) -> set[Plan]:
        """What the members work under, those too who are gone, as far as it is within reach, and signed.

        While any of them has the model, the others have no say.
        """
        members = self._members()
        metas = [NodeMeta.unpack(member.meta) for id, member in members.items() if id != self._me]
        said = [meta.plan for meta in metas if meta.ready] or [meta.plan for meta in metas]
        farthest = reach(self.plan, said)
        heard = {plan for plan in said if plan.number <= farthest and (plan <= self.plan or self._is_signed(plan))}
        if self._signing is None:
            return heard
        told = Counter(said)  # an author who is no member (any more) needs most of those who are
        return {plan for plan in heard if plan.author in members or 2 * told[plan] > len(said)}

    def _is_signed(self, plan: Plan) -> bool:
        one = plan, plan.proof
        if self._signing is None or one in self._signed:
            return self._signed.get(one, True)
        if len(self._signed) >= TEXTS_MAX:
            self._signed.clear()
        return self._signed.setdefault(one, is_signed(plan, self._signing))

    def _newest(self) -> Plan:
        """The greatest plan that anyone has told of and this node can follow."""
        for plan in sorted((plan for plan in {*self._heard(), self._proposed} if plan > self.plan), reverse=True):
            if plan.once and (self._started.exchange != WEIGHTS or self._stands_again_in_s() > 0):
                continue
            if (fault := self._fault(plan.text)) == "":
                return plan
            if plan > self._told:  # of another version of peerd: it asks for what this one does not know
                self._told = plan
                text = "the swarm's plan %d cannot be followed: %s; this node stays as it is"
                LOGGER.warning(text, plan.number, fault)
        return self.plan

    def _fault(self, text: str) -> str:
        if text not in self._usable:
            if len(self._usable) >= TEXTS_MAX:
                self._usable.clear()
            try:
                planned(self._started, text)
            except UserError as error:
                self._usable[text] = str(error)
            else:
                self._usable[text] = ""
        return self._usable[text]

    def _stands_again_in_s(self) -> float:
        """When there may be an average; none or less: now."""
        refilled = self._may_stand_s + STANDS_SHARE * (trio.current_time() - self._stood_at)
        return -refilled / STANDS_SHARE

    async def _follow_to(self, plan: Plan) -> None:
        settings = planned(self._started, plan.text)
        await self._runner.wind_up()
        before, self.plan, self.settings = self.plan, plan, settings
        if before.number == plan.number and before.author != plan.author:
            members = self._members()
            LOGGER.warning(
                "plan %d of %s (mode %s) is dropped: %s set %s without having heard of it, and one wins everywhere",
                before.number, name_of(before.author, members), before.text or self._started.mode,
                name_of(plan.author, members), plan.text or self._started.mode,
            )  # fmt: skip
        what = "one exact average of all models" if plan.once else f"mode {plan.text or settings.mode}"
        whose = "kept in this node's state folder" if plan == self._kept else "of the swarm"
        await self._write(plan)
        await self._change(plan)
        LOGGER.info("plan %d %s: %s", plan.number, whose, what)

    async def _write(self, plan: Plan) -> None:
        """Before anybody hears that this node works under it. An average is over when all have ended."""
        kept = plan == self._kept or plan.once
        if kept or self._keeps_until is None or self._keeps_until.is_set():
            return
        try:
            await in_thread(partial(known_members.write_plan, self._started, plan, self._keeps_until.is_set))
        except OSError as error:
            cause = f"the plan cannot be kept in {self._started.state_path}: {error.strerror}"
            LOGGER.warning("%s; if all nodes crash, this one starts again in the mode that it is told", cause)
        else:
            self._kept = plan

    def _note_stood(self, began: float) -> None:
        now = trio.current_time()
        refilled = min(ONCE_MAX_S, self._may_stand_s + STANDS_SHARE * (began - self._stood_at))
        self._may_stand_s, self._stood_at = refilled - (now - began), now

    async def _while_averaging(self) -> None:
        """Until all who live have the average, or some other plan is on."""
        plan, until, said, stands = self.plan, trio.current_time() + ONCE_MAX_S, False, False
        while trio.current_time() < until and self._newest() == plan:
            mode = self._runner.core.mode
            if not stands and isinstance(mode, ExactAverage) and mode.stands:
                stands = True
                await self._say(stands=True)
            if not said and self._runner.averaged.is_set() and self._runner.all_taken:
                said, until = True, trio.current_time() + LINGER_S
                self._note(plan)
                await self._say(averaged=True)
            if said and is_over(plan, self._others()):
                return
            await trio.sleep(LOOK_S)

    def _others(self) -> list[tuple[Plan, bool]]:
        """Those who hold the model and live."""
        members = self._members()
        model = NodeMeta.unpack(members[self._me].meta).model
        metas = [NodeMeta.unpack(members[id].meta) for id in partners(members, self._me, model)]
        return [(meta.plan, meta.averaged) for meta in metas]

    def _note(self, plan: Plan) -> None:
        mode = self._runner.core.mode
        assert mode is not None, "an average is its mode's"
        self.average = Average(plan, tuple(link.peer for link in mode.links()), mode.consensus_distance)
