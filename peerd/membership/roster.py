"""Who wins when two records of a member differ, and the bounded table of the winners.

Records of a member are totally ordered: by epoch, incarnation and state first (SWIM, Das, Gupta and Motivala 2002, with
the epoch in front so that a restart supersedes everything said of the previous life), then by the other fields, so that
ties end the same way everywhere. The table keeps the greatest record heard of each member. Taking a maximum is
commutative, associative and idempotent: the order of messages and their duplicates do not matter.

Anybody can make up members, as many as the table holds, and nobody is there. So whoever has *proved itself* goes first:
in a plain swarm who has answered a probe, and where `handshakes` show certificates, who has shown one here. Who has not
shown one is a *stranger* there: a member like any, that is to be met, and that makes way in a full table for one that
has shown one.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping

from peerd.membership.lot import Lot
from peerd.membership.proofs import RECORD_PROOF_BYTES
from peerd.transport.ids import Address, NodeId, is_ip
from peerd.transport.messages import COUNT, Member, State

TABLE_MEMBERS = 4096
STRANGERS_ONE_IN = 4  # draws and probes that do not ask who has proved itself, so that nobody is left out for ever
META_BYTES = 512
NAME_BYTES = 128  # ids, names and accusers; with META_BYTES and HOST_BYTES a record always fits into a datagram
HOST_BYTES = 255
INCARNATION_JUMP = 1 << 20
"""A record further ahead than this is a lie: 2**20 refutations at one per second take 12 days."""

EPOCH_JUMP = 1 << 20
"""The same of a life: a node that starts once a minute has so many lives in two years."""

NUMBER_END = COUNT.high + 1
"""Epochs and incarnations stay below."""

Order = tuple[int, int, int, str, str, str, int, bytes]


def order(record: Member) -> Order:
    """The total order of one member's records; the first three fields are what protocols speak about."""
    return (
        record.epoch, record.incarnation, record.state,
        record.accuser, record.name, record.host, record.port, record.meta,
    )  # fmt: skip


def text_bytes(text: str) -> int:
    """The length of a string on the wire."""
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


def address(record: Member) -> Address:
    """Where the member listens."""
    return record.host, record.port


