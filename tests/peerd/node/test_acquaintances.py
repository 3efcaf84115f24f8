"""Whom a node has met, and whom it tries to meet: whatever comes, and in whatever order; no clock, no network."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from peerd.node.acquaintances import AGAIN_MAX_S, Acquaintances
from peerd.transport.ids import NodeId
from peerd.transport.messages import Member, State

IDS = [f"n{index}" for index in range(6)]


def member(id: NodeId, state: State = State.ALIVE) -> Member:
    return Member(id, id, "h", 1, 1, 0, state, "", b"")


events = st.lists(
    st.one_of(
        st.tuples(st.just("note"), st.sampled_from(IDS)),
        st.tuples(st.just("failed"), st.sampled_from(IDS)),
        st.tuples(st.just("is"), st.sampled_from(IDS), st.sampled_from(State)),
        st.tuples(st.just("gone"), st.sampled_from(IDS)),
        st.tuples(st.just("waits"), st.floats(0.01, 100)),
        st.tuples(st.just("due"), st.integers(0, 3)),
    )
)


@given(events, st.integers(0, 99))
def test_who_was_met_counts_and_the_others_are_tried(script: list[tuple[str, object]], seed: int) -> None:
    told: list[NodeId] = []
    known = Acquaintances("me", Random(seed), told.append, sealed=True)
    members, met, now, tried = {"me": member("me")}, set[NodeId](), 0.0, dict[NodeId, float]()
    for what, *about in script:
        match what, about:
            case "note", [str(id)]:
                known.note(id)
                met.add(id)
            case "failed", [str(id)]:
                before = known.doubtful(id)
                assert known.failed(id) == before, "only if again"
                assert known.doubtful(id) == (id not in met)
            case "is", [str(id), State() as state]:
                members[id] = member(id, state)
            case "gone", [str(id)]:
                members.pop(id, None)
                tried.pop(id, None)
            case "waits", [float(seconds)]:
                now += seconds
            case "due", [int(most)]:
                due = known.due(members, now, most)
                assert len(due) <= most
                for one in due:
                    assert members[one.id] is one
                    assert one.id not in {"me", *met}
                    assert one.state <= State.SUSPECT
                    assert now > tried.get(one.id, -1.0), "not twice at once"
                    tried[one.id] = now
        assert {id for id in IDS if known.counts(id)} == met
        assert known.of(members).keys() == (met | {"me"}) & members.keys()
        assert sorted(told) == sorted(met)
        strangers = {id for id, one in members.items() if id not in met and one.state <= State.SUSPECT} - {"me"}
        assert (known.next_at(members, now) < float("inf")) == bool(strangers)
    now += AGAIN_MAX_S
    assert {one.id for one in known.due(members, now, 9)} == strangers_of(members, met)


def strangers_of(members: dict[NodeId, Member], met: set[NodeId]) -> set[NodeId]:
    return {id for id, one in members.items() if id not in {"me", *met} and one.state <= State.SUSPECT}


def test_who_is_new_does_not_wait_for_those_tried_in_vain() -> None:
    known = Acquaintances("me", Random(0), lambda _: None, sealed=True)
    members = {f"made-up-{index}": member(f"made-up-{index}") for index in range(100)}
    now = 0.0
    for _ in range(20):
        for one in known.due(members, now, 16):
            known.failed(one.id)
        now += 5.0
    members["new"] = member("new")
    assert "new" in {one.id for one in known.due(members, now, 16)}


def test_where_nothing_is_sealed_everybody_counts_and_nobody_is_dialled() -> None:
    known = Acquaintances("me", Random(0), lambda _: None, sealed=False)
    members = {id: member(id) for id in IDS}
    assert known.of(members) == members
    assert known.due(members, 0.0, 9) == []
    assert known.next_at(members, 0.0) == float("inf")
    assert not known.doubtful("n0")


def test_those_who_are_gone_are_forgotten() -> None:
    known = Acquaintances("me", Random(0), lambda _: None, sealed=True)
    for index in range(1000):
        known.note(f"gone-{index}")
        known.due({f"made-up-{index}": member(f"made-up-{index}")}, 0.0, 1)
    assert len(known._met) < 100
    assert len(known._tried) < 100
