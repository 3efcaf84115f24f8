"""Where a node's swarm was: what is kept of its members, what a damaged file is worth, and what leaving does to it."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peerd.daemon import known_members
from peerd.daemon.known_members import KNOWN_MAX, forget, keep, known, read, read_plan, write, write_plan
from peerd.daemon.main import _anew
from peerd.local import durable
from peerd.protocol.plan import NUMBER_MAX
from peerd.settings import Settings
from peerd.transport.errors import UserError
from peerd.transport.ids import Address
from peerd.transport.messages import AS_STARTED, Member, Plan, State

A, B, C = [("10.0.0.1", 7946), ("10.0.0.2", 7946), ("fd00::3", 1)]
MINE = ("10.0.0.9", 7946)
FILE = "members.json"


def told(folder: Path, **rest: str) -> Settings:
    return Settings(name="me", state_dir=str(folder), **rest)  # type: ignore[arg-type]


def member(id: str, where: Address, state: State = State.ALIVE) -> Member:
    return Member(id, f"node-{id}", *where, 1, 0, state, "", b"")


def members(*rows: Member) -> dict[str, Member]:
    return {row.id: row for row in (member("me", MINE), *rows)}


# ------------------------------------------------------------------------------------------------------------ the file


@settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.text(max_size=255), st.integers(0, 65535)), max_size=KNOWN_MAX, unique=True))
def test_what_was_written_is_read(tmp_path: Path, addresses: list[Address]) -> None:
    write(told(tmp_path), tuple(addresses))
    assert read(told(tmp_path)) == tuple(addresses)


def test_whom_a_node_left_is_said_once(tmp_path: Path) -> None:
    write(told(tmp_path), (A, B))
    assert known_members.take_left(told(tmp_path)) == ()
    forget(told(tmp_path), (B,))
    assert read(told(tmp_path)) == ()
    assert known_members.take_left(told(tmp_path)) == (B,)
    assert known_members.take_left(told(tmp_path)) == ()
    forget(told(tmp_path), (B,))
    forget(told(tmp_path))  # as a fresh start does
    assert known_members.take_left(told(tmp_path)) == ()


def test_a_plan_that_comes_when_the_node_leaves_is_not_kept(tmp_path: Path) -> None:
    write_plan(told(tmp_path), PLAN, lambda: True)
    assert read_plan(told(tmp_path)) == AS_STARTED


@pytest.mark.parametrize("rest", [{"swarm": "other"}, {"run": "2"}], ids=str)
def test_another_swarm_or_run_was_not_there(tmp_path: Path, rest: dict[str, str]) -> None:
    write(told(tmp_path), (A,))
    assert read(told(tmp_path, **rest)) == ()


def test_nothing_is_kept_at_first(tmp_path: Path) -> None:
    assert read(told(tmp_path / "not" / "there")) == ()
    forget(told(tmp_path / "not" / "there"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=60)
    | JSON.map(lambda kept: json.dumps(kept).encode())
    | JSON.map(lambda kept: json.dumps({"swarm": "peerd", "run": "", "members": kept}).encode())
    | st.lists(JSON, min_size=1, max_size=2).map(
        lambda kept: json.dumps({"swarm": "peerd", "run": "", "members": [["h", 1], kept]}).encode()
    )
)
def test_damage_counts_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    for host, port in read(told(tmp_path)):
        assert type(host) is str
        assert type(port) is int
        assert 0 <= port < 65536


@pytest.mark.parametrize("where", [["h", "1"], ["h", True], ["h", 1.0], ["h", -1], ["h", 65536], ["h"], [1, "h"], "h1"])
def test_one_wrong_address_makes_the_file_worthless(tmp_path: Path, where: Any) -> None:
    (tmp_path / FILE).write_text(json.dumps({"swarm": "peerd", "run": "", "members": [list(A), where]}))
    assert read(told(tmp_path)) == ()


@pytest.mark.parametrize("kept", ["[" * 100_000, "{", "", "NaN"], ids=lambda kept: kept[:3])
def test_hostile_files(tmp_path: Path, kept: str) -> None:
    (tmp_path / FILE).write_text(kept)
    assert read(told(tmp_path)) == ()


def test_a_folder_in_its_place_is_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE).mkdir()
    assert read(told(tmp_path)) == ()
    forget(told(tmp_path))
    assert [record.message for record in caplog.records] == [
        f"{tmp_path / FILE}: Is a directory; the next start asks the members named there"
    ]


# ------------------------------------------------------------------------------------------------------------ the plan

PLAN = Plan(3, "0123456789abcdef", True, "diloco every=5")


@pytest.mark.parametrize("plan", [PLAN, Plan(NUMBER_MAX, "i" * 128, True, "hardsync"), Plan(1, "", True, "")])
def test_the_plan_that_was_written_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture, plan: Plan) -> None:
    assert read_plan(told(tmp_path)) == AS_STARTED
    write_plan(told(tmp_path), plan, lambda: False)
    assert read_plan(told(tmp_path)) == plan
    assert not caplog.records
    forget(told(tmp_path))
    assert read_plan(told(tmp_path)) == AS_STARTED


@pytest.mark.parametrize("rest", [{"swarm": "other"}, {"run": "2"}], ids=str)
def test_a_plan_is_of_one_swarm_and_run(tmp_path: Path, rest: dict[str, str]) -> None:
    write_plan(told(tmp_path), PLAN, lambda: False)
    assert read_plan(told(tmp_path, **rest)) == AS_STARTED


@pytest.mark.parametrize("rest", [{"mode": "allreduce"}, {"codec": "int8"}, {"trigger": "always"}], ids=str)
def test_other_flags_are_a_later_decision(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rest: dict[str, str]
) -> None:
    caplog.set_level("INFO")
    write_plan(told(tmp_path), PLAN, lambda: False)
    assert read_plan(told(tmp_path, **rest)) == AS_STARTED
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("plan 3 of the last run (mode diloco every=5) is not taken up")
    assert read_plan(told(tmp_path, log="json")) == PLAN, "what no plan changes has no say"


@settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=60)
    | JSON.map(lambda kept: json.dumps(kept).encode())
    | JSON.map(lambda kept: json.dumps({"swarm": "peerd", "run": "", "started": {}, "plan": kept}).encode())
    | st.just(b"[" * 100_000)
)
def test_a_damaged_plan_is_told_in_a_line_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    caplog.clear()
    assert read_plan(told(tmp_path)) == AS_STARTED
    (said,) = [record.message for record in caplog.records]
    assert said.startswith(f"{tmp_path / 'plan.json'} is damaged: it is ignored")
    assert "\n" not in said


def test_a_plan_of_another_version_is_no_plan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Proposed, it would hide the swarm's own from a node that cannot follow it."""
    write_plan(told(tmp_path), replace(PLAN, text="gossip newer_setting=3"), lambda: False)
    assert read_plan(told(tmp_path)) == AS_STARTED
    assert "unknown setting 'newer_setting'" in caplog.text


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.json")
    os.mkfifo(tmp_path / "members.json")
    assert read_plan(told(tmp_path)) == AS_STARTED
    assert read(told(tmp_path)) == ()


