"""Ranks of a job hear that it stops before any of them ends: gloo fails who still reads from one that is gone."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from machine import eventually

RANK = """
import os
import sys
import torch
from torch import distributed
from peerd.trainer.ranks import RankCommand, Ranks

rank = int(sys.argv[1])
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
ranks = Ranks(torch.nn.Linear(1, 1))
ranks.say(RankCommand.GO_ON)
print("ready", flush=True)
if rank == 0:
    sys.stdin.readline()
command, _ = ranks.say(RankCommand.STOP if rank == 0 else RankCommand.GO_ON)
print(command.name, flush=True)
os._exit(0)  # at once, as a script may
"""


def is_asleep(process: subprocess.Popen[str]) -> bool:
    """Its main thread."""
    return Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "S"


def test_rank_0_does_not_end_before_the_others_have_heard_it(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "meet")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        first, second = ranks
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        eventually(lambda: is_asleep(second))  # it reads: for what nobody reads yet rank 0 waits anyway
        second.send_signal(signal.SIGSTOP)
        assert first.stdin is not None
        first.stdin.write("\n")
        first.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            first.wait(2)
        second.send_signal(signal.SIGCONT)
        assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["STOP\n"] * 2
        assert [rank.returncode for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
