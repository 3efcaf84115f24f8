"""Nothing that a peer sends raises in a mode, but PeerError; a stranger's word changes nothing, and fills nothing.

Three train; what has been said so far is what the hostile messages are made of: a field or two of it changed, or a
message all made up. They come between any two honest ones, through the core that each node has around its mode.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, cast, get_type_hints

import numpy as np
import pytest
from attacked import ROWS, Attacked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mode_swarm import SETTINGS
from wire_strategies import instances_of, values_of

from peerd.training.codecs import CODECS
from peerd.training.counts import REPORTED_MAX, REPORTED_STEP, STEP_MAX
from peerd.training.early import BYTES_MAX, MESSAGES_MAX, SENDERS_MAX, EarlyMessages
from peerd.training.effects import Send
from peerd.training.mode_core import (
    LAST_WORDS_S,
    Received,
)
from peerd.training.rounds.attempt import Pace
from peerd.training.rounds.leader import Leader
from peerd.training.rounds.member import EARLY_OF_ONE, REPEAT_S
from peerd.transport.errors import PeerError
from peerd.transport.messages import (
    MESSAGES,
    CentreIs,
    LinkOpen,
    LinkSnapshot,
    Message,
    Prepare,
    Promise,
    Push,
    RoundBegin,
    RoundPhase,
    RoundPieces,
    RoundReport,
    ShardLeader,
)

EXAMPLES = max(1, settings().max_examples // 33)  # of each mode: 3, or 300 by --hypothesis-profile=long
MODE_MESSAGES = [cls for kind, cls in MESSAGES.items() if 48 <= kind < 128]
HOSTILE = settings(max_examples=EXAMPLES, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))

numbers = st.one_of(
    st.integers(-2, 20),
    st.sampled_from([2**16, 2**32, 2**48, 2**52, 2**53 - 1, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]),
)
texts = st.sampled_from(["a", "b", "c", "x", "", "ring", "tree:0", "tree:64", "halving", "no", *CODECS])
floats = st.sampled_from([0.0, -1.0, 1e-300, 0.25, 0.5, 2.0, 1e6, 1e300])


def made_up(said: list[Message], data: st.DataObject) -> Message:
    """Something that was said, changed in part, or something else altogether."""
    if not said or data.draw(st.integers(0, 4)) == 0:
        lied: Message = data.draw(instances_of(data.draw(st.sampled_from(MODE_MESSAGES))))
        return lied
    message: Any = said[data.draw(st.integers(0, len(said) - 1))]
    hints = get_type_hints(type(message))
    names = [field.name for field in fields(message)]
    for name in data.draw(st.lists(st.sampled_from(names), max_size=2)) if names else ():
        kind = {int: numbers, str: texts, float: floats}.get(hints[name], values_of(hints[name]))
        if name == "roster":
            kind = st.lists(texts, max_size=4).map(tuple)
        message = replace(message, **{name: data.draw(kind)})
    found: Message = message
    return found


def work(swarm: Attacked, rounds: int, between: Callable[[], None]) -> None:
    """Everybody steps, and a few messages come at a time."""
    for number in range(rounds):
        for name in sorted(swarm.nodes):
            swarm.step(name, swarm.rng.normal(size=swarm.layout.total) * 0.1)
        for _ in range(3):
            for source, target in swarm.waiting():
                swarm.deliver(source, target)
            between()
        if number % 3 == 2:
            swarm.pass_time(70.0)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, [row[0], *row[1].values()])))
@HOSTILE
@given(data=st.data())
def test_a_members_message_raises_nothing_but_peer_error(row: tuple[str, dict[str, Any]], data: st.DataObject) -> None:
    swarm = Attacked(row)
    swarm.all_hear()

    def lie() -> None:
        for _ in range(data.draw(st.integers(0, 3))):
            sender, target = data.draw(st.permutations("abc"))[:2]
            swarm.lie(sender, target, made_up(swarm.said, data))

    work(swarm, 4, lie)
    assert all(np.isfinite(node.x).all() for node in swarm.nodes.values())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, [row[0], *row[1].values()])))
@HOSTILE
@given(data=st.data())
def test_a_strangers_message_changes_nothing(row: tuple[str, dict[str, Any]], data: st.DataObject) -> None:
    models = []
    for attacked in (False, True):
        swarm = Attacked(row)
        swarm.all_hear()

        def lie(swarm: Attacked = swarm, attacked: bool = attacked) -> None:
            for number in range(data.draw(st.integers(0, 3)) if attacked else 0):
                target = data.draw(st.sampled_from("abc"))
                before = list(swarm.said)
                swarm.lie(f"x{number}", target, made_up(swarm.said, data))
                assert swarm.said == before, "nobody answers a stranger"

        work(swarm, 4, lie)
        models.append([node.x.tobytes() for node in swarm.nodes.values()])
    assert models[0] == models[1]


# ---------------------------------------------------------------- what was found, one by one


def in_a_round(mode: str = "allreduce", *, codec: str = "float32", **told: Any) -> tuple[Attacked, RoundBegin]:
    """Where b waits for the leader's word, and what that word will be."""
    swarm = Attacked((mode, {}), codec=codec, **told)
    swarm.all_hear()
    swarm.settle()
    for _ in range(2):
        for name in "abc":
            swarm.step(name, 0.1)
    while not (orders := [each for each in swarm.queues["a", "b"] if isinstance(each, RoundBegin)]):
        assert any(swarm.deliver(*link) for link in swarm.waiting() if link[1] == "a")
    return swarm, orders[0]


