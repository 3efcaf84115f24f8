"""What the doctor says of machines that lack this or that; the machine that runs the test lacks RDMA."""

from __future__ import annotations

import ipaddress
import json
import os
import queue
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from ucx_here import needs_ucx

from peerd import doctor
from peerd.carriers import Finding, rdma_check
from peerd.local.node_key import NodeKey
from peerd.security import authority, authority_folder, wall_clock
from peerd.security.trust import Trust
from peerd.settings import Settings
from peerd.training.kernels import library as kernels
from peerd.transport import hello, speed
from peerd.transport.connection import Connection
from peerd.transport.errors import UserError
from peerd.transport.ids import shown
from peerd.transport.messages import Welcome
from peerd.transport.rdma import ucx
from peerd.transport.tcp import TcpTransport


def found(settings: Settings, check: str) -> list[Finding]:
    return [finding for finding in doctor.examine(settings) if finding.check == check]


def test_every_failure_has_a_cure_and_fails_the_whole() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        taken_port = taken.getsockname()[1]
        findings = doctor.examine(Settings(bind=f"127.0.0.1:{taken_port}", join=("127.0.0.1:1",)))
    failed = {finding.check for finding in findings if finding.state == "fail"}
    assert {"port", "peer"} <= failed
    assert all(finding.cure for finding in findings if finding.state == "fail")
    with pytest.raises(UserError, match="checks failed"):
        doctor.check(findings)


def test_a_member_that_would_refuse_the_first_node_of_a_user_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An authority that is made when it starts is never that member's; on another address it lacks a token already."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as member:
        join = (shown(member.getsockname()),)
        (*_, last) = found(Settings(bind="127.0.0.1:0", join=join), "peer")
    assert (last.state, last.cure) == ("fail", doctor.OF_REFUSALS["authority"])
    assert last.found.startswith(f"{join[0]}: "), "of several it says which"
    assert not any(tmp_path.iterdir()), "it makes none itself"


def test_only_interfaces_that_peers_can_reach_are_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    addresses = {"eth0": {"10.0.0.1"}, "eth1": {"10.1.0.1", "fd00::1"}, "ifb0": {"10.2.0.1"}, "veth7": set()}
    for name in addresses:
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text("down\n" if name == "ifb0" else "up\n")
        (tmp_path / name / "mtu").write_text("1500\n")
    monkeypatch.setattr(doctor, "NETWORK", tmp_path)
    monkeypatch.setattr(doctor, "_addresses", addresses.__getitem__)
    for bind, seen in (
        ("127.0.0.1", "eth0 eth1"),
        ("0.0.0.0", "eth0 eth1"),
        ("10.1.0.1", "eth1"),
        ("[fd00::1]", "eth1"),
    ):
        shown = [finding.found.split(":")[0] for finding in found(Settings(bind=f"{bind}:0"), "network")]
        assert shown == seen.split()


def test_no_port_of_its_own_is_said_to_be_free_where_any_will_do() -> None:
    said = [finding.found for finding in found(Settings(bind="127.0.0.1:0"), "port")]
    assert said == ["TCP 127.0.0.1:0: there is a free port", "UDP 127.0.0.1:0: there is a free port"]


def test_where_several_nodes_run_and_none_is_named_the_machine_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "running_nodes", lambda: ["alice", "bob"])
    assert doctor.settings_of_running(None, {}, only=True) is None
    (said,) = doctor.which_node()
    assert (said.state, "alice, bob" in said.found, "--name" in said.cure) == ("note", True, True)
    monkeypatch.setattr(doctor, "running_nodes", lambda: ["alice"])
    assert not list(doctor.which_node())


def test_a_member_of_the_same_name_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"name": "a", "address": "10.0.0.1:7946", "state": "alive", "self": True}
    gone = {**own, "address": "10.0.0.2:7946", "state": "left", "self": False}
    rows = [own, gone, {**own, "name": "b", "self": False}]
    monkeypatch.setattr(doctor, "find_node", lambda name: name)
    monkeypatch.setattr(doctor, "request", lambda path, verb: {"members": rows})
    assert not list(doctor.namesakes("a"))
    rows.append({**gone, "address": "10.0.0.3:7946", "state": "suspect"})
    (said,) = doctor.namesakes("a")
    assert (said.state, said.found) == ("note", "the name a is also that of the member at 10.0.0.3:7946")


def test_who_has_no_compiled_arithmetic_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LIBRARY", None)
    said = found(Settings(bind="127.0.0.1:0"), "software")
    assert ["C compiler" in finding.cure for finding in said if finding.state == "note"] == [True]


