"""Python programs without the seconds of their imports: forked from a process that has imported torch and peerd once.

What is forked is the same program with the same arguments, environment, folder, output, session and parent as one that
is executed; only how its interpreter came to its modules differs, and that it does not take them apart in the end. A
daemon that was forked has its script forked, too, and torchrun its ranks. Start-up itself, and the interpreter's end,
are tested where nothing is forked: `tests/contracts/test_own_mode.py` executes a demo and its nodes with their scripts,
and `tests/peerd/daemon/test_supervisor.py` what starts a script.

    python forks.py FD    serve the socket FD until its other end is closed
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from peerd.process import launch

PEERD = ["-m", "peerd.cli.main"]
FORKING = [PEERD, ["-m", "torch.distributed.run"]]  # what starts programs itself
IMPORTED = ["peerd.cli.main", "peerd.daemon.main", "peerd.trainer.swarm", "torch._dynamo", "safetensors.torch"]
ASK_MAX = 100_000  # bytes: arguments and environment
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Program:
    """`python ARGUMENTS`."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    session: bool = True  # one of its own
    dies: bool = True  # gets SIGTERM when its parent dies


class Forks:
    """A process to fork from."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    def executed(cls) -> Forks:
        """A new one, which ends with this process."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            command = [sys.executable, __file__, str(its.fileno())]
            process = subprocess.Popen(command, pass_fds=[its.fileno()], start_new_session=True)
        atexit.register(process.wait)
        atexit.register(ours.close)  # this first
        return cls(ours)

    def run(self, program: Program, output: int, errors: int) -> int:
        """Have it run as a child of this process, and return its pid; it writes to these descriptors."""
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # its own parent ends at once, and it becomes ours
        try:
            socket.send_fds(self._sock, [json.dumps(asdict(program)).encode()], [output, errors])
            pid = self._sock.recv(16)
        finally:
            _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        assert pid, "the process to fork from has ended"
        return int(pid)


class Forked(subprocess.Popen[bytes]):
    """A child of this process, which another has forked."""

    def __init__(self, forks: Forks, program: Program, output: int, errors: int) -> None:
        self.args, self.returncode = program.arguments, None
        self.stdin = self.stdout = self.stderr = None
        self._waitpid_lock = threading.Lock()
        self._child_created, self._sigint_wait_secs = False, 0.25
        self.pid = forks.run(program, output, errors)
        self._child_created = True


@cache
def forks() -> Forks:
    """The one of this process."""
    return Forks.executed()


# ------------------------------------------------------------------------------------------------- the other process


def serve(sock: socket.socket) -> Program:
    """Fork for each program that comes; returns in the process that is to run it."""
    while True:
        asked, descriptors, _, _ = socket.recv_fds(sock, ASK_MAX, 2)
        if not asked:
            os._exit(0)
        between = os.fork()
        if not between:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.001)
            break
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)
    program = Program(**json.loads(asked))
    if program.dies:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if program.session:
        os.setsid()
    sock.send(str(os.getpid()).encode())
    sock.close()
    for number, descriptor in enumerate(descriptors, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(program.folder)
    os.environ.clear()
    os.environ.update(program.environment)
    tempfile.tempdir = None  # who has imported torch has looked for it
    return program


def become(program: Program) -> None:
    """Be the interpreter that runs it."""
    words = program.arguments
    if words[0] == "-u":
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
        words = words[1:]
    for folder in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        sys.path.insert(1, folder)
        if (custom := Path(folder, "sitecustomize.py")).exists():
            runpy.run_path(str(custom))
    sys.path[0] = str(Path(words[0]).parent)
    if words[:2] == PEERD:
        sys.path[0], sys.argv = "", ["peerd", *words[2:]]
        from peerd.cli import main

        main.run()
    elif words[0] == "-m":
        sys.path[0], sys.argv = "", words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        script = sys.modules["__main__"] = ModuleType("__main__")
        script.__file__ = words[0]
        exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), script.__dict__)  # noqa: S102


def end(code: int) -> None:
    """As the interpreter ends, but for its modules: torch's take it 0.3 s. Returns if output cannot be written."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(code)


def forks_its_own() -> Program | None:
    """What this process starts from now on is forked from what it is now; in what is forked, it is what is to run."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        os.chdir("/")
        return serve(its)
    its.close()
    mine, execute = Forks(ours), subprocess.Popen.__init__

    def start(self: Any, args: Sequence[str], **named: Any) -> None:
        launched = args[3:4] == [launch.__file__]
        words = list(args[6:] if launched else args)
        outputs = named.get("stdout"), named.get("stderr")
        forkable = words[0] == sys.executable and (words[1] == "-u" or words[1:3] in FORKING)
        if not forkable or any(isinstance(to, int) for to in outputs):  # a pipe, or nowhere
            execute(self, args, **named)
            return
        dies, session = launched or "preexec_fn" in named, named.get("start_new_session", False)
        program = Program(words[1:], dict(named.get("env") or os.environ), os.getcwd(), session, dies)
        output, errors = (to.fileno() if to else own for own, to in enumerate(outputs, 1))
        Forked.__init__(self, mine, program, output, errors)

    subprocess.Popen.__init__ = start  # type: ignore[method-assign, assignment]
    return None


def main() -> None:
    """Import, serve, and be what is asked for."""
    for name in IMPORTED:
        importlib.import_module(name)
    from peerd.cli.main import VERBS, command

    for verb in VERBS:
        command.get_command(None, verb)
    command.make_context("peerd", ["version"])  # what typer imports as it reads words
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # what torch would undo of itself
    gc.collect()
    gc.freeze()  # else a collection writes to every page that is shared
    program = serve(socket.socket(fileno=int(sys.argv[1])))
    while program.arguments[:2] in FORKING and (inner := forks_its_own()) is not None:
        program = inner
    code: object = None
    try:
        become(program)
    except SystemExit as ended:
        code = ended.code
    if code is None or isinstance(code, int):
        end((code or 0) & 0xFF)
    sys.exit(code)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
