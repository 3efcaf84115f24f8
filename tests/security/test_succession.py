"""Authorities that replace others: whatever comes in whatever order, all believe the same, and none that is retired."""

from __future__ import annotations

import errno
import hashlib
import math
import ssl
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st
from test_certificates import shake

from peerd.local import durable, node_key
from peerd.local.node_key import NodeKey
from peerd.security import authority, authority_folder, wall_clock
from peerd.security.authority import Authority, read_successor, request_of, succeed
from peerd.security.certificates import DER_BYTES_MAX, Untrusted, check_chain, der, pin_of
from peerd.security.secrets_folder import Kept, read, succession, write
from peerd.security.statements import Unbelieved
from peerd.security.succession import SUCCESSORS_MAX, Replacement, Succession
from peerd.security.trust import Trust
from peerd.transport.errors import PeerError, UserError
from peerd.transport.messages import Successor

NOW = wall_clock.now()
UNTIL = NOW + timedelta(days=90)
A, B, C = (authority.generate(NOW) for _ in range(3))
A_TO_B = succeed(A, B, NOW, UNTIL)
PINS = [bytes([number]) for number in range(5)]


def said(old: int, new: int, ends: int, salt: int = 0) -> Successor:
    """A statement without certificates, which `read_plain` believes."""
    return Successor(PINS[old], PINS[new], bytes([ends]), bytes([salt]))


def read_plain(one: Successor) -> Replacement:
    return Replacement(one.old, one.new, one.new_by_old[0])


def of(*believed: int) -> Succession:
    return Succession([PINS[number] for number in believed], read_plain)


statement = st.builds(said, st.integers(0, 4), st.integers(0, 4), st.integers(1, 40), st.integers(0, 2)).filter(
    lambda one: one.old != one.new
)


def hear(here: Succession, those: list[Successor], now: float) -> None:
    for one in those:
        with suppress(Unbelieved):
            here.add([one], now)


@given(st.lists(statement, max_size=8), st.randoms(), st.integers(0, 50))
def test_all_who_have_told_each_other_believe_the_same(those: list[Successor], rng: object, later: int) -> None:
    """One has heard them in another order, the third only from the first."""
    shuffled = list(those)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other, third = of(0), of(0), of(0)
    hear(one, those, 0)
    hear(other, shuffled, 0)
    for _ in range(2):
        hear(one, other.live(0), 0)
        hear(other, one.live(0), 0)
    hear(third, one.live(0), 0)
    for _ in range(8):  # what nothing vouched for when it came may be vouched for now
        for each in (one, other, third):
            hear(each, [*those, *shuffled], 0)
    assert one.digest(0) == other.digest(0) == third.digest(0)
    assert one.in_force(later) == other.in_force(later) == third.in_force(later)
    assert one.newest(later) == other.newest(later)


@given(st.lists(statement, max_size=8), st.lists(st.tuples(statement, st.integers(0, 50)), max_size=6))
def test_who_is_retired_stays_so_whatever_is_said_later(
    those: list[Successor], later: list[tuple[Successor, int]]
) -> None:
    here, now = of(0), 0
    hear(here, those, now)
    gone: set[bytes] = set()
    for one, at in sorted(later, key=lambda each: each[1]):
        now = at
        gone |= {pin for pin in here.known if here.retires_at(pin) <= now}
        hear(here, [one], now)
        assert not gone & set(here.in_force(now))
        assert set(here.newest(now)) <= set(here.in_force(now))
        assert here.deadline(now) > now
        before = here.in_force(now)
        if not math.isinf(here.deadline(now)):
            assert here.in_force(here.deadline(now) - 1e-3) == before, "nothing ends before it says so"


def test_both_are_in_force_until_the_old_one_retires() -> None:
    here = of(0)
    assert here.add([said(0, 1, 10)], 0)
    assert not here.add([said(0, 1, 10)], 0), "it is known"
    assert here.in_force(9.9) == [PINS[1], PINS[0]], "the newest first"
    assert here.newest(0) == [PINS[1]]
    assert here.in_force(10) == [PINS[1]]
    assert here.deadline(0) == 10
    assert (here.live(10), here.digest(10)) == ([], of(1).digest(0))


def test_the_new_one_vouches_for_the_old_one_too_and_a_stranger_for_nobody() -> None:
    newcomer = of(1)
    assert newcomer.add([said(0, 1, 10)], 0)
    assert newcomer.in_force(0) == [PINS[1], PINS[0]]
    with pytest.raises(Unbelieved):
        newcomer.add([said(2, 3, 10), said(1, 4, 20)], 0)
    assert PINS[4] in newcomer.in_force(0), "what can be believed is"
    assert not newcomer.known & {PINS[2], PINS[3]}
    assert of(2).add([said(0, 1, 10), said(1, 2, 10)], 0), "whatever the order"