@pytest.mark.parametrize(
    "lie",
    [
        {"topology": "no"}, {"codec": "no"}, {"whole": False}, {"whole": False, "final": True}, {"lives": ()},
        {"round": 2**52}, {"attempt": 2**52}, {"round": -1}, {"codec": "sign"},
    ],
    ids=str,
)  # fmt: skip
def test_an_order_that_no_leader_gives_is_refused_before_it_is_begun(lie: dict[str, Any]) -> None:
    swarm, begin = in_a_round()
    with pytest.raises(PeerError):
        swarm.nodes["b"].core.on_message("a", replace(begin, **lie), swarm.now)
    swarm.train(4)


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ({"codec": "no"}, "codec 'no' is none"),
        ({"weights": (1.0, 1.0, 1.0)}, "exchanges weights"),
        ({"source": "a"}, "exchanges weights"),
        ({"waited": ()}, "waited"),
        ({"waited": (0.0, -1.0, 0.0)}, "waited"),
        ({"waited": (0.0, float("nan"), 0.0)}, "waited"),
    ],
    ids=str,
)
def test_nor_is_one_of_differences(lie: dict[str, Any], why: str) -> None:
    swarm, begin = in_a_round(codec="int8")
    assert not begin.whole
    with pytest.raises(PeerError, match=why):
        swarm.nodes["b"].core.on_message("a", replace(begin, **lie), swarm.now)
    swarm.train(4)


@pytest.mark.parametrize(("sender", "phase"), [("x", RoundPhase.RUNNING), ("a", RoundPhase.HELD)])
def test_pieces_that_cannot_be_end_no_attempt_that_their_sender_has_no_part_in_any_more(
    sender: str, phase: RoundPhase
) -> None:
    swarm, begin = in_a_round()
    rounds = swarm.nodes["b"].core._rounds
    while rounds.phase != phase:
        assert any(swarm.deliver(*link) for link in swarm.waiting())
    with pytest.raises(PeerError):
        rounds.on_message(sender, RoundPieces(begin.round, begin.attempt, (0,), (b"",)), swarm.now)
    assert rounds.phase == phase
    swarm.train(4)


@pytest.mark.parametrize("field", ["round", "attempt", "agreed"])
@pytest.mark.parametrize("number", [-1, 2**53 - 1, 2**64 - 1])
def test_a_reports_numbers_do_not_take_the_rounds_to_their_end(field: str, number: int) -> None:
    swarm = Attacked(("allreduce", {}), codec="float32")
    swarm.all_hear()
    report: Any = next(said for said in swarm.queues["b", "a"] if isinstance(said, RoundReport))
    with pytest.raises(PeerError):
        swarm.nodes["a"].core.on_message("b", replace(report, **{field: number}), swarm.now)
    swarm.train(4)


