"""torchft's DiLoCo: outer steps among the replica groups that its lighthouse finds alive."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torchft  # type: ignore[import-not-found]  # in an environment of its own
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch leaves it so
from torchft.coordination import LighthouseServer  # type: ignore[import-not-found]
from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found]

from benchmarks.versus.place import Place
from peerd.training.tasks.run import Run

PATIENCE = timedelta(seconds=60)
JOIN_MS = 1000  # for how long a quorum waits for who beats its heart and has not come
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9  # the paper's


class TorchFt:
    """A replica group of one process for each worker, over gloo."""

    def __init__(self, run: Run, place: Place, every: int) -> None:
        self._run = run
        if place.rank == 0:
            self._lighthouse = LighthouseServer(
                bind=f"{place.host}:0", min_replicas=1, join_timeout_ms=JOIN_MS, quorum_tick_ms=20
            )
            place.say(f"http://{place.host}:{urlsplit(self._lighthouse.address()).port}")
        self._store = TCPStore(place.host, 0, is_master=True, wait_for_workers=False)
        self._manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=PATIENCE),
            load_state_dict=self._load, state_dict=self._state, min_replica_size=1, use_async_quorum=False,
            timeout=PATIENCE, quorum_timeout=timedelta(hours=1), rank=0, world_size=1,
            store_addr=place.host, store_port=self._store.port, lighthouse_addr=place.hear(),
            replica_id=f"worker{place.rank}", hostname=place.host, init_sync=place.joins,
        )  # fmt: skip
        outer = torch.optim.SGD(run.model.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
        self._method = DiLoCo(self._manager, [run.model], run.optimizer, outer, every, pin_memory=False)
        self._method.__enter__()

    def step(self, number: int) -> None:
        """See `Rival`: the outer steps hang on the optimizer's."""
        self._run.step(number)

    def end(self) -> None:
        """See `Rival`."""
        self._manager.shutdown(wait=False)

    def _state(self) -> dict[str, Any]:
        """DiLoCo itself gives a joiner its outer optimizer and the model that it counts from."""
        return {"model": self._run.model.state_dict(), "optimizer": self._run.optimizer.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self._run.model.load_state_dict(state["model"])
        self._run.optimizer.load_state_dict(state["optimizer"])
