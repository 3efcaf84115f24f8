"""Who a node is: the same id, a greater epoch with every start, and one process at a time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peerd import identity
from peerd.effects import UserError

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
