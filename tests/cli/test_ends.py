"""Scripts as people write them: odd figures, odd optimizers, helpers that fork, ends without a finish, frozen bases.

Each is judged by the model that its node has in the end beside the one that the script itself has.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from machine import Machine, Node, alive, eventually
from safetensors.torch import load_file

HEAD = """\
import os, sys, time
import torch
from torch import nn
from safetensors.torch import save_file
import peerd

torch.manual_seed(0)


def train(swarm, model, optimizers, **figures):
    x = torch.randn(8, 4)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()
    swarm.step(**{"loss": loss, "samples": 8, **figures})
    time.sleep(0.01)


def keep(model, name="own.safetensors"):
    save_file({key: value.clone() for key, value in model.state_dict().items()}, name)
"""
PLAIN = """\
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
"""


@pytest.fixture
def machine(machine: Machine) -> Iterator[Machine]:
    yield machine
    machine.end()


def comes_to(node: Node, *phases: str) -> None:
    """Its training is in one of these, in the end."""
    node.eventually(lambda: node.ask("status")["phase"] in phases)


def exported(node: Node, *options: str) -> dict[str, torch.Tensor]:
    """The node's model, as its user gets it."""
    done = node.machine.peerd("export", "--name", node.name, "model.safetensors", "--force", *options)
    assert done.returncode == 0, done.stderr
    return load_file(node.machine.path / "model.safetensors")


def own(machine: Machine, name: str = "own.safetensors") -> dict[str, torch.Tensor]:
    """The model that the script has."""
    eventually((machine.path / name).exists, machine.logs)
    return load_file(machine.path / name)


def holds_the_scripts_model(node: Node) -> None:
    """To the bit: nobody else has changed it."""
    expected, found = own(node.machine), exported(node)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# ------------------------------------------------------------------------------------------------------------ figures


def test_figures_of_any_kind(machine: Machine) -> None:
    script = machine.script(
        "train.py",
        HEAD
        + PLAIN
        + """
import numpy as np
with peerd.attach(model, optimizer) as swarm:
    for step in range(30):
        train(swarm, model, [optimizer], samples=8.0, a=np.float32(0.5), b=torch.tensor([0.25]), c=None, d="text",
              e=[1, 2], f=torch.ones(3), g=1 + 2j, self=1)
keep(model)
""",
    )
    a = machine.start("a", script)
    a.says("training finished at step 30")
    holds_the_scripts_model(a)
    trainer = a.ask("status")["trainer"]
    assert trainer["samples"] == 240
    assert trainer["metrics"] == {"a": 0.5, "b": 0.25, "self": 1.0}
    assert trainer["loss"] < 5.0
    for name, kind in (
        ("c", "NoneType"),
        ("d", "str"),
        ("e", "list"),
        ("f", "Tensor and has the shape (3,)"),
        ("g", "complex"),
    ):
        line = f"peerd: metric '{name}' is not shown: it should be one number, but is of type {kind}\n"
        assert a.log.count(line) == 1
    assert a.ask("status")["trainer_restarts"] == 0


# --------------------------------------------------------------------------------------------------------- optimizers

NO_LR = """\
class NoRate(torch.optim.Optimizer):
    def __init__(self, parameters, **defaults):
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                parameter -= 0.01 * parameter.grad


class Wrapper:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()


class Settled(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.seen = 0

    def forward(self, x):
        self.seen += 1
        return super().forward(x)

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


class Strange(nn.Identity):
    def get_extra_state(self):
        return object()

    def set_extra_state(self, state):
        raise AssertionError("it was left out")


model = nn.Sequential(Settled(4, 8), nn.Tanh(), nn.Linear(8, 1), Strange())
"""
OPTIMIZERS = {
    "lr is None": "[NoRate(model.parameters(), lr=None)]",
    "tensor": "[torch.optim.SGD(model.parameters(), lr=torch.tensor(0.01), momentum=0.9)]",
    "several": "[torch.optim.SGD(model[0].parameters(), lr=0.01, momentum=0.9), "
    "Wrapper(NoRate(model[2].parameters()))]",
}


