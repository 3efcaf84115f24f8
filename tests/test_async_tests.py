"""What tests/conftest.py promises of an async test: it is run to its end, with Hypothesis too."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st


class Ended(Exception):
    """A test that nobody runs does not raise it, and is no failure either."""


ends = pytest.mark.xfail(raises=Ended, strict=True)


@ends
async def test_an_async_test_is_run() -> None:
    await trio.lowlevel.checkpoint()
    raise Ended


@ends
@settings(database=None)
@given(number=st.integers())
async def test_each_example_is_run(number: int) -> None:
    await trio.lowlevel.checkpoint()
    if number > 1000:
        raise Ended


@ends
@pytest.mark.trio(clock="autojump")
async def test_a_clock_that_jumps_and_a_fixture(tmp_path: Path) -> None:
    assert tmp_path.exists()
    await trio.sleep(1e6)
    raise Ended


@pytest.mark.xfail(raises=trio.TooSlowError, strict=True)
@pytest.mark.trio(limit_s=0.01)
async def test_one_that_goes_on_is_ended() -> None:
    await trio.sleep_forever()
