"""What does any rank but 0 do in place of talking to the daemon? What rank 0 says."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from torch import nn
from torch.optim import Optimizer

from peerd.trainer import checkpoint, groups
from peerd.trainer.kept import Kept
from peerd.trainer.optimizers import forget
from peerd.trainer.ranks import RankCommand, Ranks
from peerd.trainer.sharded import ShardedModel
from peerd.training.model.flat import FlatModel


class Follower:
    """Any rank but 0, in place of a session with the daemon."""

    def __init__(
        self, ranks: Ranks, model: nn.Module, optimizer: Optimizer, exclude: Sequence[str], kept: Kept
    ) -> None:
        """Waits for rank 0 to attach. Ends the script when the daemon refused it."""
        self._ranks = ranks
        self._model = model
        self._optimizer = optimizer
        self._exclude = exclude
        self._kept = kept
        self._shards: ShardedModel | None = None
        command, self.step = self._take_part()
        if command == RankCommand.STOP:
            raise SystemExit(1)
        self.alone = command == RankCommand.ALONE
        if self.alone or self._shards is not None:
            return
        self._flat = FlatModel(model, optimizer, exclude)
        folder = ranks.share_path(None)
        generation = checkpoint.newest(folder, self._flat.signature, lambda _: None) if folder is not None else None
        if generation is not None:
            with suppress(checkpoint.Damaged):  # rank 0 says so, and shares its model anyway
                checkpoint.restore(generation, model, optimizer)
                self._flat.loaded()
                kept.restore(generation.kept, generation.tensors, generation.step)
        ranks.share(self._flat)

    @property
    def others(self) -> int:
        """How far most other nodes are in their runs, as rank 0 knows it."""
        return 0 if self.alone else self._ranks.others

    def finish(self) -> None:
        """Go through the final flush; nothing is said after it."""
        self.follow()
        self.alone = True
        groups.let_go(self._optimizer)  # as rank 0 does

    def follow(self) -> None:
        """Go through what rank 0 went through in its last step."""
        if self.alone:
            return
        command, step = self._take_part()
        happened = step if command == RankCommand.ALONE else command
        if happened == RankCommand.CHANGED and self._shards is None:
            self._ranks.share(self._flat)
        if happened == RankCommand.ROLLED_BACK:
            if self._shards is None:
                self._ranks.share_restored(self._flat)
            forget(self._optimizer)
        self.alone = command in (RankCommand.ALONE, RankCommand.STOP)
        if command == RankCommand.STOP:
            raise SystemExit(0)

    def _take_part(self) -> tuple[RankCommand, int]:
        """Return the command with which rank 0 ends its step, and the step."""
        while True:
            command, step = self._ranks.say(RankCommand.GO_ON)
            if command < RankCommand.COMES:
                return command, step
            if command == RankCommand.COMES:
                with suppress(ValueError):  # rank 0 raises it, too, says so, and has all stop
                    self._shards = ShardedModel(self._model, self._optimizer, self._ranks, self._exclude, self._kept)
            elif self._shards is not None:
                self._shards.take_part(command, step)
