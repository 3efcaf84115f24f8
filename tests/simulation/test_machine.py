"""Any sequence of faults: safety after every one, liveness once they have stopped.

The checkers of the simulation watch safety at every event. Times are drawn by Hypothesis, so that failures shrink.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from peerd.simulation.network import Profile
from peerd.simulation.node import Clock
from peerd.simulation.problems import Quadratic
from peerd.simulation.swarm import Swarm
from peerd.simulation.world import World
from peerd.training.mode_settings import ModeSettings
from peerd.transport.messages import State

PLACES = 5
CONVERGE_S = 120.0
REACHED: Counter[str] = Counter()

moments = st.floats(0.01, 80.0).map(lambda seconds: round(seconds, 2))
shares = st.sampled_from([0.0, 0.01, 0.05])
places = st.integers(0, PLACES - 1)


class FaultySwarm(RuleBasedStateMachine):
    """Five places on a small network."""

    @initialize(seed=st.integers(0, 1 << 16), trigger=st.sampled_from(["always", "change:0.05"]))
    def begin(self, seed: int, trigger: str) -> None:
        self.swarm = Swarm(World(seed), PLACES, Quadratic(seed, values=8), told=ModeSettings(trigger=trigger))
        self.heals: list[object] = []
        self.first = 0  # where who founded the swarm is, whom all who come later are told of
        self.swarm.start(0, ())
        for place in (1, 2):
            self.swarm.start(place, (0,))

    @rule(seconds=moments)
    def advance(self, seconds: float) -> None:
        self.swarm.run(seconds)
        self.swarm.look_at_links()

    @rule(
        place=places,
        fresh=st.booleans(),
        offset_s=st.sampled_from([0.0, -1e4, 1e6]),
        drift=st.sampled_from([0.0, 1e-3, -1e-3]),
    )
    def start(self, place: int, fresh: bool, offset_s: float, drift: float) -> None:
        if place not in self.swarm.nodes:
            if not self.swarm.nodes:
                self.first = place
            seeds = [0, 1, 2, self.first] if self.swarm.nodes else []
            self.swarm.start(place, seeds, fresh=fresh, clock=Clock(offset_s, 1 + drift))
            REACHED["start"] += 1

    @precondition(lambda self: len(self.swarm.nodes) > 1)
    @rule(place=places)
    def kill(self, place: int) -> None:
        if place in self.swarm.nodes:
            self.swarm.crash(place)
            REACHED["kill"] += 1

    @rule(place=places)
    def pause(self, place: int) -> None:
        if place in self.swarm.nodes and self.swarm.nodes[place].running:
            self.swarm.pause(place)
            REACHED["pause"] += 1

    @rule(place=places)
    def resume(self, place: int) -> None:
        if place in self.swarm.nodes and not self.swarm.nodes[place].running:
            self.swarm.resume(place)
            REACHED["resume"] += 1

    @precondition(lambda self: len(self.swarm.nodes) > 2)
    @rule(place=places)
    def leave(self, place: int) -> None:
        if place in self.swarm.nodes and self.swarm.nodes[place].running:
            self.swarm.leave(place)
            REACHED["leave"] += 1

    @rule(apart=st.sets(places, min_size=1, max_size=PLACES - 1), both_ways=st.booleans())
    def cut(self, apart: set[int], both_ways: bool) -> None:
        def severed(source: int, target: int) -> bool:
            return (source in apart) != (target in apart) and (both_ways or source in apart)

        self.heals.append(self.swarm.cut(severed))
        REACHED["cut" if both_ways else "one way"] += 1

    @precondition(lambda self: self.heals)
    @rule()
    def heal(self) -> None:
        self.heals.pop()()  # type: ignore[operator]

    @rule(loss=shares, duplication=shares, reordering=shares, corruption=shares)
    def weather(self, loss: float, duplication: float, reordering: float, corruption: float) -> None:
        weather = Profile(0.0, loss=loss, duplication=duplication, reordering=reordering, corruption=corruption)
        self.swarm.set_conditions(weather)

    @rule(place=places, factor=st.sampled_from([1.0, 10.0, 1000.0]))
    def slow(self, place: int, factor: float) -> None:
        self.swarm.slow_down(place, factor)

    def teardown(self) -> None:
        """The faults stop: all who run must come to agree, and go on training together."""
        if not hasattr(self, "swarm"):
            return
        swarm = self.swarm
        for heal in self.heals:
            heal()  # type: ignore[operator]
        swarm.set_conditions(
            replace(swarm.network.conditions, loss=0.0, corruption=0.0, duplication=0.0, reordering=0.0)
        )
        for place, node in list(swarm.nodes.items()):
            if not node.running:
                swarm.resume(place)
                REACHED["resume"] += 1
        left = swarm.run(
            CONVERGE_S, lambda: all(node.membership.me.state < State.LEFT for node in swarm.nodes.values())
        )
        assert left, "who leaves is gone by then, and not there when another seeks it"
        for place in range(PLACES):
            if place not in swarm.nodes:
                swarm.start(place, (0, 1, 2, self.first))
        agreed = swarm.run(CONVERGE_S, swarm.agreed)
        views = {node.id: sorted(node.membership.members.items()) for node in swarm.nodes.values()}
        assert agreed, f"seed {swarm.world.seed}: no agreement after {CONVERGE_S} s: {views}"
        before = swarm.checkers.exchanges
        swarm.run(CONVERGE_S, lambda: swarm.checkers.exchanges >= before + PLACES)
        assert swarm.checkers.exchanges >= before + PLACES, f"seed {swarm.world.seed}: nobody exchanges any more"
        swarm.look_at_links()
        counts = swarm.counts()
        for name in ("exchanges", "refutations", "stalls", "snapshots", "failures", "rotations"):
            REACHED[name] += counts[name]
        REACHED["runs"] += 1


def _run(examples: int, steps: int, *, same: bool) -> None:
    """`same` draws the same examples each time: whether a few dozen reach every state is luck otherwise."""
    REACHED.clear()
    run_state_machine_as_test(
        FaultySwarm,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, print_blob=True,
            suppress_health_check=list(HealthCheck), derandomize=same,
        ),
    )  # fmt: skip
    rare = [name for name in INTERESTING if not REACHED[name]]
    assert not rare, f"never reached: {rare}; reached {dict(REACHED)}"


INTERESTING = (
    "start", "kill", "pause", "resume", "leave", "cut", "one way", "exchanges", "refutations", "stalls", "snapshots",
    "failures",
)  # fmt: skip


def test_any_sequence_of_faults() -> None:
    _run(examples=60, steps=30, same=True)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_sequences_of_faults() -> None:
    _run(examples=2000, steps=60, same=False)
