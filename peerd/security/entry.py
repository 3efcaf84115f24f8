"""Which swarm is a node of, when it starts? Decided by where it is bound, what it keeps and what it was told.

- Bound to loopback, without a token: of its user's own, with all other nodes of this user on this machine.
- It has an authority of its own, as the first node of a swarm has: of that one.
- It was let in before: of that swarm; a token that it has not used yet gets it another certificate there.
- It has a token: of the swarm of whoever made it.
- It was told of no other node: it is the first of a swarm of its own.
- Else it cannot get in anywhere, and its user is told how.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import trio
from cryptography.x509 import Certificate

from peerd.local import durable
from peerd.local.node_key import NodeKey
from peerd.process.logs import LOGGER
from peerd.security import authority_folder, certificates, kept, secrets_folder, wall_clock
from peerd.security.authority import Authority
from peerd.security.certificates import Untrusted, pin_of, renews_at
from peerd.security.enrolment import Enrolment
from peerd.security.newcomer import Dial, Unanswered, enrolled
from peerd.security.reception import Issuer
from peerd.security.secrets_folder import Kept
from peerd.security.token import Token
from peerd.security.token_store import TokenStore
from peerd.security.trust import Trust
from peerd.security.wall_clock import shown
from peerd.transport.errors import UserError
from peerd.transport.messages import Successor

AUTHORITY = "authority"
"""The folder in the state folder of a swarm's first node; whoever has it is the swarm's authority."""

_ASKED = "asked"
"""In a state folder: its key may have used up a token, and must stay (identity.taken), for it alone may do so again."""


_USED = "token.hex"
"""In a state folder: the id of the token by which its node was let in, and which may stay in the command line."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a node was told that says whose it is."""

    state: Path  # its folder
    users: Path  # the folder of the user's own authority
    loopback: bool  # it is bound where only this machine reaches it
    token: Token | None
    joins: bool  # it was told of another node


@dataclass(frozen=True, slots=True)
class Entry:
    """What a node has to show, and to give."""

    trust: Trust
    issuer: Issuer | None  # where it may let others in
    by: str  # how it came to it, in a few words
    folder: Path | None  # of its authority, where that is here

    def summary(self) -> dict[str, str]:
        """What `peerd info` shows of it."""
        certificate = self.trust.certificate
        return {
            "member_by": self.by,
            "authority": pin_of(self.trust.authorities[0]).hex(),
            "certificate_until": shown(certificate.not_valid_after_utc),
            "certificate_renews": shown(renews_at(certificate)),
        }


async def entered(told: Told, key: NodeKey, dial: Dial) -> Entry:
    """What this node is a member by. Raises UserError, in one line, where it is none and cannot become one."""
    now = wall_clock.now()
    own = told.state / AUTHORITY
    if told.loopback and told.token is None and not keeps_good(told.state, key):
        return _of_own(told.users, key, "the user's own authority")
    if told.loopback and told.token and _is_users(told.token, told.users, now):
        return _of_own(told.users, key, "the user's own authority")
    if (founded := authority_folder.load(own, now)) is not None:
        _check_token(told, founded.certificate, authority_folder.successors(own))
        return _of_own(own, key, "its own authority")
    if (before := kept.read(told.state, key)) is not None:
        of_swarm = secrets_folder.read(told.state)
        _check_token(told, before.authorities[0], of_swarm.successors)
        why_not = _why_not(before, of_swarm)
        if why_not is None and (told.token is None or told.token.id.hex() == _used(told.state)):
            return _let_in(told, key, before, "the certificate that it keeps")
        if told.token is None:
            clock = "set this machine's clock, or " if "here it is" in str(why_not) else ""
            raise UserError(f"{why_not}; {clock}give a new token: peerd token on a member")
        LOGGER.info("%s; asking for another one with the token", why_not or "this token is a new one")
    if told.token is not None:
        began, had_asked = trio.current_time(), (told.state / _ASKED).exists()

        def asking() -> None:
            with suppress(OSError):  # it is for `outlook` to say more
                (told.state / _ASKED).touch(0o600)

        try:
            got = await enrolled(told.token, key, dial, asking)
        except UserError as error:
            if not (had_asked or isinstance(error, Unanswered)):
                with suppress(OSError):
                    (told.state / _ASKED).unlink(missing_ok=True)
            if before is None or why_not is not None:
                raise
            LOGGER.warning("%s; going on with the certificate that this node has", error)
            return _let_in(told, key, before, "the certificate that it keeps")
        if before is not None and before.issuer is not None and got.issuer is None:
            still = certificates.signed(before.issuer, got.authorities[0])
            got = replace(got, issuer=before.issuer if still else None)
        kept.write(told.state, got)
        try:
            durable.replace(told.state / _USED, told.token.id.hex())
            (told.state / _ASKED).unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{told.state}: {error.strerror}") from None
        LOGGER.info("let in with a token in %.2f s; this node needs it no more", trio.current_time() - began)
        made_at, here = certificates.made_at(got.chain[0]), wall_clock.now()
        if here - made_at > certificates.CLOCKS_DIFFER:
            told_late = "it is %s at the node that let this one in, and here %s: set the clocks of both machines"
            LOGGER.warning(told_late, wall_clock.shown(made_at), wall_clock.shown(here))
        return _let_in(told, key, got, "a token")
    if told.joins:
        raise UserError(
            "this node is no member of that swarm yet: run peerd token there, and give this node what it prints with "
            "--token (or start all nodes with --insecure-plaintext)"
        )
    LOGGER.info("the first node of a new swarm: its authority is in %s", own)
    return _of_own(own, key, "its own authority")


