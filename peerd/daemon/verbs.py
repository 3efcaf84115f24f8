"""What can the command line ask of a running node? One method for each verb of the control socket."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import trio

from peerd import __version__
from peerd.daemon.control import Answer, Verb
from peerd.daemon.node import Daemon
from peerd.daemon.trainer_session import TrainerStatus
from peerd.local.export import write_safetensors
from peerd.node.meta import NodeMeta, partners
from peerd.protocol.plan import parts
from peerd.settings import PLANNED, parse_address
from peerd.training.modes import check_given
from peerd.transport.errors import UserError
from peerd.transport.ids import shown
from peerd.transport.messages import Member, Plan, State


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
            "export": self._export,
            "mode": self._mode,
            "mode_set": self._mode_set,
            "average": self._average,
        }

    async def _members(self, _: dict[str, Any]) -> Answer:
        rows = [self._row(member) for member in self._node.members().values()]
        return {"members": sorted(rows, key=lambda row: (str(row["name"]), str(row["id"])))}

    def _row(self, member: Member) -> Answer:
        about = NodeMeta.unpack(member.meta)
        return {
            "name": member.name,
            "address": shown((member.host, member.port)),
            "state": member.state.name.lower(),
            "id": member.id,
            "epoch": member.epoch,
            "incarnation": member.incarnation,
            "carrier": self._carrier_of(member),
            "model": about.model,
            "ready": about.ready,
            "plan": about.plan.number,
            "mode": self._mode_under(about.plan),
            "stalled": about.stalled,
            "self": member.id == self._node.me.id,
        }

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
            "epoch": node.me.epoch,
            "address": shown((node.me.host, node.me.port)),
            "version": __version__,
            "pid": os.getpid(),
            "state_dir": str(node.settings.state_path),
            "settings": {key: value for key, value in asdict(node.settings).items() if key != "state_dir"},
        }

    async def _status(self, _: dict[str, Any]) -> Answer:
        node = self._node
        model, mode, members = node.model, node.model.mode, node.members()
        membership = node.view.membership
        states = [member.state for member in members.values()]
        names = {id: member.name for id, member in members.items()}
        counts = {
            **membership.counts,
            **(mode.counts if mode else {}),
            **node.peers.offences.counts,
            "snapshots_given": model.snapshots,
            "datagrams_malformed": node.datagrams.malformed,
            "datagrams_unsendable": node.datagrams.unsendable,
        }
        return {
            "name": node.me.name,
            "phase": model.facts.phase if model.facts else "no trainer",
            "uptime_s": trio.current_time() - node.began,
            "members": {state.name.lower(): states.count(state) for state in State},
            "awareness": membership.awareness,
            "mode": self._mode_under(model.plans.plan),
            "plan": model.plans.plan.number,
            "codec": model.plans.settings.mode_settings.codec,
            "trigger": model.plans.settings.trigger,
            "parameters": model.layout.parameters if model.layout else 0,
            "values": model.layout.total if model.layout else 0,
            "trainer": _trainer(model.facts) if model.facts else None,
            "trainer_restarts": max(0, model.attaches - 1),
            "links": [
                {**asdict(link), "peer": names.get(link.peer, link.peer)} for link in (mode.links() if mode else [])
            ],
            "carriers": sorted({carrier for member in members.values() if (carrier := self._carrier_of(member))}),
            "consensus_distance": mode.consensus_distance if mode else 0.0,
            "no_partner_s": node.no_partner_s(),
            "bytes_sent": node.peers.bytes_sent + node.datagrams.bytes_sent,
            "bytes_received": node.peers.bytes_received + node.datagrams.bytes_received,
            "exchanges": mode.counts["exchanges"] if mode else 0,
            "staleness": {str(steps): count for steps, count in sorted(getattr(mode, "staleness", {}).items())},
            "snapshots": (mode.counts["snapshots"] if mode else 0) + model.snapshots,
            "loop_latency_p99_s": node.latency.percentile(99),
            "loop_latency_p50_s": node.latency.percentile(50),
            "counts": dict(sorted(counts.items())),
        }

    async def _join(self, message: dict[str, Any]) -> Answer:
        address = parse_address(str(message["address"]), "join")
        if self._node.model.about.ready and len(self._node.members()) == 1:
            raise UserError(
                "this node already trains a model of its own, and two swarms' models do not mix; "
                f"stop it and start it with --join {shown(address)}"
            )
        await self._node.view.join(address)
        return {"joined": shown(address), "members": len(self._node.members())}

    async def _leave(self, _: dict[str, Any]) -> Answer:
        self._node.leaving.set()
        return {"leaving": self._node.me.name}

    async def _export(self, message: dict[str, Any]) -> Answer:
        values, step = await self._node.model.model_values()
        path = Path(str(message["path"]))
        size = await trio.to_thread.run_sync(write_safetensors, path, values, self._node.model.tensors)
        shared = sum(" frozen " not in tensor for tensor in self._node.model.tensors)
        return {"path": str(path), "bytes": size, "tensors": shared, "step": step}

    async def _mode(self, _: dict[str, Any]) -> Answer:
        plans, members = self._node.model.plans, self._node.members()
        return {
            "plan": plans.plan.number,
            "mode": self._mode_under(plans.plan),
            "settings": {key: getattr(plans.settings, key) for key in PLANNED},
            "author": plans.plan.author,
            "proposed_by": members[plans.plan.author].name if plans.plan.author in members else plans.plan.author,
            "members": [
                {
                    "name": member.name,
                    "plan": about.plan.number,
                    "mode": self._mode_under(about.plan),
                    "stands": about.stands or about.averaged or not about.ready,
                    "stalled": about.stalled,
                }
                for member, about in sorted(plans.said().items(), key=lambda said: said[0].name)
            ],
            "failed": sorted(member.name for member in members.values() if member.state == State.FAILED),
        }

    async def _mode_set(self, message: dict[str, Any]) -> Answer:
        check_given(*parts(text := str(message["text"])))  # here alone: what a member proposed is followed anyway
        plan = self._node.model.plans.propose(text)
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

    def _mode_under(self, plan: Plan) -> str:
        """What a plan does, in a word."""
        return "average" if plan.once else parts(plan.text)[0] or self._node.settings.mode


def _trainer(facts: TrainerStatus) -> dict[str, Any]:
    """What the status shows of it; times as seconds ago, for nobody else has the loop's clock."""
    rows = asdict(facts)
    del rows["released_at"], rows["waits"]
    stepped_at = rows.pop("last_step_at")
    return {**rows, "last_step_s_ago": None if stepped_at is None else trio.current_time() - stepped_at}