def test_an_average_is_not_kept_as_a_plan(tmp_path: Path) -> None:
    write_plan(told(tmp_path), replace(PLAN, done=False), lambda: False)
    assert read_plan(told(tmp_path)) == AS_STARTED


# -------------------------------------------------------------------------------------------------------- who is known


def test_the_living_are_known_and_this_node_is_not() -> None:
    rows = members(member("a", A), member("b", B, State.SUSPECT), member("c", C, State.FAILED))
    assert known(rows, "me", ()) == (A, B)


def test_an_earlier_life_of_this_node_is_nobody_else() -> None:
    """Its key was lost, or it has the port of another that is gone."""
    assert known(members(member("a", A), member("before", MINE)), "me", ()) == (A,)
    assert known(members(member("before", MINE, State.FAILED)), "me", (MINE, A)) == (A,)


def test_those_known_stay_while_they_live_however_many_come() -> None:
    crowd = [member(f"n{i}", ("10.1.0.1", i)) for i in range(3 * KNOWN_MAX)]
    before = known(members(*crowd[KNOWN_MAX:]), "me", (C,))
    assert len(before) == KNOWN_MAX
    assert known(members(*crowd), "me", before) == before
    dead = member("n16", ("10.1.0.1", 16), State.FAILED)
    after = known(members(*crowd, dead), "me", before)
    assert len(set(after) - set(before)) == 1
    assert set(before) - set(after) == {("10.1.0.1", 16)}


