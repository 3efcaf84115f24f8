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

from peerd.effects import Vector
from peerd.replica import Replica
from peerd.shared_memory import SharedMemory

SIZE = 3
vectors = st.lists(st.integers(-50, 50), min_size=SIZE, max_size=SIZE).map(np.float32)


def two_mappings(total: int) -> tuple[SharedMemory, SharedMemory]:
    """The trainer's side and the daemon's, as after the descriptor was passed."""
    trainers = SharedMemory.create(total)
    daemons = SharedMemory(os.dup(trainers.fd), total)
    trainers.close_fd()
    daemons.close_fd()
    return trainers, daemons


class Trainer:
    """What peerd/trainer.py does with the memory; its words to the daemon wait in `said`, in order."""

    def __init__(self, memory: SharedMemory, model: Vector) -> None:
        self.memory = memory
        self.model = model.copy()
        self.handed: deque[int] = deque()  # "corrections" messages on their way here
        self.said: deque[tuple[str, int]] = deque()  # "taken" and "published" on their way there
        memory.copies[0][:] = model

    def take(self) -> None:
        half = self.handed.popleft()
        self.model += self.memory.corrections[half]
        self.said.append(("taken", half))

    def publish(self, copy: int) -> None:
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
        self.replica = Replica(theirs)
        self.known = model.copy()  # what the trainer held when it last published, as far as the daemon has heard
        self.corrected = np.zeros(SIZE, np.float32)  # by the swarm since the beginning
        self.in_known = self.corrected.copy()  # the part of it in `known`
        self.publishing: deque[tuple[Vector, Vector]] = deque()  # `known` and `in_known` of publishes on their way
        self.asked = False
        self.taken_total = np.zeros(SIZE, np.float32)

    @rule(corrections=st.lists(vectors, max_size=2))
    def the_swarm_corrects(self, corrections: list[Vector]) -> None:
        """One job of the lane, which hands over at its end."""
        for correction in corrections:
            self.replica.add(correction)
            self.corrected += correction
        half = self.replica.hand_over()
        if half is not None:
            assert self.trainer is not None, "handed to nobody"
            assert not self.trainer.handed, "two halves under way"
            self.trainer.handed.append(half)

    @precondition(lambda self: self.trainer)
    @rule(step=vectors)
    def trainer_steps(self, step: Vector) -> None:
        """And takes what waits, between two steps."""
        self.trainer.model += step
        before = self.trainer.model.copy()
        if self.trainer.handed:
            self.trainer.take()
        self.taken_total += self.trainer.model - before

    @precondition(lambda self: self.trainer and not self.asked)
    @rule()
    def trainer_publishes(self) -> None:
        self.asked = True  # one at a time, as the session asks
        self.trainer.publish(self.replica.spare_copy)
        self.publishing.append((self.trainer.model.copy(), self.taken_total.copy()))

    @precondition(lambda self: self.trainer and self.trainer.said)
    @rule()
    def daemon_hears(self) -> None:
        word, number = self.trainer.said.popleft()
        if word == "taken":
            self.replica.taken(number)
        else:
            self.asked = False
            self.replica.published(number)
            self.known, self.in_known = self.publishing.popleft()

    @precondition(lambda self: self.trainer)
    @rule()
    def trainer_dies(self) -> None:
        """What it said still arrives: the socket delivers before it ends."""
        while self.trainer.said:
            self.daemon_hears()
        self.replica.owned_here()
        self.trainer = None
        self.asked = False

    @precondition(lambda self: not self.trainer)
    @rule(model=vectors)
    def trainer_comes_back(self, model: Vector) -> None:
        """It publishes its own model and is told to load the daemon's."""
        mine, theirs = two_mappings(SIZE)
        trainer = Trainer(mine, model)
        fresh = Replica(theirs)
        copy = fresh.load(self.replica.values())
        trainer.model[:] = mine.copies[copy]
        self.trainer, self.replica = trainer, fresh
        self.known, self.in_known = trainer.model.copy(), self.corrected.copy()
        self.taken_total = self.corrected.copy()

    @invariant()
    def the_daemon_knows_the_published_model_and_every_correction(self) -> None:
        if hasattr(self, "replica"):
            expected = self.known + (self.corrected - self.in_known)
            np.testing.assert_array_equal(self.replica.values(), expected)

    @invariant()
    def the_trainer_lacks_only_what_waits_for_it(self) -> None:
        if not getattr(self, "trainer", None):
            return
        waiting = self.corrected - self.taken_total
        if not self.replica.has_corrections:
            assert not waiting.any()
        if not (self.publishing or self.trainer.said):
            halves = self.trainer.memory.corrections
            np.testing.assert_array_equal(halves[0] + halves[1], waiting)


TestExchange = Exchange.TestCase
TestExchange.settings = settings(max_examples=120, stateful_step_count=25, deadline=None, print_blob=True)


def test_values_is_no_view_of_the_memory() -> None:
    trainers, daemons = two_mappings(SIZE)
    replica = Replica(daemons)
    values = replica.values()
    values += 1
    trainers.copies[1][:] = 7
    assert not replica.values().any()
    assert replica.spare_copy == 1


def test_a_half_is_handed_over_once_and_a_stranger_is_ignored() -> None:
    replica = Replica(two_mappings(SIZE)[1])
    assert replica.hand_over() is None
    replica.add(np.ones(SIZE, np.float32))
    half = replica.hand_over()
    assert half is not None
    assert replica.hand_over() is None
    replica.taken(1 - half)
    np.testing.assert_array_equal(replica.values(), np.ones(SIZE))
    replica.taken(half)
    replica.taken(half)
    np.testing.assert_array_equal(replica.values(), np.ones(SIZE))
    assert not replica.has_corrections


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
    with pytest.raises(ValueError, match="not a sealed file of 176 bytes"):
        SharedMemory(memory.fd, 11)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(memory.fd, 0)  # so that no process can make another's access fault
    memory.close_fd()
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 160)
    with pytest.raises(ValueError, match="not a sealed file"):
        SharedMemory(unsealed, 10)
    os.close(unsealed)
