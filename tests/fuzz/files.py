"""Files of the state folder and of checkpoints, as a disk, a hand or another program may have left them."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from material import pick
from mutate import altered, bent

from peerd.daemon import known_members
from peerd.local import identity, node_key
from peerd.settings import Settings
from peerd.trainer import checkpoint
from peerd.transport.errors import UserError

ADDRESSES = (("127.0.0.1", 7001), ("10.0.0.9", 7002))
MEMBERS = {"swarm": "peerd", "run": "", "members": ADDRESSES}
STARTED = {"mode": "gossip", "codec": "auto", "trigger": "auto", "view": 3}
PLAN = {"swarm": "peerd", "run": "", "started": STARTED, "plan": [3, "b", True, "allreduce every=2"]}
NAMES = ("members.json", "plan.json", "identity.json", "key.pem", "manifest.json", "model.safetensors")


class Files:
    """An item is the number of the file, then what it holds."""

    def __init__(self) -> None:
        logging.getLogger("peerd").setLevel(logging.CRITICAL)
        self._folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self._settings = Settings(state_dir=str(self._folder))
        self._key = node_key.NodeKey(Ed25519PrivateKey.from_private_bytes(bytes(32)))
        self._key.write(self._folder / "key.pem")
        tensors = {"model.w": torch.zeros(4), "optimizer.0.step": torch.zeros(1)}
        plain: dict[str, Any] = {"class": "SGD", "param_groups": [{"lr": 0.1, "params": [0]}], "state": {"0": {}}}
        generation = checkpoint.Generation(3, "s", tensors, plain, {"model.x": [1, "a", None]})
        self._generation = checkpoint.save(self._folder / "checkpoints", generation)
        kept = {"id": self._key.id, "epoch": 3}
        self._valid = [
            *(json.dumps(each).encode() for each in (MEMBERS, PLAN, kept)),
            (self._folder / "key.pem").read_bytes(),
            *((self._generation / name).read_bytes() for name in NAMES[4:]),
        ]

    def draw(self, rng: Random) -> bytes:
        number = int(rng.random() * len(NAMES))
        valid = self._valid[number]
        if rng.random() < 0.5 or not NAMES[number].endswith("json"):
            return bytes([number]) + bent(rng, valid, pick(rng, self._valid))
        return bytes([number]) + json.dumps(altered_json(rng, json.loads(valid))).encode()

    def take(self, item: bytes) -> None:
        if not item or item[0] >= len(NAMES):
            return
        name = NAMES[item[0]]
        if name in NAMES[4:]:
            self._take_checkpoint(name, item[1:])
            return
        path = self._folder / name
        path.write_bytes(item[1:])
        try:
            known_members.read(self._settings)
            known_members.read_plan(self._settings)
            if name == "key.pem":
                node_key.read(path)
            identity._epoch_after(self._folder / "identity.json", self._key.id)
        except UserError:
            pass
        path.unlink()

    def _take_checkpoint(self, name: str, data: bytes) -> None:
        """With the right hashes, as nobody's accident leaves it."""
        for each, valid in zip(NAMES[4:], self._valid[4:], strict=True):
            (self._generation / each).write_bytes(data if each == name else valid)
        if name == "model.safetensors":
            manifest = json.loads(self._valid[4])
            manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            (self._generation / "manifest.json").write_bytes(_signed(manifest))
        else:
            try:
                manifest = json.loads(data)
                (self._generation / name).write_bytes(_signed(manifest))
            except (ValueError, TypeError, RecursionError):
                pass
        checkpoint.read_newest(self._folder / "checkpoints", "s", lambda line: None)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _signed(manifest: Any) -> bytes:
    if isinstance(manifest, dict):
        manifest.pop("sha256", None)
        manifest["sha256"] = checkpoint._digest(manifest)
    return json.dumps(manifest).encode()


def altered_json(rng: Random, value: Any) -> Any:
    """A map counts as a list of its values; what JSON has no word for becomes None."""
    if isinstance(value, dict) and value and rng.random() < 0.95:
        copy = dict(value)
        name = pick(rng, list(copy))
        copy[name] = altered_json(rng, copy[name])
        if rng.random() < 0.05:
            del copy[name]
        return copy
    found = altered(rng, value)
    try:
        json.dumps(found)
    except (TypeError, ValueError):
        return None
    return found
