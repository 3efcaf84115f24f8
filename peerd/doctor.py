"""What on this machine would keep a node from running well, and how is it mended?

Each check looks at one thing and returns findings: `ok`, a `note` that harms nothing, or a `fail` with its cure.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import trio

from peerd import __version__
from peerd.carrier import RDMA_ONLY
from peerd.effects import Address, PeerError, UserError
from peerd.local_socket import running_nodes
from peerd.settings import Settings
from peerd.transport import speed, ucx
from peerd.transport.link import LinkLost, shown
from peerd.transport.staging import SPARE_BYTES
from peerd.transport.tcp import TcpTransport, cause

CONNECT_S = 3.0
CONNECTS = 5  # the fastest is shown
MTU_LEAST = 1428  # a datagram of 1400 bytes, with its headers
NETWORK = Path("/sys/class/net")
INFINIBAND = Path("/sys/class/infiniband")
VERBS = Path("/dev/infiniband")
_TIME_ERROR = 5  # adjtimex(2): nobody keeps the clock


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the answer."""

    check: str
    state: str  # ok, note or fail
    found: str
    cure: str = ""


def examine(settings: Settings) -> list[Finding]:
    """Run every check, for a node with these settings."""
    host, port = settings.bind_address
    findings = [*_software(), *_gpu(), *_port(host, port), *_network(host), *_clock()]
    for peer in settings.seeds:
        findings += _peer(peer)
    return [*findings, *_rdma(settings)]


# ----------------------------------------------------------------------------------------------------- this machine


