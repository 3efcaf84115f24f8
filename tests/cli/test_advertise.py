"""A node that others reach at another address than it is bound to: a cloud machine, a container, a port passed on."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import across
import pytest
from machine import Machine, Node
from scripts import TRAIN

from peerd.security.token import parse

PUBLIC = "127.0.0.2"  # the forwarder's; a node's own datagrams come from 127.0.0.1, where nobody is at home


@contextmanager
def forwarded(host: str, port: int) -> Iterator[int]:
    """A port of PUBLIC from which TCP and UDP are passed on to `host` and `port`, as by docker-proxy."""
    with ExitStack() as stack:

        def kept(sock: socket.socket) -> socket.socket:
            """Until the end, when who waits for it is woken."""
            stack.enter_context(sock)
            stack.callback(_shut, sock)
            return sock

        listener = kept(socket.create_server((PUBLIC, 0)))
        public = int(listener.getsockname()[1])
        outside = kept(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        outside.bind((PUBLIC, public))
        inside: dict[tuple[str, int], socket.socket] = {}

        def accept() -> None:
            with suppress(OSError):
                while True:
                    here, there = kept(listener.accept()[0]), kept(socket.socket())
                    try:
                        there.connect((host, port))
                    except ConnectionRefusedError:
                        _shut(here)
                        continue
                    _start(_pump, here, there)
                    _start(_pump, there, here)

        def answers(client: tuple[str, int], there: socket.socket) -> None:
            with suppress(OSError):
                while True:
                    with suppress(ConnectionRefusedError):  # nobody listens, or not yet
                        outside.sendto(there.recv(1 << 16), client)

        def datagrams() -> None:
            with suppress(OSError):
                while True:
                    said, client = outside.recvfrom(1 << 16)
                    if client is None:  # it is shut
                        return
                    if client not in inside:
                        inside[client] = kept(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                        inside[client].connect((host, port))
                        _start(answers, client, inside[client])
                    with suppress(ConnectionRefusedError):
                        inside[client].send(said)

        _start(accept)
        _start(datagrams)
        yield public


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while some := source.recv(1 << 16):
            target.sendall(some)
    _shut(source)
    _shut(target)


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _start(task: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=task, args=arguments, daemon=True).start()


def test_nodes_that_are_reached_where_they_are_not_bound_train_together(machine: Machine) -> None:
    script = machine.script("train.py", TRAIN)
    ports = [Machine.free_port(), Machine.free_port()]
    with forwarded("127.0.0.1", ports[0]) as public_a, forwarded("127.0.0.1", ports[1]) as public_b:
        at_a, at_b = f"{PUBLIC}:{public_a}", f"{PUBLIC}:{public_b}"
        a = machine.start("a", script, "--bind", f"127.0.0.1:{ports[0]}", "--advertise", at_a)
        assert (a.address, a.ask("info")["bound"]) == (at_a, f"127.0.0.1:{ports[0]}")
        a.says(f"listening on 127.0.0.1:{ports[0]}, which others reach at {at_a}; others join with: peerd start")
        a.says(f"--join {at_a}")
        b = machine.start("b", script, "--bind", f"127.0.0.1:{ports[1]}", "--advertise", at_b, join=at_a, SEED="1")
        for node, other in ((a, at_b), (b, at_a)):
            node.trains()
            node.sees(a="alive", b="alive")
            assert other in {row["address"] for row in node.ask("members")["members"]}
        a.eventually(lambda: a.ask("status")["exchanges"] > 3)
        assert "cannot connect" not in machine.logs()


def test_who_listens_on_loopback_and_is_to_be_reached_elsewhere_is_told(machine: Machine) -> None:
    """Linux sends nothing from there to another machine, and so nobody would hear it."""
    for option in ("--advertise", "--relay"):
        ran = machine.peerd("start", "--name", "a", "--bind", "127.0.0.1:0", option, "192.0.2.7:7000")
        assert (ran.returncode, ran.stderr.count("\n")) == (1, 1)
        assert (
            "bind: nothing goes from 127.0.0.1 to other machines, nor comes from there; leave --bind out" in ran.stderr
        )
    a = machine.start("a", "--bind", "0.0.0.0:0", "--advertise", "192.0.2.7:7000")
    assert a.address == "192.0.2.7:7000"
    a.says("others join with: peerd start --token TOKEN --bind THEIR_ADDRESS")  # it is not of this machine's user alone
    assert parse(machine.peerd("token").stdout.strip()).addresses == (("192.0.2.7", 7000),)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("192.0.2.7:0", "advertise: '192.0.2.7:0': port 0 is nobody's; give the one that others reach"),
        ("0.0.0.0", "advertise: '0.0.0.0' is no address that others could dial"),
        ("[::]:7946", "advertise: '[::]:7946' is no address that others could dial"),
        ("a:b", "advertise: 'a:b' is not HOST:PORT"),
        ("nowhere.invalid:7", "advertise: cannot resolve nowhere.invalid:7:"),
        ("a..b", "advertise: cannot resolve a..b:7946: it is no name of a host"),
        ("224.0.0.1", "advertise: '224.0.0.1' is no address that others could dial"),
    ],
)
def test_an_address_that_nobody_can_reach_is_refused(machine: Machine, address: str, said: str) -> None:
    _is_refused(machine, "--advertise", address, said)


@pytest.mark.parametrize("address", ["224.0.0.1:0", "255.255.255.255:0"])  # Linux binds a socket to them
def test_an_address_of_many_machines_is_nobodys(machine: Machine, address: str) -> None:
    _is_refused(machine, "--bind", address, f"bind: {address!r} is no address that others could dial")


def _is_refused(machine: Machine, option: str, address: str, said: str) -> None:
    ran = machine.peerd("start", "--name", "a", option, address)
    assert ran.returncode != 0
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not list(machine.state.glob("peerd/*"))


@pytest.mark.one_run_in(4)
def test_who_is_reached_by_nobody_where_the_others_are_told_hears_of_it(machine: Machine) -> None:
    a = machine.start("a")
    nobody = f"127.0.0.1:{Machine.free_port()}"
    b = machine.start("b", "--bind", "127.0.0.1:0", "--advertise", nobody, join=a)
    b.says(f"no member reaches this node at {nobody}, as they are told: open that port to TCP and UDP, or start this")
    b.eventually(lambda: f"no member reaches this node at {nobody}" in machine.peerd("status", "--name", "b").stdout)
    assert b.ask("status")["address_unreached"] == nobody
    assert not a.ask("status")["address_unreached"]


def test_nodes_that_nobody_can_dial_train_through_a_relay_and_outlive_its_death(machine: Machine) -> None:
    """Each knows the others by ports of the relay's alone; where they listen is told to nobody."""
    script = machine.script("train.py", TRAIN)
    lent = [Machine.free_port()]
    while (port := Machine.free_port()) in range(lent[0], lent[0] + 10):
        pass
    flags = ["--bind", f"127.0.0.1:{port}", "--mode", "allreduce"]
    ports = ["--relay-ports", f"{lent[0]}-{min(lent[0] + 9, 65535)}"]
    relay = machine.start("relay", script, *flags, *ports)
    guests = [
        machine.start(name, script, "--relay", f"127.0.0.1:{port}", "--mode", "allreduce", SEED=str(seed))
        for seed, name in enumerate("ab", 1)
    ]
    for node in (relay, *guests):
        node.trains()
        node.sees(relay="alive", a="alive", b="alive")
    for guest in guests:
        info = guest.ask("info")
        assert info["address"] != info["bound"]
        assert lent[0] <= int(info["address"].rpartition(":")[2]) < lent[0] + 10
        assert all(info["bound"] != row["address"] for row in relay.ask("members")["members"])
    _go_on(guests)
    status = relay.ask("status")
    assert status["relayed_for"] == ["a", "b"]
    assert status["relayed_bytes"] > 0
    assert "relay of a, b; " in machine.peerd("status", "--name", "relay").stdout

    before = [guest.address for guest in guests]
    relay.signal(signal.SIGKILL)
    for guest in guests:
        guest.says("nobody can dial this node, its relay is gone")
    relay = machine.start("relay", script, *flags, *ports, join=guests[0].address)
    for node in (relay, *guests):
        node.sees(relay="alive", a="alive", b="alive")
    for guest in guests:
        guest.says("others reach this node at")
    assert [guest.address for guest in guests] == before, "it is back soon enough for the same ports"
    _go_on(guests)


