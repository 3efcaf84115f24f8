"""What does any rank but 0 do in place of talking to the daemon? What rank 0 says."""

from __future__ import annotations

from contextlib import suppress

from torch import nn
from torch.optim import Optimizer

from peerd import checkpoint
from peerd.ranks import Ranks, Word
from peerd.sharded import ShardedModel
from peerd.training.flat import FlatModel


class Follower:
    """Any rank but 0, in place of a session with the daemon."""

    def __init__(self, ranks: Ranks, model: nn.Module, optimizer: Optimizer) -> None:
        """Waits for rank 0 to attach. Ends the script when the daemon refused it."""
        self._ranks = ranks
        self._model = model
        self._optimizer = optimizer
        self._shards: ShardedModel | None = None
        word, self.step = self._take_part()
        if word == Word.STOP:
            raise SystemExit(1)
        self.alone = word == Word.ALONE
        if self.alone or self._shards is not None:
            return
        self._flat = FlatModel(model)
        folder = ranks.share_path(None)
        generation = checkpoint.newest(folder, self._flat.signature, lambda _: None) if folder is not None else None
        if generation is not None:
            with suppress(checkpoint.Damaged):  # rank 0 says so, and shares its model anyway
                checkpoint.restore(generation, model, optimizer)
        ranks.share(self._flat)

    def finish(self) -> None:
        """Go through the final flush; nothing is said after it."""
        self.follow()
        self.alone = True

    def follow(self) -> None:
        """Go through what rank 0 went through in its last step."""
        if self.alone:
            return
        word, step = self._take_part()
        happened = step if word == Word.ALONE else word
        if happened in (Word.CHANGED, Word.ROLLED_BACK) and self._shards is None:
            self._ranks.share(self._flat)
        if happened == Word.ROLLED_BACK:
            self._optimizer.state.clear()
        self.alone = word == Word.ALONE
        if word == Word.STOP:
            raise SystemExit(0)

    def _take_part(self) -> tuple[Word, int]:
        """Return the word with which rank 0 ends its step, and the step."""
        while True:
            word, step = self._ranks.say(Word.GO_ON)
            if word < Word.COMES:
                return word, step
            if word == Word.COMES:
                with suppress(ValueError):  # rank 0 raises it, too, says so, and has all stop
                    self._shards = ShardedModel(self._model, self._optimizer, self._ranks)
            elif self._shards is not None:
                self._shards.take_part(word, step)
