"""How do workers train through parameter servers? Rudra (Gupta, Zhang, Wang 2016), without a machine of its own for it.

The model is cut into `servers` shards; each is served by one member, which is a worker, too (leadership.py says which,
and how a shard changes hands). After a step the trainer waits; its worker pushes by how much the step moved each shard
(worker.py), each shard's server answers with its weights at once or after its rule's round (shard_server.py), and when
all have answered the model becomes those weights and the trainer goes on.

Where gradients are exchanged the trainer waits with its gradient, before its step, and pushes that; the servers make
the step, with an optimizer of their own, and the trainer's does none.

With `--topology adv:K` pushes come to each shard's server by a tree of its own (Rudra-adv: tree.py, aggregator.py), and
its weights go down it from learner to learner, as Rudra-adv* broadcasts them (tree_node.py). A server then hears and
says K whole shards a round in place of as many as there are workers; a worker waits for as many hops as the tree is
deep, and for every member on its way to be there: one that lives but cannot be heard holds those below it up until it
is declared failed. Who asks again is answered without the tree.

How a run ends is in run_end.py.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np

from peerd.training.codecs.vector import Layout
from peerd.training.effects import Apply, Averaged, Effect, Log, Proceed, Resume, Send, StepReport, Vector
from peerd.training.mode import LAND_AGAIN_S, LinkStatus, ModeClass, ModeMaker, not_finite
from peerd.training.mode_settings import EXCHANGES, GRADIENTS, SGD, ModeSettings
from peerd.training.model.quiet import EVERY_STEP, Quiet
from peerd.training.parameter_server.leadership import Leadership
from peerd.training.parameter_server.optimizer import RATE_MAX, check_rate, parse_optimizer, text_of
from peerd.training.parameter_server.run_end import TRANSITIONS, RunEnd
from peerd.training.parameter_server.shard_server import RATES, Rule, ShardServer
from peerd.training.parameter_server.shard_state import Members, ShardState
from peerd.training.parameter_server.tree import parse_arity
from peerd.training.parameter_server.tree_node import TreeRelay
from peerd.training.parameter_server.worker import NEVER, Part, Worker
from peerd.training.plain_numbers import count
from peerd.transport.errors import PeerError, WrongSetting, wrong
from peerd.transport.ids import NodeId
from peerd.transport.messages import (
    Applied,
    Connected,
    Finished,
    Message,
    Pass,
    Prepare,
    Promise,
    ShardLeader,
    ShardPull,
    ShardPush,
    ShardSum,
    SumTaken,
    Weights,
)

REPEAT_MIN_S = 10.0  # a connection that breaks is told of; this is for what else may be lost
REPEAT_SHARE = 4  # times the slowest answer of late: how long one may take
TOLD_AFTER = 3  # reminders in vain: 70 s, if answers are quick
SLOWEST_KEPT = 0.9  # of the slowest, at each answer that came sooner


class ParameterServer(ModeClass):
    """The mode's core for one node."""

    RULE: ClassVar[Rule]
    """Unless an argument says another one."""
    TAKES = ("codec", "topology", "servers", "exchange", "server_optimizer")
    ENDS_THAT_COUNT = 1  # the worker's
    EXCHANGES = EXCHANGES

    @classmethod
    def of(cls, argument: str) -> ModeMaker | None:
        """See `ModeClass`."""
        return partial(ParameterServer, rule=cls.RULE) if not argument else None

    @classmethod
    def check(cls, argument: str, told: ModeSettings) -> None:
        """See `ModeClass`."""
        super().check(argument, told)
        parse_arity(told.topology)
        if told.exchange == GRADIENTS:
            if parse_optimizer(told.server_optimizer).clip and told.servers > 1:
                raise wrong(
                    "server_optimizer",
                    f"clip is of the whole gradient, and each of {told.servers} servers has a part: "
                    "leave servers out, or clip",
                )
        elif told.server_optimizer != SGD:
            raise wrong("server_optimizer", "only with exchange gradients, which servers step by; leave it out")
        elif "batch=" in argument:
            raise WrongSetting(
                f"--mode {cls.NAME}:{argument}: only with exchange gradients, whose rate the server scales", "mode"
            )

    @classmethod
    def in_force(cls, told: ModeSettings) -> ModeSettings:
        """See `ModeClass`."""
        if told.exchange == GRADIENTS:
            told = replace(told, server_optimizer=text_of(parse_optimizer(told.server_optimizer)))
        return super().in_force(told)

    def __init__(
        self,
        me: NodeId,
        layout: Layout,
        rng: random.Random,
        settings: ModeSettings,
        values: Callable[[], Vector],
        rule: Rule,
    ) -> None:
        """Raises UserError."""
        self.counts: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()  # of the pushes that came to this node's servers
        self.deadline = float("inf")
        self._me = me
        self._rule = rule
        self._values = values
        self._optimizer = parse_optimizer(settings.server_optimizer) if settings.exchange == GRADIENTS else None
        self.barrier = 1 if self._optimizer is None else 0
        life = rng.getrandbits(31)
        self._worker = Worker(me, life, layout, settings.servers, settings.codec, values().copy(), self._optimizer)
        self._members = Members(me)
        self._relay = TreeRelay(
            self._members, self._worker, self._send, self.counts, waits=rule.n == 0 and not rule.backup
        )
        self._leadership = Leadership(
            self._members, self._relay, rule, self._worker, self._send, self._answered_here, self.counts,
            self.staleness, parse_arity(settings.topology), robust=settings.robust, optimizer=self._optimizer,
        )  # fmt: skip
        self._effects: list[Effect] = []
        self._to_self: list[Message] = []
        self._now = 0.0
        self._slowest_s = 0.0
        self._waits = False  # the trainer, at the barrier or at its end
        self._pulled = False  # weights that the model has not become yet
        self._landing = False  # it may have become them in part, as a variance does (variances.py): look again
        self._land_at = 0.0
        self._bounds = bool(layout.variances)
        self._was_late = False  # for a round of some server, with the push that waits
        self._pushed_step = -1
        self._cut = layout.parameters
        self._buffers: Vector | None = None  # float buffers as they are with a trainer that waits with its gradient
        self._run = RunEnd.TRAINING

    # ---------------------------------------------------------------- events

    def on_step(self, report: StepReport, now: float) -> list[Effect]:
        """Push what the step did. A trainer that came back while an earlier push waits waits with it."""
        self._now = now
        self._note_run(finishing=report.finishing)
        is_push = report.published and self._optimizer is None
        if is_push or report.finishing:
            if is_push and report.step != self._pushed_step and not self._worker.awaiting:
                self._pushed_step = report.step
                if not self._worker.step(self._values(), now):
                    self._effects += not_finite(self.counts)
                self._tell_all()
            self._waits = True
        return self._done()

    def on_gradient(
        self, gradient: Vector, samples: float, step: int, now: float, rate: float, *, anew: bool = False
    ) -> list[Effect]:
        """Push it. A trainer that came back while an earlier one's gradient waits waits with that."""
        self._now = now
        self._note_run(finishing=False)
        self._buffers = gradient[self._cut : len(self._worker.base)].astype(self._worker.base.dtype)
        if not self._worker.awaiting:
            said = min(RATE_MAX, self._rule.said_rate(rate, samples))
            if not self._worker.differentiate(gradient, said, now):
                self._effects += not_finite(self.counts, "a gradient")
            self._tell_all()
        self._waits = True
        return self._done()

    def on_trainer_lost(self, now: float) -> list[Effect]:
        """Nobody waits for the answer."""
        self._waits, self._buffers = False, None
        return []

    def _note_run(self, *, finishing: bool) -> None:
        if finishing == self._finishing:
            return
        self._enter(RunEnd.FINISHING if finishing else RunEnd.TRAINING)
        if not finishing:  # a new run follows a flush
            self._pushed_step = -1
            self._members.finished.discard(self._me)
            self._was_late = True  # rounds of some servers may be without us, who had finished, and not those of others

    def _enter(self, run: RunEnd) -> None:
        assert run in TRANSITIONS[self._run], f"{self._run.name} -> {run.name}"
        self._run = run

    @property
    def _finishing(self) -> bool:
        return self._run is not RunEnd.TRAINING

    @property
    def _drained(self) -> bool:
        return self._run >= RunEnd.DRAINED

    def on_message(self, sender: NodeId, message: Message | Connected, now: float) -> list[Effect]:
        """A peer's message."""
        self._now = now
        self._leadership.heard(sender, now)
        self._receive(sender, message)
        return self._done()

    def on_peers(self, alive: frozenset[NodeId], now: float) -> list[Effect]:
        """Peers came or went."""
        self._now = now
        if self._drained:
            for peer in sorted(alive - self._members.alive):
                self._send(peer, Finished())
        self._leadership.on_peers(alive, now)
        return self._done()

    def on_timer(self, now: float) -> list[Effect]:
        """Remind of what has had no answer for long."""
        self._now = now
        if self._landing and now >= self._land_at and not self._worker.awaiting:
            left = self._worker.base - self._values()
            self._landing = bool(np.isfinite(left).all() and left.any())
            self._pulled |= self._landing
        late = [
            shard for shard in self._leadership.shards if shard.part.awaiting and now >= self._repeat_at(shard.part)
        ]
        for shard in late:
            shard.part.asked_at = now
            shard.part.repeats += 1
            self.counts["repeats"] += 1
        in_vain = [shard for shard in late if shard.part.repeats == TOLD_AFTER]
        self._effects += [Log(text) for text in sorted(set(map(self._why_it_waits, in_vain)))]
        if (
            late
            and self._rule.n == 0
            and all(shard.announced for shard in self._leadership.shards if shard.part.awaiting)
        ):
            # those that have answered shall not wait for our next push; but where a shard has no server all wait for
            # that, and rounds that closed without two of them at each other's servers would hold both up
            late += [shard for shard in self._leadership.shards if not shard.part.awaiting]
        for shard in late:
            self._pull(shard)
        self._leadership.on_timer(now, self._repeat_s)
        return self._done()

    def _pull(self, shard: ShardState) -> None:
        """Ask its server for an answer; or, if there has been one, not to wait for our next push."""
        part = shard.part
        passes = Pass.NONE
        if not part.awaiting:
            passes = Pass.UNTIL_PUSHED if self._worker.awaiting else Pass.ROUND
            part.skips = True
        leader = shard.leader[1] if shard.announced else self._leadership.owner(shard)
        pull = ShardPull(part.number, part.seq, self._worker.life, passes, shard.announced)
        for peer in [leader, *self._relay.above(shard)]:
            self._send(peer, pull)

    def _why_it_waits(self, shard: ShardState) -> str:
        """For whoever reads the log: of a push that has no answer."""
        since = f"this node's step has waited for {self._now - shard.part.pushed_at:.0f} s"
        missing = self._leadership.missing(shard)
        if missing:
            some = "" if self._rule.n == 0 else "some of "
            return f"{since} for {some}{', '.join(f'member {member}' for member in sorted(missing))}"
        return (
            f"{since} for member {shard.leader[1]}, which serves the parameters: it waits for others' steps, as its "
            "log says, or one of the two cannot reach the other (peerd doctor on each, --join the other's address)"
        )

    def _receive(self, sender: NodeId, message: Message | Connected) -> None:
        leadership, now = self._leadership, self._now
        match message:
            case ShardPush():
                check_rate(message.rate, self._optimizer)
                leadership.on_push(sender, message)
            case ShardPull():
                leadership.on_pull(sender, message)
            case Weights():
                self._on_weights(sender, message)
            case Prepare():
                leadership.on_prepare(sender, message, now)
            case Promise():
                leadership.on_promise(sender, message, now)
            case ShardLeader():
                if leadership.on_leader(sender, message, now):
                    self._tell(leadership.shard(message.shard))
            case ShardSum():
                check_rate(message.rate, self._optimizer)
                shard = leadership.shard(message.shard, message.seq, term=message.term, clock=message.clock)
                self._relay.on_sum(shard, sender, message)
            case SumTaken():
                shard = leadership.shard(message.shard, message.seq, term=message.term)
                self._relay.on_taken(shard, sender, message)
            case Finished():
                self._members.finished.add(sender)
            case Connected():
                self._on_connected(sender)
            case _:
                raise PeerError(f"{type(message).__name__} has no meaning to a parameter server")

    def _on_connected(self, peer: NodeId) -> None:
        if self._drained:
            self._send(peer, Finished())
        self._leadership.on_connected(peer)
        for shard in self._leadership.shards:
            if peer in (shard.leader[1], shard.parent(self._me)):
                self._tell(shard)

    # ---------------------------------------------------------------- what there is to see

    def links(self) -> list[LinkStatus]:
        """One row a server of another member's, with the length of the last step."""
        leaders = Counter(shard.leader[1] for shard in self._leadership.shards if shard.announced)
        return [
            LinkStatus(peer, self.counts["exchanges"], self._worker.moved, 1.0, f"{shards} of its shards")
            for peer, shards in leaders.items()
            if peer != self._me
        ]

    @property
    def quiet(self) -> Quiet:
        """Each step is pushed."""
        return EVERY_STEP

    def end(self) -> Vector | None:
        """The model is the weights and the last step."""
        return None

    @property
    def under_way(self) -> bool:
        """Whether a push has had no answer."""
        return self._worker.awaiting

    @property
    def consensus_distance(self) -> float:
        """A model is its servers' weights and one step of its own."""
        return self._worker.moved / self._worker.norm if self._worker.norm > 0 else 0.0

    # ---------------------------------------------------------------- the worker

    def _tell_all(self) -> None:
        for shard in self._leadership.shards:
            self._tell(shard)

    def _tell(self, shard: ShardState, after: int | None = None) -> None:
        """Say to the server what it has not been told; before there is one, nothing."""
        if shard.announced:
            finishing, taken = self._drained, self._relay.taken_up_to(shard)
            for message in self._worker.to_say(shard.part, shard.leader, finishing=finishing, taken=taken, after=after):
                is_push = isinstance(message, ShardPush)
                self._send(self._relay.ours_go_to(shard) if is_push else shard.leader[1], message)

    def _on_weights(self, sender: NodeId, message: Weights) -> None:
        answer = self._leadership.on_weights(sender, message)
        if answer is None:
            return
        shard = self._leadership.shard(message.shard, answer.seq)
        held = self._leadership.held(shard, message.chunks)
        seq = answer.seq if answer.life == self._worker.life else 0
        self._take(shard, message.clock, seq, message.applied, held, message.final)

    def _answered_here(self, shard: ShardState, server: ShardServer, final: bool) -> None:
        """Our own worker's answer needs no bytes."""
        seq = server.last_of(self._me, self._worker.life)
        self._take(shard, server.clock, seq, server.applied.values(), server.held, final)

    def _take(
        self, shard: ShardState, clock: int, seq: int, applied: Iterable[Applied], held: Vector, final: bool
    ) -> None:
        part = shard.part
        awaited, before = part.awaiting, part.clock
        taken = self._worker.take(part, clock, seq, applied, held, final and self._finishing)
        if taken is False:
            self._tell(shard, after=seq)
        elif taken:
            self._pulled |= final
            if awaited:
                if not self._finishing:  # the others' ends may be hours away
                    self._slowest_s = max(SLOWEST_KEPT * self._slowest_s, self._now - part.pushed_at)
                due = before + 1 + part.skips
                part.skips = False
                if self._rule.n == 0 and not self._rule.backup:
                    self._keep_step(late=before == NEVER or clock > due)

    def _keep_step(self, *, late: bool) -> None:
        """Where rounds of several servers begin to count on this worker at different times, skip those that are behind.

        A server whose round this worker came too late for counts on it for the next one, as do those that have answered
        before; no such round can end before all others have answered, and those may wait for workers whom it holds up.
        Once all have answered, those whose weights lack pushes that another's have are one round behind.
        """
        self._was_late |= late
        shards = self._leadership.shards
        if self._worker.awaiting:
            skips = [shard for shard in shards if self._was_late and not shard.part.awaiting]
        else:
            self._was_late = False
            parts = [shard.part for shard in shards]
            if all(part.applied == parts[0].applied for part in parts):  # as nearly always
                return
            skips = [shard for shard in shards if any(self._is_behind(shard.part, other) for other in parts)]
        for shard in skips:
            if not shard.part.skips:
                self.counts["rounds_skipped"] += 1
                self._pull(shard)

    def _is_behind(self, part: Part, other: Part) -> bool:
        """Whether one has earlier pushes of most workers: of half of them, if that half has the first of all."""
        trains = self._members.training
        ahead: set[NodeId] = set()
        rest = {self._me}
        for worker in trains & part.applied.keys() & other.applied.keys() - rest:
            mark, its = part.applied[worker], other.applied[worker]
            (ahead if mark.life == its.life and mark.seq < its.seq else rest).add(worker)
        return len(ahead) > len(rest) or (len(ahead) == len(rest) and min(ahead) < min(rest))

    # ---------------------------------------------------------------- the end of every event

    def _send(self, peer: NodeId, message: Message) -> None:
        if peer == self._me:
            self._to_self.append(message)
        else:
            self._effects.append(Send(peer, message))

    def _done(self) -> list[Effect]:
        """Let this node's own servers and worker finish with each other, then say what came of it."""
        self._converse()
        shift, self._worker.shift = self._worker.shift, None
        drains = self._run is RunEnd.FINISHING  # a trainer that is gone waits no more, but what it pushed still counts
        if (self._waits or drains) and not self._worker.awaiting:
            self._waits = False
            if drains:
                self._drain()  # the last to finish may serve, and has the final weights at once
            self._become()
            if drains:
                self._effects.append(Proceed(settled=False))
            elif self._run is RunEnd.TRAINING:
                self._effects.append(Resume() if self._optimizer is None else Averaged(None))
                self.counts["exchanges"] += 1
        elif self._pulled and self._finishing and not self._worker.awaiting:
            self._become()
        elif shift is not None and shift.any():
            self._effects.append(Apply(shift))
        if (
            self._run is RunEnd.DRAINED
            and not self._landing
            and all(shard.part.final for shard in self._leadership.shards)
        ):
            self._enter(RunEnd.SETTLED)
            self._effects.append(Proceed(settled=True))
        self.deadline = max(self._now, self._deadline())
        effects, self._effects = self._effects, []
        return effects

    def _converse(self) -> None:
        self._leadership.serve(self._now)
        while self._to_self:
            messages, self._to_self = self._to_self, []
            for message in messages:
                self._receive(self._me, message)
            self._leadership.serve(self._now)

    def _become(self) -> None:
        """x = what was pulled."""
        self._pulled = False
        self._landing, self._land_at = self._finishing and self._bounds, self._now + LAND_AGAIN_S
        values = self._values()
        if self._buffers is not None:  # its forward pass has moved them since it published its model
            values[self._cut :], self._buffers = self._buffers, None
        correction = np.subtract(self._worker.base, values, out=values)
        if np.isfinite(correction).all():
            self._effects.append(Apply(correction))

    def _drain(self) -> None:
        self._enter(RunEnd.DRAINED)
        self._members.finished.add(self._me)
        for peer in sorted(self._members.alive):
            self._send(peer, Finished())
        self._converse()

    @property
    def _repeat_s(self) -> float:
        return max(REPEAT_MIN_S, REPEAT_SHARE * self._slowest_s)

    def _repeat_at(self, part: Part) -> float:
        return part.asked_at + self._repeat_s * float(1 << min(part.repeats, 10))

    def _deadline(self) -> float:
        waiting = [self._repeat_at(shard.part) for shard in self._leadership.shards if shard.part.awaiting]
        land_at = self._land_at if self._landing and not waiting else math.inf
        return min([*waiting, self._leadership.deadline(self._repeat_s), land_at])


