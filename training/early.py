"""What becomes of messages from one who is no member? They wait, within bounds, for the news that it is one.

News of a member and its first message race: they come by different ways. A mode makes nothing of a message before its
sender is a ready member of its plan, so a stranger's costs no more than these bounds. What does not fit is lost; an
honest sender says it again, as whatever has had no answer (training/mode.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable

from peerd.transport.ids import NodeId
from peerd.transport.messages import Message

SENDERS_MAX = 32  # the latest: who never becomes a member makes room
MESSAGES_MAX = 8  # of one sender; more of them follow only from answers, which it does not get
BYTES_MAX = 64 << 20  # of all bulk that waits


class EarlyMessages:
    """What waits, by sender, in order."""

    def __init__(self) -> None:
        self._held: OrderedDict[NodeId, dict[Hashable, Message]] = OrderedDict()
        self._bytes = 0

    def keep(self, sender: NodeId, message: Message) -> None:
        """Hold it, in place of one that it repeats or supersedes; or drop it, where it does not fit."""
        messages = self._held.get(sender, {})
        said, size = message.said, _size(message)
        freed = _size(messages[said]) if said in messages else 0
        if (said not in messages and len(messages) >= MESSAGES_MAX) or size > BYTES_MAX:
            return
        self._held.setdefault(sender, messages)[said] = message
        self._bytes += size - freed
        self._held.move_to_end(sender)
        while len(self._held) > SENDERS_MAX or self._bytes > BYTES_MAX:
            oldest = next(iter(self._held))
            self._drop(oldest)

    def take(self, members: Collection[NodeId]) -> list[tuple[NodeId, Message]]:
        """What has come from these, who are members now."""
        came = [(sender, message) for sender, held in self._held.items() if sender in members
                for message in held.values()]  # fmt: skip
        for sender in {sender for sender, _ in came}:
            self._drop(sender)
        return came

    def clear(self) -> None:
        """Nothing of it is meant any more."""
        self._held.clear()
        self._bytes = 0

    def _drop(self, sender: NodeId) -> None:
        self._bytes -= sum(map(_size, self._held.pop(sender).values()))


def _size(message: Message) -> int:
    return sum(len(chunk) for chunk in getattr(message, "chunks", ()))
