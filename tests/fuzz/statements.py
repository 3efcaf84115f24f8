"""What issuers state and nodes keep: revocations and keys from peers, and the files of certificates from the disk.

Who is out and what the keys are is changed by nobody who may not say so.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import trio
from cast import NOW, SWARM, TOKEN_USES, cast, key
from files import altered_json
from material import on_the_wire, pick
from mutate import altered, bent, packed

from peerd.security import authority_folder, kept, secrets_folder
from peerd.security.certificates import check_chain, id_of, pem, pin_of, read_der
from peerd.security.secrets_exchange import SecretsExchange
from peerd.security.shared_secrets import SharedSecrets
from peerd.security.token import Kept
from peerd.security.token_store import TokenStore
from peerd.transport import wire
from peerd.transport.errors import PeerError, UserError
from peerd.transport.messages import Keys, RevocationList, Successors
from peerd.transport.secure.datagrams import DatagramSeal

FILES = ("revocations.hex", "keyring.hex", "tokens.json", "certificate.pem", "authority/key.pem",
         "authority/certificate.pem", "succession.hex")  # fmt: skip
STATED = {"revocations.hex", "keyring.hex", "succession.hex"}
SAID = {RevocationList.KIND, Keys.KIND, Successors.KIND}
LINK: Any = SimpleNamespace(identity="m", remote="the other end")


class Statements:
    """One node. An item is a message's kind and its header, or a file's number and what it holds."""

    def __init__(self) -> None:
        logging.getLogger("peerd").setLevel(logging.CRITICAL)
        who = self._cast = cast()
        self._folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self._store = TokenStore(self._folder)
        made = who.token
        with self._store._changing() as tokens:
            tokens[made.id] = Kept(made.id, made.secret, TOKEN_USES, made.expires, False, ("a" * 32,))
        secrets_folder.write(
            self._folder,
            secrets_folder.Kept(who.successors[:1], who.revocations, who.generations[:3]),
        )
        kept.write(self._folder, who.let_in[1])
        folder = self._folder / "authority"
        folder.mkdir()
        key(1).write(folder / "key.pem")
        (folder / "certificate.pem").write_text(pem([who.root.root]))
        self._valid = [(self._folder / name).read_bytes() for name in FILES]
        self._believed = {(one.node, one.revoked_at) for one in who.revocations if self._is_ours(one)}
        self._keys = {one.key for one in who.generations if self._is_ours(one)}
        self._pins = {pin_of(who.root.root), pin_of(read_der(who.successors[0].new))}
        for name in STATED:
            (self._folder / name).unlink()
        self._secrets = trio.run(self._node)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _is_ours(self, said: Any) -> bool:
        return said in (*self._cast.revocations[0::3], *self._cast.revocations[1::3]) or said in (
            *self._cast.generations[0::3], *self._cast.generations[1::3]
        )  # fmt: skip

    async def _node(self) -> SharedSecrets:
        trust, seal = self._cast.trust(), DatagramSeal()
        me = self._cast.member.id
        return SharedSecrets(self._folder, SWARM, me, trust, None, seal, alone=False, rng=Random(1))

    def draw(self, rng: Random) -> bytes:
        who, drawn = self._cast, rng.random()
        if drawn < 0.6:
            some: list[Any] = [pick(rng, who.revocations) for _ in range(int(rng.random() * 6))]
            sample = on_the_wire(RevocationList(tuple(some)))
            if drawn < 0.3:
                some = [pick(rng, who.generations) for _ in range(int(rng.random() * 4))]
                sample = on_the_wire(Keys(tuple(some)))
            if drawn < 0.15:
                some = [pick(rng, who.successors) for _ in range(int(rng.random() * 3))]
                sample = on_the_wire(Successors(tuple(some)))
            if rng.random() < 0.2:
                return bytes([sample.kind]) + sample.header
            changed = packed(altered(rng, sample.row)) if rng.random() < 0.8 else bent(rng, sample.header)
            return bytes([sample.kind]) + changed
        number = int(rng.random() * len(FILES))
        valid = self._valid[number]
        if FILES[number].endswith("json") and rng.random() < 0.7:
            return bytes([number]) + json.dumps(altered_json(rng, json.loads(valid))).encode()
        return bytes([number]) + bent(rng, valid, pick(rng, self._valid))

    def take(self, item: bytes) -> None:
        if not item:
            return
        try:
            if item[0] in SAID:
                message = wire.decode(item[0], memoryview(item)[1:], 0).message()
                trio.run(self._hear, message)
            elif item[0] < len(FILES):
                self._read(FILES[item[0]], item[1:])
        except (PeerError, UserError):
            pass
        self._look(self._secrets)

    async def _hear(self, message: Any) -> None:
        SecretsExchange(self._secrets)._hear(LINK, message)

    def _look(self, secrets: SharedSecrets) -> None:
        out = {(one.node, one.revoked_at) for one in secrets.revocations.all()}
        assert out <= self._believed, "put out by nobody"
        assert {one.key for one in secrets.keyring.generations} <= self._keys, "a key that nobody made"
        assert secrets.succession.known <= self._pins, "an authority that nobody put in another's place"

    def _read(self, name: str, content: bytes) -> None:
        path = self._folder / name
        path.write_bytes(content)
        try:
            if name in STATED:
                self._look(trio.run(self._node))
            elif name == "tokens.json":
                self._store.use(self._cast.token.id, "b" * 32, lambda secret: secret, bytes(16), 0)
            elif name == "certificate.pem":
                found = kept.read(self._folder, self._cast.member)
                assert found is not None
                check_chain(found.chain, found.authorities, found.chain[0].not_valid_before_utc)
                assert id_of(found.chain[0]) == self._cast.member.id
            else:
                authority_folder.load(path.parent, NOW)
        finally:
            if name in STATED:
                path.unlink()
            else:
                path.write_bytes(self._valid[FILES.index(name)])
