"""Real daemons whose records and plans are signed: the life of a swarm is as it was, and forgeries are nothing."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

import pytest
import trio
from test_plans import steps, under
from test_thin_layer import check_that_they_agree
from thin import NamedSigning, Node, Swarm, simulate

from peerd.daemon.node import PROTOCOL
from peerd.membership.proofs import Proofs, claimed
from peerd.node.meta import NodeMeta
from peerd.protocol.plan import is_signed, proposal
from peerd.transport.connection import ConnectionLost
from peerd.transport.errors import PeerError
from peerd.transport.hello import Refused, greet
from peerd.transport.messages import Ack, Hello, Member, MemberTable, State

ALIVE = State.ALIVE
HERE = ("10.0.0.250", 7946)


def row(node: Node, of: Node) -> Member:
    return node.daemon.view.membership.members[of.name]


def test_a_signed_swarm_trains_buries_its_dead_and_follows_plans() -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.signed = True
        everyone = dict.fromkeys("abcd", ALIVE)
        await swarm.start("abcd", steps=240)
        await swarm.agree(**everyone)
        nodes = swarm.nodes
        assert all(len(row(nodes["a"], node).proof) == 96 for node in nodes.values())
        await nodes["c"].crash()
        await swarm.agree(**{**everyone, "c": State.FAILED})
        await nodes["c"].start(steps=240)
        await swarm.agree(**everyone)
        await steps(swarm, 10)
        await nodes["b"].ask("mode_set", text="allreduce every=2 overlap=blocking")
        await under(swarm, 1)
        signing = nodes["a"].signing
        assert signing is not None
        assert all(is_signed(node.plan, signing) for node in nodes.values())
        await steps(swarm, 4)
        await nodes["d"].leave()
        await swarm.agree(**{**everyone, "d": State.LEFT})
        check_that_they_agree(await swarm.finish())
        for node in nodes.values():
            if node.runs:
                membership = node.daemon.view.membership
                assert not membership.forgeries
                assert 0 < membership.verifications < 500
                assert not (await node.counts())["strikes"]

    simulate(1, scenario)


def test_what_others_forge_of_a_node_is_told_to_all_and_believed_by_none() -> None:
    """By a stranger who can reach every port, as in a sealed swarm nobody can; not even the node itself need answer."""

    async def scenario(swarm: Swarm) -> None:
        swarm.signed = True
        await swarm.start("abcd", steps=4000)
        await swarm.agree(**dict.fromkeys("abcd", ALIVE))
        await trio.sleep(5)
        nodes = swarm.nodes
        me = row(nodes["b"], nodes["b"])
        stranger = NamedSigning("x", nodes["a"].daemon.settings)
        plan = proposal(nodes["a"].plan, "x", "allreduce", signing=stranger)
        ready = replace(NodeMeta.unpack(me.meta), plan=plan).pack()
        lies = [
            replace(me, state=State.LEFT),
            replace(me, epoch=7, incarnation=0),
            replace(me, incarnation=me.incarnation + 1, host="10.0.0.251"),
            claimed(replace(me, incarnation=me.incarnation + 1, meta=ready), stranger),
            Proofs(stranger, {}).accused(me, State.FAILED, "x"),
            replace(Proofs(stranger, {}).accused(me, State.SUSPECT, "x"), accuser="a"),
        ]
        async with aclosing(await swarm.network.bind(HERE)) as datagrams:
            for node in nodes.values():
                for lie in lies:
                    await datagrams.send(node.address, Ack(0, "a", (lie,)))
        await trio.sleep(1)
        for node in nodes.values():
            assert row(node, nodes["b"]) == row(nodes["b"], nodes["b"]) == me, "not so much as a refutation"
            assert node.daemon.view.membership.counts["unknown_accusers"] == 1
            assert node.plan.number == 0

    simulate(2, scenario)


def test_whoever_sends_forged_records_over_streams_is_refused_before_long() -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.signed = True
        await swarm.start("ab", steps=4000)
        await swarm.agree(a=ALIVE, b=ALIVE)
        node, settings = swarm.nodes["a"], swarm.nodes["a"].daemon.settings
        me = row(node, swarm.nodes["b"])
        hello = Hello(PROTOCOL, settings.swarm, settings.run, "x", "x", 1, *HERE, settings.mode, "", ())
        ended = 0
        for number in range(8):
            lie = replace(me, epoch=me.epoch + 1 + number)
            connection = await swarm.network.carrier(swarm.nursery, HERE[0]).dial(node.address)
            try:
                await greet(connection, hello)
                await connection.send(MemberTable("x", (lie,)))
                with trio.fail_after(5):
                    await connection.receive()
            except (ConnectionLost, PeerError, Refused):
                ended += 1
            finally:
                await connection.aclose()
        assert ended == 8
        counts = await node.counts()
        assert counts["bad_signatures"] == counts["strikes"] == 3
        assert counts["peers_refused"] == 1
        assert row(node, swarm.nodes["b"]).epoch == me.epoch, "no lie of a later life is believed"

    simulate(3, scenario)


@pytest.mark.parametrize("first_signs", [True, False])
def test_a_node_that_does_not_sign_is_no_member_where_others_do(first_signs: bool) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.signed = first_signs
        await swarm.start("a", steps=4000)
        swarm.signed = not first_signs
        await swarm.start("b", steps=4000)
        await trio.sleep(30)
        signer, other = swarm.nodes["a" if first_signs else "b"], swarm.nodes["b" if first_signs else "a"]
        assert signer.sees() == {signer.name: ALIVE}
        assert signer.daemon.view.membership.counts["unsigned_records"] > 0
        assert other.name in other.sees()

    simulate(4, scenario)
