"""Who has to mend it: the peer, or the user?"""

from __future__ import annotations


class PeerError(Exception):
    """A peer broke the rules: drop that peer, never the daemon."""


class UserError(Exception):
    """The user can mend this: one clear line, a non-zero exit, no traceback."""
