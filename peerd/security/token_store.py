"""Where an issuer keeps the tokens that it made: a file, in which a use is noted before the certificate goes out.

So a crash between the two may lose a use, and never grants one twice. Several nodes of one user may share the file.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peerd.local import durable
from peerd.local.locked import locked
from peerd.security.token import ID_BYTES, SECRET_BYTES, USES_MAX, Kept, Token, used, worth_keeping
from peerd.transport.errors import UserError
from peerd.transport.ids import Address, NodeId

TOKENS_MAX = 1024
_FILE, _LOCK = "tokens.json", "tokens.lock"  # "lock" is the node's, for its life
_FILE_BYTES_MAX = 64 << 20  # 1024 tokens of 1024 uses


class TokenStore:
    """The tokens of one folder. Its methods wait for the disk: call them in a thread. All raise UserError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / _FILE

    def make(
        self, addresses: tuple[Address, ...], pin: bytes, uses: int, life_s: int, now: int, *, issuer: bool
    ) -> Token:
        """A new one."""
        if not 1 <= uses <= USES_MAX:
            raise UserError(f"uses: {uses} is not from 1 to {USES_MAX}")
        kept = Kept(secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES), uses, now + life_s, issuer)
        with self._changing() as tokens:
            rest = worth_keeping(tokens.values(), now, TOKENS_MAX - 1)
            if rest and len(rest) == TOKENS_MAX - 1 and now < rest[-1].expires and rest[-1].left:
                raise UserError(f"{TOKENS_MAX - 1} tokens wait to be used; let some expire, or remove {self._path}")
            tokens.clear()
            tokens.update({each.id: each for each in (kept, *rest)})
        return Token(addresses, pin, kept.id, kept.secret, kept.expires)

    def use(self, id: bytes, node: NodeId, expected: Callable[[bytes], bytes], given: bytes, now: int) -> Kept | str:
        """Note that a node uses a token; the token, or in a word why it may not. `expected` makes the proof."""
        with self._changing() as tokens:
            before = tokens.get(id)
            result = used(before, node, expected(before.secret) if before else b"", given, now)
            if isinstance(result, Kept):
                tokens[id] = result
            return result

    @contextmanager
    def _changing(self) -> Iterator[dict[bytes, Kept]]:
        """All of them, whose changes are on the disk when the block has ended."""
        try:
            with locked(self._folder / _LOCK):
                tokens = self._read()
                before = dict(tokens)
                yield tokens
                if tokens != before:
                    durable.replace(self._path, json.dumps([_row(kept) for kept in tokens.values()]))
        except OSError as error:
            raise UserError(f"the tokens in {self._folder}: {error.strerror}") from None

    def _read(self) -> dict[bytes, Kept]:
        try:
            rows = json.loads(durable.read(self._path, _FILE_BYTES_MAX))
            return {kept.id: kept for kept in map(_kept, rows)}
        except FileNotFoundError:
            return {}
        except (ValueError, LookupError, TypeError, RecursionError):
            cure = "remove it: then no token made before lets anybody in"
            raise UserError(f"the tokens in {self._path} are damaged; {cure}") from None


def _row(kept: Kept) -> dict[str, Any]:
    return {
        "id": kept.id.hex(), "secret": kept.secret.hex(), "uses": kept.uses, "expires": kept.expires,
        "issuer": kept.issuer, "used_by": list(kept.used_by),
    }  # fmt: skip


def _kept(row: dict[str, Any]) -> Kept:
    id, secret, used_by = bytes.fromhex(row["id"]), bytes.fromhex(row["secret"]), tuple(row["used_by"])
    kept = Kept(id, secret, row["uses"], row["expires"], row["issuer"], used_by)
    whole = (len(id), len(secret)) == (ID_BYTES, SECRET_BYTES) and type(kept.issuer) is bool
    if not whole or type(kept.uses) is not int or type(kept.expires) is not int or set(map(type, used_by)) - {str}:
        raise ValueError
    return kept
