"""What time is it for others, too? Certificates and tokens end by the wall clock; nothing else here goes by it."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> datetime:
    """To the second, as certificates have it."""
    return datetime.now(UTC).replace(microsecond=0)


def shown(moment: datetime) -> str:
    """As people read it."""
    return f"{moment:%Y-%m-%d %H:%M} UTC"
