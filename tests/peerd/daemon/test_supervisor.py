"""The script's supervisor, with real processes: what is restarted, what is not, and that nothing is left running."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from peerd.daemon import supervisor
from peerd.daemon.supervisor import Supervisor
from peerd.daemon.trainer_session import TrainerPhase, TrainerStatus
from peerd.transport.errors import UserError

# the waits between restarts take no time; processes do
pytestmark = pytest.mark.trio(clock="autojump")

PID = 'echo $$ > "$FOLDER/pid"; '
COUNT = 'echo x >> "$FOLDER/starts"; '


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def shell(folder: Path, script: str, *, attached: bool = True) -> Supervisor:
    """A script, and whether it has come to peerd.attach."""
    made = Supervisor(["sh", "-c", script], {"FOLDER": str(folder)})
    made.attached = attached
    return made


def another_each_time(**status: Any) -> Callable[[], TrainerStatus]:
    """A trainer that came, trained and went, in each life."""
    return lambda: TrainerStatus(1, **{"step": 9, "phase": TrainerPhase.GONE, "began": 1.0, **status})


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text().splitlines())


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return True
    return state == "Z"


async def written(path: Path) -> int:
    """The process id that a script has written."""
    while not path.exists() or not path.read_text().endswith("\n"):
        await trio.sleep(0.01)
    return int(path.read_text())


async def test_a_script_that_ends_well_is_not_started_again(folder: Path) -> None:
    await shell(folder, COUNT, attached=False).run()
    assert starts(folder) == 1


@pytest.mark.parametrize("finished", [True, False])
async def test_an_end_that_gave_no_last_model_is_told(
    folder: Path, finished: bool, caplog: pytest.LogCaptureFixture
) -> None:
    phase = TrainerPhase.FINISHED if finished else TrainerPhase.GONE
    await shell(folder, COUNT).run(another_each_time(phase=phase))
    assert starts(folder) == 1
    line = "sh ended without swarm.finish(): its last steps may be missing in this node's model"
    assert [record.message for record in caplog.records] == ([] if finished else [line])


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("exit 3", "exited with code 3"),
        ("kill -11 $$", "was killed by SIGSEGV"),
        ("kill -40 $$", "was killed by signal 40"),
    ],
    ids=["exit", "crash", "no name"],
)
async def test_a_script_that_dies_before_it_attaches_is_not_started_again(folder: Path, end: str, how: str) -> None:
    with pytest.raises(UserError, match=f"^sh {how} before peerd.attach was done; its own output above says why$"):
        await shell(folder, COUNT + end, attached=False).run()
    assert starts(folder) == 1


@pytest.mark.parametrize("end", ["kill -9 $$", "kill $$", "exit 137"], ids=["kill", "terminate", "a shell's command"])
async def test_a_script_that_others_kill_before_it_attaches_is_started_again(folder: Path, end: str) -> None:
    """As by who runs out of memory."""
    once = '[ -e "$FOLDER/again" ] && exit 0; touch "$FOLDER/again"; '
    await shell(folder, COUNT + once + end, attached=False).run()
    assert starts(folder) == 2


async def test_a_script_that_keeps_dying_is_started_ever_later_and_then_given_up(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UserError, match=r"^sh exited with code 3, 5 times within \d+ s: giving up$"):
        await (made := shell(folder, COUNT + "exit 3")).run(another_each_time())
    assert starts(folder) == 5
    assert re.fullmatch(r"sh exited with code 3, 4 times within \d+ s; it is started again, after 8 s", made.crash)
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        f"sh exited with code 3; starting it again in {delay} s" for delay in (1, 2, 4, 8)
    ]


@pytest.mark.parametrize(
    "status",
    [lambda: None, another_each_time(phase=TrainerPhase.GONE, began=0.0), another_each_time(step=4, first_step=4)],
    ids=["refused", "in its first wait", "in its first step"],
)
async def test_the_same_error_before_the_first_step_comes_again(folder: Path, status: Callable[[], Any]) -> None:
    why = "^sh exited with code 1 twice before its first step: giving up; its own output above says why$"
    with pytest.raises(UserError, match=why):
        await shell(folder, COUNT + "exit 1").run(status)
    assert starts(folder) == 2


@pytest.mark.parametrize("trained", [False, True])
async def test_what_peerd_attach_did_not_take_is_not_given_again(folder: Path, trained: bool) -> None:
    """Unless another life has trained, whose memory on a GPU may not be free yet."""
    made = shell(folder, COUNT + "exit 1")
    last = TrainerStatus(1, step=9, phase=TrainerPhase.GONE, began=1.0) if trained else None

    def refused() -> TrainerStatus | None:
        made.note_refused()
        return last

    with pytest.raises(UserError, match="twice" if trained else "^sh exited with code 1: peerd.attach did not take"):
        await made.run(refused)
    assert starts(folder) == 1 + trained


async def test_a_model_that_this_node_will_not_have_is_not_given_again(folder: Path) -> None:
    """Also where another life has trained: its model is the one that the node holds."""
    made = shell(folder, COUNT + "exit 1")

    def refused() -> TrainerStatus:
        made.note_unfit()
        return last

    last = TrainerStatus(1, step=9, phase=TrainerPhase.GONE, began=1.0)
    with pytest.raises(UserError, match=r"^sh exited with code 1: peerd\.attach did not take what it gave"):
        await made.run(refused)
    assert starts(folder) == 1


@pytest.mark.parametrize("refusal", [Supervisor.note_refused, Supervisor.note_unfit])
async def test_a_refusal_after_which_a_script_has_come_again_counts_no_more(
    folder: Path, refusal: Callable[[Supervisor], None]
) -> None:
    made = shell(folder, COUNT + "exit 1")

    def refused_then_taken() -> None:
        refusal(made)
        made.note_attach()

    with pytest.raises(UserError, match="twice before its first step"):
        await made.run(refused_then_taken)
    assert starts(folder) == 2


@pytest.mark.parametrize("end", ["kill -9 $$", 'exit $(wc -l < "$FOLDER/starts")'], ids=["killed", "another code"])
async def test_other_ends_before_the_first_step_may_be_chance(folder: Path, end: str) -> None:
    with pytest.raises(UserError, match=r", 5 times within \d+ s: giving up$"):
        await shell(folder, COUNT + end).run()
    assert starts(folder) == 5


@pytest.mark.parametrize("end", ["exit 1", "kill -9 $$"])
async def test_what_fails_after_its_model_was_finished_is_not_started_again(
    folder: Path, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    await shell(folder, COUNT + end).run(another_each_time(phase=TrainerPhase.FINISHED))
    assert starts(folder) == 1
    (line,) = (record.message for record in caplog.records if record.levelno == logging.WARNING)
    assert line.endswith(" after its model was finished: it is not started again")


async def test_a_model_that_an_earlier_life_finished_does_not_count(folder: Path) -> None:
    finished = TrainerStatus(1, step=9, phase=TrainerPhase.FINISHED, began=1.0)
    with pytest.raises(UserError, match="twice before its first step"):
        await shell(folder, COUNT + "exit 1").run(lambda: finished)


async def test_an_exit_code_decides_where_only_the_interpreters_end_finished_the_model(folder: Path) -> None:
    script = COUNT + 'test $(wc -l < "$FOLDER/starts") -ge 3'
    await shell(folder, script).run(another_each_time(phase=TrainerPhase.FINISHED, at_exit=True))
    assert starts(folder) == 3


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
async def test_a_script_that_has_run_is_started_again_as_soon_as_there_is_room(
    folder: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begins, lacking = supervisor.started, [False, True, True, True, False]  # of each start

    def started(*arguments: Any) -> Any:
        if lacking.pop(0):
            raise OSError(number, os.strerror(number))
        return begins(*arguments)

    monkeypatch.setattr(supervisor, "started", started)
    once = '[ -e "$FOLDER/again" ] && exit 0; touch "$FOLDER/again"; '
    await (made := shell(folder, COUNT + once + "exit 3")).run(another_each_time())
    assert (starts(folder), lacking) == (2, [])
    assert made.crash == f"cannot start sh: {os.strerror(number)}; trying again"
    assert [record.message for record in caplog.records].count(made.crash) == 1


async def test_without_room_for_its_first_start_a_script_is_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any) -> Any:
        raise OSError(errno.EAGAIN, "no room")

    monkeypatch.setattr(supervisor, "started", started)
    with pytest.raises(UserError, match=r"^cannot start sh: no room$"):
        await shell(folder, COUNT).run()


async def test_what_a_script_left_behind_need_not_be_found_for_its_next_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with no descriptor left."""

    def listed(_: str) -> list[str]:
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(os, "listdir", listed)
    monkeypatch.setattr(os, "scandir", listed)
    once = '[ -e "$FOLDER/again" ] && exit 0; touch "$FOLDER/again"; '
    await shell(folder, COUNT + once + "exit 3").run(another_each_time())
    monkeypatch.undo()
    assert starts(folder) == 2


