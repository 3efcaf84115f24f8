"""What happens to nodes in operation: logs that nobody reads, sessions that end, trainers that hang."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import PEERD
from machine import Machine, Node, eventually
from scripts import QUIET, STUBBORN, TRAIN

import peerd
from peerd.carriers import CarrierSettings
from peerd.carriers.tcp import Tcp
from peerd.daemon.main import SCRIPT_ENDS_S
from peerd.security.token import parse
from peerd.transport.errors import UserError
from peerd.transport.ids import shown

NOBODY = 65534
AS_NOBODY = f"""
import os, sys
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
os.execv(sys.argv[1], sys.argv[1:])
"""
MORE_MB = 20  # 200 lives of another took 4
AT_ONCE_S = SCRIPT_ENDS_S / 3  # nobody gave a script its time to end


@pytest.fixture
def machine(machine: Machine) -> Iterator[Machine]:
    yield machine
    logs = machine.logs()
    assert "Traceback" not in logs, logs


@pytest.fixture
def as_nobody(machine: Machine) -> Callable[..., Node]:
    """Starts `peerd ARGUMENTS` as a user without root's rights."""
    if os.geteuid() != 0:
        pytest.skip("only root can run a command as another user")
    for folder in (machine.path, machine.runtime):
        os.chown(folder, NOBODY, NOBODY)
    paths = dict.fromkeys(str(Path(str(module.__file__)).parent.parent) for module in (peerd, torch))
    environment = {**machine.environment, "PYTHONPATH": os.pathsep.join(paths)}

    def may_run(python: str) -> bool:
        probe = [sys.executable, "-c", AS_NOBODY, python, "-c", "from peerd.local import local_socket"]
        return subprocess.run(probe, env=environment, cwd=machine.path, capture_output=True).returncode == 0

    of_the_system = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    python = next(filter(may_run, (sys.executable, of_the_system)), None)
    if python is None:
        pytest.skip(f"{sys.executable} and what it imports are not for other users, and {of_the_system} does not do")

    def start(name: str, *arguments: str | Path, **more: str) -> Node:
        command = ["-c", AS_NOBODY, python, *PEERD, *map(str, arguments)]
        return machine.spawn(name, command, PYTHONPATH=environment["PYTHONPATH"], **dict[str, Any](more))

    return start


def _closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def _full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::"])
def test_who_binds_all_addresses_is_joined_at_one(machine: Machine, everywhere: str) -> None:
    try:
        host = Tcp(CarrierSettings()).reached(everywhere)
    except UserError as error:
        pytest.skip(str(error))
    port = Machine.free_port()
    a = machine.start("a", "--bind", shown((everywhere, port)))
    where = shown((host, port))
    assert a.address == where
    paste = "others join with: peerd start --token TOKEN --bind THEIR_ADDRESS; peerd token prints the TOKEN"
    a.says(f"listening on {shown((everywhere, port))}; {paste}")
    token = machine.peerd("token").stdout.strip()
    assert parse(token).addresses == ((host, port),)
    b = machine.start("b", "--bind", shown((host, 0)), "--token", token)
    for node in (a, b):
        node.sees(a="alive", b="alive")
    assert a.ask("status")["counts"]["datagrams_unsendable"] == 0


def test_the_line_to_paste_has_an_address_that_can_be_joined(machine: Machine) -> None:
    a = machine.start("a", "--bind", "0.0.0.0:0", "--insecure-plaintext")
    assert not a.address.startswith("0.0.0.0")
    a.says(f"others join with: peerd start --join {a.address} --bind THEIR_ADDRESS --insecure-plaintext\n")


def test_two_swarms_on_one_host_do_not_know_of_each_other(machine: Machine) -> None:
    script = machine.script("train.py", TRAIN)
    swarms = []
    for name, hidden in (("one", "16"), ("two", "8")):  # with models that neither would take from the other
        first = machine.start(f"{name}-a", script, "--swarm", name, HIDDEN=hidden)
        second = machine.start(f"{name}-b", script, "--swarm", name, join=first, HIDDEN=hidden, SEED="1")
        swarms.append((first, second))
    for swarm in swarms:
        for node in swarm:
            node.trains(beyond=20)
            node.eventually(lambda node=node: node.ask("status")["exchanges"] > 0)  # type: ignore[misc]
            assert sorted(node.members()) == [each.name for each in swarm]
    assert "warning" not in machine.logs()


# ---------------------------------------------------------------- the session ends


