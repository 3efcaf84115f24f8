"""What fuzzing has found stays found: the corpus is replayed, and each target is fed a little that is new."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from decoders import LocalMessages
from fuzz import CORPUS, TARGETS, Run
from simulate_fuzz import came_to, command
from target import Drawn, Target, episode, keep, read, replay, shrunk

from peerd.protocol.trainer import FROM_DAEMON, FROM_TRAINER, Said, decoded

FILES = sorted(path for path in CORPUS.iterdir() if path.name.partition("-")[0] in TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_what_was_found_once_is_mended(name: str) -> None:
    for path in FILES:
        if path.name.startswith(f"{name}-"):
            replay(TARGETS[name], read(path.read_bytes()))


@pytest.mark.parametrize("name", TARGETS)
def test_an_episode_of_each_target(name: str, tmp_path: Path) -> None:
    run = Run([TARGETS[name]], "test", tmp_path)
    run.one(TARGETS[name])
    assert run.items == TARGETS[name].items
    assert not run.failures


@pytest.mark.parametrize("known", [FROM_TRAINER, FROM_DAEMON], ids=["trainer", "daemon"])
def test_all_that_trainer_and_daemon_say_is_altered_from_what_is_understood(known: dict[str, type[Said]]) -> None:
    """Else nothing behind its decoder is ever reached."""
    for kind in known:
        assert any(decoded(said, known) for said in LocalMessages.SAID if said["kind"] == kind), kind


def test_the_same_seed_draws_the_same_items() -> None:
    """So a failure is found again."""
    drawn: list[dict[str, list[bytes]]] = [{name: [] for name in TARGETS} for _ in range(2)]
    for each in drawn:
        for name, target in TARGETS.items():
            episode(replace(target, items=50), "again", each[name])
    assert {name for name in TARGETS if drawn[0][name] != drawn[1][name]} == set()


@pytest.mark.parametrize("seed", range(4))
def test_a_simulated_run_that_was_drawn_holds(seed: int) -> None:
    words = command(random.Random(seed))
    assert words == command(random.Random(seed))
    assert came_to(words) == ("held", "")


def test_an_error_in_a_simulated_run_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("peerd.cli.simulate.run_scenario", breaks)
    verdict, said = came_to(["--peers", "3", "--steps", "1"])
    assert verdict == "wrong"
    assert "ValueError: a bug" in said
    assert came_to(["--peers", "3", "--mode", "hardsync", "--view", "2"])[0] == "refused"


class Touchy(Drawn):
    """Breaks at a second "b" after an "a"."""

    def __init__(self) -> None:
        self._taken = b""

    def draw(self, rng: object) -> bytes:
        raise AssertionError

    def take(self, item: bytes) -> None:
        self._taken += item
        if self._taken.count(b"b") == 2 and b"a" in self._taken:
            raise RuntimeError


def test_a_failure_is_cut_down_and_kept(tmp_path: Path) -> None:
    target = Target("touchy", Touchy, 1, 1.0)
    items = [b"x", b"b", b"x", b"a", b"y", b"b", b"z"]
    try:
        replay(target, items)
    except RuntimeError as error:
        few = shrunk(target, items, error)
    assert few == [b"b", b"a", b"b"]
    assert read(keep(target, few, tmp_path).read_bytes()) == few
