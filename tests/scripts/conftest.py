"""A machine for each test; what ran on it is killed afterwards, and none of it may have shown a traceback."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from machine import Machine

pytest.register_assert_rewrite("measured")


@pytest.fixture
def machine(machine: Machine) -> Iterator[Machine]:
    yield machine
    assert "Traceback" not in machine.logs()