@pytest.mark.parametrize(
    ("bound", "whose", "state"),
    [
        ("127.0.0.1:0", "is that of the node mine, which runs here", "note"),
        ("localhost", "is that of the node mine, which runs here", "note"),
        ("0.0.0.0", "is that of the node mine, which runs here", "note"),
        ("192.0.2.1", "cannot listen on", "fail"),
    ],
)
def test_a_port_that_a_node_of_this_host_holds_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, bound: str, whose: str, state: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        info = {"bound": f"{'127.0.0.1' if bound == 'localhost' else bound.split(':')[0]}:{port}"}
        monkeypatch.setattr(doctor, "running_nodes", lambda: ["other", "mine"])
        monkeypatch.setattr(doctor, "socket_path", lambda name: name)
        others = {"bound": f"127.0.0.1:{port + 1}"}
        monkeypatch.setattr(doctor, "request", lambda path, verb: info if path == "mine" else others, raising=False)
        tcp, udp = found(Settings(bind=f"127.0.0.1:{port}"), "port")
    assert (tcp.state, udp.state) == (state, "ok")
    assert whose in tcp.found
    assert tcp.cure


@pytest.mark.parametrize("bind", ["127.0.0.1:0", "127.0.0.1:{port}"])
def test_of_a_node_that_runs_the_port_is_looked_at_that_it_listens_on(
    monkeypatch: pytest.MonkeyPatch, bind: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        own = {"name": "mine", "bind": bind.format(port=port)}
        info = {"bound": f"127.0.0.1:{port}", "state_dir": "", "settings": own}
        monkeypatch.setattr(doctor, "running_nodes", lambda: ["mine"])
        monkeypatch.setattr(doctor, "find_node", lambda name: name)
        monkeypatch.setattr(doctor, "socket_path", lambda name: name)
        monkeypatch.setattr(doctor, "request", lambda path, verb: info)
        settings = doctor.settings_of_running("mine", {}, only=False)
        assert settings is not None
        tcp, _ = found(settings, "port")
    assert (tcp.state, tcp.cure) == ("ok", "")
    assert tcp.found == f"TCP 127.0.0.1:{port} is that of the node mine, which runs here"


def test_what_only_listens_is_timed_and_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "MEASURE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as there:
        where = f"127.0.0.1:{there.getsockname()[1]}"
        timed, measured = found(Settings(join=(where,), insecure_plaintext=True), "peer")
    assert (timed.state, measured.state) == ("ok", "note")
    assert "ms" in timed.found
    assert "does not answer" in measured.found
    assert measured.cure


def test_a_name_that_cannot_be_one_is_refused_in_a_line() -> None:
    (peer,) = found(Settings(bind=f"{'x' * 64}:0", join=("x..y:1",)), "peer")
    assert (peer.state, bool(peer.cure)) == ("fail", True)


def member() -> Trust:
    """Of the user's own authority."""
    key, now = NodeKey.generate(), wall_clock.now()
    mine = authority_folder.at(Settings().authority_path, now)
    return Trust(key, mine.issue_own(key, now), [mine.certificate])


@pytest.mark.parametrize(("is_loopback", "sealed"), [(True, False), (False, False), (True, True)])
def test_the_speed_of_the_line_from_a_node(monkeypatch: pytest.MonkeyPatch, is_loopback: bool, sealed: bool) -> None:
    monkeypatch.setattr(speed, "MEASURE_BYTES", 32 << 20)  # and not by time: a busy machine sends nothing for long
    monkeypatch.setattr(ipaddress.IPv4Address, "is_loopback", is_loopback)  # a listener is stricter with other hosts
    with a_node(member() if sealed else None) as address:
        _, measured = found(Settings(join=(address,), insecure_plaintext=not sealed), "peer")
    assert measured.state == "ok"
    rate = re.search(r"([0-9.e+]+) Mbit/s", measured.found)
    assert rate is not None
    assert float(rate[1]) > 0


@contextmanager
def a_node(who: Trust | None) -> Iterator[str]:
    """Yields its address."""
    give: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    taken = threading.Event()

    async def node() -> None:
        async with trio.open_nursery() as nursery:

            async def answered(connection: Connection) -> None:
                await connection.shake_hands()
                await hello.answer(connection, lambda _: None, Welcome("id", "name", 1))

            transport = TcpTransport(nursery, credentials=who)
            give.put(await nursery.start(transport.listen, ("127.0.0.1", 0), answered))
            await trio.to_thread.run_sync(taken.wait)
            nursery.cancel_scope.cancel()

    thread = threading.Thread(target=trio.run, args=(node,))
    thread.start()
    try:
        yield shown(give.get(timeout=10))
    finally:
        taken.set()
        thread.join()


@pytest.mark.parametrize(
    ("plain", "told", "cure"),
    [
        (False, "its certificate is of another authority", "--token with what peerd token prints on a member of that "),
        (
            True,
            "refused this node: its encryption is 'on', ours 'off'",
            "--insecure-plaintext on all nodes, or on none",
        ),
    ],
)
def test_a_member_that_will_not_have_this_node_is_a_failure(plain: bool, told: str, cure: str) -> None:
    """As with `peerd start`, which would end by it."""
    key = NodeKey.generate()
    other = authority.generate(wall_clock.now())
    with a_node(Trust(key, other.issue_own(key, wall_clock.now()), [other.certificate])) as address:
        _, refusal = found(Settings(join=(address,), insecure_plaintext=plain), "peer")
    assert refusal.state == "fail"
    assert told in refusal.found
    assert refusal.cure.startswith(cure)


def test_no_ucx_harms_only_who_wants_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise ucx.UcxError("no UCX library: none")

    monkeypatch.setattr(ucx, "load", none)
    assert [finding.state for finding in found(Settings(), "ucx")] == ["note"]
    assert [finding.state for finding in found(Settings(transport="rdma"), "ucx")] == ["fail"]
    without_rdma = Settings(transport="rdma", rdma_allow_fallback=True)
    assert [finding.state for finding in found(without_rdma, "ucx")] == ["fail"]


@pytest.mark.parametrize(
    ("variables", "said", "cure"),
    [
        ({ucx.LIBRARY_VARIABLE: "/nowhere", "UCX_TLS": "tcp"}, "/nowhere", f"unset or correct {ucx.LIBRARY_VARIABLE}"),
        (
            {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "mlx9_9:1"},
            "UCX_NET_DEVICES=mlx9_9:1 UCX_TLS=tcp",
            "UCX_NET_DEVICES, UCX_TLS",
        ),
    ],
)
@needs_ucx
def test_the_cure_names_the_variable_that_is_at_fault(
    variables: dict[str, str], said: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    (finding,) = [finding for finding in found(Settings(transport="rdma"), "ucx") if finding.state == "fail"]
    assert said in finding.found
    assert cure in finding.cure


def library(source: str) -> ucx.Library:
    return ucx.Library("libucp.so.0", source, (1, 18, 0), None, None)


@pytest.mark.parametrize(
    ("files", "source", "said", "cure"),
    [
        ([], "system", "no InfiniBand", "none is needed without RDMA"),
        (["class/mlx5_0"], "system", "no .*uverbs", "ib_uverbs"),
        (["class/mlx5_0", "dev/uverbs0"], "package", "without RDMA", "the system's UCX"),
        (["class/mlx5_0", "dev/uverbs0"], "system", "makes nothing of mlx5_0", "UCX_TLS"),
    ],
)
def test_why_there_is_no_rdma(
    files: list[str], source: str, said: str, cure: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    monkeypatch.setattr(rdma_check, "INFINIBAND", tmp_path / "class")
    monkeypatch.setattr(rdma_check, "VERBS", tmp_path / "dev")
    monkeypatch.setattr(ucx, "load", lambda: library(source))
    monkeypatch.setattr(ucx, "resources", lambda _: ["tcp/lo"])
    (finding,) = found(Settings(), "rdma")
    assert finding.state == "note"
    assert re.search(said, finding.found)
    assert cure in finding.cure


@needs_ucx
@pytest.mark.parametrize("locked", [True, False])
def test_rdma_that_works_if_its_memory_can_be_locked(locked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx, "resources", lambda _: ["tcp/lo", "rc_mlx5/mlx5_0:1"])
    monkeypatch.setattr(rdma_check, "RDMA_ONLY", "tcp")
    if not locked:
        monkeypatch.setattr(ucx.Context, "map", refuse_to_register)
    usable, *lacking = found(Settings(transport="rdma"), "rdma")
    assert usable.state == "ok"
    assert [(one.state, "ulimit" in one.cure) for one in lacking] == ([] if locked else [("fail", True)])


def refuse_to_register(*_: object) -> None:
    raise ucx.UcxError("ucp_mem_map: Input/output error")


@pytest.mark.one_run_in(3)
def test_the_verb_speaks_json_and_exits_with_what_it_found() -> None:
    flags = ["--bind", "127.0.0.1:0", "--join", "127.0.0.1:1", "--format", "json"]
    command = [sys.executable, "-m", "peerd.cli.main", "doctor", *flags]
    environment = {**os.environ, "PEERD_UCX_LIBRARY": "/nowhere"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    findings = json.loads(ran.stdout)
    assert {"software", "gpu", "port", "address", "ucx"} <= {finding["check"] for finding in findings}
    assert ran.returncode == 1
    assert ran.stderr.strip().startswith("peerd: 1 of ")
