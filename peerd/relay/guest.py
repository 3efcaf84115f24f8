"""A node that nobody can dial is reached at a port of a member's, which it dials: the relay.

It holds one connection to the relay. Each stream that is announced on it, and each other end of datagrams, becomes one
from this machine to the node's own sockets, which know nothing of a relay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import trio

from peerd.process.logs import LOGGER
from peerd.relay.envelope import KEY_BYTES, disclose, enclose
from peerd.relay.lossy_socket import LossySocket
from peerd.relay.streams import splice, stream_to, within
from peerd.transport.connection import Connection, ConnectionLost, Transport
from peerd.transport.errors import PeerError, UserError, cause
from peerd.transport.ids import Address, is_ip, shown
from peerd.transport.messages import Refuse, RelayCall, RelayGranted, RelayRequest
from peerd.transport.patience import GREETING_DEADLINE_S, RETRY_FIRST_S, RETRY_MAX_S

STAYS_S = 10.0  # a relay that is started again within it gives the port that all members know
LASTS_S = 30.0  # a lease that was worth having
KEEP_OPEN_S = 10.0  # between two datagrams to the relay: routers forget who was answered after 30 s and more
OTHERS_MAX = 256  # other ends of datagrams, each with a socket
CALLS_MAX = 256  # streams at once; this node lets in fewer


@dataclass(frozen=True, slots=True)
class _Line:
    """To a relay that has granted a port."""

    relay: Address
    connection: Connection
    granted: RelayGranted

    @property
    def outer(self) -> Address:
        """Where others reach this node."""
        return self.granted.host, self.granted.port


class Guest:
    """The other end of a relay: of one after the other, where several may be asked."""

    def __init__(self, relays: Sequence[Address], transport: Transport) -> None:
        """Asks the first of them before the others, by the `transport`."""
        self._relays = relays
        self._transport = transport
        self._line: _Line | None = None
        self.lost_at: float | None = None  # since when nobody reaches this node

    async def ask(self) -> Address:
        """Where others reach this node as soon as it `run`s; a relay that is away is waited for. Raises UserError."""
        try:
            self._line = await self._find(None)
        except PeerError as error:
            raise UserError(f"relay: {error}") from None
        return self._line.outer

    async def run(self, node: Address, moved: Callable[[Address], None]) -> None:
        """Pass on what comes to this node, which listens there; `moved` is told where others reach it from now on."""
        assert self._line is not None, "it was asked"
        line, node = self._line, (within(node[0]), node[1])
        delay_s = 0.0
        while True:
            began, self.lost_at = trio.current_time(), None
            try:
                await self._serve(line, node)
            except (ConnectionLost, PeerError) as error:
                self.lost_at = trio.current_time()
                if self.lost_at - began >= LASTS_S:
                    delay_s = 0.0
                if not delay_s:
                    LOGGER.warning("nobody can dial this node, its relay is gone: %s; trying again", error)
            await trio.sleep(delay_s)  # it may grant a port, and take it back, again and again
            outer, line = line.outer, await self._find(line)
            if not delay_s or line.outer != outer:
                LOGGER.info("others reach this node at %s again, through %s", shown(line.outer), shown(line.relay))
            delay_s = min(2 * delay_s or RETRY_FIRST_S, LASTS_S)
            if line.outer != outer:
                moved(line.outer)

    async def _find(self, had: _Line | None) -> _Line:
        """One that grants a port. All members know the one that this node `had`: for a while no other is asked for.

        Raises PeerError where nothing was had, and all relays answer that they grant none.
        """
        began, delay_s, said = trio.current_time(), RETRY_FIRST_S, ""
        while True:
            asked = [(had.relay, had.granted.port)] if had is not None else []
            if had is None or trio.current_time() - began >= STAYS_S:
                asked += [(relay, 0) for relay in self._relays]
            errors: list[ConnectionLost | PeerError] = []
            for relay, port in asked:
                try:
                    return await self._ask(relay, port)
                except (ConnectionLost, PeerError) as error:
                    errors.append(error)
            if had is None and all(isinstance(error, PeerError) for error in errors):
                raise errors[0]
            if (text := "; ".join(map(str, errors))) != said:
                said = text
                LOGGER.warning("relay: %s; trying again", text)
            await trio.sleep(delay_s)
            delay_s = min(2 * delay_s, RETRY_MAX_S)

    async def _ask(self, relay: Address, port: int) -> _Line:
        connection = await self._transport.dial(relay)
        try:
            await connection.send(RelayRequest(port))
            with trio.fail_after(GREETING_DEADLINE_S):
                answer = await connection.receive()
            if isinstance(answer, Refuse):
                raise PeerError(f"{connection.remote}: {answer.here}; this node asked for {answer.there}")
            if not isinstance(answer, RelayGranted):
                raise PeerError(f"{connection.remote}: it answers {type(answer).__name__} to who asks for a port")
            if not is_ip(answer.host) or not answer.port or len(answer.key) != KEY_BYTES:
                raise PeerError(f"{connection.remote}: nobody is reached at {answer.host[:80]!r}, port {answer.port}")
        except trio.TooSlowError:
            await connection.aclose()
            raise ConnectionLost(f"{connection.remote}: no answer within {GREETING_DEADLINE_S:g} s") from None
        except BaseException:
            await connection.aclose()
            raise
        return _Line(relay, connection, answer)

    async def _serve(self, line: _Line, node: Address) -> NoReturn:
        """Until the connection ends. Raises ConnectionLost or PeerError."""
        ended: ConnectionLost | PeerError
        connection, key, lent = line.connection, line.granted.key, (line.connection.host, line.granted.port)
        try:
            try:
                relay = LossySocket.to(lent)
            except OSError as error:
                raise ConnectionLost(f"no way to {shown(lent)}: {cause(error)}") from None
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_Passing(relay, key, node).run)
                try:
                    while isinstance(call := await connection.receive(), RelayCall):
                        if len(nursery.child_tasks) < CALLS_MAX:
                            nursery.start_soon(_answer, lent, key, call.number, node)
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
            any_number = "::1" if ":" in node[0] else "127.0.0.1"  # of connections is let in from there
            here = await stream_to(node, any_number)
        except BaseException:
            there.socket.close()
            raise
        await splice(there, here)


class _Passing:
    """One socket to the relay, and one to this node for each other end of datagrams."""

    def __init__(self, relay: LossySocket, key: bytes, node: Address) -> None:
        self._relay = relay
        self._key = key
        self._node = node
        self._others: OrderedDict[Address, LossySocket] = OrderedDict()  # the one used last is last

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_open)
                while True:
                    enclosed, _ = await self._relay.receive()
                    with suppress(OSError, ValueError):  # no descriptor is left; or this came from elsewhere
                        other, said = disclose(self._key, enclosed)
                        self._to(other, nursery).send(said)
        finally:
            for one in (self._relay, *self._others.values()):
                one.close()

    def _to(self, other: Address, nursery: trio.Nursery) -> LossySocket:
        """From where the node hears this other end, and where it answers it."""
        if other not in self._others:
            if len(self._others) >= OTHERS_MAX:
                self._others.popitem(last=False)[1].close()
            self._others[other] = here = LossySocket.to(self._node)
            nursery.start_soon(self._answers, other, here)
        self._others.move_to_end(other)
        return self._others[other]

    async def _answers(self, other: Address, here: LossySocket) -> None:
        with suppress(trio.ClosedResourceError):
            while True:
                said, _ = await here.receive()
                self._relay.send(enclose(self._key, other, said))

    async def _keep_open(self) -> None:
        while True:
            self._relay.send(self._key)
            await trio.sleep(KEEP_OPEN_S)
