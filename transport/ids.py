"""What are nodes and places called?"""

from __future__ import annotations

NodeId = str
Address = tuple[str, int]


def shown(address: Address) -> str:
    """Return the address as people write it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
