"""In a signed swarm: what can records that somebody else made change? And is what is true still believed?"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.local.node_key import NodeKey
from peerd.local.signing import NodeSigning
from peerd.membership import table_budget
from peerd.membership.core import LAN, Membership
from peerd.membership.dissemination import record_bytes
from peerd.membership.effects import MembershipEffect, SendDatagram
from peerd.membership.proofs import RECORD_PROOF_BYTES, VERIFICATION_ROWS, Proofs, claim, claimed
from peerd.membership.roster import address, order
from peerd.simulation.referee import Referee
from peerd.transport import wire
from peerd.transport.messages import Ack, Member, MemberTable, State
from peerd.transport.secure.signing import PROOF_BYTES, Signing, proof, proves

PROPERTY = settings(max_examples=200, deadline=None, derandomize=True)
REFEREE = Referee(7)
SOMEWHERE = ("10.0.0.200", 7000)
IDS = ["n0", "n1", "n2", "n3"]
OUTSIDER, INSIDER = "x9", "n3"


def signing(id: str) -> Signing:
    return REFEREE.signing(id)


def bare(id: str, incarnation: int = 0, epoch: int = 1, state: State = State.ALIVE, meta: bytes = b"") -> Member:
    return Member(id, f"node-{id}", "10.0.0.1", 7000 + int(id[1:]), epoch, incarnation, state, "", meta)


def alive(id: str, incarnation: int = 0, **fields: Any) -> Member:
    """As the member says it of itself."""
    return claimed(bare(id, incarnation, **fields), signing(id))


def accused(subject: Member, by: str, state: State = State.SUSPECT) -> Member:
    return Proofs(signing(by), {}).accused(subject, state, by)


def core(me: str = "n0", knows: list[str] | None = None) -> Membership:
    membership = Membership(bare(me), (), random.Random(7), 0.0, signing=signing(me))
    membership.on_timer(0.0)
    others = tuple(alive(id) for id in (IDS if knows is None else knows) if id != me)
    membership.on_table(MemberTable("n1", others), 0.0)
    return membership


def hear(membership: Membership, *news: Member, now: float = 0.0) -> list[MembershipEffect]:
    return membership.on_datagram(Ack(0, "n1", news), SOMEWHERE, now)


def wake_until(membership: Membership, end: float) -> None:
    while membership.deadline <= end:
        membership.on_timer(membership.deadline)


# What is true is believed -----------------------------------------------------------------------------------------


def test_what_a_member_says_of_itself_is_believed_and_passed_on_as_it_is() -> None:
    membership = core()
    hear(membership, said := alive("n1", 3, meta=b"gpu"))
    assert membership.members["n1"] == said
    assert said in membership.table().members
    assert Membership(bare("n5"), (), random.Random(1), 0.0, signing=signing("n5")).me == alive("n5")


claims = st.builds(
    alive, st.sampled_from(["n1", "n2", "n5"]), st.integers(0, 3), epoch=st.integers(0, 2),
    state=st.sampled_from([State.ALIVE, State.LEFT]), meta=st.sampled_from([b"", b"x"]),
)  # fmt: skip


@PROPERTY
@given(said=st.lists(claims, max_size=12), data=st.data())
def test_what_members_say_of_themselves_gives_one_table_in_any_order(said: list[Member], data: st.DataObject) -> None:
    first, second = core(), core()
    for record in said:
        hear(first, record)
    for record in data.draw(st.permutations(said + said[:3])):
        hear(second, record)
    assert dict(first.members) == dict(second.members)


def test_every_change_of_our_own_record_is_signed() -> None:
    membership, other = core("n0"), core("n1")
    membership.set_meta(b"gpu", 0.0)
    hear(other, membership.me)
    assert other.members["n0"] == membership.me == alive("n0", 1, meta=b"gpu")
    hear(membership, accused(membership.me, "n2"))
    hear(other, membership.me)
    assert other.members["n0"] == membership.me == alive("n0", 2, meta=b"gpu")
    membership.leave(0.0)
    hear(other, membership.me)
    assert other.members["n0"] == membership.me
    assert membership.me.state == State.LEFT


def test_an_accusation_by_a_member_is_believed_refuted_and_counted_once_each() -> None:
    membership = core()
    hear(membership, first := accused(alive("n1"), "n2"))
    assert membership.members["n1"] == first
    before = membership.verifications
    hear(membership, accused(alive("n1"), "n3"))
    assert membership._suspicions._suspects["n1"].accusers == {"n2", "n3"}
    made = membership.verifications - before
    hear(membership, accused(alive("n1"), "n3"), accused(alive("n1"), "n2"))
    assert membership.verifications - before == made == 1, "the claim is known; and nothing is verified twice"
    hear(membership, alive("n1", 1))
    assert membership.members["n1"] == alive("n1", 1)


def test_our_own_suspicions_and_verdicts_convince_others() -> None:
    membership, other = core("n0"), core("n2")
    for now in (0.0, 60.0):
        wake_until(membership, now)
        for id in ("n1", "n3"):
            hear(other, membership.members[id], now=now)
            assert other.members[id].accuser in (("n0",) if now else ("",)), other.counts
    assert membership.members["n1"].state == State.FAILED
    assert other.members["n1"].state == State.SUSPECT, "it judges for itself"


def test_a_verdict_counts_where_the_suspect_has_had_its_time() -> None:
    membership = core()
    dead = alive("n1")
    hear(membership, accused(dead, "n2", State.FAILED))
    assert membership.members["n1"].state == State.SUSPECT
    soon = LAN.suspicion_min_s(4)
    wake_until(membership, soon)
    hear(membership, accused(dead, "n3", State.FAILED), now=soon - 0.1)
    assert membership.members["n1"].state == State.SUSPECT
    hear(membership, replace(accused(dead, "n3"), state=State.FAILED), now=soon)
    assert membership.members["n1"].state == State.SUSPECT, "who only suspects it gives no verdict"
    hear(membership, accused(dead, "n3", State.FAILED), now=soon)
    assert membership.members["n1"] == accused(dead, "n3", State.FAILED)


def test_of_one_never_met_a_verdict_is_believed_and_an_accusation_by_nobody_is_worth_its_claim() -> None:
    membership = core(knows=["n2"])
    hear(membership, accused(alive("n1"), "n2", State.FAILED))
    assert membership.members["n1"].state == State.FAILED
    hear(membership, accused(alive("n3", 4), "n7"))
    assert membership.members["n3"] == alive("n3", 4)
    hear(membership, accused(alive("n4"), "n7", State.FAILED))
    assert "n4" not in membership.members
    assert membership.counts["unknown_accusers"] == 2


def test_whoever_is_accused_comes_after_the_accusers_in_a_table() -> None:
    membership = core()
    hear(membership, accused(alive("n1"), "n3"), accused(alive("n2"), "n1"))
    newcomer = Membership(bare("n9"), (), random.Random(1), 0.0, signing=signing("n9"))
    newcomer.on_table(membership.table(), 0.0)
    assert newcomer.members["n1"].state == State.SUSPECT
    assert newcomer.members["n2"].state in (State.SUSPECT, State.ALIVE), "its accuser is accused, too"
    assert set(newcomer.members) == {*IDS, "n9"}


def test_the_dead_of_the_other_half_are_asked_after_a_partition() -> None:
    """Who says that a healthy member has failed is itself held dead here."""
    membership = core(knows=["n1", "n3"])
    hear(membership, accused(alive("n2"), "n1", State.FAILED))
    assert membership.members["n2"].state == State.FAILED
    membership.on_table(MemberTable("n2", (accused(alive("n3"), "n2", State.FAILED),)), 0.0)
    assert membership.members["n3"].state == State.SUSPECT, "so it is told, and refutes"


# What is not true -------------------------------------------------------------------------------------------------


def test_nobody_is_brought_back_to_an_earlier_life_but_by_its_own_word() -> None:
    membership = core()
    hear(membership, later := alive("n1", epoch=9, state=State.LEFT))
    where, earlier = address(later), alive("n1", 5)
    for lie in (replace(earlier, incarnation=6), replace(earlier, proof=b""), replace(earlier, meta=b"x")):
        membership.on_table(MemberTable("n1", (lie,)), 0.0, where)
        assert membership.members["n1"] == later
    membership.on_table(MemberTable("n1", (earlier,)), 0.0, where)
    assert membership.members["n1"] == earlier


states = st.sampled_from(State)
incarnations = st.integers(0, 3)
metas = st.sampled_from([b"", b"x"])
noise = st.binary(max_size=RECORD_PROOF_BYTES)


@st.composite
def forgeries(draw: st.DrawFn, by: str) -> Member:
    """Any well-formed record that somebody can make who has this node's key, and has heard all that was ever said."""
    id = draw(st.sampled_from([*IDS, "n4", "n5"]))
    state = draw(states)
    said = alive(id, draw(st.integers(0, 1)), epoch=draw(st.integers(0, 1)))  # by the member itself, once
    record = draw(
        st.sampled_from([
            said,
            replace(said, epoch=draw(st.integers(0, 3)), incarnation=draw(incarnations)),
            replace(said, meta=draw(metas), host=draw(st.sampled_from(["10.0.0.1", "10.0.0.9"]))),
            claimed(bare(id, draw(incarnations), draw(st.integers(0, 3)), draw(states)), signing(by)),
        ])
    )  # fmt: skip
    accuser = draw(st.sampled_from(["", *IDS, by, "n5"]))
    match draw(st.sampled_from(["as it is", "state", "own", "another's name", "noise", "none"])):
        case "state":
            record = replace(record, state=state, accuser=accuser)
        case "own":
            record = accused(record, by, state)
        case "another's name":
            record = replace(accused(record, by, state), accuser=accuser)
        case "noise":
            record = replace(record, state=state, accuser=accuser, proof=draw(noise))
        case "none":
            record = replace(record, state=state, accuser=accuser, proof=b"")
    return record


