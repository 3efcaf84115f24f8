"""Where a rival's worker is, and how it finds the others."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Place:
    """One worker of a run."""

    rank: int
    peers: int
    host: str
    port: int  # free, on this host
    folder: Path  # which all of them see
    joins: bool = False  # it comes when the others are half way

    def say(self, address: str) -> None:
        """Where the first one is, to all others."""
        unfinished = self.folder / "address.part"
        unfinished.write_text(address, encoding="utf-8")
        unfinished.rename(self.folder / "address")

    def hear(self) -> str:
        """What the first one has said."""
        path = self.folder / "address"
        while not path.exists():
            time.sleep(LOOK_EVERY_S)
        return path.read_text(encoding="utf-8")
