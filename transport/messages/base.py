"""What is a message? A frozen dataclass with a number of its own, by which the other end knows it.

A message knows nothing of bytes: `peerd.transport.wire` turns it into frames and back. Bulk data sits in a last field
named `chunks`, which travels outside the msgpack header and is never copied on the way.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Annotated, ClassVar

Chunk = bytes | bytearray | memoryview
Chunks = tuple[Chunk, ...]

CHUNK_VALUES = 1 << 20
"""Values a chunk encodes: 4 MiB of float32, so that no chunk exceeds 4 MiB raw or on the wire."""


@dataclass(frozen=True, slots=True)
class Within:
    """The range of a whole number, both ends included; one that declares none is a count."""

    low: int
    high: int


COUNT = Within(0, (1 << 53) - 1)  # what a float64 holds exactly, and far from where sums leave 64 bits
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)

Port = Annotated[int, Within(0, 65535)]
Drawn = Annotated[int, Within(0, (1 << 63) - 1)]
"""A number that was drawn at random, and is compared only."""
Name = Annotated[str, NAME]
"""Of a node, a swarm, a codec; ids are names too."""
MemberName = Annotated[str, re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,31}", re.ASCII)]
"""Of a member, as long as an id at most: messages have as many of them as there are workers."""
NameOrNone = Annotated[str, re.compile(f"(?:{NAME.pattern})?", re.ASCII)]
Host = Annotated[str, re.compile(r"[A-Za-z0-9._:%-]{0,255}", re.ASCII)]
VISIBLE_MAX = 200
Visible = Annotated[str, re.compile(f"[!-~]{{0,{VISIBLE_MAX}}}", re.ASCII)]
"""Of a mode and its argument, a topology: what can be seen, and no blank."""
VisibleText = Annotated[str, re.compile(r"[ -~]{0,200}", re.ASCII)]

KIND_END = 255  # that is a chunk's frame

MESSAGES: dict[int, type[Message]] = {}
"""All of them by number. A mode from outside the package adds its own by defining it."""


@dataclass(frozen=True, slots=True)
class Message:
    """What each message is; a subclass with a KIND is known to the wire from its definition on."""

    KIND: ClassVar[int]
    """Below 16 membership's, below 32 a greeting's; from 32 on bulk, of the modes too. Those of peerd are below 128."""

    supersedes: ClassVar[bool] = False
    """Whether an older one of its type that has not left yet is worth nothing."""
    repeated: ClassVar[bool] = True
    """Whether it is said anew when a connection broke before it left."""
    key_fields: ClassVar[tuple[str, ...]] = ()
    """Of bulk: the fields that a message and its repetition have in common; its chunks are not worth comparing."""

    @property
    def stage(self) -> int:
        """What waits of its type and of an earlier stage is worth nothing."""
        return 0

    @property
    def said(self) -> Hashable:
        """Equal for a message and its repetition."""
        if self.supersedes:
            return (type(self),)
        return (type(self), *(getattr(self, name) for name in self.key_fields)) if self.key_fields else self

    def __init_subclass__(cls) -> None:
        """Raises TypeError: the number is another message's, or none for messages."""
        kind = cls.__dict__.get("KIND")
        if kind is None:
            return
        if not 0 < kind < KIND_END:
            raise TypeError(f"{cls.__name__} has the number {kind}, which is not from 1 to {KIND_END - 1}")
        known = MESSAGES.get(kind)  # a dataclass with slots is made twice
        if known is not None and (known.__module__, known.__name__) != (cls.__module__, cls.__name__):
            raise TypeError(f"{cls.__name__} has the number {kind}, which is {known.__name__}'s")
        MESSAGES[kind] = cls


@dataclass(frozen=True, slots=True)
class Connected:
    """Never sent: the shell says that messages to this peer flow (again); what was under way may be lost."""
