"""Nodes that are killed and started again, in virtual time: they find their swarm, and it goes on from one model.

Nobody here writes checkpoints: whatever is not fetched from a member is a model that starts anew, or from a step that
a test has said.
"""

from __future__ import annotations

import logging
import math
import random
import socket
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace

import pytest
import thin
import trio
from thin import Swarm, WatchedDaemon, simulate

from peerd.daemon.catch_up import NEWS_S
from peerd.daemon.known_members import known
from peerd.daemon.node import running
from peerd.local.identity import Identity
from peerd.local.node_key import NodeKey
from peerd.node.meta import FOUNDS, NodeMeta
from peerd.settings import Settings
from peerd.transport.hello import Refused
from peerd.transport.ids import Address
from peerd.transport.messages import Member, Refuse, State

ALIVE = State.ALIVE
STEPS = 10**6  # nobody finishes
IMPORTS_S = 1.0  # a script attaches no sooner: more than the round trip in which two daemons hear of each other
PATIENCE_S = 11.0  # how long those known before are waited for


class Node(thin.Node):
    """One that keeps whom it knew, as known_members.py does in a file."""

    kept: tuple[Address, ...] = ()
    newest = 0  # step of its newest checkpoint
    whole = 0  # of the newest that can be read
    imports_s = IMPORTS_S
    expects = True

    async def crash(self) -> None:
        await super().crash()
        self.kept = known(self.daemon.view.membership.members, self.name, self.kept)

    async def _live(self, task_status: trio.TaskStatus[None]) -> None:
        network, (host, port) = self._swarm.network, self.address
        joins = bool(self._settings.join)
        resumes_at = self.newest if joins or self.kept else FOUNDS
        about = NodeMeta(expects=self.expects, founder=not joins, resumes_at=resumes_at).pack()
        self.trainer.resumes_at = self.whole
        me = Member(self.name, self.name, host, port, self.epoch, 0, ALIVE, "", about)
        with self._scope:
            async with aclosing(await network.bind(self.address)) as datagrams, trio.open_nursery() as nursery:
                rest = nursery, network.carrier(nursery, host), datagrams, self.kept
                self.daemon = WatchedDaemon(self._note, self._settings, me, *rest)
                await self.daemon.start()
                task_status.started()
                await trio.sleep(self.imports_s)
                nursery.start_soon(self.trainer.run, self.daemon)
        self._over.set()

    @property
    def trains(self) -> bool:
        """Whether it has a model and makes steps."""
        return self.trainer.step > self.trainer.first_step


async def formed(swarm: Swarm, names: str) -> None:
    """A swarm of these, founded by the first, that has trained for a while."""
    for name in names:
        swarm.nodes[name] = Node(swarm, name, join=None if name == names[0] else swarm.network.place(names[0]))
        await swarm.nodes[name].start(STEPS)
    await swarm.agree(**dict.fromkeys(names, ALIVE))
    await trio.sleep(20)
    assert started_anew(swarm) == [names[0]]


def node_of(swarm: Swarm, name: str) -> Node:
    found = swarm.nodes[name]
    assert isinstance(found, Node)
    return found


def started_anew(swarm: Swarm) -> list[str]:
    """Who trains on a model of its own."""
    running = [node_of(swarm, name) for name, node in swarm.nodes.items() if node.runs]
    given = sum(node.daemon.model.snapshots for node in running)
    own = [node.name for node in running if node.trains and not node.daemon.model._took_the_swarms]
    assert len(own) == sum(node.trains for node in running) - given
    return own


async def crash(swarm: Swarm, names: str) -> None:
    for name in names:
        await swarm.nodes[name].crash()


async def restart(swarm: Swarm, delays_s: dict[str, float]) -> None:
    """Start each so many seconds from now."""

    async def later(name: str, delay_s: float) -> None:
        await trio.sleep(delay_s)
        await swarm.nodes[name].start(STEPS)

    async with trio.open_nursery() as nursery:
        for name, delay_s in delays_s.items():
            nursery.start_soon(later, name, delay_s)


def all_train(swarm: Swarm, names: str) -> Callable[[], bool]:
    return lambda: all(node_of(swarm, name).trains for name in names)


def said(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.message for record in caplog.records)


