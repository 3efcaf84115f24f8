"""What does a node need of its network? The contract that each value of `--transport` keeps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import trio

from peerd.transport.connection import Datagrams, Transport
from peerd.transport.ids import Address
from peerd.transport.secure.credentials import Credentials
from peerd.transport.secure.datagrams import DatagramSeal
from peerd.transport.sending.budget import Budget


@dataclass(frozen=True, slots=True)
class CarrierSettings:
    """What a carrier is told; see the settings of the same names."""

    swarm: str = "peerd"
    run: str = ""
    view: int = 3
    rdma_subnets: tuple[str, ...] = ()
    rdma_allow_fallback: bool = False
    budget: Budget | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of what `peerd doctor` answers."""

    check: str
    state: str  # ok, note or fail
    found: str
    cure: str = ""


class Carrier(Protocol):
    """The network of one node. Used under trio, in the order of the methods; only `start` leaves tasks behind.

    What cannot be is refused by `start` at the latest: then the node has left no trace yet.
    """

    def __init__(self, settings: CarrierSettings) -> None:
        """Remember what was told."""

    async def resolve(self, address: Address) -> Address:
        """Return what `bind` takes for an address that the user gave. Raises UserError when it leads nowhere."""

    async def bind(self, address: Address, seal: DatagramSeal | None = None) -> Datagrams:
        """Return datagrams whose port can be listened on, too; port 0 takes any such. Raises UserError.

        With a `seal` whatever leaves the process is sealed, and nothing else is heard; who cannot seal refuses it.
        """

    def reached(self, host: str) -> str:
        """Return the host that others reach when this node is bound to `host`. Raises UserError when there is none."""

    async def start(self, nursery: trio.Nursery) -> None:
        """Have at hand what connections need; its tasks are `nursery`'s.

        Raises UserError when the user insists on what is not here.
        """

    def transport(self, nursery: trio.Nursery, credentials: Credentials | None = None) -> Transport:
        """Return what dials and listens; its tasks are `nursery`'s. With `credentials` its connections are sealed."""

    @classmethod
    def examine(cls, settings: CarrierSettings, *, chosen: bool) -> Iterable[Finding]:
        """Say for `peerd doctor` what of it works here; what lacks is a failure only where it was `chosen`."""
