"""All-reduce: exact on integers, the same bits everywhere, whatever the size, the length and the order of arrival."""

from __future__ import annotations

import math
import random
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.training.codecs import CODECS
from peerd.training.codecs.vector import PIECE_VALUES
from peerd.training.rounds import collective
from peerd.training.rounds.collective import Collective
from peerd.training.rounds.topology import choose, parse_topology
from peerd.transport.errors import PeerError, UserError

TOPOLOGIES = ["ring", "tree", "tree:3", "tree:5", "halving"]


class Plain:
    """Values travel as they are."""

    exact = True

    def pack(self, start: int, values: npt.NDArray[Any]) -> Any:
        return values.copy()

    def unpack(self, start: int, payload: Any, out: npt.NDArray[Any], onto: npt.NDArray[Any] | None = None) -> None:
        out[:] = payload if onto is None else onto + payload


class Coded:
    """Values travel through a codec; what it loses is remembered."""

    exact = False

    def __init__(self, codec: str, length: int) -> None:
        self.codec = CODECS[codec]
        self.lost = np.full(length, np.nan)

    def pack(self, start: int, values: npt.NDArray[Any]) -> Any:
        body = bytes(self.codec.encode(values))
        arrived = np.empty_like(values)
        self.codec.decode(body, arrived)
        assert np.isnan(self.lost[start : start + len(values)]).all(), "packed twice by one rank"
        self.lost[start : start + len(values)] = values - arrived
        return body

    def unpack(self, start: int, payload: Any, out: npt.NDArray[Any], onto: npt.NDArray[Any] | None = None) -> None:
        values = np.empty(len(out), self.lost.dtype)
        self.codec.decode(payload, values)
        out[:] = values if onto is None else onto + values


def run(ranks: list[Collective], seed: int, *, twice: bool = False) -> list[int]:
    """Deliver in any order across links, in order within one, while each rank's values come from the end on.

    Returns the values each rank sent.
    """
    rng = random.Random(seed)
    links: dict[tuple[int, int], deque[Any]] = {}
    sent = [0] * len(ranks)

    def post(source: int, pieces: list[Any]) -> None:
        for piece in pieces:
            sent[source] += len(piece.payload)
            assert len(piece.payload) <= PIECE_VALUES or isinstance(piece.payload, bytes)
            links.setdefault((source, piece.to), deque()).extend([piece] * (1 + twice))

    missing = {rank: len(machine.vector) for rank, machine in enumerate(ranks)}  # values whose turn has not come
    later = [machine.vector.copy() for machine in ranks]
    for machine in ranks:
        machine.vector[:] = 77
    while missing or any(links.values()):
        waiting = sorted(link for link, queue in links.items() if queue)
        if (place := rng.randrange(len(missing) + len(waiting))) >= len(missing):
            source, target = waiting[place - len(missing)]
            piece = links[source, target].popleft()
            post(target, ranks[target].receive(source, piece.tag, piece.payload))
            continue
        rank = sorted(missing)[place]
        end = missing.pop(rank)
        first = rng.randint(0, end)
        ranks[rank].vector[first:end] = later[rank][first:end]
        post(rank, ranks[rank].come(first, len(later[rank])))
        if first:
            missing[rank] = first
    return sent


@given(
    st.sampled_from(TOPOLOGIES), st.integers(1, 19), st.integers(0, 60), st.integers(0, 60), st.integers(1, 9),
    st.sampled_from([np.int64, object]), st.integers(0, 2**16), st.booleans(),
)  # fmt: skip
def test_the_sum_of_integers_is_exact(
    name: str, size: int, length: int, cut: int, piece: int, dtype: Any, seed: int, twice: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective, "PIECE_VALUES", piece)
        rng = np.random.default_rng(seed)
        own = [rng.integers(-(10**9), 10**9, length).astype(dtype) for _ in range(size)]
        expected = sum(own, np.zeros(length, dtype))
        ranks = [Collective(parse_topology(name), rank, size, own[rank].copy(), Plain(), cut) for rank in range(size)]
        run(ranks, seed, twice=twice)
        for machine in ranks:
            assert machine.done
            assert (machine.vector == expected).all()


@given(
    st.sampled_from(TOPOLOGIES), st.integers(1, 12), st.integers(0, 300), st.sampled_from(sorted(CODECS)),
    st.integers(0, 2**16), st.integers(0, 2**16),
)  # fmt: skip
def test_all_ranks_end_with_the_same_bits_in_any_order(
    name: str, size: int, length: int, codec: str, seed: int, order: int
) -> None:
    rng = np.random.default_rng(seed)
    own = [rng.normal(size=length).astype(np.float32) for _ in range(size)]
    results = set()
    for each_order in (seed, order):
        packings = [Coded(codec, length) for _ in range(size)]
        ranks = [Collective(parse_topology(name), rank, size, own[rank].copy(), packings[rank]) for rank in range(size)]
        run(ranks, each_order)
        results |= {machine.vector.tobytes() for machine in ranks}
    assert len(results) == 1, "another order of arrival is another sum"
    # what was lost on the way is known to those who lost it
    total = sum(v.astype(np.float64) for v in own) if length else np.zeros(0)
    arrived = ranks[0].vector + sum(packing.lost for packing in packings)
    assert np.allclose(arrived, total, atol=1e-4)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ["ring", "halving"])
