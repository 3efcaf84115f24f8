"""The membership of a node that hears datagrams and tables of anybody, up to what its daemon makes of the members."""

from __future__ import annotations

from random import Random
from typing import Any

from decoders import mutated_header
from material import SAMPLE_IDS, Sample, on_the_wire, pick, samples
from mutate import bent
from target import Drawn

from peerd.daemon.plan_follower import PlanFollower
from peerd.membership.core import Membership
from peerd.membership.effects import AskTwin, PushPull, SendDatagram
from peerd.node.meta import NodeMeta, donors, partners, whose_model
from peerd.settings import Settings
from peerd.transport import wire
from peerd.transport.errors import PeerError
from peerd.transport.messages import Ack, Member, MemberTable, Ping, PingRequest, State

TABLE = 200  # from here on the first byte of an item is that of a table, not a datagram
LOOK_EVERY = 16  # items, at what follows from the members
ABOUT = NodeMeta("m" * 16, ready=True, founder=False).pack()


def row(id: str) -> Member:
    """As an honest member tells it."""
    return Member(id, f"node-{id}", "127.0.0.1", 7000 + ord(id[0]), 3, 1, State.ALIVE, "", ABOUT)


ROWS = [row(id) for id in SAMPLE_IDS]
HONEST = [
    on_the_wire(message)
    for each in ROWS
    for message in (
        Ack(0, each.id, (each,)), Ping(9, each.id, "a", (each, ROWS[0])), MemberTable(each.id, tuple(ROWS)),
        PingRequest(9, each.id, "c", "127.0.0.1", 7099, ()),
    )
]  # fmt: skip
DRAWN = [sample for kind, each in samples().items() if kind < wire.FIRST_HANDSHAKE_KIND for sample in each]


class Members(Drawn):
    """Node "a" of three. An item is one byte that says whence it came, then a datagram or a table's header."""

    def __init__(self) -> None:
        self.now = 0.0
        self._core = Membership(ROWS[0], [("127.0.0.1", 7999)], Random(1), 0.0, known=ROWS[1:3], numbers=Random(2))
        self._follower = PlanFollower("a", Settings(), None, self._members, None, None)  # type: ignore[arg-type]
        self._said: list[Sample] = []
        self._taken = 0
        self._asked: dict[Any, int] = {}  # bytes of the longest request for a ping from each address: an answer is due

    def _members(self) -> dict[str, Member]:
        return dict(self._core.members)

    def draw(self, rng: Random) -> bytes:
        sample = pick(rng, self._said if self._said and rng.random() < 0.3 else HONEST if rng.random() < 0.5 else DRAWN)
        header = sample.header if rng.random() < 0.1 else mutated_header(rng, sample)
        if sample.kind == MemberTable.KIND:
            return bytes([TABLE + int(rng.random() * 4)]) + header
        datagram = wire.DATAGRAM_PREFIX + bytes([sample.kind]) + header
        return bytes([int(rng.random() * 8)]) + (bent(rng, datagram) if rng.random() < 0.05 else datagram)

    def take(self, item: bytes) -> None:
        if not item:
            return
        self.now += 0.02
        where = item[0]
        source = ("127.0.0.1" if where % 2 else f"10.9.9.{where}", 7000 + where)
        try:
            if where >= TABLE:
                table: Any = wire.decode(MemberTable.KIND, memoryview(item)[1:], 0).message()
                effects = self._core.on_table(table, self.now, source if where % 3 else None)
            else:
                message = wire.decode_datagram(item[1:])
                if isinstance(message, PingRequest):
                    self._asked[source] = max(self._asked.get(source, 0), len(item) - 1)
                effects = self._core.on_datagram(message, source, self.now)
        except PeerError:
            return
        known = any(member.host == source[0] for member in self._core.members.values())
        self._perform(effects, None if known or where >= TABLE else source, len(item) - 1)
        if self.now >= self._core.deadline:
            self._perform(self._core.on_timer(self.now), None, 0)
        self._taken += 1
        if self._taken % LOOK_EVERY == 0:
            self._look()

    def _perform(self, effects: list[Any], stranger: Any, came: int) -> None:
        """As the shell does; a stranger's answer is no longer than what it sent."""
        for effect in effects:
            if isinstance(effect, SendDatagram):
                sent = wire.encode_datagram(effect.message)
                asked = max(came, self._asked.get(effect.address, 0))
                assert effect.address != stranger or len(sent) <= asked, f"{len(sent)} bytes for {asked}"
                if len(self._said) < 64:
                    self._said.append(on_the_wire(effect.message))
            elif isinstance(effect, PushPull) and effect.address[1] % 2:
                self._perform(self._core.on_unreachable(effect.address, self.now), None, 0)
            elif isinstance(effect, AskTwin):
                assert effect.address[1] < 65536

    def _look(self) -> None:
        """What the daemon makes of its members."""
        members = self._members()
        me = members["a"]
        assert me.id == "a"
        assert me.state == State.ALIVE
        assert (me.host, me.port, me.epoch) == (ROWS[0].host, ROWS[0].port, ROWS[0].epoch)
        partners(members, "a", "m" * 16, self._follower._newest())
        donors(members, "a")
        whose_model(members, "a", seeds=[("host", 1)])
        table = self._core.table()
        wire.encode(MemberTable(table.sender, table.members[-32:]))
