"""E6, FireCaffe: how long do a parameter server, a reduction tree and a ring take over lines of a known rate?"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from threading import Timer
from typing import Any

from peerd.reproduce.experiment import (
    Cell,
    Criterion,
    Curve,
    Experiment,
    Findings,
    NotRun,
    Plot,
    Result,
    Run,
    Size,
    points,
)
from peerd.reproduce.sockets.lines import can_make_namespaces, free_ports, namespaces
from peerd.reproduce.statistics import estimate, exactly
from peerd.training.rounds.topology import parse_topology
from peerd.transport.errors import UserError

PORT = 7946
ANSWER_BYTES_MAX = 4096
START_S = 120.0  # for all processes to be there
ROUND_S, LATE = 30.0, 10.0  # a round may take so long, and so many times the model's time more
ARMS = {  # mode and topology of each
    "parameter server": ("hardsync", "auto"),
    "tree:2": ("allreduce", "tree:2"),
    "tree:4": ("allreduce", "tree:4"),
    "ring": ("allreduce", "ring"),
}
PLANS: dict[Size, dict[str, Any]] = {
    Size.TINY: {"peers": 3, "values": 50_000, "mbit": 100.0, "repeats": 1, "arms": ["tree:2", "ring"]},
    Size.QUICK: {"peers": 8, "values": 1_350_000, "mbit": 50.0, "repeats": 2, "arms": list(ARMS)},
    Size.FULL: {"peers": 8, "values": 13_500_000, "mbit": 100.0, "repeats": 5, "arms": list(ARMS)},
}
OFF_MAX = 1e-3  # of a value, after a few float32 additions to values of about 1
CLOSE = 0.25  # of the model's time


def predicted(arm: str, size_bytes: float, peers: int, bytes_per_s: float) -> float:
    """Seconds by FireCaffe's cost model, there and back, with no latency. The server is one of the peers, as in peerd,
    so its line carries all others' vectors."""
    if arm == "parameter server":
        return 2 * (peers - 1) * size_bytes / bytes_per_s
    return parse_topology(ARMS[arm][1]).seconds(size_bytes, peers, 0.0, bytes_per_s)


def measure(cell: Cell) -> Result:
    """The seconds of each round, after one that connects. Raises UserError."""
    told = cell.settings
    peers, mbit = told["peers"], told["mbit"]
    with ExitStack() as stack:
        if told["namespaces"]:
            within = stack.enter_context(namespaces(peers, mbit))
            addresses = [(f"10.77.0.{rank + 1}", PORT) for rank in range(peers)]
        else:
            within = [[] for _ in range(peers)]
            addresses = [("127.0.0.1", port) for port in free_ports(peers)]
        mode, topology = ARMS[told["arm"]]
        ranks = [
            stack.enter_context(_Rank(rank, within[rank], [
                "--addresses", json.dumps(addresses), "--values", str(told["values"]), "--mode", mode,
                "--topology", topology, "--mbit", "0" if told["namespaces"] else str(mbit),
            ]))
            for rank in range(peers)
        ]  # fmt: skip
        with _in_time(START_S, ranks):
            if {rank.said() for rank in ranks} != {"ready"}:
                raise UserError(f"E6: a process of {told['arm']} did not start; what it said is above")
        most_s = ROUND_S + LATE * predicted(told["arm"], 4.0 * told["values"], peers, mbit * 125_000)
        seconds, sent = [], []
        for turn in range(told["repeats"] + 1):
            with _in_time(most_s, ranks):
                for rank in ranks:
                    rank.order()
                answers = [json.loads(rank.said()) for rank in ranks]
            if turn and not all(each["off"] < OFF_MAX for each in answers):
                raise UserError(f"E6: the models are not the mean by {told['arm']}: a bug, please report it")
            seconds.append(max(each["ended"] for each in answers) - min(each["began"] for each in answers))
            sent.append(sum(each["sent"] for each in answers))
    return {"seconds": seconds[1:], "bytes": (sent[-1] - sent[0]) / told["repeats"]}


