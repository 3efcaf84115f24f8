"""A certificate that is renewed while the old one is good, here or by an issuer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
import trio

from peerd.local.node_key import NodeKey
from peerd.security import authority, authority_folder, kept, secrets_folder, wall_clock
from peerd.security.authority import NODE_LIFE, Authority, request_of, succeed
from peerd.security.certificates import check_chain, der
from peerd.security.enrolment import Enrolment, granted
from peerd.security.entry import Entry, Told, entered
from peerd.security.reception import Issuer, Reception
from peerd.security.renewal import AGAIN_S, ALL_AT_ONCE_S, LOOK_EVERY_S, Renewal
from peerd.security.secrets_folder import succession
from peerd.security.token_store import TokenStore
from peerd.security.trust import Trust
from peerd.transport.connection import Connection
from peerd.transport.errors import Blameless, UserError
from peerd.transport.ids import Address
from peerd.transport.memory import MemoryNetwork
from peerd.transport.messages import Enrolled, EnrolmentRefused, Message, RenewalRequest
from peerd.transport.secure.credentials import Credentials

NOW = wall_clock.now()
ROOT = authority.generate(NOW)
KEY, ISSUER_KEY = NodeKey.generate(), NodeKey.generate()
WHERE = ("10.0.0.5", 7946)
DUE = NOW + NODE_LIFE * 0.7


class Node:
    """One that is due, and an issuer that it may ask."""

    def __init__(self, network: MemoryNetwork, folder: Path, *, issues: bool = False) -> None:
        self.folder, self.network = folder, network
        enrolment = granted(ROOT, request_of(KEY), NOW, issuer=issues)
        issuer = (
            Issuer(Authority(KEY, enrolment.issuer, ROOT.certificate), TokenStore(folder)) if enrolment.issuer else None
        )
        self.entry = entry(enrolment, issuer)
        self.asked: list[Message] = []
        self.answer: Callable[[RenewalRequest], Message] | None = None
        trust = Trust(ISSUER_KEY, ROOT.issue_own(ISSUER_KEY, NOW), [ROOT.certificate])
        self.reception = Reception(trust, Issuer(ROOT, TokenStore(folder)))
        self.issuers: list[Address] = [WHERE]
        transport = network.transport("10.0.0.9")
        self.renewal = Renewal(self.entry, KEY, folder, transport, lambda: self.issuers)

    async def serve(self, connection: Connection) -> None:
        request = await connection.receive()
        assert isinstance(request, RenewalRequest)
        self.asked.append(request)
        if self.answer:
            await connection.send(self.answer(request))
            await connection.flushed()
        else:
            connection.identity = KEY.id
            await self.reception.renew(connection, request)


def entry(enrolment: Enrolment, issuer: Issuer | None = None, folder: Path | None = None) -> Entry:
    return Entry(Trust(KEY, enrolment.chain, enrolment.authorities), issuer, "test", folder)


@asynccontextmanager
async def node(folder: Path, *, issues: bool = False) -> AsyncIterator[Node]:
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery)
        it = Node(network, folder, issues=issues)
        await nursery.start(network.transport(WHERE[0]).listen, WHERE, it.serve)
        yield it
        nursery.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wall_clock, "now", lambda: DUE)


async def test_an_issuer_renews_it(tmp_path: Path) -> None:
    async with node(tmp_path) as it:
        assert await it.renewal.renewed()
        assert it.entry.trust.certificate.not_valid_after_utc == DUE + NODE_LIFE
        again = kept.read(tmp_path, KEY)
        assert again is not None
        assert again.chain == it.entry.trust.chain


@pytest.mark.parametrize("there", [False, True])
async def test_an_issuer_asks_on_until_its_own_certificate_as_one_is_renewed(tmp_path: Path, there: bool) -> None:
    """Another one like it can renew what makes it a member, and is the second best."""
    other = Authority(ISSUER_KEY, ROOT.make_issuer(request_of(ISSUER_KEY), DUE), ROOT.certificate)
    like_it = ("10.0.0.6", 7946)
    async with node(tmp_path, issues=True) as it, trio.open_nursery() as nursery:

        async def serve(connection: Connection) -> None:
            request = await connection.receive()
            assert isinstance(request, RenewalRequest)
            await connection.send(granted(other, request.request, DUE, issuer=False).message())
            await connection.flushed()

        await nursery.start(it.network.transport(like_it[0]).listen, like_it, serve)
        it.issuers = [like_it, WHERE] if there else [like_it]
        assert await it.renewal.renewed()
        again = kept.read(tmp_path, KEY)
        assert again is not None
        assert again.chain[0].not_valid_after_utc == DUE + NODE_LIFE
        renewed = again.issuer is not None and again.issuer.not_valid_after_utc == DUE + authority.ISSUER_LIFE
        assert renewed == there
        nursery.cancel_scope.cancel()


async def test_an_issuer_stays_one(tmp_path: Path) -> None:
    async with node(tmp_path, issues=True) as it:
        assert await it.renewal.renewed()
        again = kept.read(tmp_path, KEY)
        assert again is not None
        assert again.issuer is not None
        assert again.issuer.not_valid_after_utc == DUE + authority.ISSUER_LIFE
        assert it.entry.issuer is not None
        assert again.issuer is not None
        assert it.entry.issuer.authority.issuer_certificate == der(again.issuer)


async def test_an_issuer_that_another_issuer_renews_keeps_the_newest_certificate_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(tmp_path, issues=True) as it:
        assert await it.renewal.renewed()
        later = DUE + NODE_LIFE * 0.7
        monkeypatch.setattr(wall_clock, "now", lambda: later)
        other = Authority(ISSUER_KEY, ROOT.make_issuer(request_of(ISSUER_KEY), later), ROOT.certificate)
        it.answer = lambda said: granted(other, said.request, later, issuer=False).message()
        assert await it.renewal.renewed()
        again = kept.read(tmp_path, KEY)
        assert again is not None
        assert again.issuer is not None
        assert again.issuer.not_valid_after_utc == DUE + authority.ISSUER_LIFE


async def test_a_node_with_an_authority_of_its_own_asks_nobody(tmp_path: Path) -> None:
    async with node(tmp_path) as it:
        enrolment = Enrolment(ROOT.issue_own(KEY, NOW), (ROOT.certificate,))
        own = entry(enrolment, Issuer(ROOT, TokenStore(tmp_path)), tmp_path)
        assert await Renewal(own, KEY, tmp_path, None, list).renewed()  # type: ignore[arg-type]
        assert own.trust.certificate.not_valid_after_utc == DUE + NODE_LIFE
        assert not it.asked


def of_another_key(_: RenewalRequest) -> Message:
    return granted(ROOT, request_of(ISSUER_KEY), DUE, issuer=False).message()


def of_another_authority(request: RenewalRequest) -> Message:
    other = authority.generate(DUE)
    return granted(other, request.request, DUE, issuer=False).message()


def of_old(request: RenewalRequest) -> Message:
    return granted(ROOT, request.request, NOW, issuer=False).message()


def of_nobody(_: RenewalRequest) -> Message:
    return EnrolmentRefused("no-issuer")


def of_year_0(request: RenewalRequest) -> Message:
    late = datetime(2100, 1, 1, tzinfo=UTC)
    (one,) = authority.self_signed(ROOT.key, late).issue(request.request, late)
    signed = one.tbs_certificate_bytes
    forged = signed.replace(b"20991231", b"00001231")
    return Enrolled((der(one).replace(signed, forged).replace(one.signature, ROOT.key.private.sign(forged)),), b"")


@pytest.mark.parametrize("answer", [of_another_key, of_another_authority, of_old, of_year_0, of_nobody])
async def test_what_a_bad_issuer_sends_changes_nothing(
    tmp_path: Path, answer: Callable[[RenewalRequest], Message]
) -> None:
    async with node(tmp_path) as it:
        before = it.entry.trust.chain
        it.answer = answer
        assert not await it.renewal.renewed()
        assert it.entry.trust.chain == before
        assert kept.read(tmp_path, KEY) is None
        it.answer = None
        it.issuers = [("10.0.0.1", 1), WHERE]
        assert await it.renewal.renewed()


async def test_nobody_is_there_who_could(tmp_path: Path) -> None:
    async with node(tmp_path) as it:
        it.issuers = []
        assert not await it.renewal.renewed()


async def test_an_issuers_own_statement_does_not_make_another_issuer(tmp_path: Path) -> None:
    """Only the authority renews what lets a node issue."""
    async with node(tmp_path, issues=True) as it:
        middle = Authority(ISSUER_KEY, ROOT.make_issuer(request_of(ISSUER_KEY), NOW), ROOT.certificate)
        trust = Trust(ISSUER_KEY, middle.issue_own(ISSUER_KEY, DUE), [ROOT.certificate])
        it.reception = Reception(trust, Issuer(middle, TokenStore(tmp_path)))
        assert await it.renewal.renewed()
        again = kept.read(tmp_path, KEY)
        assert again is not None
        assert it.entry.issuer is not None
        assert again.issuer == it.entry.issuer.authority.certificate, "the one that it has"


@pytest.mark.trio(clock="autojump")
async def test_it_is_renewed_when_it_is_due_and_not_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = trio.current_time()
    monkeypatch.setattr(wall_clock, "now", lambda: NOW + timedelta(seconds=trio.current_time() - began))
    issuer = Issuer(ROOT, TokenStore(tmp_path))
    own = entry(Enrolment(ROOT.issue_own(KEY, NOW), (ROOT.certificate,)), issuer, tmp_path)
    renewal = Renewal(own, KEY, tmp_path, None, list)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(renewal.run)
        first = own.trust.certificate
        await trio.sleep((NODE_LIFE * 0.66).total_seconds())
        assert own.trust.certificate == first
        await trio.sleep((NODE_LIFE * 0.01).total_seconds())
        assert own.trust.certificate != first
        assert own.trust.identity(der(own.trust.certificate)) == KEY.id
        nursery.cancel_scope.cancel()
    assert replace(own).summary()["member_by"] == "test"


async def test_an_issuer_whose_own_certificate_has_ended_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Authority(ISSUER_KEY, ROOT.make_issuer(request_of(ISSUER_KEY), NOW), ROOT.certificate)
    async with node(tmp_path) as it:
        it.reception = Reception(it.entry.trust, Issuer(ended, TokenStore(tmp_path)))
        monkeypatch.setattr(wall_clock, "now", lambda: NOW + authority.ISSUER_LIFE + timedelta(days=1))
        connection = Deaf()
        with pytest.raises(Blameless, match="issues none"):
            await it.reception.renew(
                connection,  # type: ignore[arg-type]
                RenewalRequest(request_of(KEY), tuple(map(der, it.entry.trust.chain)), b""),
            )
        assert connection.said == [EnrolmentRefused("no-issuer")]
        with pytest.raises(UserError, match="has ended"):
            Issuer(ended, TokenStore(tmp_path)).token((WHERE,), 1, 3600, issues=False)


class Deaf:
    """Who only hears."""

    remote, identity = "10.0.0.9:1", KEY.id

    def __init__(self) -> None:
        self.said: list[Message] = []

    async def send(self, message: Message) -> None:
        self.said.append(message)

    async def flushed(self) -> None:
        """At once."""


async def test_a_clock_that_was_set_back_is_said_and_a_node_with_its_own_authority_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = NOW - timedelta(days=30)
    async with node(tmp_path) as it:
        monkeypatch.setattr(wall_clock, "now", lambda: before)
        it.issuers = []
        assert not await it.renewal.renewed()
        assert "set this machine's clock" in caplog.text
    of_old = authority.generate(before - timedelta(days=1))
    own = Entry(
        Trust(KEY, of_old.issue_own(KEY, NOW), [of_old.certificate]), Issuer(of_old, TokenStore(tmp_path)), "test",
        tmp_path,
    )  # fmt: skip
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Renewal(own, KEY, tmp_path, None, list).run)  # type: ignore[arg-type]
        while own.trust.certificate.not_valid_before_utc > before:
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


def is_outdated(trust: Trust) -> bool:
    return trust.outdated


async def test_an_issuer_becomes_one_of_the_authority_that_takes_the_old_ones_place(tmp_path: Path) -> None:
    following = authority.generate(NOW)
    said = [succeed(ROOT, following, NOW, DUE + NODE_LIFE)]
    async with node(tmp_path, issues=True) as it:
        trust = it.entry.trust
        trust.follow(succession([ROOT.certificate], said), NOW.timestamp())
        assert is_outdated(trust)
        assert not await it.renewal.renewed(), "who is asked issues under the old one"
        middle = Authority(ISSUER_KEY, following.make_issuer(request_of(ISSUER_KEY), NOW), following.certificate)
        for by in (middle, following):
            there = Trust(ISSUER_KEY, following.issue_own(ISSUER_KEY, DUE), [following.certificate])
            there.follow(succession([following.certificate], said), NOW.timestamp())
            it.reception = Reception(there, Issuer(by, TokenStore(tmp_path)))
            assert await it.renewal.renewed()
            assert it.renewal._outdated == (by is middle), "an issuer makes none, and the authority is asked on"
            assert not is_outdated(trust)
            again = kept.read(tmp_path, KEY)
            assert again is not None
            assert again.chain == trust.chain, "so that it is a member still when the old one has retired"
        assert again is not None
        assert again.authorities == (following.certificate,)
        assert it.entry.issuer is not None
        assert it.entry.issuer.authority.root == following.certificate
        assert again.issuer is not None
        assert it.entry.issuer.authority.issuer_certificate == der(again.issuer)


@pytest.mark.trio(clock="autojump")
@pytest.mark.parametrize("issuers", [[], [("10.0.0.1", 1)]])
async def test_a_certificate_of_a_replaced_authority_that_nobody_renews_fills_no_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, issuers: list[Address]
) -> None:
    """Who has the authority may be gone for good, with the old one in force for weeks."""
    said = [succeed(ROOT, authority.generate(NOW), NOW, DUE + NODE_LIFE)]
    async with node(tmp_path) as it, trio.open_nursery() as nursery:
        it.issuers = issuers
        it.entry.trust.follow(succession([ROOT.certificate], said), NOW.timestamp())
        nursery.start_soon(it.renewal.run)
        await trio.sleep(10.5 * LOOK_EVERY_S)
        assert 10 <= caplog.text.count("is not renewed yet") <= 11
        it.issuers = [*issuers, WHERE]
        await trio.sleep(2 * AGAIN_S)
        assert "of the authority that is being replaced" in caplog.text, "another reason is said at once"
        nursery.cancel_scope.cancel()


@pytest.mark.trio(clock="autojump")
async def test_an_issuer_that_never_meets_the_new_authority_is_a_member_under_it_all_the_same(tmp_path: Path) -> None:
    """Whoever has it is off; another issuer was made one before that."""
    following = authority.generate(NOW)
    said = [succeed(ROOT, following, NOW, DUE + timedelta(days=1))]
    middle = Authority(ISSUER_KEY, following.make_issuer(request_of(ISSUER_KEY), NOW), following.certificate)
    async with node(tmp_path, issues=True) as it, trio.open_nursery() as nursery:
        there = Trust(ISSUER_KEY, following.issue_own(ISSUER_KEY, DUE), [following.certificate])
        there.follow(succession([following.certificate], said), DUE.timestamp())
        it.reception = Reception(there, Issuer(middle, TokenStore(tmp_path)))
        trust, known = it.entry.trust, succession([ROOT.certificate], said)
        trust.follow(known, DUE.timestamp())
        nursery.start_soon(it.renewal.run)
        while kept.read(tmp_path, KEY) is None or it.renewal._unkept is not None:
            await trio.sleep(1)
        await trio.sleep(LOOK_EVERY_S)
        assert len(it.asked) > LOOK_EVERY_S / (AGAIN_S + ALL_AT_ONCE_S) - 1, "for it may be made an issuer yet"
        assert Reception(trust, it.entry.issuer).by is None, "what it shows is of another authority than its tokens"
        assert trust.follow(known, (DUE + timedelta(days=2)).timestamp())
        it.renewal.look()
        await trio.sleep(AGAIN_S)
        asked = len(it.asked)
        check_chain(trust.chain, [following.certificate], DUE)
        await trio.sleep(LOOK_EVERY_S)
        assert len(it.asked) == asked, "it is none any more"
        nursery.cancel_scope.cancel()


async def dials_nobody(_: Credentials, address: Address) -> Connection:
    """Of a node that has its certificate."""
    raise AssertionError(f"{address} was dialled")


async def test_an_issuer_that_is_off_just_as_the_old_authority_retires_is_a_member_after_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has met another issuer of the new one weeks before, and so been a member under it ever since."""
    following = authority.generate(NOW)
    said = [succeed(ROOT, following, NOW, DUE + timedelta(days=1))]
    middle = Authority(ISSUER_KEY, following.make_issuer(request_of(ISSUER_KEY), NOW), following.certificate)
    secrets_folder.write(tmp_path, secrets_folder.Kept(said))
    async with node(tmp_path, issues=True) as it:
        there = Trust(ISSUER_KEY, following.issue_own(ISSUER_KEY, DUE), [following.certificate])
        there.follow(succession([following.certificate], said), DUE.timestamp())
        it.reception = Reception(there, Issuer(middle, TokenStore(tmp_path)))
        it.entry.trust.follow(succession([ROOT.certificate], said), DUE.timestamp())
        assert it.entry.issuer is not None
        before = it.entry.trust.chain, (ROOT.certificate,), it.entry.issuer.authority.certificate
        kept.write(tmp_path, Enrolment(*before))
        assert await it.renewal.renewed()
        told = Told(tmp_path, tmp_path / "users", loopback=False, token=None, joins=True)
        for days, may_be_made_one in ((0, True), (2, False)):
            now = DUE + timedelta(days=days)
            monkeypatch.setattr(wall_clock, "now", partial(DUE.__add__, timedelta(days=days)))
            again = await entered(told, KEY, dials_nobody)
            again.trust.follow(succession(again.trust.authorities, said), now.timestamp())
            assert again.trust.chain == it.entry.trust.chain
            assert again.issuer is not None
            assert again.issuer.authority.root == ROOT.certificate
            assert Reception(again.trust, again.issuer).by is None
            assert Renewal(again, KEY, tmp_path, it.network.transport("10.0.0.9"), list)._outdated == may_be_made_one


