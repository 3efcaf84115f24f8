"""Is the mean kept, whatever becomes of connections, links and members? Many random swarms, with a ledger of each.

By hand, for as long as one likes (a short form is test_sweep_mean.py):

    python tests/training/sweep_mean.py --seeds 20000
    python tests/training/sweep_mean.py --replay gossip:12345           # the line that a failure prints

A swarm of 2 to 8 nodes with views of 1 to 3 and models of a few values trains, loses, repeats and delivers messages;
its members declare each other dead and find each other again, alone and in partitions, change partners often, hold
for a while a model that is not finite, end their runs, and in half of the swarms are killed and restarted. Then the
weather clears. What each mode promises then:

    gossip, elastic:pairwise   an exchange of two lives that live on is applied by both or by neither, and the sum of
                               the models is what was put in; what a crash took is counted
    elastic                    the same, the centre variable taken for one more model, that ends with its centre
    push-sum                   what was given is taken by a life that lives on, or taken back by the giver, not both;
                               the sums of weights and of weighted models are what was put in
    gossip-push, gossip-pull   no mean: a push is merged once, both ends of a link hold the same bits, and no model
                               leaves the range of what was put in
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import mode_swarm
import numpy as np
from gossip_swarm import GossipSwarm, assert_references_agree
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from peerd.training.codecs import CODECS
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Effect, Send, Vector
from peerd.training.modes import Mode, gossip, parse_mode
from peerd.training.modes.push_sum import PushSum
from peerd.training.one_way import core as one_way_core
from peerd.training.pairs import reference
from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId
from peerd.transport.messages import Delta, LinkOpen, LinkSnapshot, Message, Push

MODES = ("gossip", "elastic:pairwise", "elastic", "push-sum", "gossip-push", "gossip-pull")
KEEP_NO_MEAN = ("gossip-push", "gossip-pull")
EXACT = 1e-10  # relative: sums of float64
ROBUST = 0.7  # of the lives bound what others do to them
TINY = 1e-11  # of one correction: below EXACT, or many that a crash took would pass for rounding
ROUNDING = 1e-12  # of a node's total, when its own two sides exchange
SIZE, BUFFERS = 5, 1  # values of a model, of them buffers
EVENTS = 60
ROTATE_AFTER = 6  # exchanges, instead of 64 and more
EXACT_CODECS = ("float32", "bfloat16")  # of which no decoded value lies outside the range of the models

End = tuple[NodeId, int, int]  # a life of a node, and a centre's reign there; 0: its model's side


class Broken(Exception):
    """A mode does not keep what it promises."""


@dataclass(slots=True)
class Exchange:
    """One exchange of a link, or one push: what it added to the sum of all, by the end that applied it."""

    moved: dict[End, Vector] = field(default_factory=dict)
    back: Vector | None = None  # push-sum: the giver has taken it back


class LedgerSwarm(GossipSwarm):
    """A swarm whose exchanges are written down. A node's total is w (x, 1), with a centre variable added to x."""

    def __init__(self, mode: str, count: int, view: int, codec: str, seed: int) -> None:
        self.mode = mode
        self.lives_of: Counter[NodeId] = Counter()
        self.reigns: Counter[NodeId] = Counter()
        self.centre_seen: dict[NodeId, Vector] = {}
        self.not_finite: set[NodeId] = set()
        self.ends: defaultdict[int, dict[NodeId, End]] = defaultdict(dict)  # of each link
        self.ledger: defaultdict[tuple[int, int], Exchange] = defaultdict(Exchange)  # by link and number
        self.put_in = np.zeros(SIZE + 1)
        self.gone = np.zeros(SIZE + 1)
        self.abdications = 0
        self.sum_off = 0.0  # at the last check
        self.counted = 0  # by lives that have ended
        self.reach = 0.0  # no model was ever put in, nor moved by steps, further than this
        super().__init__(count, SIZE, codec, view=view, seed=seed, buffers=BUFFERS, mode=mode, make=self._make)

    # ---------------------------------------------------------------- lives

    def _make(self, name: NodeId, layout: Layout, rng: random.Random, values: Callable[[], Vector]) -> Mode:
        def read() -> Vector:
            model = values()
            if name in self.not_finite:
                model[0] = np.nan
            return model

        told = replace(self.settings, robust=random.Random(f"robust/{self.lives}").random() < ROBUST)
        core = parse_mode(self.mode)(name, layout, rng, told, read)
        if isinstance(core, PushSum):
            self._watch(core, name)
        return core

    def live(self, name: str, model: Vector) -> None:
        self.lives_of[name] += 1
        super().live(name, model)
        self.put_in += self.total(name)
        self.reach = max(self.reach, float(np.abs(model).max()))

    def die(self, name: str) -> None:
        self.gone += self.total(name)
        self.counted += self.nodes[name].core.counts["exchanges_cut"]
        self.not_finite.discard(name)
        self.centre_seen.pop(name, None)
        super().die(name)

    def step(self, name: str, change: Vector | float | None = None, *, finishing: bool = False) -> None:
        if change is not None:
            self.put_in[:SIZE] += change * getattr(self.nodes[name].core, "weight", 1.0)
            self.reach += float(np.abs(change).max())
        super().step(name, change, finishing=finishing)

    def total(self, name: NodeId) -> Vector:
        """What a node adds to the sum that its mode keeps."""
        node = self.nodes[name]
        total: Vector = getattr(node.core, "weight", 1.0) * np.append(node.x, 1.0)
        centre = getattr(node.core, "centre_values", None)
        if centre is not None:
            total[:SIZE] += centre
        for waiting in getattr(node.core, "_waiting", {}).values():  # of push-sum: here, and not let in yet
            total += waiting.weight * np.append(waiting.model, 1.0)
        return total

    def end_of(self, name: NodeId, peer: NodeId, link: int) -> End:
        """Which side of this node holds the link."""
        centre = getattr(self.nodes[name].core, "_centre", None)
        return name, self.lives_of[name], self.reigns[name] if centre is not None and centre.holds(peer, link) else 0

    def lives_on(self, end: End) -> bool:
        """Whether this life is the present one, and so is the reign."""
        name, life, reign = end
        return name in self.nodes and life == self.lives_of[name] and reign in (0, self._reign(name))

    def _reign(self, name: NodeId) -> int:
        return self.reigns[name] if name in self.centre_seen else 0

    # ---------------------------------------------------------------- what is written down

    def perform(self, name: str, effects: list[Effect]) -> None:
        self._see_centre(name)
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, LinkOpen | LinkSnapshot | Push):
                link = effect.message.link
                self.ends[link].setdefault(name, self.end_of(name, effect.peer, link))
        super().perform(name, effects)

    def _see_centre(self, name: NodeId) -> None:
        """A centre variable is put in when its reign begins, and gone when that ends."""
        centre: Vector | None = getattr(self.nodes[name].core, "centre_values", None)
        seen = self.centre_seen.get(name)
        if centre is seen:
            return
        if seen is not None:
            self.gone[:SIZE] += seen
            self.abdications += 1
            del self.centre_seen[name]
        if centre is not None:
            self.put_in[:SIZE] += centre
            self.reigns[name] += 1
            self.centre_seen[name] = centre

    def deliver(self, source: str, target: str) -> bool:
        queue = self.queues[source, target]
        message: Message | None = queue[0] if queue and target in self.nodes else None
        if not isinstance(message, Delta | Push) or self.mode == "push-sum":
            return super().deliver(source, target)
        end, before = self.end_of(target, source, message.link), self.total(target)
        super().deliver(source, target)
        moved = self.total(target) - before
        if np.abs(moved).max() > ROUNDING:
            self._write((message.link, message.seq), end, moved)
        return True

    def _write(self, at: tuple[int, int], end: End, moved: Vector) -> None:
        exchange = self.ledger[at]
        if end in exchange.moved:
            raise Broken(f"{end} applied number {at[1]} of link {at[0]} twice")
        exchange.moved[end] = moved

    def _watch(self, core: Any, name: NodeId) -> None:
        """Of push-sum one event can hold a part that comes and one that goes: each is seen where it is weighed."""
        sending, untaken, correction = core._sending, core._untaken, core._correction
        end = name, self.lives_of[name], 0

        def mass(part: float, model: Vector) -> Vector:
            whole: Vector = part * np.append(model, 1.0)
            return whole

        def send(peer: NodeId, push: Push, values: Vector) -> Any:
            done = sending(peer, push, values)
            self._write(
                (push.link, push.seq),
                end,
                -mass(core._outflows[peer].under_way, core._copies.outgoing[peer].next_known),
            )
            return done

        def take_back(peer: NodeId) -> Any:
            outgoing = core._copies.outgoing[peer]
            if outgoing.under_way is not None:
                back = mass(core._outflows[peer].under_way, outgoing.next_known)
                self.ledger[outgoing.link, outgoing.under_way.seq].back = back
            return untaken(peer)

        def take(incoming: Any, push: Push, came: Vector, values: Vector, distance: float) -> Any:
            part = incoming.inflow.part(push.weight)
            self._write((push.link, push.seq), end, mass(part, came))
            return correction(incoming, push, came, values, distance)

        core._sending, core._untaken, core._correction = send, take_back, take

    # ---------------------------------------------------------------- what is promised

    def off(self) -> float:
        """How far the sum of all is from what was put in, relative, crashes left out."""
        found = sum((self.total(name) for name in self.nodes), self.gone)
        for exchange in self.ledger.values():
            if not self._is_whole(exchange):
                found = found - sum(exchange.moved.values()) - (0.0 if exchange.back is None else exchange.back)
        return float(np.abs(found - self.put_in).max() / max(1.0, np.abs(self.put_in).max()))

    def _off_by_the_living(self) -> float:
        """The part of it that no crash explains: of exchanges between ends that live on."""
        moved = np.zeros(SIZE + 1)
        for (link, _), exchange in self.ledger.items():
            if all(map(self.lives_on, [*self.ends[link].values(), *exchange.moved])):
                moved += sum(exchange.moved.values()) + (0.0 if exchange.back is None else exchange.back)
        return float(np.abs(moved).max() / max(1.0, np.abs(self.put_in).max()))

    def _is_whole(self, exchange: Exchange) -> bool:
        moved = sum(exchange.moved.values()) + (0.0 if exchange.back is None else exchange.back)
        return bool(np.abs(moved).max() < TINY)

    def check(self, *, someone_is_dead: bool) -> None:
        """Raise Broken. Nothing is under way any more, but with those who are dead."""
        if self.mode in KEEP_NO_MEAN:
            self._check_copies()
            return
        self.sum_off = self._off_by_the_living()
        torn = {at: exchange for at, exchange in self.ledger.items() if not self._is_whole(exchange)}
        cut = doubled = 0
        for (link, seq), exchange in torn.items():
            ends = {**self.ends[link], **{end[0]: end for end in exchange.moved}}
            dead = [end for end in ends.values() if not self.lives_on(end)]
            if not dead and (len(ends) == 2 or not someone_is_dead) and self.mode != "push-sum":
                raise Broken(f"number {seq} of link {link} was applied by {sorted(exchange.moved)} of {sorted(ends)}")
            if self.mode == "push-sum":
                doubled += self._is_doubled(seq, exchange, someone_is_dead=someone_is_dead)
            cut += len(dead) < len(ends)
        if (off := self.off()) > EXACT:
            raise Broken(f"the sum is off by {off:.2e}, beside what the ledger has")
        counted = self.counted + sum(node.core.counts["exchanges_cut"] for node in self.nodes.values())
        if doubled > counted:
            raise Broken(f"{doubled} pushes were taken, and taken back; {counted} are counted")
        if self.mode != "push-sum":
            assert_references_agree(self)
            if unfinished := [name for name, node in self.nodes.items() if node.core.under_way]:
                raise Broken(f"an exchange of {unfinished} was left unfinished")
            if not someone_is_dead and cut > counted + self._pending():
                raise Broken(f"{cut} exchanges were cut by crashes, {counted} are counted")
            crashes = max(self.lives_of.values()) > 1 or someone_is_dead or self.abdications
            if not crashes and counted:
                raise Broken(f"{counted} exchanges are counted as cut, and nobody crashed")

    def _pending(self) -> int:
        """Exchanges of which a living node does not know whether a life that has ended applied them."""
        cores = [
            core
            for node in self.nodes.values()
            for core in (node.core, *(getattr(node.core, side, None) for side in ("_worker", "_centre")))
            if hasattr(core, "_links")
        ]
        held = [link.reference for core in cores for link in core._links.held.values()]
        return sum(not reference.settled for reference in held) + sum(len(core._links.ended.remnants) for core in cores)

    def _is_doubled(self, seq: int, exchange: Exchange, *, someone_is_dead: bool) -> bool:
        """Whether a push between living ends was taken, and taken back, which is counted. Raises Broken."""
        takers = [end for end, moved in exchange.moved.items() if moved[-1] > 0]
        givers = [end for end in exchange.moved if end not in takers]
        if len([end for end in takers if self.lives_on(end)]) > 1:
            raise Broken(f"push {seq} was taken by {takers}")
        if not givers or not self.lives_on(givers[0]) or not all(map(self.lives_on, takers)):
            return False
        if not takers and exchange.back is None and not someone_is_dead:
            raise Broken(f"push {seq} of {givers[0]} was neither taken nor taken back")
        return bool(takers) and exchange.back is not None

    def _check_copies(self) -> None:
        for a, node in self.nodes.items():
            for b, outgoing in node.core._copies.outgoing.items():
                if b not in self.nodes:
                    continue
                if outgoing.under_way is not None:
                    raise Broken(f"a push of {a} to {b} was left unanswered")
                incoming = self.nodes[b].core._copies.incoming.get(a)
                if incoming is None or incoming.link != outgoing.link:
                    continue
                if (incoming.version, incoming.known.tobytes()) != (outgoing.version, outgoing.known.tobytes()):
                    raise Broken(f"{a} and {b} differ in what {b} knows of {a}")
            if self.settings.codec in EXACT_CODECS and np.abs(node.x).max() > 1.01 * self.reach:
                raise Broken(f"the model of {a} has left the range of what was put in")


