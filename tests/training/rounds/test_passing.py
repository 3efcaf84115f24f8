"""A leader that makes no rounds is passed by, after a bounded time and by all; who lies can do little with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from gradient_swarm import GradientSwarm
from hypothesis import given, settings
from hypothesis import strategies as st
from mode_swarm import ModeSwarm
from round_swarm import Lie, RoundSwarm, formed

from peerd.training.effects import Effect, Send
from peerd.training.rounds.culprits import MISSES_MAX
from peerd.training.rounds.leader import PATIENCE_MIN_S
from peerd.training.rounds.member import REPEAT_S
from peerd.training.rounds.passing import (
    ALONE_PATIENCES,
    TOGETHER_S,
    UNCOMMITTED_PATIENCES,
    UNORDERED_PATIENCES,
    Passing,
)
from peerd.transport import wire
from peerd.transport.messages import COUNT, LeaderPassed, Message, RoundBegin, RoundCommit, RoundPhase, RoundReport

STEP_S = 5
TURNS = 12  # of everybody's messages, in one step's time
SETTLED_S = (2 + MISSES_MAX) * (PATIENCE_MIN_S + 2 * REPEAT_S + STEP_S)
"""Until the next leader has done without what the last one keeps back: its word, its contribution, an end of rounds."""
UNORDERED_S = UNORDERED_PATIENCES * PATIENCE_MIN_S + SETTLED_S
UNCOMMITTED_S = UNCOMMITTED_PATIENCES * PATIENCE_MIN_S + SETTLED_S
ALONE_S = (UNORDERED_PATIENCES + ALONE_PATIENCES) * PATIENCE_MIN_S + SETTLED_S
ALONE_COMMIT_S = (UNCOMMITTED_PATIENCES + ALONE_PATIENCES) * PATIENCE_MIN_S + SETTLED_S


def begins_nothing(to: str, message: Message) -> Message | None:
    return None if isinstance(message, RoundBegin | RoundCommit) else message


def commits_nothing(to: str, message: Message) -> Message | None:
    return None if isinstance(message, RoundCommit) else message


def commits_to_all_but_one(to: str, message: Message) -> Message | None:
    return None if isinstance(message, RoundCommit) and to != "b" else message


def begins_with_some(to: str, message: Message) -> Message | None:
    """With those of even places; its own roster says so, too."""
    if isinstance(message, RoundBegin | RoundCommit) and to in "ceg":
        return None
    return message


def says_nothing_of_use(to: str, message: Message) -> Message | None:
    """It reports, and never more than that it has no contribution."""
    if isinstance(message, RoundReport):
        return replace(message, phase=RoundPhase.IDLE, lengths=())
    return None


LIES: list[tuple[Callable[[], Lie], float]] = [
    (lambda: begins_nothing, UNORDERED_S), (lambda: says_nothing_of_use, UNORDERED_S),
    (lambda: commits_nothing, UNCOMMITTED_S), (lambda: commits_to_all_but_one, ALONE_COMMIT_S),
    (lambda: begins_with_some, ALONE_S),
]  # fmt: skip
IDS = ["nothing", "idle", "no-commit", "commits-to-some", "begins-with-some"]


class Liars(GradientSwarm):
    """Gradients, where a member may lie as in a RoundSwarm."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.lies: dict[str, Lie] = {}
        super().__init__(*arguments, **more)

    def perform(self, name: str, effects: list[Effect]) -> None:
        said: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Send) and name in self.lies:
                lie = self.lies[name](effect.peer, effect.message)
                said += [Send(effect.peer, lie)] if lie is not None else []
            else:
                said.append(effect)
        super().perform(name, said)


def deliver(swarm: ModeSwarm) -> None:
    """All that is on its way, or as much as a line carries of one who begins again and again."""
    for _ in range(TURNS):
        for link in swarm.waiting():
            for _ in range(len(swarm.queues[link])):
                swarm.deliver(*link)


def live_through(swarm: ModeSwarm, seconds: float) -> dict[str, float]:
    """How long each stood still at most."""
    began, longest = swarm.now, dict.fromkeys(swarm.nodes, 0.0)
    steps = {name: (node.steps, swarm.now) for name, node in swarm.nodes.items()}
    while swarm.now < began + seconds:
        for name in sorted(swarm.nodes):
            swarm.step(name, None)  # type: ignore[arg-type]
        deliver(swarm)
        swarm.pass_time(STEP_S)
        deliver(swarm)
        for name, node in swarm.nodes.items():
            made, at = steps[name]
            longest[name] = max(longest[name], swarm.now - at)
            if node.steps > made:
                steps[name] = node.steps, swarm.now
    return longest


