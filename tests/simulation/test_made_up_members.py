"""Among members that one of them has made up, whom nobody can reach: how soon do those who are there hear news?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from random import Random

import pytest
from test_membership_swarm import NEAR, check

from peerd.membership.proofs import claimed
from peerd.membership.table_exchange import TABLE_PART
from peerd.node.acquaintances import Acquaintances
from peerd.simulation.network import uniform
from peerd.simulation.node import Node
from peerd.simulation.swarm import Swarm
from peerd.simulation.world import World
from peerd.transport.ids import NodeId
from peerd.transport.messages import Member, MemberTable, State

CROWD = 300
BURIED_S = 20.0  # two dials, the second after a second or two, and a suspicion that others confirm, or not
LOOK_S = 0.1
SHAKE_S = 0.05
AT_ONCE = 16  # as meetings.py dials


class Crowded:
    """Nodes, and the members that the second of them has made up, at places where nobody is."""

    def __init__(self, peers: int, made_up: int, seed: int, *, sealed: bool = True) -> None:
        places = peers + made_up + 1  # one for a newcomer
        self.swarm = swarm = Swarm(World(seed), places, topology=uniform(NEAR, places), signed=sealed)
        swarm.handshakes = sealed
        self.made_up = [f"n{index:05}" for index in range(peers, peers + made_up)]
        self._told = 0
        for index in range(peers):
            self.start(index)
        check(swarm, swarm.run(30, swarm.agreed), "did not form")
        swarm.run(25)

    def start(self, index: int, seeds: Sequence[int] = (0,)) -> Node:
        node = self.swarm.start(index, seeds)
        if self.swarm.handshakes:
            self._look(node, Acquaintances(node.id, Random(index), partial(self._met, node), sealed=True))
        return node

    def come(self, again_every_s: float = 0.0) -> None:
        """Each node is told of them, and perhaps ever again that they live."""
        maker = self.swarm.nodes[1]
        rows = tuple(map(self._row, self.made_up))
        self._told += 1
        for node in list(self.swarm.nodes.values()):
            for at in range(0, len(rows), TABLE_PART):
                table = MemberTable(maker.id, rows[at : at + TABLE_PART])
                node.perform(node.membership.on_table(table, node.now))
        if again_every_s:
            self.swarm.world.later(again_every_s, partial(self.come, again_every_s))

    def news_s(self) -> float:
        """How long something new of the first takes to all others."""
        swarm, node = self.swarm, self.swarm.nodes[0]
        began, meta = swarm.world.now, f"said at {swarm.world.now}".encode()
        node.perform(node.membership.set_meta(meta, node.now))

        def heard() -> bool:
            return all(each.membership.members[node.id].meta == meta for each in swarm.nodes.values())

        return swarm.world.now - began if swarm.run(240, heard) else float("inf")

    def believed(self) -> int:
        """In how many made-up ones the most credulous believes."""
        views = [node.membership.members for node in self.swarm.nodes.values()]
        return max(sum(id in view and view[id].state < State.FAILED for id in self.made_up) for view in views)

    def _row(self, id: NodeId) -> Member:
        row = Member(id, id, *self.swarm.address(int(id[1:])), 1, self._told, State.ALIVE, "", bytes(150))
        signing = self.swarm.signing(id)
        return row if signing is None else claimed(row, signing)

    # As daemon/meetings.py does

    def _look(self, node: Node, known: Acquaintances) -> None:
        members = {**node.membership.members, **node.membership.hearsay}
        for member in known.due(members, node.now, AT_ONCE):
            node.later(SHAKE_S, partial(self._dialled, node, known, member))
        node.later(LOOK_S, partial(self._look, node, known))

    def _dialled(self, node: Node, known: Acquaintances, member: Member) -> None:
        swarm, there = self.swarm, self.swarm.index_of((member.host, member.port))
        other = swarm.listener(there)
        if other is not None and not swarm.network.cut(node.index, there):
            known.note(other.id)
            self._met(other, node.id)
        if known.failed(member.id):
            node.perform(node.membership.missed(member.id, node.now))

    def _met(self, node: Node, id: NodeId) -> None:
        node.perform(node.membership.met(id, node.now))


@pytest.mark.cases(5)
@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "plain"])
@pytest.mark.parametrize("again_every_s", [0.0, 3.0], ids=["told once", "told again"])
@pytest.mark.parametrize("made_up", [0, CROWD])
@pytest.mark.parametrize("peers", [3, 8])
def test_news_is_known_to_all_within_moments(peers: int, made_up: int, again_every_s: float, sealed: bool) -> None:
    """It took more than four minutes. Gossip misses one of eight now and then, crowd or none: a table has it then."""
    crowded = Crowded(peers, made_up, seed=1, sealed=sealed)
    crowded.come(again_every_s)
    crowded.swarm.run(0.5)
    took_s = []
    for wait_s in (0.0, 3.0, 3.0, 5.0, 10.0):
        crowded.swarm.run(wait_s)
        took_s.append(crowded.news_s())
    check(crowded.swarm, statistics.median(took_s) < 1 and max(took_s) < 60, took_s)


@pytest.mark.cases(1)
@pytest.mark.parametrize("again_every_s", [0.0, 3.0], ids=["told once", "told again"])
def test_who_was_made_up_is_soon_dead_and_stays_so(again_every_s: float) -> None:
    crowded = Crowded(3, CROWD, seed=2)
    crowded.come(again_every_s)
    check(crowded.swarm, crowded.believed() == CROWD)
    check(crowded.swarm, crowded.swarm.run(BURIED_S, lambda: not crowded.believed()), crowded.believed())
    check(crowded.swarm, not crowded.swarm.run(120, lambda: bool(crowded.believed())))
    check(crowded.swarm, crowded.swarm.agreed())


def test_a_newcomer_is_met_among_them() -> None:
    crowded = Crowded(3, CROWD, seed=3)
    crowded.come(again_every_s=3.0)
    swarm = crowded.swarm
    swarm.run(2)
    newcomer = crowded.start(3 + CROWD)

    def known() -> bool:
        return all(newcomer.id in node.membership.members for node in swarm.nodes.values())

    check(swarm, swarm.run(3, known))
    check(swarm, swarm.run(BURIED_S, swarm.agreed))


def test_a_crash_is_missed_as_soon_among_them() -> None:
    crowded = Crowded(8, CROWD, seed=4)
    crowded.come()
    crowded.swarm.run(1)
    crowded.swarm.crash(7)
    check(crowded.swarm, crowded.swarm.run(20, lambda: bool(crowded.swarm.detections_s)))


@pytest.mark.one_run_in(3)
def test_halves_find_together_though_many_more_are_dead() -> None:
    crowded = Crowded(8, CROWD, seed=5)
    crowded.come()
    swarm = crowded.swarm
    heal = swarm.cut(lambda a, b: a % 2 != b % 2)
    swarm.run(120)
    check(swarm, not swarm.agreed(), "the test did not test anything")
    heal()
    check(swarm, swarm.run(90, swarm.agreed))


def test_all_restart_at_once_and_nobody_has_met_anybody() -> None:
    crowded = Crowded(32, 0, seed=6)
    swarm = crowded.swarm
    for index in list(swarm.nodes):
        swarm.crash(index)
    for index in range(32):
        crowded.start(index)
    check(swarm, swarm.run(20, swarm.agreed))


def test_who_was_taken_for_dead_before_anybody_met_it_is_believed_when_it_is_met() -> None:
    """It is there, and answers nobody for a minute."""
    crowded = Crowded(3, 0, seed=7)
    swarm = crowded.swarm
    heal = swarm.cut(lambda a, b: 3 in (a, b) and 1 not in (a, b), touched=[3])
    newcomer = crowded.start(3, seeds=(1,))
    swarm.run(1)
    swarm.pause(3)
    swarm.run(60)
    states = [node.membership.members[newcomer.id].state for node in swarm.nodes.values() if node is not newcomer]
    check(swarm, states == [State.FAILED] * 3, states)
    heal()
    swarm.resume(3)
    check(swarm, swarm.run(90, swarm.agreed))
