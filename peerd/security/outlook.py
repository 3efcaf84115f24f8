"""What would a node be a member by, if it started now? For `peerd doctor`: it looks, and makes and asks nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime

from peerd.local import node_key
from peerd.local.node_key import NodeKey
from peerd.security import authority_folder, kept, secrets_folder, wall_clock
from peerd.security.authority import Authority
from peerd.security.certificates import Untrusted, check_chain, pin_of
from peerd.security.entry import AUTHORITY, Told, keeps_good
from peerd.security.trust import Trust
from peerd.security.wall_clock import shown
from peerd.transport.errors import UserError
from peerd.transport.messages import Successor

KEY = "key.pem"


def outlook(told: Told) -> tuple[str, str, str]:
    """`ok`, `note` or `fail`, what was found, and the cure."""
    now = wall_clock.now()
    try:
        if _is_users_own(told):
            return _of(authority_folder.load(told.users, now), "the user's own authority, for nodes of this machine")
        if (own := authority_folder.load(told.state / AUTHORITY, now)) is not None:
            return _of(own, "an authority of this node's own, which lets others in: peerd token")
        key = node_key.read(told.state / KEY)
        before = kept.read(told.state, key) if key else None
        if before is not None:
            check_chain(before.chain, before.authorities, now)
            ends, pin = shown(before.chain[0].not_valid_after_utc), pin_of(before.authorities[0])
            issues = "; it lets others in: peerd token" if before.issuer else ""
            retires = secrets_folder.succession(before.authorities, secrets_folder.read(told.state).successors)
            if (at := retires.retires_at(pin)) <= now.timestamp():
                raise Untrusted("of an authority that another one has replaced")
            until = "" if math.isinf(at) else shown(datetime.fromtimestamp(at, UTC))
            replaced = until and f" (in force until {until}: it is being replaced)"
            return "ok", f"a certificate until {ends}, of the authority {pin.hex()[:16]}{replaced}{issues}", ""
    except Untrusted as error:
        return (
            "fail",
            f"this node's certificate is {error}",
            "a new token, or set the clock",
        )
    except UserError as error:
        return "fail", str(error), ""
    if told.token is not None:
        if now.timestamp() > told.token.expires:
            return "fail", "the token has expired, by this machine's clock", "peerd token on a member makes another"
        return "ok", f"a token of the authority {told.token.pin.hex()[:16]}, not used yet", ""
    if told.joins:
        return "fail", "no certificate, and no token", "run peerd token on a member, and give this node --token"
    return "ok", "none yet: it would be the first node of a swarm, and its authority", ""


def credentials(told: Told) -> Trust | None:
    """What a question to members can be asked with; None where this machine has nothing that they would take."""
    now = wall_clock.now()
    try:
        folder = told.users if _is_users_own(told) else told.state / AUTHORITY
        if (here := authority_folder.load(folder, now)) is not None:
            asker = NodeKey.generate()
            return _with(
                Trust(asker, here.issue_own(asker, now), [here.certificate]), authority_folder.successors(folder)
            )
        key = node_key.read(told.state / KEY)
        before = kept.read(told.state, key) if key else None
        if not key or not before:
            return None
        return _with(Trust(key, before.chain, before.authorities), secrets_folder.read(told.state).successors)
    except UserError:
        return None


def _is_users_own(told: Told) -> bool:
    """Whether it would be a member by the user's own authority: as in `entered`."""
    if not told.loopback or told.token is not None:
        return False
    key = node_key.read(told.state / KEY)
    return key is None or not keeps_good(told.state, key)


def _with(trust: Trust, successors: Iterable[Successor]) -> Trust:
    trust.follow(secrets_folder.succession(trust.authorities, successors), wall_clock.now().timestamp())
    return trust


def _of(found: Authority | None, what: str) -> tuple[str, str, str]:
    if found is None:
        return "ok", f"{what}; it is made when the first one starts", ""
    return "ok", f"{what}: {pin_of(found.certificate).hex()[:16]}", ""