class Roster:
    """The greatest record of each member, and O(1) picks among those believed to live (ALIVE or SUSPECT)."""

    def __init__(self, me: Member, *, handshakes: bool = False, signed: bool = False) -> None:
        """`signed`: a record's own member alone can make it, so that one far ahead takes nobody else's numbers away."""
        assert not fault(me), fault(me)
        self._signed = signed
        self.me = me
        self.handshakes = handshakes
        self.rows: dict[NodeId, Member] = {me.id: me}
        self.revoked: set[NodeId] = set()  # as many as revocations.py keeps
        self.live = Lot()  # without me
        self._proved: set[NodeId] = set()  # whoever has, alive or not, and perhaps not in the table yet
        self._proved_live = Lot()
        self._gone: dict[NodeId, None] = {}  # FAILED and LEFT, the longest gone first
        self._moved_from: dict[NodeId, str] = {}  # the host that a member was at before, by its records

    @property
    def population(self) -> int:
        """N: the live members, oneself included."""
        return len(self.live) + 1

    @property
    def company(self) -> int:
        """Those of them who are no strangers: how many there surely are."""
        return 1 + len(self._proved_live if self.handshakes else self.live)

    def is_live(self, id: NodeId) -> bool:
        """Whether the member is another one and believed to live."""
        return id in self.live

    def has_proved(self, id: NodeId) -> bool:
        """Whether this node, or this member, has proved itself here."""
        return id in self._proved or id == self.me.id

    def is_stranger(self, id: NodeId) -> bool:
        """Whether this member could have shown a certificate, and has not."""
        return self.handshakes and not self.has_proved(id)

    def prove(self, id: NodeId) -> None:
        """It has proved itself, for good."""
        if len(self._proved) >= 4 * TABLE_MEMBERS:
            self._proved &= self.rows.keys()
        self._proved.add(id)
        if id in self.live:
            self._proved_live.add(id)

    def strangers(self) -> list[NodeId]:
        """Those believed to live. O(N) where there are any."""
        if not self._has_strangers:
            return []
        return [id for id in self.live if id not in self._proved_live]

    def acquainted(self) -> list[NodeId]:
        """All others that are believed to live. O(N)."""
        return list(self._proved_live if self.handshakes else self.live)

    def refusal(self, record: Member) -> str:
        """Why the record may not enter the table (a name to count it under), or ""."""
        known = self.rows.get(record.id)
        reason = fault(record)
        if reason:
            return reason
        if known is not None and not self._signed and record.epoch - known.epoch > EPOCH_JUMP:
            return "epoch_jump"
        reached = known.incarnation if known is not None and known.epoch == record.epoch else 0
        if record.incarnation - reached > INCARNATION_JUMP:
            return "incarnation_jump"
        if known is None and len(self.rows) >= TABLE_MEMBERS and not self._is_made_way_for(record):
            return "table_full"
        return ""

    def _is_made_way_for(self, record: Member) -> bool:
        """Whether somebody of a full table goes for it: who is gone, or a stranger for one that is none."""
        if record.state >= State.FAILED:
            return False
        return bool(self._gone) or (self._has_strangers and not self.is_stranger(record.id))

    @property
    def _has_strangers(self) -> bool:
        return self.handshakes and len(self._proved_live) < len(self.live)

    def is_at_home(self, id: NodeId, source: Address) -> bool:
        """Whether a datagram from there may be this member's: from its host, or that of the life before.

        A source is easily forged; but what is sent to one that passes reaches nobody who is no member.
        """
        row, host = self.rows.get(id), source[0]
        return row is not None and (host == row.host or host == self._moved_from.get(id))

    def put(self, record: Member) -> NodeId:
        """Store a record that was not refused and supersedes the known one; return who was forgotten for it, or ""."""
        if record.id == self.me.id:
            self.me = record
            self.rows[record.id] = record
            return ""
        known, forgotten = self.rows.get(record.id), ""
        if known is None and len(self.rows) >= TABLE_MEMBERS:
            forgotten = next(iter(self._gone)) if self._gone else self.strangers()[0]
            self._gone.pop(forgotten, None)
            self.live.discard(forgotten)
            self._moved_from.pop(forgotten, None)
            del self.rows[forgotten]
        if known is not None and known.host != record.host:
            self._moved_from[record.id] = known.host
        self.rows[record.id] = record
        if record.state < State.FAILED:
            self._gone.pop(record.id, None)
            self.live.add(record.id)
            if record.id in self._proved:
                self._proved_live.add(record.id)
        else:
            self.live.discard(record.id)
            self._proved_live.discard(record.id)
            self._gone.setdefault(record.id)
        return forgotten

    def pick(self, count: int, rng: random.Random, without: NodeId = "", alive_only: bool = False) -> list[Member]:
        """Up to `count` distinct live members at random, most of them of those that have proved themselves.

        O(count): a few unlucky draws may return fewer.
        """
        picked: dict[NodeId, None] = {}
        if len(self.live) <= count:
            picked = dict.fromkeys(self.live)
        else:
            mixed = 0 < len(self._proved_live) < len(self.live)
            for _ in range(4 * count):
                lot = self._proved_live if mixed and rng.random() * STRANGERS_ONE_IN >= 1 else self.live
                id = lot.draw(rng)
                if id != without and not (alive_only and self.rows[id].state != State.ALIVE):
                    picked[id] = None
                if len(picked) == count:
                    break
        rows = (self.rows[id] for id in picked if id != without)
        return [row for row in rows if not (alive_only and row.state != State.ALIVE)]

    def failed(self, count: int, rng: random.Random, without: Collection[Address] = ()) -> list[Member]:
        """Up to `count` of the failed that may come back, where nobody else lives, drawn likewise. O(gone)."""
        rows = [self.rows[id] for id in self._gone if id not in self.revoked]
        failed = [row for row in rows if row.state == State.FAILED and address(row) not in without]
        proved = [row for row in failed if row.id in self._proved]
        any_one = sum(rng.random() * STRANGERS_ONE_IN < 1 for _ in range(count))
        picked = rng.sample(proved, min(count - any_one, len(proved)))
        rest = [row for row in failed if row not in picked]
        return picked + rng.sample(rest, min(count - len(picked), len(rest)))

    def live_addresses(self) -> set[Address]:
        """Where live members listen, oneself included. O(N)."""
        return {address(self.rows[id]) for id in self.live} | {address(self.me)}


def name_of(id: NodeId, members: Mapping[NodeId, Member]) -> str:
    """What people call a member; one that is not known (any more) by its id."""
    return members[id].name if id in members else id


def fault(record: Member) -> str:
    """What is wrong with a record whatever the table holds (a name to count it under), or ""."""
    if len(record.meta) > META_BYTES:
        return "meta_too_long"
    if len(record.proof) > RECORD_PROOF_BYTES:
        return "malformed"
    longest = max(text_bytes(record.id), text_bytes(record.name), text_bytes(record.accuser))
    if record.state == State.ALIVE and record.accuser:
        return "malformed"
    if not record.id or longest > NAME_BYTES or text_bytes(record.host) > HOST_BYTES:
        return "malformed"
    if not (0 <= record.epoch < NUMBER_END and 0 <= record.incarnation < NUMBER_END and 0 < record.port < 65536):
        return "malformed"
    return "" if is_ip(record.host) else "host_names"
