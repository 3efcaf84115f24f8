"""Who answers those who are not members yet, and members whose certificates end? Every node; issuers do more.

A stranger has one connection for one request, and is told of the authority and nothing else. Connections that have not
greeted are few (transport/admission.py), and so each of them may be a stranger's.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import trio
from cryptography.x509 import Certificate

from peerd.process.logs import LOGGER
from peerd.process.seldom import Seldom
from peerd.process.threads import in_thread
from peerd.security import wall_clock
from peerd.security.authority import Authority
from peerd.security.certificates import pin_of, read_der, signed
from peerd.security.enrolment import (
    BROKEN,
    NO_ISSUER,
    REASONS,
    REVOKED,
    expected_proof,
    granted,
    is_issuer_of,
    node_of,
    renewed_from,
    shown,
)
from peerd.security.token import UNKNOWN, WRONG_SECRET, Kept, Token
from peerd.security.token_store import TokenStore
from peerd.security.trust import Trust
from peerd.transport.connection import Connection
from peerd.transport.errors import Blameless, PeerError, UserError
from peerd.transport.ids import Address, NodeId
from peerd.transport.messages import EnrolmentRefused, EnrolmentRequest, RenewalRequest
from peerd.transport.patience import GREETING_DEADLINE_S

AT_ONCE_MAX = 4  # threads that wait for the disk


@dataclass(frozen=True, slots=True)
class Issuer:
    """What a node that lets others in has beside its own certificate."""

    authority: Authority
    tokens: TokenStore

    @property
    def has_ended(self) -> bool:
        """Whether it may issue nothing more: its own certificate is over."""
        return self.authority.certificate.not_valid_after_utc <= wall_clock.now()

    def token(self, addresses: tuple[Address, ...], uses: int, life_s: int, *, issues: bool) -> Token:
        """A new one, for who comes to the first of these addresses; waits for the disk. Raises UserError.

        At the others are members, by which a node that is let in already finds the swarm when this one is gone.
        """
        if self.has_ended:
            raise UserError(
                "the certificate by which this node lets others in has ended; only the first node renews it"
            )
        if issues and not self.authority.is_root:
            raise UserError("this node may not make others issuers; run peerd token --issuer on the swarm's first node")
        pin, now = pin_of(self.authority.root), int(wall_clock.now().timestamp())
        return self.tokens.make(addresses, pin, uses, life_s, now, issuer=issues)


class Reception:
    """The strangers of one node, and the members that want their certificates renewed."""

    def __init__(self, trust: Trust, issuer: Issuer | None) -> None:
        self._trust = trust
        self._issuer = issuer
        self._threads = trio.CapacityLimiter(AT_ONCE_MAX)
        self._seldom = Seldom()
        self.counts = {"enrolled": 0, "enrolments_refused": 0, "renewed": 0}

    @property
    def by(self) -> Issuer | None:
        """By what this node may let in now: of an authority in force, and the one by which it is a member itself."""
        by, trust = self._issuer, self._trust
        if by is None or by.has_ended or by.authority.root not in trust.authorities:
            return None
        return by if signed(trust.chain[-1], by.authority.root) else None

    async def enrol(self, connection: Connection) -> None:
        """Serve one stranger. Raises PeerError for who knows no secret of ours, ConnectionLost when it is gone."""
        if (by := self.by) is None:
            await self._refuse(connection, NO_ISSUER)
        chain = self._trust.chain
        await connection.send(shown(chain, by.authority.root))
        try:
            with trio.fail_after(GREETING_DEADLINE_S):
                request = await connection.receive()
        except trio.TooSlowError:
            raise Blameless(f"{connection.remote}: it asked for nothing within {GREETING_DEADLINE_S:g} s") from None
        if not isinstance(request, EnrolmentRequest):
            raise PeerError(f"{connection.remote}: a {type(request).__name__} of a node without a certificate")
        node = node_of(request.request)
        if self._trust.revoked(node):
            await self._refuse(connection, REVOKED)
        use = partial(self._use, by, chain[0], node, request)
        try:
            result = await in_thread(use, limiter=self._threads)
        except UserError as error:
            if self._seldom.is_news(str(error), now=trio.current_time()):  # anybody may ask, without a token
                LOGGER.error("cannot let %s in: %s", connection.remote, error)
            result = BROKEN
        if not isinstance(result, Kept):
            await self._refuse(connection, result)
        await self._grant(connection, request.request, by, issuer=result.issuer)
        self.counts["enrolled"] += 1
        text = "let in %s from %s with the token %s, which lets in %d more"
        LOGGER.info(text, node, connection.remote, result.id.hex(), result.left)

    async def renew(self, connection: Connection, request: RenewalRequest) -> None:
        """Give a member another certificate, which names the issuers of the one that it has. Raises PeerError."""
        node = node_of(request.request)
        if node != connection.identity:
            raise PeerError(f"{connection.remote}: it asks for the certificate of {node}")
        if (by := self.by) is None:
            await self._refuse(connection, NO_ISSUER)
        earlier = renewed_from(request, node, self._trust.authorities, wall_clock.now())
        if any(map(self._trust.revoked, earlier)):
            await self._refuse(connection, REVOKED)
        issues = bool(request.issuer) and is_issuer_of(read_der(request.issuer), node, self._trust.authorities)
        await self._grant(connection, request.request, by, issuer=issues, renewed_from=earlier)
        self.counts["renewed"] += 1

    @staticmethod
    def _use(issuer: Issuer, leaf: Certificate, node: NodeId, request: EnrolmentRequest) -> Kept | str:
        proof = partial(expected_proof, issuer.authority.root, leaf, request)
        now = int(wall_clock.now().timestamp())
        return issuer.tokens.use(request.token, node, proof, request.proof, now)

    async def _grant(
        self, connection: Connection, request: bytes, by: Issuer, *, issuer: bool, renewed_from: Collection[NodeId] = ()
    ) -> None:
        given = granted(by.authority, request, wall_clock.now(), issuer=issuer, renewed_from=renewed_from)
        await connection.send(given.message())
        await connection.flushed()

    async def _refuse(self, connection: Connection, reason: str) -> NoReturn:
        self.counts["enrolments_refused"] += 1
        await connection.send(EnrolmentRefused(reason))
        await connection.flushed()
        text = f"{connection.remote}: not let in: {REASONS[reason][1]}"
        raise PeerError(text) if reason in (UNKNOWN, WRONG_SECRET) else Blameless(text)