def test_odd_optimizers_and_extra_state_train_and_resume(machine: Machine) -> None:
    nodes = {}
    for number, (kind, made) in enumerate(OPTIMIZERS.items()):
        given = "optimizers" if kind == "several" else "optimizers[0]"
        script = machine.script(
            f"t{number}.py",
            HEAD
            + NO_LR
            + f"optimizers = {made}\n"
            + f"with peerd.attach(model, {given}) as swarm:\n"
            + "    print('begins at', swarm.step_count, 'seen', model[0].seen, flush=True)\n"
            + "    while True:\n"
            + "        train(swarm, model, optimizers)\n",
        )
        node = nodes[kind] = machine.start(f"n{number}", script)
        node.trains(beyond=20)
        node.signal(signal.SIGINT)
        assert node.end() == 0, node.log
    for number, kind in enumerate(OPTIMIZERS):
        node = machine.start(f"n{number}", machine.path / f"t{number}.py")
        node.trains()
        node.says("begins at", times=2)
        begins = [line.split() for line in node.log.splitlines() if line.startswith("begins at")]
        assert int(begins[1][2]) > 20, kind
        assert begins[1][2] == begins[1][4], "the plain extra state is that of the same step"
        assert f"resumed from the checkpoint of step {begins[1][2]}\n" in node.log, (
            node.log
        )  # the optimizer's state, too
        assert node.log.count("3._extra_state is no plain data (object): checkpoints are written without it\n") == 2
        machine.peerd("leave", "--name", node.name)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("None", "NoneType is no optimizer: give the one that updates the model"),
        ("torch.amp.GradScaler('cpu')", "GradScaler is no optimizer: give the one that updates the model"),
        ("[]", "the list of optimizers is empty: give those that update the model"),
    ],
)
def test_what_is_no_optimizer_is_refused_at_once(machine: Machine, given: str, why: str) -> None:
    a = machine.start("a", machine.script("train.py", HEAD + PLAIN + f"peerd.attach(model, {given})\n"))
    assert a.end() == 1
    assert f"peerd: {why}\n" in a.log
    assert a.log.count("starting it again") <= 1
    assert "before peerd.attach was done" not in a.log
    assert "Traceback" not in a.log


# ------------------------------------------------------------------------------------------------------------ helpers

