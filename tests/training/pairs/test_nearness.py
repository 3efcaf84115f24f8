"""Partners whose runs have ended say where their models are, and exchange only where that is far apart."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from gossip_swarm import GossipSwarm, KeptMessages
from hypothesis import given
from hypothesis import strategies as st

from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector
from peerd.training.flush import WINDOW
from peerd.training.pairs.nearness import SEED
from peerd.training.sample import Sample, sample_of
from peerd.training.sketch import WIDTH, Sketch, packed
from peerd.transport.errors import PeerError
from peerd.transport.messages import Delta, DeltaTaken, LinkClosed, LinkSketch

SIZE = 600


class Spread(KeptMessages):
    """Nodes that lie so far from one model."""

    def __init__(self, count: int, apart: float, seed: int = 0) -> None:
        self._common: Vector | None = None
        self._apart = apart
        super().__init__(count, SIZE, "sign", seed=seed)
        self.everyone_alive()
        self.settle()

    def first_model(self) -> Vector:
        drawn = super().first_model()
        if self._common is None:
            self._common = drawn
        return self._common + self._apart * super().first_model()

    def finish(self, *names: str) -> None:
        for name in names:
            self.step(name, finishing=True)
            self.settle()

    def give_halves(self, source: str, target: str) -> None:
        """Of what waits on this connection the sketches are lost."""
        self.lose(source, target, LinkSketch)
        while self.deliver(source, target):
            pass


def test_near_models_end_without_an_exchange() -> None:
    swarm = Spread(4, 0.002)
    swarm.finish(*swarm.nodes)
    swarm.quiesce()
    assert swarm.count(Delta) == 0
    assert 6 * 2 <= swarm.count(LinkSketch) <= 6 * 8
    assert all(node.proceeded == [False, True] for node in swarm.nodes.values())


def test_of_two_pairs_the_one_that_is_apart_exchanges() -> None:
    swarm = Spread(4, 0.0)
    swarm.step("c", 0.02 * swarm.rng.normal(size=SIZE))
    for link in swarm.waiting():
        swarm.lose(*link)
    swarm.finish(*swarm.nodes)
    swarm.quiesce()
    assert swarm.spread() < 0.005
    assert swarm.drift() < 1e-12
    assert all(node.proceeded[-1] for node in swarm.nodes.values())


@given(st.integers(2, 8), st.sampled_from([0.001, 0.01, 0.1, 1.0]), st.integers(0, 999), st.data())
def test_all_are_near_in_the_end_whatever_sketches_were_lost(
    count: int, apart: float, seed: int, data: st.DataObject
) -> None:
    swarm = Spread(count, apart, seed)
    for name in data.draw(st.permutations(sorted(swarm.nodes))):
        swarm.step(name, finishing=True)
        for _ in range(data.draw(st.integers(0, 5))):
            source, target = data.draw(st.sampled_from(sorted(swarm.queues)))
            queue = swarm.queues[source, target]
            if queue and isinstance(queue[0], LinkSketch):
                queue.popleft()
            else:
                swarm.deliver(source, target)
    swarm.quiesce()
    assert all(node.proceeded[-1] for node in swarm.nodes.values())
    assert swarm.drift() < 1e-9
    for one, other in combinations(swarm.nodes, 2):
        if other in swarm.nodes[one].core.references():
            apart = float(np.linalg.norm(swarm.nodes[one].x - swarm.nodes[other].x))
            assert apart < 0.01 * np.linalg.norm(swarm.nodes[one].x)


@pytest.mark.parametrize(("apart", "exchanges"), [(0.002, 0), (0.1, 1)])
def test_a_leaver_gives_its_model_to_those_who_train_on_where_it_is_news(apart: float, exchanges: int) -> None:
    swarm = Spread(3, apart)
    swarm.finish("a")
    assert swarm.nodes["a"].proceeded == [False], "the others have what it had"
    assert swarm.count(Delta) == 2 * 2 * exchanges
    for name in "bc":
        swarm.step(name, 0.3 * swarm.rng.normal(size=SIZE))
        swarm.settle()
    swarm.finish("b", "c")
    swarm.quiesce()
    assert swarm.spread() < 0.01
    assert all(node.proceeded[-1] for node in swarm.nodes.values())


class WithSilent(Spread):
    """d answers no exchange."""

    def deliver(self, source: str, target: str) -> bool:
        if source == "d":
            self.lose(source, target, Delta, DeltaTaken)
        return super().deliver(source, target)


def test_who_answers_no_exchange_keeps_none_of_the_others_from_agreeing() -> None:
    swarm = WithSilent(4, 0.1)
    swarm.step("d", 0.3 * swarm.rng.normal(size=SIZE))
    for link in swarm.waiting():
        swarm.lose(*link)
    swarm.finish(*swarm.nodes)
    for swarm.now in range(30):  # nothing is said again so soon
        for name in "abc":
            swarm.perform(name, swarm.nodes[name].core.on_timer(swarm.now))
        swarm.settle()
    for one, other in combinations("abc", 2):
        apart = float(np.linalg.norm(swarm.nodes[one].x - swarm.nodes[other].x))
        assert apart < 0.01 * np.linalg.norm(swarm.nodes[one].x)


def test_a_leavers_last_steps_are_not_lost_where_all_are_within_what_is_near_while_one_trains() -> None:
    swarm = Spread(3, 0.0)
    before = swarm.nodes["b"].x.copy()
    swarm.nodes["a"].move(0.015 * swarm.rng.normal(size=SIZE))
    swarm.finish("a")
    assert swarm.nodes["a"].proceeded == [False]
    assert np.linalg.norm(swarm.nodes["b"].x - before) > 0.003 * np.linalg.norm(before)


def test_who_trains_and_is_asked_answers_and_says_so_when_it_ends_where_it_stands() -> None:
    swarm = Spread(2, 0.001)
    swarm.finish("a")
    (link,) = swarm.nodes["a"].core._links.held.values()
    assert link.near.heard is not None
    assert not link.peer_finishing
    swarm.finish("b")
    assert link.peer_finishing, "though its model has not moved since it was asked"
    swarm.quiesce()
    assert swarm.count(Delta) == 0
    assert all(node.proceeded == [False, True] for node in swarm.nodes.values())


def test_a_sketch_that_overtakes_the_start_of_its_link_ends_nothing() -> None:
    swarm = GossipSwarm(2, SIZE, "sign")
    swarm.everyone_alive()
    core = swarm.nodes["a"].core
    number = core._links.opening["b"].number
    early = LinkSketch(number, 1, 0, True, False, bytes(8 * WIDTH))
    assert core.on_message("b", early, swarm.now) == []
    (effect,) = core.on_message("b", LinkSketch(number + 1, 1, 0, True, False, bytes(8 * WIDTH)), swarm.now)
    assert isinstance(effect.message, LinkClosed), "of this link it knows nothing"
    swarm.settle()
    assert core._links.held["b"].active


@pytest.mark.parametrize("sums", [b"", bytes(8 * WIDTH - 1), bytes(4 * WIDTH), packed(np.full((2, WIDTH), np.nan))])
def test_what_is_no_sketch_is_refused(sums: bytes) -> None:
    swarm = Spread(2, 0.1)
    (link,) = swarm.nodes["a"].core._links.held.values()
    with pytest.raises(PeerError, match="a sketch of"):
        swarm.nodes["a"].core.on_message("b", LinkSketch(link.reference.link, 1, 0, True, False, sums), swarm.now)
    assert link.near.heard is None


def test_a_liar_that_says_far_of_itself_for_ever_is_let_go() -> None:
    swarm = Spread(2, 0.001)
    core = swarm.nodes["a"].core
    (link,) = core._links.held.values()

    lie = packed(np.full((2, WIDTH), 1e6))
    for name in "ab":
        swarm.step(name, finishing=True)
    for source, target in 500 * [("a", "b"), ("b", "a")]:
        queue = swarm.queues[source, target]
        if source == "b" and queue and isinstance(queue[0], LinkSketch):
            queue[0] = LinkSketch(link.reference.link, queue[0].number, link.reference.version, True, True, lie)
        swarm.deliver(source, target)
    assert swarm.nodes["a"].proceeded == [False, True]
    assert core.counts["exchanges"] <= WINDOW + 1


def test_a_model_that_is_not_finite_is_not_said_and_holds_up_nobody() -> None:
    swarm = Spread(3, 0.001)
    swarm.nodes["a"].x[7] = np.nan
    swarm.finish(*swarm.nodes)
    swarm.quiesce()
    assert [line for _, line in swarm.logged] == ["the model holds a value that is not finite: nothing of it is sent"]
    assert swarm.nodes["a"].proceeded == []
    assert all(swarm.nodes[name].proceeded == [False, True] for name in "bc")


def test_a_question_that_makes_way_for_a_later_word_is_asked_by_that() -> None:
    swarm = Spread(2, 0.001)
    swarm.step("a", finishing=True)
    core = swarm.nodes["a"].core
    (link,) = core._links.held.values()
    queue = swarm.queues["a", "b"]
    assert [message.asks for message in queue if isinstance(message, LinkSketch)] == [True]
    queue.clear()
    (again,) = core._tell(link, swarm.now)
    assert again.message.asks
    swarm.perform("a", [again])
    swarm.settle()
    (again,) = core._tell(link, swarm.now)
    assert not again.message.asks


def test_a_liar_that_says_near_whenever_an_exchange_is_under_way_is_let_go() -> None:
    swarm = Spread(2, 0.001)
    core = swarm.nodes["a"].core
    (link,) = core._links.held.values()
    for name in "ab":
        swarm.step(name, finishing=True)

    def lie(sums: Sketch) -> None:
        said = LinkSketch(link.reference.link, link.near.newest + 1, link.reference.version, True, False, packed(sums))
        swarm.perform("a", core.on_message("b", said, swarm.now))

    for _ in range(2 * WINDOW):
        lie(np.full((2, WIDTH), 1e6))
        if not core.settled:
            lie(link.near.told.sums)
        swarm.give_halves("a", "b")
        swarm.give_halves("b", "a")
    assert swarm.nodes["a"].proceeded == [False, True]
    assert core.counts["exchanges"] <= WINDOW + 1


def test_an_exchange_of_whose_ends_nothing_is_known_counts_as_far_as_it_was() -> None:
    swarm = Spread(2, 0.1)
    for name in "ab":
        swarm.step(name, finishing=True)
    (link,) = swarm.nodes["a"].core._links.held.values()
    while link.reference.under_way is None:
        assert swarm.deliver("b", "a") or swarm.deliver("a", "b")
    swarm.cut("a", "b")
    swarm.give_halves("a", "b")
    swarm.give_halves("b", "a")
    assert link.reference.version == 1
    assert link.progress._distances == [pytest.approx(link.distance / link.anchor_norm)]


@given(st.integers(0, 99), st.integers(1, 5), st.sampled_from([0, 700]))
def test_a_sketch_of_a_sample_tells_how_far_two_models_are_apart(seed: int, tensors: int, buffers: int) -> None:
    rng = np.random.default_rng(seed)
    count = 300_000 * tensors
    ends = tuple(range(300_000, count + 1, 300_000))
    layout = Layout(count, count + buffers, (), ends)
    sample = Sample(layout, 0)
    assert not sample.is_whole
    model = rng.standard_normal(layout.total).astype(np.float32)
    other = model + 0.01 * rng.standard_normal(layout.total).astype(np.float32)
    other[count:] += 1e6
    parameters, others = np.linalg.norm(sample.sketch(model, SEED) - sample.sketch(other, SEED), axis=1)
    assert 0.5 < parameters / np.linalg.norm((model - other)[:count]) < 1.6
    assert 0.5 < others / (1e6 * np.sqrt(buffers)) < 1.6 if buffers else others == 0.0
    assert sample_of(Layout(5, 5)).sketch(np.ones(5), SEED).shape == (2, WIDTH)


def test_buffers_that_are_apart_are_mixed_though_parameters_are_near() -> None:
    """Statistics of batch normalization, each of a node's own data."""
    swarm = GossipSwarm(3, 40, "sign", buffers=8)
    for index, life in enumerate(swarm.nodes.values()):
        life.x = np.concatenate([np.ones(32), np.full(8, 97.0 + index)])
        life.publish()
    swarm.everyone_alive()
    swarm.settle()
    for name in swarm.nodes:
        swarm.step(name, finishing=True)
        swarm.settle()
    swarm.quiesce()
    for life in swarm.nodes.values():
        np.testing.assert_allclose(life.x[32:], 98.0, rtol=0.006)
        assert life.proceeded[-1]


@given(st.integers(0, 99), st.integers(1, 40), st.integers(0, 60))
def test_no_column_is_lost(seed: int, many: int, column: int) -> None:
    """Of a tensor of as many columns as a sketch has sums, or a multiple."""
    rng = np.random.default_rng(seed)
    apart = np.zeros((700, many * WIDTH), np.float32)
    apart[:, column] = rng.standard_normal(700)
    flat = apart.ravel()
    found = np.linalg.norm(sample_of(Layout(len(flat), len(flat))).sketch(flat, SEED))
    assert 0.5 < found / np.linalg.norm(flat) < 1.6


def test_an_older_sketch_that_comes_again_says_nothing() -> None:
    swarm = Spread(2, 0.001)
    swarm.step("a", finishing=True)
    first = swarm.queues["a", "b"][0]
    assert isinstance(first, LinkSketch)
    swarm.settle()
    swarm.step("b", finishing=True)
    swarm.quiesce()
    (link,) = swarm.nodes["b"].core._links.held.values()
    before = link.near.heard
    assert swarm.nodes["b"].core.on_message("a", first, swarm.now) == []
    assert link.near.heard is before
