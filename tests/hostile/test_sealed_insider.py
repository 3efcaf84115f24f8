"""A member of a sealed swarm that turns against it: it has a certificate, signs, and knows the keys of datagrams."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
import victims as honest
from machine import Node
from papers import Papers
from stranger import HUGE, Insider, Line, frame
from victims import Victims, comes_true

from peerd.local.node_key import NodeKey
from peerd.local.signing import NodeSigning
from peerd.membership import proofs
from peerd.membership.roster import EPOCH_JUMP, INCARNATION_JUMP
from peerd.node.meta import NodeMeta
from peerd.protocol import plan as plans
from peerd.training.codecs import vector
from peerd.training.codecs.compress import RAW
from peerd.training.modes.gossip import VALUE_TIMES
from peerd.transport import framing
from peerd.transport.errors import PeerError
from peerd.transport.messages import (
    Chunks,
    Delta,
    LinkOpen,
    LinkSnapshot,
    Member,
    MemberTable,
    Message,
    ModelSnapshot,
    Plan,
    State,
)

VICTIMS = {"sealed": True}


@pytest.fixture
def fresh() -> Iterator[Victims]:
    """Nodes that have had no partner but each other: they open links to whoever comes next."""
    yield from honest.victims(sealed=True)


@contextmanager
def insider(them: Victims, **about: Any) -> Iterator[tuple[Insider, Papers]]:
    """A partner in good standing, another each time: the last is refused by now."""
    papers, like = them.papers(), them.rows()[0]
    assert papers is not None
    like = replace(like, meta=replace(NodeMeta.unpack(like.meta), **about).pack())
    with Insider(like, papers=papers) as attack:
        attack.join(*them.addresses)
        yield attack, papers
        with suppress(OSError, PeerError):
            attack.leave(*them.addresses)


def test_records_of_others(them: Victims) -> None:
    """What they did not sign, what it signs for them, and that they are dead: in datagrams and in tables."""
    rows = them.rows()
    with them.unharmed(settle_s=3.0), insider(them) as (attack, papers):
        for row in rows:
            forged = [
                replace(row, epoch=row.epoch + 1, host="10.9.9.9"),
                replace(row, epoch=EPOCH_JUMP),
                replace(row, incarnation=INCARNATION_JUMP - 1, state=State.LEFT),
                replace(row, epoch=HUGE, incarnation=HUGE),
            ]
            dead = [
                papers.accuses(row, state=state, incarnation=row.incarnation + more)
                for state in (State.SUSPECT, State.FAILED)
                for more in (0, 1, INCARNATION_JUMP)
            ]
            for record in [*forged, *map(papers.signed, forged), *dead]:
                for address in them.addresses:
                    attack.tell(address, record)
                    attack.offer(address, MemberTable(attack.id, (record,)), MemberTable(attack.id, ()))


@pytest.mark.soak
def test_its_own_record_from_far_ahead(them: Victims) -> None:
    """Numbers that nobody reaches, other places, and meta that is none: that harms nobody but itself."""
    with them.unharmed(), insider(them) as (attack, papers):
        for changed in (
            replace(attack.row, epoch=EPOCH_JUMP - 1),
            replace(attack.row, epoch=HUGE),
            replace(attack.row, epoch=1 << 63),
            replace(attack.row, incarnation=INCARNATION_JUMP - 1),
            replace(attack.row, incarnation=(1 << 64) - 1),
            replace(attack.row, host="10.9.9.9", port=1, epoch=3),
            replace(attack.row, name="\x1b[2J", epoch=4),
            replace(attack.row, meta=os.urandom(512), epoch=5),
            replace(attack.row, meta=b"\xdd\xff\xff\xff\xff" * 100, epoch=6),
        ):
            record = papers.signed(changed)
            for address in them.addresses:
                attack.tell(address, record)
                attack.offer(address, MemberTable(attack.id, (record,)), MemberTable(attack.id, ()))


def made_up(like: Member, plan: Plan | None = None, begins: str = "") -> Member:
    """A member that an insider has made: it signs, and has no certificate. Its id begins so; it proposes `plan`."""
    while not (key := NodeKey.generate()).id.startswith(begins):
        pass
    signing, about = NodeSigning(key, "peerd", ""), replace(NodeMeta.unpack(like.meta), founder=False)
    if plan is not None:
        about = replace(about, plan=plans.proposal(plan, key.id, plan.text, signing=signing))
    return proofs.claimed(Member(key.id, key.id, "127.0.0.1", 1, 1, 0, State.ALIVE, "", about.pack()), signing)


def known(node: Node) -> set[str]:
    return {each["id"] for each in node.ask("members")["members"]}


def tells(attack: Insider, them: Victims, *records: Member) -> None:
    for address in them.addresses:
        attack.offer(address, MemberTable(attack.id, records), MemberTable(attack.id, ()))


def test_members_of_its_own_making_have_no_say(them: Victims) -> None:
    """They are most of all members, and name the last plan that there can be; then they lead all rounds."""
    plan = them.work_under("allreduce")
    row = them.rows()[0]
    with them.unharmed(), insider(them, ready=False) as (attack, _):  # by itself it stops no round
        last = replace(plan, number=plans.NUMBER_MAX - 1, done=True)
        crowd = [*(made_up(row, last) for _ in range(10)), *(made_up(row, begins="00") for _ in range(3))]
        tells(attack, them, *crowd)
        made = {one.id for one in crowd}
        assert comes_true(lambda: all(made <= known(node) for node in them.nodes), 10)
        before = [node.ask("status")["counts"]["rounds"] for node in them.nodes]
        assert comes_true(lambda: all(
            node.ask("status")["counts"]["rounds"] > rounds + 3
            for node, rounds in zip(them.nodes, before, strict=True)
        ), 20)  # fmt: skip
        assert [node.ask("mode")["plan"] for node in them.nodes] == [plan.number] * 2
        rows = [node.ask("members")["members"] for node in them.nodes]
        assert not any(each["met"] for of_node in rows for each in of_node if each["id"] in made)
    assert them.nodes[0].ask("mode_set", text="gossip")["plan"] == plan.number + 1, "the next can be proposed"


def test_who_broke_the_rules_is_shown_as_refused_until_it_is_forgiven(them: Victims) -> None:
    node, where = them.nodes[0], them.addresses[0]

    def refused_s() -> float:
        rows = {each["id"]: each["refused_s"] for each in node.ask("members")["members"]}
        return float(rows.get(attack.id) or 0.0)

    with them.unharmed(), insider(them, ready=False) as (attack, _):
        for _ in range(3):
            with suppress(OSError, PeerError):
                attack.greet(where).raw(os.urandom(500))
        assert comes_true(lambda: refused_s() > 500, 10)
        shown = them.machine.peerd("members", "--name", node.name).stdout
        assert any("refused" in line for line in shown.splitlines() if attack.row.name in line), shown
        with pytest.raises((OSError, PeerError)):
            attack.greet(where).hear()
        done = them.machine.peerd("forgive", attack.id, "--name", node.name)
        assert (done.returncode, done.stderr) == (0, "")
        assert refused_s() == 0
        attack.greet(where)


PLANS = {
    "few": "allreduce overlap=blocking min_peers=1000000",
    "servers": f"hardsync servers={10**15}",
    "every": f"allreduce overlap=blocking every={1 << 62}",
    "unheard of": "no-such-mode \x1b[2J[/x]",
}


@pytest.mark.parametrize(
    "text", [PLANS["few"], *(pytest.param(PLANS[name], marks=pytest.mark.soak) for name in list(PLANS)[1:])]
)
def test_a_plan_of_its_own(text: str, them: Victims) -> None:
    """Only what `peerd start` would take, and nothing that has the others stand still."""
    number = max(node.ask("mode")["plan"] for node in them.nodes) + 1
    with them.unharmed(settle_s=3.0), insider(them) as (attack, papers):
        plan = papers.plan(number, text)
        about = replace(NodeMeta.unpack(attack.row.meta), plan=plan)
        attack.row = papers.signed(replace(attack.row, incarnation=1, meta=about.pack()))
        attack.join(*them.addresses)
        for address in them.addresses:
            attack.offer(address, plan, LinkOpen(1))
    them.work_under("gossip")


def sized(them: Victims, size: float) -> Chunks:
    """A half that moves the references by so much a value, either way; NaN: to where no model is."""
    layout = them.layout()
    if np.isnan(size):
        return (bytes([RAW]) + bytes(2 * layout.total) + b"\xc0" * layout.total + b"\x7f" * layout.total,)
    noise = np.random.default_rng(0).standard_normal(layout.total).astype(np.float32)
    return vector.encode("float32", layout, noise * np.float32(size))[0]


@pytest.mark.parametrize("size", [300.0, *(pytest.param(each, marks=pytest.mark.soak) for each in (5.0, 1e30, np.nan))])
def test_deltas_of_a_partner(size: float, fresh: Victims) -> None:
    """Its link is open, it says that it may be moved without limit, and answers all: the merge alone bounds it."""
    them = fresh
    plan = them.work_under("gossip")
    chunks, nothing = sized(them, size), sized(them, 0.0)
    unlimited = b""
    lines: dict[str, Line] = {}
    answered = []
    with them.unharmed(settle_s=3.0), insider(them) as (attack, _):
        addresses = {row.id: (row.host, row.port) for row in them.rows()}

        def say(to: str, *messages: Message) -> None:
            if to not in lines:
                lines[to] = attack.greet(addresses[to])
                lines[to].say(plan)
            lines[to].say(*messages)

        def answer(sender: str, message: Message) -> None:
            match message:
                case LinkOpen(link):
                    first = Delta(link, 1, "float32", 1.0, True, False, unlimited, 0.0, 0.0, chunks)
                    say(sender, LinkSnapshot(link, "float32", nothing), first)
                case Delta(link=link, seq=seq):
                    answered.append(seq)
                    say(sender, Delta(link, seq + 1, "float32", 1.0, True, False, unlimited, 0.0, 0.0, chunks))

        attack.misbehave = answer
        for told in attack.heard[:]:  # they were quicker
            answer(*told)
        honest.comes_true(lambda: answered, 20.0 if size < VALUE_TIMES else 3.0)  # links come when there is room
        time.sleep(3.0)
    assert answered or not size < VALUE_TIMES, "none was taken up, so nothing was tried"


@pytest.mark.soak
def test_messages_and_records_that_never_end(them: Victims) -> None:
    """A message but for its last byte; a record of the seal of which only the length comes, the longest there is."""
    a, _ = them.addresses
    size = 4 * them.layout().total
    with them.unharmed(), insider(them) as (attack, _):
        for _ in range(60):
            with suppress(OSError, PeerError):
                line = attack.greet(a)
                line.raw(frame(ModelSnapshot.KIND, msgpack.packb([[size], 1, "float32"])))
                line.raw(framing.chunk_frame(bytes(size), checked=False) + bytes(size - 1))
        for _ in range(60):
            with suppress(OSError, PeerError):
                attack.greet(a).sock.sendall((4 << 20).to_bytes(4, "little") + bytes(1 << 20))


@pytest.mark.soak
@pytest.mark.parametrize("ids", ["one id", "many ids"])
def test_silent_links_keep_nobody_out(ids: str, them: Victims) -> None:
    a, _ = them.addresses
    with them.unharmed(), insider(them) as (attack, _):
        for _ in range(140):
            if ids == "many ids":
                attack.papers = them.papers()
                assert attack.papers is not None
                attack.id = attack.papers.id
            with suppress(OSError, PeerError):
                attack.greet(a).sock.settimeout(2.0)
        assert honest.comes_true(lambda: honest.gets_in(them), 40.0), "the port is full"


@pytest.mark.soak
def test_tables_without_end(them: Victims) -> None:
    """Thousands of members that it has made up, whole: each with a key of its own and signed by it."""
    crowd: list[Member] = []
    for number in range(1200):
        each = them.papers()
        assert each is not None
        row = Member(each.id, f"n{number}", "127.0.0.1", 1, 1, 0, State.ALIVE, "", b"")
        crowd.append(each.signed(row))
    with them.unharmed(settle_s=3.0), insider(them) as (attack, _):
        for _ in range(3):
            for address in them.addresses:
                parts = [MemberTable(attack.id, tuple(crowd[at : at + 32])) for at in range(0, len(crowd), 32)]
                attack.offer(address, *parts, MemberTable(attack.id, ()))
