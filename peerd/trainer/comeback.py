"""Is there a daemon again? What a script that was started by hand looks for once its own has gone: it trains on
meanwhile, and its model is the swarm's again as soon as the node has been started anew."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from peerd.local.local_socket import LocalSocket, check_private, runtime_dir
from peerd.trainer.say import say
from peerd.trainer.session import Past, RefusedNow, Session
from peerd.transport.errors import UserError

LOOK_EVERY_S = 5.0
COST_MAX = 1 / 50  # of the time, where the node does not take the script yet: a large model is offered in seconds

OpenAgain = Callable[[LocalSocket, Past], Session | None]
"""The session that follows another one, or None where the daemon has gone again. Raises Refused."""


class Comeback:
    """Of one script, from when its daemon is gone."""

    def __init__(self, session: Session, open_again: OpenAgain) -> None:
        """`session` is the one that is lost."""
        self.open_again = open_again
        self._past = session.past
        self._path = session.path
        self._look_at = time.monotonic() + LOOK_EVERY_S
        self._refused = ""  # why the node that is there does not take it yet

    def look(self, step: int) -> Session | None:
        """A session with the daemon that is there now, if there is one; the script has made so many steps.

        Raises Refused.
        """
        if time.monotonic() < self._look_at:
            return None
        self._look_at = time.monotonic() + LOOK_EVERY_S
        if (socket := self._connect()) is None:
            self._refused = ""
            return None
        if not self._refused:
            say("the node is back: this script waits for its swarm")
        began = time.monotonic()
        gc.collect()  # the memory of a session that is lost is in cycles, as is the place of one interrupted here
        try:
            session = self.open_again(socket, self._past._replace(step=step))
        except RefusedNow as refusal:
            now = time.monotonic()
            self._look_at = now + max(LOOK_EVERY_S, (now - began) / COST_MAX)
            if str(refusal) != self._refused:
                self._refused = str(refusal)
                say(f"{refusal}; training goes on alone, and the node is asked again")
            return None
        self._refused = ""
        if session is None:
            say("the node went away again; training goes on alone until it is back")
        return session

    def _connect(self) -> LocalSocket | None:
        """To a node that answers."""
        try:
            if self._path.parent == runtime_dir():
                check_private(self._path.parent)  # removed meanwhile, it may be another user's now
            socket = LocalSocket(self._path, waits=False)
        except (UserError, OSError):
            return None
        try:
            socket.ask("exchange")
        except (UserError, OSError, EOFError):  # it is on its way, is stopped, or has gone: what a look later tells
            socket.close()
            return None
        except BaseException:
            socket.close()
            raise
        return socket
