"""When do two nodes hold the same model? When these lines, one a tensor, are the same: names, types, shapes.

Trainable values differ from node to node; frozen ones must not, so their lines have a checksum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from peerd.training.model.shards import whole

_CHECKSUM_BYTES = 64 << 20  # at a time: a frozen base may fill the GPU's memory


def signature_of(tensors: list[str]) -> str:
    """What two nodes compare: 64 hexadecimal digits."""
    return hashlib.sha256("\n".join(tensors).encode()).hexdigest()


def described(parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> list[str]:
    """One line a tensor, "name dtype shape"; frozen ones with a checksum, for their values must agree too."""
    lines = []
    for name, parameter in parameters.items():
        kind = "" if parameter.requires_grad else f" frozen {_checksum(parameter)}"
        lines.append(f"{name} {type_name(parameter)} {_shape(parameter)}{kind}")
    lines += [f"{name} {type_name(buffer)} {_shape(buffer)} buffer" for name, buffer in buffers.items()]
    return lines


def type_name(tensor: torch.Tensor) -> str:
    """float32 and the like."""
    return str(tensor.dtype).removeprefix("torch.")


def _shape(tensor: torch.Tensor) -> str:
    return "x".join(str(size) for size in tensor.shape) or "scalar"


@torch.no_grad()
def _checksum(tensor: torch.Tensor) -> str:
    """Of the bits, in order: a sum would miss two values that changed places."""
    bits = whole(tensor).contiguous().reshape(-1).view(torch.uint8)
    digest = hashlib.sha256()
    for start in range(0, len(bits), _CHECKSUM_BYTES):
        digest.update(bits[start : start + _CHECKSUM_BYTES].cpu().numpy().data)
    return digest.hexdigest()[:16]