def test_a_retired_one_says_nothing_more_but_the_disk_may_remember() -> None:
    here = of(0)
    here.add([said(0, 1, 10)], 0)
    with pytest.raises(Unbelieved):
        here.add([said(0, 2, 90)], 11)
    assert not here.add([said(0, 1, 9)], 11), "it has ended"
    again = of(0)
    again.recall([said(1, 2, 10), said(0, 1, 10), said(3, 4, 90)])
    assert again.in_force(11) == [PINS[2]]
    assert again.known == {PINS[0], PINS[1], PINS[2]}, "the rest is of a swarm in which it was before"


def test_there_is_a_bound() -> None:
    here = Succession([b"x"], lambda one: Replacement(one.old, one.new, 9))
    for number in range(SUCCESSORS_MAX + 3):
        here.add([Successor(b"x", str(number).encode(), b"", b"")], 0)
    assert len(here.statements()) == SUCCESSORS_MAX


# ------------------------------------------------------------------------------------------------------ certificates


def test_what_authorities_say_of_each_other() -> None:
    replacement = read_successor(A_TO_B)
    assert replacement == Replacement(pin_of(A.certificate), pin_of(B.certificate), int(UNTIL.timestamp()))
    assert max(map(len, (A_TO_B.old, A_TO_B.new, A_TO_B.new_by_old, A_TO_B.old_by_new))) < DER_BYTES_MAX


@pytest.mark.parametrize(
    "lie",
    [
        replace(A_TO_B, new=der(C.certificate)),
        replace(A_TO_B, new_by_old=der(C.vouch(B.certificate, NOW, UNTIL))),
        replace(A_TO_B, new_by_old=der(A.vouch(C.certificate, NOW, UNTIL))),
        replace(A_TO_B, old_by_new=der(B.vouch(C.certificate, NOW, UNTIL))),
        replace(A_TO_B, old_by_new=der(B.vouch(A.certificate, NOW, UNTIL + timedelta(days=1)))),
        replace(A_TO_B, old=A_TO_B.old_by_new),
        replace(A_TO_B, new_by_old=der(A.issue_own(NodeKey.generate(), NOW)[0])),
        Successor(*(der(A.certificate),) * 4),
        Successor(b"", b"", b"", b""),
    ],
)
def test_what_one_of_them_does_not_say_is_not_believed(lie: Successor) -> None:
    with pytest.raises(Untrusted):
        read_successor(lie)


@given(st.binary(max_size=100), st.integers(0, 3))
def test_arbitrary_bytes_are_no_statement(data: bytes, where: int) -> None:
    parts = [A_TO_B.old, A_TO_B.new, A_TO_B.new_by_old, A_TO_B.old_by_new]
    parts[where] = data
    with pytest.raises(PeerError):
        read_successor(Successor(*parts))


def trust(key: NodeKey, by: Authority, *heard: Successor, at: float = NOW.timestamp()) -> Trust:
    made = Trust(key, by.issue_own(key, NOW), [by.root])
    made.follow(succession(made.authorities, heard), at)
    return made


def test_nobody_is_shut_out_while_both_are_in_force() -> None:
    """Whether they have heard of it or not, have a certificate of the one or the other, or of an issuer of either."""
    keys = [NodeKey.generate() for _ in range(3)]
    issuers = [Authority(keys[2], by.make_issuer(request_of(keys[2]), NOW), by.certificate) for by in (A, B)]
    heard = [trust(keys[0], by, A_TO_B) for by in (A, B, *issuers)]
    others = [trust(keys[1], A), *(trust(keys[1], by, A_TO_B) for by in (A, B, *issuers))]
    for one in heard:
        for other in others:
            assert shake(one, other) == (keys[1].id, keys[0].id)
            assert shake(other, one) == (keys[0].id, keys[1].id)
    assert [one.outdated for one in heard] == [True, False, True, False]
    assert not trust(keys[0], A).outdated


def test_the_old_one_is_not_believed_when_it_has_retired() -> None:
    keys = [NodeKey.generate() for _ in range(2)]
    ended = succeed(A, B, NOW, NOW - timedelta(minutes=1))
    new = trust(keys[0], B, ended)
    assert new.authorities == (B.certificate,)
    behind = trust(keys[1], A, ended, at=NOW.timestamp() - 120)  # it shows what they said of each other
    for old in (trust(keys[1], A), behind):
        for ends in ((new, old), (old, new)):
            with pytest.raises(ssl.SSLError):
                shake(*ends)
    assert not new.verify("p", b"m", A.sign("p", b"m"))
    with pytest.raises(Untrusted):
        check_chain(trust(keys[1], A).chain, new.authorities, NOW)


# ------------------------------------------------------------------------------------------------------------ files


