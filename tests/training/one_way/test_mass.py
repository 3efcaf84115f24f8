"""Push-sum's arithmetic with fractions: mass is exact under every loss, repetition and reordering."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from peerd.training.one_way.mass import Inflow, Outflow, WeightAccount

NODES = range(3)
SIZE = 2
nodes = st.sampled_from(NODES)
fractions = st.fractions(-4, 4, max_denominator=8)


def vector(*values: Fraction) -> Any:
    return np.array(values, dtype=object)


class Masses(RuleBasedStateMachine):
    """Messages are (link, total, what is decoded); the network holds and repeats them as it likes."""

    @initialize(values=st.lists(fractions, min_size=len(NODES) * SIZE, max_size=len(NODES) * SIZE))
    def start(self, values: list[Fraction]) -> None:
        self.z = [vector(*values[SIZE * node : SIZE * (node + 1)]) for node in NODES]
        self.purses = [WeightAccount(Fraction(1)) for _ in NODES]
        self.put_in = sum(self.z)
        pairs = [(a, b) for a in NODES for b in NODES if a != b]
        self.out = {pair: Outflow(Fraction(0)) for pair in pairs}
        self.into = {pair: Inflow(Fraction(0)) for pair in pairs}
        self.under_way: dict[tuple[int, int], tuple[Fraction, Any]] = {}  # at the sender, until answered
        self.network: list[tuple[tuple[int, int], Fraction, Any]] = []

    @rule(node=nodes, step=st.tuples(fractions, fractions))
    def local_step(self, node: int, step: tuple[Fraction, Fraction]) -> None:
        self.z[node] = self.z[node] + vector(*step)
        self.put_in = self.put_in + self.purses[node].weight * vector(*step)

    @rule(
        one=nodes, other=nodes, share=st.fractions(Fraction(1, 8), Fraction(1, 2)), loss=st.tuples(fractions, fractions)
    )
    def send(self, one: int, other: int, share: Fraction, loss: tuple[Fraction, Fraction]) -> None:
        pair = (one, other)
        if one == other or pair in self.under_way:
            return
        decoded = self.z[one] + vector(*loss)  # a codec may lose what it likes
        part = self.out[pair].send(self.purses[one].weight * share)
        self.correct(one, self.purses[one].give, part, decoded)
        self.under_way[pair] = (self.out[pair].total, decoded)
        self.network.append((pair, *self.under_way[pair]))

    @rule(one=nodes, other=nodes)
    def say_again(self, one: int, other: int) -> None:
        if (one, other) in self.under_way:
            self.network.append(((one, other), *self.under_way[one, other]))

    @rule(data=st.data(), keep=st.booleans())
    def arrive(self, data: st.DataObject, keep: bool) -> None:
        if not self.network:
            return
        index = data.draw(st.integers(0, len(self.network) - 1))
        pair, total, decoded = self.network[index] if keep else self.network.pop(index)
        part = self.into[pair].part(total)
        if part > 0:
            self.correct(pair[1], self.purses[pair[1]].take, part, decoded)
            self.into[pair].taken(total)

    @rule(one=nodes, other=nodes)
    def answer(self, one: int, other: int) -> None:
        pair = (one, other)
        if pair in self.under_way and self.into[pair].total == self.out[pair].total:
            del self.under_way[pair]
            self.out[pair].answered()

    @rule(one=nodes, other=nodes)
    def link_ends_untaken(self, one: int, other: int) -> None:
        """The receiver says that it did not take it, and never will; both start anew."""
        pair = (one, other)
        if pair in self.under_way and self.into[pair].total != self.out[pair].total:
            _, decoded = self.under_way.pop(pair)
            self.correct(one, self.purses[one].take, self.out[pair].under_way, decoded)
            self.network = [message for message in self.network if message[0] != pair]  # of a link that is no more
            self.out[pair], self.into[pair] = Outflow(Fraction(0)), Inflow(Fraction(0))

    def correct(self, node: int, move: Any, part: Fraction, decoded: Any) -> None:
        correction = np.empty(SIZE, object)
        move(part, self.z[node], decoded, correction)
        self.z[node] = self.z[node] + correction

    @invariant()
    def nothing_is_lost_or_made(self) -> None:
        if not hasattr(self, "z"):
            return
        untaken = {pair: self.out[pair].total - self.into[pair].total for pair in self.out}
        weight = sum(purse.weight for purse in self.purses) + sum(untaken.values())
        assert weight == len(NODES)
        mass = sum(purse.weight * z for purse, z in zip(self.purses, self.z, strict=True))
        for pair, part in untaken.items():
            if part:
                mass = mass + part * self.under_way[pair][1]
        assert (mass == self.put_in).all()


TestMasses = Masses.TestCase
TestMasses.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.03, 0.5), min_size=1, max_size=200))
def test_with_floats_both_ends_count_the_same_weight(shares: list[float]) -> None:
    purse, outflow, inflow = WeightAccount(1.0), Outflow(0.0), Inflow(0.0)
    for share in shares:
        part = outflow.send(purse.weight * share)
        assert inflow.part(outflow.total) == part
        inflow.taken(outflow.total)
        purse.weight -= part
        if purse.weight < 1e-3:
            purse.weight += 1.0
