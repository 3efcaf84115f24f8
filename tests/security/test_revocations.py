"""A set of revocations only grows, and is the same in the end whatever the order; nobody else's word enters it."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from signers import ISSUERS, signer_of, signing

from peerd.security import revocations
from peerd.security.revocations import Revocations, make
from peerd.security.statements import Unbelieved
from peerd.transport import wire
from peerd.transport.messages import Revocation, RevocationList

said = st.builds(
    lambda node, at, issuer: make(node, at, signing(issuer), issuer),
    st.sampled_from(["a", "b", "c", ISSUERS[b"one"], ISSUERS[b"two"]]),
    st.integers(0, 3),
    st.sampled_from(sorted(ISSUERS)),
)


def having(*those: Revocation) -> Revocations:
    kept = Revocations(signer_of)
    for one in those:
        kept.add(one)
    return kept


@given(st.lists(said, max_size=12), st.randoms())
def test_the_order_and_repetitions_do_not_matter(those: list[Revocation], rng: object) -> None:
    shuffled = [*those, *those]
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    here, there = having(*those), having(*shuffled)
    assert here.digest == there.digest
    assert sorted(here.all(), key=repr) == sorted(there.all(), key=repr)
    assert {one.node for one in those} == {one.node for one in here.all()}
    assert all(one.node in here for one in those)


@given(st.lists(said, max_size=6), said)
def test_it_only_grows_and_says_when(those: list[Revocation], one: Revocation) -> None:
    kept = having(*those)
    before = {each.node for each in kept.all()}
    assert kept.add(one) == (one.node not in before)
    assert {each.node for each in kept.all()} == before | {one.node}
    assert not kept.add(one)


@given(st.lists(said, max_size=6), st.lists(said, max_size=6))
def test_digests_are_equal_where_the_sets_are(here: list[Revocation], there: list[Revocation]) -> None:
    one, other = having(*here), having(*there)
    assert (one.digest == other.digest) == (set(one.all()) == set(other.all()))


@given(said, st.sampled_from(["node", "revoked_at", "issuer", "signature"]))
def test_what_nobody_has_signed_is_not_believed(one: Revocation, field: str) -> None:
    other = {"node": "x", "revoked_at": 9, "issuer": b"else", "signature": b"forged"}
    kept = Revocations(signer_of)
    with pytest.raises(Unbelieved):
        kept.add(replace(one, **{field: other[field]}))  # type: ignore[arg-type]
    assert not kept.all()


def test_what_was_believed_until_its_authority_retired_is_no_lie_and_counts_no_more() -> None:
    """By another member's clock it is still in force, and an issuer may have signed the same again."""
    in_force = True
    kept = Revocations(lambda *said: signer_of(*said) if said[3] or in_force else None)
    past = [make(node, 1, signing(b""), b"") for node in "abc"]
    for one in past:
        assert kept.add(one)
    in_force = False
    assert kept.forget_unbelieved() == past
    again = make("a", 1, signing(b"one"), b"one")
    assert not kept.add(again), "it was out already"
    for one in past:
        assert not kept.add(one)
    assert kept.all() == [again]
    assert all(node in kept for node in "abc")
    with pytest.raises(Unbelieved):
        kept.add(replace(past[1], revoked_at=2))


def test_the_authoritys_word_stands_before_an_issuers() -> None:
    first, last = make("a", 1, signing(b"one"), b"one"), make("a", 9, signing(b""), b"")
    assert having(first, last).all() == having(last, first).all() == [last]


def test_issuers_cannot_take_the_authoritys_room() -> None:
    with patch.object(revocations, "REVOKED_MAX", 2):
        kept = having(*(make(node, 1, signing(b"one"), b"one") for node in "abc"))
        assert "c" not in kept
        assert kept.counts["revocations_refused"] == 1
        assert kept.add(make("d", 1, signing(b""), b""))
        assert not kept.add(make("a", 1, signing(b""), b"")), "it was out already"
        assert kept.add(make("e", 1, signing(b"one"), b"one")), "the authority's word has freed that of an issuer"
        assert not kept.add(make("f", 1, signing(b""), b""))
        assert not kept.add(make("b", 1, signing(b""), b"")), "there is no room for the authority's, the issuer's stays"
        assert "b" in kept


def test_what_is_known_is_not_verified_again() -> None:
    asked = []

    def counting(*said: object) -> str:
        asked.append(said)
        return ""

    kept, one = Revocations(counting), make("a", 1, signing(b""), b"")
    kept.add(one)
    kept.add(one)
    kept.add(replace(one, revoked_at=2))
    assert len(asked) == 1


@given(st.lists(said, max_size=12))
def test_they_travel(those: list[Revocation]) -> None:
    message = RevocationList(tuple(those))
    assert wire.decode(message.KIND, wire.encode(message)[0], 0).message() == message
