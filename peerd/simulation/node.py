"""One simulated node: its process, its membership and its connections, a thin shell of virtual time around the cores.

It wakes them at their deadlines and carries out their effects. What trains is its other half (trainer.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from peerd.membership.core import Membership
from peerd.membership.effects import (
    AskTwin,
    MemberChanged,
    MembershipEffect,
    PushPull,
    SendDatagram,
)
from peerd.membership.table_exchange import PUSH_PULL_DEADLINE_S, TABLE_PART
from peerd.node.strikes import Strikes
from peerd.simulation.byzantine import Lie
from peerd.simulation.checkers import Checkers
from peerd.simulation.connections import Connection
from peerd.simulation.network import Network
from peerd.simulation.problems import Learner
from peerd.simulation.trainer import NodeSettings, SimulatedTrainer
from peerd.simulation.weight import datagram_bytes, table_bytes
from peerd.simulation.world import Kind, World
from peerd.training.codecs import vector
from peerd.training.effects import Effect, Send
from peerd.training.mode import OPTIMIZER_VALUES_MAX
from peerd.training.pairs.reference import PairedReference
from peerd.transport import wire
from peerd.transport.errors import Blameless, PeerError
from peerd.transport.framing import FIXED_SIZE, FrameReader, framed
from peerd.transport.ids import Address, NodeId
from peerd.transport.messages import Chunks, Member, MemberTable, Message, State
from peerd.transport.patience import DIAL_TIMEOUT_S
from peerd.transport.peer_queue import MODELS_WAITING_MAX
from peerd.transport.secure.signing import Signing

INBOX_DATAGRAMS = 400  # what the kernel keeps for a stopped process
DECODED_ONE_IN = 32  # datagrams are decoded and compared; the others arrive as the objects they were
FRAMED_ONE_IN = 32  # messages of the mode are framed; the others are encoded and decoded, and arrive as that


@dataclass(frozen=True, slots=True)
class Clock:
    """What a node believes the time is: offset + rate * virtual time."""

    offset_s: float = 0.0
    rate: float = 1.0

    def local(self, now: float) -> float:
        """This node's time."""
        return self.offset_s + self.rate * now

    def duration_s(self, local_s: float) -> float:
        """How long so many of its seconds really take."""
        return local_s / self.rate


class Letter(NamedTuple):
    """A message of the mode on its way, encoded."""

    kind: int
    header: bytes
    chunks: Chunks
    length: int  # of its frames

    def frame(self) -> bytes:
        """As a stream has it."""
        return b"".join(framed(self.kind, self.header, self.chunks))


class Environment(Protocol):
    """What a node sees of the swarm that it is in."""

    world: World
    network: Network
    checkers: Checkers
    settings: NodeSettings
    handshakes: bool  # whether members show certificates: nobody dials for that here, but in a test that says so

    def signing(self, id: NodeId) -> Signing | None:
        """Of this node; None in a plain swarm."""
        ...

    def listener(self, index: int) -> Node | None:
        """Whoever runs at this place now."""
        ...

    def index_of(self, address: Address) -> int:
        """The place of an address."""
        ...

    def believes(self, viewer: Node, id: NodeId) -> None:
        """`viewer` changed its mind about a member."""
        ...