async def test_crashes_long_ago_do_not_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "CRASH_WINDOW_S", 0.5)  # each restart is a second after the crash
    await shell(folder, COUNT + 'test $(wc -l < "$FOLDER/starts") -ge 9').run(another_each_time())
    assert starts(folder) == 9


async def test_the_script_gets_what_the_daemon_tells_it_beside_its_own_environment(folder: Path) -> None:
    made = Supervisor(
        ["sh", "-c", 'echo "$PATH $PEERD_NAME" > "$FOLDER/told"'], {"FOLDER": str(folder), "PEERD_NAME": "n"}
    )
    await made.run()
    assert (folder / "told").read_text() == f"{os.environ['PATH']} n\n"


async def test_the_script_does_not_get_the_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERD_TOKEN", "peerd2.secret")
    await Supervisor(["sh", "-c", 'env > "$FOLDER/told"'], {"FOLDER": str(folder)}).run()
    assert "peerd2" not in (folder / "told").read_text()


async def test_what_cannot_be_started_is_the_users_to_mend(folder: Path) -> None:
    broken = folder / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    with pytest.raises(UserError, match=r"^cannot start broken: No such file or directory$"):
        await Supervisor([str(broken)], {}).run()


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("--verbose", "neither an option of peerd start nor a script"),
        ("--checkpoint-every-s", "set PEERD_CHECKPOINT_EVERY_S, or checkpoint_every_s in --config's file"),
        ("nowhere/train.py", "no such script: nowhere/train.py"),
        ("digitz", "no such command or task: digitz; built-in tasks: digits, "),
    ],
)
def test_what_is_no_script_is_refused(command: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        Supervisor([command], {})


def test_tasks_start_by_name() -> None:
    made = Supervisor(["digits", "--steps", "3"], {})
    assert made.command == [sys.executable, "-u", "-m", "peerd.training.tasks.digits", "--steps", "3"]


# ----------------------------------------------------------------------------------------------------------- the end


async def stopped(made: Supervisor, folder: Path, grace_s: float) -> None:
    """Start, wait until the script has written its pid, stop; in real time, for so a process ends."""
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.run)
            await written(folder / "pid")
            await made.stop(grace_s)
    finally:
        made.kill()


