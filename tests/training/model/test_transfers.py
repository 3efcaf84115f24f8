"""Only CUDA's streams are waited for: to and from other devices a copy is whole when the call returns."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from peerd.training.model.transfers import fetch, sent

ELSEWHERE = torch.device("meta")  # as xpu and others are here: neither the host nor CUDA


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Between two devices; whether they may still be under way when the call returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.late: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and "device" in kwargs:
            self.late.append(kwargs.get("non_blocking", False))
        elif func is torch.ops.aten.copy_.default:
            self.late.append(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            return args[0]  # nothing is copied out of such a device
        return func(*args, **kwargs)


def test_what_is_not_waited_for_is_there_at_once() -> None:
    with Copies() as copies:
        there = sent(torch.zeros(3), ELSEWHERE)
        fetch(there, torch.zeros(3))
    assert there.device == ELSEWHERE
    assert copies.late == [False, False]
