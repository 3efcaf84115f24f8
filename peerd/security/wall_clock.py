"""What time is it for others, too? Certificates and tokens end by the wall clock; nothing else here goes by it."""

from __future__ import annotations

from datetime import UTC, datetime

BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)
"""It is later: all of this was written after it."""


def now() -> datetime:
    """To the second, as certificates have it."""
    return datetime.now(UTC).replace(microsecond=0)


def shown(moment: datetime) -> str:
    """As people read it."""
    return f"{moment:%Y-%m-%d %H:%M} UTC"
