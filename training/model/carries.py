"""What does a weight of lower precision lack of its float32 value? Its carry: what corrections could not yet move in it.

Of bfloat16, which is the upper half of a float32, it is the lower half, rounded: sixteen bits, to add to or take from
those of the weight. So both together are the float32 value to the bit, in four bytes. A step of the optimizer's moves
the weight alone, and the carry stays so many of 2^16 parts of its last digit. Of other types it is a float32.
"""

from __future__ import annotations

import torch

_HALF_BITS = 16
_ROUNDING = 1 << 15


def no_carry(values: torch.Tensor) -> torch.Tensor:
    """Of weights, shape (count,), that are what they should be."""
    return torch.zeros_like(values, dtype=torch.int16 if values.dtype == torch.bfloat16 else torch.float32)


def joined(values: torch.Tensor, carry: torch.Tensor) -> torch.Tensor:
    """The float32 values of these weights, shape (count,)."""
    if values.dtype != torch.bfloat16:
        return values.float() + carry
    upper = values.view(torch.int16).int()
    lower = carry.int()
    lower = torch.where(upper & 0x7FFF == 0, lower.clamp(min=0), lower)  # a weight that was set to zero: less is none
    return ((upper << _HALF_BITS) + lower).view(torch.float32)


def part(exact: torch.Tensor, values: torch.Tensor, carry: torch.Tensor) -> None:
    """Make float32 values, shape (count,), weights and their carry."""
    if values.dtype != torch.bfloat16:
        values.copy_(exact)
        carry.copy_(exact - values.float())
        return
    bits = exact.view(torch.int32)
    upper = (bits + _ROUNDING) >> _HALF_BITS
    values.view(torch.int16).copy_(upper)
    carry.copy_(bits - (upper << _HALF_BITS))
