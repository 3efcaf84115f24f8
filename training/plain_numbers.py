"""How is a number written, wherever a user or a plan gives one as text? In plain decimals, as every program reads them.

Python's own int() and float() take more: 1_0 is ten to them, so are the digits of any script, and spaces do not matter.
"""

from __future__ import annotations

import math
import re

DIGITS_MAX = 100
"""Of a whole number. Python itself reads 4,300, and would have a line that names one so long."""

_WHOLE = re.compile(r"-?[0-9]+")
_NUMBER = re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


def whole(text: str) -> int:
    """`7` or `-7`. Raises ValueError."""
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{ascii(text)[:60]} is not a whole number")
    if len(text) > DIGITS_MAX:
        raise ValueError(f"{text[:20]}... is too large a number")
    return int(text)


def number(text: str) -> float:
    """`7`, `-0.7`, `.7` or `7e-1`, and finite. Raises ValueError."""
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(value):
        raise ValueError(f"{ascii(text)[:60]} is not a number")
    return value


def count(text: str, most: int = 10**8) -> int:
    """From 1 to `most`; 0 for what is none."""
    try:
        value = whole(text)
    except ValueError:
        return 0
    return value if 1 <= value <= most else 0
