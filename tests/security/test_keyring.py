"""Rings come to be the same whatever the order; what is sealed opens where it should, and not where it must not."""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from signers import ISSUERS, nobody_is_revoked, revoked, signer_of, signing

from peerd.security.keyring import GENERATIONS_MAX, SPREAD_S, Keyring, order
from peerd.security.statements import Unbelieved
from peerd.transport import wire
from peerd.transport.errors import PeerError
from peerd.transport.messages import KeyGeneration, Keys

HERE = ("peerd", "")
_keys = itertools.count()


def ring(*generations: KeyGeneration, now: float = 0.0, known_for_s: float = 0.0) -> Keyring:
    made = Keyring(HERE, signer_of, nobody_is_revoked)
    for one in generations:
        made.add(one, now, known_for_s)
    return made


def key(seed: int | None = None) -> bytes:
    return hashlib.sha256(b"%d" % (next(_keys) if seed is None else seed)).digest()


def made(number: int, level: int = 0, issuer: bytes = b"", seed: int | None = None) -> KeyGeneration:
    """A generation of a given number."""
    before = Keyring(HERE, lambda *_: "", nobody_is_revoked)
    if number > 1:
        before.add(KeyGeneration(number - 1, key(), 0, b"", b""), 0)
    return before.make(key(seed), level, signing(issuer), issuer)


some = st.builds(made, st.integers(1, 5), st.integers(0, 2), st.sampled_from(sorted(ISSUERS)), st.integers(0, 3))


@given(st.lists(some, max_size=10), st.randoms())
def test_the_order_and_repetitions_do_not_matter(those: list[KeyGeneration], rng: object) -> None:
    shuffled = [*those, *those]
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    here, there = ring(*those), ring(*shuffled)
    assert here.generations == there.generations
    assert here.digest == there.digest
    highest = sorted({order(one) for one in those}, reverse=True)[:GENERATIONS_MAX]
    assert [order(one) for one in here.generations] == highest


@given(st.lists(some, max_size=5), st.lists(some, max_size=5))
def test_digests_are_equal_where_the_rings_are(here: list[KeyGeneration], there: list[KeyGeneration]) -> None:
    one, other = ring(*here), ring(*there)
    alike = list(map(order, one.generations)) == list(map(order, other.generations))
    assert (one.digest == other.digest) == alike


@given(st.lists(some, max_size=6), some)
def test_it_says_whether_it_changed(those: list[KeyGeneration], one: KeyGeneration) -> None:
    here = ring(*those)
    before = here.digest
    assert here.add(one, 1.0) == (here.digest != before)


@given(st.lists(st.tuples(some, st.floats(0, 300)), max_size=8), st.floats(0, 600))
def test_what_seals_is_installed_and_of_the_highest_level(those: list[tuple[KeyGeneration, float]], now: float) -> None:
    here = ring()
    for one, at in sorted(those, key=lambda each: each[1]):
        here.on_timer(at)
        here.add(one, at)
    here.on_timer(max(now, 300.0))
    sealing = here.sealing(max(now, 300.0))
    assert (sealing is None) == (not here.generations)
    if sealing is not None:
        assert sealing in here.generations
        assert sealing.level == here.generations[0].level


@given(some, st.sampled_from(["number", "level", "key", "issuer", "signature"]))
def test_what_nobody_has_signed_is_not_believed(one: KeyGeneration, field: str) -> None:
    other = {"number": 9, "level": 9, "key": bytes(32), "issuer": b"else", "signature": b"forged"}
    here = ring()
    with pytest.raises(Unbelieved):
        here.add(replace(one, **{field: other[field]}), 0)  # type: ignore[arg-type]
    assert not here.generations


def test_a_key_of_another_swarm_or_length_is_refused() -> None:
    elsewhere = Keyring(("other", ""), signer_of, nobody_is_revoked)
    with pytest.raises(Unbelieved):
        ring().add(elsewhere.make(key(), 0, signing(b""), b""), 0)
    with pytest.raises(PeerError, match="3 bytes"):
        ring().add(replace(made(1), key=b"abc"), 0)


