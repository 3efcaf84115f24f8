"""One node, assembled: membership and model side around one transport, the control socket, and the script's supervisor.

`run` is the whole life of a daemon, from taking its identity to the exit code.
"""

from __future__ import annotations

import os
import random
import shlex
import signal
import socket
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import trio

from peerd import __version__, identity, known_members
from peerd.allocator import keep_freed_chunks
from peerd.carrier import fabrics_for
from peerd.control import serve
from peerd.effects import Address, NodeId, PeerError, UserError
from peerd.export import write_safetensors
from peerd.local_socket import socket_path
from peerd.logs import LOGGER, configure
from peerd.membership import LAN, WAN, Membership
from peerd.messages import AS_STARTED, Hello, Member, MemberTable, Plan, Refuse, State, Welcome
from peerd.metrics import LoopLatency
from peerd.model_side import ModelSide
from peerd.peers import Peers
from peerd.plan import parts
from peerd.roles import About, partners
from peerd.settings import PLANNED, Settings, parse_address, unknown_variables
from peerd.supervisor import Supervisor
from peerd.swarm_view import SwarmView
from peerd.training import delta
from peerd.transport.hello import Refused, answer, first_difference
from peerd.transport.link import Datagrams, Link, LinkLost, Transport, shown
from peerd.transport.tcp import TcpTransport, bound_socket
from peerd.transport.udp import UdpDatagrams, bind_udp

PROTOCOL = 1
TENSORS_BYTES_MAX = 40 << 10  # of tensor names in a HELLO; the rest is covered by the hash
LEAVE_SPREAD_S = 3.0  # a few gossip rounds; whoever misses the word hears it from others
ANOTHER_SWARM = ("protocol", "swarm", "run")  # where a refusal names one of these, none of ours listens
SCRIPT_ENDS_S = 5.0  # for a script that was told to end: torchrun looks after its processes now and then
SCRIPT_LEAST_S = 0.5  # for one that does not know of us
LOOPBACK = ("127.", "::1", "localhost")


