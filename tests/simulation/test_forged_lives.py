"""A stranger tells a whole swarm of a later life of one member: how long is that believed?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_membership_swarm import check, grown

from peerd.membership.roster import INCARNATION_JUMP
from peerd.transport.messages import Ack, State

LIES: dict[str, list[dict[str, Any]]] = {
    "it left": [{"epoch": 6, "state": State.LEFT}],
    "it lives": [{"epoch": 6, "meta": b"another"}],
    "it moved": [{"epoch": 6, "host": "10.0.0.7"}],
    "its incarnation leapt": [
        {"incarnation": leaps * INCARNATION_JUMP, "state": State.LEFT} for leaps in range(1, 4)
    ],
}  # fmt: skip


@pytest.mark.parametrize("lies", LIES.values(), ids=LIES)
def test_a_lie_told_to_all_is_over_soon(lies: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = grown(8, seed=31)
    monkeypatch.setattr(swarm.checkers, "member_changed", lambda *_: None)  # it objects to every lie believed
    victim = swarm.nodes[3]
    me = victim.membership.me
    for node in swarm.nodes.values():
        for lie in lies:
            node.datagram(Ack(0, "n00001", (replace(me, **lie),)), ("203.0.113.9", 53))
    others = [node.membership for node in swarm.nodes.values() if node is not victim]
    check(swarm, any(other.members[me.id] != me for other in others), "the test did not test anything")
    healed = swarm.run(60, lambda: all(other.members[me.id] == victim.membership.me for other in others))
    check(swarm, healed, [other.members[me.id] for other in others])
    check(swarm, victim.membership.me.epoch == me.epoch)
    swarm.run(60)
    check(swarm, all(other.members[me.id] == victim.membership.me for other in others), "and stays so")
