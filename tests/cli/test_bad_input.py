"""What a user gets wrong, and what an attacker sends: one clear line, the right exit code, the others unharmed."""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgpack
import pytest
import trio
import zstandard
from machine import PATIENCE_S, Machine, Node, eventually
from scripts import TRAIN
from typer.testing import CliRunner

from peerd.cli.main import VERBS, app, run
from peerd.daemon.node import PROTOCOL
from peerd.local.node_key import NodeKey
from peerd.security import authority_folder, wall_clock
from peerd.security.trust import Trust
from peerd.training.codecs.compress import ZSTD
from peerd.transport.connection import Connection, ConnectionLost
from peerd.transport.hello import greet
from peerd.transport.messages import Delta, Hello, LinkOpen, Message, ModelSnapshot
from peerd.transport.tcp import TcpTransport


class Terminal:
    """Types commands into the command line's own entry point; the process is the tests', which saves its imports."""

    def __init__(self, machine: Machine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._machine = machine
        self._patch = monkeypatch
        self._capture = capfd
        self._names = 0
        for key in [key for key in os.environ if key.startswith("PEERD_")]:
            monkeypatch.delenv(key)

    def refuses(self, expected: str, *arguments: str, **environment: str) -> str:
        """The command says one line with this in it, which is returned, and ends with code 1."""
        self._names += 1
        folders = {key: self._machine.environment[key] for key in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME")}
        for key, value in {**folders, "PEERD_NAME": f"n{self._names}", **environment}.items():
            self._patch.setenv(key, value)
        self._patch.setattr(sys, "argv", ["peerd", *arguments])
        with pytest.raises(SystemExit) as end:
            run()
        out, err = self._capture.readouterr()
        assert end.value.code == 1
        assert err.startswith("peerd: ")
        assert err.count("\n") == 1, err
        assert expected in err
        assert not out
        if not self._machine.nodes:  # the authority is its user's, whichever of their nodes made it
            left = [path for path in self._machine.state.glob("*/*") if path.name != ".authority"]
            assert not left + list(self._machine.runtime.iterdir())
        return err


@pytest.fixture
def terminal(machine: Machine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(machine, monkeypatch, capfd)


START = ("start", "--bind", "127.0.0.1:0")
TOO_LONG = "long" * 70  # for a name: to look whether it is there fails, as in a folder that is closed to this user


@pytest.mark.parametrize(
    ("option", "value", "wrong"),
    [
        ("--log", "wandb", "log: 'wandb' is not one of "),
        ("--config", "c.yaml", "config c.yaml: Expected '=' after a key "),
    ],
    ids=["log", "config"],
)
def test_an_option_of_ours_after_the_script_may_have_been_the_scripts(
    machine: Machine, option: str, value: str, wrong: str
) -> None:
    machine.script("c.yaml", "model:\n  width: 64\n")
    machine.script("train.py", "")
    cure = f"{option} is peerd start's: if it was meant for train.py, put it after a --\n"
    for given in ((option, value), (f"{option}={value}",)):
        done = machine.peerd(*START, "train.py", *given)
        assert (done.returncode, done.stderr.startswith(f"peerd: {wrong}")) == (1, True), done.stderr
        assert done.stderr.endswith(f"; {cure}")
        before = machine.peerd(*START, *given, "train.py")
        assert before.stderr.startswith(f"peerd: {wrong}")
        assert "put it after" not in before.stderr, "nobody means that"


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (("--view", "x"), "--view: 'x' is not a whole number"),
        (("--wait-for=x",), "--wait-for: 'x' is not a whole number"),
        (("--every", "5"), "every: without effect in mode gossip, which takes codec, trigger, view; leave it out"),
        (("--fresh=3",), "Option '--fresh' does not take a value"),
        (("--no-robust=3",), "Option '--no-robust' does not take a value"),
        (("--name",), "Option '--name' requires an argument"),
        (("--name", "a", "--view=3", "--name=b"), "--name is given twice, and takes one value: give it once"),
    ],
)
def test_whatever_is_wrong_with_it(terminal: Terminal, wrong: tuple[str, ...], line: str) -> None:
    option = wrong[0].partition("=")[0]
    hint = f"; {option} is peerd start's: if it was meant for train.py, put it after a --\n"
    for before in ((), ("--view", "3"), ("--fresh", "--bind=127.0.0.1:0")):
        terminal.refuses(hint, "start", *before, "train.py", "--lr", "0.1", *wrong)
    terminal.refuses(f"peerd: {line}", "start", "train.py", *wrong)
    if len(wrong) in (2, 4) or "=" in wrong[0]:  # before the script nobody means that, nor where it has one of its own
        assert "put it after" not in terminal.refuses(line, "start", *wrong, "--", "train.py", *wrong)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (("--join", "orders:many"), "join: 'orders:many' is not HOST:PORT "),
        (("--rdma-subnet", "10.0.0.0/8"), "rdma_subnets: without effect with transport tcp; leave it out, or take "),
    ],
)
def test_an_option_that_no_script_has_was_meant_for_peerd(
    terminal: Terminal, wrong: tuple[str, ...], line: str
) -> None:
    assert "put it after" not in terminal.refuses(f"peerd: {line}", "start", "train.py", *wrong)