class Weather:
    """What happens to one swarm, drawn from one seed."""

    def __init__(self, mode: str, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.count, self.view = int(self.rng.integers(2, 9)), int(self.rng.integers(1, 4))
        self.codec = str(self.rng.choice(sorted(CODECS)))
        self.kills = bool(self.rng.integers(2))
        self.swarm = LedgerSwarm(mode, self.count, self.view, self.codec, seed)
        self.names = sorted(self.swarm.nodes)
        self.can_happen: list[tuple[float, Callable[[], None]]] = [
            (8, self.steps), (8, self.deliver_some), (2, self.settle), (1, self.cut), (1, self.lose),
            (1, self.repeat), (3, self.declare_dead), (2, self.find_again), (1, self.part), (1, self.rejoin),
            (1, self.wait), (0.3, self.finish),
        ]  # fmt: skip
        if mode != "elastic":  # a centre variable that starts from such a model never heals
            self.can_happen.append((0.3, self.not_finite))
        if self.kills:
            self.can_happen += [(0.5, self.kill), (0.7, self.restart)]

    def run(self) -> None:
        """Raises Broken, or whatever else goes wrong."""
        weights = np.array([weight for weight, _ in self.can_happen])
        weights /= weights.sum()
        self.swarm.everyone_alive()
        for what in self.rng.choice(len(weights), EVENTS, p=weights):
            self.can_happen[int(what)][1]()
        self.swarm.not_finite.clear()
        if self.rng.integers(2):
            for name in set(self.names) - self.swarm.nodes.keys():
                self.restart(name)
        self.calm()
        if self.rng.integers(2):
            self.swarm.finish(*sorted(self.swarm.nodes))
            self.calm()

    def calm(self) -> None:
        self.swarm.calm()
        self.swarm.check(someone_is_dead=len(self.swarm.nodes) < self.count)

    def one(self) -> NodeId:
        return str(self.rng.choice(sorted(self.swarm.nodes)))

    def two(self) -> tuple[NodeId, NodeId]:
        one, other = self.rng.choice(self.names, 2, replace=False)
        return str(one), str(other)

    def steps(self) -> None:
        name, scale = self.one(), self.rng.choice([0.0, 1e-3, 1.0])
        for _ in range(self.rng.integers(1, 4)):
            self.swarm.step(name, scale * self.rng.normal(size=SIZE))

    def deliver_some(self) -> None:
        for _ in range(self.rng.integers(1, 8)):
            if waiting := self.swarm.waiting():
                self.swarm.deliver(*waiting[self.rng.integers(len(waiting))])

    def settle(self) -> None:
        self.swarm.settle()

    def cut(self) -> None:
        self.swarm.cut(*self.two())

    def lose(self) -> None:
        self.swarm.lose(*self.two())

    def repeat(self) -> None:
        if waiting := self.swarm.waiting():
            self.swarm.duplicate(*waiting[self.rng.integers(len(waiting))], late=bool(self.rng.integers(2)))

    def _dead(self, one: NodeId, others: set[NodeId]) -> None:
        if one in self.swarm.nodes:
            self.swarm.declare_dead(one, others)

    def declare_dead(self) -> None:
        one, other = self.two()
        self._dead(one, {other})

    def find_again(self) -> None:
        one, other = self.two()
        if {one, other} <= self.swarm.nodes.keys():
            self.swarm.peers(one, {*self.swarm.nodes[one].heard, other})

    def part(self) -> None:
        """Two sides, each of which declares the other dead: at once, or a few messages later."""
        side = {name for name in self.names if self.rng.integers(2)}
        for name in self.names:
            self._dead(name, set(self.names) - side if name in side else side)
            if self.rng.integers(2):
                self.deliver_some()

    def rejoin(self) -> None:
        self.swarm.all_hear()

    def wait(self) -> None:
        self.swarm.now += float(self.rng.choice([0.1, 61.0, 400.0]))
        name = self.one()
        self.swarm.perform(name, self.swarm.nodes[name].core.on_timer(self.swarm.now))

    def not_finite(self) -> None:
        """It is so for a while."""
        name = self.one()
        (self.swarm.not_finite.discard if name in self.swarm.not_finite else self.swarm.not_finite.add)(name)

    def finish(self) -> None:
        """Until its next step, when another run begins."""
        self.swarm.step(self.one(), finishing=True)

    def kill(self) -> None:
        if len(self.swarm.nodes) > 2:
            self.swarm.die(self.one())

    def restart(self, name: NodeId | None = None) -> None:
        """With a model of its own."""
        self.swarm.restart(name or str(self.rng.choice(self.names)), self.rng.normal(size=SIZE))


@contextmanager
def quick() -> Iterator[None]:
    """Partners change often, and messages are not put into bytes and out again: other tests do that.

    No end of a run goes further than its partner may, which takes from the mean: test_robust.py has that.
    """
    with (
        patch.object(reference, "PROGRESS_MIN", 0.0),
        patch.object(gossip, "ROTATE_AFTER_EXCHANGES", ROTATE_AFTER),
        patch.object(one_way_core, "ROTATE_AFTER_EXCHANGES", ROTATE_AFTER),
        patch.object(mode_swarm, "carried", lambda message: message),
    ):
        yield


def run(mode: str, seed: int) -> tuple[str, float]:
    """What was broken, in a line, if anything was; and how far the sum was off for no crash, relative."""
    weather = Weather(mode, seed)
    try:
        weather.run()
    except (Broken, AssertionError, PeerError) as broken:  # in this swarm nobody lies
        about = f"{weather.count} nodes, view {weather.view}, {weather.codec}"
        what = str(broken).splitlines()[0] if str(broken) else "an assertion"
        return f"{about}: {what} (sum off by {weather.swarm.sum_off:.2g})", weather.swarm.sum_off
    return "", weather.swarm.sum_off


def main() -> None:
    """Run a part of the sweep, or one swarm of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20_000, help="of each mode")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--replay", help="MODE:SEED")
    options = parser.parse_args()
    console = Console()
    with quick():
        if options.replay:
            mode, _, seed = options.replay.rpartition(":")
            Weather(mode, int(seed)).run()
            console.print("kept")
            return
        sys.exit(1 if sweep(options.modes.split(","), options.first, options.seeds, options.minutes, console) else 0)


def sweep(modes: list[str], first: int, seeds: int, minutes: float, console: Console) -> int:
    """Print what is broken, and a line at the end; returns how many swarms it was."""
    began, ran, failed, worst = time.monotonic(), Counter[str](), Counter[str](), dict.fromkeys(modes, 0.0)
    counted = Counter[str]()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("swarms", total=seeds * len(modes))
        for seed in range(first, first + seeds):
            for mode in modes:
                if time.monotonic() - began > 60 * minutes:
                    break
                broken, off = run(mode, seed)
                ran[mode] += 1
                if off > EXACT and not broken:
                    counted[mode] += 1
                else:
                    worst[mode] = max(worst[mode], off)
                progress.advance(task)
                if broken:
                    failed[mode] += 1
                    progress.print(f"--replay {mode}:{seed}   {broken}", markup=False, soft_wrap=True)
    spent = time.monotonic() - began
    for mode in modes:
        console.print(
            f"{mode}: {failed[mode]} of {ran[mode]} broken, sum off by {worst[mode]:.2g} at most, but in "
            f"{counted[mode]} where the node says so (exchanges_cut)"
        )
    console.print(f"{sum(ran.values())} swarms in {spent:.0f} s, {sum(ran.values()) / spent:.0f} a second")
    return sum(failed.values())


if __name__ == "__main__":
    main()
