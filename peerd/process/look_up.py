"""Host names are looked up in threads of their own: a name server that is silent holds up nothing else.

Only names that this node's user gave are looked up. trio's own threads, which all other work shares, are 40, and a
look-up that is given up on keeps its thread until the system gives up, too.
"""

from __future__ import annotations

import socket
from functools import partial
from typing import Any

import trio
from trio.abc import HostnameResolver

from peerd.process.threads import in_thread

LOOK_UPS_MAX = 4  # at once


class LookUps(HostnameResolver):
    """What trio asks for names; install it by `trio.socket.set_custom_hostname_resolver`."""

    def __init__(self) -> None:
        self._threads = trio.CapacityLimiter(LOOK_UPS_MAX)

    async def getaddrinfo(
        self, host: Any, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> Any:
        """See `socket.getaddrinfo`."""
        found = partial(socket.getaddrinfo, host, port, family, type, proto, flags)
        return await in_thread(found, abandon_on_cancel=True, limiter=self._threads)

    async def getnameinfo(self, sockaddr: Any, flags: int) -> Any:
        """See `socket.getnameinfo`; nobody asks for it."""
        raise NotImplementedError
