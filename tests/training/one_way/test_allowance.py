"""What a member may do to another one's model by pushes: so far and no further, and push-sum loses no mass by it."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from random import Random
from typing import Any

import numpy as np
import pytest
from gossip_swarm import GossipSwarm
from hypothesis import example, given, settings
from hypothesis import strategies as st

from peerd.training.codecs.difference import norm_of_difference
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Apply, Effect, Send, Vector
from peerd.training.flush import FLUSH_REACH
from peerd.training.modes import ModeSettings, parse_mode, push_sum, settings_of
from peerd.training.modes.push_sum import WEIGHT_MAX
from peerd.training.one_way import allowance, core
from peerd.training.one_way.allowance import (
    BUFFERS_MAX,
    FAR,
    LIMIT,
    REACH_MIN,
    STILL_LIMIT,
    WEIGHT_SHARE,
    Allowances,
    Waiting,
    part_within,
)
from peerd.training.one_way.public_copy import Outgoing
from peerd.training.room import room
from peerd.training.scratch import Scratch
from peerd.transport.errors import PeerError
from peerd.transport.messages import Push

SIZE = 40
weights = st.floats(1e-3, 1e6)


class OneStart(GossipSwarm):
    """All start from one model, as swarms do."""

    def first_model(self) -> Vector:
        return self.start


def total_weight(swarm: GossipSwarm) -> float:
    cores = [node.core for node in swarm.nodes.values()]
    return float(sum(core.weight + sum(one.weight for one in core._waiting.values()) for core in cores))


def drift(swarm: GossipSwarm) -> float:
    """As `GossipSwarm.drift`, with what waits."""
    total = np.zeros(swarm.layout.total)
    for node in swarm.nodes.values():
        total += node.core.weight * node.x
        for one in node.core._waiting.values():
            total += one.weight * one.model
    expected = swarm.initial_sum + swarm.injected
    return float(np.abs(total - expected).max() / max(1.0, np.abs(expected).max()))


@given(weights, weights, st.floats(0, 1e30), st.floats(0, 1e6))
@example(1.0, 1.0, 1.1906823508245438e29, 2.3247708170498903e-288)
@example(0.125, 1.0, 1.0646094624577889e29, 1.7739003573586393e-286)
@example(1.0, 1.0, 5e-324, 0.0)  # half of the way rounds to none, which is within any limit
def test_the_part_that_is_taken_keeps_to_the_limit(weight: float, part: float, distance: float, limit: float) -> None:
    taken = part_within(weight, part, distance, limit)
    assert 0 <= taken <= part
    few_digits = 1e-300 + 1e-323 * max(1.0, 1 / weight) * distance  # floats as small as that have
    assert taken / (weight + taken) * distance <= limit * (1 + 1e-9) + few_digits
    if part / (weight + part) * distance <= limit and distance > few_digits:
        assert taken == part


@given(st.lists(st.tuples(st.floats(1e-3, 9), st.floats(-9, 9)), min_size=1, max_size=9))
def test_what_waits_is_the_mass_of_all_that_came(came: list[tuple[float, float]]) -> None:
    waiting = Waiting(0.0, np.zeros(1))
    for weight, value in came:
        waiting.join(weight, np.array([value]))
    assert waiting.weight == pytest.approx(sum(weight for weight, _ in came))
    assert (waiting.weight * waiting.model)[0] == pytest.approx(sum(w * v for w, v in came), abs=1e-9)


@pytest.mark.parametrize("mode", ["gossip-push", "push-sum"])
def test_who_went_is_forgotten_though_its_last_push_came_after_the_news(mode: str) -> None:
    layout = Layout(SIZE, SIZE)
    own = parse_mode(mode)("a", layout, Random(1), settings_of(mode, ModeSettings()), lambda: np.ones(SIZE, np.float32))
    for alive in ("bcd", "cd"):
        own.on_peers(frozenset(alive), 0.0)
    sender = Outgoing(1 << 30, np.ones(SIZE, np.float32), layout, Scratch())
    push = sender.begin(np.full(SIZE, 50.0, np.float32), "float32", {}, finishing=True, back=False)
    assert any(isinstance(effect, Apply) for effect in own.on_message("b", replace(push, weight=0.5), 1.0))
    own.on_peers(frozenset("c"), 100.0)
    allowances = own._allowances  # type: ignore[attr-defined]
    assert "b" not in allowances._left.keys() | allowances._distances.keys()


def test_what_waits_takes_no_more_room_than_links_whoever_pushes() -> None:
    """A liar with many identities had a whole model wait of each."""
    layout, names = Layout(SIZE, SIZE), frozenset(f"liar-{number}" for number in range(40))
    told = settings_of("push-sum", ModeSettings(view=2))
    own: Any = parse_mode("push-sum")("a", layout, Random(1), told, lambda: np.ones(SIZE, np.float32))
    own.on_peers(names, 0.0)
    for number, name in enumerate(sorted(names)):
        sender = Outgoing(1 << 30, np.ones(SIZE, np.float32), layout, Scratch())
        push = sender.begin(np.full(SIZE, 50.0, np.float32), "float32", {}, finishing=False, back=False)
        own.on_message(name, replace(push, weight=0.5), float(number))
    assert 1 < len(own.waiting) <= room(2, SIZE).active + 1
    elsewhere = [weight for weight, _ in own.waiting] + [weight for _, _, weight, _ in own.leaving]
    assert own.weight + sum(elsewhere) == pytest.approx(1 + 40 * 0.5)


@pytest.mark.parametrize("mode", ["gossip-push", "gossip-pull", "push-sum", "noloco"])
def test_what_a_node_has_gone_alone_does_not_widen_what_those_who_come_may_do(mode: str) -> None:
    """It counted as the way to its first exchange, and so did that among all that followed."""
    swarm = OneStart(2, SIZE, "float32", mode=mode, robust=True)
    swarm.peers("a", set())
    own = swarm.nodes["a"].core._allowances
    for _ in range(1000):
        swarm.step("a", 0.01)
    assert own._path > 100 * REACH_MIN, "it has gone far"
    swarm.peers("a", {"b"})
    assert own.of("b", 1.0) == REACH_MIN


@given(st.integers(2, 12), st.floats(0.1, 10))
def test_liars_do_not_fill_each_others_allowances_for_ever(liars: int, path: float) -> None:
    allowances = Allowances(1)
    names = [str(number) for number in range(liars)]
    for name in names:
        allowances.of(name, 0.0)
    allowances.walked(path, published=True)
    dragged = 0.0
    for name in 60 * liars * names:
        left = allowances.of(name, 0.0)
        allowances.moved(name, left)
        dragged += left
    assert dragged <= liars * liars * LIMIT * path * (1 + 1e-9)
    assert dragged > LIMIT * path


def test_who_is_far_from_the_others_has_less_to_say_the_further_it_is() -> None:
    allowances = Allowances(1)
    near = [allowances.of(name, 64.0, 1.0) for name in "abc"]
    assert allowances.of("z", 64.0, FAR) == near[0]
    assert allowances.of("z", 64.0, 10 * FAR) == pytest.approx(near[0] / 10)
    allowances.of("y", 64.0, 1e9)
    assert allowances.of("a", 64.0, 1.0) == near[0], "of five, two that are far are not the others' median"


def test_where_nobody_can_be_compared_ones_own_way_says_what_is_far() -> None:
    for walked in (0.0, 8.0):  # a node that has made no step yet lets itself be brought to where the others are
        reach = max(walked, 64.0 * REACH_MIN)
        near, far = Allowances(1), Allowances(1)
        for allowances in (near, far):
            allowances.walked(walked, published=True)
        full = near.of("z", 64.0, FAR * reach)
        assert full == near.of("y", 64.0, 0.0) > 0
        assert far.of("z", 64.0, 10 * FAR * reach) == pytest.approx(full / 10)
        assert far.of("y", 64.0, 1e9) < 1e-6, "the first was the liar, too"


def trained(seconds: float, path: float, distances: dict[str, float]) -> Allowances:
    """A run that has ended, among peers that were this far away."""
    allowances = Allowances(1)
    allowances.trains(0.0)
    allowances.walked(path, published=True)
    for peer, distance in distances.items():
        allowances.of(peer, 0.0, distance)
    allowances.ended(0.0, seconds)
    return allowances


@given(st.floats(1e-3, 1e3), st.floats(0.1, 1e3), st.lists(st.floats(0, 1e3), min_size=2, max_size=9))
def test_when_a_run_ends_a_peer_may_move_a_model_by_what_brings_it_to_the_others(
    seconds: float, path: float, distances: list[float]
) -> None:
    """Each had sixteen full allowances at once: one liar of eight took a short run of gossip-pull to where it liked."""
    allowances = trained(seconds, path, {str(peer): distance for peer, distance in enumerate(distances)})
    full, usual = LIMIT * path, sorted(distances)[(len(distances) - 1) // 2]
    at_once = max(full, min(FLUSH_REACH * usual, STILL_LIMIT * full))
    assert allowances.of("0", 0.0) == allowances.of("newcomer", 0.0) == pytest.approx(at_once)
    allowances.moved("0", at_once)
    assert allowances.of("0", 0.0) == 0.0


@given(st.floats(1e-3, 1e3), st.floats(0.1, 1e3), st.lists(st.floats(0, 1e3), min_size=1))
def test_time_fills_an_allowance_after_the_end_as_steps_did_and_not_for_ever(
    seconds: float, path: float, pauses: list[float]
) -> None:
    allowances, full, now, taken = trained(seconds, path, {"a": 0.0, "b": 0.0, "c": 0.0}), LIMIT * path, seconds, 0.0
    for pause in pauses:
        now += pause
        allowances.stood(now)
        left = allowances.of("a", 0.0)
        taken += left
        allowances.moved("a", left)
        assert taken == pytest.approx(full + min((STILL_LIMIT - 1) * full, LIMIT * path / seconds * (now - seconds)))
    allowances.trains(now)
    assert allowances.of("newcomer", 0.0) == full, "a new run"


@pytest.mark.parametrize("mode", ["gossip-push", "gossip-pull", "push-sum"])
@pytest.mark.parametrize("steps", [1, 2])
def test_the_way_of_the_first_step_is_of_no_time_that_is_known(mode: str, steps: int) -> None:
    """A run of one step had gone its way in the milliseconds until its end was said: all was filled at once."""
    swarm = OneStart(2, SIZE, "float32", mode=mode, robust=True)
    swarm.everyone_alive()
    for _ in range(steps):
        swarm.now += 1.0
        swarm.step("a", 0.1)
    swarm.now += 0.002
    swarm.step("a", finishing=True)
    own, length = swarm.nodes["a"].core._allowances, 0.1 * SIZE**0.5
    own.moved("b", own.of("b", 0.0))
    own.stood(swarm.now + 0.5)
    assert own.of("b", 0.0) == pytest.approx((steps - 1) * LIMIT * length * 0.5, rel=0.01)


def test_who_goes_and_comes_back_after_the_end_is_not_allowed_again_what_it_has_had() -> None:
    allowances = trained(10.0, 3.0, {"a": 40.0, "b": 40.0, "c": 40.0})
    most = sum(allowances._left.values())
    moved = 0.0
    for _ in range(9):
        left = allowances.of("a", 0.0, 40.0)
        allowances.moved("a", left)
        moved += left
        allowances.keep("bc")
        assert "a" not in allowances._distances, "the dead are no measure of what is usual"
        allowances.keep("abc")
    assert moved <= most / 3
    allowances.trains(11.0)
    allowances.keep("bc")
    assert "a" not in allowances._left, "a new run"


def test_of_those_who_went_after_the_end_a_bounded_number_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowance, "PEERS_MAX", 5)
    allowances = trained(10.0, 3.0, {"a": 1.0, "b": 1.0})
    for number in range(50):
        allowances.of(f"liar-{number}", 0.0, 1.0)
        allowances.keep(["a", "b"])
    assert len(allowances._left) == 5
    assert {"a", "b", "liar-49"} <= allowances._left.keys(), "the oldest is forgotten"


def test_who_has_met_too_few_to_compare_lets_them_all_bring_it_along_when_its_run_ends() -> None:
    for distances in ({"a": 1e9}, {}):
        allowances = trained(10.0, 3.0, distances)
        assert allowances.of("a", 0.0) == STILL_LIMIT * LIMIT * 3.0


@pytest.mark.parametrize("mode", ["gossip-push", "gossip-pull", "push-sum"])
def test_how_far_a_push_comes_from_is_computed_once(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    swarm = OneStart(2, SIZE, "float32", mode=mode, robust=True)
    lengths: list[float] = []

    def seen(a: Vector, b: Vector | None = None) -> float:
        lengths.append(norm_of_difference(a, b))
        return lengths[-1]

    modules = [core, allowance, push_sum]
    for module in modules:
        monkeypatch.setattr(module, "norm_of_difference", seen, raising=False)
    swarm.everyone_alive()
    swarm.settle()
    for name in "ab":
        swarm.step(name, np.linspace(0.0, 0.3, SIZE) if name == "a" else 0.0)
    a, b = (swarm.nodes[name] for name in "ab")
    pushes = [message for message in swarm.queues["a", "b"] if isinstance(message, Push)]
    if mode == "gossip-pull":
        swarm.deliver("b", "a")
        pushes = [message for message in swarm.queues["a", "b"] if isinstance(message, Push)]
    assert pushes, "a node that has moved"
    apart = float(np.linalg.norm(a.x - b.x))
    lengths.clear()
    while swarm.queues["a", "b"]:
        swarm.deliver("a", "b")
    assert [round(length / apart, 2) for length in lengths].count(1.0) == 1, lengths


def is_push(effect: Effect) -> bool:
    return isinstance(effect, Send) and isinstance(effect.message, Push)


@settings(deadline=None, max_examples=40)
@given(
    lies=st.lists(st.tuples(st.floats(0, WEIGHT_MAX), st.floats(-1e17, 1e17), st.integers(0, 3)), min_size=1),
    move=st.floats(0, 0.5),
)  # fmt: skip
@example(lies=[(0.0, 0.0, 0)] * 4 + [(1.0, 0.0, 0)], move=0.0)  # it is answered by a push
def test_a_liars_pushes_move_a_model_by_no_more_than_its_own_steps_allow(
    lies: list[tuple[float, float, int]], move: float
) -> None:
    """Whatever its weight and its values: b's model goes from where it was by a multiple of b's own path, in all."""
    swarm = OneStart(2, SIZE, "float32", mode="push-sum", robust=True, dtype="float32")
    swarm.everyone_alive()
    victim = swarm.nodes["b"]
    norm = float(np.linalg.norm(victim.x))
    dragged, path, refused = 0.0, 0.0, 0
    total = 0.0
    for weight, value, steps in lies:
        for _ in range(steps):
            swarm.step("b", np.full(SIZE, move, np.float32))
            path += move * SIZE**0.5
        while swarm.deliver("b", "a"):
            pass
        swarm.nodes["a"].x = np.full(SIZE, value, np.float32)
        swarm.step("a", np.zeros(SIZE, np.float32))
        while queue := swarm.queues["a", "b"]:
            message = queue.popleft()
            total += weight
            if isinstance(message, Push):
                message = replace(message, weight=total)
            try:
                effects = victim.core.on_message("a", message, swarm.now)
            except PeerError:
                refused += 1
                total -= weight
                continue
            merged = takewhile(lambda effect: not is_push(effect), effects)  # its own, later, is rounded
            dragged += sum(float(np.linalg.norm(e.correction)) for e in merged if isinstance(e, Apply))
            swarm.perform("b", effects)
        assert victim.core.weight <= WEIGHT_SHARE * 2 + 1e-6
        assert np.isfinite(victim.x).all()
        full = LIMIT * (1 + 2 * swarm.settings.view) * path + norm * REACH_MIN  # what an allowance begins with
        assert dragged <= (LIMIT * path + full) * 1.01 + 1e-3


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), codec=st.sampled_from(["float32", "sign"]), count=st.integers(2, 5))
def test_what_is_held_back_is_late_and_not_lost(seed: int, codec: str, count: int) -> None:
    """Members of very unlike speed, so that limits are met: the mean is kept, and weight, to the end."""
    swarm = OneStart(count, SIZE, codec, mode="push-sum", robust=True, seed=seed)
    swarm.everyone_alive()
    rng = np.random.default_rng(seed)
    names = sorted(swarm.nodes)
    for _ in range(60):
        for place, name in enumerate(names):
            if rng.random() < 0.3**place:
                swarm.step(name, rng.normal(size=SIZE))
        for link in swarm.waiting():
            if rng.random() < 0.7:
                swarm.deliver(*link)
    swarm.quiesce()
    assert abs(total_weight(swarm) - count) < 1e-9
    assert drift(swarm) < 1e-9


@pytest.mark.parametrize("mode", ["push-sum", "gossip-push", "gossip-pull"])
def test_a_swarm_ends_with_one_model_within_its_limits(mode: str) -> None:
    swarm = OneStart(5, SIZE, "sign", mode=mode, robust=True, seed=3)
    swarm.everyone_alive()
    rng = np.random.default_rng(3)
    for _ in range(100):
        for name in swarm.nodes:
            swarm.step(name, 0.05 * rng.normal(size=SIZE) - 0.01)
            swarm.settle()
    late = sum(node.core.counts["pushes_late"] + node.core.counts["pushes_shortened"] for node in swarm.nodes.values())
    pushes = sum(node.core.counts["exchanges"] for node in swarm.nodes.values())
    assert late < 0.1 * pushes, "of an honest swarm hardly any"
    swarm.finish(*swarm.nodes)
    swarm.quiesce()
    assert swarm.spread() < 0.01
    assert all(node.proceeded == [False, True] for node in swarm.nodes.values())
    if mode == "push-sum":
        assert drift(swarm) < 1e-9


@settings(deadline=None, max_examples=40)
@given(
    mode=st.sampled_from(["gossip-push", "gossip-pull"]),
    lies=st.lists(st.tuples(st.floats(-1e17, 1e17), st.integers(0, 3)), min_size=1), move=st.floats(0, 0.5),
)  # fmt: skip
def test_a_liars_model_moves_another_by_no_more_than_its_own_steps_allow(
    mode: str, lies: list[tuple[float, int]], move: float
) -> None:
    """A fourth of the values are float buffers: these go a fourth of their own length at most, for each push."""
    swarm = OneStart(2, SIZE, "float32", mode=mode, buffers=SIZE // 4, robust=True, dtype="float32")
    swarm.everyone_alive()
    victim, cut = swarm.nodes["b"], swarm.layout.parameters
    norm = float(np.linalg.norm(victim.x[:cut]))
    dragged, path = 0.0, 0.0
    for value, steps in lies:
        for _ in range(steps):
            swarm.step("b", np.full(SIZE, move, np.float32))
            path += move * cut**0.5
        swarm.nodes["a"].x = np.full(SIZE, value, np.float32)
        swarm.step("a", np.zeros(SIZE, np.float32))
        while swarm.waiting():
            swarm.deliver("b", "a")
            if not (queue := swarm.queues["a", "b"]):
                continue
            effects = victim.core.on_message("a", queue.popleft(), swarm.now)
            for effect in effects:
                if isinstance(effect, Apply):
                    dragged += float(np.linalg.norm(effect.correction[:cut]))
                    buffers = np.linalg.norm(victim.x[cut:])
                    assert np.linalg.norm(effect.correction[cut:]) <= 1.01 * BUFFERS_MAX * buffers + 1e-6
            swarm.perform("b", effects)
        full = LIMIT * (1 + 2 * swarm.settings.view) * path + norm * REACH_MIN
        assert dragged <= (LIMIT * path + full) * 1.01 + 1e-3
