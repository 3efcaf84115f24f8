"""One port that is lent: what comes there is passed on to a guest, which nobody can dial.

The guest holds a connection to this node, and has the port as long as that lives. Who dials the port is announced on
it; the guest dials the port as well, with the number from the announcement, and the two streams become one. Datagrams
go to and fro in envelopes. In a sealed swarm all of it is sealed between its two ends: here nobody reads it, and it can
only be held back.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

import trio

from peerd.relay.envelope import KEY_BYTES, Bucket, Heard, disclose, enclose
from peerd.relay.lossy_socket import LossySocket
from peerd.relay.streams import Toll, splice, stream_over
from peerd.transport.admission import Admission
from peerd.transport.connection import Connection, ConnectionLost
from peerd.transport.errors import PeerError
from peerd.transport.messages import RelayCall
from peerd.transport.patience import DIAL_TIMEOUT_S, GREETING_DEADLINE_S
from peerd.transport.tcp import EXHAUSTED, PAUSE_S, unmapped

NUMBER_BYTES = 16
OF_GUEST = KEY_BYTES + NUMBER_BYTES  # what the guest's streams begin with
CALL_S = DIAL_TIMEOUT_S + 1.0  # by then a guest that can come has come
ANY_HOST = "127.0.0.1"  # of which Admission lets in as many as come


class _Call:
    """Somebody who waits for the guest."""

    def __init__(self) -> None:
        self.answered = trio.Event()
        self.guest: trio.SocketStream | None = None


class Lease:
    """A port and who has it."""

    def __init__(
        self, port: int, key: bytes, listener: socket.socket, datagrams: socket.socket, datagrams_rate: float,
        streams_max: int,
    ) -> None:  # fmt: skip
        """Both sockets are bound to it, and one listens; `key` is what the guest's datagrams begin with.

        Of datagrams so many bytes a second are passed on, at once so many streams.
        """
        self.port = port
        self.key = key
        self._listener = trio.socket.from_stdlib_socket(listener)
        self._datagrams = LossySocket(datagrams)
        self._few = Bucket(datagrams_rate)
        self._streams_max = streams_max
        self._scope = trio.CancelScope()
        self._admission = Admission(trio.current_time())
        self._served: dict[int, trio.CancelScope] = {}
        self._calls: dict[bytes, _Call] = {}
        self._strangers = 0  # of those served
        self._freed = trio.lowlevel.ParkingLot()

    def end(self) -> None:
        """Pass on nothing more, and give the port back at once."""
        self._scope.cancel()
        self._listener.close()
        self._datagrams.close()

    async def run(self, connection: Connection, toll: Toll) -> None:
        """Until the guest's connection ends. Raises ConnectionLost, or PeerError when it broke a rule."""
        ended: ConnectionLost | PeerError = ConnectionLost(f"{connection.remote}: closed, the guest has another one")
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._accept, nursery, connection, toll)
                nursery.start_soon(self._pass_datagrams, toll)
                try:
                    message = await connection.receive()
                    ended = PeerError(f"{connection.remote}: a {type(message).__name__} from a guest")
                except (ConnectionLost, PeerError) as error:
                    ended = error
                nursery.cancel_scope.cancel()
        raise ended

    async def _accept(self, nursery: trio.Nursery, connection: Connection, toll: Toll) -> None:
        admission = self._admission
        while True:
            await self._make_room()
            if (delay_s := admission.delay_s(trio.current_time())) > 0:  # a turn of the loop is long beside bulk
                await trio.sleep(delay_s)
            try:
                sock, peer = await self._listener.accept()
            except OSError as error:  # it belongs to who was to be accepted (accept(2)), but where there is no room
                await trio.sleep(PAUSE_S if error.errno in EXHAUSTED else 0)
                continue
            host = unmapped(peer)[0]
            host = ANY_HOST if host == connection.host else host  # the guest comes as often as all others
            number = admission.enter(host, trio.current_time()) if self._has_room else None
            if number is None:
                sock.close()
            else:
                self._served[number] = trio.CancelScope()
                nursery.start_soon(self._serve, sock, number, connection, toll)

    async def _make_room(self) -> None:
        """Where somebody waits, who has said nothing for long makes way. The guest may be among those who wait."""
        while self._admission.full:
            await trio.lowlevel.checkpoint()  # the listener is closed once this is cancelled
            await trio.lowlevel.wait_readable(self._listener)
            if (slow := self._admission.makes_way(trio.current_time())) is not None:
                self._served[slow].cancel()
                self._admission.admit(slow)
            elif self._admission.full:
                with trio.move_on_at(self._admission.makes_way_at):
                    await self._freed.park()

    @property
    def _has_room(self) -> bool:
        """Each stranger has the guest's stream beside its own, or a place is kept for it."""
        return len(self._served) + self._strangers - len(self._calls) < 2 * self._streams_max

    async def _serve(self, sock: trio.socket.SocketType, number: int, connection: Connection, toll: Toll) -> None:
        """One stream to the port: the guest's, which is handed to who waits for it, or somebody's, who waits."""
        given = False
        try:
            with self._served[number], suppress(OSError, trio.BrokenResourceError, trio.TooSlowError, ConnectionLost):
                stream = stream_over(sock)
                with trio.fail_after(GREETING_DEADLINE_S):
                    first = await self._first(stream)
                if first.startswith(self.key):
                    if (call := self._calls.pop(first[KEY_BYTES:], None)) is not None:
                        given, call.guest = True, stream
                        call.answered.set()
                elif first and self._strangers < self._streams_max:
                    self._admission.admit(number)  # else those who wait for the guest would keep it out
                    self._freed.unpark_all()
                    await self._join(stream, first, connection, toll)
        finally:
            del self._served[number]
            self._admission.leave(number)
            self._freed.unpark_all()
            if not given:
                sock.close()

    async def _join(self, stranger: trio.SocketStream, first: bytes, connection: Connection, toll: Toll) -> None:
        self._strangers += 1
        try:
            if (guest := await self._guest(connection)) is not None:
                await splice(stranger, guest, toll, first)
        finally:
            self._strangers -= 1

    async def _first(self, stream: trio.SocketStream) -> bytes:
        """What comes first, and tells whether it is the guest; empty where nothing does."""
        first = b""
        while len(first) < (OF_GUEST if first.startswith(self.key[: len(first)]) else 1):
            if not (some := await stream.receive_some(OF_GUEST - len(first))):
                break  # as the key begins, by chance: what it has said is passed on
            first += some
        return first

    async def _guest(self, connection: Connection) -> trio.SocketStream | None:
        """Call it; its stream for who has dialled, or None where it does not come."""
        number, call = os.urandom(NUMBER_BYTES), _Call()
        self._calls[number] = call
        try:
            await connection.send(RelayCall(number))
            with trio.move_on_after(CALL_S):
                await call.answered.wait()
        except BaseException:
            if call.guest is not None:
                call.guest.socket.close()
            raise
        finally:
            self._calls.pop(number, None)
        return call.guest

    async def _pass_datagrams(self, toll: Toll) -> None:
        heard, guest = Heard(), None
        while True:
            try:
                said, source = await self._datagrams.receive()
            except trio.ClosedResourceError:  # this is about to end
                await trio.sleep_forever()
            now = trio.current_time()
            if said.startswith(self.key):
                guest = source
                try:
                    target, said = disclose(self.key, said)
                except ValueError:  # empty: it keeps the way open
                    continue
                if not heard.may_answer(target, now):
                    continue
            else:
                heard.note(source, now)
                if guest is None:
                    continue
                said, target = enclose(self.key, source, said), guest
            if self._few.has(len(said), now):  # strangers may send as much as they like
                toll.note(len(said))
                self._datagrams.send(said, target)
