"""How does a pass over a large model use several cores? Its pieces go to a few threads.

Which pieces there are, and in which order what comes of them is added up, does not depend on how many threads there
are: what is computed is the same bits on any machine. Kernels, numpy and zstd let go of the interpreter meanwhile.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from typing import NamedTuple, TypeVar

THREADS_MAX = 8  # memory feeds no more

Piece = TypeVar("Piece")
Result = TypeVar("Result")


class _Helpers(NamedTuple):
    pool: ThreadPoolExecutor
    threads: int


_helpers: ContextVar[_Helpers | None] = ContextVar("who helps with the pieces of a pass", default=None)


def to_spare() -> int:
    """Half of the cores that this process may run on: the rest is the trainer's, and the event loop's."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(THREADS_MAX, max(1, cores // 2))


@contextmanager
def spread(threads: int, begin: Callable[[], object]) -> Iterator[None]:
    """What runs in this context has its pieces done by so many threads: its own, and others, which call `begin` first.

    By its own alone where those cannot begin.
    """
    if threads < 2:
        yield
        return
    with ThreadPoolExecutor(threads - 1, "peerd pieces", begin) as pool:
        token = _helpers.set(_Helpers(pool, threads - 1) if _all_begin(pool, threads - 1) else None)
        try:
            yield
        finally:
            _helpers.reset(token)


def _all_begin(pool: ThreadPoolExecutor, count: int) -> bool:
    """Have it make all its threads; later it would keep for ever what it could make none for."""
    gate: Future[None] = Future()
    try:
        waiting = [pool.submit(gate.result) for _ in range(count)]  # none is idle: each needs another
    except RuntimeError:  # or BrokenThreadPool, which is one
        return False
    finally:
        gate.set_result(None)
    return all(one.exception() is None for one in waiting)


def each(work: Callable[[Piece], Result], pieces: Iterable[Piece]) -> list[Result]:
    """`work` of each piece, in order; raises one's error, of several mostly the first's, once none is under way."""
    helpers, todo = _helpers.get(), list(pieces)
    if helpers is None or len(todo) < 2:
        return [work(piece) for piece in todo]
    left, found, errors = deque(enumerate(todo)), dict[int, Result](), dict[int, BaseException]()

    def some() -> None:
        while left:
            try:
                index, piece = left.popleft()
            except IndexError:  # somebody else has it
                return
            try:
                found[index] = work(piece)
            except BaseException as error:  # raised below
                errors[index] = error
                left.clear()

    futures: list[Future[None]] = []
    context = copy_context()  # numpy's errstate is in it
    context.run(_helpers.set, None)
    with suppress(RuntimeError):  # the context has ended: who came out of it goes on alone
        for _ in range(min(helpers.threads, len(todo) - 1)):
            futures.append(helpers.pool.submit(context.copy().run, some))  # noqa: PERF401  # each as it is made
    some()
    wait([future for future in futures if not future.cancel()])
    if errors:
        error = errors[min(errors)]
        errors.clear()
        try:
            raise error
        finally:
            del error  # its traceback has this frame, which must not keep it: they would hold a whole message
    return [found[index] for index in range(len(todo))]
