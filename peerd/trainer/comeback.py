"""Is there a daemon again? What a script that was started by hand looks for once its own has gone: it trains on
meanwhile, and its model is the swarm's again as soon as the node has been started anew."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from peerd.local.local_socket import LocalSocket, find_node
from peerd.trainer.say import say
from peerd.trainer.session import Past, Refused, Session
from peerd.transport.errors import UserError

LOOK_EVERY_S = 5.0

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
        self._is_over = False

    def look(self, step: int) -> Session | None:
        """A session with the daemon that is there now, if there is one; the script has made so many steps."""
        if self._is_over or time.monotonic() < self._look_at:
            return None
        try:
            socket = self._connect()
            session = None if socket is None else self.open_again(socket, self._past._replace(step=step))
        except Refused as refusal:
            self._is_over = True
            say(f"{refusal}; training goes on alone")
            return None
        finally:
            self._look_at = time.monotonic() + LOOK_EVERY_S
        if session is not None:
            say(f"there is a daemon again: training goes on with the swarm, from step {session.step}")
        return session

    def _connect(self) -> LocalSocket | None:
        """To a node that answers."""
        given = os.environ.get("PEERD_SOCKET")
        try:
            socket = LocalSocket(Path(given) if given else find_node(self._path.stem), waits=False)
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
