"""The decoders, each alone: headers, frames in any pieces, chunks, what a member says of itself, local messages."""

from __future__ import annotations

from random import Random
from typing import Any

import msgpack
import numpy as np
from material import Sample, pick, samples
from mutate import altered, bent, packed
from target import Drawn

from peerd.local import local_socket
from peerd.node.meta import NodeMeta
from peerd.protocol.plan import reach
from peerd.protocol.trainer import FROM_DAEMON, FROM_TRAINER, decoded, encoded
from peerd.protocol.trainer_client import TrainerClient
from peerd.settings import Settings, planned
from peerd.training.codecs import CODECS, vector
from peerd.training.codecs.vector import Layout
from peerd.transport import framing, wire
from peerd.transport.errors import PeerError, UserError
from peerd.transport.messages import MESSAGES, Plan

PAYLOAD_LIMIT = 1 << 16  # bytes
SAMPLES = samples()
ALL = [sample for each in SAMPLES.values() for sample in each]
KINDS = sorted(SAMPLES)


def mutated_header(rng: Random, sample: Sample) -> bytes:
    """Bytes that were, most often, a header of this message."""
    if rng.random() < 0.5:
        return bent(rng, sample.header, pick(rng, ALL).header)
    return packed(altered(rng, sample.row))


def nearly_right_header(rng: Random, sample: Sample) -> bytes:
    """What passes the schema, most often: for those behind it."""
    what = rng.random()
    if what < 0.2:
        return sample.header
    return packed(altered(rng, sample.row)) if what < 0.9 else mutated_header(rng, sample)


class Headers(Drawn):
    """A message's header: its schema, ranges and limits. An item is the kind, then the header."""

    def draw(self, rng: Random) -> bytes:
        sample = pick(rng, ALL)
        kind = sample.kind if rng.random() < 0.98 else int(rng.random() * 256)
        return bytes([kind]) + mutated_header(rng, sample)

    def take(self, item: bytes) -> None:
        if not item:
            return
        try:
            head = wire.decode(item[0], memoryview(item)[1:], PAYLOAD_LIMIT)
        except PeerError:
            return
        message = head.message() if head.lengths is None else head.message(tuple(map(bytes, head.lengths)))
        assert isinstance(message, MESSAGES[item[0]])
        wire.encode(message)  # what is let in can be said again


def stream(rng: Random, sample: Sample, header: bytes, chunks: Any) -> bytes:
    """A message as it travels, with checksums that are right."""
    out_of_band = rng.random() < 0.05
    parts = [framing.head_frame(sample.kind, header, out_of_band)]
    for chunk in chunks:
        parts += [framing.chunk_frame(chunk), bytes(chunk)]
    return b"".join(parts)


def mutated_stream(rng: Random, sample: Sample) -> bytes:
    """A message whose header, chunks or frames are other ones."""
    what = rng.random()
    if what < 0.4:
        return stream(rng, sample, mutated_header(rng, sample), sample.chunks)
    if what < 0.6 and sample.chunks:
        chunks = altered(rng, [bytes(chunk) for chunk in sample.chunks])
        chunks = [chunk for chunk in chunks if isinstance(chunk, bytes)] if isinstance(chunks, list) else []
        row = [[len(chunk) for chunk in chunks], *sample.row[1:]] if rng.random() < 0.8 else sample.row
        return stream(rng, sample, packed(row), chunks)
    whole = stream(rng, sample, sample.header, sample.chunks)
    return bent(rng, whole, stream(rng, sample, sample.header, ())) if what < 0.9 else whole


def fed(reader: framing.FrameReader, data: bytes, step: int) -> list[Any]:
    """The messages in these bytes, which come in pieces: of up to `step` bytes, 0: as large as may be.

    Raises PeerError, and then this reader's connection is over.
    """
    came, at, view = [], 0, memoryview(data)
    while at < len(data):
        buffer = reader.buffer()
        if not len(buffer):  # a chunk beside the stream is due
            reader.received_out_of_band(memoryview(bytes(reader.out_of_band_due)))
        else:
            count = min(len(buffer), len(data) - at, 1 + (step * (at + 7)) % 97 if step else len(data))
            buffer[:count] = view[at : at + count]
            reader.received(count)
            at += count
        while (message := reader.next_message()) is not None:
            came.append(message)
        reader.take_announced()
    return came


class Frames(Drawn):
    """A stream of frames. An item is one byte that says in which pieces it comes, then bytes of the stream."""

    def __init__(self) -> None:
        self._anew()

    def _anew(self) -> None:
        self._reader = framing.FrameReader(PAYLOAD_LIMIT)
        self._reader.out_of_band = True

    def draw(self, rng: Random) -> bytes:
        step = bytes([0 if rng.random() < 0.7 else int(rng.random() * 256)])
        return step + mutated_stream(rng, pick(rng, ALL))

    def take(self, item: bytes) -> None:
        if not item:
            return
        try:
            fed(self._reader, item[1:], item[0])
        except PeerError:
            self._anew()
            return
        assert self._reader.bulk_size <= PAYLOAD_LIMIT


