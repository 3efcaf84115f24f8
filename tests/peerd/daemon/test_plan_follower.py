"""Which of the plans that others tell of counts, whatever they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from peerd.daemon import known_members
from peerd.daemon.plan_follower import ONCE_MAX_S, PlanFollower
from peerd.node.meta import NodeMeta
from peerd.protocol.plan import AHEAD_MAX, NUMBER_MAX, is_signed, proposal
from peerd.settings import Settings
from peerd.simulation.referee import Referee
from peerd.transport.errors import UserError
from peerd.transport.messages import AS_STARTED, Member, Plan, State
from peerd.transport.secure.signing import Signing

pytestmark = pytest.mark.trio(clock="autojump")


STARTED = Settings(name="me")


class Node:
    """A follower among members that say what a test wants."""

    def __init__(self, signing: Signing | None = None, started: Settings = STARTED) -> None:
        self.members: dict[str, Member] = {}
        self.followed: list[Plan] = []
        core = SimpleNamespace(mode=None)
        runner = SimpleNamespace(core=core, wind_up=self._nothing, averaged=trio.Event(), all_taken=False)
        runner.no_model = lambda: UserError("this node has no model yet")
        self.follower = PlanFollower(
            "me", started, cast(Any, runner), lambda: self.members, self._change, self._nothing, signing
        )
        self.says("me", AS_STARTED)

    def says(self, id: str, plan: Plan, *, ready: bool = True) -> None:
        meta = NodeMeta("m", ready=ready, plan=plan).pack()
        self.members[id] = Member(id, id, "10.0.0.1", 1, 1, 0, State.ALIVE, "", meta)
        self.follower.on_members()

    async def _nothing(self, **_: bool) -> None:
        await trio.lowlevel.checkpoint()

    async def _change(self, plan: Plan) -> None:
        await trio.lowlevel.checkpoint()
        self.followed.append(plan)


async def following(node: Node, says: Callable[[], None], seconds: float = 1.0) -> list[Plan]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.follower.run)
        says()
        await trio.sleep(seconds)
        nursery.cancel_scope.cancel()
    return node.followed


GOSSIP = Plan(1, "b", True, "gossip")
REFEREE = Referee(5)


def by(author: str, number: int, text: str = "allreduce") -> Plan:
    return proposal(Plan(number - 1), author, text, signing=REFEREE.signing(author))


async def test_of_two_plans_of_one_number_the_loser_is_told_of_where_it_was_in_force(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where the halves of a swarm meet again; a later plan of somebody else is no conflict."""
    node, ours, theirs = Node(), Plan(3, "a", True, "noloco"), Plan(3, "b", True, "gossip")
    node.says("a", ours)
    assert await following(node, lambda: None) == [ours]
    assert await following(node, lambda: node.says("b", theirs)) == [ours, theirs]
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1
    assert said[0].startswith("plan 3 of a (mode noloco) is dropped: b set gossip")
    later = Plan(4, "c", True, "noloco")
    await following(node, lambda: node.says("c", later))
    assert node.followed[2:] == [later]
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


async def test_in_a_signed_swarm_only_what_its_author_signed_is_a_plan() -> None:
    node = Node(REFEREE.signing("me"))
    node.says("b", AS_STARTED)
    good = by("b", 3)

    def says() -> None:
        for number, lie in enumerate([
            Plan(9, "b", True, "gossip"), replace(good, number=8), replace(good, done=False),
            replace(by("a", 7), author="b"), replace(good, text="gossip", proof=by("a", 3).proof),
        ]):  # fmt: skip
            node.says(f"a{number}", lie)
        node.says("a", good)
        node.says("z", replace(good, proof=b""))

    assert await following(node, says) == [good]
    assert node.follower.plan.proof == good.proof, "so others believe this node"
    mine = node.follower.propose("noloco")
    assert is_signed(mine, REFEREE.signing("a"))


@pytest.mark.parametrize(("tellers", "followed"), [("a", False), ("ab", False), ("abc", True)])
async def test_an_author_who_is_no_member_needs_most_members(tellers: str, followed: bool) -> None:
    node, plan = Node(REFEREE.signing("me")), by("gone", 4)
    for id in "abcd":
        node.says(id, AS_STARTED)

    def says() -> None:
        for id in tellers:
            node.says(id, plan)

    assert await following(node, says) == [plan] * followed
    node.says("gone", AS_STARTED)
    assert await following(node, lambda: None) == [plan]