class Daemon:
    """The running node. `run` makes one."""

    def __init__(
        self,
        settings: Settings,
        me: Member,
        bound: Address,
        nursery: trio.Nursery,
        transport: Transport,
        datagrams: Datagrams,
        kept: tuple[Address, ...] = (),
    ) -> None:
        """Wire the parts together; `start` starts them, listening on `bound`.

        `me` has what this node says of itself, `kept` the members that it knew before a restart.
        """
        rng = random.Random(f"{me.id}/{me.epoch}")
        self.settings = settings
        self.latency = LoopLatency()
        self.leaving = trio.Event()
        self._me = me
        self._bound = bound
        self._kept = kept
        self._nursery = nursery
        self._datagrams = datagrams
        self._transport = transport
        self._accepted: dict[Link, NodeId] = {}
        self._began = trio.current_time()
        self.peers = Peers(
            self._transport,
            self._hello,
            self._address_of,
            reconnected=lambda peer: self.model.on_reconnected(peer),
            refused=lambda refusal: self.model.on_refused(refusal, newcomer=self.model.about.expects),
        )
        timing = LAN if settings.network == "lan" else WAN
        kept_until = self._began + timing.silence_s(len(kept))
        self.model = ModelSide(me.id, settings, self.peers, self._members, self._say_about, rng, kept, kept_until)
        self.model.about = About.unpack(me.meta)
        self.model.on_layout = self._raise_payload_limits
        membership = Membership(me, [*settings.seeds, *kept], rng, self._began, timing)
        self.view = SwarmView(
            membership,
            datagrams,
            self._transport,
            self.peers,
            self._hello,
            changed=self._on_members,
            refused=self._on_refused,
        )

    async def start(self) -> Address:
        """Start every task; returns the address that peers reach."""
        await self._nursery.start(self.peers.run)
        listening: Address = await self._nursery.start(self._transport.listen, self._bound, self._accept)
        self._nursery.start_soon(self.model.run)
        self._nursery.start_soon(self.view.run)
        self._nursery.start_soon(self.latency.run)
        return listening

    # ---------------------------------------------------------------- peers

    async def _accept(self, link: Link) -> None:
        self.peers.count(link)
        try:
            hello = await answer(link, self._check, Welcome(self._me.id, self._me.name, self._me.epoch))
            self._accepted[link] = hello.node
            self._raise_payload_limits()
            plan = AS_STARTED
            while True:
                message = await link.receive()
                if isinstance(message, MemberTable):
                    await self.view.answer(link, message)
                elif isinstance(message, Plan):
                    plan = message
                else:
                    await self.model.on_message(hello.node, message, plan)
        except Refused as refusal:
            LOGGER.warning("%s", refusal)
        except PeerError as error:
            LOGGER.warning("dropped %s", error if link.remote in str(error) else f"{link.remote}: {error}")
        except LinkLost:
            pass
        finally:
            self._accepted.pop(link, None)
            await self.peers.close(link)

    def _check(self, theirs: Hello) -> Refuse | None:
        if theirs.node == self._me.id and theirs.epoch != self._me.epoch:
            return Refuse("node", f"{theirs.node} is this node's own identity", theirs.node)
        return first_difference(self._hello(), theirs)

    def _hello(self) -> Hello:
        settings, me = self.settings, self._me
        tensors: list[str] = []
        room = TENSORS_BYTES_MAX
        for tensor in self.model.tensors:
            room -= len(tensor.encode())
            if room < 0 or len(tensor.encode()) > 256:
                break
            tensors.append(tensor)
        return Hello(
            PROTOCOL, settings.swarm, settings.run, me.id, me.name, me.epoch, me.host, me.port, settings.mode,
            self.model.signature, tuple(tensors[:1000]),
        )  # fmt: skip

    def _raise_payload_limits(self) -> None:
        if self.model.layout is not None:
            for link in self._accepted:
                link.payload_limit = delta.payload_limit(self.model.layout)

    def _address_of(self, peer: NodeId) -> Address | None:
        member = self._members().get(peer)
        return (member.host, member.port) if member is not None and member.state <= State.SUSPECT else None

    # ---------------------------------------------------------------- membership

    def _members(self) -> dict[NodeId, Member]:
        return dict(self.view.membership.members)

    def _on_members(self) -> None:
        for peer, member in self._members().items():
            if member.state > State.SUSPECT:
                self.peers.forget(peer)
        self.model.on_members()
        if self.view.membership.counts["identity_conflict"]:
            self.model.fatal = (
                "another node runs with this node's identity (a copied or restored state folder?), and is newer"
            )
            self.model.failed.set()

    def _on_refused(self, where: Address, refusal: Refused) -> None:
        if refusal.field in ANOTHER_SWARM and where in self._kept and where not in self.settings.seeds:
            LOGGER.warning("%s; it is no member any more, and is not asked again", refusal)
            self.view.membership.drop_seed(where)
        else:
            self.model.on_refused(refusal, newcomer=len(self._members()) == 1)

    async def _say_about(self, about: About) -> None:
        await self.view.perform(self.view.membership.set_meta(about.pack(), trio.current_time()))

    async def leave(self) -> None:
        """Hand over what was not yet sent, say goodbye, wait until the word is out."""
        await self.model.hand_over()
        await self.view.perform(self.view.membership.leave(trio.current_time()))
        with trio.move_on_after(LEAVE_SPREAD_S):
            while not self.view.membership.left_spread:
                await trio.sleep(0.02)

    # ---------------------------------------------------------------- verbs of the control socket

    def verbs(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        """What `peerd VERB` can ask."""
        return {
            "members": self._verb_members,
            "status": self._verb_status,
            "info": self._verb_info,
            "join": self._verb_join,
            "leave": self._verb_leave,
            "export": self._verb_export,
            "mode": self._verb_mode,
            "mode_set": self._verb_mode_set,
            "average": self._verb_average,
        }

    async def _verb_members(self, _: dict[str, Any]) -> dict[str, Any]:
        rows = [self._row(member) for member in self._members().values()]
        return {"members": sorted(rows, key=lambda row: (str(row["name"]), str(row["id"])))}

    def _row(self, member: Member) -> dict[str, Any]:
        about = About.unpack(member.meta)
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
            "self": member.id == self._me.id,
        }

    def _carrier_of(self, member: Member) -> str:
        """What bulk travels over to a member; "" where there is no link, or only one that was not given up yet."""
        if member.state in (State.FAILED, State.LEFT):
            return ""
        accepted = [link.carrier for link, node in self._accepted.items() if node == member.id]
        return self.peers.carrier(member.id) or (accepted[-1] if accepted else "")

    async def _verb_info(self, _: dict[str, Any]) -> dict[str, Any]:
        return {
            "name": self._me.name,
            "id": self._me.id,
            "epoch": self._me.epoch,
            "address": shown((self._me.host, self._me.port)),
            "version": __version__,
            "pid": os.getpid(),
            "state_dir": str(self.settings.state_path),
            "settings": {key: value for key, value in asdict(self.settings).items() if key != "state_dir"},
        }

    async def _verb_status(self, _: dict[str, Any]) -> dict[str, Any]:
        model, membership = self.model, self.view.membership
        states = [member.state for member in self._members().values()]
        mode = model.mode
        names = {id: member.name for id, member in self._members().items()}
        counts = {
            **membership.counts,
            **(mode.counts if mode else {}),
            "snapshots_given": model.snapshots,
            "datagrams_malformed": self._datagrams.malformed,
            "datagrams_unsendable": self._datagrams.unsendable,
        }
        return {
            "name": self._me.name,
            "phase": model.facts.phase if model.facts else "no trainer",
            "uptime_s": trio.current_time() - self._began,
            "members": {state.name.lower(): states.count(state) for state in State},
            "awareness": membership.awareness,
            "mode": self._mode_under(model.plans.plan),
            "plan": model.plans.plan.number,
            "codec": model.plans.settings.mode_settings.codec,
            "trigger": model.plans.settings.trigger,
            "parameters": model.layout.parameters if model.layout else 0,
            "values": model.layout.total if model.layout else 0,
            "trainer": asdict(model.facts) if model.facts else None,
            "trainer_restarts": max(0, model.attaches - 1),
            "links": [
                {**asdict(link), "peer": names.get(link.peer, link.peer)} for link in (mode.links() if mode else [])
            ],
            "carriers": sorted({carrier for each in self._members().values() if (carrier := self._carrier_of(each))}),
            "consensus_distance": mode.consensus_distance if mode else 0.0,
            "bytes_sent": self.peers.bytes_sent + self._datagrams.bytes_sent,
            "bytes_received": self.peers.bytes_received + self._datagrams.bytes_received,
            "exchanges": mode.counts["exchanges"] if mode else 0,
            "staleness": {str(steps): count for steps, count in sorted(getattr(mode, "staleness", {}).items())},
            "snapshots": (mode.counts["snapshots"] if mode else 0) + model.snapshots,
            "loop_latency_p99_s": self.latency.percentile(99),
            "loop_latency_p50_s": self.latency.percentile(50),
            "counts": dict(sorted(counts.items())),
        }

    async def _verb_join(self, message: dict[str, Any]) -> dict[str, Any]:
        address = parse_address(str(message["address"]), "join")
        if self.model.about.ready and len(self._members()) == 1:
            raise UserError(
                "this node already trains a model of its own, and two swarms' models do not mix; "
                f"stop it and start it with --join {shown(address)}"
            )
        await self.view.join(address)
        return {"joined": shown(address), "members": len(self._members())}

    async def _verb_leave(self, _: dict[str, Any]) -> dict[str, Any]:
        self.leaving.set()
        return {"leaving": self._me.name}

    async def _verb_export(self, message: dict[str, Any]) -> dict[str, Any]:
        values = await self.model.model_values()
        path = Path(str(message["path"]))
        size = await trio.to_thread.run_sync(write_safetensors, path, values, self.model.tensors)
        step = self.model.facts.step if self.model.facts else 0
        return {"path": str(path), "bytes": size, "tensors": len(self.model.tensors), "step": step}

    async def _verb_mode(self, _: dict[str, Any]) -> dict[str, Any]:
        plans, members = self.model.plans, self._members()
        return {
            "plan": plans.plan.number,
            "mode": self._mode_under(plans.plan),
            "settings": {key: getattr(plans.settings, key) for key in PLANNED},
            "author": plans.plan.author,
            "proposed_by": members[plans.plan.author].name if plans.plan.author in members else plans.plan.author,
            "members": [
                {"name": member.name, "plan": plan.number, "mode": self._mode_under(plan)}
                for member, plan in sorted(plans.said().items(), key=lambda said: said[0].name)
            ],
        }

    async def _verb_mode_set(self, message: dict[str, Any]) -> dict[str, Any]:
        plan = self.model.plans.propose(str(message["text"]))
        return {"plan": plan.number, "author": plan.author}

    async def _verb_average(self, _: dict[str, Any]) -> dict[str, Any]:
        began, sent, received = trio.current_time(), self.peers.bytes_sent, self.peers.bytes_received
        average = await self.model.plans.average_all()
        members = self._members()
        names = {id: members[id].name for id in [self._me.id, *average.members] if id in members}
        live = partners(members, self._me.id, self.model.signature)
        return {
            "members": sorted(names.values()),
            "not_in_it": sorted(members[id].name for id in live - names.keys()),
            "seconds": trio.current_time() - began,
            "bytes_sent": self.peers.bytes_sent - sent,
            "bytes_received": self.peers.bytes_received - received,
            "distance": average.distance,
            "plan": self.model.plans.plan.number,
            "mode": self._mode_under(self.model.plans.plan),
        }

    def _mode_under(self, plan: Plan) -> str:
        """What a plan does, in a word."""
        return "average" if plan.once else parts(plan.text)[0] or self.settings.mode


