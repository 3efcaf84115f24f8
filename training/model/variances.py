"""What does a correction leave of a running variance? At least a tenth, so that it stays a variance.

Corrections are sums of differences, made while the model moves on: two that overlap can each take most of a variance
away, and a negative one is not a number under the root. What the bound holds back stays in the difference that the
mode sees next. A tenth is still a fall of 90 % for each correction, and one to any value > 0 ends.
"""

from __future__ import annotations

import re
from typing import Any

SHARE_LEFT = 0.1

_NAME = re.compile(r"(?:^|_)(?:var|variance)(?:_|$)")
_SIGNED = re.compile(r"log|cov")  # a logarithm or a covariance may well be negative


def is_variance(name: str) -> bool:
    """Whether a buffer of this (dotted) name holds variances."""
    last = name.rpartition(".")[2].lower()
    return _NAME.search(last) is not None and _SIGNED.search(last) is None


def bounded(before: Any, after: Any) -> Any:
    """`after`, but no value below a tenth of `before`, where that is not negative.

    Both are numpy arrays or both torch tensors, of one shape and float type; so is the result, and it is the same bits
    of either: the trainer's model and the daemon's copy of it go together.
    """
    least = before * SHARE_LEFT
    low = (before >= 0) & (after < least)
    return after * ~low + least * low
