"""When does a suspicion become a verdict?

Lifeguard's answer (Dadgar, Phillips and Currey 2018, arXiv:1707.00788, section IV-B): start long and shorten with each
further distinct accuser, since one accuser may itself be the slow one. And nobody is buried unheard: who is about to
pass the verdict asks the suspect for its last word, over a stream, which lost datagrams cannot silence. Gossip alone
leaves somebody without the refutation in one of some ten thousand cases, and one wrong verdict is heard by all.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from peerd.membership.timing import Timing
from peerd.transport.ids import NodeId

LAST_WORDS_MAX = 4
_OUTDATED_MAX = 256  # entries of the heap beyond twice the suspicions


@dataclass(slots=True)
class _Suspicion:
    started: float
    least_s: float
    most_s: float
    needed: int  # further accusers that bring it to least_s
    not_before: float = 0.0  # moved by a stall
    accusers: set[NodeId] = field(default_factory=set)
    deadline: float = 0.0
    short: bool = False  # nobody listens at its address
    asked: bool = False  # for its last word

    def lasts_s(self) -> float:
        """Lifeguard: max(min, max - (max - min) * log(C + 1) / log(K + 1)), with C accusers after the first."""
        if self.needed == 0:
            return self.least_s
        share = math.log(len(self.accusers)) / math.log(self.needed + 1)
        return max(self.least_s, self.most_s - (self.most_s - self.least_s) * share)


class Suspicions:
    """The suspicions under way. A heap holds their deadlines; an outdated entry is skipped when it surfaces."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._suspects: dict[NodeId, _Suspicion] = {}
        self._heap: list[tuple[float, NodeId]] = []

    def __len__(self) -> int:
        return len(self._suspects)

    @property
    def deadline(self) -> float:
        """When the next suspicion ends."""
        while self._heap and not self._holds(*self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def begin(self, id: NodeId, accuser: NodeId, population: int, now: float, *, vacant: bool = False) -> None:
        """A member is suspected for the first time in this incarnation; `vacant`: nobody listens at its address."""
        least_s = self._timing.suspicion_min_s(population)
        needed = min(self._timing.suspicion_accusers, max(0, population - 2))  # neither the subject nor the first
        suspicion = _Suspicion(now, least_s, least_s * self._timing.suspicion_max_mult, needed, now, {accuser})
        self._suspects[id] = suspicion
        if vacant:
            self._shorten(suspicion)
        self._arm(id, suspicion)

    def shorten(self, id: NodeId) -> None:
        """Nobody listens at the address of this one, which may be a suspect."""
        if (suspicion := self._suspects.get(id)) is not None and not suspicion.short:
            self._shorten(suspicion)
            self._arm(id, suspicion)

    def _shorten(self, suspicion: _Suspicion) -> None:
        suspicion.short = True
        suspicion.most_s = suspicion.least_s = self._timing.suspicion_vacant_share * suspicion.least_s

    def confirm(self, id: NodeId, accuser: NodeId) -> bool:
        """Another accusation; True if it counts, and so is worth telling others."""
        if not self.lacks(id, accuser):
            return False
        suspicion = self._suspects[id]
        suspicion.accusers.add(accuser)
        self._arm(id, suspicion)
        return True

    def lacks(self, id: NodeId, accuser: NodeId) -> bool:
        """Whether another accusation by this one would count."""
        suspicion = self._suspects.get(id)
        return (
            suspicion is not None and accuser not in suspicion.accusers and len(suspicion.accusers) <= suspicion.needed
        )

    def is_ripe(self, id: NodeId, now: float) -> bool:
        """Whether the suspect has had its shortest time to refute, since we last stood still and it last spoke, too."""
        suspicion = self._suspects.get(id)
        if suspicion is None or now < suspicion.started + suspicion.least_s:
            return False
        return suspicion.asked or suspicion.not_before <= now

    def clear(self, id: NodeId) -> None:
        """The suspicion is refuted, superseded, or has become a verdict."""
        self._suspects.pop(id, None)

    def postpone(self, now: float) -> None:
        """We stood still, perhaps while the refutations came: give every suspect its shortest time again.

        Whoever was asked for its last word may have said it: it is asked anew, whatever comes of the question before.
        """
        for id, suspicion in self._suspects.items():
            suspicion.asked = False
            suspicion.not_before = now + suspicion.least_s
            self._arm(id, suspicion)

    def last_words(self, now: float, unasked: Callable[[NodeId], bool] = lambda _: False) -> list[NodeId]:
        """The suspects whose time is up and who are to be asked for their last word; call before `expired`.

        At most a few at once: where many are silent it is not datagrams that were lost. Who is `unasked` takes the
        place of none of them.
        """
        if self.deadline > now:
            return []
        room = LAST_WORDS_MAX - len(self.asked())
        suspects = self._suspects.items()
        due = sorted((s.deadline, id) for id, s in suspects if s.deadline <= now and not s.asked and not unasked(id))
        ids = [id for _, id in due[: max(0, room)]]
        for id in ids:
            suspicion = self._suspects[id]
            suspicion.asked = True
            suspicion.not_before = now + 2 * self._timing.probe_timeout_s
            self._arm(id, suspicion)
        return ids

    def spoke(self, id: NodeId, now: float) -> None:
        """A suspect was heard over a stream: it lives, and has its shortest time again to refute."""
        suspicion = self._suspects.get(id)
        if suspicion is not None and suspicion.asked:
            suspicion.asked = False
            suspicion.not_before = now + suspicion.least_s
            self._arm(id, suspicion)

    def asked(self) -> list[NodeId]:
        """Those whose last word is awaited."""
        return [id for id, suspicion in self._suspects.items() if suspicion.asked]

    def expired(self, now: float) -> list[NodeId]:
        """The suspects whose time is up."""
        ids = []
        while self.deadline <= now:
            _, id = heapq.heappop(self._heap)
            del self._suspects[id]
            ids.append(id)
        return ids

    def _arm(self, id: NodeId, suspicion: _Suspicion) -> None:
        suspicion.deadline = max(suspicion.started + suspicion.lasts_s(), suspicion.not_before)
        heapq.heappush(self._heap, (suspicion.deadline, id))
        if len(self._heap) > 2 * len(self._suspects) + _OUTDATED_MAX:  # suspicions come and go faster than they end
            self._heap = [(suspicion.deadline, id) for id, suspicion in self._suspects.items()]
            heapq.heapify(self._heap)

    def _holds(self, deadline: float, id: NodeId) -> bool:
        suspicion = self._suspects.get(id)
        return suspicion is not None and suspicion.deadline == deadline
