"""What may happen to a swarm of cores, as the rules of a state machine: to its connections, and to its members."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from mode_swarm import ModeSwarm

NAMES = "abcd"
names = st.sampled_from(NAMES)


def weather_settings(examples: int, steps: int = 30) -> settings:
    """Of a machine whose failures print the blob that replays them; by the profile `long`, of no fewer than it says."""
    if settings.get_current_profile_name() == "long":
        examples = max(examples, settings().max_examples)
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


class Connections(RuleBasedStateMachine):
    """Steps, deliveries, repetitions, cuts, and members that seem dead to some, in any order."""

    swarm: ModeSwarm
    rng: np.random.Generator
    may_seem_dead = NAMES

    @rule(name=names, count=st.integers(1, 4), scale=st.sampled_from([0.0, 1e-3, 1.0]))
    def local_steps(self, name: str, count: int, scale: float) -> None:
        for _ in range(count):
            if name in self.swarm.nodes:
                self.swarm.step(name, scale * self.rng.normal(size=self.swarm.layout.total))

    @rule(one=names, other=names, count=st.integers(1, 6))
    def deliver(self, one: str, other: str, count: int) -> None:
        for _ in range(count):
            self.swarm.deliver(one, other)

    @rule()
    def deliver_all(self) -> None:
        self.swarm.settle()

    @rule(one=names, other=names, late=st.booleans())
    def repeat(self, one: str, other: str, late: bool) -> None:
        self.swarm.duplicate(one, other, late=late)

    @rule(one=names, other=names)
    def cut(self, one: str, other: str) -> None:
        self.swarm.cut(one, other)

    @rule(one=names, other=names)
    def lose(self, one: str, other: str) -> None:
        """As `cut`, but what comes next overtakes the word that messages flow again."""
        self.swarm.lose(one, other)

    @rule(one=names, other=names)
    def one_declares_other_dead(self, one: str, other: str) -> None:
        if one in self.swarm.nodes and other in self.may_seem_dead:
            self.swarm.declare_dead(one, {other})

    @rule(one=names, other=names)
    def one_finds_other_again(self, one: str, other: str) -> None:
        if {one, other} <= self.swarm.nodes.keys():
            self.swarm.peers(one, {*self.swarm.nodes[one].heard, other})

    @rule(name=names, seconds=st.sampled_from([0.1, 15.0, 61.0, 400.0]))
    def time_passes(self, name: str, seconds: float) -> None:
        self.swarm.now += seconds
        self.timer(name)

    def timer(self, name: str) -> None:
        if name in self.swarm.nodes:
            self.swarm.perform(name, self.swarm.nodes[name].core.on_timer(self.swarm.now))


class Partings(Connections):
    """Members lose sight of each other far more often than connections break."""

    @rule(one=names, others=st.permutations(NAMES), count=st.integers(0, 3))
    def one_loses_sight_of_one_after_another(self, one: str, others: list[str], count: int) -> None:
        """Each time in the middle of what a step of each began."""
        for other in others:
            self.swarm.step(one, self.rng.normal(size=self.swarm.layout.total))
            self.swarm.step(other, self.rng.normal(size=self.swarm.layout.total))
            for _ in range(count):
                self.swarm.deliver(one, other)
            self.swarm.declare_dead(one, {other} - {one})
            self.swarm.settle()

    @rule(side=st.sets(names, min_size=1, max_size=2))
    def two_sides_part(self, side: set[str]) -> None:
        for name in NAMES:
            self.swarm.declare_dead(name, set(NAMES) - side if name in side else side)

    @rule(name=names)
    def one_finds_all_again(self, name: str) -> None:
        self.swarm.hear(name)


class Lives(Connections):
    """Members die, too, and come back, and their runs end."""

    @rule(name=names)
    def finish(self, name: str) -> None:
        if name in self.swarm.nodes:
            self.swarm.finish(name)

    @precondition(lambda self: len(self.swarm.nodes) > 2)
    @rule(name=names)
    def die(self, name: str) -> None:
        if name in self.swarm.nodes:
            self.swarm.die(name)

    @rule(name=names, donor=names)
    def restart(self, name: str, donor: str) -> None:
        """With its own model, or a peer's."""
        model = self.swarm.nodes.get(donor, next(iter(self.swarm.nodes.values()))).x
        self.swarm.restart(name, model)

    @rule(name=names)
    def hear(self, name: str) -> None:
        if name in self.swarm.nodes:
            self.swarm.hear(name)
