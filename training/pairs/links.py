"""To whom does a node hold links, whom does it ask for one, and who is given one?

A link's life is in link.py, what is left of it in ended.py; what is exchanged over it is gossip.py's business. Every
message of a link may come twice: what has had no answer is said again (reminders.py).
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter

from peerd.training.codecs.difference import digest, norm_of_difference
from peerd.training.codecs.vector import Layout, NotFinite
from peerd.training.effects import Effect, Send, Sliced, Vector
from peerd.training.pairs.ended import UNKNOWN, EndedLinks
from peerd.training.pairs.graylist import Graylist
from peerd.training.pairs.link import CAME, WENT, LinkState, PairLink
from peerd.training.pairs.reference import Exchanged, PairedReference
from peerd.training.pairs.reminders import REMINDERS, Reminders
from peerd.training.pairs.start import SNAPSHOT_CODEC, arrived, snapshot, start_of
from peerd.training.room import room
from peerd.training.sample import sample_of
from peerd.training.scratch import Scratch
from peerd.training.trigger import SILENCE_MAX_S, WAKE_AFTER_S
from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId
from peerd.transport.messages import Delta, LinkClose, LinkClosed, LinkEqual, LinkOpen, LinkSnapshot

OPENED_MAX = 8
"""Links with one peer within a minute, whoever asked: each costs some passes over the whole model, or its bytes."""
_peer = attrgetter("peer")


@dataclass(slots=True)
class Asked:
    """A link that a peer was asked for, and has not given yet."""

    number: int
    at: float  # when it was last asked
    reminders: int = 0


class PairLinks:
    """The links of one node: those it holds, and those it has asked for."""

    def __init__(
        self,
        me: NodeId,
        layout: Layout,
        rng: random.Random,
        view: int,
        values: Callable[[], Vector],
        scratch: Scratch,
        counts: Counter[str],
        *,
        opens: bool,
    ) -> None:
        """Open links until there are `view`, and accept as many as room.py says; one that does not open accepts all."""
        self.held: dict[NodeId, PairLink] = {}
        self.opening: dict[NodeId, Asked] = {}
        self._offered: tuple[bytes, Sliced] | None = None  # of these: a start that needs not travel, and its digest
        self.opens = opens
        self._me = me
        self._layout = layout
        self._rng = rng
        self._view = view
        self._room = room(view, layout.total)
        self.ended = EndedLinks(self._room.left, counts)
        self._values = values
        self._scratch = scratch
        self._counts = counts
        self._alive: frozenset[NodeId] = frozenset()
        self._declined: set[NodeId] = set()
        self._lacking_since = float("inf")  # or since those who declined were last asked again
        self._made_place_at: float | None = None  # for one that was turned away, or when the first peers came
        self._turned_away: NodeId | None = None
        self.reminders = Reminders()
        self._opened_at: dict[NodeId, list[float]] = {}  # when links with each began, of late
        self.graylist = Graylist()

    def live(self) -> list[PairLink]:
        """Those whose peer is alive."""
        return [link for link in self.held.values() if link.active]

    def idle(self) -> list[PairLink]:
        """Those over which an exchange may begin, by peer."""
        return sorted([link for link in self.held.values() if link.idle], key=_peer)

    def knows(self, peer: NodeId, number: int) -> bool:
        """Whether this end holds this link, or did."""
        held = self.held.get(peer)
        return (held is not None and held.reference.link == number) or self.ended.knows(number)

    def numbers(self) -> list[int]:
        """Of all links that this end knows, the oldest first."""
        return [*self.ended.numbers(), *(link.reference.link for link in self.held.values())]

    def disown(self, numbers: list[int]) -> None:
        """Links that another held in this one's place: asked for again, one would start from two different models."""
        for number in numbers:
            self.ended.remember(number, UNKNOWN)

    @property
    def unsettled(self) -> bool:
        """Whether this node or a living peer may still have to apply an exchange."""
        held = any(not link.reference.settled for link in list(self.held.values()) if link.active)
        return held or any(peer in self._alive for peer, _ in self.ended.said_at())

    def deadline(self, now: float) -> float:
        """When something must be said again, should nothing come until then."""
        if self._places_taken() < self._wanted():
            self._lacking_since = min(self._lacking_since, now)  # those who declined are asked again
        else:
            self._lacking_since = math.inf
        return min([self._lacking_since + SILENCE_MAX_S, *self._due().values()]) - SILENCE_MAX_S + WAKE_AFTER_S

    def _due(self) -> dict[NodeId, float]:
        """When each is told again what it has not answered."""
        said_at = {peer: link.sent_at for peer, link in self.held.items() if link.waits}
        for peer, at in self.ended.said_at():
            if peer in self._alive:
                said_at[peer] = min(at, said_at.get(peer, math.inf))
        due = {peer: self.reminders.due_at(peer, at) for peer, at in said_at.items()}
        for peer, asked in self.opening.items():
            due[peer] = min(asked.at + SILENCE_MAX_S, due.get(peer, math.inf))
        return due

    # ---------------------------------------------------------------- events

    def on_peers(self, alive: frozenset[NodeId], now: float) -> list[Effect]:
        """Wake the links of those who came, rest those of who went, and fill the view."""
        effects: list[Effect] = []
        came = sorted(alive - self._alive)
        for peer in sorted(self._alive - alive):
            self._give_up(peer)
            if link := self.held.get(peer):
                link.enter(WENT[link.state])
        self._alive = alive
        if self._made_place_at is None and alive:
            self._made_place_at = now
        met = {*self.held, *self.opening, *(peer for peer, _ in self.ended.said_at())}
        for peer in filter(met.__contains__, came):
            if link := self.held.get(peer):
                link.enter(CAME[link.state])
                link.last_exchange = now
                self.returned(peer)
            effects += self.repeat(peer, now)
        self._declined &= alive
        self.reminders.keep(alive.difference(came))
        self._opened_at = {peer: opened for peer, opened in self._opened_at.items() if now - opened[-1] < SILENCE_MAX_S}
        self._make_room()
        return effects + self.fill_view(now)

    def on_timer(self, now: float) -> list[Effect]:
        """Say again what has had no answer for long, and ask anew those who declined."""
        effects: list[Effect] = []
        for peer, at in sorted(self._due().items()):
            if now >= at:
                self._counts["repeats"] += 1
                if asked := self.opening.get(peer):
                    asked.reminders += 1
                else:
                    self.reminders.reminded(peer, at, owes_half=self._owes_half(peer))
                effects += self.repeat(peer, now)
        self._declined.clear()
        self._lacking_since = float("inf")
        return effects + self._give_up_silent(now) + self.fill_view(now)

    def _owes_half(self, peer: NodeId) -> bool:
        """Be it of a link that has ended. Who has begun anew, or cannot give one, owes none."""
        link = self.held.get(peer)
        if link is not None and link.reference.under_way is not None:
            return True
        return any(one.under_way is not None for one in self.ended.of(peer).values())

    def _give_up_silent(self, now: float) -> list[Effect]:
        """Who lives, and never answers, has no place that others need: such links are never idle, so a few that lie
        would come to have all places. It is kept while there is room for others beside it: its line may be thin, and a
        link that ends there has cost a model for nothing. What is under way with it ends as with any link."""
        effects: list[Effect] = []
        silent = self._silent()
        while silent and self._strangers(now):
            if self._places_taken() + max(1, self._lacking()) <= self._room.active:
                break
            peer = silent.pop(0)
            self._counts["partners_silent"] += 1
            self.reminders.given_up(peer)
            self.graylist.refuse(peer, now)
            self._give_up(peer)
            effects += self.end(peer, now)
        return effects

    def _silent(self) -> list[NodeId]:
        """Who has a link, and is no partner."""
        return self.reminders.silent(link.peer for link in self.live()) if self.opens else []

    def _lacking(self) -> int:
        """How many partners there are too few."""
        return self._wanted() - self._places_taken() + len(self._silent())

    def on_open(self, sender: NodeId, message: LinkOpen, now: float) -> list[Effect]:
        """Give the peer a link that starts from our model, or decline. Raises NotFinite: then nothing has changed."""
        link, number = self.held.get(sender), message.link
        if link is not None and link.reference.link == number:
            return self.repeat(sender, now) if link.reference.version == 0 else []
        if self.knows(sender, number):
            return self.ended.last_word(sender, number, now)  # said again, of a link that has ended
        if sender in self.opening and self._me > sender:
            return []  # both ends asked at once: the smaller id answers, the larger's number stands
        if self._opened_too_often(sender, now):
            self._counts["links_declined"] += 1
            return [Send(sender, LinkClosed(number, 0))]
        frees = sender in self.opening or (link is not None and link.active)  # the place that it has
        full = self.opens and self._places_taken() - frees >= self._room.active
        declines = full or self.graylist.refuses(sender, now)
        values = self._values()
        start = None if declines else start_of(values, self._layout)
        self._give_up(sender)
        effects = self.end(sender, now)
        if start is None:
            self._counts["links_declined"] += 1
            return [*effects, Send(sender, LinkClosed(number, 0)), *self._make_place(sender, now)]
        self._hold(sender, number, start, values, now)
        if sender not in self.held:  # membership does not know it yet, and there is no room for another such
            self._counts["links_declined"] += 1
            return [*effects, Send(sender, LinkClosed(number, 0))]
        if message.digest and message.digest == digest(start, self._layout):
            self._counts["links_equal"] += 1
            return [*effects, Send(sender, LinkEqual(number))]
        self._counts["snapshots"] += 1
        return [*effects, Send(sender, LinkSnapshot(number, SNAPSHOT_CODEC, snapshot(start, self._layout)))]

    def on_start(self, sender: NodeId, message: LinkSnapshot | LinkEqual, now: float) -> list[Effect]:
        """The peer gives the link that we asked for. Raises PeerError."""
        if not self._has_asked(sender, message.link):
            held = self.held.get(sender)
            known = held is not None and held.reference.link == message.link
            return [] if known else self.ended.last_word(sender, message.link, now)
        values = self._values()
        if isinstance(message, LinkSnapshot):
            start = arrived(message.codec, self._layout, message.chunks, values.dtype)
        elif self._offered is not None:
            start = self._offered[1] if len(self.opening) == 1 else self._offered[1].copy()
        else:
            raise PeerError(f"{sender} has a model equal to one that it was not told of")
        self._asked_no_more(sender)
        self._hold(sender, message.link, start, values, now)
        return []

    def on_close(self, sender: NodeId, message: LinkClose, now: float) -> list[Effect]:
        """The peer wants to end its link with us."""
        link = self.held.get(sender)
        if link is None or link.reference.link != message.link:
            self.ended.taken(sender, message.link, message.version)
            return self.ended.last_word(sender, message.link, now)
        link.reference.taken(message.version)
        if not link.reference.settled or link.reference.version < message.version:
            return []  # halves are still on their way; the peer says the close again after its answer
        effects = self.end(sender, now)
        self._declined.add(sender)  # its place there is somebody else's now
        return effects + self.fill_view(now)

    def on_unknown(self, sender: NodeId, number: int, now: float) -> list[Effect]:
        """The peer says something of a link that is not held: it may have overtaken what that one begins with."""
        return [] if self._has_asked(sender, number) else self.ended.last_word(sender, number, now)

    def on_closed(self, sender: NodeId, message: LinkClosed, now: float) -> list[Effect]:
        """The peer does not hold the link, or declines to."""
        link, number = self.held.get(sender), message.link
        if self._has_asked(sender, number):
            self._give_up(sender)
            self._declined.add(sender)
            return self.fill_view(now)
        effects: list[Effect] = []
        if link is not None and link.reference.link == number:
            if link.closing:
                self._declined.add(sender)  # rotated out: somebody else's turn
            self.ended.ends_at(link.reference, message.version)
            effects += self.end(sender, now)  # the peer may wait to hear of it
        elif (said := self.ended.closed(sender, message, now)) is not None:
            effects += said
        else:
            return []
        return effects + self.fill_view(now)

    def on_taken(self, sender: NodeId, number: int, seq: int) -> None:
        """The peer has applied an exchange of which it had our half."""
        link = self.held.get(sender)
        if link is not None and link.reference.link == number:
            link.reference.taken(seq)
        else:
            self.ended.taken(sender, number, seq)

    def on_late(
        self, sender: NodeId, message: Delta, now: float, value_max: float
    ) -> tuple[Exchanged | None, list[Effect]]:
        """A half of a link that is not held: perhaps one that we waited for. Raises PeerError."""
        if self._has_asked(sender, message.link):
            # its snapshot was lost, and the peer may hold no more than what is left of the link: it waits for a half
            # that never comes from here, where the link never opens
            self._give_up(sender)
            return None, [*self.ended.last_word(sender, message.link, now), *self.fill_view(now)]
        return self.ended.receive(sender, message, now, value_max)

    def may_still_move(self, peer: NodeId) -> list[bytes]:
        """How far the halves that this one owes us of links that have ended may move each tensor."""
        owed = [one.may_still_move for one in self.ended.of(peer).values()]
        return [limits for limits in owed if limits]

    # ---------------------------------------------------------------- what gossip asks

    def fill_view(self, now: float) -> list[Effect]:
        """Ask strangers for links while there are fewer than wanted."""
        free = self._room.active - self._places_taken() if self.opens else 0
        lacking, first = min(self._lacking(), free), None
        if self._turned_away is not None and self.opens and self._places_taken() < self._room.active:
            first, self._turned_away = self._turned_away, None
        if lacking <= 0 and first is None:
            return []
        strangers = sorted(self._strangers(now) - self._declined)
        asked = self._rng.sample(strangers, min(max(0, lacking), len(strangers)))
        if first in strangers and first not in asked:
            asked[:1] = [first]
        effects: list[Effect] = []
        for peer in asked:
            number = self._rng.getrandbits(62)
            offered = self._offer()
            self.opening[peer] = Asked(number, now)
            effects.append(Send(peer, LinkOpen(number, offered)))
        return effects

    def _strangers(self, now: float) -> frozenset[NodeId]:
        """Who may be asked for a link, or may be when they have a place again."""
        refused = {peer for peer, _ in self.graylist.refused(now)}
        refused |= {peer for peer in self._opened_at if self._opened_too_often(peer, now)}
        return self._alive - self.held.keys() - self.opening.keys() - refused

    def _opened_too_often(self, peer: NodeId, now: float) -> bool:
        return sum(now - at < SILENCE_MAX_S for at in self._opened_at.get(peer, ())) >= OPENED_MAX

    def _make_place(self, peer: NodeId, now: float) -> list[Effect]:
        """This one found none here, and perhaps nowhere: it is asked when one is free. Each costs a link its past."""
        lately = self._made_place_at is None or now - self._made_place_at < SILENCE_MAX_S
        if lately or not self.opens or peer not in self._alive or self.graylist.refuses(peer, now):
            return []
        if effects := self.rotate(now):
            self._made_place_at, self._turned_away = now, peer
        return effects

    def rotate(self, now: float) -> list[Effect]:
        """Give the place of the most used idle link to a peer outside the view, if there is one."""
        idle = self.idle()
        self._declined.clear()
        if not self.opens or not idle or not self._alive - set(self.held) - set(self.opening):
            return []
        link = max(idle, key=lambda link: (link.exchanges, link.reference.link))  # of equals not all the same peer's
        link.enter(LinkState.CLOSING)
        link.sent_at = now
        self._counts["rotations"] += 1
        return [Send(link.peer, LinkClose(link.reference.link, link.reference.version))]

    def returned(self, peer: NodeId) -> None:
        """It may have begun anew, or have forgotten the link: what it was told of our end it is told again."""
        if (link := self.held.get(peer)) is not None:
            link.flushed = False
            link.near.forget()

    def repeat(self, peer: NodeId, now: float) -> list[Effect]:
        """Say again what may have been lost with a connection."""
        effects: list[Effect] = []
        for number in self.ended.of(peer):
            effects += self.ended.last_word(peer, number, now)
        if asked := self.opening.get(peer):
            asked.at = now
            return [*effects, Send(peer, LinkOpen(asked.number, self._offer()))]
        link = self.held.get(peer)
        if link is None or not link.active:
            return effects
        link.sent_at = now
        reference = link.reference
        if reference.version == 0:  # both references still are the snapshot, which comes out of its codec as it went in
            chunks = snapshot(reference.mine, self._layout)
            effects.append(Send(peer, LinkSnapshot(reference.link, SNAPSHOT_CODEC, chunks)))
        elif (
            reference.answered is not None and not reference.confirmed
        ):  # the peer may still wait for it, and must have it before the next half
            effects.append(Send(peer, replace(reference.answered, wants_answer=False)))
        if reference.under_way is not None:
            effects.append(Send(peer, reference.under_way))
        if link.closing:
            effects.append(Send(peer, LinkClose(reference.link, reference.version)))
        return effects

    def _offer(self) -> bytes:
        """The digest of the vector from which the links that are asked for now may start: one for all, until all are
        answered. Empty: our model holds a value that is not finite."""
        if self._offered is None:
            try:
                start = start_of(self._values(), self._layout)
            except NotFinite:
                return b""
            self._offered = digest(start, self._layout), start
        return self._offered[0]

    def _give_up(self, peer: NodeId) -> None:
        """Wait no longer for the link that this one was asked for, if it was."""
        if peer in self.opening:
            self.ended.remember(self._asked_no_more(peer), 0)

    def _has_asked(self, peer: NodeId, number: int) -> bool:
        asked = self.opening.get(peer)
        return asked is not None and asked.number == number

    def _asked_no_more(self, peer: NodeId) -> int:
        number = self.opening.pop(peer).number
        if not self.opening:
            self._offered = None
        return number

    def end(self, peer: NodeId, now: float) -> list[Effect]:
        """Let go of the link to `peer`, if there is one, and say so."""
        if peer not in self.held:
            return []
        number = self._let_go(peer)
        self._make_room()
        return self.ended.last_word(peer, number, now)

    def _let_go(self, peer: NodeId) -> int:
        """Of a link keep what must outlive it, and its number."""
        link = self.held.pop(peer)
        link.enter(LinkState.GONE)
        self.ended.let_go(peer, link.reference)
        return link.reference.link

    def _hold(self, peer: NodeId, number: int, start: Sliced, values: Vector, now: float) -> None:
        reference = PairedReference(number, start, self._layout, self._scratch)
        norm = norm_of_difference(values[: self._layout.parameters])
        self._opened_at[peer] = [*self._opened_at.get(peer, ())[-OPENED_MAX + 1 :], now]
        self.reminders.begins(peer)
        # a peer may open before its own news has come; one that membership never confirms holds no place of the view
        state = LinkState.OPEN if peer in self._alive else LinkState.DORMANT
        self.held[peer] = PairLink(
            peer, reference, sample_of(self._layout).take(values), norm, last_exchange=now, sent_at=now, state=state,
            start_norm=norm_of_difference(values),
        )  # fmt: skip
        self._make_room()

    def _wanted(self) -> int:
        return min(self._view, len(self._alive)) if self.opens else 0

    def _places_taken(self) -> int:
        return len(self.live()) + self._answers_due

    @property
    def _answers_due(self) -> int:
        """Of links that were asked for. Who has been silent for long may not reach us: its place is another's, too."""
        return sum(asked.reminders < REMINDERS for asked in self.opening.values())

    def expects_more(self, now: float) -> bool:
        """Whether a link that was asked for may still come, or a first one of peers who had no place for it."""
        if self._answers_due or not self.opens or any(not link.closing for link in self.live()):
            return self._answers_due > 0
        return bool(self._strangers(now))

    def ask_if_none(self, now: float) -> list[Effect]:
        """Where there is no link that will stay: ask those who declined at once, not when a while has passed."""
        if all(link.closing for link in self.live()):
            self._declined.clear()
        return self.fill_view(now)

    def _make_room(self) -> None:
        """Keep as many links to absent peers as there is room for, those with an exchange to finish first, and as much
        of what is left of others."""
        dormant = sorted(
            (link for link in self.held.values() if not link.active),
            key=lambda link: (link.reference.settled, -link.last_exchange, link.peer),
        )
        kept = self._room.dormant(self._places_taken()) if self.opens else self._view
        for link in dormant[kept:]:
            self._counts["links_forgotten"] += 1
            self._let_go(link.peer)
        self.ended.make_room()
