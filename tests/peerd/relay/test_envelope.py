"""Datagrams on their way through a relay: what is enclosed comes out, and nothing else does."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.relay.envelope import BUCKET_S, HEARD_MAX, HEARD_S, KEY_BYTES, Bucket, Heard, disclose, enclose

keys = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
hosts = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)
addresses = st.tuples(hosts, st.integers(0, 65535))


@given(key=keys, other=addresses, said=st.binary(max_size=1500))
def test_what_is_enclosed_comes_out(key: bytes, other: tuple[str, int], said: bytes) -> None:
    enclosed = enclose(key, other, said)
    assert disclose(key, enclosed) == ((str(ipaddress.ip_address(other[0])), other[1]), said)
    assert len(enclosed) - len(said) == KEY_BYTES + 1 + (16 if ":" in other[0] else 4) + 2


@given(key=keys, other=addresses, said=st.binary(max_size=40), at=st.integers(0, 200), whole=st.booleans())
def test_what_is_cut_or_of_another_key_is_refused(
    key: bytes, other: tuple[str, int], said: bytes, at: int, whole: bool
) -> None:
    enclosed = enclose(key, other, said)
    if whole:
        flipped = bytearray(enclosed)
        flipped[at % KEY_BYTES] ^= 1
        with pytest.raises(ValueError):
            disclose(key, bytes(flipped))
        return
    cut = enclosed[: at % (len(enclosed) - len(said))]
    with pytest.raises(ValueError):
        disclose(key, cut)


@given(key=keys, said=st.binary(max_size=60), mine=st.booleans())
def test_anything_is_an_envelope_or_a_value_error(key: bytes, said: bytes, mine: bool) -> None:
    enclosed = key + said if mine else said
    try:
        (host, port), _ = disclose(key, enclosed)
    except ValueError:
        return
    assert ipaddress.ip_address(host)
    assert 0 <= port <= 65535


@given(said=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 2 * HEARD_S)), max_size=20), asked=st.integers(0, 3))
def test_who_has_spoken_lately_may_be_answered(said: list[tuple[int, float]], asked: int) -> None:
    heard, now, last = Heard(), 0.0, {}
    for port, pause in said:
        now += pause
        last[port] = now
        heard.note(("10.0.0.1", port), now)
    now += HEARD_S / 2
    assert heard.may_answer(("10.0.0.1", asked), now) == (asked in last and now - last[asked] < HEARD_S)


def test_strangers_take_a_bounded_room() -> None:
    heard = Heard()
    for port in range(3 * HEARD_MAX):
        heard.note(("10.0.0.1", port), 0.0)
    assert sum(heard.may_answer(("10.0.0.1", port), 1.0) for port in range(3 * HEARD_MAX)) == HEARD_MAX


@given(rate=st.floats(1e3, 1e6), asked=st.lists(st.tuples(st.integers(1, 1500), st.floats(0, 0.5)), max_size=60))
def test_a_bucket_lets_no_more_through_than_its_rate_and_what_was_held_back_costs_nothing(
    rate: float, asked: list[tuple[int, float]]
) -> None:
    bucket, now, gone = Bucket(rate), 0.0, 0
    for count, pause in asked:
        now += pause
        gone += count if bucket.has(count, now) else 0
        assert gone <= rate * (now + BUCKET_S) * (1 + 1e-9)
    assert bucket.has(min(1000, int(rate * BUCKET_S)), now + BUCKET_S), "after a pause it is full again"
