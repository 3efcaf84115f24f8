"""Every mode keeps the contract: members come, leave, die and return at any message, and a run ends with one model.

The table of modes is the list of what is tested: a new line in it is tested here with nothing to add. Three ways:
bare cores over queues, where a fault can come at every message; real daemons over memory, TCP and UCX; simulated
swarms. What one kind of mode promises beyond this is in its own tests: the exact mean (test_rounds.py), staleness
(test_shard_server.py), exact mass (test_mass.py), each push once (test_parameter_server.py), the kept sum
(test_gossip.py, test_elastic.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import thin
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, run_state_machine_as_test
from mode_swarm import ModeSwarm
from ucx_here import needs_ucx
from weather import NAMES, Lives, weather_settings

from peerd.simulation.faults import FAULTS
from peerd.simulation.problems import Quadratic
from peerd.simulation.swarm import Swarm
from peerd.simulation.world import World
from peerd.training.codecs import CODECS
from peerd.training.effects import Vector
from peerd.training.mode_settings import OVERLAPS, ModeSettings
from peerd.training.modes import MODES, parse_mode
from peerd.training.modes.allreduce import AllReduce
from peerd.training.modes.parameter_server import ParameterServer

ROUNDED = 1e-6  # relative: what float32 on the wire drops of a float64 model
AGREED = 0.03  # relative: of a flush by paired links; each accepts 0.01, a centre 0.011 to either side
LEFT_BEHIND = 0.1  # of a step, in every model: an even share is a third, but an elastic centre keeps most of it
HEEDED = 0.15  # of all steps of a member: an even share is a third, and merging one way is late
EVERY = 2  # steps between rounds
LONG = 40  # steps

EXAMPLES = 10  # of each mode's weather
QUEUE_MAX = 100
FOREVER = 1_000_000  # steps: the run is told later when to end
STEPS_SIMULATED = 240  # a second each: the last fault begins after 54 s, and may last for 120
SIMULATED_MAX_S = 1500.0

Row = tuple[str, dict[str, Any]]


def rows() -> Iterator[Row]:
    """Every mode; all-reduce with each overlap, arguments that make other machines, servers that share or sum."""
    for mode in [*MODES, "softsync:2", "diloco:2", "elastic:pairwise"]:
        if parse_mode(mode) is AllReduce:
            yield from ((mode, {"overlap": overlap}) for overlap in OVERLAPS)
        else:
            yield mode, {}
    yield "hardsync", {"servers": 3}
    yield "softsync:2", {"topology": "adv:2"}


def name_of(row: Row) -> str:
    return "-".join([row[0], *(str(value) for value in row[1].values())])


@pytest.fixture(params=rows(), ids=name_of)
def row(request: pytest.FixtureRequest) -> Row:
    found: Row = request.param
    return found


def swarm_of(row: Row, names: str = "abc", **settings: Any) -> ModeSwarm:
    mode, options = row
    swarm = ModeSwarm(mode, names, every=EVERY, **{**options, **settings})
    swarm.all_hear()
    swarm.settle()
    return swarm


def mark(name: str) -> Vector:
    """The step of this member, and of no other: where it is in a model, that member took part."""
    values: Vector = np.eye(12)[ord(name) - ord("a")]
    return values


def tolerance(row: Row) -> float:
    """How far a model may be from the mean of all, relative, when every run has ended."""
    maker = parse_mode(row[0])
    kind = maker.func if isinstance(maker, partial) else maker
    if isinstance(kind, type) and issubclass(kind, AllReduce):
        return 0.0  # to the bit
    return ROUNDED if kind is ParameterServer else AGREED


def check_that_all_agree(row: Row, models: Iterable[Vector]) -> None:
    models = list(models)
    mean = models[0] + np.mean([model - models[0] for model in models], axis=0)  # of equal ones it is their bits
    distance = max(np.linalg.norm(model - mean) for model in models) / np.linalg.norm(mean)
    assert distance <= tolerance(row)


def end(row: Row, swarm: ModeSwarm) -> None:
    """Every run ends, with one model."""
    swarm.end()
    check_that_all_agree(row, (node.x for node in swarm.nodes.values()))
    assert all(node.proceeded[-2:] == [False, True] for node in swarm.nodes.values())


def share_of(name: str, swarm: ModeSwarm) -> float:
    """How much of one step of this member is in every model, at least."""
    where = int(mark(name).argmax())
    return float(min(node.x[where] - swarm.start[where] for node in swarm.nodes.values()))


# ---------------------------------------------------------------- bare cores


def test_who_joins_midway_takes_part(row: Row) -> None:
    swarm = swarm_of(row)
    swarm.train(2 * EVERY, mark)
    swarm.live("d", swarm.nodes["a"].x)
    swarm.all_hear()
    swarm.train(4 * EVERY, mark)
    end(row, swarm)
    assert all(share_of(name, swarm) > 0.5 for name in "abcd")


@pytest.mark.parametrize("leaver", "abc")
def test_who_leaves_in_good_order_leaves_its_steps_behind(row: Row, leaver: str) -> None:
    """The leader, the centre and the server, too. A codec of one bit would leave less, for a reason of its own."""
    swarm = swarm_of(row, codec="float32")
    swarm.train(2 * EVERY)
    node = swarm.nodes[leaver]

    def go_on(name: str) -> None:
        if name == leaver and node.steps > 2 * EVERY:
            swarm.finish(name)
        elif not node.proceeded:
            swarm.step(name, mark(name) if name == leaver else 0.0)

    swarm.come_to(lambda name: node.proceeded == [False], go_on)
    swarm.die(leaver)
    swarm.all_hear()
    swarm.train(2 * EVERY)
    end(row, swarm)
    assert share_of(leaver, swarm) > LEFT_BEHIND


@pytest.mark.cases(12)
@pytest.mark.parametrize("early", "ab")
def test_who_ends_early_holds_nobody_back(row: Row, early: str) -> None:
    """The others train on, and what they learn is in every model at the end; who leads may be the one, or another."""
    swarm = swarm_of(row)
    swarm.train(2 * EVERY)
    others = swarm.nodes.keys() - {early}

    def go_on(name: str) -> None:
        if name == early:
            swarm.finish(name)
        elif swarm.nodes[name].steps < LONG:
            swarm.step(name, mark(name))

    swarm.come_to(
        lambda name: name == early or (swarm.nodes[name].steps == LONG and not swarm.nodes[name].waits), go_on
    )
    end(row, swarm)
    assert min(share_of(name, swarm) for name in others) > HEEDED * LONG


@pytest.mark.cases(70)
@pytest.mark.parametrize("order", ["abc", "bca", "cab"])
@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_runs_end_one_after_the_other(row: Row, order: str, ahead: int) -> None:
    """The last to end has heard of all the others; who leads may be the one, and may have made steps of its own."""
    swarm = swarm_of(row)
    swarm.train(2 * EVERY, mark)
    for name in order:
        for _ in range(ahead):
            swarm.step(name, mark(name))
            swarm.settle()
    for name in order:
        swarm.finish(name)
        swarm.settle()
    end(row, swarm)


Event = Callable[[ModeSwarm, str], None]


def dies(swarm: ModeSwarm, name: str) -> None:
    swarm.die(name)
    swarm.settle()
    swarm.all_hear()


def comes_back_as_it_was(swarm: ModeSwarm, name: str) -> None:
    """With its model, before anybody missed it."""
    swarm.restart(name, swarm.nodes[name].x)


def comes_back_as_a_newcomer(swarm: ModeSwarm, name: str) -> None:
    """It was missed, and has a peer's model."""
    dies(swarm, name)
    swarm.live(name, next(iter(swarm.nodes.values())).x)
    swarm.all_hear()


