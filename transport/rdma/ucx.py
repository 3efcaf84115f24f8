"""How does Python call UCX? libucp through cffi, without callbacks: operations are posted, then asked if they ended.

cffi in its ABI mode, so that an install needs no compiler and one binding serves every UCX since 1.13. It costs about
a microsecond a call, for a few calls a chunk of megabytes. The price of ABI mode is that nobody checks these
declarations: structs of UCX grow at the end only, and `field_mask` says which fields are read, so each is declared at
least up to the last field used here.

Which UCX: `PEERD_UCX_LIBRARY` if set, else the system's `libucp.so.0`, else the package's (`peerd[rdma]`). The
system's comes first because it may know RDMA; the package is built without.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LIBRARY_VARIABLE = "PEERD_UCX_LIBRARY"
API = (1, 13)  # the least that is needed; a newer library keeps it
HOST_MEMORY = "^cuda"  # all transports but CUDA's: chunks lie in host memory, and a daemon keeps off the GPU
RDMA_TRANSPORTS = ("rc_", "dc_", "ud_")  # how UCX names what runs over InfiniBand and RoCE

# Segments of 8 kB, the default, cost UCX's tcp a factor of four; from 1m on it copies more.
_DEFAULTS = {"UCX_TCP_TX_SEG_SIZE": "768k", "UCX_TCP_RX_SEG_SIZE": "768k"}
# A send by rendezvous ends when the receiver has it; one at once would pile up where nobody receives, and be refused.
_FIXED = {"UCX_RNDV_THRESH": "32k"}
# Read when the library is loaded: logs belong on stderr, and crashes to Python.
_AT_LOAD = {"UCX_LOG_FILE": "stderr", "UCX_LOG_LEVEL": "fatal", "UCX_HANDLE_ERRORS": "none"}

_DECLARATIONS = """
typedef int8_t ucs_status_t;
typedef struct { uint64_t field_mask; uint64_t features; } ucp_params_t;
typedef struct { uint64_t field_mask; int thread_mode; } ucp_worker_params_t;
typedef struct {
    uint64_t field_mask; const void *address; int err_mode;
    struct { void *cb; void *arg; } err_handler;
    void *user_data; unsigned flags;
} ucp_ep_params_t;
typedef struct {
    uint32_t op_attr_mask; uint32_t flags; void *request; void *cb; uint64_t datatype; void *user_data;
    void *reply_buffer; int memory_type; void *recv_info; void *memh;
} ucp_request_param_t;
typedef struct { uint64_t field_mask; void *address; size_t length; } ucp_mem_map_params_t;
typedef struct { uint64_t sender_tag; size_t length; } ucp_tag_recv_info_t;

void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release);
const char *ucs_status_string(ucs_status_t status);
ucs_status_t ucp_config_read(const char *prefix, const char *file, void **config);
void ucp_config_release(void *config);
ucs_status_t ucp_init_version(unsigned major, unsigned minor, const ucp_params_t *params, void *config, void **context);
void ucp_cleanup(void *context);
void ucp_context_print_info(void *context, FILE *stream);
ucs_status_t ucp_worker_create(void *context, const ucp_worker_params_t *params, void **worker);
void ucp_worker_destroy(void *worker);
ucs_status_t ucp_worker_get_address(void *worker, void **address, size_t *length);
void ucp_worker_release_address(void *worker, void *address);
ucs_status_t ucp_worker_get_efd(void *worker, int *fd);
ucs_status_t ucp_worker_arm(void *worker);
unsigned ucp_worker_progress(void *worker);
void ucp_ep_print_info(void *ep, FILE *stream);
ucs_status_t ucp_ep_create(void *worker, const ucp_ep_params_t *params, void **ep);
void *ucp_ep_close_nbx(void *ep, const ucp_request_param_t *param);
void *ucp_tag_send_nbx(void *ep, const void *buffer, size_t count, uint64_t tag, const ucp_request_param_t *param);
void *ucp_tag_recv_nbx(void *worker, void *buffer, size_t count, uint64_t tag, uint64_t mask,
                       const ucp_request_param_t *param);
