"""What peers cannot make the membership's shell do: wait, dial without end, compute without end, or end its node."""

from __future__ import annotations

import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing

from peerd.daemon.membership_service import (
    CROWDS_EVERY_S,
    NAMED_MAX,
    PUSH_PULLS_MAX,
    PUSH_PULLS_WAITING_MAX,
    MembershipService,
)
from peerd.membership.effects import AskTwin, MemberChanged, MembershipEffect, PushPull
from peerd.membership.table_budget import BURST_ROWS, ROWS_PER_S
from peerd.membership.table_exchange import TABLE_PART
from peerd.node.meta import NodeMeta
from peerd.process.look_up import LOOK_UPS_MAX, LookUps
from peerd.transport.connection import ConnectionLost
from peerd.transport.ids import Address
from peerd.transport.messages import Member, MemberTable, State

pytestmark = pytest.mark.trio(clock="autojump")
SUSPECT = ("10.0.0.1", 1)
BLACK_HOLES = [(f"192.0.2.{number}", 1) for number in range(1, 18)]
DIAL_S = 9.0


class Core:
    """A membership core that asks for nothing by itself."""

    deadline = math.inf
    me: Member
    verifications = forgeries = 0

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.asked: set[Address] = set()
        self.unreachable: list[Address] = []
        self.revoked: set[str] = set()
        self.heard = 0

    def is_revoked(self, id: str) -> bool:
        return id in self.revoked

    def on_unreachable(self, where: Address, now: float) -> list[MembershipEffect]:
        self.unreachable.append(where)
        return []

    def on_table(self, table: MemberTable, now: float, dialled: Address | None) -> list[MembershipEffect]:
        self.heard += len(table.members)
        return [MemberChanged(record.id) for record in table.members]

    def table(self) -> MemberTable:
        return MemberTable("me", ())


class Silence:
    """A socket and a network where nothing ever comes; every dial takes its time and fails."""

    def __init__(self) -> None:
        self.dialled: list[tuple[float, Address]] = []
        self.dialling = self.most = 0

    async def receive(self) -> Any:
        await trio.sleep_forever()

    async def dial(self, where: Address) -> Any:
        self.dialled.append((trio.current_time(), where))
        self.dialling += 1
        self.most = max(self.most, self.dialling)
        try:
            await trio.sleep(DIAL_S)
        finally:
            self.dialling -= 1
        raise ConnectionLost(f"cannot reach {where[0]}: no answer")


class Shell:
    """The service under test, and what it called."""

    def __init__(self, *, proves: bool = False) -> None:
        self.core, self.silence = Core(), Silence()
        self.views = 0
        self.taken: list[Address] = []
        core, silence, proof = (*map(_any, (self.core, self.silence)), self._prove(proves))
        self.service = MembershipService(
            core, silence, silence, core, _any(None), self._changed, _any(None), proof, self.taken.append
        )

    def _changed(self) -> None:
        self.views += 1

    def _prove(self, proves: bool) -> Callable[[Address], Awaitable[bool]]:
        async def prove(where: Address) -> bool:
            await trio.sleep(1)
            return proves

        return prove


def _any(what: Any) -> Any:
    return what


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[Shell]:
    shell = Shell(**settings)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(shell.service.run)
        await trio.testing.wait_all_tasks_blocked()
        yield shell
        nursery.cancel_scope.cancel()


def a_member(id: str, state: State, epoch: int) -> Member:
    return Member(id, "node-" + id, "10.0.0.1", 1, epoch, 0, state, "", b"")


async def test_who_leaves_and_comes_again_and_again_fills_nobodys_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with running() as shell:
        shell.core.me = a_member("me", State.ALIVE, 1)
        for epoch in range(1, 1001):
            for state in (State.ALIVE, State.LEFT, State.ALIVE) if epoch % 2 else (State.ALIVE,):
                shell.core.members["c"] = a_member("c", state, epoch)
                await shell.service.perform([MemberChanged("c")])
        told = [record.message.removeprefix("node-c (10.0.0.1:1) ") for record in caplog.records]
        assert told == ["left", "is back", "is back: it ended without a word, and was started again"]
        await trio.sleep(60)
        for state in (State.SUSPECT, State.FAILED, State.ALIVE, State.LEFT):
            shell.core.members["c"] = a_member("c", state, 1000)
            await shell.service.perform([MemberChanged("c")])
        again = [record.message.removeprefix("node-c (10.0.0.1:1) ") for record in caplog.records][3:]
        assert again == ["failed: this node has never heard from it", "is back", "left"]


