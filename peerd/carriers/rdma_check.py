"""Would RDMA work on this machine, and if not, what mends it? Said to `peerd doctor`."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from peerd.carriers.carrier import CarrierSettings, Finding
from peerd.transport.errors import cause
from peerd.transport.rdma import ucx
from peerd.transport.rdma.staging import SPARE_BYTES

INFINIBAND = Path("/sys/class/infiniband")
VERBS = Path("/dev/infiniband")
RDMA_ONLY = "ib"  # UCX's name for all transports over InfiniBand and RoCE


def check_rdma(settings: CarrierSettings, *, chosen: bool) -> Iterator[Finding]:
    """UCX, its devices, and whether the memory of as many connections as `view` allows can be registered."""
    no_ucx = "fail" if chosen else "note"
    bad = "note" if settings.rdma_allow_fallback else no_ucx
    try:
        library = ucx.load()
    except ucx.UcxError as error:
        yield Finding("ucx", no_ucx, str(error), _cure_of_loading())
        return
    yield Finding("ucx", "ok", str(library))
    try:
        found = ucx.resources(library)
    except ucx.UcxError as error:
        variables = ", ".join(ucx.users_variables())
        cure = (
            f"unset or correct {variables}" if variables else f"another UCX: {ucx.LIBRARY_VARIABLE}=/path/libucp.so.0"
        )
        yield Finding("ucx", no_ucx, str(error), cure)
        return
    yield Finding("ucx", "ok", f"finds {', '.join(found) or 'nothing'}")
    if ucx.is_rdma(found):
        yield Finding("rdma", "ok", "usable: --transport rdma or auto")
        if why_not := _registers(library, 2 * settings.view * SPARE_BYTES):
            cure = "ulimit -l unlimited, LimitMEMLOCK=infinity in a unit, --ulimit memlock=-1 for a container"
            yield Finding("rdma", bad, why_not, cure)
    else:
        yield Finding("rdma", bad, *_why_no_rdma(library, chosen=chosen))


def _cure_of_loading() -> str:
    if find_spec("cffi") is None:
        return "pip install 'peerd[rdma]', or -e '.[rdma]' in a clone"
    if os.environ.get(ucx.LIBRARY_VARIABLE):
        return f"unset or correct {ucx.LIBRARY_VARIABLE}; LD_LIBRARY_PATH finds what lies beside the one that it names"
    return f"the system's UCX (libucx0, ucx), or {ucx.LIBRARY_VARIABLE}=/path/libucp.so.0; pip has one without RDMA"


def _why_no_rdma(library: ucx.Library, *, chosen: bool) -> tuple[str, str]:
    """What is missing, the first thing first, and its cure."""
    devices = sorted(device.name for device in INFINIBAND.glob("*"))
    if not devices:
        cure = "a driver for the card" + (", or --transport tcp" if chosen else "; none is needed without RDMA")
        return "not usable: the kernel knows no InfiniBand or RoCE device", cure
    nodes = sorted(VERBS.glob("uverbs*"))
    if not nodes:
        return (
            f"not usable: {', '.join(devices)}, but no {VERBS}/uverbs*",
            "modprobe ib_uverbs; give a container the devices",
        )
    shut = [str(node) for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    if shut:
        return f"not usable: no access to {', '.join(shut)}", "udev rules of rdma-core, or the group that owns them"
    if library.source == "package":
        return "not usable: the package's UCX is built without RDMA", "install the system's UCX (libucx0, ucx, ucx-ib)"
    return f"not usable: {library} makes nothing of {', '.join(devices)}", "its InfiniBand module (ucx-ib), and UCX_TLS"


def _registers(library: ucx.Library, size: int) -> str:
    """Why as much memory as the connections may need cannot be registered, which locks it; "" when it can."""
    try:
        context = ucx.Context(library, RDMA_ONLY)
        try:
            pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE)
            context.unmap(context.map(library.ffi.from_buffer(pages), size))
        finally:
            context.close()
    except (ucx.UcxError, OSError) as error:
        return f"{size >> 20} MiB, what its connections may need, cannot be registered: {cause(error)}"
    return ""