def test_an_authority_is_replaced_on_the_disk(tmp_path: Path) -> None:
    first = authority_folder.at(tmp_path, NOW)
    second, step = authority_folder.rotate(tmp_path, NOW, UNTIL, first.certificate)
    third, following = authority_folder.rotate(tmp_path, NOW, UNTIL, second.certificate)
    kept = authority_folder.load(tmp_path, NOW)
    assert kept is not None
    assert (kept.certificate, kept.key.id) == (third.certificate, third.key.id)
    assert authority_folder.successors(tmp_path) == [following, step]
    known = succession([third.certificate], authority_folder.successors(tmp_path))
    assert known.known == {pin_of(one.certificate) for one in (first, second, third)}
    assert {path.name for path in tmp_path.iterdir()} == {"key.pem", "certificate.pem", "lock"}


@pytest.mark.parametrize("done", range(5))
def test_a_crash_leaves_the_old_authority_or_the_new_one(
    tmp_path: Path, done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the four times that a file is written, so many are."""
    first = authority_folder.at(tmp_path, NOW)
    left = iter(range(done))
    write_file, write_key = durable.replace, NodeKey.write

    def or_crash() -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    def file(path: Path, text: str) -> None:
        or_crash()
        write_file(path, text)

    def key(self: NodeKey, path: Path) -> None:
        or_crash()
        write_key(self, path)

    with monkeypatch.context() as patch:
        patch.setattr("peerd.security.authority_folder.replace", file)
        patch.setattr(NodeKey, "write", key)
        if done < 4:
            with pytest.raises(KeyboardInterrupt):
                authority_folder.rotate(tmp_path, NOW, UNTIL, first.certificate)
        else:
            authority_folder.rotate(tmp_path, NOW, UNTIL, first.certificate)
    kept = authority_folder.at(tmp_path, NOW)
    assert (kept.certificate == first.certificate) == (done < 3)
    assert len(authority_folder.successors(tmp_path)) == (done >= 3)
    left = iter(range(2))
    with monkeypatch.context() as patch:
        patch.setattr("peerd.security.authority_folder.replace", file)
        patch.setattr(NodeKey, "write", key)
        with pytest.raises(KeyboardInterrupt):
            authority_folder.rotate(tmp_path, NOW, UNTIL, kept.certificate)
    assert authority_folder.at(tmp_path, NOW).certificate == kept.certificate, "a second crash loses no key"
    again, _ = authority_folder.rotate(tmp_path, NOW, UNTIL, kept.certificate)
    assert authority_folder.at(tmp_path, NOW).certificate == again.certificate


@pytest.mark.parametrize("before", ["key.pem", "next-key.pem", "certificate.pem"])
def test_an_authority_that_another_node_replaces_while_it_is_read_is_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """The advice would be to remove the folder, and with it the only key."""
    first = authority_folder.at(tmp_path, NOW)
    replaced: list[Authority] = []

    def rotate_before(path: Path) -> None:
        if path.name == before and not replaced:
            replaced.append(first)
            replaced[:] = [authority_folder.rotate(tmp_path, NOW, UNTIL, first.certificate)[0]]

    read_key, read_certificates = node_key.read, authority_folder._certificates

    def key(path: Path, *told: str) -> NodeKey | None:
        rotate_before(path)
        return read_key(path, *told)

    def of_file(path: Path, cure: str) -> list[x509.Certificate]:
        rotate_before(path)
        return read_certificates(path, cure)

    with monkeypatch.context() as patch:
        patch.setattr(node_key, "read", key)
        patch.setattr(authority_folder, "_certificates", of_file)
        found = authority_folder.load(tmp_path, NOW)
    assert found is not None
    assert found.certificate == replaced[0].certificate
    assert found.key.id == replaced[0].key.id


def test_a_disk_that_is_full_once_the_authority_is_another_undoes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the swarm would never hear of it, and be shut out from the next start on."""
    first = authority_folder.at(tmp_path, NOW)
    write_key = NodeKey.write

    def full(self: NodeKey, path: Path) -> None:
        if path.name == "key.pem" and self.id != first.key.id:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_key(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(NodeKey, "write", full)
        second, step = authority_folder.rotate(tmp_path, NOW, UNTIL, first.certificate)
    kept = authority_folder.at(tmp_path, NOW)
    assert (kept.certificate, kept.key.id) == (second.certificate, second.key.id)
    assert authority_folder.successors(tmp_path) == [step]
    third, _ = authority_folder.rotate(tmp_path, NOW, UNTIL, second.certificate)
    assert authority_folder.at(tmp_path, NOW).key.id == third.key.id


def test_a_node_keeps_it(tmp_path: Path) -> None:
    write(tmp_path, Kept([A_TO_B]))
    assert read(tmp_path).successors == [A_TO_B]
    write(tmp_path, Kept([replace(A_TO_B, old=bytes(4))]))
    with pytest.raises(UserError, match=r"succession\.hex has a statement"):
        succession([A.certificate], read(tmp_path).successors)


def test_pins_are_hashes() -> None:
    assert len(pin_of(A.certificate)) == hashlib.sha256().digest_size
