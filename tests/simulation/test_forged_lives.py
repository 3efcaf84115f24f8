"""A stranger, or a member, tells a whole swarm a lie about one member: how long is that believed, and by how many?"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from test_membership_swarm import check, grown

from peerd.membership.proofs import Proofs, claimed
from peerd.membership.roster import INCARNATION_JUMP
from peerd.simulation.node import Node
from peerd.simulation.swarm import Swarm
from peerd.transport.messages import Ack, Member, State

LIES: dict[str, list[dict[str, Any]]] = {
    "it left": [{"epoch": 6, "state": State.LEFT}],
    "it lives": [{"epoch": 6, "meta": b"another"}],
    "it moved": [{"epoch": 6, "host": "10.0.0.7"}],
    "its incarnation leapt": [
        {"incarnation": leaps * INCARNATION_JUMP, "state": State.LEFT} for leaps in range(1, 4)
    ],
}  # fmt: skip
STRANGER = ("203.0.113.9", 53)


def tell_all(swarm: Swarm, *lies: Member) -> None:
    for node in swarm.nodes.values():
        for lie in lies:
            node.datagram(Ack(0, "n00001", (lie,)), STRANGER)


@pytest.mark.parametrize("lies", LIES.values(), ids=LIES)
def test_a_lie_told_to_all_of_a_plain_swarm_is_over_soon(
    lies: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = grown(8, seed=31, signed=False)
    monkeypatch.setattr(swarm.checkers, "member_changed", lambda *_: None)  # it objects to every lie believed
    victim = swarm.nodes[3]
    me = victim.membership.me
    tell_all(swarm, *[replace(me, **lie) for lie in lies])
    others = [node.membership for node in swarm.nodes.values() if node is not victim]
    check(swarm, any(other.members[me.id] != me for other in others), "the test did not test anything")
    healed = swarm.run(60, lambda: all(other.members[me.id] == victim.membership.me for other in others))
    check(swarm, healed, [other.members[me.id] for other in others])
    check(swarm, victim.membership.me.epoch == me.epoch)
    swarm.run(60)
    check(swarm, all(other.members[me.id] == victim.membership.me for other in others), "and stays so")


def agreed_on(swarm: Swarm, victim: Node) -> bool:
    me = victim.membership.me
    return me.state == State.ALIVE and all(node.membership.members[victim.id] == me for node in swarm.nodes.values())


@pytest.mark.parametrize("lies", LIES.values(), ids=LIES)
@pytest.mark.parametrize("liar", ["n00001", "n99999"])
def test_a_lie_told_to_all_of_a_signed_swarm_is_believed_by_nobody(lies: list[dict[str, Any]], liar: str) -> None:
    """However long and often it is told: so there is nothing to be denied."""
    swarm = grown(8, seed=32)
    victim = swarm.nodes[3]
    me = victim.membership.me
    key = swarm.signing(liar)
    assert key is not None
    for _ in range(200):
        told = [replace(me, **lie) for lie in lies]
        tell_all(swarm, *told, *[claimed(lie, key) for lie in told])
        swarm.run(0.1)
        check(swarm, agreed_on(swarm, victim), [node.membership.members[me.id] for node in swarm.nodes.values()])
    check(swarm, victim.membership.me.incarnation == me.incarnation, "it was not even asked")
    check(swarm, not swarm.counts()["identity_conflict"], swarm.counts())


@pytest.mark.one_run_in(3)
def test_a_member_that_accuses_all_others_at_every_chance_buries_nobody() -> None:
    """Whoever is accused refutes it, as fast as it hears of it; what such a member costs is the work."""
    swarm = grown(12, seed=33)
    liar = swarm.nodes[1]
    key = swarm.signing(liar.id)
    assert key is not None
    proofs = Proofs(key, {})

    def accuse(state: State) -> None:
        lies = [
            proofs.accused(record, state, liar.id)
            for id, record in liar.membership.members.items()
            if id != liar.id and record.state == State.ALIVE
        ]
        for node in swarm.nodes.values():
            if node is not liar:
                node.datagram(Ack(0, liar.id, tuple(lies)), liar.address)

    for step in range(300):
        swarm.world.later(0.2 * step, partial(accuse, State.FAILED if step % 2 else State.SUSPECT))
    swarm.run(60)
    check(swarm, swarm.counts()["refutations"] > 100, "the test did not test anything")
    check(swarm, not swarm.verdicts, swarm.verdicts)
    check(swarm, swarm.run(30, swarm.agreed), "it is over when the lies are")
