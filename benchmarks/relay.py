"""What does a relay cost? The same bytes to an echo and back, direct and through a relay and its guest, in turn.

All ends are in this process, on one core: where each has its own, a relay is faster. Prints the median of the rounds.

    python benchmarks/relay.py [--rounds 9] [--mb 64] [--format json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import suppress

import trio

from peerd.relay.guest import Guest
from peerd.relay.lender import Lender
from peerd.transport.connection import Connection, ConnectionLost
from peerd.transport.hello import answer
from peerd.transport.ids import Address
from peerd.transport.messages import RelayRequest, Welcome
from peerd.transport.tcp import TcpTransport

HOST, LENT = "127.0.0.1", range(47950, 47958)
SMALL = 100  # bytes, to a new connection and back


async def _echo(stream: trio.SocketStream) -> None:
    async with stream:
        with suppress(trio.BrokenResourceError):
            async for some in stream:
                await stream.send_all(some)
            await stream.send_eof()


async def _there_and_back(where: Address, said: bytes) -> float:
    """Seconds, the connection's beginning and end included."""
    began, heard = time.perf_counter(), 0
    async with await trio.open_tcp_stream(*where) as stream, trio.open_nursery() as nursery:

        async def say() -> None:
            await stream.send_all(said)
            await stream.send_eof()

        nursery.start_soon(say)
        async for some in stream:
            heard += len(some)
    assert heard == len(said)
    return time.perf_counter() - began


async def measured(rounds: int, megabytes: int) -> dict[str, float]:
    async with trio.open_nursery() as nursery:
        transport, lender = TcpTransport(nursery), Lender(LENT, HOST, HOST)

        async def accepted(connection: Connection) -> None:
            with suppress(ConnectionLost):
                await answer(connection, lambda _: None, Welcome("r", "r", 1), {RelayRequest: lender.lend})

        relay: Address = await nursery.start(transport.listen, (HOST, 0), accepted)
        (listener,) = await trio.open_tcp_listeners(0, host=HOST)
        nursery.start_soon(trio.serve_listeners, _echo, [listener])
        node: Address = listener.socket.getsockname()
        guest = Guest([relay], transport)
        lent = await guest.ask()
        nursery.start_soon(guest.run, node, lambda _: None)
        seconds: dict[str, list[float]] = {"direct": [], "relayed": [], "direct_small": [], "relayed_small": []}
        for _ in range(rounds):
            for name, where in (("direct", node), ("relayed", lent)):
                seconds[name].append(await _there_and_back(where, bytes(megabytes * 1_000_000)))
                seconds[f"{name}_small"].append(await _there_and_back(where, bytes(SMALL)))
        nursery.cancel_scope.cancel()
    median = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "direct_mb_s": 2 * megabytes / median["direct"],
        "relayed_mb_s": 2 * megabytes / median["relayed"],
        "ratio": median["relayed"] / median["direct"],
        "direct_small_ms": 1e3 * median["direct_small"],
        "relayed_small_ms": 1e3 * median["relayed_small"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mb", type=int, default=64, help="of one message, each way")
    parser.add_argument("--format", choices=["text", "json"], default="text")
    told = parser.parse_args()
    found = trio.run(measured, told.rounds, told.mb)
    if told.format == "json":
        print(json.dumps(found))
        return
    print(
        f"{told.mb} MB there and back: direct {found['direct_mb_s']:.0f} MB/s, relayed {found['relayed_mb_s']:.0f}, "
        f"{found['ratio']:.1f} times as long; {SMALL} bytes with a new connection: direct "
        f"{found['direct_small_ms']:.2f} ms, relayed {found['relayed_small_ms']:.2f}"
    )


if __name__ == "__main__":
    main()
