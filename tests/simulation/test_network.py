"""What a message goes through: how long it takes alone and in company, what is lost, and which topologies are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.simulation.network import (
    BYTES_PER_MBIT,
    PROFILES,
    Between,
    Network,
    Profile,
    Topology,
    read_topology,
    uniform,
)
from peerd.simulation.scenario import Scenario, simulate
from peerd.simulation.world import World
from peerd.transport.errors import UserError

QUIET = Profile(latency_s=0.01, uplink_mbit=8.0, downlink_mbit=80.0)  # 1 and 10 MB/s
Flow = tuple[int, int, float, float]  # from, to, bytes, when

sizes = st.floats(1.0, 1e8)
rates = st.floats(0.1, 1e4)


def arrivals(topology: Topology, flows: Sequence[Flow], seed: int = 0) -> list[float]:
    """When each flow's last byte is there."""
    world = World(seed)
    network = Network(world, topology)
    found = [-1.0] * len(flows)

    def begin(number: int) -> None:
        source, target, size, _ = flows[number]

        def arrived() -> None:
            found[number] = world.now

        network.stream(source, target, size, lambda: None, arrived)

    for number, flow in enumerate(flows):
        world.later(flow[3], partial(begin, number))
    world.run(1e12)
    assert min(found) >= 0.0, f"seed {seed}: {found}"
    return found


def approximately(seconds: float) -> object:
    return pytest.approx(seconds, rel=1e-9, abs=1e-9)


# ---------------------------------------------------------------- streams


@given(sizes, rates, rates, st.floats(0.0, 2.0))
def test_a_flow_alone_takes_its_size_over_the_narrowest_rate_and_the_latency(
    size: float, up: float, down: float, latency_s: float
) -> None:
    topology = uniform(Profile(latency_s, uplink_mbit=up, downlink_mbit=down), 2)
    (found,) = arrivals(topology, [(0, 1, size, 0.0)])
    assert found == approximately(latency_s + size / (min(up, down) * BYTES_PER_MBIT))


@given(sizes, rates, rates, rates)
def test_a_thin_line_between_sites_is_the_narrowest_rate_too(size: float, up: float, down: float, line: float) -> None:
    profile = Profile(0.002, uplink_mbit=up, downlink_mbit=down)
    topology = Topology((profile,) * 2, ("a", "b"), {("a", "b"): Between(0.05, mbit=line)})
    (found,) = arrivals(topology, [(0, 1, size, 0.0)])
    assert found == approximately(0.052 + size / (min(up, down, line) * BYTES_PER_MBIT))


@given(sizes, sizes)
def test_two_flows_into_one_downlink_take_as_long_as_both_together(first: float, second: float) -> None:
    topology = uniform(Profile(0.01, uplink_mbit=1e4, downlink_mbit=8.0), 3)
    found = arrivals(topology, [(0, 2, first, 0.0), (1, 2, second, 0.0)])
    own = [topology.profiles[0].latency_s + size / (1e4 * BYTES_PER_MBIT) for size in (first, second)]
    assert max(found) >= 0.01 + (first + second) / 1e6 - 1e-9
    assert max(found) <= max(own) + (first + second) / 1e6 + 1e-9


@given(st.lists(st.tuples(st.integers(1, 4), sizes, st.floats(0.0, 30.0)), min_size=1, max_size=8), rates)
def test_no_pipe_ever_carries_more_than_its_rate(flows: list[tuple[int, float, float]], up: float) -> None:
    """All that has arrived by any moment was carried since the first began."""
    topology = uniform(Profile(0.0, uplink_mbit=up, downlink_mbit=8.0), 5)
    found = arrivals(topology, [(source, 0, size, at) for source, size, at in flows])
    for now in found:
        carried = sum(size for (_, size, _), at in zip(flows, found, strict=True) if at <= now)
        began = min(at for _, _, at in flows)
        assert carried <= (now - began) * 1e6 * (1 + 1e-9) + 1e-3


def test_what_trickles_in_leaves_the_downlink_to_others() -> None:
    slow, fast = replace(QUIET, uplink_mbit=0.08), replace(QUIET, uplink_mbit=800.0)
    topology = Topology((slow, fast, QUIET), ("",) * 3)
    trickle, burst = arrivals(topology, [(0, 2, 1e6, 0.0), (1, 2, 1e7, 0.5)])
    assert trickle == approximately(0.01 + 100.0)
    assert burst < 3.0


