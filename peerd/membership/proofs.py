"""Is a record true? In a signed swarm the subject has signed what it is, and the accuser that it holds it for dead.

A record carries its *claim*: all that the subject says of itself, ALIVE or LEFT, under the subject's key, whose hash is
its id. One that is SUSPECT or FAILED has the last such claim of a living subject, and after it the accuser's signature
over whom it accuses in which life and incarnation of what. So nobody can make a member, move one, have one say or end
anything, nor put an accusation into another's mouth; passing on changes nothing.

The accuser must be somebody in our table, alive or not, for its key is there and no stranger can accuse. It may be dead
because after a partition each half is told of its dead by those whom it holds dead, and must believe them enough to
ask. Of an accusation by somebody we have not met the subject's claim remains: it said so itself.

A plain swarm has no `Proofs`, and looks at none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgpack

from peerd.transport.ids import NodeId
from peerd.transport.messages import Member, State
from peerd.transport.secure.signing import KEY_BYTES, PROOF_BYTES, SIGNATURE_BYTES, Signing, proof, proves

RECORD_PROOF_BYTES = PROOF_BYTES + SIGNATURE_BYTES
"""The longest proof: the subject's, and the accuser's signature."""

VERIFICATION_ROWS = 4
"""The work of one verification, in new rows of a table in which nothing is verified: 74 us for 20."""

UNKNOWN_ACCUSERS = "unknown_accusers"
_CLAIM = "claim of a member 1"
_ACCUSATION = "accusation of a member 1"


class Proofs:
    """What one node signs, and what it asks of others' records."""

    def __init__(self, signing: Signing, rows: Mapping[NodeId, Member]) -> None:
        """`rows` has who is known, and was verified when it came there."""
        self.verifications = 0  # until now
        self._signing = signing
        self._rows = rows

    def claimed(self, me: Member) -> Member:
        """This node's own record."""
        return claimed(me, self._signing)

    def accused(self, subject: Member, state: State, by: NodeId) -> Member:
        """The record by which this node says that the subject, whose record was verified, is SUSPECT or FAILED."""
        signature = self._signing.sign(_ACCUSATION, _accusation(subject, state))
        return replace(subject, state=state, accuser=by, proof=subject.proof[:PROOF_BYTES] + signature)

    def fault(self, record: Member) -> str:
        """Why the record is not to be believed (a name to count it under), or ""."""
        accused = record.state in (State.SUSPECT, State.FAILED)
        if len(record.proof) != (RECORD_PROOF_BYTES if accused else PROOF_BYTES) or bool(record.accuser) != accused:
            return "unsigned_records"
        accuser = self._rows.get(record.accuser)
        if accused and accuser is None:
            return UNKNOWN_ACCUSERS
        if not self._is_claimed(record) or (accuser is not None and not self._is_accused(record, accuser)):
            return "bad_signatures"
        return ""

    def _is_claimed(self, record: Member) -> bool:
        known = self._rows.get(record.id)
        if known is not None and claim(known) == claim(record):
            return True
        self.verifications += 1
        return proves(self._signing, record.proof[:PROOF_BYTES], record.id, _CLAIM, _claim(record))

    def _is_accused(self, record: Member, accuser: Member) -> bool:
        """Whoever says FAILED says SUSPECT, too: so a verdict is heard by those who want to judge for themselves."""
        key, signature = accuser.proof[:KEY_BYTES], record.proof[PROOF_BYTES:]
        states = (State.SUSPECT, State.FAILED) if record.state == State.SUSPECT else (State.FAILED,)
        for state in states:
            self.verifications += 1
            if self._signing.verify(key, signature, _ACCUSATION, _accusation(record, state)):
                return True
        return False


def claimed(me: Member, signing: Signing) -> Member:
    """This node's own record, signed."""
    return replace(me, proof=proof(signing, _CLAIM, _claim(me)))


def claim(record: Member) -> Member:
    """What the subject itself has said: of an accusation, that it lives."""
    if record.state not in (State.SUSPECT, State.FAILED):
        return record
    return replace(record, state=State.ALIVE, accuser="", proof=record.proof[:PROOF_BYTES])


def _claim(record: Member) -> bytes:
    """So encoded that two different claims never read alike."""
    left = record.state == State.LEFT
    where = record.host, record.port
    packed: bytes = msgpack.packb((record.id, record.name, *where, record.epoch, record.incarnation, left, record.meta))
    return packed


def _accusation(record: Member, state: State) -> bytes:
    packed: bytes = msgpack.packb((record.id, record.epoch, record.incarnation, int(state)))
    return packed
