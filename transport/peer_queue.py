"""What waits for one peer, and what need not be said (again)? One core for the daemon and for the simulator.

What a mode says again because it has had no answer may still wait here, on a thin line: then it is not queued twice. A
message that supersedes others takes the place of an older one of its type; not of one that is leaving. Where what is
said comes in stages, what waits of an earlier one is dropped. What is not said again outlives a connection that breaks.
Each answer of a peer that asks and does not listen would be a model's bytes more, so bulk is bounded by those.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from peerd.transport.messages import Message

QUEUE_MAX = 512  # messages; a link has at most three under way, and each of up to 128 servers as many
MODELS_WAITING_MAX = 8  # of the bulk that waits: a link has three messages under way, a server as many

Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class _Waiting(Generic[Item]):
    said: Hashable
    series: Hashable  # what has stages
    stage: int
    item: Item
    repeated: bool
    bulk: int  # bytes of its chunks


class PeerQueue(Generic[Item]):
    """Messages to one peer, in order, each as what its sender keeps of it."""

    def __init__(self) -> None:
        self._waiting: deque[_Waiting[Item]] = deque()
        self._leaving: Hashable | None = None
        self._bulk_leaving = 0

    def __len__(self) -> int:
        """With the one that is leaving."""
        return len(self._waiting) + (self._leaving is not None)

    @property
    def has_waiting(self) -> bool:
        """Whether there is one to take."""
        return bool(self._waiting)

    def put(self, message: Message, item: Item, scope: Hashable = None, bulk_max: float = math.inf) -> bool:
        """Queue it, unless that is full or it waits already; whether it is news. Scopes have nothing in common.

        Of chunks at most `bulk_max` bytes wait and leave, but for a message that is the only one with any.
        """
        said, series = (scope, message.said), (scope, type(message))
        if any(other.series == series and other.stage < message.stage for other in self._waiting):
            self._waiting = deque(
                other for other in self._waiting if other.series != series or other.stage >= message.stage
            )
        at = next((at for at, other in enumerate(self._waiting) if other.said == said), None)
        bulk = sum(memoryview(chunk).nbytes for chunk in getattr(message, "chunks", ()))
        waiting = _Waiting(said, series, message.stage, item, message.repeated, bulk)
        if message.supersedes and at is not None:
            self._waiting[at] = waiting
            return True
        if len(self) >= QUEUE_MAX or at is not None or (said == self._leaving and not message.supersedes):
            return False
        held = self._bulk_leaving + sum(other.bulk for other in self._waiting) if bulk else 0
        if held and held + bulk > bulk_max:
            return False
        self._waiting.append(waiting)
        return True

    def take(self) -> Item:
        """The next one, which leaves now, until `left` or `clear`."""
        next_one = self._waiting.popleft()
        self._leaving, self._bulk_leaving = next_one.said, next_one.bulk
        return next_one.item

    def left(self) -> None:
        """It is with the peer, or with what carries it there."""
        self._leaving, self._bulk_leaving = None, 0

    def clear(self) -> None:
        """The connection broke: what was to be said is said anew, or still waits."""
        self._waiting = deque(each for each in self._waiting if not each.repeated)
        self.left()