def test_an_uplink_sends_one_after_the_other() -> None:
    first, second = arrivals(uniform(QUIET, 3), [(0, 1, 1e6, 0.0), (0, 2, 1e6, 0.0)])
    assert (first, second) == (approximately(1.01), approximately(2.01))


def test_both_directions_of_a_node_are_apart() -> None:
    there, back = arrivals(uniform(QUIET, 2), [(0, 1, 1e6, 0.0), (1, 0, 1e6, 0.0)])
    assert there == back == approximately(1.01)


def test_all_flows_of_one_direction_share_the_line_between_two_sites() -> None:
    profile = Profile(0.0, uplink_mbit=1e6, downlink_mbit=1e6)
    topology = Topology(
        (profile,) * 4, ("a", "a", "b", "b"), {("a", "b"): Between(0.1, mbit=8.0), ("b", "a"): Between(0.1, mbit=8.0)}
    )
    found = arrivals(topology, [(0, 2, 1e6, 0.0), (1, 3, 1e6, 0.0), (2, 0, 1e6, 0.0)])
    assert sorted(found[:2]) == [pytest.approx(1.1, abs=1e-3), pytest.approx(2.1, abs=1e-3)]
    assert found[2] == pytest.approx(1.1, abs=1e-3)


def test_the_next_message_may_follow_when_the_last_byte_has_left() -> None:
    world = World(0)
    network = Network(world, uniform(QUIET, 2))
    sent: list[float] = []
    network.stream(0, 1, 1e6, lambda: sent.append(world.now), lambda: None)
    world.run(10.0)
    assert sent == [approximately(1.0)]


def test_what_waits_in_a_line_or_was_lost_there_has_not_used_it() -> None:
    world = World(0)
    network = Network(world, uniform(QUIET, 2))
    network.stream(0, 1, 4e6, lambda: None, lambda: None)
    used = []
    for seconds in (1.0, 2.0, 5.0):
        world.run(seconds)
        used.append(network.up[0].used_s(world.now))
    assert used == [approximately(seconds) for seconds in (1.0, 2.0, 4.0)]
    network.stream(0, 1, 4e6, lambda: None, lambda: None)
    world.run(6.0)
    network.drop(0)
    world.run(9.0)
    assert network.up[0].used_s(world.now) == approximately(5.0)


def test_a_node_slowed_down_is_slower_both_ways_until_it_is_not() -> None:
    network = Network(World(0), uniform(QUIET, 2))

    def rates() -> tuple[float, float]:
        return network.up[1].rate, network.down[1].rate

    before = rates()
    network.slow_down(1, 1000.0)
    assert rates() == (approximately(1e3), approximately(1e4))
    network.slow_down(1, 10.0)
    assert rates() == (approximately(1e5), approximately(1e6)), "of what it had at first"
    network.slow_down(1, 1.0)
    assert rates() == before


def test_lost_packets_make_a_stream_late_and_never_lose_it() -> None:
    seed, lossy = 5, uniform(replace(QUIET, loss=0.3), 2)
    found = [arrivals(lossy, [(0, 1, 1400.0, 0.0)], seed + run)[0] for run in range(50)]
    alone = 0.01 + 1400 / 1e6
    late = [at for at in found if at > alone + 0.19]
    assert min(found) == approximately(alone), f"seed {seed}"
    assert 5 <= len(late) <= 30, f"seed {seed}: {len(late)} of 50 were late, 15 expected"


# ---------------------------------------------------------------- datagrams


@given(st.floats(0.0, 0.5), st.floats(1.0, 1e8), st.integers(1, 1400))
def test_a_datagram_waits_behind_bulk_for_no_longer_than_the_queue(queue_s: float, bulk: float, size: int) -> None:
    world = World(0)
    network = Network(world, uniform(replace(QUIET, queue_s=queue_s), 2))
    network.stream(0, 1, bulk, lambda: None, lambda: None)
    (delay_s,) = network.datagram(0, 1, size)
    assert delay_s == approximately(0.01 + size / 1e6 + min(queue_s, bulk / 1e6))


@pytest.mark.parametrize(("seed", "loss"), [(1, 0.01), (2, 0.05), (3, 0.5)])
def test_as_many_datagrams_are_lost_as_were_to_be(seed: int, loss: float) -> None:
    network = Network(World(seed), Topology((replace(QUIET, loss=loss), QUIET), ("", "")))
    count = 20_000
    lost = sum(not network.datagram(0, 1, 100) for _ in range(count))
    deviation = (count * loss * (1 - loss)) ** 0.5
    assert abs(lost - count * loss) < 4 * deviation, f"seed {seed}: {lost} of {count}"


