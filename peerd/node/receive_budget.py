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

Link = TypeVar("Link")


@dataclass(slots=True)
class _Bulk:
    size: int
    whole: bool = False


class ReceiveBudget(Generic[Link]):
    """The bulk messages on their way in to one node."""

    def __init__(self) -> None:
        self.bytes = 0
        self._under_way: dict[Link, _Bulk] = {}  # the oldest first

    def begin(self, link: Link, size: int, limit: int, proved: Callable[[Link], bool]) -> list[Link]:
        """A message of `size` bytes begins, where all may have `limit`; return the links to give up, perhaps `link`."""
        self.end(link)
        self._under_way[link] = _Bulk(size)
        self.bytes += size
        given_up: list[Link] = []
        while self.bytes > limit:
            halves = [link for link, bulk in self._under_way.items() if not bulk.whole]
            given_up.append(next((link for link in halves if not proved(link)), halves[0]))
            self.end(given_up[-1])
            if given_up[-1] == link:
                break
        return given_up

    def whole(self, link: Link) -> None:
        """Its message has come whole."""
        if (bulk := self._under_way.get(link)) is not None:
            bulk.whole = True

    def end(self, link: Link) -> None:
        """Its message was handled, or the link has ended."""
        if (bulk := self._under_way.pop(link, None)) is not None:
            self.bytes -= bulk.size