def leaders(swarm: ModeSwarm, but: str) -> set[str]:
    return {node.core._rounds._leads for name, node in swarm.nodes.items() if name != but}


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("exchange", "names"),
    [("diloco", "abcd"), ("weights", "ab"), ("weights", "abcde"), ("gradients", "abcd")],
)
@pytest.mark.parametrize(("lie", "within_s"), LIES, ids=IDS)
def test_the_others_go_on_and_follow_one_leader(
    lie: Callable[[], Lie], within_s: float, names: str, exchange: str
) -> None:
    swarm: RoundSwarm | Liars
    if exchange == "gradients":
        swarm = Liars(names)
    else:
        mode = "diloco" if exchange == "diloco" else "allreduce"
        swarm = RoundSwarm(names, mode=mode, overlap="blocking", every=2 if exchange == "diloco" else 1)
        swarm.all_hear()
    live_through(swarm, 30)
    swarm.lies["a"] = lie()
    stood = live_through(swarm, ALONE_COMMIT_S + UNCOMMITTED_S)
    honest = set(names) - {"a"}
    assert max(stood[name] for name in honest) <= within_s
    assert len(leaders(swarm, "a")) == 1
    last = live_through(swarm, UNCOMMITTED_S)
    assert max(last[name] for name in honest) <= PATIENCE_MIN_S + 2 * REPEAT_S + 2 * STEP_S, "and it costs little on"


class Voices:
    """Honest members and one that says to each whatever it likes."""

    def __init__(self, count: int) -> None:
        self.names = "abcdefgh"[:count]
        self.now = 0.0
        self.honest = {name: Passing(name) for name in self.names if name != "c"}

    def everyone(self, name: str) -> frozenset[str]:
        return frozenset(self.names) - {name}

    def say(self, sender: str, to: str, leader: str, times: int, unreached: bool = False) -> None:
        if to in self.honest:
            self.honest[to].heard(sender, leader, times, unreached=unreached)
            self.join(to)

    def join(self, name: str) -> None:
        for joined in self.honest[name].join(self.everyone(name), ALONE_PATIENCES, self.now):
            self.tell(name, joined)

    def tell(self, name: str, leader: str) -> None:
        one = self.honest[name]
        for other in self.everyone(name):
            self.say(name, other, leader, one.counts[leader], leader in one.unreached)

    def pass_time(self) -> None:
        """Until no word waits for its others."""
        for _ in range(len(self.names)):
            self.now += TOGETHER_S
            for name, one in self.honest.items():
                if one.due_at <= self.now:
                    self.join(name)

    def complain(self, name: str, *, unreached: bool = False) -> None:
        leader = self.honest[name].leader(self.everyone(name))
        if leader != name:
            self.honest[name].complain(leader, self.everyone(name), unreached=unreached)
            self.tell(name, leader)
            if name in self.honest[name].counts:
                self.tell(name, name)

    def leaders(self) -> set[str]:
        return {one.leader(self.everyone(name)) for name, one in self.honest.items()}


calls = st.tuples(st.sampled_from("abdefgh"), st.sampled_from("abcdefgh"), st.integers(1, 2**50))


@given(st.integers(4, 8), st.lists(st.one_of(calls, st.sampled_from("abdefgh")), max_size=30))
@settings(deadline=None)
def test_honest_members_follow_one_leader_whatever_one_says_to_each(count: int, course: list[Any]) -> None:
    voices = Voices(count)
    for event in course:
        if isinstance(event, str):
            if event in voices.honest:
                voices.complain(event)
        elif event[0] in voices.honest and event[1] in voices.names:
            voices.say("c", *event)
        assert len(voices.leaders()) == 1


@given(
    st.integers(4, 8),
    st.lists(st.one_of(st.tuples(calls, st.booleans()), st.sampled_from("abdefgh")), max_size=30),
    st.booleans(),
)
@settings(deadline=None)
def test_so_they_do_once_words_of_broken_lines_have_come(count: int, course: list[Any], at_once: bool) -> None:
    voices = Voices(count)
    for event in course:
        if isinstance(event, str):
            if event in voices.honest:
                voices.complain(event, unreached=True)
        else:
            (to, leader, times), unreached = event
            if to in voices.honest and leader in voices.names:
                voices.say("c", to, leader, times, unreached)
        if not at_once:
            voices.pass_time()
            assert len(voices.leaders()) == 1
    voices.pass_time()
    assert len(voices.leaders()) == 1


@given(
    st.integers(2, 8), st.lists(st.tuples(calls, st.booleans()), max_size=40), st.floats(0, 40 * ALONE_PATIENCES)
)  # fmt: skip
def test_a_liar_alone_changes_the_lead_ever_more_seldom(
    count: int, course: list[tuple[tuple[str, str, int], bool]], seconds: float
) -> None:
    voices = Voices(count)
    for number, ((to, leader, times), unreached) in enumerate(course):
        voices.now = seconds * number / len(course)
        if leader in voices.names and leader != "c":
            voices.say("c", to, leader, times, unreached)
    most = 1 + math.log2(1 + seconds / ALONE_PATIENCES)
    for one in voices.honest.values():
        assert one._heeded.get("c", (0, 0.0))[0] <= most


