"""Nobody waits for what another has given up, forgotten or never had a place for."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mode_swarm import ModeSwarm

import peerd.training.room
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector
from peerd.training.mode_core import ModeCore, PeersChanged, Received
from peerd.training.modes import Mode, ModeSettings, parse_mode, settings_of
from peerd.transport.messages import Delta, DeltaTaken, LinkSketch, PairHalf


def test_who_accepted_a_pair_that_the_other_gave_up_goes_on_with_others() -> None:
    swarm = ModeSwarm("noloco", "abc", every=4, codec="float32")
    swarm.all_hear()

    def steps(count: int) -> None:
        for _ in range(count):
            for name in "ab":
                swarm.step(name, 0.01)

    steps(8)

    def half_on_its_way() -> tuple[str, str] | None:
        for line in swarm.waiting():
            message = swarm.queues[line][0]
            if isinstance(message, PairHalf) and message.wants_answer:
                return line
            swarm.deliver(*line)
        return None

    while (line := half_on_its_way()) is None:
        steps(1)
    inviter, invited = line
    swarm.declare_dead(inviter, {invited})  # it alone has noticed anything
    swarm.lose(invited, inviter)
    swarm.hear(inviter)
    swarm.cut(inviter, invited)
    swarm.cut(invited, inviter)
    swarm.settle()
    before = swarm.nodes[invited].core.counts["exchanges"]
    for _ in range(60):
        for name in (invited, "c"):
            swarm.step(name, 0.01)
        swarm.settle()
        swarm.pass_time(5.0)
        swarm.settle()
    assert swarm.nodes[invited].core.counts["exchanges"] > before
    swarm.end()


def without_a_place(names: str, view: int, seed: int) -> ModeSwarm:
    """The news comes to each in another order, so that they take each other's places."""
    swarm, order = (
        ModeSwarm("gossip", names, size=14, seed=seed, dtype="float32", codec="sign", view=view),
        random.Random(seed),
    )
    pairs = [(one, other) for one in names for other in names if one != other]
    order.shuffle(pairs)
    for one, other in pairs:
        swarm.peers(one, set(swarm.nodes[one].heard) | {other})
        for _ in range(3):
            if waiting := swarm.waiting():
                swarm.deliver(*order.choice(waiting))
    swarm.settle()
    return swarm


@pytest.mark.parametrize(("count", "view"), [(5, 3), (3, 1), (4, 2)])
@pytest.mark.parametrize("seed", [5, 6, 10, 11])
def test_a_newcomer_is_made_a_place_where_all_are_taken(
    monkeypatch: pytest.MonkeyPatch, count: int, view: int, seed: int
) -> None:
    monkeypatch.setattr(peerd.training.room, "LARGE", 4)
    names = "abcde"[:count]
    swarm = without_a_place(names, view, seed)
    for _ in range(7):  # a minute, in which the links are used
        for name in names:
            swarm.step(name, 0.01)
        swarm.settle()
        swarm.pass_time(10.0)
        swarm.settle()
    swarm.live("z", swarm.nodes["a"].x)
    swarm.all_hear()
    swarm.settle()
    assert any(link.active for link in swarm.nodes["z"].core._links.held.values())
    assert all(len(node.core._links.live()) <= view + 1 for node in swarm.nodes.values())


@pytest.mark.cases(3)
@pytest.mark.parametrize("what", ["cut", "restart"])
@pytest.mark.parametrize("mode", ["gossip", "elastic:pairwise", "gossip-push", "push-sum"])
def test_who_has_ended_tells_one_that_forgot_its_link(mode: str, what: str) -> None:
    names, ended, rest = "abcdefgh", "efgh", "abcd"
    swarm = ModeSwarm(mode, names, size=14, seed=1, robust=True)
    rng = np.random.default_rng(1)
    swarm.all_hear()
    swarm.settle()

    def train() -> None:
        for _ in range(10):
            for name in rest:
                swarm.step(name, rng.normal(size=14) * 0.01)
            swarm.settle()

    swarm.train(20, lambda _: rng.normal(size=14) * 0.01)
    for name in ended:
        swarm.finish(name)
    swarm.settle()
    train()
    if what == "cut":
        swarm.declare_dead("a", set(names) - {"a"})
        for name in names[1:]:
            swarm.declare_dead(name, {"a"})
        swarm.settle()
        swarm.heal()
    else:
        swarm.die("a")
        for name in names[1:]:
            swarm.hear(name)
        swarm.settle()
        swarm.live("a", swarm.nodes["b"].x)
        swarm.all_hear()
        swarm.settle()
    train()
    swarm.end()


