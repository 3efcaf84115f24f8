"""TCP whose connections send large chunks over UCX: RDMA where both ends of one have it."""

from __future__ import annotations

from collections.abc import Iterable

from peerd.carriers.carrier import CarrierSettings, Finding
from peerd.carriers.rdma_check import RDMA_ONLY, check_rdma
from peerd.carriers.tcp import Tcp, same_host
from peerd.process.logs import LOGGER
from peerd.transport.bulk import Fabric
from peerd.transport.errors import UserError
from peerd.transport.rdma import ucx
from peerd.transport.rdma.fabric import UcxFabric


class Rdma(Tcp):
    """UCX or nothing: a node does not start without it."""

    def fabrics(self) -> list[Fabric]:
        """UCX's. Raises UserError where there is none."""
        try:
            return [over_ucx(self._settings, "models")]
        except ucx.UcxError as error:
            cure = "peerd doctor says more, --transport auto goes on over TCP"
            raise UserError(f"--transport rdma: {error}; {cure}") from None

    @classmethod
    def examine(cls, settings: CarrierSettings, *, chosen: bool) -> Iterable[Finding]:
        """See `Carrier.examine`."""
        return check_rdma(settings, chosen=chosen)


class Auto(Tcp):
    """Shared memory within a host, and to other hosts UCX where there is RDMA."""

    def fabrics(self) -> list[Fabric]:
        """What is here."""
        fabrics = same_host()
        try:
            fabrics.append(over_ucx(self._settings, "models to other machines"))
        except ucx.UcxError as error:
            LOGGER.info("models to other machines travel over tcp: %s", error)
        return fabrics


def over_ucx(settings: CarrierSettings, what: str) -> Fabric:
    """UCX's fabric, the log having been told `what` travels over it. Raises UcxError."""
    library = ucx.load()
    found, subnets = ucx.resources(library), settings.rdma_subnets
    if settings.rdma_allow_fallback:
        fabric = UcxFabric(library, ucx.HOST_MEMORY, without_rdma=True, subnets=subnets)
    elif ucx.is_rdma(found):
        fabric = UcxFabric(library, RDMA_ONLY, subnets=subnets)
        found = [name for name in found if ucx.is_rdma([name])]
    else:
        raise ucx.UcxError(f"{library} finds no InfiniBand or RoCE device here, only {', '.join(found) or 'nothing'}")
    LOGGER.info("%s travel over %s where the peer can: %s", what, library, ", ".join(found))
    return fabric
