"""What no step changes stays the bits that it is, an Embedding's padding is zeros, and a variance stays positive: in
every mode, on every node.

Bare cores over queues, as in test_modes.py, but each node has a real trainer's model with BatchNorm, its flat view, the
memory that it shares with the daemon, and the daemon's copy. A trainer takes corrections at its next step, as it does
in life, so what was measured and what it is applied to are never quite the same model.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from mode_swarm import Core, Life, ModeSwarm
from test_modes import EVERY, Row, end, name_of, rows
from torch import nn

from peerd.local.shared_memory import SharedMemory
from peerd.node.model_copy import ModelCopy
from peerd.training.codecs import CODECS
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector
from peerd.training.model.flat import FlatModel
from peerd.training.model.padding import padding_of
from peerd.training.modes import EVERY_STEP, class_of

FEATURES = 6
STEPS = 8  # of each member, before and after one joins
TABLE = 1.0 / 10_000 ** (torch.arange(7, dtype=torch.float64) / 7)  # no sum of float32 values of it is exact
TABLES = ("inv_freq", "wide", "low", "cache")


class Net(nn.Module):
    """Variances that jump by orders of magnitude, and tables in three types that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, FEATURES, padding_idx=1)
        self.first = nn.Linear(FEATURES, FEATURES)
        self.norm = nn.BatchNorm1d(FEATURES, momentum=0.7)
        self.register_buffer("inv_freq", torch.cat([TABLE.float(), torch.tensor([-0.0])]))
        self.register_buffer("wide", TABLE.clone())
        self.register_buffer("low", TABLE.bfloat16())
        self.register_buffer("counts", torch.arange(3))
        self.register_buffer("cache", torch.rand(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.first(x + 0.1 * self.words(torch.arange(len(x)) % 4)))
        return out


class TrainerLife(Life):
    """One life of a trainer and its daemon's copy of the model."""

    def __init__(self, name: str, model: Vector, layout: Layout, seed: int, make: Core) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.net = Net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)
        self.before = self.tables()
        self.flat = FlatModel(self.net, self.optimizer)
        self.flat.load(model)
        self.memory = SharedMemory.create(self.flat.total)
        self.memory.copies[0][:] = self.flat.gather()
        padding = padding_of(self.net, self.flat.pieces)
        self.model_copy = ModelCopy(self.memory, self.flat.variances, padding)
        super().__init__(name, model, layout, seed, make)

    @property
    def x(self) -> Vector:
        """The model as the daemon has it: what is exported, and what a newcomer gets."""
        return self.model_copy.values().copy()

    @x.setter
    def x(self, values: Vector) -> None:
        assert np.array_equal(values, self.flat.gather()), "loaded already"

    def take(self) -> None:
        while (half := self.model_copy.drain()) is not None:
            self.flat.add(self.memory.corrections[half])
            self.model_copy.taken(half)

    def move(self, move: Vector | float) -> None:
        self.take()
        scale = 10 ** (-4 * torch.rand(FEATURES, generator=self.random))
        loss = self.net(scale * torch.randn(8, FEATURES, generator=self.random)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def change(self) -> float:
        return float(self.flat.change())

    def publish(self) -> None:
        self.take()
        copy = 1 - self.memory.board.current
        self.memory.copies[copy][:] = self.flat.gather()
        self.model_copy.published(copy, self.steps)
        self.model_copy.be_quiet(EVERY_STEP)

    def correct(self, correction: Vector) -> None:
        self.model_copy.add(correction)
        if self.waits or self.finishing:  # then it does nothing else
            self.take()

    def tables(self) -> list[bytes]:
        """All that no step changes, to the bit."""
        held = dict(self.net.named_buffers())
        return [held[name].view(torch.uint8).numpy().tobytes() for name in (*TABLES, "counts")]


class TrainerSwarm(ModeSwarm):
    life = TrainerLife

    def first_model(self) -> Vector:
        torch.manual_seed(0)
        first: Vector = FlatModel(Net()).gather().numpy().copy()
        return first


def look(swarm: TrainerSwarm) -> None:
    """At every node, at its trainer's model and at what its daemon would give away."""
    for name, node in swarm.nodes.items():
        assert isinstance(node, TrainerLife)
        node_before = [table for table, of in zip(node.before, (*TABLES, "counts"), strict=True) if of != "cache"]
        node_now = [table for table, of in zip(node.tables(), (*TABLES, "counts"), strict=True) if of != "cache"]
        assert node_now == node_before, f"{name}'s tables"
        assert node.net.norm.num_batches_tracked is not None
        assert int(node.net.norm.num_batches_tracked) == node.steps, "an integer buffer is a node's own"
        (variance,) = (slice(*where) for where in node.flat.variances)
        model = node.x
        assert node.net.norm.running_var is not None
        assert float(node.net.norm.running_var.min()) > 0, f"{name}'s model"
        assert model[variance].min() > 0, f"{name}'s daemon"
        assert not node.net.words.weight[1].any(), f"{name}'s padding"
        ((start, stop),) = padding_of(node.net, node.flat.pieces)
        assert not model[start:stop].any(), f"{name}'s daemon: padding"
        for piece in node.flat.pieces:
            if piece.name in TABLES:
                given = piece.tensor.float().numpy()
                assert np.array_equal(model[piece.start : piece.stop], given), f"{name}'s daemon: {piece.name}"


def train(swarm: TrainerSwarm, rng: random.Random, steps: int) -> None:
    """Steps and messages in a random order: exchanges overlap with each other and with steps."""
    wanted = {name: node.steps + steps for name, node in swarm.nodes.items()}
    for _ in range(100 * steps):
        behind = [name for name, node in sorted(swarm.nodes.items()) if node.steps < wanted[name] and not node.waits]
        waiting = swarm.waiting()
        if behind and (not waiting or rng.random() < 0.3):
            swarm.step(rng.choice(behind), 0.0)
        elif waiting:
            swarm.deliver(*rng.choice(waiting))
        else:
            break
        look(swarm)
    swarm.train(max(1, max(wanted[name] - node.steps for name, node in swarm.nodes.items())))
    look(swarm)


def live_with(row: Row, codec: str, seed: int) -> None:
    mode, options = row
    flat = FlatModel(Net())
    about: dict[str, Any] = {
        "size": flat.total,
        "buffers": flat.total - flat.parameters,
        "variances": tuple(flat.variances),
    }
    swarm = TrainerSwarm(mode, "abc", dtype="float32", every=EVERY, codec=codec, seed=seed, view=2, **about, **options)
    rng = random.Random(seed)
    swarm.all_hear()
    swarm.settle()
    train(swarm, rng, STEPS)
    swarm.live("d", swarm.nodes["a"].x)
    swarm.restart("b", swarm.nodes["b"].x)
    swarm.all_hear()
    look(swarm)
    train(swarm, rng, STEPS)
    end(row, swarm)
    look(swarm)


@pytest.mark.cases(6)
@pytest.mark.parametrize("row", list(rows()), ids=name_of)
def test_tables_keep_their_bits_and_variances_stay_positive(row: Row) -> None:
    live_with(row, class_of(row[0]).CODEC, 1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("row", list(rows()), ids=name_of)
def test_so_they_do_with_every_codec(row: Row, codec: str) -> None:
    for seed in range(20):
        live_with(row, codec, seed)
