"""How fast is each codec, how small, and how much gets through? One thread, a difference of 25 M values.

    python benchmarks/codecs.py [--values 25000000] [--format table|json] [--codec sign]

MB/s are of the float32 vector, not of what it becomes. "codec" is the codec alone; "delta" is the whole way: cut,
encode, squeeze, measure what is lost, and back.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from peerd.training.codecs import CODECS, Codec, vector
from peerd.training.effects import Vector

Figures = dict[str, Any]


def vectors(count: int) -> dict[str, Vector]:
    """The differences to encode: well-behaved, heavy-tailed, and layers whose scales differ as in a real network."""
    random = np.random.default_rng(1)
    gaussian = random.standard_normal(count, dtype=np.float32)
    heavy = random.standard_t(3, count).astype(np.float32)
    layers = gaussian.copy()
    for layer in np.array_split(layers, 50):
        layer *= math.exp(1.5 * random.standard_normal())
    return {"gaussian": gaussian, "student t": heavy, "layers": layers}


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Median processor time of `call`, after one warm-up: wall time would count our neighbours on a shared machine."""
    times = []
    for _ in range(repeats + 1):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return statistics.median(times[1:])


def measure(codec: Codec, values: Vector, repeats: int) -> Figures:
    """Rates of the codec alone and of the whole way, bytes a value, contraction."""
    out = np.empty_like(values)
    spans = [slice(start, start + vector.PIECE_VALUES) for start in range(0, values.size, vector.PIECE_VALUES)]
    bodies = [codec.encode(values[span]) for span in spans]
    layout = vector.Layout(values.size, values.size)
    chunks, contraction = vector.encode(codec.name, layout, values)
    megabytes = values.nbytes / 1e6

    def encode_all() -> None:
        for span in spans:
            codec.encode(values[span])

    def decode_all() -> None:
        for span, body in zip(spans, bodies, strict=True):
            codec.decode(body, out[span])

    return {
        "encode_MB_s": megabytes / seconds(encode_all, repeats),
        "decode_MB_s": megabytes / seconds(decode_all, repeats),
        "delta_encode_MB_s": megabytes / seconds(lambda: vector.encode(codec.name, layout, values), repeats),
        "delta_decode_MB_s": megabytes / seconds(lambda: vector.decode(codec.name, layout, chunks, out), repeats),
        "body_bytes_a_value": sum(len(body) for body in bodies) / values.size,
        "wire_bytes_a_value": sum(len(chunk) for chunk in chunks) / values.size,
        "contraction": contraction.delta,
    }


def print_table(results: dict[str, dict[str, Figures]]) -> None:
    """One table a kind of vector."""
    for kind, rows in results.items():
        print(f"\n{kind}")
        print("codec      encode  decode  delta: encode  decode  MB/s   bytes a value: body    wire   contraction")
        for name, row in rows.items():
            print(
                f"{name:9} {row['encode_MB_s']:7.0f} {row['decode_MB_s']:7.0f} {row['delta_encode_MB_s']:14.0f}"
                f" {row['delta_decode_MB_s']:7.0f} {row['body_bytes_a_value']:26.4f} {row['wire_bytes_a_value']:7.4f}"
                f" {row['contraction']:13.6f}"
            )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=25_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--codec", choices=sorted(CODECS), action="append")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    arguments = parser.parse_args()
    results = {
        kind: {name: measure(CODECS[name], values, arguments.repeats) for name in arguments.codec or CODECS}
        for kind, values in vectors(arguments.values).items()
    }
    if arguments.format == "json":
        print(json.dumps(results, indent=2))
    else:
        print_table(results)


if __name__ == "__main__":
    main()
