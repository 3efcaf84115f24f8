"""From a token to a certificate: over connections in memory, whose handshake is made up here."""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio

from peerd.local.node_key import NodeKey
from peerd.security import authority, authority_folder, kept, wall_clock
from peerd.security.authority import Authority, request_of, succeed
from peerd.security.certificates import Untrusted, der, pin_of
from peerd.security.enrolment import asked, authority_shown, checked, expected_proof, granted, shown
from peerd.security.entry import Entry, Told, entered
from peerd.security.newcomer import enrolled
from peerd.security.reception import Issuer, Reception
from peerd.security.secrets_folder import succession
from peerd.security.token import Token
from peerd.security.token_store import TokenStore
from peerd.security.trust import Trust
from peerd.transport.connection import Connection, ConnectionLost
from peerd.transport.errors import Blameless, PeerError, UserError
from peerd.transport.ids import Address
from peerd.transport.memory import MemoryNetwork
from peerd.transport.messages import AuthorityShown, EnrolmentRefused, EnrolmentRequest, Hello, Message, RenewalRequest
from peerd.transport.secure.credentials import Credentials

NOW = wall_clock.now()
ROOT, OTHER = authority.generate(NOW), authority.generate(NOW)
SERVER, NEW = NodeKey.generate(), NodeKey.generate()
WHERE = ("10.0.0.5", 7946)


class Swarm:
    """One member that may let others in, and what became of those who came."""

    def __init__(self, network: MemoryNetwork, folder: Path, by: Authority = ROOT, issues: bool = True) -> None:
        self.network = network
        self.root = by.root
        self.tokens = TokenStore(folder)
        self.trust = Trust(SERVER, by.issue_own(SERVER, NOW), [by.root])
        issuer = Issuer(by, self.tokens) if issues else None
        self.reception = Reception(self.trust, issuer)
        self.ends: list[Exception | None] = []
        self.dialled: list[Address] = []
        self.reached = 0

    async def serve(self, connection: Connection) -> None:
        try:
            await self.reception.enrol(connection)
            self.ends.append(None)
        except (PeerError, ConnectionLost) as error:
            self.ends.append(error)
        finally:
            await connection.aclose()

    async def dial(self, credentials: Credentials, address: Address) -> Connection:
        self.dialled.append(address)
        connection = await self.network.transport("10.0.0.9").dial(address)
        self.reached += 1
        credentials.identity(der(self.trust.certificate))
        return connection

    def token(self, life_s: int = 3600, uses: int = 1, issuer: bool = False) -> Token:
        now = int(NOW.timestamp())
        return self.tokens.make((WHERE,), pin_of(self.root), uses, life_s, now, issuer=issuer)

    def told(self, folder: Path, token: Token | None, *, loopback: bool = False, joins: bool = False) -> Told:
        return Told(folder / "state", folder / "users", loopback, token, joins)

    async def enters(self, told: Told, key: NodeKey = NEW) -> Entry:
        told.state.mkdir(exist_ok=True)
        return await entered(told, key, self.dial)


@asynccontextmanager
async def swarm(folder: Path, by: Authority = ROOT, issues: bool = True) -> AsyncIterator[Swarm]:
    (folder / "issuer").mkdir()
    async with trio.open_nursery() as nursery:
        there = Swarm(MemoryNetwork(nursery), folder / "issuer", by, issues)
        await nursery.start(there.network.transport(WHERE[0]).listen, WHERE, there.serve)
        yield there
        nursery.cancel_scope.cancel()


# ---------------------------------------------------------------------------------------------------------- let in


async def test_a_token_becomes_a_certificate(tmp_path: Path) -> None:
    async with swarm(tmp_path) as there:
        got = await enrolled(there.token(), NEW, there.dial)
        assert Trust(SERVER, there.trust.chain, there.trust.authorities).identity(der(got.chain[0])) == NEW.id
        assert got.authorities == (ROOT.certificate,)
        assert got.issuer is None
        assert there.ends == [None]


