"""How do two ends agree that large chunks travel beside their stream? Three messages after the greeting, and a trial.

    dialler                                    acceptor
    BulkOffer: mine is there       ─────▶      opens a channel to it
    opens a channel to it          ◀─────      BulkAnswer: and mine there, or why not
                      each sends something over the channel
    BulkAnswer, empty: it works    ─────▶      from now on its chunks go there too

After a refusal the next best is offered. Whatever goes wrong leaves the connection as it was. Addresses are read only
from peers that have said who they are: UCX was written for clusters, where nobody is a stranger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import trio

from peerd.transport.bulk import BulkChannel, BulkRefused, Fabric
from peerd.transport.connection import ConnectionLost
from peerd.transport.errors import PeerError
from peerd.transport.messages import BulkAnswer, BulkOffer, Message

ANSWER_S = 5.0
PART_BYTES, REASON_BYTES = 512, 256  # the most that a field of bytes, or of text, holds
ADDRESS_BYTES_MAX = 16 << 10  # one port's is 100 bytes


class Upgradable(Protocol):
    """What is needed of a connection."""

    remote: str
    host: str
    admitted: bool

    @property
    def has_channel(self) -> bool:
        """Whether chunks may come over a channel."""

    def enable_receive(self, channel: BulkChannel) -> None:
        """Let chunks come over a channel."""

    def enable_send(self) -> None:
        """Let chunks go over it."""

    async def send(self, message: Message) -> None:
        """Queue a message."""

    async def receive_any(self) -> Message:
        """Return the next message."""


async def ask(connection: Upgradable, fabrics: Sequence[Fabric]) -> str:
    """Offer the acceptor channels until it takes one; return why none, or "". Raises ConnectionLost, PeerError."""
    reasons = []
    for fabric in fabrics:
        if fabric.refuses or not fabric.trusts(connection.host):
            reasons.append(fabric.refuses or fabric.outside.format(connection.host))
            continue
        try:
            return await _offer(connection, fabric)
        except BulkRefused as refusal:
            reasons.append(str(refusal))
    return "; ".join(filter(None, reasons))


async def _offer(connection: Upgradable, fabric: Fabric) -> str:
    """Return why nothing came of it, or "". Raises BulkRefused when there may be another offer."""
    with fabric.reserved() as (here, address):
        try:
            with trio.fail_after(ANSWER_S):
                await connection.send(BulkOffer(fabric.version, here, _parts(address)))
                answer = await connection.receive_any()
        except trio.TooSlowError:
            return f"no answer within {ANSWER_S:g} s"  # it may come yet
        if not isinstance(answer, BulkAnswer):
            raise PeerError(f"{connection.remote}: a {type(answer).__name__} instead of an answer to an offer")
        if answer.refusal:  # it goes into our log
            raise BulkRefused(answer.refusal if answer.refusal.isprintable() else repr(answer.refusal))
        try:
            channel = fabric.open(connection.remote, here, answer.channel, _whole(answer.address))
        except BulkRefused as refusal:
            return str(refusal)  # the acceptor has its end already
    connection.enable_receive(channel)
    return await _trial(connection, channel)


async def _trial(connection: Upgradable, channel: BulkChannel) -> str:
    """Use the channel from now on if it works; return why it does not, or ""."""
    try:
        with trio.fail_after(ANSWER_S):
            await channel.tried()
    except trio.TooSlowError:
        failure = f"{channel.name}: nothing came through within {ANSWER_S:g} s"
    except ConnectionLost as lost:
        failure = str(lost)
    else:
        await connection.send(BulkAnswer("", 0, ()))
        connection.enable_send()
        return ""
    channel.close(ConnectionLost(failure))
    return failure


def answer(connection: Upgradable, fabrics: Sequence[Fabric], offer: BulkOffer) -> BulkAnswer:
    """Return what the acceptor says to an offer, having opened the channel if it takes it. Raises PeerError."""
    if not connection.admitted or connection.has_channel:
        raise PeerError(f"{connection.remote}: an offer {'twice' if connection.admitted else 'before the greeting'}")
    ours = [fabric for fabric in fabrics if fabric.trusts(connection.host)]
    fabric = next((fabric for fabric in ours if fabric.version == offer.version), None)
    if fabric is None:
        outside = "".join(fabric.outside for fabric in fabrics if fabric.version == offer.version).format(
            connection.host
        )
        return refusal(f"it says: {outside}" if outside else _difference(ours, offer))
    try:
        with fabric.reserved() as (here, address):
            connection.enable_receive(fabric.open(connection.remote, here, offer.channel, _whole(offer.address)))
    except BulkRefused as refused:
        return refusal(f"it says: {refused}")
    return BulkAnswer("", here, _parts(address))


def _difference(ours: list[Fabric], offer: BulkOffer) -> str:
    """Only what a host that is trusted may know."""
    kinds = [_kind(fabric.version) for fabric in ours]
    if _kind(offer.version) in kinds:
        return "it is of another user, or in other namespaces"
    return f"it has {', '.join(kinds)}, not {_kind(offer.version)}" if kinds else "it has nothing beside the stream"


def _kind(version: str) -> str:
    return " ".join(version.split()[:2])


def refusal(reason: str) -> BulkAnswer:
    """No channel, and why."""
    return BulkAnswer(reason.encode()[:REASON_BYTES].decode(errors="ignore"), 0, ())


def _parts(address: bytes) -> tuple[bytes, ...]:
    return tuple(address[start : start + PART_BYTES] for start in range(0, len(address), PART_BYTES))


def _whole(parts: tuple[bytes, ...]) -> bytes:
    if sum(map(len, parts)) > ADDRESS_BYTES_MAX:
        raise PeerError(f"an address of {sum(map(len, parts))} bytes")
    return b"".join(parts)