def test_what_reads_an_option_is_not_named(terminal: Terminal) -> None:
    said = terminal.refuses("'xml' is not one of 'text'", "status", "--format", "xml")
    assert "Value error" not in said
    assert "Input should" not in terminal.refuses("Invalid value for '--peers': ", "simulate", "--peers", "1")


ONCE = "takes one value: give it once"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("simulate", "--mode", "gossip", "--mode=hardsync"), "--mode is given twice, and takes one value: put commas"),
        (("simulate", "--seed", "1", "--replay", "2"), f"--seed/--replay is given twice, and {ONCE}"),
        (("demo", "--peers", "2", "--peers", "3"), f"--peers is given twice, and {ONCE}"),
        (("reproduce", "E1", "--jobs=1", "--jobs=2"), f"--jobs is given twice, and {ONCE}"),
        (("mode", "set", "gossip", "--view", "3", "--view", "4"), f"--view is given twice, and {ONCE}"),
        (("start", "--name", "a", "train.py", "--name", "b"), f"--name is given twice, and {ONCE}"),
        (("start", "--join", "x.invalid", "--join", "y.invalid"), "cannot resolve x.invalid:7946: "),
        (("start", "nosuch.py", "--wait-for", "2", "--", "--wait-for", "3", "--wait-for", "4"), "no such script"),
    ],
)
def test_what_counts_once_is_not_given_twice(terminal: Terminal, arguments: tuple[str, ...], told: str) -> None:
    """Typer takes the last, and says nothing."""
    terminal.refuses(told, *arguments)


@pytest.mark.parametrize("option", ["--names", "--delay", "--kind", "--bin", "--mean", "--model"])
def test_a_scripts_option_that_looks_like_one_of_ours_is_not_refused(machine: Machine, option: str) -> None:
    assert machine.peerd(*START, "nosuch.py", option, "1").stderr.endswith("peerd: no such script: nosuch.py\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--nme", "a", "nosuch.py"), "peerd: --nme is"),  # before the script there is nobody else whose it could be
        (
            ("nosuch.py", "--nme", "a"),
            "peerd: --nme is no option of peerd start, which has --name; if it is one of nos",
        ),
        (
            ("nosuch.py", "--jion=10.0.0.1"),
            "peerd: --jion is no option of peerd start, which has --join; if it is one ",
        ),
        (("nosuch.py", "--", "--jion", "a"), "peerd: no such script"),
        (
            ("nosuch.py", "--mdoe", "a"),
            "peerd: --mdoe goes to nosuch.py; peerd start has --mode\npeerd: no such script",
        ),
        (
            ("nosuch.py", "--tranport=a"),
            "peerd: --tranport goes to nosuch.py; peerd start has --transport\npeerd: no such script",
        ),
        (("nosuch.py", "--model", "a", "--lr", "1"), "peerd: no such script"),
        (("nosuch.py", "--", "--nme", "a"), "peerd: no such script"),
    ],
)
def test_an_option_that_looks_like_one_of_ours_is_told(machine: Machine, arguments: tuple[str, ...], told: str) -> None:
    assert machine.peerd(*START, *arguments).stderr.startswith(told)


