"""The trainer's side: three lines around any PyTorch loop.

    with peerd.attach(model, optimizer) as swarm:
        for batch in loader:
            ...; loss.backward(); optimizer.step(); optimizer.zero_grad()
            swarm.step(loss=loss.item(), samples=len(batch))

`step` adds the corrections that the daemon has ready, measures how far the model has moved, and publishes a copy when
the daemon asks. It waits for the network only where the mode has a barrier. Leaving the block waits for the swarm's
final flush.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from peerd import checkpoint
from peerd.effects import UserError
from peerd.follower import Follower
from peerd.local_socket import LocalSocket, find_node
from peerd.ranks import Ranks, Word, of_this_job
from peerd.sharded import ShardedModel, has_shards
from peerd.shared_memory import SharedMemory
from peerd.training.flat import FlatModel, pin

ROLLBACKS_MAX = 3  # in a row: a model that is not finite again at once will not mend itself


def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> Swarm:
    """Join `model` to the swarm of the daemon that started this script, or of the node that runs here.

    Blocks until the swarm's current model is loaded, when there is one. Without a daemon it says so once and the
    script trains alone. Ends the script with one line when the daemon refuses the model.
    """
    ranks = of_this_job()
    if ranks is not None and not ranks.leads:
        return Swarm(model, optimizer, None, ranks, Follower(ranks, model, optimizer))
    session = None
    try:
        session = _open(model, optimizer, ranks)
    except _Refused as refusal:
        if ranks is not None:
            ranks.say(Word.STOP)
        raise SystemExit(f"peerd: {refusal}") from None
    if ranks is not None:
        ranks.say(Word.GO_ON if session is not None else Word.ALONE, session.step if session is not None else 0)
        if session is not None and isinstance(session.flat, FlatModel):
            ranks.share_path(session.restored_from)
            ranks.share(session.flat)
    return Swarm(model, optimizer, session, ranks)


def _open(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks | None) -> _Session | None:
    link = _connect()
    if link is None:
        return None
    try:
        return _Session(link, model, optimizer, ranks)
    except _Refused:
        link.close()
        raise
    except (OSError, EOFError):
        link.close()
        _say("the daemon went away; training alone")
        return None


class Swarm:
    """What `attach` returns: count your steps here, and leave the block when done."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        session: _Session | None,
        ranks: Ranks | None = None,
        follower: Follower | None = None,
    ) -> None:
        """Use `attach`."""
        self._model = model
        self._optimizer = optimizer
        self._session = session
        self._ranks = ranks if session is not None else None
        self._follower = follower
        self.step_count = session.step if session else follower.step if follower else 0
        """Steps done, those before a resume or before joining included."""

    @property
    def alone(self) -> bool:
        """Whether there is no daemon (any more)."""
        return self._session is None and (self._follower is None or self._follower.alone)

    def step(self, loss: float | None = None, samples: int = 0, **metrics: float) -> None:
        """Call after each optimizer step; `metrics` (accuracy=...) are shown by `peerd status` and the demo."""
        self.step_count += 1
        if self._follower is not None:
            self._follower.follow()
        if self._session is None:
            return
        try:
            self._session.on_step(self.step_count, loss, samples, metrics)
        except (OSError, EOFError):
            self._lose_daemon()
        except SystemExit:
            self._lead(Word.STOP)
            raise
        else:
            self._lead(self._session.take_word())

    def finish(self) -> None:
        """Take part in the final flush; afterwards the model is the swarm's. Leaving the block does it."""
        if self._follower is not None:
            self._follower.finish()
        if self._session is None:
            return
        try:
            self._session.finish(self.step_count)
        except (OSError, EOFError):
            self._lose_daemon()
        except SystemExit:
            self._lead(Word.STOP)
            raise
        else:
            self._lead(Word.CHANGED)
            self._close()

    def __enter__(self) -> Swarm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self._close()

    def _lead(self, word: Word) -> None:
        if self._ranks is None:
            return
        self._ranks.say(word, self.step_count)
        flat = self._session.flat if self._session is not None else None
        if word in (Word.CHANGED, Word.ROLLED_BACK) and isinstance(flat, FlatModel):
            self._ranks.share(flat)

    def _lose_daemon(self) -> None:
        _say("the daemon went away; training goes on alone")
        if self._ranks is not None and self._session is not None:
            before = self._session.take_word()  # what came before it went is everybody's
            self._ranks.say(Word.ALONE, before)
            if before != Word.GO_ON and isinstance(self._session.flat, FlatModel):
                self._ranks.share(self._session.flat)
        self._close()

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


class _Refused(Exception):
    """The daemon will not have this model; the text says why."""


