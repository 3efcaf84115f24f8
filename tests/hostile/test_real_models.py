"""What anybody may say of models: plans, deltas, pushes, rounds, weights. As a stranger, and as a member."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest
from stranger import HUGE, Insider, Stranger
from victims import Victims

from peerd.node.meta import NodeMeta
from peerd.training.codecs import vector
from peerd.transport.errors import PeerError
from peerd.transport.messages import (
    Applied,
    Chunks,
    Delta,
    LinkOpen,
    Member,
    Message,
    Plan,
    Prepare,
    Promise,
    Push,
    RoundBegin,
    RoundPhase,
    RoundReport,
    ShardLeader,
    State,
    Weights,
)

FIRST, LAST = "0" * 16, "f" * 16  # what an id begins with that is before, or after, all others
WHO = pytest.mark.parametrize("who", ["stranger", "insider"])


@contextmanager
def attacker(who: str, them: Victims, begins: str = "") -> Iterator[Stranger]:
    """One who is a member of this plan, with a model, or who is nobody: another each time, for the last is refused."""
    id = begins + os.urandom(16).hex()[len(begins) :]
    if who == "stranger":
        with Stranger(id=id) as stranger:
            yield stranger
        return
    with Insider(them.rows()[0], id=id) as insider:
        insider.join(*them.addresses)
        time.sleep(0.5)  # it is their partner then
        yield insider
        insider.leave(*them.addresses)


def chunks(them: Victims, codec: str, size: float) -> Chunks:
    """Nobody's model."""
    layout = them.layout()
    values = np.random.default_rng(0).standard_normal(layout.total).astype(np.float32) * np.float32(size)
    return vector.encode(codec, layout, values)[0]


def plans() -> list[tuple[str, Plan]]:
    author = "f" * 32
    return [
        ("few", Plan(1000, author, True, "allreduce overlap=blocking min_peers=1000000")),
        ("servers", Plan(2000, author, True, f"hardsync servers={10**15}")),
        ("view", Plan(3000, author, True, f"gossip view={10**15}")),
        ("every", Plan(4000, author, True, f"allreduce overlap=blocking every={1 << 62}")),
        ("unheard of", Plan(5000, author, True, "no-such-mode \x1b[2J[/x]")),
        ("last", Plan(1 << 32, author, True, "gossip")),
    ]


@pytest.mark.soak
@WHO
@pytest.mark.parametrize("plan", [plan for _, plan in plans()], ids=[name for name, _ in plans()])
def test_a_plan(plan: Plan, who: str, them: Victims) -> None:
    """A stranger's is none, nor one's who has no model. Of a member's, only what `peerd start` would take.

    Whoever forges a ready member's whole record is as good as one, before records are signed.
    """
    numbers = [node.ask("mode")["plan"] for node in them.nodes]
    with them.unharmed(settle_s=3.0), attacker(who, them) as attack:
        row = them.rows()[0]
        about = replace(NodeMeta.unpack(row.meta) if who == "insider" else NodeMeta(), plan=plan).pack()
        host, port = attack.address
        record = Member(attack.id, "x", host, port, 1, 1, State.ALIVE, "", about)
        if isinstance(attack, Insider):
            attack.row = record
            attack.join(*them.addresses)
        for address in them.addresses:
            attack.tell(address, record)
            attack.offer(address, plan, LinkOpen(1))
        time.sleep(1.0)
        if who == "stranger":
            assert [node.ask("mode")["plan"] for node in them.nodes] == numbers
    them.work_under("gossip")


def test_a_delta_of_one_who_is_no_member(them: Victims) -> None:
    plan = them.work_under("gossip")
    with them.unharmed(), attacker("stranger", them) as attack:
        for address in them.addresses:
            for seq in (1, 2):
                delta = Delta(7, seq, "sign", 0.5, True, False, b"", 0.0, 0.0, chunks(them, "sign", 1e3))
                attack.offer(address, plan, LinkOpen(7), delta)


@pytest.mark.soak
@WHO
def test_weight_that_is_not_there(who: str, them: Victims) -> None:
    plan = them.work_under("push-sum")
    with them.unharmed(), attacker(who, them) as attack:
        for address in them.addresses:
            push = Push(5, 1, "float32", 1.0, 1e6, False, False, chunks(them, "float32", 1e3))
            attack.offer(address, plan, push, replace(push, link=6, weight=1e300))


@pytest.mark.soak
@WHO
@pytest.mark.parametrize("number", [HUGE, (1 << 63) - 1, (1 << 64) - 1], ids=["2^53-1", "2^63-1", "2^64-1"])
def test_a_round_that_nobody_made(number: int, who: str, them: Victims) -> None:
    plan = them.work_under("allreduce")
    with them.unharmed(settle_s=3.0), attacker(who, them, LAST) as attack:
        reports = (
            RoundReport(1, RoundPhase.READY, number, 7, 7, 0, False, False, False),
            RoundReport(1, RoundPhase.READY, 1, number, number, 0, False, False, False, waits_s=-1e300),
            RoundReport(number, RoundPhase.HELD, number, number, number, number, True, True, True, waits_s=1e300),
        )
        for report in reports:
            for _ in range(10):  # a round that is under way is ended first
                for address in them.addresses:
                    attack.offer(address, plan, report)
                time.sleep(0.1)


@pytest.mark.soak
@WHO
def test_orders_that_make_no_sense(who: str, them: Victims) -> None:
    """From one whose id is before all others, who therefore leads."""
    plan = them.work_under("allreduce")
    rows = them.rows()
    with them.unharmed(settle_s=3.0), attacker(who, them, FIRST) as attack:
        lives = {}
        for row in rows:
            report = attack.waits_for(RoundReport, row.id) if isinstance(attack, Insider) else None
            lives[row.id] = report.life if isinstance(report, RoundReport) else 1
        number = 1 << 40
        for topology, whole in (
            ("no such", True), ("tree:0", True), ("tree:-1", True), ("tree:9" + "9" * 90, True), ("ring", False),
            ("halving", False), ("", True),
        ):  # fmt: skip
            number += 1
            begin = RoundBegin(
                number, number, "float32", topology, whole, False, (*lives, attack.id), (*lives.values(), 1)
            )
            for address in them.addresses:
                attack.offer(address, plan, begin, replace(begin, codec="no such codec", attempt=number + (1 << 30)))


@pytest.mark.soak
@WHO
@pytest.mark.parametrize("mode", ["hardsync", "softsync"])
def test_weights_of_one_who_claims_to_serve(mode: str, who: str, them: Victims) -> None:
    plan = them.work_under(mode)
    rows = them.rows()
    with them.unharmed(settle_s=3.0), attacker(who, them) as attack:
        weights = chunks(them, "float32", 1e3)
        for term in (1 << 20, HUGE - 1, HUGE):
            clock = 1 << 30
            marks = tuple(Applied(row.id, life, seq) for row in rows for life in range(2) for seq in range(3))
            messages: list[Message] = [
                Promise(0, term, 1, clock, marks, weights),
                Prepare(0, term, clock),
                ShardLeader(0, term, attack.id, True, 0, ()),
                Weights(0, term, attack.id, clock, marks, False, marks, weights),
                Weights(0, term, attack.id, clock, marks, True, marks, weights),
            ]
            for address in them.addresses:
                with suppress(OSError, PeerError):
                    attack.greet(address).say(plan, *messages)
