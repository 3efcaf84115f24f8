"""The same targets, with the mutations that reach new code kept and mutated further: `make fuzz GUIDED=TARGET`.

Atheris (libFuzzer) chooses by coverage; what an input is and how it is changed is ours. It has the extra `fuzz`.
"""

from __future__ import annotations

import sys
import warnings
from random import Random

import atheris

with atheris.instrument_imports(include=["peerd"]):
    from fuzz import CORPUS, TARGETS
    from mutate import bent
    from target import Target, read, replay, written

ITEMS_MAX = 64


def mutated(target: Target, data: bytes, seed: int) -> bytes:
    """One item more, fewer or other than it was."""
    rng = Random(seed)
    try:
        items = read(data)
    except ValueError:
        items = []
    victim = target.begin()
    try:
        at = int(rng.random() * (len(items) + 1))
        what = rng.random()
        if items and what < 0.2:
            del items[at % len(items)]
        elif items and what < 0.5:
            items[at % len(items)] = bent(rng, items[at % len(items)])
        else:
            for item in items[:at]:
                victim.take(item)
            items.insert(at, victim.draw(rng))
    finally:
        victim.close()
    return written(items[:ITEMS_MAX])


def main() -> None:
    """`guided.py TARGET [libFuzzer's options and folders]`."""
    target = TARGETS[sys.argv.pop(1)]
    warnings.simplefilter("error")

    def one(data: bytes) -> int:
        try:
            items = read(data)
        except ValueError:
            return -1
        replay(target, items)
        return 0

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        return mutated(target, data, seed)[:max_size]

    prefix = f"-artifact_prefix={CORPUS}/{target.name}-"
    atheris.Setup([sys.argv[0], prefix, "-max_len=65536", *sys.argv[1:]], one, custom_mutator=mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
