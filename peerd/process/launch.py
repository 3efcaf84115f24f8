"""Runs a command that dies with the process that started it. Executed by path, before the command takes its place.

The kernel is told in the child, where between fork and exec of a process with threads no Python should run (its locks
may be held for ever): so a small program of its own, which imports nothing of peerd, does it and becomes the command.

    python -I -S launch.py PARENT FD COMMAND...    FD: told the errno when COMMAND cannot be run
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the command."""
    parent, told, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has died meanwhile
        sys.exit(1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and the command would
        signal.signal(number, signal.SIG_DFL)
    os.set_inheritable(told, False)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(told, str(error.errno).encode())
        sys.exit(127)


if __name__ == "__main__":
    main()
