"""A node that nobody can dial is reached at a port of a member's, which it dials: the relay.

It holds one connection to the relay. Each stream that is announced on it, and each other end of datagrams, becomes one
from this machine to the node's own sockets, which know nothing of a relay.
"""

from __future__ import annotations

import socket
from collections import OrderedDict
from contextlib import suppress
from typing import NoReturn

import trio

from peerd.process.logs import LOGGER
from peerd.relay.envelope import ENCLOSED_MAX, KEY_BYTES, disclose, enclose
from peerd.relay.streams import Toll, splice, stream_to, within
from peerd.transport.connection import Connection, ConnectionLost, Transport
from peerd.transport.errors import PeerError, UserError, cause
from peerd.transport.ids import Address, shown
from peerd.transport.messages import Refuse, RelayCall, RelayGranted, RelayRequest
from peerd.transport.patience import GREETING_DEADLINE_S, RETRY_FIRST_S, RETRY_MAX_S

KEEP_OPEN_S = 10.0  # between two datagrams to the relay: routers forget who was answered after 30 s and more
OTHERS_MAX = 256  # other ends of datagrams, each with a socket
CALLS_MAX = 256  # streams at once; this node lets in fewer


class Guest:
    """The relay's other end."""

    def __init__(self, relay: Address, transport: Transport) -> None:
        """Dials the relay by the `transport`."""
        self._relay = relay
        self._transport = transport
        self._line: tuple[Connection, RelayGranted] | None = None

    async def ask(self) -> Address:
        """Where others reach this node as soon as it `run`s; a relay that is away is waited for. Raises UserError."""
        try:
            _, granted = self._line = await self._ask_again(None)
        except PeerError as error:
            raise UserError(f"relay: {error}") from None
        return granted.host, granted.port

    async def run(self, node: Address) -> None:
        """Pass on what comes to this node, which listens there; ask again when the relay was away."""
        assert self._line is not None, "it was asked"
        node = within(node[0]), node[1]
        connection, granted = self._line
        while True:
            try:
                await self._serve(connection, granted, node)
            except (ConnectionLost, PeerError) as error:
                LOGGER.warning("nobody can dial this node, its relay is gone: %s; trying again", error)
            connection, granted = await self._ask_again(granted)
            LOGGER.info("the relay is back: others reach this node at %s", shown((granted.host, granted.port)))

    async def _ask(self, port: int) -> tuple[Connection, RelayGranted]:
        connection = await self._transport.dial(self._relay)
        try:
            await connection.send(RelayRequest(port))
            with trio.fail_after(GREETING_DEADLINE_S):
                answer = await connection.receive()
            if isinstance(answer, Refuse):
                raise PeerError(f"{connection.remote}: {answer.here}; this node asked for {answer.there}")
            if not isinstance(answer, RelayGranted) or len(answer.key) != KEY_BYTES:
                raise PeerError(f"{connection.remote}: it answers {type(answer).__name__} to who asks for a port")
        except trio.TooSlowError:
            await connection.aclose()
            raise ConnectionLost(f"{connection.remote}: no answer within {GREETING_DEADLINE_S:g} s") from None
        except BaseException:
            await connection.aclose()
            raise
        return connection, answer

    async def _ask_again(self, had: RelayGranted | None) -> tuple[Connection, RelayGranted]:
        """Until it is granted; the port that this node had, for all members know it. At first raises PeerError."""
        delay_s, said = RETRY_FIRST_S, ""
        while True:
            try:
                connection, granted = await self._ask(had.port if had else 0)
            except (ConnectionLost, PeerError) as error:
                if had is None and isinstance(error, PeerError):
                    raise
                text = str(error)
            else:
                if had is None or (granted.host, granted.port) == (had.host, had.port):
                    return connection, granted
                await connection.aclose()
                text = f"it is at {granted.host} now, and was at {had.host}: start this node anew"
            if text != said:
                said = text
                LOGGER.warning("relay: %s; trying again", text)
            await trio.sleep(delay_s)
            delay_s = min(2 * delay_s, RETRY_MAX_S)

    async def _serve(self, connection: Connection, granted: RelayGranted, node: Address) -> NoReturn:
        """Until the connection ends. Raises ConnectionLost or PeerError."""
        ended: ConnectionLost | PeerError
        lent = connection.host, granted.port
        try:
            try:
                relay = _udp_to(lent)
            except OSError as error:
                raise ConnectionLost(f"no way to {shown(lent)}: {cause(error)}") from None
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_Datagrams(relay, granted.key, node).run)
                try:
                    while isinstance(call := await connection.receive(), RelayCall):
                        if len(nursery.child_tasks) < CALLS_MAX:
                            nursery.start_soon(_answer, lent, granted.key, call.number, node)
                    ended = PeerError(f"{connection.remote}: a {type(call).__name__} from a relay")
                except (ConnectionLost, PeerError) as error:
                    ended = error
                nursery.cancel_scope.cancel()
        finally:
            await connection.aclose()
        raise ended


async def _answer(lent: Address, key: bytes, number: bytes, node: Address) -> None:
    """Join the stream that waits at the lent port with one to this node's own."""
    with suppress(OSError, trio.BrokenResourceError):
        there = await stream_to(lent)
        try:
            await there.send_all(key + number)
            here = await stream_to(node, "" if ":" in node[0] else "127.0.0.1")  # one host that is not all of them
        except BaseException:
            there.socket.close()
            raise
        await splice(there, here, Toll())


class _Datagrams:
    """One socket to the relay, and one to this node for each other end."""

    def __init__(self, relay: trio.socket.SocketType, key: bytes, node: Address) -> None:
        self._relay = relay
        self._key = key
        self._node = node
        self._others: OrderedDict[Address, trio.socket.SocketType] = OrderedDict()  # the one used last is last

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_open)
                while True:
                    with suppress(OSError, ValueError):  # it is away, or this came from elsewhere
                        other, said = disclose(self._key, await self._relay.recv(ENCLOSED_MAX))
                        await self._to(other, nursery).send(said)
        finally:
            for sock in (self._relay, *self._others.values()):
                sock.close()

    def _to(self, other: Address, nursery: trio.Nursery) -> trio.socket.SocketType:
        """From where the node hears this other end, and where it answers it."""
        if other not in self._others:
            if len(self._others) >= OTHERS_MAX:
                self._others.popitem(last=False)[1].close()
            self._others[other] = sock = _udp_to(self._node)
            nursery.start_soon(self._answers, other, sock)
        self._others.move_to_end(other)
        return self._others[other]

    async def _answers(self, other: Address, sock: trio.socket.SocketType) -> None:
        while sock.fileno() >= 0:
            with suppress(OSError, trio.ClosedResourceError):
                await self._relay.send(enclose(self._key, other, await sock.recv(ENCLOSED_MAX)))

    async def _keep_open(self) -> None:
        while True:
            with suppress(OSError):
                await self._relay.send(self._key)
            await trio.sleep(KEEP_OPEN_S)


def _udp_to(address: Address) -> trio.socket.SocketType:
    sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_DGRAM)
    sock.setblocking(False)
    sock.connect(address)
    return trio.socket.from_stdlib_socket(sock)
