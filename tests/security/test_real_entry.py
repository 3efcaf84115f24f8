"""Whole daemons in this process, over real connections: a token, a renewal, and strangers."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio

from peerd.carriers import Finding
from peerd.daemon.cures import cured
from peerd.daemon.node import Daemon, running
from peerd.daemon.verbs import Verbs
from peerd.doctor import _lets_in
from peerd.local import identity
from peerd.local.node_key import NodeKey
from peerd.security import authority, authority_folder, kept, wall_clock
from peerd.security.authority import NODE_LIFE, succeed
from peerd.security.certificates import issuers_of
from peerd.security.token import parse
from peerd.security.trust import Newcomer, Trust
from peerd.settings import Settings
from peerd.transport.connection import Connection, ConnectionLost
from peerd.transport.errors import UserError
from peerd.transport.hello import Refused, greet
from peerd.transport.ids import Address
from peerd.transport.messages import AuthorityShown, Hello, MemberTable, Message, SpeedRequest
from peerd.transport.secure.credentials import Credentials
from peerd.transport.tcp import TcpTransport


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "users"))


@asynccontextmanager
async def node(folder: Path, name: str, **told: object) -> AsyncIterator[tuple[Daemon, Address]]:
    settings = Settings(name=name, bind="127.0.0.1:0", state_dir=str(folder / name), **told)  # type: ignore[arg-type]
    mine = identity.take(settings.state_path)
    try:
        async with running(settings, mine, expects=False) as (daemon, address):
            yield daemon, address
    finally:
        os.close(mine.lock)


async def token_of(daemon: Daemon, **wishes: object) -> str:
    answer = await Verbs(daemon).table()["token"]({"uses": 1, "expires": "24h", "issuer": False, **wishes})
    return str(answer["token"])


async def dial(nursery: trio.Nursery, credentials: Credentials, where: Address) -> Connection:
    return await TcpTransport(nursery, credentials=credentials).dial(where)


async def knows_issuer(daemon: Daemon) -> None:
    while not daemon._issuers():
        await trio.sleep(0.02)


async def test_a_token_and_a_renewal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with node(tmp_path, "a") as (a, _):
        line = await token_of(a)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
        async with node(tmp_path, "b", token=line) as (b, _):
            assert a.reception is not None
            assert b.renewal is not None
            assert b.entry is not None
            assert a.reception.counts["enrolled"] == 1
            await knows_issuer(b)
            before = b.entry.trust.certificate
            later = wall_clock.now() + NODE_LIFE * 0.7
            monkeypatch.setattr(wall_clock, "now", lambda: later)
            assert await b.renewal.renewed()
            assert b.entry.trust.certificate.not_valid_after_utc > before.not_valid_after_utc
            assert a.reception.counts["renewed"] == 1
            again = kept.read(tmp_path / "b", b.key)
            assert again is not None
            assert again.chain == b.entry.trust.chain


async def test_a_node_that_is_revoked_cannot_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with node(tmp_path, "a") as (a, where):
        line = await token_of(a)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
        async with node(tmp_path, "b", token=line) as (b, _):
            assert a.entry is not None
            assert b.entry is not None
            a.entry.trust.revoked = {b.me.id}.__contains__
            async with trio.open_nursery() as nursery:
                with pytest.raises(Refused, match="our certificate is revoked") as refused:
                    await dial(nursery, b.entry.trust, where)
                assert not refused.value.proof, "nobody has signed it"
                nursery.cancel_scope.cancel()


async def test_only_the_signed_word_of_a_revocation_ends_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(tmp_path, "a") as (a, where):
        line = await token_of(a)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
        async with node(tmp_path, "b", token=line) as (b, _), node(tmp_path, "other") as (other, _):
            assert a.entry is not None
            assert b.entry is not None
            assert a.secrets is not None
            assert b.secrets is not None
            assert other.secrets is not None
            b.peers.forget(a.me.id)
            await other.secrets.revoke(b.me.id)  # an authority of its own, which b has never heard of
            async with trio.open_nursery() as nursery:
                a.entry.trust.revoked = {b.me.id}.__contains__
                for proof in (b"", b"\x00", b"\xff" * 1000, other.secrets.proof_of(b.me.id)):
                    a.entry.trust.proof_of = lambda node, proof=proof: proof  # type: ignore[misc]
                    with pytest.raises(Refused) as refused:
                        await dial(nursery, b.entry.trust, where)
                    assert refused.value.proof == proof
                    b._on_refused_by_peer(a.me.id, refused.value)
                    assert not b.model.failed.is_set()
                a.entry.trust.revoked, a.entry.trust.proof_of = a.secrets.is_revoked, a.secrets.proof_of
                await a.secrets.revoke(b.me.id)
                with pytest.raises(Refused) as refused:
                    await dial(nursery, b.entry.trust, where)
                b._on_refused_by_peer(a.me.id, refused.value)
                assert b.model.failed.is_set()
                assert "this node was revoked" in str(b.model.fatal)
                nursery.cancel_scope.cancel()


async def test_whoever_an_issuer_let_in_goes_with_it_at_once_and_comes_back_by_another_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(tmp_path, "a") as (a, where):
        lines = [await token_of(a, issuer=True), await token_of(a)]
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
        async with node(tmp_path, "i", token=lines[0]) as (i, _):
            first = await token_of(i)
            async with node(tmp_path, "n", token=first) as (n, _), trio.open_nursery() as nursery:
                assert n.entry is not None
                assert a.secrets is not None
                assert issuers_of(n.entry.trust.certificate) == {i.me.id}
                connection = await dial(nursery, n.entry.trust, where)
                await greet(connection, n._hello())
                await a.secrets.revoke(i.me.id)
                with pytest.raises(ConnectionLost), trio.fail_after(1):  # probes would find it after 7 s
                    await connection.receive()
                with pytest.raises(Refused, match="our certificate is of an issuer that is revoked") as refused:
                    await dial(nursery, n.entry.trust, where)
                assert "give that node a new token" in cured(refused.value)
                nursery.cancel_scope.cancel()
        async with node(tmp_path, "n", token=lines[1]) as (n, _):
            assert n.entry is not None
            assert n.entry.by == "a token", "though the certificate that it has looks good to it"
            assert not issuers_of(n.entry.trust.certificate)
        async with node(tmp_path, "n", token=first) as (n, _):
            assert n.entry is not None
            assert n.entry.by == "the certificate that it keeps", "a token that is of no use harms nobody"


async def current(daemon: Daemon) -> None:
    """Wait until it has a certificate of the newest authority of two."""
    assert daemon.entry is not None
    trust = daemon.entry.trust
    with trio.fail_after(30):  # a bound on waiting
        while len(trust.authorities) < 2 or trust.outdated:
            await trio.sleep(0.02)


async def test_a_new_authority_takes_the_place_of_the_old_one_and_nobody_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peerd.security.renewal.ALL_AT_ONCE_S", 0.1)
    async with node(tmp_path, "a") as (a, _):
        line, unused = await token_of(a, uses=2), await token_of(a)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
        async with node(tmp_path, "c", token=line):
            pass  # it is off while the authority is replaced
        async with node(tmp_path, "b", token=line) as (b, _):
            await knows_issuer(b)
            rotate = Verbs(a).table()["rotate"]
            assert [one[-2:] for one in (await rotate({"retire": "7d"}))["authorities"]] == ["TC", "d)"]
            with pytest.raises(UserError, match="is being replaced already, until"):
                await rotate({"retire": "7d"})
            with pytest.raises(UserError, match="b has no authority"):
                await Verbs(b).table()["rotate"]({"retire": "7d"})
            await current(a)
            await current(b)
            async with node(tmp_path, "c", token=line) as (c, _):
                assert c.entry is not None
                assert c.entry.by == "the certificate that it keeps"
                await current(c)
            async with node(tmp_path, "d", token=await token_of(a)) as (d, _):
                await current(d)
                infos = [(await Verbs(one).table()["info"]({})) for one in (a, b, d)]
                assert len({tuple(info["authorities"]) for info in infos}) == 1
                assert len({info["authority"] for info in infos}) == 1
            with pytest.raises(BaseExceptionGroup) as group:
                async with node(tmp_path, "e", token=unused):
                    pass
            assert group.group_contains(UserError, match="of another authority than the token's")
        async with node(tmp_path, "b", token=line) as (b, _):  # the token of before is still in its command line
            await current(b)
        assert not [one for one in (a, b) if one.peers.offences.counts["strikes"]]


async def test_an_issuer_of_an_authority_that_has_retired_makes_no_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(tmp_path, "a") as (a, _):
        line = await token_of(a, issuer=True)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
        async with node(tmp_path, "i", token=line) as (i, _):
            assert await token_of(i)
            assert a.entry is not None
            assert a.entry.issuer is not None
            assert i.secrets is not None
            now = wall_clock.now()
            retired = succeed(a.entry.issuer.authority, authority.generate(now), now, now)
            i.secrets.succession.recall([retired])  # it was off when the authority was replaced, and for long after
            i.secrets._follow()
            with pytest.raises(UserError, match=r"replaced since.* run peerd token on the swarm's first node"):
                await token_of(i)


async def test_nodes_of_one_user_share_the_new_authority(tmp_path: Path) -> None:
    async with node(tmp_path, "a") as (a, (host, port)), node(tmp_path, "b", join=(f"{host}:{port}",)) as (b, _):
        while len(a.members()) < 2 or len(b.members()) < 2:
            await trio.sleep(0.02)
        await Verbs(b).table()["rotate"]({"retire": "1h"})
        for one in (a, b):
            await current(one)
        assert a.entry is not None
        assert b.entry is not None
        assert a.entry.issuer is not None
        assert a.entry.issuer.authority.certificate == b.entry.trust.authorities[0]
        async with node(tmp_path, "c", join=(f"{host}:{port}",)) as (c, _):
            await current(c)


async def test_doctor_says_whether_a_node_would_let_in_who_has_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def found(address: Address, line: str) -> Finding:
        return await trio.to_thread.run_sync(_lets_in, address, parse(line))

    async with node(tmp_path, "a") as (a, at):
        line = await token_of(a)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
        assert (await found(at, line)).state == "ok"
        async with node(tmp_path, "b", token=line) as (_, near):
            silent = await found(near, line)
            assert silent.state == "note", "another address may"
            assert "it issues no certificates" in silent.found
        fails = await found(at, replace(parse(line), pin=bytes(32)).pack())
        assert fails.state == "fail"
        assert "its certificate is of another authority than the token's" in fails.found
        assert "peerd rotate" in fails.cure
        early = wall_clock.now() - timedelta(days=1)
        monkeypatch.setattr(wall_clock, "now", lambda: early)
        fails = await found(at, line)
        assert (fails.state, fails.cure) == ("fail", "set the clocks of both machines")
        assert a.reception is not None
        assert a.reception.counts["enrolled"] == 1, "it asks for none"


async def test_a_newcomer_whose_clock_is_ahead_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, ahead in (("b", timedelta(minutes=59)), ("c", timedelta(hours=25))):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "users"))
        async with node(tmp_path, "a") as (a, _):
            line = await token_of(a)
            monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
            own = SimpleNamespace(now=lambda ahead=ahead: wall_clock.now() + ahead, shown=wall_clock.shown)
            monkeypatch.setattr("peerd.security.entry.wall_clock", own)
            async with node(tmp_path, name, token=line):
                told = [record.message for record in caplog.records if "set the clocks" in record.message]
            assert len(told) == (name == "c")


@pytest.mark.parametrize(
    "said",
    [
        Hello(3, "peerd", "", "x", "x", 1, "127.0.0.1", 9, "gossip", "", ()),
        MemberTable("x", ()),
        SpeedRequest(),
    ],
    ids=lambda said: type(said).__name__,
)
async def test_a_stranger_is_told_of_the_authority_and_nothing_else(tmp_path: Path, said: Message) -> None:
    async with node(tmp_path, "a") as (a, where), trio.open_nursery() as nursery:
        connection = await dial(nursery, Newcomer(), where)
        assert isinstance(await connection.receive(), AuthorityShown)
        await connection.send(said)
        with pytest.raises(ConnectionLost):
            await connection.receive()
        assert list(a.members()) == [a.me.id]
        nursery.cancel_scope.cancel()


async def test_a_member_that_poses_as_another_is_dropped(tmp_path: Path) -> None:
    async with node(tmp_path, "a") as (a, where), trio.open_nursery() as nursery:
        users = authority_folder.at(a.settings.authority_path, wall_clock.now())
        key = NodeKey.generate()
        trust = Trust(key, users.issue_own(key, wall_clock.now()), [users.certificate])
        connection = await dial(nursery, trust, where)
        await connection.send(replace(a._hello(), node="another"))
        with pytest.raises(ConnectionLost):
            await connection.receive()
        assert a.peers.offences.counts["strikes"] == 1
        nursery.cancel_scope.cancel()


async def test_a_wrong_secret_leaves_the_token_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with node(tmp_path, "a") as (a, _):
        line = await token_of(a)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
        wrong = replace(parse(line), secret=bytes(16)).pack()
        with pytest.raises(BaseExceptionGroup) as group:
            async with node(tmp_path, "b", token=wrong):
                pass
        assert group.group_contains(UserError, match="the token's secret is wrong")
        async with node(tmp_path, "b", token=line) as (b, _):
            assert b.entry is not None
            assert b.entry.by == "a token"
        assert a.reception is not None
        assert (a.reception.counts["enrolled"], a.reception.counts["enrolments_refused"]) == (1, 1)
