"""The daemon's copy of the model and the trainer's own: nothing is applied twice or lost, in any order of events.

Everything is a small integer in float32, so that sums are exact and compared with ==.
"""

from __future__ import annotations

import os
from collections import deque

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from peerd.local.shared_memory import SharedMemory
from peerd.node.model_copy import ModelCopy
from peerd.training.effects import Vector
from peerd.training.modes import Quiet

SIZE = 3
vectors = st.lists(st.integers(-50, 50), min_size=SIZE, max_size=SIZE).map(lambda values: np.array(values, np.float32))


def two_mappings(total: int) -> tuple[SharedMemory, SharedMemory]:
    """The trainer's side and the daemon's, as after the descriptor was passed."""
    trainers = SharedMemory.create(total)
    daemons = SharedMemory(os.dup(trainers.fd), total)
    trainers.close_fd()
    daemons.close_fd()
    return trainers, daemons


class Trainer:
    """What peerd/trainer/session.py does with the memory; its words to the daemon wait in `said`, in order."""

    def __init__(self, memory: SharedMemory, model: Vector) -> None:
        self.memory = memory
        self.model = model.copy()
        self.handed: deque[int] = deque()  # "corrections" messages on their way here
        self.said: deque[tuple[str, int]] = deque()  # "taken" and "published" on their way there
        self.published_to = 0
        memory.copies[0][:] = model

    def take(self) -> None:
        half = self.handed.popleft()
        self.model += self.memory.corrections[half]
        self.said.append(("taken", half))

    @property
    def has_spare(self) -> bool:
        return self.memory.board.current == self.published_to

    def publish(self) -> None:
        self.published_to = copy = 1 - self.published_to
        self.memory.copies[copy][:] = self.model
        self.said.append(("published", copy))


class Exchange(RuleBasedStateMachine):
    """Corrections come at any time; trainer and daemon hear each other late; trainers die and come back.

    `steps` are the trainer's own moves, `corrected` the swarm's. What the daemon knows lags by the steps that were not
    published; it never lags by a correction.
    """

    @initialize(model=vectors)
    def attach_first(self, model: Vector) -> None:
        mine, theirs = two_mappings(SIZE)
        self.trainer: Trainer | None = Trainer(mine, model)
        self.model_copy = ModelCopy(theirs)
        self.known = model.copy()  # what the trainer held when it last published, as far as the daemon has heard
        self.corrected = np.zeros(SIZE, np.float32)  # by the swarm since the beginning
        self.in_known = self.corrected.copy()  # the part of it in `known`
        self.publishing: deque[tuple[Vector, Vector]] = deque()  # `known` and `in_known` of publishes on their way
        self.asked = False
        self.taken_total = np.zeros(SIZE, np.float32)

    @property
    def attached(self) -> Trainer:
        assert self.trainer is not None
        return self.trainer

    @rule(corrections=st.lists(vectors, max_size=2), in_place=st.booleans())
    def the_swarm_corrects(self, corrections: list[Vector], in_place: bool) -> None:
        """One job of the compute thread, which hands over at its end."""
        for correction in corrections:
            spares = self.model_copy.spares() if in_place else []
            made = spares[0] if spares else correction
            for other in spares:
                other[:] = 1000  # whoever borrows them may write there
            made[:] = correction
            self.model_copy.add(made)
            self.corrected += correction
        half = self.model_copy.drain()
        if half is not None:
            assert self.trainer is not None, "handed to nobody"
            assert not self.trainer.handed, "two halves under way"
            self.trainer.handed.append(half)

    @precondition(lambda self: self.trainer)
    @rule(step=vectors)
    def trainer_steps(self, step: Vector) -> None:
        """And takes what waits, between two steps."""
        self.attached.model += step
        before = self.attached.model.copy()
        if self.attached.handed:
            self.attached.take()
        self.taken_total += self.attached.model - before

    @precondition(lambda self: self.trainer and self.trainer.has_spare)
    @rule()
    def trainer_publishes(self) -> None:
        self.attached.publish()
        self.publishing.append((self.attached.model.copy(), self.taken_total.copy()))

    @precondition(lambda self: self.trainer)
    @rule()
    def daemon_lets_go_of_what_it_read(self) -> None:
        self.model_copy.be_quiet(Quiet(0.0))

    @precondition(lambda self: self.trainer and self.trainer.said)
    @rule()
    def daemon_hears(self) -> None:
        word, number = self.attached.said.popleft()
        if word == "taken":
            self.model_copy.taken(number)
        else:
            self.model_copy.published(number, 1)
            self.known, self.in_known = self.publishing.popleft()

    @precondition(lambda self: self.trainer)
    @rule()
    def trainer_dies(self) -> None:
        """What it said still arrives: the socket delivers before it ends."""
        while self.attached.said:
            self.daemon_hears()
        self.model_copy.owned_here()
        self.trainer = None
        self.asked = False

    @precondition(lambda self: not self.trainer)
    @rule(model=vectors)
    def trainer_comes_back(self, model: Vector) -> None:
        """It publishes its own model and is told to load the daemon's."""
        mine, theirs = two_mappings(SIZE)
        trainer = Trainer(mine, model)
        fresh = ModelCopy(theirs)
        copy = fresh.load(self.model_copy.values(), self.model_copy.step)
        trainer.model[:] = mine.copies[copy]
        self.trainer, self.model_copy = trainer, fresh
        self.known, self.in_known = trainer.model.copy(), self.corrected.copy()
        self.taken_total = self.corrected.copy()

    @invariant()
    def the_daemon_knows_the_published_model_and_every_correction(self) -> None:
        if hasattr(self, "model_copy"):
            expected = self.known + (self.corrected - self.in_known)
            np.testing.assert_array_equal(self.model_copy.values(), expected)
            np.testing.assert_array_equal(self.model_copy.look(), expected)

    @invariant()
    def the_trainer_lacks_only_what_waits_for_it(self) -> None:
        if not getattr(self, "trainer", None):
            return
        waiting = self.corrected - self.taken_total
        if not self.model_copy.waiting:
            assert not waiting.any()
        if not (self.publishing or self.attached.said):
            halves = self.attached.memory.corrections
            there = np.zeros_like(waiting)
            for each in self.model_copy.waiting:
                there += halves[each]
            np.testing.assert_array_equal(there, waiting)


