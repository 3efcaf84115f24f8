"""What on this machine would keep a node from running well, and how is it mended?

Each check looks at one thing and returns findings: `ok`, a `note` that harms nothing, or a `fail` with its cure.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import ipaddress
import platform
import shutil
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio

from peerd import __version__
from peerd.carriers import CARRIERS, Finding
from peerd.local.local_socket import NodeStarts, find_node, request, running_nodes, socket_path
from peerd.process.own_address import is_lacking
from peerd.security import newcomer
from peerd.security.certificates import Untrusted
from peerd.security.entry import Told
from peerd.security.outlook import credentials, outlook
from peerd.security.token import Token
from peerd.settings import Settings, is_loopback, parse_address, where_to_listen
from peerd.training.kernels import library
from peerd.transport.connection import ConnectionLost
from peerd.transport.errors import PeerError, UserError, cause
from peerd.transport.hello import Refused, measured
from peerd.transport.ids import Address, is_ip, shown
from peerd.transport.printable import printable
from peerd.transport.secure.credentials import Credentials
from peerd.transport.tcp import TcpTransport

CONNECT_S = 3.0
CONNECTS = 5  # the fastest is shown
HANG_UP_S = 1.0
MTU_MIN = 1432  # a datagram of 1400 bytes, with its swarm's tag and its headers
NETWORK = Path("/sys/class/net")
OF_A_NODE = (
    "name", "bind", "advertise", "relay", "relay_ports", "swarm", "run", "insecure_plaintext", "transport",
    "rdma_subnets", "rdma_allow_fallback",
)  # fmt: skip
"""What a running node's settings say of how it is reached."""
OF_REFUSALS = {
    "authority": "--token with what peerd token prints on a member of that swarm",
    "certificate": "look at the clocks of both machines",
    "encryption": "--insecure-plaintext on all nodes, or on none",
    "revoked": "another --name, and a new token",
    "issuer": "a new token",
}
"""The field in which two ends differ, and its cure."""
IPV6 = Path("/proc/net/if_inet6")
IPV6_OF_ONE_LINE = ipaddress.IPv6Network("fe80::/10")
_ADDRESS_OF = 0x8915  # SIOCGIFADDR, netdevice(7)
_TIME_ERROR = 5  # adjtimex(2): nobody keeps the clock


def settings_of_running(name: str | None, told: Mapping[str, Any], *, only: bool) -> Settings | None:
    """Of the node of this name where it runs here, with what is `told`; None: it does not run.

    `only`: without a name the only one is meant, and none where several run.
    """
    if name is None and not only:
        return None
    running = running_nodes()
    if (name is None and len(running) != 1) or (name is not None and name not in running):
        return None
    try:
        info = request(find_node(name), "info")
    except NodeStarts:  # the doctor may be asked why it does not get on
        return None
    own = {key: tuple(value) if isinstance(value, list) else value for key, value in info["settings"].items()}
    kept = {key: own[key] for key in OF_A_NODE if key in own}
    kept["bind"] = info.get("bound") or info["address"]  # of a daemon that has run since before the upgrade
    return replace(Settings(), **{**kept, "state_dir": info["state_dir"], **told})


def which_node() -> Iterator[Finding]:
    """For who named none: where several run, none of them is looked at."""
    if len(running := running_nodes()) > 1:
        found = f"{', '.join(running)} run here; what follows is of a new node, --name NAME is of one of these"
        yield Finding("node", "note", found, "--name NAME looks at one of them")


def namesakes(name: str) -> Iterator[Finding]:
    """Members that have the name of this node, which runs here."""
    try:
        rows = request(find_node(name), "members")["members"]
    except UserError:  # it starts, or has just ended
        return
    live = [row for row in rows if row["state"] in ("alive", "suspect") and not row["self"]]
    if others := [row["address"] for row in live if row["name"] == name]:
        found = f"the name {name} is also that of the member at {', '.join(others)}"
        yield Finding("node", "note", found, "start one of them with another --name")


def examine(settings: Settings) -> list[Finding]:
    """Run every check, for a node with these settings."""
    host, port = settings.bind_address
    outer = settings.relays[0] if settings.relays else settings.advertised(port)
    refused = []
    if outer is not None:
        try:
            host = where_to_listen(settings.bind, _resolved(host) or host, _resolved(outer[0]) or outer[0])
        except UserError as error:
            refused = [Finding("address", "fail", str(error), "--bind 0.0.0.0:PORT")]
    network = refused or _network(settings, host, port)
    findings = [*_software(), *_gpu(), *_port(settings.name, host, port), *network, *_clock()]
    local = all(is_loopback(_resolved(one) or one) for one in (host, outer[0] if outer else host))
    told = Told(settings.state_path, settings.authority_path, local, settings.invitation, bool(settings.seeds))
    if settings.insecure_plaintext:
        findings.append(Finding("member", "note", "connections are plain: whoever reaches a node is a member"))
    else:
        state, what, cure = outlook(told)
        findings.append(Finding("member", state, f"{settings.name}: {what}", cure))
    for peer in settings.seeds:
        findings += _peer(peer, None if settings.insecure_plaintext else told)
    for name, carrier in CARRIERS.items():
        findings += carrier.examine(settings.carrier_settings, chosen=name == settings.transport)
    return findings


