"""Helpers beside the tests that use them are importable by name."""

from __future__ import annotations

import inspect
import logging
import math
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import settings
from trio.testing import MockClock

settings.register_profile("peerd", deadline=None, print_blob=True)  # slow is no failure; a failure is replayed
settings.register_profile("quick", parent=settings.get_profile("peerd"), max_examples=10)
settings.load_profile("peerd")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background, and inherited
    signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("training", "transport", "simulation", "cli")]


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A daemon that ran in this process has set up logging; the next test finds it as it was."""
    logger = logging.getLogger("peerd")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture
def machine() -> Iterator[object]:
    """Real processes in folders of their own, and nothing left of them."""
    from machine import Machine  # only for whom it serves

    with Machine() as machine:
        yield machine


LIMIT_S = 60.0
CLOCKS: dict[str, Callable[[], trio.abc.Clock | None]] = {
    "real": lambda: None,
    "autojump": partial(MockClock, autojump_threshold=0),  # to the next deadline, when every task waits
    "still": MockClock,  # until the test moves it: what a thread does takes no time
}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """An `async def test_...` is run by trio, as `@pytest.mark.trio(clock=, limit_s=)` says where it is there."""
    mark = pyfuncitem.get_closest_marker("trio")
    how: Mapping[str, Any] = mark.kwargs if mark is not None else {}
    given = getattr(pyfuncitem.obj, "hypothesis", None)
    if given is not None:  # each example is a run of its own
        if inspect.iscoroutinefunction(given.inner_test):
            given.inner_test = _in_trio(given.inner_test, **how)
        return None
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    _in_trio(pyfuncitem.obj, **how)(**{name: pyfuncitem.funcargs[name] for name in names})
    return True


def _in_trio(
    test: Callable[..., Awaitable[None]], clock: str = "real", limit_s: float = LIMIT_S
) -> Callable[..., None]:
    async def limited(**arguments: Any) -> None:
        # a clock that is no real one comes to a limit at any moment: there, it is pytest's that holds
        with trio.fail_after(limit_s if clock == "real" else math.inf):
            await test(**arguments)

    @wraps(test)
    def run(**arguments: Any) -> None:
        trio.run(partial(limited, **arguments), clock=CLOCKS[clock]())

    return run
