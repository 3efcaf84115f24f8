"""How fast is a ring all-reduce of 100 MB among processes of this machine: peerd's rounds beside gloo's, in turn.

    python benchmarks/allreduce.py [--peers 4] [--values 25000000] [--repeat 7] [--topology ring] [--format json]
    python benchmarks/allreduce.py --mbit 100       each in a network namespace of its own (root, ip and tc)

peerd's side is the production path from a mode's contribution to the committed sum: rounds, leader and collective in
the compute thread, pieces over TCP links, all that a member says included; only the trainer is left out, as it is on
gloo's side. Both sum the same vectors; a repetition takes from the first process's begin to the last one's end. Each
one's sum is compared with the others' to the bit, and with numpy's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

from peerd.process.allocator import keep_freed_chunks
from peerd.process.ending import kill_cleans_up
from peerd.reproduce.sockets.lines import free_ports, namespaces
from peerd.reproduce.sockets.without_trainer import name_of, without_trainer
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Effect, Proceed, StepReport, Vector
from peerd.training.modes import EVERY_STEP, LinkStatus, ModeClass, ModeSettings, Quiet
from peerd.training.rounds.member import Committed, Outcome, Rounds, Withdrawn
from peerd.transport.ids import Address, NodeId
from peerd.transport.messages import Connected, Message
from peerd.transport.same_host import SameHost
from peerd.transport.tcp import TcpTransport

SIDES = ("gloo", "peerd")
PORT = 7946


# ---------------------------------------------------------------------------------------------------------- one rank


def contribution(rank: int, count: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(rank).standard_normal(count, dtype=np.float32)


def obey(
    prepare: Callable[[], None], add_up: Callable[[], float], total: Callable[[], Vector], count: int, parts: int = 1
) -> None:
    """Do what the lines on stdin say; `add_up` returns when it had the sum, of which `total` is one of `parts`."""
    for line in sys.stdin:
        match line.strip():
            case "prepare":
                prepare()
                print("prepared", flush=True)
            case "go":
                began, worked = time.monotonic(), time.process_time()
                ended = add_up()
                worked = time.process_time() - worked
                said = {"began": began, "ended": ended, "cpu": worked, "sum": zlib.crc32(total().tobytes())}
                print(json.dumps(said), flush=True)
            case "check":
                ranks = int(os.environ["RANKS"])
                expected = np.sum([contribution(rank, min(count, 1 << 16)) for rank in range(ranks)], axis=0) / parts
                found = total()[: len(expected)]
                print(bool(np.all(np.abs(found - expected) <= 1e-4 * (1 + np.abs(expected)))), flush=True)


def gloo(rank: int, addresses: list[Address], count: int) -> None:
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    host, port = addresses[0]
    torch.distributed.init_process_group("gloo", f"tcp://{host}:{port}", rank=rank, world_size=len(addresses))
    source = contribution(rank, count)
    work = source.copy()
    tensor = torch.from_numpy(work)

    def add_up() -> float:
        torch.distributed.all_reduce(tensor)
        return time.monotonic()

    print("ready", flush=True)
    obey(lambda: np.copyto(work, source), add_up, lambda: work, count)
    torch.distributed.destroy_process_group()


class Summing(ModeClass):
    """The smallest mode that has rounds: every step contributes the vector, which becomes the mean."""

    NAME = "summing"
    TAKES = ("codec", "topology")
    barrier = 0
    consensus_distance = 0.0
    under_way = False

    def __init__(self, me: NodeId, layout: Layout, rng: random.Random, settings: ModeSettings, vector: Vector) -> None:
        self.counts: Counter[str] = Counter()
        self.deadline = math.inf
        self.ended = 0.0
        self._rounds = Rounds(
            me, layout, rng, settings, lambda _, where: vector[where], self.counts, differences=False, fragments=1
        )

    def on_step(self, report: StepReport, now: float) -> list[Effect]:
        return self._perform(self._rounds.reach(now))

    def on_message(self, sender: NodeId, message: Message | Connected, now: float) -> list[Effect]:
        return self._perform(self._rounds.on_message(sender, message, now))

    def on_peers(self, alive: frozenset[NodeId], now: float) -> list[Effect]:
        return self._perform(self._rounds.on_peers(alive, now))

    def on_timer(self, now: float) -> list[Effect]:
        return self._perform(self._rounds.on_timer(now))

    def links(self) -> list[LinkStatus]:
        return []

    @property
    def quiet(self) -> Quiet:
        return EVERY_STEP

    def end(self) -> None:
        pass

    def _perform(self, outcomes: list[Outcome]) -> list[Effect]:
        effects: list[Effect] = []
        for outcome in outcomes:
            if isinstance(outcome, Committed):
                self.ended = time.monotonic()
                effects.append(Proceed())
            else:
                assert not isinstance(outcome, Withdrawn), "all values are finite"
                effects.append(outcome)
        self.deadline = self._rounds.deadline()
        return effects


async def peerd(rank: int, addresses: list[Address], count: int, topology: str, shm: bool) -> None:
    layout = Layout(count, count)
    settings = ModeSettings(
        codec="float32", overlap="blocking", topology=topology, min_peers=len(addresses), robust=False
    )  # one that says no lengths would be left out of the rounds
    source = contribution(rank, count)
    work = source.copy()

    mode = Summing(name_of(rank), layout, random.Random(rank), settings, work)

    def transport(nursery: trio.Nursery) -> TcpTransport:
        return TcpTransport(nursery, *([SameHost()] if shm else []))

    async with without_trainer(rank, addresses, layout, mode, transport) as node:

        async def add_up() -> float:
            await node.step(1)
            return mode.ended

        print("ready", flush=True)
        await trio.to_thread.run_sync(
            obey,
            lambda: np.copyto(work, source),
            lambda: trio.from_thread.run(add_up),
            lambda: work,
            count,
            len(addresses),  # a round leaves the mean
        )


# -------------------------------------------------------------------------------------------------------- all of them


class Ranks:
    """One process a rank, all of one side."""

    def __init__(
        self,
        side: str,
        count: int,
        addresses: list[Address],
        within: list[list[str]],
        interface: str,
        topology: str,
        carrier: str,
        stack: ExitStack,
    ) -> None:
        self._all = [
            subprocess.Popen(
                [*within[rank], sys.executable, __file__, "--rank", str(rank), "--side", side, "--values", str(count),
                 "--addresses", json.dumps(addresses), "--topology", topology, "--carrier", carrier],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": interface, "RANKS": str(len(addresses))},
            )
            for rank in range(len(addresses))
        ]  # fmt: skip
        for process in self._all:
            stack.callback(process.kill)  # one that has ended does not mind
        assert self._heard() == ["ready"] * len(addresses)

    def add_up(self) -> tuple[float, float]:
        """Seconds, and seconds of processor time in all."""
        assert set(self._ask("prepare")) == {"prepared"}
        found = [json.loads(line) for line in self._ask("go")]
        assert len({each["sum"] for each in found}) == 1, "the sums differ"
        took = max(each["ended"] for each in found) - min(each["began"] for each in found)
        return took, sum(each["cpu"] for each in found)

    def end(self) -> None:
        assert set(self._ask("check")) == {"True"}, "not the sum"
        for process in self._all:
            process.stdin.close()  # type: ignore[union-attr]
        for process in self._all:
            process.wait(20)

    def _ask(self, word: str) -> list[str]:
        for process in self._all:
            print(word, file=process.stdin, flush=True)
        return self._heard()

    def _heard(self) -> list[str]:
        return [process.stdout.readline().strip() for process in self._all]  # type: ignore[union-attr]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as stack:
        if options.mbit:
            within = stack.enter_context(namespaces(options.peers, options.mbit))
            hosts = [f"10.77.0.{rank + 1}" for rank in range(options.peers)]
            places = {side: [(host, PORT + at) for host in hosts] for at, side in enumerate(SIDES)}
            interface = "eth0"
        else:
            within = [[] for _ in range(options.peers)]
            places = {side: [("127.0.0.1", port) for port in free_ports(options.peers)] for side in SIDES}
            interface = "lo"
        sides = {
            side: Ranks(side, options.values, places[side], within, interface, options.topology, options.carrier, stack)
            for side in SIDES
        }
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        worked: dict[str, list[float]] = {side: [] for side in SIDES}
        for turn in range(options.repeat + 1):
            for side in SIDES if turn % 2 else SIDES[::-1]:
                took, cpu = sides[side].add_up()
                if turn:  # the first one connects
                    seconds[side].append(took)
                    worked[side].append(cpu)
        for ranks in sides.values():
            ranks.end()
    medians = {side: statistics.median(found) for side, found in seconds.items()}
    in_turn = [a / b for a, b in zip(seconds["gloo"], seconds["peerd"], strict=True)]
    sent = 2 * (options.peers - 1) / options.peers * 4 * options.values
    return {
        "peers": options.peers, "mb": 4 * options.values / 1e6, "mbit": options.mbit, "seconds": seconds,
        "median_s": medians, "rate_of_gloo": medians["gloo"] / medians["peerd"], "rates_in_turn": in_turn,
        "line_s": sent / (125_000 * options.mbit) if options.mbit else 0.0,
        "processor_s": {side: statistics.median(found) for side, found in worked.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--values", type=int, default=25_000_000)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--topology", default="ring", help="of peerd's side")
    parser.add_argument(
        "--carrier", choices=("shm", "tcp"), default="shm", help="of bulk on peerd's side, over loopback"
    )
    parser.add_argument("--mbit", type=float, default=0.0, help="of each process's line; 0: loopback")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--addresses", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        addresses = [(host, port) for host, port in options.addresses]
        if options.side == "gloo":
            gloo(options.rank, addresses, options.values)
        else:
            keep_freed_chunks()  # as a daemon does
            trio.run(peerd, options.rank, addresses, options.values, options.topology, options.carrier == "shm")
        return
    if options.mbit and not (os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")):
        parser.error("--mbit: needs root, ip and tc")
    with kill_cleans_up():
        result = measure(options)
    if options.format == "json":
        print(json.dumps(result))
        return
    for side, found in result["seconds"].items():
        print(
            f"{side:<8}median {result['median_s'][side]:.3f} s, {min(found):.3f} to {max(found):.3f}; "
            f"{result['processor_s'][side]:.3f} s of processor time in all"
        )
    turns = result["rates_in_turn"]
    print(f"peerd has {result['rate_of_gloo']:.2f} of gloo's rate (in turn {min(turns):.2f} to {max(turns):.2f})")


if __name__ == "__main__":
    main()