def test_the_next_is_used_when_it_has_been_known_for_a_while() -> None:
    here = ring(first := made(1), known_for_s=SPREAD_S)
    here.add(second := here.make(key(), 0, signing(b""), b""), 100)
    assert here.sealing(100) == here.sealing(100 + SPREAD_S - 1) == first
    assert here.deadline(100) == 100 + SPREAD_S
    assert here.sealing(100 + SPREAD_S) == second
    assert here.deadline(100 + SPREAD_S) == math.inf
    assert here.generations == (second, first), "what others seal with the old one still opens"


def test_after_a_revocation_the_next_is_used_at_once_and_the_others_removed_soon() -> None:
    here = ring(first := made(1), known_for_s=SPREAD_S)
    assert here.is_behind(1)
    here.add(second := here.make(key(), 1, signing(b""), b""), 100)
    assert not here.is_behind(1)
    assert here.sealing(100) == second
    assert list(here.generations) == [second, first]
    assert not here.on_timer(100 + SPREAD_S - 1)
    assert here.on_timer(100 + SPREAD_S)
    assert list(here.generations) == [second]
    assert not here.add(first, 1000), "a laggard brings it back"
    assert here.sealing(1000) == second


def test_a_level_beats_a_number() -> None:
    """On the other side of a partition, where nobody knew of the revocation, keys were made daily."""
    here = ring(new := made(2, level=1))
    here.add(made(3), 0)
    here.add(made(4), 0)
    here.add(made(5), 0)
    assert here.generations[0] == here.sealing(0) == new
    assert here.make(key(), 1, signing(b""), b"").number == 6


def test_two_that_are_made_at_once_are_one_in_the_end() -> None:
    here, there = ring(first := made(1), known_for_s=99), ring(first, known_for_s=99)
    ours, theirs = (one.make(key(), 1, signing(by), by) for one, by in ((here, b"one"), (there, b"two")))
    for one in (here, there):
        one.add(ours, 0)
        one.add(theirs, 0)
    assert here.sealing(SPREAD_S) == there.sealing(SPREAD_S) == max(ours, theirs, key=order)


def test_keys_of_an_issuer_that_is_revoked_are_gone() -> None:
    out: list[str] = []
    here = Keyring(HERE, signer_of, lambda node: node in out)
    here.add(first := made(1), 0)
    here.add(jam := made(1 << 40, level=1 << 40, issuer=b"one"), 0)
    here.on_timer(SPREAD_S)
    assert list(here.generations) == [jam]
    out.append(ISSUERS[b"one"])
    assert here.forget_unbelieved()
    assert not here.forget_unbelieved()
    assert here.is_behind(0), "there is none"
    assert not here.add(jam, 200)
    assert here.counts["keys_of_revoked"] == 1
    assert here.add(first, 200)
    here.add(here.make(key(), 1, signing(b""), b""), 200)
    assert here.sealing(200) == here.generations[0] != first


def test_a_newcomer_seals_with_what_the_others_use() -> None:
    those = made(1), made(2), made(3)
    assert ring(*those, now=50).sealing(50) == those[1]
    assert ring(those[0], now=50).sealing(50) == those[0]
    assert ring(*those, now=50, known_for_s=SPREAD_S).sealing(50) == those[2]
    assert ring().sealing(0) is None


def test_no_name_of_a_revoked_signer_matters_for_others() -> None:
    here = Keyring(HERE, signer_of, revoked(ISSUERS[b"two"]))
    assert here.add(made(1, issuer=b"one"), 0)
    assert not here.add(made(2, issuer=b"two"), 0)


@given(st.lists(some, max_size=GENERATIONS_MAX))
def test_they_travel(those: list[KeyGeneration]) -> None:
    message = Keys(tuple(those))
    assert wire.decode(message.KIND, wire.encode(message)[0], 0).message() == message
