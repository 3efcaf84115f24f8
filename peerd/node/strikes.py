"""Who is not heard for a while? Whoever broke the rules three times within a minute.

A core: it knows no connection, and `now` comes in. One strike may be a damaged line; a node that crashes or loses
packets gets none. What is remembered is bounded: names cost a stranger nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from peerd.training.refusal import Refusal

STRIKES_MAX = 3
WINDOW_S = 60.0
REMEMBERED_MAX = 1024


@dataclass(slots=True)
class _Record:
    strikes: list[float] = field(default_factory=list)  # when, since the last refusal
    refusal: Refusal = field(default_factory=Refusal)


class Strikes:
    """The strikes of one node's peers."""

    def __init__(self) -> None:
        self._records: dict[Hashable, _Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def strike(self, who: Hashable, now: float) -> float:
        """Count a broken rule; for how many seconds `who` is refused, 0: it is not yet."""
        if who not in self._records:
            self._make_room(now)
        record = self._records.setdefault(who, _Record())
        if (left_s := record.refusal.left_s(now)) > 0:
            return left_s
        record.strikes = [at for at in record.strikes if now - at < WINDOW_S] + [now]
        if len(record.strikes) < STRIKES_MAX:
            return 0.0
        record.strikes = []
        return record.refusal.begin(now)

    def refused_s(self, who: Hashable, now: float) -> float:
        """For how many seconds from now `who` is refused; 0: it is heard."""
        record = self._records.get(who)
        return record.refusal.left_s(now) if record is not None else 0.0

    def forgive(self, whom: Callable[[Hashable], bool]) -> None:
        """Hold nothing against these any more."""
        for who in [who for who in self._records if whom(who)]:
            del self._records[who]

    def _make_room(self, now: float) -> None:
        if len(self._records) < REMEMBERED_MAX:
            return
        for who in [who for who, record in self._records.items() if _over(record, now)]:
            del self._records[who]
        if len(self._records) >= REMEMBERED_MAX:  # whoever is refused is forgotten last
            del self._records[min(self._records, key=lambda who: self._records[who].refusal.until)]


def _over(record: _Record, now: float) -> bool:
    """Whether it has no say in what comes."""
    recent = bool(record.strikes) and now - record.strikes[-1] < WINDOW_S
    return not recent and record.refusal.is_past(now)