@contextmanager
def hangups(handler: signal.Handlers) -> Iterator[None]:
    """What is started meanwhile inherits this for SIGHUP."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_hangs_up_is_a_goodbye(machine: Machine) -> None:
    a = machine.start("a")
    with hangups(signal.SIG_DFL):  # these tests may themselves be behind nohup
        b = machine.start("b", machine.script("train.py", TRAIN), join=a)
    b.sees(a="alive")
    a.sees(b="alive")
    b.says("ready, in a swarm")
    b.signal(signal.SIGHUP)
    b.signal(signal.SIGHUP)  # from the shell, and again from the kernel: not a second wish
    assert b.end() == 0
    assert not b.socket.exists()
    a.sees(b="left")


def test_under_nohup_a_node_outlives_its_terminal(machine: Machine) -> None:
    with hangups(signal.SIG_IGN):  # as nohup does
        node = machine.start("n")
    assert node.address
    node.signal(signal.SIGHUP)
    node.signal(signal.SIGHUP)
    assert machine.peerd("leave").stdout == "n has left\n"
    assert node.end() == 0
    assert node.log.count("leaving the swarm") == 1


# ---------------------------------------------------------------- a last checkpoint that takes long

SLOW_DISK = """\
import os, time
from peerd.trainer import checkpoint

save_file = checkpoint.save_file
checkpoint.save_file = lambda *arguments: (time.sleep(float(os.environ["DISK_S"])), save_file(*arguments))
"""


def test_a_last_checkpoint_that_takes_long_is_waited_for(machine: Machine) -> None:
    node = machine.start("n", machine.script("train.py", SLOW_DISK + TRAIN), DISK_S="4")
    node.trains(beyond=5)
    left = machine.peerd("leave")
    assert (left.returncode, left.stdout) == (0, "n has left\n")
    assert "n is leaving, and waits for the script's last checkpoint\n" in left.stderr
    assert node.end() == 0
    node.says("waiting for the script's last checkpoint; Ctrl-C or SIGTERM now ends this node without it")
    assert [*(machine.state / "peerd" / "n" / "checkpoints").glob("step-*/manifest.json")]


FULL_DISK = """\
import errno, os
from peerd.trainer import checkpoint

