"""What does somebody on the line see of nodes that train together, and of one that a token lets in? All packets of real
ones, searched."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import suppress

import msgpack
import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from machine import Machine, Node
from tap import Tap

from peerd.local import node_key
from peerd.local.node_key import NodeKey
from peerd.security import authority_folder, wall_clock
from peerd.security.authority import Authority
from peerd.security.certificates import der
from peerd.security.enrolment import asked
from peerd.security.token import Token, parse
from peerd.training.codecs import compress
from peerd.transport import framing, wire
from peerd.transport.errors import PeerError

MODEL_BYTES = 4 * 64 * 64  # below what goes through shared memory
MARKED = 64  # values of each kind: 256 bytes, in one piece of what is searched
FLOAT32, BFLOAT16 = -0.012345678, 0.01544189453125  # small: what triggers an exchange is by the norm of the model

TRAIN = f"""\
import os, time
import torch
from torch import nn
import peerd

torch.manual_seed(int(os.environ["SEED"]))


class Quetzal(nn.Module):
    def __init__(self):
        super().__init__()
        self.trained = nn.Linear(64, 64)
        self.marked_float32 = nn.Parameter(torch.full(({MARKED},), {FLOAT32}))
        self.marked_bfloat16 = nn.Parameter(torch.full(({MARKED},), {BFLOAT16}, dtype=torch.bfloat16))


