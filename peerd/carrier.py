"""What do a node's links carry bulk over? Settled once, at its start; then link by link (transport/upgrade.py)."""

from __future__ import annotations

from peerd.effects import UserError
from peerd.logs import LOGGER
from peerd.settings import Settings
from peerd.transport import ucx
from peerd.transport.lane import Fabric
from peerd.transport.rdma import UcxFabric
from peerd.transport.same_host import SameHost

RDMA_ONLY = "ib"  # UCX's name for all transports over InfiniBand and RoCE


def fabrics_for(settings: Settings) -> list[Fabric]:
    """Return what goes beside TCP, the best first. Raises UserError when the user insists on what is not here."""
    fabrics: list[Fabric] = []
    if settings.transport != "rdma":
        try:
            fabrics.append(SameHost())
        except OSError as error:
            LOGGER.info("bulk between nodes of this host travels over tcp: %s", error)
    if settings.transport != "tcp" and (rdma := _rdma(settings)) is not None:
        fabrics.append(rdma)
    return fabrics


def _rdma(settings: Settings) -> UcxFabric | None:
    try:
        library = ucx.load()
        fabric, found = _fabric(library, settings)
    except ucx.UcxError as error:
        if settings.transport == "rdma":
            raise UserError(
                f"--transport rdma: {error}; peerd doctor says more, --transport auto goes on over TCP"
            ) from None
        LOGGER.info("bulk to other hosts travels over tcp: %s", error)
        return None
    bulk = "bulk" if settings.transport == "rdma" else "bulk to other hosts"
    LOGGER.info("%s travels over %s where the peer can: %s", bulk, library, ", ".join(found))
    return fabric


def _fabric(library: ucx.Library, settings: Settings) -> tuple[UcxFabric, list[str]]:
    """Return it, and what it may use."""
    found, subnets = ucx.resources(library), settings.rdma_subnets
    if settings.rdma_allow_fallback:
        return UcxFabric(library, ucx.HOST_MEMORY, without_rdma=True, subnets=subnets), found
    if not ucx.is_rdma(found):
        raise ucx.UcxError(f"{library} finds no InfiniBand or RoCE device here, only {', '.join(found) or 'nothing'}")
    return UcxFabric(library, RDMA_ONLY, subnets=subnets), [name for name in found if ucx.is_rdma([name])]
