"""What is fuzzed: something that takes items of bytes, one after the other, and may find them bad but not break."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol

import msgpack

Place = tuple[str, str, int]
"""The kind of an error and where it was raised: two failures with the same are one bug."""


class Victim(Protocol):
    """It begins anew for each episode, and is the same each time: what it makes of the same items is the same."""

    def draw(self, rng: Random) -> bytes:
        """The next hostile item."""
        ...

    def take(self, item: bytes) -> None:
        """Whatever comes out of this is a bug: what is the sender's own fault is dealt with within."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


class Drawn:
    """A victim that holds nothing."""

    def close(self) -> None:
        """Nothing to give back."""


@dataclass(frozen=True, slots=True)
class Target:
    """`share` is of the time; `items` make an episode."""

    name: str
    begin: Callable[[], Victim]
    items: int
    share: float


def replay(target: Target, items: list[bytes]) -> None:
    """Raises what it comes to."""
    victim = target.begin()
    try:
        for item in items:
            victim.take(item)
    finally:
        victim.close()


def read(data: bytes) -> list[bytes]:
    """The items of a file in the corpus. Raises ValueError."""
    try:
        items = msgpack.unpackb(data)
    except (msgpack.UnpackException, RecursionError) as error:
        raise ValueError(f"no items: {error}") from None
    if not isinstance(items, list) or not all(type(item) is bytes for item in items):
        raise ValueError("no list of items")
    return items


def written(items: list[bytes]) -> bytes:
    """What `read` reads."""
    data: bytes = msgpack.packb(items)
    return data


def episode(target: Target, seed: str, items: list[bytes]) -> None:
    """One, whose items are left in `items`. Raises what it comes to."""
    rng = Random(seed)
    victim = target.begin()
    try:
        for _ in range(target.items):
            item = victim.draw(rng)
            items.append(item)
            victim.take(item)
    finally:
        victim.close()


def place(error: BaseException) -> Place:
    """See `Place`."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return type(error).__name__, last.filename, last.lineno or 0


def fails_alike(target: Target, items: list[bytes], found: Exception) -> bool:
    """Whether these items come to the same."""
    try:
        replay(target, items)
    except Exception as error:
        return place(error) == place(found)
    return False


def shrunk(target: Target, items: list[bytes], found: Exception) -> list[bytes]:
    """The fewest items that come to the same, as far as leaving out finds them."""
    size = max(1, len(items) // 2)
    while True:
        at = 0
        while at < len(items):
            fewer = items[:at] + items[at + size :]
            if fails_alike(target, fewer, found):
                items = fewer
            else:
                at += size
        if size == 1:
            return items
        size //= 2


def keep(target: Target, items: list[bytes], folder: Path) -> Path:
    """Write them where the tests replay them."""
    data = written(items)
    path = folder / f"{target.name}-{hashlib.sha256(data).hexdigest()[:12]}"
    folder.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path