async def test_a_plan_that_was_kept_unsigned_is_not_taken_up(tmp_path: Path) -> None:
    settings = Settings(name="me", state_dir=str(tmp_path))
    for plan, taken in ((GOSSIP, False), (by("b", 2), True)):
        known_members.write_plan(settings, plan, lambda: False)
        node = Node(REFEREE.signing("me"), settings)
        assert await following(node, lambda node=node: node.follower.keep(trio.Event())) == [plan] * taken  # type: ignore[misc]


@pytest.mark.parametrize(
    "text",
    ["allreduce servers=1000000000000000", "gossip view=9999999", "async servers=0", "allreduce min_peers=513",
     "nonsense", "allreduce topology=nonsense", "gossip codec=nonsense", "gossip every=1000000001",
     "allreduce topology=tree:1000000", "diloco:1000000", "softsync:x"],
)  # fmt: skip
async def test_a_plan_that_start_would_refuse_is_not_followed_and_hides_no_other(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node()
    node.says("a", Plan(2, "a", True, text))
    assert await following(node, lambda: node.says("b", GOSSIP)) == [GOSSIP]
    assert len([record for record in caplog.records if "cannot be followed" in record.message]) == 1


async def test_a_number_far_ahead_does_not_count_and_leaves_room_for_proposals() -> None:
    node = Node()
    node.says("b", GOSSIP)
    node.says("c", GOSSIP)
    assert await following(node, lambda: node.says("a", Plan(NUMBER_MAX, "a", True, "allreduce"))) == [GOSSIP]
    assert node.follower.propose("noloco").number == 2
    assert await following(node, lambda: node.says("a", Plan(AHEAD_MAX + 2, "a", True, "allreduce"))) == [
        GOSSIP, Plan(2, "me", True, "noloco"), Plan(AHEAD_MAX + 2, "a", True, "allreduce"),
    ]  # fmt: skip


async def test_a_newcomer_takes_up_the_plan_of_a_swarm_that_is_far_ahead() -> None:
    node, plan = Node(), Plan(9 * AHEAD_MAX, "b", True, "allreduce")
    node.says("a", plan)
    assert await following(node, lambda: node.says("b", plan)) == [plan]


async def test_after_the_last_number_a_proposal_says_what_to_do() -> None:
    node, plan = Node(), Plan(NUMBER_MAX, "b", True, "allreduce")
    node.says("a", plan)
    await following(node, lambda: node.says("b", plan))
    with pytest.raises(UserError, match="start the swarm anew"):
        node.follower.propose("gossip")


async def test_who_has_no_model_has_no_say_while_others_have() -> None:
    node = Node()
    node.says("b", AS_STARTED)
    assert await following(node, lambda: node.says("a", Plan(3, "a", True, "allreduce"), ready=False)) == []
    assert await following(node, lambda: node.says("a", Plan(3, "a", True, "allreduce"))) != []


async def test_a_mode_is_set_only_where_others_hear_of_it() -> None:
    node = Node()
    node.says("me", AS_STARTED, ready=False)
    node.says("a", AS_STARTED, ready=False)
    assert node.follower.set_mode("allreduce").number == 1, "while none has a model all are heard"
    node.says("a", AS_STARTED)
    with pytest.raises(UserError, match="this node has no model yet"):
        node.follower.set_mode("noloco")
    node.says("me", AS_STARTED)
    assert node.follower.set_mode("noloco").number == 2


async def test_while_nobody_has_a_model_all_have_a_say() -> None:
    node, plan = Node(), Plan(3, "a", True, "allreduce")
    assert await following(node, lambda: node.says("a", plan, ready=False)) == [plan]


@pytest.mark.one_run_in(3)
async def test_averages_again_and_again_leave_most_of_the_time_to_training() -> None:
    node, stood, hours = Node(), 0.0, 1.5

    async def ask() -> None:
        number = 0
        while True:
            number += 1
            node.says("a", Plan(2 * number, "a", False, ""))
            await trio.sleep(5)

    async def look() -> None:
        nonlocal stood
        while True:
            await trio.sleep(1)
            stood += node.follower.plan.once

    node.follower._runner.core = cast(Any, SimpleNamespace(mode=object()))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.follower.run)
        nursery.start_soon(ask)
        nursery.start_soon(look)
        await trio.sleep(hours * 3600)
        nursery.cancel_scope.cancel()
    assert stood < 0.2 * hours * 3600 + 2 * ONCE_MAX_S
    assert stood > 0