void *ucp_tag_probe_nb(void *worker, uint64_t tag, uint64_t mask, int remove, ucp_tag_recv_info_t *info);
void *ucp_tag_msg_recv_nbx(void *worker, void *buffer, size_t count, void *message, const ucp_request_param_t *param);
ucs_status_t ucp_tag_recv_request_test(void *request, ucp_tag_recv_info_t *info);
void ucp_request_cancel(void *worker, void *request);
void ucp_request_free(void *request);
ucs_status_t ucp_request_check_status(void *request);
ucs_status_t ucp_mem_map(void *context, const ucp_mem_map_params_t *params, void **memory);
ucs_status_t ucp_mem_unmap(void *context, void *memory);
"""

_FEATURE_TAG, _FEATURE_WAKEUP = 1 << 0, 1 << 4
_PARAM_FEATURES = 1 << 0
_WORKER_THREAD_MODE, _SINGLE_THREAD = 1 << 0, 0
_EP_ADDRESS, _EP_ERROR_MODE = 1 << 0, 1 << 1
_ERROR_MODE_NONE, _ERROR_MODE_PEER = 0, 1
_MAP_ADDRESS, _MAP_LENGTH = 1 << 0, 1 << 1
_OP_FLAGS, _OP_NO_IMMEDIATE, _CLOSE_FORCE = 1 << 4, 1 << 16, 1 << 0
_ALL_BITS = (1 << 64) - 1

OK, IN_PROGRESS, TRUNCATED, BUSY, NOT_CONNECTED = 0, 1, -9, -15, -24


class UcxError(Exception):
    """UCX is not here, or refused; the text is one line."""

    def __init__(self, text: str, status: int = OK) -> None:
        super().__init__(text)
        self.broken = status <= NOT_CONNECTED  # the errors about a connection, and of a network, come last


@dataclass(frozen=True, slots=True)
class Library:
    """A loaded UCX."""

    path: str
    source: str  # which of the three places
    version: tuple[int, int, int]
    ffi: Any
    calls: Any

    def __str__(self) -> str:
        return f"UCX {'.'.join(map(str, self.version))} ({self.source}: {self.path})"

    def check(self, status: int, what: str) -> None:
        """Raise UcxError if `status` is an error."""
        if status < 0:
            raise self.error(status, f"{what}: ")

    def error(self, status: int, what: str = "") -> UcxError:
        """What an error status means, in UCX's words."""
        return UcxError(what + str(self.ffi.string(self.calls.ucs_status_string(status)).decode()), status)


def load(environment: Mapping[str, str] = os.environ) -> Library:
    """Return the first UCX of the three places. Raises UcxError naming what was tried."""
    try:
        from cffi import FFI
    except ImportError:
        raise UcxError("the package cffi is not installed (pip install 'peerd[rdma]')") from None
    ffi = FFI()
    ffi.cdef(_DECLARATIONS)
    tried = []
    for source, path in _places(environment):
        try:
            with _environment(_AT_LOAD):
                # never unloaded: a context that was not closed has handlers that every fork calls
                calls = ffi.dlopen(path, os.RTLD_NOW | os.RTLD_NODELETE)
        except OSError as error:
            said = str(error).partition(".  Additionally")[0].removeprefix(f"cannot load library '{path}': ")
            tried.append(f"{source}: {said}")
            continue
        found = ffi.new("unsigned[3]")
        try:
            calls.ucp_get_version(found, found + 1, found + 2)
        except AttributeError:
            tried.append(f"{source}: {path} is not UCX's libucp.so.0")
            continue
        library = Library(path, source, (found[0], found[1], found[2]), ffi, calls)
        if library.version[:2] >= API:
            return library
        tried.append(f"{source}: UCX {found[0]}.{found[1]} is older than {API[0]}.{API[1]}")
    raise UcxError("no UCX library: " + "; ".join(" ".join(text.split()) for text in tried))


