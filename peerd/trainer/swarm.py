"""The trainer's side: three lines around any PyTorch loop.

    with peerd.attach(model, optimizer) as swarm:
        for batch in loader:
            ...; loss.backward(); optimizer.step(); optimizer.zero_grad()
            swarm.step(loss=loss, samples=len(batch))

`step` adds the corrections that the daemon has ready, looks how far the model has moved where that may matter, and
publishes a copy when that is far enough, when the daemon asks, or when its last one is old. It waits for the network
only where the mode has a barrier. Leaving the block waits for the swarm's final flush.
"""

from __future__ import annotations

import atexit
import math
import multiprocessing
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, SupportsFloat

import torch
from torch import nn

from peerd.local.local_socket import LocalSocket, find_node
from peerd.trainer import checkpoint, groups, reflections
from peerd.trainer.comeback import Comeback, OpenAgain
from peerd.trainer.figures import Figures, FromGpus, clean, one_number
from peerd.trainer.follower import Follower
from peerd.trainer.kept import Kept
from peerd.trainer.optimizers import Optimizers, as_one
from peerd.trainer.ranks import RankCommand, Ranks, are_several, is_first, of_this_job
from peerd.trainer.say import say
from peerd.trainer.session import STILL_STEPS, Past, Refused, RefusedNow, Session
from peerd.training.model.flat import FlatModel
from peerd.training.model.names import patterns_of
from peerd.training.model.over import is_over, number_of
from peerd.training.model.quasi_global import QuasiGlobalMomentum
from peerd.training.model.together import Models, one_model
from peerd.transport.errors import UserError


