"""What do production's connections do? In order, one direction, dialled anew for ever; what breaks on the way is lost.

The rules are those of daemon/peers.py over transport/tcp.py, on virtual time: a dial costs a round trip and the
handshake; what is queued or under way when a connection breaks is gone, and its sender is told when messages flow
again; who stands still or cannot be reached holds the stream up, until the sender's patience ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum, auto
from typing import Generic, Protocol, TypeVar

from peerd.simulation.network import Network
from peerd.simulation.world import Kind, World
from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId
from peerd.transport.messages import Message
from peerd.transport.patience import DIAL_TIMEOUT_S, GREETING_DEADLINE_S, PATIENCE_S, RETRY_FIRST_S, RETRY_MAX_S
from peerd.transport.peer_queue import PeerQueue

HANDSHAKE_BYTES = 600  # Hello and Welcome
LOOK_S = 0.5  # how often a stream that is held up tries again

Item = TypeVar("Item")
Carried = TypeVar("Carried", contravariant=True)


class State(Enum):
    """What a connection does."""

    DIALLING = auto()  # for the first time
    IDLE = auto()  # there is a line, and nothing leaves
    SENDING = auto()  # a message leaves
    BROKEN = auto()  # it waits for the next dial, or dials
    CLOSED = auto()


TRANSITIONS: dict[State, dict[State, str]] = {
    State.DIALLING: {
        State.IDLE: "it was answered",
        State.BROKEN: "nobody is there, or nobody answers for long",
        State.CLOSED: "the peer is gone, or this process is",
    },
    State.IDLE: {
        State.SENDING: "a message waits",
        State.BROKEN: "the process at the other end is gone or stood still for long, or a message came damaged",
        State.CLOSED: "as before",
    },
    State.SENDING: {
        State.IDLE: "all of the message has left",
        State.BROKEN: "as when idle",
        State.CLOSED: "as before",
    },
    State.BROKEN: {
        State.IDLE: "a dial was answered: what waits is dropped, and the node hears that messages flow again",
        State.BROKEN: "a dial was not",
        State.CLOSED: "as before",
    },
    State.CLOSED: {},
}
"""What a state may be followed by, and why."""


class End(Protocol[Carried]):
    """A node, as its connections see it."""

    index: int
    life: int  # counts the starts of whatever process listens there
    up: bool  # a process is there
    running: bool  # and is not stopped
    bytes_sent: int  # on all lines

    def receive(self, source: NodeId, item: Carried) -> None:
        """A whole message arrived. Raises PeerError when it is damaged."""
        ...

    def hears(self, source: NodeId) -> bool:
        """Whether it takes a connection of this node."""
        ...


class Connection(Generic[Item]):
    """From one process to another. What a message is to its ends, is theirs to know."""

    def __init__(
        self,
        world: World,
        network: Network,
        source: End[Item],
        target: Callable[[], End[Item] | None],
        source_id: NodeId,
        index: int,
        reconnected: Callable[[], None],
        unreached: Callable[[], None],
    ) -> None:
        """`target` is whoever listens at the place `index` now."""
        self._world = world
        self._network = network
        self._source = source
        self._target = target
        self._source_id = source_id
        self._index = index
        self._reconnected = reconnected
        self._unreached = unreached
        self._lost_at = world.now
        self._queue = PeerQueue[tuple[Item, float]]()  # and the bytes on the line
        self._state = State.DIALLING
        self._line = 0  # counts the connections, so that what belongs to a broken one is ignored
        self._moved = self._handed_over = 0  # messages on this line
        self._arrived: dict[int, Item] = {}  # by number; one whose packets are repeated holds up those behind it
        self._held_since: float | None = None
        self._life = -1
        self._retry_s = RETRY_FIRST_S
        self._dial()

    @property
    def queued(self) -> int:
        """Messages that wait."""
        return len(self._queue)

    @property
    def _connected(self) -> bool:
        return self._state in (State.IDLE, State.SENDING)

    @property
    def busy(self) -> bool:
        """Whether something is on its way."""
        return self._connected and (bool(self._queue) or self._moved > self._handed_over)

    def send(self, message: Message, item: Item, size: float, bulk_max: float = math.inf) -> None:
        """Queue; the mode says again what has had no answer, so a full queue drops it, and so does what still waits."""
        if self._queue.put(message, (item, size), bulk_max=bulk_max):
            self._move()

    def reset(self) -> None:
        """The process at the other end is gone, and its kernel says so."""
        line = self._line
        if self._connected:
            flight_s = self._network.flight_s(self._index, self._source.index)
            self._world.later(flight_s, lambda: self._break() if line == self._line else None)

    def close(self) -> None:
        """The peer is gone, or this process is."""
        self._enter(State.CLOSED)
        self._line += 1

    def _enter(self, state: State) -> None:
        assert state in TRANSITIONS[self._state], f"{self._state.name} -> {state.name}"
        self._state = state

    def _dial(self) -> None:
        line = self._line
        back_s = self._network.flight_s(self._source.index, self._index)
        self._world.later(2 * back_s, lambda: self._answered(line) if line == self._line else None)

    def _answered(self, line: int) -> None:
        target = self._target()
        if target is None or not target.up or not target.hears(self._source_id):
            self._break()
            return
        if not target.running or self._cut():
            self._world.later(GREETING_DEADLINE_S, lambda: self._break() if line == self._line else None)
            return
        self._source.bytes_sent += HANDSHAKE_BYTES
        was_broken, self._life = self._state is State.BROKEN, target.life
        self._enter(State.IDLE)
        self._retry_s = RETRY_FIRST_S
        if was_broken:
            self._queue.clear()  # a later exchange must not overtake what is said again now
            self._reconnected()
        self._move()

    def _cut(self) -> bool:
        here, there = self._source.index, self._index
        return self._network.cut(here, there) or self._network.cut(there, here)

    def _break(self) -> None:
        if self._connected:
            self._world.note(Kind.BROKEN, self._source.index, self._index)
            self._lost_at = self._world.now
        elif self._world.now - self._lost_at >= DIAL_TIMEOUT_S:
            self._unreached()
        self._line += 1
        self._enter(State.BROKEN)
        self._queue.clear()
        self._arrived.clear()
        self._moved = self._handed_over = 0
        self._held_since = None
        line = self._line
        self._world.later(self._retry_s, lambda: self._dial() if line == self._line else None)
        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)

    def _move(self) -> None:
        if self._state is not State.IDLE or not self._queue.has_waiting:
            return
        item, size = self._queue.take()
        self._enter(State.SENDING)
        line, number = self._line, self._moved
        self._moved += 1
        self._network.stream(
            self._source.index,
            self._index,
            size,
            lambda: self._sent(line, size),
            lambda: self._arrive(line, number, item),
        )

    def _sent(self, line: int, size: float) -> None:
        if line == self._line:
            self._source.bytes_sent += round(size)
            self._enter(State.IDLE)
            self._queue.left()
            self._move()

    def _arrive(self, line: int, number: int, item: Item) -> None:
        if line == self._line:
            self._arrived[number] = item
            if self._held_since is None:
                self._hand_over(line)

    def _hand_over(self, line: int) -> None:
        """Give what has arrived to the receiver, in order, or wait for it."""
        while line == self._line and self._handed_over in self._arrived:
            target = self._target()
            if target is None or not target.up or target.life != self._life:
                self._break()
                return
            if not target.running or self._cut():
                now = self._world.now
                self._held_since = now if self._held_since is None else self._held_since
                if now - self._held_since >= PATIENCE_S:
                    self._break()
                else:
                    self._world.later(LOOK_S, lambda: self._hand_over(line))
                return
            self._held_since = None
            item = self._arrived.pop(self._handed_over)
            self._handed_over += 1
            try:
                target.receive(self._source_id, item)
            except PeerError:
                self._break()
