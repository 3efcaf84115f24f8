"""When is a member late? What most of the others take, whatever their clocks say and one of them tells.

And swarms of members of unequal speed, on a clock of their own: who gives what when, and who waits for whom.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mode_swarm import ModeSwarm

from peerd.training.rounds.choice import DENSE
from peerd.training.rounds.quorum import GRACE, ROUNDS, Quorum
from peerd.transport.messages import RoundBegin

seconds = st.floats(0.001, 1000)
pauses = st.floats(0, 1000)


def begin(waited: dict[str, float]) -> RoundBegin:
    lives = tuple(range(len(waited)))
    return RoundBegin(1, 1, "float32", "ring", False, False, tuple(waited), lives, waited=tuple(waited.values()))


def round_of(quorum: Quorum, own: float, others: list[float], at: float, takes: float = 0.01, every: int = 1) -> float:
    """One round after that which ended at `at`, where each came after so many seconds; when it ended."""
    quorum.reached(at + own)
    began = at + max(own, *others)
    waited = {"me": began - at - own} | {str(n): began - at - other for n, other in enumerate(others)}
    quorum.committed(begin(waited), "me", began + takes, every)
    return began + takes


@given(own=seconds, usual=seconds, at=st.floats(0, 1e6), count=st.integers(1, 5), slow=st.floats(1, 100))
def test_it_goes_by_most_of_the_others(own: float, usual: float, at: float, count: int, slow: float) -> None:
    quorum = Quorum(1)
    quorum.committed(begin({"me": 0.0}), "me", at, 1)
    assert quorum.due_at == math.inf, "it knows nobody's pace"
    others = [usual] * count + [usual * slow] * (count - 1)
    ended = round_of(quorum, own, others, at)
    assert quorum.due_at - ended == pytest.approx(GRACE * usual, rel=1e-3, abs=1e-3)
    quorum.reached(ended + own)
    assert quorum.due_at == math.inf, "it has come"


@given(usual=seconds, pause=pauses, lie=st.floats(0, 1e300))
def test_one_pause_and_one_liar_change_little(usual: float, pause: float, lie: float) -> None:
    quorum, at = Quorum(1), 0.0
    quorum.committed(begin({"me": 0.0}), "me", at, 1)
    for number in range(ROUNDS):
        at = round_of(quorum, usual, [usual + pause * (number == 2)] * 3, at)
    assert quorum.due_at - at == pytest.approx(GRACE * usual, rel=1e-3, abs=1e-3)
    quorum.reached(at + usual)
    quorum.committed(begin({"me": 0.0, "a": 0.0, "b": 0.0, "liar": lie}), "me", at + usual, 1)
    assert quorum.due_at - at - usual == pytest.approx(GRACE * usual, rel=1e-3, abs=1e-3)


@given(usual=seconds, orders=st.lists(st.integers(1, 64), min_size=1, max_size=8))
def test_it_waits_for_as_many_steps_as_are_ordered(usual: float, orders: list[int]) -> None:
    quorum, at, every = Quorum(1), 0.0, 1
    quorum.committed(begin({"me": 0.0}), "me", at, every)
    for following in orders:
        at = round_of(quorum, every * usual, [every * usual] * 3, at, every=following)
        every = following
        assert quorum.due_at - at == pytest.approx(GRACE * every * usual, rel=1e-3, abs=1e-3 * every)


def test_where_all_are_slower_at_once_they_come_by_their_own_steps_again() -> None:
    quorum, at = Quorum(1), 0.0
    quorum.committed(begin({"me": 0.0}), "me", at, 1)
    for _ in range(ROUNDS):
        at = round_of(quorum, 1.0, [1.0] * 3, at)
    early = 0  # rounds to which all come before they have made steps of 10 s
    while (came := min(10.0, quorum.due_at - at)) < 10.0:
        at = round_of(quorum, came, [came] * 3, at)
        early += 1
    assert 0 < early < 40


# ---------------------------------------------------------------- swarms

TICK_S = 0.005
FAST_S, SLOW_S = 0.05, 0.3


class Paced:
    """Members that take so long for a step, and learn the same but for some noise.

    Of so many `steps` the last ones are of no length, and each ends its run by then; 0: all are alike, and nobody ends.
    """

    def __init__(
        self, step_s: dict[str, float], mode: str = "allreduce", size: int = 400, steps: int = 0, **settings: Any
    ) -> None:
        self._steps = steps
        self.step_s = step_s
        told = {"overlap": "quorum", "every": 2, "codec": "int8", "robust": True, **settings}
        self.swarm = ModeSwarm(mode, "".join(step_s), size, **told)
        self.swarm.all_hear()
        self.swarm.settle()
        self._ends_at = {name: step_s[name] for name in step_s}  # of the step that each is in

    def run(self, seconds: float, pause: frozenset[str] = frozenset()) -> None:
        """Members of `pause` make no step meanwhile."""
        swarm, until = self.swarm, self.swarm.now + seconds
        while swarm.now < until:
            for name in sorted(swarm.nodes.keys() - pause):
                node = swarm.nodes[name]
                if node.waits or node.finishing:
                    self._ends_at[name] = swarm.now + self.step_s[name]
                elif swarm.now >= self._ends_at[name]:
                    rate = 0.5 + 0.5 * math.cos(math.pi * min(1.0, node.steps / self._steps)) if self._steps else 1.0
                    swarm.step(name, rate * (0.02 + 0.01 * swarm.rng.normal(size=swarm.layout.total)))
                    if node.steps >= self._steps > 0:
                        swarm.finish(name)
                    self._ends_at[name] = swarm.now + self.step_s[name]
            swarm.settle()
            swarm.pass_time(TICK_S)
        for name in pause:
            self._ends_at[name] = swarm.now + self.step_s[name]

    def counted(self, what: str) -> dict[str, int]:
        return {name: node.core.counts[what] for name, node in self.swarm.nodes.items()}


@pytest.mark.cases(3)
@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8", "sign"])
@pytest.mark.parametrize("mode", ["allreduce", "diloco"])
def test_as_many_slow_as_fast_members_hold_nobody_up_and_lose_nobody(mode: str, codec: str) -> None:
    paced = Paced({"a": FAST_S, "b": SLOW_S, "c": SLOW_S, "d": FAST_S}, mode, codec=codec)
    paced.run(6.0)
    steps = {name: node.steps for name, node in paced.swarm.nodes.items()}
    assert set(paced.counted("members_left_out").values()) == {0}
    assert min(steps["a"], steps["d"]) > 0.5 * 6.0 / FAST_S
    assert min(steps["b"], steps["c"]) > 0.8 * 6.0 / SLOW_S
    assert max(paced.counted("rounds_early")["a"], paced.counted("rounds_early")["d"]) < 5
    paced.swarm.end()
    models = [node.x for node in paced.swarm.nodes.values()]
    assert all((model == models[0]).all() for model in models)


@pytest.mark.parametrize("more", range(8))
def test_whenever_runs_end_nobody_is_too_long_beside_those_who_have_just_given_all(more: int) -> None:
    """What the slow ones' encoding dropped of that is no way: the fast ones' would be a hundred times it."""
    paced = Paced({"a": FAST_S, "b": SLOW_S, "c": SLOW_S, "d": FAST_S})
    paced.run(4.0 + more * FAST_S / 2)
    paced.swarm.end()
    assert set(paced.counted("members_left_out").values()) == {0}


def test_who_trains_on_when_all_others_have_ended_is_not_too_long_beside_what_their_codec_left() -> None:
    """Of a small model that is soon next to nothing: the last one was left out, and the others ended without it."""
    paced = Paced(dict.fromkeys("abcde", FAST_S), size=16, codec="auto", every=4)
    paced.run(2.0)
    for name in "abcd":
        paced.swarm.finish(name)
    paced.run(5.0)
    assert paced.swarm.nodes["e"].core.counts[f"rounds_{DENSE}"] > 20, "or this tries nothing"
    assert set(paced.counted("rounds_shortened").values()) == {0}
    assert set(paced.counted("members_left_out").values()) == {0}
    paced.swarm.end()
    models = [node.x for node in paced.swarm.nodes.values()]
    assert all((model == models[0]).all() for model in models)


def test_a_slow_member_is_not_too_long_beside_those_whose_learning_rate_had_fallen_to_nothing_at_their_end() -> None:
    """It was left out of the last rounds, and its run had no end."""
    paced = Paced(dict.fromkeys("abcd", FAST_S) | {"e": SLOW_S}, size=64, codec="auto", every=0, steps=300)
    nodes = paced.swarm.nodes
    while not all(nodes[name].finishing for name in "abcd"):
        paced.run(1.0)
    assert nodes["e"].steps < 200, "or this tries nothing"
    paced.run(12.0)
    assert set(paced.counted("members_left_out").values()) == {0}
    paced.swarm.end()
    assert all((node.x == nodes["a"].x).all() for node in nodes.values())


def test_a_round_to_which_all_came_early_does_not_begin() -> None:
    """As where all evaluate their models at once."""
    paced = Paced({"a": FAST_S, "b": FAST_S, "c": FAST_S})
    paced.run(2.0)
    before, early = paced.counted("rounds"), paced.counted("rounds_early")
    paced.run(3.0, pause=frozenset("abc"))
    assert max(count - before[name] for name, count in paced.counted("rounds").items()) <= 1
    assert all(count > early[name] for name, count in paced.counted("rounds_early").items()), "or this tries nothing"
    paced.run(2.0)
    assert min(count - before[name] for name, count in paced.counted("rounds").items()) > 0.5 * 2.0 / (2 * FAST_S)


@pytest.mark.parametrize("slow", "abc")
def test_rounds_are_at_the_pace_of_who_still_trains(slow: str) -> None:
    """Who has ended is in every round, and begins none."""
    paced = Paced({name: SLOW_S if name == slow else FAST_S for name in "abc"})
    paced.run(2.0)
    for name in set("abc") - {slow}:
        paced.swarm.finish(name)
    paced.run(0.5)
    before = paced.counted("rounds")[slow]
    paced.run(6.0)
    assert paced.counted("rounds")[slow] - before <= 6.0 / (2 * SLOW_S) + 2


def test_too_few_members_wait_for_more() -> None:
    paced = Paced({"a": FAST_S, "b": SLOW_S}, min_peers=2)
    paced.run(3.0)
    paced.swarm.die("a")
    paced.swarm.all_hear()
    paced.run(1.0)
    before = paced.swarm.nodes["b"].steps
    paced.run(3.0)
    assert paced.swarm.nodes["b"].steps == before
    assert paced.swarm.nodes["b"].waits
