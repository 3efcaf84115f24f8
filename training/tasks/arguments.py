"""What can be said to a task on its command line? The same for each; a flag beats the environment beats a default."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from peerd.training.plain_numbers import number, whole
from peerd.training.tasks import data_partition

T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True)
class Arguments:
    """A task's settings."""

    shard: data_partition.Split
    steps: int
    seed: int
    rank: int
    peers: int
    lr: float
    batch: int
    pace: float  # minimum seconds a step


def parse(task: str, argv: Sequence[str] | None, *, steps: int, lr: float, batch: int) -> Arguments:
    """Read the command line; the keywords are the task's own defaults."""
    parser = argparse.ArgumentParser(prog=f"python -m peerd.training.tasks.{task}")
    add, environment = parser.add_argument, os.environ.get
    add("--shard", default="iid", help="iid, sorted or dirichlet:A (default iid)")
    add("--steps", type=_count, default=steps, help=f"optimizer steps of the whole run (default {steps})")
    add(
        "--seed", type=_natural, default=0, help="of the weights and of the split: give every rank the same (default 0)"
    )
    add(
        "--rank",
        type=_natural,
        default=environment("PEERD_RANK", "0"),
        help="whose partition (default PEERD_RANK or 0)",
    )
    add("--peers", type=_count, default=environment("PEERD_PEERS", "1"), help="partitions (default PEERD_PEERS or 1)")
    add("--lr", type=_positive, default=lr, help=f"peak learning rate (default {lr:g})")
    add("--batch", type=_count, default=batch, help=f"samples a step (default {batch})")
    add("--pace", type=_seconds, default=0.0, help="minimum seconds a step, so that peers share a machine (default 0)")
    values = vars(parser.parse_args(argv))
    return Arguments(**{**values, "shard": data_partition.parse(values["shard"])})


def _natural(text: str) -> int:
    return _at_least(_plain(whole, text), 0)


def _count(text: str) -> int:
    return _at_least(_plain(whole, text), 1)


def _plain(read: Callable[[str], T], text: str) -> T:
    try:
        return read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _at_least(value: int, least: int) -> int:
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is less than {least}")
    return value


def _positive(text: str) -> float:
    value = _plain(number, text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def _seconds(text: str) -> float:
    value = _plain(number, text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value
