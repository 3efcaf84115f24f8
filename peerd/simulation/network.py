"""What does a message go through on its way? Uplink, perhaps a line between sites, downlink, and what a fault adds.

Bulk waits in one queue a direction and node (what a parameter server's link really does under load), and moves through
the pipes of its way at once, as a stream does: each pipe is taken when the first byte reaches it. Datagrams are small
and do not queue behind bulk, as routers share a line between flows: they are late by what it holds, at most `queue_s`.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peerd.simulation.world import World
from peerd.transport.errors import UserError, cause
from peerd.transport.messages import Message

BYTES_PER_MBIT = 125_000
RETRANSMIT_S = 0.2  # the least a stream waits before it repeats a lost packet (RFC 6298 as kernels have it)
PACKET_BYTES = 1400


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of network, as one node sees it."""

    latency_s: float  # one way
    jitter_s: float = 0.0  # uniform, on top
    loss: float = 0.0  # of each end: a packet passes both
    duplication: float = 0.0
    reordering: float = 0.0  # share of datagrams that are late by another latency
    corruption: float = 0.0  # share of a stream's messages with a byte changed
    uplink_mbit: float = 1000.0
    downlink_mbit: float = 1000.0
    queue_s: float = 0.0  # how late bulk makes a datagram, at most


PROFILES = {
    "lan": Profile(latency_s=0.0002, jitter_s=0.0001),
    "wan": Profile(latency_s=0.04, jitter_s=0.005, loss=0.0005, queue_s=0.02),
    "home": Profile(latency_s=0.015, jitter_s=0.01, loss=0.002, uplink_mbit=20.0, downlink_mbit=100.0, queue_s=0.1),
}


@dataclass(frozen=True, slots=True)
class Between:
    """The line between two sites; all traffic of one direction shares it."""

    latency_s: float
    jitter_s: float = 0.0
    loss: float = 0.0
    mbit: float = 1000.0


@dataclass(frozen=True, slots=True)
class Topology:
    """Where every node is, and what lies between the places."""

    profiles: tuple[Profile, ...]  # one a node
    sites: tuple[str, ...]  # one a node
    lines: dict[tuple[str, str], Between] = field(default_factory=dict)

    @property
    def latency_s(self) -> float:
        """The longest, one way."""
        here = max(profile.latency_s for profile in self.profiles)
        return here + max((line.latency_s for line in self.lines.values()), default=0.0)

    @property
    def flight_s(self) -> float:
        """The longest that one packet takes, one way, jitter too."""
        here = max(profile.latency_s + profile.jitter_s for profile in self.profiles)
        return here + max((line.latency_s + line.jitter_s for line in self.lines.values()), default=0.0)


@dataclass(slots=True)
class Pipe:
    """Something that so many bytes a second go through, one after the other."""

    rate: float
    free_at: float = 0.0
    busy_s: float = 0.0  # with what still waits

    def take(self, now: float, size: float, last_byte_at: float) -> tuple[float, float]:
        """When the first and the last of `size` bytes come out that are there from `now` until `last_byte_at`.

        What trickles in holds the pipe no longer than its bytes take: others fill the gaps.
        """
        begins = max(now, self.free_at)
        self.free_at = begins + size / self.rate
        self.busy_s += size / self.rate
        return begins, max(self.free_at, last_byte_at)

    def used_s(self, now: float) -> float:
        """For how long it has been in use; what still waits in it is not."""
        return self.busy_s - max(0.0, self.free_at - now)

    def clear(self, now: float) -> None:
        """What waits in it is lost."""
        self.busy_s = self.used_s(now)
        self.free_at = min(self.free_at, now)