def test_a_rank_sends_two_vectors_less_its_share(name: str, size: int) -> None:
    length = 240 * size
    ranks = [Collective(parse_topology(name), rank, size, np.ones(length), Plain()) for rank in range(size)]
    assert run(ranks, 0) == [2 * (size - 1) * length // size] * size


@given(st.sampled_from(TOPOLOGIES), st.integers(1, 70))
def test_every_segment_has_one_tree_of_all_ranks(name: str, size: int) -> None:
    topology = parse_topology(name)
    for segment in range(topology.segments(size)):
        parents = [topology.parent(segment, rank, size) for rank in range(size)]
        assert parents.count(None) == 1
        for rank in range(size):
            assert sorted(topology.children(segment, rank, size)) == [r for r in range(size) if parents[r] == rank]
            at: int | None = rank
            for _ in range(size):
                at = parents[at] if at is not None else None
            assert at is None, "a cycle"


@given(st.sampled_from(TOPOLOGIES), st.integers(1, 70))
def test_every_rank_is_given_each_sum_once(name: str, size: int) -> None:
    topology = parse_topology(name)
    for segment in range(topology.segments(size)):
        (root,) = (rank for rank in range(size) if topology.parent(segment, rank, size) is None)
        given: list[tuple[int, int | None]] = [(root, None)]
        reached = []
        while given:
            rank, giver = given.pop()
            assert topology.giver(segment, rank, size) == giver
            reached.append(rank)
            given += [(taker, rank) for taker in topology.takers(segment, rank, size)]
        assert sorted(reached) == list(range(size))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_ring_gives_one_way_alone(size: int) -> None:
    ring = parse_topology("ring")
    for segment in range(size):
        for rank in range(size):
            assert ring.parent(segment, rank, size) in (None, (rank + 1) % size)
            assert ring.takers(segment, rank, size) in ([], [(rank + 1) % size])


@given(st.integers(2, 6), st.integers(2, 200))
def test_a_tree_is_as_deep_as_the_cost_model_says(arity: int, size: int) -> None:
    topology = parse_topology(f"tree:{arity}")
    depth = 0
    for rank in range(size):
        steps, at = 0, topology.parent(0, rank, size)
        while at is not None:
            steps, at = steps + 1, topology.parent(0, at, size)
        depth = max(depth, steps)
    assert depth <= round(topology.seconds(0.0, size, 0.5, 1.0))


def test_the_cost_model_is_firecaffes() -> None:
    told = 100e6, 16, 1e-3, 10e6
    assert choose(*told) == "ring", "less than a tenth slower"
    assert choose(1e6, 16, 1e-2, 10e6) == "halving"
    assert math.isclose(parse_topology("ring").seconds(*told), 2 * 15 * (1e-3 + 100 / 160))
    assert math.isclose(parse_topology("tree:2").seconds(*told), 2 * 4 * (1e-3 + 10))
    assert choose(100e6, 17, 1e-3, 10e6) == "ring"
    assert choose(100.0, 17, 1e-3, 10e6) == "halving"


@pytest.mark.parametrize("text", ["", "star", "tree:", "tree:1", "tree:x", "tree:65", "ring:2"])
def test_an_unknown_topology_is_named(text: str) -> None:
    with pytest.raises(UserError, match="topology"):
        parse_topology(text)


def test_pieces_that_cannot_be_are_the_peers_fault() -> None:
    machine = Collective(parse_topology("tree"), 0, 4, np.ones(8), Plain())
    for source, tag in ((3, 0), (1, 1), (1, 2), (1, -1)):
        with pytest.raises(PeerError):
            machine.receive(source, tag, np.ones(8))


class Looked(list[Any]):
    """Counts at how many of its items somebody has looked."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        self.looks += len(self)
        return super().__iter__()


def test_values_that_come_part_by_part_are_not_all_looked_through_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of 70 billion values has 67,000 pieces, and comes in 6,000 parts."""
    count = 1000
    monkeypatch.setattr(collective, "PIECE_VALUES", 1)
    alone = Collective(parse_topology("ring"), 0, 1, np.zeros(count, np.int64), Plain())
    alone._parts = parts = Looked(alone._parts)
    for first in reversed(range(0, count, 10)):
        alone.come(first, count)
    assert alone.done
    assert parts.looks < 50 * count
