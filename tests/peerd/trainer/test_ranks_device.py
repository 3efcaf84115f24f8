"""Over which device do ranks share a model? The one that their process group has a backend for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peerd.trainer import ranks


@pytest.mark.parametrize(
    ("backends", "on", "found"),
    [
        ("cpu:gloo,cuda:nccl", "cuda:1", "cuda:1"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu"),
        ("cpu:gloo,cuda:gloo,xpu:gloo", "cuda:1", "cpu"),
        ("cuda:nccl", "cuda:1", "cuda:1"),
        ("cuda:nccl", "cpu", "cuda:2"),
        ("xpu:xccl", "xpu:1", "xpu:1"),
        ("xpu:xccl", "cpu", "xpu:2"),
        ("cpu:gloo,xpu:xccl", "xpu:1", "xpu:1"),
        ("cpu:gloo,cuda:nccl,xpu:xccl", "xpu:1", "xpu:1"),
        ("cpu:mpi", "cuda:1", "cpu"),
    ],
)
def test_a_model_goes_over_the_device_that_the_process_group_takes(
    backends: str, on: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: backends)
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(current_device=lambda: 2))
    device = torch.device(on)
    model: Any = SimpleNamespace(
        parameters=lambda: [SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(device=device)]
    )
    assert ranks._device_of(model) == torch.device(found)
