"""Helpers beside the tests that use them are importable by name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("training", "transport")]
