"""What `--transport` takes: a new carrier is one file, and one line here."""

from __future__ import annotations

from peerd.carriers.carrier import Carrier, CarrierSettings, Finding
from peerd.carriers.rdma import Auto, Rdma
from peerd.carriers.tcp import Tcp

__all__ = ["CARRIERS", "Carrier", "CarrierSettings", "Finding"]

CARRIERS: dict[str, type[Carrier]] = {
    "tcp": Tcp,
    "rdma": Rdma,
    "auto": Auto,
}
