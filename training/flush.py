"""How do modes with links end a run?"""

from __future__ import annotations

FLUSH_CODEC = "int4"  # an eighth of a difference's length is left after one exchange, a sixtieth after two
FLUSH_TOLERANCE = 1e-2  # relative distance at which two models count as one
FLUSH_REACH = 1.5
"""Times the usual distance: what each peer may move a model by whose run has ended. With 1 honest partners of a liar
end apart; with 2 one liar of eight took 5 to 8 points more of runs with few exchanges (RESULTS.md)."""
WHILE_ONE_TRAINS = 3.0  # tolerances: its end moves all once more, and they agree then
WINDOW = 32  # exchanges of a flush within which two that do not agree come closer, or never will
PARTED_MAX = 32  # times that two agree and then do not: one that lies can say both in turn
CLOSER = 0.98  # of the distance before: what an honest member's exchanges come to even where they are clipped


class Progress:
    """Does a partner come closer, while all agree at the end of a run? One that lies does not, nor one too far off.

    News from elsewhere takes two apart again that had come close, so the least distance says nothing: what counts is
    whether the second half of a window is closer than the first.
    """

    def __init__(self) -> None:
        self.is_stuck = False
        self._distances: list[float] = []
        self._agreed = False
        self._parted = 0

    def note(self, distance: float, *, agree: bool) -> None:
        """The two were so far apart at an exchange, which counts as agreement or not."""
        self._parted += self._agreed and not agree
        self._agreed = agree
        if self._parted > PARTED_MAX:
            self.is_stuck = True
        elif agree:
            self._distances.clear()
        else:
            self._distances.append(distance)
            if len(self._distances) == WINDOW:
                half = WINDOW // 2
                self.is_stuck = sum(self._distances[half:]) >= CLOSER * sum(self._distances[:half])
                self._distances.clear()
