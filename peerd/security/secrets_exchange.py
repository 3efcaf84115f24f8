"""How do members tell each other of authorities, revocations and keys? Before the tables of a push-pull.

On a connection whose other end has proved who it is; nothing is sent to a stranger, nor over what is plain:

    who dialled  SecretsHeld: three digests
    the other    Successors, RevocationList, Keys: where its own differ; then SecretsHeld
    who dialled  Successors, RevocationList, Keys: where its own differ

Authorities go first, as they have signed the rest, and revocations before keys, so that no key is with a node that may
still give it to who is out.
"""

from __future__ import annotations

from collections.abc import Iterable

import trio

from peerd.security.keyring import GENERATIONS_MAX
from peerd.security.revocations import REVOKED_MAX
from peerd.security.secrets_folder import PART, parts
from peerd.security.shared_secrets import SharedSecrets
from peerd.security.statements import Unbelieved
from peerd.security.succession import SUCCESSORS_MAX
from peerd.transport.connection import Connection
from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId
from peerd.transport.messages import Keys, Message, Revocation, RevocationList, SecretsHeld, Successors

PARTS_MAX = 2 * REVOKED_MAX // PART + 3
UNBELIEVED_MAX = 16  # in a message: what members of a swarm that changes its authority may say; each costs 74 us
SUCCESSOR_ROWS = 32  # of a table, that the four certificates of one cost


class SecretsExchange:
    """One node's part in it."""

    def __init__(self, secrets: SharedSecrets) -> None:
        self._secrets = secrets

    async def exchange(self, connection: Connection) -> None:
        """The dialling side, once greeted. Raises ConnectionLost and PeerError."""
        if not connection.identity:
            return
        await connection.send(self._secrets.held)
        for _ in range(PARTS_MAX):
            message = await connection.receive()
            if isinstance(message, SecretsHeld):
                await self._tell(connection, message)
                return
            self._hear(connection, message)
        raise PeerError(f"{connection.remote} sent revocations without end")

    async def answer(self, connection: Connection, message: Message) -> None:
        """The accepting side, for each of these messages that comes. Raises ConnectionLost and PeerError."""
        if not connection.identity:
            raise PeerError(f"{connection.remote} speaks of keys, and has not proved who it is")
        if isinstance(message, SecretsHeld):
            await self._tell(connection, message)
            await connection.send(self._secrets.held)
        else:
            self._hear(connection, message)

    def rows_of(self, message: Message) -> int:
        """What hearing and answering it costs, in rows of a table: of the same size, and as dear to encode."""
        if isinstance(message, SecretsHeld):
            held = self._secrets.held
            return 1 + (len(self._secrets.revocations) if message.revocations != held.revocations else 0)
        if isinstance(message, Successors):
            return 1 + SUCCESSOR_ROWS * len(message.successors)
        return 1 + (len(message.revocations) if isinstance(message, RevocationList) else 0)

    @property
    def verifications(self) -> int:
        """The signatures verified so far, which cost more than a row."""
        return self._secrets.verifications

    async def _tell(self, connection: Connection, theirs: SecretsHeld) -> None:
        secrets, held = self._secrets, self._secrets.held
        if theirs.successors != held.successors:
            await connection.send(Successors(tuple(secrets.live_successors())))
        if theirs.revocations != held.revocations:
            for part in parts(secrets.revocations.all()):
                await connection.send(part)
        if secrets.is_revoked(connection.identity or ""):  # it became so while this was said
            raise PeerError(f"{connection.remote} is revoked")
        if theirs.keyring != secrets.keyring.digest:
            await connection.send(Keys(secrets.keyring.generations))

    def _hear(self, connection: Connection, message: Message) -> None:
        if isinstance(message, Successors):
            if len(message.successors) > SUCCESSORS_MAX:
                raise PeerError(f"{connection.remote} sent {len(message.successors)} successors of authorities")
            self._secrets.hear_successors(message.successors)
        elif isinstance(message, RevocationList):
            new: list[NodeId] = []
            before = self._secrets.revocations.digest
            try:
                self._add(connection, message.revocations, new)
            finally:  # what is believed counts, whatever lies come after it
                if new:
                    self._secrets.put_out(new)
                if self._secrets.revocations.digest != before:
                    self._secrets.changed()
        elif isinstance(message, Keys):
            if len(message.generations) > GENERATIONS_MAX:
                raise PeerError(f"{connection.remote} sent {len(message.generations)} keys for datagrams")
            if self._install(message):
                self._secrets.changed()
        else:
            raise PeerError(f"{connection.remote} sent {type(message).__name__} where keys are spoken of")

    def _add(self, connection: Connection, said: Iterable[Revocation], new: list[NodeId]) -> None:
        """Believe what is to be believed; whoever is out since is added to `new`. Raises PeerError."""
        unbelieved = 0
        for one in said:
            try:
                if self._secrets.revocations.add(one):
                    new.append(one.node)
            except Unbelieved as error:
                self._secrets.unbelieved += 1
                unbelieved += 1
                if unbelieved > UNBELIEVED_MAX:
                    raise PeerError(f"{connection.remote}: {error}, and more of them") from None

    def _install(self, message: Keys) -> bool:
        changed = False
        for one in message.generations:
            try:
                changed |= self._secrets.keyring.add(one, trio.current_time())
            except Unbelieved:
                self._secrets.unbelieved += 1
        return changed