def test_an_exchange_with_one_that_left_is_no_measure_any_more() -> None:
    nothing: Any = SimpleNamespace(counts={}, on_peers=lambda *_: [], on_message=lambda *_: [])
    core = ModeCore()
    core.mode = nothing
    half = Delta(1, 1, "sign", 0.1, True, False, b"", 0.0, 0.0, ())
    core.handle(PeersChanged(frozenset("xy")), 0.0)
    for peer, seconds in (("x", 100.0), ("y", 2.0)):
        core.sent(peer, half, 0.0)
        core.handle(Received(peer, DeltaTaken(1, 1)), seconds)
    assert core.slowest_s == 100.0
    core.handle(PeersChanged(frozenset("y")), 101.0)
    assert core.slowest_s == 2.0


@pytest.mark.parametrize("known", ["xy", "y", ""])
def test_an_exchange_in_which_a_node_stood_still_for_hours_is_no_measure_and_a_line_that_slows_down_is(
    known: str,
) -> None:
    """Who left after it would have waited for four times as long, for a partner that does not answer."""
    nothing: Any = SimpleNamespace(counts={}, on_peers=lambda *_: [], on_message=lambda *_: [])
    core = ModeCore()
    core.mode = nothing
    half = Delta(1, 1, "sign", 0.1, True, False, b"", 0.0, 0.0, ())
    core.handle(PeersChanged(frozenset("xy")), 0.0)

    def exchange(peer: str, seconds: float) -> float:
        core.sent(peer, half, 0.0)
        core.handle(Received(peer, DeltaTaken(1, 1)), seconds)
        return core.slowest_s

    for peer in known:
        exchange(peer, 2.0)
    assert exchange("x", 14_400.0) == (8.0 if known else 14_400.0)
    assert [exchange("x", 100.0) for _ in range(3)][-1] >= 100.0


def test_a_question_is_no_exchange() -> None:
    nothing: Any = SimpleNamespace(counts={}, on_peers=lambda *_: [], on_message=lambda *_: [])
    core = ModeCore()
    core.mode = nothing
    core.handle(PeersChanged(frozenset("x")), 0.0)
    question = LinkSketch(1, 1, 0, True, True, bytes(488))
    core.sent("x", question, 0.0)
    core.handle(Received("x", question), 100.0)
    assert core.slowest_s == 0.0


