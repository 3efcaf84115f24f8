"""How does a swarm hold together through one centre variable? Elastic averaging (EASGD, Zhang et al. 2015; Jin 2016).

When a worker's trigger fires, its model x and the centre C move towards each other by u = a (x - C), where a is BETA /
workers. BETA is 0.9, the paper's, or that of `elastic:BETA`. If the script has Nesterov momentum, this is EAMSGD.
That is gossip's exchange over paired references (any codec, error feedback) with its gain limited to a, so a node is
made of one or two gossip cores: its worker, whose only partner is the centre, and on one node, beside its own trainer,
the centre, whose model is C. There the two talk without a network. The sum of all models and C is conserved. As a falls
with 1/workers, a large swarm is coupled weakly; and the centre holds three models for each worker.

Who is the centre: the smallest id alive, for as long as it lives; a newcomer with a smaller id follows it.

    no centre (start, death)   the smallest living id elects itself, and tells all: C starts from its own model
    a newcomer                 takes the smallest id for the centre, which names the true one; that one tells it, too
    two centres (a cut heals)  the one with fewer exchanges follows the other, and so do its workers; its C ends

What was under way with a centre that ends is lost with it. A run ends with a flush in rounds that the centre begins.

`elastic:pairwise[:ALPHA]` needs no centre: two peers that meet move towards each other by the same elastic force,

    x += alpha (y - x)        y += alpha (x - y)

which is that step with a peer in the centre's place, as in Elastic Gossip (Pramod 2018, arXiv:1812.02407), and gossip's
exchange, whose gain is the largest that the codec allows, up to one half, where a pair becomes one model. Here it is
alpha: of the distance of a pair 1 - 2 alpha is left, and the peers go on exploring apart. Both ends name their own, and
the smaller one counts.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from peerd.training.codecs.vector import GAIN_MAX, Layout
from peerd.training.counts import within_step
from peerd.training.effects import Apply, Effect, Proceed, Send, StepReport, Vector
from peerd.training.flush import FLUSH_TOLERANCE
from peerd.training.mode import LinkedMode, LinkStatus, ModeMaker, not_finite
from peerd.training.mode_settings import ModeSettings
from peerd.training.model.quiet import EVERY_STEP, Quiet
from peerd.training.modes.gossip import Gossip
from peerd.training.pairs.link import PairLink
from peerd.training.pairs.reference import PairedReference
from peerd.training.pairs.robust import CentreAllowances
from peerd.training.plain_numbers import number
from peerd.training.trigger import ONLY_FINISHING, SILENCE_MAX_S
from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId
from peerd.transport.messages import (
    CentreIs,
    Connected,
    Delta,
    DeltaTaken,
    LinkClose,
    LinkClosed,
    LinkEqual,
    LinkOpen,
    LinkSnapshot,
    Message,
)

BETA = 0.9  # the moving rate times the number of workers (Zhang et al. 2015)
ALPHA = 0.25  # half of the way to the mean: half of a pair's distance is left
BETA_END = 2.0  # where all workers pull at once, a centre would be thrown beyond them, ever further


class _Worker(Gossip):
    """The trainer's side: it begins the exchanges of the training, and one to hand over what it holds at the end."""

    COMPARES = False
    tolerance = 1.1 * FLUSH_TOLERANCE  # the two ends' norms differ by the tolerance: it accepts what the centre does

    def _round(self, idle: list[PairLink]) -> list[PairLink]:
        return [link for link in idle if not link.flushed]


