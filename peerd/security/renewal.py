"""How does a node stay a member for longer than its certificate lives? It gets another one while the old one is good.

The key, and with it the id, stays. Connections that are open when a certificate ends stay open: whom they are to is
proved already.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import trio
from cryptography.x509 import Certificate

from peerd.local.node_key import NodeKey
from peerd.process.logs import LOGGER
from peerd.process.seldom import Seldom
from peerd.process.threads import in_thread
from peerd.security import authority_folder, kept, wall_clock
from peerd.security.authority import Authority, request_of
from peerd.security.certificates import Untrusted, der, renews_at
from peerd.security.enrolment import REASONS, Enrolment, checked
from peerd.security.entry import Entry
from peerd.transport.connection import ConnectionLost, Transport
from peerd.transport.errors import PeerError, UserError
from peerd.transport.ids import Address, shown
from peerd.transport.messages import Enrolled, EnrolmentRefused, RenewalRequest
from peerd.transport.patience import DIAL_TIMEOUT_S, GREETING_DEADLINE_S

ALL_AT_ONCE_S = 5.0  # the time over which they spread what they ask when the authority is replaced
AGAIN_S = 60.0  # then, where nobody gives any yet: issuers need another certificate first
LOOK_EVERY_S = 3600.0  # a machine that slept, or whose clock was set, is late by this at most


class Renewal:
    """That of one node's certificate."""

    def __init__(
        self, entry: Entry, key: NodeKey, state: Path, transport: Transport, issuers: Callable[[], list[Address]]
    ) -> None:
        """Kept in the folder `state`, where it is not made here; `issuers` are asked for when they are needed."""
        self._entry = entry
        self._key = key
        self._state = state
        self._transport = transport
        self._issuers = issuers
        self._touched = trio.Event()
        self._unkept: Enrolment | None = None  # in force, and not in the folder
        self._why_not = Seldom(LOOK_EVERY_S)  # it is asked for again within seconds where the authority is replaced

    async def run(self) -> None:
        """Renew it whenever two thirds of its life are over, until cancelled."""
        while True:
            self._touched, trust = trio.Event(), self._entry.trust
            await self._keep()
            pause_s = 0.0 if self._outdated else _good_for(trust.certificate).total_seconds()
            if pause_s <= 0:
                if self._outdated and self._entry.folder is None:  # all members ask, and nearly at once
                    await trio.sleep(random.uniform(0, ALL_AT_ONCE_S))
                renewed = await self.renewed()
                pause_s = 0.0 if renewed else LOOK_EVERY_S
                if self._outdated:  # who has just joined does not know the members yet
                    pause_s = AGAIN_S if self._issuers() else ALL_AT_ONCE_S
            with trio.move_on_after(min(pause_s, LOOK_EVERY_S)):
                await self._touched.wait()

    def look(self) -> None:
        """Whether another certificate is needed: the authorities in force have changed."""
        self._touched.set()

    @property
    def _outdated(self) -> bool:
        """Whether an authority is being replaced by whose word this node is a member, or issues what others have."""
        trust = self._entry.trust
        issues_under_old = bool(trust.newest) and self._is_issuer_yet and self._issues_under not in trust.newest
        return trust.outdated or issues_under_old

    @property
    def _is_issuer_yet(self) -> bool:
        return self._issues_under in self._entry.trust.authorities

    @property
    def _issues_under(self) -> Certificate | None:
        return self._entry.issuer.authority.root if self._entry.issuer else None

    async def renewed(self) -> bool:
        """Whether there is another certificate now; the log says why not, each reason once an hour."""
        trust, here = self._entry.trust, self._entry.issuer
        said = []
        if here is not None and self._entry.folder is not None:
            now, unread = wall_clock.now(), ""
            try:
                if trust.outdated and (made := authority_folder.load(self._entry.folder, now)) is not None:
                    here.authority.become(made)  # another node of this user has replaced it
            except UserError as error:  # a disk may fail, or no descriptor be left: it is looked for again
                unread = str(error)
            if (end := here.authority.certificate.not_valid_after_utc) <= now:
                said.append(f"the authority in {self._entry.folder} ended {wall_clock.shown(end)}")
            else:
                chain = here.authority.issue_own(self._key, now)
                trust.renew(chain, trust.authorities)
                if not trust.outdated:
                    return _good_for(chain[0]) > timedelta(0)
                replaced = "has an authority that was replaced on another machine; copy that one"
                said.append(unread or f"{self._entry.folder} {replaced}")
        second: Enrolment | None = None  # of another such issuer, which cannot renew what this one issues by
        plain: Enrolment | None = None  # of one of the new authority, before that itself has made this one an issuer
        for address in self._issuers():
            try:
                got = await self._ask(address)
                if here is not None and got.issuer == here.authority.certificate:
                    second = second or got
                    continue
                if here is not None and got.issuer is None:
                    plain = plain or (got if self._entry.folder is None else None)
                    raise Untrusted(f"{shown(address)}: not the new authority itself, which alone makes issuers")
                await self._take(got)
                return True
            except (ConnectionLost, PeerError, UserError) as error:
                said.append(str(error))
        is_due = trust.outdated or _good_for(trust.certificate) <= timedelta(0)
        if (best := second or plain) is not None and is_due:
            await self._take(best)
            return True
        why = "; ".join(said) or "no member issues any now"
        if not self._why_not.is_news(why, now=trio.current_time()):
            return False
        begins, ends = (
            wall_clock.shown(one)
            for one in (trust.certificate.not_valid_before_utc, trust.certificate.not_valid_after_utc)
        )
        if wall_clock.now() < trust.certificate.not_valid_before_utc:
            text = "this node's certificate begins at %s, and here it is %s: set this machine's clock (not renewed: %s)"
            LOGGER.warning(text, begins, wall_clock.shown(wall_clock.now()), why)
        elif not is_due:
            LOGGER.warning("this node's authority is being replaced, and it is no issuer of the new one yet: %s", why)
        else:
            LOGGER.warning("this node's certificate ends at %s, and is not renewed yet: %s", ends, why)
        return False

    async def _take(self, got: Enrolment) -> None:
        trust, here = self._entry.trust, self._entry.issuer
        trust.renew(got.chain, trust.authorities)
        if here is not None and got.issuer is not None:  # what it issues from now on may end later
            here.authority.become(Authority(self._key, got.issuer, got.authorities[0]))
        elif here is not None and self._is_issuer_yet:  # started again it may be made one of the new authority, too
            both = (*got.authorities, here.authority.root)
            got = replace(got, issuer=here.authority.certificate, authorities=both)
        LOGGER.info("the certificate is renewed until %s", wall_clock.shown(got.chain[0].not_valid_after_utc))
        self._unkept = got
        await self._keep()

    async def _keep(self) -> None:
        if self._unkept is None:
            return
        try:
            await in_thread(partial(kept.write, self._state, self._unkept))
            self._unkept = None
        except UserError as error:  # the disk may have room later
            LOGGER.warning("the renewed certificate is this node's only while it runs, and cannot be kept: %s", error)

    async def _ask(self, address: Address) -> Enrolment:
        trust, here = self._entry.trust, self._entry.issuer
        try:
            with trio.fail_after(DIAL_TIMEOUT_S + GREETING_DEADLINE_S):
                connection = await self._transport.dial(address)
                try:
                    issuer = der(here.authority.certificate) if here else b""
                    await connection.send(RenewalRequest(request_of(self._key), tuple(map(der, trust.chain)), issuer))
                    answer = await connection.receive()
                finally:
                    await connection.aclose()
        except trio.TooSlowError:
            raise ConnectionLost(f"{shown(address)}: no answer") from None
        if isinstance(answer, EnrolmentRefused) and answer.reason in REASONS:
            raise PeerError(f"{connection.remote}: {REASONS[answer.reason][0]}")
        if not isinstance(answer, Enrolled):
            raise PeerError(f"{connection.remote}: a {type(answer).__name__} instead of a certificate")
        try:
            got = checked(answer, self._key, trust.authorities, wall_clock.now())
            if _good_for(got.chain[0]) <= timedelta(0):
                raise Untrusted("good for no longer than this node's")
            if self._outdated and got.authorities[0] not in trust.newest:
                raise Untrusted("of the authority that is being replaced")
        except Untrusted as error:
            raise Untrusted(f"{connection.remote}: the certificate that it sent is {error}") from None
        if here and not got.issuer and got.authorities[0] == here.authority.root:
            return replace(got, issuer=here.authority.certificate)
        return got


def _good_for(certificate: Certificate) -> timedelta:
    """How long until it is to be renewed; nothing where the clock says that it has not begun, for it was set back."""
    now = wall_clock.now()
    return renews_at(certificate) - now if now >= certificate.not_valid_before_utc else timedelta(0)
