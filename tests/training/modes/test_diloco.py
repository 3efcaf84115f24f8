"""DiLoCo in fragments: the plain recurrence, the bytes of a round, and nothing touched out of turn."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mode_swarm import ModeSwarm
from round_swarm import formed

from peerd.training.batch_sizes import Work, shares
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector
from peerd.training.mode_settings import ModeSettings
from peerd.training.modes import check_options
from peerd.training.modes.diloco import OUTER_LR, OUTER_MOMENTUM
from peerd.transport.errors import UserError
from peerd.transport.messages import RoundPieces

SIZE = 40


@given(
    fragments=st.integers(1, 5), each=st.integers(1, 3), count=st.integers(1, 4), rounds=st.integers(1, 12),
    outer=st.sampled_from([(OUTER_LR, OUTER_MOMENTUM), (1.0, 0.0), (0.5, 0.3)]), seed=st.integers(0, 2**16),
    samples=st.lists(st.sampled_from([0.0, 8.0, 16.0, 64.0]), min_size=4, max_size=4),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_every_fragment_follows_the_outer_step_at_its_own_rounds(
    fragments: int, each: int, count: int, rounds: int, outer: tuple[float, float], seed: int, samples: list[float]
) -> None:
    """Fragment r mod P at round r: agreed -= lr (g + mu m) with its own g and m, from the model that all begin with.

    Where g turns back m begins anew. The mean in g is weighted by the samples of a step. Float buffers become the plain
    mean.
    """
    names = "abcd"[:count]
    every = max(2, fragments * each)  # 1 stands for the default
    lr, mu = outer
    told = {"outer_lr": str(lr), "outer_momentum": str(mu)}
    swarm = formed(names, SIZE, mode=f"diloco:{fragments}", overlap="blocking", every=every, seed=seed, **told)
    models = {name: swarm.nodes[name].x.copy() for name in names}
    agreed, momentum = models["a"].copy(), np.zeros(SIZE)
    sizes = samples[:count]
    weights = shares([Work(size, 2) for size in sizes]) or (1.0,) * count
    for name, size in zip(names, sizes, strict=True):
        swarm.nodes[name].samples = size
    for number in range(1, rounds + 1):
        for _ in range(every // fragments):
            for name in names:
                move = swarm.integers()
                models[name] += move
                swarm.step(name, move)
        swarm.settle()
        part = number % fragments
        where = slice(SIZE * part // fragments, SIZE * (part + 1) // fragments)
        mean = np.average([models[name] for name in names], axis=0, weights=weights)
        plain = np.mean([models[name] for name in names], axis=0)
        gradient = agreed[where] - mean[where]
        parameters = np.arange(SIZE)[where] < swarm.layout.parameters
        if gradient[parameters] @ momentum[where][parameters] < 0:
            momentum[where] = 0
        momentum[where] = mu * momentum[where] + gradient
        agreed[where] -= lr * (gradient + mu * momentum[where])
        agreed[where][~parameters] = plain[where][~parameters]
        for name in names:
            models[name][where] = agreed[where]
            before = swarm.nodes[name].x
            np.testing.assert_allclose(before, models[name], rtol=1e-4, atol=1.0)
            models[name] = before.copy()  # what was rounded is the same from here on


@pytest.mark.parametrize("mode", ["diloco", "diloco:2"])
def test_momentum_does_not_carry_a_short_run_away_from_what_its_members_have_found(mode: str) -> None:
    """Each round they come .9 of the way to where all want to be; the momentum of that went on to .47 of it beyond."""
    swarm = formed("abc", SIZE, mode=mode, overlap="blocking", every=2)
    wanted, parameters = swarm.nodes["a"].x - swarm.integers(), swarm.layout.parameters
    left = [np.inf]
    for _ in range(8):
        for _ in range(2):
            for name, node in swarm.nodes.items():
                swarm.step(name, np.float32(0.68) * (wanted - node.x))
            swarm.settle()
        left.append(float(np.linalg.norm((swarm.nodes["a"].x - wanted)[:parameters])))
    assert all(later < before for before, later in pairwise(left) if before > 1), left
    assert swarm.nodes["a"].core.counts["momentum_restarts"] > 0


def test_a_round_costs_a_fragment_and_leaves_the_others_progress() -> None:
    swarm = formed("abc", SIZE, mode="diloco:4", every=8)
    sent: dict[int, int] = {}
    deliver = swarm.deliver

    def watched(source: str, target: str) -> bool:
        queue = swarm.queues.get((source, target))
        if queue and isinstance(queue[0], RoundPieces):
            sent[queue[0].round] = sent.get(queue[0].round, 0) + sum(map(len, queue[0].chunks))
        return deliver(source, target)

    swarm.deliver = watched  # type: ignore[method-assign]
    for _ in range(10):
        for _ in range(2):
            for name in "abc":
                swarm.step(name)
        before = {name: node.x.copy() for name, node in swarm.nodes.items()}
        rounds = len(swarm.nodes["a"].rounds)
        swarm.settle()
        number = max(swarm.nodes["a"].rounds)
        if len(swarm.nodes["a"].rounds) == rounds:
            continue
        others = np.ones(SIZE, bool)
        others[10 * (number % 4) : 10 * (number % 4) + 10] = False
        for name, node in swarm.nodes.items():
            assert (node.x[others] == before[name][others]).all(), "out of turn"
            assert (node.x[~others] != before[name][~others]).any()
    assert len(sent) >= 8
    whole = 2 * 2 * 4 * (SIZE + SIZE // 4)  # a ring of three, and the buffers' second half
    assert all(size < whole / 2 for size in sent.values()), "a fourth, and what frames cost"


@pytest.mark.one_run_in(3)
def test_a_lossy_codec_loses_nothing_of_any_fragment_for_good() -> None:
    swarm = formed("abc", SIZE, mode="diloco:4", codec="sign", every=4, outer_momentum="0")
    still = np.zeros(SIZE)
    for _ in range(4):
        for name in "abc":
            swarm.step(name, still)
        swarm.settle()
    before = [node.x.copy() for node in swarm.nodes.values()]
    assert all((x == before[0]).all() for x in before), "after a whole round"
    for name in "abc":
        swarm.step(name, swarm.integers())
    progress = np.mean([node.x for node in swarm.nodes.values()], axis=0) - before[0]
    wanted = before[0] + OUTER_LR * progress
    buffers = slice(swarm.layout.parameters, None)
    wanted[buffers] = (before[0] + progress)[buffers]
    for _ in range(600):
        for name in "abc":
            swarm.step(name, still)
        swarm.settle()
    for node in swarm.nodes.values():
        np.testing.assert_allclose(node.x, wanted, atol=1.0)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 9))
def test_parts_of_a_layout_are_all_of_it_in_order(parameters: int, buffers: int, count: int) -> None:
    layout = Layout(parameters, parameters + buffers)
    parts = layout.cut(count)
    places: Vector = np.concatenate([np.arange(layout.total)[where] for where, _ in parts])
    assert (places == np.arange(layout.total)).all()
    assert sum(part.parameters for _, part in parts) == parameters
    sizes = [part.total for _, part in parts]
    assert sizes == [where.stop - where.start for where, _ in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("mode", "overlap", "topology", "line"),
    [
        ("diloco:0", "delayed", "auto", "--mode diloco:0: with an argument it is"),
        ("diloco:x", "delayed", "auto", "--mode diloco:x: "),
        ("diloco:2:3", "delayed", "auto", "--mode diloco:2:3: "),
        ("diloco:9999", "delayed", "auto", "P from 1 to 1024"),
        ("diloco:2", "hpsgd", "auto", "overlap hpsgd: not with diloco:P"),
        ("diloco:2", "never", "auto", "overlap: 'never' is not one of"),
        ("diloco:2", "delayed", "star", "topology 'star': not one of"),
    ],
)
def test_what_does_not_fit_is_one_line(mode: str, overlap: str, topology: str, line: str) -> None:
    with pytest.raises(UserError) as failure:
        check_options(mode, ModeSettings(overlap=overlap, topology=topology))
    assert line in str(failure.value)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("mode", ["diloco", "diloco:3"])
def test_float_buffers_take_the_mean_with_no_momentum(mode: str) -> None:
    """A variance that falls would go on falling, below zero: Nesterov's step goes 1.33 times as far, and further."""
    swarm = ModeSwarm(mode, "abc", 40, buffers=10, dtype="float32", every=3, overlap="blocking")
    for node in swarm.nodes.values():
        node.x[30:] = 1.0
    swarm.all_hear()
    swarm.settle()
    for _ in range(60):
        for name, node in swarm.nodes.items():
            move = np.zeros(40, np.float32)
            move[30:] = -0.2 * node.x[30:]
            swarm.step(name, move)
        swarm.settle()
        assert all((node.x[30:] > 0).all() for node in swarm.nodes.values())


