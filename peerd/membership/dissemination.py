"""Which news rides on the next datagram: the least told first, each told a bounded number of times.

SWIM spreads membership changes by infection, on the back of messages that travel anyway (Das, Gupta and Motivala 2002,
section 4.1).
"""

from __future__ import annotations

from itertools import chain

from peerd.membership.roster import text_bytes
from peerd.transport.ids import NodeId
from peerd.transport.messages import Member, State

DATAGRAM_BYTES = 1400
"""Leaves 72 of a 1500-byte packet for a seal, after 28 of IP and UDP."""

ENVELOPE_BYTES = 72
"""The frame header (32), and around a message's ids: arrays, a number of up to 9 bytes, a port, string headers."""

_RECORD_BYTES = 42  # of msgpack around a record: array 3, four string headers 8, meta and proof 5, numbers 22, spare
_MISFITS = 3  # records too large for the rest of a datagram that are passed over before giving up looking

_Key = tuple[NodeId, NodeId]  # of whom, by which accuser


def record_bytes(record: Member) -> int:
    """An upper bound of the record's length on the wire."""
    strings = text_bytes(record.id) + text_bytes(record.name) + text_bytes(record.host) + text_bytes(record.accuser)
    return _RECORD_BYTES + strings + len(record.meta) + len(record.proof)


class News:
    """Records to pass on, in piles by how often they were sent.

    One record per member, except that suspicions of one life and incarnation by distinct accusers stand side by side:
    the number of accusers is what shortens a suspicion.
    """

    def __init__(self) -> None:
        self._piles: list[dict[_Key, tuple[Member, int]]] = [{}]
        self._pile_of: dict[_Key, int] = {}
        self._keys_of: dict[NodeId, list[_Key]] = {}

    def __len__(self) -> int:
        return len(self._pile_of)

    def is_fresh(self, id: NodeId) -> bool:
        """Whether there is still something to tell about this member."""
        return id in self._keys_of

    def add(self, record: Member) -> None:
        """Tell this; it replaces what it supersedes."""
        key = (record.id, record.accuser if record.state == State.SUSPECT else "")
        for known in list(self._keys_of.get(record.id, ())):
            if known == key or not _side_by_side(self._piles[self._pile_of[known]][known][0], record):
                self._forget(known)
        self._put(key, (record, record_bytes(record)), 0)

    def pass_to(self, id: NodeId, to: News) -> None:
        """Have it told there what is still told of this member, as often as it would be here."""
        for key in list(self._keys_of.get(id, ())):
            pile = self._pile_of[key]
            entry = self._piles[pile][key]
            self._forget(key)
            to._put(key, entry, pile)

    def forget(self, id: NodeId) -> None:
        """Tell nothing of this member any more."""
        for key in list(self._keys_of.get(id, ())):
            self._forget(key)

    def take(self, space: int, limit: int) -> tuple[Member, ...]:
        """The least told records that fit into `space` bytes; each leaves after `limit` transmissions."""
        if not self._pile_of:
            return ()
        taken: list[_Key] = []
        misfits = 0
        for key, (_, size) in chain.from_iterable(pile.items() for pile in self._piles):
            if size <= space:
                taken.append(key)
                space -= size
            elif (misfits := misfits + 1) > _MISFITS or space < _RECORD_BYTES:
                break
        return tuple(self._tell(key, limit) for key in taken)

    def _tell(self, key: _Key, limit: int) -> Member:
        pile = self._pile_of[key]
        entry = self._piles[pile][key]
        if pile + 1 >= limit:
            self._forget(key)
            return entry[0]
        del self._piles[pile][key]
        if pile + 1 == len(self._piles):
            self._piles.append({})
        self._piles[pile + 1][key] = entry
        self._pile_of[key] = pile + 1
        return entry[0]

    def _put(self, key: _Key, entry: tuple[Member, int], pile: int) -> None:
        while pile >= len(self._piles):
            self._piles.append({})
        self._piles[pile][key] = entry
        self._pile_of[key] = pile
        self._keys_of.setdefault(key[0], []).append(key)

    def _forget(self, key: _Key) -> None:
        del self._piles[self._pile_of.pop(key)][key]
        keys = self._keys_of[key[0]]
        keys.remove(key)
        if not keys:
            del self._keys_of[key[0]]


def _side_by_side(told: Member, record: Member) -> bool:
    return (
        told.state == record.state == State.SUSPECT
        and told.epoch == record.epoch
        and told.incarnation == record.incarnation
    )
