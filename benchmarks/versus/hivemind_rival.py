"""hivemind's averager (Ryabinin et al. 2021, arXiv:2103.03239): the models are averaged every so many steps."""

from __future__ import annotations

from contextlib import suppress

import hivemind  # type: ignore[import-not-found]  # in an environment of its own
import torch

from benchmarks.versus.place import Place
from peerd.training.tasks.run import Run

MATCHMAKING_S, ANSWER_S = 1.5, 1.0  # its own 5 and 3 would be most of the time here
PATIENCE_S = 20.0


class Hivemind:
    """One group, which begins when it is full; values travel in 16 bits, as in its examples."""

    def __init__(self, run: Run, place: Place, every: int) -> None:
        self._run, self._every = run, every
        here = f"/ip4/{place.host}/tcp/{place.port}"
        if place.rank == 0:
            self._dht = hivemind.DHT(host_maddrs=[here], start=True)
            place.say(str(self._dht.get_visible_maddrs()[0]))
        else:
            self._dht = hivemind.DHT(host_maddrs=[here], initial_peers=[place.hear()], start=True)
        self._parameters = list(run.model.parameters())
        self._averager = hivemind.averaging.DecentralizedAverager(
            [values.detach().clone() for values in self._parameters], self._dht, start=True, prefix="versus",
            target_group_size=place.peers, min_matchmaking_time=MATCHMAKING_S, request_timeout=ANSWER_S,
            compression=hivemind.compression.Float16Compression(),
        )  # fmt: skip
        if place.joins and self._averager.load_state_from_peers() is not None:
            self._take()

    def step(self, number: int) -> None:
        """See `Rival`."""
        self._run.step(number)
        if (number + 1) % self._every == 0:
            self._average()

    def end(self) -> None:
        """See `Rival`: one average more, of the models as they are."""
        self._average()

    @torch.no_grad()
    def _average(self) -> None:
        """Without a group the model stays as it is."""
        with self._averager.get_tensors() as held:
            for values, mine in zip(held, self._parameters, strict=True):
                values.copy_(mine)
        with suppress(hivemind.averaging.partition.AllreduceException):
            self._averager.step(timeout=PATIENCE_S)
        self._take()

    @torch.no_grad()
    def _take(self) -> None:
        with self._averager.get_tensors() as held:
            for values, mine in zip(held, self._parameters, strict=True):
                mine.copy_(values)