@pytest.mark.parametrize("field", ["round", "attempt", "agreed"])
def test_a_leader_that_believes_a_first_report_is_believed_by_the_others(field: str) -> None:
    swarm = Attacked(("allreduce", {}), codec="float32")
    swarm.all_hear()
    swarm.settle()
    for _ in range(2):
        for name in "abc":
            swarm.step(name, 0.1)
    said = swarm.queues["b", "a"]
    assert any(isinstance(each, RoundReport) and each.phase == RoundPhase.READY for each in said)
    for place, each in enumerate(said):
        if isinstance(each, RoundReport):
            said[place] = replace(each, **cast(Any, {field: REPORTED_MAX}))
    swarm.train(4)
    assert not swarm.refused


@pytest.mark.parametrize(
    ("field", "step"),
    [("round", STEP_MAX), ("attempt", STEP_MAX), ("round", REPORTED_STEP), ("attempt", REPORTED_STEP)],
)
def test_what_a_leader_orders_by_any_report_is_believed_by_the_others(field: str, step: int) -> None:
    """Else they would drop it for what one member has said."""
    swarm = Attacked(("allreduce", {}), "abcd", codec="float32", overlap="blocking")
    swarm.all_hear()
    swarm.settle()
    swarm.train(4)
    rounds = swarm.nodes["a"].core.mode._rounds
    ours = rounds.round if field == "round" else rounds._seen
    report = replace(swarm.nodes["d"].core.mode._rounds._report(swarm.now), **{field: ours + step})
    for name in "abc":
        swarm.step(name, 0.1)
    swarm.lie("d", "a", report)
    swarm.step("d", 0.1)
    swarm.settle()
    assert swarm.refused == 0


def test_no_reports_of_one_member_bring_rounds_to_where_a_newcomer_does_not_believe_them() -> None:
    """Be it as far as is believed, from the first round on: it takes thousands."""
    swarm = Attacked(("allreduce", {}), "abcd", codec="float32", overlap="blocking")
    swarm.all_hear()
    swarm.settle()
    ours = swarm.nodes["a"].core.mode._rounds
    for _ in range(120):
        for name in "abcd":
            swarm.step(name, 0.1)
        said = swarm.queues["d", "a"]
        for place, each in enumerate(said):
            if isinstance(each, RoundReport) and each.phase == RoundPhase.READY:
                said[place] = replace(each, round=ours.round + STEP_MAX if ours.round else REPORTED_MAX)
        swarm.settle()
    assert ours.round > 20
    swarm.refused = 0
    swarm.live("e", swarm.start)
    swarm.all_hear()
    swarm.settle()
    swarm.train(8)
    assert swarm.refused == 0
    assert swarm.nodes["e"].core.mode._rounds.round == ours.round


@pytest.mark.parametrize("victim", ["b", "c"])  # the former leads next
@pytest.mark.parametrize("min_peers", [1, 4])
def test_who_was_taken_far_ahead_by_a_leader_that_lied_is_in_rounds_again_under_the_next(
    victim: str, min_peers: int
) -> None:
    swarm = Attacked(("allreduce", {}), "abcde", codec="float32", overlap="blocking", min_peers=min_peers)
    swarm.all_hear()
    swarm.settle()
    swarm.train(4)
    rounds = swarm.nodes[victim].core.mode._rounds
    while rounds.phase == RoundPhase.IDLE:
        for name in "abcde":
            swarm.step(name, 0.1)
    begin = rounds.order
    swarm.lie("a", victim, replace(begin, round=begin.round + 1, attempt=begin.attempt + STEP_MAX - (1 << 21)))
    assert rounds._seen > STEP_MAX // 2
    swarm.die("a")
    swarm.all_hear()
    swarm.settle()
    swarm.train(8)
    assert swarm.refused == 0
    assert len({node.core.mode._rounds._seen for node in swarm.nodes.values()}) == 1