def test_losses_of_places_lines_and_weather_multiply() -> None:
    profiles = (replace(QUIET, loss=0.1), QUIET)
    network = Network(World(0), Topology(profiles, ("a", "b"), {("a", "b"): Between(0.1, loss=0.2)}))
    network.conditions = Profile(0.0, loss=0.5)
    assert network.loss(0, 1) == approximately(1 - 0.9 * 0.8 * 0.5)
    assert network.loss(1, 0) == approximately(1 - 0.9 * 0.5), "the line back has no loss of its own"


def test_weather_duplicates_and_reorders_datagrams() -> None:
    seed, count = 4, 5000
    network = Network(World(seed), uniform(QUIET, 2))
    network.conditions = Profile(0.0, duplication=0.1, reordering=0.2)
    copies = [network.datagram(0, 1, 100) for _ in range(count)]
    twice, late = sum(len(each) == 2 for each in copies), sum(each[0] > 0.015 for each in copies)
    assert 0.08 < twice / count < 0.12, f"seed {seed}: {twice} twice"
    assert 0.17 < late / count < 0.23, f"seed {seed}: {late} late"


def test_a_cut_loses_one_direction_and_no_other() -> None:
    network = Network(World(0), uniform(QUIET, 3))
    network.cut = lambda source, target: (source, target) == (0, 1)
    assert network.datagram(0, 1, 100) == []
    assert len(network.datagram(1, 0, 100)) == len(network.datagram(0, 2, 100)) == 1


@given(st.binary(min_size=1, max_size=100), st.integers(0, 1000))
def test_bad_weather_changes_one_bit_of_a_frame(frame: bytes, seed: int) -> None:
    network = Network(World(seed), uniform(QUIET, 2))
    assert not network.damages()
    network.conditions = Profile(0.0, corruption=1.0)
    assert network.damages()
    damaged = network.damaged(frame)
    assert len(damaged) == len(frame)
    assert sum((a ^ b).bit_count() for a, b in zip(frame, damaged, strict=True)) == 1


def test_between_places_the_line_counts_and_half_of_either_end() -> None:
    profiles = (replace(QUIET, latency_s=0.01), replace(QUIET, latency_s=0.03), replace(QUIET, latency_s=0.05))
    network = Network(World(0), Topology(profiles, ("a", "b", "b"), {("a", "b"): Between(0.1)}))
    assert network.flight_s(0, 1) == approximately(0.1 + 0.02)
    assert network.flight_s(1, 2) == approximately(0.05), "at one place the slower end counts"


# ---------------------------------------------------------------- topologies

THREE_SITES = """
[[site]]
name = "paris"
peers = 2
latency_ms = 0.5
jitter_ms = 0.25

[[site]]
name = "tokyo"
peers = 1
like = "wan"
loss = 0.25

[[site]]
peers = 3
like = "home"
uplink_mbit = 5
downlink_mbit = 50.5

[[between]]
sites = ["paris", "tokyo"]
latency_ms = 110
jitter_ms = 4
loss = 0.001
mbit = 200

[[between]]
sites = ["tokyo", "site-2"]
latency_ms = 125
"""


def test_three_sites_are_read(tmp_path: Path) -> None:
    path = tmp_path / "sites.toml"
    path.write_text(THREE_SITES)
    topology = read_topology(path)
    assert topology.sites == ("paris", "paris", "tokyo", "site-2", "site-2", "site-2")
    paris, _, tokyo, home, *_ = topology.profiles
    assert paris == replace(PROFILES["lan"], latency_s=0.0005, jitter_s=0.00025)
    assert tokyo == replace(PROFILES["wan"], loss=0.25)
    assert home == replace(PROFILES["home"], uplink_mbit=5.0, downlink_mbit=50.5)
    line = Between(0.11, 0.004, 0.001, 200.0)
    assert topology.lines["paris", "tokyo"] == topology.lines["tokyo", "paris"] == line
    assert topology.lines["tokyo", "site-2"] == Between(0.125)
    assert ("paris", "site-2") not in topology.lines


