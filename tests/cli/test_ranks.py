"""Nodes that train with several processes each (torchrun, DDP or FSDP over gloo): a node's ranks stay one model."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from machine import Machine, Node, eventually
from safetensors.torch import load_file
from scripts import DDP, FSDP, needs_fsdp

STEPS = 150


ENDS_AT_ONCE = "import atexit, os\natexit.register(os._exit, 0)\n"
"""Torch is not taken apart: two ranks over gloo abort there now and then, without peerd, too."""


def torchrun(
    machine: Machine,
    name: str,
    seed: int,
    *,
    join: Node | None = None,
    steps: int = STEPS,
    text: str = DDP,
    members: int = 2,
) -> Node:
    script = machine.script("ranks.py", text)
    job = ["--", sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    return machine.start(name, "--wait-for", str(members), *map(str, job), join=join, SEED=str(seed), STEPS=str(steps))


def in_one_process(text: str) -> str:
    """The script of two ranks, without the ranks."""
    plain = re.sub(r"DistributedDataParallel\((nn.*)\)$", r"\1", text, flags=re.MULTILINE)
    plain = re.sub(r"^distributed.*$", "", plain.replace("distributed.get_rank()", "0"), flags=re.MULTILINE)
    assert "(nn.Sequential" not in plain
    return plain


def said(node: Node) -> dict[int, list[str]]:
    """What each rank said, in its order."""
    found: dict[int, list[str]] = {0: [], 1: []}
    for rank, rest in re.findall(r"rank (\d) (.*)", node.log):
        found[int(rank)].append(rest)
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("text", [pytest.param(DDP, id="ddp"), pytest.param(FSDP, id="fsdp", marks=needs_fsdp)])
def test_two_nodes_of_two_ranks_train_one_model(machine: Machine, text: str) -> None:
    a = torchrun(machine, "a", seed=1, text=text)
    b = torchrun(machine, "b", seed=2, join=a, text=text)
    for node in (a, b):
        node.eventually(lambda node=node: node.ask("status")["phase"] == "finished", patience_s=180)  # type: ignore[misc]
        node.eventually(lambda node=node: len(said(node)[1]) == len(said(node)[0]) == 3 + STEPS // 25)  # type: ignore[misc]
        ranks = said(node)
        assert ranks[0] == ranks[1], "the ranks of a node differ"
        assert ranks[0][-1].startswith("ends with ")
        assert node.ask("status")["exchanges"] > 5, "nothing was learnt from the other node"
        machine.peerd("export", "--name", node.name, f"{node.name}.safetensors")
    assert said(b)[0][1] == said(a)[0][0].replace("comes", "begins at 0"), (
        "a newcomer begins with the model of the first"
    )
    one, other = (load_file(machine.path / f"{node.name}.safetensors") for node in (a, b))
    for name, value in one.items():
        assert torch.allclose(value, other[name], atol=0.02), name


KEEPS = DDP.replace(
    "with peerd.attach(model, optimizer) as swarm:\n",
    """\
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 20], gamma=0.9)
with peerd.attach(model, optimizer, keep={"scheduler": scheduler}) as swarm:
    say(f"comes to epoch {scheduler.last_epoch}")