def test_no_rounds_of_years_bring_attempts_to_where_a_newcomer_does_not_believe_them() -> None:
    """A count of them ends there: only who comes to lead draws where it begins."""
    swarm = Attacked(("allreduce", {}), codec="float32", overlap="blocking")
    swarm.all_hear()
    swarm.settle()
    swarm.train(4)
    rounds = swarm.nodes["b"].core.mode._rounds
    number, attempt = rounds.round, rounds._seen
    swarm.train(20)
    assert 8 <= rounds.round - number == rounds._seen - attempt


def test_a_length_that_is_none_is_its_members_fault_and_not_the_leaders_that_repeats_it() -> None:
    swarm = Attacked(("allreduce", {}), "abcd", codec="int8", overlap="blocking")
    swarm.all_hear()
    swarm.settle()
    swarm.train(4)
    said = swarm.nodes["d"].core.mode._rounds._report(swarm.now)
    with pytest.raises(PeerError):
        swarm.nodes["a"].core.on_message("d", replace(said, lengths=(-1.0, 0.0)), swarm.now)


def test_a_member_that_claims_to_have_waited_for_ever_takes_nobody_elses_turn() -> None:
    leader = Leader("a", random.Random(1), SETTINGS, 48, differences=False)
    idle = RoundReport(1, RoundPhase.IDLE, 0, 0, 0, 0, False, False, False)
    for name in "abc":
        leader.heard(name, replace(idle, phase=RoundPhase.READY), 0.0)
    pace = Pace()
    everyone = frozenset("abc")
    begun = next(order for _, order in leader.decide(everyone, pace, 0.0))
    for name in "abc":
        held = replace(idle, phase=RoundPhase.HELD, attempt=begun.attempt)
        leader.heard(name, held, 1.0)
    leader.decide(everyone, pace, 1.0)
    after = replace(idle, round=1, agreed=begun.attempt, attempt=begun.attempt)
    leader.heard("a", after, 2.0)
    leader.heard("c", after, 2.0)
    leader.heard("b", replace(after, phase=RoundPhase.READY, waits_s=1e9), 2.0)
    assert leader.decide(everyone, pace, 3.0) == [], "the others have not come to it yet"


def test_early_pieces_of_one_member_are_bounded() -> None:
    swarm, begin = in_a_round()
    core = swarm.nodes["b"].core
    for number in range(50):
        core.on_message("c", RoundPieces(1, begin.attempt + number, (0, 1), (b"x" * 9, b"x" * 9)), swarm.now)
    assert sum(len(pieces.seqs) for _, pieces in core.mode._rounds._early) <= EARLY_OF_ONE


def test_pieces_that_overtake_their_order_are_not_held_against_the_leader() -> None:
    """Of which the last cannot be; the order is begun all the same, and who sent them is named."""
    swarm, begin = in_a_round(topology="ring", overlap="blocking")
    core = swarm.nodes["b"].core
    core.on_message("c", RoundPieces(begin.round, begin.attempt, (999,), (b"x",)), swarm.now)
    effects = core.on_message("a", begin, swarm.now)
    assert any(isinstance(effect, Send) and isinstance(effect.message, RoundPieces) for effect in effects)
    said = [effect.message for effect in core.on_timer(swarm.now + REPEAT_S) if isinstance(effect, Send)]
    assert [message.blames for message in said if isinstance(message, RoundReport)] == ["c"]


def test_what_a_newcomer_says_before_its_news_is_heard_with_it() -> None:
    swarm = Attacked(("gossip", {}), "ab")
    swarm.hear("b")
    opens = [swarm.queues["b", "a"].popleft()]
    core = swarm.nodes["a"].core
    assert core.on_message("b", opens[0], 0.0) == []
    assert core.core.came_early() == []
    assert core.mode.counts["unheard"] == 1
    core.on_peers(frozenset("b"), 0.0)
    assert core.core.came_early() == [Received("b", opens[0])]
    assert core.core.came_early() == []


