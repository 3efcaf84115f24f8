"""When is a member late? What most of the others take, whatever their clocks say and one of them tells."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.training.rounds.quorum import GRACE, ROUNDS, Quorum
from peerd.transport.messages import RoundBegin

seconds = st.floats(0.001, 1000)
pauses = st.floats(0, 1000)


def begin(waited: dict[str, float]) -> RoundBegin:
    lives = tuple(range(len(waited)))
    return RoundBegin(1, 1, "float32", "ring", False, False, tuple(waited), lives, waited=tuple(waited.values()))


def round_of(quorum: Quorum, own: float, others: list[float], at: float, takes: float = 0.01) -> float:
    """One round after that which ended at `at`, where each came after so many seconds; when it ended."""
    quorum.reached(at + own)
    began = at + max(own, *others)
    waited = {"me": began - at - own} | {str(n): began - at - other for n, other in enumerate(others)}
    quorum.committed(begin(waited), "me", began + takes)
    return began + takes


@given(own=seconds, usual=seconds, at=st.floats(0, 1e6), count=st.integers(1, 5), slow=st.floats(1, 100))
def test_it_goes_by_most_of_the_others(own: float, usual: float, at: float, count: int, slow: float) -> None:
    quorum = Quorum()
    quorum.committed(begin({"me": 0.0}), "me", at)
    assert quorum.due_at == math.inf, "it knows nobody's pace"
    others = [usual] * count + [usual * slow] * (count - 1)
    ended = round_of(quorum, own, others, at)
    assert quorum.due_at - ended == pytest.approx(GRACE * usual, rel=1e-3, abs=1e-3)
    quorum.reached(ended + own)
    assert quorum.due_at == math.inf, "it has come"


@given(usual=seconds, pause=pauses, lie=st.floats(0, 1e300))
def test_one_pause_and_one_liar_change_little(usual: float, pause: float, lie: float) -> None:
    quorum, at = Quorum(), 0.0
    quorum.committed(begin({"me": 0.0}), "me", at)
    for number in range(ROUNDS):
        at = round_of(quorum, usual, [usual + pause * (number == 2)] * 3, at)
    assert quorum.due_at - at == pytest.approx(GRACE * usual, rel=1e-3, abs=1e-3)
    quorum.reached(at + usual)
    quorum.committed(begin({"me": 0.0, "a": 0.0, "b": 0.0, "liar": lie}), "me", at + usual)
    assert quorum.due_at - at - usual == pytest.approx(GRACE * usual, rel=1e-3, abs=1e-3)


def test_where_all_are_slower_at_once_they_come_by_their_own_steps_again() -> None:
    quorum, at = Quorum(), 0.0
    quorum.committed(begin({"me": 0.0}), "me", at)
    for _ in range(ROUNDS):
        at = round_of(quorum, 1.0, [1.0] * 3, at)
    early = 0  # rounds to which all come before they have made steps of 10 s
    while (came := min(10.0, quorum.due_at - at)) < 10.0:
        at = round_of(quorum, came, [came] * 3, at)
        early += 1
    assert 0 < early < 40
