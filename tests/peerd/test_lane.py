"""The lane: one job at a time, in order, away from the loop; errors reach whoever waits."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.effects import Apply, Effect, Log, PeerError, Proceed, Publish
from peerd.lane import HandOver, Lane
from peerd.replica import Replica
from peerd.shared_memory import SharedMemory


def run(body: Callable[[Lane, list[Effect | HandOver]], Awaitable[None]]) -> None:
    """With a running lane and the list of what its jobs asked for."""
    performed: list[Effect | HandOver] = []

    async def perform(effects: list[Effect | HandOver]) -> None:
        performed.extend(effects)

    async def main() -> None:
        lane = Lane(perform)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lane.run)
                await body(lane, performed)
                nursery.cancel_scope.cancel()

    trio.run(main)


@settings(max_examples=30, deadline=None, print_blob=True)
@given(st.lists(st.booleans(), max_size=12))
def test_jobs_run_one_at_a_time_in_the_order_of_the_events(waited_for: list[bool]) -> None:
    async def body(lane: Lane, performed: list[Effect | HandOver]) -> None:
        began: list[int] = []
        running: list[int] = []

        def job(number: int) -> Callable[[float], list[Effect]]:
            def work(_: float) -> list[Effect]:
                assert not running, "two jobs at once"
                running.append(number)
                began.append(number)
                time.sleep(0)
                running.pop()
                return [Log("info", str(number))]

            return work

        async with trio.open_nursery() as nursery:
            for number, wait in enumerate(waited_for):
                if wait:
                    nursery.start_soon(lane.call, job(number))
                    await trio.testing.wait_all_tasks_blocked()
                else:
                    lane.post(job(number))
        await lane.call(lambda _: [])
        assert began == list(range(len(waited_for)))
        assert performed == [Log("info", str(number)) for number in began]

    run(body)


def test_an_error_reaches_the_caller_and_the_lane_goes_on() -> None:
    async def body(lane: Lane, performed: list[Effect | HandOver]) -> None:
        def wrong(_: float) -> list[Effect]:
            raise PeerError("a bad payload")

        with pytest.raises(PeerError, match="a bad payload"):
            await lane.call(wrong)
        await lane.call(lambda _: [Publish()])
        assert performed == [Publish()]

    run(body)


def test_an_error_of_a_posted_job_is_a_bug_and_is_not_hidden() -> None:
    async def body(lane: Lane, _: list[Effect | HandOver]) -> None:
        def wrong(_: float) -> list[Effect]:
            raise ZeroDivisionError

        lane.post(wrong)
        await trio.sleep_forever()

    with pytest.raises(ExceptionGroup) as failure:
        run(body)
    assert failure.group_contains(ZeroDivisionError)


def test_a_caller_that_is_cancelled_leaves_its_job_in_the_line() -> None:
    async def body(lane: Lane, performed: list[Effect | HandOver]) -> None:
        gate = threading.Event()

        def slow(_: float) -> list[Effect]:
            gate.wait(60)
            return [Publish()]

        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lane.call, slow)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        gate.set()
        await lane.call(lambda _: [Proceed()])
        assert performed == [Publish(), Proceed()]

    run(body)


def test_the_loop_runs_while_a_job_computes() -> None:
    async def body(lane: Lane, _: list[Effect | HandOver]) -> None:
        loop = threading.get_ident()
        turn = threading.Event()
        threads: list[int] = []

        def slow(_: float) -> list[Effect]:
            threads.append(threading.get_ident())
            assert turn.wait(60), "the loop had no turn"
            return []

        lane.post(slow)
        while not threads:
            await trio.sleep(0)
        turn.set()
        await lane.call(lambda _: [])
        assert threads != [loop]

    run(body)


def test_corrections_are_in_the_replica_before_anything_is_performed() -> None:
    memory = SharedMemory.create(2)
    other = SharedMemory(os.dup(memory.fd), 2)
    memory.close_fd()
    other.close_fd()

    async def body(lane: Lane, performed: list[Effect | HandOver]) -> None:
        replica = lane.replica = Replica(other)
        await lane.call(lambda _: [Apply(np.float32([1, 2])), Publish(), Apply(np.float32([10, 20]))])
        (publish, hand_over) = performed
        assert publish == Publish()
        assert isinstance(hand_over, HandOver)
        assert memory.corrections[hand_over.half].tolist() == [11, 22]
        await lane.call(lambda _: [Apply(np.float32([5, 5]))])
        assert len(performed) == 2, "the trainer has a half already"
        assert replica.values().tolist() == [16, 27]

        def taken(_: float) -> list[Effect]:
            replica.taken(hand_over.half)
            return []

        await lane.call(taken)
        assert performed[2:] == [HandOver(1 - hand_over.half)]

    run(body)


def test_a_job_is_told_the_time_at_which_it_starts() -> None:
    async def body(lane: Lane, _: list[Effect | HandOver]) -> None:
        times: list[float] = []

        def note(now: float) -> list[Effect]:
            times.append(now)
            return []

        before = trio.current_time()
        await lane.call(note)
        await lane.call(note)
        assert before <= times[0] <= times[1] <= trio.current_time()

    run(body)


def test_the_worker_is_nicer_than_its_process_and_never_less() -> None:
    async def body(lane: Lane, _: list[Effect | HandOver]) -> None:
        found: list[int] = []

        def look(_: float) -> list[Effect]:
            found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return []

        await lane.call(look)
        assert found == [min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)]

    run(body)
