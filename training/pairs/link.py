"""What is a link, seen from one end, and what may its life be? Which links there are is links.py's business.

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
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from peerd.training.effects import Vector
from peerd.training.flush import Progress
from peerd.training.pairs.duration import SPARSE, Durations
from peerd.training.pairs.nearness import Nearness
from peerd.training.pairs.reference import PairedReference
from peerd.transport.ids import NodeId


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
