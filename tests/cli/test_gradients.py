"""Gradients between real processes: one is killed at any step, another joins, and all hold the model of plain DDP."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from typing import Any

import torch
from machine import Machine, Node

CLOSE = 1e-6  # relative
TRAIN = """
import json, os, torch, peerd
torch.set_num_threads(1)
torch.manual_seed(int(os.environ["SEED"]))
rank = int(os.environ["RANK"])
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
falls = float(os.environ.get("FALLS", "0"))
with peerd.attach(model, optimizer) as swarm, open(os.environ["OUT"], "a") as out:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1 / (1 + falls * swarm.step_count))
    while True:
        at = swarm.step_count
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1000 * at + rank))
        torch.nn.functional.mse_loss(model(x), x[:, :1] * x[:, 1:2]).backward()
        optimizer.step()
        optimizer.zero_grad()
        swarm.step()
        schedule.step()
        state = [p.tolist() for p in model.parameters()]
        state += [optimizer.state[p]["momentum_buffer"].tolist() for p in model.parameters()]
        print(json.dumps([swarm.step_count, state]), file=out, flush=True)
"""


class Plain:
    """One process that has all ranks' batches."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def step(self, at: int, ranks: list[int]) -> None:
        for rank in ranks:
            x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1000 * at + rank))
            loss = torch.nn.functional.mse_loss(self.model(x), x[:, :1] * x[:, 1:2]) / len(ranks)
            loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def put(self, state: list[object]) -> None:
        parameters = list(self.model.parameters())
        with torch.no_grad():
            for parameter, values in zip(parameters, state[: len(parameters)], strict=True):
                parameter.copy_(torch.tensor(values))
        for parameter, values in zip(parameters, state[len(parameters) :], strict=True):
            self.optimizer.state[parameter]["momentum_buffer"] = torch.tensor(values)

    def is_close(self, state: list[object]) -> bool:
        ours = [p.detach() for p in self.model.parameters()]
        ours += [self.optimizer.state[p]["momentum_buffer"] for p in self.model.parameters()]
        theirs = [torch.tensor(values) for values in state]
        return all(float((a - b).norm()) <= CLOSE * (1 + float(b.norm())) for a, b in zip(ours, theirs, strict=True))


def whose_mean(at: int, before: list[object], after: list[object]) -> tuple[int, ...] | None:
    """The ranks whose gradients' mean led from one state to the next."""
    for ranks in ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,)):
        plain = Plain()
        plain.put(before)
        plain.step(at, list(ranks))
        if plain.is_close(after):
            return ranks
    return None


def said(machine: Machine, rank: int) -> dict[int, list[object]]:
    """The state after each step, by whole lines."""
    path = machine.path / f"{rank}.states"
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return dict(map(json.loads, lines))


GRADIENTS = ("--mode", "allreduce", "--exchange", "gradients", "--wait-for", "3")


def start(machine: Machine, rank: int, join: Node | None, seed: int = 0, **environment: str) -> Node:
    environment |= {"OUT": str(machine.path / f"{rank}.states"), "RANK": str(rank), "SEED": str(seed)}
    return machine.start(
        f"n{rank}", *GRADIENTS, machine.script("train.py", TRAIN), join=join, **dict[str, Any](environment)
    )


def test_a_change_of_the_mode_costs_nobody_a_step(machine: Machine) -> None:
    nodes = [start(machine, 0, None)]
    nodes += [start(machine, rank, nodes[0]) for rank in (1, 2)]
    for node in nodes:
        node.trains(beyond=3)
    for rank, change in ((1, ("--topology", "halving")), (0, ("--topology", "ring")), (2, ())):
        nodes[rank].trains(beyond=nodes[rank].step + 5)
        changed = machine.peerd("mode", "set", "allreduce", *change, "--name", f"n{rank}")
        assert changed.returncode == 0, changed.stderr
    nodes[0].trains(beyond=nodes[0].step + 5)
    machine.end()
    states = [said(machine, rank) for rank in range(3)]
    last = min(map(max, states))
    assert last > 20
    for at in range(1, last):
        assert states[0][at] == states[1][at] == states[2][at], f"not to the bit after step {at}"
        assert whose_mean(at, states[0][at], states[0][at + 1]) == (0, 1, 2), f"not of all at step {at}"


def test_who_comes_later_makes_the_same_steps_by_the_swarms_schedule(machine: Machine) -> None:
    nodes = [start(machine, 0, None, FALLS="0.05")]
    nodes += [start(machine, rank, nodes[0], FALLS="0.05") for rank in (1, 2)]
    nodes[0].trains(beyond=10)
    late = start(machine, 3, nodes[0], seed=1, FALLS="0.05")
    late.eventually(lambda: len(said(machine, 3)) >= 8)
    os.kill(nodes[1].trainer_pid, signal.SIGKILL)  # a script that comes back takes the model over, too
    before = max(said(machine, 1))
    nodes[1].eventually(lambda: max(said(machine, 1)) > before + 8)
    machine.end()
    states = [said(machine, rank) for rank in range(4)]
    assert 3 in (rank for rank in range(4) if min(states[rank]) > 10)
    for rank in (1, 2, 3):
        both = states[0].keys() & states[rank].keys()
        assert len(both) >= 8
        assert [at for at in sorted(both) if states[rank][at] != states[0][at]] == [], "not to the bit"


def test_who_is_killed_at_any_step_costs_a_round_and_not_the_run(machine: Machine) -> None:
    victim, killed_at = 0, random.randrange(3, 12)  # the founder, through which all have joined
    nodes = [start(machine, 0, None)]
    nodes += [start(machine, rank, nodes[0]) for rank in (1, 2)]
    nodes[2].eventually(lambda: len(said(machine, 2)) >= killed_at)
    nodes[victim].signal(signal.SIGKILL)  # its trainer is killed with it
    killed = time.monotonic()
    survivors = [rank for rank in (0, 1, 2) if rank != victim]
    before = max(max(said(machine, rank)) for rank in survivors)
    nodes[survivors[0]].eventually(lambda: max(said(machine, survivors[0])) > before + 2)
    print(f"killed after step {killed_at}; on after {time.monotonic() - killed:.1f} s")  # noqa: T201
    joiner = start(machine, 3, nodes[survivors[0]], seed=1)
    joiner.eventually(lambda: len(said(machine, 3)) >= 6)  # the others may not have told of the last ones yet
    machine.end()

    states = {rank: said(machine, rank) for rank in range(4)}
    seen = states[survivors[0]]
    means = [whose_mean(at, seen[at], seen[at + 1]) for at in range(1, min(states[3]) - 1)]  # to the newcomer's first
    together = means.count((0, 1, 2))
    assert means[:together] == [(0, 1, 2)] * together, means
    assert set(means[together:]) == {tuple(survivors)}, means
    for rank in (survivors[1], 3):
        both = seen.keys() & states[rank].keys()
        assert len(both) > 3
        assert [at for at in both if states[rank][at] != seen[at]] == [], "not to the bit"
