"""An attacker: whoever can reach a node's port speaks the real wire, without any of the sender's checks.

A `Stranger` is no member. An `Insider` is one: it tells a valid record of itself, answers pings and takes connections,
as an honest node does, until its test has it do otherwise. Either speaks plainly, or with `Papers` as a member of a
sealed swarm, whose wire it then uses; a stranger with papers could be a member, and is none.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from types import TracebackType
from typing import Any

import msgpack
from papers import Blocking, Papers, sealed

from peerd.daemon.node import PROTOCOL
from peerd.node.meta import NodeMeta
from peerd.transport import framing, wire
from peerd.transport.connection import ConnectionLost
from peerd.transport.errors import PeerError
from peerd.transport.ids import Address
from peerd.transport.messages import (
    Ack,
    BulkAnswer,
    BulkOffer,
    Hello,
    Keys,
    Member,
    MemberTable,
    Message,
    Ping,
    Refuse,
    SecretsHeld,
    State,
    Welcome,
)
from peerd.transport.stream import ByteStream

HANG_S = 10.0  # a bound on waiting for the victim
HUGE = (1 << 53) - 1  # the largest number that any field may have


def row(value: Any) -> Any:
    """What a dataclass is on the wire, whatever its fields hold."""
    if is_dataclass(value):
        return [row(getattr(value, item.name)) for item in fields(value) if item.name != "chunks"]
    return [row(item) for item in value] if isinstance(value, tuple) else value


def frame(kind: int, header: bytes = b"", payload_length: int = 0, header_length: int | None = None) -> bytes:
    """A frame with a right checksum over what is there, whatever else is wrong."""
    length = len(header) if header_length is None else header_length
    fixed = struct.pack("<4sBBHIIQ4x", framing.MAGIC, wire.VERSION, kind, 0, length, payload_length, 0)
    return fixed + struct.pack("<I", zlib.crc32(header, zlib.crc32(fixed))) + header


def stream_bytes(message: Message, *, checked: bool = True) -> bytes:
    """A message as it travels over a connection; what is sealed has no `checked` chunks."""
    chunks = tuple(bytes(chunk) for chunk in getattr(message, "chunks", ()))
    bulk = any(item.name == "chunks" for item in fields(message))
    header: bytes = msgpack.packb([[len(chunk) for chunk in chunks], *row(message)] if bulk else row(message))
    return frame(message.KIND, header) + b"".join(
        framing.chunk_frame(chunk, checked=checked) + chunk for chunk in chunks
    )


def datagram_bytes(message: Message) -> bytes:
    """A message as it travels in a datagram, of the swarm that has no tag."""
    packed: bytes = msgpack.packb(row(message))
    return wire.DATAGRAM_PREFIX + bytes([message.KIND]) + packed


class Line:
    """One TCP connection, from either end."""

    def __init__(self, sock: socket.socket, papers: Papers | None = None, *, dialled: bool = True) -> None:
        """With papers, shake hands; raises OSError or PeerError."""
        self.sock = sock
        self._reader = framing.FrameReader(payload_limit=1 << 30)
        sock.settimeout(HANG_S)
        self._stream: ByteStream = Blocking(sock)
        if papers is not None:
            self._stream = sealed(self._stream, papers.credentials, dialled=dialled).stream
            self._reader.checked = False

    def say(self, *messages: Message) -> None:
        """Raises OSError when the victim has hung up."""
        self.raw(b"".join(stream_bytes(message, checked=self._reader.checked) for message in messages))

    def raw(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._stream.send_some([rest]) :]

    def hear(self) -> Message:
        """The next message; raises OSError when none comes, PeerError when it is none."""
        while (message := self._reader.next_message()) is None:
            count = self._stream.receive_some(self._reader.buffer())
            if not count:
                raise ConnectionError("hung up")
            self._reader.received(count)
        return message

    def is_cut(self, within_s: float) -> bool:
        """Whether the victim hangs up, whatever it says before."""
        self.sock.settimeout(within_s)
        try:
            while self.sock.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        self.sock.close()


class Stranger:
    """One without a place in the swarm: sockets of its own, and what anybody is told."""

    def __init__(self, id: str | None = None, name: str = "stranger", papers: Papers | None = None) -> None:
        """Papers say who it is."""
        self.papers = papers
        self.id = papers.id if papers else id or os.urandom(16).hex()
        self.name = name
        self._lines: list[Line] = []
        self.udp = self._bound()
        self.udp.settimeout(HANG_S)
        self.sent_bytes = 0

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for line in self._lines:
            line.close()
        self.udp.close()

    def _bound(self) -> socket.socket:
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", 0))
        return udp

    @property
    def address(self) -> Address:
        host, port = self.udp.getsockname()
        return host, port

    def shout(self, where: Address, *messages: Message) -> None:
        """A datagram each."""
        for message in messages:
            self.sent_bytes += self.udp.sendto(self._datagram(message), where)

    def _datagram(self, message: Message) -> bytes:
        plain = datagram_bytes(message)
        if self.papers is None:
            return plain
        datagram = self.papers.seal.seal(plain, b"")
        assert datagram is not None, "it has not learnt the key"
        return datagram

    def tell(self, where: Address, *records: Member) -> None:
        """News of members that answers nothing, a datagram for each."""
        self.shout(where, *(Ack(0, self.id, (record,)) for record in records))

    def call(self, where: Address) -> Line:
        """Connect, and say nothing; with papers, once hands are shaken."""
        sock = socket.create_connection(where, timeout=HANG_S)
        try:
            line = Line(sock, self.papers)
        except BaseException:
            sock.close()
            raise
        self._lines.append(line)
        return line

    def hello(self) -> Hello:
        host, port = self.address
        return Hello(PROTOCOL, "peerd", "", self.id, self.name, 1, host, port, "", "", ())

    def greet(self, where: Address) -> Line:
        """Connect, and be welcomed; raises OSError or PeerError when the victim will not."""
        line = self.call(where)
        line.say(self.hello())
        answer = line.hear()
        if not isinstance(answer, Welcome):
            raise PeerError(f"not welcome: {answer}")
        return line

    def offer(self, where: Address, *messages: Message) -> None:
        """Say these over a connection of their own; whether it is heard to its end is the victim's business."""
        with suppress(OSError, PeerError):
            self.greet(where).say(*messages)

    def learn(self, where: Address) -> dict[str, Member]:
        """The table that a node gives to whoever asks, by name."""
        return self._exchange(where)

    def _exchange(self, where: Address, *records: Member) -> dict[str, Member]:
        """A push-pull, and before it, with papers, what goes before it."""
        line = self.greet(where)
        if self.papers is not None:
            line.say(SecretsHeld(b"", b"", b""))
            while not isinstance(message := line.hear(), SecretsHeld):
                if isinstance(message, Keys):
                    self.papers.install(message)
        if records:
            line.say(MemberTable(self.id, records))
        line.say(MemberTable(self.id, ()))
        table: dict[str, Member] = {}
        while isinstance(part := line.hear(), MemberTable) and part.members:
            table |= {member.name: member for member in part.members}
        line.close()
        return table


