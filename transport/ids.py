"""What are nodes and places called?"""

from __future__ import annotations

import functools
import ipaddress
import re

NodeId = str
Address = tuple[str, int]


_HOST = re.compile(r"[0-9A-Fa-f.:]+(%[A-Za-z0-9_.-]{1,15})?")  # of IPv6 perhaps with the name of an interface
_EVERYONE = ipaddress.ip_address("255.255.255.255")


@functools.lru_cache(maxsize=4096)
def is_ip(host: str) -> bool:
    """Whether it is the address of one machine: whoever is told a name looks it up, and no node does so for a peer."""
    try:
        ip = ipaddress.ip_address(host) if _HOST.fullmatch(host) else None
    except ValueError:
        return False
    ip = getattr(ip, "ipv4_mapped", None) or ip  # where a dialler of ::ffff:224.0.0.1 sends to
    return ip is not None and not (ip.is_multicast or ip.is_unspecified or ip == _EVERYONE)


def shown(address: Address) -> str:
    """Return the address as people write it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
