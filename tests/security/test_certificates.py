"""Who is believed, decided by certificates: OpenSSL's handshake and our own checks agree."""

from __future__ import annotations

import ssl
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509 import Certificate
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.local.node_key import NodeKey
from peerd.security import authority, authority_folder, wall_clock
from peerd.security.authority import NODE_LIFE, Authority, request_of, requested_key
from peerd.security.certificates import DER_BYTES_MAX, Untrusted, check_chain, der, id_of, read_der, renews_at
from peerd.security.trust import Newcomer, Trust
from peerd.transport.errors import PeerError, UserError
from peerd.transport.secure.credentials import STRANGER, Credentials

NOW = wall_clock.now()
ROOT, OTHER = authority.generate(NOW), authority.generate(NOW)
A, B = NodeKey.generate(), NodeKey.generate()
ISSUER_KEY = NodeKey.generate()
ISSUER = Authority(ISSUER_KEY, ROOT.make_issuer(request_of(ISSUER_KEY), NOW), ROOT.certificate)
LEAF = ROOT.issue_own(A, NOW)


def trust(key: NodeKey, by: Authority = ROOT, now: datetime = NOW, believes: Authority = ROOT) -> Trust:
    return Trust(key, by.issue_own(key, now), [believes.certificate])


def shake(client: Credentials, server: Credentials) -> tuple[str, str]:
    """Whom each end sees: of the server, of the client. Raises ssl.SSLError, or what `identity` raises."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.context(server=False).wrap_bio(to_client, to_server, server_side=False),
        server.context(server=True).wrap_bio(to_server, to_client, server_side=True),
    ]
    failed: ssl.SSLError | None = None
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                failed = failed or error
    if failed:
        raise failed
    assert ends[0].version() == "TLSv1.3"
    return client.identity(ends[0].getpeercert(True)), server.identity(ends[1].getpeercert(True))


def test_each_end_knows_the_other() -> None:
    assert shake(trust(A), trust(B)) == (B.id, A.id)


def test_an_issuers_nodes_are_known_and_know_the_others() -> None:
    assert shake(trust(A, by=ISSUER), trust(B)) == (B.id, A.id)
    assert shake(trust(A), trust(B, by=ISSUER)) == (B.id, A.id)


def test_a_newcomer_is_a_stranger_who_sees_whom_it_dialled() -> None:
    newcomer = Newcomer()
    assert shake(newcomer, trust(B)) == (B.id, STRANGER)
    assert newcomer.shown is not None
    assert id_of(newcomer.shown) == B.id


@pytest.mark.parametrize("here", ["client", "server"])
@pytest.mark.parametrize(
    "bad",
    [
        trust(A, by=OTHER),
        trust(A, now=NOW - NODE_LIFE - timedelta(hours=1)),
        trust(A, now=NOW + timedelta(hours=2)),
        Trust(A, (ISSUER.issue_own(A, NOW)[0],), [ROOT.certificate]),  # its issuer is not shown
        Trust(ISSUER_KEY, (ISSUER.certificate,), [ROOT.certificate]),  # an issuer is no node
    ],
    ids=["other authority", "expired", "not begun", "no issuer", "an issuer's"],
)
def test_what_ends_a_handshake(bad: Trust, here: str) -> None:
    ends: tuple[Trust, Trust] = (bad, trust(B)) if here == "client" else (trust(B), bad)
    with pytest.raises((ssl.SSLError, PeerError)):
        shake(*ends)
    with pytest.raises(Untrusted):
        check_chain(bad.chain, [ROOT.certificate], NOW)


def test_an_issuer_makes_no_issuers() -> None:
    key = NodeKey.generate()
    forged = Authority(ISSUER_KEY, ISSUER.certificate, ISSUER.certificate).make_issuer(request_of(key), NOW)
    chain = [*Authority(key, forged, ROOT.certificate).issue_own(A, NOW), ISSUER.certificate]
    with pytest.raises(Untrusted):
        check_chain(chain, [ROOT.certificate], NOW)
    with pytest.raises(ssl.SSLError):
        shake(Trust(A, chain, [ROOT.certificate]), trust(B))


def test_who_is_revoked_is_refused_with_all_that_it_issued() -> None:
    for by, revoked in ((ROOT, A), (ISSUER, ISSUER_KEY)):
        here = trust(B)
        here.revoked = {revoked.id}.__contains__
        with pytest.raises(Untrusted, match="revoked"):
            here.identity(der(by.issue_own(A, NOW)[0]))
        assert here.identity(der(by.issue_own(B, NOW)[0]) if by is ROOT else None) in (B.id, STRANGER)


@pytest.mark.parametrize("spelled", [str.upper, "{} ".format, "  {}".format])
def test_a_revoked_issuer_has_no_other_spelling(spelled: Callable[[str], str]) -> None:
    """OpenSSL takes names that differ in case or in spaces for the same."""
    issuer, node = (
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in (spelled(ISSUER_KEY.id), A.id)
    )
    leaf = (
        x509.CertificateBuilder(issuer, node, A.public, 1)
        .not_valid_before(NOW - timedelta(hours=1))
        .not_valid_after(NOW + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(ISSUER_KEY.private, None)
    )
    here = trust(B)
    here.revoked = {ISSUER_KEY.id}.__contains__
    with pytest.raises(Untrusted):
        shake(Trust(A, (leaf, ISSUER.certificate), [ROOT.certificate]), here)


def test_a_certificate_that_is_renewed_is_shown_from_then_on() -> None:
    mine = trust(A, by=OTHER)
    with pytest.raises(ssl.SSLError):
        shake(mine, trust(B))
    mine.renew(LEAF, [ROOT.certificate])
    assert shake(mine, trust(B)) == (B.id, A.id)


def test_two_authorities_in_force() -> None:
    both = Trust(B, ROOT.issue_own(B, NOW), [ROOT.certificate, OTHER.certificate])
    assert shake(Trust(A, OTHER.issue_own(A, NOW), [ROOT.certificate]), both) == (B.id, A.id)


@pytest.mark.parametrize("by", [ROOT, ISSUER], ids=["authority", "issuer"])
def test_statements(by: Authority) -> None:
    said = by.sign("revocation", b"x")
    here = trust(A)
    assert here.verify("revocation", b"x", said, by.issuer_certificate)
    assert not here.verify("keyring", b"x", said, by.issuer_certificate)
    assert not here.verify("revocation", b"y", said, by.issuer_certificate)
    assert not trust(A, believes=OTHER).verify("revocation", b"x", said, by.issuer_certificate)
    assert not here.verify("revocation", b"x", A.sign("revocation", b"x"), der(LEAF[0]))  # a node is no issuer


@given(st.binary(max_size=600))
def test_arbitrary_bytes_are_no_certificate(data: bytes) -> None:
    with pytest.raises(PeerError):
        read_der(data)
    with pytest.raises(PeerError):
        ROOT.issue(data, NOW)
    assert not trust(A).verify("p", b"m", data, data or b"x")


def test_a_year_that_no_clock_has_is_seen_as_it_is_read() -> None:
    whole = der(authority.self_signed(A, datetime(2100, 1, 1, tzinfo=UTC)).certificate)
    begins = b"20991231230000Z"
    assert read_der(whole.replace(begins, b"0001" + begins[4:])), "of another year nothing is said yet"
    with pytest.raises(Untrusted):
        read_der(whole.replace(begins, b"0000" + begins[4:]))


@given(st.data())
@settings(max_examples=1000)
def test_a_bit_that_is_flipped_is_seen_or_says_nothing(data: st.DataObject) -> None:
    """The number of unused bits of the signature, a bit string, is not signed, and may be 1 where the last one is 0."""
    whole = bytearray(der(LEAF[0]))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        read = read_der(bytes(whole))
        check_chain([read], [ROOT.certificate], NOW)
    except PeerError:
        return
    assert read.tbs_certificate_bytes == LEAF[0].tbs_certificate_bytes
    assert read.signature == LEAF[0].signature


@given(st.integers(0, len(request_of(A)) * 8 - 1))
def test_a_bit_that_is_flipped_in_a_request_is_seen(bit: int) -> None:
    """Or it asks for the same key."""
    request = bytearray(request_of(A))
    request[bit // 8] ^= 1 << bit % 8
    with suppress(PeerError):
        assert requested_key(bytes(request)) == A.public


def test_all_fit_a_message() -> None:
    chain: Sequence[Certificate] = (*ISSUER.issue_own(A, NOW), ROOT.certificate)
    assert max(len(der(one)) for one in chain) < DER_BYTES_MAX - 50
    assert len(request_of(A)) < DER_BYTES_MAX


def test_no_certificate_outlives_its_issuer() -> None:
    late = NOW + authority.AUTHORITY_LIFE - timedelta(days=1)
    assert ROOT.issue_own(A, late)[0].not_valid_after_utc == ROOT.certificate.not_valid_after_utc


def test_a_certificate_is_renewed_when_two_thirds_of_its_life_are_over() -> None:
    assert renews_at(LEAF[0]) == NOW + NODE_LIFE * (2 / 3)


def test_an_authority_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "authority"
    made, again = authority_folder.at(folder, NOW), authority_folder.at(folder, NOW)
    assert made.certificate == again.certificate
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {
        "key.pem": 0o600, "certificate.pem": 0o600, "lock": 0o600,
    }  # fmt: skip
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_nodes_that_begin_at_once_have_one_authority(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: authority_folder.at(tmp_path / "a", NOW).certificate, range(8)))
    assert len(set(made)) == 1


def test_an_authority_that_a_crash_left_half_made_is_made_to_the_end(tmp_path: Path) -> None:
    authority_folder.at(tmp_path, NOW)
    (tmp_path / "certificate.pem").unlink()
    assert authority_folder.at(tmp_path, NOW).certificate == authority_folder.at(tmp_path, NOW).certificate


def test_another_users_folder_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority_folder.at(tmp_path, NOW)
    monkeypatch.setattr("os.getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(UserError, match="is another user's"):
        authority_folder.at(tmp_path, NOW)


@pytest.mark.parametrize("file", ["key.pem", "certificate.pem"])
@pytest.mark.parametrize("content", [b"", b"\xff", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_a_damaged_authority_is_refused_in_one_line(tmp_path: Path, file: str, content: bytes) -> None:
    authority_folder.at(tmp_path, NOW)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=rf"{tmp_path / file} is damaged; restore .* from a backup, or remove it"):
        authority_folder.at(tmp_path, NOW)


def test_another_authoritys_certificate_beside_the_key_is_damage(tmp_path: Path) -> None:
    authority_folder.at(tmp_path / "a", NOW)
    authority_folder.at(tmp_path / "b", NOW)
    (tmp_path / "a" / "certificate.pem").write_bytes((tmp_path / "b" / "certificate.pem").read_bytes())
    with pytest.raises(UserError, match="damaged"):
        authority_folder.at(tmp_path / "a", NOW)


@pytest.mark.parametrize("off", [timedelta(hours=-2), authority.AUTHORITY_LIFE + timedelta(days=1)])
def test_a_clock_that_is_far_off_is_said(tmp_path: Path, off: timedelta) -> None:
    authority_folder.at(tmp_path, NOW)
    with pytest.raises(UserError, match="set this machine's clock") as told:
        authority_folder.at(tmp_path, NOW + off)
    assert ("if it is right, remove" in str(told.value)) == (off > timedelta())


def test_no_authority_is_made_by_a_clock_that_lost_its_battery(tmp_path: Path) -> None:
    """It would have ended once the clock is right."""
    with pytest.raises(UserError, match=r"clock is at 1970-01-01 00:00 UTC; set it$"):
        authority_folder.at(tmp_path, datetime(1970, 1, 1, tzinfo=UTC))
    assert authority_folder.load(tmp_path, NOW) is None
