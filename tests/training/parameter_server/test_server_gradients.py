"""Workers push gradients: hardsync is synchronous SGD, Rudra's rates, and an optimizer that outlives its server."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server_swarm import GradientSwarm
from test_server_optimizer import torchs

from peerd.training.codecs import vector
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector
from peerd.training.mode_settings import ModeSettings
from peerd.training.modes import check_options, parse_mode
from peerd.training.parameter_server.limits import PushLimits
from peerd.training.parameter_server.optimizer import DIFFERENCE, AdamW, Optimizer, Sgd, parse_optimizer
from peerd.training.parameter_server.shard_server import Rule, ShardServer
from peerd.training.parameter_server.worker import Worker
from peerd.transport.errors import PeerError, UserError
from peerd.transport.messages import Applied, Promise, ShardPush, Weights

OPTIMIZERS = ["sgd", "sgd:momentum=0.9,nesterov=true,weight_decay=0.01", "adamw:beta2=0.99"]
SIZE = 8
WIRE = 1e-6  # what float32 on the wire drops


class Torch:
    """The steps that one trainer of torch's would make."""

    def __init__(self, optimizer: str, start: Vector) -> None:
        self.parameter = torch.nn.Parameter(torch.tensor(start))
        self.optimizer: Any = torchs(parse_optimizer(optimizer), self.parameter)

    def step(self, gradient: Vector, rate: float) -> Vector:
        self.optimizer.param_groups[0]["lr"] = rate
        self.parameter.grad = torch.tensor(gradient)
        self.optimizer.step()
        return self.parameter.detach().numpy()


def hessian(name: str) -> Vector:
    return np.random.default_rng(ord(name)).uniform(0.5, 2.0, SIZE)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("how", [{}, {"servers": 3}, {"topology": "adv:2"}], ids=["one", "shards", "tree"])
def test_hardsync_is_the_optimizers_own_step_of_the_mean_gradient(optimizer: str, how: dict[str, Any]) -> None:
    """At each worker's own weights, and with a schedule."""
    names = "abcde"
    swarm = GradientSwarm("hardsync", names, optimizer, size=SIZE, **how)
    reference = Torch(optimizer, swarm.start)
    for number in range(12):
        rate, model = 0.1 / (1 + number), reference.parameter.detach().numpy().copy()
        for name in names:
            swarm.push(name, hessian(name) * swarm.nodes[name].x, rate)
        swarm.settle()
        expected = reference.step(np.mean([hessian(name) * model for name in names], axis=0), rate)
        for node in swarm.nodes.values():
            assert not node.waits
            np.testing.assert_allclose(node.x, expected, rtol=WIRE, atol=WIRE)
    assert sum((node.core.staleness for node in swarm.nodes.values()), Counter()).keys() == {0}


ENDS = (2, 5, 8)  # of the swarm's tensors
"""With two servers the second one is cut."""
tensors_used = st.lists(st.sampled_from(ENDS), unique=True)


