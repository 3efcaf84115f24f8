"""A seal of datagrams: what is sealed opens once, everywhere but at home; whatever else comes opens nowhere."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.membership.dissemination import DATAGRAM_BYTES
from peerd.transport import wire
from peerd.transport.messages import Ack, Member, State
from peerd.transport.secure import datagrams
from peerd.transport.secure.datagrams import OVERHEAD, WINDOW, DatagramSeal, SealError, key_id
from peerd.transport.udp import UdpDatagrams, bind_udp

KEY, NEXT, OTHER = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))
TAG = b"\xffabc"
LOOPBACK = ("127.0.0.1", 0)


def seal(*keys: bytes) -> DatagramSeal:
    """It opens these, and seals with the first."""
    made = DatagramSeal()
    made.install(keys, keys[0])
    return made


def sealed(by: DatagramSeal, text: bytes = b"text", tag: bytes = TAG) -> bytes:
    datagram = by.seal(text, tag)
    assert datagram is not None
    return datagram


def refused(by: DatagramSeal, datagram: bytes, why: str, tag: bytes = TAG) -> None:
    before = by.counts[f"datagrams_{why}"]
    with pytest.raises(SealError, match=why):
        by.open(datagram, tag)
    assert by.counts[f"datagrams_{why}"] == before + 1


@given(st.lists(st.binary(max_size=1400), min_size=1, max_size=20))
def test_what_is_sealed_opens(texts: list[bytes]) -> None:
    here, there = seal(KEY), seal(KEY)
    for text in texts:
        datagram = sealed(here, text)
        assert len(datagram) == len(text) + OVERHEAD
        assert len(text) < 8 or text not in datagram
        assert there.open(datagram, TAG) == text


@given(st.data())
def test_whatever_is_changed_does_not_open(data: st.DataObject) -> None:
    here, there = seal(KEY), seal(KEY)
    if data.draw(st.booleans(), "the stream is known"):
        there.open(sealed(here), TAG)
    datagram = bytearray(sealed(here, b"some text"))
    at = data.draw(st.integers(0, len(datagram) - 1))
    datagram[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(SealError):
        there.open(bytes(datagram), TAG)
    assert len(there._streams) <= 1


@given(st.binary(max_size=100))
def test_whatever_is_made_up_does_not_open(made_up: bytes) -> None:
    refused(seal(KEY), made_up, "undecipherable")
    refused(seal(KEY), key_id(KEY) + made_up, "undecipherable")


def test_another_key_or_swarm_opens_nothing() -> None:
    refused(seal(OTHER), sealed(seal(KEY)), "undecipherable")
    refused(seal(KEY), sealed(seal(KEY)), "undecipherable", tag=b"")


def test_without_a_key_nothing_is_sealed() -> None:
    nothing = DatagramSeal()
    assert nothing.seal(b"text", TAG) is None
    refused(nothing, sealed(seal(KEY)), "undecipherable")


def test_what_is_our_own_is_refused_and_nobody_elses() -> None:
    here, there = seal(KEY), seal(KEY)
    datagram = sealed(here)
    refused(here, datagram, "reflected")
    assert there.open(datagram, TAG) == b"text"


arrivals = st.lists(st.integers(0, 30), max_size=60)


@given(arrivals, st.integers(1, 40))
def test_each_opens_once_in_any_order(order: list[int], window: int) -> None:
    """Of what a window holds: what is older than that is refused, whether it came or not."""
    with patch.multiple(datagrams, WINDOW=window, _MASK=(1 << window) - 1):
        here, there = seal(KEY), seal(KEY)
        datagram = [sealed(here, b"%d" % number) for number in range(31)]
        came: set[int] = set()
        for number in order:
            if number in came or number <= max(came, default=0) - window:
                refused(there, datagram[number], "replayed")
            else:
                assert there.open(datagram[number], TAG) == b"%d" % number
                came.add(number)


def test_reordering_by_as_much_as_the_window_is_taken() -> None:
    here, there = seal(KEY), seal(KEY)
    datagram = [sealed(here) for _ in range(WINDOW + 1)]
    there.open(datagram[-1], TAG)
    there.open(datagram[1], TAG)
    refused(there, datagram[0], "replayed")
    refused(there, datagram[1], "replayed")


def test_a_far_leap_of_the_count_costs_nothing() -> None:
    here, there = seal(KEY), seal(KEY)
    first = sealed(here)
    there.open(first, TAG)
    here._count = 1 << 60
    there.open(sealed(here), TAG)
    refused(there, first, "replayed")
    (stream,) = there._streams.values()
    assert stream.seen.bit_length() <= WINDOW


def test_streams_are_never_shared() -> None:
    """Nor is a nonce used twice by who takes up a key again, as after one that counts no more."""
    here = seal(KEY, NEXT)
    heads = {sealed(here)[:20]}
    for key in (NEXT, KEY, NEXT, KEY):
        here.install([KEY, NEXT], key)
        heads.add(sealed(here)[:20])
    here.install([KEY, NEXT], KEY)
    heads.add(sealed(here)[:20])
    assert len(heads) == 5, "one for each time a key was taken up, and none for what changed nothing"
    assert len({sealed(seal(KEY))[:20] for _ in range(100)}) == 100


def test_memory_is_bounded_and_only_holders_of_the_key_fill_it() -> None:
    there = seal(KEY)
    with patch.object(datagrams, "STREAMS_MAX", 4):
        known = [seal(KEY) for _ in range(6)]
        for one in known:
            there.open(sealed(one), TAG)
        assert len(there._streams) == 4
        there.open(sealed(known[2]), TAG)  # which is not the longest silent any more
        for _ in range(3):
            there.open(sealed(seal(KEY)), TAG)
        assert any(name[4:16] in sealed(known[2]) for name in there._streams)
        rng = random.Random(1)
        for _ in range(100):
            refused(there, key_id(KEY) + rng.randbytes(60), "undecipherable")
        stranger = sealed(seal(KEY))[:28] + rng.randbytes(20)
        refused(there, stranger, "undecipherable")
        assert len(there._streams) == 4
    there.install([NEXT], NEXT)
    assert not there._streams


@settings(max_examples=50)
@given(st.lists(st.sampled_from("abc"), max_size=12))
def test_while_keys_change_whoever_shares_one_is_heard(changes: list[str]) -> None:
    """Each node installs the next key some time, and seals with it some time later; two keys are installed anywhere."""
    keys = [bytes([number]) * 32 for number in range(20)]
    nodes = {name: seal(keys[0]) for name in "abc"}
    at = dict.fromkeys("abc", 0)
    for name in changes:
        if at[name] <= min(at.values()):
            at[name] += 1
            nodes[name].install([keys[at[name] - 1], keys[at[name]], keys[at[name] + 1]], keys[at[name]])
            for other in nodes:
                nodes[other].install([keys[max(0, at[other] + d)] for d in (-1, 0, 1)], keys[at[other]])
        for one in "abc":
            for other in set("abc") - {one}:
                assert nodes[other].open(sealed(nodes[one]), TAG) == b"text"


def test_the_longest_datagram_leaves_room_for_its_seal() -> None:
    assert DATAGRAM_BYTES == wire.DATAGRAM_MAX
    assert wire.DATAGRAM_MAX + OVERHEAD + len(TAG) <= 1500 - 28
    assert wire.DATAGRAM_MAX + OVERHEAD + len(TAG) <= 1500 - 48, "over IPv6, too"


async def take(ours: UdpDatagrams) -> Ack:
    with trio.fail_after(5):
        message, _ = await ours.receive()
    assert isinstance(message, Ack)
    return message


async def test_over_udp_the_largest_arrives_and_what_is_plain_does_not() -> None:
    news = tuple(Member(f"{n:032}", "n" * 99, "10.0.0.1", 7000, 1, 0, State.ALIVE, "", b"m" * 400) for n in range(2))
    message = Ack(7, "a" * 32, news)
    ours, theirs = seal(KEY), seal(KEY)
    async with trio.open_nursery():
        here, there = await bind_udp(LOOPBACK, TAG, ours), await bind_udp(LOOPBACK, TAG, theirs)
        plain, other = await bind_udp(LOOPBACK, TAG), await bind_udp(LOOPBACK, TAG, seal(OTHER))
        await plain.send(there.address, message)
        await other.send(there.address, message)
        await there.send(there.address, message)
        await here.send(there.address, message)
        assert await take(there) == message
        assert there.malformed == 3
        assert theirs.counts == {
            "datagrams_undecipherable": 2, "datagrams_reflected": 1, "datagrams_replayed": 0,
        }  # fmt: skip
        ours.install([], None)
        await here.send(there.address, message)
        assert here.unsendable == 1
        for one in (here, there, plain, other):
            await one.aclose()