async def test_who_cannot_be_reached_is_named_if_it_is_a_member(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as shell:
        shell.core.members["old"] = replace(a_member("old", State.FAILED, 1), incarnation=7)
        shell.core.members["c"] = a_member("c", State.ALIVE, 1)
        await shell.service.perform([PushPull(SUSPECT), PushPull(BLACK_HOLES[0])])
        await trio.sleep(2 * DIAL_S)
        assert sorted(record.message for record in caplog.records) == [  # both at one moment, in any order
            "cannot reach 192.0.2.1: no answer; trying again",
            "node-c: cannot reach 10.0.0.1: no answer; trying again",
        ]


async def test_that_nobody_answers_where_a_member_has_left_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    """A node whose others have all left dials for ever where it joined, and may be joined by them again."""
    async with running() as shell:
        for state, said in ((State.LEFT, 0), (State.ALIVE, 1)):
            shell.core.members["c"] = a_member("c", state, 1)
            await shell.service.perform([PushPull(SUSPECT)])
            await trio.sleep(2 * DIAL_S)
            assert len(shell.core.unreachable) == 1 + said
            assert len(caplog.records) == said


async def test_who_is_revoked_is_told_neither_as_failed_nor_as_out_of_reach(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as shell:
        shell.core.me = a_member("me", State.ALIVE, 1)
        for state in (State.ALIVE, State.FAILED):
            shell.core.members["c"] = a_member("c", state, 1)
            shell.core.revoked = {"c"} if state == State.FAILED else set()
            await shell.service.perform([MemberChanged("c")])
        await shell.service.perform([PushPull(SUSPECT)])
        await trio.sleep(2 * DIAL_S)
        assert shell.core.unreachable == [SUSPECT]
        assert not caplog.records


async def test_who_joins_is_told_not_who_was_there_before_this_node(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with running() as shell:
        shell.core.me = a_member("me", State.ALIVE, 1)

        async def hears_of(id: str) -> None:
            shell.core.members[id] = a_member(id, State.ALIVE, 1)
            await shell.service.perform([MemberChanged(id)])

        await hears_of("old")  # as from the first table, before it is whole
        await shell.service.answer(_any(Link(1)), MemberTable("n1", Link.rows))
        for _ in range(2):
            await hears_of("new")
        await trio.sleep(1)
        assert [record.message for record in caplog.records] == ["node-new (10.0.0.1:1) joined"]
        for number in range(1000):
            await hears_of(f"{number}")
        await trio.sleep(1)
        named = [f"node-{number} (10.0.0.1:1) joined" for number in range(NAMED_MAX - 1)]
        assert [record.message for record in caplog.records][1:] == [*named, f"{1000 - len(named)} more members joined"]
        caplog.clear()
        await hears_of("late")
        await trio.sleep(CROWDS_EVERY_S / 2)
        assert not caplog.records, "nor do they fill the log by coming one after the other"
        await trio.sleep(CROWDS_EVERY_S)
        assert [record.message for record in caplog.records] == ["node-late (10.0.0.1:1) joined"]


async def test_a_second_newcomer_is_told_of_as_soon_as_the_first(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with running() as shell:
        shell.core.me = a_member("me", State.ALIVE, 1)
        await shell.service.answer(_any(Link(1)), MemberTable("n1", Link.rows))
        for id in ("first", "second"):
            shell.core.members[id] = a_member(id, State.ALIVE, 1)
            await shell.service.perform([MemberChanged(id)])
            await trio.sleep(0.1)
            assert caplog.records[-1].message == f"node-{id} (10.0.0.1:1) joined"


async def test_who_makes_no_step_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with running() as shell:
        shell.core.me = a_member("me", State.ALIVE, 1)

        async def hears_of_c(state: State = State.ALIVE, *, stalled: bool) -> None:
            shell.core.members["c"] = replace(a_member("c", state, 1), meta=NodeMeta(stalled=stalled).pack())
            await shell.service.perform([MemberChanged("c")])

        for stalled in (False, True, True, False, True, False):
            await hears_of_c(stalled=stalled)
        await trio.sleep(60)
        told = [record.message.removeprefix("node-c (10.0.0.1:1) ") for record in caplog.records]
        assert told == ["made no step for long: the script hangs, or has died"]
        for state in (State.ALIVE, State.SUSPECT, State.ALIVE):
            await hears_of_c(state, stalled=True)
        await hears_of_c(State.FAILED, stalled=True)
        await trio.sleep(CROWDS_EVERY_S)
        again = {record.message.removeprefix("node-c (10.0.0.1:1) ") for record in caplog.records[1:]}
        assert again == {told[0], "failed: this node has never heard from it"}


async def test_members_at_addresses_of_two_kinds_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as shell:
        shell.core.me = a_member("me", State.ALIVE, 1)
        for id, host in (("b", "10.0.0.2"), ("c", "fd00::2"), ("d", "fd00::3")):
            shell.core.members[id] = replace(a_member(id, State.ALIVE, 1), host=host)
            await shell.service.perform([MemberChanged(id)])
    [told] = [record.message for record in caplog.records]
    assert told.startswith(
        "node-c is at fd00::2, this node at 10.0.0.1: members that are not all at IPv4 or all at IPv6 "
    )


async def test_another_of_this_nodes_name_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as shell:
        shell.core.me = a_member("me", State.ALIVE, 1)
        for port, state in enumerate((State.ALIVE, State.LEFT, State.ALIVE, State.ALIVE), 1):
            shell.core.members["b"] = replace(a_member("b", state, port), name="node-me", port=port)
            await shell.service.perform([MemberChanged("b")])
    [told] = [record.message for record in caplog.records]
    assert told.startswith("the member at 10.0.0.1:3 is called node-me, too: "), "who was at 1 is its earlier life"


async def test_a_suspect_is_dialled_at_once_whatever_black_holes_are_dialled() -> None:
    async with running() as shell:
        await shell.service.perform([PushPull(where) for where in [*BLACK_HOLES, SUSPECT]])
        await trio.sleep(1)
        shell.core.asked = {SUSPECT}
        await shell.service.perform([PushPull(SUSPECT)])
        await trio.sleep(0.1)
        assert (1.0, SUSPECT) in shell.silence.dialled
        assert SUSPECT not in shell.core.unreachable, "it was not even dialled"


async def test_a_push_pull_has_its_time_from_when_it_is_dialled() -> None:
    async with running() as shell:
        await shell.service.perform([PushPull(where) for where in BLACK_HOLES])
        await trio.sleep(4 * DIAL_S)
        assert {where for _, where in shell.silence.dialled} == set(BLACK_HOLES)
        assert shell.silence.most == PUSH_PULLS_MAX


async def test_push_pulls_that_wait_are_bounded() -> None:
    async with running() as shell:
        await shell.service.perform([PushPull(BLACK_HOLES[0])] * 1000)
        await shell.service.perform([PushPull(("10.1.1.1", port)) for port in range(1, 5000)])
        assert len(trio.lowlevel.current_task().parent_nursery.child_tasks) < 10  # type: ignore[union-attr]
        assert len(shell.service._under_way) == PUSH_PULLS_WAITING_MAX
        await trio.sleep(PUSH_PULLS_WAITING_MAX * DIAL_S)
        assert not shell.service._under_way


async def test_many_changes_are_one_new_view() -> None:
    async with running() as shell:
        await shell.service.perform([MemberChanged(f"n{number}") for number in range(4096)])
        await trio.testing.wait_all_tasks_blocked()
        assert shell.views == 1
        await shell.service.perform([MemberChanged("n1")])
        await trio.testing.wait_all_tasks_blocked()
        assert shell.views == 2


@pytest.mark.parametrize("proves", [True, False])
async def test_only_a_proof_ends_the_node(proves: bool) -> None:
    async with running(proves=proves) as shell:
        await shell.service.perform([AskTwin(SUSPECT)])
        await trio.sleep(20)
        assert shell.taken == ([SUSPECT] if proves else [])


class Link:
    """A connection whose other end sends whole parts without end."""

    identity = None
    remote = "192.0.2.1:999"
    rows = tuple(Member(f"n{n}", "n", "10.0.0.2", 7, 1, 0, State.ALIVE, "", b"") for n in range(TABLE_PART))

    def __init__(self, parts: int) -> None:
        self.parts = parts

    async def receive(self) -> MemberTable:
        await trio.lowlevel.checkpoint()
        self.parts -= 1
        return MemberTable("n1", self.rows if self.parts >= 0 else ())

    async def send(self, message: MemberTable) -> None:
        await trio.lowlevel.checkpoint()


async def test_tables_of_one_host_are_rated() -> None:
    async with running() as shell:

        async def connection() -> None:
            while True:
                await shell.service.answer(_any(Link(100)), MemberTable("n1", Link.rows))

        with trio.move_on_after(3):
            async with trio.open_nursery() as nursery:
                for _ in range(50):  # of one host
                    nursery.start_soon(connection)
        assert BURST_ROWS <= shell.core.heard <= BURST_ROWS + 4 * ROWS_PER_S, "a crowd that joins is served at once"


@pytest.mark.trio(clock="real")
async def test_names_are_looked_up_in_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    trio.socket.set_custom_hostname_resolver(LookUps())
    threads = trio.to_thread.current_default_thread_limiter()
    busy: list[float] = []

    def look_up(host: Any, *rest: Any, **flags: Any) -> Any:
        if rest and rest[-1] & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "a name")
        busy.append(trio.from_thread.run_sync(lambda: threads.borrowed_tokens))
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.7", 1))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    for _ in range(2 * LOOK_UPS_MAX):
        assert (await trio.socket.getaddrinfo("nosuch.example", 1))[0][4] == ("10.0.0.7", 1)
    assert busy == [0] * 2 * LOOK_UPS_MAX