@settings(deadline=None, max_examples=40)
@given(
    steps=st.lists(st.tuples(*[tensors_used] * 3), min_size=1, max_size=6),
    how=st.sampled_from([{}, {"servers": 2}, {"topology": "adv:2"}, {"codec": "sign"}]),
)
def test_a_tensor_that_nobody_has_a_gradient_for_stays_as_it_is(
    steps: list[tuple[list[int], ...]], how: dict[str, Any]
) -> None:
    """Momentum and weight decay do not move it: torch's optimizers pass by what has no gradient."""
    optimizer = "sgd:momentum=0.9,weight_decay=0.1"
    swarm = GradientSwarm("hardsync", "abc", optimizer, size=SIZE, **how)
    parts = [slice(begin, end) for begin, end in pairwise((0, *ENDS))]
    parameters = [torch.nn.Parameter(torch.tensor(swarm.start[part])) for part in parts]
    reference = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)
    for number, of_all in enumerate(steps):
        before = {name: node.x.copy() for name, node in swarm.nodes.items()}
        total = np.zeros(SIZE)
        for place, (name, used) in enumerate(zip("abc", of_all, strict=True)):
            flags = [float(end in used) for end in ENDS]
            mine = gradient(10 * number + place) * np.repeat(flags, np.diff((0, *ENDS)))
            total += mine
            swarm.push(name, mine, 0.1, flags=flags)
        swarm.settle()
        used_by_any = set().union(*of_all)
        for end, part, parameter in zip(ENDS, parts, parameters, strict=True):
            parameter.grad = torch.tensor(total[part] / 3) if end in used_by_any else None
            if end not in used_by_any:
                assert all(np.allclose(node.x[part], before[name][part]) for name, node in swarm.nodes.items())
        reference.step()
        expected = np.concatenate([parameter.detach().numpy() for parameter in parameters])
        for node in swarm.nodes.values():
            assert how.get("codec") or np.allclose(node.x, expected, rtol=WIRE, atol=WIRE)


@pytest.mark.parametrize("topology", ["auto", "adv:2"])
def test_no_flag_that_a_liar_says_hides_another_members_gradient(topology: str) -> None:
    swarm = GradientSwarm("hardsync", "abcd", "sgd", size=SIZE, topology=topology)
    for name in "abcd":
        swarm.push(name, float(name != "d"), 0.1, flags=[-3.0, -1e30, 2.0] if name == "d" else None)
    swarm.settle()
    for node in swarm.nodes.values():
        np.testing.assert_allclose(node.x, swarm.start - 0.075, rtol=WIRE, atol=WIRE)


def test_a_servers_clip_is_torchs_clip_grad_norm() -> None:
    swarm = GradientSwarm("hardsync", "ab", "adamw:clip=0.5", size=SIZE)
    reference = Torch("adamw", swarm.start)
    for number in range(6):
        gradients = [(1 if number % 2 else 0.1) * gradient(10 * number + place) for place in range(2)]
        for name, mine in zip("ab", gradients, strict=True):
            swarm.push(name, mine, 0.1)
        swarm.settle()
        mean = torch.tensor(np.mean(gradients, axis=0))
        mean *= min(1.0, 0.5 / (float(mean.norm()) + 1e-6))
        expected = reference.step(mean.numpy(), 0.1)
        for node in swarm.nodes.values():
            np.testing.assert_allclose(node.x, expected, rtol=WIRE, atol=WIRE)


