"""What `peerd status` shows a user who has never seen it: no word without a line that explains it."""

from __future__ import annotations

import re
from pathlib import Path

from peerd.cli.status import status
from peerd.training.trigger import TRIGGERS

MODES = Path(__file__).parent.parent.parent / "training" / "modes"


def test_the_help_explains_every_trigger_decision() -> None:
    decisions = {name for path in MODES.glob("*.py") for name in re.findall(r'"trigger_([a-z_]+)"', path.read_text())}
    assert {"quiet", "finishing"} <= decisions
    assert not {word for word in {*decisions, *TRIGGERS, "silence"} if word not in str(status.__doc__)}
