"""Who may exchange with whom, and whose model does a newcomer start from? Decided from what members say."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgpack

from peerd.protocol import plan as plans
from peerd.training.model.over import PARTS
from peerd.transport.ids import Address, NodeId, shown
from peerd.transport.messages import AS_STARTED, Member, Plan, State

FIRST = (1 << 63) - 1
"""In place of steps: nobody goes before this node."""

FOUNDS = FIRST - 1
"""Nobody does who has not begun to."""

_NOTHING_LATER = [*plans.pack(AS_STARTED), False, False, False, False, b"", False, 0, 0, b""]


@dataclass(frozen=True, slots=True)
class NodeMeta:
    """What a member says of itself in its `meta`."""

    model: str = ""  # signature of its model, shortened; "" before a trainer has attached
    ready: bool = False  # it holds the swarm's model: it can give it, and exchange
    expects: bool = False  # a trainer is attached or on its way
    founder: bool = False  # it was started without a node to join
    plan: Plan = AS_STARTED  # how it combines models (plan.py)
    averaged: bool = False  # its model is the average with which that plan begins
    stands: bool = False  # its model is in that average: it waits for the others'
    stalled: bool = False  # its trainer has made no step for long
    issuer: bool = False  # it gives certificates to those who have a token, and renews them
    ended: bool = False  # its trainer's run: the last step is made, and it was not broken off
    made: int = 0  # parts of that run, where the trainer has said how long it is (training/model/over.py)
    resumes_at: int = 0  # before it is ready: the step of its newest checkpoint, or FOUNDS; FIRST once it goes first
    draws: bytes = b""  # by what its model began (peerd/trainer/inputs.py); b"": that is not known

    def pack(self) -> bytes:
        """At most 64 bytes while each node works as it was started, else at most 500."""
        flags = [self.averaged, self.stands, self.stalled, self.issuer]
        later = [*plans.pack(self.plan), *flags, self.plan.proof, self.ended, self.made, self.resumes_at, self.draws]
        if later == _NOTHING_LATER:
            later = []
        packed: bytes = msgpack.packb([self.model[:16], self.ready, self.expects, self.founder, *later])
        return packed

    @classmethod
    @functools.lru_cache(maxsize=4096)  # a whole table of members
    def unpack(cls, meta: bytes) -> NodeMeta:
        """Anything unreadable is a member that offers nothing."""
        try:
            said = msgpack.unpackb(meta, max_array_len=32, max_str_len=256)
        except (ValueError, TypeError, msgpack.UnpackException):
            return cls()
        if not isinstance(said, list) or len(said) < 4 or not isinstance(said[0], str):
            return cls()
        model, ready, expects, founder = said[:4]
        averaged, stands, stalled, issuer, ended = (said[at : at + 1] == [True] for at in (8, 9, 10, 11, 13))
        plan = plans.unpack(said[4:8], *said[12:13])
        known = model, ready is True, expects is True, founder is True
        made, resumes_at = (_number(said[at : at + 1], most) for at, most in ((14, PARTS), (15, FIRST)))
        draws = next((value for value in said[16:17] if type(value) is bytes), b"")
        return cls(*known, plan, averaged, stands, stalled, issuer, ended, made, resumes_at, draws)


@dataclass(frozen=True, slots=True)
class OwnModel:
    """Start from the model that the trainer brought."""


@dataclass(frozen=True, slots=True)
class FetchFrom:
    """Ask these members, in this order."""

    donors: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Wait until a member has a model, and say why."""

    reason: str


def partners(members: Mapping[NodeId, Member], me: NodeId, model: str, plan: Plan | None = None) -> frozenset[NodeId]:
    """Live members that hold the same model and can exchange: under `plan`, where one is given."""
    return frozenset(id for id, member in members.items() if id != me and is_partner(member, model, plan))


def partners_said(members: Mapping[NodeId, Member], me: NodeId, model: str) -> dict[NodeId, NodeMeta]:
    """What the partners under any plan say."""
    return {id: NodeMeta.unpack(members[id].meta) for id in partners(members, me, model)}


def is_partner(member: Member, model: str, plan: Plan | None = None) -> bool:
    """Whether this member lives, holds the same model and can exchange."""
    meta = NodeMeta.unpack(member.meta)
    holds = member.state <= State.SUSPECT and meta.ready and meta.model == model[:16]
    return holds and (plan is None or plans.works_with(plan, meta.plan))


def donors(members: Mapping[NodeId, Member], me: NodeId) -> list[NodeId]:
    """Other live members that have a model to give, whichever it is: asking one of another model says what differs."""
    others = ((id, member) for id, member in members.items() if id != me and member.state <= State.SUSPECT)
    return sorted(id for id, member in others if NodeMeta.unpack(member.meta).ready)


def whose_model(
    members: Mapping[NodeId, Member], me: NodeId, *, seeds: Sequence[Address], awaited: Collection[Address] = ()
) -> OwnModel | FetchFrom | WaitFor:
    """Where a newcomer's model comes from, which joins through `seeds`.

    A member that has one gives it. While none has, exactly one goes first of those that train: who has begun to go
    first; else who founds a swarm; else who has the checkpoint of the latest step; of equal ones who was started
    without a node to join, then the smallest id. All others wait for it, so a swarm never starts from two models. Nor
    does anyone go first while members may still answer whom it knew before a restart: `awaited`, for a bounded time.
    """
    live = {id: NodeMeta.unpack(m.meta) for id, m in members.items() if m.state <= State.SUSPECT}
    if givers := donors(members, me):
        start = sum(me.encode()) % len(givers)  # newcomers spread over the donors
        return FetchFrom(tuple(givers[start:] + givers[:start]))
    if len(live) == 1 and seeds:
        return WaitFor(f"no node of the swarm has answered yet; peerd doctor --join {shown(seeds[0])} shows why")
    candidates = [id for id, meta in live.items() if meta.expects or id == me]
    if not candidates:
        return WaitFor("this node is leaving")
    first = min(candidates, key=lambda id: (-live[id].resumes_at, not live[id].founder, id))
    if first != me:
        at = f" at step {step}" if 0 < (step := live[first].resumes_at) < FOUNDS else ""
        return WaitFor(f"no member has a model yet; {members[first].name} goes first{at}")
    if set(awaited) - {(members[id].host, members[id].port) for id in live}:
        return WaitFor("members known before the restart may still answer")
    return OwnModel()


def _number(said: list[object], most: int) -> int:
    """0 for what is none."""
    return next((value for value in said if type(value) is int and 0 <= value <= most), 0)
