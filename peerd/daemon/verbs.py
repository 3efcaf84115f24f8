"""What can the command line ask of a running node? One method for each verb of the control socket."""

from __future__ import annotations

import os
import random
import re
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import trio

from peerd import __version__
from peerd.daemon.control import Answer, Verb
from peerd.daemon.node import Daemon
from peerd.daemon.trainer_session import TrainerStatus
from peerd.local.export import write_safetensors
from peerd.local.node_key import ID_DIGITS
from peerd.membership.roster import name_of
from peerd.node.meta import NodeMeta, partners
from peerd.process.logs import LOGGER
from peerd.protocol.plan import parts
from peerd.security import wall_clock
from peerd.security.certificates import pin_of
from peerd.security.token import parse_life
from peerd.settings import parse_address
from peerd.training.mode_settings import PLANNED, WEIGHTS
from peerd.training.modes import LinkStatus, Mode, check_given, class_of, in_full, shown_settings
from peerd.transport.errors import UserError
from peerd.transport.ids import Address, NodeId, shown
from peerd.transport.messages import Member, Plan, State

OTHER_SEEDS = 2  # members' addresses in a token beside the issuer's own; each makes it 27 characters longer


class Verbs:
    """The questions to one node."""

    def __init__(self, node: Daemon) -> None:
        self._node = node

    def table(self) -> dict[str, Verb]:
        """Each under the name by which it is asked for."""
        return {
            "members": self._members,
            "status": self._status,
            "info": self._info,
            "join": self._join,
            "leave": self._leave,
            "forgive": self._forgive,
            "export": self._export,
            "exchange": self._exchange,
            "mode": self._mode,
            "mode_set": self._mode_set,
            "average": self._average,
            "last_checkpoint": self._last_checkpoint,
            "token": self._token,
            "revoke": self._revoke,
            "rotate": self._rotate,
        }

    async def _members(self, _: dict[str, Any]) -> Answer:
        refused, unreached = self._refused(), self._node.peers.unreached()
        rows = [
            {**self._row(member), "refused_s": refused.get(id), "unreached_s": unreached.get(id)}
            for id, member in self._who_came().items()
        ]
        return {"members": sorted(rows, key=lambda row: (str(row["name"]), str(row["id"])))}

    def _who_came(self) -> dict[NodeId, Member]:
        """The members, without who left before its script had the swarm's model, as one whose start was refused."""

        def came(member: Member) -> bool:
            meta = NodeMeta.unpack(member.meta)
            return self._state_of(member) != "left" or meta.ready or not meta.expects

        return {id: member for id, member in self._node.members().items() if came(member)}

    def _called(self, name: str) -> list[Member]:
        """Those of the name; who never came, whom nobody is shown, only where there is no other."""
        came, known = self._who_came().values(), self._node.members().values()
        return [one for one in came if one.name == name] or [one for one in known if one.name == name]

    def _row(self, member: Member) -> Answer:
        meta = NodeMeta.unpack(member.meta)
        return {
            "name": member.name,
            "address": shown((member.host, member.port)),
            "state": self._state_of(member),
            "id": member.id,
            "epoch": member.epoch,
            "incarnation": member.incarnation,
            "carrier": self._carrier_of(member),
            "model": meta.model,
            "ready": meta.ready,
            "expects": meta.expects,
            "ended": meta.ended,
            "plan": meta.plan.number,
            "mode": self._mode_under(meta.plan),
            "stalled": meta.stalled,
            "met": self._node.acquaintances.counts(member.id),
            "self": member.id == self._node.me.id,
        }

    def _state_of(self, member: Member) -> str:
        """A revoked one is out for ever, though it may have left as it heard of it, before the others did."""
        secrets = self._node.secrets
        is_out = member.state >= State.FAILED and secrets is not None and secrets.is_revoked(member.id)
        return "revoked" if is_out else member.state.name.lower()

    def _refused(self) -> dict[str, float]:
        """For how many seconds each member is refused: for broken rules, silence, or a model far from all others'."""
        node = self._node
        graylist = getattr(node.model.mode, "graylist", None)
        found = dict(graylist.refused(trio.current_time())) if graylist is not None else {}
        for id, member in node.members().items():
            if (seconds := node.peers.offences.refused_s(id, member.host)) > found.get(id, 0.0):
                found[id] = seconds
        return found

    def _carrier_of(self, member: Member) -> str:
        """What bulk travels over to a member; "" where there is no link, or only one that was not given up yet."""
        if member.state in (State.FAILED, State.LEFT):
            return ""
        return self._node.peers.carrier(member.id) or self._node.acceptor.carrier(member.id)

    async def _info(self, _: dict[str, Any]) -> Answer:
        node = self._node
        return {
            "name": node.me.name,
            "id": node.me.id,
            "fingerprint": node.key.fingerprint,
            **self._entry(),
            "epoch": node.me.epoch,
            "address": shown((node.me.host, node.me.port)),
            "bound": shown(node.bound),
            "version": __version__,
            "pid": os.getpid(),
            "state_dir": str(node.settings.state_path),
            "mode_in_force": self._mode_under(node.model.plans.plan),
            "settings": {
                key: value for key, value in asdict(node.settings).items() if key not in ("state_dir", "token")
            },
        }

    def _entry(self) -> Answer:
        """By what it is a member."""
        if (entry := self._node.entry) is None:
            return {"sealed": False}
        live = [member for member in self._node.members().values() if member.state <= State.SUSPECT]
        issuers = sorted(member.name for member in live if NodeMeta.unpack(member.meta).issuer)
        in_force = self._node.secrets.in_force if self._node.secrets is not None else []
        return {"sealed": True, **entry.summary(), "authorities": in_force, "issuers": issuers}

    async def _status(self, _: dict[str, Any]) -> Answer:
        node = self._node
        model, mode, members = node.model, node.model.mode, node.members()
        membership, links = node.view.membership, mode.links() if mode else []
        states = [self._state_of(member) for member in self._who_came().values()]
        names = {id: member.name for id, member in members.items()}
        left = {id for id, member in members.items() if member.state is State.LEFT}  # a round's members, until the next
        counts = {
            **membership.counts,
            **(mode.counts if mode else {}),
            **node.peers.offences.counts,
            **(node.reception.counts if node.reception else {}),
            **(node.secrets.counts if node.secrets else {}),
            "snapshots_given": model.snapshots,
            "datagrams_malformed": node.datagrams.malformed,
            "datagrams_unsendable": node.datagrams.unsendable,
        }
        return {
            "name": node.me.name,
            "phase": model.status.phase if model.status else "script awaited" if model.meta.expects else "no trainer",
            "uptime_s": trio.current_time() - node.began,
            "members": {state: states.count(state) for state in (*(state.name.lower() for state in State), "revoked")},
            "joining": [shown(seed) for seed in node.settings.seeds] if len(states) == 1 else [],
            "no_steps": sorted(
                member.name
                for member in members.values()
                if member.state == State.ALIVE and NodeMeta.unpack(member.meta).stalled
            ),
            "same_batches": sorted(names.get(id, id) for id in model.same_batches),
            "awareness": membership.awareness,
            "mode": self._mode_under(model.plans.plan),
            "plan": model.plans.plan.number,
            "codec": model.plans.settings.mode_settings.codec,
            "trigger": model.plans.settings.trigger,
            "parameters": model.layout.parameters if model.layout else 0,
            "values": model.layout.total if model.layout else 0,
            "trainer": _trainer(model.status) if model.status else None,
            "trainer_restarts": max(0, model.attaches - 1),
            "crash": node.crash(),
            "links": [
                {**asdict(link), "peer": names.get(link.peer, link.peer)} for link in links if link.peer not in left
            ],
            "carriers": sorted({carrier for member in members.values() if (carrier := self._carrier_of(member))}),
            "consensus_distance": _distance(mode, links) if mode else None,
            "refused": {names.get(id, id): seconds for id, seconds in self._refused().items()},
            "no_partner_s": node.no_partner_s(),
            "bytes_sent": node.peers.bytes_sent + node.datagrams.bytes_sent,
            "bytes_received": node.peers.bytes_received + node.datagrams.bytes_received,
            "address_gone": node.own_address.gone,
            "address_unreached": node.own_address.astray,
            "budget_bytes_s": node.budget.rate if node.budget else None,
            "budget_waited_s": node.budget.waited_s if node.budget else 0.0,
            "relay_lost_s": trio.current_time() - lost if node.guest and (lost := node.guest.lost_at) else None,
            "relayed_for": sorted(names.get(id, id) for id in node.lender.guests.values()),
            "relayed_bytes": node.lender.relayed_bytes,
            "exchanges": mode.counts["exchanges"] if mode else 0,
            "staleness": {str(steps): count for steps, count in sorted(getattr(mode, "staleness", {}).items())},
            "snapshots": (mode.counts["snapshots"] if mode else 0) + model.snapshots,
            "loop_latency_p99_s": node.latency.percentile(99),
            "loop_latency_p50_s": node.latency.percentile(50),
            "counts": dict(sorted(counts.items())),
        }

    async def _join(self, message: dict[str, Any]) -> Answer:
        address = parse_address(str(message["address"]), "join")
        if self._node.model.meta.ready and len(self._who_came()) == 1:
            raise UserError(
                "this node already trains a model of its own, and two swarms' models do not mix; "
                f"end it (peerd leave --name {self._node.me.name}) and start it with --join {shown(address)}"
            )
        await self._node.view.join(address)
        return {"joined": shown(address), "members": len(self._who_came())}

    async def _leave(self, _: dict[str, Any]) -> Answer:
        self._node.leaving.set()
        return {"leaving": self._node.me.name, "waits_for": self._node.ending}

    async def _forgive(self, message: dict[str, Any]) -> Answer:
        node, wanted = self._node, str(message["member"])
        found = self._called(wanted) or [one for id, one in node.members().items() if id == wanted]
        if len(found) != 1:
            how_many = "no member" if not found else f"{len(found)} members"
            raise UserError(f"{how_many} of the name or id {wanted[:80]!r}: see peerd members")
        id = found[0].id
        graylist = getattr(node.model.mode, "graylist", None)
        was_refused = id in self._refused()
        node.peers.offences.forgive(id)
        if graylist is not None:
            graylist.forgive(id)
        node.model.on_members()
        return {"forgiven": found[0].name, "id": id, "was_refused": was_refused}

    async def _exchange(self, _: dict[str, Any]) -> Answer:
        """A script asks before it attaches: its memory depends on it."""
        return self._node.model.exchange()

    async def _export(self, message: dict[str, Any]) -> Answer:
        values, step = await self._node.model.model_values()
        path = Path(str(message["path"]))
        size = await trio.to_thread.run_sync(write_safetensors, path, values, self._node.model.tensors)
        shared = sum(" frozen " not in tensor and not tensor.endswith(" state") for tensor in self._node.model.tensors)
        return {"path": str(path), "bytes": size, "tensors": shared, "step": step}

    async def _token(self, message: dict[str, Any]) -> Answer:
        entry, me = self._node.entry, self._node.me
        if entry is None:
            raise UserError(
                f"{me.name} runs with --insecure-plaintext: whoever reaches it is a member, without a token"
            )
        if entry.issuer is None:
            others = ", ".join(self._entry()["issuers"]) or "the first node of the swarm"
            raise UserError(f"{me.name} issues no tokens; run peerd token on {others}")
        if self._node.reception is not None and self._node.reception.by is None and not entry.issuer.has_ended:
            replaced = "was an issuer of an authority that was replaced since, by which nobody comes in any more"
            raise UserError(f"{me.name} {replaced}; run peerd token on the swarm's first node")
        uses, life_s, issues = int(message["uses"]), parse_life(str(message["expires"])), bool(message["issuer"])
        addresses = ((me.host, me.port), *self._other_seeds())
        make = partial(entry.issuer.token, addresses, uses, life_s, issues=issues)
        token = await trio.to_thread.run_sync(make)
        return {"token": token.pack(), "uses": uses, "expires": token.expires, "address": shown((me.host, me.port))}

    def _other_seeds(self) -> list[Address]:
        """Of a few members that do not issue: whoever asks them for a certificate is told so, and is not to blame."""
        node = self._node
        met = node.acquaintances.of(node.members()).values()
        live = [one for one in met if one.state == State.ALIVE and one.id != node.me.id]
        others = [(one.host, one.port) for one in live if not NodeMeta.unpack(one.meta).issuer]
        return random.sample(others, min(OTHER_SEEDS, len(others)))

    async def _revoke(self, message: dict[str, Any]) -> Answer:
        secrets, me = self._node.secrets, self._node.me
        if secrets is None:
            raise UserError(f"{me.name} runs with --insecure-plaintext: nobody needs a certificate, so none can be out")
        if secrets.issuer is None:
            others = ", ".join(self._entry()["issuers"]) or "the first node of the swarm"
            raise UserError(
                f"{me.name} issues no certificates, so its word puts nobody out; run peerd revoke on {others}"
            )
        node = self._named(str(message["node"]))
        name = member.name if (member := self._node.members().get(node)) else ""
        new = await secrets.revoke(node)
        return {"revoked": node, "name": name, "new": new, "key": secrets.counts["datagram_key_number"]}

    async def _rotate(self, message: dict[str, Any]) -> Answer:
        secrets, entry, me = self._node.secrets, self._node.entry, self._node.me
        if secrets is None or entry is None:
            raise UserError(f"{me.name} runs with --insecure-plaintext: it is of no authority that could be replaced")
        if entry.folder is None:
            raise UserError(
                f"{me.name} has no authority that it could replace; run peerd rotate on the swarm's first node"
            )
        until = wall_clock.now() + timedelta(seconds=parse_life(str(message["retire"]), "retire"))
        await secrets.replace_authority(entry.folder, until)
        return {"authority": pin_of(entry.trust.authorities[0]).hex(), "authorities": secrets.in_force}

    def _named(self, text: str) -> NodeId:
        """The id that is meant by a member's name, or by an id, which no member need have. Raises UserError."""
        if re.fullmatch(f"[0-9a-f]{{{ID_DIGITS}}}", text):
            return text
        found = [member.id for member in self._called(text)]
        if len(found) > 1:
            raise UserError(
                f"{len(found)} members are called {text!r}; say which by its id: {', '.join(sorted(found))}"
            )
        if not found:
            raise UserError(f"no member is called {text!r}; peerd members --format json has all names and ids")
        return found[0]

    async def _mode(self, _: dict[str, Any]) -> Answer:
        plans, members = self._node.model.plans, self._node.members()
        mode, in_force = plans.settings.mode, plans.settings.mode_settings
        kind = class_of(mode).exchanging(in_force.exchange)
        exchanged = ("exchange", "server_optimizer") if in_force.exchange != WEIGHTS else ()  # that stays as started
        return {
            "plan": plans.plan.number,
            "mode": self._mode_under(plans.plan),
            "settings": {
                **shown_settings(mode, in_force),
                **{name: getattr(in_force, name) for name in exchanged if name in kind.TAKES},
            },
            "settle_steps": kind.settle_steps(mode.partition(":")[2], in_force),
            "author": plans.plan.author,
            "proposed_by": name_of(plans.plan.author, members),
            "members": [
                {
                    "name": member.name,
                    "plan": meta.plan.number,
                    "author": meta.plan.author,
                    "mode": self._mode_under(meta.plan),
                    "stands": meta.stands or meta.averaged or not meta.ready,
                    "stalled": meta.stalled,
                }
                for member, meta in sorted(plans.said().items(), key=lambda said: said[0].name)
            ],
            **{
                state: sorted(member.name for member in members.values() if self._state_of(member) == state)
                for state in ("failed", "revoked")
            },
        }

    async def _mode_set(self, message: dict[str, Any]) -> Answer:
        mode, given = parts(text := str(message["text"]))
        # here alone: what a member proposed is followed anyway
        check_given(mode, given, self._node.settings.exchange, among=PLANNED)
        plan = self._node.model.plans.set_mode(text)
        return {"plan": plan.number, "author": plan.author}

    async def _average(self, _: dict[str, Any]) -> Answer:
        node = self._node
        began, sent, received = trio.current_time(), node.peers.bytes_sent, node.peers.bytes_received
        average = await node.model.plans.average_all()
        members = node.members()
        names = {id: members[id].name for id in [node.me.id, *average.members] if id in members}
        live = partners(members, node.me.id, node.model.signature)
        return {
            "members": sorted(names.values()),
            "not_in_it": sorted(members[id].name for id in live - names.keys()),
            "seconds": trio.current_time() - began,
            "bytes_sent": node.peers.bytes_sent - sent,
            "bytes_received": node.peers.bytes_received - received,
            "distance": average.distance,
            "plan": node.model.plans.plan.number,
            "mode": self._mode_under(node.model.plans.plan),
        }

    async def _last_checkpoint(self, message: dict[str, Any]) -> Answer:
        """Of a script that has let go of this node before it wrote it."""
        status, why = self._node.model.status, message.get("why")
        if status is not None and status.pid == message.get("pid"):
            status.checkpoint_failed = None if why is None else str(why)
            if why is not None:
                LOGGER.warning("the script's last checkpoint was not written, %s", why)
        return {}

    def _mode_under(self, plan: Plan) -> str:
        """What a plan does, in a word."""
        return "average" if plan.once else in_full(parts(plan.text)[0] or self._node.settings.mode)


def _distance(mode: Mode, links: list[LinkStatus]) -> float | None:
    """Of the models, where one was measured: until then a mode has 0, as where all hold one model."""
    distance = mode.consensus_distance
    return distance if distance != 0.0 or any(link.exchanges for link in links) else None


def _trainer(status: TrainerStatus) -> dict[str, Any]:
    """What the status shows of it; times as seconds ago, for nobody else has the loop's clock."""
    rows = asdict(status)
    del rows["released_at"], rows["waits"]
    now, began, stepped_at = trio.current_time(), rows.pop("began"), rows.pop("last_step_at")
    return {
        **rows,
        "began_s_ago": now - began if began else None,
        "last_step_s_ago": None if stepped_at is None else now - stepped_at,
    }
