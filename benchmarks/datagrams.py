"""What does the seal of a datagram cost, and what does garbage cost who receives it?

Rounds of each in turn, on one core; prints the median of the rounds, in microseconds a datagram, beside plain AES-GCM.

    python benchmarks/datagrams.py [--rounds 31] [--format json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from peerd.transport import wire
from peerd.transport.messages import Ack, Member, State
from peerd.transport.secure.datagrams import DatagramSeal, SealError, key_id

BATCH = 500  # datagrams
TAG = b"\xffabc"


def _sealed(size: int) -> Callable[[], None]:
    key = os.urandom(32)
    here, there = DatagramSeal(), DatagramSeal()
    here.install([key], key)
    there.install([key], key)
    text = os.urandom(size)

    def run() -> None:
        for _ in range(BATCH):
            there.open(here.seal(text, TAG) or b"", TAG)

    return run


def _bare(size: int) -> Callable[[], None]:
    aead, text, nonce = AESGCM(os.urandom(32)), os.urandom(size), bytes(12)

    def run() -> None:
        for _ in range(BATCH):
            aead.decrypt(nonce, aead.encrypt(nonce, text, TAG), TAG)

    return run


def _garbage(*, known_stream: bool) -> Callable[[], None]:
    """From somebody who has seen our key's id, and a stream where it is a known one."""
    key = os.urandom(32)
    here, there = DatagramSeal(), DatagramSeal()
    here.install([key], key)
    there.install([key], key)
    seen = here.seal(b"text", TAG) or b""
    there.open(seen, TAG)
    made_up = [(seen[:20] if known_stream else key_id(key) + os.urandom(16)) + os.urandom(8 + 76) for _ in range(BATCH)]

    def run() -> None:
        for datagram in made_up:
            try:
                there.open(datagram, TAG)
            except SealError:
                continue
            raise AssertionError("garbage was opened")

    return run


def _wire() -> Callable[[], None]:
    message = Ack(7, "a" * 32, (Member("b" * 32, "node", "10.0.0.1", 7946, 1, 0, State.ALIVE, "", b"m" * 20),))

    def run() -> None:
        for _ in range(BATCH):
            wire.decode_datagram(wire.encode_datagram(message))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--format", choices=["text", "json"], default="text")
    options = parser.parse_args()
    runs = {
        "seal and open, 100 bytes": _sealed(100),
        "AES-GCM alone, 100 bytes": _bare(100),
        "seal and open, 1400 bytes": _sealed(1400),
        "AES-GCM alone, 1400 bytes": _bare(1400),
        "garbage of a known stream": _garbage(known_stream=True),
        "garbage of a made-up stream": _garbage(known_stream=False),
        "encode and decode an Ack": _wire(),
    }
    took: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            took[name].append((time.perf_counter() - began) / BATCH * 1e6)
    rows = {name: {"median_us": statistics.median(each), "best_us": min(each)} for name, each in took.items()}
    if options.format == "json":
        print(json.dumps(rows))
        return
    for name, row in rows.items():
        print(f"{name:<30}{row['median_us']:>8.2f} {row['best_us']:>8.2f}")


if __name__ == "__main__":
    main()
