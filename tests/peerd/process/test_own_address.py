"""A node is told when its machine loses the address to which it is bound, and when that is back."""

from __future__ import annotations

import logging

import pytest
import trio

from peerd.process import own_address
from peerd.process.own_address import LOOK_EVERY_S, OwnAddress

OF_NO_MACHINE = "192.0.2.1"  # kept for texts


@pytest.mark.trio(clock="autojump")
async def test_it_is_told_once_that_the_address_is_gone_and_that_it_is_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    lacking: set[str] = set()
    monkeypatch.setattr(own_address, "is_lacking", lambda host: host in lacking)
    address = OwnAddress("10.0.1.2", lambda: ("10.0.1.2", 7), lambda: False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(address.run)
        for gone in ("", "10.0.1.2", "", "10.0.1.2"):
            lacking ^= {"10.0.1.2"} if gone or lacking else set()
            await trio.sleep(3.5 * LOOK_EVERY_S)
            assert address.gone == gone
        nursery.cancel_scope.cancel()
    warning = (
        "this machine has the address 10.0.1.2 no more, to which this node is bound: others cannot reach it; "
        "start it again with --bind ADDRESS"
    )
    back = "this machine has the address 10.0.1.2 again: others can reach this node"
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", warning), ("INFO", back), ("WARNING", warning),
    ]  # fmt: skip


@pytest.mark.trio(clock="autojump")
@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0", "::"])  # with --advertise alone it is bound to all
async def test_it_is_told_once_that_nobody_comes_to_where_the_others_are_told(
    bound: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    by_nobody = False
    address = OwnAddress(bound, lambda: ("192.0.2.9", 7000), lambda: by_nobody)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(address.run)
        for by_nobody in (False, True, False):
            await trio.sleep(3.5 * LOOK_EVERY_S)
            assert address.astray == ("192.0.2.9:7000" if by_nobody else "")
        nursery.cancel_scope.cancel()
    levels, lines = zip(*((record.levelname, record.message) for record in caplog.records), strict=True)
    assert levels == ("WARNING", "INFO")
    assert lines[0].startswith("no member reaches this node at 192.0.2.9:7000, as they are told: open that port to TCP")
    assert lines[1] == "other members reach this node again"


@pytest.mark.parametrize(
    ("host", "lacks"),
    [("127.0.0.1", False), ("0.0.0.0", False), (OF_NO_MACHINE, True)],
)
def test_what_can_be_bound_is_here(host: str, lacks: bool) -> None:
    assert own_address.is_lacking(host) is lacks


@pytest.mark.trio(clock="autojump")
@pytest.mark.parametrize("host", [OF_NO_MACHINE, "n1"])
async def test_an_address_of_another_kind_of_network_is_not_watched(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    address = OwnAddress(host, lambda: (host, 7), lambda: False)
    await address.run()
    assert not address.gone
    assert not caplog.records
