"""A node that has no file descriptor left says so, once, and says when one is free again."""

from __future__ import annotations

import logging
import os
import resource
from contextlib import suppress

import pytest
import trio

from peerd.process.descriptors import LOOK_EVERY_S, none_left, watch_descriptors


@pytest.mark.trio(clock="autojump")
async def test_it_is_told_once_that_none_is_left_and_that_one_is_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_descriptors)
        await trio.sleep(2.5 * LOOK_EVERY_S)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
            with suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            await trio.sleep(3 * LOOK_EVERY_S)
        finally:
            for descriptor in taken:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await trio.sleep(3 * LOOK_EVERY_S)
        nursery.cancel_scope.cancel()
    assert [(record.levelname, record.message) for record in caplog.records] == [
        (
            "WARNING",
            "all 200 file descriptors of this process are in use: start it with more (ulimit -n); until one is free "
            "nobody new can connect to this node, nor its script attach",
        ),
        ("INFO", "file descriptors are free again"),
    ]
    assert not none_left()
