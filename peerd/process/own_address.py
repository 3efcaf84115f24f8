"""Does the machine still have the address to which this node is bound? DHCP may give it another at any time.

The sockets live on, and the kernel says nothing: to whoever is bound there only the others seem to come and go.
"""

from __future__ import annotations

import errno
import socket

import trio

from peerd.process.logs import LOGGER
from peerd.transport.ids import is_ip

LOOK_EVERY_S = 5.0


class OwnAddress:
    """The `host` of a bound node."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.gone = ""  # the host, as long as the machine lacks it

    async def run(self) -> None:
        """Say when it goes, and when it is back. What was never here is of another kind of network: nothing is said."""
        if not is_ip(self._host) or is_lacking(self._host):  # a name would be looked up, while all others wait
            return
        while True:
            await trio.sleep(LOOK_EVERY_S)
            lacks = is_lacking(self._host)
            if lacks and not self.gone:
                LOGGER.warning("%s", cure_of(self._host))
            elif self.gone and not lacks:
                LOGGER.info("this machine has the address %s again: others can reach this node", self._host)
            self.gone = self._host if lacks else ""


def cure_of(gone: str) -> str:
    """What the user is to know, and to do."""
    bound = f"this machine has the address {gone} no more, to which this node is bound"
    return f"{bound}: others cannot reach it; start it again with --bind ADDRESS"


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
