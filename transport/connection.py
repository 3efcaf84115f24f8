"""What carries messages between peers: the interfaces, and the one way in which a connection ends.

A carrier is one file: it makes `Connection`s (`tcp`, `memory`) or `Datagrams` (`udp`, `memory`). Whoever uses one sees
messages only; bytes, frames and limits stay inside `peerd.transport`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from peerd.transport.ids import Address, NodeId
from peerd.transport.messages import Message


class ConnectionLost(Exception):
    """The connection ended or could not be made: nobody broke a rule. The text names the peer and the cause."""


class NobodyListens(ConnectionLost):
    """The host is there, and says that nobody listens at that port."""


class Connection(Protocol):
    """One reliable two-way channel of messages to one peer.

    Order: what is sent in one queue arrives in the order of the `send` calls. There are two. Handshake and
    membership messages (`wire.is_urgent`) overtake all the others, between two frames; everything else, bulk or not,
    stays in order, because a mode's messages mean something only in order.
    """

    identity: NodeId | None  # who is there, as proved; STRANGER: who has no certificate; None: nothing is proved
    remote: str  # "host:port", for logs
    host: str  # where the other end is: an address, never a name; "" where there are none
    bytes_measured: int  # of those sent: samples for a peer that measures the line, no part of the swarm's traffic
    payload_limit: int  # most bytes of chunks in one received message
    on_bulk: Callable[[int], None]  # told the size of each bulk message that begins to come, and 0 once it is here
    upgrades_refused: Callable[[], Awaitable[str]]  # asked why the peer may have no other carrier; "" where it may

    @property
    def bytes_sent(self) -> int:
        """Counted at the socket, as is what is received."""

    @property
    def bytes_received(self) -> int:
        """Counted at the socket."""

    @property
    def carrier(self) -> str:
        """What bulk that is sent from now on travels over."""

    async def shake_hands(self) -> None:
        """Seal it and find out its `identity`, where the carrier does that. For who accepted it, before all else.

        Raises Refused when one end does not take the other, PeerError when the peer broke the rules or was silent,
        ConnectionLost when the connection ended. On any error it is closed.
        """

    async def send(self, message: Message) -> None:
        """Queue `message`, waiting while its queue is full: of one bulk message or 64 messages.

        Chunks are not copied: they must not change until they are sent, or the peer sees other values.
        Raises ConnectionLost once it is gone. Returning means queued, not delivered. Safe to cancel: then the
        message either was queued whole or not at all.
        """

    async def flushed(self) -> None:
        """Wait until the network has taken all that was queued, or never will."""

    async def receive(self) -> Message:
        """Return the next message; one task at a time. Safe to cancel.

        Raises PeerError, having closed it, when the peer broke the rules; ConnectionLost when the connection ended.
        """

    async def aclose(self) -> None:
        """Close, after at most a second of flushing what is queued; when cancelled, at once."""

    def drop(self, lost: ConnectionLost) -> None:
        """Close at once, losing what is queued; from now on `send` and `receive` raise the first `lost`."""

    def admit(self) -> None:
        """Say that the handshake is over: the connection stops counting among the listener's pending ones."""

    async def upgrade(self) -> str:
        """Move bulk to a faster carrier if both ends have one; return why not, or "". For the dialler, once admitted.

        The acceptor only needs to receive. Until both ends know that it works, bulk travels as before.
        """


class Transport(Protocol):
    """Makes connections of one kind. Its nursery owns the sender tasks of those it dialled."""

    async def dial(self, address: Address) -> Connection:
        """Connect and shake hands; raises ConnectionLost with one line naming the address and the cause.

        Raises Refused and PeerError as `Connection.shake_hands` does.
        """

    async def listen(
        self,
        address: Address,
        accepted: Callable[[Connection], Awaitable[None]],
        task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Listen until cancelled, running `accepted(connection)` in a task of its own for each connection.

        `task_status.started` gets the actual address. It is closed when `accepted` ends; PeerError and ConnectionLost
        raised by it end that connection only. Raises UserError when the address cannot be listened on.
        """


class Datagrams(Protocol):
    """Best-effort messages of one datagram each: they may be lost, doubled or late, but never malformed."""

    address: Address  # where this end is reached
    malformed: int  # datagrams received and dropped because they were no message
    unsendable: int  # messages dropped here: no such host, no route, buffer full
    bytes_sent: int
    bytes_received: int  # malformed ones too

    async def send(self, address: Address, message: Message) -> None:
        """Send, or drop; never raises for the network's sake. News that does not fit is left out, the last first."""

    async def receive(self) -> tuple[Message, Address]:
        """Return the next well-formed message and its source."""

    async def aclose(self) -> None:
        """Give the address back."""
