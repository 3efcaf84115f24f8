"""The control of E10, and nothing to train with: gossip of float32 as the papers count it, 32 bits a value.

peerd's own float32 is packed without loss (training/codecs/compress.py), whatever else it is compared with.
"""

from __future__ import annotations

from dataclasses import replace

from peerd.training.codecs import CODECS
from peerd.training.codecs.compress import RAW, unpack
from peerd.training.effects import Effect, Send, Vector
from peerd.training.modes.gossip import Gossip
from peerd.training.pairs.link import PairLink
from peerd.transport.ids import NodeId
from peerd.transport.messages import CHUNK_VALUES, Chunks, Delta


class Unpacked(Gossip):
    """The mode's core for one node. What a broken connection has said again stays packed."""

    NAME = "gossip-unpacked"

    def _begin(self, link: PairLink, values: Vector, reason: str, now: float) -> list[Effect]:
        return _unpacked(super()._begin(link, values, reason, now))

    def _on_delta(self, sender: NodeId, message: Delta, now: float) -> list[Effect]:
        return _unpacked(super()._on_delta(sender, message, now))


def _unpacked(effects: list[Effect]) -> list[Effect]:
    return [
        replace(effect, message=replace(effect.message, chunks=_raw(effect.message.codec, effect.message.chunks)))
        if isinstance(effect, Send) and isinstance(effect.message, Delta)
        else effect
        for effect in effects
    ]


def _raw(codec: str, chunks: Chunks) -> Chunks:
    limit = CODECS[codec].body_limit(CHUNK_VALUES)
    return tuple(bytes([RAW]) + unpack(chunk, limit) for chunk in chunks)
