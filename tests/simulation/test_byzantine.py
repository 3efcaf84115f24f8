"""Do members lie as they are told to: the same at each run of a seed, and to no effect on who tells the figures?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from peerd.node.second_opinion import SecondOpinion
from peerd.simulation.byzantine import ATTACKS, Lie, parse_byzantine
from peerd.simulation.scenario import Scenario, _Run, simulate
from peerd.transport.errors import UserError
from peerd.transport.ids import NodeId

SMALL = Scenario(peers=5, problem="consensus", steps=60, compute="fixed:1", faults="none", seed=3)


@pytest.mark.cases(2)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_run_with_liars_is_the_same_again_and_breaks_no_invariant(attack: str) -> None:
    scenario = replace(SMALL, byzantine=f"{attack}:1")
    first, again = (simulate(scenario).result for _ in range(2))
    assert first["violations"] == []
    assert first["digest"] == again["digest"]
    assert len(first["liars"]) == 1
    assert math.isfinite(first["error"])
    assert f"--byzantine {attack}:1" in first["replay"]


@dataclass(frozen=True)
class _Said:
    chunks: tuple[bytes, ...]


def test_values_that_no_codec_packed_are_altered_too() -> None:
    lie = Lie(ATTACKS["nan"], np.random.default_rng(0), np.random.default_rng(0))
    said: Any = _Said((b"PEER", b"\x00" + bytes(3)))
    altered: Any = lie.sent(said)
    assert altered.chunks[0] == b"\xff\xff\xff\xff"
    assert altered.chunks[1] != said.chunks[1]


@pytest.mark.parametrize("attack", ["huge", "nan"])
def test_who_breaks_the_rules_is_not_heard_for_long(attack: str) -> None:
    honest, attacked = (simulate(replace(SMALL, byzantine=how)).result for how in ("none", f"{attack}:1"))
    assert attacked["bytes_sent_total"] < 2 * honest["bytes_sent_total"], "it says the same again and again"


@pytest.mark.cases(1)
@pytest.mark.parametrize("attack", ["sign-flip", "pull"])
def test_one_worker_of_eight_that_lies_does_not_ruin_a_centre(attack: str) -> None:
    eight = replace(SMALL, peers=8, mode="elastic", problem="digits", byzantine=f"{attack}:1", seed=1)
    result = simulate(eight).result
    assert result["liars"] == [3], "it is not the centre"
    assert result["accuracy"] > result["clean_accuracy"] - 0.03


@pytest.mark.parametrize("attack", ["huge", "nan"])
def test_no_end_waits_for_who_is_not_heard(attack: str) -> None:
    run = _Run(replace(SMALL, byzantine=f"{attack}:1"), None)
    run.go(lambda share, look: None)
    trainers = [node.trainer for index, node in run.swarm.nodes.items() if index not in run.swarm.liars]
    assert len(trainers) == SMALL.peers - 1
    assert all(trainer is not None and trainer.trained_until < 60 + 1 for trainer in trainers)


def test_no_end_waits_for_a_liar_that_rounds_go_on_without() -> None:
    result = simulate(replace(SMALL, mode="allreduce", byzantine="huge:1", steps=20, seed=0)).result
    assert result["violations"] == []
    assert result["liars"] == [1]
    assert result["steps_least"] < 20 == result["steps_most"]


def test_a_leader_whose_values_are_no_numbers_costs_seconds() -> None:
    result = simulate(replace(SMALL, mode="allreduce", byzantine="nan:1", steps=20, seed=3)).result
    assert result["liars"] == [0], "it leads"
    assert result["virtual_seconds"] < 40, "each makes 20 steps of a second"


def test_without_the_robust_merge_a_huge_value_ruins_the_honest_models() -> None:
    result = simulate(replace(SMALL, byzantine="huge:1", robust=False)).result
    assert result["error"] > 100 > result["clean_error"]
    assert result["clean_distance"] > 100
    assert "--no-robust" in result["replay"]


@pytest.mark.parametrize(
    "text", ["lies", "huge:", "huge:x", "huge:0", "huge:16", "huge:100%", "huge:1%", "huge:-1", "none:1", "huge:1:1"]
)
def test_what_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--byzantine"):
        parse_byzantine(text, 16)


def test_a_share_is_of_all_members() -> None:
    found = parse_byzantine("noise:25%", 16)
    assert found is not None
    assert found[1] == 4


@pytest.mark.parametrize(("mode", "seed"), [("gossip", 0), ("gossip", 1), ("elastic", 2), ("elastic:pairwise", 3)])
def test_whatever_happens_to_honest_members_none_is_graylisted(mode: str, seed: int) -> None:
    faults = Scenario(
        peers=6, seed=seed, minutes=4.0, compute="fixed:1", faults="all", fault_every=20.0, mode=mode, slow_node=4.0
    )
    result = simulate(faults).result
    assert result["violations"] == []
    assert result["graylisted"] == 0


@pytest.mark.cases(1)
@pytest.mark.parametrize(("attack", "seed"), [("sign-flip", 5), ("huge", 3), ("pull", 5)])
def test_a_node_that_comes_back_starts_from_no_liars_model(
    attack: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashes = replace(SMALL, peers=8, steps=100, faults="crash", fault_every=15.0, byzantine=f"{attack}:1", seed=seed)
    accepts, answers = SecondOpinion.accepts, list[tuple[NodeId, bool]]()

    def noted(opinion: SecondOpinion, donor: NodeId, *model: Any) -> bool:
        answers.append((donor, accepts(opinion, donor, *model)))
        return answers[-1][1]

    monkeypatch.setattr(SecondOpinion, "accepts", noted)
    run = _Run(crashes, None)
    run.go(lambda share, look: None)
    (liar,) = (run.swarm.nodes[index].id for index in run.swarm.liars)
    assert {accepted for donor, accepted in answers if donor == liar} == {False}, "it was asked, and refused each time"
    assert {accepted for donor, accepted in answers if donor != liar} == {True}


def test_newcomers_and_the_slow_agree_with_the_others_at_the_end() -> None:
    result = simulate(replace(SMALL, peers=8, steps=150, join_over=60.0, slow_node=4.0)).result
    assert result["consensus_distance"] < 0.02
    assert result["graylisted"] == 0


def test_a_slow_node_ends_with_the_others() -> None:
    ends = [simulate(replace(SMALL, slow_node=4.0, ends_together=together)).result for together in (False, True)]
    assert [result["steps_least"] < 0.5 * result["steps"] for result in ends] == [False, True]


def test_a_slow_node_makes_fewer_steps() -> None:
    result = simulate(replace(SMALL, steps=None, minutes=1, slow_node=4.0)).result
    assert result["steps_least"] == pytest.approx(result["steps"] / 4, abs=1)