def keeps_good(state: Path, key: NodeKey) -> bool:
    """Whether a token let this node into another authority's swarm, where it still is a member."""
    before = kept.read(state, key)
    return before is not None and _why_not(before, secrets_folder.read(state)) is None


def _of_own(folder: Path, key: NodeKey, by: str) -> Entry:
    now = wall_clock.now()
    here = authority_folder.at(folder, now)
    trust = Trust(key, here.issue_own(key, now), (here.certificate,))
    return Entry(trust, Issuer(here, TokenStore(folder)), by, folder)


def _let_in(told: Told, key: NodeKey, enrolment: Enrolment, by: str) -> Entry:
    trust = Trust(key, enrolment.chain, enrolment.authorities)
    issuer = None
    for root in enrolment.authorities:  # of two, where one is being replaced, it may be an issuer of the old one yet
        if enrolment.issuer is not None and certificates.signed(enrolment.issuer, root):
            issuer = Issuer(Authority(key, enrolment.issuer, root), TokenStore(told.state))
    return Entry(trust, issuer, by, None)


def _used(state: Path) -> str:
    """The id of the token that this node was let in by; nothing where that is not known."""
    try:
        return (state / _USED).read_text()
    except (OSError, ValueError):
        return ""


def _why_not(before: Enrolment, of_swarm: Kept) -> str | None:
    """Why what was kept cannot be shown now. Raises UserError."""
    now = wall_clock.now()
    in_force = secrets_folder.succession(before.authorities, of_swarm.successors).in_force(now.timestamp())
    try:
        if {one.node for one in of_swarm.revocations} & certificates.issuers_of(before.chain[0]):
            return "this node's certificate is of an issuer that is revoked"
        if pin_of(before.authorities[0]) not in in_force:
            return "this node's certificate is of an authority that another one has replaced while it was off"
        certificates.check_chain(before.chain, before.authorities, now)
    except Untrusted as error:
        return f"this node's certificate is {error}"
    return None


def _is_users(token: Token, folder: Path, now: datetime) -> bool:
    found = authority_folder.load(folder, now)
    successors = authority_folder.successors(folder)
    return found is not None and token.pin in secrets_folder.succession([found.certificate], successors).known


def _check_token(told: Told, authority: Certificate, successors: Iterable[Successor]) -> None:
    """Whoever gives a token of another swarm may not know that this node is of one."""
    if told.token is None or told.token.pin in secrets_folder.succession([authority], successors).known:
        return
    raise UserError(
        f"the token is of the authority {told.token.pin.hex()[:16]}, and this node is a member under "
        f"{pin_of(authority).hex()[:16]}: give it another --name, or to leave that swarm for good remove {told.state} "
        f"(if the swarm's authority was replaced while this node was off, remove {told.state / kept.FILE})"
    )
