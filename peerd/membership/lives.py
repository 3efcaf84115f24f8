"""Which life of an identity counts, when a record speaks of one that nobody has met?

A higher epoch supersedes a life, and so does a lie about one. Two things keep a lie from ending anybody:

- a record of this node's own later life is no more than a reason to ask at its address whether a twin holds our key;
- a member that was dialled and answered, in a life that a record had buried, is believed against that record, and the
  epoch so refuted is not believed again for a while, however many still tell it.

In a signed swarm (proofs.py) only whoever has the key can tell such a lie. What is left for both is an older copy of a
state folder, which starts in a life that others have seen end.
"""

from __future__ import annotations

from peerd.membership.roster import TABLE_MEMBERS
from peerd.transport.ids import Address, NodeId
from peerd.transport.messages import Member

TWIN_DEADLINE_S = 10.0
"""A question after a twin takes no longer, and the next waits as long: one at a time."""

TWIN_AGAIN_S = 60.0
"""An address is asked for a twin once in so long."""

DISOWNED_S = 600.0
"""For so long an epoch that its member has refuted is not believed: longer than tables take to cross a swarm."""


class TwinQuestions:
    """When may an address be asked whether it holds our key? Whoever forges records chooses the addresses."""

    def __init__(self) -> None:
        self._asked: dict[Address, float] = {}

    def may_ask(self, where: Address, now: float) -> bool:
        """Whether to ask there now, which then counts as asked."""
        self._asked = {known: at for known, at in self._asked.items() if now - at < TWIN_AGAIN_S}
        if where in self._asked or any(now - at < TWIN_DEADLINE_S for at in self._asked.values()):
            return False
        self._asked[where] = now
        return True


class Disowned:
    """Epochs that the member itself has refuted, the highest of each."""

    def __init__(self) -> None:
        self._until: dict[NodeId, tuple[int, float]] = {}

    def add(self, lie: Member, now: float) -> None:
        """This record is of a life that never was."""
        self._until.pop(lie.id, None)
        if len(self._until) >= TABLE_MEMBERS:
            del self._until[next(iter(self._until))]
        self._until[lie.id] = lie.epoch, now + DISOWNED_S

    def has(self, record: Member, known: Member | None, now: float) -> bool:
        """Whether the record speaks of such a life."""
        epoch, until = self._until.get(record.id, (-1, now))
        return now < until and record.epoch <= epoch and (known is None or record.epoch > known.epoch)

    def forget(self, id: NodeId) -> None:
        """The member itself speaks of such a life: by now there is one."""
        self._until.pop(id, None)