@pytest.mark.cases(2)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("pause_s", [0.5, 40.0], ids=["unnoticed", "buried"])
def test_a_founder_comes_back_to_its_swarm(seed: int, pause_s: float, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(swarm: Swarm) -> None:
        await formed(swarm, "abc")
        await swarm.nodes["a"].crash()
        await restart(swarm, {"a": pause_s})
        await swarm.agree(a=ALIVE, b=ALIVE, c=ALIVE)
        await swarm.eventually(all_train(swarm, "a"))
        assert swarm.nodes["a"].trainer.first_step > 50

    simulate(seed, scenario)
    assert not said(caplog, "goes on alone")


def test_a_founder_waits_for_a_network_that_is_not_up_yet(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(swarm: Swarm) -> None:
        await formed(swarm, "abc")
        await swarm.nodes["a"].crash()
        assert isinstance(swarm.network, thin.Memory)
        for other in "bc":
            swarm.network.cut(swarm.network.place("a")[0], swarm.network.place(other)[0])
        await swarm.nodes["a"].start(STEPS)
        await trio.sleep(PATIENCE_S / 2)
        for other in "bc":
            swarm.network.heal(swarm.network.place("a")[0], swarm.network.place(other)[0])
        await swarm.eventually(all_train(swarm, "a"))
        assert swarm.nodes["a"].trainer.first_step > 50

    simulate(1, scenario)
    assert not said(caplog, "goes on alone")


def test_a_founder_that_nobody_answers_goes_on_alone_and_asks_again_the_next_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(swarm: Swarm) -> None:
        await formed(swarm, "ab")
        await crash(swarm, "ba")
        for life in (1, 2):
            began = trio.current_time()
            await swarm.nodes["a"].start(STEPS)
            await swarm.eventually(all_train(swarm, "a"))
            assert PATIENCE_S <= trio.current_time() - began < PATIENCE_S + 2
            assert said(caplog, "no member known before the restart answers: this node goes on alone") == life
            await swarm.nodes["a"].crash()

    simulate(1, scenario)


async def test_a_node_that_knew_its_own_address_alone_waits_for_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        here = probe.getsockname()
    settings = Settings(name="a", bind=f"127.0.0.1:{here[1]}", insecure_plaintext=True)
    me, trainer = Identity(NodeKey.generate(), 1, -1), thin.Trainer("a", STEPS, 0.01)
    async with running(settings, me, expects=True, kept=(here,)) as (daemon, address):
        assert address == here
        daemon.nursery.start_soon(trainer.run, daemon)
        while not trainer.step:
            await trio.sleep(0.01)
        daemon.nursery.cancel_scope.cancel()
    assert not said(caplog, "goes on alone")


def test_members_find_each_other_without_the_one_they_joined_through() -> None:
    async def scenario(swarm: Swarm) -> None:
        await formed(swarm, "abc")
        await crash(swarm, "abc")
        await swarm.nodes["b"].start(STEPS)
        await trio.sleep(10 * PATIENCE_S)
        assert not node_of(swarm, "b").trains, "alone, it waits for a seed for ever"
        await swarm.nodes["c"].start(STEPS)
        await swarm.eventually(all_train(swarm, "bc"))
        await swarm.nodes["a"].start(STEPS)
        await swarm.eventually(all_train(swarm, "abc"))
        assert len(started_anew(swarm)) == 1
        assert "a" not in started_anew(swarm)

    simulate(1, scenario)


def drawn(seed: int) -> dict[str, float]:
    """When each comes back: some at once, some at the very moment when others give up waiting for them."""
    chance = random.Random(seed)
    return {name: chance.choice([0.0, 0.01, chance.uniform(0, 30), PATIENCE_S, PATIENCE_S + 0.01]) for name in "abcd"}


@pytest.mark.cases(3)
@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(8, 20))])
def test_after_a_power_cut_all_go_on_from_one_model(seed: int) -> None:
    async def scenario(swarm: Swarm) -> None:
        await formed(swarm, "abcd")
        await crash(swarm, "abcd")
        for name, step in zip("abcd", random.Random(-seed).choices([0, 0, 100, 500], k=4), strict=True):
            node_of(swarm, name).newest = node_of(swarm, name).whole = step
        await restart(swarm, drawn(seed))
        await swarm.eventually(all_train(swarm, "abcd"))
        await swarm.agree(**dict.fromkeys("abcd", ALIVE))
        assert len(started_anew(swarm)) == 1

    simulate(seed, scenario)


@pytest.mark.cases(3)
@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(8, 20))])
def test_after_a_power_cut_the_latest_checkpoint_is_gone_on_from(seed: int) -> None:
    chance = random.Random(seed)

    async def scenario(swarm: Swarm) -> None:
        await formed(swarm, "abcd")
        await crash(swarm, "abcd")
        nodes = [node_of(swarm, name) for name in "abcd"]
        for node in nodes:
            node.newest = chance.choice([0, 100, 300, 500])
            node.whole = chance.choice([node.newest, node.newest, 0])
        await restart(swarm, {name: chance.uniform(0, PATIENCE_S - 2) for name in "abcd"})
        await swarm.eventually(all_train(swarm, "abcd"))
        (first,) = started_anew(swarm)
        latest = max(node.whole for node in nodes)
        assert node_of(swarm, first).trainer.first_step == latest
        assert all(node.trainer.first_step >= latest for node in nodes)

    simulate(seed, scenario)