def tell(membership: Membership, how: str, record: Member, now: float = 0.0) -> None:
    if how == "datagram":
        hear(membership, record, now=now)
    else:
        # dialled where its member lives only that member answers: a sealed connection proves who it is
        membership.on_table(MemberTable(record.id if how == "own table" else "n3", (record,)), now, SOMEWHERE)


def honest_words() -> set[Member]:
    """All that was ever said of themselves by those whose words `forgeries` replays."""
    return {alive(id, inc, epoch=ep) for id in [*IDS, "n4", "n5"] for inc in (0, 1) for ep in (0, 1)}


ways = st.sampled_from(["datagram", "table", "own table"])


@PROPERTY
@given(lies=st.lists(st.tuples(ways, forgeries(OUTSIDER)), max_size=10))
def test_an_outsider_changes_nothing_but_by_what_members_have_said(lies: list[tuple[str, Member]]) -> None:
    membership = core()
    for how, lie in lies:
        tell(membership, how, lie)
    for id, record in membership.members.items():
        assert id in (*IDS, "n4", "n5", OUTSIDER)
        assert record in honest_words() | {membership.me}, "nobody is accused, moved, ended or made"
    assert membership.me.incarnation <= 2, "it heard its own words of another life, at most"


@PROPERTY
@given(lies=st.lists(st.tuples(ways, forgeries(INSIDER)), max_size=10))
def test_an_insider_can_suspect_others_and_no_more(lies: list[tuple[str, Member]]) -> None:
    membership, others = core(), {id: core(id) for id in ("n1", "n2")}
    for how, lie in lies:
        tell(membership, how, lie)
    for id in ("n1", "n2"):
        record = membership.members[id]
        assert claim(record) in honest_words()
        if record.state != State.ALIVE:
            assert (record.state, record.accuser) == (State.SUSPECT, INSIDER)
        others[id].set_meta(b"ready", 0.0)
        others[id].set_meta(b"working", 0.0)  # it is ahead of the words that were replayed
        accusation = Proofs(signing(INSIDER), {}).accused(others[id].me, State.SUSPECT, INSIDER)
        hear(membership, accusation)
        assert membership.members[id].state == State.SUSPECT
        hear(others[id], membership.members[id])
        hear(membership, others[id].me)
        assert membership.members[id] == others[id].me, "which its subject refutes"
        assert others[id].me.state == State.ALIVE


