"""Helpers beside the tests that use them are importable by name."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("peerd", deadline=None, print_blob=True)  # slow is no failure; a failure is replayed
settings.load_profile("peerd")

sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("training", "transport", "simulation")]


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A daemon that ran in this process has set up logging; the next test finds it as it was."""
    logger = logging.getLogger("peerd")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
