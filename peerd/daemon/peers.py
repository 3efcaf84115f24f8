"""How does a message reach a peer? One connection a direction: a node sends only on connections that it dialled.

So two nodes that dial each other at once need no tie-break, and an answer never waits behind the other end's bulk. A
peer's queue holds what its mode has under way (one exchange a link), so it is bounded by the mode. What is queued or in
flight when a connection breaks is dropped; `reconnected` then tells the mode to say it again. A message belongs to the
plan (plan.py) under which it was queued: the connection says so before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from peerd.daemon.offences import Offences, unproved_host
from peerd.process.logs import LOGGER
from peerd.transport.connection import Connection, ConnectionLost, NobodyListens, Transport
from peerd.transport.errors import PeerError
from peerd.transport.hello import Refused, greet
from peerd.transport.ids import Address, NodeId
from peerd.transport.messages import AS_STARTED, Hello, Message, Plan
from peerd.transport.patience import DIAL_TIMEOUT_S, RETRY_FIRST_S, RETRY_MAX_S
from peerd.transport.peer_queue import PeerQueue

IDLE_S = 300.0  # a connection to a former partner is closed; the trigger's longest silence is 60 s
REFUSED_RETRY_S = 30.0  # it may have been restarted with the right model
UNREACHED_S = 30.0  # without a connection; one that is dead is no member by then


@dataclass(slots=True, eq=False)
class _Outgoing:
    """The way to one peer."""

    scope: trio.CancelScope
    lost_at: float  # since when there is no connection
    queue: PeerQueue[tuple[Plan, Message]] = field(default_factory=PeerQueue)
    filled: trio.Event = field(default_factory=trio.Event)
    failing_since: float | None = None  # no dial of since then came to a greeting
    unreached: bool = False  # for so long that it was said


class Peers:
    """The outgoing connections of one node."""

    def __init__(
        self,
        transport: Transport,
        hello: Callable[[], Hello],
        address_of: Callable[[NodeId], Address | None],
        reconnected: Callable[[NodeId], None],
        refused: Callable[[NodeId, Refused], None],
        met: Callable[[NodeId | None], None] = lambda _: None,
        vacant: Callable[[NodeId], None] = lambda _: None,
        reach: Callable[[NodeId, Exception | None], None] = lambda *_: None,
        unreached: Callable[[NodeId], None] = lambda _: None,
        named: Callable[[NodeId], str] = str,
    ) -> None:
        """`hello` is asked anew for every connection: the model may have become known meanwhile.

        `met` is told who is at the other end of each connection that `count` sees, `vacant` at whose address nobody
        listens, `reach` whom no connection can be made to for UNREACHED_S, with the last error; None: now it can.
        `unreached` is told at each dial in vain, once a dial's time has passed without a connection; that there is
        one again, `reconnected`.
        `named` is what the log calls a peer.
        """
        self.offences = Offences()
        self.plan = AS_STARTED  # of what is sent from now on
        self.bulk_max = math.inf  # bytes that wait for one peer
        self._transport = transport
        self._hello = hello
        self._address_of = address_of
        self._reconnected = reconnected
        self._refused = refused
        self._met = met
        self._vacant = vacant
        self._reach = reach
        self._unreached = unreached
        self._named = named
        self._boxes: dict[NodeId, _Outgoing] = {}
        self._ended = False
        self._open: set[Connection] = set()
        self._connections: dict[NodeId, Connection] = {}  # those we dialled that are greeted
        self._closed_sent = 0
        self._closed_received = 0
        self._nursery: trio.Nursery | None = None

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the connections until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._ended = True

    def send(self, peer: NodeId, message: Message) -> None:
        """Queue for `peer`, dialling it if need be; once this has ended, drop it."""
        assert self._nursery is not None, "send before run"
        if self._ended:
            return
        box = self._boxes.get(peer)
        if box is None:
            box = self._boxes[peer] = _Outgoing(trio.CancelScope(), trio.current_time())
            self._nursery.start_soon(self._keep_connected, peer, box)
        if box.queue.put(message, (self.plan, message), self.plan, self.bulk_max):
            box.filled.set()

    def forget(self, peer: NodeId) -> None:
        """Close the connection to a peer that is gone; what is queued is dropped."""
        if box := self._boxes.pop(peer, None):
            box.scope.cancel()

    def cut(self, peer: NodeId, host: str) -> None:
        """Close the connection to a peer at this host, which broke the rules; it is made anew when that is forgiven."""
        if (connection := self._connections.get(peer)) is not None and unproved_host(connection) == host:
            connection.drop(ConnectionLost(f"{connection.remote}: closed, it broke the rules"))

    def shut_out(self, peer: NodeId, why: str) -> None:
        """Close every connection, whoever dialled it, whose other end is this one; `why` goes on from its id."""
        self.forget(peer)
        for connection in self._open:
            if connection.identity == peer:
                connection.drop(ConnectionLost(f"{connection.remote}: closed, {peer} {why}"))

    async def drain(self) -> None:
        """Wait until nothing is queued."""
        while any(box.queue for box in self._boxes.values()):
            await trio.sleep(0.01)

    @property
    def bytes_sent(self) -> int:
        """Written to the sockets of all connections seen by `count`, but for what measures a line."""
        return self._closed_sent + sum(connection.bytes_sent - connection.bytes_measured for connection in self._open)

    @property
    def bytes_received(self) -> int:
        """Read from the sockets of all connections seen by `count`."""
        return self._closed_received + sum(connection.bytes_received for connection in self._open)

    def unreached(self) -> dict[NodeId, float]:
        """For how many seconds no connection could be made, to those for whom that is long."""
        now = trio.current_time()
        return {
            peer: now - box.failing_since
            for peer, box in self._boxes.items()
            if box.unreached and box.failing_since is not None
        }

    def carrier(self, peer: NodeId) -> str:
        """What bulk to `peer` travels over; "" where there is no connection."""
        return self._connections[peer].carrier if peer in self._connections else ""

    def count(self, connection: Connection) -> None:
        """Have its bytes counted; an accepted one too, which is told of again once it is sealed."""
        self._open.add(connection)
        self._met(connection.identity)

    async def close(self, connection: Connection) -> None:
        """Close a counted connection."""
        try:
            await connection.aclose()
        finally:
            self._open.discard(connection)
            self._closed_sent += connection.bytes_sent - connection.bytes_measured
            self._closed_received += connection.bytes_received

    async def _keep_connected(self, peer: NodeId, box: _Outgoing) -> None:
        delay_s, broken, said, stays = RETRY_FIRST_S, False, "", ""
        with box.scope:
            while (address := self._address_of(peer)) is not None:
                greeted = False
                try:
                    connection = await self._transport.dial(address)
                    self.count(connection)
                    try:
                        if (
                            connection.identity not in (None, peer)
                            or (await greet(connection, self._hello())).node != peer
                        ):
                            raise ConnectionLost(f"another node answers at {connection.remote}")
                        greeted = True
                        self._note_reach(peer, box, None)
                        if refused_s := self.offences.refused_s(peer, unproved_host(connection)):
                            delay_s = max(RETRY_MAX_S, min(refused_s, REFUSED_RETRY_S))
                            raise ConnectionLost(f"{connection.remote}: it broke the rules too often")
                        if (why_not := await connection.upgrade()) and why_not != stays:
                            stays = why_not
                            LOGGER.info(
                                "models to %s travel over %s: %s",
                                self._named(peer),
                                connection.carrier,
                                why_not,
                            )
                        self._connections[peer] = connection
                        if broken:
                            box.queue.clear()  # a later exchange must not overtake what is said again now
                            self._reconnected(peer)
                        delay_s = RETRY_FIRST_S
                        try:
                            await self._write(peer, connection, box)
                        except PeerError as error:
                            self.offences.strike(peer, unproved_host(connection), error)
                            raise
                    finally:
                        if self._connections.pop(peer, None) is not None:
                            box.lost_at = trio.current_time()
                        await self.close(connection)
                except Refused as refusal:
                    self._note_reach(peer, box, None)
                    self._refused(peer, refusal)
                    delay_s = REFUSED_RETRY_S
                except (ConnectionLost, PeerError) as error:
                    if str(error) != said:
                        said = str(error)
                        LOGGER.info("%s: %s", self._named(peer), said)
                    if not greeted:
                        self._note_reach(peer, box, error)
                        if trio.current_time() - box.lost_at >= DIAL_TIMEOUT_S:
                            self._unreached(peer)
                    if isinstance(error, NobodyListens):
                        self._vacant(peer)
                except Exception as error:
                    self.offences.unforeseen(error, f"the connection to {peer} failed")
                    delay_s = RETRY_MAX_S
                broken = True
                box.queue.clear()
                await trio.sleep(delay_s)
                delay_s = min(2 * delay_s, RETRY_MAX_S)
        if self._boxes.get(peer) is box:
            del self._boxes[peer]

    def _note_reach(self, peer: NodeId, box: _Outgoing, error: Exception | None) -> None:
        """A dial has failed with this error, or has not."""
        was, now = box.unreached, trio.current_time()
        if error is None:
            box.failing_since = None
        elif box.failing_since is None:
            box.failing_since = now
        box.unreached = box.failing_since is not None and now - box.failing_since >= UNREACHED_S
        if box.unreached != was:
            self._reach(peer, error)

    async def _write(self, peer: NodeId, connection: Connection, box: _Outgoing) -> None:
        """Send what is queued, while watching for the end of the connection.

        Raises ConnectionLost, PeerError, or what was wrong with a message of ours.
        """
        ended: Exception | None = None
        said = AS_STARTED
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_watch, connection)
                while True:
                    while box.queue.has_waiting:
                        plan, message = box.queue.take()
                        if plan != said:
                            await connection.send(plan)
                            said = plan
                        try:
                            await connection.send(message)
                        except (ValueError, TypeError, OverflowError) as error:  # encoding it: no byte has left
                            self.offences.unforeseen(error, f"a message to {peer} that cannot be written is left out")
                        await connection.flushed()  # until then it waits, and need not be said again
                        box.queue.left()
                    box.filled = trio.Event()
                    with trio.move_on_after(IDLE_S) as idle:
                        await box.filled.wait()
                    if idle.cancelled_caught and not box.queue:
                        box.scope.cancel()
                        if self._boxes.get(peer) is box:
                            del self._boxes[peer]  # what is sent from now on dials anew
        except* Exception as group:
            ended = group.exceptions[0]  # the watcher or the writer: whoever saw it first
        assert ended is not None, "the writer only ends with its connection"
        raise ended


async def _watch(connection: Connection) -> None:
    await connection.receive()
    raise PeerError(f"{connection.remote} answered on a connection that only we write to")
