"""A machine for each test; what ran on it is killed afterwards, and none of it may have shown a traceback."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from machine import Machine

pytest.register_assert_rewrite("measured")


@pytest.fixture
def machine(machine: Machine) -> Iterator[Machine]:
    yield machine
    # a loader's worker whose trainer was killed says so itself: its own thread, none of peerd's code
    assert [each for each in machine.logs().split("Traceback")[1:] if "resource_sharer.py" not in each] == []