@pytest.mark.parametrize("seed", [5, 6, 10, 11])
def test_a_run_that_ends_before_any_had_a_place_for_it_is_not_settled_alone(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(peerd.training.room, "LARGE", 4)
    swarm = without_a_place("abcde", 3, seed)
    swarm.live("z", swarm.nodes["a"].x)
    swarm.all_hear()
    swarm.settle()
    assert not swarm.nodes["z"].core._links.live(), "all places are taken"
    swarm.step("z", 0.3)
    swarm.finish("z")
    swarm.settle()
    assert not swarm.nodes["z"].proceeded
    swarm.end()
    assert swarm.spread() < 0.01


@pytest.mark.parametrize("mode", ["hardsync", "softsync:1", "async"])
def test_how_long_others_took_to_end_is_no_pace_of_the_next_run(mode: str) -> None:
    """Found by any weather: reminders of the next run came after four times as long, 27 minutes here."""
    swarm = ModeSwarm(mode, "abcd", servers=3)
    swarm.all_hear()
    swarm.settle()
    for name in "acdb":
        swarm.finish(name)
        swarm.settle()
        swarm.pass_time(400.0)
    swarm.heal()
    for name in "abcd":
        swarm.begin_again(name)
    ended = swarm.now
    swarm.train(3)
    assert swarm.now - ended < 1.0, "nor does a round of some servers wait for who is in none of the others'"


@pytest.mark.parametrize("mode", ["gossip", "noloco", "push-sum"])
def test_who_came_no_closer_at_a_runs_end_is_a_partner_of_the_next(mode: str) -> None:
    """Nobody flushed to it, and all waited for that: found where two were too far apart to agree."""
    swarm = ModeSwarm(mode, "abc", trigger="always", robust=True)
    swarm.all_hear()
    swarm.settle()
    rng = np.random.default_rng(0)
    for run in range(2):
        swarm.train(12, lambda name: rng.normal(size=swarm.layout.total))
        swarm.end()
        assert swarm.spread() < 0.01, run
        for name, node in swarm.nodes.items():
            partners = (node.core._flush if mode == "noloco" else node.core)._held()
            assert partners
            for partner in partners:
                partner.progress.is_stuck = True
            swarm.begin_again(name)


@pytest.mark.parametrize("mode", ["gossip", "elastic:pairwise", "gossip-push"])
def test_a_run_that_ends_while_models_differ_says_from_whose(mode: str) -> None:
    """It counted as settled, and nobody heard that it was not. One shows a model far away, whatever comes."""
    told, lies = settings_of(mode, ModeSettings(trigger="always", codec="float32")), [False]

    def make(name: str, layout: Layout, rng: random.Random, values: Callable[[], Vector]) -> Mode:
        def shown() -> Vector:
            return np.full(layout.total, 50.0) if lies[0] and name == "d" else values()

        return parse_mode(mode)(name, layout, rng, told, shown)

    swarm = ModeSwarm(mode, "abcd", trigger="always", make=make)
    swarm.all_hear()
    swarm.settle()
    rng = np.random.default_rng(0)
    for lies_now in (False, True):
        swarm.train(12, lambda name: 0.1 * rng.normal(size=swarm.layout.total))
        assert not swarm.logged
        lies[0] = lies_now
        swarm.end()
        for name in "abcd":
            swarm.begin_again(name)
    said = {name: text.rpartition(": ")[2].removesuffix(" came no closer") for name, text in swarm.logged}
    assert len(said) == len(swarm.logged)
    assert said == {"a": "d", "b": "d", "c": "d", "d": "a, b, c"}


@settings(max_examples=60, deadline=None, print_blob=True)
@given(
    overlap=st.sampled_from(["quorum", "blocking", "delayed", "hpsgd"]), until=st.integers(0, 70), at_once=st.booleans()
)
@example(overlap="blocking", until=0, at_once=False)  # the others landed again where their first last round had them
@example(overlap="blocking", until=12, at_once=False)  # it had missed that end, and nobody came to a round of its own
@example(overlap="hpsgd", until=35, at_once=False)
@example(overlap="quorum", until=40, at_once=False)
@example(overlap="quorum", until=40, at_once=True)
@example(overlap="delayed", until=30, at_once=True)
def test_a_run_that_begins_while_the_last_one_ends_keeps_its_steps(overlap: str, until: int, *, at_once: bool) -> None:
    """Where the last round of the run before came late all that the next one had made was taken back, without end."""
    swarm = ModeSwarm("allreduce", "abc", 30, robust=False, codec="float32", overlap=overlap, every=1)
    swarm.all_hear()
    swarm.settle()
    swarm.train(8, lambda name: 0.01)
    for name in "abc":
        swarm.finish(name)
    for turn in range(until):
        if lines := swarm.waiting():
            swarm.deliver(*lines[turn % len(lines)])
    late = swarm.nodes["c"]
    before, made = float(np.mean([node.x for node in swarm.nodes.values()])), -late.steps
    swarm.begin_again("c")
    for _ in range(12):
        swarm.step("c", 1.0)
        if not at_once:
            swarm.settle()
            swarm.pass_time(0.15)
            swarm.settle()
    made += late.steps
    assert made == 12 or late.waits or (at_once and overlap == "blocking")
    if late.waits:
        swarm.settle()
    swarm.end()
    assert swarm.spread() < 1e-3
    assert float(late.x.mean()) - before > made / 3 - 0.3
    assert overlap == "hpsgd" or float(late.x.mean()) - before < made / 3 + 0.3


@pytest.mark.parametrize(
    ("mode", "kept"),
    [
        ("gossip", "_allowances._peers"), ("gossip", "_links.opening"), ("elastic", "_centre._allowances._said"),
        ("gossip-push", "_answers._repeats"), ("gossip-pull", "_copies.outgoing"),
        ("softsync:4", "_leadership.shards.0.server.limits._last"),
    ],
)  # fmt: skip
def test_of_who_has_gone_nothing_is_kept_though_its_last_words_come_late(mode: str, kept: str) -> None:
    swarm = ModeSwarm(mode, "abcz", robust=True)
    swarm.all_hear()
    swarm.settle()
    swarm.train(2, lambda name: 0.1)
    for name in "abcz":
        swarm.step(name, 0.1)
        for other in "abc":
            swarm.lose(name, other)  # so that all is said again
    swarm.pass_time(61.0)
    for name in "abc":
        swarm.peers(name, set("abc"))
    swarm.settle()
    swarm.die("z")
    swarm.live("d", swarm.start)
    swarm.all_hear()
    for name in "abc":
        found = swarm.nodes[name].core
        for part in kept.split("."):
            found = found[int(part)] if part.isdigit() else getattr(found, part, {})
        assert "z" not in found
