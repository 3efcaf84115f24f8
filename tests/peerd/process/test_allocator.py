"""Freed chunks are used again: what the kernel had to hand out says so."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import numpy as np
from peerd.process.allocator import keep_freed_chunks
if sys.argv[1] == "keep":
    keep_freed_chunks()
for turn in range(60):
    if turn == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    chunks = [np.empty(3 << 20, np.uint8) for _ in range(4)]
    for chunk in chunks:
        chunk.fill(1)
    del chunk, chunks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    return int(subprocess.run([sys.executable, "-c", FAULTS, how], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="its malloc alone has these settings")
def test_freed_chunks_cost_no_pages() -> None:
    assert page_faults("keep") < 100 < page_faults("as it is")