async def run(settings: Settings, command: list[str]) -> int:
    """The life of a daemon; returns the exit code. Raises UserError for what the user can mend."""
    configure(settings.name, settings.run, settings.log)
    keep_freed_chunks()
    if (ignored := unknown_variables(os.environ)) is not None:
        LOGGER.warning("%s", ignored)
    mine = identity.take(settings.state_path)
    kept = known_members.read(settings)
    path = socket_path(settings.name)
    supervisor = Supervisor(command, {"PEERD_SOCKET": str(path), "PEERD_NAME": settings.name}) if command else None
    host, port = await _resolve(settings.bind_address)
    for seed in settings.seeds:
        await _resolve(seed)
    datagrams, port = await _bind_both(host, port)
    about = About(expects=bool(command), founder=not settings.join).pack()
    me = Member(mine.id, settings.name, _advertised(host), port, mine.epoch, 0, State.ALIVE, "", about)
    fabrics = fabrics_for(settings)
    failure: UserError | None = None
    async with aclosing(datagrams), trio.open_nursery() as nursery:
        for fabric in fabrics:
            await nursery.start(fabric.run)
        daemon = Daemon(settings, me, (host, port), nursery, TcpTransport(nursery, *fabrics), datagrams, kept)
        address = await daemon.start()
        attach = _attach_hook(daemon, supervisor)
        await nursery.start(serve, path, daemon.verbs(), attach)
        _announce(settings, address, command)
        nursery.start_soon(_watch_signals, daemon, supervisor, path)
        if supervisor is not None:
            nursery.start_soon(_supervise, daemon, supervisor)
        nursery.start_soon(_watch_failure, daemon)
        nursery.start_soon(_keep_known_members, daemon, kept)
        await daemon.leaving.wait()
        LOGGER.info("leaving the swarm")
        await daemon.leave()
        if supervisor is not None:
            await supervisor.stop(SCRIPT_ENDS_S if supervisor.attached else SCRIPT_LEAST_S)
        if daemon.model.fatal is not None:
            failure = UserError(daemon.model.fatal)
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return 0


