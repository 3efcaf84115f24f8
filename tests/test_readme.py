"""Do the pages say what is there? Files and commands on them exist; settings, modes and codecs have a row each."""

from __future__ import annotations

import io
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from peerd.carriers import CARRIERS
from peerd.cli import main
from peerd.daemon.node import PROTOCOL
from peerd.settings import Settings
from peerd.simulation.scenario import Scenario, simulate
from peerd.simulation.world import END, Kind
from peerd.training.codecs import CODECS
from peerd.training.modes import MODES, ModeSettings, heeds
from peerd.training.trigger import TRIGGERS

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "CHANGELOG")),
    *sorted(ROOT.glob("docs/*.md")),
]
RESULTS = [ROOT / "SECURITY.md", *sorted(ROOT.glob("benchmarks/**/*.md"))]
FOLDERS = ("peerd", "training", "transport", "cli", "tests", "benchmarks", "docs")
MADE_UP = ("NAME", "*")  # in a path that is a pattern
DEFAULTS = {  # where the table says it in other words
    "name": "the host's name", "advertise": "where it is bound", "relay": "none", "relay_ports": "none",
    "join": "none", "run": "none", "token": "none", "budget": "none", "rdma_subnets": "any",
    "checkpoint_every_s": "60", "state_dir": "$XDG_STATE_HOME/peerd/NAME",
}  # fmt: skip


def rows(page: Path, heading: str) -> dict[str, list[str]]:
    """The table whose first cell is `heading`: further cells by each row's first, without backquotes."""
    lines = page.read_text().splitlines()
    (start,) = [at for at, line in enumerate(lines) if line.startswith(f"| {heading} |")]
    found = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        first, *rest = [cell.strip() for cell in line.strip("|").split(" | ")]
        found[first.strip("` ")] = [cell.strip("` ") for cell in rest]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(rf"(?<![\w./:-])((?:{'|'.join(FOLDERS)})/[\w./*-]*)", page.read_text())
    missing = {path for path in named if not any(mark in path for mark in MADE_UP) and not (ROOT / path).exists()}
    assert not missing


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if path.startswith("https:"):
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, target


def test_every_setting_has_a_row_with_its_default() -> None:
    told = {key: cells[0] for key, cells in rows(ROOT / "docs/settings.md", "key").items()}
    defaults = {item.name: getattr(Settings(), item.name) for item in fields(Settings)}
    shown = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in defaults.items()}
    assert told == shown | DEFAULTS


def test_every_mode_has_a_row_and_the_settings_that_it_takes() -> None:
    shown = {mode.partition(":")[0].split("[")[0] for mode in rows(ROOT / "docs/modes.md", "mode")}
    assert shown == set(MODES)
    taken: dict[str, set[str]] = {}
    for modes, (settings,) in rows(ROOT / "docs/settings.md", "modes").items():
        for mode in modes.replace("`", "").split(", "):
            taken[mode.partition(":")[0]] = set(settings.replace("`", "").split(", "))
    told = [item.name for item in fields(ModeSettings) if item.name != "robust"]  # which has its row above, for all
    assert taken == {mode: {setting for setting in told if heeds(mode, setting)} for mode in MODES}


def test_every_codec_trigger_and_transport_has_a_row() -> None:
    assert set(rows(ROOT / "docs/settings.md", "transport")) == set(CARRIERS)
    assert set(rows(ROOT / "docs/settings.md", "codec")) == set(CODECS)
    assert {trigger.partition(":")[0] for trigger in rows(ROOT / "docs/settings.md", "trigger")} == set(TRIGGERS)


def test_the_changelog_has_the_protocol_and_every_verb_codec_and_mode() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert f"speak the same protocol, {PROTOCOL} now" in text
    words = set(re.findall(r"[\w.-]+", text))
    assert {*main.VERBS, *CODECS, *MODES} <= words


def test_every_event_of_a_trace_has_a_row_with_its_numbers() -> None:
    shown = rows(ROOT / "docs/simulation.md", "event")
    assert list(shown) == [kind.name.lower() for kind in Kind]
    trace = io.StringIO()
    simulate(Scenario(peers=8, steps=150, faults="all", fault_every=10.0, join_over=2.0), trace)
    found = [json.loads(line) for line in trace.getvalue().splitlines()]
    last = found.pop()
    page = (ROOT / "docs/simulation.md").read_text()
    assert last["event"] == END
    assert all(f"`{key}`" in page for key in last)
    for row in found:
        told = {key for key, cell in zip(("node", "other", "value"), shown[row["event"]], strict=True) if cell != "-"}
        numbers = row.keys() - {"t", "event"}
        assert numbers <= told, row
        assert "other" not in told - numbers, row
    assert {row["event"] for row in found} == set(shown)


def commands() -> list[str]:
    """Those of peerd in text and in blocks of code, a line each, without the comment behind it."""
    found = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        blocks = [block for _, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]
        lines = [line for block in blocks for line in block.splitlines()]
        found += [match[1] for line in lines if (match := re.match(r"(?:(?:node \d|any) +)?peerd ([^#]*)", line))]
        found += re.findall(r"`peerd ([a-z][^`\n]*)`", text)
    return [command.strip() for command in found]


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_commands_and_their_flags_exist(command: str) -> None:
    known: Any = typer.main.get_command(main.app)
    words = command.split(" -- ")[0].split()
    while words and hasattr(known, "get_command"):
        known = known.get_command(None, words.pop(0))
        assert known is not None, "no such verb"
    flags = {flag for parameter in known.params for flag in parameter.opts}
    assert not {word for word in words if word.startswith("--") and word not in {*flags, "--"}}
