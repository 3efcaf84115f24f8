"""The handshake over the memory carrier, in virtual time: who is let in, who is told why not, who is cut off."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
import trio
import trio.testing

from peerd.effects import PeerError
from peerd.messages import Hello, Ping, Refuse, SpeedRequest, SpeedSample, Welcome
from peerd.transport import hello as handshake
from peerd.transport import speed
from peerd.transport.hello import Refused, answer, first_difference, greet
from peerd.transport.link import LinkLost
from peerd.transport.memory import MemoryNetwork

TENSORS = ("embed f32 16x8", "head f32 8x4")
HELLO = Hello(1, "swarm", "run", "id", "name", 1, "10.0.0.1", 7946, "gossip", "ab12", TENSORS)
WELCOME = Welcome("id2", "name2", 1)


@asynccontextmanager
async def linked():
    """Yield both ends of a link."""
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery)
        give, taken = trio.open_memory_channel(1)

        async def accepted(link):
            await give.send(link)
            await trio.sleep_forever()

        address = await nursery.start(network.transport("b").listen, ("b", 1), accepted)
        near = await network.transport("a").dial(address)
        yield near, await taken.receive()
        nursery.cancel_scope.cancel()


def meet(dialler, acceptor):
    """Run both sides over one link, in virtual time; return what each returned or raised."""
    found = {}

    async def keep(name, side, link):
        try:
            found[name] = await side(link)
        except (PeerError, LinkLost) as error:
            found[name] = error

    async def main():
        async with linked() as (near, far):
            async with trio.open_nursery() as both:
                both.start_soon(keep, "near", dialler, near)
                both.start_soon(keep, "far", acceptor, far)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return found["near"], found["far"]


async def nothing(link):
    try:
        return await link.receive()
    except LinkLost:
        return "closed"


def greeting(hello):
    return lambda link: greet(link, hello)


def answering(check):
    return lambda link: answer(link, check, WELCOME)


def test_the_welcome_and_the_hello_arrive():
    assert meet(greeting(HELLO), answering(lambda hello: None)) == (WELCOME, HELLO)


def test_a_refusal_names_the_field_on_both_sides():
    theirs = replace(HELLO, run="other")
    near, far = meet(greeting(HELLO), answering(lambda hello: first_difference(theirs, hello)))
    for error in (near, far):
        assert isinstance(error, Refused)
        assert (error.field, error.here, error.there) == ("run", "other", "run")
    assert str(near) == "b:1 refused this node: its run is 'other', ours 'run'"
    assert "its run is 'run', ours 'other'" in str(far)


def test_a_silent_dialler_is_cut_off():
    near, far = meet(nothing, answering(lambda hello: None))
    assert near == "closed"
    assert isinstance(far, PeerError)
    assert "no greeting within 5 s" in str(far)


def test_a_silent_acceptor_is_cut_off():
    near, far = meet(greeting(HELLO), lambda link: trio.sleep(20))
    assert isinstance(near, PeerError)
    assert "no greeting" in str(near)
    assert far is None


async def ping(link):
    await link.send(Ping(1, "a", "b", ()))
    return await nothing(link)


def test_another_first_message_is_refused():
    near, far = meet(ping, answering(lambda hello: None))
    assert near == "closed"
    assert isinstance(far, PeerError)
    assert "a Ping instead of a greeting" in str(far)


def test_another_answer_is_refused():
    near, far = meet(greeting(HELLO), lambda link: ping(link))
    assert isinstance(near, PeerError)
    assert "a Ping instead" in str(near)
    assert far == HELLO


def test_a_dialler_that_leaves_is_lost_not_at_fault():
    _, far = meet(lambda link: link.aclose(), answering(lambda hello: None))
    assert isinstance(far, LinkLost)


def test_a_hello_has_limited_tensors():
    names = tuple(f"{index:0>250}" for index in range(200))
    _, far = meet(greeting(replace(HELLO, tensors=names)), answering(lambda hello: None))
    assert isinstance(far, PeerError)
    assert "50000 bytes of tensors" in str(far)
    near, _ = meet(greeting(replace(HELLO, tensors=names[:190])), answering(lambda hello: None))
    assert near == WELCOME


def test_only_a_greeted_link_is_admitted():
    admitted = []

    async def main(check):
        async with linked() as (near, far):
            far.admit = lambda: admitted.append(check)
            async with trio.open_nursery() as both:
                both.start_soon(swallow, greet, near, HELLO)
                both.start_soon(swallow, answer, far, check, WELCOME)

    async def swallow(side, *args):
        with suppress(PeerError):
            await side(*args)

    fine, refusing = (lambda hello: None), (lambda hello: Refuse("run", "a", "b"))
    for check in (fine, refusing):
        trio.run(main, check)
    assert admitted == [fine]
    assert handshake.DEADLINE_S == 5.0


# --------------------------------------------------------------------------------------------- first difference

DIFFERENCES = {
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
def test_the_first_difference(mine, theirs, expected):
    assert first_difference(replace(HELLO, **mine), replace(HELLO, **theirs)) == expected


def test_who_only_measures_is_cut_off_in_the_time_of_a_greeting():
    async def dialler(link):
        link.payload_limit = speed.SAMPLE_BYTES
        await link.send(SpeedRequest())
        assert len((await link.receive()).chunks[0]) == speed.SAMPLE_BYTES
        while trio.current_time() < 10 * handshake.DEADLINE_S:
            await link.send(SpeedRequest())
            await link.receive()
            await trio.sleep(0.1)

    near, far = meet(dialler, lambda link: answer(link, lambda _: None, WELCOME))
    assert isinstance(near, LinkLost)
    assert isinstance(far, PeerError)
    assert "no greeting" in str(far)


def test_one_connection_has_as_many_samples_as_a_measurement_takes():
    async def dialler(link):
        link.payload_limit = speed.SAMPLE_BYTES
        for _ in range(speed.SAMPLES_MOST + 1):
            await link.send(SpeedRequest())
            await link.receive()

    _, far = meet(dialler, lambda link: answer(link, lambda _: None, WELCOME))
    assert "more than" in str(far)


def closing(side):
    async def closed(link):
        try:
            return await side(link)
        finally:
            await link.aclose()

    return closed


def test_a_line_is_measured_by_what_comes_in():
    async def slow(link):
        while True:
            assert isinstance(await link.receive(), SpeedRequest)
            await trio.sleep(0.1)
            await link.send(SpeedSample((bytes(speed.SAMPLE_BYTES),)))

    rate, _ = meet(closing(speed.measure), slow)
    assert rate == pytest.approx(10 * speed.SAMPLE_BYTES, rel=0.15)
    other, _ = meet(speed.measure, lambda link: link.send(SpeedRequest()))
    assert "no sample" in str(other)
    silent, _ = meet(speed.measure, lambda link: trio.sleep(5))
    assert isinstance(silent, PeerError)
    assert "does not answer" in str(silent)