def attach(
    model: Models,
    optimizer: Optimizers,
    *,
    exclude: Sequence[str] = (),
    keep: Mapping[str, Any] = MappingProxyType({}),
    quasi_global_momentum: bool = False,
) -> Swarm:
    """Join `model` to the swarm of the daemon that started this script, or of the node that runs here.

    Several models, optimizers or both, in a list or by name, are shared as one: attach([g, d], [og, od]). Tensors that
    `exclude` names, or fits as a pattern ("head.*"), stay private: they are neither shared nor compared.

    Blocks until the swarm's current model is loaded, when there is one. Without a daemon it says so once and the
    script trains alone. Ends the script with one line when the daemon refuses the model. Several optimizers come as a
    list; a wrapper that has an `optimizer` or `param_groups`, and so a learning rate scheduler, is as good as what it
    wraps.

    `keep` names what else belongs to this node's checkpoints: any objects with `state_dict` and `load_state_dict`, as a
    scheduler, averaged weights, a loader (keep={"scheduler": scheduler}), and dictionaries. A script that resumes from
    one finds them as they were at its step; of several ranks, as rank 0 had them. States are numbers, text, lists,
    dictionaries, tensors and arrays; one that has something else ends the script with a line.

    With `quasi_global_momentum`, the same on all nodes, the momentum of torch's SGD follows how the model moves with
    the swarm, not this node's own gradients alone (arXiv:2102.04761): where nodes see different classes, `gossip` ends
    nearer to training on all data. It needs a momentum above 0 and dampening 0, parameters in float32 or float64, nodes
    that exchange weights, and memory for two more tensors of each parameter's size; else the script ends with a line.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # by which Python itself sees it
        raise SystemExit(
            "peerd: a process that the script starts (a loader's worker, by spawn or forkserver) runs the script anew "
            'from its top: put the training under if __name__ == "__main__":'
        )
    try:
        model, optimizer, exclude = one_model(model), as_one(optimizer), patterns_of(exclude)
        kept = Kept(keep, say if is_first() else lambda _: None)
        momentum = QuasiGlobalMomentum(optimizer) if quasi_global_momentum else None
    except ValueError as error:  # on every rank
        with suppress(Refused):
            if is_first() and (socket := _connect()) is not None:
                _give_up(socket)
        raise SystemExit(f"peerd: {error}") from None
    try:
        with _no_inference_mode():
            return _come(model, optimizer, exclude, kept, momentum)
    except BaseException:  # the script may catch it, and train on
        if momentum is not None:
            momentum.remove()
        raise


def _come(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    exclude: Sequence[str],
    kept: Kept,
    momentum: QuasiGlobalMomentum | None,
) -> Swarm:
    """`attach`, of what was found to be right."""
    groups.remember(optimizer)  # on every rank, before a checkpoint is loaded
    ranks = of_this_job(model)
    if ranks is not None and not ranks.leads:
        follower = Follower(ranks, model, optimizer, exclude, kept)
        kept.came()
        return Swarm(None, ranks, follower, momentum)
    session = None

    def open_on(socket: LocalSocket, past: Past | None = None) -> Session | None:
        return _opened(
            socket,
            lambda: Session(
                socket, model, optimizer, ranks, exclude, kept,
                quasi_global_momentum=momentum is not None, past=past,
            ),
        )  # fmt: skip

    try:
        socket = _connect()
        if socket is not None and hasattr(sys, "ps1"):
            _end_earlier(socket.path)
        session = None if socket is None else open_on(socket)
        if socket is not None and session is None:
            say("the daemon went away; training alone")
        for line in checkpoint.not_kept(model) if session is not None else ():
            say(line)
        if session is not None and session.hooks is None and (line := reflections.told(model, session.flat.pieces)):
            say(line)
        with suppress(Exception):  # of the script's own classes: the first checkpoint will say it
            if session is not None and (line := checkpoint.too_long(model, optimizer, kept)):
                say(line)
        if ranks is not None:
            ranks.say(
                RankCommand.GO_ON if session is not None else RankCommand.ALONE,
                session.step if session is not None else 0,
            )
            if session is not None and isinstance(session.flat, FlatModel):
                ranks.share_path(session.checkpoints.restored_from)
                ranks.share(session.flat)
        kept.came()
        again = open_on if session is not None and ranks is None else None
        return Swarm(session, ranks, momentum=momentum, open_again=again)
    except Refused as refusal:
        if ranks is not None:
            ranks.say(RankCommand.STOP)
        raise SystemExit(f"peerd: {refusal}") from None
    except BaseException:  # its connection and its hooks would be in the way of the next attach
        if session is not None:
            session.close()
        raise


def _end_earlier(path: Path) -> None:
    """In a notebook a cell that failed is run again, and what it had attached may have no name any more."""
    for swarm in list(_SWARMS):
        if swarm._session is not None and swarm._session.path == path:
            say("the earlier training of this process, which was not finished, ends here")
            swarm._end("of a training in whose place another came")


def _opened(socket: LocalSocket, session: Callable[[], Session]) -> Session | None:
    """The session on this connection; None where the daemon has gone. Raises Refused."""
    try:
        return session()
    except Refused:
        _give_up(socket)
        raise
    except (ConnectionError, EOFError):
        socket.close()
        if _is_daemons():
            raise Refused(DAEMON_GONE) from None
        return None
    except OSError as error:  # of this process: no file descriptors, or a limit on files
        _give_up(socket)
        raise RefusedNow(f"the model cannot be shared with the daemon: {error.strerror or error}") from None
    except BaseException:
        socket.close()  # the interpreter may keep what was interrupted, whose session would be in the way of the next
        raise


def _give_up(socket: LocalSocket) -> None:
    """Tell the daemon, where it did not refuse the script itself, that this will come again."""
    with suppress(OSError, EOFError, UserError):
        socket.ask("refused", daemon=os.environ.get("PEERD_DAEMON", ""))
    socket.close()


AFTER_THE_END = 'after swarm.finish() or the end of its "with" block'
DAEMON_GONE = "the daemon that started this script went away, and the script ends"

_SWARMS: weakref.WeakSet[Swarm] = weakref.WeakSet()


_OF_PARENTS: list[object] = []
"""In a forked child, which has no CUDA: what has tensors and pinned memory that it may not let go, or it aborts."""


def _in_forked_child() -> None:
    """What a script forks (a loader's worker, a helper) is no trainer, and must not hold the trainer's connection."""
    for swarm in _SWARMS:
        swarm._stay_out()


os.register_at_fork(after_in_child=_in_forked_child)


class Swarm:
    """What `attach` returns: count your steps here, and leave the block when done."""

    def __init__(
        self,
        session: Session | None,
        ranks: Ranks | None = None,
        follower: Follower | None = None,
        momentum: QuasiGlobalMomentum | None = None,
        open_again: OpenAgain | None = None,
    ) -> None:
        """Use `attach`."""
        self._session = session
        self._momentum = momentum
        self._ranks = ranks if session is not None else None
        self._follower = follower
        self._on_gpus = FromGpus()
        self._open_again = open_again  # where another daemon may take the place of one that went away
        self._comeback: Comeback | None = None  # since a daemon went away
        self._total: int | None = None  # steps of the run, where the script has said so
        self._totals_differ = False  # another was said before: for the rest of the run
        self._number = self._drawn_at = -1  # the number that was given last, and after how many steps
        self._named: set[str] = set()  # figures that were no numbers
        self._told_cut_short = self._told_none_left = False
        self._ended = ""  # how it ended here, until a later step has said so
        _SWARMS.add(self)
        if session is not None:
            atexit.register(self._at_exit)
        self._step_count = follower.step if follower else 0  # where there is no session (any more)
        self._others = session.others if session is not None and ranks is None else 0
        """How far other nodes are in their runs (over.py); the same on all ranks, which hear it after each step."""
        self._drop_momentum()

    @property
    def step_count(self) -> int:
        """Steps done, those before a resume or before joining included.

        Where gradients are exchanged and this node takes over the others' model, it is right from the backward pass on.
        """
        return self._step_count if self._session is None else self._session.step

    @property
    def alone(self) -> bool:
        """Whether there is no daemon (any more)."""
        return self._session is None and (self._follower is None or self._follower.alone)

    def step(self, /, loss: SupportsFloat | None = None, samples: SupportsFloat = 0, **metrics: SupportsFloat) -> None:
        """Call after each optimizer step; `metrics` (accuracy=...) are shown by `peerd status` and the demo.

        All of them may be Python's numbers, numpy's, or tensors of one value; what is no number is left out, and named
        once. Who gives a tensor on a GPU does not wait for it, `samples` aside: it is shown, and looked at, a step or
        so later.
        """
        self._step_count = step = self.step_count + 1
        if self._follower is not None:
            self._follower.follow()
            self._others = self._follower.others
        if self._session is None:
            self._drop_momentum()
            self._come_back()
            self._say_ended()
            return
        if self._ranks is None and are_several():
            raise SystemExit("peerd: the process group was made after peerd.attach: make it before, on all ranks")
        session = self._session
        self._daemon_outlives(session.refuse_graph)
        if self._momentum is not None and self._momentum.after_step() == STILL_STEPS:
            say(
                f"quasi_global_momentum does nothing: it has seen the optimizer make none of {STILL_STEPS} steps. In a "
                "CUDA graph that was captured before peerd.attach it sees none: step outside of one, or leave it out"
            )
        given = metrics if loss is None else {"loss": loss, **metrics}
        figures = self._clean(self._on_gpus.exchange(given), samples)
        if self._daemon_outlives(lambda: session.on_step(step, figures)):
            self._others = session.others
            self._lead(session.take_command())

    def steps(self, total: int) -> Iterator[int]:
        """The steps of a run of `total`, from `step_count` on: `for step in swarm.steps(1000): ...; swarm.step()`.

        A node that is slower than most others goes by their count: it leaves out the steps that it comes too late for,
        so its learning rate falls when theirs does, and ends its run with theirs, and says so. What it learnt alone
        from there on would be of its own data, and their models would follow it. Who has made nine tenths of `total`
        goes on to the last. A number comes again only where no `step` was made of it, or where the swarm's model, of an
        earlier step, took the place of this node's. `step_count` is of the steps that this node makes itself.

        `total` is of the whole run. Where a later call in the same run names another one (an epoch's end each time),
        no step is left out, for the others' counts may be of the one before.
        """
        before, self._total = self._total, int(total)
        total = self._total
        self._totals_differ |= before not in (None, total)
        if before == total and max(self.step_count, self._number + 1) >= total:
            self._say_none_left(total)
        if self._session is not None:
            self._session.say_total(total)
        while not self.is_over(total):
            if self.step_count != self._drawn_at:  # else nothing was made of the last one, which comes again
                if self.step_count < self._drawn_at:
                    self._number = self.step_count - 1
                if is_over(self.step_count, total, self._others, self._number):
                    break
                others = 0 if self._totals_differ else self._others
                self._number = number_of(self._number, self.step_count, total, others)
                self._drawn_at = self.step_count
            yield self._number
        self._say_cut_short(total)

    def is_over(self, total: int) -> bool:
        """Whether a run of `total` steps ends here, for a loop that is not over `steps`; the same on all ranks."""
        over = is_over(self.step_count, total, self._others)
        if over:
            self._say_cut_short(total)
        return over

    def _say_none_left(self, total: int) -> None:
        """To who loops over epochs, the later of which would all be empty, and nobody would see why."""
        if self._follower is None and not self._told_none_left:
            self._told_none_left = True
            cure = f"for another epoch give what all have together, swarm.steps({2 * total:,}) and so on"
            say(f"swarm.steps({total:,}) has none left: it counts the whole run's; {cure}")

    def _say_cut_short(self, total: int) -> None:
        if self.step_count < total and self._follower is None and not self._told_cut_short:
            self._told_cut_short = True
            made = f"{self.step_count:,} of {total:,}"
            late = "this node left out steps that most others were past (it is slower, or was restarted, or came late)"
            say(f"{late}: its run ends with theirs, after {made} steps")

    def _say_ended(self) -> None:
        """To who counts on after the end: the model would be this script's alone, and nobody would see why."""
        if self._ended:
            ended, self._ended = self._ended, ""
            say(f"swarm.step {ended}: this training goes on alone; peerd.attach again, and it is with the swarm")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backward passes accumulate gradients here alone: for all but the last pass before a step.

        Without an effect where the swarm exchanges weights.
        """
        hooks = self._session.hooks if self._session is not None else None
        with hooks.no_sync() if hooks is not None else nullcontext():
            yield

    def weigh(self, samples: SupportsFloat) -> None:
        """How many samples the next backward pass is of, where gradients are exchanged and batches differ in size.

        Otherwise it counts as many as `step` was told last. Raises ValueError: not a number above 0.
        """
        number = one_number(samples)
        if number is None or not 0 < number < math.inf:
            raise ValueError(f"samples is {samples!r}, and should be a number above 0")
        if self._session is not None:
            self._session.weigh(number)

    def finish(self) -> None:
        """Take part in the final flush; afterwards the model is the swarm's. Leaving the block does it.

        A script that ends well without it is flushed when the interpreter exits, where it is the only process of its
        job.
        """
        self._finish(at_exit=False)

    def _finish(self, *, at_exit: bool) -> None:
        if self._follower is not None:
            self._follower.finish()
        self._comeback = None
        if self._session is None:
            self._drop_momentum()
            return
        come = self._on_gpus.rest()
        session, last = self._session, self._clean(come) if come else None
        if self._daemon_outlives(lambda: session.finish(self.step_count, last, at_exit=at_exit), comes_back=False):
            try:
                session.keep(self.step_count)
                self._lead(RankCommand.CHANGED)
            finally:
                self._end(AFTER_THE_END)

    def __enter__(self) -> Swarm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.finish()
        else:
            self._tell_of_old_graph(error)
            self._end(AFTER_THE_END)

    def _tell_of_old_graph(self, error: object) -> None:
        """Autograd's own error names neither peerd nor a cure."""
        old = isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error)
        if old and self._session is not None and self._session.changed_in_pass:
            say(
                "the swarm's model came at the end of a backward pass, and a later one goes through what was made with "
                "the model before (z = generator(noise), for two passes): make it anew after the first optimizer's step"
            )

    def _at_exit(self) -> None:
        """The interpreter exits and the training was not finished: give the last steps, where that is safe."""
        if self._session is None or (hasattr(sys, "last_type") and not hasattr(sys, "ps1")):
            self._tell_of_old_graph(getattr(sys, "last_value", None))
            self._close()  # an error ended the script, and its traceback is there to read
        elif self._ranks is not None:  # the other ranks may be gone, and the process group with them
            say("the script ended without swarm.finish(): its last steps may be missing in the swarm's model")
            self._close()
        else:
            try:
                self._finish(at_exit=True)
            except SystemExit:  # the node leaves: it has what it needs
                pass
            except Exception as error:  # whatever is left of the script at this point
                say(f"the script ended without swarm.finish(), and its last steps could not be given: {error!r}")

    def _clean(self, given: dict[str, Any], samples: SupportsFloat = 0) -> Figures:
        figures = clean(given.pop("loss", None), samples, given)
        for name in figures.left_out.keys() - self._named:
            self._named.add(name)
            say(f"{name} is not shown: {figures.left_out[name]}")
        return figures

    def _daemon_outlives(self, act: Callable[[], None], *, comes_back: bool = True) -> bool:
        """Do it; whether the daemon is still there. Raises SystemExit where the node leaves: all ranks end then.

        Without `comes_back` the run has ended, and no later daemon is looked for.
        """
        try:
            with _no_inference_mode():
                act()
        except (OSError, EOFError):
            if not _is_daemons():
                self._lose_daemon(comes_back=comes_back)
                return False
            self._stop()  # as the kernel ends a script that is the daemon's own child
            raise SystemExit(f"peerd: {DAEMON_GONE}") from None
        except SystemExit as end:
            self._stop()
            if not end.code and not _is_daemons():
                say("the node that this script trains with leaves the swarm: the script ends here")
            raise
        return True

    def _stay_out(self) -> None:
        momentum = self._momentum.remove() if self._momentum is not None else None
        _OF_PARENTS.extend([self._session, self._on_gpus, self._follower, momentum])
        self._ranks = self._follower = self._comeback = None
        if self._session is not None:
            self._session.abandon()
        self._end("in a process that was forked after peerd.attach")

    def _lead(self, command: RankCommand) -> None:
        if self._ranks is None:
            return
        self._ranks.others = self._others
        self._ranks.say(command, self.step_count)
        self._share(self._ranks, command)

    def _share(self, ranks: Ranks, happened: RankCommand) -> None:
        flat = self._session.flat if self._session is not None else None
        if not isinstance(flat, FlatModel):
            return
        if happened == RankCommand.CHANGED:
            ranks.share(flat)
        elif happened == RankCommand.ROLLED_BACK:
            ranks.share_restored(flat)

    def _stop(self) -> None:
        self._lead(RankCommand.STOP)
        self._close()

    def _lose_daemon(self, *, comes_back: bool) -> None:
        assert self._session is not None, "it is lost once"
        if comes_back and self._open_again is not None:
            say("the daemon went away; training goes on alone, and with the swarm again once the node is back")
            self._comeback = Comeback(self._session, self._open_again)
        else:
            say("the daemon went away; training goes on alone")
        self._others = 0
        if self._ranks is not None:
            before = self._session.take_command()  # what came before it went is everybody's
            self._ranks.say(RankCommand.ALONE, before)
            self._share(self._ranks, before)
        self._close()

    def _come_back(self) -> None:
        comeback = self._comeback
        if comeback is None:
            return
        try:
            with _no_inference_mode():
                session = comeback.look(self._step_count)
        except Refused as refusal:
            self._comeback = None
            say(f"{refusal}; training goes on alone")
            return
        if session is None:
            return
        try:  # what interrupts this the script may catch: all of it was done, or it is done again
            say(f"training goes on with the swarm, from step {session.step}")
            if self._total is not None:
                session.say_total(self._total)
            if self._momentum is not None:
                self._momentum.begin()
            self._others = session.others
            atexit.register(self._at_exit)
            self._session, self._open_again, self._comeback = session, comeback.open_again, None
        except BaseException:
            session.close()  # it would be in the way of the next
            raise

    def _drop_momentum(self) -> None:
        """A script that trains alone does so as it would without peerd."""
        if self._momentum is not None and self.alone:
            self._momentum.remove()

    def _end(self, how: str) -> None:
        if self._session is not None:
            self._ended = how
        self._close()

    def _close(self) -> None:
        atexit.unregister(self._at_exit)
        self._open_again = None  # which holds the model
        if self._session is not None:
            self._session.close()
            self._step_count, self._session = self.step_count, None
        self._drop_momentum()


def _no_inference_mode() -> AbstractContextManager[None]:
    """In it torch makes tensors that no later step outside of it may change."""
    return torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext()


def _is_daemons() -> bool:
    """Whether a daemon started this script, perhaps within another command."""
    return bool(os.environ.get("PEERD_DAEMON"))


def _connect() -> LocalSocket | None:
    if int(os.environ.get("LOCAL_RANK", "0")) != 0:
        return None  # of several ranks without a process group one talks to the daemon
    given = os.environ.get("PEERD_SOCKET")
    path = Path(given) if given else None
    try:
        path = path or find_node(os.environ.get("PEERD_NAME"))
        return LocalSocket(path)
    except UserError as error:
        say(f"{error}; training alone")
    except OSError as error:
        failed = f"the node {f'at {path}' if path else 'of this machine'} does not answer ({error.strerror})"
        if _is_daemons():
            raise Refused(failed) from None
        say(f"{failed}; training alone")
    return None
