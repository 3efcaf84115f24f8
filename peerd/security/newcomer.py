"""How does a node without a certificate get in? It asks at the addresses of its token, before it listens itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

import trio
from cryptography.x509 import Certificate

from peerd.local.node_key import NodeKey
from peerd.security import wall_clock
from peerd.security.certificates import Untrusted
from peerd.security.enrolment import REASONS, REVOKED, Enrolment, asked, authority_shown, checked
from peerd.security.token import EXPIRED, USED_UP, WRONG_SECRET, Token
from peerd.security.trust import Newcomer
from peerd.transport.connection import Connection, ConnectionLost
from peerd.transport.errors import PeerError, UserError
from peerd.transport.ids import Address, shown
from peerd.transport.messages import AuthorityShown, Enrolled, EnrolmentRefused, Message
from peerd.transport.patience import GREETING_DEADLINE_S, PATIENCE_S, RETRY_FIRST_S, RETRY_MAX_S
from peerd.transport.printable import printable
from peerd.transport.secure.credentials import Credentials

Dial = Callable[[Credentials, Address], Awaitable[Connection]]


class Unanswered(UserError):
    """It was asked for, and nobody refused it: the token may be used up by this key, which alone may ask again."""


async def enrolled(token: Token, key: NodeKey, dial: Dial, asking: Callable[[], None] = lambda: None) -> Enrolment:
    """Turn a token into a certificate for this key. Raises UserError: one line, with what each address said.

    It raises Unanswered where the token may have been used, for this key alone; `asking` is called before that can be.
    Who cannot be reached, or is too busy, is tried again for PATIENCE_S.
    """
    said: dict[Address, PeerError | ConnectionLost] = {}
    unanswered = False
    pause_s, until = RETRY_FIRST_S, trio.current_time() + PATIENCE_S
    while True:
        for address in token.addresses:
            if isinstance(said.get(address), PeerError):
                continue
            try:
                return await _ask(token, key, dial, address, asking)
            except (PeerError, ConnectionLost) as error:
                said[address] = error
                unanswered |= isinstance(error, _Silent | _Unfit)
                if isinstance(error, _Refused):  # by who made the token; the others made none
                    raise (Unanswered if unanswered else UserError)(_why_not({address: error})) from None
        tried_again = any(isinstance(error, ConnectionLost) for error in said.values())
        if not tried_again or trio.current_time() + pause_s > until:
            raise (Unanswered if unanswered else UserError)(_why_not(said))
        await trio.sleep(pause_s)
        pause_s = min(2 * pause_s, RETRY_MAX_S)


async def _ask(token: Token, key: NodeKey, dial: Dial, address: Address, asking: Callable[[], None]) -> Enrolment:
    credentials = Newcomer()
    connection = await dial(credentials, address)
    try:
        leaf, authority = await _shown(token, connection, credentials)
        asking()
        await connection.send(asked(token, key, leaf))
        try:
            answer = await _answer(connection)
        except ConnectionLost as lost:
            raise _Silent(*lost.args) from None
        if not isinstance(answer, Enrolled):
            raise PeerError(f"{connection.remote}: a {type(answer).__name__} instead of a certificate")
        try:
            return checked(answer, key, [authority], wall_clock.now())
        except Untrusted as error:
            raise _Unfit(f"the certificate that it sent is {error}") from None
    finally:
        await connection.aclose()


async def examine(token: Token, dial: Dial, address: Address) -> None:
    """Whether who has the token would believe the node at this address; it is not used.

    Raises Untrusted; PeerError where it lets nobody in; ConnectionLost.
    """
    credentials = Newcomer()
    connection = await dial(credentials, address)
    try:
        await _shown(token, connection, credentials)
    finally:
        await connection.aclose()


async def _shown(token: Token, connection: Connection, credentials: Newcomer) -> tuple[Certificate, Certificate]:
    """The certificates of the other end and of its authority, which is the token's. Raises PeerError."""
    try:
        first = await _answer(connection)
    except _Refused as refused:  # of one that has shown no authority yet: it may be anybody
        raise PeerError(f"{connection.remote}: {refused}") from None
    if not isinstance(first, AuthorityShown):
        raise PeerError(f"{connection.remote}: a {type(first).__name__} before anything was asked")
    if credentials.shown is None:
        raise PeerError(f"{connection.remote} has shown no certificate")
    try:
        return credentials.shown, authority_shown(token, first, credentials.shown, wall_clock.now())
    except Untrusted as error:
        raise Untrusted(f"its certificate is {error}") from None


async def _answer(connection: Connection) -> Message:
    """Raises _Refused."""
    try:
        with trio.fail_after(GREETING_DEADLINE_S):
            message = await connection.receive()
    except trio.TooSlowError:
        raise ConnectionLost(f"{connection.remote}: no answer within {GREETING_DEADLINE_S:g} s") from None
    if isinstance(message, EnrolmentRefused):
        why = REASONS[message.reason][0] if message.reason in REASONS else f"it says {message.reason}"
        raise (_Refused if message.reason in (EXPIRED, USED_UP, WRONG_SECRET, REVOKED) else PeerError)(why)
    return message


class _Silent(ConnectionLost):
    """It was gone after it had been asked."""


class _Unfit(Untrusted):
    """It was granted, and what came is of no use here: a clock may be wrong, which is set then."""


class _Refused(PeerError):
    """It knows the token, and will not take it."""


def _why_not(said: dict[Address, PeerError | ConnectionLost]) -> str:
    answers = []
    for address, error in said.items():
        where, what = shown(address), printable(str(error))
        answers.append(what if where in what else f"{where}: {what}")
    return f"not let in: {'; '.join(answers)}; {cure(said.values())}"


def cure(errors: Collection[PeerError | ConnectionLost]) -> str:
    """What may help where these kept a newcomer out."""
    if any("here it is" in str(error) for error in errors):
        return "set the clocks of both machines"
    if any(isinstance(error, Untrusted) for error in errors):
        return "is it another swarm's node, or was its authority replaced since (peerd rotate)? Then make another token"
    if any(isinstance(error, ConnectionLost) for error in errors):
        return "does the node that made the token run, and can this machine reach it?"
    return "make another token with peerd token on that node"
