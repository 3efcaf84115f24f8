"""A mode from a file outside the package, with a message and an option of its own, is as good as any (CONTRIBUTING)."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_modes as contract
import trio

from peerd.daemon import control
from peerd.daemon.offences import Offences
from peerd.settings import load, planned
from peerd.training.modes import MODES, parse_mode
from peerd.training.modes.own_mode import adopted, as_told
from peerd.transport.errors import UserError
from peerd.transport.messages import MESSAGES

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
KIND = 200


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page shows, in a file of its own."""
    example, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path_factory.mktemp("own") / "bounded.py"
    path.write_text(example)
    return path


@pytest.fixture(scope="module")
def row(file: Path) -> Iterator[contract.Row]:
    """The mode in the table, while these tests run."""
    yield adopted(f"{file}:Bounded:50"), {}
    del MODES["bounded"], MESSAGES[KIND]
    del sys.modules[f"peerd_mode_{file.resolve()}"]


# each test of the contract, which pytest finds here by its name, and runs for the row above
CONTRACT = {
    name: test
    for name, test in vars(contract).items()
    if name.startswith("test_") and "row" in inspect.signature(test).parameters
}
assert CONTRACT
globals().update(CONTRACT)


def test_it_leaves_a_straggler_alone_and_its_message_comes(row: contract.Row) -> None:
    swarm = contract.swarm_of((adopted(row[0]).replace("50", "20"), {}), "ab")
    for _ in range(60):
        swarm.step("a", contract.mark("a"))
        swarm.settle()
        if swarm.nodes["b"].steps < 5:
            swarm.step("b", contract.mark("b"))
            swarm.settle()
    swarm.step("b", contract.mark("b"))
    assert swarm.nodes["b"].core._made["a"] >= 50
    swarm.nodes["a"].core._made["b"] = 1
    swarm.train(4)
    assert swarm.nodes["a"].core.counts["left_alone"] > 0


def test_its_bugs_are_its_own(file: Path, row: contract.Row, caplog: pytest.LogCaptureFixture) -> None:
    for name, told in ((str(file), f"a bug in {file}"), ("elsewhere.py", "a bug in peerd, please report it")):
        try:
            eval(compile("1 / 0", name, "eval"))  # noqa: S307
        except ZeroDivisionError as error:
            Offences().unforeseen(error, "a step could not be handled")
        assert caplog.messages[-1] == f"a step could not be handled: {told}; this node goes on"


def test_settings_and_processes_call_it_by_its_name(file: Path, row: contract.Row) -> None:
    assert row[0] == "bounded:50"
    settings = load({"mode": f"{file}:Bounded:7"}, {}, None)
    assert settings.mode == "bounded:7"
    assert settings.mode_settings.codec == "auto"
    assert as_told("bounded:7") == f"{file}:Bounded:7"
    assert as_told("gossip") == "gossip"
    with pytest.raises(UserError, match="every: without effect in mode bounded"):
        load({"mode": f"{file}:Bounded", "every": 5}, {}, None)
    with pytest.raises(UserError, match=r"with an argument it is .*bounded:STEPS"):
        parse_mode("bounded:x")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nowhere.py:Bounded", "there is no file nowhere.py"),
        ("{file}:Other", "has no class 'Other' that is a ModeClass"),
        ("{broken}:Bounded", "broken.py fails with ZeroDivisionError: division by zero"),
        ("{taken}:Mine", "there is a mode 'gossip' already; give it another NAME"),
        ("{taken}:Nameless", "Nameless needs a NAME"),
        ("{taken}:Blank", "Blank needs a NAME"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(file: Path, row: contract.Row, tmp_path: Path, text: str, says: str) -> None:
    broken, taken = tmp_path / "broken.py", tmp_path / "taken.py"
    broken.write_text("1 / 0")
    taken.write_text(
        "from peerd.training.modes.gossip import Gossip\nclass Mine(Gossip):\n    NAME = 'gossip'\n"
        "from peerd.training.modes import ModeClass\nclass Nameless(ModeClass):\n    TAKES = ()\n"
        "class Blank(ModeClass):\n    NAME, TAKES = 'a b', ()\n"
    )
    with pytest.raises(UserError, match=says) as refused:
        adopted(text.format(file=file, broken=broken, taken=taken))
    assert "\n" not in str(refused.value)


RAISES = """
from peerd.training.modes.gossip import Gossip

class Odd(Gossip):
    NAME, ARGUMENT = "odd", "N"

    @classmethod
    def of(cls, argument):
        return super().of("")

    @classmethod
    def check(cls, argument, told):
        if argument != "1":
            {}[argument]
"""


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A mode whose own check fails, and what is to be said of it."""
    file = tmp_path / "odd.py"
    file.write_text(RAISES)
    yield f"{file}:Odd", f"{file}, line 14, fails with KeyError: '2'"
    MODES.pop("odd", None)


@pytest.mark.parametrize("verb", [["start", "--bind", "127.0.0.1:0"], ["simulate", "--peers", "2"]])
def test_what_its_check_raises_is_one_line_that_says_where(odd: tuple[str, str], verb: list[str]) -> None:
    command = [sys.executable, "-m", "peerd.cli.main", *verb, "--mode", f"{odd[0]}:2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, f"peerd: {odd[1]}\n")


@pytest.mark.trio
async def test_what_its_check_raises_is_what_a_verb_answers(
    odd: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    started = load({"mode": f"{odd[0]}:1"}, {}, None)

    async def mode_set(_: dict[str, Any]) -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        return {"mode": planned(started, "odd:2").mode}

    assert await control._answer({"mode_set": mode_set}, {"kind": "mode_set"}) == {"error": odd[1]}
    assert not caplog.records


def test_the_simulator_runs_it_and_says_how_to_run_it_again(file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "peerd.cli.main", "simulate", "--peers", "4", "--minutes", "1", "--format", "json"]
    done = subprocess.run(
        [*command, "--mode", "bounded.py:Bounded:50"], cwd=file.parent, capture_output=True, text=True, check=True
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["violations"] == []
    assert f"{file}:Bounded:50" in result["replay"]


@pytest.mark.one_run_in(3)
def test_the_demo_runs_it(file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "peerd.cli.main", "demo", "--peers", "2", "--steps", "60", "--format", "json"]
    done = subprocess.run(
        [*command, "--mode", f"{file}:Bounded:50", "--picture", str(tmp_path / "run.png")],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failures"] == []
    assert result["exchanges"] > 0
