"""How does a copy of the model come into the shared memory? On a GPU beside the training, which goes on meanwhile.

The flat copy stays on the device until the next one is made, so nothing writes what is being copied: the session says
nothing to the daemon, and takes nothing from it that changes the model, before the copy is whole.
"""

from __future__ import annotations

import torch


class Publication:
    """One copy at a time. In host memory it is whole at once."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._whole: torch.cuda.Event | None = None

    def begin(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy `source`, shape (total,), on any device, to `target`, pinned host memory; at most one is under way."""
        assert not self.under_way, "one copy at a time"
        if not source.is_cuda:
            target.copy_(source)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(source.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(source.device))  # which has just made it
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._whole = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._whole.record(self._stream)

    @property
    def under_way(self) -> bool:
        """Whether the copy is not whole yet."""
        return self._whole is not None and not self._whole.query()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until it is whole."""
        if self._whole is not None:
            self._whole.synchronize()
            self._whole = None
