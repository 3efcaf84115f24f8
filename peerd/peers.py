"""How does a message reach a peer? One connection a direction: a node sends only on connections that it dialled.

So two nodes that dial each other at once need no tie-break, and an answer never waits behind the other end's bulk. A
peer's queue holds what its mode has under way (one exchange a link), so it is bounded by the mode. What is queued or in
flight when a connection breaks is dropped; `reconnected` then tells the mode to say it again. A message belongs to the
plan (plan.py) under which it was queued: the connection says so before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import trio

from peerd.effects import Address, NodeId, PeerError
from peerd.logs import LOGGER
from peerd.messages import AS_STARTED, Hello, Message, Plan
from peerd.transport.hello import Refused, greet
from peerd.transport.link import Link, LinkLost, Transport

RETRY_FIRST_S = 0.1
RETRY_MAX_S = 5.0  # a peer that comes back is found again within this; a dead one is forgotten by membership
IDLE_S = 300.0  # a connection to a former partner is closed; the trigger's longest silence is 60 s
QUEUE_MAX = 64  # messages to one peer; a link has at most three under way
REFUSED_RETRY_S = 30.0  # it may have been restarted with the right model


@dataclass(slots=True, eq=False)
class _Outbox:
    scope: trio.CancelScope
    queue: deque[tuple[Plan, Message]] = field(default_factory=deque)
    filled: trio.Event = field(default_factory=trio.Event)


class Peers:
    """The outgoing connections of one node."""

    def __init__(
        self,
        transport: Transport,
        hello: Callable[[], Hello],
        address_of: Callable[[NodeId], Address | None],
        reconnected: Callable[[NodeId], None],
        refused: Callable[[Refused], None],
    ) -> None:
        """`hello` is asked anew for every connection: the model may have become known meanwhile."""
        self.plan = AS_STARTED  # of what is sent from now on
        self._transport = transport
        self._hello = hello
        self._address_of = address_of
        self._reconnected = reconnected
        self._refused = refused
        self._boxes: dict[NodeId, _Outbox] = {}
        self._open: set[Link] = set()
        self._links: dict[NodeId, Link] = {}  # those we dialled that are greeted
        self._closed_sent = 0
        self._closed_received = 0
        self._nursery: trio.Nursery | None = None

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the connections until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    def send(self, peer: NodeId, message: Message) -> None:
        """Queue for `peer`, dialling it if need be."""
        assert self._nursery is not None, "send before run"
        box = self._boxes.get(peer)
        if box is None:
            box = self._boxes[peer] = _Outbox(trio.CancelScope())
            self._nursery.start_soon(self._keep_connected, peer, box)
        said = self.plan, what_is_said(message)
        waiting = [at for at, (plan, other) in enumerate(box.queue) if (plan, what_is_said(other)) == said]
        if supersedes(message) and waiting and waiting[-1] > 0:
            box.queue[waiting[-1]] = self.plan, message
            return
        if len(box.queue) >= QUEUE_MAX or (waiting and not supersedes(message)):
            return  # the mode says again what has had no answer; on a thin line, perhaps because it has not left yet
        box.queue.append((self.plan, message))
        box.filled.set()

    def forget(self, peer: NodeId) -> None:
        """Close the connection to a peer that is gone; what is queued is dropped."""
        if box := self._boxes.pop(peer, None):
            box.scope.cancel()

    async def drain(self) -> None:
        """Wait until nothing is queued."""
        while any(box.queue for box in self._boxes.values()):
            await trio.sleep(0.01)

    @property
    def bytes_sent(self) -> int:
        """Written to the sockets of all connections seen by `count`."""
        return self._closed_sent + sum(link.bytes_sent for link in self._open)

    @property
    def bytes_received(self) -> int:
        """Read from the sockets of all connections seen by `count`."""
        return self._closed_received + sum(link.bytes_received for link in self._open)

    def carrier(self, peer: NodeId) -> str:
        """What bulk to `peer` travels over; "" where there is no connection."""
        return self._links[peer].carrier if peer in self._links else ""

    def count(self, link: Link) -> None:
        """Have the link's bytes counted; accepted links too."""
        self._open.add(link)

    async def close(self, link: Link) -> None:
        """Close a counted link."""
        try:
            await link.aclose()
        finally:
            self._open.discard(link)
            self._closed_sent += link.bytes_sent
            self._closed_received += link.bytes_received

    async def _keep_connected(self, peer: NodeId, box: _Outbox) -> None:
        delay_s, broken, said, stays = RETRY_FIRST_S, False, "", ""
        with box.scope:
            while (address := self._address_of(peer)) is not None:
                try:
                    link = await self._transport.dial(address)
                    self.count(link)
                    try:
                        if (await greet(link, self._hello())).node != peer:
                            raise LinkLost(f"another node answers at {link.remote}")
                        if (why_not := await link.upgrade()) and why_not != stays:
                            stays = why_not
                            LOGGER.info("bulk to %s stays on %s: %s", link.remote, link.carrier, why_not)
                        self._links[peer] = link
                        if broken:
                            box.queue.clear()  # a later exchange must not overtake what is said again now
                            self._reconnected(peer)
                        delay_s = RETRY_FIRST_S
                        await self._write(peer, link, box)
                    finally:
                        self._links.pop(peer, None)
                        await self.close(link)
                except Refused as refusal:
                    self._refused(refusal)
                    delay_s = REFUSED_RETRY_S
                except (LinkLost, PeerError) as error:
                    if str(error) != said:
                        said = str(error)
                        LOGGER.info("%s", said)
                broken = True
                box.queue.clear()
                await trio.sleep(delay_s)
                delay_s = min(2 * delay_s, RETRY_MAX_S)
        if self._boxes.get(peer) is box:
            del self._boxes[peer]

    async def _write(self, peer: NodeId, link: Link, box: _Outbox) -> None:
        """Send what is queued, while watching for the end of the connection. Raises LinkLost or PeerError."""
        ended: Exception | None = None
        said = AS_STARTED
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_watch, link)
                while True:
                    while box.queue:
                        plan, message = box.queue[0]
                        if plan != said:
                            await link.send(plan)
                            said = plan
                        await link.send(message)
                        await link.flushed()  # until then it waits, and need not be said again
                        box.queue.popleft()
                    box.filled = trio.Event()
                    with trio.move_on_after(IDLE_S) as idle:
                        await box.filled.wait()
                    if idle.cancelled_caught and not box.queue:
                        box.scope.cancel()
                        if self._boxes.get(peer) is box:
                            del self._boxes[peer]  # what is sent from now on dials anew
        except* (LinkLost, PeerError) as group:
            ended = group.exceptions[0]  # the watcher or the writer: whoever saw it first
        assert ended is not None, "the writer only ends with its connection"
        raise ended


def what_is_said(message: Message) -> tuple[Any, ...]:
    """Equal for a message and its repetition; of bulk by what it is about, for its chunks are not worth comparing."""
    if supersedes(message):
        return (type(message),)
    if not hasattr(message, "chunks"):
        return (message,)
    return type(message), *(
        getattr(message, name, None) for name in ("link", "attempt", "shard", "term", "clock", "seq", "seqs")
    )


def supersedes(message: Message) -> bool:
    """Whether it takes the place of an older one of its type that waits; not of the first, which may be leaving."""
    return getattr(message, "supersedes", False)


async def _watch(link: Link) -> None:
    await link.receive()
    raise PeerError(f"{link.remote} answered on a connection that only we write to")
