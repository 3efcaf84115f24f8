"""What goes wrong in a simulated swarm? One function a kind of fault, and a storm of them drawn at random.

A fault begins at once and ends by itself. The catalogue with what is expected of each is in the tests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from peerd.simulation.network import Profile
from peerd.simulation.swarm import GRACE_S, Swarm
from peerd.transport.errors import UserError

Fault = Callable[[Swarm, random.Random], None]

LOSS_MAX = 0.05  # what nobody healthy may be declared failed under
LONGEST_PARTITION_S = 120.0


def crash(swarm: Swarm, rng: random.Random) -> None:
    """kill -9; the same identity comes back, sooner than it is noticed or later, or with all its state lost."""
    if (victim := _victim(swarm, rng)) is None:
        return
    swarm.crash(victim)
    away_s = rng.choice([0.5, 3.0, 8.0, 20.0, 60.0])
    fresh = rng.random() < 0.2
    seeds = [0, 1] if swarm.peers > 1 else [0]

    def back() -> None:
        if victim not in swarm.nodes:
            swarm.start(victim, seeds, fresh=fresh)

    swarm.world.later(away_s, back)


def pause(swarm: Swarm, rng: random.Random) -> None:
    """SIGSTOP for a moment, or for so long that the others bury the node."""
    if (victim := _victim(swarm, rng)) is None:
        return
    node = swarm.nodes[victim]
    swarm.pause(victim)

    def go_on() -> None:
        if swarm.nodes.get(victim) is node:
            swarm.resume(victim)

    swarm.world.later(rng.choice([1.0, 2.0, 4.0, 16.0, 60.0]), go_on)


def partition(swarm: Swarm, rng: random.Random) -> None:
    """Two halves, or some and all others, hear nothing of each other."""
    size = rng.randint(1, max(1, swarm.peers // 2))
    apart = set(rng.sample(range(swarm.peers), size))
    heal = swarm.cut(lambda source, target: (source in apart) != (target in apart))
    swarm.world.later(rng.uniform(1.0, LONGEST_PARTITION_S), heal)


def one_way(swarm: Swarm, rng: random.Random) -> None:
    """One node does not hear one other, but is heard by it."""
    if swarm.peers < 2:
        return
    pair = tuple(rng.sample(range(swarm.peers), 2))
    swarm.world.later(rng.uniform(1.0, 60.0), swarm.cut(lambda source, target: (source, target) == pair, pair))


def flap(swarm: Swarm, rng: random.Random) -> None:
    """The line of one node comes and goes every second."""
    victim, left = rng.randrange(swarm.peers), rng.randint(3, 15)

    def down(times: int) -> None:
        heal = swarm.cut(lambda source, target: victim in (source, target))

        def up() -> None:
            heal()
            if times > 1:
                swarm.world.later(0.5, lambda: down(times - 1))

        swarm.world.later(0.5, up)

    down(left)


def swizzle_clog(swarm: Swarm, rng: random.Random) -> None:
    """Nodes are clogged one after the other, and unclogged in another order."""
    victims = rng.sample(range(swarm.peers), max(1, swarm.peers // 2))
    for victim, delay_s in zip(victims, sorted(rng.uniform(0.0, 30.0) for _ in victims), strict=True):

        def clog(victim: int = victim) -> None:
            heal = swarm.cut(lambda source, target: victim in (source, target))
            swarm.world.later(10.0 + rng.random() * 20.0, heal)

        swarm.world.later(delay_s, clog)


def worsen_conditions(swarm: Swarm, rng: random.Random) -> None:
    """Loss, duplicates and disorder everywhere for a while, and damaged bytes."""
    ends = swarm.set_conditions(
        Profile(
            0.0,
            loss=rng.choice([0.0, 0.01, LOSS_MAX]),
            duplication=rng.choice([0.0, 0.1]),
            reordering=rng.choice([0.0, 0.2]),
            corruption=rng.choice([0.0, 0.02]),
        )
    )
    swarm.world.later(rng.uniform(5.0, 120.0), ends)


def slow(swarm: Swarm, rng: random.Random) -> None:
    """One node's bandwidth falls to a thousandth (1 Mbit/s of a gigabit)."""
    victim, factor = rng.randrange(swarm.peers), rng.choice([10.0, 1000.0])
    swarm.slow_down(victim, factor)
    swarm.world.later(rng.uniform(5.0, 60.0), lambda: swarm.slow_down(victim, 1.0))


def leave(swarm: Swarm, rng: random.Random) -> None:
    """A node says goodbye, and comes back later."""
    if (victim := _victim(swarm, rng)) is None:
        return
    swarm.leave(victim)

    def back() -> None:
        if victim in swarm.nodes:
            swarm.world.later(1.0, back)
        else:
            swarm.start(victim, [0, 1] if swarm.peers > 1 else [0])

    swarm.world.later(rng.uniform(5.0, 40.0), back)


FAULTS: dict[str, Fault] = {
    "crash": crash,
    "pause": pause,
    "partition": partition,
    "one-way": one_way,
    "flap": flap,
    "swizzle-clog": swizzle_clog,
    "weather": worsen_conditions,
    "slow": slow,
    "leave": leave,
}


def parse_faults(text: str) -> list[str]:
    """`none`, `all`, or names with commas between them. Raises UserError."""
    if text in ("none", "all"):
        return [] if text == "none" else list(FAULTS)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in FAULTS:
            alone = f"; {name} stands alone" if name in ("none", "all") else ""
            raise UserError(f"--faults {text}: {name!r} is none of {', '.join(FAULTS)}{alone or ', all, none'}")
    return names


def inject_faults(swarm: Swarm, names: Sequence[str], every_s: float, over: Callable[[], bool]) -> None:
    """One fault of those named every so many seconds on average, from a stream of its own, until it is `over`."""
    rng = swarm.world.rng("faults")

    def strike() -> None:
        if not over():
            FAULTS[rng.choice(names)](swarm, rng)
            swarm.world.later(rng.expovariate(1 / every_s), strike)

    if names:
        swarm.world.later(rng.expovariate(1 / every_s), strike)


def calm_after_s() -> float:
    """How long the last fault may last, and what it began with it."""
    return LONGEST_PARTITION_S + GRACE_S


def _victim(swarm: Swarm, rng: random.Random) -> int | None:
    """A running node; the last two are left in peace, so that there is a swarm to come back to."""
    running = sorted(index for index, node in swarm.nodes.items() if node.running)
    return rng.choice(running) if len(running) > 2 else None
