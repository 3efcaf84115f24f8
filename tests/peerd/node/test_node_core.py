"""The daemon's core: corrections go into the copy before anything is performed, and come to the trainer in buffers."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import numpy as np
import pytest

from peerd.local.shared_memory import SharedMemory
from peerd.node.core import BufferTaken, CopyRead, ModelIs, ModelWanted, NodeCore, Nothing, TakeBuffer
from peerd.node.model_copy import ModelCopy
from peerd.training.effects import Apply, Effect, Publish, StepReport
from peerd.training.mode_core import TRANSITIONS, ModeBegins, ModeEnds, ModePhase, PeersChanged, Received, Stepped
from peerd.training.modes import EVERY_STEP
from peerd.transport.messages import AS_STARTED, Finished


class Asking:
    """A mode that asks for what the test says, whatever comes."""

    deadline = float("inf")
    barrier = 0
    quiet = EVERY_STEP
    under_way = False

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.asks: list[Effect] = []

    def on_step(self, *_: Any) -> list[Effect]:
        return self.asks

    on_message = on_peers = on_timer = on_step

    def succeeds(self, last: Any) -> None:
        pass

    def works_in_place(self, spares: Any) -> bool:
        return False

    def end(self) -> None:
        return None


def test_corrections_are_in_the_copy_before_anything_is_performed() -> None:
    memory = SharedMemory.create(2)
    other = SharedMemory(os.dup(memory.fd), 2)
    memory.close_fd()
    other.close_fd()
    core, mode = NodeCore(), Asking()
    core.model, core.mode = ModelCopy(other), mode  # type: ignore[assignment]
    core.handle_all(PeersChanged(frozenset("a")), 0.0)
    mode.asks = [Apply(np.array([1, 2], np.float32)), Publish(), Apply(np.array([10, 20], np.float32))]
    publish, first = core.handle_all(Received("a", Finished()), 0.0)
    assert publish == Publish()
    assert isinstance(first, TakeBuffer)
    assert memory.corrections[first.buffer].tolist() == [11, 22]
    mode.asks = [Apply(np.array([5, 5], np.float32))]
    assert core.handle_all(Received("a", Finished()), 0.0) == [], "the trainer has a buffer already"
    (found,) = core.handle_all(ModelWanted(), 0.0)
    assert isinstance(found, ModelIs)
    assert found.values.tolist() == [16, 27]
    assert core.handle_all(BufferTaken(first.buffer), 0.0) == [TakeBuffer(1 - first.buffer)]
    assert core.handle_all(Nothing(), 0.0) == []


def test_a_copy_that_came_is_said_before_what_follows_from_it() -> None:
    memory = SharedMemory.create(2)
    core, mode = NodeCore(), Asking()
    core.model, core.mode = ModelCopy(memory), mode  # type: ignore[assignment]
    mode.asks = [Publish()]
    report = StepReport(7, 1.0, 1.0, published=True, finishing=False)
    assert core.handle_all(Stepped(report, 1), 0.0) == [CopyRead(), Publish()]
    assert core.model.step == 7


def test_a_mode_comes_to_an_end_as_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: set[tuple[ModePhase, ModePhase]] = set()
    enter = NodeCore._enter

    def seen(core: NodeCore, phase: ModePhase) -> None:
        gone.add((core.phase, phase))
        enter(core, phase)

    monkeypatch.setattr(NodeCore, "_enter", seen)
    memory = SharedMemory.create(2)
    core, mode = NodeCore(), Asking()
    core.model = ModelCopy(memory)
    begins = ModeBegins(AS_STARTED, frozenset("a"), lambda _: mode)  # type: ignore[arg-type, return-value]
    said = Received("a", Finished())

    def hears() -> bool:
        mode.asks = [Publish()]
        heard = core.handle(said, 0.0) == [Publish()]
        mode.asks = []
        return heard

    core.handle(begins, 0.0)
    for under_way in (True, True, False, False):
        mode.under_way = under_way
        core.handle(ModeEnds(), 0.0)
        assert hears() == under_way, "until nothing is under way"
    for ended in (False, True):
        mode.under_way = not ended
        core.handle(begins, 0.0)
        core.handle(ModeEnds(), 0.0)
        core.handle(begins, 0.0)
        assert hears()
    core.handle(begins, 0.0)
    assert gone == {(one, other) for one, following in TRANSITIONS.items() for other in following}