def loses_its_connections(swarm: ModeSwarm, name: str) -> None:
    for other in sorted(swarm.nodes.keys() - {name}):
        swarm.cut(name, other)
        swarm.cut(other, name)


def seems_dead(swarm: ModeSwarm, name: str) -> None:
    """To all others for a while, and they to it."""
    for other in sorted(swarm.nodes.keys() - {name}):
        swarm.lose(name, other)
        swarm.lose(other, name)
        swarm.peers(other, swarm.nodes.keys() - {name})
    swarm.peers(name, set())
    swarm.settle()
    swarm.all_hear()


EVENTS: list[Event] = [dies, comes_back_as_it_was, comes_back_as_a_newcomer, loses_its_connections, seems_dead]
AT_MESSAGES = [(event, ends) for event in EVENTS for ends in (False, True) if event is not seems_dead or not ends]
"""Two sides that both end their runs hold two models: nobody is left to make them one."""


def at_messages(row: Row, every: int, *, ends: bool) -> Iterator[ModeSwarm]:
    """A swarm in the middle of a step of all, or of the end of all runs: before its first message, a later one, ..."""
    for boundary in itertools.count(0, every):
        swarm = swarm_of(row, seed=boundary)
        swarm.train(EVERY)
        for _ in range(EVERY):
            for name in "abc":
                if ends:
                    swarm.finish(name)
                else:
                    swarm.step(name, mark(name))
        for _ in range(boundary):
            if not (links := swarm.waiting()):
                return
            swarm.deliver(*links[boundary % len(links)])
        yield swarm