class _Session:
    """A connection to the daemon, the memory shared with it, and the model's flat view."""

    def __init__(
        self, link: LocalSocket, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks | None
    ) -> None:
        self._link = link
        self._model = model
        self._optimizer = optimizer
        self.flat: FlatModel | ShardedModel
        try:
            if has_shards(model) and ranks is not None:
                ranks.say(Word.COMES)
                self.flat = ShardedModel(model, optimizer, ranks)
            else:
                self.flat = FlatModel(model)
        except ValueError as error:
            raise _Refused(str(error)) from None
        self._memory = SharedMemory.create(self.flat.total)
        if self.flat.on_cuda and not pin(self._memory.vectors):
            _say("CUDA does not pin the shared memory: copies of the model will be slower")
        self._lr_max = 0.0
        self._rollbacks = 0
        self._publish_to: int | None = None
        self._early: list[dict[str, Any]] = []  # requests that came before the start
        self._go = False  # enough members are ready for the first step
        self._barrier = 0  # a step that is a multiple of it waits for the swarm; 0: none does
        self._resumed = False
        self._finished = False
        self._stop = False  # the node leaves the swarm: publish once more, write a checkpoint, end the script
        self._writer: threading.Thread | None = None
        self.step = 0
        self.restored_from: Path | None = None
        self._word = Word.GO_ON
        self._attach()

    # ---------------------------------------------------------------- coming

    def _attach(self) -> None:
        flat = self.flat
        about = {"parameters": flat.parameters, "total": flat.total, "signature": flat.signature}
        message = {"kind": "attach", "pid": os.getpid(), "tensors": flat.tensors, **about}
        try:
            self._link.send(message, fds=(self._memory.fd,))
        except ValueError as error:
            cause = f"the names of the model's {len(flat.tensors):,} tensors are too long together"
            raise _Refused(f"{cause} ({error}); join small parameters into larger ones") from None
        self._memory.close_fd()
        welcome = self._expect("welcome")
        self._checkpoints = Path(welcome["checkpoints"])
        self._checkpoint_every_s = float(welcome["checkpoint_every_s"])
        restored = self._restore()
        self._publish(0)
        self._link.send({"kind": "ready", "step": self.step})
        start = self._expect("start")
        self._lr_max = start["lr_most"]
        self._barrier = start["barrier"]
        if start["load"] is not None:
            flat.load(self._memory.copies[start["load"]])
            self.step = max(self.step, int(start["step"]))
        if restored is not None:
            _say_restored(*restored, model_too=start["load"] is None)
        for message in self._early:
            self._obey(message)
        while not self._go and not self._stop:
            self._poll(timeout_s=None)
        self._last_checkpoint = time.monotonic()

    def _restore(self) -> tuple[int, bool] | None:
        """Load the newest good checkpoint: its step, and whether it had a state that fits the optimizer."""
        generation = checkpoint.newest(self._checkpoints, self.flat.signature, _say)
        if generation is None:
            return None
        self.restored_from = self._checkpoints
        if isinstance(self.flat, ShardedModel):
            self.flat.about_to_resume(self._checkpoints, generation.step)
        try:
            whole = checkpoint.restore(generation, self._model, self._optimizer)
        except checkpoint.Damaged as error:
            _say(f"checkpoint of step {generation.step} refused: {error}")
            return None
        self.step = generation.step
        return generation.step, whole

    def _expect(self, kind: str) -> dict[str, Any]:
        while True:
            message = self._link.receive()
            assert message is not None, "a receive without a timeout returns a message or raises"
            if "error" in message:
                raise _Refused(message["error"])
            if message["kind"] == kind:
                return message
            self._early.append(message)  # the daemon goes on exchanging while this trainer comes

    # ---------------------------------------------------------------- training

    def on_step(self, step: int, loss: float | None, samples: int, metrics: dict[str, float]) -> None:
        """Between two optimizer steps: the only moment at which the model is touched."""
        self._poll(timeout_s=0)
        change = float(self.flat.change())
        rolled_back = not math.isfinite(change)
        if rolled_back:
            self._roll_back(step)
            change = 0.0
        else:
            self._rollbacks = 0
        rest = {"loss": loss, "samples": samples, "metrics": metrics, "rolled_back": rolled_back}
        if self._stop:
            self._report_last(step, change, **rest)
            self._end(step)
        at_barrier = self._barrier > 0 and step % self._barrier == 0
        if at_barrier:
            self._resumed = False
            self._wait_for_slot()
        self._report(step, change, **rest)
        while at_barrier and not self._resumed and not self._stop:
            self._poll(timeout_s=None)
        if time.monotonic() - self._last_checkpoint >= self._checkpoint_every_s and not rolled_back:
            self._write_checkpoint(step)

    def finish(self, step: int) -> None:
        """Publish the last model, take what comes until the daemon says that the flush is done."""
        self._poll(timeout_s=0)
        change = float(self.flat.change())
        if not math.isfinite(change):
            self._roll_back(step)
            change = 0.0
        self._report_last(step, change)
        while not self._finished and not self._stop:
            self._poll(timeout_s=None)
        if self._stop:
            self._end(step)
        self._write_checkpoint(step)
        if self._writer is not None:
            self._writer.join()

    def _end(self, step: int) -> None:
        self._write_checkpoint(step)
        if self._writer is not None:
            self._writer.join()
        raise SystemExit(0)

    def take_word(self) -> Word:
        """What happened to the model since this was asked last."""
        word, self._word = self._word, Word.GO_ON
        return word

    def close(self) -> None:
        """Let go of the daemon."""
        self._link.close()

    def _report_last(self, step: int, change: float, **rest: Any) -> None:
        """Publish the model that no further step will change."""
        self._wait_for_slot()
        self._report(step, change, finishing=True, **rest)

    def _wait_for_slot(self) -> None:
        """Have a copy to publish to in the next report."""
        if self._publish_to is None:
            self._link.send({"kind": "slot"})
            while self._publish_to is None:
                self._poll(timeout_s=None)

    def _report(self, step: int, change: float, **rest: Any) -> None:
        lr = max(float(group["lr"]) for group in self._optimizer.param_groups)
        self._lr_max = max(self._lr_max, lr, *(float(g.get("initial_lr", 0.0)) for g in self._optimizer.param_groups))
        slot, self._publish_to = self._publish_to, None
        if slot is not None:
            self._publish(slot)
        for name in ("loss", "metrics"):
            rest[name] = _finite(rest.get(name))
        self._link.send(
            {
                "kind": "step",
                "step": step,
                "change": change,
                "lr": lr,
                "lr_ratio": lr / self._lr_max if self._lr_max > 0 else 1.0,
                "published": slot,
                **rest,
            }
        )

    def _poll(self, timeout_s: float | None) -> None:
        """Do what the daemon asks; with no timeout, wait for one request."""
        while (message := self._link.receive(timeout_s)) is not None:
            self._obey(message)
            if timeout_s is None:
                return

    def _obey(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "corrections":
                self.flat.add(self._memory.corrections[message["half"]])
                self._word = max(self._word, Word.CHANGED)
                self._link.send({"kind": "taken", "half": message["half"]})
            case "publish":
                self._publish_to = message["slot"]
            case "go":
                self._go = True
            case "resume":
                self._resumed = True
            case "barrier":  # the mode has changed, and nobody waits at the old one's any more
                self._barrier = message["barrier"]
                self._resumed = True
                self._link.send({"kind": "barrier"})
            case "finished":
                self._finished = True
            case "stop":
                self._stop = True

    def _publish(self, slot: int) -> None:
        target = torch.from_numpy(self._memory.copies[slot])
        target.copy_(self.flat.gather())

    def _roll_back(self, step: int) -> None:
        self._rollbacks += 1
        if self._rollbacks > ROLLBACKS_MAX:
            raise SystemExit(
                f"peerd: the model is not finite at step {step}, again after {ROLLBACKS_MAX} returns to its last "
                "published copy; lower the learning rate or look at the data"
            )
        _say(f"the model is not finite at step {step}: back to its last published copy, optimizer state cleared")
        self.flat.restore()
        self._optimizer.state.clear()
        self._word = Word.ROLLED_BACK

    def _write_checkpoint(self, step: int) -> None:
        """Copy now, write in a thread: training goes on meanwhile. One at a time."""
        if self._writer is not None:
            if self._writer.is_alive() and not self._finished:
                return
            self._writer.join()
        self._last_checkpoint = time.monotonic()
        if isinstance(self.flat, ShardedModel):
            self.flat.about_to_capture()
        generation = checkpoint.capture(self._model, self._optimizer, step, self.flat.signature)
        self._writer = threading.Thread(target=_save, args=(self._checkpoints, generation), name="peerd-checkpoint")
        self._writer.start()


def _save(folder: Path, generation: checkpoint.Generation) -> None:
    try:
        checkpoint.save(folder, generation)
    except OSError as error:
        _say(f"no checkpoint written at step {generation.step}: {error}; training goes on, the older ones are kept")


def _connect() -> LocalSocket | None:
    if int(os.environ.get("LOCAL_RANK", "0")) != 0:
        return None  # of several ranks without a process group one talks to the daemon
    given = os.environ.get("PEERD_SOCKET")
    try:
        return LocalSocket(Path(given) if given else find_node(os.environ.get("PEERD_NAME")))
    except UserError as error:
        _say(f"{error}; training alone")
    except OSError as error:
        _say(f"the node at {given} does not answer ({error.strerror}); training alone")
    return None


def _say_restored(step: int, whole: bool, *, model_too: bool) -> None:
    """Said once it is known whose model the training starts from: the daemon may have a later one."""
    found = f"the checkpoint of step {step}"
    if model_too:
        _say(f"resumed from {found}" if whole else f"resumed from {found}, which has no state that fits the optimizer")
    elif whole:
        _say(f"the model is the daemon's; the optimizer's state is from {found}")
    else:
        _say(f"the model is the daemon's; {found} has no state that fits the optimizer")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): float(number) for name, number in value.items() if math.isfinite(number)}
    return float(value) if value is not None and math.isfinite(value) else None


def _say(text: str) -> None:
    sys.stderr.write(f"peerd: {text}\n")
    sys.stderr.flush()