@pytest.mark.parametrize("task", ["fashion-mnist", "shakespeare"])
def test_a_demo_without_its_data_starts_no_node(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, task: str
) -> None:
    monkeypatch.setattr("peerd.cli.demo.LocalSwarm", None)
    terminal.refuses("or set PEERD_DATA to a", "demo", "--task", task, "--peers", "1", PEERD_DATA=str(tmp_path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('trigerr = "always"', "unknown key 'trigerr'; did you mean 'trigger'?"),
        ('view = "three"', "view must be a whole number, not 'three'"),
        ("join = 7", "join must be a list of strings, not 7"),
        ("view = = 3", "Invalid value (at line 1, column 8): view = = 3"),
        ('mode = "gossip"\n\nview 3 # "', "(at line 3, column 6): view 3 # "),
        ("view = 3\nview = 4", "Cannot overwrite a value"),
        (f"view = {'9' * 5000}", "config "),
        (f"view = 0x{'9' * 5000}", "config "),
        (f"view = {'9' * 4000}", "view: 99999999999999999999... is too large a number"),
        ("\ufeffview = 0", "view"),
        (f"checkpoint_every_s = {'9' * 400}", "checkpoint_every_s: 99999999999999999999... is too large a number"),
        (r'mode = "a\u0000.py:Mine"', r"--mode a\x00.py:Mine: there is no file a\x00.py"),
    ],
)
def test_wrong_configuration(machine: Machine, terminal: Terminal, text: str, expected: str) -> None:
    terminal.refuses(expected, *START, "--config", str(machine.script("peerd.toml", text)))