def _attach_hook(daemon: Daemon, supervisor: Supervisor | None) -> Callable[..., Any]:
    async def attach(connection: Any, message: dict[str, Any]) -> None:
        if supervisor is not None:
            supervisor.attached = True
        await daemon.model.attach(connection, message)

    return attach


async def _supervise(daemon: Daemon, supervisor: Supervisor) -> None:
    try:
        await supervisor.run()
        if not supervisor.attached and not supervisor.stopping:
            LOGGER.warning("%s ended without calling peerd.attach: this node trains nothing", supervisor.name)
            await daemon.model.expect_none()
    except UserError as error:
        daemon.model.fatal = str(error)
        daemon.model.failed.set()


async def _watch_failure(daemon: Daemon) -> None:
    await daemon.model.failed.wait()
    daemon.leaving.set()


async def _keep_known_members(daemon: Daemon, kept: tuple[Address, ...]) -> None:
    """Until it leaves: whoever leaves on purpose starts as it is told, whoever had to end looks for its swarm again."""
    membership = daemon.view.membership
    try:
        await known_members.keep(daemon.settings, membership.me.id, lambda: membership.members, kept, daemon.leaving)
    finally:
        if daemon.leaving.is_set() and daemon.model.fatal is None:
            known_members.forget(daemon.settings)


