"""How does the membership core meet the network? One timer, one datagram socket, and push-pulls over connections."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence

import trio

from peerd.daemon.cures import cured
from peerd.daemon.peers import Peers
from peerd.membership.core import Membership
from peerd.membership.effects import (
    AskTwin,
    MemberChanged,
    MembershipEffect,
    PushPull,
    SendDatagram,
)
from peerd.membership.lives import TWIN_DEADLINE_S
from peerd.membership.proofs import VERIFICATION_ROWS
from peerd.membership.roster import name_of
from peerd.membership.suspicion import LAST_WORDS_MAX
from peerd.membership.table_budget import TableBudget
from peerd.membership.table_exchange import PUSH_PULL_DEADLINE_S, TABLE_PART, TABLE_PARTS_MAX
from peerd.node.meta import NodeMeta
from peerd.process.logs import LOGGER
from peerd.process.seldom import Seldom
from peerd.security.secrets_exchange import SecretsExchange
from peerd.training.effects import Log
from peerd.transport.connection import Connection, ConnectionLost, Datagrams, Transport
from peerd.transport.errors import PeerError, UserError
from peerd.transport.hello import Refused, check_identity, greet
from peerd.transport.ids import Address, NodeId, shown
from peerd.transport.messages import Hello, Member, MemberTable, SecretsMessage, State

SAID_MAX = 256
PUSH_PULLS_MAX = 8  # at once
PUSH_PULLS_WAITING_MAX = 256  # more are left out: whoever is to be dialled for ever is dialled again
VIEW_SHARE = 0.1  # of the loop's time, at most, that goes into what follows from changed members
UNFORESEEN_S = 1.0  # the least between two errors of the membership's own
CROWDS_EVERY_S, NAMED_MAX = 5.0, 8  # lines of what many may do at once
GONE_MAX = 1024  # members forgotten whose traces are kept until all are cleared at once


class MembershipService:
    """The shell around one Membership."""

    def __init__(
        self,
        membership: Membership,
        datagrams: Datagrams,
        transport: Transport,
        peers: Peers,
        hello: Callable[[], Hello],
        changed: Callable[[], None],
        refused: Callable[[Address, Refused], None],
        prove: Callable[[Address], Awaitable[bool]],
        taken: Callable[[Address], None],
        secrets: SecretsExchange | None = None,
        near: Callable[[Address], Address] = lambda address: address,
    ) -> None:
        """`changed` is called, once a turn of the loop at most, when members came, went or said something new of
        themselves; `refused` when the node at an address whose table we asked for will not have us. `prove` asks
        whether the node at an address holds our own key, and `taken` is called when it does. `secrets` go beside the
        tables. Where members are to be reached from here datagrams go to `near` of their addresses.
        """
        self.membership = membership
        self._near = near
        self._datagrams = datagrams
        self._transport = transport
        self._peers = peers
        self._hello = hello
        self._changed = changed
        self._refused = refused
        self._prove = prove
        self._taken = taken
        self._secrets = secrets
        self._touched = trio.Event()
        self._members_changed = trio.Event()
        self._push_pulls = trio.CapacityLimiter(PUSH_PULLS_MAX)
        self._last_words = trio.CapacityLimiter(LAST_WORDS_MAX)
        self._under_way: set[tuple[Address, trio.CapacityLimiter]] = set()  # push-pulls, those that wait as well
        self._budget = TableBudget()
        self._nursery: trio.Nursery | None = None
        self._said: dict[Address, str] = {}  # the last failure told of each address: said once
        self._heard_at: dict[NodeId, float] = {}  # members of whom a message came, and when the last one did
        self._told_of_kinds = self._told_of_namesake = False
        self._seldom = Seldom()  # of members what they bring about themselves
        self._believed: dict[NodeId, tuple[State, int]] = {}  # of each member, when it last changed, and its epoch
        self._stalled: set[NodeId] = set()  # members that have said that their trainers make no step
        self._introduced = False  # whether a table has come: who is heard of after it is new to the others, too
        self._crowds: dict[str, list[str]] = {}  # what members did, and who, and not told yet
        self._news = trio.Event()

    async def run(self) -> None:
        """Probe and gossip until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._receive)
            nursery.start_soon(self._tell_changes)
            nursery.start_soon(self._tell_crowds)
            while True:
                self._touched = trio.Event()
                with trio.move_on_at(self.membership.deadline):
                    await self._touched.wait()  # an event may have moved the deadline
                if (now := trio.current_time()) >= self.membership.deadline:
                    try:
                        effects = self.membership.on_timer(now)
                    except Exception as error:  # what a peer said earlier may surface now
                        self._peers.offences.unforeseen(error, "what was due in the membership could not be done")
                        await trio.sleep(UNFORESEEN_S)
                    else:
                        await self.perform(effects)

    async def perform(self, effects: Iterable[MembershipEffect]) -> None:
        """Do what the core asks."""
        for effect in effects:
            match effect:
                case SendDatagram():
                    await self._datagrams.send(self._near(effect.address), effect.message)
                case PushPull():
                    self._start_push_pull(effect.address)
                case MemberChanged():
                    self._tell_of(effect.id)
                    self.tell_changes()
                case AskTwin():
                    if self._nursery is not None:
                        self._nursery.start_soon(self._ask_twin, effect.address)
                case Log():
                    LOGGER.warning("%s", effect.text)
        self._touched.set()

    async def join(self, address: Address) -> None:
        """One push-pull, now. Raises UserError with the cause."""
        failure = await self._exchange_tables(address, self._push_pulls)
        if failure is not None:
            raise UserError(f"cannot join {shown(address)}: {cured(failure, joins=True)}")

    async def answer(self, connection: Connection, first: MemberTable) -> None:
        """The accepting side of a push-pull, whose first message has arrived: it hears first, so that it can refute."""
        self._introduced = True  # who is dialled is a member
        await self._receive_table(connection, first, None)
        await self._keep_to_budget(connection, len(self.membership.members))
        await self._send_table(connection)

    async def answer_secrets(self, connection: Connection, message: SecretsMessage) -> None:
        """The accepting side of what goes before a push-pull."""
        if self._secrets is None:
            raise PeerError(f"{connection.remote} speaks of keys, and this node has none")
        await self._keep_to_budget(connection, self._secrets.rows_of(message))
        verified = self._secrets.verifications
        try:
            await self._secrets.answer(connection, message)
        finally:
            await self._keep_to_budget(connection, VERIFICATION_ROWS * (self._secrets.verifications - verified))

    def tell_changes(self) -> None:
        """What follows from the members is to be found anew."""
        self._members_changed.set()

    def met(self, id: NodeId) -> None:
        """This member has shown its certificate."""
        self.tell_changes()
        self._note(self.membership.met, id)

    def missed(self, id: NodeId) -> None:
        """This one was dialled in vain."""
        self._note(self.membership.missed, id)

    def vacant(self, id: NodeId) -> None:
        """Nobody listens where this one did."""
        self._note(self.membership.vacant, id)

    def name_of(self, id: NodeId) -> str:
        """What the log calls a member."""
        return name_of(id, self.membership.members)

    def spread(self) -> None:
        """What goes beside the tables is news."""
        self.membership.spread(trio.current_time())
        self._touched.set()

    def _note(self, what: Callable[[NodeId, float], Sequence[MembershipEffect]], id: NodeId) -> None:
        try:
            effects = what(id, trio.current_time())
        except Exception as error:
            self._peers.offences.unforeseen(error, f"a meeting with {id} could not be noted")
            return
        self._touched.set()
        if effects and self._nursery is not None:
            self._nursery.start_soon(self.perform, effects)

    def _tell_of(self, id: NodeId) -> None:
        """Say when a member has come, failed or left, and when one that had is back; each node says it once."""
        members = self.membership.members
        member, (before, epoch) = members.get(id), self._believed.get(id, (None, 0))
        if member is None or id == self.membership.me.id or (before == State.FAILED and member.state == State.SUSPECT):
            return  # dropped meanwhile; or whether it is back is not known yet
        self._believed[id] = member.state, member.epoch
        if member.state == State.ALIVE:
            self._tell_of_kinds(member)
            self._tell_of_namesake(member)
        who = f"{member.name} ({shown((member.host, member.port))})"
        if self.membership.is_revoked(id):
            pass  # who was told that it is out for ever
        elif before is not None and before < State.FAILED == member.state:
            heard_at = self._heard_at.get(id)
            ago = None if heard_at is None else f"last heard from it {trio.current_time() - heard_at:.0f} s ago"
            LOGGER.warning("%s failed: this node %s", who, ago or "has never heard from it")
        elif before is not None and before < State.LEFT == member.state:
            self._tell_seldom(id, who, "left")
        elif before is None and member.state == State.ALIVE:
            if self._introduced:
                self._tell_in_crowds(who, "joined")
        elif before == State.FAILED and member.state == State.ALIVE:
            LOGGER.info("%s is back", who)
        elif before == State.LEFT and member.state == State.ALIVE:
            self._tell_seldom(id, who, "is back")
        elif before is not None and member.epoch > epoch and member.state == State.ALIVE:
            self._tell_seldom(id, who, "is back: it ended without a word, and was started again")
        self._tell_of_steps(member, who)
        if len(self._believed) > len(members) + GONE_MAX:  # a full table drops the failed
            self._believed = {id: believed for id, believed in self._believed.items() if id in members}
            self._heard_at = {id: at for id, at in self._heard_at.items() if id in members}
            self._stalled &= members.keys()

    def _tell_of_steps(self, member: Member, who: str) -> None:
        if not (member.state <= State.SUSPECT and NodeMeta.unpack(member.meta).stalled):
            self._stalled.discard(member.id)
        elif member.id not in self._stalled:
            self._stalled.add(member.id)
            if self._seldom.is_news(member.id, "stalled", now=trio.current_time()):
                self._tell_in_crowds(who, "made no step for long: the script hangs, or has died")

    def _tell_of_kinds(self, member: Member) -> None:
        """Once: in one of the two directions, at least, no datagram can be sent."""
        mine, theirs = self.membership.me.host, member.host
        if (":" in mine) != (":" in theirs) and not self._told_of_kinds:
            self._told_of_kinds = True
            text = (
                "%s is at %s, this node at %s: members that are not all at IPv4 or all at IPv6 addresses take each "
                "other for dead; start them anew with --bind of one kind"
            )
            LOGGER.warning(text, member.name, theirs, mine)

    def _tell_of_namesake(self, member: Member) -> None:
        """Once: anybody may call itself what it likes. At this node's own address it is one of its earlier lives."""
        me, where = self.membership.me, (member.host, member.port)
        if member.name == me.name and where != (me.host, me.port) and not self._told_of_namesake:
            self._told_of_namesake = True
            text = (
                "the member at %s is called %s, too: only its id tells it from this node, and a seed made of "
                "PEERD_NAME is the same; start one of the two with another --name"
            )
            LOGGER.warning(text, shown(where), me.name)

    def _tell_seldom(self, id: NodeId, who: str, what: str) -> None:
        if self._seldom.is_news(id, what, now=trio.current_time()):
            LOGGER.info("%s %s", who, what)

    def _tell_in_crowds(self, who: str, what: str) -> None:
        self._crowds.setdefault(what, []).append(who)
        self._news.set()

    def _note_heard(self, sender: NodeId) -> None:
        if sender in self.membership.members:
            self._heard_at[sender] = trio.current_time()

    async def _receive(self) -> None:
        while True:
            message, source = await self._datagrams.receive()
            self._note_heard(getattr(message, "sender", ""))
            try:
                effects = self.membership.on_datagram(message, source, trio.current_time())
            except Exception as error:
                self._peers.offences.unforeseen(error, f"dropped a datagram from {shown(source)}")
                continue
            await self.perform(effects)

    async def _tell_changes(self) -> None:
        """What follows from the members is found once a turn, whatever has come, and a pause follows that is longer."""
        while True:
            await self._members_changed.wait()
            self._members_changed = trio.Event()
            began = trio.current_time()
            try:
                self._changed()
            except Exception as error:
                self._peers.offences.unforeseen(error, "what members say of themselves could not be handled")
            await trio.sleep((1 / VIEW_SHARE - 1) * (trio.current_time() - began))

    async def _tell_crowds(self) -> None:
        """Some by name, as they come: thousands may come at once, or be made up."""
        told: Counter[str] = Counter()
        until = -math.inf
        while True:
            await self._news.wait()
            if trio.current_time() >= until:
                told, until = Counter(), trio.current_time() + CROWDS_EVERY_S
            crowds, self._crowds, self._news = self._crowds, {}, trio.Event()
            for what, names in crowds.items():
                room = NAMED_MAX - told[what]
                for who in names[:room]:
                    LOGGER.info("%s %s", who, what)
                if (more := len(names) - room) > 0:
                    LOGGER.info("%d more members %s", more, what)
                told[what] += len(names)
            if max(told.values()) >= NAMED_MAX:
                await trio.sleep_until(until)

    async def _ask_twin(self, where: Address) -> None:
        with trio.move_on_after(TWIN_DEADLINE_S):
            if await self._prove(where):
                self._taken(where)

    def _start_push_pull(self, address: Address) -> None:
        """Soon dial this address, unless that is about to happen.

        Last words wait for no other push-pull: they are few, and so is the time that is left.
        """
        limiter = self._last_words if address in self.membership.asked else self._push_pulls
        one = address, limiter
        if self._nursery is not None and one not in self._under_way and len(self._under_way) < PUSH_PULLS_WAITING_MAX:
            self._under_way.add(one)
            self._nursery.start_soon(self._push_pull, *one)

    async def _push_pull(self, address: Address, limiter: trio.CapacityLimiter) -> None:
        try:
            failure = await self._exchange_tables(address, limiter)
        finally:
            self._under_way.discard((address, limiter))
        if failure is None:
            self._said.pop(address, None)
            return
        there = [one for one in self.membership.members.values() if (one.host, one.port) == address]
        resident = min(there, key=lambda one: one.state, default=None)  # rather who lives there than who did
        is_out = resident is not None and (resident.state == State.LEFT or self.membership.is_revoked(resident.id))
        awaited = isinstance(failure, Refused) or not is_out  # nobody need answer where who was there is out
        if self._said.get(address) != str(failure) and awaited:
            if len(self._said) >= SAID_MAX:  # addresses come and go with ports that the kernel picks
                self._said.clear()
            self._said[address] = str(failure)
            if isinstance(failure, Refused):
                self._refused(address, failure)
            else:
                LOGGER.warning("%s%s; trying again", f"{resident.name}: " if resident is not None else "", failure)
        effects = self.membership.on_unreachable(address, trio.current_time())
        await self.perform(effect for effect in effects if not isinstance(effect, Log))  # said above, with the cause

    async def _exchange_tables(self, address: Address, limiter: trio.CapacityLimiter) -> Exception | None:
        """One push-pull; returns what went wrong. It has its time from when its turn comes."""
        try:
            async with limiter:
                with trio.fail_after(PUSH_PULL_DEADLINE_S):
                    connection = await self._transport.dial(address)
                    self._peers.count(connection)
                    try:
                        await greet(connection, self._hello())
                        if self._secrets is not None:
                            await self._secrets.exchange(connection)
                        await self._send_table(connection)
                        await self._receive_table(connection, None, address)
                        self._introduced = True
                    finally:
                        await self._peers.close(connection)
        except (ConnectionLost, Refused, PeerError) as error:
            return error
        except trio.TooSlowError:
            return ConnectionLost(f"{shown(address)}: no answer within {PUSH_PULL_DEADLINE_S:g} s")
        except Exception as error:
            self._peers.offences.unforeseen(error, f"dropped the member table of {shown(address)}")
            return PeerError(f"{shown(address)}: its member table could not be handled")
        return None

    async def _send_table(self, connection: Connection) -> None:
        table = self.membership.table()
        for start in range(0, len(table.members), TABLE_PART):
            await connection.send(MemberTable(table.sender, table.members[start : start + TABLE_PART]))
        await connection.send(MemberTable(table.sender, ()))  # an empty part ends it

    async def _keep_to_budget(self, connection: Connection, rows: int) -> None:
        host = connection.remote.rpartition(":")[0]
        await trio.sleep(self._budget.wait_s(host, rows, trio.current_time()))  # lets others work in any case

    async def _receive_table(self, connection: Connection, part: MemberTable | None, dialled: Address | None) -> None:
        for _ in range(TABLE_PARTS_MAX):
            if part is None:
                message = await connection.receive()
                if not isinstance(message, MemberTable):
                    raise PeerError(f"{connection.remote} sent {type(message).__name__} in the middle of a push-pull")
                part = message
            check_identity(connection, part.sender)
            if not part.members:
                return
            if dialled is None:
                await self._keep_to_budget(connection, len(part.members))
            await self._hear_part(connection, part, dialled)
            self._note_heard(part.sender)
            part = None
        raise PeerError(f"{connection.remote} sent a member table without end")

    async def _hear_part(self, connection: Connection, part: MemberTable, dialled: Address | None) -> None:
        """A part is few enough rows to be verified at once (32 of them take 5 ms); others work before the next."""
        membership = self.membership
        verified, forged = membership.verifications, membership.forgeries
        effects = membership.on_table(part, trio.current_time(), dialled)
        verified, forged = membership.verifications - verified, membership.forgeries - forged
        await self.perform(effects)
        if verified:
            await self._keep_to_budget(connection, VERIFICATION_ROWS * verified)
        if forged:  # who passes a record on has verified it
            raise PeerError(f"{connection.remote} sent records of members that did not sign them")