# ----------------------------------------------------------------------------------------------------- this machine


def _software() -> Iterator[Finding]:
    import torch

    yield Finding(
        "software", "ok", f"peerd {__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    if library.LIBRARY is not None:
        yield Finding("software", "ok", "the arithmetic of exchanges is compiled")
    else:
        here = Path(__file__).resolve().parents[1]
        source = f"-e {here}" if (here / "pyproject.toml").exists() else "CHECKOUT"
        cure = f"install a C compiler, then: CC=gcc pip install --force-reinstall --no-deps {source}"
        yield Finding(
            "software", "note", "NumPy does the arithmetic of exchanges, in 1.4 to 1.7 times the processor time", cure
        )


def _gpu() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            name = torch.cuda.get_device_name(index)
            try:
                torch.zeros(1, device=f"cuda:{index}").add_(1).item()
                yield Finding("gpu", "ok", name)
            except RuntimeError as error:
                cure = (
                    f"install a torch that has kernels for it; this one says: {next(iter(str(error).splitlines()), '')}"
                )
                yield Finding("gpu", "fail", f"{name} does not compute", cure)
    elif shutil.which("nvidia-smi") is not None:
        cure = "install a CUDA build of torch that the driver (nvidia-smi) supports, and look at CUDA_VISIBLE_DEVICES"
        yield Finding("gpu", "fail", "the machine has an NVIDIA driver, and torch sees no GPU", cure)
    else:
        yield Finding("gpu", "note", "none: training runs on the CPU")


def _port(asked: str, host: str, port: int) -> Iterator[Finding]:
    for kind, name in ((socket.SOCK_STREAM, "TCP"), (socket.SOCK_DGRAM, "UDP")):
        where = f"{name} {shown((host, port))}"
        try:
            family, _, _, _, target = socket.getaddrinfo(host, port, type=kind, flags=socket.AI_PASSIVE)[0]
            with socket.socket(family, kind) as probe:
                if kind == socket.SOCK_STREAM:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(target)
        except (OSError, UnicodeError) as error:
            cure = "--bind HOST:PORT with an address of this machine and a free port (port 0: any)"
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE and (node := _node_on(host, port)):
                said = f"{where} is that of the node {node}, which runs here"
                its_own = Finding("port", "ok", said)
                yield its_own if node == asked else Finding("port", "note", said, f"for another node {cure}")
            else:
                yield Finding("port", "fail", f"cannot listen on {where}: {cause(error)}", cure)
        else:
            yield Finding("port", "ok", f"{where} is free" if port else f"{where}: there is a free port")


def _node_on(host: str, port: int) -> str | None:
    """The node of this user that is bound to an address which would be in the way of this one."""
    try:
        running = running_nodes()
    except UserError:  # their folder is not ours alone, as `peerd start` says in full
        return None
    for name in running:
        try:
            info = request(socket_path(name), "info")
        except UserError:  # it has just ended, or is stopped
            continue
        bound, its_port = parse_address((info.get("bound") or info["address"]), "bound")
        same = bound == _resolved(host) or {bound, host} & {"0.0.0.0", "::"}
        if same and its_port == port:
            return name
    return None


def _network(settings: Settings, host: str, port: int) -> Iterator[Finding]:
    address, advertised = _resolved(host), settings.advertised(port)
    if settings.relays:
        relays = " or ".join(map(shown, settings.relays))
        yield Finding("address", "ok", f"others reach this node through {relays}, started with --relay-ports")
    elif advertised is not None and not is_ip(_resolved(advertised[0]) or ""):
        cure = "--advertise HOST:PORT with the address at which others reach this node"
        yield Finding("address", "fail", f"nobody reaches {advertised[0]}, which is to be advertised", cure)
    elif advertised is not None:
        lead = f"others are told {shown(advertised)}, which must lead to {shown((host, port))} by TCP and UDP"
        yield Finding("address", "ok", f"{lead}; peerd doctor --join {shown(advertised)} on another machine tries it")
    elif address is None or address.startswith("127.") or address == "::1":
        yield Finding(
            "address", "note", f"{host}: only nodes on this machine reach it", "--bind ADDRESS:PORT for others"
        )
    elif not is_lacking(host):  # else `_port` says so
        yield Finding("address", "ok", f"{address}; a firewall must let TCP and UDP through to the port")
    for name in _interfaces(address):
        mtu, mbit = _number(NETWORK / name / "mtu"), _number(NETWORK / name / "speed")
        found = f"{name}: MTU {mtu}" + (f", {mbit} Mbit/s by its own account" if mbit > 0 else "")
        if mtu < MTU_MIN:
            cure = f"raise it to {MTU_MIN} or more (ip link set {name} mtu 1500), or bind another interface"
            yield Finding("network", "note", f"{found}: datagrams of membership are cut into pieces", cure)
        else:
            yield Finding("network", "ok", found)


def _interfaces(bound: str | None) -> list[str]:
    """Those that are up and have an address, but for loopback; where one of them has `bound`, that one alone."""
    names = [interface.name for interface in NETWORK.glob("*") if interface.name != "lo"]
    addresses = {name: _addresses(name) for name in sorted(names) if _is_up(name)}
    return [name for name, its in addresses.items() if bound in its] or [name for name, its in addresses.items() if its]


def _is_up(name: str) -> bool:
    try:
        return (NETWORK / name / "operstate").read_text().strip() != "down"  # a bridge says unknown
    except OSError:
        return False


def _addresses(name: str) -> set[str]:
    """Its first IPv4 address, and all of IPv6 but those of its line alone, which peers cannot be told."""
    found = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _ADDRESS_OF, struct.pack("256s", name.encode()))
            found.add(socket.inet_ntoa(answer[20:24]))
        except OSError:  # it has none
            pass
    try:
        rows = [line.split() for line in IPV6.read_text().splitlines()]
    except OSError:  # a kernel without IPv6
        rows = []
    of_it = {ipaddress.IPv6Address(int(row[0], 16)) for row in rows if row[-1] == name}
    return found | {str(one) for one in of_it if one not in IPV6_OF_ONE_LINE}


