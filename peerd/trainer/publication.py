"""How does a copy of the model come into the shared memory? On a GPU beside the training, which goes on meanwhile.

What is copied stays on the device until the next copy is made, so nothing writes it meanwhile: the session says nothing
to the daemon, and takes nothing from it that changes the model, before the copy is whole.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Publication:
    """One copy at a time. In host memory it is whole at once."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._began: torch.cuda.Event | None = None
        self._whole: torch.cuda.Event | None = None
        self.device_s = 0.0
        """What the last copy that was waited for took the device; the host stood for less."""

    def begin(self, parts: Iterable[tuple[slice, torch.Tensor]], target: torch.Tensor, device: torch.device) -> None:
        """Copy `parts`, each made on `device` as it is asked for, to `target`, shape (total,), pinned host memory.

        At most one copy is under way.
        """
        assert not self.under_way, "one copy at a time"
        if device.type != "cuda":
            _copy(parts, target, non_blocking=False)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))  # which has just made what they are made of
        # in this stream, so that their memory is its, too; on this device, or the process's current one, to which torch
        # goes back from another's stream, would get a context, of hundreds of MB
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            self._began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._whole = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._began.record(self._stream)
            _copy(parts, target, non_blocking=True)
            self._whole.record(self._stream)

    @property
    def under_way(self) -> bool:
        """Whether the copy is not whole yet."""
        return self._whole is not None and not self._whole.query()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until it is whole."""
        if self._began is not None and self._whole is not None:
            self._whole.synchronize()
            self.device_s = self._began.elapsed_time(self._whole) / 1000
            self._whole = None


def _copy(parts: Iterable[tuple[slice, torch.Tensor]], target: torch.Tensor, *, non_blocking: bool) -> None:
    for where, values in parts:
        target[where].copy_(values, non_blocking=non_blocking)
