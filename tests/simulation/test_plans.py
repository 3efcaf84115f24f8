"""A swarm changes its mode while it trains: real daemons on virtual time, killed and restarted in the middle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trio
from test_thin_layer import ALIVE, check_that_they_agree, distance
from thin import Model, Swarm, simulate

from peerd.daemon import known_members
from peerd.daemon.mode_runner import WIND_UP_MIN_S
from peerd.daemon.plan_follower import ONCE_MAX_S
from peerd.training.modes import MODES, in_full
from peerd.training.modes.average import Average
from peerd.training.rounds.leader import PATIENCE_FIRST_S
from peerd.transport.errors import UserError
from peerd.transport.messages import State

CONSERVING = (
    "allreduce", "gossip", "diloco every=3", "allreduce overlap=hpsgd every=3",
    "allreduce codec=top_k every=2 overlap=delayed", "allreduce overlap=delayed",
    "allreduce overlap=blocking codec=sign", "gossip codec=sign",
)  # fmt: skip
SLOW = ("diloco", "noloco")  # 50 steps before they say anything


async def under(swarm: Swarm, number: int) -> None:
    await swarm.eventually(
        lambda: all((node.plan.number, node.plan.done) == (number, True) for node in swarm.nodes.values() if node.runs)
    )


async def steps(swarm: Swarm, count: int) -> None:
    """So many more of every node."""
    wanted = {node.name: node.trainer.step + count for node in swarm.nodes.values() if node.runs}
    await swarm.eventually(lambda: all(swarm.nodes[name].trainer.step >= step for name, step in wanted.items()))


async def mean_at_rest(swarm: Swarm) -> Model:
    """Of all models, once nothing is under way."""
    for node in swarm.nodes.values():
        node.trainer.rests = True
    await trio.sleep(3)
    # at one moment, as `model_values` would not: it waits for a step, and a link that was silent long enough exchanges
    models = [(await node.daemon.model._runner.values())[0] for node in swarm.nodes.values()]
    for node in swarm.nodes.values():
        node.trainer.rests = False
    await steps(swarm, 4)
    mean: Model = np.mean(models, axis=0)
    return mean


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", [1, 2])
def test_gossip_then_all_reduce_then_gossip_with_a_death_between(seed: int) -> None:
    async def scenario(swarm: Swarm) -> dict[str, Model]:
        everyone = dict.fromkeys("abcd", ALIVE)
        await swarm.start("abcd", steps=400)
        await swarm.agree(**everyone)
        await steps(swarm, 40)
        assert (await swarm.nodes["b"].ask("mode_set", text="allreduce every=2 overlap=blocking"))["plan"] == 1
        await under(swarm, 1)
        before = await swarm.nodes["c"].counts()
        await steps(swarm, 20)
        rounds = (await swarm.nodes["c"].counts())["rounds"]
        assert rounds >= 8, before

        await swarm.nodes["d"].crash()
        await steps(swarm, 10)
        await swarm.nodes["d"].start(steps=400)
        await swarm.agree(**everyone)
        await steps(swarm, 10)
        assert swarm.nodes["d"].plan.number == 1
        assert (await swarm.nodes["d"].counts())["rounds"] > 0, "it takes part in what the others do now"

        await swarm.nodes["d"].ask("mode_set", text="gossip")
        await under(swarm, 2)
        await steps(swarm, 40)
        assert (await swarm.nodes["a"].ask("status"))["mode"] == "gossip"
        assert (await swarm.nodes["a"].counts())["exchanges"] > 10
        return await swarm.finish()

    check_that_they_agree(simulate(seed, scenario))


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", [1, 2])
def test_an_average_makes_all_models_the_same_to_the_bit(seed: int) -> None:
    async def scenario(swarm: Swarm) -> dict[str, Model]:
        await swarm.start("abcd", steps=300)
        await swarm.agree(**dict.fromkeys("abcd", ALIVE))
        await steps(swarm, 40)
        seen: list[dict[str, Model]] = []

        async def watch() -> None:
            """At the moment when the last one has the average."""
            nodes = swarm.nodes.values()
            while not all(node.daemon.model.plans.average for node in nodes):
                await trio.sleep(0.001)
            seen.append({node.name: node.model for node in nodes})
            seen.append({node.name: (await node.daemon.model.model_values())[0] for node in nodes})

        swarm.nursery.start_soon(watch)
        answer = await swarm.nodes["c"].ask("average")
        assert answer["members"] == ["a", "b", "c", "d"]
        assert not answer["not_in_it"]
        assert answer["distance"] > 0
        assert answer["seconds"] < 10
        assert answer["mode"] == "gossip"
        for models in seen:
            assert len({model.tobytes() for model in models.values()}) == 1
        assert len(seen) == 2
        assert (seen[0]["a"] == seen[1]["a"]).all()
        await under(swarm, 1)
        await steps(swarm, 20)
        assert (await swarm.nodes["a"].counts())["exchanges"] > 2
        return await swarm.finish()

    check_that_they_agree(simulate(seed, scenario))


@pytest.mark.parametrize("victim", ["a", "c"])  # who leads the round; who was asked
def test_nobody_stays_in_an_average_whose_member_dies(victim: str) -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.start("abcd", steps=300)
        await swarm.agree(**dict.fromkeys("abcd", ALIVE))
        await steps(swarm, 20)
        plan = swarm.nodes["c"].daemon.model.plans.propose("", once=True)
        await swarm.eventually(lambda: any(node.plan == plan for node in swarm.nodes.values() if node.name != victim))
        await swarm.nodes[victim].crash()
        await under(swarm, 1)
        assert not any(isinstance(node.daemon.model.mode, Average) for node in swarm.nodes.values() if node.runs)
        await steps(swarm, 20)

    simulate(1, scenario)


@pytest.mark.one_run_in(3)
@pytest.mark.parametrize("late", ["a", pytest.param("d", marks=pytest.mark.soak)])
def test_a_trainer_that_does_not_come_to_the_average_is_left_out_and_named(late: str) -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.start("abcd", steps=300)
        await swarm.agree(**dict.fromkeys("abcd", ALIVE))
        await steps(swarm, 10)
        trainer = swarm.nodes[late].trainer
        trainer.rests = True
        await trio.sleep(1)
        answer = await swarm.nodes["b"].ask("average")
        assert answer["members"] == sorted({*"abcd"} - {late})
        assert answer["not_in_it"] == [late]
        assert PATIENCE_FIRST_S <= answer["seconds"] < ONCE_MAX_S
        await under(swarm, 1)
        trainer.rests = False
        await steps(swarm, 10)

    simulate(1, scenario)


def test_a_change_in_the_middle_of_the_final_flush_and_an_average_after_it() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.start("abc", steps=60)
        await swarm.eventually(lambda: any(node.trainer.step == 60 for node in swarm.nodes.values()))
        await swarm.nodes["a"].ask("mode_set", text="allreduce")
        models = await swarm.finish()
        assert max(distance(models["a"], model) for model in models.values()) < 0.01
        answer = await swarm.nodes["b"].ask("average")
        assert answer["members"] == ["a", "b", "c"]
        found = {(await node.daemon.model.model_values())[0].tobytes() for node in swarm.nodes.values()}
        assert len(found) == 1, "nobody trains any more"

    simulate(1, scenario)


@pytest.mark.parametrize("seed", [1])
def test_a_change_finishes_the_exchanges_that_it_meets(seed: int) -> None:
    """Nobody learns, exchanges come at every step: what a change cut in half would move the mean."""

    async def scenario(swarm: Swarm) -> None:
        await swarm.start("abcd", steps=600, trigger="always", codec="float32")
        await swarm.agree(**dict.fromkeys("abcd", ALIVE))
        await steps(swarm, 20)
        for node in swarm.nodes.values():
            node.trainer.learns = False
            node.daemon.latency_s = 0.2  # something is always under way
        await steps(swarm, 10)  # what was learnt last is published
        before = await mean_at_rest(swarm)
        for number, text in enumerate([*CONSERVING, "gossip"], 1):
            for name, sign in zip("abcd", (1, -1, 1, -1), strict=True):  # apart again, about the same mean
                swarm.nodes[name].trainer._model += np.float32(sign)
            await steps(swarm, 2)
            await swarm.nodes["abcd"[number % 4]].ask("mode_set", text=text)
            await under(swarm, number)
            await steps(swarm, 10)
            mean = await mean_at_rest(swarm)
            if text.startswith("allreduce") and "codec=" in text:
                continue  # what encoding has dropped of contributions is still to come: the next change brings it
            assert np.allclose(mean, before, atol=1e-5), text

    simulate(seed, scenario)


@pytest.mark.parametrize("count", [2, 6])
def test_what_was_rolled_back_for_a_round_is_not_lost(count: int) -> None:
    """In hpsgd a window's progress is out of the model until the round that has it is over."""

    async def scenario(swarm: Swarm) -> None:
        await swarm.start("abc", steps=600, mode="allreduce", overlap="hpsgd", every=4)
        await swarm.agree(**dict.fromkeys("abc", ALIVE))
        for node in swarm.nodes.values():
            node.trainer.learns, node.daemon.latency_s = False, 0.1
        await steps(swarm, 30)
        before = await mean_at_rest(swarm)
        for name, moved in zip("abc", (1, 2, 3), strict=True):
            swarm.nodes[name].trainer._model += np.float32(moved)
        await steps(swarm, count)
        await swarm.nodes["a"].ask("mode_set", text="gossip trigger=always codec=float32")
        await under(swarm, 1)
        await steps(swarm, 10)
        assert np.allclose(await mean_at_rest(swarm), before + 2, atol=1e-5)

    simulate(1, scenario)


