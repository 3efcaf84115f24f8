"""The compute thread: one job at a time, in order, away from the loop; errors reach whoever waits."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.daemon.compute_thread import ComputeThread
from peerd.training.effects import Effect, Log, Proceed, Publish
from peerd.transport.errors import PeerError

Job = Callable[[float], list[Effect]]
Worker = ComputeThread[Job, list[Effect]]


@asynccontextmanager
async def running_thread(is_short: Callable[[], bool] = lambda: False) -> AsyncIterator[tuple[Worker, list[Effect]]]:
    """A running compute thread and the list of what its jobs asked for."""
    performed: list[Effect] = []

    async def perform(effects: list[Effect]) -> None:
        performed.extend(effects)

    compute: Worker = ComputeThread(lambda job, now: job(now), perform, is_short=is_short)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(compute.run)
        yield compute, performed
        nursery.cancel_scope.cancel()


@settings(max_examples=30, deadline=None, print_blob=True)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12))
async def test_jobs_run_one_at_a_time_in_the_order_of_the_events(jobs: list[tuple[bool, bool]]) -> None:
    waited_for, short = [wait for wait, _ in jobs], [is_short for _, is_short in jobs] + [False]
    began: list[int] = []
    on_the_loop: list[bool] = []
    async with running_thread(lambda: short[len(began)]) as (compute, performed):
        running: list[int] = []
        loop = threading.get_ident()

        def job(number: int) -> Callable[[float], list[Effect]]:
            def work(_: float) -> list[Effect]:
                assert not running, "two jobs at once"
                running.append(number)
                began.append(number)
                on_the_loop.append(threading.get_ident() == loop)
                time.sleep(0)
                running.pop()
                return [Log(str(number))]

            return work

        async with trio.open_nursery() as nursery:
            for number, wait in enumerate(waited_for):
                if wait:
                    nursery.start_soon(compute.call, job(number))
                    await trio.testing.wait_all_tasks_blocked()
                else:
                    compute.post(job(number))
        await compute.call(lambda _: [])
        assert began == list(range(len(waited_for)))
        assert performed == [Log(str(number)) for number in began]
        assert on_the_loop == short[:-1]


@pytest.mark.parametrize("short", [False, True])
async def test_an_error_reaches_the_caller_and_the_thread_goes_on(short: bool) -> None:
    async with running_thread(lambda: short) as (compute, performed):

        def wrong(_: float) -> list[Effect]:
            raise PeerError("a bad payload")

        with pytest.raises(PeerError, match="a bad payload"):
            await compute.call(wrong)
        await compute.call(lambda _: [Publish()])
        assert performed == [Publish()]


async def test_an_error_of_a_posted_job_is_a_bug_and_is_not_hidden() -> None:
    def wrong(_: float) -> list[Effect]:
        raise ZeroDivisionError

    async def waiting() -> None:
        async with running_thread() as (compute, _):
            compute.post(wrong)
            await trio.sleep_forever()

    with pytest.raises(ExceptionGroup) as failure:
        await waiting()
    assert failure.group_contains(ZeroDivisionError)


async def test_an_error_that_is_forgiven_lets_the_thread_go_on() -> None:
    performed: list[Effect] = []
    errors: list[Exception] = []

    async def perform(effects: list[Effect]) -> None:
        performed.extend(effects)

    def forgiven(_: Job, error: Exception) -> bool:
        errors.append(error)
        return True

    def wrong(_: float) -> list[Effect]:
        raise ZeroDivisionError

    compute: Worker = ComputeThread(lambda job, now: job(now), perform, forgiven)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(compute.run)
        compute.post(wrong)
        await compute.call(lambda _: [Publish()])
        nursery.cancel_scope.cancel()
    assert performed == [Publish()]
    assert [type(error) for error in errors] == [ZeroDivisionError]


async def test_threads_that_hang_elsewhere_hold_up_no_job() -> None:
    gate = threading.Event()
    limiter = trio.to_thread.current_default_thread_limiter()
    try:
        async with trio.open_nursery() as nursery, running_thread() as (compute, _):
            for _name in range(int(limiter.total_tokens)):
                nursery.start_soon(trio.to_thread.run_sync, gate.wait, 60)
            await trio.testing.wait_all_tasks_blocked()
            assert limiter.available_tokens == 0
            with trio.fail_after(30):
                await compute.call(lambda _: [])
            gate.set()
    finally:
        gate.set()


async def test_a_caller_that_is_cancelled_leaves_its_job_in_the_line() -> None:
    async with running_thread() as (compute, performed):
        gate = threading.Event()

        def slow(_: float) -> list[Effect]:
            gate.wait(60)
            return [Publish()]

        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(compute.call, slow)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        gate.set()
        await compute.call(lambda _: [Proceed()])
        assert performed == [Publish(), Proceed()]


async def test_the_loop_runs_while_a_job_computes() -> None:
    async with running_thread() as (compute, _):
        loop = threading.get_ident()
        turn = threading.Event()
        threads: list[int] = []

        def slow(_: float) -> list[Effect]:
            threads.append(threading.get_ident())
            assert turn.wait(60), "the loop had no turn"
            return []

        compute.post(slow)
        while not threads:
            await trio.sleep(0)
        turn.set()
        await compute.call(lambda _: [])
        assert threads != [loop]


async def test_a_job_is_told_the_time_at_which_it_starts() -> None:
    async with running_thread() as (compute, _):
        times: list[float] = []

        def note(now: float) -> list[Effect]:
            times.append(now)
            return []

        before = trio.current_time()
        await compute.call(note)
        await compute.call(note)
        assert before <= times[0] <= times[1] <= trio.current_time()


async def test_the_worker_is_nicer_than_its_process_and_never_less() -> None:
    async with running_thread() as (compute, _):
        found: list[int] = []

        def look(_: float) -> list[Effect]:
            found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return []

        await compute.call(look)
        assert found == [min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)]
