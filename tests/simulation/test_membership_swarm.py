"""Whole swarms of real membership cores, members and nothing else: who joins, who is missed, and who is never accused.

The checkers watch at every event that no key goes down, that nobody raises another's incarnation, and that nobody who
was not touched is declared failed.
"""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from peerd.simulation.network import Profile, uniform
from peerd.simulation.node import Clock, Node
from peerd.simulation.swarm import GRACE_S, Swarm
from peerd.simulation.world import Violation, World
from peerd.transport.ids import NodeId
from peerd.transport.messages import State

NEAR = Profile(latency_s=0.005, jitter_s=0.01)


def swarm_of(
    peers: int, seed: int, profile: Profile = NEAR, trace: io.StringIO | None = None, *, signed: bool = True
) -> Swarm:
    """Places, and nobody there yet."""
    return Swarm(World(seed, trace), peers, topology=uniform(profile, peers), signed=signed)


def grown(
    peers: int, seed: int, profile: Profile = NEAR, trace: io.StringIO | None = None, *, signed: bool = True
) -> Swarm:
    """One that has formed."""
    swarm = swarm_of(peers, seed, profile, trace, signed=signed)
    swarm.start_all()
    swarm.run(20)
    check(
        swarm, swarm.run(10, swarm.agreed), "did not converge", sizes(swarm)
    )  # a lost packet may be refuted just then
    return swarm


def check(swarm: Swarm, condition: bool, *what: object) -> None:
    assert condition, f"seed {swarm.world.seed} at {swarm.world.now:.3f} s: {what}"


def alive(node: Node) -> set[NodeId]:
    """The others that it believes to live."""
    return {id for id, known in node.membership.members.items() if known.state < State.FAILED and id != node.id}


def sizes(swarm: Swarm) -> list[int]:
    return [len(alive(node)) for node in swarm.nodes.values()]


def states(swarm: Swarm, id: NodeId) -> Counter[State]:
    return Counter(node.membership.members[id].state for node in swarm.nodes.values() if node.id != id)


@pytest.mark.parametrize("size", [2, 3, 17, 64])
def test_all_join_through_one_seed(size: int) -> None:
    swarm = grown(size, seed=100 + size)
    check(swarm, swarm.counts()["failures"] == 0, swarm.counts())
    check(swarm, swarm.counts()["stalls"] == 0, swarm.counts())


def test_a_quiet_swarm_sends_two_datagrams_per_member_and_second() -> None:
    trace = io.StringIO()
    swarm = grown(16, seed=1, trace=trace)
    before = trace.tell()
    swarm.run(100)
    trace.seek(before)
    sent = sum('"datagram"' in line for line in trace)
    check(swarm, 0 < sent <= 2 * 16 * 101, sent)


@pytest.mark.cases(2)
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 6, 7, 8])  # 99 of 100; with 5 nobody happens to probe for 6 s
def test_a_crash_is_known_to_all_of_64_within_12_seconds(seed: int) -> None:
    swarm = grown(64, seed)
    victim = swarm.nodes[swarm.world.rng("victim").randrange(1, 64)]
    swarm.crash(victim.index)
    found = swarm.run(12, lambda: all(victim.id not in alive(node) for node in swarm.nodes.values()))
    check(swarm, found, states(swarm, victim.id))
    check(swarm, {subject for _, _, subject in swarm.verdicts} == {victim.id}, swarm.verdicts)


def test_of_two_the_survivor_notices_and_goes_on_looking() -> None:
    swarm = grown(2, seed=2)
    first = swarm.nodes[0]
    swarm.crash(1)
    check(swarm, swarm.run(12, lambda: not alive(first)), first.membership.members)
    swarm.run(600)
    again = swarm.start(1, seeds=[])
    check(swarm, swarm.run(40, swarm.agreed), first.membership.members)
    check(swarm, alive(again) == {first.id})


def test_a_restart_replaces_the_former_life_at_once() -> None:
    swarm = grown(16, seed=3)
    swarm.crash(5)
    swarm.run(0.5)
    again = swarm.start(5)
    check(swarm, swarm.run(3, swarm.agreed), states(swarm, again.id))
    swarm.run(60)
    check(swarm, not swarm.verdicts and swarm.agreed(), swarm.verdicts)


def test_all_restart_at_once() -> None:
    swarm = grown(32, seed=4)
    for index in range(32):
        swarm.crash(index)
        swarm.start(index, seeds=[0, 1])
    check(swarm, swarm.run(30, swarm.agreed), "not one swarm again")


