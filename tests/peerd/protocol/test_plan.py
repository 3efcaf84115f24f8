"""The plan register: whatever is heard in whatever order, all come to one plan, and nobody goes back."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.membership.roster import META_BYTES
from peerd.node.meta import FIRST, NodeMeta
from peerd.protocol.plan import (
    NUMBER_MAX,
    after,
    is_over,
    is_signed,
    newest,
    pack,
    parts,
    proposal,
    text_of,
    unpack,
    works_with,
)
from peerd.protocol.trainer import DRAWS_BYTES
from peerd.settings import Settings, planned
from peerd.simulation.referee import Referee
from peerd.training.codecs import CODECS
from peerd.training.mode_settings import OPTIONS, OVERLAPS, PLANNED
from peerd.training.model.over import PARTS
from peerd.training.modes import MODES, class_of
from peerd.training.modes.parameter_server import ParameterServer
from peerd.transport.errors import UserError
from peerd.transport.messages import AS_STARTED, Plan
from peerd.transport.secure.signing import PROOF_BYTES

ids = st.text("0123456789abcdef", min_size=1, max_size=16)
texts = st.sampled_from(["", "gossip", "allreduce every=5", "diloco every=50 overlap=blocking"])
plans = st.builds(Plan, st.integers(1, 9), ids, st.booleans(), texts)  # few numbers: they meet


@given(st.lists(plans, max_size=5), st.randoms())
def test_what_is_heard_in_any_order_and_twice_comes_to_the_same(heard: list[Plan], rng: random.Random) -> None:
    shuffled = [*heard, *rng.choices(heard, k=3)] if heard else []
    rng.shuffle(shuffled)
    known = AS_STARTED
    for plan in shuffled:
        before, known = known, newest([known, plan])
        assert known >= before
        assert newest([known, plan]) == known
    assert known == newest(heard)
    assert known > AS_STARTED or not heard


@given(st.data())
def test_members_who_tell_each_other_agree_whoever_proposes(data: st.DataObject) -> None:
    names = "abcd"
    knows = dict.fromkeys(names, AS_STARTED)
    for _ in range(data.draw(st.integers(0, 20))):
        who = data.draw(st.sampled_from(names))
        before = knows[who]
        match data.draw(st.sampled_from(["proposes", "hears", "restarts", "has averaged"])):
            case "proposes":
                knows[who] = proposal(before, who, data.draw(texts), once=data.draw(st.booleans()))
                assert knows[who] > before
                assert not before.once or knows[who] > after(before)
            case "hears":
                knows[who] = newest([before, knows[data.draw(st.sampled_from(names))]])
                assert knows[who] >= before
            case "restarts":
                knows[who] = AS_STARTED
            case "has averaged" if before.once:
                knows[who] = after(before)
                assert knows[who] > before
                assert not knows[who].once
    for one, other in itertools.permutations(names, 2):  # each hears of each
        knows[one] = newest([knows[one], knows[other]])
    assert len(set(knows.values())) == 1


def test_who_averaged_goes_back_to_what_was_without_a_word() -> None:
    was = Plan(3, "a", True, "diloco every=20")
    average = proposal(was, "b", was.text, once=True)
    assert average.once
    assert average < after(average) == Plan(4, "b", True, was.text)
    assert proposal(average, "a", "gossip") > after(average), "what somebody wants meanwhile comes after it"


@given(plans, plans)
def test_what_was_proposed_beside_an_average_beats_its_end_too_or_neither(plan: Plan, other: Plan) -> None:
    if plan.once and (plan.number, plan.author) != (other.number, other.author):
        assert (other > plan) == (other > after(plan))


@given(plans, plans)
def test_members_exchange_under_one_plan(mine: Plan, theirs: Plan) -> None:
    if mine != theirs:
        assert works_with(mine, theirs) == (mine.once and theirs < mine), "an average waits for who has not heard of it"
    assert works_with(mine, mine)


@given(plans, st.lists(st.tuples(st.none() | plans, st.booleans()), max_size=4))
def test_an_average_is_over_when_nobody_needs_us(plan: Plan, said: list[tuple[Plan | None, bool]]) -> None:
    others = [(theirs or plan, averaged) for theirs, averaged in said]
    needs_us = [theirs < plan or (theirs == plan and not averaged) for theirs, averaged in others]
    assert is_over(plan, others) == (not any(needs_us))


proofs = st.just(b"") | st.binary(min_size=PROOF_BYTES, max_size=PROOF_BYTES)


@given(plans, proofs)
def test_what_is_said_is_understood_and_fits(plan: Plan, proof: bytes) -> None:
    plan = replace(plan, proof=proof)
    assert unpack([*pack(plan)]) == plan
    assert unpack([*pack(plan)], proof).proof == proof
    for averaged, stands, stalled in itertools.product((False, True), repeat=3):
        about = NodeMeta("m" * 16, True, True, True, plan, averaged, stands, stalled)
        assert NodeMeta.unpack(about.pack()) == about
        assert NodeMeta.unpack(about.pack()).plan.proof == proof
        assert len(about.pack()) <= META_BYTES


def test_the_longest_plan_fits_and_a_longer_one_is_none() -> None:
    longest = Plan(NUMBER_MAX, "i" * 128, False, "t" * 200, bytes(PROOF_BYTES))
    about = NodeMeta(
        "m" * 16, True, True, True, longest, True, True, True, True, True, PARTS, FIRST, bytes(DRAWS_BYTES)
    )
    assert len(about.pack()) <= META_BYTES
    assert NodeMeta.unpack(about.pack()) == about
    for plan in (
        Plan(NUMBER_MAX + 1, "a"),
        Plan(-1, "a"),
        Plan(1, "i" * 129),
        Plan(1, "a", True, "t" * 201),
        Plan(1, "a", True, "ü" * 101),
    ):
        assert unpack([*pack(plan)]) == AS_STARTED


@given(st.lists(st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.binary(max_size=9), max_size=5))
def test_anything_said_is_a_plan_or_as_started(said: list[object]) -> None:
    assert unpack(said) == AS_STARTED or pack(unpack(said)) == said


@given(st.lists(st.none() | st.integers(-9, 9) | st.binary(max_size=100), min_size=1, max_size=3))
def test_anything_beside_a_plan_is_a_proof_or_none(said: list[object]) -> None:
    meta = msgpack.packb(["m", True, True, True, 1, "a", True, "gossip", True, True, True, *said])
    proof = NodeMeta.unpack(meta).plan.proof
    assert proof == (said[0] if isinstance(said[0], bytes) and len(said[0]) == PROOF_BYTES else b"")


# Whose plan it is -------------------------------------------------------------------------------------------------

REFEREE = Referee(3)


@given(plans, st.booleans(), st.sampled_from(["number", "author", "text", "proof", "swarm"]))
def test_a_plan_is_its_authors_and_of_one_swarm(known: Plan, once: bool, changed: str) -> None:
    here = REFEREE.signing("a")
    plan = proposal(known, "a", "gossip", once=once, signing=here)
    others = REFEREE.signing("b")
    assert is_signed(plan, others)
    assert is_signed(after(plan), others) if once else is_signed(plan, here)
    lie = {
        "number": replace(plan, number=plan.number + 1),
        "author": replace(plan, author="b"),
        "text": replace(plan, text="allreduce"),
        "proof": replace(plan, proof=b""),
        "swarm": proposal(known, "a", "gossip", once=once, signing=Referee(4).signing("a")),
    }[changed]
    assert not is_signed(lie, others)
    assert not is_signed(replace(lie, done=not lie.done), others)


def test_nobody_makes_an_average_of_what_was_proposed_for_good() -> None:
    plan = proposal(AS_STARTED, "a", "gossip", signing=REFEREE.signing("a"))
    assert not is_signed(replace(plan, done=False), REFEREE.signing("b"))
    assert is_signed(AS_STARTED, REFEREE.signing("b"))


def counts(name: str) -> st.SearchStrategy[int | None]:
    least, most = OPTIONS[name].metadata["least"], OPTIONS[name].metadata["most"]
    return st.none() | st.integers(least, most) | st.just(most)


changes = st.fixed_dictionaries(
    {
        "codec": st.none() | st.sampled_from(["auto", *CODECS]),
        "trigger": st.sampled_from([None, "always", "period:10", "change:0.125"]),
        "every": counts("every"),
        "overlap": st.sampled_from([None, *OVERLAPS]),
        "topology": st.sampled_from([None, "auto", "ring", "tree:4", "halving"]),
        "servers": counts("servers"),
        "min_peers": counts("min_peers"),
        "view": counts("view"),
        "outer_lr": st.sampled_from([None, "auto", "0.5"]),
        "outer_momentum": st.sampled_from([None, "auto", "0"]),
    },
)


STARTED = Settings(name="n", mode="gossip", codec="int8", trigger="always", every=7, view=5, wait_for=4)


@given(st.sampled_from([*MODES, "softsync:3"]), changes)
def test_a_plans_text_means_what_was_said(mode: str, said: dict[str, object]) -> None:
    if issubclass(class_of(mode), ParameterServer) and said["topology"] not in (None, "auto"):
        said["topology"] = "adv:2"
    assert set(said) == set(PLANNED), "every setting of a plan is drawn"
    text = text_of(mode, said)
    assert parts(text) == (mode, {key: str(value) for key, value in said.items() if value is not None})
    result = planned(STARTED, text)
    assert result.mode == mode
    assert (result.name, result.wait_for) == ("n", 4), "a plan changes nothing else"
    for key, value in said.items():
        unsaid = getattr(STARTED if mode == STARTED.mode else Settings(), key)
        assert getattr(result, key) == (unsaid if value is None else value)


def test_no_text_is_what_was_started() -> None:
    assert planned(STARTED, "") is STARTED


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("gosip", "mode: 'gosip' is not one of .*; did you mean 'gossip'"),
        ("gossip:3", "what takes an argument is .*softsync:N"),
        ("gossip every", "mode gossip: '' is not a whole number"),
        ("gossip every=-1", "every: -1 must be at least 0"),
        ("gossip view=0", "view: 0 must be at least 1"),
        ("gossip name=x", "unknown setting 'name'; known: codec, "),
        ("gossip =", "unknown setting ''"),
        ("  ", "mode: '' is not one of"),
        ("gossip" + " every=1" * 30, "longer than 200 bytes"),
    ],
)
def test_what_is_no_plan_is_refused_with_a_line(text: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        planned(STARTED, text)


def test_what_is_no_ascii_is_the_users_error() -> None:
    with pytest.raises(UserError, match="has characters beyond ASCII"):
        text_of("gossip", {"codec": "\udcff"})


def test_an_empty_mode_is_no_change_back_to_what_was_started() -> None:
    with pytest.raises(UserError, match="mode: empty; name one"):
        text_of("", {})