@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("later_s", [0.0, 0.05, 0.9])
def test_of_scripts_that_are_started_by_hand_the_latest_checkpoint_goes_first(first: str, later_s: float) -> None:
    """No node said that one comes: those that come at one moment have yet to hear of each other."""

    async def scenario(swarm: Swarm) -> None:
        await formed(swarm, "ab")
        await crash(swarm, "ab")
        for name, step in (("a", 300), ("b", 500)):
            node = node_of(swarm, name)
            node.expects, node.imports_s = False, 3.0 if name == first else 3.0 + later_s
            node.newest = node.whole = step
        await restart(swarm, dict.fromkeys("ab", 0.0))
        await swarm.eventually(all_train(swarm, "ab"))
        assert started_anew(swarm) == ["b"]

    simulate(1, scenario)


@pytest.mark.parametrize("later_s", [NEWS_S + apart_s for apart_s in (-0.1, -0.02, -0.015, -0.01, -0.005, 0.0, 0.1)])
def test_a_founder_whose_script_comes_as_another_has_waited_makes_no_second_model(later_s: float) -> None:
    """All are started by hand, at an interval at which neither has heard of the other."""

    async def scenario(swarm: Swarm) -> None:
        for name in "ab":
            swarm.nodes[name] = node = Node(swarm, name, join=None if name == "a" else swarm.network.place("a"))
            node.expects, node.imports_s = False, 3.0 if name == "b" else 3.0 + later_s
            await node.start(STEPS)
        await swarm.eventually(all_train(swarm, "ab"))
        assert len(started_anew(swarm)) == 1

    simulate(1, scenario)


@pytest.mark.parametrize(("seed", "earlier", "later", "later_s"), [(3, "c", "f", 0.5), (10, "f", "b", 0.3)])
def test_scripts_that_are_started_by_hand_hear_of_each_other_in_a_wide_swarm(
    seed: int, earlier: str, later: str, later_s: float
) -> None:
    """News comes there by several members, each of which passes it on now and then."""

    async def scenario(swarm: Swarm) -> None:
        for name in "abcdefgh":
            joins = None if name == "a" else swarm.network.place("a")
            swarm.nodes[name] = node = Node(swarm, name, join=joins, network="wan")
            node.expects, node.imports_s = False, {earlier: 12.0, later: 12.0 + later_s}.get(name, math.inf)
            node.newest = node.whole = {earlier: 300, later: 500}.get(name, 0)
            await node.start(STEPS)
        await trio.sleep(16)
        await swarm.eventually(all_train(swarm, earlier + later))
        own = [name for name in (earlier, later) if not node_of(swarm, name).daemon.model._took_the_swarms]
        assert own == [later]

    simulate(seed, scenario)


def test_a_script_that_went_away_as_it_waited_leaves_the_next_one_its_checkpoint() -> None:
    """The former was another model's: it had no checkpoint."""

    async def scenario(swarm: Swarm) -> None:
        await formed(swarm, "ab")
        await crash(swarm, "ab")
        for name, step in (("a", 300), ("b", 500)):
            node = node_of(swarm, name)
            node.expects, node.imports_s = False, 20.0 if name == "b" else 18.0  # at one moment
            node.newest = node.whole = step
        await restart(swarm, {"b": 0.0})
        stray = thin.Trainer("b", STEPS, swarm.network.step_s)
        swarm.nursery.start_soon(stray.run, node_of(swarm, "b").daemon)
        await trio.sleep(2.0)
        stray._tell.close()
        await restart(swarm, {"a": 0.0})
        await swarm.eventually(all_train(swarm, "b"))
        assert node_of(swarm, "b").trainer.first_step == 500

    simulate(1, scenario)


def test_a_checkpoint_that_was_not_there_when_the_node_came_makes_no_second_model() -> None:
    """The script before may have been writing it, or the one that came first had another model."""

    async def scenario(swarm: Swarm) -> None:
        await formed(swarm, "ab")
        await crash(swarm, "ab")
        node_of(swarm, "a").whole = 500
        node_of(swarm, "b").newest = node_of(swarm, "b").whole = 300
        await restart(swarm, dict.fromkeys("ab", 0.0))
        await swarm.eventually(all_train(swarm, "ab"))
        assert started_anew(swarm) == ["b"]

    simulate(1, scenario)


async def start_a_stranger(swarm: Swarm, name: str) -> Node:
    """Another swarm's node, where one of ours was."""
    stranger = Node(swarm, name, join=None)
    stranger._settings = replace(stranger._settings, swarm="theirs")
    await stranger.start(STEPS)
    return stranger


