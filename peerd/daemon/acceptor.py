"""Who is let in? Each connection that another node dialled: greeted or refused, then heard until it ends."""

from __future__ import annotations

from collections.abc import Callable

from peerd.daemon.cures import cured
from peerd.daemon.membership_service import MembershipService
from peerd.daemon.peers import Peers
from peerd.daemon.trainer_service import TrainerService
from peerd.process.logs import LOGGER
from peerd.training.codecs import vector
from peerd.transport.connection import Connection, ConnectionLost
from peerd.transport.errors import PeerError
from peerd.transport.hello import Refused, answer, first_difference
from peerd.transport.ids import NodeId
from peerd.transport.messages import AS_STARTED, Hello, Member, MemberTable, Plan, Refuse, Welcome


class Acceptor:
    """The accepted connections of one node."""

    def __init__(
        self,
        me: Member,
        hello: Callable[[], Hello],
        peers: Peers,
        trainer_service: TrainerService,
        membership_service: MembershipService,
    ) -> None:
        """`hello` is asked anew for every connection, as by `peers`."""
        self._me = me
        self._hello = hello
        self._peers = peers
        self._trainer_service = trainer_service
        self._membership_service = membership_service
        self._greeted: dict[Connection, NodeId] = {}

    async def accept(self, link: Connection) -> None:
        """Serve one connection from its greeting to its end."""
        self._peers.count(link)
        try:
            hello = await answer(link, self._check, Welcome(self._me.id, self._me.name, self._me.epoch))
            self._greeted[link] = hello.node
            self.raise_payload_limits()
            plan = AS_STARTED
            while True:
                message = await link.receive()
                if isinstance(message, MemberTable):
                    await self._membership_service.answer(link, message)
                elif hello.node == self._me.id:  # a seed may be this node, under a name; its own tables harm nobody
                    raise PeerError(f"{link.remote} says a {type(message).__name__} in this node's own name")
                elif isinstance(message, Plan):
                    plan = message
                else:
                    await self._trainer_service.on_message(hello.node, message, plan)
        except Refused as refusal:
            LOGGER.warning("%s", cured(refusal))
        except PeerError as error:
            LOGGER.warning("dropped %s", error if link.remote in str(error) else f"{link.remote}: {error}")
        except ConnectionLost:
            pass
        finally:
            self._greeted.pop(link, None)
            await self._peers.close(link)

    def raise_payload_limits(self) -> None:
        """Let messages in that hold a whole model, once it is known how large that is."""
        if (layout := self._trainer_service.layout) is not None:
            for link in self._greeted:
                link.payload_limit = vector.payload_limit(layout)

    def carrier(self, peer: NodeId) -> str:
        """What bulk from `peer` travels over; "" where it has not dialled."""
        return next((link.carrier for link, node in reversed(self._greeted.items()) if node == peer), "")

    def _check(self, theirs: Hello) -> Refuse | None:
        if theirs.node == self._me.id and theirs.epoch != self._me.epoch:
            return Refuse("node", f"{theirs.node} is this node's own identity", theirs.node)
        return first_difference(self._hello(), theirs)
