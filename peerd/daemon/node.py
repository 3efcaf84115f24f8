"""One node, assembled: membership, model and connections around one carrier.

What `peerd VERB` asks of it is verbs.py's, the process that it lives in main.py's.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import trio

from peerd.carriers import CARRIERS, Carrier
from peerd.daemon.acceptor import Acceptor
from peerd.daemon.cures import cured
from peerd.daemon.meetings import Meetings
from peerd.daemon.membership_service import MembershipService
from peerd.daemon.metrics import LoopLatency
from peerd.daemon.peers import Peers
from peerd.daemon.trainer_service import TrainerService
from peerd.daemon.twin_proof import TwinProof
from peerd.local.generations import newest_step
from peerd.local.identity import Identity
from peerd.local.node_key import NodeKey
from peerd.local.signing import NodeSigning
from peerd.membership.core import LAN, WAN, Membership
from peerd.node.acquaintances import Acquaintances
from peerd.node.meta import FOUNDS, NodeMeta, partners
from peerd.process.descriptors import watch_descriptors
from peerd.process.logs import LOGGER
from peerd.process.look_up import LookUps
from peerd.process.own_address import OwnAddress, is_elsewhere
from peerd.process.seldom import Seldom
from peerd.relay.guest import Guest
from peerd.relay.lender import Lender, Near
from peerd.security import authority_folder
from peerd.security.certificates import issuers_of
from peerd.security.entry import Entry, Told, entered
from peerd.security.reception import Reception
from peerd.security.renewal import Renewal
from peerd.security.secrets_exchange import SecretsExchange
from peerd.security.shared_secrets import SharedSecrets
from peerd.settings import Settings, is_loopback, where_to_listen
from peerd.training.modes import alike_at_start
from peerd.transport.connection import Datagrams, Transport
from peerd.transport.errors import PeerError, UserError, wrong
from peerd.transport.hello import Instead, Refused
from peerd.transport.ids import Address, NodeId, is_ip, shown
from peerd.transport.messages import Challenge, Hello, Member, RelayRequest, RenewalRequest, State
from peerd.transport.secure.datagrams import DatagramSeal
from peerd.transport.secure.signing import Signing
from peerd.transport.sending.budget import Budget
from peerd.transport.tcp import TcpTransport

PROTOCOL = 27
TENSORS_BYTES_MAX = 40 << 10  # of tensor names in a HELLO; the rest is covered by the hash
TENSORS_MAX = 1000  # names in a HELLO, of TENSOR_BYTES_MAX each
TENSOR_BYTES_MAX = 256
SCRIPT_ENDS = "the script's end"
LEAVE_SPREAD_S = 3.0  # a few gossip rounds; whoever misses the word hears it from others
REFUSED_TOLD_S = 3600.0
PUT_OUT = ("revoked", "issuer")  # what ends a node that was in the swarm is the statement beside it
ALERTS = (*PUT_OUT, "certificate", "authority", "encryption")  # said before a handshake is over: by anybody
THEIR_SWARM = ("swarm", "run")  # what a member never refuses: another node has its address now
ANOTHER_SWARM = ("protocol", *THEIR_SWARM, "authority")  # where a refusal names one of these, none of ours listens


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
        entry: Entry | None = None,
        signing: Signing | None = None,
        secrets: SharedSecrets | None = None,
        budget: Budget | None = None,
    ) -> None:
        """Wire the parts together; `start` starts them, listening on `bound`.

        `me` has what this node says of itself, whose key is `key`, `kept` the members that it knew before a restart.
        With `signing`, by that key, members' records and plans are signed, and none is believed that is not.
        What is drawn at random is drawn from `rng`, and without one from the system: peers must not guess it. `entry`
        says by what it is a member, and `secrets` are the members'; without them all is plain, and anybody is one.
        """
        rng = rng or random.SystemRandom()
        timing = LAN if settings.network == "lan" else WAN
        self.settings = settings
        self.key = key
        self.entry = entry
        self.secrets = secrets
        self.nursery = nursery
        self.datagrams = datagrams
        self.budget = budget
        self.latency = LoopLatency()
        self.leaving = trio.Event()
        self.ending = SCRIPT_ENDS  # what its own end waits for
        self.crash: Callable[[], str] = lambda: ""  # of the script that this node keeps running: how it died last
        self.began = trio.current_time()
        self.bound = bound
        self.own_address = OwnAddress(bound[0], lambda: (self.me.host, self.me.port), self._is_asked_by_nobody)
        self._kept = kept
        self._refusals = Seldom(REFUSED_TOLD_S)  # by whom and for what: who has refused this node is dialled again
        self.guest: Guest | None = None
        self.lender = Lender(settings.lent_ports, bound[0], me.host, budget)
        self._transport = transport = Near(transport, self.lender.near)
        self._have_partners, self._partners_until = False, self.began
        self.acquaintances = Acquaintances(me.id, rng, lambda id: self.view.met(id), sealed=entry is not None)
        self.peers = Peers(
            transport,
            self._hello,
            self._address_of,
            reconnected=lambda peer: self.model.on_reconnected(peer),
            refused=self._on_refused_by_peer,
            met=self.acquaintances.note,
            vacant=lambda peer: self.view.vacant(peer),
            reach=self._on_reach,
            unreached=lambda peer: self.model.on_unreached(peer),
            named=lambda peer: self.view.name_of(peer),
        )
        self.meetings = Meetings(
            self.acquaintances, self.peers, transport, self._said_to_live, lambda id: self.view.missed(id)
        )
        kept_until = self.began + timing.silence_s(len(kept))
        self.model = TrainerService(
            me.id, settings, self.peers, self.members, self._say_meta, rng, kept, kept_until, signing,
            self.acquaintances,
        )  # fmt: skip
        self.model.meta = NodeMeta.unpack(me.meta)
        self.twin_proof = TwinProof(key, lambda: self.me, settings.swarm, settings.run, transport)
        self.view = MembershipService(
            Membership(
                me, [*settings.seeds, *kept], rng, self.began, timing, numbers=rng, signing=signing,
                handshakes=self.acquaintances.sealed,
            ),
            datagrams,
            transport,
            self.peers,
            self._hello,
            changed=self._on_members,
            refused=self._on_refused_by_seed,
            prove=self.twin_proof.prove,
            taken=self._on_identity_taken,
            secrets=SecretsExchange(secrets) if secrets is not None else None,
            near=self.lender.near,
        )  # fmt: skip
        self.reception = self.renewal = None
        if entry is not None:
            self.reception = Reception(entry.trust, entry.issuer)
            self.renewal = Renewal(entry, key, settings.state_path, transport, self._issuers)
        instead: Instead = {
            Challenge: self.twin_proof.answer,
            RelayRequest: self.lender.lend,
            **({RenewalRequest: self.reception.renew} if self.reception is not None else {}),
        }
        self.acceptor = Acceptor(me, self._hello, self.peers, self.model, self.view, instead, self.reception)
        if secrets is not None:
            secrets.on_revoked, secrets.on_news = self._on_revoked, self.view.spread
            if self.renewal is not None:
                secrets.on_authorities = self.renewal.look
            for one in secrets.revocations.all():
                self.view.membership.revoke(one.node, self.began)

    async def start(self) -> Address:
        """Start every task; returns the address that peers reach."""
        await self.nursery.start(self.peers.run)
        listening: Address = await self.nursery.start(self._transport.listen, self.bound, self.acceptor.accept)
        self.nursery.start_soon(self.model.run)
        self.nursery.start_soon(self.view.run)
        self.nursery.start_soon(self.latency.run)
        self.nursery.start_soon(self.own_address.run)
        self.nursery.start_soon(watch_descriptors)
        if self.acquaintances.sealed:
            self.nursery.start_soon(self.meetings.run)
        if self.renewal is not None:
            self.nursery.start_soon(self.renewal.run)
        if self.secrets is not None:
            self.nursery.start_soon(self.secrets.run)
        return listening

    async def leave(self) -> None:
        """Hand over what was not yet sent, say goodbye, wait until the word is out."""
        await self.model.drain()
        await self.view.perform(self.view.membership.leave(trio.current_time()))
        with trio.move_on_after(LEAVE_SPREAD_S):
            while not self.view.membership.left_spread:
                await trio.sleep(0.02)

    # ---------------------------------------------------------------- what its parts ask of one another

    @property
    def me(self) -> Member:
        """What this node says of itself."""
        return self.view.membership.me

    def move(self, where: Address) -> None:
        """Others reach it there from now on."""
        self.nursery.start_soon(self.view.perform, self.view.membership.move(where, trio.current_time()))

    def members(self) -> dict[NodeId, Member]:
        """All that it knows of, itself too."""
        return dict(self.view.membership.members)

    def _is_asked_by_nobody(self) -> bool:
        return self.guest is None and self.view.membership.is_asked_by_nobody

    def _said_to_live(self) -> dict[NodeId, Member]:
        return self.members() | self.view.membership.hearsay

    def no_partner_s(self) -> float | None:
        """For how long there has been nobody to exchange with; None: there is somebody."""
        if self._partners():
            return None
        return trio.current_time() - self._partners_until

    def _partners(self) -> frozenset[NodeId]:
        return partners(self.acquaintances.of(self.view.membership.members), self.me.id, self.model.signature)

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
            PROTOCOL, settings.swarm, settings.run, me.id, me.name, me.epoch, me.host, me.port,
            alike_at_start(settings.mode, settings),
            self.model.signature, tuple(tensors),
        )  # fmt: skip

    def _address_of(self, peer: NodeId) -> Address | None:
        member = self.view.membership.members.get(peer)
        return (member.host, member.port) if member is not None and member.state <= State.SUSPECT else None

    def _issuers(self) -> list[Address]:
        live = [one for id, one in self.members().items() if id != self.me.id and one.state <= State.SUSPECT]
        return [(one.host, one.port) for one in live if NodeMeta.unpack(one.meta).issuer]

    def _on_members(self) -> None:
        for peer, member in self.members().items():
            if member.state > State.SUSPECT:
                self.peers.forget(peer)
        self.model.on_members()
        self.meetings.on_members()
        have = bool(self._partners())
        if have or self._have_partners:
            self._have_partners, self._partners_until = have, trio.current_time()

    def _on_identity_taken(self, where: Address) -> None:
        runs = f"the node at {shown(where)} runs with this node's identity"
        self.fail(f"{runs} (a copied or restored state folder?), and is newer")

    def _on_revoked(self, node: NodeId) -> None:
        if node == self.me.id:
            self.fail("this node was revoked: the swarm takes its key no more; another --name enters with a new token")
            return
        known = self.members().get(node)
        LOGGER.warning("%s was revoked: it is out for ever", f"{known.name} ({node})" if known else node)
        effects = self.view.membership.revoke(node, trio.current_time())
        self.nursery.start_soon(self.view.perform, effects)
        self.peers.shut_out(node, "is revoked")
        if self.entry is None:
            return
        for other in self.entry.trust.resting_on(node):
            self.peers.shut_out(other, f"is a member by the word of {node}, which is revoked")
        if node in issuers_of(self.entry.trust.certificate):
            why = f"this node is a member by the word of {node}, an issuer that was revoked"
            self.fail(f"{why}: the swarm takes its certificate no more; enter again with a new token")

    def _on_reach(self, peer: NodeId, error: Exception | None) -> None:
        if (member := self.members().get(peer)) is None:
            return
        who = f"{member.name} ({peer[:8]})"
        if error is None:
            LOGGER.info("%s can be reached again", who)
        else:
            LOGGER.warning(
                "%s is alive, but this node cannot connect to it: %s; until that can be it hears nothing from here "
                "(peerd doctor --join %s shows why; one that nobody can dial is started with --relay)",
                who, error, shown((member.host, member.port)),
            )  # fmt: skip
        self.view.tell_changes()

    def _on_refused_by_peer(self, peer: NodeId, refusal: Refused) -> None:
        self._hear_proof(refusal)
        is_news = self._refusals.is_news(peer, refusal.field, now=trio.current_time())
        if refusal.field in PUT_OUT or refusal.field in THEIR_SWARM:
            if is_news:
                gone = refusal.field in THEIR_SWARM
                told = f"{refusal}; a member listened there, and does no more" if gone else cured(refusal)
                LOGGER.warning("%s", told)
            return
        differs, newcomer = (refusal.field, refusal.here, refusal.there), self.model.meta.expects
        self.model.on_refused(PeerError(cured(refusal)), newcomer=newcomer, peer=peer, differs=differs, is_news=is_news)

    def _on_refused_by_seed(self, where: Address, refusal: Refused) -> None:
        self._hear_proof(refusal)
        named = where in self.settings.seeds
        if refusal.field in ANOTHER_SWARM and where in self._kept and not named:
            LOGGER.warning("%s; it is no member any more, and is not asked again", refusal)
            self.view.membership.drop_seed(where)
        elif (refusal.field in PUT_OUT and self._kept) or (refusal.field in ALERTS and not named):
            LOGGER.warning("%s", cured(refusal))
        else:
            newcomer = len(self.members()) == 1
            self.model.on_refused(PeerError(cured(refusal, joins=newcomer)), newcomer=newcomer)

    def _hear_proof(self, refusal: Refused) -> None:
        if refusal.proof and self.secrets is not None:
            self.secrets.hear_proof(refusal.proof)

    async def _say_meta(self, meta: NodeMeta) -> None:
        self.acceptor.raise_payload_limits()  # the first word about a model comes when its size is known
        await self.view.perform(self.view.membership.set_meta(meta.pack(), trio.current_time()))


@asynccontextmanager
async def running(
    settings: Settings,
    identity: Identity,
    *,
    expects: bool,
    kept: tuple[Address, ...] = (),
    begin: Callable[[], None] = lambda: None,
    early: Callable[[trio.Nursery], Awaitable[None]] | None = None,
    waits: Callable[[str], None] = lambda what: None,
) -> AsyncIterator[tuple[Daemon, Address]]:
    """Yield a node that runs until the block ends, and the address that it listens on. Raises UserError.

    Its tasks are in its `nursery`, whose errors end the block. A trainer is on its way where it `expects` one. `begin`
    is called once nothing stands against the start, before what an earlier life has kept is read; and `early` before
    it waits for other nodes, which may take for ever: `waits` is told for what, or "".
    """
    trio.socket.set_custom_hostname_resolver(LookUps())
    told = settings.carrier_settings
    carrier = CARRIERS[settings.transport](told)
    host, port = await _resolved(carrier, settings.bind_address, "bind")
    relays = [await _resolved(carrier, relay, "relay") for relay in settings.relays]
    reached = relays[0] if relays else await _reached(settings, carrier, (host, port))
    host = where_to_listen(settings.bind, host, reached[0])
    seeds = {await _resolved(carrier, seed, "join") for seed in settings.seeds}
    if is_loopback(reached[0]) and seeds and all(is_elsewhere(seed) for seed, _ in seeds):
        raise wrong(
            "bind",
            f"{reached[0]} is reached from this machine alone, and {shown(settings.seeds[0])}, which is to be joined, "
            "is on another: give --bind the address at which others reach this node, or 0.0.0.0",
        )
    if seeds and not kept and seeds <= {(host, port), reached}.difference(relays):
        own = shown(settings.seeds[0])
        if not settings.join:  # nobody said so: whoever made the token listens there
            raise UserError(
                f"token: the member that made it listens at this node's own address, {own}: give this node another "
                "port, as any is with --bind HOST:0"
            )
        raise UserError(f"join: {own} is this node's own address; leave --join out where a swarm begins")
    seal = None if settings.insecure_plaintext else DatagramSeal()
    async with aclosing(await carrier.bind((host, port), seal)) as datagrams, trio.open_nursery() as nursery:
        bound = (host, datagrams.address[1])
        if early is not None:
            await early(nursery)
        await carrier.start(nursery)  # then it enters: whoever is refused before founds no authority, nor uses a token
        local = is_loopback(host) and is_loopback(reached[0])
        if settings.token:
            waits("a member that lets it in by its token")
        entry = None if settings.insecure_plaintext else await _enter(settings, identity.key, local=local)
        transport = carrier.transport(nursery, entry.trust if entry else None)
        guest = Guest(relays, transport) if relays else None
        waits(f"its relay {' or '.join(map(shown, relays))}" if guest else "")
        reached = await guest.ask() if guest else (reached[0], reached[1] or bound[1])
        waits("")
        kept = tuple(where for where in kept if where != reached)
        secrets = (
            _secrets(settings, identity, entry, seal, alone=not (settings.seeds or kept)) if entry and seal else None
        )
        issuer = entry is not None and entry.issuer is not None
        begin()
        resumes_at = newest_step(settings.checkpoints) if settings.seeds or kept else FOUNDS
        meta = NodeMeta(expects=expects, founder=not settings.seeds, issuer=issuer, resumes_at=resumes_at).pack()
        me = Member(identity.id, settings.name, *reached, identity.epoch, 0, State.ALIVE, "", meta)
        signing = NodeSigning(identity.key, settings.swarm, settings.run) if entry else None
        daemon = Daemon(
            settings, me, identity.key, bound, nursery, transport, datagrams, kept, None, entry, signing, secrets,
            told.budget,
        )  # fmt: skip
        daemon.model.plans.keep(daemon.leaving)
        listening = await daemon.start()
        if guest is not None:
            daemon.guest = guest
            nursery.start_soon(guest.run, listening, daemon.move)
        yield daemon, listening
        nursery.cancel_scope.cancel()


def _secrets(settings: Settings, identity: Identity, entry: Entry, seal: DatagramSeal, *, alone: bool) -> SharedSecrets:
    """What this node keeps of the swarm's secrets. Raises UserError."""
    issuer = entry.issuer.authority if entry.issuer is not None else None
    where, rng = (settings.swarm, settings.run), random.SystemRandom()
    secrets = SharedSecrets(
        settings.state_path, where, identity.id, entry.trust, issuer, seal, alone=alone, rng=rng,
        successors=authority_folder.successors(entry.folder) if entry.folder else (),
    )  # fmt: skip
    entry.trust.revoked, entry.trust.proof_of = secrets.is_revoked, secrets.proof_of
    return secrets


