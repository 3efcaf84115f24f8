"""How does the membership core meet the network? One timer, one datagram socket, and push-pulls over connections."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import trio

from peerd.daemon.cures import cured
from peerd.daemon.peers import Peers
from peerd.membership.core import Membership
from peerd.membership.effects import MemberChanged, MembershipEffect, PushPull, SendDatagram
from peerd.membership.table_exchange import PUSH_PULL_DEADLINE_S, TABLE_PART, TABLE_PARTS_MAX
from peerd.process.logs import LOGGER
from peerd.training.effects import Log
from peerd.transport.connection import Connection, ConnectionLost, Datagrams, Transport
from peerd.transport.errors import PeerError, UserError
from peerd.transport.hello import Refused, greet
from peerd.transport.ids import Address, NodeId, shown
from peerd.transport.messages import Hello, MemberTable, State

SAID_MAX = 256
PUSH_PULLS_MAX = 8  # at once


class MembershipService:
    """The shell around one Membership."""

    def __init__(
        self,
        membership: Membership,
        datagrams: Datagrams,
        transport: Transport,
        peers: Peers,
        hello: Callable[[], Hello],
        changed: Callable[[], None],
        refused: Callable[[Address, Refused], None],
    ) -> None:
        """`changed` is called whenever a member came, went or said something new of itself; `refused` when the
        node at an address whose table we asked for will not have us.
        """
        self.membership = membership
        self._datagrams = datagrams
        self._transport = transport
        self._peers = peers
        self._hello = hello
        self._changed = changed
        self._refused = refused
        self._touched = trio.Event()
        self._push_pulls = trio.CapacityLimiter(PUSH_PULLS_MAX)
        self._nursery: trio.Nursery | None = None
        self._said: dict[Address, str] = {}  # the last failure told of each address: said once
        self._heard_at: dict[NodeId, float] = {}  # members of whom a message came, and when the last one did
        self._believed: dict[NodeId, State] = {}  # of each member, when it last changed

    async def run(self) -> None:
        """Probe and gossip until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._receive)
            while True:
                self._touched = trio.Event()
                with trio.move_on_at(self.membership.deadline):
                    await self._touched.wait()  # an event may have moved the deadline
                if (now := trio.current_time()) >= self.membership.deadline:
                    await self.perform(self.membership.on_timer(now))

    async def perform(self, effects: Iterable[MembershipEffect]) -> None:
        """Do what the core asks."""
        for effect in effects:
            match effect:
                case SendDatagram():
                    await self._datagrams.send(effect.address, effect.message)
                case PushPull():
                    if self._nursery is not None:
                        self._nursery.start_soon(self._push_pull, effect.address)
                case MemberChanged():
                    self._tell_of(effect.id)
                    self._changed()
                case Log():
                    LOGGER.log(20 if effect.level == "info" else 30, "%s", effect.text)
        self._touched.set()

    async def join(self, address: Address) -> None:
        """One push-pull, now. Raises UserError with the cause."""
        failure = await self._exchange_tables(address)
        if failure is not None:
            raise UserError(f"cannot join {shown(address)}: {cured(failure)}")

    async def answer(self, link: Connection, first: MemberTable) -> None:
        """The accepting side of a push-pull, whose first message has arrived: it hears first, so that it can refute."""
        await self._receive_table(link, first)
        await self._send_table(link)

    def _tell_of(self, id: NodeId) -> None:
        """Say when a member has failed, and when one that had is back; each node says it once."""
        members = self.membership.members
        member, before = members.get(id), self._believed.get(id)
        if member is None or (before == State.FAILED and member.state == State.SUSPECT):
            return  # dropped meanwhile; or whether it is back is not known yet
        self._believed[id] = member.state
        who = f"{member.name} ({shown((member.host, member.port))})"
        if before is not None and before < State.FAILED == member.state:
            heard_at = self._heard_at.get(id)
            ago = None if heard_at is None else f"last heard from it {trio.current_time() - heard_at:.0f} s ago"
            LOGGER.warning("%s failed: this node %s", who, ago or "has never heard from it")
        elif before == State.FAILED and member.state == State.ALIVE:
            LOGGER.info("%s is back", who)
        if len(self._believed) > len(members):  # a full table drops the failed
            self._believed = {id: state for id, state in self._believed.items() if id in members}
            self._heard_at = {id: at for id, at in self._heard_at.items() if id in members}

    def _note_heard(self, sender: NodeId) -> None:
        if sender in self.membership.members:
            self._heard_at[sender] = trio.current_time()

    async def _receive(self) -> None:
        while True:
            message, source = await self._datagrams.receive()
            self._note_heard(getattr(message, "sender", ""))
            await self.perform(self.membership.on_datagram(message, source, trio.current_time()))

    async def _push_pull(self, address: Address) -> None:
        failure = await self._exchange_tables(address)
        if failure is None:
            self._said.pop(address, None)
            return
        if self._said.get(address) != str(failure):
            if len(self._said) >= SAID_MAX:  # addresses come and go with ports that the kernel picks
                self._said.clear()
            self._said[address] = str(failure)
            if isinstance(failure, Refused):
                self._refused(address, failure)
            else:
                LOGGER.warning("%s; trying again", failure)
        effects = self.membership.on_unreachable(address, trio.current_time())
        await self.perform(effect for effect in effects if not isinstance(effect, Log))  # said above, with the cause

    async def _exchange_tables(self, address: Address) -> Exception | None:
        """One push-pull; returns what went wrong."""
        try:
            with trio.fail_after(PUSH_PULL_DEADLINE_S):
                async with self._push_pulls:
                    link = await self._transport.dial(address)
                    self._peers.count(link)
                    try:
                        await greet(link, self._hello())
                        await self._send_table(link)
                        await self._receive_table(link, None)
                    finally:
                        await self._peers.close(link)
        except (ConnectionLost, Refused, PeerError) as error:
            return error
        except trio.TooSlowError:
            return ConnectionLost(f"{shown(address)}: no answer within {PUSH_PULL_DEADLINE_S:g} s")
        return None

    async def _send_table(self, link: Connection) -> None:
        table = self.membership.table()
        for start in range(0, len(table.members), TABLE_PART):
            await link.send(MemberTable(table.sender, table.members[start : start + TABLE_PART]))
        await link.send(MemberTable(table.sender, ()))  # an empty part ends it

    async def _receive_table(self, link: Connection, part: MemberTable | None) -> None:
        for _ in range(TABLE_PARTS_MAX):
            if part is None:
                message = await link.receive()
                if not isinstance(message, MemberTable):
                    raise PeerError(f"{link.remote} sent {type(message).__name__} in the middle of a push-pull")
                part = message
            if not part.members:
                return
            await self.perform(self.membership.on_table(part, trio.current_time()))
            self._note_heard(part.sender)
            part = None
        raise PeerError(f"{link.remote} sent a member table without end")