class Node:
    """One life of one node."""

    def __init__(
        self,
        swarm: Environment,
        index: int,
        me: Member,
        seeds: list[Address],
        learner: Learner | None,
        wait_for: int,
        clock: Clock,
        known: Sequence[Member] = (),
        lie: Lie | None = None,
    ) -> None:
        """Without a learner it is a member and nothing else. In a swarm that is formed already, whose members are
        `known`, it has the model, too."""
        self.index = index
        self.life = me.epoch
        self.id = me.id
        self.address = (me.host, me.port)
        self.up = self.running = True
        self.excused_until = math.inf
        self.bytes_sent = 0
        self.clock = clock
        self._swarm = swarm
        self._world = swarm.world
        rng = swarm.world.rng("membership", index, me.epoch)
        signing = swarm.signing(me.id)
        self.membership = Membership(
            me, seeds, rng, self.now, swarm.settings.timing, known, signing=signing, handshakes=swarm.handshakes
        )
        self._connections: dict[NodeId, Connection[Letter]] = {}
        self._strikes = Strikes()
        self._reader = FrameReader()
        self._bulk_max = math.inf  # bytes that wait for one peer
        self._inbox: list[tuple[Message, Address]] = []
        self._missed: list[Callable[[], None]] = []  # what would have happened while it stood still
        self._wakes_at = math.inf
        self.trainer: SimulatedTrainer | None = None
        if learner is not None:
            kept = OPTIMIZER_VALUES_MAX[swarm.settings.mode_settings.exchange]
            self._reader.payload_limit = limit = vector.payload_limit(learner.layout, kept)
            self._bulk_max = MODELS_WAITING_MAX * limit
            partners = {member.id for member in known if member.id != self.id}
            self.trainer = SimulatedTrainer(
                self, swarm.world, swarm.checkers, swarm.settings, learner, partners,
                seeds=seeds, formed=bool(known), wait_for=wait_for, lie=lie,
            )  # fmt: skip

    def begin(self) -> None:
        """Wake for the first time, once the swarm knows of this node."""
        if self.trainer is not None:
            self.trainer.begin()
        self._wake_when_due()

    @property
    def now(self) -> float:
        """See `Shell`."""
        clock = self.clock  # asked at every event
        return clock.offset_s + clock.rate * self._world.now

    @property
    def references(self) -> Mapping[NodeId, PairedReference]:
        """See `Watched`."""
        return self.trainer.references if self.trainer is not None else {}

    @property
    def is_centre(self) -> bool:
        """See `Watched`."""
        return self.trainer is not None and self.trainer.is_centre

    @property
    def counts(self) -> Counter[str]:
        """Of membership and mode."""
        return self.membership.counts + (self.trainer.counts if self.trainer is not None else Counter())

    # ---------------------------------------------------------------- the process

    def later(self, delay_s: float, event: Callable[[], None]) -> None:
        """In this life only; not before it is resumed."""

        def fire() -> None:
            if not self.up:
                return
            if self.running:
                event()
            else:
                self._missed.append(event)

        self._world.later(delay_s, fire)

    def crash(self) -> None:
        """The process is gone, with all it held."""
        self.up = self.running = False
        for connection in self._connections.values():
            connection.close()

    def pause(self) -> None:
        """SIGSTOP, daemon and trainer."""
        self.running = False

    def resume(self) -> None:
        """SIGCONT, in the worst order: timers before what waits in the sockets."""
        self.running = True
        if self.membership.deadline <= self.now:
            self.perform(self.membership.on_timer(self.now))
        missed, self._missed = self._missed, []
        for event in missed:
            event()
        inbox, self._inbox = self._inbox, []
        for message, source in inbox:
            self.perform(self.membership.on_datagram(message, source, self.now))

    # ---------------------------------------------------------------- membership

    def datagram(self, message: Message, source: Address) -> None:
        """One datagram arrived."""
        if self.running:
            self.perform(self.membership.on_datagram(message, source, self.now))
        elif self.up and len(self._inbox) < INBOX_DATAGRAMS:
            self._inbox.append((message, source))

    def leave(self) -> None:
        """Say goodbye."""
        self.perform(self.membership.leave(self.now))

    def perform(self, effects: Sequence[Effect | MembershipEffect]) -> None:
        """Do what a core asks."""
        for effect in effects:
            match effect:
                case SendDatagram():
                    self._send_datagram(effect)
                case PushPull():
                    self._push_pull(effect.address)
                case MemberChanged():
                    self._member_changed(effect.id)
                case AskTwin():
                    pass  # nobody has keys here: of two lives the older goes on
                case Send():
                    self.send(effect.peer, effect.message)
                case _ if self.trainer is not None:
                    self.trainer.perform(effect)
        self._wake_when_due()

    def _send_datagram(self, effect: SendDatagram) -> None:
        swarm, world = self._swarm, self._world
        message, size = effect.message, datagram_bytes(effect.message)
        if world.events % DECODED_ONE_IN == 0 or size > wire.DATAGRAM_MAX:
            encoded = wire.encode_datagram(message)
            message = wire.decode_datagram(encoded)
            swarm.checkers.same("a datagram", (size, encoded), (len(encoded), wire.encode_datagram(message)))
        self.bytes_sent += size
        target = swarm.index_of(effect.address)
        copies = swarm.network.datagram(self.index, target, size)
        if not copies:
            world.note(Kind.LOST, self.index, target, size)
        for delay_s in copies:
            world.later(delay_s, partial(self._deliver, target, message, size))

    def _deliver(self, target: int, message: Message, size: int) -> None:
        self._world.note(Kind.DATAGRAM, self.index, target, size)
        if (node := self._swarm.listener(target)) is not None:
            node.datagram(message, self.address)

    def _push_pull(self, address: Address) -> None:
        """Both tables over a connection of their own: they cost their bytes and four flights."""
        swarm, network = self._swarm, self._swarm.network
        index = swarm.index_of(address)
        mine = self.membership.table()
        ended = False

        def fail() -> None:
            nonlocal ended
            if not ended:
                ended = True
                self.perform(self.membership.on_unreachable(address, self.now))

        def answer() -> None:
            nonlocal ended
            other = swarm.listener(index)
            if other is None:  # its kernel says so, before any table is sent
                self.later(network.flight_s(index, self.index), fail)
                return
            sent = table_bytes(mine)
            self.bytes_sent += sent
            self._world.note(Kind.TABLES, self.index, index, sent)
            if not other.running or network.cut(index, self.index):
                return
            other.perform(_tables(other, mine))
            theirs = other.membership.table()
            back = table_bytes(theirs)
            other.bytes_sent += back
            self._world.note(Kind.TABLES, other.index, self.index, back)
            ended = True
            self.later(network.flight_s(other.index, self.index), lambda: self.perform(_tables(self, theirs, address)))

        if network.cut(self.index, index) or network.cut(index, self.index):
            self.later(DIAL_TIMEOUT_S, fail)
            return
        self.later(3 * network.flight_s(self.index, index), answer)
        self.later(PUSH_PULL_DEADLINE_S, fail)

    def _member_changed(self, id: NodeId) -> None:
        self._swarm.checkers.member_changed(self, id)
        self._swarm.believes(self, id)
        member = self.membership.members[id]
        if id == self.id or self.trainer is None:
            return
        if member.state > State.SUSPECT and (gone := self._connections.pop(id, None)):
            gone.close()
        self.trainer.member_changed(member)

    # ---------------------------------------------------------------- time

    def _wake_when_due(self) -> None:
        deadline, trainer = self.membership.deadline, self.trainer
        if trainer is not None and (its := trainer.deadline) < deadline:
            deadline = its
        if deadline < self._wakes_at:
            self._wakes_at = deadline
            delay_s = self.clock.duration_s(deadline - self.now)
            if delay_s < math.inf:
                self._world.later(delay_s, partial(self._wake, deadline))

    def _wake(self, planned: float) -> None:
        if self._wakes_at != planned or not self.up:
            return
        if not self.running:
            self._missed.append(partial(self._wake, planned))
            return
        self._wakes_at = math.inf
        now = max(self.now, planned)  # adding a delay may round below the deadline that it was to reach
        if self.membership.deadline <= now:
            self.perform(self.membership.on_timer(now))
        if self.trainer is not None and self.trainer.deadline <= now:
            self.perform(self.trainer.on_timer(now))
        self._wake_when_due()

    # ---------------------------------------------------------------- messages of the mode

    def send(self, peer: NodeId, message: Message) -> None:
        """See `Shell`."""
        member = self.membership.members.get(peer)
        if member is None or member.state > State.SUSPECT or not self.hears(peer):
            return
        connection = self._connections.get(peer)
        if connection is None:
            swarm, index = self._swarm, self._swarm.index_of((member.host, member.port))

            def listener() -> Node | None:
                """Whoever answers there under another identity is not the peer."""
                node = swarm.listener(index)
                return node if node is not None and node.id == peer else None

            connection = self._connections[peer] = Connection(
                self._world,
                swarm.network,
                self,
                listener,
                self.id,
                index,
                lambda: self._reconnected(peer),
                lambda: self._unreached(peer),
            )
        if self.trainer is not None:
            message = self.trainer.sent(peer, message)
        header, chunks = wire.encode(message)
        payload = sum(map(len, chunks))
        length = FIXED_SIZE * (1 + len(chunks)) + len(header) + payload
        size = length + payload * (self._swarm.settings.size_scale - 1)
        connection.send(message, Letter(message.KIND, header, chunks, length), size, self._bulk_max)
        self._swarm.checkers.queue(self.id, peer, connection.queued)

    def arriving(self, peer: NodeId) -> bool:
        """See `Shell`, as production sees at its sockets."""
        row = self.membership.members[peer]
        node = self._swarm.listener(self._swarm.index_of((row.host, row.port)))
        return node is not None and node.sends_to(self.id)

    def sends_to(self, peer: NodeId) -> bool:
        """Whether something is on its way there."""
        connection = self._connections.get(peer)
        return connection is not None and connection.busy

    def reset(self, peer: NodeId) -> None:
        """The process of this peer is gone."""
        if connection := self._connections.get(peer):
            connection.reset()

    def _reconnected(self, peer: NodeId) -> None:
        if self.up and self.trainer is not None:
            self.trainer.reconnected(peer)

    def _unreached(self, peer: NodeId) -> None:
        if self.up and self.trainer is not None:
            self.trainer.unreached(peer)

    def receive(self, source: NodeId, letter: Letter) -> None:
        """A message of the mode, or about a whole model. Raises PeerError."""
        message = self._opened(letter)
        if self._swarm.network.drops(message):
            self._world.note(Kind.LOST, int(source[1:6]), self.index, letter.length)
            return
        self._world.note(Kind.MESSAGE, self.index, letter.kind, letter.length)
        if self.trainer is not None:
            try:
                self.trainer.receive(source, message)
            except PeerError as error:
                if not isinstance(error, Blameless):  # nor is a line that damages what it carries the peer's fault
                    self._strike(source)
                raise

    def _strike(self, peer: NodeId) -> None:
        was_heard = self.hears(peer)
        if (refused_s := self._strikes.strike(peer, self.now)) and was_heard:
            self._look_at(peer)
            self.later(refused_s, lambda: self._look_at(peer))

    def _look_at(self, peer: NodeId) -> None:
        if self.trainer is not None and (member := self.membership.members.get(peer)) is not None:
            self.trainer.member_changed(member)

    def hears(self, source: NodeId) -> bool:
        """See `End`: not who broke the rules again and again."""
        return not self._strikes.refused_s(source, self.now)

    def _opened(self, letter: Letter) -> Message:
        network = self._swarm.network
        if network.damages():
            return self._read(network.damaged(letter.frame()))
        if self._world.events % FRAMED_ONE_IN == 0:
            frame = letter.frame()
            self._swarm.checkers.same("a frame", letter.length, len(frame))
            return self._read(frame)
        return wire.decode(letter.kind, letter.header, self._reader.payload_limit).message(letter.chunks)

    def _read(self, frame: bytes) -> Message:
        reader, at = self._reader, 0
        message: Message | None = None
        try:
            while at < len(frame):
                buffer = reader.buffer()
                count = min(len(buffer), len(frame) - at)
                buffer[:count] = frame[at : at + count]
                reader.received(count)
                at += count
                message = reader.next_message() or message
        except BaseException:
            self._reader = FrameReader(reader.payload_limit)  # a damaged stream ends with its connection
            raise
        if message is None:
            self._reader = FrameReader(reader.payload_limit)
            raise PeerError("a frame that is no message")
        return message


def _parts(table: MemberTable) -> list[MemberTable]:
    rows = table.members
    return [MemberTable(table.sender, rows[start : start + TABLE_PART]) for start in range(0, len(rows), TABLE_PART)]


def _tables(node: Node, table: MemberTable, dialled: Address | None = None) -> list[MembershipEffect]:
    effects: list[MembershipEffect] = []
    for part in _parts(table):
        effects += node.membership.on_table(part, node.clock.local(node._world.now), dialled)
    return effects