SITE = "[[site]]\npeers = 1\nname = 'a'\n[[site]]\npeers = 1\nname = 'b'\n"
BETWEEN = SITE + "[[between]]\nlatency_ms = 1\n"
BAD = {
    "no TOML": ("[[site", "no TOML"),
    "no UTF-8": (b"\xff", "no TOML"),
    "empty": ("", r"no \[\[site\]\]"),
    "an unknown table": ("[[node]]\npeers = 1", "'node' is not one of between, site"),
    "an unknown key": ("[[site]]\npeers = 1\nlatency = 1", "'latency' is not one of"),
    "an unknown key of a line": (BETWEEN + "sites = ['a', 'b']\nuplink_mbit = 1", "'uplink_mbit' is not one of"),
    "one table": ("[site]\npeers = 1", r"site must be tables, each under a line \[\[site\]\]"),
    "a number for tables": ("site = 1", "site must be tables"),
    "numbers for tables": ("site = [1]", "site must be tables"),
    "a text for tables": ("between = 'ab'\n" + SITE, "between must be tables"),
    "no peers": ("[[site]]", "needs peers"),
    "zero peers": ("[[site]]\npeers = 0", "needs peers"),
    "half a peer": ("[[site]]\npeers = 1.5", "needs peers"),
    "true peers": ("[[site]]\npeers = true", "needs peers"),
    "too many peers": ("[[site]]\npeers = 10_000_000_000", "needs peers"),
    "a name that is none": ("[[site]]\npeers = 1\nname = 7", "name = 7 must be a string"),
    "like nothing": ("[[site]]\npeers = 1\nlike = 'moon'", "like = 'moon' is not one of lan, wan, home"),
    "like a list": ("[[site]]\npeers = 1\nlike = ['lan']", "is not one of lan, wan, home"),
    "a negative number": ("[[site]]\npeers = 1\nlatency_ms = -1", "latency_ms = -1 must be a number from 0"),
    "a number as text": ("[[site]]\npeers = 1\nlatency_ms = '1'", "latency_ms = '1' must be a number"),
    "not a number": ("[[site]]\npeers = 1\njitter_ms = nan", "jitter_ms = nan must be a number"),
    "infinity": ("[[site]]\npeers = 1\ndownlink_mbit = inf", "downlink_mbit = inf must be a number"),
    "true": ("[[site]]\npeers = 1\nloss = true", "loss = True must be a number"),
    "more lost than sent": ("[[site]]\npeers = 1\nloss = 1.5", "loss = 1.5 must be a number from 0 to 0.9"),
    "no bandwidth": ("[[site]]\npeers = 1\nuplink_mbit = 0", "uplink_mbit = 0 must be a number from 0.001"),
    "no bandwidth between": (BETWEEN + "sites = ['a', 'b']\nmbit = 0", "mbit = 0 must be a number from 0.001"),
    "no ends": (BETWEEN, "sites = None must name two of a, b"),
    "one end": (BETWEEN + "sites = ['a']", "must name two of a, b"),
    "the same end twice": (BETWEEN + "sites = ['a', 'a']", "must name two of a, b"),
    "an unknown end": (BETWEEN + "sites = ['a', 'c']", "must name two of a, b"),
    "ends that are lists": (BETWEEN + "sites = [['a'], ['b']]", "must name two of a, b"),
    "no latency between": (SITE + "[[between]]\nsites = ['a', 'b']", "needs latency_ms"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_topology_gives_one_line_that_names_the_file(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "sites.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message) as raised:
        read_topology(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_topology_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_topology(tmp_path / "none.toml")
    (tmp_path / "endless.toml").symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"endless\.toml: more than 10000000 characters"):
        read_topology(tmp_path / "endless.toml")


@pytest.mark.parametrize("faults", ["none", "all"])
def test_a_network_too_slow_for_membership_has_false_deaths_and_no_violation(tmp_path: Path, faults: str) -> None:
    """A packet takes a minute: nobody can answer before it is taken for dead."""
    path = tmp_path / "sites.toml"
    path.write_text("[[site]]\npeers = 4\nlatency_ms = 60000\n")
    result = simulate(Scenario(peers=4, minutes=30, network=str(path), faults=faults)).result
    assert result["violations"] == []
    assert result["false_deaths"] > 0


def test_who_is_healthy_is_declared_failed_on_no_network_that_is_fast_enough(tmp_path: Path) -> None:
    path = tmp_path / "sites.toml"
    path.write_text("[[site]]\npeers = 4\nlatency_ms = 2400\njitter_ms = 100\n")
    result = simulate(Scenario(peers=4, minutes=15, network=str(path), faults="none")).result
    assert (result["false_deaths"], result["violations"]) == (0, [])