TestExchange = Exchange.TestCase
TestExchange.settings = settings(max_examples=120, stateful_step_count=25, deadline=None, print_blob=True)


def test_a_trainers_own_model_gets_what_came_since_the_last_trainer_took_something() -> None:
    """A checkpoint is newer than the copy here: what others gave meanwhile is not in it, but their models have paid."""
    theirs, daemons = two_mappings(SIZE)
    theirs.copies[0][:] = 1
    model_copy = ModelCopy(daemons)
    for correction in (1, 10, 100, 1000):  # taken, told of, not told of, and after the trainer's end
        if correction == 1000:
            model_copy.owned_here()
            model_copy.owned_here()  # said again, it changes nothing
        model_copy.add(np.full(SIZE, correction, np.float32))
        half = model_copy.drain()
        if correction == 1:
            assert half is not None
            model_copy.taken(half)
    assert model_copy.values().tolist() == [1112] * SIZE
    comes, next_one = two_mappings(SIZE)
    comes.copies[0][:] = 5
    fresh = ModelCopy(next_one)
    fresh.take_over(model_copy)
    assert fresh.values().tolist() == [1115] * SIZE
    assert fresh.waiting, "the trainer will take them as any others"


def test_what_a_trainer_is_to_load_has_no_correction_that_it_will_be_told_to_take() -> None:
    trainers, daemons = two_mappings(SIZE)
    model_copy = ModelCopy(daemons)
    model_copy.add(np.full(SIZE, 1, np.float32))
    half = model_copy.drain()
    assert half is not None
    copy = model_copy.load(np.full(SIZE, 10, np.float32), 5)
    model_copy.add(np.full(SIZE, 100, np.float32))
    assert trainers.copies[copy].tolist() == [10] * SIZE, "to the bit, whenever it reads it"
    assert model_copy.values().tolist() == model_copy.look().tolist() == [111] * SIZE
    model_copy.taken(half)
    trainers.copies[1 - copy][:] = 11
    model_copy.published(1 - copy, 6)
    assert model_copy.values().tolist() == model_copy.look().tolist() == [111] * SIZE