FORKS = {
    "multiprocessing": """
import multiprocessing
def helper():
    swarm.step(loss=1e9, samples=10**6)
    print("helper alone", swarm.alone, flush=True)
    swarm.finish()
    time.sleep(600)
multiprocessing.get_context("fork").Process(target=helper).start()
""",
    "exec": """
import subprocess
subprocess.Popen(["sleep", "600"], close_fds=False)
""",
    "without Python's knowledge": """
import ctypes
libc = ctypes.PyDLL(None)
if libc.fork() == 0:
    while True:
        libc.pause()
""",
    "loader": """
dataset = torch.utils.data.TensorDataset(torch.zeros(64))
options = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
loader = iter(torch.utils.data.DataLoader(dataset, batch_size=2, **options))
next(loader)
""",
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", FORKS)
def test_a_helper_does_not_keep_the_next_trainer_out(machine: Machine, kind: str) -> None:
    body = (
        "swarm = peerd.attach(model, optimizer)\n" + FORKS[kind] + "while True:\n    train(swarm, model, [optimizer])\n"
    )
    a = machine.start("a", machine.script("train.py", HEAD + PLAIN + body))
    for life in range(3):
        a.trains(beyond=5)
        pid, reached = a.trainer_pid, a.step
        if life == 2:
            break
        os.kill(pid, signal.SIGKILL)
        a.eventually(lambda pid=pid: a.trainer_pid != pid)  # type: ignore[misc]
        a.eventually(lambda reached=reached: a.step > reached)  # type: ignore[misc]
    assert a.log.count("starting it again") == 2
    assert "attached to this node already" not in a.log
    assert a.ask("status")["trainer"]["samples"] < 10**6
    if kind == "multiprocessing":
        a.says("helper alone True", times=3)
        assert "went away" not in a.log
    os.kill(a.trainer_pid, signal.SIGKILL)  # nor does its node wait for it when it leaves
    a.signal(signal.SIGINT)
    assert a.end() == 0


# --------------------------------------------------------------------------------------------------------------- ends

ENDS = {
    "sys.exit(0) in the block": """
with peerd.attach(model, optimizer) as swarm:
    while True:
        train(swarm, model, [optimizer])
        if swarm.step_count == 25:
            keep(model)
            sys.exit(0)
""",
    "no finish": """
def main():
    swarm = peerd.attach(model, optimizer)
    for _ in range(25):
        train(swarm, model, [optimizer])
main()
keep(model)
""",
    "sys.exit() without a block": """
swarm = peerd.attach(model, optimizer)
for _ in range(25):
    train(swarm, model, [optimizer])
keep(model)
sys.exit()
""",
    "an error after the block": """
with peerd.attach(model, optimizer) as swarm:
    for _ in range(25):
        train(swarm, model, [optimizer])
keep(model)
raise TypeError("in the evaluation")
""",
}


COUNTED = """
with peerd.attach(model, optimizer) as swarm:
    while swarm.step_count < 25:
        train(swarm, model, [optimizer])
keep(model)
"""


def test_a_run_that_is_complete_makes_no_step_again_and_says_so(machine: Machine) -> None:
    script = machine.script("train.py", HEAD + PLAIN + COUNTED)
    a = machine.start("a", script)
    a.says("training finished at step 25")
    assert "made no step" not in a.log
    a.signal(signal.SIGINT)
    assert a.end() == 0
    a.says("left the swarm")
    again = machine.start("a", script)
    again.says(
        "the script made no step: it went on from step 25, and had none left: "
        "let the script make more in all, or start it with --fresh"
    )
    again.signal(signal.SIGINT)
    assert again.end() == 0
    refused = machine.peerd("start", "--name", "a", "--bind", "192.0.2.1:0", "--fresh", script)
    assert refused.returncode == 1
    assert not [*(machine.state / "peerd" / "a").glob("checkpoints-*")], "what cannot start forgets nothing"
    fresh = machine.start("a", "--fresh", script)
    fresh.says("training from step 0")
    fresh.says("training finished at step 25")
    aside = machine.state / "peerd" / "a" / "checkpoints-1"
    fresh.says(f"beginning anew; the checkpoints of before are in {aside}")
    assert [*aside.glob("step-00000025/manifest.json")]


def test_the_count_comes_with_the_model(machine: Machine) -> None:
    """A node that found the swarm at an earlier step than its own checkpoint had ended its loop at once."""
    longer = machine.script("longer.py", HEAD + PLAIN + COUNTED.replace("25", "60"))
    b = machine.start("b", longer)
    b.says("training finished at step 60")
    b.signal(signal.SIGINT)
    assert b.end() == 0
    a = machine.start("a", machine.script("train.py", HEAD + PLAIN + COUNTED))
    a.says("training finished at step 25")
    b = machine.start("b", longer, join=a)
    b.says("the swarm's model is of step 25, this node's own of step 60: training goes on from the former")
    b.says("training from step 25")
    b.says("training finished at step 60")
    aside = machine.state / "peerd" / "b" / "checkpoints-passed"
    assert [*aside.glob("step-00000060/manifest.json")], "or a script that is started again would go on from it"


def test_what_was_passed_over_is_gone_on_from_as_the_warning_says(machine: Machine) -> None:
    """It said to start that node first: one that joins waits for the founder, and its checkpoint was put aside."""
    short, longer = (machine.script(f"{n}.py", HEAD + PLAIN + COUNTED.replace("25", n)) for n in ("30", "60"))
    b = machine.start("b", longer)
    b.says("training finished at step 60")
    b.signal(signal.SIGINT)
    assert b.end() == 0
    a = machine.start("a", short)
    a.says("training finished at step 30")
    b = machine.start("b", short, join=a)
    b.says("without --join and --token, and the others with --join to it")
    b.says("training finished at step 30")
    for node in (a, b):
        node.signal(signal.SIGINT)
        assert node.end() == 0
    state = machine.state / "peerd" / "b"
    for passed in (state / "checkpoints-passed").iterdir():
        passed.rename(state / "checkpoints" / passed.name)
    b = machine.start("b", longer)
    b.says("resumed from the checkpoint of step 60")
    a = machine.start("a", short, join=b)
    a.says("training from step 60")


@pytest.mark.parametrize("end", ENDS)
def test_an_end_gives_the_last_step_to_the_node_and_is_the_last(machine: Machine, end: str) -> None:
    a = machine.start("a", machine.script("train.py", HEAD + PLAIN + ENDS[end]), PEERD_TRIGGER="period:1000")
    a.says("training finished at step 25")
    holds_the_scripts_model(a)
    checkpoint = machine.state / "peerd" / "a" / "checkpoints" / "step-00000025" / "model.safetensors"
    eventually(checkpoint.exists)  # the trainer writes it when it has been told of the end
    kept = {name: value for name, value in load_file(checkpoint).items() if name.startswith("model.")}
    assert {name: value.tolist() for name, value in kept.items()} == {
        f"model.{name}": value.tolist() for name, value in own(machine).items()
    }
    if "error" in end:
        a.says("train.py exited with code 1 after its model was finished: it is not started again")
    eventually(lambda: not alive(a.trainer_pid))
    assert "starting it again" not in a.log
    assert a.ask("status")["phase"] == "finished"


GONE = """
with peerd.attach(model, optimizer) as swarm:
    while swarm.step_count < int(os.environ.get("STEPS", 10**6)):
        train(swarm, model, [optimizer])
        if "GONE" in os.environ and swarm.step_count == 30:
            os._exit(0)
"""


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "mode",
    [
        {"PEERD_MODE": "hardsync"},
        {"PEERD_MODE": "allreduce", "PEERD_OVERLAP": "blocking"},
        {"PEERD_MODE": "diloco", "PEERD_EVERY": "10"},
        {"PEERD_MODE": "gossip"},
    ],
    ids=lambda mode: mode["PEERD_MODE"],
)
def test_a_script_that_is_gone_for_good_holds_nobody_up(machine: Machine, mode: dict[str, str]) -> None:
    """Its node lives, and is a member with the model as it stands."""
    script = machine.script("train.py", HEAD + PLAIN + GONE)
    told: Any = {**mode, "PEERD_WAIT_FOR": "3"}
    a = machine.start("a", script, **told)
    b, c = machine.start("b", script, join=a, GONE="1", **told), machine.start("c", script, join=a, **told)
    b.says("no script trains here any more")
    rounds = a.ask("status")["counts"].get("rounds", 0)
    for node in (a, c):
        node.trains(beyond=node.step + 100)
    if mode["PEERD_MODE"] in ("allreduce", "diloco"):
        assert a.ask("status")["counts"]["rounds"] > rounds + 5
    (row,) = (line for line in machine.peerd("members", "--name", "a").stdout.splitlines() if line.startswith("b "))
    assert "alive, no trainer" in row


