"""Is there a UCX to test with?"""

from __future__ import annotations

import pytest

from peerd.transport import ucx


def why_not() -> str:
    try:
        ucx.load()
    except ucx.UcxError as error:
        return str(error)
    return ""


needs_ucx = pytest.mark.skipif(bool(why_not()), reason=f"no UCX here: {why_not()}")