def _clock() -> Iterator[Finding]:
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # all zero: only asks
    if state == _TIME_ERROR:
        cure = "start chrony or systemd-timesyncd; certificates need clocks that differ by less than an hour"
        yield Finding("clock", "note", "not synchronised: it may be wrong", cure)
    elif state >= 0:
        yield Finding("clock", "ok", "synchronised")


def _peer(peer: Address, told: Told | None) -> Iterator[Finding]:
    times = []
    try:
        for _ in range(CONNECTS):
            began = time.perf_counter()
            with socket.create_connection(peer, CONNECT_S) as probe:
                times.append(time.perf_counter() - began)
                if not _hangs_up(probe):
                    break
    except (OSError, UnicodeError) as error:
        cure = "is a node running there, with --bind on an address that others reach? is the port open in its firewall?"
        yield Finding("peer", "fail", f"{shown(peer)}: {cause(error)}", cure)
    else:
        yield Finding("peer", "ok", f"{shown(peer)}: connected in {min(times) * 1e3:.2f} ms")
        mine = credentials(told) if told else None
        if told and mine is None:
            if told.token is not None:
                yield _lets_in(peer, told.token)
            # by the user's own authority, which is made then, a start would be refused
            state, cure = ("fail", OF_REFUSALS["authority"]) if told.loopback and told.token is None else ("note", "")
            why = "no speed measured, as it answers members only, and this node is none yet"
            yield Finding("peer", state, f"{shown(peer)}: {why}", cure)
        else:
            yield _speed(peer, mine)


def _lets_in(peer: Address, token: Token) -> Finding:
    async def looked() -> Finding:
        async with trio.open_nursery() as nursery:
            try:
                await newcomer.examine(
                    token, lambda who, where: TcpTransport(nursery, credentials=who).dial(where), peer
                )
            except Untrusted as error:
                return Finding("peer", "fail", f"{shown(peer)}: {printable(str(error))}", newcomer.cure([error]))
            except (PeerError, ConnectionLost) as error:  # another member may
                return Finding("peer", "note", f"{shown(peer)} lets nobody in: {printable(str(error))}")
            finally:
                nursery.cancel_scope.cancel()
        return Finding("peer", "ok", f"{shown(peer)} is of the token's authority")

    return trio.run(looked)


def _hangs_up(probe: socket.socket) -> bool:
    """End a connection; whether the other end has done so, too: a node lets in few at once that have not greeted."""
    probe.settimeout(HANG_UP_S)
    try:
        probe.shutdown(socket.SHUT_WR)
        return not probe.recv(1)
    except OSError:
        return False


def _speed(peer: Address, mine: Credentials | None) -> Finding:
    async def looked() -> Finding:
        async with trio.open_nursery() as nursery:
            try:
                connection = await TcpTransport(nursery, credentials=mine).dial(peer)
                try:
                    rate = await measured(connection)
                finally:
                    await connection.aclose()
            except (ConnectionLost, PeerError) as error:
                cure = "is it a node of this version of peerd?"
                if isinstance(error, Refused):  # a start would end by it
                    return Finding("peer", "fail", printable(str(error)), OF_REFUSALS.get(error.field, cure))
                return Finding("peer", "note", f"no speed measured: {printable(str(error))}", cure)
            finally:
                nursery.cancel_scope.cancel()
        return Finding("peer", "ok", f"{shown(peer)}: {8e-6 * rate:.1f} Mbit/s from there to here over TCP")

    return trio.run(looked)


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