def test_the_node_of_a_script_that_is_gone_ends_with_the_others_model(machine: Machine) -> None:
    script = machine.script("train.py", HEAD + PLAIN + GONE)
    told: Any = {"STEPS": "300", "PEERD_WAIT_FOR": "3"}
    a = machine.start("a", script, **told)
    b, c = machine.start("b", script, join=a, GONE="1", **told), machine.start("c", script, join=a, **told)
    for node in (a, c):
        node.says("training finished at step 300")
    one, other = exported(a), exported(b)
    for name, value in one.items():
        assert float((value - other[name]).norm()) < 0.05 * float(value.norm()), name


def test_a_script_by_hand_after_one_that_is_gone_holds_nobody_up_either(machine: Machine) -> None:
    script = machine.script("train.py", HEAD + PLAIN + GONE)
    told: Any = {"PEERD_MODE": "hardsync"}
    a = machine.start("a", script, PEERD_WAIT_FOR="2", **told)
    b = machine.start("b", script, join=a, GONE="1", PEERD_WAIT_FOR="2", **told)
    b.says("no script trains here any more")
    hand = machine.spawn("hand", [str(script)], PEERD_NAME="b")
    eventually(lambda: b.ask("status")["phase"] == "training")
    a.trains(beyond=a.step + 10)
    hand.signal(signal.SIGKILL)
    hand.end()
    b.says("no script trains here any more", times=2)
    a.trains(beyond=a.step + 100)


