"""How does the membership core meet the network? One timer, one datagram socket, and push-pulls over connections."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import trio

from peerd.effects import Address, Effect, Log, MemberChanged, PeerError, PushPull, SendDatagram, UserError
from peerd.logs import LOGGER
from peerd.membership import Membership
from peerd.messages import Hello, MemberTable
from peerd.peers import Peers
from peerd.transport.hello import Refused, greet
from peerd.transport.link import Datagrams, Link, LinkLost, Transport, shown

TABLE_PART = 32  # members in one message: the longest legal rows take 1.6 kB each of the 64 KiB of a header
TABLE_PARTS_MAX = 160
PUSH_PULLS_MAX = 8  # at once
PUSH_PULL_DEADLINE_S = 10.0  # two small messages; only a node that hangs takes longer


class SwarmView:
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

    async def perform(self, effects: Iterable[Effect]) -> None:
        """Do what the core asks."""
        for effect in effects:
            match effect:
                case SendDatagram():
                    await self._datagrams.send(effect.address, effect.message)
                case PushPull():
                    if self._nursery is not None:
                        self._nursery.start_soon(self._push_pull, effect.address)
                case MemberChanged():
                    self._changed()
                case Log():
                    LOGGER.log(20 if effect.level == "info" else 30, "%s", effect.text)
        self._touched.set()

    async def join(self, address: Address) -> None:
        """One push-pull, now. Raises UserError with the cause."""
        failure = await self._exchange_tables(address)
        if failure is not None:
            raise UserError(f"cannot join {shown(address)}: {failure}")

    async def answer(self, link: Link, first: MemberTable) -> None:
        """The accepting side of a push-pull, whose first message has arrived: it hears first, so that it can refute."""
        await self._receive_table(link, first)
        await self._send_table(link)

    async def _receive(self) -> None:
        while True:
            message, source = await self._datagrams.receive()
            await self.perform(self.membership.on_datagram(message, source, trio.current_time()))

    async def _push_pull(self, address: Address) -> None:
        failure = await self._exchange_tables(address)
        if failure is None:
            self._said.pop(address, None)
            return
        if self._said.get(address) != str(failure):
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
        except (LinkLost, Refused, PeerError) as error:
            return error
        except trio.TooSlowError:
            return LinkLost(f"{shown(address)}: no answer within {PUSH_PULL_DEADLINE_S:g} s")
        return None

    async def _send_table(self, link: Link) -> None:
        table = self.membership.table()
        for start in range(0, len(table.members), TABLE_PART):
            await link.send(MemberTable(table.sender, table.members[start : start + TABLE_PART]))
        await link.send(MemberTable(table.sender, ()))  # an empty part ends it

    async def _receive_table(self, link: Link, part: MemberTable | None) -> None:
        for _ in range(TABLE_PARTS_MAX):
            if part is None:
                message = await link.receive()
                if not isinstance(message, MemberTable):
                    raise PeerError(f"{link.remote} sent {type(message).__name__} in the middle of a push-pull")
                part = message
            if not part.members:
                return
            await self.perform(self.membership.on_table(part, trio.current_time()))
            part = None
        raise PeerError(f"{link.remote} sent a member table without end")