@contextmanager
def _in_time(seconds: float, ranks: Sequence[_Rank]) -> Iterator[None]:
    """Afterwards all are killed: who waits for one that is gone would wait for ever."""

    def kill() -> None:
        for rank in ranks:
            rank.kill()

    timer = Timer(seconds, kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Rank:
    """A process of peerd/reproduce/sockets/rank.py."""

    def __init__(self, rank: int, within: list[str], words: list[str]) -> None:
        command = [*within, sys.executable, "-m", "peerd.reproduce.sockets.rank", "--rank", str(rank), *words]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> _Rank:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        assert self._process.stdin is not None, "it was asked for"
        assert self._process.stdout is not None, "it was asked for"
        if error is not None:  # it may wait for one that is gone
            self.kill()
        try:
            self._process.stdin.close()
            self._process.wait(5)
        except (OSError, subprocess.TimeoutExpired):
            self.kill()
            self._process.wait()
        self._process.stdout.close()

    def kill(self) -> None:
        self._process.kill()

    def order(self) -> None:
        assert self._process.stdin is not None, "it was asked for"
        with suppress(BrokenPipeError):  # it has ended: that is said where its answer is missed
            self._process.stdin.write("step\n")
            self._process.stdin.flush()

    def said(self) -> str:
        assert self._process.stdout is not None, "it was asked for"
        line = self._process.stdout.readline(ANSWER_BYTES_MAX).strip()
        if not line:
            raise UserError("E6: a process ended, or one waited for it too long; what it said is above")
        return line


def study(size: Size, run: Run) -> Findings:
    """Each arm in turn; the order is judged by medians."""
    plan = PLANS[size]
    in_namespaces = can_make_namespaces()
    shared = {name: plan[name] for name in ("peers", "values", "mbit", "repeats")}
    cells = [Cell(arm, 0, {**shared, "arm": arm, "namespaces": in_namespaces}) for arm in plan["arms"]]
    results = dict(zip(plan["arms"], run(cells), strict=True))
    size_bytes, rate = 4.0 * plan["values"], plan["mbit"] * 125_000
    model = {arm: predicted(arm, size_bytes, plan["peers"], rate) for arm in results}
    took = {arm: estimate(result["seconds"]) for arm, result in results.items()}
    ratios = {arm: estimate([each / model[arm] for each in result["seconds"]]) for arm, result in results.items()}
    off = [estimate([abs(each / model[arm] - 1) for each in result["seconds"]]) for arm, result in results.items()]
    by_model = sorted(results, key=model.__getitem__)
    by_clock = sorted(results, key=lambda arm: statistics.median(results[arm]["seconds"]))
    slower = [arm for arm in ("parameter server",) if arm in took and "tree:2" in took]
    order = f"by the clock {', '.join(by_clock)}; by the model {', '.join(by_model)}"
    where = "namespaces with tc" if in_namespaces else "loopback with the limit in each process"
    seen = (
        f"Here {plan['peers']} processes summed {size_bytes / 1e6:.1f} MB over lines of {plan['mbit']:g} Mbit/s "
        f"({where}); the fastest first, {order}; measured over predicted lay between "
        f"{min(ratio.mean for ratio in ratios.values()):.2f} and {max(ratio.mean for ratio in ratios.values()):.2f}."
    )
    places = [float(place) for place in range(len(results))]
    figures = {
        "distance": max(off, key=lambda each: each.mean),
        "order": exactly(float(by_clock == by_model)),
        "server over tree": (
            estimate([a / b for a, b in zip(results[slower[0]]["seconds"], results["tree:2"]["seconds"], strict=True)])
            if slower
            else NotRun("these two were not both run")
        ),
    }
    rows = [
        {"arm": arm, "measured s": took[arm].mean, "model s": model[arm], "measured / model": ratios[arm].mean,
         "bytes a peer / vector": results[arm]["bytes"] / plan["peers"] / size_bytes}
        for arm in results
    ]  # fmt: skip
    curves = [
        points("measured", places, [took[arm] for arm in results], line=False),
        Curve("model", places, list(model.values()), line=False),
    ]
    across = ", ".join(f"{number}: {arm}" for number, arm in enumerate(results))
    return Findings(seen, figures, [Plot("seconds for a sum", across, curves)], rows)


EXPERIMENT = Experiment(
    "E6",
    "a sum over slow lines: server, trees, ring",
    "FireCaffe, arXiv:1511.00175",
    "FireCaffe claimed that adding up gradients along a tree of the workers takes less time than sending them all to a "
    "parameter server, and gave a formula for each.",
    (
        Criterion("distance", "the arm farthest from its formula is within 25 % of it", most=CLOSE),
        Criterion("order", "the arms come in the formulas' order (1: yes)", least=1),
        Criterion("server over tree", "the parameter server takes longer than the binary tree (ratio)", least=1),
    ),
    measure,
    study,
    alone=True,
    notes=(
        "peerd's modes as they are, every message of theirs included: hardsync for the server, which is one of the "
        "peers, allreduce for the rest; no trainer, no optimizer. The ring stands beside the trees: it beats both.",
        "The formulas add up levels one after the other; peerd sends a vector in pieces, which overlap.",
        "What goes to the server and comes from it is compressed without loss, sums of the others are not: of the "
        "2 (n - 1) / n vectors that a peer of the server's would send three quarters travel.",
    ),
)
