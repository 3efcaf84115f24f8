"""Who a node is: the same id, a greater epoch with every start, and one process at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peerd.local import identity
from peerd.local.node_key import NodeKey
from peerd.transport.errors import UserError

FILE = "identity.json"
KEY = "key.pem"


def live_once(folder: Path) -> identity.Identity:
    """Start and end: the lock goes with the process."""
    taken = identity.take(folder)
    os.close(taken.lock)
    return taken


def test_the_id_stays_and_the_epoch_grows(tmp_path: Path) -> None:
    lives = [live_once(tmp_path / "not" / "there" / "yet") for _ in range(5)]
    assert len({life.id for life in lives}) == 1
    assert [life.epoch for life in lives] == [1, 2, 3, 4, 5]
    assert re.fullmatch("[0-9a-f]{32}", lives[0].id)
    assert lives[0].id == lives[0].key.fingerprint[:32]


def test_two_folders_are_two_nodes(tmp_path: Path) -> None:
    assert live_once(tmp_path / "a").id != live_once(tmp_path / "b").id


def test_only_one_process_has_a_folder(tmp_path: Path) -> None:
    held = identity.take(tmp_path)
    with pytest.raises(UserError, match=r"a node already runs with the state folder .* another --name"):
        identity.take(tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["epoch"] == 1, "the refused start is no epoch"
    os.close(held.lock)
    assert live_once(tmp_path).epoch == 2


def test_a_lock_that_a_failing_start_takes_away_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, failing = fcntl.flock, [True]

    def meanwhile(lock: int, how: int) -> None:
        if failing:
            failing.clear()
            (tmp_path / "lock").unlink()
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", meanwhile)
    held = identity.take(tmp_path)
    with pytest.raises(UserError, match="a node already runs with the state folder"):
        identity.take(tmp_path)
    os.close(held.lock)


def test_a_file_system_whose_files_cannot_be_told_apart_holds_no_start_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "samestat", lambda *_: False)
    with pytest.raises(UserError, match=r"its lock is another file each time; choose another with state_dir$"):
        identity.take(tmp_path)


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with pytest.raises(UserError, match=r"^state folder .*: No locks available; choose another with state_dir$"):
        identity.take(tmp_path)


def test_a_folder_that_cannot_be_is_refused_in_a_line(tmp_path: Path) -> None:
    for folder in (tmp_path / ("y" * 300), tmp_path / "a\0b"):
        with pytest.raises(UserError, match="choose another with state_dir"), identity.taken(folder, tmp_path / "run"):
            raise AssertionError("it is taken")
    assert not list(tmp_path.iterdir())


def test_a_folder_whose_name_is_no_text_is_refused_in_a_line(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff") / "node"
    with pytest.raises(UserError, match="its name is not UTF-8; choose another with state_dir"):
        identity.take(folder)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("peerd.local.durable.flush", full)
    with pytest.raises(UserError, match="No space left"), identity.taken(tmp_path / "a" / "b", tmp_path / "run"):
        raise AssertionError("it is taken")
    assert not list(tmp_path.iterdir())


def test_the_lock_is_not_inherited(tmp_path: Path) -> None:
    held = identity.take(tmp_path)
    assert not os.get_inheritable(held.lock), "a script that outlives its daemon would keep the folder"
    os.close(held.lock)


def test_a_lost_key_is_a_new_identity(tmp_path: Path) -> None:
    first = live_once(tmp_path)
    (tmp_path / KEY).unlink()
    second = live_once(tmp_path)
    assert second.id != first.id
    assert second.epoch == 1


def test_a_lost_count_goes_on_from_the_clock(tmp_path: Path) -> None:
    first = [live_once(tmp_path) for _ in range(5)][-1]
    (tmp_path / FILE).unlink()
    second = live_once(tmp_path)
    assert second.id == first.id
    assert second.epoch > 1 << 30, "above any count of starts, so that it supersedes every earlier life"
    assert live_once(tmp_path).epoch == second.epoch + 1


def test_the_count_of_another_key_is_not_taken_up(tmp_path: Path) -> None:
    for name in "ab":
        live_once(tmp_path / name)
    (tmp_path / "a" / KEY).replace(tmp_path / "b" / KEY)
    assert live_once(tmp_path / "b").epoch > 1 << 30, "epoch 2 may be one that the key has had"


def test_an_identity_without_a_key_is_replaced_and_all_else_stays(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"id": "0123456789abcdef", "epoch": 7}')
    (tmp_path / "members.json").write_text("{}")
    taken = live_once(tmp_path)
    assert (len(taken.id), taken.epoch) == (32, 1)
    assert (tmp_path / "members.json").read_text() == "{}"


def password_protected() -> bytes:
    private = Ed25519PrivateKey.generate()
    return private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))


def of_another_kind() -> bytes:
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def of_a_flipped_bit() -> bytes:
    """Which makes Ed448's of it: the library calls that an internal error."""
    private = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private.replace(b"BQYDK2Vw", b"BQYDK2Vv")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff" * 99, b"-----BEGIN PRIVATE KEY-----\n", password_protected(), of_another_kind(),
        of_a_flipped_bit(),
    ],
)  # fmt: skip
def test_a_damaged_key_is_one_line_and_never_another_identity(tmp_path: Path, content: bytes) -> None:
    first = live_once(tmp_path)
    whole = (tmp_path / KEY).read_bytes()
    (tmp_path / KEY).write_bytes(content)
    with pytest.raises(UserError, match=r"key\.pem is damaged; restore it from a backup, or remove it: [^\n]*$"):
        identity.take(tmp_path)
    (tmp_path / KEY).write_bytes(whole)
    assert live_once(tmp_path).id == first.id, "the refused start holds no lock"


