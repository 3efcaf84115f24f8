"""The partitions: every sample exactly once, no rank empty, the same for the same seed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.training.tasks.data_partition import Indices, Labels, Split, batches, of_rank, parse
from peerd.transport.errors import UserError

SPLITS = st.one_of(
    st.sampled_from(["iid", "sorted"]),
    st.floats(0.001, 1000).map(lambda alpha: f"dirichlet:{alpha!r}"),
).map(parse)
PEERS = st.integers(1, 12)
SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def label_arrays(draw: st.DrawFn) -> Labels:
    return np.array(draw(st.lists(st.integers(0, 9), min_size=12, max_size=200)), np.int64)


def every_shard(split: Split, labels: Labels, peers: int, seed: int) -> list[Indices]:
    return [of_rank(split, labels, rank, peers, seed) for rank in range(peers)]


@settings(deadline=None)  # a shared machine stalls
@given(SPLITS, label_arrays(), PEERS, SEEDS)
def test_every_sample_once_and_no_rank_empty(split: Split, labels: Labels, peers: int, seed: int) -> None:
    parts = every_shard(split, labels, peers, seed)
    assert all(len(part) > 0 for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))


@settings(deadline=None)  # a shared machine stalls
@given(SPLITS, label_arrays(), PEERS, SEEDS)
def test_same_seed_same_shards(split: Split, labels: Labels, peers: int, seed: int) -> None:
    for one, other in zip(
        every_shard(split, labels, peers, seed), every_shard(split, labels, peers, seed), strict=True
    ):
        assert one.tolist() == other.tolist()


@settings(deadline=None)  # a shared machine stalls
@given(label_arrays(), PEERS, SEEDS)
def test_sorted_ranks_follow_the_labels(labels: Labels, peers: int, seed: int) -> None:
    parts = every_shard(Split("sorted"), labels, peers, seed)
    for lower, upper in itertools.pairwise(parts):
        assert labels[lower].max() <= labels[upper].min()


@settings(deadline=None)  # a shared machine stalls
@given(label_arrays(), PEERS, SEEDS)
def test_iid_and_sorted_ranks_are_equal_to_one_sample(labels: Labels, peers: int, seed: int) -> None:
    for kind in ("iid", "sorted"):
        sizes = [len(part) for part in every_shard(Split(kind), labels, peers, seed)]
        assert max(sizes) - min(sizes) <= 1


def largest_class_share(split: Split, seed: int) -> float:
    labels = np.arange(4000) % 10
    parts = every_shard(split, labels, 4, seed)
    return float(np.mean([np.bincount(labels[part]).max() / len(part) for part in parts]))


@pytest.mark.parametrize("seed", range(5))
def test_small_alpha_is_skewed_and_large_alpha_is_not(seed: int) -> None:
    assert largest_class_share(Split("dirichlet", 0.05), seed) > 0.25
    assert largest_class_share(Split("dirichlet", 1000), seed) < 0.12
    assert largest_class_share(Split("iid"), seed) < 0.14


def test_a_different_seed_splits_otherwise() -> None:
    labels = np.arange(100) % 10
    assert of_rank(Split("iid"), labels, 0, 4, 1).tolist() != of_rank(Split("iid"), labels, 0, 4, 2).tolist()


def test_one_class_and_tiny_alpha_still_leave_no_rank_empty() -> None:
    parts = every_shard(Split("dirichlet", 0.001), np.zeros(8, np.int64), 8, seed=0)
    assert [len(part) for part in parts] == [1] * 8


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("iid", Split("iid")),
        ("sorted", Split("sorted")),
        ("dirichlet:0.3", Split("dirichlet", 0.3)),
        ("dirichlet:1e3", Split("dirichlet", 1000.0)),
    ],
)
def test_parse(text: str, split: Split) -> None:
    assert parse(text) == split


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "unknown shard ''"),
        ("IID", "choose iid, sorted or dirichlet:A"),
        ("iid:3", "takes no argument"),
        ("sorted:", "takes no argument"),
        ("dirichlet", "needs a number"),
        ("dirichlet:", "needs a number"),
        ("dirichlet:a", "needs a number"),
        ("dirichlet:0", "must lie between"),
        ("dirichlet:-1", "must lie between"),
        ("dirichlet:nan", "needs a number"),
        ("dirichlet:inf", "needs a number"),
    ],
)
def test_parse_says_what_is_wrong(text: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        parse(text)


@pytest.mark.parametrize(("rank", "peers"), [(4, 4), (-1, 4), (0, 0)])
def test_a_rank_that_does_not_exist(rank: int, peers: int) -> None:
    with pytest.raises(UserError, match="does not exist"):
        of_rank(Split("iid"), np.arange(10), rank, peers, 0)


def test_more_peers_than_samples() -> None:
    with pytest.raises(UserError, match="3 samples cannot be split over 4 peers"):
        of_rank(Split("iid"), np.arange(3), 0, 4, 0)


@settings(deadline=None)  # a shared machine stalls
@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 30))
def test_a_resumed_stream_goes_on_where_it_stopped(count: int, size: int, done: int) -> None:
    samples = np.arange(100, 100 + count)
    whole = list(itertools.islice(batches(samples, size, rank=1, seed=2), done + 5))
    resumed = list(itertools.islice(batches(samples, size, rank=1, seed=2, first_step=done), 5))
    assert [batch.tolist() for batch in whole[done:]] == [batch.tolist() for batch in resumed]


def test_an_epoch_shows_each_sample_once_and_ranks_shuffle_differently() -> None:
    samples = np.arange(64)
    epoch = list(itertools.islice(batches(samples, 16, rank=0, seed=0), 4))
    assert sorted(np.concatenate(epoch).tolist()) == samples.tolist()
    other = next(batches(samples, 16, rank=1, seed=0))
    assert epoch[0].tolist() != other.tolist()


def test_a_shard_smaller_than_a_batch_is_one_batch() -> None:
    assert sorted(next(batches(np.arange(3), 32, rank=0, seed=0)).tolist()) == [0, 1, 2]