@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_a_graceful_leave_is_left_everywhere_and_never_failed(loss: float) -> None:
    swarm = grown(32, seed=5, profile=replace(NEAR, loss=loss))
    leaver = swarm.nodes[7]
    swarm.leave(7)
    check(swarm, not leaver.membership.left_spread)
    check(swarm, swarm.run(5, lambda: leaver.membership.left_spread), "still telling")
    swarm.run(60)
    check(swarm, 7 not in swarm.nodes, "told all and did not go")
    check(swarm, states(swarm, leaver.id) == {State.LEFT: 31}, states(swarm, leaver.id))
    check(swarm, not swarm.verdicts, swarm.verdicts)
    swarm.start(7, seeds=[3])
    check(swarm, swarm.run(5, swarm.agreed), "one that left and came back must be alive", states(swarm, leaver.id))


@pytest.mark.one_run_in(3)
@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", [6, 7])
def test_halves_find_together_after_ten_minutes(seed: int) -> None:
    swarm = grown(24, seed)
    heal = swarm.cut(lambda source, target: (source < 12) != (target < 12))
    swarm.run(600)
    check(swarm, sizes(swarm) == [11] * 24, sizes(swarm))
    before = len(swarm.verdicts)
    heal()
    check(swarm, swarm.run(30, swarm.agreed), sizes(swarm))
    swarm.run(60)
    check(swarm, len(swarm.verdicts) == before, "accused each other after the heal", swarm.verdicts[before:])


@pytest.mark.one_run_in(3)
@pytest.mark.parametrize("seed", [8, pytest.param(9, marks=pytest.mark.soak)])
def test_five_minutes_at_five_percent_loss_declare_nobody_failed(seed: int) -> None:
    swarm = grown(48, seed, replace(NEAR, loss=0.05))
    swarm.run(300)
    check(swarm, not swarm.verdicts, swarm.verdicts)
    check(swarm, swarm.counts()["suspicions"] > 0, "the test did not test anything", swarm.counts())


@pytest.mark.one_run_in(3)
@pytest.mark.cases(1)
@pytest.mark.parametrize(("seed", "stop_s"), [(10, 2.0), (11, 4.0), (12, 16.0)])
def test_stopped_processes_accuse_nobody_who_was_not(seed: int, stop_s: float) -> None:
    swarm = grown(32, seed)
    rng = swarm.world.rng("stops")

    def stop(index: int) -> None:
        swarm.pause(index)
        swarm.world.later(stop_s, lambda: go(index))

    def go(index: int) -> None:
        swarm.resume(index)
        swarm.world.later(stop_s, lambda: stop(index))

    for index in range(8):
        swarm.world.later(rng.random() * 2 * stop_s, partial(stop, index))
    culprits = {swarm.nodes[index].id for index in range(8)}
    swarm.run(200)
    healthy = [verdict for verdict in swarm.verdicts if verdict[2] not in culprits]
    check(swarm, not healthy, healthy)
    check(swarm, swarm.counts()["stalls"] > 40, swarm.counts())


def test_a_short_stop_is_suspected_at_most() -> None:
    swarm = grown(32, seed=13)
    for index in range(1, 9):
        swarm.pause(index)
        swarm.run(5)
        swarm.resume(index)
        swarm.run(5)
    check(swarm, not swarm.verdicts, swarm.verdicts)
    check(swarm, swarm.counts()["refutations"] > 0, "the test did not test anything")


def test_a_long_stop_is_buried_and_comes_back_by_itself() -> None:
    swarm = grown(16, seed=14)
    stopped = swarm.nodes[3]
    swarm.pause(3)
    swarm.run(60)
    check(swarm, states(swarm, stopped.id) == {State.FAILED: 15}, states(swarm, stopped.id))
    swarm.crash(9)
    swarm.run(15)
    swarm.resume(3)
    check(swarm, swarm.run(15, swarm.agreed), states(swarm, stopped.id))


def test_a_node_whose_seed_was_down_joins_when_it_comes_up() -> None:
    swarm = swarm_of(2, seed=15)
    lonely = swarm.start(1)
    swarm.run(300)
    check(swarm, not alive(lonely) and lonely.counts["unreachable"] >= 10, lonely.counts)
    swarm.start(0)
    check(swarm, swarm.run(32, swarm.agreed), lonely.membership.members)


@pytest.mark.parametrize("how", ["crash", "pause"])
def test_a_process_that_is_gone_or_stopped_while_it_dials_says_nothing(how: str) -> None:
    swarm = swarm_of(2, seed=5, profile=Profile(latency_s=0.1))
    first = swarm.start(0, ())
    dials = swarm.start(1)
    swarm.run(0.2)
    swarm.crash(1) if how == "crash" else swarm.pause(1)
    swarm.run(3)
    check(swarm, not alive(first) and not dials.bytes_sent, first.membership.members, dials.bytes_sent)
    if how == "pause":
        swarm.resume(1)
        check(swarm, swarm.run(3, swarm.agreed), sizes(swarm))