@pytest.mark.parametrize("messages", range(0, 40, 3))
@pytest.mark.parametrize("mode", ["hardsync", "async"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS[1:])
def test_a_server_that_dies_at_any_message_takes_nothing_of_the_optimizer_along(
    mode: str, messages: int, optimizer: str
) -> None:
    """All push one gradient, so that whoever is in a step, the steps are the same."""
    swarm = GradientSwarm(mode, "abcd", optimizer, size=SIZE, servers=2 if mode == "hardsync" else 1)
    reference = Torch(optimizer, swarm.start)

    def all_push(number: int) -> None:
        for name in sorted(swarm.nodes):
            swarm.push(name, gradient(number), 0.1)

    all_push(0)
    swarm.settle()
    all_push(1)
    (victim,) = {swarm.serving(0)[0]}
    swarm.dies_after(messages, victim)
    assert not [name for name, node in swarm.nodes.items() if node.waits], "without any timer"
    all_push(2)
    swarm.settle()
    if mode == "hardsync":
        for number in range(3):
            expected = reference.step(gradient(number), 0.1)
        for node in swarm.nodes.values():
            np.testing.assert_allclose(node.x, expected, rtol=WIRE, atol=WIRE)
    else:
        check_that_clock_state_and_weights_go_together(swarm, optimizer)


def gradient(number: int) -> Vector:
    return np.random.default_rng(number).normal(size=SIZE)


def check_that_clock_state_and_weights_go_together(swarm: GradientSwarm, optimizer: str) -> None:
    """One more step of the server's is one of torch's that knows its weights and state, and nothing is zeros again."""
    served = swarm.server()
    state = served.held[SIZE:].reshape(-1, SIZE)
    assert served.clock >= 3 * 3
    assert served.optimizer is not None
    assert served.optimizer.is_possible(state)
    assert (np.abs(state) > 0).all()


def test_a_newcomer_and_a_codec_with_loss_keep_all_alike() -> None:
    swarm = GradientSwarm("hardsync", "abc", "adamw", size=50, buffers=6, codec="sign", servers=2)
    for number in range(6):
        if number == 3:
            swarm.join("d", "a")
            swarm.all_hear()
            swarm.settle()
        for place, name in enumerate(sorted(swarm.nodes)):
            swarm.nodes[name].x[44:] += place  # the forward pass of a batch norm
            swarm.push(name, np.random.default_rng([number, place]).normal(size=44), 0.01)
        swarm.settle()
        models = [node.x for node in swarm.nodes.values()]
        for model in models:
            np.testing.assert_allclose(model, models[0], rtol=WIRE, atol=WIRE)
    moved = 3 * 1.0 + 3 * 1.5
    np.testing.assert_allclose(models[0][44:], swarm.start[44:] + moved, rtol=WIRE, atol=WIRE)
    swarm.end()
    assert len({node.x.astype(np.float32).tobytes() for node in swarm.nodes.values()}) == 1


@given(
    n=st.integers(1, 8),
    rate=st.sampled_from(["staleness", "mean", "constant"]),
    pushes=st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(-8, 8)), max_size=60),
)
def test_sgd_follows_rudras_rule(n: int, rate: str, pushes: list[tuple[str, int]]) -> None:
    """w -= mean(alpha(tau) g) over the c gradients of an update; alpha0 / max(1, tau), alpha0 / n or alpha0."""
    training = frozenset("abcdef")
    served = served_by(Sgd(), Rule(n, rate))
    pulled, seqs = Counter[str](), Counter[str]()
    weights, clock, waiting = Fraction(0), 0, list[Fraction]()
    for worker, slope in pushes:
        seqs[worker] += 1
        mark = Applied(worker, 0, seqs[worker])
        served.take([mark], pulled[worker], np.array([float(slope)]), training, 0.5)
        served.due(training)
        tau = clock - pulled[worker]
        if tau <= 2 * n:
            divisor = {"staleness": max(1, tau), "mean": n, "constant": 1}[rate]
            waiting.append(Fraction(slope, 2 * divisor))
        if waiting and len(waiting) == max(1, 6 // n):
            weights, clock, waiting = weights - sum(waiting, Fraction(0)) / len(waiting), clock + 1, []
        pulled[worker] = clock
        assert served.clock == clock
        assert abs(served.weights[0] - float(weights)) < 1e-9


def served_by(optimizer: Optimizer, rule: Rule, size: int = 1, **settings: Any) -> ShardServer:
    held = np.zeros(size * (1 + optimizer.rows))
    return ShardServer(rule, held, 0, {}, Counter(), Counter(), optimizer=optimizer, parameters=size, **settings)


def test_an_optimizer_that_does_not_care_how_long_a_gradient_is_heeds_its_staleness() -> None:
    moved = []
    for rule in (Rule(None, "staleness"), Rule(None, "constant")):
        served = served_by(AdamW(weight_decay=0.0), rule)
        served.clock = 3
        served.take([Applied("a", 0, 1)], 0, np.ones(1), frozenset("abcd"), 0.1)
        served.due(frozenset("abcd"))
        moved.append(float(served.weights[0]))
    assert moved[1] == pytest.approx(3 * moved[0])


@pytest.mark.parametrize(("workers", "batch", "samples"), [(4, 32, 8), (4, 32, 32), (1, 128, 32)])
def test_the_square_root_rule(workers: int, batch: int, samples: int) -> None:
    """alpha0 sqrt(mu lambda / B)."""
    swarm = GradientSwarm(f"hardsync:batch={batch}", "abcd"[:workers], "sgd", size=SIZE)
    for name in swarm.nodes:
        swarm.push(name, 1.0, 0.1, samples)
    swarm.settle()
    rate = 0.1 * math.sqrt(samples * workers / batch)
    np.testing.assert_allclose(swarm.weights(), swarm.start - rate, rtol=WIRE, atol=WIRE)


def test_backup_workers() -> None:
    """A round goes on without the last one, whose gradient is dropped, and who is in the next round."""
    swarm = GradientSwarm("hardsync:backup=1", "abcd", "sgd", size=SIZE)
    for number, late in enumerate("dadb"):
        for name in sorted(swarm.nodes.keys() - {late}):
            swarm.push(name, 1.0, 0.1)
        swarm.settle()
        assert not any(node.waits for node in swarm.nodes.values())
        swarm.push(late, 100.0, 0.1)
        swarm.settle()
        assert not any(node.waits for node in swarm.nodes.values()), "answered at once"
        np.testing.assert_allclose(swarm.weights(), swarm.start - 0.1 * (number + 1), rtol=WIRE, atol=WIRE)
        assert sum(node.core.counts["pushes_dropped"] for node in swarm.nodes.values()) == number + 1


@pytest.mark.parametrize("topology", ["auto", "adv:2"])
def test_a_gradient_that_is_not_finite_is_not_counted(topology: str) -> None:
    """Nor is it a zero: the mean is that of the others."""
    swarm = GradientSwarm("hardsync", "abcd", "sgd", size=SIZE, topology=topology)
    for value in (np.nan, 3.0):
        swarm.push("a", value, 0.1)
        for name in "bcd":
            swarm.push(name, 3.0, 0.1)
        swarm.settle()
        assert not any(node.waits for node in swarm.nodes.values())
    np.testing.assert_allclose(swarm.weights(), swarm.start - 0.6, rtol=WIRE, atol=WIRE)


@pytest.mark.parametrize("ends", [False, True])
def test_hardsync_takes_no_late_gradient_whoever_has_ended(*, ends: bool) -> None:
    swarm = GradientSwarm("hardsync:backup=1", "abcd", "sgd", servers=1)
    if ends:
        swarm.finish("d")
        swarm.settle()
    before, names = swarm.weights().copy(), "ab" if ends else "abd"
    for _ in range(6):
        for name in names:
            swarm.push(name, 1.0, 0.1)
        swarm.settle()
        swarm.push("c", 100.0, 0.1)
        swarm.settle()
        assert not swarm.nodes["c"].waits, "it is answered at once"
    assert swarm.server().counts["pushes_dropped"] == 6
    np.testing.assert_allclose(swarm.weights(), before - 0.6)


@pytest.mark.parametrize("gradients", [True, False])
def test_what_was_dropped_before_outlives_a_push_that_is_not_finite(*, gradients: bool) -> None:
    worker = Worker("a", 1, Layout(8, 8), 2, "sign", np.zeros(8), Sgd() if gradients else None)
    gradient = np.arange(8.0)

    def pushes(values: Vector, now: float) -> bool:
        return worker.differentiate(values, 0.1, now) if gradients else worker.step(values, now)

    assert pushes(gradient, 0.0)
    assert not pushes(np.full(8, np.nan), 1.0)
    pushes(gradient, 2.0)
    counted = np.zeros(8)
    for part in worker.parts:
        for push in (part.pushes[0], part.pushes[2]):
            arrives = np.empty(4)
            vector.decode(push.codec, part.layout, push.chunks, arrives)
            counted[part.where] += arrives
    np.testing.assert_allclose(counted + worker._residual, 2 * gradient, rtol=1e-6)


@settings(deadline=None, max_examples=15)
@given(data=st.data(), workers=st.integers(2, 30), jitter=st.sampled_from([0.02, 0.05, 0.2]), seed=st.integers(0, 99))
def test_mean_staleness_is_that_of_the_law(data: st.DataObject, workers: int, jitter: float, seed: int) -> None:
    """Rudra: (lambda - 1) / c for c = floor(lambda / n) gradients in one update, in the steady state.

    Where n divides lambda; else c is less than their share, and more of them are too stale to count.
    """
    n = data.draw(st.sampled_from([n for n in range(1, workers + 1) if workers % n == 0]))
    names = [f"w{index}" for index in range(workers)]
    training, rng = frozenset(names), np.random.default_rng(seed)
    served = served_by(Sgd(), Rule(n))
    due = [(float(rng.uniform(0.5, 1.5)), name, 0) for name in names]
    heapq.heapify(due)
    seqs = Counter[str]()
    for number in range(workers * 110):
        if number == workers * 10:
            served.staleness.clear()
        at, name, clock = heapq.heappop(due)
        seqs[name] += 1
        served.take([Applied(name, 0, seqs[name])], clock, np.zeros(1), training, 0.1)
        served.due(training)
        heapq.heappush(due, (at + float(rng.lognormal(0.0, jitter)), name, served.clock))
    mean = sum(tau * count for tau, count in served.staleness.items()) / served.staleness.total()
    assert mean == pytest.approx((workers - 1) / (workers // n), rel=0.01)


# ---------------------------------------------------------------- what a peer may say


def test_what_no_learning_rate_is_is_refused() -> None:
    swarm = GradientSwarm("async", "ab", "sgd", size=SIZE)
    (server,) = swarm.serving()
    chunks, _ = vector.encode("float32", swarm.layout.gradients, np.zeros(swarm.layout.gradients.total))
    push = ShardPush(0, 1, 1, 1, 0, "float32", True, False, 0.1, chunks)
    for rate in (math.nan, math.inf, -0.1, 1e9, DIFFERENCE):
        with pytest.raises(PeerError):
            swarm.nodes[server].core.on_message("b", replace(push, rate=rate), 0.0)
    swarm.nodes[server].core.on_message("b", push, 0.0)


def test_a_state_that_no_gradients_make_is_refused() -> None:
    swarm = GradientSwarm("async", "abc", "adamw", size=SIZE)
    (server,) = swarm.serving()
    worker = next(name for name in swarm.nodes if name != server)
    core = swarm.nodes[worker].core
    term = core._leadership.shards[0].leader[0]
    held = np.concatenate([swarm.start, np.ones(SIZE), np.zeros(SIZE)])
    chunks, _ = vector.encode("float32", Layout(3 * SIZE, 3 * SIZE), held)
    mark = Applied(worker, core._worker.life, 0)
    with pytest.raises(PeerError, match="state that no gradients make"):
        core.on_message(server, Weights(0, term, server, 1, (mark,), True, (), chunks), 0.0)
    short, _ = vector.encode("float32", Layout(SIZE, SIZE), swarm.start)
    with pytest.raises(PeerError):
        core.on_message(server, Weights(0, term, server, 1, (mark,), True, (), short), 0.0)


@settings(deadline=None)
@given(
    optimizer=st.sampled_from([Sgd(), AdamW(weight_decay=0.0)]),
    pushes=st.lists(
        st.tuples(
            st.sampled_from("abcxx"),
            st.floats(0.1, 1.0),
            st.sampled_from([1.0, 1e9]),
            st.sampled_from([0.0, 0.01, 999.0]),
        ),
        min_size=1,
        max_size=20,
    ),
)
def test_no_gradient_or_rate_of_a_liar_moves_the_weights_far(
    optimizer: Optimizer, pushes: list[tuple[str, float, float, float]]
) -> None:
    """Whoever came first, and whatever it says; the server's own worker is `a`."""
    size = 4
    held = np.concatenate([np.ones(size), np.zeros(size * optimizer.rows)])
    served = ShardServer(
        Rule(None), held, 0, {}, Counter(), Counter(), (), PushLimits("a", Layout(size, size)), optimizer, size
    )
    training, seqs = frozenset("abcx"), Counter[str]()
    for worker, length, factor, rate in pushes:
        seqs[worker] += 1
        before = served.weights.copy()
        lies = worker == "x"
        slope = np.full(size, length * (factor if lies else 1.0))
        served.take([Applied(worker, 0, seqs[worker])], served.clock, slope, training, rate if lies else 0.01)
        served.due(training)
        moved = float(np.linalg.norm(served.weights - before))
        most = 8 * 0.04 * math.sqrt(size) if isinstance(optimizer, AdamW) else 16 * 0.01 * 1.0 * math.sqrt(size)
        assert moved <= max(most, float(np.linalg.norm(before)) / 16 * 8)


def test_one_members_newest_optimizer_is_not_taken_at_its_word() -> None:
    """The server dies; a liar's weights are near, what it says the optimizer remembers is not."""
    swarm = GradientSwarm("async", "abcde", "sgd:momentum=0.9", size=SIZE, robust=True)
    for number in range(5):
        for name in "abcde":
            swarm.push(name, gradient(number), 0.01)
        swarm.settle()
    (server,) = swarm.serving()
    swarm.die(server)
    swarm.all_hear()
    proposer = next(name for name in swarm.nodes if swarm.nodes[name].core._leadership.shards[0].preparing is not None)
    core = swarm.nodes[proposer].core
    shard = core._leadership.shards[0]
    liar = next(name for name in swarm.nodes if name != proposer)
    clock, _, held = shard.preparing.best
    lie = np.concatenate([held[:SIZE], np.full(SIZE, 1e6)])
    chunks, _ = vector.encode("float32", Layout(2 * SIZE, 2 * SIZE), lie)
    swarm.lose(proposer, liar)
    promise = Promise(0, shard.leader[0], 7, clock + 5, (), tuple(bytes(chunk) for chunk in chunks))
    swarm.perform(proposer, core.on_message(liar, promise, swarm.now))
    swarm.settle()
    assert swarm.serving() == [proposer]
    assert core.counts["replicas_doubted"] == 1
    assert np.abs(shard.server.held).max() < 100


# ---------------------------------------------------------------- what a user may say


@pytest.mark.parametrize(
    ("mode", "rule"),
    [
        ("hardsync", Rule(0)),
        ("hardsync:batch=128", Rule(0, batch=128)),
        ("hardsync:backup=2:batch=64", Rule(0, backup=2, batch=64)),
        ("async:mean", Rule(None, "mean")),
        ("softsync:30:constant", Rule(30, "constant")),
    ],
)
def test_parse(mode: str, rule: Rule) -> None:
    maker: Any = parse_mode(mode)
    assert maker.keywords["rule"] == rule


@pytest.mark.parametrize(
    "mode",
    ["hardsync:backup", "hardsync:backup=0", "hardsync:batch=x", "hardsync:backup=1:more=1", "async:fast",
     "hardsync:batch=4:batch=8"],
)  # fmt: skip
def test_a_bad_argument_is_the_users_error(mode: str) -> None:
    with pytest.raises(UserError, match=f"--mode {mode}"):
        parse_mode(mode)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (("hardsync", "weights", "sgd:momentum=0.9"), "server_optimizer: only with exchange gradients"),
        (("hardsync:batch=64", "weights", "sgd"), "hardsync:batch=64: only with exchange gradients"),
        (("hardsync", "gradients", "adam"), "'adam' is not one of"),
    ],
)
def test_what_does_not_go_together_is_the_users_error(given: tuple[str, str, str], line: str) -> None:
    mode, exchange, optimizer = given
    with pytest.raises(UserError, match=line):
        check_options(mode, ModeSettings(exchange=exchange, server_optimizer=optimizer))