def test_a_node_that_is_alone_keeps_whom_it_knew_but_for_those_who_left() -> None:
    assert known(members(), "me", (A, B)) == (A, B)
    assert known(members(member("a", A, State.FAILED)), "me", (A, B)) == (A, B)
    assert known(members(member("a", A, State.LEFT), member("b", B, State.FAILED)), "me", (A, B)) == (B,)


def test_a_member_that_took_the_place_of_one_that_left_is_known() -> None:
    rows = members(member("new", A), member("old", A, State.LEFT))
    assert known(rows, "me", ()) == (A,)


# ------------------------------------------------------------------------------------------------------- while it runs


async def test_the_file_follows_the_members_and_is_written_no_more_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[Address, ...]] = []
    monkeypatch.setattr(known_members, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(known_members, "write", lambda _, addresses: written.append(addresses))
    rows, leaving = members(), trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep, told(tmp_path), "me", lambda: rows, (), leaving)
        for row, addresses in (
            (member("a", A), (A,)),
            (member("a", A, State.SUSPECT), (A,)),
            (member("b", B), (A, B)),
            (member("a", A, State.FAILED), (B,)),
            (member("b", B, State.LEFT), ()),
        ):
            rows[row.id] = row
            with trio.fail_after(60):
                while not written or written[-1] != addresses:
                    await trio.sleep(0.001)
            await trio.sleep(0.01)
        leaving.set()
    assert written == [(A,), (A, B), (B,), ()]


async def test_a_disk_that_is_full_is_told_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = 0

    def full(*given: Any) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError(28, "No space left on device")
        leaving.set()
        durable.replace(*given)

    leaving = trio.Event()
    monkeypatch.setattr(known_members, "replace", full)
    await keep(told(tmp_path), "me", lambda: members(member("a", A)), (), leaving)
    assert (tmp_path / FILE).exists()
    assert [record.message for record in caplog.records] == [
        f"{tmp_path / FILE}: No space left on device; after a crash this node may not find its swarm"
    ]


@pytest.mark.parametrize("new", ["members", "checkpoints", ""])
def test_what_a_fresh_start_puts_aside_comes_back_over_nothing_new(tmp_path: Path, new: str) -> None:
    """A node without a script has no checkpoints: one that died after days looked for its swarm of before."""
    write(told(tmp_path), (A,))

    def dies() -> None:
        with _anew(told(tmp_path)) as begin:
            begin()
            if new == "members":
                write(told(tmp_path), (B,))
            if new == "checkpoints":
                told(tmp_path).checkpoints.mkdir(parents=True)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        dies()
    assert read(told(tmp_path)) == {"members": (B,), "checkpoints": (), "": (A,)}[new]


def test_what_cannot_be_put_aside_for_sure_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    checkpoints = told(tmp_path).checkpoints
    (checkpoints / "step-00000007").mkdir(parents=True)
    monkeypatch.setattr(durable, "flush", fails)
    with pytest.raises(UserError, match=r" aside: Input/output error$"):
        durable.put_aside(checkpoints)
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000007"]
