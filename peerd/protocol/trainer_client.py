"""What has the daemon said so far, and what does the trainer wait for? The trainer's end of a session, without I/O.

A trainer trains, and waits where the swarm has to do something first: the first step, a barrier, a gradient, the end.
It says itself that it waits (`enter`), and only the daemon's answer lets it go on (`hear`). What the daemon says to one
that does not wait for it changes no state: an answer may cross a wait that the script has given up.
"""

from __future__ import annotations

from enum import Enum, auto

from peerd.protocol.trainer import (
    Added,
    BarrierHeard,
    BarrierIs,
    Corrections,
    Finished,
    Go,
    GradientIs,
    Publish,
    Resume,
    Said,
    Start,
    Stop,
)


class ClientState(Enum):
    """What the trainer does."""

    STARTING = auto()  # it waits for enough members
    TRAINING = auto()  # it waits for nobody
    AT_BARRIER = auto()
    WITH_GRADIENT = auto()
    FINISHING = auto()  # its last step is made, and the others are to agree
    FINISHED = auto()
    LEAVING = auto()  # the node goes: it publishes once more, and waits for nobody


_FROM_ANY = {
    ClientState.AT_BARRIER: "a step of the barrier's is made: Stepped",
    ClientState.WITH_GRADIENT: "its gradient is in the memory: GradientReady",
    ClientState.FINISHING: "its last step is made: Stepped(finishing)",
    ClientState.LEAVING: "Stop",
}  # from one that waits, too: the script may catch what interrupted it (Ctrl-C), and train on or end
TRANSITIONS: dict[ClientState, dict[ClientState, str]] = {
    ClientState.STARTING: {ClientState.TRAINING: "Go", ClientState.LEAVING: "Stop"},
    ClientState.TRAINING: _FROM_ANY,
    ClientState.AT_BARRIER: {ClientState.TRAINING: "Resume; or BarrierIs: nobody waits at the old one", **_FROM_ANY},
    ClientState.WITH_GRADIENT: {ClientState.TRAINING: "GradientIs", **_FROM_ANY},
    ClientState.FINISHING: {ClientState.FINISHED: "Finished", **_FROM_ANY},
    ClientState.FINISHED: _FROM_ANY,
    ClientState.LEAVING: {},
}
"""What a state may be followed by, and why."""

ANSWERS: dict[ClientState, tuple[type[Said], ...]] = {
    ClientState.STARTING: (Go,),
    ClientState.AT_BARRIER: (Resume, BarrierIs),
    ClientState.WITH_GRADIENT: (GradientIs,),
    ClientState.FINISHING: (Finished,),
}
"""Where the trainer waits, and for what."""


class TrainerClient:
    """What one trainer knows of its session."""

    def __init__(self) -> None:
        self.state = ClientState.STARTING
        self.heard = 0  # messages
        self.barrier = 0
        self.copy_asked = False
        self.mean: bool | None = None  # whether what stands for the last gradient is the swarm's; None: it has not come
        self.published_to = 0  # the copy that was written last

    @property
    def waits(self) -> bool:
        """Whether the daemon's answer must come first."""
        return self.state in ANSWERS

    @property
    def leaves(self) -> bool:
        """Whether the node goes."""
        return self.state is ClientState.LEAVING

    @property
    def next_copy(self) -> int:
        """The one that may be written when the daemon reads the other."""
        return 1 - self.published_to

    def published(self, copy: int) -> None:
        """This copy has been written."""
        self.published_to, self.copy_asked = copy, False

    def enter(self, state: ClientState) -> None:
        """The only way from one state to another; there is none from a node that leaves."""
        if not self.leaves:
            assert state in TRANSITIONS[self.state], f"{self.state.name} -> {state.name}"
            self.state = state
            if state is ClientState.WITH_GRADIENT:
                self.mean = None

    def hear(self, said: Said) -> Said | None:
        """Note it; returns what to answer, to `Corrections` once they have been added."""
        if isinstance(said, Stop):
            self.enter(ClientState.LEAVING)
        elif isinstance(said, ANSWERS.get(self.state, ())):
            self.enter(ClientState.FINISHED if isinstance(said, Finished) else ClientState.TRAINING)
        match said:
            case Start(barrier=barrier):
                self.barrier = barrier
            case Corrections(buffer):
                return Added(buffer)
            case Publish():
                self.copy_asked = True
            case GradientIs(mean):
                self.mean = mean
            case BarrierIs(barrier):
                self.barrier = barrier
                return BarrierHeard()
        return None