async def _watch_signals(daemon: Daemon, supervisor: Supervisor | None, path: Path) -> None:
    """The first SIGINT or SIGTERM leaves in good order; the second ends at once, with the script and the socket."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            if daemon.leaving.is_set():
                if supervisor is not None:
                    supervisor.kill()
                path.unlink(missing_ok=True)
                os._exit(128 + number)
            daemon.leaving.set()


async def _resolve(address: Address) -> Address:
    try:
        found = await trio.socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"cannot resolve {shown(address)}: {error.strerror or error}") from None
    return str(found[0][4][0]), address[1]


def _advertised(host: str) -> str:
    """The address that others reach when bound to all: the one that the machine's default route starts from."""
    if host not in ("0.0.0.0", "::"):
        return host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("2001:db8::1" if ":" in host else "192.0.2.1", 9))  # no packet is sent by this
            return str(probe.getsockname()[0])
        except OSError:
            raise UserError(f"bind {host}: this machine has no route out; bind the address that others reach") from None


async def _bind_both(host: str, port: int) -> tuple[UdpDatagrams, int]:
    """The datagram socket, and a port that is free for it; the listener takes the same number."""
    for _ in range(20 if port == 0 else 1):
        wanted = port
        if port == 0:
            with await bound_socket((host, 0), socket.SOCK_STREAM) as probe:
                wanted = int(probe.getsockname()[1])
        try:
            return await bind_udp((host, wanted)), wanted
        except UserError:
            if port != 0:
                raise
    raise UserError(f"no free port on {host} for both TCP and UDP")


def _announce(settings: Settings, address: Address, command: list[str]) -> None:
    where, local = shown(address), address[0].startswith(LOOPBACK)
    if settings.join:  # whoever joined through this node before it is a member would wait with it, or found a swarm
        LOGGER.info("listening on %s; joining through %s", where, ", ".join(map(shown, settings.seeds)))
    else:
        options = ["--join", where] if local else ["--join", where, "--bind", "THEIR_ADDRESS"]
        options += ["--transport", settings.transport] if settings.transport != Settings().transport else []
        options += ["--rdma-allow-fallback"] if settings.rdma_allow_fallback else []
        words = [*command, *options] if len(command) <= 1 else [*options, "--", *command]
        LOGGER.info("listening on %s; others join with: peerd start %s", where, shlex.join(words))
    if not local:
        LOGGER.warning("connections are neither encrypted nor authenticated yet: use a network that you trust")