def test_no_descriptor_for_the_control_socket(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("peerd.daemon.control._bind", exhausted)
    terminal.refuses("Too many open files; let it open more files (ulimit -n)", *START)


@pytest.mark.parametrize("files", [6, 8, 10, 14])
def test_too_few_descriptors_for_a_node(machine: Machine, files: int) -> None:
    """Whatever it is that gets none."""
    limited = f'ulimit -n {files} && exec "$@"'
    command = [sys.executable, "-m", "peerd.cli.main", *START, "--", sys.executable, "-c", ""]
    ran = subprocess.run(
        ["sh", "-c", limited, "sh", *command], env=machine.environment, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode != 0
    assert "Traceback" not in ran.stderr
    assert "open more files (ulimit -n)" in ran.stderr.splitlines()[-1]


def test_a_working_folder_that_is_gone(terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for verb, folders in (("demo", {}), ("status", {"XDG_RUNTIME_DIR": "here"}), ("start", {"XDG_STATE_HOME": "here"})):
        terminal.refuses("gone: go to another one (cd)", verb, **folders)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((*START, "--config", "nosuch.toml"), "config nosuch.toml: No such file"),
        ((*START, "--trigger", "chnge:0.05"), "write one of: change:0.05"),
        ((*START, "--trigger", "change:nan"), "trigger 'change:nan' is not one"),
        ((*START, "--codec", "int9"), "did you mean 'int8'?"),
        (("start", "--bind", "127.0.0.1:99999"), "bind: '127.0.0.1:99999' has a port above 65535"),
        (("start", "--bind", "192.0.2.1:0"), "cannot listen on 192.0.2.1:0"),  # TEST-NET: nobody's address
        ((*START, "--join", "10.0.0.5:7x"), "join: '10.0.0.5:7x' is not HOST:PORT"),
        ((*START, "--join", "nosuch.invalid"), "cannot resolve nosuch.invalid:7946"),
        (("start", "--bind", "localhost:7949", "--join", "127.0.0.1:7949"), "join: 127.0.0.1:7949 is this node's own"),
        ((*START, "--name", "a/b"), "name: 'a/b' must be"),
        ((*START, "--view", "0"), "view: 0 must be at least 1"),
        ((*START, "--view", "1_0"), "--view: '1_0' is not a whole number"),
        ((*START, "--view", "\u0665"), r"--view: '\u0665' is not a whole number"),
        ((*START, "--wait-for", " 5"), "--wait-for: ' 5' is not a whole number"),
        ((*START, "--view", "9" * 5000), "--view: 99999999999999999999... is too large a number"),
        ((*START, "--view", "2.0"), "--view: '2.0' is not a whole number"),
        ((*START, "--mode", "diloco", "--outer-lr", "1_0"), "outer_lr: '1_0' is neither a number nor auto"),
        ((*START, "--trigger", "change:0.0_5"), "trigger 'change:0.0_5' is not one"),
        ((*START, "--trigger", "period:\u0665"), "is not one; write one of"),
        ((*START, "--mode", "elastic:pairwise:0.2_5"), "--mode elastic:pairwise:0.2_5: with an argument it is"),
        ((*START, "--mode", "allreduce", "--topology", "tree: 2"), "topology 'tree: 2': not one of"),
        (("start", "--bind", "127.0.0.1:\u0660"), "is not HOST:PORT"),
        (("demo", "--peers", "1_0"), "--peers: '1_0' is not a whole number"),
        (("demo", "--shard", "dirichlet:0_1"), "shard 'dirichlet' needs a number"),
        (("demo", "--kill", "1@0.5_0"), "--kill 1@0.5_0: wanted NODE@SHARE"),
        (("demo", "--mode", "hardsync", "--servers", "5"), "--servers 5: the swarm has 4 peers"),
        (("demo", "--mode", "allreduce", "--min-peers", "5"), "--min-peers 5: the swarm has 4 peers"),
        (
            ("demo", "--mode", "diloco", "--min-peers", "4", "--kill", "1@0.5"),
            "--min-peers 4: after --kill 1@0.5 there",
        ),
        (("simulate", "--lr", " 0.1"), "--lr: ' 0.1' is not a number"),
        (("simulate", "--minutes", "inf"), "--minutes: 'inf' is not a number"),
        (("simulate", "--seeds", "0..1_0"), "--seeds 0..1_0: wanted FIRST..LAST"),
        (("simulate", "--minutes", "1", "--compute", "fixed:1_0"), "--compute fixed:1_0: wanted fixed:SECONDS"),
        (("simulate", "--mode", "gossip;view=1_0,push-sum"), "view=1_0: not a value of view ('1_0' is not a whole"),
        ((*START, "nosuch.py"), "no such script: nosuch.py"),
        ((*START, "digit"), "no such command or task: digit"),
        ((*START, "--nosuch"), "--nosuch is neither an option"),
        (("demo", "--task", "digit"), "task 'digit' is not one of digits,"),
        (("demo", "--problem", "consensus"), "task 'consensus' is not one of digits,"),  # as simulate has it
        (("simulate", "--task", "digit"), "--problem digit: not one of members, "),  # as demo has it
        (("demo", "--shard", "nonsense"), "unknown shard 'nonsense': choose iid, sorted or dirichlet:A"),
        (("demo", "--codec", "int9"), "did you mean 'int8'?"),
        (("demo", "--trigger", "never"), "trigger 'never' is not one"),
        (("demo", "--every", "5"), "every: without effect in mode gossip, which takes codec, trigger, view"),
        ((*START, "--mode", "diloco", "--servers", "2"), "servers: without effect in mode diloco, which takes codec, "),
        (("demo", "--picture", "p.txt"), "the name must end in .png, .svg or .pdf"),
        ((*START, f"{TOO_LONG}.py"), "no such script: long"),
        ((*START, "--mode", f"{TOO_LONG}.py:Mine"), ".py:Mine: there is no file long"),
        (("demo", "--picture", f"{TOO_LONG}.png"), ".png: File name too long; choose another place"),
        (("export", f"{TOO_LONG}.safetensors"), "no peerd node runs here"),
        (("members",), "no peerd node runs here"),
        (("export", "model.txt"), "export model.txt: the file is written as safetensors; end its name in"),
        (("leave", "--name", "x"), "no node called 'x' runs here; start it with: peerd start train.py --name 'x'"),
    ],
)
def test_wrong_arguments(
    machine: Machine, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], expected: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(machine.path))
    terminal.refuses(expected, *arguments)
    assert not list(machine.path.glob("peerd-demo-*"))  # refused before anything is started


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("nosuch",), "No such command 'nosuch'; peerd -h lists"),
        (("strat",), "No such command 'strat'. Did you mean 'start'? peerd -h lists"),
        (("--", "--start"), "No such command '--start'. Did you mean 'start'?"),
        (("demo", "--nosuch"), "No such option: --nosuch; peerd demo -h lists"),
        (("status", "--name"), "Option '--name' requires an argument; peerd status -h lists"),
        (("demo", "--peers", "0"), "'--peers'"),
        (("demo", "extra"), "extra"),
        (("simulate", "4"), "(4). Did you mean --peers 4? peerd simulate -h lists"),
        (("demo", "3"), "(3). Did you mean --peers 3? peerd demo -h lists"),
        (("status", "--format", "yaml"), "'--format'"),
        (("mode", "set"), "peerd mode set -h lists"),
    ],
)
def test_what_no_verb_takes(terminal: Terminal, arguments: tuple[str, ...], expected: str) -> None:
    terminal.refuses(expected, *arguments)


