"""What does no honest member say of a round, and no honest leader order? Bounds of what comes from others.

Each raises PeerError, which counts against whoever sent it.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass

from peerd.training.batch_sizes import are_shares
from peerd.training.codecs import CODECS
from peerd.training.counts import REPORTED_MAX, within_step
from peerd.training.mode_settings import GRADIENTS, ModeSettings
from peerd.training.rounds.attempt import EXACT_CODEC, ends_whole
from peerd.training.rounds.choice import EVERY_AT_FIRST, EVERY_MAX, is_left_to_leader
from peerd.training.rounds.lengths import GROUPS, Lengths, are_lengths
from peerd.training.rounds.lines import SEGMENTS_MAX
from peerd.training.rounds.topology import parse_topology
from peerd.training.rounds.weights import are_weights
from peerd.transport.errors import PeerError, UserError
from peerd.transport.ids import NodeId
from peerd.transport.messages import NO_MEAN, RoundBegin, RoundReport

UNREACHED_MAX = SEGMENTS_MAX
"""Members of whom one says that it cannot reach them: a ring or a halving of more is not arranged by it."""


@dataclass(frozen=True, slots=True)
class Hearer:
    """What a member knows as it hears others."""

    me: NodeId
    round: int  # the last one applied
    seen: int  # the highest attempt begun
    said: Container[Lengths]  # of its contribution, of late

    def check_report(self, report: RoundReport) -> None:
        """What no member reports to its leader. Raises PeerError."""
        for what, told, ours in (
            ("a round", report.round, self.round), ("an agreed attempt", report.agreed, self.seen),
            ("an attempt", report.attempt, self.seen),
        ):  # fmt: skip
            within_step(what, told, ours, first=REPORTED_MAX)
        within_step("a step", report.step, 0)  # an order may repeat it, to all
        check_limit(report.limit)
        if len(report.unreached) > UNREACHED_MAX:
            raise PeerError(f"{len(report.unreached)} members who cannot be reached")
        if not all(0 <= length < math.inf for length in report.lengths):  # an order repeats them, to all
            raise PeerError("a contribution whose length is none")

    def check_order(self, begin: RoundBegin, settings: ModeSettings, *, differences: bool) -> None:
        """What no leader orders of a mode like this member's. Raises PeerError."""
        within_step("a round", begin.round, self.round)
        within_step("an attempt", begin.attempt, self.seen)
        within_step("a model of step", begin.step, 0)  # who goes on from the last could say no later one
        count, is_of_gradients = len(begin.roster), settings.exchange == GRADIENTS
        if len(begin.lives) != count:
            raise PeerError(f"a roster of {count} members with {len(begin.lives)} lives")
        if begin.whole and begin.codec != EXACT_CODEC:
            raise PeerError(f"a round of whole models in {begin.codec[:40]!r}")
        if is_of_gradients:
            _check_gradients(begin)
        elif begin.weights or begin.source:
            raise PeerError("a round of gradients in a swarm that exchanges weights")
        exact_end = begin.final and ends_whole(settings)
        if not begin.whole and (exact_end or not differences):
            raise PeerError("a round of differences where whole models are due")
        if begin.lengths and not (are_lengths(begin.lengths, count) and self._has_said(begin)):
            raise PeerError("a round whose members did not say these lengths")
        if len(begin.waited) != count or not all(0 <= waited < math.inf for waited in begin.waited):
            raise PeerError("a round whose members have not waited so long")
        if not are_shares(begin.shares, count) or (begin.shares and (is_of_gradients or begin.whole or begin.final)):
            raise PeerError("a round whose members cannot have these shares")
        if begin.every and not (is_left_to_leader(settings) and EVERY_AT_FIRST <= begin.every <= EVERY_MAX):
            raise PeerError(f"{begin.every} steps to the next round")
        if begin.codec not in CODECS:
            raise PeerError(f"codec {begin.codec[:40]!r} is none of {', '.join(CODECS)}")
        try:
            parse_topology(begin.topology)
        except UserError as error:
            raise PeerError(str(error)) from None

    def _has_said(self, begin: RoundBegin) -> bool:
        """Whether the lengths that are told of this member's contribution are its own words."""
        late = begin.round <= self.round or begin.attempt <= self.seen  # of a leader that stood still meanwhile
        if late or self.me not in begin.roster:
            return True
        place = GROUPS * begin.roster.index(self.me)
        return begin.lengths[place : place + GROUPS] in self.said


def check_limit(limit: float) -> None:
    """Of a mean. Raises PeerError."""
    if not (limit == NO_MEAN or 0 <= limit < math.inf):
        raise PeerError(f"a mean that may be {limit} long")


def _check_gradients(begin: RoundBegin) -> None:
    if begin.whole and begin.source not in begin.roster:
        raise PeerError(f"a round of {begin.source[:40]!r}'s model, who is not in it")
    if not begin.whole and (begin.source or not are_weights(begin.weights, len(begin.roster))):
        raise PeerError("a round of gradients whose weights no members have")
