"""Meets the members that this node has not met: a handshake shows whether each is what its record says."""

from __future__ import annotations

from collections.abc import Callable

import trio

from peerd.daemon.peers import Peers
from peerd.node.acquaintances import Acquaintances
from peerd.transport.connection import ConnectionLost, Transport
from peerd.transport.errors import PeerError
from peerd.transport.hello import Refused
from peerd.transport.ids import NodeId
from peerd.transport.messages import Member

AT_ONCE = 16  # a handshake takes three round trips and 3 ms; one with nobody ends after five seconds
LOOK_MIN_S = 0.05


class Meetings:
    """Of one node."""

    def __init__(
        self,
        acquaintances: Acquaintances,
        peers: Peers,
        transport: Transport,
        members: Callable[[], dict[NodeId, Member]],
        missed: Callable[[NodeId], None],
    ) -> None:
        """`members` may be there, and `missed` is told of each that was dialled in vain again."""
        self._acquaintances = acquaintances
        self._peers = peers
        self._transport = transport
        self._members = members
        self._missed = missed
        self._under_way = 0
        self._news = trio.Event()

    async def run(self) -> None:
        """Dial until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                room, members = AT_ONCE - self._under_way, self._members()
                for member in self._acquaintances.due(members, trio.current_time(), room):
                    self._under_way += 1
                    nursery.start_soon(self._dial, member)
                await trio.sleep(LOOK_MIN_S)
                until = self._acquaintances.next_at(members, trio.current_time())
                with trio.move_on_at(until if self._under_way < AT_ONCE else float("inf")):
                    await self._news.wait()
                self._news = trio.Event()

    def on_members(self) -> None:
        """Somebody may be new."""
        self._news.set()

    async def _dial(self, member: Member) -> None:
        try:
            connection = await self._transport.dial((member.host, member.port))
            self._peers.count(connection)
            await self._peers.close(connection)
        except (ConnectionLost, Refused, PeerError):
            pass  # membership says who is out of reach, and why
        except Exception as error:
            self._peers.offences.unforeseen(error, f"could not meet {member.id}")
        finally:
            again = self._acquaintances.failed(member.id)
            self._under_way -= 1
            self._news.set()
        if again:
            self._missed(member.id)
