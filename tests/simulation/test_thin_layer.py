"""The real daemon, several times in one process and on virtual time: whole lives of a swarm, the same every time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from random import Random

import numpy as np
import pytest
import trio
from thin import Event, Model, Swarm, simulate, targets

from peerd.node.donors import ASK_SOON_S
from peerd.training.flush import FLUSH_TOLERANCE
from peerd.transport.messages import State

DETECTION_S = 12.0
ALIVE = State.ALIVE


def distance(one: Model, other: Model) -> float:
    """Relative."""
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def check_that_they_agree(models: dict[str, Model]) -> None:
    """All models are one, and it is what their trainers together would make of it."""
    for one, other in combinations(models, 2):
        assert distance(models[one], models[other]) < FLUSH_TOLERANCE
        assert distance(targets(one), targets(other)) > 50 * FLUSH_TOLERANCE
    together = np.mean([targets(name) for name in models], axis=0)
    for model in models.values():
        assert distance(model, together) < 0.05


@pytest.mark.parametrize(("seed", "names"), [(1, "abc"), (2, "abcde")])
def test_a_swarm_joins_through_one_node_trains_and_agrees(seed: int, names: str) -> None:
    async def scenario(swarm: Swarm) -> dict[str, Model]:
        await swarm.start(names, steps=200, wait_for=len(names))
        await swarm.agree(**dict.fromkeys(names, ALIVE))
        models = await swarm.finish()
        for node in swarm.nodes.values():
            assert node.trainer.step == 200
            counts = await node.counts()
            assert counts["exchanges"] > 20
            looks = sum(count for name, count in counts.items() if name.startswith("trigger_"))
            assert looks < 150, "most steps are not worth a look: they bring no copy"
            assert counts["datagrams_malformed"] == 0
        assert sum([(await node.counts())["snapshots_given"] for node in swarm.nodes.values()]) == len(names) - 1
        return models

    check_that_they_agree(simulate(seed, scenario))


def test_how_far_the_models_are_apart_is_known_once_two_have_exchanged() -> None:
    async def scenario(swarm: Swarm) -> list[float | None]:
        async def told() -> float | None:
            found: float | None = (await swarm.nodes["a"].ask("status"))["consensus_distance"]
            return found

        await swarm.start("a", steps=200, wait_for=2)
        seen = [await told()]
        await trio.sleep(10)
        seen.append(await told())
        await swarm.start("b", steps=200, wait_for=2)
        await swarm.finish()
        return [*seen, await told()]

    waiting, still_waiting, measured = simulate(1, scenario)
    assert (waiting, still_waiting) == (None, None)
    assert measured is not None
    assert 0 < measured < 1


@pytest.mark.parametrize("seed", [1, 2])
def test_a_crashed_node_is_noticed_and_comes_back_to_the_swarms_model(seed: int) -> None:
    async def scenario(swarm: Swarm) -> dict[str, Model]:
        everyone = dict.fromkeys("abcd", ALIVE)
        await swarm.start("abcd", steps=240)
        await swarm.agree(**everyone)
        await trio.sleep(10)
        await swarm.nodes["c"].crash()
        crashed_at, before = trio.current_time(), await swarm.nodes["a"].counts()
        await swarm.agree(**{**everyone, "c": State.FAILED})
        assert trio.current_time() - crashed_at < DETECTION_S

        await trio.sleep(10)
        after, reached = await swarm.nodes["a"].counts(), swarm.nodes["a"].trainer.step
        assert after["exchanges"] > before["exchanges"] + 5, "the others go on"
        assert after["failures"] == 1, "and suspect nobody else"
        await swarm.nodes["c"].start(steps=240)
        await swarm.agree(**everyone)
        await swarm.eventually(lambda: swarm.nodes["c"].trainer.step > reached)
        assert swarm.nodes["c"].trainer.first_step >= reached - 1
        return await swarm.finish()

    check_that_they_agree(simulate(seed, scenario))


def test_a_death_and_a_return_are_a_line_in_each_others_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.start("abcd", steps=400)
        await swarm.agree(**dict.fromkeys("abcd", ALIVE))
        await trio.sleep(5)
        await swarm.nodes["c"].crash()
        await swarm.agree(a=ALIVE, b=ALIVE, c=State.FAILED, d=ALIVE)
        await trio.sleep(20)
        await swarm.nodes["c"].start(steps=400)
        await swarm.agree(**dict.fromkeys("abcd", ALIVE))
        await trio.sleep(5)
        await swarm.nodes["c"].crash()
        await swarm.nodes["c"].start(steps=400)  # before anybody misses it
        await trio.sleep(20)
        await swarm.nodes["b"].leave()
        await swarm.eventually(
            lambda: all(node.sees()["b"] == State.LEFT for node in swarm.nodes.values() if node.runs)
        )

    caplog.set_level("INFO")
    simulate(1, scenario)
    told = [
        record.message
        for record in caplog.records
        if "(10.0.0.99:7946)" in record.message or "(10.0.0.98:7946)" in record.message
    ]
    joined, told = [line for line in told if "joined" in line], [line for line in told if "joined" not in line]
    assert sorted(joined) == ["b (10.0.0.98:7946) joined"] + ["c (10.0.0.99:7946) joined"] * 2  # by who was there
    died, came, again, left = told[:3], told[3:6], told[6:9], told[9:]
    heard = [
        re.fullmatch(r"c \(10\.0\.0\.99:7946\) failed: this node last heard from it (\d+) s ago", line) for line in died
    ]
    assert all(each is not None and int(each[1]) <= 2 * DETECTION_S for each in heard), told
    assert came == ["c (10.0.0.99:7946) is back"] * 3
    assert again == ["c (10.0.0.99:7946) is back: it ended without a word, and was started again"] * 3
    assert left == ["b (10.0.0.98:7946) left"] * 3


def test_a_restart_that_nobody_noticed_starts_from_the_swarms_model_too() -> None:
    async def scenario(swarm: Swarm) -> dict[str, Model]:
        await swarm.start("abc", steps=160)
        await trio.sleep(10)
        await swarm.nodes["b"].crash()
        await trio.sleep(0.5)
        await swarm.nodes["b"].start(steps=160)
        await swarm.eventually(lambda: swarm.nodes["b"].trainer.first_step > 30)
        models = await swarm.finish()
        assert all(node.sees() == dict.fromkeys("abc", ALIVE) for node in swarm.nodes.values())
        assert not any("FAILED" in what for _, _, what in swarm.trace)
        return models

    check_that_they_agree(simulate(3, scenario))


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", range(4))
def test_who_comes_is_given_the_model_at_the_first_request(seed: int) -> None:
    """Though the news of it has not reached the donor yet, or the donor still dials its former life."""

    async def scenario(swarm: Swarm) -> None:
        async def comes(name: str) -> None:
            came_at = trio.current_time()
            await swarm.eventually(lambda: swarm.nodes[name].trainer.first_step > 0)
            assert trio.current_time() - came_at < ASK_SOON_S

        await swarm.start("abc", steps=4000)
        await trio.sleep(10)
        await swarm.start("d", steps=4000)
        await comes("d")
        await trio.sleep(2)  # so that it is a partner, which the others dial
        for name in "dbd":
            await swarm.nodes[name].crash()
            await swarm.nodes[name].start(steps=4000)
            await comes(name)
            await trio.sleep(10)

    simulate(seed, scenario)


def test_trio_can_still_be_made_deterministic() -> None:
    for name, kind in (("_ALLOW_DETERMINISTIC_SCHEDULING", bool), ("_r", Random)):
        told = f"trio {trio.__version__} has no private trio._core._run.{name} any more: thin.simulate() relies on it"
        assert isinstance(getattr(trio._core._run, name, None), kind), f"{told}, so pin an older trio"


async def canary(swarm: Swarm) -> list[Event]:
    """Everything at once, and briefly: arrivals, training, a crash and a flush."""
    await swarm.start("abc", steps=40)
    await trio.sleep(3)
    await swarm.nodes["b"].crash()
    await trio.sleep(2)
    await swarm.nodes["b"].start(steps=40)
    await swarm.finish()
    return swarm.trace


def test_a_seed_decides_the_whole_run() -> None:
    trace = simulate(1, canary)
    assert {what.split()[0] for _, _, what in trace} == {"a", "b", "c", "exchange"}
    assert simulate(1, canary) == trace
    others = [simulate(seed, canary) for seed in (2, 3)]
    assert trace not in others, "nothing but the schedule is drawn from the seed"
    assert others[0] != others[1]


def test_a_seed_decides_the_run_of_another_process() -> None:
    program = "import json; from test_thin_layer import *; print(json.dumps(simulate(1, canary)))"
    traces = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        ran = subprocess.run(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parent, env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        traces.append([tuple(event) for event in json.loads(ran.stdout)])
    assert traces == [simulate(1, canary)] * 2
