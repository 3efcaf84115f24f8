"""The first two messages of every connection that is to last: who are you, and do we train the same thing?

The dialler sends Hello; the acceptor answers Welcome, or Refuse with the first thing that differs. Anything else,
silence included, closes the connection; but in place of greeting a dialler may measure the line
(transport/speed.py), or say what somebody else answers (`Instead`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, NoReturn

import trio

from peerd.transport import speed, wire
from peerd.transport.connection import Connection, ConnectionLost
from peerd.transport.errors import Blameless, Encrypted, PeerError
from peerd.transport.ids import NodeId
from peerd.transport.messages import NO_TLS, Hello, Message, Refuse, Welcome
from peerd.transport.patience import GREETING_DEADLINE_S

HELLO_MAX = 4 << 10  # bytes, but for the tensors
TENSORS_MAX = 48 << 10  # bytes of names, so that the whole stays under the 64 KiB of a header


Instead = Mapping[type[Message], Callable[[Connection, Any], Awaitable[None]]]
"""What serves those that did not come to greet, by what they say first."""


class Refused(PeerError):
    """The two ends cannot train together: `field` is `here` on the acceptor's side and `there` on the dialler's."""

    def __init__(self, text: str, refuse: Refuse, proof: bytes = b"") -> None:
        """`proof` is by whose word we are put out, where the other end has shown that: nobody has read it yet."""
        self.field, self.here, self.there = refuse.field, refuse.here, refuse.there
        self.proof = proof
        super().__init__(text)


async def greet(connection: Connection, hello: Hello) -> Welcome:
    """Introduce this node to whom it dialled; raises Refused when they differ. On any error it is closed."""
    try:
        await connection.send(hello)
        with _greeting_deadline(connection):
            answer = await connection.receive()
        if isinstance(answer, Welcome):
            check_identity(connection, answer.node)
            return answer
        if isinstance(answer, Refuse):
            _raise_refused(connection, answer)
        _unexpected(connection, answer)
    except BaseException:
        await connection.aclose()
        raise


async def answer(
    connection: Connection,
    check: Callable[[Hello], Refuse | None],
    me: Welcome,
    instead: Instead = MappingProxyType({}),
) -> Hello:
    """Let the dialler introduce itself, and welcome it if `check` has nothing against it.

    `instead` serves those that came for something else, by what they say first. Raises ConnectionLost when that is
    done, Refused when `check` has, PeerError when the dialler was silent or said something else. On any error it is
    closed; on success it is admitted.
    """
    try:
        with _greeting_deadline(connection):
            hello = await speed.serve(connection)
        if type(hello) in instead:
            await instead[type(hello)](connection, hello)
            raise ConnectionLost(f"{connection.remote}: has what it asked for")
        if not isinstance(hello, Hello):
            _unexpected(connection, hello)
        _check_size(connection, hello)
        check_identity(connection, hello.node)
        refuse = check(hello)
        if refuse is not None:
            await connection.send(refuse)
            who = f"{hello.name} at {connection.host}"  # it dialled from a port that nobody knows it by
            raise Refused(f"refused {who}: its {refuse.field} is {refuse.there!r}, ours {refuse.here!r}", refuse)
        await connection.send(me)
    except Encrypted:
        await connection.aclose()
        text = (
            f"refused {connection.host or connection.remote}: its encryption is {NO_TLS.there!r}, ours {NO_TLS.here!r}"
        )
        raise Refused(text, NO_TLS) from None
    except BaseException:
        await connection.aclose()  # which flushes the Refuse
        raise
    connection.admit()
    return hello


def first_difference(mine: Hello, theirs: Hello) -> Refuse | None:
    """Return why two nodes cannot train together, if so: `here` is from `mine`, `there` from `theirs`.

    An empty mode or model is not known yet, and no reason.
    """
    for field in ("protocol", "swarm", "run"):
        here, there = getattr(mine, field), getattr(theirs, field)
        if here != there:
            return Refuse(field, str(here), str(there))
    if mine.mode and theirs.mode and mine.mode != theirs.mode:
        return Refuse("mode", mine.mode, theirs.mode)
    if mine.model and theirs.model and mine.model != theirs.model:
        if mine.tensors and theirs.tensors:
            for here, there in zip_longest(mine.tensors, theirs.tensors, fillvalue="no such tensor"):
                if here != there:
                    return Refuse("model", here, there)
        return Refuse("model", mine.model, theirs.model)
    return None


def check_identity(connection: Connection, node: NodeId) -> None:
    """Raise PeerError where the other end calls itself `node` and has proved to be another."""
    if connection.identity is not None and node != connection.identity:
        raise PeerError(
            f"{connection.remote}: it says that it is {node}, and its certificate that it is {connection.identity}"
        )


async def measured(connection: Connection) -> float:
    """The bytes a second that come from the peer, as `speed.measure` has it; raises Refused where it refuses us."""
    try:
        return await speed.measure(connection)
    except speed.NoSample as error:
        if isinstance(error.message, Refuse):
            _raise_refused(connection, error.message)
        raise


def _raise_refused(connection: Connection, answer: Refuse) -> NoReturn:
    text = f"{connection.remote} refused this node: its {answer.field} is {answer.here!r}, ours {answer.there!r}"
    raise Refused(text, answer) from None


@contextmanager
def _greeting_deadline(connection: Connection) -> Iterator[None]:
    try:
        with trio.fail_after(GREETING_DEADLINE_S):
            yield
    except trio.TooSlowError:
        raise Blameless(f"{connection.remote}: no greeting within {GREETING_DEADLINE_S:g} s") from None


def _check_size(connection: Connection, hello: Hello) -> None:
    rest = len(wire.encode(replace(hello, tensors=()))[0])
    tensors = sum(len(tensor.encode()) for tensor in hello.tensors)
    if rest > HELLO_MAX or tensors > TENSORS_MAX:
        raise PeerError(f"{connection.remote}: a Hello of {rest} bytes and {tensors} bytes of tensors")


def _unexpected(connection: Connection, message: Message) -> NoReturn:
    raise PeerError(f"{connection.remote}: a {type(message).__name__} instead of a greeting")
