"""Who is let in? Each connection that another node dialled: greeted or refused, then heard until it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import trio

from peerd.daemon.cures import cured
from peerd.daemon.membership_service import MembershipService
from peerd.daemon.offences import unproved_host
from peerd.daemon.peers import Peers
from peerd.daemon.trainer_service import TrainerService
from peerd.node.receive_budget import ReceiveBudget
from peerd.process.logs import LOGGER
from peerd.process.seldom import Seldom
from peerd.security.reception import Reception
from peerd.training.codecs import vector
from peerd.training.mode import OPTIMIZER_VALUES_MAX
from peerd.transport.admission import GREETED_MAX, UNPROVED_IDLE_S, Greeted
from peerd.transport.connection import Connection, ConnectionLost
from peerd.transport.errors import Blameless, PeerError
from peerd.transport.hello import Instead, Refused, answer, first_difference
from peerd.transport.ids import NodeId
from peerd.transport.messages import (
    AS_STARTED,
    Hello,
    Member,
    MemberTable,
    Message,
    ModelMessage,
    Plan,
    Refuse,
    SecretsMessage,
    State,
    Welcome,
)
from peerd.transport.peer_queue import MODELS_WAITING_MAX
from peerd.transport.secure.credentials import STRANGER

NEWS_S, LOOK_S = 2.0, 0.02  # for the news of a member, less than a dialler waits; between two looks


class Acceptor:
    """The accepted connections of one node."""

    def __init__(
        self,
        me: Member,
        hello: Callable[[], Hello],
        peers: Peers,
        trainer_service: TrainerService,
        membership_service: MembershipService,
        instead: Instead,
        reception: Reception | None = None,
    ) -> None:
        """`hello` is asked anew for every connection, as by `peers`; `instead` serves members that want another thing.

        Who has no certificate is heard by the `reception` alone.
        """
        self._me = me
        self._hello = hello
        self._peers = peers
        self._trainer_service = trainer_service
        self._membership_service = membership_service
        self._instead = instead
        self._reception = reception
        self._offences = peers.offences
        self._nodes: dict[Connection, NodeId] = {}  # who has greeted on each
        self._greeted: Greeted[Connection] = Greeted()
        self._budget: ReceiveBudget[Connection] = ReceiveBudget()
        self._seldom = Seldom()  # by host and reason: a line a handshake fills a log with a gigabyte a day

    async def accept(self, connection: Connection) -> None:
        """Serve one connection from its greeting to its end."""
        self._peers.count(connection)
        try:
            await self._serve(connection)
        except Refused as refusal:
            if self._seldom.is_news(connection.host, refusal.field, now=trio.current_time()):
                LOGGER.warning("%s", cured(refusal))
        except ConnectionLost:
            pass
        except PeerError as error:
            told = str(error).removeprefix(f"{connection.remote}: ")
            if self._is_news(connection, error, told):
                LOGGER.warning("dropped %s: %s", self._called(connection), told)
            # who has no model yet knows of no bulk; a peer may still send it what its last life wanted
            if self._trainer_service.layout is not None or connection not in self._nodes:
                self._strike(connection, error)
        except Exception as error:  # a UserError too: here it is the peer that caused it
            self._offences.unforeseen(error, f"dropped {self._called(connection)}, what it said could not be handled")
            self._strike(connection, error)
        finally:
            self._nodes.pop(connection, None)
            self._greeted.leave(connection)
            self._budget.end(connection)
            await self._peers.close(connection)

    async def _serve(self, connection: Connection) -> None:
        await connection.shake_hands()
        self._peers.count(connection)
        if not connection.identity:  # who has proved to be a member is not to blame for what shares its host
            self._check_heard("", connection)
        if connection.identity == STRANGER:
            await self._hear_stranger(connection)
            return
        me = Welcome(self._me.id, self._me.name, self._me.epoch)
        hello = await answer(connection, partial(self._check, connection), me, self._instead)
        who = (hello.node, unproved_host(connection))
        self._nodes[connection] = hello.node
        _close(self._greeted.enter(connection, who, trio.current_time()), "others need the room")
        connection.on_bulk = partial(self._on_bulk, connection)
        connection.upgrades_refused = partial(self._why_not_upgraded, hello.node)
        self.raise_payload_limits()
        plan = AS_STARTED
        while True:
            message = await self._next_message(connection)
            if isinstance(message, MemberTable):
                await self._membership_service.answer(connection, message)
            elif isinstance(message, SecretsMessage):
                await self._membership_service.answer_secrets(connection, message)
            else:
                _close(self._greeted.sends(connection), "it has another connection to send on")
                if hello.node == self._me.id:  # a seed may be this node, under a name; its own tables harm nobody
                    raise PeerError(f"{connection.remote} says a {type(message).__name__} in this node's own name")
                if isinstance(message, Plan):
                    plan = message
                elif isinstance(message, ModelMessage):
                    await self._news_of(hello.node, hello.epoch)
                    self._trainer_service.on_message(hello.node, message)
                else:
                    await self._trainer_service.runner.on_message(hello.node, message, plan)
            self._budget.end(connection)
            if hello.node in self._membership_service.membership.members:
                self._greeted.useful(connection, trio.current_time())

    async def _hear_stranger(self, connection: Connection) -> None:
        assert self._reception is not None, "only where connections are sealed there are strangers"
        await self._reception.enrol(connection)

    async def _next_message(self, connection: Connection) -> Message:
        """Raises ConnectionLost where nothing comes from a peer that has proved nothing."""
        while True:
            before = connection.bytes_received
            with trio.move_on_after(UNPROVED_IDLE_S):
                return await connection.receive()
            if connection.bytes_received == before and not self._greeted.proved(connection, trio.current_time()):
                raise ConnectionLost(f"{connection.remote}: closed, it says nothing")

    async def _why_not_upgraded(self, node: NodeId) -> str:
        """Addresses of other carriers are taken from members alone; the news of a new one may still be on its way."""
        return "" if await self._news_of(node) else "it says: this node is not in its table of members"

    async def _news_of(self, node: NodeId, epoch: int = 0) -> bool:
        """Whether it is a member, in this life or a later one; the news of it may come after itself."""
        membership = self._membership_service.membership
        with trio.move_on_after(NEWS_S):
            while (member := membership.members.get(node)) is None or member.epoch < epoch:
                await trio.sleep(LOOK_S)
            return True
        return False

    def _on_bulk(self, connection: Connection, size: int) -> None:
        """Bound what is half here: see receive_budget.py; two more, for who is no member in our table yet."""
        if not size:
            self._budget.whole(connection)
            return
        members = sum(member.state <= State.SUSPECT for member in self._membership_service.membership.members.values())
        limit = (min(members, GREETED_MAX) + 2) * connection.payload_limit
        now = trio.current_time()
        _close(
            self._budget.begin(connection, size, limit, lambda each: self._greeted.proved(each, now)),
            "too much was on its way in",
        )

    def _is_news(self, connection: Connection, error: PeerError, told: str) -> bool:
        """Whether the log needs it: who breaks rules is refused soon, and it was said why; who breaks none never is."""
        who = self._who(connection)
        if isinstance(error, Blameless):
            return self._seldom.is_news(connection.host, who, told, now=trio.current_time())
        return not self._offences.refused_s(who, unproved_host(connection))

    def _strike(self, connection: Connection, error: Exception) -> None:
        """Count it, and drop what else this peer has here."""
        node, host = self._who(connection), unproved_host(connection)
        self._offences.strike(node, host, error)
        if node and not isinstance(error, Blameless):
            _close(self._greeted.of((node, host)), "its peer broke the rules")
            self._peers.cut(node, host)

    def _called(self, connection: Connection) -> str:
        """By the log."""
        who = self._who(connection)
        return f"{self._membership_service.name_of(who)} ({connection.remote})" if who else connection.remote

    def _who(self, connection: Connection) -> NodeId:
        return self._nodes.get(connection) or connection.identity or ""

    def _check_heard(self, node: NodeId, connection: Connection) -> None:
        if self._offences.refused_s(node, unproved_host(connection)):
            raise ConnectionLost(f"{connection.remote}: closed, it broke the rules too often")

    def raise_payload_limits(self) -> None:
        """Let messages in that hold a whole model, once it is known how large that is, and some out."""
        if (layout := self._trainer_service.layout) is not None:
            limit = vector.payload_limit(layout, OPTIMIZER_VALUES_MAX[self._trainer_service.plans.settings.exchange])
            self._peers.bulk_max = MODELS_WAITING_MAX * limit
            for connection in self._nodes:
                connection.payload_limit = limit

    def carrier(self, peer: NodeId) -> str:
        """What bulk from `peer` travels over; "" where it has not dialled."""
        return next((connection.carrier for connection, node in reversed(self._nodes.items()) if node == peer), "")

    def _check(self, connection: Connection, theirs: Hello) -> Refuse | None:
        self._check_heard(theirs.node, connection)
        if theirs.node == self._me.id and theirs.epoch != self._me.epoch:
            return Refuse("node", f"{theirs.node} is this node's own identity", theirs.node)
        return first_difference(self._hello(), theirs)


def _close(connections: Iterable[Connection], why: str) -> None:
    for connection in connections:
        connection.drop(ConnectionLost(f"{connection.remote}: closed, {why}"))
