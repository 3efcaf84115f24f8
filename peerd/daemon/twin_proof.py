"""Does another node run with a copy of this node's state folder? Only one that holds the key can say so.

Anybody may claim that a node of this id is somewhere. So whoever is told dials there and asks for a signature; the two
nodes of one key know it alike, which is why a proof names none. What is signed has all that either end said:

- the nonce, so that an earlier proof is of no use;
- a number of each process, so that our own answer, should the place that was named pass our question on to ourselves,
  is seen to be ours;
- the answerer's epoch and address, so that which of two lives is the newer is the twin's own word, whoever brings it;
- the swarm and the run: in another one, a copied state folder harms nobody here;
- the purpose (NodeKey.sign), and the answerer's own random number: who asks cannot have a text of theirs signed.

A stranger may ask. An answer costs 24 us and the connection, so the rate at which the listener accepts (admission.py)
bounds it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import astuple, replace

import msgpack
import trio

from peerd.local.node_key import NodeKey
from peerd.transport.connection import Connection, ConnectionLost, Transport
from peerd.transport.errors import PeerError
from peerd.transport.ids import Address
from peerd.transport.messages import Challenge, Member, Proof
from peerd.transport.patience import DIAL_TIMEOUT_S, GREETING_DEADLINE_S

_PURPOSE = "proof of a twin 1"
_NONCE_BYTES = 32
_LIFE_BYTES = 16


class TwinProof:
    """What one process asks of its twins, and answers them."""

    def __init__(self, key: NodeKey, me: Callable[[], Member], swarm: str, run: str, transport: Transport) -> None:
        """Of `me`, as it is called and reached now."""
        self._key = key
        self._now_me = me
        self._where = swarm, run
        self._transport = transport
        self._life = secrets.token_bytes(_LIFE_BYTES)

    @property
    def _me(self) -> Member:
        return self._now_me()

    async def prove(self, address: Address) -> bool:
        """Whether whoever answers there has proved that this node's key is in use by a newer life than this one.

        Of two with one epoch the higher address is the newer, as in membership. Ends within DIAL_TIMEOUT_S and
        GREETING_DEADLINE_S; whatever goes wrong proves nothing.
        """
        challenge = Challenge(self._me.id, secrets.token_bytes(_NONCE_BYTES), self._life, self._me.epoch)
        try:
            with trio.fail_after(DIAL_TIMEOUT_S + GREETING_DEADLINE_S):
                connection = await self._transport.dial(address)
                try:
                    await connection.send(challenge)
                    proof = await connection.receive()
                finally:
                    await connection.aclose()
        except (ConnectionLost, PeerError, trio.TooSlowError):
            return False
        return isinstance(proof, Proof) and self._is_newer_twin(challenge, proof)

    async def answer(self, connection: Connection, challenge: Challenge) -> None:
        """Say what a node that was told of us is to know. Raises PeerError where the question is not for us."""
        if challenge.node != self._me.id:
            raise PeerError("it asked for a proof of another id than this node's")
        if challenge.life == self._life:
            raise PeerError("it asked this node a question of this node's own")
        if (len(challenge.nonce), len(challenge.life)) != (_NONCE_BYTES, _LIFE_BYTES):
            raise PeerError(
                f"it asked for a proof with numbers of {len(challenge.nonce)} and {len(challenge.life)} bytes"
            )
        proof = Proof(self._life, self._me.epoch, self._me.host, self._me.port, b"")
        await connection.send(replace(proof, signature=self._key.sign(_PURPOSE, self._said(challenge, proof))))

    def _is_newer_twin(self, challenge: Challenge, proof: Proof) -> bool:
        theirs, ours = (proof.epoch, proof.host, proof.port), (self._me.epoch, self._me.host, self._me.port)
        newer = theirs > ours and proof.life != self._life
        return newer and self._key.verify(proof.signature, _PURPOSE, self._said(challenge, proof))

    def _said(self, challenge: Challenge, proof: Proof) -> bytes:
        """Everything but the signature, so encoded that two different conversations never read alike."""
        said: bytes = msgpack.packb((*self._where, *astuple(challenge), *astuple(proof)[:-1]))
        return said