@PROPERTY
@given(records=st.lists(st.tuples(ways, forgeries(INSIDER)), max_size=10))
def test_what_is_in_the_table_is_true_to_whoever_hears_it_from_there(records: list[tuple[str, Member]]) -> None:
    """Else honest members would be blamed for passing it on."""
    membership, other = core(), core("n2", knows=[])
    for how, record in records:
        tell(membership, how, record)
    for part in (membership.table().members, membership.table().members):
        other.on_table(MemberTable("n0", part), 0.0)
    assert not other.counts["bad_signatures"]
    assert not other.counts["unsigned_records"]
    for id, record in membership.members.items():
        assert id in other.members or record.state == State.FAILED


@PROPERTY
@given(records=st.lists(forgeries(INSIDER), max_size=10))
def test_no_key_decreases(records: list[Member]) -> None:
    membership = core()
    keys: dict[str, Any] = {}
    for record in records:
        hear(membership, record)
        for id, known in membership.members.items():
            assert order(known)[:3] >= keys.get(id, order(known)[:3])
            keys[id] = order(known)[:3]


def test_a_proof_is_for_one_swarm_run_purpose_message_and_node() -> None:
    key, other = NodeKey.generate(), NodeKey.generate()
    here = NodeSigning(key, "swarm", "run")
    shown = proof(here, "purpose", b"message")
    assert proves(here, shown, key.id, "purpose", b"message")
    assert proves(NodeSigning(other, "swarm", "run"), shown, key.id, "purpose", b"message"), "to whoever hears it"
    assert not proves(here, shown, other.id, "purpose", b"message")
    assert not proves(here, shown, key.id, "purpose", b"massage")
    assert not proves(here, shown, key.id, "another", b"message")
    for swarm, run in (("swarm", ""), ("", "run"), ("swarmrun", ""), ("run", "swarm")):
        assert not proves(NodeSigning(key, swarm, run), shown, key.id, "purpose", b"message")
    for at in range(0, PROOF_BYTES, 7):
        spoilt = shown[:at] + bytes([shown[at] ^ 1]) + shown[at + 1 :]
        assert not proves(here, spoilt, key.id, "purpose", b"message")
    for length in (0, 1, 32, 95, 97):
        assert not proves(here, (shown + b"x")[:length], key.id, "purpose", b"message")
    assert not here.verify(bytes(31), bytes(64), "purpose", b"message")
    assert not here.verify(bytes(32), bytes(64), "purpose", b"message")


