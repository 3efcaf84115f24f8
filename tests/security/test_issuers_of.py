"""A renewed certificate names all issuers that the one before it rested on: nobody outlives who let it in."""

from __future__ import annotations

import pytest
from cryptography import x509
from cryptography.x509 import Certificate
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.local.node_key import NodeKey
from peerd.security import authority, wall_clock
from peerd.security.authority import Authority, request_of
from peerd.security.certificates import (
    DER_BYTES_MAX,
    ISSUERS_MAX,
    RENEWED_FROM,
    Untrusted,
    check_chain,
    der,
    issuers_of,
    read_der,
)
from peerd.security.enrolment import renewed_from
from peerd.security.trust import SEEN_MAX, Trust
from peerd.transport.errors import PeerError
from peerd.transport.messages import RenewalRequest

NOW = wall_clock.now()
ROOT = authority.generate(NOW)
NODE, OTHER = NodeKey.generate(), NodeKey.generate()
KEYS = [NodeKey.generate() for _ in range(ISSUERS_MAX + 2)]
ISSUERS = [Authority(key, ROOT.make_issuer(request_of(key), NOW), ROOT.certificate) for key in KEYS]
ALL = [ROOT, *ISSUERS]
by_whom = st.integers(0, 3)  # 0: the authority


def renewed(chain: tuple[Certificate, ...], by: Authority) -> tuple[Certificate, ...]:
    """As the other end makes it from what was asked."""
    request = RenewalRequest(request_of(NODE), tuple(map(der, chain)), b"")
    return by.issue(request.request, NOW, renewed_from(request, NODE.id, [ROOT.certificate], NOW))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.booleans(), by_whom), min_size=1, max_size=8), st.sets(st.integers(1, 3)))
def test_a_node_is_refused_if_and_only_if_an_issuer_since_its_last_token_is_revoked(
    steps: list[tuple[bool, int]], revoked: set[int]
) -> None:
    """Each step is a token (True) or a renewal, at one of the issuers."""
    chain, rests_on = ROOT.issue_own(NODE, NOW), set[int]()
    for token, by in steps:
        chain = ALL[by].issue_own(NODE, NOW) if token else renewed(chain, ALL[by])
        rests_on = {by} if token else rests_on | {by}
        check_chain(chain, [ROOT.certificate], NOW)
    here = Trust(OTHER, ROOT.issue_own(OTHER, NOW), [ROOT.certificate])
    leaf = der(read_der(der(chain[0])))
    assert here.identity(leaf) == NODE.id
    for index in range(1, 4):
        assert (here.resting_on(KEYS[index - 1].id) == [NODE.id]) == (index in rests_on)
    here.revoked = {KEYS[index - 1].id for index in revoked}.__contains__
    if rests_on & revoked:
        with pytest.raises(Untrusted, match="of an issuer that is revoked"):
            here.identity(leaf)
    else:
        assert here.identity(leaf) == NODE.id


def test_there_is_room_for_some_issuers_and_no_more() -> None:
    chain = ROOT.issue_own(NODE, NOW)
    for by in ISSUERS[: ISSUERS_MAX + 1]:
        chain = renewed(chain, by)
    assert len(der(chain[0])) <= DER_BYTES_MAX
    assert len(issuers_of(chain[0])) == ISSUERS_MAX + 1, "who issued it is named by its issuer"
    with pytest.raises(PeerError, match="a new token clears that"):
        renewed(chain, ISSUERS[-1])


def test_what_is_asked_for_must_be_the_nodes_own_and_good() -> None:
    for chain, why in (
        (ROOT.issue_own(OTHER, NOW), "another node's"),
        (authority.generate(NOW).issue_own(NODE, NOW), "of another authority"),
        ((), "missing"),
        (ISSUERS[0].issue_own(NODE, NOW) * 2, "too many"),
    ):
        with pytest.raises(Untrusted, match=why):
            renewed(chain, ROOT)


@pytest.mark.parametrize("value", [b"", bytes(15), bytes(32), bytes(16 * 8), bytes(range(16))[::-1] + bytes(16)])
def test_what_we_do_not_write_is_not_read(value: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    made = x509.UnrecognizedExtension(RENEWED_FROM, value)
    monkeypatch.setattr("peerd.security.certificates.renewed_from", lambda issuers: made)
    leaf = ROOT.issue(request_of(NODE), NOW, [KEYS[0].id])[0]
    with pytest.raises(Untrusted, match="does not name as it should"):
        issuers_of(leaf)


def test_who_was_seen_is_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SEEN_MAX > 160
    monkeypatch.setattr("peerd.security.trust.SEEN_MAX", 2)
    here = Trust(OTHER, ROOT.issue_own(OTHER, NOW), [ROOT.certificate])
    for key in (NODE, KEYS[1], NODE, KEYS[2]):
        here.identity(der(ISSUERS[0].issue_own(key, NOW)[0]))
    assert here.resting_on(KEYS[0].id) == [NODE.id, KEYS[2].id]
