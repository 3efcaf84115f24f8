"""Do the invariants catch what they are for? Bugs are planted; each must be found, shrunk and found again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from peerd.membership.core import Membership
from peerd.simulation.faults import FAULTS
from peerd.simulation.problems import Quadratic, _Descent
from peerd.simulation.swarm import Swarm
from peerd.simulation.world import Violation, World
from peerd.training.effects import Apply, Effect, StepReport, Vector
from peerd.training.mode_settings import ModeSettings
from peerd.training.modes.gossip import Gossip
from peerd.training.pairs.reference import PairedReference

SECONDS = 60.0
CONVERGE_S = 240.0  # a pause, a crash or a storm may last for two minutes of it


def run(seed: int, peers: int, faults: list[tuple[float, str]]) -> None:
    """A short life of a small swarm, with these faults at these times."""
    world = World(seed)
    swarm = Swarm(world, peers, Quadratic(seed, values=8), told=ModeSettings(trigger="always"))
    swarm.start_all(1.0)
    rng = world.rng("test")
    for at, name in faults:
        world.later(at, lambda name=name: FAULTS[name](swarm, rng))  # type: ignore[misc]
    swarm.run(SECONDS)
    swarm.look_at_links()
    if not swarm.run(CONVERGE_S, lambda: swarm.whole() and swarm.agreed()):
        swarm.checkers.fail("the members still disagree")


schedules = st.lists(
    st.tuples(st.floats(5.0, 30.0).map(lambda at: round(at, 1)), st.sampled_from(["pause", "crash", "weather"])),
    max_size=3,
)


def found(patch: Callable[[pytest.MonkeyPatch], None]) -> tuple[int, int, list[tuple[float, str]], str]:
    """The smallest run in which the planted bug shows, and what is said of it."""
    seen: list[tuple[int, int, list[tuple[float, str]], str]] = []

    @settings(
        max_examples=30, deadline=None, derandomize=True, database=None, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow], report_multiple_bugs=False,
    )  # fmt: skip
    @given(st.integers(0, 3), st.integers(2, 5), schedules)
    def search(seed: int, peers: int, faults: list[tuple[float, str]]) -> None:
        try:
            run(seed, peers, faults)
        except Violation as violation:
            seen.append((seed, peers, faults, str(violation)))
            raise

    with pytest.MonkeyPatch.context() as planted:
        patch(planted)
        with contextlib.suppress(Violation, Flaky):
            search()
    assert seen, "the planted bug was not found"
    return seen[-1]


def skip_one_reference_update(planted: pytest.MonkeyPatch) -> None:
    complete = PairedReference._complete

    def skipping(self: PairedReference, *halves: Any) -> Any:
        before = self.mine.copy()
        moved = complete(self, *halves)
        if self.version == 3:
            self.mine[:] = before[:]
        return moved

    planted.setattr(PairedReference, "_complete", skipping)


def apply_one_correction_twice(planted: pytest.MonkeyPatch) -> None:
    completed = Gossip._completed

    def twice(self: Gossip, *rest: Any) -> list[Effect]:
        effects = completed(self, *rest)
        corrections = [effect for effect in effects if isinstance(effect, Apply)]
        return [*corrections, *effects] if self.counts["exchanges"] == 4 else effects

    planted.setattr(Gossip, "_completed", twice)


def forget_to_raise_the_incarnation(planted: pytest.MonkeyPatch) -> None:
    speak = Membership._speak

    def mumble(self: Membership, record: Any, now: float) -> None:
        if record.meta == self.me.meta:  # a refutation, not something new to say
            record = replace(record, incarnation=self.me.incarnation)
        speak(self, record, now)

    planted.setattr(Membership, "_speak", mumble)


def move_a_model_without_an_exchange(planted: pytest.MonkeyPatch) -> None:
    on_step = Gossip.on_step

    def moving(self: Gossip, report: StepReport, now: float) -> list[Effect]:
        effects = on_step(self, report, now)
        return [Apply(np.full(8, 1e-6)), *effects] if report.step == 5 else effects

    planted.setattr(Gossip, "on_step", moving)


def lose_a_correction_before_the_model(planted: pytest.MonkeyPatch) -> None:
    add = _Descent.add

    def losing(self: _Descent, correction: Vector) -> None:
        if not (correction.any() and self.x[0] > 1.5):
            add(self, correction)

    planted.setattr(_Descent, "add", losing)


@pytest.mark.one_run_in(3)
@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("patch", "says"),
    [
        (skip_one_reference_update, "their references differ"),
        (apply_one_correction_twice, "2 times at once"),
        (forget_to_raise_the_incarnation, "still disagree"),
        (move_a_model_without_an_exchange, "than was put in"),
        (lose_a_correction_before_the_model, "than was put in"),
    ],
)
def test_a_planted_bug_is_found_shrunk_and_replayed(patch: Callable[[pytest.MonkeyPatch], None], says: str) -> None:
    seed, peers, faults, violation = found(patch)
    assert says in violation
    with pytest.MonkeyPatch.context() as planted:
        patch(planted)
        with pytest.raises(Violation) as again:
            run(seed, peers, faults)
    assert str(again.value) == violation
    run(seed, peers, faults)  # without the bug, the same run is clean
