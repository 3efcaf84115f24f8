"""What a scraper sees: the Prometheus text format, read back by the official parser."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from peerd.daemon.metrics import exposition


def status(**changes: Any) -> dict[str, Any]:
    """The part of a node's status that is measured."""
    return {
        "name": "a",
        "members": {},
        "bytes_sent": 10,
        "bytes_received": 20,
        "consensus_distance": 0.25,
        "loop_latency_p99_s": 0.001,
        "trainer": None,
        "counts": {},
        "refused": {"b": 600.0},
        **changes,
    }


def samples(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """By the sample's name and its labels' values; the node's name, which is on each, is left out."""
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation for family in families)
    assert {sample.labels.pop("node") for family in families for sample in family.samples} == {"a"}
    return {(s.name, tuple(s.labels.values())): s.value for family in families for s in family.samples}


def test_a_node_without_a_trainer() -> None:
    found = samples(exposition(status()))
    assert found["peerd_sent_bytes_total", ()] == 10
    assert found["peerd_received_bytes_total", ()] == 20
    assert found["peerd_consensus_distance_ratio", ()] == 0.25
    assert ("peerd_steps_total", ()) not in found
    for lacks in ({"no_partner_s": 1.0}, {"consensus_distance": None}):
        assert ("peerd_consensus_distance_ratio", ()) not in samples(exposition(status(**lacks)))


def test_members_are_counted_by_state() -> None:
    found = samples(exposition(status(members={"alive": 3, "failed": 0})))
    assert found["peerd_members", ("alive",)] == 3
    assert found["peerd_members", ("failed",)] == 0


def test_a_node_that_trains() -> None:
    trainer = {"step": 7, "samples": 70, "loss": 0.5, "metrics": {"accuracy": 0.75, 'odd "name"\n': 1.0}}
    trainer["last_step_s_ago"] = 3.0
    counts = {"trigger_quiet": 3, "trigger_change": 4, "exchanges": 5}
    found = samples(exposition(status(trainer=trainer, counts=counts)))
    assert found["peerd_steps_total", ()] == 7
    assert found["peerd_samples_total", ()] == 70
    assert found["peerd_loss", ()] == 0.5
    assert found["peerd_last_step_age_seconds", ()] == 3.0
    assert found["peerd_trainer_metric", ("accuracy",)] == 0.75
    assert found["peerd_trainer_metric", ('odd "name"\n',)] == 1
    assert found["peerd_trigger_decisions_total", ("quiet",)] == 3
    assert found["peerd_trigger_decisions_total", ("change",)] == 4
    assert found["peerd_events_total", ("exchanges",)] == 5


def test_a_loss_that_is_not_known_is_not_a_number_made_up() -> None:
    found = samples(exposition(status(trainer={"step": 0, "samples": 0, "loss": None, "metrics": {}})))
    assert ("peerd_loss", ()) not in found


@settings(deadline=None, print_blob=True)
@given(
    counts=st.dictionaries(st.text(min_size=1, max_size=12), st.integers(0, 2**53), max_size=5),
    distance=st.floats(),
    sent=st.integers(0, 2**53),
)
def test_any_status_parses(counts: dict[str, int], distance: float, sent: int) -> None:
    found = samples(exposition(status(counts=counts, consensus_distance=distance, bytes_sent=sent)))
    assert found["peerd_sent_bytes_total", ()] == sent
    value = found["peerd_consensus_distance_ratio", ()]
    assert value == distance or (math.isnan(value) and math.isnan(distance))
    assert sum(len(labels) for _, labels in found) == len(counts)