def test_a_number_is_drawn_for_each_step_not_for_each_batch(machine: Machine) -> None:
    loop = """
with peerd.attach(model, optimizer) as swarm:
    for batch, step in enumerate(swarm.steps(10)):
        print("number", step, flush=True)
        if batch % 4 == 3:
            train(swarm, model, [optimizer])
"""
    script = machine.script("train.py", HEAD + PLAIN + loop)
    alone = machine.spawn("alone", [str(script)])
    assert alone.end() == 0
    a = machine.start("a", script)
    a.says("training finished at step 10")
    for node in (alone, a):
        assert node.log.count("number 9") == 4
        assert [int(found) for found in re.findall(r"number (\d+)", node.log)] == [at // 4 for at in range(40)]
        assert "slower than most" not in node.log


def test_what_a_script_may_not_do_ends_it_and_says_so(machine: Machine) -> None:
    """It trained alone, as if its daemon had gone away."""
    limited = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
    node = machine.start("x")
    eventually(node.socket.exists)
    node.says("one that you start on this machine trains with this node (PEERD_NAME=x python train.py)")
    hand = machine.spawn("hand", [str(machine.script("train.py", HEAD + PLAIN + limited + COUNTED))], PEERD_NAME="x")
    assert hand.end() == 1
    hand.says("peerd: the model cannot be shared with the daemon: File too large")


def test_a_signal_that_comes_twice_at_once_is_one(machine: Machine) -> None:
    """As timeout(1) has it, which signals its child, and then its group."""
    a = machine.start("a", machine.script("train.py", HEAD + PLAIN + GONE))
    a.trains(beyond=10)
    a.signal(signal.SIGINT)
    a.signal(signal.SIGTERM)  # two of one kind might be one to the kernel
    assert a.end() == 0
    a.says("left the swarm")


def test_an_end_that_nothing_can_flush_is_told(machine: Machine) -> None:
    body = ENDS["no finish"].replace("keep(model)", "os._exit(0)")
    a = machine.start("a", machine.script("train.py", HEAD + PLAIN + body))
    a.says("train.py ended without swarm.finish(): its last steps may be missing in this node's model")
    assert "starting it again" not in a.log
    assert a.ask("status")["phase"] == "gone"


LAST_STEPS = """
torch.manual_seed(int(os.environ["SEED"]))


def ends():
    keep(model, f"own-{os.environ['SEED']}.safetensors")
    while not all(os.path.exists(f"own-{seed}.safetensors") for seed in (1, 2)):
        time.sleep(0.01)  # nothing that comes from the other at its end is in what was kept


swarm = peerd.attach(model, optimizer)
"""
LAST_WORDS = {
    "sys.exit(0) in the block": """
with swarm:
    while True:
        train(swarm, model, [optimizer])
        if swarm.step_count == 150:
            ends()
            sys.exit(0)
""",
    "no finish": """
while swarm.step_count < 150:
    train(swarm, model, [optimizer])
ends()
""",
    "block": """
with swarm:
    while swarm.step_count < 150:
        train(swarm, model, [optimizer])
    ends()
""",
}


@pytest.mark.parametrize("end", ["sys.exit(0) in the block", "no finish"])
def test_the_last_steps_of_a_script_without_finish_reach_the_swarm(machine: Machine, end: str) -> None:
    flags = ("--wait-for", "2", "--trigger", "period:100000")  # nothing is exchanged before the end
    one = machine.script("a.py", HEAD + PLAIN + LAST_STEPS + LAST_WORDS[end])
    other = machine.script("b.py", HEAD + PLAIN + LAST_STEPS + LAST_WORDS["block"])
    a = machine.start("a", one, *flags, SEED="1")
    b = machine.start("b", other, *flags, SEED="2", join=a)
    for node in (a, b):
        node.says("training finished at step 150")
    before = [own(machine, f"own-{seed}.safetensors") for seed in (1, 2)]
    for node in (a, b):
        for name, value in exported(node).items():
            mean = (before[0][name] + before[1][name]) / 2
            apart = float((before[0][name] - mean).norm())
            assert float((value - mean).norm()) < 0.1 * apart, (node.name, name)


@pytest.mark.parametrize("failure", ["raise ValueError('step 7')", "sys.exit(3)"])
@pytest.mark.parametrize("block", [True, False])
def test_a_failure_in_the_training_is_no_end(machine: Machine, failure: str, block: bool) -> None:
    body = f"""\
if swarm.step_count == 0:
        for _ in range(7):
            train(swarm, model, [optimizer])
        {failure}
    while swarm.step_count < 20:
        train(swarm, model, [optimizer])
"""
    text = (
        f"with peerd.attach(model, optimizer) as swarm:\n    {body}"
        if block
        else f"swarm = peerd.attach(model, optimizer)\nif True:\n    {body}"
    )
    a = machine.start("a", machine.script("train.py", HEAD + PLAIN + text + "keep(model)\n"))
    a.says("training finished at step 20")
    code = 3 if "exit" in failure else 1
    assert a.log.count(f"train.py exited with code {code}; starting it again in 1 s") == 1
    holds_the_scripts_model(a)


HOPELESS = {
    "a TypeError before the first step": "with peerd.attach(model, optimizer) as swarm:\n    len(3)\n",
    "nothing to train": "peerd.attach(model.requires_grad_(False), optimizer)\n",
    "no argument": "peerd.attach(model)\n",
}


@pytest.mark.parametrize("why", HOPELESS)
def test_an_error_that_comes_again_is_not_awaited_five_times(machine: Machine, why: str) -> None:
    a = machine.start("a", machine.script("train.py", HEAD + PLAIN + HOPELESS[why]))
    assert a.end() == 1
    ends = {
        "a TypeError before the first step": " twice before its first step: giving up",
        "nothing to train": ": peerd.attach did not take what it gave",
        "no argument": " before peerd.attach was done",
    }
    assert f"\npeerd: train.py exited with code 1{ends[why]}; its own output above says why\n" in a.log
    assert a.log.count("starting it again") == (1 if "twice" in ends[why] else 0)


ANOTHER_MODEL = """\
width = 4 + os.path.exists("once")
model = nn.Linear(4, width)
with peerd.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)) as swarm:
    for _ in swarm.steps(3):
        swarm.step()
    open("once", "w").close()
    os._exit(1)
"""


def test_a_model_that_the_node_will_not_have_is_refused_once(machine: Machine) -> None:
    """Its script has changed since the node began."""
    a = machine.start("a", machine.script("train.py", HEAD + ANOTHER_MODEL))
    assert a.end() == 1
    assert a.log.count("this node holds another model: ") == 1
    assert "\npeerd: train.py exited with code 1: peerd.attach did not take what it gave; " in a.log


# ------------------------------------------------------------------------------------------------------ frozen tensors

LORA = """\
class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(4, 512)
        self.middle = nn.Linear(512, 512)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.momentum = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.norm = nn.BatchNorm1d(512)
        self.down = nn.Linear(512, 4, bias=False)
        self.up = nn.Linear(4, 1).bfloat16()
        self.tied = nn.Linear(512, 4, bias=False)
        self.tied.weight = self.down.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x):
        self.momentum.data = 0.9 * self.momentum.data + 0.1 * x.mean(0)
        hidden = self.norm(self.middle(self.base(x)).tanh())
        return self.up((self.down(hidden) + self.tied(hidden)).bfloat16()).float()

model = Lora()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
with peerd.attach(model, optimizer) as swarm:
    keep(model, f"at{swarm.step_count}.safetensors")
    print("begins at", swarm.step_count, flush=True)
    while swarm.step_count < int(os.environ["STEPS"]):
        train(swarm, model, [optimizer])
keep(model)
"""


def test_a_frozen_base_is_in_the_complete_export_and_in_no_checkpoint(machine: Machine) -> None:
    script = machine.script("train.py", HEAD + LORA)
    a = machine.start("a", script, STEPS="25")
    a.says("training finished at step 25")
    expected = own(machine)

    # the checkpoint has what is trained, and the frozen tensor that the script itself moves; not the base
    generation = machine.state / "peerd" / "a" / "checkpoints" / "step-00000025"
    kept = load_file(generation / "model.safetensors")
    assert "model.momentum" in kept
    assert not [name for name in kept if "base" in name or "middle" in name]
    assert (generation / "model.safetensors").stat().st_size < 0.2 * (machine.path / "own.safetensors").stat().st_size

    # the complete export loads strictly, the plain one has what is shared
    complete = exported(a, "--complete")
    assert complete.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(complete[name], expected[name])]
    assert {name: value.dtype for name, value in complete.items()} == {n: v.dtype for n, v in expected.items()}
    assert not {"base.weight", "norm.num_batches_tracked", "tied.weight"} & exported(a).keys()

    # and what is resumed is the same model
    machine.peerd("leave", "--name", "a")
    a = machine.start("a", script, STEPS="40")
    a.says("begins at 25")
    assert "peerd: resumed from the checkpoint of step 25\n" in a.log
    resumed = own(machine, "at25.safetensors")
    assert not [name for name in expected if not torch.equal(resumed[name], expected[name])]
    a.says("training finished at step 40")

    # where the frozen tensors are nowhere, one line says so
    for path in (machine.state / "peerd" / "a" / "checkpoints").glob("rest-*"):
        path.unlink()
    refused = machine.peerd("export", "--name", "a", "--complete", "other.safetensors")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: export --complete: ") or "--complete" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not Path(machine.path / "other.safetensors").exists()
    assert json.loads(machine.peerd("export", "--name", "a", "m.safetensors", "--format", "json").stdout)["step"] == 40


