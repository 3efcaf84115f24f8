"""All of it together: the nodes of one simulated swarm, what goes wrong in it, and what is measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice

import numpy as np

from peerd.membership.core import LAN, Timing
from peerd.membership.proofs import claimed
from peerd.simulation.byzantine import draw_liars, make_lie
from peerd.simulation.checkers import Checkers
from peerd.simulation.network import PROFILES, Network, Profile, Topology, uniform
from peerd.simulation.node import Clock, Node
from peerd.simulation.problems import Compute, Problem
from peerd.simulation.referee import Referee
from peerd.simulation.trainer import READY, NodeSettings, Phase, SimulatedTrainer
from peerd.simulation.world import Kind, World
from peerd.training.codecs.vector import VALUE_MAX
from peerd.training.effects import Vector
from peerd.training.mode_settings import ModeSettings
from peerd.training.modes import class_of, settings_of
from peerd.training.modes.push_sum import PushSum
from peerd.training.trigger import PeriodTrigger, parse_trigger
from peerd.transport.ids import Address, NodeId
from peerd.transport.messages import Member, State
from peerd.transport.secure.signing import Signing

GRACE_S = 90.0  # after a fault has gone: until then a suspicion that it began may still become a verdict
STOP_ASKED_EVERY_S = 0.1
KNOWN_SHARE = 0.99  # of the live nodes: then a crash is known
VIEWERS = 8  # whose whole membership is looked at now and then
PORT = 7946


@dataclass(slots=True)
class Crash:
    """Who is gone since when, and who knows."""

    at: float
    epoch: int
    known: set[NodeId] = field(default_factory=set)
    detected_s: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """Which packets do not pass, and whom that touches."""

    severed: Callable[[int, int], bool]
    touched: frozenset[int]


class Swarm:
    """See the module; everything drawn at random comes from the world's seed."""

    def __init__(
        self,
        world: World,
        peers: int,
        problem: Problem | None = None,
        *,
        topology: Topology | None = None,
        timing: Timing = LAN,
        mode: str = "gossip",
        told: ModeSettings | None = None,
        compute: str = "fixed:1",
        steps: int | None = None,
        signed: bool = True,
        byzantine: str = "none",
        slow_node: float = 1.0,
        ends_together: bool = False,
        drop: float = 0.0,
        replay: Callable[[], str] = lambda: "run this test with this seed",
    ) -> None:
        """`peers` places; `start` puts a node on one. Without a problem they are members and nothing else.

        Records are signed as in a sealed swarm, or not as in a plain one. Of the messages that the mode can do without
        the share `drop` is lost.
        """
        self.world = world
        self.peers = peers
        self.handshakes = False
        topology = topology or uniform(PROFILES["lan"], peers)
        self.network = Network(world, topology, drop, class_of(mode).MAY_BE_LOST)
        self.nodes: dict[int, Node] = {}  # by place: those whose process is there
        self.latest: dict[NodeId, Node] = {}
        self.checkers = Checkers(world, self.latest, replay, topology.flight_s)
        self.verdicts: list[tuple[float, NodeId, NodeId]] = []  # when, in whose view, who is FAILED
        self.crashes: dict[NodeId, Crash] = {}
        self.detections_s: list[float] = []
        self.crashed = 0
        self.settings = NodeSettings(
            mode, settings_of(mode, told or ModeSettings()), timing, Compute(compute), steps,
            problem.size_scale if problem is not None else 1.0, slow_node, ends_together,
        )  # fmt: skip
        self._problem = problem
        self._referee = Referee(world.seed) if signed else None
        self._attack, self.liars = draw_liars(byzantine, peers, world)
        self._lives = Counter[int]()
        self._identities = Counter[int]()
        self._gone_bytes = 0
        self._gone_counts: Counter[str] = Counter()
        self._gone_staleness: Counter[int] = Counter()
        self._gone_received: Vector = np.zeros(())
        self._gone_mass: Vector = np.zeros(())
        self._cuts: list[_Cut] = []
        self._conditions: list[Profile] = []

    # ---------------------------------------------------------------- nodes

    def start(
        self,
        index: int,
        seeds: Sequence[int] = (0,),
        *,
        wait_for: int = 1,
        fresh: bool = False,
        clock: Clock | None = None,
        known: Sequence[Member] = (),
    ) -> Node:
        """Start a process at this place: the first, or the next life of its identity, or a `fresh` one."""
        self._lives[index] += 1
        self._identities[index] += fresh
        version = self._identities[index]
        id = f"n{index:05}" + (f".{version}" if version else "")
        host, port = self.address(index)
        me = (
            known[index]
            if known
            else Member(id, f"node-{index}", host, port, self._lives[index], 0, State.ALIVE, "", b"")
        )
        learner = self._problem.learner(index) if self._problem is not None else None
        where = [self.address(seed) for seed in seeds if seed != index]
        self.world.note(Kind.START, index, self._lives[index])
        lie = make_lie(self._attack, index, self.world) if self._attack and index in self.liars else None
        node = Node(self, index, me, where, learner, wait_for, clock or Clock(), known, lie)
        self.nodes[index] = self.latest[id] = node
        self.crashes.pop(id, None)
        node.excused_until = self._calm_at(index) if self._lives[index] > 1 or self._cuts else self.world.now
        node.begin()
        return node

    def start_formed(self) -> None:
        """All nodes at once, as a swarm that formed long ago: they know each other, and have the model."""
        meta = READY.pack() if self._problem is not None else b""
        known = [
            self._said(Member(f"n{index:05}", f"node-{index}", *self.address(index), 1, 0, State.ALIVE, "", meta))
            for index in range(self.peers)
        ]
        for index in range(self.peers):
            self.start(index, [] if index == 0 else [0], wait_for=self.peers, known=known)

    def _said(self, me: Member) -> Member:
        """By the member itself."""
        return me if (signing := self.signing(me.id)) is None else claimed(me, signing)

    def start_all(self, spread_s: float = 0.0) -> None:
        """The first node, then all others through it, within so many seconds."""
        rng = self.world.rng("start")
        self.start(0, (), wait_for=self.peers)
        for index in range(1, self.peers):

            def come(index: int = index) -> None:
                self.start(index, wait_for=self.peers)

            self.world.later(spread_s * rng.random(), come)

    def crash(self, index: int) -> None:
        """kill -9."""
        node = self.nodes.pop(index)
        self.world.note(Kind.CRASH, index)
        node.excused_until = math.inf
        self._gone_bytes += node.bytes_sent
        self._gone_counts += node.counts
        if node.trainer is not None:
            self._gone_staleness += node.trainer.staleness
            self._gone_mass = self._gone_mass + node.trainer.put_by_others
            if (received := node.trainer.received) is not None:
                self._gone_received = self._gone_received + received
        self.crashed += 1
        self.network.drop(index)
        node.crash()
        if node.trainer is not None and not isinstance(node.trainer.mode, PushSum):
            node.trainer = None  # a model, for each life of a long run; of push-sum it knows what of its mass had come
        for other in self.nodes.values():
            if not (self.network.cut(index, other.index) or self.network.cut(other.index, index)):
                other.reset(node.id)
        self.crashes[node.id] = Crash(self.world.now, node.life)

    def leave(self, index: int) -> None:
        """Say goodbye, and go when the word is out."""
        node = self.nodes[index]
        node.leave()

        def gone() -> None:
            if self.nodes.get(index) is not node:
                return
            if node.membership.left_spread:
                self.crash(index)
                self.crashed -= 1
                del self.crashes[node.id]
            else:
                self.world.later(0.2, gone)

        gone()

    def pause(self, index: int) -> None:
        """SIGSTOP."""
        node = self.nodes[index]
        self.world.note(Kind.PAUSE, index)
        node.excused_until = math.inf
        node.pause()

    def resume(self, index: int) -> None:
        """SIGCONT."""
        node = self.nodes[index]
        self.world.note(Kind.RESUME, index)
        node.excused_until = self._calm_at(index)
        node.resume()

    def cut(self, severed: Callable[[int, int], bool], touched: Collection[int] | None = None) -> Callable[[], None]:
        """No packet passes from the first to the second place while `severed` says so; returns what heals it.

        Only the `touched` places are excused (default: all): a node that hears nobody buries everybody.
        """
        cut = _Cut(severed, frozenset(range(self.peers) if touched is None else touched))
        self._cuts.append(cut)
        self.world.note(Kind.CUT, len(self._cuts))
        self._set_cuts(cut)

        def heal() -> None:
            self._cuts.remove(cut)
            self.world.note(Kind.HEAL, len(self._cuts))
            self._set_cuts(cut)

        return heal

    def set_conditions(self, conditions: Profile) -> Callable[[], None]:
        """Loss, duplication, reordering and corruption on top of the network's own, everywhere.

        Returns what ends it. Of several that overlap the last one rules.
        """
        self._conditions.append(conditions)

        def rule() -> None:
            self.network.conditions = self._conditions[-1] if self._conditions else Profile(0.0)
            self.world.note(Kind.WEATHER, -1, value=self.network.conditions.loss)

        def end() -> None:
            self._conditions.remove(conditions)
            rule()

        rule()
        return end

    def slow_down(self, index: int, factor: float) -> None:
        """Let a node have this part of its bandwidth; 1 is all of it."""
        self.network.slow_down(index, factor)
        self.world.note(Kind.SLOW, index, value=factor)

    def _set_cuts(self, changed: _Cut) -> None:
        cuts = [cut.severed for cut in self._cuts]
        self.network.cut = (lambda a, b: any(cut(a, b) for cut in cuts)) if cuts else (lambda a, b: False)
        for index in changed.touched & self.nodes.keys():
            if self.nodes[index].running:
                self.nodes[index].excused_until = self._calm_at(index)

    def _calm_at(self, index: int) -> float:
        """When who runs there is to be trusted again."""
        cut_off = any(index in cut.touched for cut in self._cuts)
        return math.inf if cut_off else self.world.now + GRACE_S

    # ---------------------------------------------------------------- what nodes see of it

    def signing(self, id: NodeId) -> Signing | None:
        """See `Environment`."""
        return self._referee.signing(id) if self._referee is not None else None

    def listener(self, index: int) -> Node | None:
        """See `Environment`."""
        return self.nodes.get(index)

    def address(self, index: int) -> Address:
        """Of a place."""
        return f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}", PORT

    def index_of(self, address: Address) -> int:
        """The place of an address."""
        return _place(address[0])

    def believes(self, viewer: Node, id: NodeId) -> None:
        """Write down verdicts, and when a crash is known."""
        record = viewer.membership.members[id]
        self.world.note(Kind.STATE, viewer.index, int(record.id[1:6]), record.state)
        if record.state != State.FAILED or id == viewer.id:
            return
        self.verdicts.append((self.world.now, viewer.id, id))
        crash = self.crashes.get(id)
        if crash is None or crash.epoch != record.epoch or crash.detected_s is not None:
            return
        crash.known.add(viewer.id)
        if len(crash.known) >= KNOWN_SHARE * len(self.nodes):
            crash.detected_s = self.world.now - crash.at
            self.detections_s.append(crash.detected_s)

    # ---------------------------------------------------------------- what is measured

    def run(self, seconds: float, stop: Callable[[], bool] | None = None) -> bool:
        """Let time pass. `stop` is asked now and then, and ends it earlier; says whether it did."""
        until = self.world.now + seconds
        if stop is None:
            self.world.run(until)
            return False
        while self.world.now < until and not stop():
            self.world.run(min(until, self.world.now + STOP_ASKED_EVERY_S))
        return stop()

    def whole(self) -> bool:
        """Whether every place has its process, which runs, and nothing is cut."""
        return not self._cuts and len(self.nodes) == self.peers and all(node.running for node in self.nodes.values())

    def agreed(self) -> bool:
        """Every node holds exactly the running nodes alive, and of each the same record."""
        own = {node.id: node.membership.me for node in self.nodes.values()}
        for node in self.nodes.values():
            members = node.membership.members
            if {id for id, member in members.items() if member.state <= State.SUSPECT} != own.keys():
                return False
            if any(members[id] != record for id, record in own.items()):
                return False
        return True

    @property
    def trainers(self) -> Iterator[SimulatedTrainer]:
        """Of all nodes, if they train."""
        return (node.trainer for node in self.nodes.values() if node.trainer is not None)

    def models(self) -> list[Vector]:
        """Of all nodes that have one."""
        return [trainer.model() for trainer in self.trainers if trainer.mode is not None]

    def honest_models(self, count: int | None = None) -> list[Vector]:
        """Of those who do not lie about theirs, the first so many."""
        honest = (trainer for trainer in self.trainers if trainer.mode is not None and trainer.lie is None)
        return [trainer.model() for trainer in islice(honest, count)]

    def counts(self) -> Counter[str]:
        """Of all nodes, those that are gone too."""
        return sum((node.counts for node in self.nodes.values()), Counter(self._gone_counts))

    def staleness(self) -> Counter[int]:
        """Of all nodes, those that are gone too: own steps between the ends of an exchange, or a server's updates."""
        return sum((trainer.staleness for trainer in self.trainers), Counter(self._gone_staleness))

    def mean_bias(self) -> float:
        """How far exchanges have moved the (weighted) mean of the models, over its norm.

        What push-sum has under way, or waiting, counts as there. What died with a node counts as moved.
        """
        moved = sum((trainer.put_by_others for trainer in self.trainers), self._gone_mass)
        for node in self.nodes.values():
            mode = node.trainer.mode if node.trainer is not None else None
            if isinstance(mode, PushSum):
                moved = moved + sum(weight * model for weight, model in mode.waiting)
                for peer, push, weight, model in mode.leaving:
                    there = self.latest[peer].trainer
                    if there is None or not isinstance(there.mode, PushSum) or not there.mode.has_taken(node.id, push):
                        moved = moved + weight * model
        norm = float(np.linalg.norm(sum(self.models())))
        return float(np.linalg.norm(moved)) / norm if norm > 0 else 0.0

    @property
    def bytes_sent(self) -> int:
        """On all lines, by all nodes, those that are gone too."""
        return self._gone_bytes + sum(node.bytes_sent for node in self.nodes.values())

    def finished(self) -> bool:
        """Whether every node's run has ended; a liar that waits may have been left out by the others, for good."""
        ended = (trainer.phase is Phase.FINISHED or (trainer.lie and trainer.waits) for trainer in self.trainers)
        return bool(self.nodes) and all(ended)

    def look_at_links(self) -> None:
        """Ask the checkers whether anybody has been silent for too long, whether the models sum up to what was put in,
        and whether what a few nodes believe only ever grew. Liars are refused, and silence to them is as it should be.
        """
        training = {
            node.id: node
            for node in self.nodes.values()
            if node.running
            and (trainer := node.trainer) is not None
            and trainer.phase is Phase.TRAINING
            and trainer.lie is None
            and np.abs(trainer.model()).max() <= VALUE_MAX  # what is no number, or too large, is refused
        }
        trigger = parse_trigger(self.settings.mode_settings.trigger)
        if not isinstance(trigger, PeriodTrigger):  # which may be silent for any time
            self.checkers.links(training, self.world.now)
        received = [made for trainer in self.trainers if (made := trainer.received) is not None]
        if received:
            self.checkers.conserved(sum(received, self._gone_received), self.models())
        for node in list(self.nodes.values())[:VIEWERS]:
            for id in node.membership.members:
                self.checkers.keys(node, id)


@lru_cache(maxsize=4096)
def _place(host: str) -> int:
    """That has this address; asked of every datagram."""
    _, high, middle, low = host.split(".")
    return (int(high) << 16) + (int(middle) << 8) + int(low)
