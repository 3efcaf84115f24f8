"""Which half message is given up when too many bytes are on their way in? A core: it knows no connection.

A connection has one bulk message under way, no larger than the model allows, and a peer has one connection to send on.
So honest peers have at most (members) x (one message) on its way at once: that is the budget, and a larger model or
swarm has a larger one. What exceeds it are half messages that nobody means to end. Honest ones end, so of those that
have not ended the oldest goes first, of peers that have proved nothing before all others. What has come whole and waits
to be handled counts as well, and is never given up: its bytes are spent, and its sender waits for us.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

ConnectionT = TypeVar("ConnectionT")


@dataclass(slots=True)
class _Bulk:
    size: int
    whole: bool = False


class ReceiveBudget(Generic[ConnectionT]):
    """The bulk messages on their way in to one node."""

    def __init__(self) -> None:
        self.bytes = 0
        self._under_way: dict[ConnectionT, _Bulk] = {}  # the oldest first

    def begin(
        self, connection: ConnectionT, size: int, limit: int, proved: Callable[[ConnectionT], bool]
    ) -> list[ConnectionT]:
        """A message of `size` bytes begins, where all may have `limit`; return those to give up, perhaps this one."""
        self.end(connection)
        self._under_way[connection] = _Bulk(size)
        self.bytes += size
        given_up: list[ConnectionT] = []
        while self.bytes > limit:
            halves = [connection for connection, bulk in self._under_way.items() if not bulk.whole]
            given_up.append(next((connection for connection in halves if not proved(connection)), halves[0]))
            self.end(given_up[-1])
            if given_up[-1] == connection:
                break
        return given_up

    def whole(self, connection: ConnectionT) -> None:
        """Its message has come whole."""
        if (bulk := self._under_way.get(connection)) is not None:
            bulk.whole = True

    def end(self, connection: ConnectionT) -> None:
        """Its message was handled, or the connection has ended."""
        if (bulk := self._under_way.pop(connection, None)) is not None:
            self.bytes -= bulk.size
