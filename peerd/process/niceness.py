"""How do a thread's computations yield to the training and to the event loop, where cores are scarce?"""

from __future__ import annotations

import os
import threading

NICE = 10
"""Added to the process's own: the thread takes a tenth of what those get that it shares a core with."""
NICE_MAX = 19


def yield_to_others() -> None:
    """Make the calling thread alone nice, on Linux; may be called again."""
    thread = threading.get_native_id()
    nice = min(NICE_MAX, os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICE)
    os.setpriority(os.PRIO_PROCESS, thread, max(nice, os.getpriority(os.PRIO_PROCESS, thread)))
