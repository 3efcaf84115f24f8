"""When is a trainer said to make no steps? Beside its own pace, never while it waits for the swarm."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from peerd.daemon.trainer_session import TrainerPhase, TrainerSession, TrainerStatus
from peerd.daemon.trainer_watch import STALL_MIN_S, STALL_SHARE, TrainerWatch
from peerd.local.board import PAGE_BYTES, Board
from peerd.protocol.trainer import BarrierIs, Resume, Start

LOOK_S = 1.0


def _train(watch: TrainerWatch, steps: list[float], wait_s: float = 0.0, now: float = 0.0) -> float:
    """Make steps that take so long; after each one waits for the swarm. Returns the time."""
    status = watch.status
    looked = now

    def pass_until(until: float) -> None:
        nonlocal looked
        while looked + LOOK_S <= until:
            looked += LOOK_S
            watch.look(looked)
            assert not watch.stalled, looked

    for step_s in steps:
        pass_until(now + step_s)
        now += step_s
        status.last_step_at, status.waits = now, wait_s > 0
        pass_until(now + wait_s)
        now += wait_s
        if status.waits:
            status.waits, status.released_at = False, now
    return now


def _training() -> TrainerStatus:
    return TrainerStatus(pid=1, phase=TrainerPhase.TRAINING)


@given(st.lists(st.floats(0.001, 8.0), min_size=3, max_size=30), st.just(0.0) | st.floats(0.0, 100.0))
def test_no_step_that_is_like_the_others_is_a_stall(steps: list[float], wait_s: float) -> None:
    watch = TrainerWatch(_training())
    now = _train(watch, steps, wait_s)
    watch.look(now)
    assert watch.slowest_s <= max(steps) + 2 * LOOK_S


@given(st.lists(st.floats(0.5, 8.0), min_size=3, max_size=30))
def test_a_silence_that_is_long_beside_its_steps_is_one_and_a_step_ends_it(steps: list[float]) -> None:
    watch = TrainerWatch(_training())
    now = _train(watch, steps)
    watch.look(now)
    silent_s = max(STALL_MIN_S, STALL_SHARE * (max(steps) + 2 * LOOK_S))
    watch.look(now + silent_s + 1)
    stalled = [watch.stalled]
    watch.status.last_step_at = now + silent_s + 2
    watch.look(now + silent_s + 3)
    assert [*stalled, watch.stalled] == [True, False]
    watch.status.enter(TrainerPhase.GONE)
    watch.look(now + silent_s + 3)
    gone = [watch.stalled]
    watch.look(now + silent_s + 3 + STALL_MIN_S)
    assert [*gone, watch.stalled] == [False, True]


@pytest.mark.parametrize("stopped_s", [60.0, 7200.0])
def test_time_in_which_all_processes_were_stopped_is_no_part_of_a_step(stopped_s: float) -> None:
    watch = TrainerWatch(_training())
    now = _train(watch, [1.0, 1.0, 1.0]) + stopped_s
    watch.goes_on(now)
    watch.look(now + 1.0)
    stalled = [watch.stalled]
    now = _train(watch, [2.0, 1.0], now=now)
    watch.look(now)
    assert [*stalled, watch.slowest_s <= 2.0 + 2 * LOOK_S] == [False, True]


def test_who_waits_for_the_swarm_does_not_hang() -> None:
    watch = TrainerWatch(_training())
    now = _train(watch, [1.0, 1.0, 1.0])
    watch.status.waits = True
    watch.look(now + 1000)
    assert not watch.stalled


class _Script:
    """The trainer's end: what it says is put in `says`."""

    def __init__(self) -> None:
        self.says: list[dict[str, Any]] = []

    async def send(self, message: dict[str, Any]) -> None:
        """Nobody reads it."""

    async def receive(self) -> dict[str, Any]:
        return self.says.pop(0)


@pytest.mark.trio(clock="still")
async def test_a_trainer_waits_at_the_barrier_that_it_knows_of() -> None:
    script, status = _Script(), TrainerStatus(pid=1)
    step = {"kind": "step", "change": 0.1, "lr_ratio": 1.0, "stands": False, "published": None}
    session = TrainerSession(script, status, Board(memoryview(bytearray(PAGE_BYTES))))  # type: ignore[arg-type]

    async def waits_after(said: dict[str, Any]) -> bool:
        script.says.append(said)
        assert await session.receive() is not None
        return status.waits

    await session.tell(Start(None, 0, 0.1, 0))
    assert not await waits_after({**step, "step": 1})
    await session.tell(BarrierIs(2))
    assert not await waits_after({**step, "step": 2})  # said before it had heard of it: it may hang since
    assert not await waits_after({"kind": "barrier"})
    assert not await waits_after({**step, "step": 3})
    assert await waits_after({**step, "step": 4, "stands": True})
    await session.tell(Resume())
    waits = [status.waits]
    assert await waits_after({**step, "step": 6, "stands": True})
    await session.tell(BarrierIs(0))
    assert [*waits, status.waits] == [False, True]
    assert not await waits_after({"kind": "barrier"})
    assert status.released_at == trio.current_time()


def test_the_first_step_may_take_any_time() -> None:
    watch = TrainerWatch(_training())
    watch.look(1e6)
    assert not watch.stalled
    _train(watch, [1.0], now=1e6)
    watch.look(1e6 + 1)
    assert watch.slowest_s == 0