@pytest.mark.parametrize("verb", [*VERBS, "mode set", "mode show"])
def test_every_verb_refuses_alike(terminal: Terminal, verb: str) -> None:
    terminal.refuses("--nosuch", *verb.split(), "--nosuch", "3")


@pytest.mark.parametrize("verb", [*VERBS, "mode set", "mode show"])
@pytest.mark.parametrize("width", [80, 120])
def test_help_ends_its_lines_where_the_terminal_does(verb: str, width: int) -> None:
    """A line that was broken in the source as well would be a short one in the middle."""
    shown = CliRunner(env={"COLUMNS": str(width)}).invoke(app, [*verb.split(), "--help"]).stdout
    assert "\b" not in shown
    assert max(map(len, shown.splitlines())) <= width
    prose = "\n".join(line.strip() for line in shown.partition("\u256d")[0].splitlines())
    paragraphs = [paragraph.splitlines() for paragraph in prose.strip().split("\n\n") if "  " not in paragraph]
    breaks = [pair for lines in paragraphs for pair in pairwise(lines)]
    assert not [(line, after) for line, after in breaks if len(f"{line} {after.split()[0]}") < width - 1]


def test_who_types_no_verb_gets_the_help_and_no_other_code() -> None:
    for words in ([], ["mode"]):
        shown = CliRunner().invoke(app, words)
        assert (shown.exit_code, "Usage: " in shown.stdout) == (1, True)


def test_a_runtime_folder_that_cannot_be_made(machine: Machine, terminal: Terminal) -> None:
    runtime = str(machine.script("a_file", ""))
    terminal.refuses("set XDG_RUNTIME_DIR to a folder", *START, XDG_RUNTIME_DIR=runtime)


def test_the_version_is_told_to_whoever_asks_as_other_programs_are_asked() -> None:
    asked = [CliRunner().invoke(app, [word]) for word in ("version", "--version")]
    assert [one.exit_code for one in asked] == [0, 0]
    assert asked[0].stdout == asked[1].stdout != ""


@pytest.mark.parametrize("arguments", [("version",), ("simulate", "--peers", "2", "--minutes", "0.1"), ("--help",)])
def test_an_answer_that_cannot_be_written_is_a_line(machine: Machine, arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "peerd.cli.main", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=machine.environment)
    assert (done.returncode, done.stderr.strip()) == (1, "peerd: cannot write the answer: No space left on device")


def test_what_a_terminal_has_no_characters_for_is_shown_by_others(machine: Machine, tmp_path: Path) -> None:
    """A table that is cut, or a trend, has some; and a path may be no UTF-8."""
    named = os.fsdecode(bytes(tmp_path) + b"/\xff.html")
    for arguments, locale in (
        (("simulate", "--help"), {"PYTHONIOENCODING": "ascii", "COLUMNS": "20"}),
        (("simulate", "--peers", "2", "--minutes", "0.1", "--report", named), {"PYTHONIOENCODING": "utf-8"}),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "peerd.cli.main", *arguments],
            capture_output=True, text=True, env={**machine.environment, **locale},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(r"\udcff.html" + "\n")


@pytest.mark.parametrize("after_s", [0.06, 0.1, 0.14, 0.2])
def test_an_interrupt_while_it_begins_is_a_line(machine: Machine, after_s: float) -> None:
    """Whenever it comes; an interpreter that has not yet come to our code ends as it likes."""
    code = "from peerd.cli import run; print(end='.', flush=True); run()"
    command = [sys.executable, "-c", code, "simulate", "--peers", "100", "--minutes", "1000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=machine.environment
    ) as begun:
        assert begun.stdout is not None
        assert begun.stdout.read(1) == "."
        time.sleep(after_s)
        begun.send_signal(signal.SIGINT)
        _, said = begun.communicate(timeout=PATIENCE_S)
    assert begun.returncode in (1, 130)
    assert "Traceback" not in said
    assert len(said.split("\n")) <= 3, said  # a line, and one that ends what stood there


IMPORTER = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED"]:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                os.abort()  # as where it passes through C++