@pytest.mark.trio(clock="real")
async def test_a_script_that_ends_by_itself_is_given_the_time(folder: Path) -> None:
    made = shell(folder, 'trap "echo asked > $FOLDER/asked" TERM; ' + PID + 'sleep 0.2; echo done > "$FOLDER/done"')
    await stopped(made, folder, grace_s=30)
    assert (folder / "done").exists()
    assert not (folder / "asked").exists()


@pytest.mark.trio(clock="real")
async def test_a_script_that_writes_its_checkpoint_is_given_all_the_time_that_takes(folder: Path) -> None:
    asked = 'trap "echo asked > $FOLDER/asked; exit 5" TERM; '
    made = shell(folder, f'{asked}{PID} until [ -e "$FOLDER/stop" ]; do sleep 0.05; done')
    left = 20

    async def writes() -> bool:
        nonlocal left
        left -= 1
        if not left:
            (folder / "stop").touch()
        return left >= 0

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.run)
            await written(folder / "pid")
            with trio.fail_after(30):
                await made.stop(0.1, writes)
    finally:
        made.kill()
    assert left < 0
    assert not (folder / "asked").exists()


@pytest.mark.trio(clock="real")
async def test_a_script_that_goes_on_is_asked_to_end(folder: Path) -> None:
    made = shell(folder, f'trap "echo asked > $FOLDER/asked; exit 5" TERM; {PID} {COUNT} while :; do sleep 0.05; done')
    await stopped(made, folder, grace_s=0.05)
    assert (folder / "asked").exists()
    assert starts(folder) == 1, "an end that was asked for is no crash"


