"""The parameter server's tables: a shard's lead and the end of a run go every way of them and no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_swarm import ServerSwarm

from peerd.training.codecs.vector import Layout
from peerd.training.modes.parameter_server import ParameterServer
from peerd.training.parameter_server import run_end, shard_state
from peerd.training.parameter_server.run_end import RunEnd
from peerd.training.parameter_server.shard_state import Lead, ShardState
from peerd.training.parameter_server.worker import parts_of

LIVES_MAX = 30


@dataclass
class Gone:
    """Which ways were gone, by whatever enters states."""

    leads: set[tuple[Lead, Lead]] = field(default_factory=set)
    ends: set[tuple[RunEnd, RunEnd]] = field(default_factory=set)


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> Gone:
    seen = Gone()
    enter, end = ShardState.enter, ParameterServer._enter

    def leads(shard: ShardState, lead: Lead) -> None:
        seen.leads.add((shard.lead, lead))
        enter(shard, lead)

    def ends(core: ParameterServer, run: RunEnd) -> None:
        seen.ends.add((core._run, run))
        end(core, run)

    monkeypatch.setattr(ShardState, "enter", leads)
    monkeypatch.setattr(ParameterServer, "_enter", ends)
    return seen


def ways(table: dict[Any, dict[Any, str]]) -> set[tuple[Any, Any]]:
    return {(before, after) for before, following in table.items() for after in following}


def happens(swarm: ServerSwarm, chance: Callable[[int], int]) -> None:
    """Something to someone, that may happen to it now."""
    names = sorted(swarm.nodes)
    one, other = names[chance(len(names))], names[chance(len(names))]
    node = swarm.nodes[one]
    match chance(9):
        case 0:
            swarm.cut(one, other)
        case 1:
            swarm.declare_dead(one, {other} - {one})
        case 2:
            swarm.hear(one)
        case 3:
            swarm.finish(one)
        case 4 if node.finishing or node.waits:  # its trainer is another one, or trains on
            node.core.on_trainer_lost(swarm.now)
            node.waits = False
            swarm.begin_again(one)
            swarm.step(one, 1.0)
        case 5 if len(names) > 2:
            swarm.die(one)
        case 6 if swarm.lives < LIVES_MAX:
            swarm.restart(one, node.x)
        case 7:
            swarm.pass_time(15.0)
        case _:
            if not node.waits and not node.finishing:
                swarm.step(one, 1.0)
            while swarm.deliver(other, one):
                pass


def check(swarm: ServerSwarm) -> None:
    """What a state says of the rest."""
    for name, node in swarm.nodes.items():
        core = node.core
        for shard in core._leadership.shards:
            assert (shard.server is not None) == (shard.lead is Lead.SERVING)
            assert (shard.preparing is not None) == (shard.lead is Lead.PREPARING)
            if shard.lead in (Lead.SERVING, Lead.PREPARING):
                assert shard.leader[1] == name
        assert (core._run is not RunEnd.TRAINING) == node.finishing
        assert (core._run >= RunEnd.DRAINED) == (name in core._members.finished)
        assert node.proceeded == [False, True][: max(0, core._run - 1)]


@settings(max_examples=200)
@given(
    mode=st.sampled_from(["hardsync", "softsync:1", "async"]), topology=st.sampled_from(["auto", "adv:2"]),
    chances=st.lists(st.integers(0, 2**16), min_size=100, max_size=400),
)  # fmt: skip
def test_whatever_happens_states_go_where_the_tables_say(mode: str, topology: str, chances: list[int]) -> None:
    """Whatever enters a state asserts it; and they agree with all else that is known."""
    swarm = ServerSwarm(mode, "abc", servers=2, topology=topology)
    drawn = iter(chances)
    for first in drawn:
        happens(swarm, lambda count, first=first: next(drawn, first) % count)  # type: ignore[misc]
        check(swarm)
    swarm.heal()
    check(swarm)
    assert all(len(swarm.serving(shard)) == 1 for shard in range(2))


def test_every_way_of_the_tables_is_gone(gone: Gone) -> None:
    for mode in ("hardsync", "softsync:1"):
        swarm = ServerSwarm(mode, "abc", servers=2, topology="adv:2")
        for _ in range(600):
            happens(swarm, lambda count: int(swarm.rng.integers(count)))  # noqa: B023
    assert gone.leads == ways(shard_state.TRANSITIONS)
    assert gone.ends == ways(run_end.TRANSITIONS)


@pytest.mark.parametrize("before", Lead)
def test_no_other_way_is_there_for_a_lead(before: Lead) -> None:
    (part,) = parts_of(Layout(4, 4), 1, gradients=False)
    shard = ShardState(part, lead=before)
    refused(shard.enter, before, shard_state.TRANSITIONS)


@pytest.mark.parametrize("before", RunEnd)
def test_no_other_way_is_there_to_an_end(before: RunEnd) -> None:
    core = ServerSwarm("async", "a").nodes["a"].core
    core._run = before
    refused(core._enter, before, run_end.TRANSITIONS)


def refused(enter: Callable[[Any], None], before: Enum, table: dict[Any, dict[Any, str]]) -> None:
    for after in set(type(before)) - table[before].keys():
        with pytest.raises(AssertionError, match=f"{before.name} -> {after.name}"):
            enter(after)
