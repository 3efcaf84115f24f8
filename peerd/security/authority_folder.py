"""Where is an authority kept? In a folder of its own, of which all nodes of one user on one machine may share one.

Whoever has the folder lets in whom they like.
"""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from cryptography import x509

from peerd.local import node_key
from peerd.local.durable import replace
from peerd.local.locked import locked
from peerd.local.node_key import NodeKey
from peerd.security import certificates
from peerd.security.authority import Authority, generate, self_signed, succeed
from peerd.security.certificates import Untrusted, der, read_der
from peerd.security.wall_clock import BEGINNING, shown
from peerd.transport.errors import UserError
from peerd.transport.messages import Successor

_KEY, _NEXT_KEY, _CERTIFICATE, _LOCK = "key.pem", "next-key.pem", "certificate.pem", "lock"
_FILE_BYTES_MAX = 1 << 16
NEW_TOKENS = "then all nodes that it let in need a new token"


def at(folder: Path, now: datetime) -> Authority:
    """The authority kept in a folder, made when there is none: one, however many nodes begin at once.

    Raises UserError for one that cannot be used: whoever it let in would be shut out by another one in its place.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if {folder.lstat().st_uid, folder.stat().st_uid} != {os.getuid()}:
            raise UserError(f"the authority's folder {folder} is another user's; remove it, or set XDG_STATE_HOME")
        folder.chmod(0o700)
        with locked(folder / _LOCK):
            return load(folder, now) or _make(folder, now)
    except OSError as error:
        raise UserError(
            f"the authority's folder {folder}: {error.strerror}; it must be this user's own (XDG_STATE_HOME moves it)"
        ) from None


def load(folder: Path, now: datetime) -> Authority | None:
    """The one kept there; None where none was made, or not to the end. Raises UserError."""
    cure = f"restore {folder} from a backup, or remove it: {NEW_TOKENS}"
    kept = _kept(folder, cure)
    if kept is not None and not _belong_together(*kept):
        kept = _kept(folder, cure)  # another node of this user may have replaced it between two of the files
    if kept is None:
        return None
    if not _belong_together(*kept):
        raise UserError(f"the authority's certificate {folder / _CERTIFICATE} is damaged; {cure}")
    key, certificate = kept
    try:
        certificates.check_time(certificate, now)
    except Untrusted as error:
        right = f"; if it is right, remove {folder}: {NEW_TOKENS}" if now > certificate.not_valid_after_utc else ""
        raise UserError(
            f"the authority's certificate in {folder} is {error}; set this machine's clock{right}"
        ) from None
    return Authority(key, certificate, certificate)


def _kept(folder: Path, cure: str) -> tuple[NodeKey, x509.Certificate] | None:
    key, following = (node_key.read(folder / name, "the authority's key", cure) for name in (_KEY, _NEXT_KEY))
    if key is None or not os.path.lexists(folder / _CERTIFICATE):
        return None
    certificate, *_ = _certificates(folder / _CERTIFICATE, cure)
    if following is not None and _belong_together(following, certificate):
        key = following  # a crash came before it was given its name
    return key, certificate


def _belong_together(key: NodeKey, certificate: x509.Certificate) -> bool:
    return certificates.is_authority(certificate) and certificates.public_key(certificate) == key.public


def _make(folder: Path, now: datetime) -> Authority:
    if now < BEGINNING:  # it would have ended, or be younger than what it signs, once the clock is right
        raise UserError(f"no authority can be made while this machine's clock is at {shown(now)}; set it")
    key = node_key.read(folder / _KEY) or NodeKey.generate()  # a crash came between the two files
    made = self_signed(key, now)
    key.write(folder / _KEY)
    replace(folder / _CERTIFICATE, certificates.pem([made.certificate]))
    return made


def rotate(folder: Path, now: datetime, until: datetime, known: x509.Certificate) -> tuple[Authority, Successor]:
    """Put a new authority in the place of the one that is kept here, if that is the one `known`. Raises UserError.

    The certificate's file, which has both and what they say of each other, decides which one is kept.
    """
    try:
        with locked(folder / _LOCK):
            if (old := load(folder, now)) is None:
                raise UserError(f"there is no authority in {folder}")
            # a step from one that nobody has heard of would be believed by none
            if known != old.certificate:
                raise UserError("another node of this user has just replaced the authority: it need not be done again")
            old.key.write(folder / _KEY)  # a crash may have left it under the other name
            new = generate(now)
            step = succeed(old, new, now, min(until, old.certificate.not_valid_after_utc))
            new.key.write(folder / _NEXT_KEY)
            said = [read_der(step.old), read_der(step.new_by_old), read_der(step.old_by_new)]
            before = _certificates(folder / _CERTIFICATE, "restore it from a backup")[1:]
            replace(folder / _CERTIFICATE, certificates.pem([new.certificate, *said, *before]))
            with suppress(OSError):  # it is done: whoever loads it takes the key by its other name, too
                new.key.write(folder / _KEY)
                (folder / _NEXT_KEY).unlink()
            return new, step
    except OSError as error:
        raise UserError(f"the authority's folder {folder}: {error.strerror}") from None


def successors(folder: Path) -> list[Successor]:
    """What the authority kept here has replaced, and what that one had. Raises UserError."""
    path = folder / _CERTIFICATE
    if not os.path.lexists(path):
        return []
    new, *rest = _certificates(path, "restore it from a backup")
    found = []
    for old, new_by_old, old_by_new in zip(rest[::3], rest[1::3], rest[2::3], strict=False):
        found.append(Successor(*map(der, (old, new, new_by_old, old_by_new))))
        new = old
    return found


def _certificates(path: Path, cure: str) -> list[x509.Certificate]:
    try:
        with path.open("rb") as file:
            return certificates.read_pem(file.read(_FILE_BYTES_MAX))
    except OSError as error:
        raise UserError(f"the authority's certificate {path}: {error.strerror}; let this user read it") from None
    except Untrusted:
        raise UserError(f"the authority's certificate {path} is damaged; {cure}") from None
