"""The handshake over the memory carrier, in virtual time: who is let in, who is told why not, who is cut off."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing
from connection_ends import met, receive_a

from peerd.transport import patience, speed
from peerd.transport.connection import Connection, ConnectionLost
from peerd.transport.errors import PeerError
from peerd.transport.hello import Refused, answer, first_difference, greet, measured
from peerd.transport.memory import MemoryNetwork
from peerd.transport.messages import NO_TLS, Hello, Message, Ping, Refuse, SpeedRequest, SpeedSample, Welcome

pytestmark = pytest.mark.trio(clock="autojump")

TENSORS = ("embed f32 16x8", "head f32 8x4")
HELLO = Hello(1, "swarm", "run", "id", "name", 1, "10.0.0.1", 7946, "gossip", "ab12", TENSORS)
WELCOME = Welcome("id2", "name2", 1)
Side = Callable[[Connection], Awaitable[object]]
Check = Callable[[Hello], Refuse | None]


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Connection, Connection]]:
    """Yield both ends of a connection."""
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery)
        async with met(network.transport("a"), network.transport("b"), ("b", 1)) as ends:
            yield ends
        nursery.cancel_scope.cancel()


async def note_incarnation(dialler: Side, acceptor: Side) -> tuple[object, object]:
    """Run both sides over one connection, return what each returned or raised."""
    found: dict[str, object] = {}

    async def keep(name: str, side: Side, connection: Connection) -> None:
        try:
            found[name] = await side(connection)
        except (PeerError, ConnectionLost) as error:
            found[name] = error

    async with linked() as (near, far):
        async with trio.open_nursery() as both:
            both.start_soon(keep, "near", dialler, near)
            both.start_soon(keep, "far", acceptor, far)
    return found["near"], found["far"]


async def nothing(connection: Connection) -> Message | str:
    try:
        return await connection.receive()
    except ConnectionLost:
        return "closed"


def greeting(hello: Hello) -> Side:
    return lambda connection: greet(connection, hello)


def answering(check: Check) -> Side:
    return lambda connection: answer(connection, check, WELCOME)


async def test_the_welcome_and_the_hello_arrive() -> None:
    assert await note_incarnation(greeting(HELLO), answering(lambda hello: None)) == (WELCOME, HELLO)


async def test_a_refusal_names_the_field_on_both_sides() -> None:
    theirs = replace(HELLO, run="other")
    near, far = await note_incarnation(greeting(HELLO), answering(lambda hello: first_difference(theirs, hello)))
    for error in (near, far):
        assert isinstance(error, Refused)
        assert (error.field, error.here, error.there) == ("run", "other", "run")
    assert isinstance(near, Refused)
    assert str(near) == "b:1 refused this node: its run is 'other', ours 'run'"
    assert re.fullmatch(r"refused name at \S*: its run is 'run', ours 'other'", str(far))


async def test_a_silent_dialler_is_cut_off() -> None:
    near, far = await note_incarnation(nothing, answering(lambda hello: None))
    assert near == "closed"
    assert isinstance(far, PeerError)
    assert "no greeting within 5 s" in str(far)


async def test_a_silent_acceptor_is_cut_off() -> None:
    near, far = await note_incarnation(greeting(HELLO), lambda connection: trio.sleep(20))
    assert isinstance(near, PeerError)
    assert "no greeting" in str(near)
    assert far is None


async def ping(connection: Connection) -> Message | str:
    await connection.send(Ping(1, "a", "b", ()))
    return await nothing(connection)


async def test_another_first_message_is_refused() -> None:
    near, far = await note_incarnation(ping, answering(lambda hello: None))
    assert near == "closed"
    assert isinstance(far, PeerError)
    assert "a Ping instead of a greeting" in str(far)


async def test_another_answer_is_refused() -> None:
    near, far = await note_incarnation(greeting(HELLO), lambda connection: ping(connection))
    assert isinstance(near, PeerError)
    assert "a Ping instead" in str(near)
    assert far == HELLO


async def test_a_dialler_that_leaves_is_lost_not_at_fault() -> None:
    _, far = await note_incarnation(lambda connection: connection.aclose(), answering(lambda hello: None))
    assert isinstance(far, ConnectionLost)


async def test_a_hello_has_limited_tensors() -> None:
    names = tuple(f"{index:0>250}" for index in range(200))
    _, far = await note_incarnation(greeting(replace(HELLO, tensors=names)), answering(lambda hello: None))
    assert isinstance(far, PeerError)
    assert "50000 bytes of tensors" in str(far)
    near, _ = await note_incarnation(greeting(replace(HELLO, tensors=names[:190])), answering(lambda hello: None))
    assert near == WELCOME


async def test_only_a_greeted_link_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    admitted: list[Check] = []

    async def main(check: Check) -> None:
        async with linked() as (near, far):
            monkeypatch.setattr(far, "admit", lambda: admitted.append(check))
            async with trio.open_nursery() as both:
                both.start_soon(swallow, greet, near, HELLO)
                both.start_soon(swallow, answer, far, check, WELCOME)

    async def swallow(side: Callable[..., Awaitable[object]], *args: object) -> None:
        with suppress(PeerError):
            await side(*args)

    def fine(_: Hello) -> None:
        return None

    def refusing(_: Hello) -> Refuse:
        return Refuse("run", "a", "b")

    for check in (fine, refusing):
        await main(check)
    assert admitted == [fine]
    assert patience.GREETING_DEADLINE_S == 5.0


# --------------------------------------------------------------------------------------------- first difference

DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any], Refuse | None]] = {
    "nothing": ({}, {}, None),
    "names do not matter": ({}, {"node": "x", "name": "x", "epoch": 9, "host": "x", "port": 1}, None),
    "protocol first": ({}, {"protocol": 2, "swarm": "x"}, Refuse("protocol", "1", "2")),
    "swarm": ({}, {"swarm": "x"}, Refuse("swarm", "swarm", "x")),
    "run": ({}, {"run": "x"}, Refuse("run", "run", "x")),
    "mode": ({}, {"mode": "diloco"}, Refuse("mode", "gossip", "diloco")),
    "mode not known yet": ({}, {"mode": ""}, None),
    "model not known yet": ({"model": "", "tensors": ()}, {}, None),
    "a tensor": ({}, {"model": "x", "tensors": ("embed f32 16x8", "h")}, Refuse("model", "head f32 8x4", "h")),
    "a tensor less": ({}, {"model": "x", "tensors": TENSORS[:1]}, Refuse("model", "head f32 8x4", "no such tensor")),
    "a tensor not shown": ({}, {"model": "x"}, Refuse("model", "ab12", "x")),
    "no tensors shown": ({}, {"model": "x", "tensors": ()}, Refuse("model", "ab12", "x")),
}


@pytest.mark.parametrize(("mine", "theirs", "expected"), DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_the_first_difference(mine: dict[str, Any], theirs: dict[str, Any], expected: Refuse | None) -> None:
    assert first_difference(replace(HELLO, **mine), replace(HELLO, **theirs)) == expected


async def test_who_only_measures_is_cut_off_in_the_time_of_a_greeting() -> None:
    async def dialler(connection: Connection) -> None:
        connection.payload_limit = speed.SAMPLE_BYTES
        await connection.send(SpeedRequest())
        assert len((await receive_a(SpeedSample, connection)).chunks[0]) == speed.SAMPLE_BYTES
        while trio.current_time() < 10 * patience.GREETING_DEADLINE_S:
            await connection.send(SpeedRequest())
            await connection.receive()
            await trio.sleep(0.1)

    near, far = await note_incarnation(dialler, lambda connection: answer(connection, lambda _: None, WELCOME))
    assert isinstance(near, ConnectionLost)
    assert isinstance(far, PeerError)
    assert "no greeting" in str(far)


async def test_one_connection_has_as_many_samples_as_a_measurement_takes() -> None:
    async def dialler(connection: Connection) -> None:
        connection.payload_limit = speed.SAMPLE_BYTES
        for _ in range(speed.SAMPLES_MAX + 1):
            await connection.send(SpeedRequest())
            await connection.receive()

    _, far = await note_incarnation(dialler, lambda connection: answer(connection, lambda _: None, WELCOME))
    assert "more than" in str(far)


def closing(side: Side) -> Side:
    async def closed(connection: Connection) -> object:
        try:
            return await side(connection)
        finally:
            await connection.aclose()

    return closed


async def test_a_line_is_measured_by_what_comes_in() -> None:
    async def slow(connection: Connection) -> None:
        while True:
            assert isinstance(await connection.receive(), SpeedRequest)
            await trio.sleep(0.1)
            await connection.send(SpeedSample((bytes(speed.SAMPLE_BYTES),)))

    rate, _ = await note_incarnation(closing(speed.measure), slow)
    assert rate == pytest.approx(10 * speed.SAMPLE_BYTES, rel=0.15)
    other, _ = await note_incarnation(speed.measure, lambda connection: connection.send(SpeedRequest()))
    assert "no sample" in str(other)
    refused, _ = await note_incarnation(measured, lambda connection: connection.send(NO_TLS))
    assert isinstance(refused, Refused)
    assert (refused.field, refused.here, refused.there) == ("encryption", "off", "on")
    silent, _ = await note_incarnation(speed.measure, lambda connection: trio.sleep(5))
    assert isinstance(silent, PeerError)
    assert "does not answer" in str(silent)
