"""What one node tells another of keys and revocations, to whom it tells nothing, and what it finds on its disk."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import trio
from secret_swarm import ISSUER, KEYS, OTHER, ROOT, Node, ends, inline_threads, push_pull

from peerd.security import authority_folder, revocations, secrets_exchange, secrets_folder, shared_secrets, wall_clock
from peerd.security.keyring import ROTATE_S, SPREAD_S, Keyring, order
from peerd.security.secrets_exchange import UNBELIEVED_MAX
from peerd.security.shared_secrets import FIRST_KEY_S, WRITE_AGAIN_S
from peerd.transport.errors import PeerError, UserError
from peerd.transport.messages import (
    COUNT,
    Hello,
    KeyGeneration,
    Keys,
    RevocationList,
    SecretsHeld,
    Successors,
)

pytestmark = pytest.mark.trio(clock="autojump")


@pytest.fixture(autouse=True)
def _inline() -> object:
    with inline_threads():
        yield


async def started(nursery: trio.Nursery, folder: Path, *indices: int) -> list[Node]:
    nodes = [Node(folder, index) for index in indices]
    for node in nodes:
        node.start(nursery)
    await trio.sleep(0.1)
    return nodes


async def test_revocations_go_before_keys_and_what_is_known_is_not_said(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        a, b = await started(nursery, tmp_path, 0, 2)
        assert [type(said) for said in (await push_pull(b, a))[1]] == [Keys, SecretsHeld]
        assert [[type(said) for said in side] for side in await push_pull(a, b)] == [[SecretsHeld], [SecretsHeld]]
        await a.secrets.revoke(KEYS[5].id)
        told = [SecretsHeld, RevocationList, Keys]
        assert [type(said) for said in (await push_pull(a, b))[0]] == told, "the dialler's side"
        await a.secrets.revoke(KEYS[4].id)
        assert [type(said) for said in (await push_pull(b, a))[1]] == [*told[1:], SecretsHeld], "the other's"
        assert b.secrets.is_revoked(KEYS[4].id)
        assert b.news == 5, "a key; a revocation and a key, twice"
        nursery.cancel_scope.cancel()


async def test_all_that_is_asked_for_or_verified_is_counted(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        (a,) = await started(nursery, tmp_path, 0)
        for key in KEYS[3:]:
            await a.secrets.revoke(key.id)
        same, other = SecretsHeld(b"", a.secrets.revocations.digest, b""), SecretsHeld(b"", b"", b"")
        assert [a.talk.rows_of(said) for said in (same, other, Keys(()))] == [1, 4, 1]
        lies = tuple(revocations.make(f"{n:032}", 1, OTHER.sign, b"") for n in range(3))
        assert a.talk.rows_of(RevocationList(lies)) == 4
        before = a.secrets.verifications
        _, there = ends("b", "a")
        await a.talk.answer(there, RevocationList((*lies, *a.secrets.revocations.all())))
        assert a.secrets.verifications == before + 3, "what is known costs nothing"
        nursery.cancel_scope.cancel()


async def test_an_authority_is_not_replaced_where_members_would_not_remember_it(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        (a,) = await started(nursery, tmp_path, 0)
        before = a.secrets.held
        with patch.object(shared_secrets, "SUCCESSORS_MAX", 0), pytest.raises(UserError, match="was replaced"):
            await a.secrets.replace_authority(a.authority, wall_clock.now() + timedelta(hours=1))
        assert a.secrets.held == before
        await a.secrets.replace_authority(a.authority, wall_clock.now() + timedelta(hours=1))
        assert a.secrets.held != before
        nursery.cancel_scope.cancel()


async def test_of_two_replacements_at_once_one_is_refused(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        (a,) = await started(nursery, tmp_path, 0)
        refused: list[str] = []

        async def replace_it() -> None:
            try:
                await a.secrets.replace_authority(a.authority, wall_clock.now() + timedelta(hours=1))
            except UserError as error:
                refused.append(str(error))

        async with trio.open_nursery() as both:
            both.start_soon(replace_it)
            both.start_soon(replace_it)
        assert len(a.secrets.succession.statements()) == 1
        assert len(refused) == 1
        assert "is being replaced already" in refused[0]
        nursery.cancel_scope.cancel()


async def test_an_authority_that_another_node_of_the_user_has_just_replaced_is_not_replaced_again(
    tmp_path: Path,
) -> None:
    """Members would not believe it: they have not heard of the one between, nor has this node."""
    async with trio.open_nursery() as nursery:
        (a,) = await started(nursery, tmp_path, 0)
        until = wall_clock.now() + timedelta(hours=1)
        assert a.secrets.issuer is not None
        known = a.secrets.issuer.certificate
        _, said = authority_folder.rotate(a.authority, wall_clock.now(), until, known)
        with pytest.raises(UserError, match="another node of this user"):
            await a.secrets.replace_authority(a.authority, until)
        assert authority_folder.successors(a.authority) == [said]
        assert a.secrets.unbelieved == 0
        assert a.secrets.live_successors() == [said], "it tells all: whoever did it may have died before it could"
        with pytest.raises(UserError, match="is being replaced already"):
            await a.secrets.replace_authority(a.authority, until)
        nursery.cancel_scope.cancel()


async def test_a_clock_that_jumps_ahead_of_an_authoritys_end_and_back_loses_no_revocation(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        a, b = await started(nursery, tmp_path, 0, 2)
        await a.secrets.revoke(KEYS[5].id)
        await a.secrets.replace_authority(a.authority, wall_clock.now() + timedelta(days=7))
        await push_pull(b, a)
        ahead = wall_clock.now() + timedelta(days=365)
        with patch.object(wall_clock, "now", lambda: ahead):
            b.secrets._follow()
            assert len(b.secrets.in_force) == 1
            assert b.secrets.is_revoked(KEYS[5].id)
            assert not b.secrets.proof_of(KEYS[5].id), "nobody would believe it"
        b.secrets._follow()
        assert b.secrets.proof_of(KEYS[5].id) == a.secrets.proof_of(KEYS[5].id)
        assert b.secrets.revocations.digest == a.secrets.revocations.digest, "else all is told at each exchange"
        nursery.cancel_scope.cancel()


async def test_the_key_changes_though_its_maker_is_started_again_each_day(tmp_path: Path) -> None:
    numbers = []
    async with trio.open_nursery() as nursery:
        (a,) = await started(nursery, tmp_path, 0)
        for _ in range(3):
            await trio.sleep(0.8 * ROTATE_S)
            numbers.append(a.secrets.keyring.generations[0].number)
            a.crash()
            (kept,) = tmp_path.rglob("keyring.hex")
            aged = kept.stat().st_mtime - 0.8 * ROTATE_S  # to the clock on the wall no time has passed
            os.utime(kept, times=(aged, aged))
            a.start(nursery)
        nursery.cancel_scope.cancel()
    assert numbers[0] == 1 < numbers[-1]


async def test_issuers_that_all_start_again_late_make_no_key_each(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        nodes = await started(nursery, tmp_path, 0, 1)
        await push_pull(nodes[1], nodes[0])
        await trio.sleep(SPREAD_S)
        for node in nodes:
            node.crash()
        for kept in tmp_path.rglob("keyring.hex"):
            aged = kept.stat().st_mtime - 2 * ROTATE_S
            os.utime(kept, times=(aged, aged))
        for node in nodes:
            node.start(nursery)
        await trio.sleep(SPREAD_S)
        assert all(node.secrets.keyring.generations[0].number == 1 for node in nodes)
        for _ in range(20):
            await trio.sleep(SPREAD_S / 2)
            await push_pull(nodes[1], nodes[0])
        assert [node.secrets.keyring.generations[0].number for node in nodes] == [2, 2]
        assert len({node.secrets.keyring.generations[0].key for node in nodes}) == 1
        nursery.cancel_scope.cancel()


async def test_where_an_issuer_gone_wrong_leaves_no_number_the_others_try_once_a_day(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        (a,) = await started(nursery, tmp_path, 0)
        before = Keyring(("peerd", ""), lambda *_: "", lambda _: False)
        before.add(KeyGeneration(COUNT.high, bytes(32), 0, b"", b""), 0.0)
        last = [
            before.make(os.urandom(32), 0, ISSUER.sign, ISSUER.issuer_certificate)
            for _ in range(300)
        ]  # fmt: skip
        for one in sorted(last, key=order, reverse=True)[:3]:  # few that a node makes are above them
            assert a.secrets.keyring.add(one, trio.current_time())
        a.news = 0
        with trio.move_on_after(4 * ROTATE_S):
            while a.news < 10:
                await trio.sleep(60.0)
        assert a.news <= 4
        nursery.cancel_scope.cancel()


async def test_nothing_goes_to_a_stranger_or_over_what_proves_nothing(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        (a,) = await started(nursery, tmp_path, 0)
        for identity in (None, ""):
            here, there = ends(identity, identity)
            await a.talk.exchange(here)
            for message in (SecretsHeld(b"", b"", b""), Keys(()), RevocationList(())):
                with pytest.raises(PeerError, match="has not proved who it is"):
                    await a.talk.answer(there, message)
            assert not here.sent
            assert not there.sent
        nursery.cancel_scope.cancel()


async def test_who_is_revoked_in_mid_sentence_gets_no_key(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        (a,) = await started(nursery, tmp_path, 0)
        await a.secrets.revoke(KEYS[3].id)
        _, there = ends(KEYS[3].id, "a")
        with pytest.raises(PeerError, match="is revoked"):
            await a.talk.answer(there, SecretsHeld(b"", b"", b""))
        assert [type(said) for said in there.sent] == [Successors, RevocationList]
        nursery.cancel_scope.cancel()


async def test_what_is_not_believed_changes_nothing_and_much_of_it_is_a_broken_rule(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        (a,) = await started(nursery, tmp_path, 0)
        _, there = ends("b", "a")
        lies = tuple(revocations.make(f"{n:032}", 1, OTHER.sign, b"") for n in range(UNBELIEVED_MAX + 1))
        await a.talk.answer(there, RevocationList(lies[:-1]))
        with pytest.raises(PeerError, match="nobody has signed"):
            await a.talk.answer(there, RevocationList(lies))
        key = a.secrets.keyring.make(bytes(32), 0, OTHER.sign, b"")
        await a.talk.answer(there, Keys((key,)))
        assert not len(a.secrets.revocations)
        assert a.secrets.keyring.generations != (key,)
        assert a.secrets.counts["statements_not_believed"] == 2 * UNBELIEVED_MAX + 2
        with pytest.raises(PeerError, match="4 keys"):
            await a.talk.answer(there, Keys((key,) * 4))
        with pytest.raises(PeerError, match="Hello where keys"):
            await a.talk.answer(there, Hello(1, "", "", "b", "b", 1, "", 1, "", "", ()))
        nursery.cancel_scope.cancel()


async def test_what_is_believed_counts_whatever_lies_come_after_it(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        (a,) = await started(nursery, tmp_path, 0)
        out: list[str] = []
        a.secrets.on_revoked = out.append
        _, there = ends("b", "a")
        true = revocations.make(KEYS[5].id, 1, ROOT.sign, b"")
        lies = tuple(revocations.make(f"{n:032}", 1, OTHER.sign, b"") for n in range(UNBELIEVED_MAX + 1))
        with pytest.raises(PeerError, match="nobody has signed"):
            await a.talk.answer(there, RevocationList((true, *lies)))
        assert out == [KEYS[5].id], "its connections are closed"
        await trio.sleep(0.1)
        assert secrets_folder.read(tmp_path / "0").revocations == [true]
        nursery.cancel_scope.cancel()


async def test_a_list_without_end_is_a_broken_rule(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        (a,) = await started(nursery, tmp_path, 2)
        here, there = ends("a", "b")
        for _ in range(4):
            await there.send(RevocationList(()))
        with patch.object(secrets_exchange, "PARTS_MAX", 3), pytest.raises(PeerError, match="without end"):
            await a.talk.exchange(here)
        nursery.cancel_scope.cancel()


async def test_an_issuer_puts_out_and_is_put_out_with_its_keys(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        a, b, c = await started(nursery, tmp_path, 0, 1, 2)
        await push_pull(b, a)
        assert await b.secrets.revoke(KEYS[4].id)
        assert not await b.secrets.revoke(KEYS[4].id)
        await push_pull(b, a)
        await push_pull(c, a)
        assert a.secrets.keyring.generations[0].issuer == ISSUER.issuer_certificate
        assert await a.secrets.revoke(b.id)
        assert [one.issuer for one in a.secrets.keyring.generations] == [b"", b""]
        assert a.secrets.is_revoked(KEYS[4].id), "what it has said it has said"
        await push_pull(c, a)
        assert a.is_heard_by(c)
        assert not a.is_heard_by(b)
        nursery.cancel_scope.cancel()


async def test_who_cannot_revoke_is_told_why(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        a, c = await started(nursery, tmp_path, 0, 2)
        with pytest.raises(UserError, match="issues no certificates"):
            await c.secrets.revoke(a.id)
        with pytest.raises(UserError, match="the node itself"):
            await a.secrets.revoke(a.id)
        with patch.object(revocations, "REVOKED_MAX", 0), pytest.raises(UserError, match="remembers no more"):
            await a.secrets.revoke(c.id)
        assert not len(a.secrets.revocations)
        nursery.cancel_scope.cancel()


async def test_the_disk_has_it_and_for_this_user_alone(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        a, c = await started(nursery, tmp_path, 0, 3)
        await a.secrets.revoke(c.id)
        kept = a.secrets.keyring.generations
        a.crash()
        assert {path.name: path.stat().st_mode & 0o777 for path in a.folder.iterdir()} == {
            "keyring.hex": 0o600, "revocations.hex": 0o600,
        }  # fmt: skip
        a.start(nursery)
        assert a.secrets.keyring.generations == kept
        assert a.secrets.is_revoked(c.id)
        (c.folder / "revocations.hex").write_text((a.folder / "revocations.hex").read_text())
        c.crash()
        with pytest.raises(UserError, match="this node was revoked"):
            c.start(nursery)
        (a.folder / "keyring.hex").write_text("garbage\n")
        with pytest.raises(UserError, match=r"keyring\.hex is damaged; restore"):
            Node.start(a, nursery)
        nursery.cancel_scope.cancel()


async def test_what_another_authority_said_is_forgotten_at_the_start(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        (a,) = await started(nursery, tmp_path, 0)
        await a.secrets.revoke(KEYS[3].id)
        a.crash()
        text = (a.folder / "revocations.hex").read_text()
        lie = revocations.make("f" * 32, 1, OTHER.sign, b"")
        a.secrets.revocations._kept[lie.node] = lie
        kept = secrets_folder.Kept((), a.secrets.revocations.all(), a.secrets.keyring.generations)
        secrets_folder.write(a.folder, kept)
        assert (a.folder / "revocations.hex").read_text() != text
        a.start(nursery)
        assert not a.secrets.is_revoked(lie.node)
        assert a.secrets.is_revoked(KEYS[3].id)
        nursery.cancel_scope.cancel()


async def test_an_issuer_that_finds_nobody_makes_the_first_key_and_one_that_joins_does_not(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        a, b = await started(nursery, tmp_path, 0, 1)
        assert a.secrets.counts["datagram_keys"] == 1, "the first node of a swarm, at once"
        await push_pull(b, a)
        await trio.sleep(3 * FIRST_KEY_S)
        assert a.secrets.keyring.generations == b.secrets.keyring.generations
        assert len(b.secrets.keyring.generations) == 1
        (alone,) = await started(nursery, tmp_path / "alone", 1)
        assert not alone.secrets.keyring.generations
        await trio.sleep(3 * FIRST_KEY_S)
        assert len(alone.secrets.keyring.generations) == 1
        nursery.cancel_scope.cancel()


async def test_a_revocation_without_its_key_gets_one_from_another_issuer(tmp_path: Path) -> None:
    """Who revoked died in between."""
    async with trio.open_nursery() as nursery:
        a, b = await started(nursery, tmp_path, 0, 1)
        await push_pull(b, a)
        said = revocations.make(KEYS[4].id, 1, ROOT.sign, b"")
        _, there = ends("a", "b")
        await b.talk.answer(there, RevocationList((said, replace(said, revoked_at=2))))
        assert b.secrets.keyring.is_behind(1)
        await trio.sleep(2 * SPREAD_S)
        assert not b.secrets.keyring.is_behind(1)
        await push_pull(b, a)
        assert a.secrets.keyring.digest == b.secrets.keyring.digest
        nursery.cancel_scope.cancel()


async def test_a_file_that_was_damaged_meanwhile_is_written_anew(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        (a,) = await started(nursery, tmp_path, 0)
        assert await a.secrets.revoke(KEYS[4].id)
        for name in secrets_folder.FILES[1:]:
            (a.folder / name).write_bytes(b"\xff\xfe")
        assert await a.secrets.revoke(KEYS[5].id)
        assert {said.node for said in secrets_folder.read(a.folder).revocations} == {KEYS[4].id, KEYS[5].id}
        nursery.cancel_scope.cancel()


async def test_what_the_disk_does_not_take_is_told_and_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with trio.open_nursery() as nursery:
        (a,) = await started(nursery, tmp_path, 0)
        with patch.object(secrets_folder, "write", side_effect=OSError(28, "No space left on device")):
            with pytest.raises(UserError, match=f"^{KEYS[5].id} is out, and others hear of it, but .*No space left"):
                await a.secrets.revoke(KEYS[5].id)
            await trio.sleep(5 * WRITE_AGAIN_S)
        assert a.secrets.is_revoked(KEYS[5].id)
        assert not secrets_folder.read(a.folder).revocations
        await trio.sleep(2 * WRITE_AGAIN_S)
        assert [said.node for said in secrets_folder.read(a.folder).revocations] == [KEYS[5].id]
        told = [record.message for record in caplog.records if str(a.folder) in record.message]
        assert ["No space left" in text for text in told] == [True, False], "once, and when it is written"
        nursery.cancel_scope.cancel()