def test_the_word_of_the_leader_alone_keeps_nobody_from_passing_it_by() -> None:
    for names in ("ab", "abcd"):
        member, others = Passing("b"), frozenset(names) - {"b"}
        for leader in names:
            member.heard("a", leader, 2**50)
            member.join(others, ALONE_PATIENCES, 0.0)
        member.complain("a", others)
        for other in names[2:]:
            member.heard(other, "a", 2)
        member.join(others, ALONE_PATIENCES, 0.0)
        assert member.leader(others) != "a"


@pytest.mark.parametrize("names", ["ab", "abcd"])
def test_no_word_takes_a_count_to_its_end(names: str) -> None:
    member, others = Passing("b"), frozenset(names) - {"b"}
    for _ in range(3):
        for leader in "aba":
            member.heard("a", leader, COUNT.high)
            member.join(others, ALONE_PATIENCES, 0.0)
    member.complain("a", others)
    for leader, times in member.counts.items():
        wire.encode(LeaderPassed(leader, times + 1000))
    assert names != "ab" or member.leader(others) == "b", "of more, others have to say so, too"


@given(
    st.lists(st.sampled_from("ab"), max_size=6),
    st.lists(st.sampled_from("ab"), max_size=2),
    st.sampled_from(["ab", "ba"]),
)
def test_of_two_that_could_not_hear_each_other_one_leads_once_they_can(
    apart: list[str], later: list[str], order: str
) -> None:
    members = {name: Passing(name) for name in "ab"}
    alive = {"a": frozenset("b"), "b": frozenset("a")}

    def complain(name: str) -> None:
        if (leader := members[name].leader(alive[name])) != name:
            members[name].complain(leader, alive[name])

    def hear(now: float) -> set[str]:
        for name in order * 2:
            (other,) = alive[name]
            for leader, times in members[other].counts.items():
                members[name].heard(other, leader, times)
            members[name].join(alive[name], ALONE_PATIENCES, now)
        return {member.leader(alive[name]) for name, member in members.items()}

    for name in apart:
        complain(name)
    assert len(hear(0.0)) == 1, "at once"
    for name in later:
        complain(name)
    assert len(hear(2.0 * ALONE_PATIENCES)) == 1


def test_a_newcomer_follows_whom_the_others_follow() -> None:
    swarm = RoundSwarm("abcde", overlap="blocking")
    swarm.all_hear()
    live_through(swarm, 30)
    swarm.lies["a"] = begins_nothing
    live_through(swarm, UNORDERED_S)
    (leader,) = leaders(swarm, "a")
    assert leader != "a"
    swarm.restart("d", swarm.nodes["c"].x)
    swarm.all_hear()
    swarm.settle()
    assert leaders(swarm, "a") == {leader}
    swarm.restart("a", swarm.nodes["c"].x)
    swarm.all_hear()
    swarm.settle()
    assert leaders(swarm, "") == {leader}, "another life is the same member"


@pytest.mark.cases(1)
@pytest.mark.parametrize("liar", "ce")
def test_who_complains_without_end_costs_little(liar: str) -> None:
    """Of each leader in turn, to some of the others."""
    swarm = RoundSwarm("abcde", overlap="blocking")
    swarm.all_hear()
    live_through(swarm, 30)
    before = {name: node.steps for name, node in swarm.nodes.items()}
    for number in range(200):
        victim = "abcde"[number % 5]
        if victim != liar:
            leader = swarm.nodes[victim].core._rounds._leads
            told = swarm.nodes[victim].core.on_message(liar, LeaderPassed(leader, number + 1), swarm.now)
            swarm.perform(victim, told)
        live_through(swarm, STEP_S)
        assert len(leaders(swarm, liar)) == 1
    assert all(node.steps - before[name] >= 0.9 * 200 for name, node in swarm.nodes.items())


def test_min_peers_that_nobody_meets_passes_nobody_by() -> None:
    swarm = RoundSwarm("abc", overlap="blocking", min_peers=4)
    swarm.all_hear()
    live_through(swarm, 3000)
    assert leaders(swarm, "") == {"a"}


def test_two_that_follow_each_other_do_not_answer_each_other_for_ever() -> None:
    """Each knows of a complaint of its own, and has yet to hear of the other's."""
    swarm = formed("ab", overlap="blocking")
    for name in "ab":
        rounds = swarm.nodes[name].core._rounds
        rounds._passing.counts[name] = 1
        rounds._follow(swarm.now)
        assert rounds._leads != name
    swarm.step("a")
    assert swarm.settle() < 10
    swarm.cut("a", "b")
    swarm.cut("b", "a")
    swarm.settle()
    assert len(leaders(swarm, "")) == 1, "they have heard"


@given(st.lists(st.tuples(st.sampled_from("bc"), st.text("xyz", min_size=1, max_size=9)), max_size=30))
def test_of_made_up_leaders_nothing_is_said_on(heard: list[tuple[str, str]]) -> None:
    member = Passing("a")
    for sender, leader in heard:
        member.heard(sender, leader, 2**40)
    assert member.join(frozenset("bc"), ALONE_PATIENCES, 0.0) == []
    assert member.join(frozenset("bc"), ALONE_PATIENCES, 10.0 * ALONE_PATIENCES) == []
    assert not member.counts