async def _reached(settings: Settings, carrier: Carrier, bound: Address) -> Address:
    """Where others reach a node that is bound there; port 0: the one that it will get. Raises UserError."""
    host, port = bound
    if (told := settings.advertised(port)) is None:
        key, text, found = "bind", settings.bind, (carrier.reached(host), port)
    else:
        key, text, found = "advertise", settings.advertise, await _resolved(carrier, told, "advertise")
    if not is_ip(found[0]):
        raise UserError(f"{key}: {text!r} is no address that others could dial")
    return found


async def _resolved(carrier: Carrier, address: Address, key: str) -> Address:
    """What the setting `key` has told. Raises WrongSetting."""
    try:
        return await carrier.resolve(address)
    except UserError as error:
        raise wrong(key, str(error)) from None


async def _enter(settings: Settings, key: NodeKey, *, local: bool) -> Entry:
    """By what a node is a member, which this machine alone reaches where it is `local`. Raises UserError."""
    token = settings.invitation
    told = Told(settings.state_path, settings.authority_path, local, token, joins=bool(settings.seeds))
    async with trio.open_nursery() as nursery:
        entry = await entered(
            told, key, lambda newcomer, where: TcpTransport(nursery, credentials=newcomer).dial(where)
        )
        nursery.cancel_scope.cancel()
    return entry
