"""Who has to mend it: the peer, or the user?"""

from __future__ import annotations


def cause(error: Exception) -> str:
    """What went wrong in a few words; what has none of the system's (a name that cannot be one) says it itself."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


class PeerError(Exception):
    """A peer broke the rules: drop that peer, never the daemon."""


class Blameless(PeerError):
    """It cannot be talked to, and no rule was broken: another version, or silence. It counts as no strike."""


class Encrypted(Blameless):
    """It speaks TLS on a connection that is not sealed."""


class UserError(Exception):
    """The user can mend this: one clear line, exit code 1, no traceback."""


class WrongSetting(UserError):
    """Of the setting `key`, as `Settings` names it."""

    def __init__(self, text: str, key: str) -> None:
        super().__init__(text)
        self.key = key


def wrong(key: str, text: str) -> WrongSetting:
    """The line that this text makes of a setting."""
    return WrongSetting(f"{key}: {text}", key)