class Network:
    """All links of one swarm. A node is a number here."""

    def __init__(
        self, world: World, topology: Topology, drop: float = 0.0, may_be_lost: tuple[type[Message], ...] = ()
    ) -> None:
        """The share `drop` of such messages of the mode is lost, at the end of its way; their streams live on."""
        self.dropped = 0
        self.conditions = Profile(0.0)  # loss, duplication and reordering that faults add everywhere
        self.cut: Callable[[int, int], bool] = lambda source, target: False
        self.up = [Pipe(profile.uplink_mbit * BYTES_PER_MBIT) for profile in topology.profiles]
        self.down = [Pipe(profile.downlink_mbit * BYTES_PER_MBIT) for profile in topology.profiles]
        self._world = world
        self._rng: random.Random = world.rng("network")
        self._drop, self._may_be_lost = drop, may_be_lost
        self._drop_rng = world.rng("drop")
        self._topology = topology
        self._lines = {sites: Pipe(line.mbit * BYTES_PER_MBIT) for sites, line in topology.lines.items()}

    def slow_down(self, node: int, factor: float) -> None:
        """Let the node have this part of its bandwidth, both ways; 1 is all of it."""
        profile = self._topology.profiles[node]
        self.up[node].rate = profile.uplink_mbit * BYTES_PER_MBIT / factor
        self.down[node].rate = profile.downlink_mbit * BYTES_PER_MBIT / factor

    def drop(self, node: int) -> None:
        """The process there is gone, and what waited in its pipes with it."""
        for pipe in (self.up[node], self.down[node]):
            pipe.clear(self._world.now)

    def flight_s(self, source: int, target: int) -> float:
        """Latency and jitter of one packet, one way."""
        here, there = self._topology.profiles[source], self._topology.profiles[target]
        line = self._line(source, target)
        if line is None:
            return max(here.latency_s, there.latency_s) + here.jitter_s * self._rng.random()
        return line.latency_s + (here.latency_s + there.latency_s) / 2 + line.jitter_s * self._rng.random()

    def loss(self, source: int, target: int) -> float:
        """The chance that one packet is lost."""
        here, there = self._topology.profiles[source], self._topology.profiles[target]
        arrives = (1 - here.loss) * (1 - there.loss) * (1 - self.conditions.loss)
        line = self._line(source, target)
        return 1 - arrives if line is None else 1 - arrives * (1 - line.loss)

    def datagram(self, source: int, target: int, size: int) -> list[float]:
        """In how many seconds each copy of a datagram arrives; none: it is lost."""
        rng, profile, conditions = self._rng, self._topology.profiles[source], self.conditions
        if self.cut(source, target) or rng.random() < self.loss(source, target):
            return []
        up = self.up[source]
        delay_s = self.flight_s(source, target) + size / up.rate
        delay_s += min(profile.queue_s, max(0.0, up.free_at - self._world.now))
        if rng.random() < profile.reordering + conditions.reordering:
            delay_s += self.flight_s(source, target) * (1 + 4 * rng.random())
        if rng.random() < profile.duplication + conditions.duplication:
            return [delay_s, delay_s + self.flight_s(source, target)]
        return [delay_s]

    def damages(self) -> bool:
        """Whether this message of a stream arrives with a byte changed."""
        return self.conditions.corruption > 0 and self._rng.random() < self.conditions.corruption

    def damaged(self, frame: bytes) -> bytes:
        """The frame as it arrives then."""
        at = self._rng.randrange(len(frame))
        return frame[:at] + bytes([frame[at] ^ (1 << self._rng.randrange(8))]) + frame[at + 1 :]

    def drops(self, message: Message) -> bool:
        """Whether this message, which has arrived, is one of those that are lost."""
        lost = self._drop > 0 and isinstance(message, self._may_be_lost) and self._drop_rng.random() < self._drop
        self.dropped += lost
        return lost

    def stream(
        self, source: int, target: int, size: float, sent: Callable[[], None], arrived: Callable[[], None]
    ) -> None:
        """Move `size` bytes of a stream: `sent` when the next may follow, `arrived` when the last one is there."""
        world = self._world
        begins, ends = self.up[source].take(world.now, size, world.now)
        world.later(ends - world.now, sent)
        flight_s = self.flight_s(source, target) + self._repeats_s(source, target, size)
        pipes = [self.down[target]]
        if (line := self._lines.get((self._topology.sites[source], self._topology.sites[target]))) is not None:
            pipes.insert(0, line)
        self._through(pipes, size, begins + flight_s, ends + flight_s, arrived)

    def _through(
        self, pipes: list[Pipe], size: float, first_at: float, last_at: float, arrived: Callable[[], None]
    ) -> None:
        def enter() -> None:
            begins, ends = pipes[0].take(self._world.now, size, last_at)
            if len(pipes) > 1:
                self._through(pipes[1:], size, begins, ends, arrived)
            else:
                self._world.later(ends - self._world.now, arrived)

        self._world.later(first_at - self._world.now, enter)

    def _repeats_s(self, source: int, target: int, size: float) -> float:
        """How late lost packets make a stream's last byte: the losses of one round trip are repeated together."""
        lost = self.loss(source, target)
        rounds, packets = 0, max(1.0, size / PACKET_BYTES)
        while packets >= 1 and self._rng.random() < 1 - (1 - lost) ** packets and rounds < 8:
            rounds, packets = rounds + 1, packets * lost
        return rounds * max(RETRANSMIT_S, 2 * self.flight_s(source, target))

    def _line(self, source: int, target: int) -> Between | None:
        sites = self._topology.sites
        return self._topology.lines.get((sites[source], sites[target])) if sites[source] != sites[target] else None


