"""Who a node is: the same id, a greater epoch with every start, and one process at a time."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peerd.local import identity
from peerd.transport.errors import UserError

FILE = "identity.json"


def live_once(folder: Path) -> identity.Identity:
    """Start and end: the lock goes with the process."""
    taken = identity.take(folder)
    os.close(taken.lock)
    return taken


def test_the_id_stays_and_the_epoch_grows(tmp_path: Path) -> None:
    lives = [live_once(tmp_path / "not" / "there" / "yet") for _ in range(5)]
    assert len({life.id for life in lives}) == 1
    assert [life.epoch for life in lives] == [1, 2, 3, 4, 5]
    assert len(lives[0].id) == 16


def test_two_folders_are_two_nodes(tmp_path: Path) -> None:
    assert live_once(tmp_path / "a").id != live_once(tmp_path / "b").id


def test_only_one_process_has_a_folder(tmp_path: Path) -> None:
    held = identity.take(tmp_path)
    with pytest.raises(UserError, match=r"a node already runs with the state folder .* another --name"):
        identity.take(tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["epoch"] == 1, "the refused start is no epoch"
    os.close(held.lock)
    assert live_once(tmp_path).epoch == 2


def test_a_folder_that_cannot_be_is_refused_in_a_line(tmp_path: Path) -> None:
    for folder in (tmp_path / ("y" * 300), tmp_path / "a\0b"):
        with pytest.raises(UserError, match="choose another with state_dir"), identity.taken(folder, tmp_path / "run"):
            raise AssertionError("it is taken")
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


def test_a_lost_file_is_a_new_identity(tmp_path: Path) -> None:
    first = live_once(tmp_path)
    (tmp_path / FILE).unlink()
    second = live_once(tmp_path)
    assert second.id != first.id
    assert second.epoch == 1


@settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=60)
    | st.fixed_dictionaries(
        {
            "id": st.none() | st.text(max_size=20) | st.from_regex(r"\A[0-9a-f]{16}\Z") | st.integers(),
            "epoch": st.integers() | st.floats() | st.booleans() | st.text(max_size=3) | st.none(),
        }
    ).map(lambda kept: json.dumps(kept).encode())
)
def test_any_damage_gives_a_usable_identity(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    taken = live_once(tmp_path)
    assert len(taken.id) == 16
    assert 1 <= taken.epoch <= identity.EPOCH_MAX + 1
    again = live_once(tmp_path)
    assert (again.id, again.epoch) == (taken.id, taken.epoch + 1) or taken.epoch > identity.EPOCH_MAX


@pytest.mark.parametrize("kept", ['{"id": "0123456789abcdef", "epoch": Infinity}', "[" * 100_000, '{"epoch": 1}'])
def test_hostile_files(tmp_path: Path, kept: str) -> None:
    (tmp_path / FILE).write_text(kept)
    assert live_once(tmp_path).epoch == 1


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
