"""The mean of equal values is that value, to the bit, in whatever order the members add theirs; others keep theirs."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.training.effects import Vector
from peerd.training.rounds.halves import halved, mean_of

MEMBERS_MAX = 4096
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def sum_along_a_tree(vectors: list[Vector], rng: random.Random) -> Vector:
    """Any two partial sums at a time, as float32 rounds them."""
    left = list(vectors)
    while len(left) > 1:
        one, other = (left.pop(rng.randrange(len(left))) for _ in range(2))
        left.append(one + other)
    return left[0]


def small_enough(values: list[float], members: int) -> Vector:
    """A sum beyond float32 is not finite, and no member takes part with it."""
    array = np.array(values, np.float32)
    return np.where(np.abs(array) < np.finfo(np.float32).max / members, array, np.float32(0.3))


@settings(deadline=None)
@given(st.lists(FINITE, min_size=1, max_size=20), st.integers(1, 64), st.randoms(use_true_random=False))
def test_the_mean_of_equal_values_is_that_value_along_any_tree(
    values: list[float], members: int, rng: random.Random
) -> None:
    equal = small_enough(values, members)
    sums = sum_along_a_tree([halved(equal)] * members, rng)
    assert np.array_equal(mean_of(sums, members), equal)


@settings(deadline=None, max_examples=20)
@given(st.lists(FINITE, min_size=1, max_size=20), st.integers(1, MEMBERS_MAX))
def test_the_mean_of_equal_values_is_that_value_along_a_chain(values: list[float], members: int) -> None:
    equal = small_enough(values, members)
    halves = halved(equal)
    sums = np.zeros_like(halves)
    for _ in range(members):
        sums += halves
    assert np.array_equal(mean_of(sums, members), equal)


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(0, 2**32 - 1), st.randoms(use_true_random=False))
def test_the_mean_of_others_is_as_good_as_float32(members: int, seed: int, rng: random.Random) -> None:
    vectors = [vector.astype(np.float32) for vector in np.random.default_rng(seed).normal(size=(members, 5))]
    sums = sum_along_a_tree([halved(vector) for vector in vectors], rng)
    exact = np.mean(vectors, axis=0, dtype=np.float64)
    room = members * np.finfo(np.float32).eps * np.mean(np.abs(vectors), axis=0) + 1e-12
    assert (np.abs(mean_of(sums, members) - exact) <= room).all()


def test_wider_vectors_keep_their_type() -> None:
    halves = halved(np.array([1 / 3, -7.5]))
    assert halves.dtype == np.float64
    assert mean_of(3 * halves, 3).tolist() == [float(np.float32(1 / 3)), -7.5]