class Insider(Stranger):
    """A member that is as good as any, until `misbehave` has it answer a message in its own way."""

    def __init__(
        self,
        like: Member,
        id: str | None = None,
        name: str = "insider",
        papers: Papers | None = None,
        *,
        refuses: Refuse | None = None,
    ):
        """`like` is an honest one: what it says of its model and its plan is said of this one, too."""
        super().__init__(id, name, papers)
        self.heard: list[tuple[str, Message]] = []  # over TCP, with who said it
        self.pinged_by: list[str] = []
        self.misbehave: Callable[[str, Message], None] = lambda sender, message: None
        self._refuses = refuses
        about = replace(NodeMeta.unpack(like.meta), founder=False, averaged=False, stands=False)
        host, port = self.address
        self.row = self.says(Member(self.id, name, host, port, 1, 0, State.ALIVE, "", about.pack()))
        self._ended = False
        for task in (self._answer_pings, self._accept):
            threading.Thread(target=task, daemon=True).start()

    def _bound(self) -> socket.socket:
        """The port of its listener, which may be another's for datagrams."""
        while True:
            self._listener = socket.create_server(("127.0.0.1", 0))
            udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                udp.bind(self._listener.getsockname())
                return udp
            except OSError:
                udp.close()
                self._listener.close()

    def __exit__(self, *arguments: Any) -> None:
        self._ended = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        super().__exit__(*arguments)

    def join(self, *where: Address) -> None:
        """Say who it is, by a push-pull as a newcomer's."""
        for each in where:
            self.learn(each)

    def learn(self, where: Address) -> dict[str, Member]:
        return self._exchange(where, self.row)

    def says(self, record: Member) -> Member:
        """A record of its own, as its swarm wants it."""
        return record if self.papers is None else self.papers.signed(record)

    def leave(self, *where: Address) -> None:
        """In good order."""
        self.row = self.says(replace(self.row, state=State.LEFT))
        for each in where:
            with suppress(OSError, PeerError):
                self.learn(each)

    def waits_for(self, kind: type[Message], sender: str, patience_s: float = HANG_S) -> Message | None:
        """The newest message of this type from that node; None when none comes."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            for told, message in reversed(self.heard[:]):
                if told == sender and isinstance(message, kind):
                    return message
            time.sleep(0.02)
        return None

    def _answer_pings(self) -> None:
        while not self._ended:
            try:
                datagram, source = self.udp.recvfrom(2048)
                if self.papers is not None:
                    datagram = self.papers.seal.open(datagram, b"")
                message = wire.decode_datagram(datagram)
            except TimeoutError:
                continue
            except PeerError:
                continue
            except OSError:
                return
            if isinstance(message, Ping):
                self.pinged_by.append(message.sender)
                with suppress(OSError):
                    self.udp.sendto(self._datagram(Ack(message.seq, self.id, (self.row,))), source)

    def _accept(self) -> None:
        while not self._ended:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            line = Line(sock, self.papers, dialled=False)
        except (OSError, PeerError, ConnectionLost):  # a victim that ends meanwhile
            sock.close()
            return
        line.sock.settimeout(None)
        self._lines.append(line)
        with suppress(OSError, PeerError, ValueError):
            hello = line.hear()
            if not isinstance(hello, Hello):
                return
            line.say(self._refuses or Welcome(self.id, self.name, self.row.epoch))
            while self._refuses is None:
                message = line.hear()
                if isinstance(message, BulkOffer):
                    line.say(BulkAnswer("none here", 0, ()))
                elif isinstance(message, SecretsHeld):
                    line.say(message)  # it holds the same
                elif isinstance(message, MemberTable) and not message.members:
                    line.say(MemberTable(self.id, (self.row,)), MemberTable(self.id, ()))
                else:
                    self.heard.append((hello.node, message))
                    self.misbehave(hello.node, message)
        line.close()
