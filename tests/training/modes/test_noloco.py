"""NoLoCo's pairs: the outer step is the published one, it is made once or not at all, and nobody waits for the dead."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gossip_swarm import GossipSwarm
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant
from weather import NAMES, Connections, weather_settings

from peerd.training.effects import Vector
from peerd.training.flush import FLUSH_REACH
from peerd.training.modes.noloco import ANSWERS_MAX, TRANSITIONS, NoLoCo, Stage, _Pair
from peerd.training.one_way.allowance import BUFFERS_MAX, LIMIT, REACH_MIN
from peerd.training.pairs.outer import ETA, MU
from peerd.transport.errors import PeerError
from peerd.transport.messages import CentreIs, PairAnswer, PairHalf, PairInvite

H = 3


def noloco_swarm(count: int, size: int, codec: str = "float32", **settings: object) -> GossipSwarm:
    swarm = GossipSwarm(count, size, codec, mode="noloco", every=H, **settings)  # type: ignore[arg-type]
    swarm.everyone_alive()
    return swarm


@pytest.mark.parametrize(("eta", "mu", "told"), [(ETA, MU, {}), (1.0, 0.0, {"outer_lr": "1", "outer_momentum": "0"})])
def test_two_in_lockstep_follow_the_formula(eta: float, mu: float, told: dict[str, str]) -> None:
    swarm = noloco_swarm(2, 60, **told)
    rng = np.random.default_rng(0)
    phi = {name: node.x.copy() for name, node in swarm.nodes.items()}
    momentum: dict[str, Vector] = {name: np.zeros(60) for name in phi}
    for _ in range(4):
        for _ in range(H):
            for name in phi:
                swarm.step(name, rng.normal(size=60))
        x = {name: node.x.copy() for name, node in swarm.nodes.items()}
        swarm.settle()
        mean_delta = sum(x[name] - phi[name] for name in phi) / 2
        mean_phi = sum(phi.values()) / 2
        for name in phi:
            momentum[name] = mu * momentum[name] + eta * mean_delta + eta * (mean_phi - phi[name])
            phi[name] = phi[name] + momentum[name]
            assert np.allclose(swarm.nodes[name].x, phi[name], atol=1e-5)
    assert all(node.core.counts["exchanges"] == 4 for node in swarm.nodes.values())


@settings(max_examples=20, deadline=None, print_blob=True)
@given(codec=st.sampled_from(["float32", "bfloat16", "int8", "sign"]), seed=st.integers(0, 1000))
def test_no_codec_moves_the_pairs_mean_and_later_progress_is_kept(codec: str, seed: int) -> None:
    swarm = noloco_swarm(2, 60, codec, seed=seed)
    rng = np.random.default_rng(seed)
    phi = swarm.initial_sum
    for _ in range(H):
        for name in swarm.nodes:
            swarm.step(name, rng.normal(size=60))
    contributed = swarm.injected.copy()
    while not swarm.queues["a", "b"] or not isinstance(swarm.queues["a", "b"][0], PairHalf):
        swarm.deliver("a", "b")
        swarm.deliver("b", "a")
    swarm.step("a", rng.normal(size=60))  # its contribution is on its way
    swarm.settle()
    assert swarm.nodes["a"].applied == swarm.nodes["b"].applied == 1
    total = sum(node.x for node in swarm.nodes.values())
    assert np.allclose(total, phi + ETA * contributed + (swarm.injected - contributed), atol=1e-9)


@settings(max_examples=10, deadline=None, print_blob=True)
@given(late=st.integers(1, 19), seed=st.integers(0, 2**16))
def test_pairs_that_are_due_at_another_time_meet_the_others_too(late: int, seed: int) -> None:
    """Two that have met would be due together, and never meet who is due when they are not."""
    swarm = GossipSwarm(4, 8, "float32", mode="noloco", every=20, seed=seed)
    swarm.everyone_alive()
    for step in range(60 * 20):
        for name in "abcd" if step >= late else "ab":
            swarm.step(name, 1.0)
        swarm.settle()
    for name, node in swarm.nodes.items():
        met = {status.peer: status.exchanges for status in node.core.links()}
        assert met.keys() == set("abcd") - {name}
        assert min(met.values()) >= 2, met


@settings(max_examples=30, deadline=None, print_blob=True)
@given(lies=st.lists(st.floats(-1e17, 1e17), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_a_liars_half_moves_the_other_by_no_more_than_its_own_steps_allow(lies: list[float], seed: int) -> None:
    """The outer step makes at most ETA / (1 - MU) of all that it is given: own progress, and what the liar may add."""
    swarm = noloco_swarm(2, 60, robust=True, seed=seed, buffers=12)
    rng = np.random.default_rng(seed)
    victim = swarm.nodes["b"]
    start, path, cut = victim.x.copy(), 0.0, swarm.layout.parameters
    for lie in lies:
        for _ in range(H):
            step = rng.normal(size=60)
            path += float(np.linalg.norm(step[:cut]))
            for name in swarm.nodes:
                swarm.step(name, step)
        before = victim.x[cut:].copy()
        swarm.nodes["a"].x = np.full(60, lie)
        swarm.settle()
        at_first = max(2 * LIMIT * path, float(np.linalg.norm(start[:cut])) * REACH_MIN)
        most = ETA / (1 - MU) * (path + LIMIT * path + at_first)
        assert float(np.linalg.norm((victim.x - start)[:cut])) <= 1.01 * most
        assert np.linalg.norm(victim.x[cut:] - before) <= 1.01 * BUFFERS_MAX * np.linalg.norm(before)
    assert victim.core.counts["exchanges"] == len(lies)
    assert victim.core.counts["halves_shortened"] >= sum(abs(lie) > 1e6 for lie in lies)


@settings(max_examples=3, deadline=None, print_blob=True)
@given(lie=st.sampled_from([-1e3, 30.0]), seed=st.integers(0, 1000))
def test_the_end_of_a_run_gives_a_liar_no_more_than_was_usual_between_the_others(lie: float, seed: int) -> None:
    """The flush is by gossip, which has seen nothing of the run: it is told how far apart all were that have met."""
    swarm = noloco_swarm(6, 60, robust=True, seed=seed)
    rng = np.random.default_rng(seed)
    liar, honest = "f", "abcde"
    swarm.nodes[liar].core._robust = False
    swarm.nodes[liar].core._flush._settings = replace(swarm.nodes[liar].core._flush._settings, robust=False)
    for _ in range(12 * H):
        for name in swarm.nodes:
            swarm.step(name, 1.0 + 0.1 * rng.normal(size=60))  # all go the same long way
        swarm.settle()
    before = {name: swarm.nodes[name].x.copy() for name in honest}
    usual = max(float(np.linalg.norm(before[one] - before[other])) for one in honest for other in honest)
    swarm.nodes[liar].x = np.full(60, lie)
    swarm.finish(*swarm.nodes)
    for _ in range(3):
        swarm.quiesce()
    for name in honest:
        moved = float(np.linalg.norm(swarm.nodes[name].x - before[name]))
        assert moved < 4 * FLUSH_REACH * usual, f"{name} moved by {moved}, where {usual} is usual"


class Weather(Connections):
    """No exchange is made twice, and all agree at the end."""

    @initialize(codec=st.sampled_from(["float32", "bfloat16", "int8", "sign"]), seed=st.integers(0, 2**16))
    def start(self, codec: str, seed: int) -> None:
        self.swarm: GossipSwarm = noloco_swarm(4, 40, codec, seed=seed, buffers=7)
        self.rng = np.random.default_rng(seed)

    @invariant()
    def every_exchange_once(self) -> None:
        if hasattr(self, "swarm"):
            for node in self.swarm.nodes.values():
                assert node.applied == node.core.counts["exchanges"]
                ended = list(node.core._ended)
                assert len(ended) == len(set(ended))
                assert np.isfinite(node.x).all()

    def teardown(self) -> None:
        if not hasattr(self, "swarm"):
            return
        self.swarm.calm()
        self.swarm.finish(*NAMES)
        self.swarm.quiesce()
        self.swarm.quiesce()
        assert self.swarm.spread() < 0.03
        assert all(node.proceeded == [False, True] for node in self.swarm.nodes.values())


TestWeather = Weather.TestCase
TestWeather.settings = weather_settings(40)


@pytest.mark.parametrize("boundary", range(5))
@pytest.mark.parametrize("victim", ["inviter", "invited"])
def test_a_partner_that_dies_after_any_message_stalls_nobody(boundary: int, victim: str) -> None:
    swarm = noloco_swarm(4, 40, seed=boundary)
    for _ in range(H):
        swarm.step("a", np.ones(40))  # only a has made its steps: it asks in vain, and is remembered
    swarm.settle()
    for name in "bcd":
        for _ in range(H - 1):
            swarm.step(name, np.ones(40))
    swarm.settle()
    asked = next(name for name in "bcd" if "a" in swarm.nodes[name].core._asked_us)
    swarm.step(asked, np.ones(40))  # it asks a
    inviter, invited = asked, "a"
    for index in range(boundary):
        swarm.deliver(*((inviter, invited) if index % 2 == 0 else (invited, inviter)))
    dead = inviter if victim == "inviter" else invited
    living = [name for name in swarm.nodes if name != dead]
    for pair, queue in swarm.queues.items():
        if dead in pair:
            queue.clear()
    for name in living:
        swarm.peers(name, set(living))
    before = {name: swarm.nodes[name].core.counts["exchanges"] for name in living}
    for _ in range(3 * H):
        for name in living:
            swarm.step(name, np.ones(40))
        for source, target in list(swarm.queues):
            while dead not in (source, target) and swarm.deliver(source, target):
                pass
    assert all(swarm.nodes[name].core.counts["exchanges"] > before[name] for name in living)


def test_training_goes_on_while_a_partner_is_silent() -> None:
    swarm = noloco_swarm(2, 40)
    for _ in range(10 * H):
        swarm.step("a", np.ones(40))
    assert swarm.nodes["a"].steps == 10 * H
    assert np.allclose(swarm.nodes["a"].x, GossipSwarm(2, 40, "float32").nodes["a"].x + 10 * H)


@pytest.mark.parametrize(("liar", "says"), [("c", PairAnswer), ("a", PairInvite)])
def test_who_promises_a_half_and_keeps_others_waiting_is_given_up_and_left_alone(liar: str, says: type) -> None:
    """It lives, and says no more than this; though it says that again and again."""
    swarm = noloco_swarm(3, 20)
    deliver = swarm.deliver

    def hears(source: str, target: str) -> bool:
        if source == liar:  # a word of its own, and none of what it means
            queue = swarm.queues[liar, target]
            for message in [each for each in queue if not isinstance(each, says)]:
                queue.remove(message)
        return deliver(source, target)

    swarm.deliver = hears  # type: ignore[method-assign]
    refused: dict[str, set[str]] = {name: set() for name in swarm.nodes}
    for _ in range(40):
        swarm.now += 30.0
        for name, node in swarm.nodes.items():
            swarm.step(name, 0.1)
            if says is PairInvite and name != liar:
                swarm.queues[liar, name].appendleft(PairInvite(swarm.messages))
                hears(liar, name)
            if swarm.now >= node.core.deadline:
                swarm.perform(name, node.core.on_timer(swarm.now))
            refused[name] |= dict(node.core.graylist.refused(swarm.now)).keys()
        swarm.settle()
    for name in {*"abc"} - {liar}:
        assert refused[name] == {liar}, "and nobody else; peerd status shows it"
        core = swarm.nodes[name].core
        assert core.counts["exchanges"] >= 3
        assert core.counts["partners_silent"] <= 3


def test_float_buffers_take_the_mean() -> None:
    swarm = noloco_swarm(2, 40, buffers=10)
    mean = sum(node.x[30:] for node in swarm.nodes.values()) / 2
    for _ in range(H):
        for name in swarm.nodes:
            swarm.step(name, np.zeros(40))
    swarm.settle()
    assert all(np.allclose(node.x[30:], mean, atol=0.01) for node in swarm.nodes.values())


def test_a_model_that_is_not_finite_sends_nothing() -> None:
    swarm = noloco_swarm(2, 40)
    swarm.nodes["a"].x[3] = np.nan
    for _ in range(2 * H):
        for name in swarm.nodes:
            swarm.step(name, np.ones(40))
    swarm.settle()
    assert np.isfinite(swarm.nodes["b"].x).all()
    assert swarm.nodes["a"].core.counts["not_finite"]


def test_a_half_that_is_damaged_changes_nothing() -> None:
    swarm = noloco_swarm(2, 40)
    for _ in range(H):
        for name in swarm.nodes:
            swarm.step(name, np.ones(40))
    while not isinstance(swarm.queues["a", "b"][0] if swarm.queues["a", "b"] else None, PairHalf):
        swarm.deliver("a", "b")
        swarm.deliver("b", "a")
    half = swarm.queues["a", "b"].popleft()
    assert isinstance(half, PairHalf)
    before = swarm.nodes["b"].x.copy()
    with pytest.raises(PeerError):
        swarm.nodes["b"].core.on_message("a", PairHalf(half.seq, half.codec, True, (b"\x00garbage",)), 0.0)
    assert np.array_equal(swarm.nodes["b"].x, before)
    swarm.queues["a", "b"].append(half)
    swarm.settle()
    assert all(node.applied == 1 for node in swarm.nodes.values())


def test_what_nobody_promised_is_declined() -> None:
    core = noloco_swarm(2, 40).nodes["a"].core
    for stray in (PairInvite(5), PairAnswer(5, True), PairHalf(5, "float32", True, ())):
        assert [effect.message for effect in core.on_message("b", stray, 0.0)] == [PairAnswer(5, False)]
    with pytest.raises(PeerError):
        core.on_message("b", CentreIs("b", 0), 0.0)


def test_exchanges_go_every_way_of_the_table_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: set[tuple[Stage, Stage]] = set()
    enter = NoLoCo._enter

    def seen(core: NoLoCo, pair: _Pair | None) -> None:
        before, after = (Stage.IDLE if one is None else one.stage for one in (core._pair, pair))
        gone.add((before, after))
        enter(core, pair)

    monkeypatch.setattr(NoLoCo, "_enter", seen)
    swarm = noloco_swarm(3, 10)
    for _ in range(600):
        one, other = swarm.rng.choice(list(swarm.nodes), 2, replace=False)
        match swarm.rng.integers(6):
            case 0:
                swarm.cut(one, other)
            case 1:
                swarm.declare_dead(one, {other})
            case 2:
                swarm.hear(one)
            case 3:
                swarm.deliver(one, other)
            case _:
                swarm.step(one, swarm.rng.normal(size=10))
                swarm.deliver(other, one)
    assert gone == {(before, after) for before, following in TRANSITIONS.items() for after in following}
    core = swarm.nodes["a"].core
    for before in Stage:
        for after in set(Stage) - TRANSITIONS[before].keys():
            core._pair = _pair_at(before)
            with pytest.raises(AssertionError, match=f"{before.name} -> {after.name}"):
                core._enter(_pair_at(after))


def _pair_at(stage: Stage) -> _Pair | None:
    return None if stage is Stage.IDLE else _Pair("b", 1, stage, PairInvite(1), 0.0, 0, 0.0)


def through_the_first_half(swarm: GossipSwarm) -> tuple[str, str]:
    """Who has invited, whose half has come, and who has answered; the answer is on its way."""
    while True:
        for source, target in list(swarm.queues):
            if swarm.queues[source, target]:
                half = swarm.queues[source, target][0]
                swarm.deliver(source, target)
                if isinstance(half, PairHalf) and half.wants_answer:
                    return source, target


def test_an_answer_that_was_lost_comes_though_its_sender_has_met_a_third() -> None:
    """Else one end of the pair has moved and the other has not: their sum is another one."""
    swarm = noloco_swarm(3, 40)
    rng = np.random.default_rng(0)
    for _ in range(H):
        for name in "bc":
            swarm.step(name, rng.normal(size=40))
    inviter, invited = through_the_first_half(swarm)
    assert (swarm.nodes[inviter].applied, swarm.nodes[invited].applied) == (0, 1)
    swarm.lose(invited, inviter)  # and the connection is not made again for long
    has_answered = False
    while not has_answered:
        swarm.step(invited, rng.normal(size=40))
        swarm.step("a", rng.normal(size=40))
        for pair in (("a", invited), (invited, "a")) * 3:
            while queue := swarm.queues[pair]:
                has_answered |= isinstance(queue[0], PairHalf) and pair[0] == invited and not queue[0].wants_answer
                swarm.deliver(*pair)
    swarm.lose(invited, inviter)
    swarm.cut(invited, inviter)
    swarm.settle()
    assert swarm.nodes[inviter].applied == 1
    assert not any(node.core._answers for node in swarm.nodes.values()), "nobody waits for a word"


def test_no_more_answers_are_kept_than_there_is_room_for() -> None:
    """Each is a whole model, and who lies says never that it has one."""
    swarm = noloco_swarm(6, 10)
    node = swarm.nodes["f"].core
    for seq, name in enumerate("abcde"):  # a smaller id's invitation is heeded
        for _ in range(2 * H):
            swarm.step("f", 0.1)
        swarm.perform("f", node.on_message(name, PairInvite(seq), swarm.now))
        half = PairHalf(seq, "float32", True, node._outer.contribute(swarm.nodes[name].x).chunks)
        swarm.perform("f", node.on_message(name, half, swarm.now))
        assert node.counts["exchanges"] == seq + 1
        assert len(node._answers) <= ANSWERS_MAX
    assert list(node._answers) == ["d", "e"]


@settings(max_examples=30, deadline=None, print_blob=True)
@given(seed=st.integers(0, 2**16))
def test_whatever_is_lost_no_exchange_is_at_one_end_alone(seed: int) -> None:
    """Where nobody dies, and connections are made again; answers that wait have room."""
    swarm = noloco_swarm(3, 10, seed=seed)
    rng = np.random.default_rng(seed)
    for _ in range(400):
        one, other = rng.choice(list(swarm.nodes), 2, replace=False)
        match rng.integers(6):
            case 0:
                swarm.lose(one, other)
            case 1:
                swarm.step(one, rng.normal(size=10))
            case _:
                swarm.deliver(one, other)
    swarm.calm()
    ended = [{(frozenset((name, peer)), seq) for peer, seq in node.core._ended} for name, node in swarm.nodes.items()]
    of_both = [exchange for one in ended for exchange in one]
    assert all(of_both.count(exchange) == 2 for exchange in of_both)
    assert not any(node.core._answers for node in swarm.nodes.values())
