"""Is the model that travels the model, where a framework owns the loop, the optimizer or the model?"""

from __future__ import annotations

import importlib.util
import re

import pytest
from machine import Machine
from measured import BOTH_HALVES_KNOWN, Script, one_model

pytestmark = pytest.mark.scripts


def script(name: str, *needs: str) -> Script:
    """Skips where a framework is absent."""
    for package in needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; make scripts installs it")
    return Script(name)


def test_trainer_of_transformers(machine: Machine) -> None:
    assert max(one_model(script("hf_trainer", "transformers", "accelerate"), machine, 100)) < 1.0


def test_accelerate(machine: Machine) -> None:
    assert max(one_model(script("hf_accelerate", "accelerate"), machine, 300)) < BOTH_HALVES_KNOWN


def test_lightning(machine: Machine) -> None:
    assert max(one_model(script("pl_lightning", "lightning"), machine, 300)) < BOTH_HALVES_KNOWN


def test_adafactor_of_transformers(machine: Machine) -> None:
    assert max(one_model(script("adafactor", "transformers"), machine, 400)) < BOTH_HALVES_KNOWN


def test_adapters_on_a_frozen_base(machine: Machine) -> None:
    lora = script("peft_lora", "peft", "transformers")
    assert max(one_model(lora, machine, 100)) < 1.5
    trained = int(re.findall(r"^trains (\d+) of", (machine.path / "a.log").read_text(), re.MULTILINE)[0])
    exported = machine.path / "a-export.safetensors"
    assert exported.stat().st_size < 1.5 * 4 * trained + 8192
    checkpoints = list((machine.state / "peerd" / "a" / "checkpoints").glob("step-*/model.safetensors"))
    assert checkpoints
    for checkpoint in checkpoints:  # the adapters and two moments of AdamW
        assert checkpoint.stat().st_size < 1.5 * 3 * 4 * trained + 16384
