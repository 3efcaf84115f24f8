"""A hand between members that seal their datagrams: it changes them, makes some up, has them come again, late or back.

What opens was sealed so, under the same tag, and comes for the first time; what is honest opens.
"""

from __future__ import annotations

from random import Random

from mutate import TOUCH_BYTES, touched
from target import Drawn

from peerd.transport.secure.datagrams import DatagramSeal, SealError

HONEST, TOUCHED, AGAIN, LATE, HELD, MADE_UP, BACK, ELSEWHERE, KEYS = range(9)
KEPT = 16  # datagrams that may come again


class SealedDatagrams(Drawn):
    """Two members and a hand between them. An item is what is done, who seals, how, then a datagram."""

    TAGS = (b"", b"other")

    def __init__(self) -> None:
        self._keys = 0
        self._nodes = [DatagramSeal() for _ in range(3)]  # the last is who receives
        self._late: list[bytes] = []
        self._sealed: dict[bytes, tuple[int, bytes]] = {}  # that did not come: under which key, and what it says
        self._past: list[bytes] = []
        self._change_keys()

    def _change_keys(self) -> None:
        """The newest and the one before it are known, and that one seals."""
        self._keys += 1
        known = [number.to_bytes(32, "big") for number in (self._keys, self._keys + 1)]
        for node in self._nodes:
            node.install(known, known[0])

    def draw(self, rng: Random) -> bytes:
        drawn = rng.random()
        what = HONEST if drawn < 0.4 else TOUCHED if drawn < 0.7 else int(rng.random() * 9)
        head = bytes([what, int(rng.random() * 2)]) + rng.randbytes(TOUCH_BYTES)
        return head + rng.randbytes(int(rng.random() * 80))

    def take(self, item: bytes) -> None:
        if len(item) < 2 + TOUCH_BYTES:
            return
        what, who, how, data = item[0] % 9, item[1] % 3, item[2 : 2 + TOUCH_BYTES], item[2 + TOUCH_BYTES :]
        if what == KEYS:  # seldom
            if how[0] < 32:
                self._change_keys()
            return
        if what == MADE_UP:
            self._come(data)
        elif what == AGAIN:
            self._come(self._past[how[0] % len(self._past)] if self._past else b"")
        elif what == LATE and self._late:
            self._come(self._late.pop(how[0] % len(self._late)))
        else:
            self._seal(what, who, how, data)

    def _seal(self, what: int, who: int, how: bytes, data: bytes) -> None:
        sender = 2 if what == BACK else who % 2
        tag = self.TAGS[what == ELSEWHERE]
        sealed = self._nodes[sender].seal(data, tag)
        assert sealed is not None
        if sender < 2 and not tag:
            self._sealed[sealed] = self._keys, data
        if what == HELD:
            self._late = [*self._late[-KEPT:], sealed]
        elif what == TOUCHED:
            self._come(touched(how, sealed, self._past[-1] if self._past else b""))
        else:
            self._come(sealed)
        self._past = [*self._past[-KEPT:], sealed]

    def _come(self, datagram: bytes) -> None:
        """What opens was sealed so, and comes for the first time; what is so opens."""
        expected = self._sealed.pop(datagram, None)
        try:
            said = self._nodes[2].open(datagram, self.TAGS[0])
        except SealError:
            assert expected is None or expected[0] < self._keys, "an honest datagram did not open"
            return
        assert expected is not None, "what nobody sealed has opened"
        assert said == expected[1]
