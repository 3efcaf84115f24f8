"""Lines of a known rate between processes of one machine: network namespaces on a bridge, shaped by tc."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from peerd.process.ending import ENDING, kill_cleans_up

_NUMBERS = itertools.count()  # a name of an interface has 15 characters


def can_make_namespaces() -> bool:
    """Whether this user and this machine may: root, ip, tc, and a kernel or a container that lets them."""
    if not (os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")):
        return False
    try:
        with namespaces(1, 100.0):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@contextmanager
def namespaces(count: int, mbit: float) -> Iterator[list[list[str]]]:
    """So many, with addresses 10.77.0.1 and so on, on one switch, with so fast a line each, both ways.

    Yields what is to stand before a command, for each; its last word is the name of the namespace, and of the switch's
    end of its line. Needs `can_make_namespaces`.
    """
    switch = f"p{os.getpid()}.{next(_NUMBERS)}"  # one that was taken down lasts as long as its last process
    names = [f"{switch}.{rank}" for rank in range(count)]

    def ip(line: str) -> None:
        subprocess.run(["ip", *line.split()], check=True, capture_output=True)

    def take_down(line: str) -> None:
        with suppress(subprocess.CalledProcessError):  # the end came before it was there
            ip(line)

    with kill_cleans_up(), ExitStack() as stack:
        stack.callback(signal.pthread_sigmask, signal.SIG_UNBLOCK, ENDING)
        stack.callback(take_down, f"link del {switch}")
        ip(f"link add {switch} type bridge")
        ip(f"link set {switch} up")
        for rank, name in enumerate(names):
            stack.callback(take_down, f"netns del {name}")
            ip(f"netns add {name}")
            ip(f"link add {name} type veth peer name eth0 netns {name}")
            ip(f"link set {name} master {switch} up")
            ip(f"-n {name} addr add 10.77.0.{rank + 1}/24 dev eth0")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} link set eth0 up")
            shape = f"root tbf rate {mbit}mbit burst 256kb latency 100ms".split()
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", *shape], check=True)
            subprocess.run(["tc", "qdisc", "add", "dev", name, *shape], check=True)
        stack.callback(signal.pthread_sigmask, signal.SIG_BLOCK, ENDING)  # not while this is taken down
        yield [["ip", "netns", "exec", name] for name in names]


def free_ports(count: int) -> list[int]:
    """Of this host, free a moment ago."""
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]