def save_file(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

checkpoint.save_file = save_file
"""


def test_a_last_checkpoint_that_is_not_written_is_told_by_the_node(machine: Machine) -> None:
    ends = TRAIN.replace("while not (swarm.alone and swarm.step_count > 5)", "while swarm.step_count < 5")
    node = machine.start("n", machine.script("train.py", FULL_DISK + ends))
    why = "at step 5: No space left on device; there is none yet"
    node.says(f"n  warning: the script's last checkpoint was not written, {why}\n")
    status = node.ask("status")
    assert (status["phase"], status["trainer"]["checkpoint_failed"]) == ("finished", why)


def test_a_second_signal_says_what_it_ends(machine: Machine) -> None:
    node = machine.start("n", machine.script("train.py", SLOW_DISK + TRAIN), DISK_S="60")
    node.trains(beyond=5)
    node.signal(signal.SIGINT)
    node.says("waiting for the script's last checkpoint")
    node.signal(signal.SIGINT)
    assert node.end() == 128 + signal.SIGINT
    node.says("ended at once by SIGINT, without the script's last checkpoint")
    eventually(lambda: not machine.processes())


# ---------------------------------------------------------------- a trainer hangs


def test_a_trainer_that_hangs_is_seen_and_an_average_that_waits_for_it_is_taken_back(machine: Machine) -> None:
    script = machine.script("train.py", TRAIN)
    a = machine.start("a", script)
    a.trains()
    alone = machine.peerd("status", "--name", "a").stdout
    assert "no partner for " in alone
    assert "consensus distance" not in alone
    b = machine.start("b", script, join=a, SEED="1")
    for node in (a, b):
        node.trains(beyond=20)
        node.sees(a="alive", b="alive")
    a.eventually(lambda: a.ask("status")["no_partner_s"] is None)
    assert "consensus distance" in machine.peerd("status", "--name", "a").stdout
    time.sleep(2)  # a node knows how long its steps take once it has looked
    hung = b.trainer_pid
    os.kill(hung, signal.SIGSTOP)
    b.says(f"the trainer (pid {hung}) made its last step ")
    a.eventually(
        lambda: {row["name"]: row["stalled"] for row in a.ask("members")["members"]} == {"a": False, "b": True}
    )
    assert b.ask("status")["trainer"]["last_step_s_ago"] > 9
    assert re.search(r"last step \d+ s ago", machine.peerd("status", "--name", "b").stdout)
    assert "alive, no steps" in machine.peerd("members", "--name", "a").stdout

    asker = machine.spawn("asker", ["-m", "peerd.cli.main", "average", "--name", "a"])
    asker.says("waiting for the next step of b (no step for long)")
    stands_at = a.step
    asker.signal(signal.SIGINT)
    assert asker.end() == 130
    assert asker.log.endswith("peerd: interrupted: the node takes the average back, and the swarm goes on as before\n")
    a.says("it is taken back")
    a.trains(beyond=stands_at + 5)
    for node in (a, b):
        node.eventually(lambda node=node: (node.ask("mode")["plan"], node.ask("mode")["mode"]) == (2, "gossip"))  # type: ignore[misc]

    os.kill(hung, signal.SIGCONT)
    b.says("the trainer steps again")
    a.eventually(lambda: not any(row["stalled"] for row in a.ask("members")["members"]))
    b.trains(beyond=b.step)
    assert b.log.count("made its last step") == 1
    averaged = machine.peerd("average", "--name", "b", "--format", "json")
    assert json.loads(averaged.stdout)["members"] == ["a", "b"], averaged.stderr


# ---------------------------------------------------------------- who has nothing to give


def test_a_clone_is_refused_and_who_waits_for_others_leaves(machine: Machine) -> None:
    script = machine.script("train.py", TRAIN)
    a = machine.start("a", script, "--wait-for", "3")
    a.says("1 of 3 members are ready")
    shutil.copytree(machine.state / "peerd" / "a", machine.state / "peerd" / "clone")
    before = {a.process.pid, a.trainer_pid}
    clone = machine.start("clone", machine.script("stubborn.py", STUBBORN), join=a)
    assert clone.end() == 1
    assert {*machine.processes()} == before, "its script ends before it does"
    assert "is this node's own identity" in clone.log
    assert [row["name"] for row in a.ask("members")["members"]] == ["a"]
    asked = time.monotonic()
    assert machine.peerd("leave", "--name", "a").stdout == "a has left\n"
    assert a.end() == 0
    assert time.monotonic() - asked < AT_ONCE_S
    assert "ready, " not in machine.logs()  # no script got as far as its first step
    eventually(lambda: not machine.processes())


# ---------------------------------------------------------------- the clock on the wall

JUMPING_CLOCK = """
import datetime, pathlib, time
from peerd.security import wall_clock

shift = pathlib.Path("shift")  # in seconds
now, nanoseconds = wall_clock.now, time.time_ns
wall_clock.now = lambda: now() + datetime.timedelta(seconds=int(shift.read_text()))
time.time_ns = lambda: nanoseconds() + 10**9 * int(shift.read_text())
time.time = lambda: time.time_ns() / 1e9
"""


def test_a_jump_of_the_wall_clock_ends_no_training(machine: Machine) -> None:
    machine.script("sitecustomize.py", JUMPING_CLOCK)
    shift = machine.script("shift", "0")
    script = machine.script("train.py", TRAIN)
    a = machine.start("a", script)
    b = machine.start("b", script, join=a, SEED="1", PYTHONPATH=str(machine.path))
    for node in (a, b):
        node.trains(beyond=20)
    for days in (3, -3, 0.25):  # a certificate begins an hour before it was made: with -3 there is no new connection
        (machine.path / "next").write_text(f"{86400 * days:.0f}")
        (machine.path / "next").replace(shift)  # at once: who reads it meanwhile finds no number
        met, reached = b.ask("status")["exchanges"], b.step
        b.trains(beyond=reached + 100)
        assert (a.members(), b.members()) == ({"a": "alive", "b": "alive"},) * 2
        if days >= 0:
            b.eventually(lambda met=met: b.ask("status")["exchanges"] > met)  # type: ignore[misc]
    assert a.ask("status")["trainer_restarts"] == b.ask("status")["trainer_restarts"] == 0
    hours = []
    for node in (b, a):
        node.signal(signal.SIGINT)
        assert node.end() == 0
        hours += [int(hour) for hour in re.findall(r"^(\d\d):.* leaving the swarm$", node.log, re.MULTILINE)]
    assert (hours[0] - hours[1]) % 24 in (5, 6), "its clock has jumped"


# ---------------------------------------------------------------- again and again


@pytest.mark.parametrize("lives", [5, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_a_node_that_is_restarted_again_and_again_costs_the_others_nothing(machine: Machine, lives: int) -> None:
    a = machine.start("a")
    kept = machine.state / "peerd" / "a" / "members.json"

    def life(end: signal.Signals, keeps: bool = False) -> None:
        b = machine.start("b", join=a)
        b.sees(a="alive")
        address = b.address
        a.eventually(
            lambda: [r["address"] for r in a.ask("members")["members"] if r["state"] == "alive"][1:] == [address]
        )
        if keeps:  # a looks once in a second: a shorter life leaves nothing in its file
            a.eventually(lambda: kept.exists() and kept.read_text().count("127.0.0.1") == 1)
        b.signal(end)
        b.process.wait()

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{a.process.pid}/fd"))

    def resident_mb() -> float:
        pages = int(Path(f"/proc/{a.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    life(signal.SIGKILL, keeps=True)
    before, held_mb = descriptors(), resident_mb()
    for number in range(1, lives):
        life(signal.SIGKILL if number % 4 == 2 else signal.SIGINT)
    a.eventually(lambda: descriptors() <= before)
    assert resident_mb() < held_mb + MORE_MB
    assert [row["name"] for row in a.ask("members")["members"]] == ["a", "b"]
    a.eventually(lambda: kept.read_text().count("127.0.0.1") <= 1)


def test_a_state_folder_that_goes_away_ends_no_training(machine: Machine) -> None:
    node = machine.start("n", machine.script("train.py", TRAIN), PEERD_CHECKPOINT_EVERY_S="0.2")
    state = machine.state / "peerd" / "n"
    node.eventually(lambda: (state / "checkpoints").exists())
    state.rename(machine.path / "moved")
    node.trains(beyond=node.step + 50)
    node.eventually(lambda: (state / "checkpoints").exists())  # what is written from now on is there again
    node.signal(signal.SIGINT)
    assert node.end() == 0


def test_a_state_folder_that_cannot_be_written_ends_no_training(machine: Machine) -> None:
    node = machine.start("n", machine.script("train.py", TRAIN), PEERD_CHECKPOINT_EVERY_S="0.2")
    checkpoints = machine.state / "peerd" / "n" / "checkpoints"
    node.eventually(checkpoints.exists)
    trainer = node.trainer_pid
    os.kill(trainer, signal.SIGSTOP)  # else it may make the folder again at once
    checkpoints.rename(machine.path / "moved")
    checkpoints.write_text("")  # in the way of root, too
    os.kill(trainer, signal.SIGCONT)
    node.says("no checkpoint written at step ", times=3)
    reached = node.step
    os.kill(trainer, signal.SIGKILL)
    node.eventually(lambda: node.trainer_pid != trainer)
    node.trains(beyond=reached + 20)
    node.signal(signal.SIGINT)
    assert node.end() == 0
    line = re.compile(r"^peerd: no checkpoint written at step (\d+): .*; there is none yet$", re.MULTILINE)
    for life in node.log.split("starting it again"):
        steps = line.findall(life)
        assert len({*steps}) == len(steps) == life.count("no checkpoint") > 0


def test_a_script_that_goes_to_another_folder_finds_its_node_and_its_checkpoints(machine: Machine) -> None:
    """As Hydra's do, to a new folder at each start."""
    moves = "import os, tempfile\nos.chdir(tempfile.mkdtemp(dir='.'))\n"
    script = machine.script("train.py", moves + TRAIN)
    for resumes in (False, True):
        node = machine.start(
            "n",
            script,
            XDG_RUNTIME_DIR=machine.runtime.name,
            PEERD_STATE_DIR="kept",
            PEERD_CHECKPOINT_EVERY_S="0.2",
        )
        node.trains()
        node.eventually(lambda: [*(machine.path / "kept" / "checkpoints").glob("step-*/manifest.json")])
        if resumes:  # the node knows of a step before the script says so
            node.says("resumed from the checkpoint of step")
        assert ("resumed from the checkpoint of step" in node.log) is resumes
        exported = machine.peerd("export", machine.path / "m.safetensors", "--complete", "--force")
        assert exported.returncode == 0, exported.stderr
        node.signal(signal.SIGINT)
        assert node.end() == 0


# ---------------------------------------------------------------- without root


@pytest.mark.one_run_in(3)
def test_what_the_readme_starts_needs_no_root(machine: Machine, as_nobody: Callable[..., Node]) -> None:
    script = machine.script("train.py", TRAIN)
    flags = ["--name", "a", "--bind", "127.0.0.1:0"]
    node = as_nobody("a", "start", script, *flags, PEERD_CHECKPOINT_EVERY_S="0.2")
    node.trains()
    status = as_nobody("status", "status", "--name", "a")
    assert status.end() == 0, status.log
    assert status.log.startswith("a: training; mode: gossip; members: 1 alive\n")
    assert "no checkpoint" not in node.log
    state = machine.state / "peerd" / "a"
    for folder in (state / "checkpoints", state):
        folder.chmod(0o500)
    node.says("no checkpoint written at step ")
    node.trains(beyond=node.step + 20)
    leave = as_nobody("leave", "leave", "--name", "a")
    assert leave.end() == 0
    assert leave.log.endswith("a has left\n")
    assert node.end() == 0


# ---------------------------------------------------------------- nobody hears


WITHOUT_STREAMS = """
import os, sys
os.closerange(0, 3)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_where_no_stream_is_open_nothing_else_is_written_to_as_one(machine: Machine) -> None:
    script = machine.script("quiet.py", QUIET)
    command = [*PEERD, "start", str(script), "--name", "n", "--bind", "127.0.0.1:0"]
    node = machine.spawn("n", ["-c", WITHOUT_STREAMS, *command])
    node.trains()
    for pid in (node.process.pid, node.trainer_pid):  # a library of the script's wrote to the model that both map
        assert {os.readlink(f"/proc/{pid}/fd/{stream}") for stream in range(3)} == {os.devnull}
    node.signal(signal.SIGINT)
    assert node.end() == 0


@pytest.mark.parametrize("opened", [_closed_pipe, _full_disk])
def test_what_nobody_can_read_ends_no_training(machine: Machine, opened: Callable[[], int]) -> None:
    assert "print" not in QUIET  # of its own words a script may die
    script = machine.script("quiet.py", QUIET)
    node = machine.start("n", script)
    node.trains(beyond=5)
    node.signal(signal.SIGINT)
    assert node.end() == 0

    output = opened()
    node = machine.start("n", script, output=output)  # its trainer says that it resumes
    os.close(output)
    pid = (node.trains(), node.trainer_pid)[1]
    node.trains(beyond=node.step + 10)
    assert node.trainer_pid == pid
    assert node.ask("status")["trainer_restarts"] == 0
    assert node.ask("status")["trainer"]["first_step"] > 5
    os.kill(pid, signal.SIGKILL)  # what the daemon says of it ends nothing either
    node.eventually(lambda: node.trainer_pid != pid)
    node.trains()
    node.signal(signal.SIGINT)
    assert node.end() == 0


def test_two_swarms_that_one_node_joins_become_one_and_who_began_alone_is_told(machine: Machine) -> None:
    script = machine.script("train.py", TRAIN)
    a, b = machine.start("a", script), machine.start("b", script, SEED="1")
    a.trains()
    b.trains()
    machine.start("c", "--join", b.address, script, join=a)
    for here, there in ((a, b), (b, a)):
        here.sees(a="alive", b="alive")
        here.says(f"{there.name} trains already, with another model than this node")
        here.says(f"start it with --join {there.address}")


def test_nodes_of_one_seed_are_told_that_they_draw_the_same_batches(machine: Machine) -> None:
    """Though one starts when the other has long begun, and with its model; once, and of nobody else."""
    script = machine.script("train.py", TRAIN)
    a = machine.start("a", script)
    a.trains(beyond=20)
    b, c = machine.start("b", script, join=a), machine.start("c", script, join=a, SEED="1")
    for here, there in ((a, b), (b, a)):
        here.says(f"{there.name} trains on the same batches as this node")
        here.eventually(lambda here=here, there=there: here.ask("status")["same_batches"] == [there.name])  # type: ignore[misc]
    c.trains(beyond=20)
    shown = machine.peerd("status", "--name", "a").stdout
    assert "same batches as b: together they learn what one learns" in shown
    b.signal(signal.SIGINT)
    assert b.end() == 0
    a.eventually(lambda: a.ask("status")["same_batches"] == [])
    assert c.ask("status")["same_batches"] == []
    a.trains(beyond=a.step + 20)
    machine.end()
    assert [node.log.count("trains on the same batches") for node in (a, b, c)] == [1, 1, 0]


@pytest.mark.parametrize("ranks", ["01", "00"])
def test_a_built_in_task_draws_what_its_rank_says(machine: Machine, ranks: str) -> None:
    """Of one seed for all: each has a part of the data."""
    options = ("--wait-for", "2", "digits", "--steps", "100000", "--pace", "0.01")
    a = machine.start("a", *options, PEERD_RANK=ranks[0], PEERD_PEERS="2")
    b = machine.start("b", *options, join=a, PEERD_RANK=ranks[1], PEERD_PEERS="2")
    for node in (a, b):
        node.trains(beyond=20)
    if ranks[0] == ranks[1]:
        a.says("b trains on the same batches")
        b.says("a trains on the same batches")
    machine.end()
    assert ("same batches" in machine.logs()) == (ranks[0] == ranks[1])