@pytest.mark.one_run_in(3)
def test_an_address_that_now_belongs_to_another_swarm_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    async def scenario(swarm: Swarm) -> None:
        await formed(swarm, "abc")
        await crash(swarm, "abc")
        stranger = await start_a_stranger(swarm, "b")
        await restart(swarm, {"a": 0.0, "c": 5.0})
        await swarm.eventually(all_train(swarm, "ac"))
        assert started_anew(swarm) == ["a"]
        await trio.sleep(200)
        assert swarm.nodes["a"].daemon.model.fatal is None
        assert swarm.nodes["a"].sees() == {"a": ALIVE, "c": ALIVE}
        assert stranger.sees() == {"b": ALIVE}

    simulate(1, scenario)
    given_up = "10.0.0.98:7946 refused this node: its swarm is 'theirs', ours 'peerd'; it is no member any more"
    assert said(caplog, given_up) == 2, "once by each"


def test_a_word_that_anybody_can_say_ends_no_node_that_was_started_again() -> None:
    """TLS's alerts are not authenticated: only the seed that the user named is believed, and not that we are out."""

    async def scenario(swarm: Swarm) -> None:
        await formed(swarm, "ab")
        await crash(swarm, "ab")
        await swarm.nodes["b"].start(STEPS)
        daemon = swarm.nodes["b"].daemon
        seed = daemon.settings.seeds[0]
        for where in (seed, ("10.0.0.77", 7946)):
            for field in ("revoked", "issuer", "certificate", "encryption"):
                if where != seed or field in ("revoked", "issuer"):
                    daemon._on_refused_by_seed(where, Refused("refused", Refuse(field, "theirs", "ours")))
                    daemon._on_refused_by_peer("a", Refused("refused", Refuse("revoked", "theirs", "ours")))
        assert daemon.model.fatal is None
        daemon._on_refused_by_seed(seed, Refused("refused", Refuse("certificate", "expired", "ours")))
        assert daemon.model.fatal == "refused; look at the clocks of both machines"

    simulate(1, scenario)


@pytest.mark.parametrize("field", ["swarm", "run"])
def test_where_a_member_was_another_swarms_node_ends_nobody_and_asks_for_no_join(
    field: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    async def scenario(swarm: Swarm) -> None:
        await formed(swarm, "ab")
        await crash(swarm, "ab")
        await swarm.nodes["b"].start(STEPS)
        daemon = swarm.nodes["b"].daemon
        daemon._on_refused_by_peer("a", Refused("a refused this node", Refuse(field, "theirs", "ours")))
        assert daemon.model.fatal is None

    simulate(1, scenario)
    assert "a refused this node; a member listened there, and does no more" in caplog.messages


@pytest.mark.parametrize("field", ["revoked", "swarm", "certificate", "model"])
def test_who_goes_on_refusing_a_member_is_told_of_once(field: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is dialled again twice a minute, as is each partner that does so."""
    caplog.set_level(logging.WARNING)

    async def scenario(swarm: Swarm) -> None:
        await formed(swarm, "ab")
        for _ in range(5):
            for peer in "ac":
                refusal = Refused(f"{peer} refused this node", Refuse(field, "theirs", "ours"))
                swarm.nodes["b"].daemon._on_refused_by_peer(peer, refusal)
            await trio.sleep(30)

    simulate(1, scenario)
    told = [text for text in caplog.messages if "refused this node" in text]
    assert sorted(text[0] for text in told) == ["a", "c"]


def test_a_node_started_again_with_another_mode_ends_with_a_line() -> None:
    """Its members say so over connections that have proved who they are."""

    async def scenario(swarm: Swarm) -> None:
        await formed(swarm, "ab")
        await crash(swarm, "ab")
        await swarm.nodes["b"].start(STEPS)
        daemon = swarm.nodes["b"].daemon
        daemon._on_refused_by_seed(("10.0.0.77", 7946), Refused("refused", Refuse("mode", "gossip", "allreduce")))
        cured = "refused; start this node with --mode gossip, as the members were started: "
        assert str(daemon.model.fatal).startswith(cured)

    simulate(1, scenario)


def test_a_node_told_to_join_another_swarm_ends_as_ever() -> None:
    async def scenario(swarm: Swarm) -> None:
        await formed(swarm, "ab")
        await crash(swarm, "ab")
        await start_a_stranger(swarm, "a")
        await swarm.nodes["b"].start(STEPS)
        with trio.fail_after(60):
            await swarm.nodes["b"].daemon.model.failed.wait()
        assert "its swarm is 'theirs', ours 'peerd'" in str(swarm.nodes["b"].daemon.model.fatal)

    simulate(1, scenario)