async def test_a_token_for_an_issuer(tmp_path: Path) -> None:
    async with swarm(tmp_path) as there:
        entry = await there.enters(there.told(tmp_path, there.token(issuer=True)))
        assert entry.issuer is not None
        other = NodeKey.generate()
        again = await there.enters(there.told(tmp_path, None))
        assert again.issuer is not None
        chain = again.issuer.authority.issue_own(other, NOW)
        assert len(chain) == 2
        assert authority_shown(there.token(), shown(chain, ROOT.certificate), chain[0], NOW) == ROOT.certificate


async def test_an_issuer_lets_in_whom_all_others_know(tmp_path: Path) -> None:
    issuer = Authority(SERVER, ROOT.make_issuer(request_of(SERVER), NOW), ROOT.certificate)
    async with swarm(tmp_path, by=issuer) as there:
        got = await enrolled(there.token(), NEW, there.dial)
        assert len(got.chain) == 2


async def test_the_second_start_needs_nobody(tmp_path: Path) -> None:
    async with swarm(tmp_path) as there:
        told = there.told(tmp_path, there.token())
        first = await there.enters(told)
        again = await there.enters(told)
        assert again.trust.chain == first.trust.chain
        assert (await there.enters(replace(told, token=None))).trust.chain == first.trust.chain
        assert len(there.dialled) == 1
        assert stat.S_IMODE((told.state / "certificate.pem").stat().st_mode) == 0o600


async def test_who_got_no_answer_keeps_its_key_and_asks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def dies(*_: object, **__: object) -> None:
        raise ConnectionLost("the issuer dies, having noted the use")

    async with swarm(tmp_path) as there:
        told = there.told(tmp_path, there.token())
        with monkeypatch.context() as patch:
            patch.setattr(Reception, "_grant", dies)
            with pytest.raises(UserError, match="closed"):
                await there.enters(told)
        assert [path.name for path in told.state.iterdir()] == ["asked"], "so the folder stays, and its key"
        await there.enters(told)
        assert sorted(path.name for path in told.state.iterdir()) == ["certificate.pem", "token.hex"]
        other = replace(told, state=tmp_path / "other")
        with pytest.raises(UserError, match="used already"):
            await there.enters(other, NodeKey.generate())
        assert not list(other.state.iterdir())