sys.meta_path.insert(0, Finder())
from peerd.cli import run
run()
"""


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("numpy", ("simulate", "--minutes", "1")),
        ("trio", (*START, "--name", "n")),
        ("torch", ("doctor",)),
        ("torch", ("simulate", "--problem", "digits", "--steps", "1")),
        ("torch", ("demo", "--peers", "1")),
    ],
)
def test_an_interrupt_inside_an_import_is_a_line(machine: Machine, module: str, arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", IMPORTER, *arguments]
    environment = {**machine.environment, "INTERRUPTED": module}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr, done.stdout) == (130, "peerd: interrupted\n", "")


def test_a_start_that_is_refused_leaves_no_folder(machine: Machine, terminal: Terminal) -> None:
    a = machine.start("a")
    state, runtime = machine.path / "s", machine.path / "r"
    folders = {"XDG_STATE_HOME": str(state), "XDG_RUNTIME_DIR": str(runtime)}
    runtime.mkdir()
    port = a.address.rsplit(":")[1]
    terminal.refuses("port in use: 127.0.0.1:", "start", "--bind", f"127.0.0.1:{port}", **folders)
    terminal.refuses("no such script: nosuch.py", *START, "nosuch.py", **folders)
    own = {"PEERD_STATE_DIR": str(state / "b"), "XDG_RUNTIME_DIR": str(runtime)}
    another = machine.start("b", "--mode", "diloco", join=a, output=None, **own)
    assert another.end() == 1
    assert "its mode is 'gossip', ours 'diloco'" in another.log
    assert "leaving the swarm" not in another.log, "it never was in it"
    assert not state.exists()
    assert not list(runtime.iterdir())


def test_who_is_refused_is_no_member_that_left(machine: Machine) -> None:
    a = machine.start("a")
    machine.start("bare", join=a)
    refused = machine.path / "refused"
    b = machine.start("b", "--", "sh", "-c", f"until [ -e {refused} ]; do sleep .1; done; exit 3", join=a)
    a.sees(bare="alive", b="alive")
    refused.touch()
    assert b.end() == 1
    a.says("b (127.0.0.1:")
    a.eventually(lambda: "b" not in a.members())
    assert machine.peerd("leave", "--name", "bare").returncode == 0
    a.sees(bare="left")
    members = a.ask("status")["members"]
    assert (members["alive"], members["left"]) == (1, 1)
    machine.start("b", join=a)
    a.sees(b="alive")
    assert machine.peerd("forgive", "b", "--name", "a").stderr == "", "there is one of this name"


def test_who_was_refused_does_not_make_a_swarm_of_one_that_joins_another(machine: Machine) -> None:
    a = machine.start("a", machine.script("train.py", TRAIN))
    a.trains()
    go = machine.state / "go"
    waits = "import os, time\nwhile not os.path.exists(os.environ['GO']):\n    time.sleep(0.01)\n"
    b = machine.start("b", machine.script("late.py", waits + TRAIN), join=a, HIDDEN="8", GO=str(go))
    a.says("b (127.0.0.1:")  # a member, which is refused once its model is known
    go.touch()
    assert b.end() == 1
    a.eventually(lambda: list(a.members()) == ["a"])
    done = machine.peerd("join", machine.start("c").address, "--name", "a")
    assert done.returncode == 1
    assert "this node already trains a model of its own, and two swarms' models do not mix" in done.stderr


def test_a_fresh_start_that_is_refused_has_put_nothing_aside(machine: Machine) -> None:
    a = machine.start("a", train := machine.script("train.py", TRAIN))
    a.trains()
    b = machine.start("b", train, join=a)
    b.trains(beyond=5)
    state = machine.state / "peerd" / "b"
    eventually(lambda: (state / "members.json").exists())
    b.signal(signal.SIGKILL)
    b.end()
    checkpoints = sorted((state / "checkpoints").iterdir())
    known = (state / "members.json").read_text()
    again = machine.start("b", train, "--fresh", join=a, HIDDEN="8")
    assert again.end() == 1
    assert "refused this node: its model is " in again.log
    again.says("nothing has begun anew: what was put aside is back")
    assert sorted((state / "checkpoints").iterdir()) == checkpoints
    assert (state / "members.json").read_text() == known
    taken = machine.start("b", train, "--fresh", join=a)
    taken.trains()
    assert (state / "checkpoints-1").exists()


def test_wrong_places(machine: Machine, terminal: Terminal) -> None:
    a = machine.start("a")
    port = a.address.rsplit(":")[1]
    terminal.refuses("port in use: 127.0.0.1:", "start", "--bind", f"127.0.0.1:{port}")
    token = machine.peerd("token", "--name", "a").stdout.strip()
    taken = "token: the member that made it listens at this node's own address, 127.0.0.1:"
    terminal.refuses(taken, "start", "--bind", f"127.0.0.1:{port}", "--token", token)
    terminal.refuses("a node already runs with the state folder", *START, "--name", "a")
    elsewhere = str(machine.path / "elsewhere")
    terminal.refuses("a node called 'a' runs here already", *START, "--name", "a", XDG_STATE_HOME=elsewhere)
    terminal.refuses("cannot join 127.0.0.1:1", "join", "--name", "a", "127.0.0.1:1")
    terminal.refuses("join: 'x:y:z' is not HOST:PORT", "join", "--name", "a", "x:y:z")
    terminal.refuses("this node has no model yet", "export", "--name", "a", "m.safetensors")
    file = str(machine.script("file", ""))
    terminal.refuses("Not a directory; choose another with state_dir", *START, XDG_STATE_HOME=file)
    terminal.refuses(".sock: Not a directory", *START, XDG_RUNTIME_DIR=file)
    too_long = "AF_UNIX path too long; set XDG_RUNTIME_DIR to a shorter folder"
    terminal.refuses(too_long, *START, XDG_RUNTIME_DIR=str(machine.path / ("x" * 100)))
    if os.getuid() == 0:
        foreign = machine.path / "foreign"
        (foreign / "peerd").mkdir(parents=True)
        os.chown(foreign / "peerd", 65534, 65534)
        terminal.refuses("belongs to another user", *START, XDG_RUNTIME_DIR=str(foreign))
    assert a.members() == {"a": "alive"}


def test_a_script_that_dies_at_import(machine: Machine) -> None:
    node = machine.start("n", machine.script("dies.py", "print('mine')\nimport nosuchmodule\n"))
    assert node.end() == 1
    lines = node.log.splitlines()
    assert "mine" in lines
    assert "ModuleNotFoundError: No module named 'nosuchmodule'" in lines
    assert lines[-1].startswith("peerd: dies.py exited with code 1 before peerd.attach was done")
    assert node.log.count("Traceback") == 1  # the script's own
    assert not node.socket.exists()


# ------------------------------------------------------------------------------------------- a swarm, and who harms it


def test_a_swarm_is_unharmed(machine: Machine) -> None:
    script = machine.script("train.py", TRAIN)
    a = machine.start("a", "--trigger", "period:5", script)
    a.trains()

    # another swarm, and another model: refused with the field that differs
    other_swarm = machine.start("s", "--swarm", "other", join=a)
    assert other_swarm.end() == 1
    assert other_swarm.log.splitlines()[-1] == (
        f"peerd: {a.address} refused this node: its swarm is 'peerd', ours 'other'; "
        "give all nodes the same --swarm, or join a node of your own swarm"
    )
    other_model = machine.start("m", script, join=a, HIDDEN="17")
    sick = machine.start("sick", "--trigger", "period:5", script, join=a, NAN="1", SEED="1")
    assert other_model.end() == 1
    assert other_model.log.splitlines()[-1].endswith(  # either of the two refuses it
        " refused this node: its model is '0.weight float32 16x4', ours '0.weight float32 17x4'; "
        "build the model with the same sizes and types on all nodes"
    )
    for refused in (other_swarm, other_model):
        assert not (machine.state / "peerd" / refused.name).exists()

    # a NaN every 50 steps: rolled back, and never sent on
    sick.says("the model is not finite", times=2)
    assert sick.ask("status")["trainer"]["rollbacks"] >= 2
    assert_well(a, sick)

    # garbage on every port
    for garbage in garbages():
        throw(a, garbage)
    assert_well(a, sick)
    trio.run(bomb, a, machine.state / "peerd" / ".authority")
    a.eventually(lambda: a.ask("status")["counts"].get("unheard", 0) >= 2 * DELTAS)  # who is no member has no say
    assert_well(a, sick)
    throw_locally(a)
    assert_well(a, sick)
    assert "Traceback" not in machine.logs()
    for node in (a, sick):
        node.signal(signal.SIGINT)
        assert node.end() == 0


def assert_well(*nodes: Node) -> None:
    """They train and exchange, their models are finite, and they see each other."""
    for node in nodes:
        node.sees(**{other.name: "alive" for other in nodes})
        before = node.ask("status")
        node.eventually(lambda node=node, before=before: node.ask("status")["exchanges"] > before["exchanges"])  # type: ignore[misc]
        node.trains(beyond=before["trainer"]["step"])
        assert node.ask("status")["trainer"]["loss"] is not None
        assert node.ask("status")["consensus_distance"] < 1.0


def frame(kind: int, header: bytes = b"", payload_length: int = 0, header_length: int | None = None) -> bytes:
    """A frame with a right checksum, whatever else is wrong."""
    length = len(header) if header_length is None else header_length
    fixed = struct.pack("<4sBBHIIQ4x", b"PEER", 1, kind, 0, length, payload_length, 0)
    return fixed + struct.pack("<I", zlib.crc32(header, zlib.crc32(fixed))) + header


def garbages() -> list[bytes]:
    return [
        b"",
        b"\0",
        os.urandom(5000),
        b"GET /status HTTP/1.1\r\nHost: node\r\nUser-Agent: a-scanner\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(508),  # a TLS ClientHello
        frame(Hello.KIND, header_length=0xFFFFFFFF),
        frame(Hello.KIND, header_length=65536),  # announced, never sent
        frame(Hello.KIND, b"\xdf\xff\xff\xff\xff"),  # a map of 4 billion
        frame(Hello.KIND, b"\x91" * 60000),  # lists in lists
        frame(255, payload_length=0xFFFFFFFF),
        frame(ModelSnapshot.KIND, msgpack.packb([[1 << 62], 0, "float32"])),
        frame(ModelSnapshot.KIND, msgpack.packb([[4 << 20] * 10000, 0, "float32"])),
    ]


def throw(node: Node, garbage: bytes) -> None:
    host, port = node.address.split(":")
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        connection.sendall(garbage)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.sendto(garbage, (host, int(port)))


def throw_locally(node: Node) -> None:
    """At the control socket, as a broken program of the same user would."""

    def packed(*messages: object) -> bytes:
        bodies = [msgpack.packb(message) for message in messages]
        return b"".join(struct.pack("<I", len(body)) + body for body in bodies)

    attach = {"kind": "attach", "pid": 1, "signature": "x", "tensors": ["w float32 1"], "parameters": 1, "total": 1}
    attach |= {"variances": [], "ends": [], "states": 0, "gradients": 0}
    for garbage in (
        b"\xff" * 100,
        b"GET / HTTP/1.1\r\n\r\n",
        packed([1]),
        packed({"kind": ["status"]}),
        packed({"kind": "nosuch"}),
        packed({"kind": "join", "address": "x:y:z"}),
        packed({"kind": "attach"}),
        packed(attach),
    ):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE_S)
            connection.connect(str(node.socket))
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass


DELTAS = 8


async def bomb(node: Node, users: Path) -> None:
    """As a node of the user's, but no member: chunks that swell to 2 MiB where 16 bytes are due, or make no sense."""
    host, port = node.address.split(":")
    swollen = bytes([ZSTD]) + zstandard.ZstdCompressor(level=19).compress(bytes(2 << 20))
    delta = Delta(
        7, 1, "sign", 0.1, wants_answer=True, finishing=False, limits=b"", samples=0.0, steps_s=0.0, chunks=(swollen,)
    )
    key, now = NodeKey.generate(), wall_clock.now()
    mine = authority_folder.at(users, now)  # it could be a member, and is none
    trust = Trust(key, mine.issue_own(key, now), [mine.certificate])
    hello = Hello(PROTOCOL, "peerd", "", key.id, "stranger", 1, "127.0.0.1", 9, "gossip", "", ())
    deltas = (
        delta,
        replace(delta, codec="float32"),
        replace(delta, codec="no-such-codec"),
        replace(delta, chunks=(b"",)),
        replace(delta, chunks=(swollen[:1000],)),
        replace(delta, chunks=()),
        replace(delta, gain=-1e30),
        replace(delta, seq=(1 << 53) - 1),
    )
    assert len(deltas) == DELTAS
    for message in (*deltas, ModelSnapshot((1 << 53) - 1, "float32", (swollen,))):
        async with trio.open_nursery() as nursery:
            link = await TcpTransport(nursery, credentials=trust).dial((host, int(port)))
            await greet(link, hello)
            await offer(link, LinkOpen(7))
            await offer(link, message)
            with (
                suppress(ConnectionLost),
                trio.move_on_after(0.3),
            ):  # it may hang up; it never answers on this connection
                await link.receive()
            await link.aclose()
            nursery.cancel_scope.cancel()


async def offer(link: Connection, message: Message) -> None:
    with suppress(ConnectionLost):
        await link.send(message)
