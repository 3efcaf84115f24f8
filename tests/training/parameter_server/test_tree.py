"""The tree of aggregators: the same weights as without it, fewer messages at the root, and every push once."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_swarm import ServerSwarm
from test_parameter_server import Storm
from weather import weather_settings

from peerd.training.codecs import vector
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Send
from peerd.training.mode_settings import ModeSettings
from peerd.training.modes import check_options
from peerd.training.parameter_server.aggregator import Aggregator
from peerd.training.parameter_server.optimizer import DIFFERENCE
from peerd.training.parameter_server.shard_server import Rule, ShardServer
from peerd.training.parameter_server.shard_state import Lead, Members, ShardState
from peerd.training.parameter_server.tree import Tree
from peerd.training.parameter_server.tree_node import TreeRelay
from peerd.training.parameter_server.worker import Worker, parts_of
from peerd.transport.errors import UserError
from peerd.transport.messages import Applied, ShardLeader, ShardPush, ShardSum, SumTaken, Weights

NAMES = "abcdefghij"


def tree_of(count: int, arity: int) -> Tree:
    return Tree(arity, tuple(Applied(f"n{index}", index, 0) for index in range(count)))


@settings(deadline=None)
@given(count=st.integers(1, 80), arity=st.integers(2, 8))
def test_everybody_has_one_way_to_the_root(count: int, arity: int) -> None:
    tree = tree_of(count, arity)
    root = "n0"
    assert tree.parent(root) is None
    assert tree.below(root) == {member.worker for member in tree.members} - {root}
    children = Counter(tree.parent(member.worker) for member in tree.members)
    assert all(number <= arity for parent, number in children.items() if parent is not None)
    assert tree.aggregators() == children.keys() - {root, None}
    for member in tree.members[1:]:
        way = [member.worker, *tree.above(member.worker)]
        assert way[-1] == root
        assert all(tree.parent(low) == high for low, high in itertools.pairwise(way))
        assert all(member.worker in tree.below(high) for high in way[1:])
        at = root
        for expected in reversed(way[:-1]):
            at = tree.next_down(at, member.worker)
            assert at == expected
    assert tree.next_down(root, "stranger") == "stranger"
    assert tree.parent("stranger") is None


pushes = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3), st.booleans()), max_size=40)


@settings(deadline=None)
@given(pushes=pushes, arity=st.integers(2, 3))
def test_sums_hold_each_push_once_by_clock_and_in_the_workers_order(
    pushes: list[tuple[int, int, bool]], arity: int
) -> None:
    """Of an aggregator just below the root, whose line is free now and then."""
    tree = tree_of(15, arity)
    below = sorted(tree.below("n1"))
    layout = Layout(1, 1)
    shard = replace(parts_of(layout, 1, gradients=False)[0], clock=0)
    core = Aggregator("n1", shard, (1, "n0"), tree, False, Counter(), np.zeros(1))
    seqs, hops = Counter[str](), Counter[str]()
    wanted: dict[int, int] = {}
    sent: list[ShardSum] = []
    for index, clock, free in pushes:
        worker = below[index % len(below)] if index > 1 else "n1"
        life = int(worker[1:])
        seqs[worker] += 1
        value = 1 << (len(wanted) % 20)
        wanted[clock] = wanted.get(clock, 0) + value
        chunks, _ = vector.encode("float32", layout, np.array([float(value)]))
        if worker == "n1":
            push = ShardPush(0, seqs[worker], life, 0, clock, "float32", True, False, DIFFERENCE, chunks)
            assert core.take_push(push)
            assert not core.take_push(push), "said again"
        else:
            hops[worker] += 1
            part = Applied(worker, life, seqs[worker])
            core.take_sum(ShardSum(0, 1, "n0", hops[worker], clock, "float32", False, (part,), DIFFERENCE, chunks))
        sent += core.due(frozenset())
        if free and sent:
            core.taken(sent[-1].seq)
    if sent:
        core.taken(sent[-1].seq)
    sent += core.due(frozenset())
    assert [each.seq for each in sent] == list(range(1, len(sent) + 1))
    found: dict[int, float] = {}
    for each in sent:
        values = np.zeros(1)
        vector.decode(each.codec, layout, each.chunks, values)
        found[each.clock] = found.get(each.clock, 0) + values[0]
    assert found == wanted
    for worker, last in seqs.items():
        assert [part.seq for each in sent for part in each.parts if part.worker == worker] == list(range(1, last + 1))


@settings(deadline=None)
@given(
    n=st.sampled_from([1, 2, 3, None]), arrivals=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=20)
)
def test_a_sum_counts_as_its_pushes(n: int | None, arrivals: list[tuple[int, int]]) -> None:
    """Staleness, drops and clock are those of the pushes at once: as many updates as they make, of their mean."""
    training = frozenset("abcdef")
    rule = Rule(n, "constant")
    served = ShardServer(rule, np.zeros(1), 0, {}, Counter(), Counter())
    served.pulled |= training
    group, most = rule.group(6), rule.spread(6)
    clock, weights, waiting = 0, 0.0, list[float]()
    staleness, dropped, seqs = Counter[int](), 0, Counter[str]()
    for count, age in arrivals:
        workers = "abcdef"[:count]
        seqs.update(workers)
        made_at = max(0, clock - age)
        marks = [Applied(worker, 0, seqs[worker]) for worker in workers]
        served.take(marks, made_at, np.array([float(count)]), training)
        served.due(training)
        staleness[clock - made_at] += count
        if clock - made_at > most:
            dropped += count
        else:
            waiting += [1.0] * count
        if updates := len(waiting) // group:
            weights += sum(waiting) / len(waiting) * updates
            clock += updates
            waiting = []
        assert served.clock == clock
        assert served.weights[0] == pytest.approx(weights)
    assert served.staleness == staleness
    assert served.counts["pushes_dropped"] == dropped


@pytest.mark.parametrize("mode", ["hardsync", "softsync:1", "async"])
@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_the_weights_are_those_without_a_tree(mode: str, codec: str) -> None:
    swarms = [ServerSwarm(mode, NAMES, codec=codec, servers=2, topology=topology) for topology in ("auto", "adv:2")]
    for step in range(4):
        for swarm in swarms:
            for name in NAMES:
                change = np.random.default_rng([step, ord(name)]).integers(-9, 9, 8).astype(float)
                swarm.step(name, change)
            swarm.settle()
    direct, tree = swarms
    total = sum(swarm.nodes[name].core.counts["pushes"] for swarm in [tree] for name in NAMES)
    assert total == 2 * 4 * len(NAMES)
    if mode == "hardsync":  # otherwise what came together is one update, with and without a tree in another order
        np.testing.assert_allclose(tree.weights(), direct.weights(), atol=1e-4)
    assert sum(node.core.counts["summed"] for node in tree.nodes.values()) > 0
    assert sum(node.core.counts["pushes_dropped"] for node in tree.nodes.values()) == 0


def test_the_root_hears_and_says_as_much_as_its_arity() -> None:
    """In a round of hardsync; without a tree it is as much as there are workers."""
    for topology, most in (("auto", len(NAMES) - 1), ("adv:2", 2), ("adv:3", 3)):
        swarm = ServerSwarm("hardsync", NAMES, topology=topology)
        (root,) = swarm.serving()
        heard: Counter[str] = Counter()
        deliver = swarm.deliver

        def watched(source: str, target: str, swarm: ServerSwarm = swarm, heard: Counter[str] = heard) -> bool:
            queue = swarm.queues.get((source, target))
            if queue and isinstance(queue[0], ShardPush | ShardSum | Weights):
                heard["to", target] += 1  # type: ignore[index]
                heard["from", source] += 1  # type: ignore[index]
            return deliver(source, target)  # noqa: B023

        swarm.deliver = watched  # type: ignore[method-assign]
        for name in NAMES:
            swarm.step(name, 1.0)
        swarm.settle()
        assert swarm.weights()[0] == 1.0
        assert heard["to", root] == heard["from", root] == most  # type: ignore[index]


@pytest.mark.parametrize("messages", range(0, 60, 3))
@pytest.mark.parametrize("mode", ["hardsync", "softsync:1", "async"])
def test_an_aggregator_that_dies_after_any_message_loses_no_push(mode: str, messages: int) -> None:
    swarm = ServerSwarm(mode, NAMES[:8], topology="adv:2")
    (root,) = swarm.serving()
    tree = swarm.nodes[root].core._leadership.shards[0].tree
    assert tree is not None
    victim = max(sorted(tree.aggregators()), key=lambda id: len(tree.below(id)))
    for place, name in enumerate(swarm.nodes):
        swarm.step(name, 8.0 * np.eye(8)[place])
    swarm.dies_after(messages, victim)
    assert not [name for name, node in swarm.nodes.items() if node.waits], "without any timer"
    for _ in range(3):
        for name in swarm.nodes:
            swarm.step(name, 0.0)
        swarm.settle()
    for weight, name in zip(swarm.weights(), NAMES, strict=False):
        assert weight > 0 or name == victim, f"{name}'s push is lost"


def test_an_aggregator_that_restarts_unnoticed_cuts_nobody_off() -> None:
    swarm = ServerSwarm("hardsync", NAMES[:8], topology="adv:2")
    (root,) = swarm.serving()
    tree = swarm.nodes[root].core._leadership.shards[0].tree
    assert tree is not None
    victim = sorted(tree.aggregators())[0]
    swarm.die(victim)
    swarm.join(victim, root)  # nobody was told that it died
    for other in swarm.nodes:
        if other != victim:
            swarm.cut(other, victim)
    swarm.settle()
    for name in swarm.nodes:
        swarm.step(name, 8.0)
    swarm.settle()
    assert not [name for name, node in swarm.nodes.items() if node.waits]
    assert swarm.weights()[0] == 8.0


def test_a_sum_that_comes_before_the_news_of_its_tree_waits_for_it() -> None:
    """The server tells all of a new tree at once; who hears first may push at once."""
    swarm = ServerSwarm("async", "abcd", topology="adv:2")
    (root,) = swarm.serving()
    shard = swarm.nodes[root].core._leadership.shards[0]
    assert shard.tree is not None
    (middle,) = shard.tree.aggregators()
    (leaf,) = shard.tree.below(middle)
    core, term = swarm.nodes[middle].core, shard.leader[0] + 1
    life = swarm.nodes[leaf].core._worker.life
    chunks, _ = vector.encode("float32", Layout(8, 8), np.ones(8))
    early = ShardSum(0, term, root, 1, 0, "float32", False, (Applied(leaf, life, 1),), DIFFERENCE, chunks)
    assert core.on_message(leaf, early, 0.0) == []
    said = core.on_message(root, ShardLeader(0, term, root, True, 2, shard.tree.members), 0.0)
    assert Send(leaf, SumTaken(0, term, root, 1)) in said
    (sent,) = [each.message for each in said if isinstance(each, Send) and each.peer == root]
    assert isinstance(sent, ShardSum)
    assert sent.parts == early.parts


def test_newcomers_are_in_the_tree_before_long() -> None:
    swarm = ServerSwarm("async", "ab", topology="adv:2")
    for name in NAMES[2:]:
        swarm.join(name, "a")
        swarm.all_hear()
        swarm.settle()
    (root,) = swarm.serving()
    tree = swarm.nodes[root].core._leadership.shards[0].tree
    assert tree is not None
    assert len(tree.members) >= 8


class TreeStorm(Storm):
    """The storm without a tree, in one that is three deep."""

    names, topology = "abcdefg", "adv:2"

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "swarm"):
            assert not any(node.core.counts["sums_refused"] for node in self.swarm.nodes.values())


TestTreeStorm = TreeStorm.TestCase
TestTreeStorm.settings = weather_settings(40, 40)


@pytest.mark.parametrize("topology", ["ring", "adv", "adv:1", "adv:65", "adv:x", "tree:2"])
def test_a_bad_topology_of_servers_is_the_users_error(topology: str) -> None:
    with pytest.raises(UserError, match=f"topology '{topology}': a parameter server has auto"):
        check_options("softsync:2", ModeSettings(topology=topology))


def test_an_all_reduce_has_no_aggregators() -> None:
    with pytest.raises(UserError, match="topology 'adv:2': not one of ring"):
        check_options("allreduce", ModeSettings(topology="adv:2"))


def test_an_early_sum_that_cannot_be_is_not_held_against_the_server() -> None:
    """It came before the tree was known, and is looked at when the server says it."""
    layout = Layout(8, 8)
    worker = Worker("b", 1, layout, 1, "float32", np.zeros(8, np.float32))
    said: list[tuple[str, Any]] = []
    relay = TreeRelay(Members("b"), worker, lambda to, message: said.append((to, message)), Counter(), waits=False)
    shard = ShardState(worker.parts[0], leader=(1, "a"), lead=Lead.FOLLOWING)
    chunks = vector.encode("float32", layout, np.ones(8, np.float32))[0]

    def a_sum(sender: str, of: str) -> tuple[str, ShardSum]:
        return sender, ShardSum(0, 1, "a", 1, 0, "float32", False, (Applied(of, 1, 1),), DIFFERENCE, chunks)

    for sender, message in (a_sum("c", "stranger"), a_sum("d", "d")):
        relay.on_sum(shard, sender, message)
    members = tuple(Applied(id, 1, 0) for id in ("a", "b", "e", "c", "d"))
    relay.enter(shard, Tree(2, members))
    assert [to for to, message in said if isinstance(message, SumTaken)] == ["d"]
