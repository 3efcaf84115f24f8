"""The trainer's end of one connection to the daemon: what each says, and what is done to the model between steps."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from peerd.local.local_socket import LocalSocket, request
from peerd.local.shared_memory import SharedMemory
from peerd.protocol.trainer import (
    FROM_DAEMON,
    Attach,
    CheckpointFailed,
    Corrections,
    Drew,
    GradientPart,
    GradientReady,
    Load,
    Ready,
    Said,
    SpareWanted,
    Start,
    Stepped,
    Welcome,
    decoded,
    encoded,
)
from peerd.protocol.trainer_client import ClientState, TrainerClient
from peerd.trainer import groups
from peerd.trainer.figures import SAMPLES_MAX, Figures
from peerd.trainer.gradient_hooks import GradientHooks
from peerd.trainer.inputs import Inputs
from peerd.trainer.kept import Kept
from peerd.trainer.optimizers import forget, kind, learning_rates
from peerd.trainer.own_checkpoints import OwnCheckpoints, say_restored
from peerd.trainer.publication import Publication
from peerd.trainer.ranks import RankCommand, Ranks
from peerd.trainer.rest import FrozenBase
from peerd.trainer.say import say
from peerd.trainer.sharded import ShardedModel, has_shards
from peerd.trainer.states import require_state
from peerd.training.model.flat import FlatModel
from peerd.training.model.gradient_parts import GradientParts
from peerd.training.model.gradients import FlatGradients, require_dense
from peerd.training.model.optimizer_state import OptimizerState
from peerd.training.model.padding import padding_of
from peerd.training.model.transfers import pin, unpin, wait_for
from peerd.training.model.watch import ChangeWatch
from peerd.transport.errors import UserError

LR_RATIO_MIN = 1e-3  # a schedule that ends at 0 must not make what rounding moves worth an exchange
ROLLBACKS_MAX = 3  # in a row: a model that is not finite again at once will not mend itself
SLOW_ANSWER_S = 5.0  # a user who waits wants to know for what
LISTEN_EVERY_S = 1.0  # to a daemon that says nothing: it may be gone
RATIO_TOLD = 1.1  # the learning rate changes by this factor before the daemon hears of it
COPY_EVERY = 200  # times what a copy takes: how old the daemon's may be, as it is all that is left of a killed trainer
COPY_EVERY_MIN_S = 1.0
BATCHES = 100  # of which the usual size counts
STILL_STEPS = 100
"""Without any change, or any step of the optimizer's: more than a scaler leaves out until it fits, or a batch is
gathered from."""

_TRAINED: dict[Path, tuple[weakref.ref[torch.Tensor], int]] = {}
"""Which model this process has trained last with the node that keeps its checkpoints there, and up to which step: the
node holds one, whoever comes next. By its last trained parameter: several models, or a wrapped one, are another module
at each attach."""

Expected = TypeVar("Expected", bound=Said)


class Refused(Exception):
    """The daemon will not have this model; the text says why."""


class RefusedNow(Refused):
    """It may have it later, or the next daemon."""


class Past(NamedTuple):
    """What the session that follows one must know, where the same training goes on with another daemon."""

    step: int
    lr_max: float
    frozen: FrozenBase


class Session:
    """A connection to the daemon, the memory shared with it, and the model's flat view."""

    def __init__(
        self,
        socket: LocalSocket,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks | None,
        exclude: Sequence[str],
        kept: Kept,
        *,
        quasi_global_momentum: bool,
        past: Past | None = None,
    ) -> None:
        """With a `past` the model is further than any checkpoint, and none is loaded."""
        self._socket = socket
        self._model = model
        self._optimizer = optimizer
        self._kept = kept
        self.flat: FlatModel | ShardedModel
        self._exchanges, shares_optimizer, servers_step_by = _exchange_of(socket)
        if self._exchanges and ranks is not None:
            raise Refused("gradients are exchanged by one process a node: start this job as one, or with weights")
        if self._exchanges and quasi_global_momentum:
            raise Refused(
                "quasi_global_momentum: nodes that exchange gradients have one momentum already; leave it out"
            )
        self._states: OptimizerState | None = None  # where it is a part of the model
        try:
            shards = has_shards(model)  # first: the state of FSDP1's is all ranks' to ask for
            require_state(model)
            if shards and ranks is not None:
                ranks.say(RankCommand.COMES)
                self.flat = ShardedModel(model, optimizer, ranks, exclude)
            else:
                self.flat = FlatModel(model, optimizer, exclude)
                if self._exchanges:  # before a step: what fails in one is started again
                    require_dense(model, self.flat.pieces)
                if shares_optimizer:
                    self._states = OptimizerState(optimizer, self.flat.pieces)
                    self.flat.share_states(self._states.tensors)
        except (ValueError, RuntimeError, NotImplementedError, TypeError) as error:  # torch's own, of odd tensors
            raise Refused(str(error).splitlines()[0]) from None
        # before a checkpoint changes what the script made
        self._frozen = FrozenBase(model) if past is None else past.frozen
        self._parts: GradientParts | None = None
        self._telling = threading.Lock()
        self._gradients = FlatGradients(self.flat) if self._exchanges and isinstance(self.flat, FlatModel) else None
        gradients = self._gradients.total if self._gradients is not None else 0
        self._memory = SharedMemory.create(self.flat.total, gradients)
        self._pinned: list[tuple[npt.NDArray[np.float32], torch.device]] = []
        self._pin()
        self._board = self._memory.board
        self._watch = ChangeWatch()
        self._samples = 0  # since this trainer came
        self._batch, self._batches = 0.0, 0  # samples of a step, of late, and how many steps have said theirs
        self._ranks = 1 if ranks is None else ranks.count
        self._loss = math.nan  # none was said yet
        self._lr_max = 0.0 if past is None else past.lr_max
        self._told_ratio = 1.0  # of the learning rate to the largest, in the last report
        self._rollbacks = 0
        self._moved_at: int | None = 0  # since which no look has found a change that could have been; None: it was said
        self._client = TrainerClient()
        self._copied_at = 0.0
        self._copy_cost_s = 0.0
        self._heard_at = 0.0
        self._early: list[Said] = []  # requests that came before the start
        self._publication = Publication()
        self._unsaid: Stepped | None = None  # of the step whose copy is under way
        self._came: dict[str, Any] | None = None  # what the daemon said last, until it is heeded
        self._owed: Said | None = None  # the answer to it
        self._answered: list[int] = []  # whether it was given: a second one would be for the correction that follows
        self.step = 0
        self._inputs: Inputs | None = None  # where a training begins
        self.hooks: GradientHooks | None = None  # where gradients are exchanged
        self._given: list[int] = []  # whether a gradient was, whose mean is owed
        self.changed_in_pass = False  # the model, since the last step, as a backward pass waited for its mean
        self._weight = 1.0  # of a gradient in the mean: samples of the last step, if they were said
        self._command = RankCommand.GO_ON
        self._is_over = False  # the last checkpoint is written, or is being written
        try:
            self._attach(past)
        except BaseException:
            self._remove_hooks()
            self._memory.close_fd()
            self._unpin()
            raise
        if servers_step_by and past is None:
            say(
                f"the servers make the steps, by {servers_step_by} (--server-optimizer): of this script's "
                f"{kind(optimizer)} only the learning rate counts"
            )

    # ---------------------------------------------------------------- coming

    def _pin(self) -> None:
        on_gpus = [piece.tensor.device for piece in self.flat.pieces if piece.tensor.device.type == "cuda"]
        if not on_gpus:
            return
        memories = [memory for memory in (self._memory.vectors, self._memory.gradient) if memory.size]
        self._pinned = [(memory, on_gpus[0]) for memory in memories if pin(memory, on_gpus[0])]
        if len(self._pinned) < len(memories):
            say("CUDA does not pin the shared memory: copies of the model will be slower")

    def _unpin(self) -> None:
        if self._pinned:
            with suppress(RuntimeError):  # of a device that has failed
                self._publication.wait()
                if self._parts is not None:
                    self._parts.wait()
            while self._pinned:
                unpin(*self._pinned.pop())

    def _attach(self, past: Past | None) -> None:
        flat = self.flat
        variances = [list(each) for each in flat.variances]
        ends = [piece.stop for piece in flat.pieces]
        try:
            comes = Attach(
                os.getpid(), flat.signature, flat.parameters, flat.total, list(flat.tensors), variances, ends,
                getattr(flat, "states", 0), self._gradients.total if self._gradients is not None else 0,
                os.environ.get("PEERD_DAEMON", ""), list(map(list, padding_of(self._model, flat.pieces))),
            )  # fmt: skip
        except ValueError as error:
            raise Refused(f"the model has nothing to share ({error})") from None
        try:
            self._socket.send(encoded(comes), fds=(self._memory.fd,))
        except ValueError as error:
            cause = f"the names of the model's {len(flat.tensors):,} tensors are too long together"
            raise Refused(f"{cause} ({error}); join small parameters into larger ones") from None
        self._memory.close_fd()
        welcome = self._expect(Welcome)
        self.checkpoints = OwnCheckpoints(
            Path(welcome.checkpoints), self._model, self._optimizer, flat, self._kept, self._frozen
        )
        restored = None if past is not None else self.checkpoints.restore(one_rank=self._ranks == 1)
        self.step = past.step if past is not None else restored[0] if restored is not None else 0
        self._publish(0, None)
        self._say(Ready(self.step))
        start = self._expect(Start)
        self._lr_max = max(self._lr_max, start.lr_max)
        self._client.hear(start)
        is_further = False  # than the swarm
        if start.load is not None:
            flat.load(self._memory.copies[start.load])
            is_further = start.step < self.step
            self.step = start.step
            if is_further:
                self.checkpoints.passed_by(start.step)
            if self._ranks == 1:  # other ranks have yet to read what they resume from
                self.checkpoints.put_passed_aside()
        if restored is not None:
            model_of = None if start.load is None else start.step
            say_restored(*restored, model_of=model_of, with_state=self._states is not None)
        elif self.step and past is None:
            self._kept.none_found(self.step)
        if self.step and past is None and groups.has_schedule(self._optimizer) and not self._kept.has_schedule:
            say(
                "the optimizer has a learning rate scheduler: one that counts its own steps begins at its first, and "
                f"the model is of step {self.step}; compute the rate from swarm.step_count"
            )
        if past is None:
            self._tell_of_the_one_before()
        for message in self._early:
            self._obey(message)
        self._moved_at = self.step
        self._watch.copied()
        self._wait()
        if past is None:
            self._inputs = Inputs(self._model)
        # what came from the one put aside, of the optimizer and else, is in none
        self.checkpoints.begin(welcome.checkpoint_every_s, hastens=is_further)
        if self._gradients is not None and isinstance(flat, FlatModel):
            parts = GradientParts(flat, self._gradients, torch.from_numpy(self._memory.gradient))
            self._parts = parts
            self.hooks = GradientHooks(flat, self._optimizer, self._exchange, parts.begin, self._on_gradient)

    def _expect(self, kind: type[Expected]) -> Expected:
        while True:
            said = self._receive(None)
            assert said is not None, "a receive without a timeout returns a message or raises"
            self._came = None
            if isinstance(said, kind):
                return said
            self._early.append(said)  # the daemon goes on exchanging while this trainer comes

    def _say(self, said: Said, done: list[int] | None = None) -> None:
        self._say_published()
        self._answer()
        self._socket.send(encoded(said), done=done)

    def _say_published(self) -> None:
        """What was said of the last copy, now that it is whole: before anything else, as it was true before that."""
        self._publication.wait()
        self._copy_cost_s = max(self._copy_cost_s, self._publication.device_s)
        if self._unsaid is not None:
            self._socket.send(encoded(self._unsaid))
            self._unsaid = None  # after it: said twice it counts once, and a copy that was not said is waited for

    # ---------------------------------------------------------------- training

    def refuse_graph(self) -> None:
        """Of a step in a CUDA graph, replays would repeat nothing that the host does."""
        if self.flat.pieces[0].held.is_cuda and torch.cuda.is_current_stream_capturing():
            raise SystemExit(
                "peerd: swarm.step goes into a CUDA graph, whose replays would exchange nothing: call it after each "
                "replay, outside of the graph"
            )

    def on_step(self, step: int, figures: Figures) -> None:
        """Between two optimizer steps: the only moment at which the model is touched.

        Where the daemon wants nothing of it, a step costs the figures on the board, whatever the size of the model.
        """
        self.step = step
        self.checkpoints.on_step()
        self.changed_in_pass = False
        if self.hooks is not None:
            self.hooks.after_step()
            if self.hooks.idle == STILL_STEPS:
                say(
                    f"the optimizer that peerd.attach was given has not stepped in {STILL_STEPS} steps: does another "
                    "one, made since, step the model? The swarm goes by the state and learning rate of the given one"
                )
        if self._states is not None:
            self._states.give_back()  # where a scaler has left the step out
        self._weight = float(figures.samples or 1)
        now = time.monotonic()
        lr, ratio = self._note(step, now, figures)
        if self._unsaid is not None and not self._publication.under_way:
            self._say_published()
        if self.checkpoints.has_news():
            self._say(CheckpointFailed(self.checkpoints.failed))
        if self._inputs is not None and (digest := self._inputs.after_step()) is not None:
            self._say(Drew(digest))
        if self._board.sent != self._client.heard or now - self._heard_at >= LISTEN_EVERY_S:
            self._poll(timeout_s=0)
        quiet = self._board.quiet.at_rate(ratio / self._told_ratio)
        at_barrier = quiet.stands_at(step, self._client.barrier)
        must_copy = at_barrier or self._client.leaves
        may_copy = must_copy or self._has_spare
        is_old = now - self._copied_at >= max(COPY_EVERY_MIN_S, COPY_EVERY * self._copy_cost_s)
        asked = self._client.copy_asked or is_old
        due = self._watch.step(quiet.change if self._watch.change <= quiet.change else math.inf, lr, now)
        rolled_back = False
        keeps = self.checkpoints.due(now)
        looks = due or keeps or must_copy or (may_copy and (asked or quiet.wants_copy(self._watch.change, step)))
        if looks or (figures.loss is not None and not math.isfinite(figures.loss)):
            rolled_back = not self._look(step)
        if self._client.leaves:
            self._report_last(step, ratio, rolled_back=rolled_back)
            self._end(step)
        if at_barrier:
            self._client.enter(ClientState.AT_BARRIER)
            self._wait_for_spare()
        stands = at_barrier and self._client.waits  # the mode may have changed meanwhile
        wants_copy = asked or quiet.wants_copy(self._watch.change, step)
        copies = at_barrier or (may_copy and wants_copy and not rolled_back)
        told = max(ratio, self._told_ratio) <= RATIO_TOLD * min(ratio, self._told_ratio)
        if copies or rolled_back or quiet.wants_report(step) or not told:
            self._report(step, ratio, copies=copies, rolled_back=rolled_back, stands=stands)
        if at_barrier:
            self._wait()
        if keeps and not rolled_back:
            self.checkpoints.write(step)

    def weigh(self, samples: float) -> None:
        """How many samples the next gradient is of."""
        self._weight = samples

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """A parameter has its gradient, in the middle of a backward pass; each device has a thread for it."""
        assert self._parts is not None, "hooks are set where gradients are exchanged"
        if self._is_owed:
            return  # the memory is the mean's
        if parameter.is_cuda and torch.cuda.is_current_stream_capturing():
            raise SystemExit(
                "peerd: this backward pass goes into a CUDA graph, whose replays would exchange no gradients: run it "
                "without one, or exchange weights"
            )
        with self._telling:
            anew = self._parts.is_first
            if (first := self._parts.came(parameter)) is not None:
                with suppress(OSError):  # the daemon is gone: the end of the pass will say so
                    self._say(GradientPart(self.step, self._weight, first, anew))

    def _give_gradient(self) -> None:
        assert self._parts is not None, "hooks are set where gradients are exchanged"
        anew = self._parts.is_first
        for first in self._parts.rest():
            self._say(GradientPart(self.step, self._weight, first, anew))
            anew = False
        anew = self._parts.complete()
        self._client.enter(ClientState.WITH_GRADIENT)
        # interrupted before it is said, the next pass gives its own; after it, that is for nothing
        self._say(GradientReady(self.step, self._weight, self._rates()[0], anew), done=self._given)

    @property
    def _is_owed(self) -> bool:
        """Whether a gradient was given whose mean has not been taken yet."""
        return bool(self._given)

    def _wait_for_mean(self) -> None:
        while self._client.mean is None and not self._client.leaves:
            if self._client.copy_asked:
                self._wait_for_spare()
                self._report(self.step, self._rates()[1], copies=True, rolled_back=False)
            else:
                self._poll(timeout_s=None)

    def _exchange(self) -> bool:
        """Put the swarm's mean in place of the gradients; whether it is finite. The trainer stands until it comes.

        Where the script has caught what interrupted that (Ctrl-C in a notebook), the others have stepped by the mean
        that it waited for: this one's next pass is for nothing, and its step is by that mean, too. With several
        exchanges before a step (accumulation without `no_sync`) it is one of them behind from then on.
        """
        assert self._gradients is not None, "hooks are set where gradients are exchanged"
        try:
            if not self._is_owed:
                self._give_gradient()
            self._wait_for_mean()
        except ValueError as error:
            raise SystemExit(f"peerd: {error}") from None
        except (OSError, EOFError):  # the daemon is gone: the step is this script's own, and says so
            self.close()
            return True
        if self._client.leaves:
            self._report_last(self.step, self._rates()[1], rolled_back=False)
            self._end(self.step)
        mean = torch.from_numpy(self._memory.gradient) if self._client.mean else None
        self._gradients.scatter(mean)
        self._given = []  # now: scattered halfway, it is there to be scattered again
        return mean is None or math.isfinite(float(mean[0]))  # a mean that is not finite is NaN in each value

    def finish(self, step: int, last: Figures | None, *, at_exit: bool = False) -> None:
        """Publish the last model, take what comes until the daemon says that the flush is done; `keep` is to follow.

        `last` are figures that have come since the last step.
        `at_exit`: the interpreter ends, and only its exit code will say whether the script did well.
        """
        if self._is_over:
            return
        self._poll(timeout_s=0)
        self._given = []  # its mean is not given any more: the daemon drops a gradient of a run that ends
        _, ratio = self._rates()
        if last is not None:
            self._note(step, time.monotonic(), last)
        rolled_back = not self._look(step)
        self._client.enter(ClientState.FINISHING)
        self._report_last(step, ratio, rolled_back=rolled_back, at_exit=at_exit)
        self._wait()
        if self._client.leaves:
            self._end(step)

    def _end(self, step: int) -> NoReturn:
        with suppress(OSError):  # a daemon that is gone needs it no more
            self._say_published()
        self.keep(step)
        raise SystemExit(0)

    def keep(self, step: int) -> None:
        """Write the last checkpoint, and let go of the daemon before: nobody here takes corrections meanwhile."""
        if self._is_over:
            return
        self._is_over = True
        self.close()
        self.checkpoints.write_last(step)
        if self.checkpoints.has_news():
            with suppress(UserError):  # a daemon that is gone shows it to nobody
                request(self.path, "last_checkpoint", pid=os.getpid(), why=self.checkpoints.failed)

    @property
    def others(self) -> int:
        """How far most other nodes are in their runs (training/model/over.py)."""
        return self._board.others

    def say_total(self, total: int) -> None:
        """The run is so many steps long."""
        self._board.say_total(total)

    @property
    def past(self) -> Past:
        """For the session that follows this one."""
        return Past(self.step, self._lr_max, self._frozen)

    def _tell_of_the_one_before(self) -> None:
        """In this process."""
        last, until = _TRAINED.get(self.checkpoints.folder, (None, 0))
        if last is None or not self.step:
            return
        if last() is not self._last_trained:
            say(
                f"this training goes on from step {self.step} with the model of the one before it in this script; "
                "another one (another fold or seed) wants a node of its own: PEERD_RUN=NAME peerd start --name NAME"
            )
        elif self.step < until:
            say(
                f"the model goes back from step {until} to {self.step}: the node has no later copy of it, as the "
                "training before this one ended by an error or Ctrl-C; swarm.finish() would have given the rest"
            )

    @property
    def _last_trained(self) -> torch.Tensor:
        return [piece.held for piece in self.flat.pieces if not piece.is_buffer][-1]

    @property
    def path(self) -> Path:
        """Of the daemon's socket."""
        return self._socket.path

    def take_command(self) -> RankCommand:
        """What happened to the model since this was asked last."""
        command, self._command = self._command, RankCommand.GO_ON
        return command

    def close(self) -> None:
        """Let go of the daemon."""
        self._remove_hooks()
        groups.let_go(self._optimizer)
        if isinstance(self.flat, FlatModel):
            self.flat.private.let_go()
        _TRAINED[self.checkpoints.folder] = weakref.ref(self._last_trained), self.step
        self._socket.close()
        self._unpin()

    def _remove_hooks(self) -> None:
        if self._inputs is not None:
            self._inputs.remove()
        if self.hooks is not None:
            self.hooks.remove()

    def abandon(self) -> None:
        """In a forked child, before `close`: what is CUDA's is the parent's."""
        self._pinned.clear()

    def _note(self, step: int, now: float, figures: Figures) -> tuple[float, float]:
        """The figures, for whoever looks; returns the learning rate, and its ratio to the largest so far."""
        lr, ratio = self._rates()
        self._samples = min(self._samples + figures.samples, SAMPLES_MAX)
        if figures.samples:
            self._batches = min(self._batches + 1, BATCHES)
            self._batch += (figures.samples - self._batch) / self._batches
        if figures.loss is not None and math.isfinite(figures.loss):
            self._loss = figures.loss
        self._board.note(step, self._samples, now, self._loss, lr, self._lr_max, figures.metrics)
        return lr, ratio

    def _rates(self) -> tuple[float, float]:
        rates = learning_rates(self._optimizer)
        lr = max(rates, default=1.0)  # of an optimizer that has none it is always the same
        if not self._lr_max:  # a schedule's rates are known from its first step
            self._lr_max = max([lr, *learning_rates(self._optimizer, "initial_lr")])
        self._lr_max = max(self._lr_max, lr)
        return lr, max(lr / self._lr_max, LR_RATIO_MIN) if self._lr_max > 0 else 1.0

    def _look(self, step: int) -> bool:
        """See how far the model has moved; one that is not finite goes back to its last copy. Whether it was finite."""
        wait_for([self.flat.device])  # the step's own work is no part of a look
        began = time.monotonic()
        before, change = self._watch.change, float(self.flat.change())
        self._watch.looked(change, began, time.monotonic())
        if math.isfinite(change):
            self._rollbacks = 0
            self._tell_of_still(step, moved=change != before)
            return True
        self._refuse_beyond_float32()
        self._roll_back(step)
        self._watch.copied()
        return False

    def _tell_of_still(self, step: int, *, moved: bool) -> None:
        """Where the script goes on with another model than it gave, each node trains alone, and nobody would see it."""
        if self._moved_at is None or self._exchanges:  # of gradients it may be servers that make the steps
            return
        if moved or not self._rates()[0] or not any(piece.held.requires_grad for piece in self.flat.pieces):
            self._moved_at = step
        elif step - self._moved_at >= STILL_STEPS:
            self._moved_at = None
            say(
                f"the model that peerd.attach was given has not changed in {STILL_STEPS} steps: does the optimizer "
                "step another one, made or copied since?"
            )

    @property
    def _has_spare(self) -> bool:
        """Whether there is a copy that the daemon does not read."""
        return self._board.current == self._client.published_to

    def _wait_for_spare(self) -> None:
        if not self._has_spare:
            self._say(SpareWanted())
            while not self._has_spare:
                self._poll(timeout_s=None)

    def _report_last(self, step: int, ratio: float, *, rolled_back: bool, at_exit: bool = False) -> None:
        """Publish the model that no further step will change."""
        self._wait_for_spare()
        self._report(step, ratio, copies=True, rolled_back=rolled_back, finishing=True, at_exit=at_exit)

    def _report(
        self, step: int, ratio: float, *, copies: bool, rolled_back: bool, stands: bool = False, **rest: bool
    ) -> None:
        change = self._watch.change
        copy = self._client.next_copy if copies else None
        self._told_ratio = ratio
        said = Stepped(step, change, ratio, stands, copy, rolled_back, samples=self._ranks * self._batch, **rest)
        if copy is None:
            self._say(said)
            return
        self._publish(copy, said)
        if not self._publication.under_way:
            self._say_published()

    def _publish(self, copy: int, said: Stepped | None) -> None:
        began = time.monotonic()
        self._publication.begin(self.flat.snapshot(), torch.from_numpy(self._memory.copies[copy]), self.flat.device)
        self._watch.copied()
        # nothing between the two: a KeyboardInterrupt comes before both or after both, and what is published is said
        self._client.published(copy)
        self._unsaid = said
        self._copied_at = time.monotonic()
        self._copy_cost_s = self._copied_at - began
        for line in self.flat.unshared():
            say(line)

    def _wait(self) -> None:
        """Do what the daemon asks until it has said what this trainer waits for."""
        while self._client.waits:
            self._poll(timeout_s=None)

    def _poll(self, timeout_s: float | None) -> None:
        """Do what the daemon asks; with no timeout, wait for one request."""
        self._heard_at = time.monotonic()
        self._answer()  # what was interrupted
        if timeout_s is None:
            self._say_published()  # the daemon may answer to it
        while (message := self._receive(timeout_s)) is not None:
            self._obey(message)
            if timeout_s is None:
                return

    def _receive(self, timeout_s: float | None) -> Said | None:
        if self._came is None:
            if (message := self._socket.receive(timeout_s)) is None:
                return None
            self._came = message  # whoever catches what interrupts this finds it here: it does not come again
            self._client.heard += 1
        message = self._came
        if "error" in message:
            raise (RefusedNow if message.get("passes") is True else Refused)(message["error"])
        try:
            return decoded(message, FROM_DAEMON)
        except ValueError as error:  # a daemon of another version: gone, as far as this script can tell
            raise EOFError(f"the script's peerd and the daemon's do not understand each other ({error})") from None

    def _obey(self, said: Said) -> None:
        # What interrupts this the script may catch, and train on (Ctrl-C, memory that ran out); the daemon offers
        # nothing more before it is answered. What was left undone is to the others as if this script had stepped so.
        again = isinstance(said, Load)  # that has no answer, and can be done again
        self._owed, self._came = self._client.hear(said), self._came if again else None  # both, or neither
        if isinstance(said, Corrections | Load):
            self._say_published()  # what is copied stays as it is until then
            self.changed_in_pass |= self._client.state is ClientState.WITH_GRADIENT
        if isinstance(said, Corrections):
            self._command = max(self._command, RankCommand.CHANGED)  # also where only a part is added
            self.flat.add(self._memory.corrections[said.half])
        elif isinstance(said, Load):
            self.flat.load(self._memory.copies[said.copy])
            if said.step < self.step:  # this node was cut off, and went further alone
                self.checkpoints.passed_by(said.step)
            self.step = said.step
            self._board.go_on_from(self.step)
            if self._states is not None and self._client.state is ClientState.WITH_GRADIENT:
                self._states.take_rates()  # the step that follows is of that model
            self._came = None
        self._answer()

    def _answer(self) -> None:
        if self._owed is not None:
            self._say_published()
            if not self._answered:
                self._socket.send(encoded(self._owed), done=self._answered)
            self._owed, self._answered = None, []

    def _refuse_beyond_float32(self) -> None:
        if (name := self.flat.beyond_float32()) is not None:
            raise SystemExit(
                f"peerd: {name} holds a float64 beyond what float32 can, in which models are shared: scale it down, or "
                f"keep it private with exclude=[{name!r}]"
            )

    def _roll_back(self, step: int) -> None:
        self._rollbacks += 1
        self._given = []  # the daemon drops a gradient of a model that was not finite
        if self._rollbacks > ROLLBACKS_MAX:
            raise SystemExit(
                f"peerd: the model is not finite at step {step}, again after {ROLLBACKS_MAX} returns to its last "
                "published copy; lower the learning rate or look at the data"
            )
        say(f"the model is not finite at step {step}: back to its last published copy, optimizer state cleared")
        self.flat.restore()
        forget(self._optimizer)
        self._command = RankCommand.ROLLED_BACK


def _exchange_of(socket: LocalSocket) -> tuple[bool, bool, str]:
    """Whether members give each other gradients, whether the optimizer's state belongs to the model then, and by which
    optimizer servers make the steps in place of the script's; "" where they do not.
    """
    socket.send({"kind": "exchange"})
    told = False
    while (said := socket.receive(SLOW_ANSWER_S)) is None:  # of a daemon that is stopped it comes when that goes on
        if not told:
            told = True
            say("waiting for the daemon's answer; if its process is stopped, kill -CONT lets it go on")
    # a daemon that knows no such question exchanges weights
    return said.get("exchange") == "gradients", said.get("optimizer") is True, str(said.get("server_optimizer") or "")