async def test_an_authority_that_cannot_be_read_when_it_was_replaced_ends_no_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = authority_folder.at(tmp_path, NOW)
    own = entry(Enrolment(here.issue_own(KEY, NOW), (here.certificate,)), Issuer(here, TokenStore(tmp_path)), tmp_path)
    _, said = authority_folder.rotate(tmp_path, NOW, DUE + NODE_LIFE, here.certificate)  # by another node of this user
    own.trust.follow(succession(own.trust.authorities, [said]), NOW.timestamp())
    certificate = tmp_path / "certificate.pem"
    whole = certificate.read_bytes()
    async with trio.open_nursery() as nursery:
        renewal = Renewal(own, KEY, tmp_path, MemoryNetwork(nursery).transport("10.0.0.9"), list)
        certificate.write_bytes(b"damaged")
        assert not await renewal.renewed()
        assert f"{certificate} is damaged" in caplog.text
        certificate.write_bytes(whole)
        assert await renewal.renewed()
    assert not is_outdated(own.trust)


@pytest.mark.parametrize("past_h", [0.2, 3.0])
async def test_an_authority_that_has_ended_issues_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, past_h: float
) -> None:
    at = ROOT.certificate.not_valid_after_utc + timedelta(hours=past_h)
    monkeypatch.setattr(wall_clock, "now", lambda: at)
    enrolment = granted(ROOT, request_of(KEY), NOW, issuer=False)
    own = entry(enrolment, Issuer(ROOT, TokenStore(tmp_path)), tmp_path)
    async with trio.open_nursery() as nursery:
        renewal = Renewal(own, KEY, tmp_path, MemoryNetwork(nursery).transport("10.0.0.9"), list)
        assert not await renewal.renewed()
    said = "\n".join(record.message for record in caplog.records)
    assert f"the authority in {tmp_path} ended " in said


@pytest.mark.trio(clock="autojump")
async def test_a_renewed_certificate_that_cannot_be_written_is_in_force_and_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(state: Path, enrolment: Enrolment) -> None:
        raise UserError("certificate.pem: No space left on device")

    async with node(tmp_path) as it, trio.open_nursery() as nursery:
        with monkeypatch.context() as full:
            full.setattr(kept, "write", fails)
            nursery.start_soon(it.renewal.run)
            while "cannot be kept: certificate.pem: No space left" not in caplog.text:  # a thread's time is no clock's
                await trio.sleep(0.01)
            assert it.entry.trust.certificate.not_valid_after_utc == DUE + NODE_LIFE
            assert kept.read(tmp_path, KEY) is None
        began = trio.current_time()
        while (again := kept.read(tmp_path, KEY)) is None:
            await trio.sleep(60)
        assert trio.current_time() - began >= LOOK_EVERY_S - 60
        nursery.cancel_scope.cancel()
        assert again is not None
        assert again.chain == it.entry.trust.chain
