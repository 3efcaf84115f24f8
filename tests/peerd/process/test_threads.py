"""Work in a thread, where the system may let none be started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio

from peerd.process.look_up import LookUps
from peerd.process.threads import AGAIN_S, in_thread
from peerd.transport.connection import ConnectionLost
from peerd.transport.tcp import TcpTransport


@pytest.mark.trio(clock="autojump")
async def test_where_no_thread_can_be_started_it_waits_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_sync, full = trio.to_thread.run_sync, [True] * 3

    async def limited(work: Callable[[], int], **others: Any) -> int:
        if full:
            full.pop()
            raise RuntimeError("can't start new thread")
        return await run_sync(work, **others)

    monkeypatch.setattr(trio.to_thread, "run_sync", limited)
    began = trio.current_time()
    assert await in_thread(lambda: 7) == 7
    assert trio.current_time() - began >= 3 * AGAIN_S
    assert [record.message for record in caplog.records] == [
        "can't start new thread: the system's limit on processes is reached; trying again"
    ]


@pytest.mark.trio(clock="autojump")
async def test_a_name_that_no_thread_can_look_up_is_one_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none(*_: Any, **others: Any) -> None:
        raise RuntimeError("can't start new thread")

    trio.socket.set_custom_hostname_resolver(LookUps())
    monkeypatch.setattr(trio.to_thread, "run_sync", none)
    async with trio.open_nursery() as nursery:
        with pytest.raises(ConnectionLost):
            await TcpTransport(nursery).dial(("nosuch.example", 1))


async def test_what_the_work_itself_raises_is_raised_once() -> None:
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        raise RuntimeError("can't start new thread")

    with pytest.raises(RuntimeError):
        await in_thread(work)
    assert calls == [1]
