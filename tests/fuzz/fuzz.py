"""Mutated frames, datagrams, chunks and files, for so many seconds: `make fuzz SECONDS=60`.

Each target is fed episodes of items until its share of the time is used. An episode follows from the seed and its
number alone, so a failure is found again; what it came to is cut down to the items that matter, and written to
tests/fuzz/corpus, which the default tests replay.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import resource
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

from daemons import Daemons
from datagrams import Members
from decoders import Deltas, Frames, Headers, LocalMessages, Metas
from entries import Entries
from files import Files
from nodes import Nodes
from sealed_datagrams import SealedDatagrams
from sealed_records import Records
from statements import Statements
from target import Place, Target, episode, keep, place, shrunk

CORPUS = Path(__file__).parent / "corpus"
GROWN_MAX = 32 << 20  # bytes
ROOM = 1 << 30  # bytes beyond the first ones: an item that asks for more fails, and the machine goes on
HANG_S = 300.0  # of an episode: then its traceback is shown, and the run ends
LOOK_S = 10.0
TARGETS = {
    target.name: target
    for target in (
        Target("headers", Headers, 1000, 0.25),
        Target("frames", Frames, 500, 0.2),
        Target("datagrams", Members, 500, 0.25),
        Target("nodes", Nodes, 200, 0.1),
        Target("deltas", Deltas, 500, 0.05),
        Target("metas", Metas, 500, 0.04),
        Target("local", LocalMessages, 500, 0.04),
        Target("files", Files, 200, 0.02),
        Target("daemons", Daemons, 200, 0.05),
        Target("records", Records, 500, 0.05),
        Target("seals", SealedDatagrams, 500, 0.05),
        Target("entries", Entries, 200, 0.05),
        Target("statements", Statements, 200, 0.03),
    )
}


@dataclass(slots=True)
class Tally:
    """What one target has had."""

    episodes: int = 0
    items: int = 0
    spent_s: float = 0.0
    failures: int = 0


def rss_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def data_bytes() -> int:
    """What the limit of memory counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))


class Run:
    """One run over some targets."""

    def __init__(self, targets: list[Target], seed: str, folder: Path = CORPUS) -> None:
        self.tallies = {target.name: Tally() for target in targets}
        self.rss_first = self.rss_most = 0
        self._targets = targets
        self._seed = seed
        self._folder = folder
        self._known: set[Place] = set()

    def for_seconds(self, seconds: float) -> None:
        """One episode of each, after which memory must stay; then whichever has had least of its share is next."""
        for target in self._targets:
            self.one(target)
        gc.collect()
        gc.freeze()  # what is imported by now stays: a twentieth of the time
        self.rss_first = rss_bytes()
        began = looked = time.monotonic()
        while (now := time.monotonic()) - began < seconds:
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            target = min(self._targets, key=lambda each: self.tallies[each.name].spent_s / each.share)
            self.one(target)
            if now - looked >= LOOK_S:
                looked = now
                self.rss_most = max(self.rss_most, rss_bytes())
                print(
                    f"{self.items:,} inputs, {self.items / (now - began):,.0f}/s, RSS {rss_bytes() >> 20} MiB",
                    flush=True,
                )
        faulthandler.cancel_dump_traceback_later()
        self.rss_most = max(self.rss_most, rss_bytes())

    @property
    def items(self) -> int:
        """Of all targets."""
        return sum(tally.items for tally in self.tallies.values())

    @property
    def failures(self) -> int:
        """Of all targets."""
        return sum(tally.failures for tally in self.tallies.values())

    def one(self, target: Target) -> None:
        """The next episode of a target; what it comes to is told, and kept."""
        tally = self.tallies[target.name]
        items: list[bytes] = []
        began = time.perf_counter()
        try:
            episode(target, f"{self._seed} {target.name} {tally.episodes}", items)
        except Exception as error:
            tally.failures += 1
            self._tell(target, items, error, tally.episodes)
        tally.spent_s += time.perf_counter() - began
        tally.episodes += 1
        tally.items += len(items)

    def _tell(self, target: Target, items: list[bytes], error: Exception, number: int) -> None:
        where = place(error)
        if where in self._known:
            return
        self._known.add(where)
        traceback.print_exception(error)
        path = keep(target, shrunk(target, items, error), self._folder)
        print(f"{target.name}, episode {number} of seed {self._seed}: {path}")

    def report(self) -> None:
        """A line for each target, and one for all."""
        for name, tally in self.tallies.items():
            rate = tally.items / max(1e-9, tally.spent_s)
            print(f"{name:10} {tally.items:12,} inputs {rate:9,.0f}/s {tally.failures:4} failures")
        spent_s = sum(tally.spent_s for tally in self.tallies.values())
        memory = f"RSS {self.rss_first >> 20} MiB, at most {self.rss_most >> 20} MiB later"
        print(f"{'all':10} {self.items:12,} inputs {self.items / spent_s:9,.0f}/s {self.failures:4} failures; {memory}")


def main() -> int:
    """0: nothing was found, and memory stayed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", default="0")
    parser.add_argument("targets", nargs="*", default=list(TARGETS), help=", ".join(TARGETS))
    told = parser.parse_args()
    warnings.simplefilter("error")
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + ROOM,) * 2)
    run = Run([TARGETS[name] for name in told.targets], told.seed)
    run.for_seconds(told.seconds)
    run.report()
    if run.rss_most - run.rss_first > GROWN_MAX:
        print(f"memory grew by {(run.rss_most - run.rss_first) >> 20} MiB")
        return 1
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
