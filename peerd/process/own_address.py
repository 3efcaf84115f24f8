"""Can others reach this node at its own address? DHCP may take that from the machine, and a wrong one may be told.

The sockets live on, and the kernel says nothing: to whoever is bound there only the others seem to come and go. An
address of a router or a container may lead nowhere: this node reaches the others, who alone see that they do not.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

import trio

from peerd.process.logs import LOGGER
from peerd.transport.ids import Address, is_ip, shown

LOOK_EVERY_S = 5.0
ALL_OF_IT = ("0.0.0.0", "::")  # the addresses of this machine, each of them: it lacks none


class OwnAddress:
    """Of a node that is bound to `host`."""

    def __init__(self, host: str, told: Callable[[], Address], is_asked_by_nobody: Callable[[], bool]) -> None:
        """`told` is the address that the others know; `is_asked_by_nobody`: nothing comes from them to there."""
        self._host = host
        self._told = told
        self._is_asked_by_nobody = is_asked_by_nobody
        self.gone = ""  # the host, as long as the machine lacks it
        self.astray = ""  # what the others know, as long as it does not lead here

    async def run(self) -> None:
        """Say when it does not serve, and when it does again; what was never here is of another kind of network."""
        is_known = is_ip(self._host) or self._host in ALL_OF_IT  # a name would be looked up, while all others wait
        if not is_known or is_lacking(self._host):
            return
        while True:
            await trio.sleep(LOOK_EVERY_S)
            lacks = is_lacking(self._host)
            if lacks and not self.gone:
                LOGGER.warning("%s", cure_of(self._host))
            elif self.gone and not lacks:
                LOGGER.info("this machine has the address %s again: others can reach this node", self._host)
            self.gone = self._host if lacks else ""
            where = shown(self._told()) if self._is_asked_by_nobody() else ""
            if where and not self.astray:
                LOGGER.warning("%s", cure_of_astray(where))
            elif self.astray and not where:
                LOGGER.info("other members reach this node again")
            self.astray = where


def cure_of(gone: str) -> str:
    """What the user is to know, and to do."""
    bound = f"this machine has the address {gone} no more, to which this node is bound"
    return f"{bound}: others cannot reach it; start it again with --bind ADDRESS"


def cure_of_astray(told: str) -> str:
    """The same, where what the others are told does not lead to this node."""
    return (
        f"no member reaches this node at {told}, as they are told: open that port to TCP and UDP, or start this node "
        f"again with the right --advertise, or with --relay; peerd doctor --join {told} on another machine tries it"
    )


def is_elsewhere(host: str) -> bool:
    """Whether it is the address of another machine; a name says nothing."""
    return is_ip(host) and is_lacking(host)


def is_lacking(host: str) -> bool:
    """Whether nothing can be bound to it. Where that cannot be found out the machine has it: no descriptor is left."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(where)
    except (OSError, UnicodeError) as error:
        return isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL
    return False
