"""A model in shards is, step for step, the one that a process has whole: two gloo ranks beside a plain FlatModel."""

from __future__ import annotations

from typing import Any

import pytest
from machine import Machine
from scripts import needs_fsdp
from torch import nn

from peerd.trainer.sharded import has_shards

PROGRAM = """
import os, sys
from pathlib import Path
import numpy as np, torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from peerd.trainer import checkpoint
from peerd.trainer.ranks import RankCommand, Ranks
from peerd.trainer.sharded import ShardedModel, has_shards
from peerd.training.model.flat import FlatModel

distributed.init_process_group("gloo")
ranks = Ranks(torch.nn.Linear(1, 1))
mesh = init_device_mesh("cpu", (2,))



def compare(folder, dtype):
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7), nn.Linear(7, 1), nn.Linear(1, 5)).to(dtype)
        model[2].weight.requires_grad_(False)
        return model


    def steps(model, optimizer, count):
        torch.manual_seed(1)
        for _ in range(count):
            model(torch.randn(16, 3).to(dtype)).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


    plain, model = build(), build()
    for part in (model[0], model[3], model):
        fully_shard(part, mesh=mesh)
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in (plain, model)]
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 3).to(dtype))  # leaves whole parameters behind
    model.train()
    expected = FlatModel(plain)
    if ranks.leads:
        assert has_shards(model) and not has_shards(plain)
        ranks.say(RankCommand.COMES)
        found = ShardedModel(model, optimizers[1], ranks)
        assert (found.total, found.parameters) == (expected.total, expected.parameters)
        assert (found.tensors, found.signature) == (expected.tensors, expected.signature)
        assert [p.start for p in found.pieces] == [p.start for p in expected.pieces]
        near = dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=0.02, atol=0.02)

        def whole(shared):
            return torch.cat([values.clone() for _, values in shared.snapshot()])

        def same():
            torch.testing.assert_close(whole(found), whole(expected), **near)

        rng = np.random.default_rng(0)
        same()
        def both(count):
            ranks.say(RankCommand.GO_ON, count)
            steps(model, optimizers[1], count)
            steps(plain, optimizers[0], count)

        both(2)
        torch.testing.assert_close(float(found.change()), float(expected.change()), rtol=0.02, atol=1e-6)
        same()
        assert float(found.change()) == 0
        for _ in range(20):
            correction = (rng.standard_normal(found.total) * 1e-3).astype(np.float32)
            found.add(correction); expected.add(correction)
        assert abs(float(found.change())) < 1e-3, "the base moves along"
        same()
        before = whole(found)
        both(1)
        found.restore(); expected.restore(); optimizers[0].state.clear()
        torch.testing.assert_close(whole(found), before)
        both(1)
        found.about_to_capture()
        one = checkpoint.capture(model, optimizers[1], 7, found.signature)
        other = checkpoint.capture(plain, optimizers[0], 7, expected.signature)
        kinds = [{name: (t.shape, t.dtype) for name, t in each.tensors.items()} for each in (one, other)]
        assert kinds[0] == kinds[1]
        checkpoint.save(folder, one)
        values = rng.standard_normal(found.total).astype(np.float32)
        found.load(values); expected.load(values)
        same()
        both(2)
        found.about_to_resume(folder, 7)
        checkpoint.restore(checkpoint.newest(folder, found.signature, print), model, optimizers[1])
        checkpoint.restore(one, plain, optimizers[0])
        same()
        both(2)
        same()
        nan = plain[1].running_mean
        for each in (model, plain):
            each[1].running_mean.fill_(float("nan"))
        assert not np.isfinite(float(found.change())) and not np.isfinite(float(expected.change()))
        found.restore()
        found.about_to_capture()  # no rank has a state of the optimizer now
        assert not any("optimizer" in name for name in checkpoint.capture(model, optimizers[1], 8, "").tensors)
        ranks.say(RankCommand.STOP)
        print("equal", dtype)
    else:
        shards = None
        while True:
            command, count = ranks.say(RankCommand.GO_ON)
            if command == RankCommand.STOP:
                break
            if command == RankCommand.GO_ON:
                steps(model, optimizers[1], count)
            elif command == RankCommand.COMES:
                shards = ShardedModel(model, optimizers[1], ranks)
            else:
                shards.take_part(command, count)


for name in ("float32", "bfloat16"):
    compare(Path(sys.argv[1]) / name, getattr(torch, name))
distributed.barrier()
sys.stdout.flush()
os._exit(0)  # when both cores are busy gloo's threads may abort a process that takes torch apart
"""


@needs_fsdp
def test_shards_act_as_the_whole(machine: Machine) -> None:
    script = str(machine.script("ranks.py", PROGRAM))
    about: dict[str, Any] = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(machine.free_port())}
    command = [script, str(machine.path)]
    ranks = [machine.spawn(f"rank {rank}", command, RANK=str(rank), **about) for rank in range(2)]
    assert [rank.process.wait(120) for rank in ranks] == [0, 0], machine.logs()
    assert ranks[0].log.split("\n")[:2] == ["equal torch.float32", "equal torch.bfloat16"], machine.logs()


def test_a_wrapper_that_hides_its_shards_is_refused() -> None:
    class FullyShardedDataParallel(nn.Module):
        """By its name alone: making a real one takes ranks."""

    with pytest.raises(ValueError, match="hides its shards: use "):
        has_shards(FullyShardedDataParallel())


def test_an_ordinary_model_has_none() -> None:
    assert not has_shards(nn.Linear(2, 2))