def test_what_strangers_say_fills_nothing() -> None:
    early = EarlyMessages()
    for number in range(10 * SENDERS_MAX):
        for link in range(10 * MESSAGES_MAX):
            early.keep(f"x{number}", LinkOpen(link))
    kept = early.take({f"x{number}" for number in range(10 * SENDERS_MAX)})
    assert len(kept) == SENDERS_MAX * MESSAGES_MAX
    piece = bytes(BYTES_MAX // 4)
    for number in range(SENDERS_MAX):
        early.keep(f"y{number}", LinkSnapshot(number, "float32", (piece,)))
    assert len(early.take({f"y{number}" for number in range(SENDERS_MAX)})) == 4


def test_who_has_gone_is_heard_for_a_while() -> None:
    swarm = Attacked(("gossip", {}), "abc")
    swarm.all_hear()
    core = swarm.nodes["a"].core
    core.on_peers(frozenset("c"), 100.0)
    assert core.on_message("b", LinkOpen(9), 101.0) != []
    assert core.on_message("b", LinkOpen(10), 100.0 + LAST_WORDS_S) == []


@pytest.mark.parametrize("weight", [1.1e6, 1e300])
def test_no_push_brings_more_weight_than_any_swarm_has(weight: float) -> None:
    swarm = Attacked(("push-sum", {}), "ab", codec="float32")
    swarm.all_hear()
    swarm.step("b", 1.0)
    (push,) = (said for said in swarm.queues["b", "a"] if isinstance(said, Push))
    with pytest.raises(PeerError, match="weight"):
        swarm.nodes["a"].core.on_message("b", replace(push, weight=weight), 0.0)
    assert swarm.nodes["a"].core.weight == 1.0


def test_no_bid_takes_terms_and_clocks_to_their_end() -> None:
    swarm = Attacked(("hardsync", {}))
    swarm.all_hear()
    swarm.train(4)
    core = swarm.nodes["a"].core
    for lie in (Prepare(0, 2**52, 0), ShardLeader(0, 2**52, "b", True, 0, ()), Promise(0, 1, 1, 2**52, (), ())):
        with pytest.raises(PeerError):
            core.on_message("b", lie, swarm.now)
    swarm.train(4)


def served() -> tuple[Attacked, dict[str, Any]]:
    """Four workers of one server, and what each knows of it."""
    swarm = Attacked(("hardsync", {}), "abcd")
    swarm.all_hear()
    swarm.settle()
    swarm.train(4)
    states = {name: node.core.mode._leadership.shards[0] for name, node in swarm.nodes.items()}
    return swarm, states


@pytest.mark.parametrize("step", [STEP_MAX, REPORTED_STEP, 1000])
@pytest.mark.parametrize("told", ["owner", "another"])
def test_no_word_of_a_server_sets_its_owner_and_the_others_at_odds(told: str, step: int) -> None:
    """Neither by a bid that they refuse, nor as one of them believes in a ballot of which the owner has not heard."""
    swarm, states = served()
    term, owner = states["a"].leader
    liar, another, _ = sorted({*"abcd"} - {owner})
    named, to = (liar, owner) if told == "owner" else (owner, another)
    swarm.lie(liar, to, ShardLeader(0, term + step, named, True, 0, ()))
    swarm.settle()
    swarm.train(4)
    assert swarm.refused == 0
    assert len({state.leader for state in states.values()}) == 1


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("bids", [False, True])
def test_who_was_taken_far_ahead_by_an_owner_that_lied_is_served_again_by_the_next(place: int, bids: bool) -> None:
    swarm, states = served()
    term, owner = states["a"].leader
    victim = sorted({*"abcd"} - {owner})[place]
    for times in (1, 2, 3):
        far = term + times * STEP_MAX
        swarm.lie(owner, victim, Prepare(0, far, 0) if bids else ShardLeader(0, far, owner, True, 0, ()))
    swarm.die(owner)
    swarm.all_hear()
    swarm.settle()
    swarm.train(4)
    assert swarm.refused == 0
    assert len({states[name].leader for name in swarm.nodes}) == 1


def test_no_age_takes_the_centre_over_for_ever() -> None:
    swarm = Attacked(("elastic", {}))
    swarm.all_hear()
    swarm.train(4)
    with pytest.raises(PeerError):
        swarm.nodes["a"].core.on_message("b", CentreIs("b", 2**52), swarm.now)
    assert swarm.nodes["a"].core.centre == "a"
