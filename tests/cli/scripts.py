"""Users' own scripts, as they would write them: an ordinary PyTorch loop and three lines of peerd."""

from __future__ import annotations

import pytest
import torch

needs_fsdp = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason=f"fully_shard of torch {torch.__version__} runs on GPUs alone"
)

TRAIN = """\
import os, time
import torch
from torch import nn
import peerd

torch.manual_seed(int(os.environ.get("SEED", "0")))
HIDDEN = int(os.environ.get("HIDDEN", "16"))
model = nn.Sequential(nn.Linear(4, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
with peerd.attach(model, optimizer) as swarm:
    print("ready, alone" if swarm.alone else "ready, in a swarm", "at step", swarm.step_count, flush=True)
    while not (swarm.alone and swarm.step_count > 5):
        x = torch.randn(8, 4)
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        if os.environ.get("NAN") and swarm.step_count % 50 == 49:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        swarm.step(loss=loss.item(), samples=8)
        time.sleep(0.01)
print("done", flush=True)
"""

QUIET = "\n".join(line for line in TRAIN.splitlines() if "print(" not in line)

# BatchNorm and its integer counter, a tied weight, a frozen layer, bfloat16 and float64 parameters, all in one
MOTLEY = """\
import os, time
import torch
from torch import nn
import peerd

torch.manual_seed(0)
base = nn.Linear(8, 8)
for parameter in base.parameters():
    parameter.requires_grad_(False)
torch.manual_seed(int(os.environ["SEED"]))


class Motley(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = base
        self.norm = nn.BatchNorm1d(8)
        self.low = nn.Linear(8, 8).bfloat16()
        self.high = nn.Linear(8, 8).double()
        self.first = nn.Linear(8, 8, bias=False)
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        x = self.first(self.norm(self.base(x)))
        x = self.low(x.bfloat16())
        x = self.high(x.double())
        return self.last(x.float())


model = Motley()
frozen = base.weight.clone()
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.003)
with peerd.attach(model, optimizer) as swarm:
    while swarm.step_count < 300:
        x = torch.randn(16, 8) + 1.0
        loss = ((model(x) - x.flip(1)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        swarm.step(loss=loss.item(), samples=16)
        time.sleep(0.01)
assert model.last.weight is model.first.weight
assert torch.equal(base.weight, frozen)
assert [p.dtype for p in (model.low.weight, model.high.weight)] == [torch.bfloat16, torch.float64]
assert all(bool(p.isfinite().all()) for p in model.parameters())
print("whole", int(model.norm.num_batches_tracked) > 0, flush=True)
"""

# Needs no torch: a script that neither attaches nor ends
STUBBORN = """\
import os, signal, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("running as", os.getpid(), flush=True)
while True:
    time.sleep(1)
"""

# two ranks of one node, as torchrun starts them; each says what its model is, to the bit
DDP = """\
import hashlib, os
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
import peerd

distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.manual_seed(int(os.environ["SEED"]))
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
torch.manual_seed(100 * int(os.environ["SEED"]) + rank)


def say(text):
    os.write(1, f"rank {rank} {text}\\n".encode())  # at once: the lines of two ranks must not mix


def digest():
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]


say(f"comes with {digest()}")
with peerd.attach(model, optimizer) as swarm:
    say(f"begins at {swarm.step_count} with {digest()}")
    while swarm.step_count < int(os.environ["STEPS"]):
        x = torch.randn(8, 4)
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        swarm.step(loss=loss.item(), samples=8)
        if swarm.step_count % 25 == 0:
            say(f"at {swarm.step_count} has {digest()}")
say(f"ends with {digest()}")
distributed.destroy_process_group()
"""

FSDP = (
    DDP.replace(
        "from torch.nn.parallel import DistributedDataParallel\n",
        "from torch.distributed.device_mesh import init_device_mesh\nfrom torch.distributed.fsdp import fully_shard\n",
    )
    .replace(
        "model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)))",
        "mesh = init_device_mesh('cpu', (2,))\n"
        "model = nn.Sequential(nn.Linear(4, 17), nn.BatchNorm1d(17), nn.ReLU(), nn.Linear(17, 1))\n"
        "fully_shard(model[0], mesh=mesh)\n"
        "fully_shard(model, mesh=mesh)",
    )
    .replace(
        "torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)", "torch.optim.AdamW(model.parameters(), lr=0.01)"
    )
    .replace("p.detach().numpy()", "p.detach().full_tensor().numpy()")
)
