"""How do two ends agree that large chunks travel beside their stream? Three messages after the greeting, and a trial.

    dialler                                    acceptor
    BulkOffer: mine is there       ─────▶      opens a lane to it
    opens a lane to it             ◀─────      BulkAnswer: and mine there, or why not
                      each sends something over the lane
    BulkAnswer, empty: it works    ─────▶      from now on its chunks go there too

After a refusal the next best is offered. Whatever goes wrong leaves the link as it was. An address comes from a peer
that has said who it is, never from a stranger: UCX, which reads one, was written for clusters, where nobody is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import trio

from peerd.effects import PeerError
from peerd.messages import BulkAnswer, BulkOffer, Message
from peerd.transport.lane import BulkLane, Fabric, LaneRefused
from peerd.transport.link import LinkLost

ANSWER_S = 5.0
PART_BYTES = 512  # the most that one field holds
ADDRESS_BYTES_MAX = 16 << 10  # one port's is 100 bytes


class Upgradable(Protocol):
    """What is needed of a link."""

    remote: str
    host: str
    admitted: bool

    @property
    def has_lane(self) -> bool:
        """Whether chunks may come over a lane."""

    def adopt(self, lane: BulkLane) -> None:
        """Let chunks come over a lane."""

    def widen(self) -> None:
        """Let chunks go over it."""

    async def send(self, message: Message) -> None:
        """Queue a message."""

    async def receive_any(self) -> Message:
        """Return the next message."""


async def ask(link: Upgradable, fabrics: Sequence[Fabric]) -> str:
    """Offer the acceptor lanes until it takes one; return why there is none, or "". Raises LinkLost or PeerError."""
    reasons = []
    for fabric in fabrics:
        if fabric.ended or not fabric.trusts(link.host):
            reasons.append(fabric.ended or fabric.outside.format(link.host))
            continue
        try:
            return await _offer(link, fabric)
        except LaneRefused as refusal:
            reasons.append(str(refusal))
    return "; ".join(filter(None, reasons))


async def _offer(link: Upgradable, fabric: Fabric) -> str:
    """Return why nothing came of it, or "". Raises LaneRefused when there may be another offer."""
    here = fabric.reserve()
    try:
        with trio.fail_after(ANSWER_S):
            await link.send(BulkOffer(fabric.version, here, _parts(fabric.address(here))))
            answer = await link.receive_any()
        if not isinstance(answer, BulkAnswer):
            raise PeerError(f"{link.remote}: a {type(answer).__name__} instead of an answer to an offer")
        if answer.refusal:  # it goes into our log
            raise LaneRefused(answer.refusal if answer.refusal.isprintable() else repr(answer.refusal))
        try:
            lane = fabric.open(link.remote, here, answer.lane, _whole(answer.address))
        except LaneRefused as refusal:
            return str(refusal)  # the acceptor has its end already
    except trio.TooSlowError:
        return f"no answer within {ANSWER_S:g} s"  # it may come yet
    finally:
        fabric.abandon(here)
    link.adopt(lane)
    return await _trial(link, lane)


async def _trial(link: Upgradable, lane: BulkLane) -> str:
    """Use the lane from now on if it works; return why it does not, or ""."""
    try:
        with trio.fail_after(ANSWER_S):
            await lane.tried()
    except trio.TooSlowError:
        failure = f"{lane.name}: nothing came through within {ANSWER_S:g} s"
    except LinkLost as lost:
        failure = str(lost)
    else:
        await link.send(BulkAnswer("", 0, ()))
        link.widen()
        return ""
    lane.close(LinkLost(failure))
    return failure


def answer(link: Upgradable, fabrics: Sequence[Fabric], offer: BulkOffer) -> BulkAnswer:
    """Return what the acceptor says to an offer, having opened the lane if it takes it. Raises PeerError."""
    if not link.admitted or link.has_lane:
        raise PeerError(f"{link.remote}: an offer {'twice' if link.admitted else 'before the greeting'}")
    fabric = next((fabric for fabric in fabrics if fabric.version == offer.version), None)
    if fabric is None:
        ours = ", ".join(fabric.version for fabric in fabrics)
        return _refusal(f"it has {ours or 'nothing beside the stream'}, we {offer.version}"[:250])
    if not fabric.trusts(link.host):
        return _refusal(f"it says: {fabric.outside.format(link.host)}")
    try:
        here = fabric.reserve()
        address = fabric.address(here)
        try:
            link.adopt(fabric.open(link.remote, here, offer.lane, _whole(offer.address)))
        finally:
            fabric.abandon(here)
    except LaneRefused as refused:
        return _refusal(f"it says: {refused}"[:250])
    return BulkAnswer("", here, _parts(address))


def _refusal(reason: str) -> BulkAnswer:
    return BulkAnswer(reason, 0, ())


def _parts(address: bytes) -> tuple[bytes, ...]:
    return tuple(address[start : start + PART_BYTES] for start in range(0, len(address), PART_BYTES))


def _whole(parts: tuple[bytes, ...]) -> bytes:
    if sum(map(len, parts)) > ADDRESS_BYTES_MAX:
        raise PeerError(f"an address of {sum(map(len, parts))} bytes")
    return b"".join(parts)
