"""What anybody may say of members, in datagrams and tables: of a node itself, of another, of thousands."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import victims as honest
from stranger import HUGE, Insider, Stranger
from victims import Victims

from peerd.membership.roster import INCARNATION_JUMP
from peerd.transport.messages import Ack, Member, MemberTable, Ping, PingRequest, State


def flood(count: int, **fields: object) -> list[Member]:
    row = Member("", "", "127.0.0.1", 1, 1, 0, State.ALIVE, "", b"")
    return [replace(row, id=f"{number:064x}", name=f"n{number}", **fields) for number in range(count)]  # type: ignore[arg-type]


def test_of_a_nodes_own_id(them: Victims) -> None:
    rows = them.rows()
    with them.unharmed(), Stranger() as stranger:
        for address in them.addresses:
            for row in rows:
                stranger.tell(address, replace(row, epoch=HUGE), replace(row, epoch=row.epoch + 1, port=1))
                stranger.tell(address, replace(row, host="10.9.9.9"), replace(row, epoch=1 << 63))
    assert all("identity" not in node.log for node in them.nodes if node.process.poll() is not None)


def test_of_an_incarnation_that_nobody_reaches(them: Victims) -> None:
    """Not one that a node cannot outbid: else it is gone while it lives."""
    a, _ = them.addresses
    with them.unharmed(settle_s=3.0), Stranger() as stranger:
        row = them.rows()[1]
        stranger.tell(a, replace(row, incarnation=HUGE, state=State.LEFT))
        first = replace(row, incarnation=row.incarnation + INCARNATION_JUMP, state=State.FAILED, accuser="x")
        second = replace(row, incarnation=row.incarnation + 2 * INCARNATION_JUMP, state=State.LEFT)
        stranger.shout(a, Ack(0, stranger.id, (first, second)))  # together: the first is told to nobody


@pytest.mark.soak
def test_of_a_member_that_comes_and_goes(them: Victims) -> None:
    """The others are probed as before."""
    a, _ = them.addresses
    prober, row = them.rows()
    with them.unharmed(), Insider(row) as insider:
        insider.join(a)
        for number in range(0, 2000, 2):
            insider.tell(a, replace(row, incarnation=row.incarnation + number, state=State.FAILED, accuser="x"))
            insider.tell(a, replace(row, incarnation=row.incarnation + number + 1))
            time.sleep(0.0005)  # a datagram that overflows the socket harms nobody
        insider.pinged_by.clear()
        assert honest.comes_true(lambda: prober.id in insider.pinged_by, 25.0), "it is probed no more"
        insider.leave(a)


def test_an_answer_is_no_larger_than_what_asked_for_it(them: Victims) -> None:
    a, _ = them.addresses
    fat = replace(flood(1)[0], host="10.9.9.9", name="n" * 128, meta=b"m" * 512, state=State.FAILED, accuser="a" * 128)
    with them.unharmed(), Stranger(id=fat.id) as stranger:
        stranger.tell(a, fat)
        time.sleep(0.2)
        target = them.rows()[0].id
        stranger.sent_bytes = 0
        stranger.udp.settimeout(0.5)
        came = 0
        for number in range(5):
            stranger.shout(a, Ping(number, fat.id, target, ()), PingRequest(number, fat.id, target, "127.0.0.1", 1, ()))
        try:
            while True:
                came += len(stranger.udp.recv(2048))
        except TimeoutError:
            pass
        assert came <= stranger.sent_bytes, f"{came} bytes for {stranger.sent_bytes}"


def test_probes_to_names_that_take_long_to_look_up(them: Victims) -> None:
    a, _ = them.addresses
    row = them.rows()[0]
    with them.unharmed(), Insider(them.rows()[1]) as insider:
        insider.join(a)
        names = [f"n{number}.slow" for number in range(10)]
        insider.shout(a, *(PingRequest(number, insider.id, row.id, name, 1, ()) for number, name in enumerate(names)))
        insider.tell(a, *(replace(each, host=f"{each.name}.slow") for each in flood(10)))
        with Stranger(id=insider.id) as other:
            other.shout(a, Ping(7, other.id, row.id, ()))
            other.udp.settimeout(2.0)
            assert other.udp.recv(2048), "it answers pings no more"
        insider.leave(a)


def test_a_name_is_shown_as_it_is(them: Victims) -> None:
    a, _ = them.addresses
    rows = [
        replace(row, name=name, state=State.FAILED)
        for row, name in zip(flood(4), ["[/x]", "[red]", "\x1b[2Jx", "a\nb"], strict=True)
    ]
    with them.unharmed(settle_s=0.2), Stranger() as stranger:
        stranger.tell(a, *rows)
        time.sleep(0.2)
        for verb in ("members", "status"):
            done = them.machine.peerd(verb, "--name", "a")
            assert done.returncode == 0, done.stderr
            assert "\x1b[2J" not in done.stdout
        assert "\x1b[2J" not in them.machine.logs()


@pytest.mark.parametrize("way", ["table", pytest.param("datagrams", marks=pytest.mark.soak)])
def test_of_thousands_of_members(way: str, them: Victims) -> None:
    """Last: they are members until they are found out."""
    a, _ = them.addresses
    crowd = flood(2800)
    with them.unharmed(settle_s=3.0), Stranger() as stranger:
        if way == "table":
            parts = [MemberTable(stranger.id, tuple(crowd[at : at + 400])) for at in range(0, len(crowd), 400)]
            stranger.offer(a, *parts, MemberTable(stranger.id, ()))
        else:
            for at in range(0, len(crowd), 8):
                stranger.shout(a, Ack(0, stranger.id, tuple(crowd[at : at + 8])))
                time.sleep(0.001)
