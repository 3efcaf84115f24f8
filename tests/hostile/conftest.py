"""The honest nodes of each file here: what they are, it says in VICTIMS."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import victims as honest
from victims import Victims


@pytest.fixture(scope="module")
def swarm(request: pytest.FixtureRequest) -> Iterator[Victims]:
    yield from honest.victims(**getattr(request.module, "VICTIMS", {}))


@pytest.fixture
def them(swarm: Victims) -> Victims:
    return swarm.revive()
