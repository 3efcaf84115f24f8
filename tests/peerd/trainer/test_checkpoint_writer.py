"""When is a checkpoint due, and who pays for it?"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peerd.local.being_written import being_written, is_writing
from peerd.process.niceness import NICE
from peerd.trainer import checkpoint
from peerd.trainer.checkpoint_writer import COST_MAX, FIRST_S, CheckpointWriter


def generation(step: int, stands: bool = False) -> checkpoint.Generation:
    return checkpoint.Generation(step, "signature", {}, None)


class NoRest:
    def fetch(self, folder: Path) -> None:
        """It is where it should be."""

    def write(self, folder: Path) -> None:
        """There is none."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


FOLDER = Path("checkpoints")


def writer(every_s: float, capture: Callable[[int, bool], checkpoint.Generation] = generation) -> CheckpointWriter:
    made = CheckpointWriter(FOLDER, every_s, NoRest(), capture)  # type: ignore[arg-type]
    made._thread.join()
    return made


@given(every_s=st.floats(0.1, 1e4), copying_s=st.floats(0.0, 100.0), writing_s=st.floats(0.0, 100.0))
def test_the_next_one_waits_until_the_last_has_cost_a_fiftieth(
    every_s: float, copying_s: float, writing_s: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        now, spent = [1000.0], [5.0]
        patch.setattr(time, "monotonic", lambda: now[0])
        patch.setattr(time, "thread_time", lambda: spent[0])

        def capture(step: int, stands: bool) -> checkpoint.Generation:
            now[0] += copying_s
            return generation(step)

        def save(folder: Path, generation: checkpoint.Generation) -> None:
            now[0] += 3600.0  # the disk stood still
            spent[0] += writing_s

        patch.setattr(checkpoint, "save", save)
        kept = writer(every_s, capture)
        first_s = min(every_s, FIRST_S)
        assert not kept.due(1000.0 + 0.99 * first_s)
        assert kept.due(1000.0 + 1.01 * first_s)
        kept.write(7)
        kept._thread.join()
        next_s = max(min(every_s, 2 * first_s), (copying_s + writing_s) / COST_MAX)
        assert not kept.due(1000.0 + 0.99 * next_s)
        assert kept.due(1000.0 + 1.01 * next_s)


@pytest.mark.parametrize(("values", "waits"), [(1000, [5, 10, 20, 40, 60, 60]), (10**7, [25, 50, 60]), (10**9, [60])])
def test_the_first_ones_come_soon_where_the_model_is_small(
    values: int, waits: list[float], clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that died every 50 s had none, and so began with a new optimizer and scheduler each time."""
    monkeypatch.setattr(checkpoint, "save", lambda *_: None)
    kept = CheckpointWriter(FOLDER, 60.0, NoRest(), generation, values)  # type: ignore[arg-type]
    for wait_s in waits:
        kept._thread.join()
        assert not kept.due(clock[0] + 0.99 * wait_s)
        clock[0] += wait_s
        assert kept.due(clock[0])
        kept.write(7)
    kept._thread.join()  # or it calls what a later test has put there


def test_one_is_written_at_a_time_by_a_nicer_thread(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, niceness = threading.Event(), []

    def save(*_: Any) -> None:
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        assert go_on.wait(60)

    monkeypatch.setattr(checkpoint, "save", save)
    kept = writer(1.0)
    kept.write(7)
    assert not kept.due(1e9)
    go_on.set()
    kept._thread.join()
    assert kept.due(1e9)
    assert niceness == [min(19, os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICE)]


def test_the_last_one_comes_after_the_one_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []

    def save(_: Path, generation: checkpoint.Generation) -> None:
        time.sleep(0.05 if not saved else 0.0)
        saved.append(generation.step)

    def capture(step: int, stands: bool) -> checkpoint.Generation:
        captured.append((step, stands))
        return generation(step)

    captured: list[tuple[int, bool]] = []
    monkeypatch.setattr(checkpoint, "save", save)
    kept = writer(1.0, capture)
    kept.write(7)
    kept.write_last(8)
    assert saved == [7, 8]
    assert captured == [(7, False), (8, True)], "only the last model stands while it is written"


def test_the_daemon_can_see_one_from_its_copy_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(step: int, stands: bool) -> checkpoint.Generation:
        seen.append(is_writing(FOLDER, os.getpid()))
        return generation(step)

    def save_file(*_: Any) -> None:
        seen.append(is_writing(FOLDER, os.getpid()))
        raise OSError("disk full")

    class SlowRest(NoRest):
        def write(self, folder: Path) -> None:
            deadline = time.monotonic() + 30
            while not is_writing(FOLDER, os.getpid()) and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(is_writing(FOLDER, os.getpid()))

    seen: list[bool] = []
    monkeypatch.setattr(checkpoint, "save_file", save_file)
    kept = CheckpointWriter(FOLDER, 1.0, SlowRest(), capture)  # type: ignore[arg-type]
    kept.write_last(8)
    assert seen == [True, True, True], "of what goes beside it, too"
    assert not is_writing(FOLDER, os.getpid())


def test_who_has_ended_or_cannot_be_seen_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    try:
        (FOLDER / f"tmp-{child}-7").mkdir(parents=True)
        deadline = time.monotonic() + 30
        while is_writing(FOLDER, child) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert Path(f"/proc/{child}").exists(), "nobody has asked for its end yet"
        assert not is_writing(FOLDER, child)
    finally:
        os.waitpid(child, 0)
    with being_written(FOLDER, 8):
        assert is_writing(FOLDER, os.getpid())

        def fails(*_: Any) -> Any:
            raise PermissionError(13, "no")

        monkeypatch.setattr(Path, "glob", fails)
        assert not is_writing(FOLDER, os.getpid())


def test_a_model_that_cannot_be_captured_is_trained_on(capsys: pytest.CaptureFixture[str]) -> None:
    def capture(step: int, stands: bool) -> checkpoint.Generation:
        raise RuntimeError("no storage\nException raised from somewhere")

    kept = writer(1.0, capture)
    kept.write(7)
    kept.write_last(8)
    said = capsys.readouterr().err.splitlines()
    assert [line.partition("no checkpoint written at ")[2] for line in said] == [
        f"step {step}: no storage; there is none yet" for step in (7, 8)
    ]


def test_which_checkpoint_is_left_when_one_is_not_written_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = False

    def capture(step: int, stands: bool) -> checkpoint.Generation:
        if fails:
            raise OSError(28, "No space left on device")
        return generation(step, stands)

    kept = writer(1.0, capture)
    kept.write_last(7)
    fails = True
    kept.write_last(8)
    assert kept.failed == "at step 8: No space left on device; that of step 7 is kept"
    assert capsys.readouterr().err == f"peerd: no checkpoint written {kept.failed}\n"

    def fails_to_read(*_: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "glob", fails_to_read)
    kept.write(9)
    assert kept.failed == "at step 9: No space left on device"


def test_a_machine_that_gives_no_thread_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """And has the copy of the model in its memory no longer than that is written."""
    saved = []
    copies: list[weakref.ref[torch.Tensor]] = []
    monkeypatch.setattr(checkpoint, "save", lambda _, generation: saved.append(generation.step))

    def refuses(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def capture(step: int, stands: bool) -> checkpoint.Generation:
        copy = torch.zeros(1)
        copies.append(weakref.ref(copy))
        return checkpoint.Generation(step, "signature", {"model.weight": copy}, None)

    monkeypatch.setattr(threading.Thread, "start", refuses)
    kept = CheckpointWriter(FOLDER, 1.0, NoRest(), capture)  # type: ignore[arg-type]
    kept.write(1)
    assert copies[0]() is None
    kept.write_last(2)
    assert saved == [1, 2]


FULL, ODD = OSError(28, "No space left on device"), ValueError("odd")


@pytest.mark.parametrize(("errors", "tries", "told"), [([FULL, FULL], 3, 1), ([ODD], 1, 1), ([FULL, ODD], 2, 2)])
def test_what_a_full_disk_did_not_take_beside_the_model_comes_with_a_later_checkpoint(
    errors: list[Exception], tries: int, told: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[int] = []

    class FullAtFirst:
        def write(self, folder: Path) -> None:
            tried.append(len(tried))
            if len(tried) <= len(errors):
                raise errors[len(tried) - 1]

    monkeypatch.setattr(checkpoint, "save", lambda *_: None)
    kept = CheckpointWriter(FOLDER, 1.0, FullAtFirst(), generation)  # type: ignore[arg-type]
    for step in range(4):
        kept.write_last(step)
    assert len(tried) == tries
    assert capsys.readouterr().err.count("is not on the disk") == told