def _places(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if given := environment.get(LIBRARY_VARIABLE):
        yield LIBRARY_VARIABLE, given  # and nothing else: who names one means that one
        return
    yield "system", "libucp.so.0"
    package = find_spec("libucx")
    if package is None or not package.submodule_search_locations:
        return
    yield "package", str(Path(package.submodule_search_locations[0]) / "lib" / "libucp.so.0")


@contextmanager
def _environment(wanted: Mapping[str, str], fixed: Mapping[str, str] = {}) -> Iterator[None]:
    """Set variables that UCX is about to read, and take them back: the trainer inherits ours.

    What the user set goes before the `wanted`, not before the `fixed`.
    """
    ours = {key: value for key, value in wanted.items() if key not in os.environ} | dict(fixed)
    before = {key: os.environ.pop(key) for key in fixed if key in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for key in ours:
            del os.environ[key]
        os.environ.update(before)


class Context:
    """UCX with a choice of its transports, and one worker: what one node needs."""

    def __init__(self, library: Library, transports: str) -> None:
        """`transports` as in UCX_TLS; a UCX_TLS that the user set goes before it.

        Raises UcxError when none of them is here.
        """
        self.library = library
        self._calls, self._ffi = library.calls, library.ffi
        self._context = self._ffi.NULL
        self._worker = self._ffi.NULL
        self._param = self._ffi.new("ucp_request_param_t *")
        self._receive_param = self._ffi.new("ucp_request_param_t *", {"op_attr_mask": _OP_NO_IMMEDIATE})
        self._info = self._ffi.new("ucp_tag_recv_info_t *")
        try:
            # read with the context and, those of a transport, with the worker; ucp_config_modify reaches a few only
            with _environment({**_DEFAULTS, "UCX_TLS": transports}, _FIXED):
                self._open()
        except UcxError as error:
            self.close()
            chosen = " ".join(f"{key}={value}" for key, value in users_variables().items())
            raise UcxError(f"{error} with {chosen}" if chosen else str(error)) from None
        fd = self._ffi.new("int *")
        library.check(self._calls.ucp_worker_get_efd(self._worker, fd), "ucp_worker_get_efd")
        self.event_fd: int = fd[0]

    def _open(self) -> None:
        config = self._made("ucp_config_read", self._ffi.NULL, self._ffi.NULL)
        try:
            features = {"field_mask": _PARAM_FEATURES, "features": _FEATURE_TAG | _FEATURE_WAKEUP}
            params = self._ffi.new("ucp_params_t *", features)
            self._context = self._made("ucp_init_version", *API, params, config)
        finally:
            self._calls.ucp_config_release(config)
        single = {"field_mask": _WORKER_THREAD_MODE, "thread_mode": _SINGLE_THREAD}
        self._worker = self._made("ucp_worker_create", self._context, self._ffi.new("ucp_worker_params_t *", single))

    def _made(self, call: str, *arguments: Any) -> Any:
        """Call what returns a status and, in its last argument, a pointer."""
        made = self._ffi.new("void **")
        self.library.check(getattr(self._calls, call)(*arguments, made), call)
        return made[0]

    def close(self) -> None:
        """Give everything back; nothing may be in progress."""
        if self._worker:
            self._calls.ucp_worker_destroy(self._worker)
        if self._context:
            self._calls.ucp_cleanup(self._context)
        self._worker = self._context = self._ffi.NULL

    def resources(self) -> list[str]:
        """The transports in use and their devices, as TRANSPORT/DEVICE. Raises UcxError."""
        told = self._told(self._calls.ucp_context_print_info, self._context)
        return [line.split()[-1] for line in told if " resource " in line]

    def channels(self, endpoint: Any) -> list[str]:
        """What an endpoint goes over, as TRANSPORT/DEVICE. Raises UcxError."""
        told = self._told(self._calls.ucp_ep_print_info, endpoint)
        found = [line.split(":", 2)[2].split()[0] for line in told if " lane[" in line]
        return list(dict.fromkeys(channel.rpartition(".")[0] for channel in found))

    def _told(self, call: Any, of: Any) -> list[str]:
        try:
            with os.fdopen(os.memfd_create("ucx"), "w+") as file:  # UCX tells such things to a C stream only
                call(of, file)
                file.seek(0)
                return file.readlines()
        except OSError as error:
            raise UcxError(f"what UCX says cannot be read: {error.strerror}") from None

    # ------------------------------------------------------------------------------------------------- the worker

    def address(self) -> bytes:
        """How peers reach the worker."""
        length = self._ffi.new("size_t *")
        address = self._ffi.new("void **")
        self.library.check(self._calls.ucp_worker_get_address(self._worker, address, length), "ucp_worker_get_address")
        try:
            return bytes(self._ffi.buffer(address[0], length[0]))
        finally:
            self._calls.ucp_worker_release_address(self._worker, address[0])

    def progress(self) -> bool:
        """Move what is in progress; False: nothing moved."""
        return bool(self._calls.ucp_worker_progress(self._worker))

    def arm(self) -> bool:
        """Have `event_fd` become readable at the next event; False: there is one now, so call `progress`."""
        status = self._calls.ucp_worker_arm(self._worker)
        if status != BUSY:
            self.library.check(status, "ucp_worker_arm")
        return bool(status != BUSY)

    def connect(self, address: bytes, guarded: bool = True) -> Any:
        """Return an endpoint to another worker. When `guarded`, an error on it ends its operations.

        Shared memory knows no errors and can only be had unguarded. Raises UcxError.
        """
        remote = self._ffi.from_buffer(address)
        mode = _ERROR_MODE_PEER if guarded else _ERROR_MODE_NONE
        values = {"field_mask": _EP_ADDRESS | _EP_ERROR_MODE, "address": remote, "err_mode": mode}
        params = self._ffi.new("ucp_ep_params_t *", values)
        return self._made("ucp_ep_create", self._worker, params)

    # --------------------------------------------------------------- operations: None is done, else what to ask about

    def send(self, endpoint: Any, memory: Any, count: int, tag: int) -> Any:
        """Post a send. Raises UcxError."""
        return self._posted(self._calls.ucp_tag_send_nbx(endpoint, memory, count, tag, self._param), "send")

    def receive(self, memory: Any, count: int, tag: int) -> Any:
        """Post a receive of the message with exactly this tag. Raises UcxError."""
        posted = self._calls.ucp_tag_recv_nbx(self._worker, memory, count, tag, _ALL_BITS, self._receive_param)
        return self._posted(posted, "receive")

    def find(self) -> tuple[Any, int, int] | None:
        """Take a message that came without a receive for it, to be given to `receive_found`; its tag and size."""
        message = self._calls.ucp_tag_probe_nb(self._worker, 0, 0, 1, self._info)
        return (message, int(self._info.sender_tag), int(self._info.length)) if message else None

    def receive_found(self, message: Any, memory: Any, count: int) -> Any:
        """Post a receive of a message that was found. Raises UcxError."""
        posted = self._calls.ucp_tag_msg_recv_nbx(self._worker, memory, count, message, self._receive_param)
        return self._posted(posted, "receive")

    def received(self, request: Any) -> tuple[int, int]:
        """The status of a receive, and how many bytes came when it is OK."""
        status = int(self._calls.ucp_tag_recv_request_test(request, self._info))
        return status, int(self._info.length)

    def disconnect(self, endpoint: Any, guarded: bool) -> Any:
        """Post the end of an endpoint: of a guarded one at once, ending its operations. Raises UcxError."""
        values = {"op_attr_mask": _OP_FLAGS, "flags": _CLOSE_FORCE if guarded else 0}
        params = self._ffi.new("ucp_request_param_t *", values)
        return self._posted(self._calls.ucp_ep_close_nbx(endpoint, params), "close")

    def status(self, request: Any) -> int:
        """IN_PROGRESS, OK, or an error; asked after one that ended, the request must be freed."""
        return int(self._calls.ucp_request_check_status(request))

    def cancel(self, request: Any) -> None:
        """Ask for the end of an operation; it has ended when `status` says so."""
        self._calls.ucp_request_cancel(self._worker, request)

    def free(self, request: Any) -> None:
        """Give back a request that has ended."""
        self._calls.ucp_request_free(request)

    def _posted(self, result: Any, what: str) -> Any:
        value = int(self._ffi.cast("intptr_t", result))
        if -100 <= value < 0:  # a status in the place of a pointer
            raise self.library.error(value, f"{what}: ")
        return result if value else None

    # ------------------------------------------------------------------------------------------------------ memory

    def map(self, memory: Any, size: int) -> Any:
        """Register memory with every device. Raises UcxError."""
        values = {"field_mask": _MAP_ADDRESS | _MAP_LENGTH, "address": memory, "length": size}
        return self._made("ucp_mem_map", self._context, self._ffi.new("ucp_mem_map_params_t *", values))

    def unmap(self, mapped: Any) -> None:
        """Take memory from every device: no peer reaches it any more."""
        status = self._calls.ucp_mem_unmap(self._context, mapped)
        assert status == OK, "only what is mapped is unmapped"


def users_variables() -> dict[str, str]:
    """What the user has told UCX itself."""
    return {key: value for key, value in sorted(os.environ.items()) if key.startswith("UCX_") and key not in _FIXED}


def resources(library: Library) -> list[str]:
    """Every transport and device that UCX finds. Raises UcxError."""
    context = Context(library, HOST_MEMORY)
    try:
        return context.resources()
    finally:
        context.close()


def is_rdma(resources: list[str]) -> bool:
    """Whether one of UCX's transports runs over InfiniBand or RoCE."""
    return any(resource.startswith(RDMA_TRANSPORTS) for resource in resources)
