"""Who keeps the training script running? The daemon launches it, restarts it when it dies, and outlives it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import trio

from peerd.daemon.trainer_session import TrainerPhase, TrainerStatus
from peerd.process import launch
from peerd.process.logs import LOGGER
from peerd.process.threads import AGAIN_S, in_thread
from peerd.settings import Settings
from peerd.training.tasks import TASKS
from peerd.transport.errors import UserError

CRASHES_MAX = 5  # within CRASH_WINDOW_S: a script that keeps dying will not mend itself
CRASH_WINDOW_S = 600.0
BACKOFF_MAX_S = 60.0
TERMINATE_GRACE_S = 5.0
LAST_WORDS_S = 1.0  # what a script said before its end is read by then
OOM_SCORE = "500"  # when memory runs out the kernel takes the trainer, not the daemon
DAEMON = "PEERD_DAEMON"  # the daemon's pid, in the environment of what it starts
OUTPUT_ABOVE = "its own output above says why"
KILLED_BY = (signal.SIGKILL, signal.SIGTERM)  # others' doing, as by who runs out of memory: the script may be good
MORE_FILES = "; let it open more files (ulimit -n)"
NO_ROOM = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # for a process now; there may be some later
SIGNALLED = 128  # and the number of the signal: how sh ends when its command was killed


class Supervisor:
    """One script and its restarts."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        """`command` as given to `peerd start`. Raises UserError when there is no such script."""
        self.command = _argv(command)
        self.name = Path(command[0]).name
        self.attached = False  # the script got as far as peerd.attach
        self._refused = self._unfit = False  # what it gave last was not taken: by peerd.attach itself, by this node
        self.stopping = False
        self.runs = True  # the script, or it is about to be started (again)
        self.crash = ""  # how the script died last, how often of late, and when it is started again
        own = {key: value for key, value in os.environ.items() if key != "PEERD_TOKEN"}  # a secret of this node's
        self._environment = {**own, **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._limiter = trio.CapacityLimiter(1)  # its own: whatever fills trio's common threads, the end is seen

    async def run(self, status: Callable[[], TrainerStatus | None] = lambda: None) -> None:
        """Until the script ends well, or after its model was finished; `status` are of the trainer that came last.

        Raises UserError when it cannot be kept running.
        """
        crashes: deque[float] = deque()
        hopeless: int | None = None  # the exit code of a script that has just failed before its first step
        while not self.stopping:
            before, self._refused, self._unfit = status(), False, False
            if (code := await self._run_once()) is None:
                await trio.sleep(AGAIN_S)
                continue
            with trio.move_on_after(LAST_WORDS_S):
                while (found := status()) is not None and found.phase not in (TrainerPhase.FINISHED, TrainerPhase.GONE):
                    await trio.sleep(0.01)
            after = found if found is not before else None
            if code == 0 or self.stopping:
                if after is not None and after.phase is not TrainerPhase.FINISHED and not self.stopping:
                    line = "%s ended without swarm.finish(): its last steps may be missing in this node's model"
                    LOGGER.warning(line, self.name)
                return
            how = f"was killed by {_name_of(-code)}" if code < 0 else f"exited with code {code}"
            if after is not None and after.phase is TrainerPhase.FINISHED and not after.at_exit:
                LOGGER.warning("%s %s after its model was finished: it is not started again", self.name, how)
                return
            killed = -code in KILLED_BY or code - SIGNALLED in KILLED_BY
            if not self.attached and not killed:
                raise UserError(f"{self.name} {how} before peerd.attach was done; {OUTPUT_ABOVE}")
            fruitless = code > 0 and (after is None or not after.has_stepped)
            # what peerd.attach itself refuses after a life that has trained may be for want of memory: that comes again
            if fruitless and (self._unfit or (self._refused and found is None)):
                raise UserError(f"{self.name} {how}: peerd.attach did not take what it gave; {OUTPUT_ABOVE}")
            if fruitless and code == hopeless:
                raise UserError(f"{self.name} {how} twice before its first step: giving up; {OUTPUT_ABOVE}")
            hopeless = code if fruitless else None
            now = trio.current_time()
            crashes.append(now)
            while now - crashes[0] > CRASH_WINDOW_S:
                crashes.popleft()
            if len(crashes) >= CRASHES_MAX:
                raise UserError(f"{self.name} {how}, {len(crashes)} times within {now - crashes[0]:.0f} s: giving up")
            await self._end_rest()
            delay = min(2.0 ** (len(crashes) - 1), BACKOFF_MAX_S)
            times = f", {len(crashes)} times within {now - crashes[0]:.0f} s" if len(crashes) > 1 else ""
            self.crash = f"{self.name} {how}{times}; it is started again, after {delay:.0f} s"
            LOGGER.warning("%s %s; starting it again in %.0f s", self.name, how, delay)
            await trio.sleep(delay)

    def note_attach(self) -> None:
        """The script comes with a model; what it came with before in this life, and was not taken, is past."""
        self.attached, self._refused, self._unfit = True, False, False

    def note_refused(self) -> None:
        """The script came to peerd.attach, which itself did not take what it gave."""
        self.attached = self._refused = True

    def note_unfit(self) -> None:
        """This node will not have the script's model, whenever it comes."""
        self._unfit = True

    async def stop(self, grace_s: float, writes: Callable[[], Awaitable[bool]] | None = None) -> None:
        """Give the script `grace_s` to end by itself, not counting while it `writes`, then end it."""
        self.stopping = True
        for ask, wait_s in ((None, grace_s), (signal.SIGTERM, TERMINATE_GRACE_S), (signal.SIGKILL, TERMINATE_GRACE_S)):
            if self._process is None or self._process.poll() is not None:
                break
            if ask is not None:
                _signal_group(self._process.pid, ask)
            with trio.move_on_after(wait_s) as patience:
                while self._process.poll() is None:
                    await trio.sleep(0.02)
                    if ask is None and writes is not None and await writes():
                        patience.deadline = trio.current_time() + wait_s
        if self._process is not None and self._process.poll():
            await self._end_rest()

    def kill(self) -> None:
        """At once."""
        self.stopping = True
        if self._process is not None and self._process.poll() is None:
            _signal_group(self._process.pid, signal.SIGKILL)

    async def _end_rest(self) -> None:
        """Of a script that died: what it started holds a port or a GPU's memory, or trains on beside its successor."""
        assert self._process is not None, "it has died"
        mark = f"{DAEMON}={self._environment.get(DAEMON)}".encode()  # torchrun's workers are in groups of their own
        for ask in (signal.SIGTERM, signal.SIGKILL):
            if not (left := _living(self._process.pid, mark)):
                return
            LOGGER.info("ending what %s left behind: pid %s", self.name, ", ".join(map(str, left)))
            for pid in left:
                with suppress(OSError):
                    os.kill(pid, ask)
            with trio.move_on_after(TERMINATE_GRACE_S):
                while _living(self._process.pid, mark):
                    await trio.sleep(0.05)

    async def _run_once(self) -> int | None:
        """Its exit code. None: it has run before, and the system has no room for it now.

        A node that ended for that would lose what it holds.
        """
        ran = self._process is not None
        # a session of its own: Ctrl-C in the terminal reaches the daemon alone, which ends the script in good order
        try:
            self._process, told = started(self.command, self._environment)
            await _check_runs(told)
        except OSError as error:
            if self._process is not None:
                self._process.wait()  # it has ended, having told why
            why = f"cannot start {self.name}: {error.strerror or error}"
            if not ran or error.errno not in NO_ROOM:
                raise UserError(f"{why}{MORE_FILES if error.errno == errno.EMFILE else ''}") from None
            if self.crash != (crash := f"{why}; trying again"):
                LOGGER.warning("%s", crash)
            self.crash = crash
            return None
        try:
            Path(f"/proc/{self._process.pid}/oom_score_adj").write_text(OOM_SCORE)
        except OSError:
            LOGGER.info("the kernel does not let the trainer's out-of-memory score be raised")
        return await in_thread(self._process.wait, abandon_on_cancel=True, limiter=self._limiter)


