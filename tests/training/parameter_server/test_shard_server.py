"""A shard's server adds what Rudra's rules say, and no push twice."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.training.parameter_server.optimizer import Sgd
from peerd.training.parameter_server.shard_server import Rule, ShardServer
from peerd.transport.messages import Applied

WORKERS = "abcdef"


def server(rule: Rule) -> ShardServer:
    return ShardServer(rule, np.zeros(1), 0, {}, Counter(), Counter())


@given(st.lists(st.lists(st.integers(-50, 50), min_size=4, max_size=4), max_size=8))
def test_hardsync_adds_the_mean_of_all(rounds: list[list[int]]) -> None:
    training = frozenset("abcd")
    served = server(Rule(n=0))
    expected = Fraction(0)
    for number, updates in enumerate(rounds):
        for worker, update in zip("abcd", updates, strict=True):
            served.take([Applied(worker, 0, number + 1)], number, np.array([float(update)]), training)
            served.owed[worker] = None
            assert served.due(training) == (list("abcd") if worker == "d" else []), "all or nobody"
        expected += Fraction(sum(updates), 4)
        assert served.weights[0] == float(expected)
        assert served.clock == number + 1
    assert served.staleness == Counter({0: 4 * len(rounds)} if rounds else {})


@given(
    n=st.integers(1, 8),
    rate=st.sampled_from(["staleness", "mean", "constant"]),
    pushes=st.lists(st.tuples(st.sampled_from(WORKERS), st.integers(-8, 8)), max_size=60),
)
def test_softsync_follows_the_plain_rule(n: int, rate: str, pushes: list[tuple[str, int]]) -> None:
    """Each worker pushes what it made of the weights that its push before was answered with."""
    training = frozenset(WORKERS)
    served = server(Rule(n, rate))
    served.pulled |= training
    pulled, seqs = Counter[str](), Counter[str]()
    weights, clock, waiting = Fraction(0), 0, list[Fraction]()
    stale, dropped = Counter[int](), 0
    for worker, update in pushes:
        seqs[worker] += 1
        served.take([Applied(worker, 0, seqs[worker])], pulled[worker], np.array([float(update)]), training)
        served.owed[worker] = None
        assert served.due(training) == [worker], "at once"

        tau = clock - pulled[worker]
        stale[tau] += 1
        if tau > 2 * n:
            dropped += 1
        else:
            divisor = {"staleness": max(1, tau), "mean": n, "constant": 1}[rate]
            waiting.append(Fraction(update, divisor))
        if waiting and len(waiting) == max(1, len(WORKERS) // n):
            weights, clock, waiting = weights + sum(waiting, Fraction(0)) / len(waiting), clock + 1, []
        pulled[worker] = clock

        assert served.clock == clock
        assert abs(served.weights[0] - float(weights)) < 1e-9
    assert served.staleness == stale
    assert served.counts["pushes_dropped"] == dropped


def test_how_stale_a_newcomer_was_that_has_served_itself_does_not_count() -> None:
    """What it pushes until it has these weights is of another clock."""
    training = frozenset("ab")
    served = ShardServer(Rule(n=1), np.zeros(1), 300, {"a": Applied("a", 0, 7)}, Counter(), Counter())
    for seq in (1, 2):
        served.take([Applied("b", 0, seq)], seq - 1, np.ones(1), training)
    assert (served.counts["pushes_dropped"], served.staleness) == (2, Counter())
    served.take([Applied("a", 0, 8)], 290, np.ones(1), training)
    served.owed["b"] = None
    served.due(training)
    served.take([Applied("b", 0, 3)], 295, np.ones(1), training)
    assert served.staleness == Counter({10: 1, 5: 1}), "of who has had them it does"


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 5)), max_size=40))
def test_a_push_is_next_once_and_in_order(said: list[tuple[int, int]]) -> None:
    served = server(Rule(n=1))
    last: dict[int, int] = {0: 0, 1: 0}
    now_living = 0
    for life, seq in said:
        if life != now_living:
            last[life] = 0  # a life that follows another begins anew
        fits = served.is_next("a", life, seq, oldest=1)
        assert fits == (seq == last[life] + 1)
        if fits:
            served.take([Applied("a", life, seq)], 0, np.ones(1), frozenset("a"))
            now_living, last[life] = life, seq


def test_async_takes_each_push_alone() -> None:
    served = server(Rule(n=None))
    for worker in "ab":
        served.take([Applied(worker, 0, 1)], 0, np.ones(1), frozenset("ab"))
        served.due(frozenset("ab"))
    assert served.clock == 2


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_sum_that_is_not_finite_as_it_travels_changes_nothing(dtype: Any) -> None:
    """Simulated models may be float64."""
    served = ShardServer(Rule(n=1), np.zeros(2, dtype), 0, {}, Counter(), Counter(), optimizer=Sgd(), parameters=2)
    for worker in "ab":
        served.take([Applied(worker, 0, 1)], 0, np.full(2, 3e38, dtype), frozenset("ab"), 10.0)
    with np.errstate(over="ignore"):
        served.due(frozenset("ab"))
    assert not served.weights.any()
    assert served.counts["updates_not_finite"] == 1
    assert served.clock == 1, "nobody waits for it"
