"""Whatever is done to sealed bytes on their way: the right bytes come out, in order, or the connection ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.transport.errors import Blameless, PeerError
from peerd.transport.messages import Chunk
from peerd.transport.secure import records
from peerd.transport.secure.records import OVERHEAD_BYTES, RECORD_MAX, SHARE_BYTES, Opener, Sealer, Secrets, length_of
from peerd.transport.secure.sealed_stream import SMALL, UNDUE_MAX, SealedStream

DIALLER, ACCEPTOR = (
    Secrets.of("test", b"d" * SHARE_BYTES, b"a" * SHARE_BYTES, dialled=dialled) for dialled in (True, False)
)


class Line:
    """A stream under a sealed one: takes and gives so many bytes a call, in turn; 0: it would block."""

    name, host, checked, midway = "line", "", True, False
    bytes_sent = bytes_received = 0

    def __init__(self, rates: Sequence[int] = (1 << 30,), carried: bytes = b"") -> None:
        self.carried = bytearray(carried)
        self._rates = rates
        self._calls = 0

    def _rate(self) -> int:
        self._calls += 1
        if not (rate := self._rates[self._calls % len(self._rates)]):
            raise BlockingIOError
        return rate

    def send_some(self, pieces: Sequence[Chunk]) -> int:
        (piece,) = pieces
        sent = piece[: self._rate()]
        self.carried += sent
        return len(sent)

    def receive_some(self, buffer: memoryview) -> int:
        count = min(self._rate(), len(buffer), len(self.carried))
        assert len(buffer), "there is room"
        buffer[:count] = self.carried[:count]
        del self.carried[:count]
        return count

    async def wait_sendable(self) -> None:
        raise NotImplementedError

    async def wait_receivable(self, due: int = 1) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def send(stream: SealedStream, pieces: Sequence[bytes]) -> None:
    """As StreamConnection does."""
    left = [memoryview(piece) for piece in pieces if piece]
    while left:
        try:
            sent = stream.send_some(left)
        except BlockingIOError:
            continue
        while sent:
            taken, left[0] = min(sent, len(left[0])), left[0][sent:]
            sent -= taken
            if not left[0]:
                left.pop(0)


def receive(stream: SealedStream, sizes: Sequence[int]) -> bytes:
    """All that comes, in buffers of so many bytes; BlockingIOError is tried again."""
    received, turn = b"", 0
    while True:
        buffer = memoryview(bytearray(sizes[turn % len(sizes)]))
        turn += 1
        try:
            count = stream.receive_some(buffer)
        except BlockingIOError:
            continue
        if not count:
            return received
        received += bytes(buffer[:count])


def sealed(pieces: Sequence[bytes], secrets: Secrets = DIALLER) -> bytes:
    line = Line()
    send(SealedStream(line, secrets), pieces)
    return bytes(line.carried)


def opened(carried: bytes, secrets: Secrets = ACCEPTOR) -> bytes:
    return receive(SealedStream(Line(carried=carried), secrets), [1 << 20])


def apart(carried: bytes) -> list[bytes]:
    found = []
    while carried:
        size = OVERHEAD_BYTES + length_of(memoryview(carried))
        found.append(carried[:size])
        carried = carried[size:]
    return found


@st.composite
def some_pieces(draw: st.DrawFn) -> list[bytes]:
    sizes = st.one_of(st.integers(0, 40), st.integers(0, 40_000), st.sampled_from([SMALL, SMALL + 1, UNDUE_MAX]))
    return [bytes([at % 251]) * size for at, size in enumerate(draw(st.lists(sizes, max_size=8)))]


rates = st.lists(st.sampled_from([0, 1, 3, 20, 21, 500, 5000, 1 << 30]), min_size=1, max_size=5).filter(
    lambda found: max(found) > 400
)


@given(some_pieces(), rates, rates, st.lists(st.integers(1, 300_000), min_size=1, max_size=4), st.integers(0, 16384))
@settings(max_examples=100, deadline=None)
def test_what_is_sent_arrives_however_it_is_cut(
    pieces: list[bytes], sending: list[int], receiving: list[int], sizes: list[int], early: int
) -> None:
    line = Line(sending)
    send(SealedStream(line, DIALLER), pieces)
    carried = bytes(line.carried)
    far = SealedStream(Line(receiving, carried[early:]), ACCEPTOR, carried[:early])
    if max(sizes) < 3000:
        sizes = [*sizes, 100_000]
    assert receive(far, sizes) == b"".join(pieces)


@given(some_pieces(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_bit_that_flips_ends_it(pieces: list[bytes], data: st.DataObject) -> None:
    carried = bytearray(sealed([b"first", *pieces]))
    at = data.draw(st.integers(0, 8 * len(carried) - 1))
    carried[at // 8] ^= 1 << at % 8
    whole, received = b"first" + b"".join(pieces), bytearray()
    with pytest.raises(PeerError):
        receive_until(SealedStream(Line(carried=bytes(carried)), ACCEPTOR), received)
    assert whole.startswith(received)
    assert len(received) < len(whole)


def receive_until(stream: SealedStream, received: bytearray) -> None:
    """Raises PeerError where a length grew, so that the rest of the record never comes, too."""
    buffer = memoryview(bytearray(1 << 20))
    while count := stream.receive_some(buffer):
        received += buffer[:count]
    if stream.midway:
        raise PeerError("it ended in the middle")


def disturbed(order: str, one: list[bytes]) -> list[bytes]:
    match order:
        case "swapped":
            return [one[0], one[2], one[1], one[3]]
        case "doubled":
            return [one[0], one[1], one[1], *one[2:]]
        case "left out":
            return [one[0], *one[2:]]
        case "cut":
            return [one[0], one[1][:-1], *one[2:]]
        case _:
            return [one[0], one[1] + b"\0", *one[2:]]


@pytest.mark.parametrize("order", ["swapped", "doubled", "left out", "cut", "longer"])
@pytest.mark.parametrize("size", [1, 20_000, UNDUE_MAX])
def test_records_come_in_the_order_in_which_they_were_sealed(order: str, size: int) -> None:
    line = Line()
    near = SealedStream(line, DIALLER)
    carried = []
    for at in range(4):
        send(near, [bytes([at]) * size])
        carried.append(bytes(line.carried))
        line.carried.clear()
    far = SealedStream(Line(carried=b"".join(disturbed(order, carried))), ACCEPTOR)
    buffer = memoryview(bytearray(size))
    assert far.receive_some(buffer) == size
    assert bytes(buffer) == bytes(size)
    if order in ("doubled", "longer"):
        assert far.receive_some(buffer) == size
    with pytest.raises(PeerError):
        receive_until(far, bytearray())


def test_what_was_sent_is_not_taken_back() -> None:
    """Neither by who sealed it, nor under another purpose, nor with what one other end has said."""
    carried = sealed([b"mine"])
    others = Secrets.of("other", b"d" * SHARE_BYTES, b"a" * SHARE_BYTES, dialled=False)
    another = Secrets.of("test", b"e" * SHARE_BYTES, b"a" * SHARE_BYTES, dialled=False)
    assert opened(carried) == b"mine"
    for secrets in (DIALLER, others, another):
        with pytest.raises(Blameless, match="a seal is broken"):
            opened(carried, secrets)


@pytest.mark.parametrize("length", [0, RECORD_MAX + 1, 0xFFFFFFFF])
def test_a_length_that_nobody_seals_is_refused_at_once(length: int) -> None:
    with pytest.raises(PeerError, match=f"a sealed record of {length} bytes"):
        opened(length.to_bytes(4, "little"))


def test_keys_change_at_both_ends_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "KEY_RECORDS", 3)
    sealer, opener = Sealer(DIALLER.sending), Opener(ACCEPTOR.receiving)
    record, plain = memoryview(bytearray(OVERHEAD_BYTES + 4)), memoryview(bytearray(4))
    ciphers = []
    for at in range(10):
        sealer.seal(b"%04d" % at, record)
        opener.open(record, plain)
        assert bytes(plain) == b"%04d" % at
        ciphers.append(sealer._key._cipher)
    assert [ciphers[at] is ciphers[at - 1] for at in range(1, 10)] == [at % 3 != 0 for at in range(1, 10)]


def test_a_chunk_begins_with_a_record() -> None:
    """So that it is opened straight into its own memory."""
    pieces = [b"h" * 32, bytes(3 * RECORD_MAX + 5), b"h" * 32, b"short", b"h" * 99, bytes(SMALL + 1)]
    sizes = [len(record) - OVERHEAD_BYTES for record in apart(sealed(pieces))]
    assert sizes[:4] == [32, RECORD_MAX, RECORD_MAX, RECORD_MAX]
    assert sizes[-1] == SMALL + 1
    assert sum(sizes) == sum(map(len, pieces))


@pytest.mark.parametrize("size", [RECORD_MAX - 1, RECORD_MAX, RECORD_MAX + 1, 3 * RECORD_MAX + 5])
def test_long_records_go_straight_to_where_they_are_due(size: int) -> None:
    message = bytes(range(256)) * (size // 256) + bytes(size % 256)
    far = SealedStream(Line([1 << 16], sealed([b"head", message])), ACCEPTOR)
    head, body = memoryview(bytearray(1000)), memoryview(bytearray(size))
    assert far.receive_some(head) == 4
    filled = 0
    while filled < size:
        filled += far.receive_some(body[filled:])
    assert body == message


def test_nobody_has_memory_set_aside_by_a_length_alone() -> None:
    carried = sealed([b"head", bytes(UNDUE_MAX + 1)])
    far = SealedStream(Line([1 << 16], carried), ACCEPTOR)
    buffer = memoryview(bytearray(1000))
    assert far.receive_some(buffer) == 4
    with pytest.raises(PeerError, match="where none is due"):
        far.receive_some(buffer)
