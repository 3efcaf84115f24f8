"""How late the loop wakes, in virtual time: the clock jumps while a sample sleeps, as a blocked loop's would."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.daemon.metrics import SAMPLE_EVERY_S, SAMPLES, LoopLatency

EXACT = 1e-6


def measured(delays_s: list[float]) -> LoopLatency:
    """One sample for each of these delays."""
    latency = LoopLatency()
    clock = trio.testing.MockClock()  # moved by hand alone

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(latency.run)
            for delay_s in delays_s:
                await trio.testing.wait_all_tasks_blocked()
                clock.jump(SAMPLE_EVERY_S + delay_s)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    trio.run(main, clock=clock)
    return latency


def test_before_the_first_sample_it_is_0() -> None:
    assert measured([]).percentile(99) == 0


@settings(max_examples=50, deadline=None, print_blob=True)
@given(st.lists(st.floats(0, 10), min_size=1, max_size=30), st.floats(0, 100))
def test_it_is_the_percentile_of_what_the_loop_was_late_by(delays_s: list[float], percent: float) -> None:
    expected = float(np.percentile(delays_s, percent))
    assert measured(delays_s).percentile(percent) == pytest.approx(expected, abs=EXACT)


def test_one_long_block_among_a_hundred_shows_in_the_99th_and_not_in_the_median() -> None:
    latency = measured([0.5 if index == 50 else 0.0 for index in range(100)])
    assert latency.percentile(50) == pytest.approx(0, abs=EXACT)
    assert latency.percentile(100) == pytest.approx(0.5, abs=EXACT)
    assert latency.percentile(99) > 0


def test_what_is_longer_ago_than_a_minute_is_forgotten() -> None:
    latency = measured([5.0] * 100 + [0.0] * SAMPLES)
    assert latency.percentile(100) == pytest.approx(0, abs=EXACT)


def test_who_asks_first_waits_for_no_import() -> None:
    code = """if True:
        import sys
        import numpy as np
        from peerd.daemon.metrics import LoopLatency
        latency = LoopLatency()
        latency._late.extend([0.0, 0.1, 0.3])
        before = set(sys.modules)
        assert latency.percentile(50) == 0.1
        print(*set(sys.modules) - before)
    """
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ended.stdout.split() == []