""",
).replace("        swarm.step(", "        scheduler.step()\n        swarm.step(")


def test_ranks_whose_checkpoint_is_passed_over_have_one_optimizer_state(machine: Machine) -> None:
    """All of them read what rank 0 then puts aside."""
    a = torchrun(machine, "a", seed=1, steps=50, members=1, text=ENDS_AT_ONCE + KEEPS)
    a.says("training finished at step 50")
    machine.peerd("leave", "--name", "a")
    a.end()
    b = machine.start("b", machine.script("plain.py", in_one_process(DDP)), SEED="2", STEPS="25")
    b.says("training finished at step 25")
    again = torchrun(machine, "a", seed=1, steps=75, members=1, text=ENDS_AT_ONCE + KEEPS, join=b)
    again.says("checkpoints of later steps than 25 are in ")
    again.says("training finished at step 75")
    again.eventually(lambda: len(said(again)[1]) == len(said(again)[0]))
    ranks = said(again)
    assert "begins at 25 with" in " ".join(ranks[0])
    assert "comes to epoch 50" in ranks[0]
    assert ranks[0] == ranks[1], "the ranks of a node differ"


def test_ranks_beside_a_plain_script_train_one_model(machine: Machine) -> None:
    a = torchrun(machine, "a", seed=1, steps=50)
    b = machine.start(
        "b", "--wait-for", "2", machine.script("plain.py", in_one_process(DDP)), join=a, SEED="2", STEPS="50"
    )
    exported = []
    for node in (a, b):
        node.eventually(lambda node=node: node.ask("status")["phase"] == "finished")  # type: ignore[misc]
        assert node.ask("status")["exchanges"] > 0
        machine.peerd("export", "--name", node.name, f"{node.name}.safetensors")
        exported.append(load_file(machine.path / f"{node.name}.safetensors"))
    assert said(b)[0][1] == said(a)[0][0].replace("comes", "begins at 0")
    one, other = exported
    assert one.keys() == other.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for name, value in one.items():
        assert torch.allclose(value, other[name], atol=0.02), name


def test_ranks_whose_daemon_leaves_end_together(machine: Machine) -> None:
    a = torchrun(machine, "a", seed=1, steps=10**6, text=ENDS_AT_ONCE + DDP)
    b = torchrun(machine, "b", seed=2, join=a, steps=10**6, text=ENDS_AT_ONCE + DDP)
    for node in (a, b):
        node.eventually(lambda node=node: len(said(node)[1]) > 3)  # type: ignore[misc]
    left = machine.peerd("leave", "--name", "b")
    assert left.returncode == 0, left.stderr
    assert b.end() == 0, b.log
    assert "Traceback" not in b.log


def test_slow_ranks_end_in_the_same_step_when_most_others_have_ended(machine: Machine) -> None:
    endless = 'while swarm.step_count < int(os.environ["STEPS"]):'
    bounded = DDP.replace(endless, 'for _ in swarm.steps(int(os.environ["STEPS"])):')
    slow = bounded.replace("        optimizer.step()\n", "        optimizer.step()\n        time.sleep(0.05)\n")
    slow = slow.replace("import hashlib", "import time, hashlib").replace(
        "ends with", "ends at {swarm.step_count} with"
    )
    assert bounded.count("swarm.steps") == slow.count("time.sleep") == 1
    a = torchrun(machine, "a", seed=1, steps=10**4, text=ENDS_AT_ONCE + slow, members=3)
    script = machine.script("quick.py", in_one_process(bounded))
    others = [machine.start(name, "--wait-for", "3", script, join=a, SEED=name, STEPS="300") for name in ("2", "3")]
    a.eventually(lambda: len(re.findall(r"rank \d ends at \d+ with", a.log)) == 2)
    assert len(set(re.findall(r"rank \d (ends at \d+ with .*)", a.log))) == 1, a.log
    assert a.log.count(": its run ends with theirs, after ") == 1, a.log
    for node in (a, *others):
        node.eventually(lambda node=node: node.ask("status")["phase"] == "finished")  # type: ignore[misc]
    assert all("slower than most" not in node.log for node in others)


def test_ranks_that_end_without_finish_are_told_once_what_is_missing(machine: Machine) -> None:
    text = ENDS_AT_ONCE + DDP.replace(
        "with peerd.attach(model, optimizer) as swarm:", "swarm = peerd.attach(model, optimizer)\nif 1:"
    )
    a = torchrun(machine, "a", seed=1, steps=25, text=text, members=1)
    a.eventually(lambda: len(said(a)[1]) == len(said(a)[0]) == 4)
    eventually(lambda: machine.processes() == [a.process.pid], machine.logs)
    line = "peerd: the script ended without swarm.finish(): its last steps may be missing in the swarm's model\n"
    assert a.log.count(line) == 1, a.log
    assert "Traceback" not in a.log
    assert "starting it again" not in a.log
