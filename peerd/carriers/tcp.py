"""Connections over TCP, datagrams over UDP; between nodes of one host large chunks go through shared memory."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import trio

from peerd.carriers.carrier import CarrierSettings, Finding
from peerd.process.logs import LOGGER
from peerd.transport.bulk import Fabric
from peerd.transport.connection import Datagrams, Transport
from peerd.transport.errors import UserError, cause
from peerd.transport.ids import Address, shown
from peerd.transport.same_host import SameHost
from peerd.transport.secure.credentials import Credentials
from peerd.transport.secure.datagrams import DatagramSeal
from peerd.transport.tcp import TcpTransport, bound_socket
from peerd.transport.udp import bind_udp, tag_of

FREE_PORT_TRIES = 20  # of ports that are free for TCP, one that is free for UDP


class Tcp:
    """See `Carrier`."""

    def __init__(self, settings: CarrierSettings) -> None:
        self._settings = settings
        self._fabrics: list[Fabric] = []

    async def resolve(self, address: Address) -> Address:
        """See `Carrier.resolve`: the address behind a name."""
        try:
            found = await trio.socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        except OSError as error:
            raise UserError(f"cannot resolve {shown(address)}: {error.strerror or error}") from None
        except ValueError:  # a part of it is empty, or too long
            raise UserError(f"cannot resolve {shown((address[0][:80], address[1]))}: it is no name of a host") from None
        return str(found[0][4][0]), address[1]

    async def bind(self, address: Address, seal: DatagramSeal | None = None) -> Datagrams:
        """See `Carrier.bind`."""
        host, port = address
        tag = tag_of(self._settings.swarm, self._settings.run)
        if port != 0:
            return await bind_udp(address, tag, seal, self._settings.budget)
        for _ in range(FREE_PORT_TRIES):
            with await bound_socket((host, 0), socket.SOCK_STREAM) as probe:
                free = int(probe.getsockname()[1])
            try:
                return await bind_udp((host, free), tag, seal, self._settings.budget)
            except UserError:
                continue
        raise UserError(f"no free port on {host} for both TCP and UDP")

    def reached(self, host: str) -> str:
        """See `Carrier.reached`: when bound to all, the address that the machine's default route starts from."""
        if host not in ("0.0.0.0", "::"):
            return host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("2001:db8::1" if ":" in host else "192.0.2.1", 9))  # no packet is sent by this
                return str(probe.getsockname()[0])
            except OSError:
                cure = "bind the address that others reach"
                raise UserError(f"bind {host}: this machine has no route out; {cure}") from None

    async def start(self, nursery: trio.Nursery) -> None:
        """See `Carrier.start`."""
        self._fabrics = self.fabrics()
        for fabric in self._fabrics:
            await nursery.start(fabric.run)

    def transport(self, nursery: trio.Nursery, credentials: Credentials | None = None) -> Transport:
        """See `Carrier.transport`."""
        return TcpTransport(nursery, *self._fabrics, credentials=credentials, budget=self._settings.budget)

    def fabrics(self) -> list[Fabric]:
        """What connections are upgraded to, the best first."""
        return same_host()

    @classmethod
    def examine(cls, settings: CarrierSettings, *, chosen: bool) -> Iterable[Finding]:
        """See `Carrier.examine`: every machine has it."""
        return ()


def same_host() -> list[Fabric]:
    """Shared memory, where the kernel allows it."""
    try:
        return [SameHost()]
    except OSError as error:
        LOGGER.info("models between nodes of this machine travel over tcp: %s", cause(error))
        return []
