"""Where is what members have in common while a node does not run? In private files, one message a line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cryptography.x509 import Certificate

from peerd.local import durable
from peerd.security import wall_clock
from peerd.security.authority import read_successor
from peerd.security.certificates import pin_of
from peerd.security.succession import Succession
from peerd.transport import wire
from peerd.transport.errors import PeerError, UserError
from peerd.transport.messages import KeyGeneration, Keys, Message, Revocation, RevocationList, Successor, Successors

PART = 64  # revocations in a message: 47 kB at most, of a header's 64

Said = TypeVar("Said", Successors, RevocationList, Keys)

_FILE_BYTES_MAX = 16 << 20  # twice what all revocations take
FILES = _SUCCESSION, _REVOCATIONS, _KEYRING = "succession.hex", "revocations.hex", "keyring.hex"


def parts(revocations: Sequence[Revocation]) -> Iterator[RevocationList]:
    """The messages that hold all of them."""
    for start in range(0, len(revocations), PART):
        yield RevocationList(tuple(revocations[start : start + PART]))


@dataclass(frozen=True, slots=True)
class Kept:
    """All of it."""

    successors: Sequence[Successor] = ()
    revocations: Sequence[Revocation] = ()
    generations: Sequence[KeyGeneration] = ()
    keys_age_s: float = 0.0  # since the newest came, by the clock on the wall


def write(folder: Path, kept: Kept) -> None:
    """Keep them, on the disk when this returns. Raises OSError."""
    if kept.successors:
        _replace(folder / _SUCCESSION, [Successors((one,)) for one in kept.successors])
    _replace(folder / _REVOCATIONS, list(parts(kept.revocations)))  # first: see SharedSecrets
    _replace(folder / _KEYRING, [Keys(tuple(kept.generations))])


def read(folder: Path) -> Kept:
    """What was kept. Raises UserError for a damaged file: who is out must not come in by a fault of the disk."""
    return Kept(
        [one for said in _read(folder / _SUCCESSION, Successors) for one in said.successors],
        [one for said in _read(folder / _REVOCATIONS, RevocationList) for one in said.revocations],
        [one for said in _read(folder / _KEYRING, Keys) for one in said.generations],
        _age_s(folder / _KEYRING),
    )


def succession(authorities: Iterable[Certificate], *kept: Iterable[Successor]) -> Succession:
    """The authorities that a node knows, which begins with some, and keeps what replaced them. Raises UserError."""
    known = Succession(map(pin_of, authorities), read_successor)
    try:
        known.recall(one for some in kept for one in some)
    except PeerError as error:
        raise UserError(f"{_SUCCESSION} has a statement {error}; restore it from a backup, or remove it") from None
    return known


def _replace(path: Path, messages: Sequence[Message]) -> None:
    text = "".join(wire.encode(message)[0].hex() + "\n" for message in messages)
    if messages and not (path.is_file() and path.read_bytes() == text.encode()):  # what is damaged may be no text
        durable.replace(path, text)


def _age_s(path: Path) -> float:
    try:
        return max(0.0, wall_clock.now().timestamp() - path.stat().st_mtime)
    except OSError:
        return 0.0


def _read(path: Path, kind: type[Said]) -> list[Said]:
    try:
        if not path.is_file():
            return []
        lines = durable.read(path, _FILE_BYTES_MAX).decode().splitlines()
        said = [wire.decode(kind.KIND, bytes.fromhex(line), 0).message() for line in lines]
        return [one for one in said if isinstance(one, kind)]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; let this user read it") from None
    except (ValueError, PeerError):
        cure = "restore it from a backup, or remove it: other members, if any run, tell this node what was in it"
        raise UserError(f"{path} is damaged; {cure}") from None