def test_from_each_mode_to_the_next() -> None:
    async def scenario(swarm: Swarm) -> dict[str, Model]:
        await swarm.start("abc", steps=20 + 20 * len(MODES) + 60)
        await swarm.agree(**dict.fromkeys("abc", ALIVE))
        await steps(swarm, 20)
        for number, mode in enumerate([*MODES, "gossip"], 1):
            began = trio.current_time()
            await swarm.nodes["abc"[number % 3]].ask("mode_set", text=mode)
            await under(swarm, number)
            assert trio.current_time() - began < 2 * WIND_UP_MIN_S, mode
            await steps(swarm, 12)
            for node in swarm.nodes.values():
                assert (await node.ask("status"))["mode"] == in_full(mode)
                counts = await node.counts() if mode not in SLOW else {"rounds": 1}
                assert counts.get("exchanges", 0) + counts.get("rounds", 0) > 0, mode
        return await swarm.finish()

    check_that_they_agree(simulate(1, scenario))


@pytest.mark.parametrize("seed", [1, 2])
def test_of_proposals_made_at_once_one_wins_everywhere(seed: int) -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.start("abcd", steps=300)
        await swarm.agree(**dict.fromkeys("abcd", ALIVE))
        await steps(swarm, 10)
        for name, text in zip("abcd", ("allreduce", "diloco", "push-sum", "elastic"), strict=True):
            await swarm.nodes[name].ask("mode_set", text=text)
        await swarm.eventually(lambda: {node.plan.text for node in swarm.nodes.values()} == {"elastic"})

        swarm.nodes["a"].daemon.model.plans.propose("elastic", once=True)
        await trio.sleep(0.1)
        await swarm.nodes["b"].ask("mode_set", text="gossip")
        await swarm.eventually(
            lambda: {(node.plan.text, node.plan.once) for node in swarm.nodes.values()} == {("gossip", False)}
        )
        await steps(swarm, 20)

    simulate(seed, scenario)