@pytest.mark.trio(clock="real")
async def test_a_script_that_will_not_end_is_killed_with_its_children(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "TERMINATE_GRACE_S", 0.2)
    (folder / "child.sh").write_text('trap "" TERM; echo $$ > "$FOLDER/child"; while :; do sleep 0.05; done')
    both = 'sh "$FOLDER/child.sh" & until [ -s "$FOLDER/child" ]; do sleep 0.01; done; '
    made = shell(folder, 'trap "" TERM; ' + both + PID + "while :; do sleep 0.05; done")
    await stopped(made, folder, grace_s=0.05)
    pids = [int((folder / name).read_text()) for name in ("pid", "child")]
    deadline = time.monotonic() + 30
    while not all(map(gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(map(gone, pids))


@pytest.mark.trio(clock="real")
async def test_a_kill_is_at_once(folder: Path) -> None:
    made = shell(folder, 'trap "" TERM; ' + PID + "while :; do sleep 0.05; done")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        pid = await written(folder / "pid")
        made.kill()
    assert gone(pid)
    made.kill()


async def test_nothing_is_stopped_before_anything_was_started(folder: Path) -> None:
    made = shell(folder, PID)
    await made.stop(grace_s=1)
    made.kill()
    assert made.stopping


@pytest.mark.trio(clock="real")
async def test_a_script_that_is_stopped_as_it_starts_does_not_go_on(folder: Path) -> None:
    made = shell(folder, "sleep 99")
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.run)
            await trio.testing.wait_all_tasks_blocked()
            made.kill()


PARENT = (
    "import os; from peerd.daemon.supervisor import started; child, told = started(['sleep', '99'], dict(os.environ)); "
)
WAITS = {"the daemon": "os.read(told, 1)", "the demo": "os.close(told)"}


@pytest.mark.parametrize("waits", WAITS.values(), ids=WAITS)
def test_a_script_dies_with_its_daemon(folder: Path, waits: str) -> None:
    program = f"{PARENT}{waits}; print(child.pid, flush=True); os.kill(os.getpid(), 9)"
    output = folder / "output"
    with output.open("wb") as file:
        ran = subprocess.run([sys.executable, "-c", program], stdout=file, check=False)
    assert ran.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while not gone(int(output.read_text())) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone(int(output.read_text()))


async def test_a_script_starts_as_if_the_daemon_had_run_it(folder: Path) -> None:
    """Nothing of the program between is left: no signal that is ignored, no descriptor, no name."""
    script = "grep SigIgn /proc/self/status; ls /proc/self/fd | wc -w; tr '\\0' ' ' < /proc/$$/cmdline; "
    script += 'cut -d" " -f6 /proc/$$/stat | grep -cx $$'
    await shell(folder, f'({script}) > "$FOLDER/here"').run()
    told = script.join(("(", ') > "$FOLDER/there"'))
    subprocess.run(["sh", "-c", told], env={**os.environ, "FOLDER": str(folder)}, start_new_session=True, check=False)
    assert (folder / "here").read_text() == (folder / "there").read_text().replace("there", "here")


HELPER = 'sh -c \'trap "" TERM; echo $$ >> "$FOLDER/helpers"; while :; do sleep 0.05; done\' & '
BOTH = (
    f'{COUNT}{HELPER}until [ "$(wc -l < "$FOLDER/helpers")" -ge "$(wc -l < "$FOLDER/starts")" ]; do sleep 0.01; done; '
)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "TERMINATE_GRACE_S", 0.2)
    monkeypatch.setattr(supervisor, "BACKOFF_MAX_S", 0.0)


@pytest.mark.trio(clock="real")
async def test_what_a_dead_script_leaves_behind_ends_before_it_is_started_again(folder: Path, impatient: None) -> None:
    """A helper holds a port or a GPU; where the script is another command's, the trainer itself is left."""
    look = 'case "$(cut -d" " -f3 /proc/$each/stat 2> /dev/null)" in ""|Z) ;; *) echo $each >> "$FOLDER/alive";; esac'
    alive = f'for each in $(cat "$FOLDER/helpers"); do {look}; done; '
    made = shell(folder, f'touch "$FOLDER/helpers"; {alive}{BOTH}[ "$(wc -l < "$FOLDER/starts")" -gt 2 ] || kill -9 $$')
    await made.run()
    helpers = [int(pid) for pid in (folder / "helpers").read_text().split()]
    assert starts(folder) == len(helpers) == 3
    assert not (folder / "alive").exists()
    assert list(map(gone, helpers)) == [True, True, False], "what a script leaves that ends well is its user's"
    os.kill(helpers[-1], signal.SIGKILL)


@pytest.mark.trio(clock="real")
async def test_what_is_in_a_session_of_its_own_is_left_behind_too(folder: Path, impatient: None) -> None:
    """As torchrun's workers are, and who starts one by hand beside them is not."""
    detached = f"setsid {HELPER}" + 'until [ -s "$FOLDER/helpers" ]; do sleep 0.01; done; '
    made = Supervisor(
        ["sh", "-c", f'[ -e "$FOLDER/helpers" ] && exit 0; {detached}kill -9 $$'],
        {"FOLDER": str(folder), supervisor.DAEMON: str(os.getpid())},
    )
    made.attached = True
    with subprocess.Popen(["sleep", "99"], env={**os.environ, supervisor.DAEMON: "1"}) as another:
        await made.run()
        assert gone(int((folder / "helpers").read_text()))
        assert another.poll() is None
        another.kill()


@pytest.mark.trio(clock="real")
async def test_a_script_that_dies_as_it_is_stopped_leaves_nothing(folder: Path, impatient: None) -> None:
    made = shell(folder, f'touch "$FOLDER/helpers"; {BOTH}{PID}while :; do sleep 0.05; done')
    await stopped(made, folder, grace_s=0.05)
    assert gone(int((folder / "helpers").read_text()))