def test_a_trainer_that_takes_each_correction_at_once_costs_one_buffer() -> None:
    model_copy = ModelCopy(two_mappings(SIZE)[1])
    for _ in range(3):
        model_copy.add(np.ones(SIZE, np.float32))
        assert model_copy.drain() == 0
        model_copy.taken(0)
    model_copy.add(np.ones(SIZE, np.float32))
    assert (model_copy.drain(), len(model_copy.spares())) == (0, 1)
    model_copy.add(np.ones(SIZE, np.float32))
    assert not model_copy.spares()
    assert (model_copy.drain(), model_copy.waiting) == (None, [0, 1])


def test_padding_is_corrected_once_it_is_trained() -> None:
    trainers, daemons = two_mappings(SIZE)
    model_copy = ModelCopy(daemons, padding=[(1, 2)])
    ones = np.ones(SIZE, np.float32)

    def corrections() -> list[list[float]]:
        model_copy.add(ones)
        model_copy.add(ones)
        half = model_copy.drain()
        assert half is not None
        given = trainers.corrections[half][:2].tolist()
        model_copy.taken(half)
        return [given, model_copy.values()[:2].tolist()]

    assert corrections() == [[2, 0], [2, 0]]
    trainers.copies[1][:] = 5  # its weight is that of another layer, too
    model_copy.published(1, 1)
    assert corrections() == [[2, 2], [7, 7]]
    trainers.copies[0][:] = 0
    model_copy.published(0, 2)
    model_copy.owned_here()
    model_copy.add(ones)
    assert model_copy.values()[:2].tolist() == [1, 0]


def test_a_look_is_no_copy_and_cannot_be_written() -> None:
    daemons = two_mappings(SIZE)[1]
    model_copy = ModelCopy(daemons)
    seen = model_copy.look()
    assert np.shares_memory(seen, daemons.copies[0])
    with pytest.raises(ValueError, match="read-only"):
        seen += 1


def test_values_is_no_view_of_the_memory() -> None:
    trainers, daemons = two_mappings(SIZE)
    model_copy = ModelCopy(daemons)
    values = model_copy.values()
    values += 1
    trainers.copies[1][:] = 7
    assert not model_copy.values().any()
    assert daemons.board.current == 0


def test_a_half_is_handed_over_once_and_a_stranger_is_ignored() -> None:
    model_copy = ModelCopy(two_mappings(SIZE)[1])
    assert model_copy.drain() is None
    model_copy.add(np.ones(SIZE, np.float32))
    half = model_copy.drain()
    assert half is not None
    assert model_copy.drain() is None
    model_copy.taken(1 - half)
    np.testing.assert_array_equal(model_copy.values(), np.ones(SIZE))
    model_copy.taken(half)
    model_copy.taken(half)
    np.testing.assert_array_equal(model_copy.values(), np.ones(SIZE))
    assert not model_copy.waiting


@pytest.mark.parametrize("total", [0, 1, 1000])
def test_shared_memory_is_seen_from_both_sides(total: int) -> None:
    trainers, daemons = two_mappings(total)
    for number, (mine, theirs) in enumerate(
        zip(trainers.copies + trainers.corrections, daemons.copies + daemons.corrections, strict=True)
    ):
        assert not theirs.any()
        mine[:] = number + 1
    for number, theirs in enumerate(daemons.copies + daemons.corrections):
        assert theirs.shape == (total,)
        assert (theirs == number + 1).all()


def test_shared_memory_of_another_size_or_without_seals_is_refused() -> None:
    memory = SharedMemory.create(10)
    with pytest.raises(ValueError, match="not a sealed file of 4272 bytes"):
        SharedMemory(memory.fd, 11)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(memory.fd, 0)  # so that no process can make another's access fault
    memory.close_fd()
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 160)
    with pytest.raises(ValueError, match="not a sealed file"):
        SharedMemory(unsealed, 10)
    os.close(unsealed)


def test_a_copy_that_is_said_twice_counts_once() -> None:
    trainers, daemons = two_mappings(SIZE)
    model_copy = ModelCopy(daemons)
    model_copy.add(np.full(SIZE, 1, np.float32))
    trainers.copies[1][:] = 10
    for _ in range(2):
        model_copy.published(1, 6)
    assert model_copy.values().tolist() == [11] * SIZE
