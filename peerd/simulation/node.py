"""One simulated node: the production cores of membership and mode, and a thin shell of virtual time around them.

What production spreads over daemon and trainer is here one object: it wakes the cores at their deadlines, carries out
their effects, makes the learner's steps, and brings a newcomer the swarm's model.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from peerd.effects import (
    Address,
    Apply,
    Effect,
    MemberChanged,
    NodeId,
    PeerError,
    Proceed,
    Publish,
    PushPull,
    Resume,
    Send,
    SendDatagram,
    StepReport,
    Vector,
)
from peerd.membership import Membership
from peerd.messages import Connected, Delta, Member, MemberTable, Message, ModelRequest, ModelSnapshot, State
from peerd.roles import About, FetchFrom, OwnModel, is_partner, whose_model
from peerd.simulation.checkers import Checkers
from peerd.simulation.connections import Connection
from peerd.simulation.network import Network
from peerd.simulation.problems import Compute, Learner
from peerd.simulation.weight import datagram_bytes, table_bytes
from peerd.simulation.world import Kind, World
from peerd.swarm_view import PUSH_PULL_DEADLINE_S, TABLE_PART
from peerd.timing import Timing
from peerd.training import delta
from peerd.training.modes import Mode, ModeSettings, parse_mode
from peerd.training.reference import PairedReference
from peerd.transport import wire
from peerd.transport.framing import FrameReader, frames
from peerd.transport.tcp import DIAL_TIMEOUT_S

SIGNATURE = "simulated"
READY = About(model=SIGNATURE, ready=True, expects=True)
SNAPSHOT_CODEC = "float32"
INBOX_DATAGRAMS = 400  # what the kernel keeps for a stopped process
PEERS_EVERY_S = 0.5  # the mode hears of members that came or went at most so often
LOOK_AGAIN_S = 1.0  # how often a newcomer looks whether somebody has a model
ASK_AGAIN_S = 10.0
DECODED_ONE_IN = 32  # datagrams are decoded and compared; the others arrive as the objects they were
SETTLE_S = 30.0  # how long an ended run waits for others that train
PHASES = ("joining", "waiting", "training", "finishing", "finished")


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What all nodes of a swarm share."""

    mode: str
    mode_settings: ModeSettings
    timing: Timing
    compute: Compute
    steps: int | None  # of a run; None trains for ever
    size_scale: float


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