@pytest.mark.one_run_in(2)
def test_a_guest_whose_relay_stays_away_moves_to_another(machine: Machine) -> None:
    script = machine.script("train.py", TRAIN)
    ends = [Machine.free_port() for _ in range(4)]
    often = ["--trigger", "period:20"]
    flags = ["--bind", f"127.0.0.1:{ends[0]}", "--relay-ports", str(ends[2])]
    relays = [machine.start("r", script, *often, *flags)]
    relays[0].trains()
    flags = ["--bind", f"127.0.0.1:{ends[1]}", "--relay-ports", str(ends[3])]
    relays.append(machine.start("s", script, *often, *flags, join=relays[0]))
    relays[1].trains()
    asked = [word for relay in relays for word in ("--relay", relay.address)]
    guest = machine.start("guest", script, *often, *asked)
    guest.trains()
    assert guest.address == f"127.0.0.1:{ends[2]}"
    relays[0].signal(signal.SIGKILL)
    guest.says(f"others reach this node at 127.0.0.1:{ends[3]} again, through {relays[1].address}")
    assert guest.address == f"127.0.0.1:{ends[3]}"
    other = relays[1]
    other.eventually(
        lambda: (
            {(row["name"], row["state"], row["address"]) for row in other.ask("members")["members"]}
            >= {("guest", "alive", f"127.0.0.1:{ends[3]}")}
        )
    )
    exchanges = other.ask("status")["exchanges"]
    other.eventually(lambda: other.ask("status")["exchanges"] > exchanges + 3)
    assert "under our identity" not in machine.logs()


