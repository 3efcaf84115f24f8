"""What has this node on its disk of the training of one session? What it began from, what came later, what is written.

Where the swarm's model is of an earlier step than some of its checkpoints, those are put aside: they would be the
newest, were this script started again, or all nodes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from peerd.trainer import checkpoint
from peerd.trainer.checkpoint_writer import CheckpointWriter, wait_for_earlier
from peerd.trainer.kept import Kept
from peerd.trainer.rest import FrozenBase, Rest
from peerd.trainer.say import say
from peerd.trainer.sharded import ShardedModel
from peerd.training.model.flat import FlatModel


class OwnCheckpoints:
    """The folder of one node's checkpoints, as long as its trainer is attached."""

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        flat: FlatModel | ShardedModel,
        kept: Kept,
        frozen: FrozenBase,
    ) -> None:
        """`frozen`: what checkpoints may leave out, as it was before any was loaded."""
        self.folder = folder
        self._model = model
        self._optimizer = optimizer
        self._flat = flat
        self._kept = kept
        self._frozen = frozen
        self._told_failed: str | None = None  # why the last one was not written
        self._passed: int | None = None  # the swarm's model is of this step, and there are checkpoints of later ones
        self._has_put_aside = False  # some of them, in this training
        self.restored_from: Path | None = None
        wait_for_earlier(folder)

    def restore(self, *, one_rank: bool) -> tuple[int, bool] | None:
        """Load the newest good one: its step, and whether it had a state that fits the optimizer."""
        generation = checkpoint.newest(self.folder, self._flat.signature, say)
        if generation is None:
            return None
        self.restored_from = self.folder
        if isinstance(self._flat, ShardedModel):
            self._flat.about_to_resume(self.folder, generation.step)
        # of several ranks each would have to know by itself
        newer = self._flat.private.newer if isinstance(self._flat, FlatModel) and one_rank else ()
        try:
            whole = checkpoint.restore(generation, self._model, self._optimizer, say, newer)
        except checkpoint.Damaged as error:
            say(f"checkpoint of step {generation.step} refused: {error}")
            return None
        self._flat.loaded()
        self._kept.restore(generation.kept, generation.tensors, generation.step)
        return generation.step, whole

    def passed_by(self, step: int) -> None:
        """The training goes on from the swarm's model, of a step before the last here."""
        self._passed = step

    def put_passed_aside(self) -> None:
        """Now, be it that one is still being written."""
        if self._passed is None:
            return
        step, self._passed = self._passed, None
        try:
            if (aside := checkpoint.put_later_aside(self.folder, step, again=self._has_put_aside)) is not None:
                self._has_put_aside = True
                say(f"checkpoints of later steps than {step} are in {aside} now")
        except OSError as error:
            say(f"checkpoints of later steps than {step} cannot be put aside: {error.strerror}")

    def begin(self, every_s: float, *, hastens: bool) -> None:
        """From now on some are written, one each `every_s` seconds at most, but for the first ones."""
        rest = Rest(self._model, self._flat.pieces, self._flat.signature)
        self._writer = CheckpointWriter(self.folder, every_s, rest, self._capture, self._flat.total)
        if hastens:
            self._writer.hasten()

    def on_step(self) -> None:
        """A step is made, of the model that the training goes on from."""
        if self._passed is not None and not self._writer.is_at_it:  # with one of a later step, perhaps
            self.put_passed_aside()
            self._writer.hasten()

    def due(self, now: float) -> bool:
        """Whether the next one should be written at `now`, a time of `time.monotonic`."""
        return self._passed is None and self._writer.due(now)

    def write(self, step: int) -> None:
        """Write the next one, of this step."""
        self._writer.write(step)

    def write_last(self, step: int) -> None:
        """The same where none is to follow; it is on the disk when this returns."""
        if self._passed is not None:
            wait_for_earlier(self.folder)
            self.put_passed_aside()
        self._writer.write_last(step)

    @property
    def failed(self) -> str | None:
        """Why the last one was not written."""
        return self._writer.failed

    def has_news(self) -> bool:
        """Whether `failed` is another than it was when this was asked last."""
        before, self._told_failed = self._told_failed, self.failed
        return before != self._told_failed

    def _capture(self, step: int, stands: bool) -> checkpoint.Generation:
        if isinstance(self._flat, ShardedModel):
            self._flat.about_to_capture()
        frozen = self._frozen.unchanged(self._model)
        try:
            return checkpoint.capture(
                self._model, self._optimizer, step, self._flat.signature, frozen, self._kept, stands=stands
            )
        except Exception as error:
            if isinstance(self._flat, ShardedModel):  # the other ranks wait for this one's part
                raise SystemExit(
                    f"peerd: no checkpoint can be made of the ranks' shards at step {step}: {error}"
                ) from None
            raise


def say_restored(step: int, whole: bool, *, model_of: int | None, with_state: bool) -> None:
    """Said once it is known whose model the training starts from: the daemon may have one, `model_of` a step.

    `with_state`: the optimizer's is a part of it.
    """
    found, given = f"the checkpoint of step {step}", f"the model of step {model_of} comes from the daemon"
    if model_of is None:
        say(f"resumed from {found}" if whole else f"resumed from {found}, which has no state that fits the optimizer")
    elif with_state:
        say(f"{given}, and so is the optimizer's state, in place of that of {found}")
    elif whole:
        say(f"{given}; the optimizer's state is this node's own, from {found}")
    else:
        say(f"{given}; {found}, this node's own, has no state that fits the optimizer")
