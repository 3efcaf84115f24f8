"""The published claims that peerd is built on, each tried at small scale: a new experiment is one file and one line."""

from __future__ import annotations

from importlib import import_module

from peerd.reproduce.experiment import Experiment

__all__ = ["EXPERIMENTS"]

FILES = (
    "e01_staleness",
    "e02_learning_rate",
    "e03_batch_rule",
    "e04_crossover",
    "e05_trigger",
    "e05b_fixed_period",
    "e06_topologies",
    "e07_speedup",
    "e08_large_batch",
    "e09_hpsgd",
    "e10_compression",
    "e11_outer_steps",
    "e12_drops",
)
"""In the order in which they are listed and run; each has its `EXPERIMENT`."""

_ALL: list[Experiment] = [import_module(f"{__name__}.{file}").EXPERIMENT for file in FILES]
EXPERIMENTS: dict[str, Experiment] = {each.name: each for each in _ALL}
