"""How a node gets in: token lines, certificates, requests, either end of an enrolment, the handshake before it.

Nobody comes to be certified, or to be believed, by what was changed.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import trio
from cast import NOW, TOKEN_USES, Cast, cast
from flights import FLIGHT_BYTES, Flight
from material import on_the_wire, pick
from mutate import altered, bent, packed
from trio.testing import MockClock

from peerd.security import certificates, token
from peerd.security.authority import request_of, requested_key
from peerd.security.certificates import Untrusted, der
from peerd.security.enrolment import asked, authority_shown, checked, expected_proof, node_of, shown
from peerd.security.newcomer import enrolled
from peerd.security.reception import Issuer, Reception
from peerd.security.token import Kept
from peerd.security.token_store import TokenStore
from peerd.security.trust import Newcomer
from peerd.transport import wire
from peerd.transport.connection import ConnectionLost
from peerd.transport.errors import PeerError, UserError
from peerd.transport.ids import Address
from peerd.transport.messages import AuthorityShown, Enrolled, EnrolmentRefused, EnrolmentRequest, Message
from peerd.transport.secure.credentials import STRANGER, Credentials

LINE, CERTIFICATE, REQUEST, SHOWN, GIVEN, ASKED, ANSWERED, FLIGHTS = range(8)
SHARES = (0.3, 0.55, 0.65, 0.75, 0.85, 0.9, 0.96, 1.0)


class Link:
    """A connection over which it is known what comes."""

    identity, remote = None, "the other end"

    def __init__(self, comes: list[Message]) -> None:
        self.said: list[Message] = []
        self._comes = comes

    async def receive(self) -> Message:
        if not self._comes:
            raise ConnectionLost("it has gone")
        return self._comes.pop(0)

    async def send(self, message: Message) -> None:
        self.said.append(message)

    async def flushed(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


class Entries:
    """One issuer. An item is what it is, then the bytes: of several messages a list of kinds and headers."""

    def __init__(self) -> None:
        logging.getLogger("peerd").setLevel(logging.CRITICAL)
        self._cast = cast()
        self._folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self._trust = self._cast.trust()
        store = TokenStore(self._folder)
        with store._changing() as tokens:
            made = self._cast.token
            tokens[made.id] = Kept(made.id, made.secret, TOKEN_USES, made.expires)
        self._reception = Reception(self._trust, Issuer(self._cast.root, store))
        self._leaf = self._trust.certificate

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def draw(self, rng: Random) -> bytes:
        drawn, who = rng.random(), self._cast
        what = next(number for number, share in enumerate(SHARES) if drawn < share)
        if what == LINE:
            return bytes([what]) + bent(rng, who.token.pack().encode(), b"peerd2.")
        if what == CERTIFICATE:
            found = who.certificates()
            chosen = bytearray(pick(rng, found))
            if rng.random() < 0.3:
                return bytes([what]) + bent(rng, bytes(chosen), pick(rng, found))
            chosen[int(rng.random() * len(chosen))] = int(rng.random() * 256)  # most lengths in it stay right
            return bytes([what]) + chosen
        if what == REQUEST:
            return bytes([what]) + bent(rng, request_of(who.newcomer))
        if what == FLIGHTS:
            how = bytes([int(rng.random() * 8)])
            for _ in range(int(rng.random() * 3)):
                at = int(rng.random() * FLIGHT_BYTES)
                how += bytes([int(rng.random() * 3), at >> 8, at & 255, int(rng.random() * 256)])
            return bytes([what]) + how
        told = _honest(who, self._leaf)
        if what == SHOWN:
            return bytes([what]) + _changed(rng, told[0])
        if what == GIVEN:
            return bytes([what]) + _changed(rng, pick(rng, told[2:]))
        messages = [told[1]] if what == ASKED else [told[0], pick(rng, told[2:])]
        rows = [[message.KIND, on_the_wire(message).header] for message in messages]
        at = int(rng.random() * len(rows))
        rows[at][1] = _changed(rng, messages[at])
        return bytes([what]) + packed(altered(rng, rows) if rng.random() < 0.2 else rows)

    def take(self, item: bytes) -> None:
        if not item:
            return
        what, data = item[0] % len(SHARES), item[1:]
        try:
            (self._line, self._certificate, self._request, self._shown, self._given, self._asked, self._answered,
             self._flights)[what](data)  # fmt: skip
        except (PeerError, UserError):
            return

    def _line(self, data: bytes) -> None:
        text = data.decode(errors="replace")
        assert token.parse(text).pack() == text.strip()

    def _certificate(self, data: bytes) -> None:
        found = certificates.read_der(data)
        certificates.is_authority(found)
        certificates.renews_at(found)
        root, sign = self._cast.root, self._cast.issuer.sign
        assert not self._trust.verify("p", b"m", sign("p", b"m"), data) or data == der(self._cast.issuer.certificate)
        certificates.check_chain([found], [root.root], NOW)
        assert self._trust.identity(data) in self._cast.ids, "somebody has certified itself"

    def _request(self, data: bytes) -> None:
        assert node_of(data) == certificates.id_of_key(requested_key(data))
        assert node_of(data) == self._cast.newcomer.id, "signed by nobody"

    def _shown(self, data: bytes) -> None:
        said = wire.decode(AuthorityShown.KIND, data, 0).message()
        assert isinstance(said, AuthorityShown)
        found = authority_shown(self._cast.token, said, self._leaf, NOW)
        assert certificates.pin_of(found) == self._cast.token.pin

    def _given(self, data: bytes) -> None:
        said = wire.decode(Enrolled.KIND, data, 0).message()
        assert isinstance(said, Enrolled)
        found = checked(said, self._cast.member, [self._cast.root.root], NOW)
        given = [list(map(der, each.chain)) for each in self._cast.let_in[:2]]
        assert list(map(der, found.chain)) in given, "nobody has signed this"
        assert found.issuer is None or certificates.id_of(found.issuer) == self._cast.member.id

    def _asked(self, data: bytes) -> None:
        messages = _messages(data)
        connection: Any = Link(messages[:])
        try:
            trio.run(partial(self._reception.enrol, connection))
        except ConnectionLost:
            pass
        finally:
            if any(isinstance(said, Enrolled) for said in connection.said):
                made, (request, *_) = self._cast.token, messages
                assert isinstance(request, EnrolmentRequest)
                proof = expected_proof(self._cast.root.root, self._leaf, request, made.secret)
                assert (request.token, request.proof) == (made.id, proof), "who knows no secret was let in"

    def _answered(self, data: bytes) -> None:
        messages = _messages(data)

        async def dial(credentials: Credentials, address: Address) -> Any:
            credentials.identity(der(self._leaf))
            return Link(messages)

        got = trio.run(enrolled, self._cast.token, self._cast.member, dial, clock=MockClock(autojump_threshold=0))
        assert certificates.id_of(got.chain[0]) == self._cast.member.id
        assert certificates.pin_of(got.authorities[0]) == self._cast.token.pin

    def _flights(self, data: bytes) -> None:
        comes_in = bool(data) and data[0] % 4 == 3
        touches = [data[at : at + 4] for at in range(1, len(data) - 3, 4)]
        dialler: Credentials = Newcomer() if comes_in else self._trust
        ends = Flight.between(dialler, self._trust, touches)
        for end in ends:
            expected = STRANGER if end is ends[1] and comes_in else self._cast.member.id
            assert end.identity in (None, expected), f"{end.identity} has shown no certificate"
            assert end.identity is not None or touches, "nothing was touched, and yet there is no connection"


def _honest(who: Cast, leaf: Any) -> list[Message]:
    """What both ends say: the authority, the request, the certificates, or why there are none."""
    first = asked(who.token, who.newcomer, leaf)
    given = [each.message() for each in who.let_in]
    return [shown(who.let_in[0].chain, who.root.root), first, *given, EnrolmentRefused("used-up")]


def _changed(rng: Random, message: Message) -> bytes:
    sample = on_the_wire(message)
    if rng.random() < 0.1:
        return sample.header
    return packed(altered(rng, sample.row)) if rng.random() < 0.7 else bent(rng, sample.header)


def _messages(data: bytes) -> list[Message]:
    """Those in an item. Raises PeerError for one that no decoder lets in."""
    try:
        rows = msgpack.unpackb(data)
        return [wire.decode(kind, header, 0).message() for kind, header in rows if type(header) is bytes]
    except (ValueError, TypeError, msgpack.UnpackException):
        raise Untrusted("no messages") from None
