"""What the doctor says of machines that lack this or that; the machine that runs the test lacks RDMA."""

from __future__ import annotations

import json
import os
import queue
import re
import socket
import subprocess
import sys
import threading
from functools import partial

import pytest
import trio
from ucx_here import needs_ucx

from peerd import doctor
from peerd.effects import UserError
from peerd.settings import Settings
from peerd.transport import hello, speed, ucx
from peerd.transport.tcp import TcpTransport


def found(settings: Settings, check: str) -> list[doctor.Finding]:
    return [finding for finding in doctor.examine(settings) if finding.check == check]


def test_every_failure_has_a_cure_and_fails_the_whole():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        taken_port = taken.getsockname()[1]
        findings = doctor.examine(Settings(bind=f"127.0.0.1:{taken_port}", join=("127.0.0.1:1",)))
    failed = {finding.check for finding in findings if finding.state == "fail"}
    assert {"port", "peer"} <= failed
    assert all(finding.cure for finding in findings if finding.state == "fail")
    with pytest.raises(UserError, match="checks failed"):
        doctor.check(findings)


def test_what_only_listens_is_timed_and_nothing_more(monkeypatch):
    monkeypatch.setattr(speed, "MEASURE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as there:
        timed, measured = found(Settings(join=(f"127.0.0.1:{there.getsockname()[1]}",)), "peer")
    assert (timed.state, measured.state) == ("ok", "note")
    assert "ms" in timed.found
    assert "does not answer" in measured.found
    assert measured.cure


def test_a_name_that_cannot_be_one_is_refused_in_a_line():
    (peer,) = found(Settings(bind=f"{'x' * 64}:0", join=("x..y:1",)), "peer")
    assert (peer.state, bool(peer.cure)) == ("fail", True)


def test_the_speed_of_the_line_from_a_node(monkeypatch):
    monkeypatch.setattr(speed, "MEASURE_S", 0.1)
    give, taken = queue.SimpleQueue(), threading.Event()

    async def node():
        async with trio.open_nursery() as nursery:
            answered = partial(hello.answer, check=None, me=None)
            give.put(await nursery.start(TcpTransport(nursery).listen, ("127.0.0.1", 0), answered))
            await trio.to_thread.run_sync(taken.wait)
            nursery.cancel_scope.cancel()

    thread = threading.Thread(target=trio.run, args=(node,))
    thread.start()
    try:
        host, port = give.get(timeout=10)
        _, measured = found(Settings(join=(f"{host}:{port}",)), "peer")
    finally:
        taken.set()
        thread.join()
    assert measured.state == "ok"
    assert float(re.search(r"([0-9.e+]+) Mbit/s", measured.found)[1]) > 0


def test_no_ucx_harms_only_who_wants_rdma(monkeypatch):
    def none():
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
def test_the_cure_names_the_variable_that_is_at_fault(variables, said, cure, monkeypatch):
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
        ([], "system", "no InfiniBand", "--transport tcp"),
        (["class/mlx5_0"], "system", "no .*uverbs", "ib_uverbs"),
        (["class/mlx5_0", "dev/uverbs0"], "package", "without RDMA", "the system's UCX"),
        (["class/mlx5_0", "dev/uverbs0"], "system", "makes nothing of mlx5_0", "UCX_TLS"),
    ],
)
def test_why_there_is_no_rdma(files, source, said, cure, monkeypatch, tmp_path):
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    monkeypatch.setattr(doctor, "INFINIBAND", tmp_path / "class")
    monkeypatch.setattr(doctor, "VERBS", tmp_path / "dev")
    monkeypatch.setattr(ucx, "load", lambda: library(source))
    monkeypatch.setattr(ucx, "resources", lambda _: ["tcp/lo"])
    (finding,) = found(Settings(), "rdma")
    assert finding.state == "note"
    assert re.search(said, finding.found)
    assert cure in finding.cure


@needs_ucx
@pytest.mark.parametrize("locked", [True, False])
def test_rdma_that_works_if_its_memory_can_be_locked(locked, monkeypatch):
    monkeypatch.setattr(ucx, "resources", lambda _: ["tcp/lo", "rc_mlx5/mlx5_0:1"])
    monkeypatch.setattr(doctor, "RDMA_ONLY", "tcp")
    if not locked:
        monkeypatch.setattr(ucx.Context, "map", refuse_to_register)
    usable, *lacking = found(Settings(transport="rdma"), "rdma")
    assert usable.state == "ok"
    assert [(one.state, "ulimit" in one.cure) for one in lacking] == ([] if locked else [("fail", True)])


def refuse_to_register(*_):
    raise ucx.UcxError("ucp_mem_map: Input/output error")


def test_the_verb_speaks_json_and_exits_with_what_it_found():
    flags = ["--bind", "127.0.0.1:0", "--join", "127.0.0.1:1", "--format", "json"]
    command = [sys.executable, "-m", "peerd.cli.main", "doctor", *flags]
    environment = {**os.environ, "PEERD_UCX_LIBRARY": "/nowhere"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    findings = json.loads(ran.stdout)
    assert {"software", "gpu", "port", "address", "ucx"} <= {finding["check"] for finding in findings}
    assert ran.returncode == 1
    assert ran.stderr.strip().startswith("peerd: 1 of ")
