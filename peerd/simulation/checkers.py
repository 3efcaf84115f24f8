"""Does what peerd promises hold during a simulated run?

A violation ends the run. Membership: keys never go down, nobody raises another's incarnation, nobody healthy is
declared failed, all agree after the faults. Exchanges: every one is applied once at either end, in order, with opposite
corrections (as long, each by its share, where batches differ), and leaves the references bit for bit the same; so what
the swarm's models sum up to is conserved. Queues are bounded, and no link is silent for ever.

Who is healthy can be told from who is dead only where an answer comes in time: on a network that is too slow for that,
false deaths are counted, and are no violation; nor is a link that is silent for one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from peerd.membership.core import Membership
from peerd.membership.table_exchange import PUSH_PULL_DEADLINE_S
from peerd.simulation.world import Violation, World
from peerd.training.effects import Apply, Effect, Vector
from peerd.training.pairs.reference import PairedReference, goes_alone, share_of
from peerd.training.trigger import SILENCE_MAX_S
from peerd.transport.ids import NodeId
from peerd.transport.messages import Delta, State

QUEUED_MAX = 16
"""Messages to one peer: an exchange, its repeat and the life of a link, for either direction of news; or of a round, a
window of pieces, the confirmations of another, and what is ordered and reported. And there is a word on each leader."""
SILENCE_SLACK_S = 30.0  # a partner may be busy, and an exchange takes its time on a thin line
LAST_WORD_FLIGHTS = 4  # of a dial, and of a table each way: what a suspect is asked for before it is declared failed
SHARE_TOLERANCE, TINY = 1e-4, 1e-30
"""Of corrections that are not opposite to the bit, as each end takes its share in float32; TINY ones are rounded."""
SUM_TOLERANCE = 1e-9  # relative, of float64 sums over many steps

Key = tuple[int, int, int]


class Watched(Protocol):
    """A node, as the checkers see it."""

    id: NodeId
    index: int
    membership: Membership
    excused_until: float  # a fault touches it until then

    @property
    def references(self) -> Mapping[NodeId, PairedReference]:
        """Of the links it holds."""
        ...

    @property
    def is_centre(self) -> bool:
        """Whether those links correct a centre variable of its mode, not its model."""
        ...

    def sends_to(self, peer: NodeId) -> bool:
        """Whether something is on its way there."""
        ...


@dataclass(frozen=True, slots=True)
class _Half:
    """One end of a completed exchange, in checksums."""

    node: NodeId
    mine: int
    theirs: int
    correction: int | None  # unknown where it went to a centre variable, not to the node's model
    opposite: int | None
    total: float  # of the correction, as it would be where both ends count alike, and how long that is
    length: float
    counts_alike: bool
    uneven: bool  # where either end goes as far as it may itself


class Checkers:
    """All invariants of one run."""

    def __init__(
        self, world: World, latest: Mapping[NodeId, Watched], replay: Callable[[], str], flight_s: float
    ) -> None:
        """`latest` is the present or last life of every identity; `replay` the command that shows a violation again.

        `flight_s` is the longest that one packet takes.
        """
        self.too_slow = LAST_WORD_FLIGHTS * flight_s > PUSH_PULL_DEADLINE_S  # for members to agree on who lives
        self.exchanges = 0
        self.false_deaths = 0
        self._world = world
        self._latest = latest
        self._replay = replay
        self._keys: dict[tuple[NodeId, int, NodeId], Key] = {}
        self._versions: dict[tuple[int, NodeId], int] = {}  # by link and node
        self._waiting: dict[tuple[int, int], _Half] = {}  # by link and version: one end has applied it
        self._half_done: dict[tuple[int, int], Vector] = {}  # by link and version: a correction without its opposite
        self._uneven: Vector = np.zeros(())  # what corrections at two runs' ends come to that are not opposite
        self._spoke_at: dict[tuple[NodeId, NodeId], tuple[int, float]] = {}  # link and when, by node and peer

    def fail(self, what: str) -> None:
        """Raise Violation."""
        raise Violation(f"at {self._world.now:.3f} s of seed {self._world.seed}: {what}; replay: {self._replay()}")

    # ---------------------------------------------------------------- membership

    def member_changed(self, viewer: Watched, id: NodeId) -> None:
        """`viewer` believes something new of `id`."""
        self.keys(viewer, id)
        subject = self._latest.get(id)
        if subject is None:
            return
        record = viewer.membership.members[id]
        dead = record.state == State.FAILED and record.epoch == subject.membership.me.epoch
        if dead and self._world.now >= subject.excused_until and viewer.id != id:
            self.false_deaths += 1
            if self.too_slow:
                return
            self.fail(f"{viewer.id} declared {id} failed, which was never paused, cut or crashed")

    def keys(self, viewer: Watched, id: NodeId) -> None:
        """What `viewer` believes of `id` is no older than before, and no newer than what that one says itself."""
        record = viewer.membership.members[id]
        key = (record.epoch, record.incarnation, int(record.state))
        at = (viewer.id, viewer.membership.me.epoch, id)
        if key < self._keys.get(at, key):
            self.fail(f"{viewer.id} went from {self._keys[at]} back to {key} on {id}")
        self._keys[at] = key
        subject = self._latest.get(id)
        if subject is not None and key[:2] > (subject.membership.me.epoch, subject.membership.me.incarnation):
            itself = (subject.membership.me.epoch, subject.membership.me.incarnation)
            self.fail(f"{viewer.id} holds {key} of {id}, which itself is at {itself}")

    # ---------------------------------------------------------------- exchanges

    def exchanged(self, node: Watched, peer: NodeId, message: Delta, effects: list[Effect]) -> None:
        """`node` took in one half from `peer`, and answered with `effects`."""
        at = (message.link, node.id)
        before = self._versions.get(at, 0)
        corrections: list[Vector | None] = [effect.correction for effect in effects if isinstance(effect, Apply)]
        known = node.references.get(peer)
        if node.is_centre and known is not None and known.link == message.link:  # else it is a link of its trainer's
            corrections = [None] * (known.version > before)
        if not corrections:
            return
        if len(corrections) > 1:
            self.fail(f"{node.id} applied exchange {message.seq} with {peer} {len(corrections)} times at once")
        if message.seq != before + 1:
            self.fail(f"{node.id} applied exchange {message.seq} with {peer} after {before}")
        self._versions[at] = message.seq
        reference = node.references.get(peer)
        if reference is None or reference.link != message.link:  # what is left of a link: its references have ended
            self._note_half((message.link, message.seq), corrections[0], uneven=message.finishing)
            self.exchanges += self._waiting.pop((message.link, message.seq), None) is not None
            return
        assert reference.answered is not None, "it has applied this exchange"
        uneven = goes_alone(reference.answered, message, reference.distances)
        self._note_half((message.link, message.seq), corrections[0], uneven=uneven)
        half = _half(node.id, reference, corrections[0], share_of(reference.answered, message), uneven)
        other = self._waiting.pop((message.link, message.seq), None)
        if other is None:
            self._waiting[message.link, message.seq] = half
        else:
            self._compare(half, other, message.seq)
            self.exchanges += 1
        self._spoke_at[node.id, peer] = (message.link, self._world.now)

    def _note_half(self, exchange: tuple[int, int], correction: Vector | None, *, uneven: bool) -> None:
        """One end has applied its correction; the other may never, if it dies, or by less at its run's end."""
        if correction is None:
            return
        other = self._half_done.pop(exchange, None)
        if other is None:
            self._half_done[exchange] = correction.copy()
        elif uneven:
            self._uneven = self._uneven + other.astype(np.float64) + correction

    def _compare(self, half: _Half, other: _Half, seq: int) -> None:
        who = f"{half.node} and {other.node} after exchange {seq}"
        if half.node == other.node:
            self.fail(f"{who}: one end twice")
        if (half.mine, half.theirs) != (other.theirs, other.mine):
            self.fail(f"{who}: their references differ")
        if None in (half.correction, other.correction) or half.uneven:
            return
        alike = half.counts_alike and other.counts_alike
        if alike:
            opposite = half.correction == other.opposite
        else:
            near = SHARE_TOLERANCE * (half.length + other.length) + TINY
            opposite = abs(half.length - other.length) < near and abs(half.total + other.total) < near
        if not opposite:
            self.fail(f"{who}: their corrections are not opposite, so the mean moves")

    # ---------------------------------------------------------------- now and then

    def links(self, nodes: Mapping[NodeId, Watched], now: float) -> None:
        """No link between two healthy trainers has been silent for longer than the trigger allows."""
        if self.too_slow:  # they take each other for dead
            return
        references = {id: node.references for id, node in nodes.items()}
        for node in nodes.values():
            for peer, reference in references[node.id].items():
                other = nodes.get(peer)
                theirs = references[peer].get(node.id) if other is not None else None
                if other is None or theirs is None or theirs.link != reference.link:
                    self._spoke_at.pop((node.id, peer), None)
                    continue
                link, since = self._spoke_at.get((node.id, peer), (-1, now))
                if link != reference.link or node.sends_to(peer) or other.sends_to(node.id):
                    self._spoke_at[node.id, peer] = (reference.link, now)
                    continue
                since = max(since, node.excused_until, other.excused_until)
                if now - since > SILENCE_MAX_S + SILENCE_SLACK_S:
                    self.fail(f"{node.id} and {peer} have been silent for {now - since:.0f} s")

    def queue(self, node: NodeId, peer: NodeId, queued: int) -> None:
        """What waits for one peer is bounded by what its mode has under way."""
        if queued > QUEUED_MAX + len(self._latest):
            self.fail(f"{node} has {queued} messages waiting for {peer}")

    def conserved(self, received: Vector, models: list[Vector]) -> None:
        """What all models that ever were, shape (values,) each, took from others is what exchanges left half done, or
        moved more at one end."""
        error = float(np.abs(received - self._uneven - sum(self._half_done.values())).max())
        error /= max(1.0, *(float(np.abs(model).max()) for model in models))
        if error > SUM_TOLERANCE:
            self.fail(f"the models sum up to {error:.2e} more or less than was put in")

    def same(self, what: str, sent: Any, decoded: Any) -> None:
        """What was decoded is what was encoded."""
        if sent != decoded:
            self.fail(f"{what}: {sent!r} became {decoded!r}")


def _half(node: NodeId, reference: PairedReference, correction: Vector | None, share: float, uneven: bool) -> _Half:
    """A zero has a sign, which addition does not care for."""
    return _Half(
        node,
        zlib.crc32(reference.mine[:].data),
        zlib.crc32(reference.theirs[:].data),
        None if correction is None else zlib.crc32((correction + 0.0).data),
        None if correction is None else zlib.crc32((0.0 - correction).data),
        0.0 if correction is None else float(correction.sum(dtype=np.float64)) / share / math.sqrt(correction.size),
        0.0 if correction is None else float(np.linalg.norm(correction.astype(np.float64))) / share,
        share == 1,
        uneven,
    )
