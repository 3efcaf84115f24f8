"""How are models combined from now on? The plan of a swarm: a register that the last proposal wins.

Every member says in its `meta` under which plan it works, and takes over the greatest that anyone says: the highest
number, then author and the rest, so that of two proposals made at once the same one wins everywhere. Taking a maximum
is commutative, associative and idempotent, so the order of the news does not matter, and nobody ever goes back.

A mode's messages mean something under one plan only. Each member exchanges with those that say they work under the
same, and each connection says which plan its messages were meant under (it sends the Plan itself, before the first
message and after every change; none for number 0); those of another plan are dropped.

In a signed swarm each plan has its author's signature over all but `done`, which says how far it has come: over whether
it was proposed as `once` instead. The author's key travels with it, for who proposed it may be gone for good.

A plan that is `once` begins with one exact average of all models, those of members that have not heard of it yet too.
Each member whose model is the average says so, and goes on by itself, under the same number, when all have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median_low

import msgpack

from peerd.transport.errors import UserError
from peerd.transport.ids import NodeId
from peerd.transport.messages import AS_STARTED, NAME, PLAN_NUMBER_MAX, Plan
from peerd.transport.secure.signing import PROOF_BYTES, Signing, proof, proves

NUMBER_MAX = PLAN_NUMBER_MAX
AHEAD_MAX = 1 << 16  # changes of the mode that a node may have missed
AUTHOR_BYTES = 128
TEXT = re.compile(r"[ -~]*", re.ASCII)
TEXT_BYTES = 200  # with the rest of what a member says of itself under the 512 bytes of its meta
_PURPOSE = "plan of a swarm 1"


def newest(plans: Iterable[Plan]) -> Plan:
    """The one that a member who has heard of these works under."""
    return max(plans, default=AS_STARTED)


def reach(own: Plan, others: Sequence[Plan]) -> int:
    """The highest number that counts: beyond it a proposal could leave no number for those after it.

    A newcomer takes it from where half of the members are already, for it may come late.
    """
    return max(own.number, median_low([plan.number for plan in others] or [0])) + AHEAD_MAX


def proposal(known: Plan, author: NodeId, text: str, *, once: bool = False, signing: Signing | None = None) -> Plan:
    """A plan that beats `known`; `signing` is its author's."""
    plan = Plan(known.number + 1, author, not once, text)
    return plan if signing is None else replace(plan, proof=proof(signing, _PURPOSE, _proposed(plan, once)))


def is_signed(plan: Plan, signing: Signing) -> bool:
    """Whether its author has proposed this; two verifications at most. What every node was started with nobody did."""
    proposals = (True,) if plan.once else (False, True)
    return plan == AS_STARTED or any(
        proves(signing, plan.proof, plan.author, _PURPOSE, _proposed(plan, once)) for once in proposals
    )


def _proposed(plan: Plan, once: bool) -> bytes:
    packed: bytes = msgpack.packb((plan.number, plan.author, plan.text, once))
    return packed


def after(plan: Plan) -> Plan:
    """What follows the average: the same for all who took part, so that nobody need tell another.

    Nothing lies between the two, so whatever was proposed beside the average beats both or neither.
    """
    assert plan.once, "any other plan is for good"
    return replace(plan, done=True)


def works_with(mine: Plan, theirs: Plan) -> bool:
    """Whether a member under `mine` exchanges with one under `theirs`, or will once it has heard of mine."""
    return theirs == mine or (mine.once and theirs < mine)


def is_over(plan: Plan, others: Iterable[tuple[Plan, bool]]) -> bool:
    """Whether no other member needs us for the average any more, from each one's plan and whether it has averaged."""
    return all(theirs > plan or (theirs == plan and averaged) for theirs, averaged in others)


def text_of(mode: str, changes: Mapping[str, object]) -> str:
    """How a plan says it; a change of None is none. Raises UserError for what no plan can say."""
    if not mode:  # as an unset variable of a shell makes it; no text at all is the mode that was started
        raise UserError("mode: empty; name one that peerd start --mode takes")
    text = " ".join([mode, *(f"{key}={value}" for key, value in changes.items() if value is not None)])
    if not TEXT.fullmatch(text):
        raise UserError(f"mode: {ascii(text)[:80]} has characters beyond ASCII")
    return text


def parts(text: str) -> tuple[str, dict[str, str]]:
    """The mode and the changes."""
    mode, *changes = text.split() or [""]
    return mode, {key: value for key, _, value in (change.partition("=") for change in changes)}


def pack(plan: Plan) -> list[int | str | bool]:
    """For the meta, where its proof goes by itself."""
    return [plan.number, plan.author, plan.done, plan.text]


def unpack(said: list[object], proof: object = b"") -> Plan:
    """Whatever is no plan is what each node was started with, and whatever is no proof is none."""
    proof = proof if isinstance(proof, bytes) and len(proof) == PROOF_BYTES else b""
    match said:
        case [int(number), str(author), bool(done), str(text)] if type(number) is int and 0 < number <= NUMBER_MAX:
            named = not author or (NAME.fullmatch(author) is not None and len(author) <= AUTHOR_BYTES)
            fits = named and TEXT.fullmatch(text) is not None and len(text) <= TEXT_BYTES
            return Plan(number, author, done, text, proof) if fits else AS_STARTED
    return AS_STARTED
