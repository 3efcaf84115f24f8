"""How many rows of tables may one host exchange with us? Each costs the loop's time, theirs and ours alike."""

from __future__ import annotations

ROWS_PER_S = 8192  # a row that is new takes some 20 us: a sixth of the loop's time
BURST_ROWS = 1 << 15  # all tables of 180 nodes of one host that join at once, or four of the longest both ways
SOURCES_MAX = 1024


class TableBudget:
    """A token bucket for each host, kept as the time at which it is full again."""

    def __init__(self) -> None:
        self._full_at: dict[str, float] = {}

    def wait_s(self, host: str, rows: int, now: float) -> float:
        """How long to wait before so many rows more are taken from, or given to, this host."""
        full_at = max(now, self._full_at.pop(host, now)) + rows / ROWS_PER_S
        if len(self._full_at) >= SOURCES_MAX:
            self._full_at = {known: at for known, at in self._full_at.items() if at > now}
        if len(self._full_at) >= SOURCES_MAX:
            del self._full_at[next(iter(self._full_at))]
        self._full_at[host] = full_at
        return max(0.0, full_at - now - BURST_ROWS / ROWS_PER_S)