def happens_at_messages(row: Row, event: Event, every: int, *, ends: bool) -> None:
    for number, swarm in enumerate(at_messages(row, every, ends=ends)):
        event(swarm, "abc"[number % 3])
        if not ends:
            swarm.train(EVERY)
        end(row, swarm)


@pytest.mark.cases(40)
@pytest.mark.parametrize(("event", "ends"), AT_MESSAGES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_at_any_message(row: Row, event: Event, ends: bool) -> None:
    """Something happens to one member, and the others go on; nobody waits for what will not come."""
    happens_at_messages(row, event, 1 if event is dies else 4, ends=ends)  # deaths at every one


@pytest.mark.soak
@pytest.mark.parametrize(("event", "ends"), AT_MESSAGES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_at_every_message(row: Row, event: Event, ends: bool) -> None:
    happens_at_messages(row, event, 1, ends=ends)


@pytest.mark.cases(3)
def test_what_comes_twice_counts_once(row: Row) -> None:
    """Each message of a step and of an end in turn, at once or behind what follows it: the same models, to the bit."""

    def models(twice: int) -> tuple[int, list[bytes]]:
        swarm, number = swarm_of(row), 0
        swarm.train(EVERY, mark)
        for act in (lambda name: swarm.step(name, mark(name)), swarm.finish):
            for name in "abc":
                act(name)
            while swarm.waiting():
                for link in itertools.permutations("abc", 2):  # an order that no message changes
                    while swarm.queues.get(link):
                        if number == twice:
                            swarm.duplicate(*link, late=number % 2 > 0)
                        swarm.deliver(*link)
                        number += 1
        end(row, swarm)
        return number, [node.x.tobytes() for node in swarm.nodes.values()]

    count, expected = models(-1)
    for twice in range(count):
        assert models(twice)[1] == expected, f"message {twice}"


# ---------------------------------------------------------------- any weather


class AnyMode(Lives):
    """Anything may happen, in any order; then calm comes, and another run of all ends with one model."""

    row: Row

    @initialize(
        codec=st.sampled_from(sorted(CODECS)), seed=st.integers(0, 2**16), view=st.integers(2, 3),
        dtype=st.sampled_from(["float32", "float64"]),
    )  # fmt: skip
    def start(self, codec: str, seed: int, view: int, dtype: str) -> None:
        self.swarm = swarm_of(self.row, NAMES, size=40, buffers=7, codec=codec, seed=seed, view=view, dtype=dtype)
        self.rng = np.random.default_rng(seed)

    @invariant()
    def nothing_waits_without_bound(self) -> None:
        if hasattr(self, "swarm"):
            assert all(len(queue) <= QUEUE_MAX for queue in self.swarm.queues.values())

    def teardown(self) -> None:
        if not hasattr(self, "swarm"):
            return
        self.swarm.heal()
        for name in self.swarm.nodes:
            self.swarm.begin_again(name)
        self.swarm.train(EVERY)
        end(self.row, self.swarm)


def in_any_weather(row: Row, examples: int) -> None:
    machine = type("AnyMode", (AnyMode,), {"row": row})
    run_state_machine_as_test(machine, settings=weather_settings(examples))


@pytest.mark.cases(6)
def test_in_any_weather(row: Row) -> None:
    in_any_weather(row, EXAMPLES)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_in_much_weather(row: Row) -> None:
    in_any_weather(row, 100 * EXAMPLES)


# ---------------------------------------------------------------- real daemons


async def whole_life(row: Row, swarm: thin.Swarm) -> tuple[dict[str, thin.Model], dict[str, int], set[str]]:
    """Three train; one joins, one is killed and comes back, one leaves, and the rest end. Returns their models, in how
    many exchanges and rounds each took part, and what carried the bulk."""
    mode, options = row
    settings = {"mode": mode, "every": EVERY, "trigger": "always", **options}
    nodes = swarm.nodes

    async def reaches(name: str, step: int) -> None:
        await swarm.eventually(lambda: nodes[name].trainer.step >= step)

    await swarm.start("abc", steps=FOREVER, wait_for=3, **settings)
    for name in "abc":  # the donor of d's model has made a step, too
        await reaches(name, 4 * EVERY)
    await swarm.start("d", steps=FOREVER, **settings)
    await swarm.eventually(lambda: nodes["d"].trainer.first_step > 0)
    await reaches("d", nodes["d"].trainer.first_step + 4 * EVERY)
    await nodes["c"].crash()
    before = nodes["a"].trainer.step
    await nodes["c"].start(steps=FOREVER)
    await reaches("c", before + EVERY)
    await nodes["b"].leave()
    await reaches("a", before + 4 * EVERY)
    last = max(node.trainer.step for node in nodes.values()) + 2 * EVERY
    for node in nodes.values():
        node.trainer.steps = last
    models = await swarm.finish()
    counts = {name: await nodes[name].counts() for name in models}
    took_part = {name: count.get("exchanges", 0) + count.get("rounds", 0) for name, count in counts.items()}
    return models, took_part, {carrier for name in models for carrier in await nodes[name].carriers()}


@pytest.mark.cases(10)
@pytest.mark.parametrize(
    ("run", "carrier"),
    [
        pytest.param(partial(thin.simulate, 1), "memory", id="memory"),
        pytest.param(thin.live, "tcp", id="tcp"),
    ],
)
def test_daemons_live_through_it(row: Row, run: Callable[[Any], Any], carrier: str) -> None:
    models, took_part, carriers = run(partial(whole_life, row))
    assert any(each.startswith(carrier) for each in carriers), "a link may be so new that it has not been upgraded"
    assert models.keys() == took_part.keys() == {"a", "c", "d"}
    assert min(took_part.values()) > 1
    check_that_all_agree(row, models.values())


@pytest.mark.cases(2)
@pytest.mark.parametrize("mode", ["gossip", "push-sum", "allreduce", "hardsync"])  # of each kind: modes see no carriers
@pytest.mark.parametrize(
    ("run", "carrier"),
    [
        pytest.param(thin.live_over_shm, "shm", id="shm"),
        pytest.param(thin.live_over_ucx, "ucx tcp", id="ucx", marks=needs_ucx),
    ],
)
def test_daemons_live_through_it_over_other_carriers(mode: str, run: Callable[[Any], Any], carrier: str) -> None:
    test_daemons_live_through_it((mode, {}), run, carrier)


# ---------------------------------------------------------------- whole simulated swarms


def simulated(row: Row, seed: int) -> None:
    """Every fault of the catalogue once, six seconds apart, while four train; then calm, and all runs end."""
    mode, told = row
    world = World(seed)
    swarm = Swarm(
        world, 4, Quadratic(seed, values=16), mode=mode, told=ModeSettings(**{"every": 2 * EVERY, **told}),
        compute="lognormal:1:0.2", steps=STEPS_SIMULATED, replay=lambda: f"simulated({row}, {seed})",
    )  # fmt: skip
    swarm.start_formed()
    rng = world.rng("faults")
    for index, fault in enumerate(FAULTS.values(), 1):
        world.later(6.0 * index, partial(fault, swarm, rng))
    while not swarm.run(10.0, swarm.finished):
        swarm.look_at_links()
        assert world.now < SIMULATED_MAX_S, f"seed {seed}: hangs"
    assert swarm.crashed == 1
    check_that_all_agree(row, swarm.models())


@pytest.mark.cases(6)
def test_a_simulated_swarm_lives_through_every_fault(row: Row) -> None:
    simulated(row, 1)


def test_a_tree_outlives_a_line_that_breaks_one_way() -> None:
    """What a sum's sender waits for, that it was taken, goes the other way, and may be lost alone."""
    simulated(("softsync:2", {"topology": "adv:2"}), 2)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_simulated_swarms_live_through_every_fault(row: Row) -> None:
    for seed in range(100):
        simulated(row, seed)
