"""Helpers beside the tests that use them are importable by name."""

from __future__ import annotations

import gc
import inspect
import logging
import math
import os
import random
import signal
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import settings
from trio.testing import MockClock

# read as torch is imported: its threads spin while they wait for each other, and other tests have the cores
os.environ["OMP_NUM_THREADS"] = "1"

# slow is no failure; a failure is replayed
settings.register_profile("peerd", deadline=None, print_blob=True, max_examples=30)
settings.register_profile("quick", parent=settings.get_profile("peerd"), max_examples=10)
settings.register_profile("thorough", parent=settings.get_profile("peerd"), max_examples=100)
settings.register_profile("long", parent=settings.get_profile("peerd"), max_examples=10_000)  # by hand, with a seed
settings.load_profile("peerd")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background, and inherited
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHARES = {"peerd": 0.3, "quick": 0.1}
"""By profile: of the examples that a test says itself, so many are drawn."""
_fewer: set[object] = set()  # whose examples are that many now

HELPERS = ("training", "transport", "simulation", "peerd", "cli")
sys.path[:0] = [str(Path(__file__).parent / folder) for folder in HELPERS]


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A daemon that ran in this process has set up logging; the next test finds it as it was."""
    logger = logging.getLogger("peerd")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(autouse=True, scope="session")
def _a_state_folder_for_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nodes of this process have an authority of their user's, which is to be none of whoever runs the tests."""
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    del os.environ["XDG_STATE_HOME"]
    if before is not None:
        os.environ["XDG_STATE_HOME"] = before


@pytest.fixture
def machine() -> Iterator[object]:
    """Real processes in folders of their own, and nothing left of them."""
    from machine import Machine  # only for whom it serves

    with Machine() as machine:
        yield machine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="run all cases of every test (make thorough)")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        os.environ.setdefault("PEERD_TESTS_LOT", str(random.randrange(2**32)))  # one for all workers, which inherit it


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"PEERD_TESTS_LOT={os.environ['PEERD_TESTS_LOT']} draws the same cases again")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the tests that take long a run takes some, with some of their cases and examples: others each time.

    `make thorough` takes all; so does whoever names files or tests, of cases.
    """
    share = SHARES.get(settings.get_current_profile_name() or "", 1.0)
    for item in items:
        _draw_fewer_examples(item, share)
    named = config.option.keyword or getattr(config.option, "lf", False) or any(".py" in arg for arg in config.args)
    if config.getoption("--all-cases") or named:
        return
    lot = random.Random(os.environ["PEERD_TESTS_LOT"])
    cases: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)  # by their test, and how many of them are drawn
    for item in items:
        mark = item.get_closest_marker("cases")
        if mark is not None and item.get_closest_marker("soak") is None:
            cases[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    left_out = {one for (_, count), each in cases.items() for one in lot.sample(each, max(0, len(each) - count))}
    seldom: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("one_run_in")
        if mark is not None:
            seldom[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    left_out.update(item for (_, runs), each in seldom.items() if lot.randrange(runs) for item in each)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _draw_fewer_examples(item: pytest.Item, share: float) -> None:
    """Of a test that says itself how many it draws."""
    held, name = getattr(item, "obj", None), "_hypothesis_internal_use_settings"
    if isinstance(item, pytest.Function) and item.cls is not None and hasattr(item.cls, "settings"):
        held, name = item.cls, "settings"  # a state machine's test case
    own = getattr(held, name, None)
    if own is not None and own.max_examples != settings().max_examples and held not in _fewer:
        _fewer.add(held)  # once, whatever its cases
        setattr(held, name, settings(own, max_examples=math.ceil(share * own.max_examples)))


def pytest_collection_finish() -> None:
    """What is there by now stays: torch, and 5000 tests. Going through it again and again took 5 % of a run."""
    gc.collect()
    gc.freeze()


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