class HardSync(ParameterServer):
    """The server waits for a push of every worker."""

    NAME = "hardsync"
    RULE = Rule(n=0)
    ARGUMENT = "batch=B and backup=K, one or both with a colon between, from 1 on"

    @classmethod
    def of(cls, argument: str) -> ModeMaker | None:
        """See `ModeClass`."""
        numbers = cls._numbers(argument)
        if not numbers.keys() <= {"batch", "backup"} or not all(numbers.values()):
            return None
        batch, backup = numbers.get("batch", 0), numbers.get("backup", 0)
        return partial(ParameterServer, rule=replace(cls.RULE, batch=batch, backup=backup))

    @classmethod
    def in_one_form(cls, argument: str) -> str:
        """See `ModeClass`."""
        return ":".join(f"{key}={number}" for key, number in sorted(cls._numbers(argument).items()))

    @staticmethod
    def _numbers(argument: str) -> dict[str, int]:
        """A word said twice is none."""
        words = [word.partition("=")[::2] for word in argument.split(":")] if argument else []
        given = dict(words)
        return {key: count(text) if len(given) == len(words) else 0 for key, text in given.items()}


class SoftSync(ParameterServer):
    """The server waits for pushes of a part of the workers: of one of N."""

    NAME = "softsync"
    RULE = Rule(n=1)
    USUAL = "1"
    ARGUMENT = f"N[:RATE] with N >= 1 and RATE of {', '.join(RATES)}"

    @classmethod
    def of(cls, argument: str) -> ModeMaker | None:
        """See `ModeClass`."""
        if not argument:
            return super().of(argument)
        first, _, rate = argument.partition(":")
        number = count(first)
        return (
            partial(ParameterServer, rule=Rule(number, rate or RATES[0])) if number and rate in ("", *RATES) else None
        )

    @classmethod
    def in_one_form(cls, argument: str) -> str:
        """See `ModeClass`."""
        first, _, rate = argument.partition(":")
        if rate in ("", RATES[0]):
            return str(count(first)) if count(first) > 1 else ""
        return f"{count(first)}:{rate}"


class Async(ParameterServer):
    """The server waits for nobody."""

    NAME = "async"
    RULE = Rule(n=None)
    ARGUMENT = f"RATE of {', '.join(RATES)}"

    @classmethod
    def of(cls, argument: str) -> ModeMaker | None:
        """See `ModeClass`."""
        rate = argument or RATES[0]
        return partial(ParameterServer, rule=replace(cls.RULE, rate=rate)) if rate in RATES else None

    @classmethod
    def in_one_form(cls, argument: str) -> str:
        """See `ModeClass`."""
        return argument if argument != RATES[0] else ""
