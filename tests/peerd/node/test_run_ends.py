"""When have most others ended their runs? Whoever comes, trains, ends, dies and leaves in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.node.meta import NodeMeta
from peerd.node.run_ends import RunEnds
from peerd.training.model.over import NEARLY, is_over

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
        assert ends.heard(said) == (words.count("ended") > words.count("trains"))


def test_who_ended_before_this_run_does_not_end_it() -> None:
    ends = RunEnds()
    assert not ends.heard({"a": ENDED, "b": GONE})
    assert not ends.heard({"a": ENDED, "b": TRAINS})
    assert ends.heard({"a": ENDED, "b": GONE}), "b was there"
    assert ends.heard({}), "and has left since"
    assert not ends.heard({"b": TRAINS})


@pytest.mark.parametrize(
    ("step", "most_ended", "over"),
    [(99, False, False), (100, False, True), (89, True, True), (90, True, False), (0, True, True), (100, True, True)],
)
def test_a_run_that_is_nearly_done_is_made_to_its_end(step: int, most_ended: bool, over: bool) -> None:
    assert round(100 * NEARLY) == 90
    assert is_over(step, 100, most_ended=most_ended) == over
