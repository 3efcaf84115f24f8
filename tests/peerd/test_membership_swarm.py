"""Whole swarms of real membership cores on a small virtual network: one heap of (time, sequence, event).

Every test draws from one seed, which a failure prints (see `Swarm.check`).
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from peerd.effects import Address, Effect, Log, MemberChanged, NodeId, PushPull, SendDatagram
from peerd.membership import LAN, Membership, Timing
from peerd.messages import Member, MemberTable, Message, State

Key = tuple[int, int, int]
INBOX_DATAGRAMS = 400  # what the kernel keeps for a stopped process


class Node:
    """A core, its address, and the state of the process around it."""

    def __init__(self, core: Membership, address: Address) -> None:
        self.core = core
        self.address = address
        self.running = True
        self.inbox: list[tuple[Message, Address]] = []
        self.wakes_at = float("inf")
        self.seen: dict[NodeId, Key] = {}

    def alive(self) -> set[NodeId]:
        """The others that it believes to live."""
        return {id for id, known in self.core.members.items() if known.state < State.FAILED and id != self.core.me.id}


class Swarm:
    """The network, its faults, and what is checked at every event."""

    def __init__(self, seed: int, loss: float = 0.0, latency_s: float = 0.01, timing: Timing = LAN) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.loss = loss
        self.latency_s = latency_s
        self.timing = timing
        self.now = 0.0
        self.nodes: dict[Address, Node] = {}
        self.cut: Callable[[Address, Address], bool] = lambda source, target: False
        self.verdicts: list[tuple[float, NodeId, NodeId]] = []  # when, in whose view, who is FAILED
        self.datagrams = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    def check(self, condition: bool, *what: object) -> None:
        assert condition, f"seed {self.seed} at {self.now:.3f} s: {what}"

    def later(self, delay_s: float, event: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._sequence, event))

    def start(self, number: int, seeds: Sequence[int] = (), epoch: int = 1) -> Node:
        me = Member(f"n{number:03}", f"node-{number}", "10.0.0.1", 7000 + number, epoch, 0, State.ALIVE, "", b"")
        core = Membership(
            me, [where(other) for other in seeds], random.Random(self.rng.getrandbits(64)), self.now, self.timing
        )
        node = self.nodes[where(number)] = Node(core, where(number))
        self._wake_when_due(node)
        return node

    def grow(self, size: int) -> list[Node]:
        nodes = [self.start(0)]
        nodes += [self.start(number, seeds=[0]) for number in range(1, size)]
        self.run(20)
        self.check(self.agreed(), "did not converge", [len(node.alive()) for node in nodes])
        return nodes

    def kill(self, node: Node) -> None:
        del self.nodes[node.address]

    def pause(self, node: Node) -> None:
        node.running = False

    def resume(self, node: Node) -> None:
        """The worst order: timers before what waits in the sockets."""
        node.running = True
        if node.core.deadline <= self.now:
            self._do(node, node.core.on_timer(self.now))
        inbox, node.inbox = node.inbox, []
        for message, source in inbox:
            self._do(node, node.core.on_datagram(message, source, self.now))

    def run(self, duration_s: float, until: Callable[[], bool] | None = None) -> bool:
        """Go on; with `until`, looked at every tenth of a second, stop early and say whether it came true."""
        end, look = self.now + duration_s, self.now
        while self._heap and self._heap[0][0] <= end:
            if until is not None and self._heap[0][0] >= look:
                if until():
                    return True
                look = self._heap[0][0] + 0.1
            self.now, _, event = heapq.heappop(self._heap)
            event()
        self.now = end
        return until is not None and until()

    def agreed(self) -> bool:
        """Every node holds exactly the running nodes alive, and no live row differs between tables."""
        ids = {node.core.me.id: node.core.me for node in self.nodes.values()}
        return all(
            node.alive() | {node.core.me.id} == ids.keys()
            and all(node.core.members[id] == record for id, record in ids.items())
            for node in self.nodes.values()
        )

    def act(self, node: Node, effects: list[Effect]) -> None:
        """Carry out what a call from a test returned."""
        self._do(node, effects)

    def _do(self, node: Node, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendDatagram):
                self._send(node, effect)
            elif isinstance(effect, PushPull):
                self.later(self._flight_s(), lambda to=effect.address: self._push_pull(node, to))
            elif isinstance(effect, MemberChanged):
                self._watch(node, effect.id)
            else:
                self.check(isinstance(effect, Log), effect)
        self._wake_when_due(node)

    def _send(self, node: Node, effect: SendDatagram) -> None:
        self.datagrams += 1
        if self.rng.random() >= self.loss and not self.cut(node.address, effect.address):
            self.later(self._flight_s(), lambda: self._deliver(effect, node.address))

    def _deliver(self, effect: SendDatagram, source: Address) -> None:
        node = self.nodes.get(effect.address)
        if node is None:
            return
        if node.running:
            self._do(node, node.core.on_datagram(effect.message, source, self.now))
        elif len(node.inbox) < INBOX_DATAGRAMS:
            node.inbox.append((effect.message, source))

    def _push_pull(self, node: Node, to: Address) -> None:
        other = self.nodes.get(to)
        if other is None or not other.running or self.cut(node.address, to) or self.cut(to, node.address):
            self.later(1.0, lambda: self._up(node) and self._do(node, node.core.on_unreachable(to, self.now)))
            return
        mine = node.core.table()
        if self.rng.random() < 0.5:  # the acceptor may answer before or after it has merged
            theirs = other.core.table()
            self._do(other, other.core.on_table(mine, self.now))
        else:
            self._do(other, other.core.on_table(mine, self.now))
            theirs = other.core.table()
        self.later(self._flight_s(), lambda: self._table(node, theirs))

    def _table(self, node: Node, theirs: MemberTable) -> None:
        if self._up(node):
            self._do(node, node.core.on_table(theirs, self.now))

    def _up(self, node: Node) -> bool:
        return self.nodes.get(node.address) is node and node.running

    def _watch(self, node: Node, id: NodeId) -> None:
        record = node.core.members[id]
        key = (record.epoch, record.incarnation, int(record.state))
        self.check(key >= node.seen.get(id, key), "a key decreased", node.core.me.id, id)
        node.seen[id] = key
        if id != node.core.me.id and record.state == State.FAILED:
            self.verdicts.append((self.now, node.core.me.id, id))
        spoken = max(
            ((n.core.me.epoch, n.core.me.incarnation) for n in self.nodes.values() if n.core.me.id == id),
            default=key[:2],
        )
        self.check(key[:2] <= spoken, "someone else raised an incarnation", id, key, spoken)

    def _flight_s(self) -> float:
        return self.latency_s * (0.5 + self.rng.random())

    def _wake_when_due(self, node: Node) -> None:
        if node.core.deadline < node.wakes_at:
            node.wakes_at = node.core.deadline
            self.later(max(0.0, node.core.deadline - self.now), lambda: self._wake(node, node_wakes_at))
            node_wakes_at = node.wakes_at

    def _wake(self, node: Node, planned: float) -> None:
        if self.nodes.get(node.address) is not node or node.wakes_at != planned:
            return
        node.wakes_at = float("inf")
        if not node.running:
            return  # `resume` looks again
        if node.core.deadline <= self.now:
            self._do(node, node.core.on_timer(self.now))
        else:
            self._wake_when_due(node)


def where(number: int) -> Address:
    return ("10.0.0.1", 7000 + number)


def total(swarm: Swarm) -> Counter[str]:
    return sum((node.core.counts for node in swarm.nodes.values()), Counter())


def states(swarm: Swarm, id: NodeId) -> Counter[State]:
    return Counter(node.core.members[id].state for node in swarm.nodes.values() if node.core.me.id != id)


@pytest.mark.parametrize("size", [2, 3, 17, 64])
def test_all_join_through_one_seed(size: int) -> None:
    swarm = Swarm(seed=100 + size)
    swarm.grow(size)
    swarm.check(total(swarm)["failures"] == 0, total(swarm))
    swarm.check(total(swarm)["stalls"] == 0, total(swarm))


def test_a_quiet_swarm_sends_two_datagrams_per_member_and_second() -> None:
    swarm = Swarm(seed=1)
    swarm.grow(16)
    before = swarm.datagrams
    swarm.run(100)
    swarm.check(swarm.datagrams - before <= 2 * 16 * 101, swarm.datagrams - before)


@pytest.mark.parametrize("seed", range(8))
def test_a_crash_is_known_to_all_of_64_within_12_seconds(seed: int) -> None:
    swarm = Swarm(seed)
    nodes = swarm.grow(64)
    victim = nodes[swarm.rng.randrange(1, 64)]
    swarm.kill(victim)
    id = victim.core.me.id
    found = swarm.run(12, until=lambda: all(id not in node.alive() for node in swarm.nodes.values()))
    swarm.check(found, states(swarm, id))
    swarm.check({subject for _, _, subject in swarm.verdicts} == {id}, swarm.verdicts)


def test_of_two_the_survivor_notices_and_goes_on_looking() -> None:
    swarm = Swarm(seed=2)
    first, second = swarm.grow(2)
    swarm.kill(second)
    swarm.check(swarm.run(12, until=lambda: not first.alive()), first.core.members)
    swarm.run(600)
    again = swarm.start(1, seeds=[], epoch=2)
    swarm.check(swarm.run(40, until=swarm.agreed), first.core.members)
    swarm.check(again.alive() == {"n000"})


def test_a_restart_replaces_the_former_life_at_once() -> None:
    swarm = Swarm(seed=3)
    nodes = swarm.grow(16)
    swarm.kill(nodes[5])
    swarm.run(0.5)
    swarm.start(5, seeds=[0], epoch=2)
    swarm.check(swarm.run(3, until=swarm.agreed), states(swarm, "n005"))
    swarm.run(60)
    swarm.check(not swarm.verdicts and swarm.agreed(), swarm.verdicts)


def test_all_restart_at_once() -> None:
    swarm = Swarm(seed=4)
    nodes = swarm.grow(32)
    for number, node in enumerate(nodes):
        swarm.kill(node)
        swarm.start(number, seeds=[0, 1], epoch=2)
    swarm.check(swarm.run(30, until=swarm.agreed), "not one swarm again")


@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_a_graceful_leave_is_left_everywhere_and_never_failed(loss: float) -> None:
    swarm = Swarm(seed=5, loss=loss)
    nodes = swarm.grow(32)
    leaver = nodes[7]
    swarm.act(leaver, leaver.core.leave(swarm.now))
    swarm.check(not leaver.core.left_spread)
    swarm.check(swarm.run(5, until=lambda: leaver.core.left_spread), "still telling")
    swarm.kill(leaver)
    swarm.run(60)
    swarm.check(states(swarm, "n007") == {State.LEFT: 31}, states(swarm, "n007"))
    swarm.check(not swarm.verdicts, swarm.verdicts)
    swarm.start(7, seeds=[3], epoch=2)
    swarm.check(swarm.run(5, until=swarm.agreed), "one that left and came back must be alive", states(swarm, "n007"))


@pytest.mark.parametrize("seed", [6, 7])
def test_halves_find_together_after_ten_minutes(seed: int) -> None:
    swarm = Swarm(seed)
    nodes = swarm.grow(24)
    low = {node.address for node in nodes[:12]}
    swarm.cut = lambda source, target: (source in low) != (target in low)
    swarm.run(600)
    swarm.check(all(len(node.alive()) == 11 for node in nodes), [len(node.alive()) for node in nodes])
    before = len(swarm.verdicts)
    swarm.cut = lambda source, target: False
    swarm.check(swarm.run(30, until=swarm.agreed), [len(node.alive()) for node in nodes])
    swarm.run(60)
    swarm.check(len(swarm.verdicts) == before, "accused each other after the heal", swarm.verdicts[before:])


@pytest.mark.parametrize("seed", [8, 9])
def test_five_minutes_at_five_percent_loss_declare_nobody_failed(seed: int) -> None:
    swarm = Swarm(seed, loss=0.05)
    swarm.grow(48)
    swarm.run(300)
    swarm.check(not swarm.verdicts, swarm.verdicts)
    swarm.check(total(swarm)["suspicions"] > 0, "the test did not test anything", total(swarm))


@pytest.mark.parametrize(("seed", "stop_s"), [(10, 2.0), (11, 4.0), (12, 16.0)])
def test_stopped_processes_accuse_nobody_who_was_not(seed: int, stop_s: float) -> None:
    swarm = Swarm(seed)
    nodes = swarm.grow(32)
    stopped = nodes[:8]

    def stop(node: Node) -> None:
        swarm.pause(node)
        swarm.later(stop_s, lambda: go(node))

    def go(node: Node) -> None:
        swarm.resume(node)
        swarm.later(stop_s, lambda: stop(node))

    for node in stopped:
        swarm.later(swarm.rng.random() * 2 * stop_s, lambda node=node: stop(node))
    swarm.run(200)
    culprits = {node.core.me.id for node in stopped}
    healthy = [verdict for verdict in swarm.verdicts if verdict[2] not in culprits]
    swarm.check(not healthy, healthy)
    swarm.check(total(swarm)["stalls"] > 40, total(swarm))


def test_a_short_stop_is_suspected_at_most() -> None:
    swarm = Swarm(seed=13)
    nodes = swarm.grow(32)
    for node in nodes[1:9]:
        swarm.pause(node)
        swarm.run(5)
        swarm.resume(node)
        swarm.run(5)
    swarm.check(not swarm.verdicts, swarm.verdicts)
    swarm.check(total(swarm)["refutations"] > 0, "the test did not test anything")


def test_a_long_stop_is_buried_and_comes_back_by_itself() -> None:
    swarm = Swarm(seed=14)
    nodes = swarm.grow(16)
    swarm.pause(nodes[3])
    swarm.run(60)
    swarm.check(states(swarm, "n003") == {State.FAILED: 15}, states(swarm, "n003"))
    swarm.kill(nodes[9])
    swarm.run(15)
    swarm.resume(nodes[3])
    swarm.check(swarm.run(15, until=swarm.agreed), states(swarm, "n003"))


def test_a_node_whose_seed_was_down_joins_when_it_comes_up() -> None:
    swarm = Swarm(seed=15)
    lonely = swarm.start(1, seeds=[0])
    swarm.run(300)
    swarm.check(not lonely.alive() and lonely.core.counts["unreachable"] >= 10, lonely.core.counts)
    swarm.start(0)
    swarm.check(swarm.run(32, until=swarm.agreed), lonely.core.members)


def test_first_retries_come_quickly() -> None:
    swarm = Swarm(seed=16)
    swarm.start(1, seeds=[0])
    swarm.run(2)
    swarm.start(0)
    swarm.check(swarm.run(3, until=swarm.agreed), "a seed started a moment later is found a moment later")


def test_two_swarms_with_a_late_common_seed_become_one() -> None:
    swarm = Swarm(seed=17)
    for number, seeds in ((1, [0]), (2, [0, 1]), (3, [0]), (4, [0, 3])):
        swarm.start(number, seeds=seeds)
    swarm.run(60)
    swarm.check(not swarm.agreed())
    swarm.start(0)
    swarm.check(swarm.run(40, until=swarm.agreed), [len(n.alive()) for n in swarm.nodes.values()])


def test_a_slow_network_is_measured_not_accused() -> None:
    """Every probe takes 0.6 to 1.8 s there and back, against a probe timeout of 0.5 s."""
    swarm = Swarm(seed=18, latency_s=0.6)
    swarm.grow(16)
    swarm.run(60)
    before = total(swarm)["suspicions"]
    swarm.run(120)
    swarm.check(not swarm.verdicts, swarm.verdicts)
    swarm.check(total(swarm)["suspicions"] - before <= 2, total(swarm)["suspicions"] - before)


def test_one_way_cut_between_two_is_bridged_by_others() -> None:
    swarm = Swarm(seed=19)
    nodes = swarm.grow(12)
    swarm.cut = lambda source, target: (source, target) == (nodes[2].address, nodes[8].address)
    swarm.run(120)
    swarm.check(not swarm.verdicts and total(swarm)["suspicions"] == 0, total(swarm))
    swarm.check(total(swarm)["indirect_probes"] > 0, "the test did not test anything")


def test_duplicated_identity_is_noticed_by_the_older_life() -> None:
    swarm = Swarm(seed=20)
    nodes = swarm.grow(4)
    twin = replace(nodes[2].core.me, epoch=2, port=7099)
    swarm.nodes["10.0.0.1", 7099] = copy = Node(
        Membership(twin, [where(0)], random.Random(1), swarm.now, LAN), ("10.0.0.1", 7099)
    )
    swarm.act(copy, [])
    swarm.run(5)
    swarm.check(nodes[2].core.counts["identity_conflict"] > 0, nodes[2].core.counts)
    swarm.check(copy.core.counts["identity_conflict"] == 0, copy.core.counts)
    swarm.check(nodes[0].core.members["n002"].port == 7099)


def test_the_same_seed_gives_the_same_run() -> None:
    def trace() -> tuple[int, list[tuple[float, NodeId, NodeId]], Counter[str]]:
        swarm = Swarm(seed=21, loss=0.1)
        nodes = swarm.grow(12)
        swarm.kill(nodes[4])
        swarm.run(30)
        return swarm.datagrams, swarm.verdicts, total(swarm)

    first, second = trace(), trace()
    assert first == second
    assert first[1], "nobody noticed the crash"