def _go_on(nodes: list[Node]) -> None:
    """With rounds: some more than there were."""

    def rounds(node: Node, beyond: int = 0) -> int:
        return max(0, int(node.ask("status")["counts"].get("rounds", 0)) - beyond)

    for node in nodes:
        node.eventually(partial(rounds, node, rounds(node) + 3))


def test_a_relay_that_is_not_there_yet_is_waited_for_until_ctrl_c(machine: Machine) -> None:
    a = machine.start("a", "--relay", "127.0.0.1:1")
    a.says("relay: cannot reach 127.0.0.1:1: Connection refused; trying again")
    starting = (
        "peerd: the node 'a' is starting: it waits for its relay 127.0.0.1:1; its log says more, and Ctrl-C ends it"
    )
    for verb in ("status", "members", "leave"):
        ran = machine.peerd(verb)
        assert (ran.returncode, ran.stdout, ran.stderr) == (1, "", f"{starting}\n")
    assert "'a' is starting" not in machine.peerd("doctor").stderr, "it may be asked why"
    a.signal(signal.SIGINT)
    assert a.end() == 130
    assert "Traceback" not in a.log
    assert "interrupted" in a.log


@pytest.mark.one_run_in(2)
@pytest.mark.skipif(
    subprocess.run(["unshare", "-Urn", "true"], capture_output=True).returncode != 0, reason="no user namespaces here"
)
def test_a_guest_of_another_network_is_heard_and_hears_all() -> None:
    """What is bound to loopback sends nothing to another machine, which no test on loopback tells."""
    command = ["unshare", "-Urn", "bash", "-c", across.SET_UP, "across", sys.executable]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.stdout == "0 unsendable from 0.0.0.0:7946\n", ran.stderr


def test_a_relay_that_is_none_is_named(machine: Machine) -> None:
    a = machine.start("a")
    ran = machine.peerd("start", "--name", "b", "--bind", "127.0.0.1:0", "--relay", a.address)
    assert (ran.returncode, ran.stderr) == (
        1,
        f"peerd: relay: {a.address}: it lends no ports; this node asked for a port\n",
    )
    assert not list(machine.state.glob("peerd/b"))
