"""One node, assembled: membership, model and connections around one carrier.

What `peerd VERB` asks of it is verbs.py's, the process that it lives in main.py's.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import trio

from peerd.carriers import CARRIERS
from peerd.daemon.acceptor import Acceptor
from peerd.daemon.cures import cured
from peerd.daemon.look_up import LookUps
from peerd.daemon.membership_service import MembershipService
from peerd.daemon.metrics import LoopLatency
from peerd.daemon.peers import Peers
from peerd.daemon.trainer_service import TrainerService
from peerd.daemon.twin_proof import TwinProof
from peerd.local.identity import Identity
from peerd.local.node_key import NodeKey
from peerd.membership.core import LAN, WAN, Membership
from peerd.node.meta import NodeMeta, partners
from peerd.process.logs import LOGGER
from peerd.settings import Settings
from peerd.transport.connection import Datagrams, Transport
from peerd.transport.errors import PeerError
from peerd.transport.hello import Refused
from peerd.transport.ids import Address, NodeId, shown
from peerd.transport.messages import Hello, Member, State

PROTOCOL = 3
TENSORS_BYTES_MAX = 40 << 10  # of tensor names in a HELLO; the rest is covered by the hash
TENSORS_MAX = 1000  # names in a HELLO, of TENSOR_BYTES_MAX each
TENSOR_BYTES_MAX = 256
LEAVE_SPREAD_S = 3.0  # a few gossip rounds; whoever misses the word hears it from others
ANOTHER_SWARM = ("protocol", "swarm", "run")  # where a refusal names one of these, none of ours listens


class Daemon:
    """The running node. `running` makes one of its settings."""

    def __init__(
        self,
        settings: Settings,
        me: Member,
        key: NodeKey,
        bound: Address,
        nursery: trio.Nursery,
        transport: Transport,
        datagrams: Datagrams,
        kept: tuple[Address, ...] = (),
        rng: random.Random | None = None,
    ) -> None:
        """Wire the parts together; `start` starts them, listening on `bound`.

        `me` has what this node says of itself, whose key is `key`, `kept` the members that it knew before a restart.
        What is drawn at random is drawn from `rng`, and without one from the system: peers must not guess it.
        """
        rng = rng or random.SystemRandom()
        timing = LAN if settings.network == "lan" else WAN
        self.settings = settings
        self.me = me
        self.key = key
        self.nursery = nursery
        self.datagrams = datagrams
        self.latency = LoopLatency()
        self.leaving = trio.Event()
        self.began = trio.current_time()
        self._bound = bound
        self._kept = kept
        self._transport = transport
        self._have_partners, self._partners_until = False, self.began
        self.peers = Peers(
            transport,
            self._hello,
            self._address_of,
            reconnected=lambda peer: self.model.on_reconnected(peer),
            refused=self._on_refused_by_peer,
        )
        kept_until = self.began + timing.silence_s(len(kept))
        self.model = TrainerService(me.id, settings, self.peers, self.members, self._say_about, rng, kept, kept_until)
        self.model.about = NodeMeta.unpack(me.meta)
        self.twin_proof = TwinProof(key, me, settings.swarm, settings.run, transport)
        self.view = MembershipService(
            Membership(me, [*settings.seeds, *kept], rng, self.began, timing, numbers=rng),
            datagrams,
            transport,
            self.peers,
            self._hello,
            changed=self._on_members,
            refused=self._on_refused_by_seed,
            prove=self.twin_proof.prove,
            taken=self._on_identity_taken,
        )
        self.acceptor = Acceptor(me, self._hello, self.peers, self.model, self.view, self.twin_proof.answer)

    async def start(self) -> Address:
        """Start every task; returns the address that peers reach."""
        await self.nursery.start(self.peers.run)
        listening: Address = await self.nursery.start(self._transport.listen, self._bound, self.acceptor.accept)
        self.nursery.start_soon(self.model.run)
        self.nursery.start_soon(self.view.run)
        self.nursery.start_soon(self.latency.run)
        return listening

    async def leave(self) -> None:
        """Hand over what was not yet sent, say goodbye, wait until the word is out."""
        await self.model.hand_over()
        await self.view.perform(self.view.membership.leave(trio.current_time()))
        with trio.move_on_after(LEAVE_SPREAD_S):
            while not self.view.membership.left_spread:
                await trio.sleep(0.02)

    # ---------------------------------------------------------------- what its parts ask of one another

    def members(self) -> dict[NodeId, Member]:
        """All that it knows of, itself too."""
        return dict(self.view.membership.members)

    def no_partner_s(self) -> float | None:
        """For how long there has been nobody to exchange with; None: there is somebody."""
        if partners(self.members(), self.me.id, self.model.signature):
            return None
        return trio.current_time() - self._partners_until

    def fail(self, why: str) -> None:
        """Have this node end: it cannot be part of its swarm."""
        self.model.fatal = why
        self.model.failed.set()

    def _hello(self) -> Hello:
        settings, me = self.settings, self.me
        tensors: list[str] = []
        room = TENSORS_BYTES_MAX
        for tensor in self.model.tensors[:TENSORS_MAX]:
            room -= (size := len(tensor.encode()))
            if room < 0 or size > TENSOR_BYTES_MAX:
                break
            tensors.append(tensor)
        return Hello(
            PROTOCOL, settings.swarm, settings.run, me.id, me.name, me.epoch, me.host, me.port, settings.mode,
            self.model.signature, tuple(tensors),
        )  # fmt: skip

    def _address_of(self, peer: NodeId) -> Address | None:
        member = self.view.membership.members.get(peer)
        return (member.host, member.port) if member is not None and member.state <= State.SUSPECT else None

    def _on_members(self) -> None:
        for peer, member in self.members().items():
            if member.state > State.SUSPECT:
                self.peers.forget(peer)
        self.model.on_members()
        have = bool(partners(self.members(), self.me.id, self.model.signature))
        if have or self._have_partners:
            self._have_partners, self._partners_until = have, trio.current_time()

    def _on_identity_taken(self, where: Address) -> None:
        runs = f"the node at {shown(where)} runs with this node's identity"
        self.fail(f"{runs} (a copied or restored state folder?), and is newer")

    def _on_refused_by_peer(self, peer: NodeId, refusal: Refused) -> None:
        self.model.on_refused(PeerError(cured(refusal)), newcomer=self.model.about.expects, peer=peer)

    def _on_refused_by_seed(self, where: Address, refusal: Refused) -> None:
        if refusal.field in ANOTHER_SWARM and where in self._kept and where not in self.settings.seeds:
            LOGGER.warning("%s; it is no member any more, and is not asked again", refusal)
            self.view.membership.drop_seed(where)
        else:
            self.model.on_refused(PeerError(cured(refusal)), newcomer=len(self.members()) == 1)

    async def _say_about(self, about: NodeMeta) -> None:
        self.acceptor.raise_payload_limits()  # the first word about a model comes when its size is known
        await self.view.perform(self.view.membership.set_meta(about.pack(), trio.current_time()))


@asynccontextmanager
async def running(
    settings: Settings, identity: Identity, *, expects: bool, kept: tuple[Address, ...] = ()
) -> AsyncIterator[tuple[Daemon, Address]]:
    """Yield a node that runs until the block ends, and the address that it listens on. Raises UserError.

    Its tasks are in its `nursery`, whose errors end the block. A trainer is on its way where it `expects` one.
    """
    trio.socket.set_custom_hostname_resolver(LookUps())
    carrier = CARRIERS[settings.transport](settings.carrier_settings)
    host, port = await carrier.resolve(settings.bind_address)
    for seed in settings.seeds:
        await carrier.resolve(seed)
    async with aclosing(await carrier.bind((host, port))) as datagrams:
        bound = (host, datagrams.address[1])
        about = NodeMeta(expects=expects, founder=not settings.join).pack()
        reached = carrier.reached(host), bound[1]
        me = Member(identity.id, settings.name, *reached, identity.epoch, 0, State.ALIVE, "", about)
        async with trio.open_nursery() as nursery:
            daemon = Daemon(settings, me, identity.key, bound, nursery, await carrier.start(nursery), datagrams, kept)
            daemon.model.plans.keep(daemon.leaving)
            yield daemon, await daemon.start()
            nursery.cancel_scope.cancel()