class Deltas(Drawn):
    """A vector in chunks. An item is a codec's number and the chunks."""

    LAYOUT = Layout(700, 730, ((720, 730),))
    NAMES = sorted(CODECS)

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._out = np.empty(self.LAYOUT.total, np.float32)
        self._valid = []
        for name in self.NAMES:
            for scale in (1.0, 1e-30, 0.0, 1e30):
                values = (rng.standard_t(3, self.LAYOUT.total) * scale).astype(np.float32)
                chunks = vector.encode(name, self.LAYOUT, values)[0]
                self._valid.append((self.NAMES.index(name), [bytes(chunk) for chunk in chunks]))

    def draw(self, rng: Random) -> bytes:
        number, chunks = pick(rng, self._valid)
        chunks = list(chunks)
        at = int(rng.random() * len(chunks))
        flag, body = chunks[at][:1], chunks[at][1:]
        other = pick(rng, pick(rng, self._valid)[1])
        chunks[at] = flag + bent(rng, body, other) if rng.random() < 0.8 else bent(rng, chunks[at], other)
        if rng.random() < 0.05:
            chunks = chunks[:-1] if rng.random() < 0.5 else [*chunks, other]
        return packed([int(rng.random() * 8) if rng.random() < 0.05 else number, *chunks])

    def take(self, item: bytes) -> None:
        try:
            number, *chunks = msgpack.unpackb(item)
            name = self.NAMES[number]
        except (ValueError, TypeError, LookupError, msgpack.UnpackException):
            return
        if not all(type(chunk) is bytes for chunk in chunks):
            return
        try:
            vector.decode(name, self.LAYOUT, tuple(chunks), self._out)
        except PeerError:
            return
        assert np.isfinite(self._out).all(), "a codec let in what is not finite"


class Metas(Drawn):
    """What a member says of itself, and the plan in it."""

    def __init__(self) -> None:
        texts = ("", "gossip", "allreduce every=2", "hardsync servers=3 codec=sign", "diloco:2 topology=ring")
        plans = [Plan(number, "b", done, text) for number, text in enumerate(texts) for done in (True, False)]
        self._valid = [NodeMeta("a" * 16, True, False, True, plan, True, False).pack() for plan in plans]
        self._started = Settings()

    def draw(self, rng: Random) -> bytes:
        meta = pick(rng, self._valid)
        if rng.random() < 0.5:
            return bent(rng, meta, pick(rng, self._valid))
        return packed(altered(rng, msgpack.unpackb(meta)))

    def take(self, item: bytes) -> None:
        about = NodeMeta.unpack(item)
        about.pack()
        reach(about.plan, [about.plan])
        try:
            planned(self._started, about.plan.text)
        except UserError:
            return


class LocalMessages(Drawn):
    """What trainer and daemon say to each other over the Unix socket, from either end."""

    SAID: tuple[dict[str, Any], ...] = (
        {"kind": "attach", "pid": 1, "signature": "s", "parameters": 4, "total": 6, "tensors": ["w float32 4"],
         "variances": [[4, 6]], "ends": [2, 6], "states": 1, "gradients": 0},
        {"kind": "ready", "step": 3},
        {"kind": "step", "step": 4, "change": 0.5, "lr_ratio": 1.0, "stands": True, "published": 1, "finishing": False},
        {"kind": "taken", "half": 1}, {"kind": "spare"}, {"kind": "barrier", "barrier": 4}, {"kind": "publish"},
        {"kind": "welcome", "checkpoints": "/x", "checkpoint_every_s": 60.0}, {"kind": "resume"}, {"kind": "stop"},
        {"kind": "start", "load": 0, "step": 5, "lr_max": 0.1, "barrier": 0}, {"kind": "corrections", "half": 0},
        {"kind": "gradient_part", "step": 4, "samples": 8.0, "first": 2, "anew": True}, {"kind": "go"},
        {"kind": "gradient_ready", "step": 4, "samples": 8.0, "rate": 0.1, "anew": False}, {"kind": "finished"},
        {"kind": "load", "copy": 0, "step": 5}, {"kind": "gradient", "mean": True}, {"kind": "checkpoint", "why": None},
        {"kind": "drew", "digest": bytes(8)},
    )  # fmt: skip

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._client = TrainerClient()

    def draw(self, rng: Random) -> bytes:
        message = dict(pick(rng, self.SAID))
        for _ in range(1 + int(rng.random() * 2)):
            name = pick(rng, list(message))
            message[name] = altered(rng, message[name])
        body = packed(message)
        if rng.random() < 0.3:
            body = bent(rng, body)
        framed = len(body).to_bytes(4, "little") + body
        return bent(rng, framed) if rng.random() < 0.05 else framed

    def take(self, item: bytes) -> None:
        self._buffer += item
        try:
            while (message := local_socket.take(self._buffer)) is not None:
                for known in (FROM_TRAINER, FROM_DAEMON):
                    self._hear(message, known)
        except ValueError:  # cut off
            self._buffer.clear()

    def _hear(self, message: dict[str, Any], known: Any) -> None:
        try:
            said = decoded(message, known)
        except ValueError:
            return
        local_socket.pack(encoded(said))
        if known is FROM_DAEMON:
            self._client.hear(said)