def uniform(profile: Profile, peers: int) -> Topology:
    """Every node at one place."""
    return Topology((profile,) * peers, ("",) * peers)


_MS_MAX, _MBIT_MIN, _MBIT_MAX = 60_000.0, 0.001, 1e6
_NUMBERS = {  # by key: the field, what to multiply with, the least and the most
    "latency_ms": ("latency_s", 1e-3, 0.0, _MS_MAX),
    "jitter_ms": ("jitter_s", 1e-3, 0.0, _MS_MAX),
    "loss": ("loss", 1.0, 0.0, 0.9),
    "uplink_mbit": ("uplink_mbit", 1.0, _MBIT_MIN, _MBIT_MAX),
    "downlink_mbit": ("downlink_mbit", 1.0, _MBIT_MIN, _MBIT_MAX),
    "mbit": ("mbit", 1.0, _MBIT_MIN, _MBIT_MAX),
}
_PEERS_MAX = 1_000_000
_CHARACTERS_MAX = 10_000_000


def read_topology(path: Path) -> Topology:
    """The topology in a TOML file; see docs/simulation.md for an example. Raises UserError."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_CHARACTERS_MAX + 1)
        if len(text) > _CHARACTERS_MAX:
            raise UserError(f"--network {path}: more than {_CHARACTERS_MAX} characters")
        tables = tomllib.loads(text)
    except OSError as error:
        raise UserError(f"--network {path}: {cause(error)}; docs/simulation.md has an example of such a file") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"--network {path}: no TOML: {error}") from None
    _only(path, tables, {"site", "between"})
    profiles: list[Profile] = []
    sites: list[str] = []
    for row in _rows(path, tables, "site"):
        _only(path, row, {"name", "peers", "like", "latency_ms", "jitter_ms", "loss", "uplink_mbit", "downlink_mbit"})
        like, peers = row.get("like", "lan"), row.get("peers")
        name = row.get("name", f"site-{len(set(sites))}")
        if not isinstance(name, str):
            raise UserError(f"{path}: name = {name!r} must be a string")
        if not isinstance(like, str) or like not in PROFILES:
            raise UserError(f"{path}: like = {like!r} is not one of {', '.join(PROFILES)}")
        if type(peers) is not int or not 1 <= peers <= _PEERS_MAX:
            raise UserError(f"{path}: every [[site]] needs peers, a whole number from 1 to {_PEERS_MAX}")
        if name in sites:
            raise UserError(f"{path}: two sites are called {name!r}")
        profiles += [replace(PROFILES[like], **_numbers(path, row))] * peers
        sites += [name] * peers
    lines: dict[tuple[str, str], Between] = {}
    for row in _rows(path, tables, "between"):
        _only(path, row, {"sites", "latency_ms", "jitter_ms", "loss", "mbit"})
        ends = row.get("sites")
        if not isinstance(ends, list) or len(ends) != 2 or ends[0] == ends[1] or not all(end in sites for end in ends):
            raise UserError(f"{path}: sites = {ends!r} must name two of {', '.join(dict.fromkeys(sites))}")
        if (ends[0], ends[1]) in lines:
            raise UserError(f"{path}: two [[between]] for {ends[0]} and {ends[1]}")
        if "latency_ms" not in row:
            raise UserError(f"{path}: every [[between]] needs latency_ms")
        lines[ends[0], ends[1]] = lines[ends[1], ends[0]] = Between(**_numbers(path, row))
    if not profiles:
        raise UserError(f"{path}: no [[site]] with peers in it")
    return Topology(tuple(profiles), tuple(sites), lines)


def _rows(path: Path, tables: dict[str, Any], key: str) -> list[dict[str, Any]]:
    rows = tables.get(key, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path}: {key} must be tables, each under a line [[{key}]]")
    return rows


def _only(path: Path, table: dict[str, Any], known: set[str]) -> None:
    if unknown := sorted(table.keys() - known):
        raise UserError(f"{path}: {unknown[0]!r} is not one of {', '.join(sorted(known))}")


def _numbers(path: Path, row: dict[str, Any]) -> dict[str, float]:
    """The fields that a row sets."""
    found = {}
    for key in row.keys() & _NUMBERS.keys():
        name, scale, least, most = _NUMBERS[key]
        value = row[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise UserError(f"{path}: {key} = {value!r} must be a number from {least:g} to {most:g}")
        found[name] = value * scale
    return found
