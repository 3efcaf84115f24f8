"""How far are most others in their runs? Whoever comes, trains, ends, dies and leaves in whatever order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.node.meta import NodeMeta
from peerd.node.run_ends import RunEnds
from peerd.training.model.over import NEARLY, OVER, PARTS, is_over, number_of, parts_of

IDLE = NodeMeta("m", ready=True)  # it gives its model, and trains not
TRAINS = NodeMeta("m", ready=True, expects=True)
ENDED = NodeMeta("m", ready=True, expects=True, ended=True)
GONE = NodeMeta("m", ready=True, ended=True)  # its script has, too
HANGS = NodeMeta("m", ready=True, expects=True, stalled=True)
states = st.sampled_from([None, IDLE, TRAINS, ENDED, GONE, HANGS])


@given(
    histories=st.integers(1, 12).flatmap(
        lambda length: st.dictionaries(
            st.sampled_from("abcde"), st.lists(states, min_size=length, max_size=length), min_size=1
        )
    )
)
def test_most_have_ended_of_those_who_trained_beside(histories: dict[str, list[NodeMeta | None]]) -> None:
    ends = RunEnds()
    known = dict[str, str]()
    for now in range(len(next(iter(histories.values())))):
        for id, history in histories.items():
            match history[now], known.get(id):
                case meta, _ if meta == TRAINS:
                    known[id] = "trains"
                case meta, str() if meta is not None and meta.ended:
                    known[id] = "ended"
                case meta, str() as was if meta is not None or was == "trains":
                    del known[id]  # it died, or its script did, or hangs
        said = {id: meta for id, history in histories.items() if (meta := history[now]) is not None}
        words = list(known.values())
        assert (ends.heard(said) == OVER) == (words.count("ended") > words.count("trains"))


def test_who_ended_before_this_run_does_not_end_it() -> None:
    ends = RunEnds()
    assert ends.heard({"a": ENDED, "b": GONE}) == 0
    assert ends.heard({"a": ENDED, "b": TRAINS}) == 0
    assert ends.heard({"a": ENDED, "b": GONE}) == OVER, "b was there"
    assert ends.heard({}) == OVER, "and has left since"
    assert ends.heard({"b": TRAINS}) == 0


@given(st.lists(st.integers(0, PARTS), min_size=1, max_size=6), st.integers(0, PARTS))
def test_most_others_have_made_what_is_said(made: list[int], told: int) -> None:
    ends = RunEnds()
    heard = ends.heard({str(at): replace(TRAINS, made=parts) for at, parts in enumerate(made)})
    assert 2 * sum(parts >= heard for parts in made) > len(made)
    assert 2 * sum(parts <= heard for parts in made) >= len(made)
    among = {str(at): replace(TRAINS, made=parts) for at, parts in enumerate([*made, told])}
    assert ends.heard(among) <= max(made), "one alone hurries nobody, where there is another"


@given(last=st.integers(-1, 1000), made=st.integers(0, 1000), total=st.integers(1, 1000), others=st.integers(0, OVER))
def test_a_slow_node_goes_by_the_others_count(last: int, made: int, total: int, others: int) -> None:
    number, following = number_of(last, made, total, others), max(last + 1, made)
    assert 0 <= number < total
    if following < total:
        assert following <= number
        assert number == following or parts_of(number, total) <= others, "no further than they are"
        assert number_of(last, made, total, parts_of(following, total)) == following, "who is as far leaves none out"
    assert parts_of(following, 0) == 0


@given(total=st.integers(1, 60), resumed=st.integers(0, 70), others=st.lists(st.integers(0, OVER), max_size=80))
def test_no_number_comes_twice_and_the_last_one_ends_a_run(total: int, resumed: int, others: list[int]) -> None:
    made, numbers = resumed, [-1]
    for told in [*sorted(others), *[OVER] * total]:
        if is_over(made, total, told, numbers[-1]):
            break
        numbers.append(number_of(numbers[-1], made, total, told))
        made += 1
    assert is_over(made, total, OVER, numbers[-1])
    assert numbers == sorted(set(numbers))
    assert numbers[-1] < total


@pytest.mark.parametrize(
    ("made", "others", "over"),
    [(99, PARTS, False), (100, 0, True), (89, OVER, True), (90, OVER, False), (0, OVER, True), (100, OVER, True)],
)
def test_a_run_that_is_nearly_done_is_made_to_its_end(made: int, others: int, over: bool) -> None:
    assert round(100 * NEARLY) == 90
    assert is_over(made, 100, others) == over
