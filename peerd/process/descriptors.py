"""Has this process a file descriptor left? Without one it accepts nobody, and the kernel tells no one."""

from __future__ import annotations

import errno
import os
import resource

import trio

from peerd.process.logs import LOGGER

LOOK_EVERY_S = 5.0


async def watch_descriptors() -> None:
    """Say once when none is left, and when one is again."""
    is_told = False
    while True:
        await trio.sleep(LOOK_EVERY_S)
        why = none_left()
        if why and not is_told:
            LOGGER.warning("%s; until one is free nobody new can connect to this node, nor its script attach", why)
        elif is_told and not why:
            LOGGER.info("file descriptors are free again")
        is_told = bool(why)


def none_left() -> str:
    """Why no file can be opened, and what to do; empty where one can."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno == errno.EMFILE:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return f"all {limit} file descriptors of this process are in use: start it with more (ulimit -n)"
        if error.errno == errno.ENFILE:
            return "all file descriptors of this machine are in use (fs.file-max)"
    return ""
