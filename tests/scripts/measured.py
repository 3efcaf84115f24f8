"""What is the model of a node worth? Users' scripts on real nodes, and their own measure of what leaves these."""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from machine import Machine, Node, eventually
from safetensors.torch import load_file
from torch import nn

from peerd.training.flush import FLUSH_TOLERANCE

USERS = Path(__file__).parent / "users"
sys.path.insert(0, str(USERS))

# of `squares`, with `HALVES`: who has seen one half alone is left with 30, the mean of two such with 15
BOTH_HALVES_KNOWN = 5.0

_STEP = re.compile(r"^at step (\d+) the test loss is (\S+)$", re.MULTILINE)
_END = re.compile(r"^ends with a test loss of (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Exported:
    """A model that left a node, with the step that the node says it is of, and its loss by the script's own measure."""

    step: int
    loss: float
    tensors: dict[str, torch.Tensor]
    bytes: int


class Script:
    """One of `users/`: it can be started on a node, and judges a file that a node exported."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = USERS / f"{name}.py"

    @cached_property
    def _module(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a framework's own
            return importlib.import_module(self.name)

    def export(self, node: Node) -> Exported:
        """Have the node write its model, and judge it."""
        path = node.machine.path / f"{node.name}-export.safetensors"
        answer = node.ask("export", path=str(path))
        tensors = load_file(path)
        return Exported(int(answer["step"]), self.loss(tensors), tensors, path.stat().st_size)

    def constants(self) -> dict[str, torch.Tensor]:
        """The buffers that the script calls constant, as it makes them."""
        model = self._module.build()
        return {name: getattr(model, name) for name in self._module.NAMES}

    def loss(self, tensors: dict[str, torch.Tensor]) -> float:
        """Of the script's own model with these tensors; those that are not exported are as `build` makes them."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            built = self._module.build()
            model = nn.ModuleList(built) if isinstance(built, list) else built
            missing, unknown = model.load_state_dict(tensors, strict=False)
            assert not unknown, unknown
            learned = {name for name, p in model.named_parameters() if p.requires_grad}
            assert not learned & set(missing), missing
            return float(self._module.test_loss(built))


def losses(node: Node) -> list[tuple[int, float]]:
    """Steps and test losses that a node's script has said so far, in all its lives, in their order."""
    return [(int(step), float(loss)) for step, loss in _STEP.findall(node.log)]


def said_last(node: Node) -> tuple[int, float]:
    """The last of them."""
    return losses(node)[-1]


def ends(node: Node) -> float:
    """Wait for the script's end: the test loss of the model that it is left with."""

    def ended() -> bool:
        assert all(other.process.poll() is None for other in node.machine.nodes), node.machine.logs()
        assert "Traceback" not in node.machine.logs(), node.machine.logs()
        return _END.search(node.log) is not None

    eventually(ended, node.machine.logs, patience_s=120.0)
    return float(_END.findall(node.log)[-1])


def have_met(node: Node) -> bool:
    """Whether it has had anything of another's, in exchanges or in rounds."""
    status = node.ask("status")
    return bool(status["exchanges"] or status["counts"].get("rounds"))


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Between two models, as a part of their norm."""
    assert one.keys() == other.keys()
    apart = sum(float((one[name].double() - other[name].double()).square().sum()) for name in one)
    whole = sum(float(tensor.double().square().sum()) for tensor in one.values())
    return float((apart / whole) ** 0.5)


def one_model(script: Script, machine: Machine, steps: int, *flags: str, **b_has: str) -> list[float]:
    """Train a and b to their end: each then holds the same model, which a trainer was left with. Returns their losses.

    Where the script has halves, each has seen one of two; what both know shows that they have shared it.
    """
    both: dict[str, Any] = {"STEPS": str(steps), "HALVES": "1"}
    a = machine.start("a", script.path, "--wait-for", "2", *flags, **both)
    b = machine.start("b", script.path, "--wait-for", "2", *flags, join=a, SEED="1", **both, **dict[str, Any](b_has))
    left = [ends(node) for node in (a, b)]
    exported = [script.export(node) for node in (a, b)]
    for node, model in zip((a, b), exported, strict=True):
        assert have_met(node)
        assert model.step == steps == said_last(node)[0]
        # the trainer that ended last holds what is everybody's now; the model of the other one's node went on with it
        assert any(model.loss == pytest.approx(loss, rel=1e-3) for loss in left)
    assert distance(exported[0].tensors, exported[1].tensors) <= FLUSH_TOLERANCE
    return [model.loss for model in exported]
