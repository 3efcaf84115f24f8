"""Who is named for drawing what this node draws? Whoever trains on it now, once, and few of many."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from peerd.node.meta import NodeMeta
from peerd.node.same_batches import TOLD_MAX, SameBatches

TRAINS = NodeMeta("m", ready=True, expects=True)
ONE, OTHER = b"one seed", b"another."
metas = st.builds(
    NodeMeta, st.just("m"), ready=st.just(True), expects=st.booleans(), ended=st.booleans(),
    draws=st.sampled_from([b"", ONE, OTHER]),
)  # fmt: skip


@given(st.lists(st.tuples(metas, st.dictionaries(st.sampled_from("abcdefgh"), metas)), max_size=12))
def test_each_is_told_once_and_few_of_many(history: list[tuple[NodeMeta, dict[str, NodeMeta]]]) -> None:
    same, told = SameBatches(), list[str]()
    for own, partners in history:
        new = same.heard(own, partners)
        both = {
            id for id, meta in partners.items()
            if own.draws and meta.draws == own.draws and not any(not one.expects or one.ended for one in (own, meta))
        }  # fmt: skip
        assert same.found == both
        assert set(new) <= both
        assert len(new) == min(TOLD_MAX - len(told), len(both - set(told)))
        told += new
    assert len(told) == len(set(told)) <= TOLD_MAX


def test_who_has_not_said_what_it_draws_draws_nothing_alike() -> None:
    same = SameBatches()
    assert same.heard(TRAINS, {"a": TRAINS}) == []
    assert same.heard(replace(TRAINS, draws=ONE), {"a": TRAINS, "b": replace(TRAINS, draws=OTHER)}) == []
    assert same.heard(replace(TRAINS, draws=ONE), {"a": replace(TRAINS, draws=ONE)}) == ["a"]