def test_a_folder_in_the_keys_place_is_one_line(tmp_path: Path) -> None:
    (tmp_path / KEY).mkdir()
    with pytest.raises(UserError, match="is damaged"):
        identity.take(tmp_path)


@pytest.mark.parametrize("mask", [0o000, 0o022])
def test_what_is_kept_is_for_the_user_alone(tmp_path: Path, mask: int) -> None:
    folder = tmp_path / "state"
    before = os.umask(mask)
    try:
        live_once(folder)
        assert modes(folder) == {"state": 0o700, FILE: 0o600, KEY: 0o600, "lock": 0o600}
        (folder / KEY).chmod(0o644)
        (folder / FILE).with_suffix(".tmp").touch(0o666)
        live_once(folder)
    finally:
        os.umask(before)
    assert modes(folder) == {"state": 0o700, FILE: 0o600, KEY: 0o600, "lock": 0o600}


def modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}


def test_a_signature_is_for_one_purpose_one_message_and_one_key() -> None:
    key, other = NodeKey.generate(), NodeKey.generate()
    signature = key.sign("this", b"message")
    assert key.verify(signature, "this", b"message")
    assert not key.verify(signature, "that", b"message")
    assert not key.verify(signature, "this", b"another")
    assert not key.verify(signature, "thi", b"smessage")
    assert not key.verify(signature[:-1], "this", b"message")
    assert not other.verify(signature, "this", b"message")


def test_the_id_is_the_hash_that_openssl_has_of_the_public_key(tmp_path: Path) -> None:
    taken = live_once(tmp_path)
    command = f"openssl pkey -in {tmp_path / KEY} -pubout -outform DER | openssl dgst -sha256 -r"
    if shutil.which("openssl"):
        said = subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout
        assert said.split()[0] == taken.key.fingerprint


@settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=60)
    | st.fixed_dictionaries(
        {
            "id": st.just("OURS")
            | st.none()
            | st.text(max_size=20)
            | st.from_regex(r"\A[0-9a-f]{32}\Z")
            | st.integers(),
            "epoch": st.integers()
            | st.integers((1 << 53) - 3, (1 << 53) + 1)
            | st.floats()
            | st.booleans()
            | st.text(max_size=3)
            | st.none(),
        }
    ).map(lambda kept: json.dumps(kept).encode())
)
def test_any_damage_gives_a_usable_identity(tmp_path: Path, content: bytes) -> None:
    id = live_once(tmp_path).id
    (tmp_path / FILE).write_bytes(content.replace(b"OURS", id.encode()))
    taken = live_once(tmp_path)
    assert taken.id == id
    assert 1 <= taken.epoch < 1 << 53
    again = live_once(tmp_path)
    assert again.id == id
    assert again.epoch == taken.epoch + 1 or taken.epoch == identity.EPOCH_MAX


@pytest.mark.parametrize("kept", ['{"id": "0123456789abcdef", "epoch": Infinity}', "[" * 100_000, '{"epoch": 1}'])
def test_hostile_files(tmp_path: Path, kept: str) -> None:
    (tmp_path / FILE).write_text(kept)
    assert live_once(tmp_path).epoch == 1
    (tmp_path / FILE).write_text(kept)
    assert live_once(tmp_path).epoch > 1


def test_a_crash_while_writing_keeps_the_old_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = live_once(tmp_path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="No space left on device"):
            identity.take(tmp_path)
    again = live_once(tmp_path)
    assert (again.id, again.epoch) == (first.id, 2)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"state folder .*file/state: Not a directory; choose another with state_dir"):
        identity.take(tmp_path / "file" / "state")


def refused(state: Path, runtime: Path, *made: Path) -> None:
    """A start that comes to make these folders, and fails."""
    with identity.taken(state, runtime):
        for folder in made:
            folder.mkdir()
        raise UserError("refused")


def test_what_fails_leaves_no_folder_that_it_made(tmp_path: Path) -> None:
    state, runtime = tmp_path / "new" / "state", tmp_path / "run" / "peerd"
    runtime.parent.mkdir()
    with pytest.raises(UserError):
        refused(state, runtime, runtime)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert not runtime.exists()


@pytest.mark.parametrize("kept", ["checkpoints", "members.json", None])
def test_what_fails_leaves_what_was_there_or_is_worth_keeping(tmp_path: Path, kept: str | None) -> None:
    if kept is None:
        live_once(tmp_path / "state")
    with pytest.raises(UserError):
        refused(tmp_path / "state", tmp_path / "run", *([tmp_path / "state" / kept] if kept else []))
    assert json.loads((tmp_path / "state" / FILE).read_text())["epoch"] == (1 if kept else 2)


def test_a_second_start_takes_nothing_from_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with identity.taken(folder, tmp_path / "run") as held:
        with pytest.raises(UserError, match="already runs"), identity.taken(folder, tmp_path / "run"):
            raise AssertionError("not reached")
        assert json.loads((folder / FILE).read_text())["id"] == held.id
        os.close(held.lock)