def test_real_keys_sign_records() -> None:
    keys = [NodeSigning(NodeKey.generate(), "s", "r") for _ in range(3)]
    ids = [each.id_of(each.key) for each in keys]
    first, second, third = (
        Membership(replace(bare(f"n{at}"), id=ids[at]), (), random.Random(at), 0.0, signing=keys[at]) for at in range(3)
    )
    first.on_table(second.table(), 0.0)
    first.on_table(third.table(), 0.0)
    assert set(first.members) == set(ids)
    second.on_table(first.table(), 0.0)
    accusation = Proofs(keys[1], {}).accused(third.me, State.SUSPECT, ids[1])
    hear(first, accusation)
    assert first.members[ids[2]] == accusation
    hear(first, replace(third.me, incarnation=5), replace(third.me, state=State.LEFT))
    assert first.members[ids[2]] == accusation
    assert first.counts["bad_signatures"] == 2
    assert record_bytes(accusation) <= 300


# What it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [INSIDER, OUTSIDER])
def test_what_is_verified_for_a_source_of_datagrams_is_bounded(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_budget, "BURST_ROWS", 800)
    membership = core()
    before = membership.verifications
    for number in range(800):
        record = alive(INSIDER, number + 1) if by == INSIDER else replace(alive("n1"), incarnation=number + 1)
        hear(membership, record)
    assert membership.verifications - before <= 800 / VERIFICATION_ROWS + 1
    assert membership.counts["unverified"] > 400
    other = ("10.0.0.201", 7000)
    membership.on_datagram(Ack(0, "n1", (alive("n2", 5),)), other, 0.0)
    assert membership.members["n2"] == alive("n2", 5), "others are heard"
    hear(membership, alive("n1", 5), now=60.0)
    assert membership.members["n1"] == alive("n1", 5), "and it is again after a while"


def test_what_does_not_win_is_not_verified() -> None:
    membership = core()
    before = membership.verifications
    hear(membership, *[replace(alive(id), proof=b"x" * PROOF_BYTES) for id in IDS])
    membership.on_table(MemberTable("n1", tuple(alive(id) for id in IDS)), 0.0)
    hear(membership, replace(accused(alive("n1"), "n2", State.FAILED), epoch=0))
    assert membership.verifications == before


def test_the_longest_signed_record_fits_into_a_datagram() -> None:
    longest = replace(
        accused(alive("n1", (1 << 53) - 3, meta=bytes(512)), "n2"), id="i" * 32, accuser="a" * 32, name="n" * 128,
        host="f" * 61,
    )  # fmt: skip
    membership = core()
    space = 1400 - 72 - 2 * 32
    assert record_bytes(longest) <= space
    membership._news.add(longest)
    [effect] = [e for e in membership._gossip(0.0) if isinstance(e, SendDatagram) and longest in e.message.news][:1]  # type: ignore[attr-defined]
    assert len(wire.encode_datagram(effect.message)) <= 1400 - 72