@pytest.mark.parametrize("mode", ["diloco", "diloco:2"])
def test_a_round_of_whole_models_begins_the_momentum_anew(mode: str) -> None:
    """A newcomer has none: with what the others had before it came, all would go on from one model to several."""
    swarm = formed("ab", SIZE, mode=mode, overlap="blocking", every=4)
    move = np.zeros(SIZE)
    move[: swarm.layout.parameters] = 100.0

    def rounds(count: int, move: Vector) -> None:
        wanted = {name: len(node.rounds) + count for name, node in swarm.nodes.items()}
        while any(len(swarm.nodes[name].rounds) < wanted[name] for name in wanted):
            for name in sorted(swarm.nodes):
                swarm.step(name, move)
            swarm.settle()

    rounds(6, move)
    swarm.restart("c", swarm.nodes["a"].x)
    swarm.all_hear()
    swarm.settle()
    still = np.zeros(SIZE)
    while not swarm.nodes["c"].rounds:
        rounds(1, still)
    before = swarm.nodes["a"].x.copy()
    assert all((node.x == before).all() for node in swarm.nodes.values()), "the round of whole models"
    assert all(node.core._momentum is None for node in swarm.nodes.values())
    rounds(4, still)
    assert all((node.x == before).all() for node in swarm.nodes.values()), "nobody has moved since"


@pytest.mark.parametrize("mode", ["diloco", "noloco"])
@pytest.mark.parametrize(
    ("told", "line"),
    [
        ({"outer_lr": "0"}, "outer_lr: 0 must be above 0"),
        ({"outer_lr": "nan"}, "outer_lr: 'nan' is neither a number nor auto"),
        ({"outer_lr": "fast"}, "outer_lr: 'fast' is neither a number nor auto"),
        ({"outer_momentum": "1"}, "outer_momentum: 1 must be from 0 to below 1"),
        ({"outer_momentum": "-0.1"}, "outer_momentum: -0.1 must be from 0 to below 1"),
    ],
)
def test_an_outer_step_that_makes_no_sense_is_one_line(mode: str, told: dict[str, str], line: str) -> None:
    with pytest.raises(UserError, match=line):
        check_options(mode, ModeSettings(**told))  # type: ignore[arg-type]