def test_first_retries_come_quickly() -> None:
    swarm = swarm_of(2, seed=16)
    swarm.start(1)
    swarm.run(2)
    swarm.start(0)
    check(swarm, swarm.run(3, swarm.agreed), "a seed started a moment later is found a moment later")


def test_two_swarms_with_a_late_common_seed_become_one() -> None:
    swarm = swarm_of(5, seed=17)
    for index, seeds in ((1, [0]), (2, [0, 1]), (3, [0]), (4, [0, 3])):
        swarm.start(index, seeds)
    swarm.run(60)
    check(swarm, not swarm.agreed())
    swarm.start(0)
    check(swarm, swarm.run(40, swarm.agreed), sizes(swarm))


def test_a_slow_network_is_measured_not_accused() -> None:
    """Every probe takes 0.6 to 1.8 s there and back, against a probe timeout of 0.5 s."""
    swarm = grown(16, seed=18, profile=Profile(latency_s=0.3, jitter_s=0.6))
    swarm.run(60)
    before = swarm.counts()["suspicions"]
    swarm.run(120)
    check(swarm, not swarm.verdicts, swarm.verdicts)
    check(swarm, swarm.counts()["suspicions"] - before <= 2, swarm.counts()["suspicions"] - before)


def test_one_way_cut_between_two_is_bridged_by_others() -> None:
    swarm = grown(12, seed=19)
    swarm.cut(lambda source, target: (source, target) == (2, 8))
    swarm.run(120)
    check(swarm, not swarm.verdicts and swarm.counts()["suspicions"] == 0, swarm.counts())
    check(swarm, swarm.counts()["indirect_probes"] > 0, "the test did not test anything")


def test_duplicated_identity_is_noticed_by_the_older_life() -> None:
    """A copy of a node's state starts at another place; `Swarm.start` itself starts nobody twice."""
    swarm = swarm_of(5, seed=20)
    for index in range(4):
        swarm.start(index)
    swarm.run(20)
    older = swarm.nodes[2]
    host, port = swarm.address(4)
    me = replace(older.membership.me, epoch=2, host=host, port=port)
    copy = Node(swarm, 4, me, [swarm.address(0)], None, 1, Clock())
    swarm.nodes[4] = swarm.latest[older.id] = copy
    copy.begin()
    swarm.run(5)
    check(swarm, older.counts["identity_conflict"] > 0, older.counts)
    check(swarm, copy.counts["identity_conflict"] == 0, copy.counts)
    check(swarm, swarm.nodes[0].membership.members[older.id].host == host)


def test_the_same_seed_gives_the_same_run() -> None:
    def run(seed: int) -> tuple[str, list[tuple[float, NodeId, NodeId]], Counter[str]]:
        swarm = grown(12, seed, replace(NEAR, loss=0.1))
        swarm.crash(4)
        swarm.run(30)
        return swarm.world.digest, swarm.verdicts, swarm.counts()

    first, second = run(21), run(21)
    assert first == second
    assert first[1], "nobody noticed the crash"
    assert run(22)[0] != first[0]


# ---------------------------------------------------------------- who is excused


def buried(swarm: Swarm) -> bool:
    """Whether the checkers object when a node, of which nobody hears any more, is declared failed."""
    swarm.network.cut = lambda source, target: 3 in (source, target)
    try:
        swarm.run(30)
    except Violation:
        return True
    check(swarm, bool(swarm.verdicts), "the test did not test anything")
    return False


def test_a_verdict_on_an_untouched_node_ends_the_run() -> None:
    swarm = grown(8, seed=23)
    swarm.network.cut = lambda source, target: 3 in (source, target)
    with pytest.raises(Violation, match=r"of seed 23: .* failed, which was never paused, cut or crashed; replay: "):
        swarm.run(30)


@pytest.mark.parametrize(("after_s", "objects"), [(1.0, False), (GRACE_S + 1.0, True)])
def test_a_healed_cut_excuses_for_a_while_only(after_s: float, objects: bool) -> None:
    swarm = grown(8, seed=24)
    swarm.cut(lambda source, target: (source, target) == (0, 1))()
    swarm.run(after_s)
    assert buried(swarm) is objects, "seed 24"


@pytest.mark.parametrize("how", ["start", "resume"])
def test_who_comes_during_a_cut_is_excused_as_long_as_all_others(how: str) -> None:
    swarm = grown(8, seed=25)
    if how == "start":
        swarm.crash(3)
    else:
        swarm.pause(3)
    heal = swarm.cut(lambda source, target: (source, target) == (0, 1))
    swarm.run(1)
    if how == "start":
        swarm.start(3)
    else:
        swarm.resume(3)
    swarm.run(GRACE_S + 1.0)
    check(swarm, swarm.nodes[3].excused_until > swarm.world.now, "would be accused by a cut that still lasts")
    heal()
    swarm.run(GRACE_S + 1.0)
    assert buried(swarm), "seed 25"
