"""One exchange of the two ends of a link, without a network."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from peerd.training.effects import Vector
from peerd.training.pairs.reference import Exchanged, ExchangeHalf, PairedReference
from peerd.transport.messages import Delta


def exchange(
    a: PairedReference,
    b: PairedReference,
    x: Vector,
    y: Vector,
    half: ExchangeHalf,
    of_b: AbstractContextManager[None] | None = None,
) -> tuple[Exchanged, Exchanged]:
    """`a`, whose model is x, begins; what comes of it on both ends. Afterwards they know the same of each other.

    All that `b` computes is done within `of_b`.
    """
    asks = a.begin(x, half)
    with of_b or nullcontext():
        answer = b.receive(asks, y, half)
    assert isinstance(answer.reply, Delta)
    found = a.receive(answer.reply, x, half).exchanged
    assert found is not None
    assert answer.exchanged is not None
    assert a.mine[:].tobytes() == b.theirs[:].tobytes()
    assert a.theirs[:].tobytes() == b.mine[:].tobytes()
    return found, answer.exchanged