model = Quetzal()
optimizer = torch.optim.SGD([model.trained.weight, model.trained.bias], lr=0.01)
with peerd.attach(model, optimizer) as swarm:
    while True:
        x = torch.randn(8, 64)
        loss = ((model.trained(x) - x.flip(1)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        swarm.step(loss=loss.item(), samples=8)
        time.sleep(0.01)
"""


def secrets_of(machine: Machine, ids: list[str], addresses: list[tuple[str, int]]) -> dict[str, list[bytes]]:
    """What nobody on the line is to see, as it would be written, by what it is."""
    float32, bfloat16 = (np.full(1, mark, np.float32).view(np.uint8) for mark in (FLOAT32, BFLOAT16))
    keys = [node_key.read(machine.state / "peerd" / name / "key.pem") for name in ("anahuac", "bonampak")]
    assert None not in keys
    return {
        "the float32 part of the model": forms(float32),
        "the bfloat16 part of the model": forms(bfloat16[2:]),
        "a tensor's name": [b"marked_float32", b"marked_bfloat16", b"trained.weight"],
        "a node's name": [b"anahuac", b"bonampak"],
        "the swarm's name": [b"chichen"],
        "a node's id in hex": [id.encode() for id in ids],
        "a node's id": [bytes.fromhex(id) for id in ids],
        "a node's key": [key.public.public_bytes_raw() for key in keys if key],
        "a node's host": [host.encode() for host, _ in addresses],
        "a node's address": [msgpack.packb(host) + msgpack.packb(port) for host, port in addresses],
        "the beginning of a frame": [framing.MAGIC + bytes([wire.VERSION])],
    }


def let_in(machine: Machine, by: Node, host: str) -> tuple[Token, NodeKey]:
    """A node of another user joins with a token of this one."""
    ran = machine.peerd("token", "--name", by.name)
    assert ran.returncode == 0, ran.stderr
    line = ran.stdout.strip()
    flags = ["--swarm", "chichen", "--bind", f"{host}:0", "--token", line]
    third = machine.start("copan", *flags, XDG_STATE_HOME=str(machine.path / "other"))
    third.says("let in with a token")
    by.sees(copan="alive")
    key = node_key.read(machine.path / "other" / "peerd" / "copan" / "key.pem")
    assert key is not None
    return parse(line), key


def secrets_of_enrolment(token: Token, key: NodeKey, issuer: Authority) -> dict[str, list[bytes]]:
    """The same of a newcomer: all that it says has these in it, but for the token's secret."""
    request = asked(token, key, issuer.certificate)
    header, _ = wire.encode(request)
    spoken = {
        "a token's id": [token.id],
        "a newcomer's request": [request.request],
        "a newcomer's key": [key.public.public_bytes_raw()],
    }
    assert all(mark in header for marks in spoken.values() for mark in marks), "so it would be found"
    assert token.secret not in header
    written = {"a token": [token.pack().encode()], "a token's secret": [token.secret, token.secret.hex().encode()]}
    return spoken | written | {"an authority's key": [token.pin, issuer.key.public.public_bytes_raw()]}


def forms(mark: npt.NDArray[np.uint8]) -> list[bytes]:
    """A tensor of nothing but this value: as it lies in memory, and one of its bytes after the other (planes.py)."""
    return [mark.tobytes() * MARKED, *(bytes([byte]) * MARKED for byte in mark)]


def unpacked(flow: bytes) -> Iterator[bytes]:
    """What was said, and what of it was compressed."""
    yield flow
    at = flow.find(compress.MAGIC)
    while at >= 0:
        with suppress(zstandard.ZstdError):
            yield (
                zstandard.ZstdDecompressor(max_window_size=compress.WINDOW_LIMIT).decompressobj().decompress(flow[at:])
            )
        at = flow.find(compress.MAGIC, at + 1)


def is_plain(datagram: bytes) -> bool:
    """Whether anybody can read it, after any swarm's tag."""
    for start in (0, 4):
        with suppress(PeerError):
            wire.decode_datagram(datagram[start:])
            return True
    return False


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "plain"])
def test_what_a_tap_on_the_line_reads(sealed: bool, machine: Machine) -> None:
    """Nothing, and all where nodes are started with --insecure-plaintext: so what is looked for would be found."""
    host = f"127.{64 + os.getpid() % 128}.{os.getpid() >> 7 & 255}.{7 if sealed else 8}"  # of this test alone
    flags = ["--swarm", "chichen", "--codec", "float32", "--mode", "gossip", "--bind", f"{host}:0"]
    flags += [] if sealed else ["--insecure-plaintext"]
    script = machine.script("train.py", TRAIN)
    try:
        tap = Tap(host)
    except PermissionError:
        pytest.skip("only root may record what passes (CAP_NET_RAW)")
    with tap:
        first = machine.start("anahuac", *flags, script, SEED="0")
        second = machine.start("bonampak", *flags, script, join=first, SEED="1")  # it fetches the whole model
        for node in (first, second):
            node.trains(beyond=node.trains() + 20)
            node.sees(anahuac="alive", bonampak="alive")
        first.eventually(lambda: tap.carried > 6 * MODEL_BYTES)  # in whole messages of the model: little else is said
        first.eventually(lambda: tap.datagrams > 10)
        enrolment = let_in(machine, first, host) if sealed else None
        said = [node.ask("info") for node in (first, second)]
        flows, datagrams = tap.read()
    addresses = [(host, int(one["address"].rsplit(":")[-1])) for one in said]
    sought = secrets_of(machine, [one["id"] for one in said], addresses)
    passed = [piece for flow in flows.values() for piece in unpacked(flow)] + datagrams
    found = {what for what, marks in sought.items() if any(mark in each for mark in marks for each in passed)}
    readable = [each for each in datagrams if is_plain(each)]
    if not sealed:
        assert found >= sought.keys() - {"a node's id", "a node's key"}
        assert readable == datagrams
        return
    assert not found
    assert not readable
    here = authority_folder.load(machine.state / "peerd" / ".authority", wall_clock.now())
    assert here is not None
    assert enrolment is not None
    for what, marks in secrets_of_enrolment(*enrolment, here).items():
        assert not any(mark in each for mark in marks for each in passed), what
    certificate = der(here.certificate)
    assert not any(certificate in each or here.certificate.serial_number.to_bytes(20, "big") in each for each in passed)
    long = {flow: each for flow, each in flows.items() if len(each) > 8 << 10}  # of which little is a handshake
    every = b"".join(long.values())
    about = [(flow, len(each), len(zlib.compress(each)), each[:64].hex()) for flow, each in long.items()]
    assert len(zlib.compress(every)) > 0.98 * len(every), f"what passes has a pattern; {addresses}: {about}"