class Surroundings(Protocol):
    """What a node sees of the swarm that it is in."""

    world: World
    network: Network
    checkers: Checkers
    settings: NodeSettings

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
        swarm: Surroundings,
        index: int,
        me: Member,
        seeds: list[Address],
        learner: Learner | None,
        wait_for: int,
        clock: Clock,
        known: Sequence[Member] = (),
    ) -> None:
        """Without a learner it is a member and nothing else. In a swarm that is formed already, whose members are
        `known`, it has the model, too."""
        self.index = index
        self.life = me.epoch
        self.id = me.id
        self.address = (me.host, me.port)
        self.up = self.running = True
        self.excused_until = math.inf
        self.phase = "joining" if learner is not None else "finished"
        self.learner = learner
        self.steps = 0
        self.loss = math.nan
        self.computed_s = 0.0  # by the trainer, in whole steps
        self.trained_from = self.trained_until = math.nan
        self.bytes_sent = 0
        self.staleness: Counter[int] = Counter()  # own steps between the two ends of an exchange
        self.mode: Mode | None = None
        self.injected: Vector | None = None  # start, own steps and corrections, where exactness is checked
        self.clock = clock
        self._swarm = swarm
        self._world = swarm.world
        self._rng = swarm.world.rng("node", index, me.epoch)
        self._compute_rng = swarm.world.rng("compute", index, me.epoch)
        self._seeds = seeds
        self._wait_for = wait_for
        rng = swarm.world.rng("membership", index, me.epoch)
        self.membership = Membership(me, seeds, rng, self._now, swarm.settings.timing, known)
        self._about = About(expects=learner is not None, founder=not seeds)
        self._connections: dict[NodeId, Connection] = {}
        self._reader = FrameReader()
        self._partners: set[NodeId] = set()
        self._partners_due = False
        self._inbox: list[tuple[Message, Address]] = []
        self._missed: list[Callable[[], None]] = []  # what would have happened while it stood still
        self._wakes_at = math.inf
        self._replica: Vector | None = None  # the last copy and all corrections since
        self._pending: Vector | None = None  # corrections that the learner has not yet taken
        self._asked_publish = False
        self._at_barrier = False
        self._asked: tuple[NodeId, float] | None = None  # the donor of our first model
        self._began: dict[NodeId, int] = {}
        if known:
            self._about = READY
            self._partners = {member.id for member in known if member.id != self.id}

    def begin(self) -> None:
        """Wake for the first time, once the swarm knows of this node."""
        if self.learner is not None:
            self._reader.payload_limit = delta.payload_limit(self.learner.layout)
            if self._about is READY:
                self._have_model()
            else:
                self._say_about(model=SIGNATURE)
                self._join()
        self._wake_when_due()

    @property
    def _now(self) -> float:
        return self.clock.local(self._world.now)

    @property
    def references(self) -> Mapping[NodeId, PairedReference]:
        """Of the links that its mode holds, if it has links."""
        return getattr(self.mode, "references", dict)()

    @property
    def is_centre(self) -> bool:
        """Whether its links belong to a centre variable."""
        return getattr(self.mode, "centre_values", None) is not None

    @property
    def counts(self) -> Counter[str]:
        """Of membership and mode."""
        return self.membership.counts + (self.mode.counts if self.mode is not None else Counter())

    @property
    def trained_s(self) -> float:
        """From the first step's begin to the end of the run, its last exchanges included, or until now."""
        until = self._world.now if math.isnan(self.trained_until) else self.trained_until
        return 0.0 if math.isnan(self.trained_from) else until - self.trained_from

    def values(self) -> Vector:
        """The model, with every correction that has come."""
        assert self.learner is not None, "asked of nodes that train"
        values = self.learner.values()
        return values if self._pending is None else values + self._pending

    # ---------------------------------------------------------------- the process

    def _later(self, delay_s: float, event: Callable[[], None]) -> None:
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
        if self.membership.deadline <= self._now:
            self.perform(self.membership.on_timer(self._now))
        missed, self._missed = self._missed, []
        for event in missed:
            event()
        inbox, self._inbox = self._inbox, []
        for message, source in inbox:
            self.perform(self.membership.on_datagram(message, source, self._now))

    # ---------------------------------------------------------------- membership

    def datagram(self, message: Message, source: Address) -> None:
        """One datagram arrived."""
        if self.running:
            self.perform(self.membership.on_datagram(message, source, self._now))
        elif self.up and len(self._inbox) < INBOX_DATAGRAMS:
            self._inbox.append((message, source))

    def leave(self) -> None:
        """Say goodbye."""
        self.perform(self.membership.leave(self._now))

    def perform(self, effects: list[Effect]) -> None:
        """Do what a core asks."""
        for effect in effects:
            match effect:
                case SendDatagram():
                    self._send_datagram(effect)
                case PushPull():
                    self._push_pull(effect.address)
                case MemberChanged():
                    self._member_changed(effect.id)
                case Send():
                    self._send(effect.peer, effect.message)
                case Apply():
                    self._apply(effect.correction)
                case Publish():
                    self._asked_publish = True
                case Resume() if self._at_barrier:
                    self._at_barrier = False
                    self._take_corrections()
                    self._next_step()
                case Proceed() if effect.settled and self.phase == "finishing":
                    self._finish()
        self._wake_when_due()

    def _send_datagram(self, effect: SendDatagram) -> None:
        swarm, world = self._swarm, self._world
        message, size = effect.message, datagram_bytes(effect.message)
        if world.events % DECODED_ONE_IN == 0 or size > wire.MAX_DATAGRAM:
            encoded = wire.encode_datagram(message)
            message = wire.decode_datagram(encoded)
            swarm.checkers.same("a datagram", (size, encoded), (len(encoded), wire.encode_datagram(message)))
        self.bytes_sent += size
        target = swarm.index_of(effect.address)
        copies = swarm.network.datagram(self.index, target, size)
        if not copies:
            world.note(Kind.LOST, self.index, target, size)
        for delay_s in copies:
            world.later(delay_s, lambda: self._deliver(target, message, size))

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
                self.perform(self.membership.on_unreachable(address, self._now))

        def answer() -> None:
            nonlocal ended
            other = swarm.listener(index)
            if other is None:  # its kernel says so, before any table is sent
                self._later(network.flight_s(index, self.index), fail)
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
            self._later(network.flight_s(other.index, self.index), lambda: self.perform(_tables(self, theirs)))

        if network.cut(self.index, index) or network.cut(index, self.index):
            self._later(DIAL_TIMEOUT_S, fail)
            return
        self._world.later(3 * network.flight_s(self.index, index), answer)
        self._later(PUSH_PULL_DEADLINE_S, fail)

    def _member_changed(self, id: NodeId) -> None:
        self._swarm.checkers.member_changed(self, id)
        self._swarm.believes(self, id)
        member = self.membership.members[id]
        if id == self.id or self.learner is None:
            return
        if member.state > State.SUSPECT and (gone := self._connections.pop(id, None)):
            gone.close()
        if is_partner(member, SIGNATURE) != (id in self._partners):
            self._partners ^= {id}
            if not self._partners_due:
                self._partners_due = True
                self._later(PEERS_EVERY_S, self._tell_partners)

    def _tell_partners(self) -> None:
        self._partners_due = False
        if self.mode is not None:
            self.perform(self.mode.on_peers(frozenset(self._partners), self._now))
            self._maybe_go()

    def _say_about(self, **changes: Any) -> None:
        self._about = About(**{**{key: getattr(self._about, key) for key in self._about.__slots__}, **changes})
        self.perform(self.membership.set_meta(self._about.pack(), self._now))

    # ---------------------------------------------------------------- time

    def _wake_when_due(self) -> None:
        deadline = self.membership.deadline
        if self.mode is not None:
            deadline = min(deadline, self.mode.deadline)
        if deadline < self._wakes_at:
            self._wakes_at = deadline
            delay_s = self.clock.duration_s(deadline - self._now)
            if delay_s < math.inf:
                self._later(delay_s, lambda: self._wake(deadline))

    def _wake(self, planned: float) -> None:
        if self._wakes_at != planned:
            return
        self._wakes_at = math.inf
        now = max(self._now, planned)  # adding a delay may round below the deadline that it was to reach
        if self.membership.deadline <= now:
            self.perform(self.membership.on_timer(now))
        if self.mode is not None and self.mode.deadline <= now:
            self.perform(self.mode.on_timer(now))
        self._wake_when_due()

    # ---------------------------------------------------------------- messages of the mode

    def _send(self, peer: NodeId, message: Message) -> None:
        member = self.membership.members.get(peer)
        if member is None or member.state > State.SUSPECT:
            return
        connection = self._connections.get(peer)
        if connection is None:
            swarm, index = self._swarm, self._swarm.index_of((member.host, member.port))

            def listener() -> Node | None:
                """Whoever answers there under another identity is not the peer."""
                node = swarm.listener(index)
                return node if node is not None and node.id == peer else None

            connection = self._connections[peer] = Connection(
                self._world, swarm.network, self, listener, self.id, index, lambda: self._reconnected(peer)
            )
        pieces = list(frames(message))
        frame = b"".join(pieces)
        payload = sum(len(chunk) for chunk in getattr(message, "chunks", ()))
        if isinstance(message, Delta) and message.wants_answer:
            self._began[peer] = self.steps
        size = len(frame) + payload * (self._swarm.settings.size_scale - 1)
        connection.send(message, frame, size)
        self._swarm.checkers.queue(self.id, peer, connection.queued)

    def sends_to(self, peer: NodeId) -> bool:
        """Whether something is on its way there."""
        connection = self._connections.get(peer)
        return connection is not None and connection.busy

    def reset(self, peer: NodeId) -> None:
        """The process of this peer is gone."""
        if connection := self._connections.get(peer):
            connection.reset()

    def _reconnected(self, peer: NodeId) -> None:
        if self.up and self.mode is not None:
            self._later(0.0, lambda: self.perform(self._mode.on_message(peer, Connected(), self._now)))

    def receive(self, source: NodeId, frame: bytes) -> None:
        """A message of the mode, or about a whole model. Raises PeerError."""
        message = self._read(frame)
        self._world.note(Kind.MESSAGE, self.index, message.KIND, len(frame))
        match message:
            case ModelRequest():
                self._give_model(source)
            case ModelSnapshot():
                self._take_model(source, message)
            case _ if self.mode is not None:
                effects = self.mode.on_message(source, message, self._now)
                if isinstance(message, Delta):
                    self._swarm.checkers.exchanged(self, source, message, effects)
                    if any(isinstance(effect, Apply) for effect in effects):
                        self.staleness[self.steps - self._began.pop(source, self.steps)] += 1
                self.perform(effects)

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

    @property
    def _mode(self) -> Mode:
        assert self.mode is not None, "asked of a node that has one"
        return self.mode

    # ---------------------------------------------------------------- the first model

    def _join(self) -> None:
        """Look whose model this node starts from, until it has one."""
        if self.phase != "joining" or self.learner is None:
            return
        match whose_model(self.membership.members, self.id, has_seeds=bool(self._seeds)):
            case OwnModel():
                self._have_model()
                return
            case FetchFrom(givers):
                asked, at = self._asked or ("", -math.inf)
                if asked not in givers or (self._now - at >= ASK_AGAIN_S and not self._arriving(asked)):
                    others = [giver for giver in givers if giver != asked] or list(givers)
                    self._asked = (others[0], self._now)
                    self._send(others[0], ModelRequest())
        self._later(LOOK_AGAIN_S, self._join)

    def _arriving(self, donor: NodeId) -> bool:
        """Whether bytes come from there, as production sees at its sockets."""
        row = self.membership.members[donor]
        node = self._swarm.listener(self._swarm.index_of((row.host, row.port)))
        return node is not None and node.sends_to(self.id)

    def _give_model(self, peer: NodeId) -> None:
        if self.learner is not None and self._replica is not None:
            chunks, _ = delta.encode(SNAPSHOT_CODEC, self.learner.layout, self._replica)
            self._send(peer, ModelSnapshot(self.steps, SNAPSHOT_CODEC, chunks))

    def _take_model(self, source: NodeId, message: ModelSnapshot) -> None:
        if self.phase != "joining" or self._asked is None or self._asked[0] != source or self.learner is None:
            return
        values = np.empty(self.learner.layout.total, self.learner.values().dtype)
        delta.decode(message.codec, self.learner.layout, message.chunks, values)
        self.learner.load(values)
        self.steps = message.step
        self._have_model()

    def _have_model(self) -> None:
        learner, swarm = self.learner, self._swarm
        assert learner is not None, "only those join"
        self._replica = learner.publish()
        self._pending = np.zeros_like(self._replica)
        if self._replica.dtype == np.float64:
            self.injected = self._replica.copy()
        buffer = np.empty_like(self._replica)

        def values() -> Vector:
            assert self._replica is not None, "set above"
            np.copyto(buffer, self._replica)
            return buffer

        settings = swarm.settings
        self.mode = parse_mode(settings.mode)(self.id, learner.layout, self._rng, settings.mode_settings, values)
        if isinstance(staleness := getattr(self.mode, "staleness", None), Counter):
            self.staleness = staleness
        self._enter("waiting")
        self._say_about(ready=True)
        self._tell_partners()
        self._maybe_go()

    def _maybe_go(self) -> None:
        if self.phase == "waiting" and 1 + len(self._partners) >= self._wait_for:
            self._enter("training")
            self._next_step()

    def _enter(self, phase: str) -> None:
        self.phase = phase
        if phase == "training":
            self.trained_from = self._world.now
        elif phase == "finished":
            self.trained_until = self._world.now
        self._world.note(Kind.PHASE, self.index, PHASES.index(phase))

    # ---------------------------------------------------------------- training

    def _next_step(self) -> None:
        seconds = self._swarm.settings.compute.draw(self._compute_rng)
        self._later(seconds, lambda: self._step(seconds))

    def _step(self, seconds: float) -> None:
        learner = self.learner
        assert learner is not None, "only those train"
        self.computed_s += seconds
        before = learner.values().copy() if self.injected is not None else None
        moved = learner.step(self.steps)
        if self.injected is not None and before is not None:
            self.injected += learner.values() - before
        self.steps += 1
        self.loss = moved.loss
        self._take_corrections()
        change = learner.change()
        ended = self._swarm.settings.steps is not None and self.steps >= self._swarm.settings.steps
        barrier = self._mode.barrier
        self._at_barrier = not ended and barrier > 0 and self.steps % barrier == 0
        published = self._asked_publish or ended or self._at_barrier
        if published:
            self._asked_publish = False
            self._replica = learner.publish()
        self._world.note(Kind.STEP, self.index, self.steps, change)
        report = StepReport(self.steps, change, moved.lr_ratio, published, finishing=ended)
        if ended:
            self._enter("finishing")
            self._later(SETTLE_S, self._finish)
        waits = self._at_barrier  # Resume, which may come at once, makes the next step
        self.perform(self._mode.on_step(report, self._now))
        if not ended and not waits:
            self._next_step()

    def _apply(self, correction: Vector) -> None:
        assert self._replica is not None, "a mode runs only on a model"
        assert self._pending is not None, "set with it"
        self._world.note(Kind.APPLY, self.index, value=float(zlib.crc32(correction.data)))
        self._replica += correction
        self._pending += correction
        if self.injected is not None:
            self.injected += correction
        if self.phase not in ("training", "waiting"):
            self._take_corrections()

    def _take_corrections(self) -> None:
        if self.learner is not None and self._pending is not None:
            self.learner.add(self._pending)
            self._pending.fill(0.0)

    def _finish(self) -> None:
        if self.phase == "finishing":
            self._enter("finished")
            self._world.note(Kind.FINISHED, self.index, self.steps)


def _parts(table: MemberTable) -> list[MemberTable]:
    rows = table.members
    return [MemberTable(table.sender, rows[start : start + TABLE_PART]) for start in range(0, len(rows), TABLE_PART)]


def _tables(node: Node, table: MemberTable) -> list[Effect]:
    effects: list[Effect] = []
    for part in _parts(table):
        effects += node.membership.on_table(part, node.clock.local(node._world.now))
    return effects
