"""When a link exchanges: the properties that each rule keeps, and how a rule is written."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.training.trigger import (
    SILENCE_MAX_S,
    TRIGGERS,
    AlwaysTrigger,
    ChangeTrigger,
    LinkChange,
    PeriodTrigger,
    Trigger,
    fires,
    parse_trigger,
)
from peerd.training.trigger_check import distance_from_mean
from peerd.transport.errors import UserError

amounts = st.floats(0, 1e30)
thresholds = st.floats(0, 10)
links = st.builds(
    LinkChange,
    change=amounts,
    norm=amounts,
    worth=st.floats(1, 10),
    lr_ratio=st.floats(0, 1),
    steps=st.integers(0, 10_000),
    silence_s=st.floats(0, 1e6),
    finishing=st.booleans(),
)
triggers = st.one_of(
    st.builds(ChangeTrigger, thresholds), st.builds(PeriodTrigger, st.integers(1, 1000)), st.just(AlwaysTrigger())
)
QUIET = LinkChange(change=0.0, norm=10.0, worth=1.0, lr_ratio=1.0, steps=1, silence_s=0.0, finishing=False)


@given(trigger=triggers, link=links, factor=st.floats(1, 1e6))
def test_a_greater_change_fires_too(trigger: Trigger, link: LinkChange, factor: float) -> None:
    if fires(trigger, link):
        assert fires(trigger, replace(link, change=link.change * factor))


@given(low=thresholds, high=thresholds, link=links)
def test_a_lower_threshold_fires_too(low: float, high: float, link: LinkChange) -> None:
    low, high = sorted((low, high))
    if fires(ChangeTrigger(high), link):
        assert fires(ChangeTrigger(low), link)


@given(threshold=thresholds, link=links, extra=st.floats(0, 1e6))
def test_silence_always_ends(threshold: float, link: LinkChange, extra: float) -> None:
    assert fires(ChangeTrigger(threshold), replace(link, silence_s=SILENCE_MAX_S + extra))


@given(period=st.integers(1, 1000), link=links)
def test_a_period_ends_after_its_steps(period: int, link: LinkChange) -> None:
    fired = fires(PeriodTrigger(period), replace(link, finishing=False))
    assert fired == ("period" if link.steps >= period else None)


@given(trigger=triggers, link=links)
def test_the_end_of_a_run_always_fires(trigger: Trigger, link: LinkChange) -> None:
    assert fires(trigger, replace(link, finishing=True)) == "finishing"


@given(trigger=triggers, link=links, change=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_model_that_is_not_finite_sends_nothing(trigger: Trigger, link: LinkChange, change: float) -> None:
    assert fires(trigger, replace(link, change=change)) is None


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        (QUIET, None),
        (replace(QUIET, change=0.5), None),  # exactly at the threshold
        (replace(QUIET, change=0.51), "change"),
        (replace(QUIET, change=0.3, lr_ratio=0.5), "change"),  # a decayed learning rate lowers the threshold
        (replace(QUIET, change=1e-9, norm=0.0), "change"),
        (replace(QUIET, norm=0.0), None),
        (replace(QUIET, change=0.51, silence_s=100.0), "change"),
        (replace(QUIET, silence_s=59.9), None),
        (replace(QUIET, silence_s=60.0), "silence"),
        (replace(QUIET, change=9.0, finishing=True), "finishing"),
        (replace(QUIET, change=math.nan, finishing=True), None),
    ],
)
def test_reasons_of_the_default(link: LinkChange, reason: str | None) -> None:
    assert fires(parse_trigger("change:0.05"), link) == reason


@pytest.mark.parametrize(
    ("text", "trigger"),
    [
        ("change:0.05", ChangeTrigger(0.05)),
        ("change:0", ChangeTrigger(0.0)),
        ("change:1e-3", ChangeTrigger(0.001)),
        ("period:10", PeriodTrigger(10)),
        ("always", AlwaysTrigger()),
    ],
)
def test_triggers_are_read(text: str, trigger: Trigger) -> None:
    assert parse_trigger(text) == trigger


@pytest.mark.parametrize("kind", TRIGGERS)
def test_every_example_can_be_read(kind: str) -> None:
    assert TRIGGERS[kind].example.partition(":")[0] == kind
    parse_trigger(TRIGGERS[kind].example)


@pytest.mark.parametrize(
    "text",
    [
        *("", "change", "change:", "change:x", "change:-1", "change:nan", "change:inf", "change:0.05:1"),
        *("period", "period:0", "period:-1", "period:1.5", "period:²", "period:" + "9" * 5000),
        *("always:1", "Always", "sometimes", "a\nb"),
    ],
)
def test_anything_else_is_one_clear_line(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_trigger(text)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    for kind in TRIGGERS.values():
        assert kind.example in message


@given(text=st.text(max_size=20))
def test_any_text_is_a_trigger_or_a_user_error(text: str) -> None:
    with contextlib.suppress(UserError):
        parse_trigger(text)
        assert text.partition(":")[0] in TRIGGERS


def test_how_far_a_model_is_from_the_mean_is_told_by_the_partners_that_were_met() -> None:
    met: list[Any] = [SimpleNamespace(exchanges=1, distance=math.sqrt(2) * far, anchor_norm=10.0) for far in (3, 4)]
    stranger: Any = SimpleNamespace(exchanges=0, distance=1e9, anchor_norm=1e9)
    zero: Any = SimpleNamespace(exchanges=1, distance=1.0, anchor_norm=0.0)
    assert distance_from_mean([*met, stranger]) == pytest.approx(math.sqrt((9 + 16) / 2) / 10)
    assert distance_from_mean([stranger]) == distance_from_mean([]) == distance_from_mean([zero]) == 0.0