class _Centre(Gossip):
    """C's side: it answers, and flushes in rounds with all workers that have ended.

    In a first round C becomes the mean of all; in a second, which leaves C where it is, each worker goes half the way
    to it; and so on. One worker after the other would need as many rounds as there are workers, and so would rounds of
    those alone who have answered: so the slow ones are waited for, until it seems that they will never answer.
    """

    COMPARES = False
    tolerance = FLUSH_TOLERANCE
    answered_min_s = SILENCE_MAX_S
    _members: frozenset[NodeId] = frozenset()
    _half_way = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._allowances = CentreAllowances(self._layout)

    def _round(self, idle: list[PairLink]) -> list[PairLink]:
        links = [link for link in idle if link.peer_finishing or not link.flushed]
        if all(self._agrees(link) for link in links):
            return []
        members = frozenset(link.peer for link in links)
        self._half_way = members == self._members and not self._half_way
        self._members = members
        return links

    def _comparable(self) -> int:
        return len(self._alive)

    def _flush_limit(self) -> float:
        return GAIN_MAX if self._half_way else 1 / (1 + max(1, len(self._members)))


class Elastic(LinkedMode):
    """The mode's core for one node."""

    NAME = "elastic"
    ARGUMENT = f"BETA above 0 and below {BETA_END:g}, or pairwise[:ALPHA] with ALPHA above 0 and up to {GAIN_MAX}"

    barrier = 0

    @classmethod
    def of(cls, argument: str) -> ModeMaker | None:
        """See `ModeClass`."""
        if not argument:
            return super().of(argument)
        how, colon, text = argument.partition(":")
        try:
            if how != "pairwise":
                beta = number(argument)
                return partial(cls, beta=beta) if 0 < beta < BETA_END else None
            alpha = number(text) if colon else ALPHA
        except ValueError:
            return None
        return partial(Gossip, gain_limit=alpha) if 0 < alpha <= GAIN_MAX else None

    @classmethod
    def in_one_form(cls, argument: str) -> str:
        """See `ModeClass`."""
        how, _, text = argument.partition(":")
        if how and how != "pairwise":
            return "" if number(argument) == BETA else repr(number(argument))
        return f"{how}:{number(text)!r}" if text and number(text) != ALPHA else how

    def __init__(
        self,
        me: NodeId,
        layout: Layout,
        rng: random.Random,
        settings: ModeSettings,
        values: Callable[[], Vector],
        *,
        beta: float = BETA,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.deadline = math.inf
        self.centre: NodeId | None = None
        """Whom this node takes for the centre."""
        self.centre_values: Vector | None = None
        """C, while this node is the centre."""
        self._me = me
        self._beta = beta
        self._layout = layout
        self._rng = rng
        self._settings = settings
        self._values = values
        self._worker = _Worker(me, layout, rng, replace(settings, view=1), self._model, counts=self.counts)
        self._centre: _Centre | None = None
        self._age = 0  # exchanges of C
        self._alive: frozenset[NodeId] = frozenset()
        self._named: NodeId | None = None  # a centre that we heard of before membership knew it
        self._sent_on: set[NodeId] = set()  # whom we took for the centre, and who named another
        self._past: list[int] = []  # links of a reign of this node that has ended
        self._inside: deque[tuple[Gossip, Message]] = deque()  # from one core of this node to the other
        self._correction: Vector | None = None  # of x, by this event; lent until the next
        self._corrected = False
        self._report = StepReport(0, 0.0, 1.0, published=False, finishing=False)
        self._drained = self._settled = False

    # ---------------------------------------------------------------- events

    def on_step(self, report: StepReport, now: float) -> list[Effect]:
        """The worker may begin an exchange; at the end the centre flushes, too."""
        self._reclaim()
        was_finishing, self._report = self._report.finishing, report
        if not report.finishing:
            self._drained = self._settled = False
        effects = self._perform(self._worker, self._worker.on_step(report, now), now)
        if self._centre is not None and (report.finishing or was_finishing):
            effects += self._perform(self._centre, self._centre.on_step(report, now), now)
        return self._end(effects)

    def on_message(self, sender: NodeId, message: Message | Connected, now: float) -> list[Effect]:
        """One event of one link, or news of the centre."""
        self._reclaim()
        match message:
            case CentreIs():
                effects = self._on_news(sender, message, now)
            case LinkOpen() if self._centre is None:  # not declined: it asks whom we name, or again if that is us
                effects = [] if self.centre is None else [Send(sender, CentreIs(self.centre, 0))]
            case Connected():
                effects = [effect for core in self._cores() for effect in self._tell(core, sender, message, now)]
                if self._centre is not None and sender in self._alive:
                    effects.append(Send(sender, CentreIs(self._me, self._age)))
            case LinkOpen() | LinkSnapshot() | LinkEqual() | Delta() | DeltaTaken() | LinkClose() | LinkClosed():
                is_centres = isinstance(message, LinkOpen) or (
                    self._centre is not None and self._centre.holds(sender, message.link)
                )
                core = self._centre if is_centres and self._centre is not None else self._worker
                effects = self._tell(core, sender, message, now)
            case _:
                raise PeerError(f"{type(message).__name__} has no meaning in elastic averaging")
        return self._end(effects)

    def on_peers(self, alive: frozenset[NodeId], now: float) -> list[Effect]:
        """Peers came or went; perhaps the centre."""
        self._reclaim()
        came, self._alive = alive - self._alive, alive
        for core in self._cores():
            core.gain_limit = min(GAIN_MAX, self._beta / (1 + len(alive)))
        effects: list[Effect] = []
        if self.centre is None or self.centre not in alive | {self._me}:
            named = self._named if self._named in alive else None
            effects += self._follow(named or min(alive | {self._me}), now)
        elif self._centre is not None:
            effects += [Send(peer, CentreIs(self._me, self._age)) for peer in sorted(came)]
            effects += self._perform(self._centre, self._centre.on_peers(alive | {self._me}, now), now)
        return self._end(effects)

    def on_timer(self, now: float) -> list[Effect]:
        """See gossip."""
        self._reclaim()
        self._sent_on.clear()
        effects = [effect for core in self._cores() for effect in self._perform(core, core.on_timer(now), now)]
        return self._end(effects)

    # ---------------------------------------------------------------- what there is to see

    def links(self) -> list[LinkStatus]:
        """One row a live link: a worker's one, or all of the centre's, its own trainer's too."""
        return (self._centre or self._worker).links()

    def references(self) -> dict[NodeId, PairedReference]:
        """As in gossip; not what this node's own two sides know of each other."""
        found = (self._centre or self._worker).references()
        return {peer: reference for peer, reference in found.items() if peer != self._me}

    @property
    def quiet(self) -> Quiet:
        """As its worker's; the centre answers."""
        return EVERY_STEP if self._report.finishing or self._drained else self._worker.quiet

    def end(self) -> Vector | None:
        """The models have it all; the centre, which lies among them, goes."""
        return None

    @property
    def under_way(self) -> bool:
        """Whether an exchange is."""
        return any(core.under_way for core in self._cores())

    @property
    def consensus_distance(self) -> float:
        """As in gossip, but the other end is near the mean: the distance to it counts in full."""
        return math.sqrt(2) * (self._centre or self._worker).consensus_distance

    # ---------------------------------------------------------------- who is the centre

    def _on_news(self, sender: NodeId, news: CentreIs, now: float) -> list[Effect]:
        within_step("a centre's age", news.age, self._age)
        if sender != news.node:
            if sender != self.centre:
                return []
            if self._worker.links():
                self._sent_on.clear()  # it was the centre
            if news.node in self._sent_on:
                return []  # two who name each other would send us to and fro, as fast as the network is
            self._sent_on.add(sender)
            if news.node == self._me or news.node in self._alive:
                return self._follow(news.node, now)
            self._named = news.node
        elif sender not in self._alive:
            self._named = sender  # once membership knows it, it hears from us
        elif sender == self.centre:
            return self._tell(self._worker, sender, Connected(), now)  # it may not have listened when we asked it
        elif self._centre is not None:
            if (-news.age, sender) < (-self._age, self._me):
                return self._follow(sender, now)
            return [Send(sender, CentreIs(self._me, self._age))]
        elif not self._worker.links():  # whom we follow has not answered: it may be none
            return self._follow(sender, now)
        return []

    def _follow(self, centre: NodeId, now: float) -> list[Effect]:
        """From now on this is the centre."""
        effects: list[Effect] = []
        self.centre, self._named = centre, None
        if centre == self._me:
            self.centre_values = values = self._model().copy()
            buffer = np.empty_like(values)

            def read() -> Vector:
                np.copyto(buffer, values)
                return buffer

            settings = replace(self._settings, trigger=ONLY_FINISHING)
            self._centre = _Centre(self._me, self._layout, self._rng, settings, read, opens=False, counts=self.counts)
            self._centre.gain_limit = self._worker.gain_limit
            self._centre.disown(self._past)
            self._age = 0
            effects += [Send(peer, CentreIs(centre, 0)) for peer in sorted(self._alive)]
            effects += self._perform(self._centre, self._centre.on_peers(self._alive | {self._me}, now), now)
        elif self._centre is not None:
            effects += [Send(link.peer, CentreIs(centre, 0)) for link in self._centre.links() if link.peer != self._me]
            self._past = self._centre.link_numbers()
            self._centre = self.centre_values = None
        effects += self._perform(self._worker, self._worker.on_peers(frozenset({centre}), now), now)
        if self._centre is not None and self._report.finishing:
            effects += self._perform(self._centre, self._centre.on_step(self._report, now), now)
        return effects

    # ---------------------------------------------------------------- two cores, one node

    def _cores(self) -> list[Gossip]:
        return [self._worker] if self._centre is None else [self._worker, self._centre]

    def _model(self) -> Vector:
        """The model with the corrections that this event's effects will bring."""
        values = self._values()
        if self._correction is not None and self._corrected:
            np.add(values, self._correction, out=values)
        return values

    def _tell(self, core: Gossip, sender: NodeId, message: Message | Connected, now: float) -> list[Effect]:
        return self._perform(core, core.on_message(sender, message, now), now)

    def _perform(self, core: Gossip, effects: list[Effect], now: float) -> list[Effect]:
        """Do what stays within this node; return the rest."""
        out = self._sort(core, effects)
        while self._inside:
            origin, message = self._inside.popleft()
            other = self._centre if origin is self._worker else self._worker
            if other is not None:
                try:
                    out += self._sort(other, other.on_message(self._me, message, now))
                except PeerError:  # this node's model is none that it would take from a peer
                    out += [*not_finite(self.counts), *self._sort(other, other.end_link(self._me, now))]
                    break  # the rest at the next event: it may come to this again
        return out

    def _sort(self, core: Gossip, effects: list[Effect]) -> list[Effect]:
        """A core's corrections are lent until its next event: they are taken at once."""
        out: list[Effect] = []
        for effect in effects:
            match effect:
                case Send(peer, message) if peer == self._me:
                    self._inside.append((core, message))
                case Apply() if core is not self._worker:
                    assert self.centre_values is not None, "there is a core that corrects it"
                    self.centre_values += effect.correction
                    self._age += 1
                case Apply():
                    if self._correction is None:
                        self._correction = np.zeros_like(effect.correction)
                    self._correction += effect.correction
                    self._corrected = True
                case Proceed():
                    pass  # said once both cores have said it
                case _:
                    out.append(effect)
        return out

    def _reclaim(self) -> None:
        if self._correction is not None and self._corrected:
            self._correction.fill(0.0)
        self._corrected = False

    def _end(self, effects: list[Effect]) -> list[Effect]:
        cores = self._cores()
        if self._correction is not None and self._corrected:
            effects.append(Apply(self._correction))
        if self._report.finishing:
            if not self._drained and all(core.drained for core in cores):
                self._drained = True
                effects.append(Proceed(settled=False))
            if not self._settled and all(core.settled for core in cores):
                self._settled = True
                effects.append(Proceed(settled=True))
        self.deadline = min(core.deadline for core in cores)
        return effects
