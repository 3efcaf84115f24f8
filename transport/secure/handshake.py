"""Who is at the other end, and with which keys is the rest sealed? TLS 1.3 first, then records of our own.

TLS runs in memory, over any `ByteStream`. Once an end knows who the other is, it says so inside TLS: with its share of
the secrets, or with why it will have nothing to do with it. That matters, as in TLS 1.3 the dialler is done before the
acceptor has seen its certificate. What an end sends after its share is records (records.py), of which OpenSSL, which
takes from its input exactly the records of TLS, never sees any: both ends leave TLS there, and none of its messages
can follow.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NoReturn, TypeVar

from peerd.transport.connection import ConnectionLost
from peerd.transport.errors import PeerError, cause
from peerd.transport.framing import MAGIC, frames
from peerd.transport.hello import Refused
from peerd.transport.messages import Refuse
from peerd.transport.printable import printable
from peerd.transport.secure import reasons
from peerd.transport.secure.credentials import Credentials, PutOut
from peerd.transport.secure.records import SHARE_BYTES, Secrets
from peerd.transport.secure.sealed_channel import SealedChannel
from peerd.transport.secure.sealed_stream import SealedStream
from peerd.transport.stream import ByteStream, Sealed

ALPN = "peerd/1"
HANDSHAKE_BYTES_MAX = 64 << 10  # received; a chain of certificates is 1 KiB
READ_BYTES = 4 << 10
REASON_BYTES_MAX = 200
PIECE_BYTES = 255  # of a proof; a revocation with its issuer's certificate takes three
_SHARE, _REFUSAL, _PROOF = 1, 2, 3  # what is said inside TLS begins with one of these, and its length

T = TypeVar("T")


async def shake_hands(stream: ByteStream, remote: str, credentials: Credentials, *, dialled: bool) -> Sealed:
    """Return what is sealed from now on, and who is at its other end.

    Raises Refused where one end does not take the other, PeerError where the other end broke the rules, ConnectionLost
    where it is gone. It waits for as long as it is let.
    """
    try:
        context = credentials.context(server=not dialled)
    except ssl.SSLError:
        raise
    except OSError as error:  # no descriptor is left here: the other end has nothing to do with it
        raise ConnectionLost(f"{remote}: no handshake, for this node lacks what it takes ({cause(error)})") from None
    context.set_alpn_protocols([ALPN])
    tls = _Tls(stream, remote, context, dialled)
    await tls.run(tls.ends.do_handshake)
    if tls.ends.selected_alpn_protocol() != ALPN:
        raise PeerError(f"{remote}: it speaks TLS, but is no node of peerd")
    certificate = tls.ends.getpeercert(binary_form=True)
    try:
        identity = credentials.identity(certificate)
    except PeerError as error:
        await tls.refuse(error)
        _refuse(remote, str(error))
    ours = os.urandom(SHARE_BYTES)
    if not dialled:
        await tls.say(_SHARE, ours)
    theirs = await tls.hear_share()
    if dialled:  # only now: an acceptor that refuses us closes without having received what it does not want
        await tls.say(_SHARE, ours)
    try:  # whoever was revoked while it took its time is not closed with those that were open then
        credentials.identity(certificate)
    except PeerError as error:
        _refuse(remote, str(error))
    shares = (ours, theirs) if dialled else (theirs, ours)
    of_stream, of_bulk = (Secrets.of(purpose, *shares, dialled=dialled) for purpose in ("stream", "bulk"))
    sealed = SealedStream(stream, of_stream, tls.incoming.read())
    return Sealed(sealed, identity, partial(SealedChannel, secrets=of_bulk))


class _Tls:
    """One end of TLS, and the stream under it."""

    def __init__(self, stream: ByteStream, remote: str, context: ssl.SSLContext, dialled: bool) -> None:
        self.incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.ends = context.wrap_bio(self.incoming, self._outgoing, server_side=not dialled)
        self._stream = stream
        self._remote = remote
        self._received = 0

    async def run(self, step: Callable[[], T]) -> T:
        """Take a step of TLS, sending and receiving what it needs. Raises Refused, PeerError or ConnectionLost."""
        while True:
            try:
                done = step()
            except ssl.SSLWantReadError:
                await self._send(self._outgoing.read())
                await self._receive()
            except ssl.SSLError as error:
                await self._send(self._outgoing.read())  # an alert: the other end is to know as well
                self._explain(error)
            else:
                await self._send(self._outgoing.read())
                return done

    async def say(self, what: int, text: bytes) -> None:
        """Send what the other end's `hear_share` understands."""
        await self.run(partial(self.ends.write, bytes((what, len(text))) + text))

    async def refuse(self, error: PeerError) -> None:
        """Say why, and prove it to who was put out; an empty piece is the last."""
        await self.say(_REFUSAL, str(error).encode()[:REASON_BYTES_MAX])
        if isinstance(error, PutOut):
            for start in range(0, len(error.proof), PIECE_BYTES):
                await self.say(_PROOF, error.proof[start : start + PIECE_BYTES])
            await self.say(_PROOF, b"")

    async def hear_share(self) -> bytes:
        """Return the other end's share. Raises Refused with its reason if it will not have us."""
        what, length = await self._read(2)
        text = await self._read(length)
        if what == _REFUSAL:
            why = printable(text.decode(errors="replace"))
            _refused(self._remote, why, await self._hear_proof() if reasons.is_put_out(why) else b"")
        if what != _SHARE or length != SHARE_BYTES or self.ends.pending():
            raise PeerError(f"{self._remote}: no share of a key in its handshake")
        return text

    async def _hear_proof(self) -> bytes:
        """Of a refusal, as far as it comes."""
        proof = b""
        with suppress(ConnectionLost, PeerError):
            while True:
                what, length = await self._read(2)
                if what != _PROOF or not length:
                    break
                proof += await self._read(length)
        return proof

    async def _read(self, count: int) -> bytes:
        read = b""
        while len(read) < count:
            some = await self.run(partial(self.ends.read, count - len(read)))
            if not some:
                raise ConnectionLost(f"{self._remote}: closed by the peer during the handshake")
            read += some
        return read

    async def _send(self, data: bytes) -> None:
        while data:
            try:
                data = data[self._stream.send_some([data]) :]
            except BlockingIOError:
                await self._stream.wait_sendable()

    async def _receive(self) -> None:
        buffer = memoryview(bytearray(READ_BYTES))
        while True:
            try:
                count = self._stream.receive_some(buffer)
                break
            except BlockingIOError:
                await self._stream.wait_receivable()
        if not count:
            raise ConnectionLost(f"{self._remote}: closed by the peer during the handshake")
        if not self._received and buffer[: len(MAGIC)] == MAGIC:
            await self._refuse_plaintext()
        self._received += count
        if self._received > HANDSHAKE_BYTES_MAX:
            raise PeerError(f"{self._remote}: a handshake of more than {HANDSHAKE_BYTES_MAX} bytes")
        self.incoming.write(buffer[:count])

    async def _refuse_plaintext(self) -> NoReturn:
        """Of a node that speaks without TLS we say so; to one that dialled we say it in its own language."""
        if self.ends.server_side:
            await self._send(b"".join(map(bytes, frames(Refuse("encryption", "on", "off")))))
            text = f"refused {self._remote}: its encryption is 'off', ours 'on'"
            raise Refused(text, Refuse("encryption", "on", "off"))
        text = f"{self._remote} refused this node: its encryption is 'off', ours 'on'"
        raise Refused(text, Refuse("encryption", "off", "on"))

    def _explain(self, error: ssl.SSLError) -> NoReturn:
        if (why := reasons.of_certificate(error)) is not None:
            _refuse(self._remote, why)
        if (why := reasons.of_alert(error)) is not None:
            if why == reasons.ANOTHER_AUTHORITY and self.ends.server_side:  # a newcomer sees our certificate first
                refuse = Refuse(reasons.field(why), "ours", why)
                raise Refused(f"{self._remote} dialled, and is {why} than this node", refuse) from None
            _refused(self._remote, why)
        if isinstance(error, ssl.SSLZeroReturnError | ssl.SSLEOFError):
            raise ConnectionLost(f"{self._remote}: closed by the peer during the handshake") from None
        raise PeerError(f"{self._remote}: its handshake is not TLS 1.3 as peerd speaks it") from None


def _refuse(remote: str, why: str) -> NoReturn:
    refuse = Refuse(reasons.field(why), "ours", why)
    raise Refused(f"refused {remote}: its certificate is {why}", refuse) from None


def _refused(remote: str, why: str, proof: bytes = b"") -> NoReturn:
    refuse = Refuse(reasons.field(why), why, "ours")
    raise Refused(f"{remote} refused this node: our certificate is {why}", refuse, proof) from None
