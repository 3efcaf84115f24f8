"""Who goes first, who gives its model, and what a member may say of itself: every node decides the same."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.node.meta import FIRST, FOUNDS, FetchFrom, NodeMeta, OwnModel, WaitFor, donors, partners, whose_model
from peerd.protocol.trainer import DRAWS_BYTES
from peerd.transport.ids import Address
from peerd.transport.messages import Member, State
from peerd.transport.wire import BYTES_MAX

MODELS = ("a" * 64, "b" * 64, "")
PRINTED = settings(deadline=None, print_blob=True)

abouts = st.builds(NodeMeta, st.sampled_from(MODELS), ready=st.booleans(), expects=st.booleans(), founder=st.booleans())
steps = st.sampled_from([0, 0, 1, 70, 500, FOUNDS, FIRST])
not_ready = st.builds(
    NodeMeta, st.just(""), ready=st.just(False), expects=st.booleans(), founder=st.booleans(), resumes_at=steps
)
states = st.sampled_from(State)


def member(id: str, about: NodeMeta | bytes, state: State = State.ALIVE) -> Member:
    meta = about if isinstance(about, bytes) else about.pack()
    return Member(id, f"name of {id}", "host", 1, 1, 0, state, "", meta)


def swarms(about: st.SearchStrategy[NodeMeta | bytes]) -> st.SearchStrategy[dict[str, Member]]:
    ids = st.text("abcdef0123456789", min_size=1, max_size=4)
    rows = st.dictionaries(ids, st.tuples(about, states), min_size=1, max_size=8)
    return rows.map(lambda table: {id: member(id, about, state) for id, (about, state) in table.items()})


def live(members: dict[str, Member]) -> list[str]:
    return [id for id, member in members.items() if member.state <= State.SUSPECT]


def trainers(members: dict[str, Member]) -> list[str]:
    return [id for id in live(members) if NodeMeta.unpack(members[id].meta).expects]


@PRINTED
@given(swarms(not_ready))
def test_exactly_one_goes_first_while_nobody_is_ready(members: dict[str, Member]) -> None:
    first = [id for id in trainers(members) if whose_model(members, id, seeds=()) == OwnModel()]
    assert len(first) == (1 if trainers(members) else 0)
    for id in set(trainers(members)) - set(first):
        decision = whose_model(members, id, seeds=())
        assert isinstance(decision, WaitFor)
        assert f"name of {first[0]}" in decision.reason


@PRINTED
@given(swarms(not_ready), st.data())
def test_whoever_goes_first_stays_first_when_others_stop(members: dict[str, Member], data: st.DataObject) -> None:
    """Only the first itself, going away, makes room for another."""
    first = [id for id in trainers(members) if whose_model(members, id, seeds=()) == OwnModel()]
    others = [id for id in members if id not in first]
    for id in data.draw(st.sets(st.sampled_from(others)) if others else st.just(set())):
        del members[id]
    assert all(whose_model(members, id, seeds=()) == OwnModel() for id in first)


@PRINTED
@given(swarms(abouts))
def test_nobody_starts_from_its_own_model_while_another_has_one(members: dict[str, Member]) -> None:
    for id in live(members):
        ready = [other for other in live(members) if other != id and NodeMeta.unpack(members[other].meta).ready]
        decision = whose_model(members, id, seeds=[ELSEWHERE])
        assert isinstance(decision, FetchFrom) == bool(ready)
        if isinstance(decision, FetchFrom):
            assert sorted(decision.donors) == sorted(ready) == donors(members, id)


def test_a_node_with_seeds_does_not_go_first_alone() -> None:
    members = {"a": member("a", NodeMeta(expects=True, founder=True))}
    assert whose_model(members, "a", seeds=()) == OwnModel()
    assert whose_model(members, "a", seeds=[ELSEWHERE]) == WaitFor(
        "no node of the swarm has answered yet; peerd doctor --join host:2 shows why"
    )


WHERE = ("host", 1)  # of every member here
ELSEWHERE = ("host", 2)


@PRINTED
@given(swarms(abouts), st.sampled_from([(), (ELSEWHERE,)]))
def test_nobody_goes_first_while_those_known_before_may_answer(
    members: dict[str, Member], seeds: tuple[Address, ...]
) -> None:
    for id in live(members):
        before = whose_model(members, id, seeds=seeds)
        assert whose_model(members, id, seeds=seeds, awaited=[WHERE]) == before, "all have answered"
        waiting = whose_model(members, id, seeds=seeds, awaited=[WHERE, ELSEWHERE])
        if before == OwnModel():
            assert waiting == WaitFor("members known before the restart may still answer")
        else:
            assert waiting == before


def test_a_failed_member_has_not_answered() -> None:
    me = Member("a", "a", "host", 2, 1, 0, State.ALIVE, "", NodeMeta(expects=True, founder=True).pack())
    members = {"a": me, "b": member("b", NodeMeta(ready=True), State.FAILED)}
    assert isinstance(whose_model(members, "a", seeds=(), awaited=[WHERE]), WaitFor)
    assert whose_model(members, "a", seeds=()) == OwnModel()


def test_a_founder_goes_before_a_smaller_id() -> None:
    members = {"a": member("a", NodeMeta(expects=True)), "b": member("b", NodeMeta(expects=True, founder=True))}
    assert whose_model(members, "b", seeds=()) == OwnModel()
    assert isinstance(whose_model(members, "a", seeds=[ELSEWHERE]), WaitFor)


@PRINTED
@given(swarms(not_ready))
def test_no_later_checkpoint_is_passed_over(members: dict[str, Member]) -> None:
    found = {id: NodeMeta.unpack(members[id].meta) for id in trainers(members)}
    for id in found:
        if whose_model(members, id, seeds=()) == OwnModel():
            assert found[id].resumes_at == max(each.resumes_at for each in found.values())


def test_whoever_has_the_latest_checkpoint_goes_first_but_for_who_founds_a_swarm() -> None:
    expects = NodeMeta(expects=True, resumes_at=70)
    members = {"a": member("a", replace(expects, founder=True)), "b": member("b", replace(expects, resumes_at=500))}
    assert whose_model(members, "b", seeds=[ELSEWHERE]) == OwnModel()
    waits = whose_model(members, "a", seeds=())
    assert waits == WaitFor("no member has a model yet; name of b goes first at step 500")
    members["a"] = member("a", NodeMeta(expects=True, founder=True, resumes_at=FIRST))
    assert whose_model(members, "a", seeds=()) == OwnModel()
    waits = whose_model(members, "b", seeds=[ELSEWHERE])
    assert waits == WaitFor("no member has a model yet; name of a goes first")


def test_newcomers_spread_over_the_donors() -> None:
    members = {id: member(id, NodeMeta(ready=True)) for id in "abcd"}
    asked = set()
    for newcomer in ("e", "f", "g", "h"):
        decision = whose_model({**members, newcomer: member(newcomer, NodeMeta())}, newcomer, seeds=[ELSEWHERE])
        assert isinstance(decision, FetchFrom)
        asked.add(decision.donors[0])
    assert asked == set("abcd")


@PRINTED
@given(swarms(abouts | st.binary(max_size=20)), st.sampled_from(MODELS))
def test_partners_are_live_ready_and_of_the_same_model(members: dict[str, Member], model: str) -> None:
    for me in members:
        found = partners(members, me, model)
        assert me not in found
        assert found <= set(live(members)) & set(donors(members, me))
        for id in found:
            assert NodeMeta.unpack(members[id].meta).model == model[:16]


def test_a_ready_member_of_another_model_is_asked_and_is_no_partner() -> None:
    """Asking it brings the refusal that names what differs; skipping it left a newcomer looking for ever."""
    members = {"a": member("a", NodeMeta("x", expects=True)), "b": member("b", NodeMeta("y", ready=True))}
    assert whose_model(members, "a", seeds=[ELSEWHERE]) == FetchFrom(("b",))
    assert donors(members, "a") == ["b"]
    assert not partners(members, "a", "x")


@PRINTED
@given(
    st.text("0123456789abcdef", max_size=64), st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.booleans(),
    st.integers(0, FIRST), st.just(b"") | st.binary(min_size=DRAWS_BYTES, max_size=DRAWS_BYTES),
)  # fmt: skip
def test_about_round_trip(
    model: str, ready: bool, expects: bool, founder: bool, stalled: bool, ended: bool, resumes_at: int, draws: bytes
) -> None:
    about = NodeMeta(model, ready, expects, founder, stalled=stalled, ended=ended, resumes_at=resumes_at, draws=draws)
    assert len(about.pack()) <= 64 <= BYTES_MAX
    assert NodeMeta.unpack(about.pack()) == replace(about, model=model[:16])


@PRINTED
@given(st.binary(max_size=BYTES_MAX))
def test_any_bytes_are_something_said(meta: bytes) -> None:
    about = NodeMeta.unpack(meta)
    assert isinstance(about.model, str)
    assert type(about.draws) is bytes
    assert {type(about.ready), type(about.expects), type(about.founder)} == {bool}


def test_later_versions_may_say_more() -> None:
    packed = NodeMeta("m", ready=True).pack()
    assert NodeMeta.unpack(bytes([packed[0] + 1]) + packed[1:] + b"\xa3new") == NodeMeta("m", ready=True)