def test_a_swarm_that_ends_at_once_comes_back_in_its_mode(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the newest plan that any of its nodes had: c was away when it was set."""

    async def scenario(swarm: Swarm) -> dict[str, Model]:
        everyone = dict.fromkeys("abc", ALIVE)
        await swarm.start("abc", steps=600, state_dir=str(tmp_path))
        await swarm.agree(**everyone)
        await steps(swarm, 10)
        await swarm.nodes["b"].ask("mode_set", text="allreduce every=2 overlap=blocking")
        await under(swarm, 1)
        await swarm.nodes["c"].crash()
        await swarm.agree(**{**everyone, "c": State.FAILED})
        await swarm.nodes["a"].ask("mode_set", text="diloco every=5")
        await under(swarm, 2)
        swarm.nodes["a"].daemon.model.plans.propose("diloco every=5", once=True)  # which is not kept: all end in it
        await swarm.eventually(lambda: swarm.nodes["b"].plan.once)
        for name in "ab":
            await swarm.nodes[name].crash()
        caplog.clear()
        for name in "cab":
            await swarm.nodes[name].start(steps=600)
        await swarm.agree(**everyone)
        await under(swarm, 2)
        await steps(swarm, 30)
        for node in swarm.nodes.values():
            assert (await node.ask("mode"))["settings"]["every"] == 5
            assert (await node.counts())["rounds"] > 0
        return await swarm.finish()

    caplog.set_level("INFO")
    check_that_they_agree(simulate(1, scenario))
    told = sorted(record.message for record in caplog.records if record.message.startswith("plan "))
    kept = "kept in this node's state folder"
    assert told == [
        f"plan 1 {kept}: mode allreduce every=2 overlap=blocking",
        f"plan 2 {kept}: mode diloco every=5",
        f"plan 2 {kept}: mode diloco every=5",
        "plan 2 of the swarm: mode diloco every=5",
    ]


def test_a_plan_that_cannot_be_kept_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async def scenario(swarm: Swarm) -> None:
        await swarm.start("a", steps=200, state_dir=str(tmp_path))
        await steps(swarm, 5)
        await swarm.nodes["a"].ask("mode_set", text="diloco")
        await under(swarm, 1)

    monkeypatch.setattr(known_members, "replace", full)
    simulate(1, scenario)
    assert [record.message for record in caplog.records] == [
        f"the plan cannot be kept in {tmp_path / 'a'}: No space left on device; "
        "if all nodes crash, this one starts again in the mode that it is told"
    ]


def test_what_cannot_be_is_refused_with_a_line() -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.start("a", steps=20)
        for text, line in [
            ("gosip", "did you mean 'gossip'?"),
            ("allreduce every=-1", "every: -1 must be at least 0"),
            ("gossip every=5", "every: without effect in mode gossip, which takes codec, trigger, view; leave it out"),
            ("allreduce every=many", "'many' is not a whole number"),
            ("gossip codec=int9", "did you mean 'int8'?"),
            ("gossip " + 200 * "x", "longer than 200 bytes"),
            ("gossip log=json", "unknown setting 'log'"),
        ]:
            with pytest.raises(UserError, match=line.replace("?", r"\?")):
                await swarm.nodes["a"].ask("mode_set", text=text)
        await trio.sleep(1)
        assert swarm.nodes["a"].plan.number == 0

    simulate(1, scenario)


@pytest.mark.parametrize("mode", ["softsync", "allreduce"])
def test_where_gradients_are_exchanged_the_mode_says_so(mode: str) -> None:
    async def scenario(swarm: Swarm) -> None:
        await swarm.start("a", steps=1, mode=mode, exchange="gradients")
        settings = (await swarm.nodes["a"].ask("mode"))["settings"]
        assert settings["exchange"] == "gradients"
        assert settings.get("server_optimizer") == ("sgd" if mode == "softsync" else None)

    simulate(1, scenario)
