"""What does a member say that lies about its model? One function an attack; who lies, and when, comes from the seed.

A liar keeps its connections, answers in time and follows its mode's rules: only the model that its mode reads is not
the one that it trains (`Lie.shown`), and the `nan` attack alters messages on their way out (`Lie.sent`). It says
differences whole where each node chooses its codec, and keeps to no bound of a robust merge: that is the worst that a
member inside the rules of the wire can do with these values.

The attacks are those of the literature on Byzantine gossip (He, Karimireddy, Jaggi 2022, arXiv:2202.01545; Blanchard et
al. 2017, arXiv:1703.02757).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from peerd.simulation.world import World
from peerd.training.codecs.compress import Compressor, unpack
from peerd.training.effects import Vector
from peerd.training.mode_settings import ModeSettings
from peerd.transport.errors import PeerError, UserError
from peerd.transport.messages import CHUNK_VALUES, Message

HUGE = 1e6  # added to each value
PULL = 10.0  # how far a constant pull goes for each unit of the liar's own steps
DRIFT = 0.5  # and a slow drift, which stays within what the members' own noise spreads
BODY_MAX = 8 * CHUNK_VALUES  # bytes of any codec's chunk


@dataclass(slots=True)
class Lie:
    """What one member shows in place of its model."""

    attack: Attack
    rng: np.random.Generator
    towards: np.random.Generator  # draws the same direction for all liars of a run
    start: Vector | None = None
    direction: Vector | None = None  # of length 1
    walked: float = 0.0  # the sum of the lengths of its own steps

    def stepped(self, before: Vector, after: Vector) -> None:
        """The liar has trained, too."""
        self.walked += float(np.linalg.norm(after - before))

    def told(self, settings: ModeSettings, chooses_codec: bool) -> ModeSettings:
        """What its mode keeps to."""
        return replace(settings, robust=False, codec="float32" if chooses_codec else settings.codec)

    def shown(self, read: Callable[[], Vector], stop: int) -> Callable[[], Vector]:
        """What the mode is to read in place of `read`: of the model, which ends at `stop`."""

        def lied() -> Vector:
            values = read().copy()  # the model itself stays as it is
            model = values[:stop]
            if self.start is None:
                self.start = model.copy()
                drawn = self.towards.standard_normal(len(model))
                self.direction = (drawn / np.linalg.norm(drawn)).astype(model.dtype)
            self.attack(self, model)
            return values

        return lied

    def sent(self, message: Message) -> Message:
        """What leaves in place of this message."""
        if self.attack is not not_a_number or not getattr(message, "chunks", ()):
            return message
        bulk: Any = message
        altered: Message = replace(bulk, chunks=tuple(_all_ones(chunk) for chunk in bulk.chunks))
        return altered


Attack = Callable[[Lie, Vector], None]
"""Overwrites the model, shape (values,), with what is shown."""


def sign_flip(lie: Lie, values: Vector) -> None:
    """Its progress with the sign turned round."""
    assert lie.start is not None, "set before"
    np.subtract(2 * lie.start, values, out=values)


def noise(lie: Lie, values: Vector) -> None:
    """As much fresh noise as there is model."""
    norm = float(np.linalg.norm(values))
    values += (norm / math.sqrt(len(values))) * lie.rng.standard_normal(len(values)).astype(values.dtype)


def huge(lie: Lie, values: Vector) -> None:
    """Far away, once and for all."""
    values += HUGE


def pull(lie: Lie, values: Vector) -> None:
    """Always the same way, ten times as fast as an honest member trains."""
    _away(lie, PULL, values)


def drift(lie: Lie, values: Vector) -> None:
    """Always the same way, so slowly that it could be the member's data."""
    _away(lie, DRIFT, values)


def not_a_number(lie: Lie, values: Vector) -> None:
    """The model is as it is; every value that leaves is a NaN."""


def _away(lie: Lie, rate: float, values: Vector) -> None:
    assert lie.direction is not None, "set before"
    values += (rate * lie.walked) * lie.direction


ATTACKS: dict[str, Attack] = {
    "sign-flip": sign_flip,
    "noise": noise,
    "huge": huge,
    "pull": pull,
    "drift": drift,
    "nan": not_a_number,
}


def parse_byzantine(text: str, peers: int) -> tuple[Attack, int] | None:
    """`none`, `ATTACK`, `ATTACK:COUNT` or `ATTACK:SHARE%`: what is done, and by how many. Raises UserError."""
    name, colon, many = text.partition(":")
    if text == "none":
        return None
    if name not in ATTACKS:
        raise UserError(f"--byzantine {text}: {name!r} is none of {', '.join(ATTACKS)}, none")
    digits = many.removesuffix("%")
    if colon and not (digits.isascii() and digits.isdigit() and len(digits) < 6):
        raise UserError(f"--byzantine {text}: wanted {name}:COUNT or {name}:SHARE%, as {name}:1 or {name}:25%")
    count = round(peers * int(digits) / 100) if many.endswith("%") else int(digits or 1)
    if not 0 < count < peers:
        raise UserError(f"--byzantine {text}: {count} of {peers} members; at least one must lie, and one be honest")
    return ATTACKS[name], count


def draw_liars(text: str, peers: int, world: World) -> tuple[Attack | None, frozenset[int]]:
    """What is done, and at which places. Raises UserError."""
    match parse_byzantine(text, peers):
        case None:
            return None, frozenset()
        case attack, count:
            return attack, frozenset(world.rng("byzantine").sample(range(peers), count))


def make_lie(attack: Attack, index: int, world: World) -> Lie:
    """Of the member at this place."""
    return Lie(attack, _numbers(world, "noise", index), _numbers(world, "direction"))


def _numbers(world: World, *name: object) -> np.random.Generator:
    return np.random.default_rng(world.rng("byzantine", *name).getrandbits(64))


def _all_ones(chunk: bytes | bytearray | memoryview) -> bytes | bytearray | memoryview:
    """The chunk with every bit of its body set: a NaN in any format of floats, a scale that is one in the others."""
    try:
        return Compressor().pack(b"\xff" * len(unpack(chunk, BODY_MAX)))
    except PeerError:  # some messages have their values as they are
        return b"\xff" * len(chunk)
