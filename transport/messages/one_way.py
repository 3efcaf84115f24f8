"""Pushes over one-way links (gossip-push, gossip-pull, push-sum)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from peerd.transport.messages.base import Chunks, Drawn, Message, Name


@dataclass(frozen=True, slots=True)
class Push(Message):
    """The sender's model less what the receiver knows of it (nothing, at seq 1): number `seq` of the one-way `link`."""

    KIND: ClassVar[int] = 56
    key_fields: ClassVar[tuple[str, ...]] = ("link", "seq")
    wants_answer: ClassVar[bool] = True
    link: Drawn
    seq: int
    codec: Name
    gain: float  # what the sender's measured contraction allows
    weight: float  # push-sum: all the weight that ever went over this link; 0 in other modes
    finishing: bool  # the sender's trainer has ended: it is flushing
    back: bool  # push-sum: it only gives back, and is not answered in kind
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class Pushed(Message):
    """All of `link` up to number `taken` is in my model."""

    KIND: ClassVar[int] = 57
    supersedes: ClassVar[bool] = True
    link: Drawn
    taken: int
    distance: float  # ||what I know of your model - mine||
    finishing: bool  # my trainer has ended

    @property
    def said(self) -> Hashable:
        """Of one link the last answer counts."""
        return (type(self), self.link)


@dataclass(frozen=True, slots=True)
class PushForgotten(Message):
    """I do not hold `link` (any more), of which I took all up to `seq`: start a new one."""

    KIND: ClassVar[int] = 58
    link: Drawn
    seq: int


@dataclass(frozen=True, slots=True)
class Pull(Message):
    """Push me your model; I have taken number `seq` of your `link` (0 and 0: none)."""

    KIND: ClassVar[int] = 59
    wants_answer: ClassVar[bool] = True
    link: Drawn
    seq: int
    back: bool  # the sender asks because it was asked, and does not want to be asked for this
