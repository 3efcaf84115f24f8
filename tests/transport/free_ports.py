"""Ports for whoever must know one before it listens."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

FIRST, LAST = 16000, 32767  # below those that the kernel gives to whoever asks for any: another test would have them


def free_ports(count: int) -> list[int]:
    """Some on which nobody listens on loopback, by TCP or UDP."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(FIRST, LAST + 1), 64 + count):
        with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp, suppress(OSError):
            tcp.bind(("127.0.0.1", port))
            udp.bind(("127.0.0.1", port))
            found.append(port)
    return found[:count]