# ----------------------------------------------------------------------------------------------------- private tensors

HEADS = """\
class Tasked(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.head = nn.Linear(8, int(os.environ["H"]))

    def forward(self, x):
        return self.head(self.body(x))

torch.manual_seed(int(os.environ["H"]))
model = Tasked()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
with peerd.attach(model, optimizer, exclude=["head.*"]) as swarm:
    keep(model, f"H{os.environ['H']}-at{swarm.step_count}.safetensors")
    while swarm.step_count < int(os.environ["STEPS"]):
        train(swarm, model, [optimizer])
keep(model, f"H{os.environ['H']}.safetensors")
"""


def test_heads_of_their_own_on_a_body_that_is_shared(machine: Machine) -> None:
    script = machine.script("train.py", HEAD + HEADS)
    a = machine.start("a", script, "--wait-for", "2", STEPS="60", H="3")
    b = machine.start("b", script, "--wait-for", "2", STEPS="60", H="5", join=a)
    for node in (a, b):
        node.says("training finished at step 60")
    first, second = exported(a), exported(b)
    assert {*first} == {*second} == {"body.0.weight", "body.0.bias"}
    began, ended, other = (own(machine, f"{name}.safetensors") for name in ("H3-at0", "H3", "H5"))
    for name, value in first.items():
        close = 0.1 * float((value - began[name]).norm())
        assert float((value - second[name]).norm()) < close
        # who ended last holds what is everybody's now
        assert min(float((value - kept[name]).norm()) for kept in (ended, other)) < close
    assert [kept["head.weight"].shape[0] for kept in (ended, other)] == [3, 5]
    assert not torch.equal(ended["head.weight"], began["head.weight"]), "a private head is trained"

    for node in (a, b):
        machine.peerd("leave", "--name", node.name)
    a = machine.start("a", script, STEPS="61", H="3")
    a.says("training finished at step 61")
    resumed = own(machine, "H3-at60.safetensors")
    for name in ("head.weight", "head.bias"):
        assert torch.equal(resumed[name], ended[name]), name


