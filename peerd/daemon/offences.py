"""What becomes of a peer that breaks the rules, or says what a core did not foresee? It is dropped, never the daemon.

A peer is its node id, where a certificate has proved that: the addresses of one are as many as it likes. Else it is
the id and its host together: ids are believed, so one alone would let anybody have an honest node refused. Who never
greeted is its host; not loopback, which all nodes of a small swarm share.
"""

from __future__ import annotations

import ipaddress
import traceback
from collections import Counter
from collections.abc import Callable

import trio

from peerd.node.strikes import Strikes
from peerd.process.logs import LOGGER
from peerd.training.modes.own_mode import whose
from peerd.transport.connection import Connection
from peerd.transport.errors import Blameless
from peerd.transport.ids import NodeId

TOLD_MAX = 256  # tracebacks in a daemon's life: a place in the code has one a kind of error


class Offences:
    """Those against one node."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(strikes=0, peers_refused=0, unforeseen_errors=0)
        self.on_refused: Callable[[NodeId, float], None] = lambda node, seconds: None
        self._strikes = Strikes()
        self._told: set[tuple[type[Exception], str, int]] = set()

    def strike(self, node: NodeId, host: str, error: Exception) -> None:
        """A peer caused this error; `node` is "" where it has not greeted, `host` where it has proved its id."""
        if isinstance(error, Blameless) or not _can_be_struck(node, host):
            return
        self.counts["strikes"] += 1
        now = trio.current_time()
        before = self._strikes.refused_s((node, host), now)
        if (refused_s := self._strikes.strike((node, host), now)) and not before:
            self.counts["peers_refused"] += 1
            who = " at ".join(filter(None, (node, host)))
            LOGGER.warning("%s has broken the rules again and again: refused for %.0f min", who, refused_s / 60)
            self.on_refused(node, refused_s)

    def refused_s(self, node: NodeId, host: str) -> float:
        """For how many seconds a peer is not heard; 0: it is."""
        if not _can_be_struck(node, host):
            return 0.0
        now = trio.current_time()
        return max(self._strikes.refused_s(who, now) for who in ((node, host), (node, "")))

    def forgive(self, node: NodeId) -> None:
        """Hold nothing against this node, wherever it was."""
        self._strikes.forgive(lambda who: isinstance(who, tuple) and who[0] == node)

    def unforeseen(self, error: Exception, what: str) -> None:
        """Count an error that is a bug here, whoever found it; the first one of a kind and place is told in full."""
        self.counts["unforeseen_errors"] += 1
        frames = traceback.extract_tb(error.__traceback__)
        kind = (type(error), frames[-1].filename, frames[-1].lineno or 0) if frames else (type(error), "", 0)
        if kind not in self._told and len(self._told) < TOLD_MAX:
            self._told.add(kind)
            own = whose(error)
            where = f"a bug in {own}" if own is not None else "a bug in peerd, please report it"
            LOGGER.error("%s: %s; this node goes on", what, where, exc_info=error)


def unproved_host(connection: Connection) -> str:
    """Where the other end is, as far as that says who it is; "": it has proved its id."""
    return "" if connection.identity else connection.host


def _can_be_struck(node: NodeId, host: str) -> bool:
    if node or not host:
        return bool(node)
    return not ipaddress.ip_address(host).is_loopback
