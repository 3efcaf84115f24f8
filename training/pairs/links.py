"""How does a link to a partner begin, rest and end? What is exchanged over it is another file's business (gossip.py).

A link's life, seen from one end (`peer` is the other):

    opening   -> open      LinkOpen sent; LinkSnapshot came: both references start from that vector. Or LinkEqual: from
                           the one whose digest the LinkOpen had, as the peer has the same (all have just begun, or
                           this node has its model from that peer)
    open      -> open      exchanges (training/pairs/reference.py)
    open      -> dormant   the peer is not alive: an exchange under way is kept, to be finished when it is back
    dormant   -> open      the peer is back
    live      -> (gone)    the peer leaves a half of ours unanswered, though reminded, and its place is needed
    open      -> closing   rotated out: LinkClose sent when no exchange is under way
    closing   -> (gone)    LinkClosed came
    closing   -> dormant   the peer is not alive: what it was asked is said again when it is back (CLOSING_DORMANT)
    any       -> (gone)    the peer does not hold the link any more, or opens another; a new one is opened
    dormant   -> (gone)    there are others, of peers that went later, for whose references the memory is needed

Every message of a link may come twice: what has had no answer is said again.

However a link goes, an exchange is applied on both ends or on neither, while both live. What one end has applied and
the other may not have outlives the link (reference.Unfinished), and is said when the peer is there:

    I have applied v, and you may not have        Delta v, LinkClosed at v
    I wait for your half of v + 1                 Delta v + 1, which whoever has applied it, or can, answers
    I have applied v, and no more will follow     LinkClosed at v: the last word on a link, true for ever

It ends when both ends are known to be at one version, or when the peer knows nothing of the link: it has crashed, and
what it had applied is lost with it, or what it had not is not known. That is counted: exchanges_cut.
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from operator import attrgetter

from peerd.training.codecs.difference import digest, norm_of_difference
from peerd.training.codecs.vector import Layout, NotFinite
from peerd.training.effects import Effect, Send, Sliced, Vector
from peerd.training.flush import Progress
from peerd.training.mode import ENDED_MAX
from peerd.training.pairs.duration import SPARSE, Durations
from peerd.training.pairs.graylist import Graylist
from peerd.training.pairs.nearness import Nearness
from peerd.training.pairs.reference import Exchanged, PairedReference, Unfinished
from peerd.training.pairs.start import SNAPSHOT_CODEC, arrived, snapshot, start_of
from peerd.training.room import room
from peerd.training.sample import sample_of
from peerd.training.scratch import Scratch
from peerd.training.trigger import SILENCE_MAX_S, WAKE_AFTER_S
from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId
from peerd.transport.messages import Delta, LinkClose, LinkClosed, LinkEqual, LinkOpen, LinkSnapshot

UNKNOWN = -1  # the version of a link that this end knows nothing of: it was another life's
UNFINISHED_MAX = 64
OPENED_MAX = 8
"""Links with one peer within a minute, whoever asked: each costs some passes over the whole model, or its bytes."""
SILENT_DOUBLINGS_MAX = 6  # of how long an answer is waited for, while none comes at all: it may be the line
REMINDERS = 10  # a minute apart: a whole model on a thin line takes long, and may still come after them
PATIENCE_MAX_S = 3600.0
SOON = 0.25  # of the patience with a peer: an answer within it halves that


class LinkState(Enum):
    """Where a link is in its life, once its first vector has come."""

    OPEN = auto()  # exchanges may begin
    DORMANT = auto()  # the peer is not alive
    CLOSING = auto()  # LinkClose was sent: none begins here, and the peer's are still answered
    CLOSING_DORMANT = auto()  # LinkClose was sent, and the peer is not alive
    GONE = auto()  # not held any more


TRANSITIONS: dict[LinkState, dict[LinkState, str]] = {
    LinkState.OPEN: {
        LinkState.DORMANT: "the peer is not alive",
        LinkState.CLOSING: "rotated out: LinkClose",
        LinkState.GONE: "the peer's LinkClose, LinkClosed or LinkOpen, or we leave it alone: what it may lack is said",
    },
    LinkState.DORMANT: {
        LinkState.OPEN: "the peer is back: what had no answer is said again",
        LinkState.GONE: "links of peers that went later need the memory, or the peer is heard before it is known",
    },
    LinkState.CLOSING: {
        LinkState.CLOSING_DORMANT: "the peer is not alive",
        LinkState.GONE: "LinkClosed, or what ends an open one",
    },
    LinkState.CLOSING_DORMANT: {
        LinkState.CLOSING: "the peer is back: LinkClose is said again",
        LinkState.GONE: "as of a dormant one",
    },
    LinkState.GONE: {},
}
"""What a state may be followed by, and why."""

WENT = {LinkState.OPEN: LinkState.DORMANT, LinkState.CLOSING: LinkState.CLOSING_DORMANT}
CAME = {rests: live for live, rests in WENT.items()}
_LIVE, _CLOSING = tuple(WENT), (LinkState.CLOSING, LinkState.CLOSING_DORMANT)  # asked at every event of every link
_peer = attrgetter("peer")


@dataclass(slots=True, eq=False)
class PairLink:
    """One end of a link, with what gossip notes of it."""

    peer: NodeId
    reference: PairedReference
    anchor: Vector  # what is kept of x after the last exchange (sample.py)
    anchor_norm: float
    last_exchange: float
    sent_at: float  # when something that waits for an answer was last sent
    state: LinkState
    began_at: float = 0.0  # the last exchange that this end began
    declined_at: float = float("-inf")  # when it was overdue, and the trigger had no reason
    moved: float = 0.0  # at most ||x at the last publish - anchor||
    news: float = 0.0  # the same, of partners that train on, since our own trainer ended
    exchanges: int = 0
    codec: str = SPARSE  # of the next exchange, where `auto` chooses
    distance: float = 0.0  # between the two models, at the last exchange
    peer_finishing: bool = False
    may_at_end: bool = False  # it has been granted what a peer may do at its run's end (robust.py)
    flushed: bool = False  # since our own trainer ended: it has what we had, or was near
    last_reason: str = ""
    start_norm: float = 0.0  # of the whole vector, buffers too, when the link was made
    progress: Progress = field(default_factory=Progress)  # since our own trainer ended
    worth: float = 1.0  # see `PartnerState`
    took: Durations = field(default_factory=Durations)
    near: Nearness = field(default_factory=Nearness)

    def enter(self, state: LinkState) -> None:
        """The only way from one state to another."""
        assert state in TRANSITIONS[self.state], f"{self.state.name} -> {state.name}"
        self.state = state

    @property
    def active(self) -> bool:
        """Whether the peer is alive."""
        return self.state in _LIVE

    @property
    def closing(self) -> bool:
        """Whether the peer was asked to let go of it."""
        return self.state in _CLOSING

    @property
    def idle(self) -> bool:
        """Whether an exchange may begin."""
        return self.state is LinkState.OPEN and self.reference.under_way is None

    @property
    def waits(self) -> bool:
        """Whether a living peer owes an answer."""
        state = self.state
        return state is LinkState.CLOSING or (state is LinkState.OPEN and not self.reference.settled)


@dataclass(slots=True, eq=False)
class Remnant:
    """What is left of a link that ended here before both ends were known to have applied the same exchanges."""

    peer: NodeId
    unfinished: Unfinished
    said_at: float = float("-inf")


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
        self.opening: dict[NodeId, tuple[int, float]] = {}  # link number, when it was last asked for
        self._reminded: Counter[NodeId] = Counter()  # of these
        self._offered: tuple[bytes, Sliced] | None = None  # of these: a start that needs not travel, and its digest
        self.remnants: dict[int, Remnant] = {}  # by link number, the oldest first
        self._ended: OrderedDict[int, int] = OrderedDict()  # link number -> version: LinkClosed was, or can be, said
        self.opens = opens
        self._me = me
        self._layout = layout
        self._rng = rng
        self._view = view
        self._room = room(view, layout.total)
        self._values = values
        self._scratch = scratch
        self._counts = counts
        self._alive: frozenset[NodeId] = frozenset()
        self._declined: set[NodeId] = set()
        self._lacking_since = float("inf")  # or since those who declined were last asked again
        self._made_place_at: float | None = None  # for one that was turned away, or when the first peers came
        self._turned_away: NodeId | None = None
        self._unanswered: Counter[NodeId] = Counter()  # minutes that each was waited for in vain, for a half it owes
        self._patience: dict[NodeId, float] = {}  # seconds that each is waited for, where that is longer than usual
        self._in_vain = 0  # times that one was given up for that, since an exchange was complete
        self._opened_at: dict[NodeId, list[float]] = {}  # when links with each began, of late
        self.graylist = Graylist()

    def live(self) -> list[PairLink]:
        """Those whose peer is alive."""
        return [link for link in self.held.values() if link.state in _LIVE]

    def idle(self) -> list[PairLink]:
        """Those over which an exchange may begin, by peer."""
        return sorted([link for link in self.held.values() if link.idle], key=_peer)

    def knows(self, peer: NodeId, number: int) -> bool:
        """Whether this end holds this link, or did."""
        held = self.held.get(peer)
        return (held is not None and held.reference.link == number) or number in self.remnants or number in self._ended

    def numbers(self) -> list[int]:
        """Of all links that this end knows, the oldest first."""
        return [*self._ended, *self.remnants, *(link.reference.link for link in self.held.values())]

    def disown(self, numbers: list[int]) -> None:
        """Links that another held in this one's place: asked for again, one would start from two different models."""
        for number in numbers:
            self._remember(number, UNKNOWN)

    @property
    def unsettled(self) -> bool:
        """Whether this node or a living peer may still have to apply an exchange."""
        held = any(not link.reference.settled for link in list(self.held.values()) if link.active)
        return held or any(remnant.peer in self._alive for remnant in list(self.remnants.values()))

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
        for left in self.remnants.values():
            if left.peer in self._alive:
                said_at[left.peer] = min(left.said_at, said_at.get(left.peer, math.inf))
        due = {peer: at + self._patience_with(peer) for peer, at in said_at.items()}
        for peer, (_, asked_at) in self.opening.items():
            due[peer] = min(asked_at + SILENCE_MAX_S, due.get(peer, math.inf))
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
        met = {*self.held, *self.opening, *(remnant.peer for remnant in self.remnants.values())}
        for peer in filter(met.__contains__, came):
            if link := self.held.get(peer):
                link.enter(CAME[link.state])
                link.last_exchange = now
                self.returned(peer)
            effects += self.repeat(peer, now)
        self._declined &= alive
        self._patience = {peer: patience for peer, patience in self._patience.items() if peer in alive}
        for peer in self._unanswered.keys() - (alive - set(came)):
            del self._unanswered[peer]
        self._opened_at = {peer: opened for peer, opened in self._opened_at.items() if now - opened[-1] < SILENCE_MAX_S}
        self._make_room()
        return effects + self.fill_view(now)

    def on_timer(self, now: float) -> list[Effect]:
        """Say again what has had no answer for long, and ask anew those who declined.

        A half may take long over a thin line, and longer if it is said again meanwhile: each time twice as late.
        """
        effects: list[Effect] = []
        for peer, at in sorted(self._due().items()):
            if now >= at:
                self._counts["repeats"] += 1
                if peer in self.opening:
                    self._reminded[peer] += 1
                elif at == -math.inf:  # what is left of a link that has just ended
                    self._unanswered[peer] += self._owes_half(peer)
                else:
                    patience = self._patience_with(peer)
                    self._unanswered[peer] += self._owes_half(peer) * round(patience / SILENCE_MAX_S)
                    self._patience[peer] = min(2 * patience, PATIENCE_MAX_S)
                effects += self.repeat(peer, now)
        self._declined.clear()
        self._lacking_since = float("inf")
        return effects + self._give_up_silent(now) + self.fill_view(now)

    def answered(self, peer: NodeId, after_s: float) -> None:
        """An exchange with it is complete, which began so many seconds ago."""
        del self._unanswered[peer]
        self._in_vain = 0
        if (patience := self._patience.get(peer)) is not None and after_s < SOON * patience:
            self._patience[peer] = patience / 2
            if patience / 2 <= SILENCE_MAX_S:
                del self._patience[peer]

    def _patience_with(self, peer: NodeId) -> float:
        return self._patience.get(peer, SILENCE_MAX_S)

    def _owes_half(self, peer: NodeId) -> bool:
        """Be it of a link that has ended. Who has begun anew, or cannot give one, owes none."""
        link = self.held.get(peer)
        if link is not None and link.reference.under_way is not None:
            return True
        return any(one.peer == peer and one.unfinished.under_way is not None for one in self.remnants.values())

    def _give_up_silent(self, now: float) -> list[Effect]:
        """Who lives, and never answers, has no place that others need: such links are never idle, so a few that lie
        would come to have all places. It is kept while there is room for others beside it: its line may be thin, and a
        link that ends there has cost a model for nothing. What is under way with it ends as with any link."""
        effects: list[Effect] = []
        silent = sorted(self._silent(), key=lambda link: (-self._unanswered[link.peer], link.peer))
        while silent and self._strangers(now):
            if self._places_taken() + max(1, self._lacking()) <= self._room.active:
                break
            peer = silent.pop(0).peer
            self._counts["partners_silent"] += 1
            self._in_vain += 1
            del self._unanswered[peer]
            self.graylist.refuse(peer, now)
            self._give_up(peer)
            effects += self.end(peer, now)
        return effects

    def _silent(self) -> list[PairLink]:
        """Those that have not answered for so long that they are no partners."""
        if not self.opens or not self._unanswered:
            return []
        limit = REMINDERS << min(self._in_vain, SILENT_DOUBLINGS_MAX)
        return [link for link in self.live() if self._unanswered[link.peer] >= limit]

    def _lacking(self) -> int:
        """How many partners there are too few."""
        return self._wanted() - self._places_taken() + len(self._silent())

    def on_open(self, sender: NodeId, message: LinkOpen, now: float) -> list[Effect]:
        """Give the peer a link that starts from our model, or decline. Raises NotFinite: then nothing has changed."""
        link, number = self.held.get(sender), message.link
        if link is not None and link.reference.link == number:
            return self.repeat(sender, now) if link.reference.version == 0 else []
        if self.knows(sender, number):
            return self.last_word(sender, number, now)  # said again, of a link that has ended
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
        if self.opening.get(sender, (None, 0.0))[0] != message.link:
            held = self.held.get(sender)
            known = held is not None and held.reference.link == message.link
            return [] if known else self.last_word(sender, message.link, now)
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
            if remnant := self._remnant(sender, message.link):
                remnant.unfinished.taken(message.version)
                self._settle(remnant)
            return self.last_word(sender, message.link, now)
        link.reference.taken(message.version)
        if not link.reference.settled or link.reference.version < message.version:
            return []  # halves are still on their way; the peer says the close again after its answer
        effects = self.end(sender, now)
        self._declined.add(sender)  # its place there is somebody else's now
        return effects + self.fill_view(now)

    def on_unknown(self, sender: NodeId, number: int, now: float) -> list[Effect]:
        """The peer says something of a link that is not held: it may have overtaken what that one begins with."""
        asked, _ = self.opening.get(sender, (None, 0.0))
        return [] if asked == number else self.last_word(sender, number, now)

    def on_closed(self, sender: NodeId, message: LinkClosed, now: float) -> list[Effect]:
        """The peer does not hold the link, or declines to."""
        link, number = self.held.get(sender), message.link
        if self.opening.get(sender, (None, 0.0))[0] == number:
            self._give_up(sender)
            self._declined.add(sender)
            return self.fill_view(now)
        effects: list[Effect] = []
        if link is not None and link.reference.link == number:
            if link.closing:
                self._declined.add(sender)  # rotated out: somebody else's turn
            self._ends_at(link.reference, message.version)
            effects += self.end(sender, now)  # the peer may wait to hear of it
        elif remnant := self._remnant(sender, number):
            self._ends_at(remnant.unfinished, message.version)
            self._settle(remnant)
            if number in self.remnants:
                effects += self.last_word(sender, number, now)
        else:
            return []
        return effects + self.fill_view(now)

    def on_taken(self, sender: NodeId, number: int, seq: int) -> None:
        """The peer has applied an exchange of which it had our half."""
        link = self.held.get(sender)
        if link is not None and link.reference.link == number:
            link.reference.taken(seq)
        elif remnant := self._remnant(sender, number):
            remnant.unfinished.taken(seq)
            self._settle(remnant)

    def on_late(
        self, sender: NodeId, message: Delta, now: float, value_max: float
    ) -> tuple[Exchanged | None, list[Effect]]:
        """A half of a link that is not held: perhaps one that we waited for. Raises PeerError."""
        if self.opening.get(sender, (None, 0.0))[0] == message.link:
            # its snapshot was lost, and the peer may hold no more than what is left of the link: it waits for a half
            # that never comes from here, where the link never opens
            self._give_up(sender)
            return None, [*self.last_word(sender, message.link, now), *self.fill_view(now)]
        remnant = self._remnant(sender, message.link)
        if remnant is None:
            return None, self.last_word(sender, message.link, now)
        exchanged = remnant.unfinished.receive(message, value_max)
        answer = exchanged is not None or message.seq >= remnant.unfinished.version
        self._settle(remnant)
        return exchanged, self.last_word(sender, message.link, now) if answer else []

    def may_still_move(self, peer: NodeId) -> list[bytes]:
        """How far the halves that this one owes us of links that have ended may move each tensor."""
        owed = [one.unfinished.may_still_move for one in self.remnants.values() if one.peer == peer]
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
            self.opening[peer] = (number, now)
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
        for number in [number for number, one in self.remnants.items() if one.peer == peer]:
            effects += self.last_word(peer, number, now)
        if peer in self.opening:
            number, _ = self.opening[peer]
            self.opening[peer] = (number, now)
            return [*effects, Send(peer, LinkOpen(number, self._offer()))]
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
            self._remember(self._asked_no_more(peer), 0)

    def _asked_no_more(self, peer: NodeId) -> int:
        number, _ = self.opening.pop(peer)
        self._reminded.pop(peer, None)
        if not self.opening:
            self._offered = None
        return number

    def end(self, peer: NodeId, now: float) -> list[Effect]:
        """Let go of the link to `peer`, if there is one, and say so."""
        if peer not in self.held:
            return []
        number = self._let_go(peer)
        self._make_room()
        return self.last_word(peer, number, now)

    def _let_go(self, peer: NodeId) -> int:
        """Of a link keep what must outlive it, and its number."""
        link = self.held.pop(peer)
        link.enter(LinkState.GONE)
        reference = link.reference
        if (unfinished := reference.end()) is None:
            self._remember(reference.link, reference.version)
        else:
            self.remnants[reference.link] = Remnant(peer, unfinished)
        return reference.link

    def last_word(self, peer: NodeId, number: int, now: float) -> list[Effect]:
        """What there is to say of a link that is not held."""
        remnant = self._remnant(peer, number)
        if remnant is None:
            return [Send(peer, LinkClosed(number, self._ended.get(number, UNKNOWN)))]
        remnant.said_at = now
        return [Send(peer, message) for message in remnant.unfinished.said()]

    def _remnant(self, peer: NodeId, number: int) -> Remnant | None:
        remnant = self.remnants.get(number)
        return remnant if remnant is not None and remnant.peer == peer else None

    def _settle(self, remnant: Remnant) -> None:
        """Forget it, if both ends are known to have applied the same exchanges."""
        unfinished = remnant.unfinished
        if unfinished.settled:
            self.remnants.pop(unfinished.link, None)
            self._remember(unfinished.link, unfinished.version)

    def _ends_at(self, ended: PairedReference | Unfinished, version: int) -> None:
        """The peer has applied so many exchanges of this link, and no other will follow."""
        if version == ended.version + 1 and ended.under_way is not None:
            ended.taken(ended.version)
            return  # its half is what we wait for
        self._counts["exchanges_cut"] += version != ended.version and not ended.settled
        ended.taken(ended.version)
        ended.cancel()

    def _remember(self, number: int, version: int) -> None:
        self._ended[number] = version
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def _hold(self, peer: NodeId, number: int, start: Sliced, values: Vector, now: float) -> None:
        reference = PairedReference(number, start, self._layout, self._scratch)
        norm = norm_of_difference(values[: self._layout.parameters])
        self._opened_at[peer] = [*self._opened_at.get(peer, ())[-OPENED_MAX + 1 :], now]
        self._patience.pop(peer, None)  # who opens one after the other is to be missed all the same
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
        return sum(self._reminded[peer] < REMINDERS for peer in self.opening)

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
        left = self.remnants.values()
        while len(left) > UNFINISHED_MAX or sum(one.unfinished.models for one in left) > self._room.left:
            self._counts["exchanges_cut"] += 1
            del self.remnants[next(iter(self.remnants))]