def _software() -> Iterator[Finding]:
    import torch

    yield Finding(
        "software", "ok", f"peerd {__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    )


def _gpu() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield Finding("gpu", "ok", ", ".join(names))
    elif shutil.which("nvidia-smi") is not None:
        cure = "install a CUDA build of torch that the driver (nvidia-smi) supports, and look at CUDA_VISIBLE_DEVICES"
        yield Finding("gpu", "fail", "the machine has an NVIDIA driver, and torch sees no GPU", cure)
    else:
        yield Finding("gpu", "note", "none: training runs on the CPU")


def _port(host: str, port: int) -> Iterator[Finding]:
    for kind, name in ((socket.SOCK_STREAM, "TCP"), (socket.SOCK_DGRAM, "UDP")):
        where = f"{name} {shown((host, port))}"
        try:
            family, _, _, _, target = socket.getaddrinfo(host, port, type=kind, flags=socket.AI_PASSIVE)[0]
            with socket.socket(family, kind) as probe:
                if kind == socket.SOCK_STREAM:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(target)
        except (OSError, UnicodeError) as error:
            taken = f"; a node runs here: {', '.join(running_nodes())}" if running_nodes() else ""
            cure = "--bind HOST:PORT with an address of this machine and a free port (port 0: any)"
            yield Finding("port", "fail", f"cannot listen on {where}: {cause(error)}{taken}", cure)
        else:
            yield Finding("port", "ok", f"{where} is free")


def _network(host: str) -> Iterator[Finding]:
    address = _resolved(host)
    if address is None or address.startswith("127.") or address == "::1":
        yield Finding(
            "address", "note", f"{host}: only nodes on this machine reach it", "--bind ADDRESS:PORT for others"
        )
    else:
        yield Finding("address", "ok", f"{address}; a firewall must let TCP and UDP through to the port")
    for name in sorted(interface.name for interface in NETWORK.glob("*") if interface.name != "lo"):
        mtu, mbit = _number(NETWORK / name / "mtu"), _number(NETWORK / name / "speed")
        found = f"{name}: MTU {mtu}" + (f", {mbit} Mbit/s by its own account" if mbit > 0 else "")
        if mtu < MTU_LEAST:
            cure = f"raise it to {MTU_LEAST} or more (ip link set {name} mtu 1500), or bind another interface"
            yield Finding("network", "note", f"{found}: datagrams of membership are cut into pieces", cure)
        else:
            yield Finding("network", "ok", found)


def _clock() -> Iterator[Finding]:
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # all zero: only asks
    if state == _TIME_ERROR:
        cure = "start chrony or systemd-timesyncd"
        yield Finding("clock", "note", "not synchronised: peerd needs no common time, logs are harder to compare", cure)
    elif state >= 0:
        yield Finding("clock", "ok", "synchronised")


def _peer(peer: Address) -> Iterator[Finding]:
    times = []
    try:
        for _ in range(CONNECTS):
            began = time.perf_counter()
            with socket.create_connection(peer, CONNECT_S):
                times.append(time.perf_counter() - began)
    except (OSError, UnicodeError) as error:
        cure = "is a node running there, with --bind on an address that others reach? is the port open in its firewall?"
        yield Finding("peer", "fail", f"{shown(peer)}: {cause(error)}", cure)
    else:
        yield Finding("peer", "ok", f"{shown(peer)}: connected in {min(times) * 1e3:.2f} ms")
        yield _speed(peer)


def _speed(peer: Address) -> Finding:
    async def measured() -> Finding:
        async with trio.open_nursery() as nursery:
            try:
                link = await TcpTransport(nursery).dial(peer)
                try:
                    rate = await speed.measure(link)
                finally:
                    await link.aclose()
            except (LinkLost, PeerError) as error:
                return Finding("peer", "note", f"no speed measured: {error}", "is it a node of this version of peerd?")
            finally:
                nursery.cancel_scope.cancel()
        return Finding("peer", "ok", f"{shown(peer)}: {8e-6 * rate:.1f} Mbit/s from there to here over TCP")

    return trio.run(measured)


# -------------------------------------------------------------------------------------------------------------- RDMA


def _rdma(settings: Settings) -> Iterator[Finding]:
    # what lacks harms only those who cannot do without
    no_ucx = "fail" if settings.transport == "rdma" else "note"
    bad = "note" if settings.rdma_allow_fallback else no_ucx
    try:
        library = ucx.load()
    except ucx.UcxError as error:
        yield Finding("ucx", no_ucx, str(error), _cure_of_loading())
        return
    yield Finding("ucx", "ok", str(library))
    try:
        found = ucx.resources(library)
    except ucx.UcxError as error:
        variables = ", ".join(ucx.users_variables())
        cure = (
            f"unset or correct {variables}" if variables else f"another UCX: {ucx.LIBRARY_VARIABLE}=/path/libucp.so.0"
        )
        yield Finding("ucx", no_ucx, str(error), cure)
        return
    yield Finding("ucx", "ok", f"finds {', '.join(found) or 'nothing'}")
    if ucx.is_rdma(found):
        yield Finding("rdma", "ok", "usable: --transport rdma or auto")
        if why_not := _registers(library, 2 * settings.view * SPARE_BYTES):
            cure = "ulimit -l unlimited, LimitMEMLOCK=infinity in a unit, --ulimit memlock=-1 for a container"
            yield Finding("rdma", bad, why_not, cure)
    else:
        yield Finding("rdma", bad, *_why_no_rdma(library))


def _cure_of_loading() -> str:
    if find_spec("cffi") is None:
        return "pip install 'peerd[rdma]', or -e '.[rdma]' in a clone"
    if os.environ.get(ucx.LIBRARY_VARIABLE):
        return f"unset or correct {ucx.LIBRARY_VARIABLE}; LD_LIBRARY_PATH finds what lies beside the one that it names"
    return f"the system's UCX (libucx0, ucx), or {ucx.LIBRARY_VARIABLE}=/path/libucp.so.0; pip has one without RDMA"


def _why_no_rdma(library: ucx.Library) -> tuple[str, str]:
    """What is missing, the first thing first, and its cure."""
    devices = sorted(device.name for device in INFINIBAND.glob("*"))
    if not devices:
        return "not usable: the kernel knows no InfiniBand or RoCE device", "--transport tcp; or a driver for the card"
    nodes = sorted(VERBS.glob("uverbs*"))
    if not nodes:
        return (
            f"not usable: {', '.join(devices)}, but no {VERBS}/uverbs*",
            "modprobe ib_uverbs; give a container the devices",
        )
    shut = [str(node) for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    if shut:
        return f"not usable: no access to {', '.join(shut)}", "udev rules of rdma-core, or the group that owns them"
    if library.source == "package":
        return "not usable: the package's UCX is built without RDMA", "install the system's UCX (libucx0, ucx, ucx-ib)"
    return f"not usable: {library} makes nothing of {', '.join(devices)}", "its InfiniBand module (ucx-ib), and UCX_TLS"


def _registers(library: ucx.Library, size: int) -> str:
    """Why as much memory as the links may need cannot be registered, which locks it; "" when it can."""
    try:
        context = ucx.Context(library, RDMA_ONLY)
        try:
            pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE)
            context.unmap(context.map(library.ffi.from_buffer(pages), size))
        finally:
            context.close()
    except (ucx.UcxError, OSError) as error:
        return f"{size >> 20} MiB, what its links may need, cannot be registered: {error}"
    return ""


def _resolved(host: str) -> str | None:
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0])
    except (OSError, UnicodeError):
        return None


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # an interface that is down has no speed
        return 0


def check(findings: list[Finding]) -> None:
    """Raise UserError when something fails."""
    failed = sum(finding.state == "fail" for finding in findings)
    if failed:
        raise UserError(f"{failed} of {len(findings)} checks failed")
