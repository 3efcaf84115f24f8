"""How do many tensors come over a bus? One after the other, and who needs them waits once, for the last.

In host memory each is there at once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values` on `device`. Before what is in the host's memory is written again, `wait_for` that device."""
    return values.to(device, non_blocking=values.device.type == "cpu")


def fetch(values: torch.Tensor, out: torch.Tensor) -> None:
    """Copy `values` to `out`, host memory in rows of the same shape: there once their device was waited for."""
    # in another order they would go by a copy in pageable memory
    out.copy_(values if values.device == out.device else values.contiguous(), non_blocking=True)


def wait_for(devices: Iterable[torch.device]) -> None:
    """Until what was sent to them, and fetched from them, is there."""
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
