"""A last step that is said twice: its run ends once, whenever it comes again."""

from __future__ import annotations

from typing import Any

import pytest
from attacked import ROWS, Attacked

from peerd.training.effects import StepReport


def say_again(swarm: Attacked, name: str) -> int:
    """The last step once more, as from a script that was interrupted in swarm.finish(); messages that follow."""
    node = swarm.nodes[name]
    before = swarm.sent
    node.publish()
    swarm.perform(name, node.core.on_step(StepReport(node.steps, 0.0, 1.0, True, True), swarm.now))
    return swarm.sent - before


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_last_step_that_is_said_twice_ends_its_run_once(row: tuple[str, dict[str, Any]]) -> None:
    swarm = Attacked(row)
    swarm.all_hear()
    swarm.train(4)
    swarm.finish("a")
    assert say_again(swarm, "a") == 0, "at once"
    swarm.end()
    for name in "abc":
        assert swarm.nodes[name].proceeded == [False, True]
        assert say_again(swarm, name) == 0, "when all have agreed"
    assert swarm.settle() == 0
    assert all(node.proceeded == [False, True] for node in swarm.nodes.values())
