"""How does a pass over a large model use several cores? Its pieces go to a few threads.

Which pieces there are, and in which order what comes of them is added up, does not depend on how many threads there
are: what is computed is the same bits on any machine. Kernels, numpy and zstd let go of the interpreter meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

THREADS_MAX = 8  # memory feeds no more

Piece = TypeVar("Piece")
Result = TypeVar("Result")

_pool: ContextVar[ThreadPoolExecutor | None] = ContextVar("threads for the pieces of a pass", default=None)


def to_spare() -> int:
    """Half of the cores that this process may run on: the rest is the trainer's, and the event loop's."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(THREADS_MAX, max(1, cores // 2))


@contextmanager
def spread(threads: int, begin: Callable[[], object]) -> Iterator[None]:
    """What runs in this context has its pieces done by so many threads, each of which calls `begin` first."""
    if threads < 2:
        yield
        return
    with ThreadPoolExecutor(threads, "peerd pieces", begin) as pool:
        token = _pool.set(pool)
        try:
            yield
        finally:
            _pool.reset(token)


def each(work: Callable[[Piece], Result], pieces: Iterable[Piece]) -> list[Result]:
    """`work` of each piece, in order; raises one's error once none is under way any more."""
    pool, todo = _pool.get(), list(pieces)
    if pool is None or len(todo) < 2:
        return [work(piece) for piece in todo]
    futures = [pool.submit(work, piece) for piece in todo]
    wait(futures, return_when=FIRST_EXCEPTION)
    for future in futures:
        future.cancel()
    wait(futures)
    failed = [error for future in futures if not future.cancelled() and (error := future.exception()) is not None]
    if failed:
        raise failed[0]
    return [future.result() for future in futures]
