"""What one member of a swarm with parameter servers can do to the model: at most so much, whatever it sends."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_swarm import ServerSwarm

from peerd.training.codecs import vector
from peerd.training.codecs.vector import Layout
from peerd.training.parameter_server.limits import FIRST_SHARE, PUSH_LIMIT, PushLimits
from peerd.training.parameter_server.shard_server import Rule, ShardServer
from peerd.training.parameter_server.shard_state import WEIGHTS_CODEC
from peerd.transport.messages import Applied, Prepare, Promise, ShardLeader, Weights

SIZE, PARAMETERS = 8, 6
LAYOUT = Layout(PARAMETERS, SIZE)
GROUPS = (slice(0, PARAMETERS), slice(PARAMETERS, SIZE))
HONEST, LIAR = "abc", "x"
finite = st.one_of(st.floats(-(2.0**99), 2.0**99, width=32), st.sampled_from([0.0, 1.0, -1.0]))
updates = st.lists(finite, min_size=SIZE, max_size=SIZE).map(lambda values: np.array(values, np.float32))
small = st.lists(st.integers(-4, 4), min_size=SIZE, max_size=SIZE).map(lambda one: np.array(one, np.float32) / 4)


def norms(values: np.ndarray) -> list[float]:
    return [float(np.linalg.norm(values[group].astype(np.float64))) for group in GROUPS]


@settings(deadline=None)
@given(st.lists(st.one_of(st.tuples(st.sampled_from(HONEST), small), st.tuples(st.just(LIAR), updates)), max_size=30))
def test_no_push_moves_the_weights_further_than_two_of_the_others(pushes: list[tuple[str, np.ndarray]]) -> None:
    """Parameters and buffers each, however often the liar pushes; what the others push is no more than they say."""
    start = np.ones(SIZE, np.float32)
    served = ShardServer(Rule(None), start, 0, {}, Counter(), Counter(), limits=PushLimits("a", LAYOUT))
    seqs, last = Counter[str](), dict[str, list[float]]()
    training = frozenset(HONEST + LIAR)
    for worker, update in pushes:
        seqs[worker] += 1
        before = served.weights.copy()
        served.take([Applied(worker, 0, seqs[worker])], served.clock, update.copy(), training)
        served.due(training)
        moved = norms(served.weights - before)
        if worker == LIAR:
            for number, group in enumerate(GROUPS):
                known = [each[number] for each in last.values() if each[number] > 0]
                limit = PUSH_LIMIT * median(known) if known else FIRST_SHARE * norms(before)[number]
                rounding = 1e-6 * np.abs(served.weights[group]).max()
                assert limit == 0 or moved[number] <= limit * (1 + 1e-5) + SIZE * rounding
        else:
            last[worker] = moved
    assert np.isfinite(served.weights).all()


def test_who_trains_what_all_others_leave_is_shortened_by_half_at_most() -> None:
    """It was taken for one that pushes twelve times too much, and the rest of the model stood still."""
    layout = Layout(2000, 2000, (), (12, 2000))
    limits, weights = PushLimits("a", layout), np.ones(2000, np.float32)
    few = np.where(np.arange(2000) < 12, 0.1, 0.0).astype(np.float32)
    for worker in "bcd":
        limits.clip([worker], few.copy(), weights)
    update = np.full(2000, 0.1, np.float32)
    limits.clip(["e"], update, weights)
    assert np.linalg.norm(update) > 0.49 * 0.1 * math.sqrt(2000)


def test_who_is_alone_with_its_server_is_not_shortened() -> None:
    served = ShardServer(Rule(None), np.ones(SIZE), 0, {}, Counter(), Counter(), limits=PushLimits("a", LAYOUT))
    for seq in (1, 2):
        served.take([Applied("a", 0, seq)], served.clock, np.full(SIZE, 5.0), frozenset("a"))
        served.due(frozenset("a"))
    assert (served.weights == 11.0).all()


def evil(swarm: ServerSwarm) -> tuple[bytes, ...]:
    layout = Layout(swarm.layout.total, swarm.layout.total)
    chunks, _ = vector.encode(WEIGHTS_CODEC, layout, np.full(layout.total, 1e6))
    return tuple(bytes(chunk) for chunk in chunks)


def trained(names: str = "abcde", mode: str = "async") -> tuple[ServerSwarm, str, str, list[str]]:
    """A swarm that has made steps; its server, a liar, and the others."""
    swarm = ServerSwarm(mode, names, robust=True)
    (server,) = swarm.serving()
    liar, *others = [name for name in names if name != server]
    for number in range(5):
        for name in names:
            swarm.step(name, 0.1 + 0.01 * number)
        swarm.settle()
    return swarm, server, liar, others


@pytest.mark.parametrize("term", [1, 2, 1000])
def test_who_does_not_own_a_shard_serves_it_for_nobody(term: int) -> None:
    swarm, server, liar, others = trained()
    victim = others[0]
    before = swarm.nodes[victim].x.copy()
    ballot = swarm.nodes[victim].core._leadership.shards[0].leader
    mark = Applied(victim, swarm.nodes[victim].core._worker.life, 5)
    for message in (
        Weights(0, term, liar, 10**6, (mark,), True, (), evil(swarm)),
        ShardLeader(0, term, liar, True, 0, ()),
        Weights(0, term, liar, 10**6, (mark,), True, (), evil(swarm)),
        Prepare(0, term, 0),
    ):
        for target in (victim, server):
            swarm.perform(target, swarm.nodes[target].core.on_message(liar, message, swarm.now))
    swarm.settle()
    assert swarm.serving() == [server]
    assert swarm.nodes[victim].core._leadership.shards[0].leader[1] == ballot[1]
    for name in swarm.nodes:
        swarm.step(name, 0.1)
    swarm.settle()
    assert not [name for name, node in swarm.nodes.items() if node.waits]
    assert np.abs(swarm.nodes[victim].x - before).max() < 1.0


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("mode", ["async", "hardsync"])
def test_one_members_newest_model_is_not_taken_at_its_word(mode: str, first: bool) -> None:
    """The server dies, and a liar answers the ballot with a model of its own, newer than all others."""
    swarm, server, liar, others = trained(mode=mode)
    before = swarm.nodes[others[0]].x.copy()
    swarm.die(server)
    swarm.all_hear()
    proposer = next(name for name in swarm.nodes if swarm.nodes[name].core._leadership.shards[0].preparing is not None)
    if proposer == liar:
        liar = next(name for name in others if name != proposer)
    term = swarm.nodes[proposer].core._leadership.shards[0].leader[0]
    lie = Promise(0, term, 7, 10**6, (), evil(swarm))
    swarm.lose(proposer, liar)
    if not first:
        swarm.settle()
        assert swarm.serving() == []
    swarm.perform(proposer, swarm.nodes[proposer].core.on_message(liar, lie, swarm.now))
    swarm.settle()
    assert swarm.serving() == [proposer]
    assert np.abs(swarm.weights() - before).max() < 1.0
    assert swarm.nodes[proposer].core.counts["replicas_doubted"] == 1


def test_who_was_away_for_long_takes_the_model_that_two_others_tell() -> None:
    """However far it is from its own, and beside that of a liar."""
    swarm, server, liar, others = trained()
    leadership = swarm.nodes[server].core._leadership
    shard = leadership.shards[0]
    shard.outdated = True
    leadership._reconsider(shard, swarm.now)
    term, best = shard.leader[0], shard.preparing.best
    promises = {
        liar: Promise(0, term, 7, 10**6, (), evil(swarm)),
        others[0]: far(swarm, term, best[0] + 500, 40.0),
        others[1]: far(swarm, term, best[0] + 501, 40.1),
    }
    for name, message in promises.items():
        leadership.on_promise(name, message, swarm.now)
    leadership.on_promise(others[2], replace(promises[liar], clock=0, chunks=()), swarm.now)
    assert shard.server is not None
    assert shard.server.weights[0] == pytest.approx(40.1)


def far(swarm: ServerSwarm, term: int, clock: int, value: float) -> Promise:
    layout = Layout(swarm.layout.total, swarm.layout.total)
    chunks, _ = vector.encode(WEIGHTS_CODEC, layout, np.full(layout.total, value))
    return Promise(0, term, 9, clock, (), chunks)