LOOP = """
with peerd.attach(model, optimizer) as swarm:
    for step in swarm.steps(int(os.environ["STEPS"])):
        train(swarm, model, [optimizer])
        time.sleep(float(os.environ.get("SLOW", "0")))
"""


def test_who_leaves_in_the_middle_ends_nobodys_run(machine: Machine) -> None:
    script = machine.script("train.py", HEAD + PLAIN + LOOP)
    a = machine.start("a", "--wait-for", "4", script, STEPS="100000")
    others = [machine.start(name, "--wait-for", "4", script, join=a, STEPS="100000") for name in "bcd"]
    for node in (a, *others):
        node.trains(beyond=20)
    for node in others[:2]:
        machine.peerd("leave", "--name", node.name)
    others[2].signal(signal.SIGINT)
    for node in others:
        node.end()
    a.trains(beyond=a.step + 100)
    assert "slower than most others" not in a.log


def test_a_slow_script_that_dies_after_the_others_ends_ends_with_them(machine: Machine) -> None:
    script = machine.script("train.py", HEAD + PLAIN + LOOP)
    slow = machine.start("slow", "--wait-for", "3", script, STEPS="3000", SLOW="0.1")
    others = [machine.start(name, "--wait-for", "3", script, join=slow, STEPS="100") for name in "bc"]
    slow.trains(beyond=5)
    pid = slow.trainer_pid
    os.kill(pid, signal.SIGSTOP)
    for node in others:
        comes_to(node, "finishing", "finished")
    os.kill(pid, signal.SIGKILL)
    slow.says("its run ends with theirs, after ")
    comes_to(slow, "finished")
    assert slow.step < 1000


@pytest.mark.one_run_in(3)
def test_a_slow_script_goes_by_the_others_count(machine: Machine) -> None:
    """And they, which are as fast as each other, by their own."""
    loop = LOOP.replace("        train(", "        print('number', step, flush=True)\n        train(")
    assert loop != LOOP
    script = machine.script("train.py", HEAD + PLAIN + loop)
    a = machine.start("a", "--wait-for", "3", script, STEPS="400", SLOW="0.015")
    b = machine.start("b", "--wait-for", "3", script, join=a, STEPS="400", SLOW="0.015")
    slow = machine.start("slow", "--wait-for", "3", script, join=a, STEPS="400", SLOW="0.15")
    for node in (a, b, slow):
        comes_to(node, "finished")
    numbers = {node.name: [int(found) for found in re.findall(r"number (\d+)", node.log)] for node in (a, b, slow)}
    for made in numbers.values():
        assert made == sorted(set(made)), "none is made twice"
        assert made[-1] < 400
    assert len(numbers["slow"]) == slow.step < 150
    assert numbers["slow"][-1] > 250, "it is where they are"
    for name in "ab":
        assert len(numbers[name]) > 380, "each may come late for some, beside other work"
