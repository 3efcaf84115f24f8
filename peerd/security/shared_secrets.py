"""What do members hold in common? The authorities in force, who is out, and the keys of datagrams.

They are kept in the state folder, and told to members (secrets_exchange.py). Who comes to hold something new soon
exchanges tables with others, too (Membership.spread). What follows from one for the others is found here: what an
authority has signed counts for as long as it is in force, and an issuer signs again what would be lost with it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from random import Random

import trio

from peerd.process.logs import LOGGER
from peerd.process.threads import in_thread
from peerd.security import authority_folder, revocations, secrets_folder, wall_clock
from peerd.security.authority import Authority
from peerd.security.certificates import id_of, pin_of, read_der
from peerd.security.keyring import KEY_BYTES, ROTATE_S, SPREAD_S, Keyring
from peerd.security.revocations import REVOKED_MAX, Revocations
from peerd.security.secrets_folder import Kept
from peerd.security.statements import AUTHORITY, Unbelieved
from peerd.security.succession import SUCCESSORS_MAX
from peerd.security.trust import Trust
from peerd.security.wall_clock import shown
from peerd.transport import wire
from peerd.transport.errors import PeerError, UserError
from peerd.transport.ids import NodeId
from peerd.transport.messages import RevocationList, SecretsHeld, Successor
from peerd.transport.secure.datagrams import DatagramSeal

LOOK_EVERY_S = 3600.0  # at the wall clock, which may be set
WRITE_AGAIN_S = 10.0  # after a disk did not take it
FIRST_KEY_S = 10.0  # an issuer that has heard of none makes one: nobody answers, or nobody has any


class SharedSecrets:
    """Those of one node. `run` keeps the files, and makes keys where this node is an issuer."""

    def __init__(
        self, folder: Path, where: tuple[str, str], me: NodeId, trust: Trust, issuer: Authority | None,
        seal: DatagramSeal, *, alone: bool, rng: Random, successors: Sequence[Successor] = (),
    ) -> None:  # fmt: skip
        """`where` is the swarm and the run; `issuer` signs for this node, if it is one. `alone`: it founds the swarm.
        What the keyring says goes into the `seal`, which authorities are in force into the `trust`. `successors` are
        known beside those that are kept in the folder.

        Raises UserError for a file that is damaged, and where this node is revoked.
        """
        self.seal = seal
        self.revocations = Revocations(self._signer_of)
        self.keyring = Keyring(where, self._signer_of, self.is_revoked)
        self.issuer = issuer
        self.on_revoked: Callable[[NodeId], None] = lambda node: None
        self.on_authorities: Callable[[], None] = lambda: None
        self.on_news: Callable[[], None] = lambda: None
        self.unbelieved = self.verifications = 0
        self._trust = trust
        self._folder = folder
        self._me = me
        self._patience = 0.0 if alone else FIRST_KEY_S * (1 + rng.random())
        self._replacing = trio.Lock()
        self._began = trio.current_time()
        self._spread_s = SPREAD_S * (1 + 9 * rng.random())  # issuers that all start again hear of the first one's key
        self._jitter = 1 + rng.random() / 4  # that not all issuers make the next key at once
        self._behind_at: float | None = None  # since when a key is to be made
        self._made_at = -math.inf  # the last one here; an issuer that goes wrong may leave no number above its own
        self._touched = trio.Event()
        self._unwritten = False
        self._why_unwritten = ""  # as the log said it
        self._writing = trio.Lock()
        self._load(successors)

    def is_revoked(self, node: NodeId) -> bool:
        """Whether it is out for ever."""
        return node in self.revocations

    @property
    def counts(self) -> dict[str, int]:
        """For `peerd status`."""
        keys = self.keyring.generations
        return {
            **self.revocations.counts,
            **self.keyring.counts,
            **self.seal.counts,
            "revocations": len(self.revocations),
            "datagram_keys": len(keys),
            "datagram_key_number": keys[0].number if keys else 0,
            "statements_not_believed": self.unbelieved,
        }

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._touched = trio.Event()
            now = trio.current_time()
            self._follow()
            self._unwritten |= self.keyring.on_timer(now)
            if now >= self._make_at(now):
                self._make_key(now)
            self._apply(now)
            await self._write()
            look_s = WRITE_AGAIN_S if self._unwritten else LOOK_EVERY_S
            retires = now + min(self.succession.deadline(unix := _unix()) - unix, look_s)
            with trio.move_on_at(min(self.keyring.deadline(now), self._make_at(now), retires)):
                await self._touched.wait()

    async def revoke(self, node: NodeId) -> bool:
        """Put a node out; False where it was already. On the disk when this returns. Raises UserError."""
        if self.issuer is None:
            raise UserError("this node issues no certificates, so its word puts nobody out; ask one that does")
        if not self._may_sign:
            raise UserError("this node was an issuer of an authority that was replaced since; ask another one")
        if node == self._me:
            raise UserError("this is the node itself, which peerd leave ends; to put it out, ask another issuer")
        if node in self.revocations:
            return False
        at = int(wall_clock.now().timestamp())
        if not self.revocations.add(revocations.make(node, at, self.issuer.sign, self.issuer.issuer_certificate)):
            raise UserError(f"{REVOKED_MAX} nodes are revoked, and a swarm remembers no more: make a new one")
        self.put_out([node])
        self._make_key(trio.current_time())
        await self._write()
        if self._unwritten:
            then = "it is written as soon as that can be; let this node run until its log says so"
            raise UserError(f"{node} is out, and others hear of it, but {self._folder}: {self._why_unwritten}; {then}")
        return True

    async def replace_authority(self, folder: Path, until: datetime) -> None:
        """Put a new authority in the place of the one that is kept in this folder, and signs for this node.

        The old one is in force `until` then. Raises UserError.
        """
        assert self.issuer is not None
        async with self._replacing:
            if not math.isinf(ends := self.succession.deadline(_unix())):
                until_then = shown(datetime.fromtimestamp(ends, UTC))
                raise UserError(f"the authority is being replaced already, until {until_then}; then it may be again")
            if len(self.succession.statements()) >= SUCCESSORS_MAX:
                times = f"{SUCCESSORS_MAX} times, and members remember no more of it"
                raise UserError(f"the authority was replaced {times}")
            now, known = wall_clock.now(), self.issuer.certificate
            try:
                made, said = await trio.to_thread.run_sync(authority_folder.rotate, folder, now, until, known)
            except UserError:  # another node of this user may have, and died before it told anybody
                with suppress(PeerError, UserError):
                    self.hear_successors(await trio.to_thread.run_sync(authority_folder.successors, folder))
                raise
            self.issuer.become(made)
            self.hear_successors([said])
            self._make_key(trio.current_time())
            await self._write()

    @property
    def _may_sign(self) -> bool:
        """Whether others believe what this node signs for all."""
        known = self.issuer is not None and self.issuer.root in self._trust.authorities
        return known and not self.is_revoked(self._me)

    # What follows -----------------------------------------------------------------------------------------------------

    @property
    def held(self) -> SecretsHeld:
        """Digests of all that others are told of."""
        return SecretsHeld(self.succession.digest(_unix()), self.revocations.digest, self.keyring.digest)

    @property
    def in_force(self) -> list[str]:
        """The authorities that are believed, the newest first, and until when; for people."""
        rows = []
        for one in self._trust.authorities:
            retires = self.succession.retires_at(pin := pin_of(one))
            ends = min(one.not_valid_after_utc.timestamp(), retires)
            replaced = "" if math.isinf(retires) else " (being replaced)"
            rows.append(f"{pin.hex()[:16]} until {shown(datetime.fromtimestamp(ends, UTC))}{replaced}")
        return rows

    def live_successors(self) -> list[Successor]:
        """Those that others are told of."""
        return self.succession.live(_unix())

    def hear_successors(self, said: Sequence[Successor]) -> None:
        """Believe them. Raises PeerError for what is no such statement, and believes none then."""
        before = self.held.successors
        try:
            self.succession.add(said, _unix())
        except Unbelieved:  # it believes what it can
            self.unbelieved += 1
        if self.held.successors != before:
            self._follow()
            self.changed()

    def proof_of(self, node: NodeId) -> bytes:
        """What convinces a node that it is revoked; nothing where that cannot be shown any more."""
        said = self.revocations.of(node)
        return wire.encode(RevocationList((said,)))[0] if said is not None else b""

    def hear_proof(self, proof: bytes) -> None:
        """Whoever refused this node has shown by whose word; that is believed as from anybody, or not."""
        try:
            said = wire.decode(RevocationList.KIND, proof, 0).message()
            assert isinstance(said, RevocationList)
            (one,) = said.revocations
            new = self.revocations.add(one)
        except (PeerError, ValueError):  # a refusal alone is no reason to end: any member could say it
            self.unbelieved += 1
            return
        if new:
            self.put_out([one.node])
            self.changed()

    def put_out(self, nodes: Iterable[NodeId]) -> None:
        """Follow from that these are revoked what follows, at once."""
        self.keyring.forget_unbelieved()
        for node in nodes:
            self.on_revoked(node)

    def _follow(self) -> None:
        """The authorities in force may be others now."""
        if not self._trust.follow(self.succession, _unix()):
            return
        before = self.revocations.digest
        self._unwritten |= self.keyring.forget_unbelieved()
        orphaned = self.revocations.forget_unbelieved()
        if self.issuer is not None and self._may_sign:
            for one in orphaned:
                self.revocations.add(
                    revocations.make(one.node, one.revoked_at, self.issuer.sign, self.issuer.issuer_certificate)
                )
        self._unwritten |= self.revocations.digest != before
        LOGGER.info("the swarm's authorities in force: %s", ", ".join(self.in_force))
        self.on_authorities()

    def changed(self) -> None:
        """Keep, use and spread what is new."""
        self._unwritten = True
        self._apply(trio.current_time())
        self._touched.set()
        self.on_news()

    # Keys -------------------------------------------------------------------------------------------------------------

    def _apply(self, now: float) -> None:
        sealing = self.keyring.sealing(now)
        self.seal.install((one.key for one in self.keyring.generations), sealing.key if sealing else None)

    def _make_at(self, now: float) -> float:
        """When this node is to make a key; infinity: others do."""
        if not self._may_sign:
            return math.inf
        if not self.keyring.is_behind(len(self.revocations)):
            self._behind_at = None
            last = max(self.keyring.newest_since, self._made_at)
            return max(last + self._jitter * ROTATE_S, self._began + self._spread_s)
        if self._behind_at is None:
            self._behind_at = now
        # who revokes makes the key, too; others only if it died in between, or keys of two halves have met
        return self._behind_at + (self._jitter * SPREAD_S if self.keyring.generations else self._patience)

    def _make_key(self, now: float) -> None:
        assert self.issuer is not None
        made = self.keyring.make(
            secrets.token_bytes(KEY_BYTES), len(self.revocations), self.issuer.sign, self.issuer.issuer_certificate
        )
        self.keyring.add(made, now)
        self._made_at = now
        self.changed()

    # Files ------------------------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        async with self._writing:
            if not self._unwritten:
                return
            self._unwritten = False
            kept = Kept(self.succession.statements(), self.revocations.all(), self.keyring.generations)
            why = ""
            try:
                await in_thread(partial(secrets_folder.write, self._folder, kept))
            except OSError as error:
                self._unwritten, why = True, error.strerror or str(error)
            except trio.Cancelled:  # whoever asked went away before it began
                self.changed()
                raise
            if why and why != self._why_unwritten:
                lost = "until it is written, other members must tell this node after a restart who is out and the keys"
                LOGGER.warning("%s: %s; %s", self._folder, why, lost)
            elif self._why_unwritten and not why:
                LOGGER.info("%s: written now", self._folder)
            self._why_unwritten = why

    def _load(self, successors: Sequence[Successor]) -> None:
        """What was kept; what is not believed any more, or is of another swarm, is left out."""
        now = trio.current_time()
        kept = secrets_folder.read(self._folder)
        self.succession = secrets_folder.succession(self._trust.authorities, successors, kept.successors)
        self._trust.follow(self.succession, 0.0)  # all that were ever in force, so that what is lost is signed again
        for one in kept.revocations:
            with suppress(Unbelieved):
                self.revocations.add(one)
        if self.is_revoked(self._me):
            raise UserError(
                "this node was revoked, and its swarm takes it no more; "
                f"remove {self._folder} or take another --name, and enter with a new token"
            )
        self._follow()
        for generation in kept.generations:  # a node may be started again more often than keys change
            with suppress(PeerError):
                self.keyring.add(generation, now, known_for_s=max(SPREAD_S, kept.keys_age_s))
        self._apply(now)

    def _signer_of(self, purpose: str, message: bytes, signature: bytes, issuer: bytes) -> NodeId | None:
        self.verifications += 1
        if not self._trust.verify(purpose, message, signature, issuer):
            return None
        return id_of(read_der(issuer)) if issuer else AUTHORITY


def _unix() -> float:
    return wall_clock.now().timestamp()