def started(
    command: list[str],
    environment: dict[str, str],
    output: int | None = None,
    errors: int | None = None,
    folder: Path | None = None,
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a command in a session of its own, which gets SIGTERM when this process dies. Raises OSError.

    `output` and `errors` are descriptors, and `folder` is where it runs; without them they are as here. With it comes a
    descriptor, to be closed: it ends as the command runs, or tells the errno why it cannot.
    """
    reading, writing = os.pipe()
    try:
        words = [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), str(writing), *command]
        process = subprocess.Popen(
            words,
            env=environment,
            stdout=output,
            stderr=errors,
            cwd=folder,
            start_new_session=True,
            pass_fds=[writing],
        )
        return process, reading
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)


async def _check_runs(told: int) -> None:
    """Raises OSError where the command cannot be run."""
    try:
        await trio.lowlevel.wait_readable(told)
        code = os.read(told, 16)
    finally:
        os.close(told)
    if code:
        raise OSError(int(code), os.strerror(int(code)))


def _argv(command: list[str]) -> list[str]:
    script = command[0]
    if script in TASKS:
        return [sys.executable, "-u", "-m", TASKS[script].module, *command[1:]]
    if script.startswith("-"):
        key = script.removeprefix("--").partition("=")[0].replace("-", "_")
        if key in {item.name for item in fields(Settings)}:
            raise UserError(
                f"{script} is no option of peerd start: set PEERD_{key.upper()}, or {key} in --config's file"
            )
        raise UserError(f"{script} is neither an option of peerd start nor a script; see peerd start --help")
    if not script.endswith(".py"):
        if shutil.which(script) is None:
            raise UserError(f"no such command or task: {script}; built-in tasks: {', '.join(TASKS)}")
        return command  # torchrun, python -m ..., a shell script
    if not os.path.isfile(script):  # Path's own raises where a folder above it is closed to this user
        raise UserError(f"no such script: {script}")
    return [sys.executable, "-u", *command]


def _living(group: int, mark: bytes) -> list[int]:
    """Pids of a group, and of those with the `mark` in their environment; without what has ended, if nobody waited."""
    folders, found = list[Path](), []
    with suppress(OSError):  # no descriptor is left
        folders = list(Path("/proc").glob("[0-9]*"))
    for folder in folders:
        with suppress(OSError, ValueError):  # it has ended meanwhile, or is another user's
            state, _, of = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if state not in "ZX" and (int(of) == group or mark in (folder / "environ").read_bytes().split(b"\0")):
                found.append(int(folder.name))
    return found


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return


def _name_of(number: int) -> str:
    """Of a signal; real-time signals have none but for the first and the last."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
