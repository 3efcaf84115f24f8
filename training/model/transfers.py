"""How does a model come over a bus? Tensor after tensor, and who needs them waits once, for the last.

In host memory each is there at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

from peerd.training.model.published import parts_of


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values` on `device`. Before what is in the host's memory is written again, `wait_for` that device."""
    return values.to(device, non_blocking=_is_late(device) and values.device.type == "cpu")


def fetch(values: torch.Tensor, out: torch.Tensor) -> None:
    """Copy `values` to `out`, host memory in rows of the same shape: there once their device was waited for."""
    if values.device == out.device:
        out.copy_(values)
        return
    flat, to = values.contiguous().view(-1), out.view(-1)  # in another order or type they would go by pageable memory
    for where in parts_of(flat):
        to[where].copy_(flat[where].to(out.dtype), non_blocking=_is_late(values.device))


def wait_for(devices: Iterable[torch.device]) -> None:
    """Until what was sent to them, and fetched from them, is there."""
    for device in {device for device in devices if _is_late(device)}:
        torch.cuda.current_stream(device).synchronize()


def _is_late(device: torch.device) -> bool:
    """Whether copies to and from it are waited for: of all others each call does, whatever they are (XPU)."""
    return device.type == "cuda"


def pin(memory: npt.NDArray[np.float32], device: torch.device) -> bool:
    """Have CUDA copy between `memory` and `device` at the full speed of the bus; `unpin` it before it is let go.

    False when it will not: copies still work.
    """
    with torch.cuda.device(device):  # or the process's current GPU would get a context, too, of hundreds of MB
        try:
            code = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)  # type: ignore[no-untyped-call]
        except (RuntimeError, AttributeError):
            return False
        if int(code) != 0:
            with suppress(RuntimeError):  # the runtime keeps the error, and gives it to whoever asks next
                torch.zeros(1, device=device).add_(1)
        return int(code) == 0


def unpin(memory: npt.NDArray[np.float32], device: torch.device) -> None:
    """No copy is under way: forget the addresses, which will be another memory's."""
    with torch.cuda.device(device), suppress(RuntimeError, AttributeError):
        torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)  # type: ignore[no-untyped-call]
