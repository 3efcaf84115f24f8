"""When is a checkpoint written, and by whom? A thread that yields to the training, at most a fiftieth of the time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from peerd.local.being_written import LAST, being_written
from peerd.local.generations import generations, step_of
from peerd.process.niceness import yield_to_others
from peerd.trainer import checkpoint
from peerd.trainer.rest import Rest
from peerd.trainer.say import say
from peerd.transport.errors import cause

COST_MAX = 1 / 50
"""Of the time: the copy holds the training up, and what writes it takes a processor's time."""

FIRST_S = 5.0
"""From the start to the first one, or longer where it costs more; each next one waits twice as long. What nothing else
holds (the optimizer's state, what the script keeps) comes back to a script that dies again and again within a minute.
"""

VALUE_S = 5e-8  # what a value costs with Adam's state of it, in a processor's time: nothing of a first one is measured

_THREADS: dict[Path, threading.Thread] = {}
"""By folder, what writes there: of a training that was broken off it is still at it as this process attaches again."""


def wait_for_earlier(folder: Path) -> None:
    """Until nothing that this process has begun to write there is under way."""
    if (thread := _THREADS.get(folder)) is not None and thread.is_alive():
        thread.join()


class CheckpointWriter:
    """Keeps a run in its folder. One file is written at a time; none that fails ends the training."""

    def __init__(
        self,
        folder: Path,
        every_s: float,
        rest: Rest,
        capture: Callable[[int, bool], checkpoint.Generation],
        values: int = 0,
    ) -> None:
        """`every_s`: seconds from one checkpoint to the next, or more where they cost more than `COST_MAX`.

        The first ones come sooner, as far as a model of so many `values` allows.

        `rest` is written at once: what the model has beside its trained tensors. `capture` gives the model as it is
        after a step; and whether it stands until that is written, so that it need not be copied.
        """
        self._folder = folder
        self._capture = capture
        self._every_s = every_s
        self._wait_s = min(every_s, max(FIRST_S, values * VALUE_S / COST_MAX))
        self._began = time.monotonic()
        self._cost_s = 0.0
        self.failed: str | None = None  # why the last one was not written
        self._rest: Rest | None = rest  # until it is written, or never can be
        with suppress(Exception):  # of no room in host memory: the thread will say it
            rest.fetch(folder)
        self._start(self._keep_rest)

    def due(self, now: float) -> bool:
        """Whether the next one should be written at `now`, a time of `time.monotonic`."""
        waited = now - self._began
        return waited >= self._wait_s and not self.is_at_it and waited >= self._cost_s / COST_MAX

    @property
    def is_at_it(self) -> bool:
        """Whether something is being written."""
        return self._thread.is_alive()

    def hasten(self) -> None:
        """The next one is due at once."""
        self._began = -math.inf

    def write(self, step: int) -> None:
        """Copy now, write in a thread: training goes on meanwhile."""
        self._began = time.monotonic()
        self._wait_s = min(self._every_s, 2 * self._wait_s)
        generation = self._captured(step, stands=False)
        copying_s = time.monotonic() - self._began
        if generation is None:
            self._cost_s = copying_s
            return

        def work() -> None:
            began_s = time.thread_time()  # of the script's thread, where no other can be started
            self._save(generation)
            self._cost_s = copying_s + time.thread_time() - began_s  # not what it waited for a core or a disk

        self._start(work)

    def write_last(self, step: int) -> None:
        """Without a thread: an interpreter that exits starts none. The daemon sees it from its beginning to its end."""
        with ExitStack() as stack:
            with suppress(OSError):  # which the writing itself will say
                stack.enter_context(being_written(self._folder, LAST))
            if self._thread.is_alive():
                self._thread.join()
            if (generation := self._captured(step, stands=True)) is not None:
                self._save(generation)

    def _captured(self, step: int, *, stands: bool) -> checkpoint.Generation | None:
        try:
            return self._capture(step, stands)
        except Exception as error:
            self._not_written(step, error)
            return None

    def _save(self, generation: checkpoint.Generation) -> None:
        try:
            checkpoint.save(self._folder, generation)
        except Exception as error:
            self._not_written(generation.step, error)
        else:
            self.failed = None
            self._keep_rest(again=True)

    def _keep_rest(self, *, again: bool = False) -> None:
        """A disk that would not have it may have it when it has a checkpoint."""
        if self._rest is None:
            return
        try:
            self._rest.write(self._folder)
            self._rest = None
        except Exception as error:  # as below
            until = " until a later checkpoint is written"
            if not isinstance(error, OSError):
                self._rest, until = None, ""
            if not again or self._rest is None:  # it was promised
                why = f"what the model has beside its trained tensors is not on the disk: {cause(error)}"
                say(f"{why}; export --complete will miss it{until}")

    def _not_written(self, step: int, error: Exception) -> None:
        """Odd tensors, too, are no reason to end the training."""
        why = next(iter(cause(error).splitlines()), type(error).__name__)
        with suppress(OSError):  # a disk that has failed may not be read, either
            older = generations(self._folder)
            why += f"; that of step {step_of(older[0])} is kept" if older else "; there is none yet"
        self.failed = f"at step {step}: {why}"
        say(f"no checkpoint written {self.failed}")

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            yield_to_others()
            work()

        self._thread = threading.Thread(target=run, name="peerd-checkpoint")
        try:
            self._thread.start()
            _THREADS[self._folder] = self._thread
        except RuntimeError:  # this machine, or its container, has as many as it may have
            self._thread = threading.Thread()  # for one that never ran holds its work, and so a copy of the model
            work()