async def test_who_cannot_use_what_came_for_its_clock_keeps_its_key_and_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The issuer has run for days, so that what it shows is good by both clocks; what it gives is of now."""
    before = NOW - timedelta(days=5)
    by = authority.generate(before)
    async with swarm(tmp_path, by=by) as there:
        there.trust.renew(by.issue_own(SERVER, before), [by.root])
        told = there.told(tmp_path, there.token())
        with monkeypatch.context() as patch:
            behind = SimpleNamespace(now=lambda: NOW - timedelta(hours=2))
            patch.setattr("peerd.security.newcomer.wall_clock", behind)
            with pytest.raises(UserError, match="set the clocks of both machines"):
                await there.enters(told)
        assert [path.name for path in told.state.iterdir()] == ["asked"], "so the folder stays, and its key"
        await there.enters(told)
        assert sorted(path.name for path in told.state.iterdir()) == ["certificate.pem", "token.hex"]


async def test_who_is_interrupted_while_it_waits_for_the_answer_keeps_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(*_: object, **__: object) -> None:
        scope.cancel()
        await trio.sleep_forever()

    async with swarm(tmp_path) as there:
        told = there.told(tmp_path, there.token())
        with monkeypatch.context() as patch, trio.CancelScope() as scope:
            patch.setattr(Reception, "_grant", hangs)
            await there.enters(told)
        assert scope.cancelled_caught
        assert [path.name for path in told.state.iterdir()] == ["asked"]
        await there.enters(told)


async def test_who_is_too_busy_is_asked_again(tmp_path: Path) -> None:
    async with swarm(tmp_path) as there:
        busy = 3

        async def dial(credentials: Credentials, address: Address) -> Connection:
            nonlocal busy
            busy -= 1
            if busy >= 0:
                raise ConnectionLost(f"{address}: busy")
            return await there.dial(credentials, address)

        assert await enrolled(there.token(), NEW, dial)


async def test_the_second_address_of_a_token(tmp_path: Path) -> None:
    async with swarm(tmp_path) as there:
        token = there.token()
        assert await enrolled(replace(token, addresses=(("10.0.0.1", 1), *token.addresses)), NEW, there.dial)


# ------------------------------------------------------------------------------------------------------- not let in


async def ended(there: Swarm, connections: int = 1) -> None:
    while len(there.ends) < connections:
        await trio.sleep(0.001)


async def refused(there: Swarm, token: Token, key: NodeKey = NEW) -> tuple[str, str, bool]:
    """What the newcomer is told, what the member says, and whether that is a strike."""
    with pytest.raises(UserError) as told:
        await enrolled(token, key, there.dial)
    await ended(there, there.reached)
    noted = there.ends[-1] if there.ends else None
    assert "\n" not in str(told.value)
    return str(told.value), str(noted), isinstance(noted, PeerError) and not isinstance(noted, Blameless)


async def test_a_token_that_was_used(tmp_path: Path) -> None:
    async with swarm(tmp_path) as there:
        token = there.token()
        await enrolled(token, NodeKey.generate(), there.dial)
        told, noted, strike = await refused(there, token)
        cure = "make another token with peerd token on that node"
        assert told == f"not let in: 10.0.0.5:7946: the token was used already; {cure}"
        assert noted.endswith("not let in: its token was used already")
        assert not strike


async def test_many_at_once_are_no_more_than_the_token_lets_in(tmp_path: Path) -> None:
    async with swarm(tmp_path) as there:
        token = there.token(uses=5)
        ends: list[int | str] = []

        async def comes(key: NodeKey) -> None:
            try:
                ends.append((await enrolled(token, key, there.dial)).chain[0].serial_number)
            except UserError as error:
                ends.append(str(error))

        async with trio.open_nursery() as nursery:
            for _ in range(12):
                nursery.start_soon(comes, NodeKey.generate())
        assert len({end for end in ends if isinstance(end, int)}) == 5
        assert sum("used already" in end for end in ends if isinstance(end, str)) == 7


async def test_a_token_that_has_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm(tmp_path) as there:
        token = there.token()
        monkeypatch.setattr(wall_clock, "now", lambda: NOW + timedelta(hours=1))
        told, noted, strike = await refused(there, token)
        assert "the token has expired; make another" in told
        assert noted.endswith("its token has expired")
        assert not strike


async def test_a_token_that_nobody_made(tmp_path: Path) -> None:
    async with swarm(tmp_path) as there:
        told, noted, strike = await refused(there, replace(there.token(), id=b"another."))
        assert "it never made this token" in told
        assert "never was given its token here" in noted
        assert strike


async def test_a_wrong_secret(tmp_path: Path) -> None:
    async with swarm(tmp_path) as there:
        token = there.token()
        told, noted, strike = await refused(there, replace(token, secret=bytes(16)))
        assert "the token's secret is wrong" in told
        assert "does not know its token's secret" in noted
        assert strike
        assert await enrolled(token, NEW, there.dial), "it is as good as before"


async def test_another_authority_is_told_nothing(tmp_path: Path) -> None:
    async with swarm(tmp_path) as there:
        told, noted, _ = await refused(there, replace(there.token(), pin=pin_of(OTHER.certificate)))
        assert (
            "10.0.0.5:7946: its certificate is of another authority than the token's; is it another swarm's node"
            in told
        )
        assert "connection" in noted or "closed" in noted


async def test_who_issues_no_certificates(tmp_path: Path) -> None:
    async with swarm(tmp_path, issues=False) as there:
        told, noted, strike = await refused(there, there.token())
        assert "it issues no certificates" in told
        assert "this node issues none" in noted
        assert not strike


async def test_an_issuer_of_an_authority_that_has_retired_lets_nobody_in(tmp_path: Path) -> None:
    """What it gave would be believed by none, not even by itself."""
    issuer = Authority(SERVER, ROOT.make_issuer(request_of(SERVER), NOW), ROOT.certificate)
    async with swarm(tmp_path, by=issuer) as there:
        there.trust.follow(succession([ROOT.certificate], [succeed(ROOT, OTHER, NOW, NOW)]), NOW.timestamp())
        told, noted, strike = await refused(there, there.token())
        assert "it issues no certificates" in told
        assert "this node issues none" in noted
        assert not strike


@pytest.mark.trio(clock="autojump")
async def test_nobody_is_there(tmp_path: Path) -> None:
    async with swarm(tmp_path) as there:
        token = replace(there.token(), addresses=(("10.0.0.1", 1), ("10.0.0.2", 2)))
        told, _, _ = await refused(there, token)
        assert "cannot reach 10.0.0.1:1: connection refused; cannot reach 10.0.0.2:2: " in told
        assert told.endswith("does the node that made the token run, and can this machine reach it?")


async def test_a_clock_that_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm(tmp_path) as there:
        token = there.token()
        monkeypatch.setattr(wall_clock, "now", lambda: NOW - timedelta(days=2))
        told, _, _ = await refused(there, token)
        assert told.endswith("set the clocks of both machines")


async def test_a_key_that_is_revoked(tmp_path: Path) -> None:
    async with swarm(tmp_path) as there:
        there.trust.revoked = {NEW.id}.__contains__
        told, noted, _ = await refused(there, there.token())
        assert "this node's key is revoked" in told
        assert "its key is revoked" in noted


async def test_an_issuer_that_cannot_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with swarm(tmp_path) as there:
        token = there.token()
        (tmp_path / "issuer" / "tokens.json").write_text("damaged")
        told, noted, strike = await refused(there, token)
        assert "it failed, as its log says" in told
        assert "could not be looked up" in noted
        assert not strike
        await refused(there, token)
    assert caplog.text.count("cannot let") == 1, "strangers would fill the log: they need no token for this"


@pytest.mark.parametrize(
    "said",
    [
        EnrolmentRequest(b"", b"", b""),
        EnrolmentRequest(b"12345678", request_of(NEW), b"x" * 32),
        Hello(3, "s", "", NEW.id, "a", 1, "10.0.0.9", 1, "gossip", "", ()),
        RenewalRequest(request_of(NEW), (), b""),
    ],
    ids=lambda said: type(said).__name__,
)
async def test_a_stranger_who_says_something_else_is_struck(tmp_path: Path, said: Message) -> None:
    async with swarm(tmp_path) as there:
        connection = await there.network.transport("10.0.0.9").dial(WHERE)
        assert isinstance(await connection.receive(), AuthorityShown)
        await connection.send(said)
        await ended(there)
        assert isinstance(there.ends[0], PeerError)
        assert not isinstance(there.ends[0], Blameless)


@pytest.mark.trio(clock="autojump")
async def test_a_silent_stranger_is_dropped(tmp_path: Path) -> None:
    async with swarm(tmp_path) as there:
        await there.network.transport("10.0.0.9").dial(WHERE)
        await trio.sleep(60)
        assert isinstance(there.ends[0], Blameless)


# ---------------------------------------------------------------------------------------------- the pure core's checks


def test_a_proof_that_a_false_issuer_got_is_worth_nothing() -> None:
    """It is a member with a certificate of the same authority, and passes on what it hears."""
    token = Token((WHERE,), pin_of(ROOT.certificate), b"12345678", b"s" * 16, 0)
    true, false = (ROOT.issue_own(key, NOW)[0] for key in (SERVER, NodeKey.generate()))
    heard, asked_here = asked(token, NEW, false), asked(token, NEW, true)
    assert heard.proof != expected_proof(ROOT.certificate, true, heard, token.secret)
    assert asked_here.proof == expected_proof(ROOT.certificate, true, asked_here, token.secret)


def test_what_is_granted_must_be_for_this_key_and_of_this_authority() -> None:
    def given_by(by: Authority, key: NodeKey) -> None:
        made = granted(by, request_of(key), NOW, issuer=False)
        checked(made.message(), NEW, [ROOT.certificate], NOW)

    given_by(ROOT, NEW)
    with pytest.raises(Untrusted, match="another node's"):
        given_by(ROOT, SERVER)
    with pytest.raises(Untrusted, match="another authority"):
        given_by(OTHER, NEW)


# ------------------------------------------------------------------------------------------------------ which swarm


async def test_on_loopback_all_nodes_are_the_users(tmp_path: Path) -> None:
    async with swarm(tmp_path) as there:
        told = there.told(tmp_path, None, loopback=True, joins=True)
        a, b = await there.enters(told), await there.enters(told, NodeKey.generate())
        assert a.trust.authorities == b.trust.authorities
        assert a.trust.chain != b.trust.chain
        assert not list(told.state.iterdir()), "nothing of it is kept"
        assert stat.S_IMODE(told.users.stat().st_mode) == 0o700
        assert not there.dialled


async def test_on_loopback_with_a_token_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm(tmp_path) as there:
        entry = await there.enters(there.told(tmp_path, there.token(), loopback=True))
        assert entry.trust.authorities == (ROOT.certificate,)
        again = await there.enters(there.told(tmp_path, None, loopback=True))
        assert again.trust.chain == entry.trust.chain, "the second time, the token is not needed"
        assert len(there.dialled) == 1
        monkeypatch.setattr(wall_clock, "now", lambda: NOW + timedelta(days=91))
        own = await there.enters(there.told(tmp_path, None, loopback=True))
        assert own.trust.authorities != entry.trust.authorities


async def test_on_loopback_with_a_token_of_ones_own(tmp_path: Path) -> None:
    async with swarm(tmp_path) as there:
        own = authority_folder.at(tmp_path / "users", NOW)
        token = replace(there.token(), pin=pin_of(own.certificate))
        entry = await there.enters(there.told(tmp_path, token, loopback=True))
        assert entry.trust.authorities == (own.certificate,)
        assert not there.dialled


async def test_the_first_node_founds(tmp_path: Path) -> None:
    async with swarm(tmp_path) as there:
        told = there.told(tmp_path, None)
        first, again = await there.enters(told), await there.enters(replace(told, joins=True))
        assert first.trust.authorities == again.trust.authorities
        assert first.issuer is not None
        assert stat.S_IMODE((told.state / "authority").stat().st_mode) == 0o700


async def test_who_joins_without_a_token_is_told_how(tmp_path: Path) -> None:
    async with swarm(tmp_path) as there:
        with pytest.raises(UserError, match=r"^[^\n]*run peerd token there[^\n]*--insecure-plaintext[^\n]*$"):
            await there.enters(there.told(tmp_path, None, joins=True))
        assert not list((tmp_path / "state").iterdir())


@pytest.mark.parametrize("before", ["founder", "member"])
async def test_a_member_is_given_another_swarms_token(tmp_path: Path, before: str) -> None:
    async with swarm(tmp_path) as there:
        await there.enters(there.told(tmp_path, there.token() if before == "member" else None))
        other = replace(there.token(), pin=pin_of(OTHER.certificate))
        with pytest.raises(UserError, match=r"give it another --name, or to leave that swarm for good remove"):
            await there.enters(there.told(tmp_path, other))


async def test_a_certificate_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm(tmp_path) as there:
        await there.enters(there.told(tmp_path, there.token()))
        token = there.token(life_s=86400 * 300)
        monkeypatch.setattr(wall_clock, "now", lambda: NOW + timedelta(days=91))
        with pytest.raises(UserError, match=r"this node's certificate is expired since .*peerd token on a member"):
            await there.enters(there.told(tmp_path, None))
        there.trust.renew(ROOT.issue_own(SERVER, wall_clock.now()), [ROOT.certificate])
        assert await there.enters(there.told(tmp_path, token))
        assert await there.enters(there.told(tmp_path, None))


async def test_a_clock_before_the_certificate_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm(tmp_path) as there:
        await there.enters(there.told(tmp_path, there.token()))
        monkeypatch.setattr(wall_clock, "now", lambda: NOW - timedelta(days=400))
        with pytest.raises(UserError, match="set this machine's clock"):
            await there.enters(there.told(tmp_path, None))


@pytest.mark.parametrize("content", ["", "\0", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
async def test_a_damaged_certificate_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "certificate.pem").write_text(content)
    with pytest.raises(UserError, match=r"is damaged; restore it from a backup, or remove it and give"):
        kept.read(tmp_path, NEW)


def test_whom_an_issuer_lets_in_whose_clock_is_behind_can_start_again(tmp_path: Path) -> None:
    """Its certificate begins before that of the issuer."""
    issuer = Authority(SERVER, ROOT.make_issuer(request_of(SERVER), NOW), ROOT.certificate)
    for behind in (timedelta(), timedelta(minutes=30)):
        kept.write(tmp_path, granted(issuer, request_of(NEW), NOW - behind, issuer=False))
        assert kept.read(tmp_path, NEW) is not None


async def test_who_refuses_before_it_has_shown_an_authority_may_be_anybody(tmp_path: Path) -> None:
    async with swarm(tmp_path) as there:
        stranger = ("10.0.0.1", 1)

        async def lies(connection: Connection) -> None:
            await connection.send(EnrolmentRefused("used-up"))
            await connection.flushed()

        async with trio.open_nursery() as nursery:
            await nursery.start(there.network.transport(stranger[0]).listen, stranger, lies)
            token = there.token()
            assert await enrolled(replace(token, addresses=(stranger, *token.addresses)), NEW, there.dial)
            nursery.cancel_scope.cancel()


async def test_a_certificate_of_another_key(tmp_path: Path) -> None:
    kept.write(tmp_path, granted(ROOT, request_of(SERVER), NOW, issuer=False))
    with pytest.raises(UserError, match="is of another key than the node's"):
        kept.read(tmp_path, NEW)


# ---------------------------------------------------------------------------------------------------------- renewal


async def test_a_member_gets_another_certificate_for_its_own_key_only(tmp_path: Path) -> None:
    async with swarm(tmp_path) as there:
        sent: list[Message] = []

        class Link:
            remote, identity = "10.0.0.9:1", NEW.id

            async def send(self, message: Message) -> None:
                sent.append(message)

            async def flushed(self) -> None:
                pass

        connection: Connection = Link()  # type: ignore[assignment]
        chain = tuple(map(der, ROOT.issue_own(NEW, NOW)))
        await there.reception.renew(connection, RenewalRequest(request_of(NEW), chain, b""))
        assert checked(sent[0], NEW, [ROOT.certificate], NOW).issuer is None  # type: ignore[arg-type]
        with pytest.raises(PeerError, match="asks for the certificate of"):
            await there.reception.renew(connection, RenewalRequest(request_of(SERVER), chain, b""))
        issuer = der(ROOT.make_issuer(request_of(NEW), NOW))
        await there.reception.renew(connection, RenewalRequest(request_of(NEW), chain, issuer))
        assert checked(sent[1], NEW, [ROOT.certificate], NOW).issuer is not None  # type: ignore[arg-type]
        stolen = der(ROOT.make_issuer(request_of(SERVER), NOW))
        await there.reception.renew(connection, RenewalRequest(request_of(NEW), chain, stolen))
        assert checked(sent[2], NEW, [ROOT.certificate], NOW).issuer is None  # type: ignore[arg-type]
