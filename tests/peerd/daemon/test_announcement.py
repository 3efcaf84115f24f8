"""What does a node say of how others join it?"""

from __future__ import annotations

import logging

import pytest

from peerd.daemon import main
from peerd.settings import Settings

AT = ("127.0.0.1", 7946)
OPTIONS = "--join 127.0.0.1:7946 --name THEIRS --bind 127.0.0.1:0"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("", OPTIONS),
        ("train.py", f"train.py {OPTIONS}"),
        ("train.py --lr 3 --rank 0", f"{OPTIONS} -- train.py --lr 3 --rank THEIR_RANK"),
        ("train.py --rank=0 --ranks 2", f"{OPTIONS} -- train.py --rank=THEIR_RANK --ranks 2"),
        ("digits", f"{OPTIONS} -- digits --rank THEIR_RANK --peers HOW_MANY"),
        ("digits --peers=4 --steps 9", f"{OPTIONS} -- digits --peers=4 --steps 9 --rank THEIR_RANK"),
        ("digits --rank 1 --peers 4", f"{OPTIONS} -- digits --rank THEIR_RANK --peers 4"),
    ],
)
def test_how_others_join_is_a_line_to_paste(command: str, told: str, caplog: pytest.LogCaptureFixture) -> None:
    """With the rank of this node they would make its batches once more."""
    caplog.set_level(logging.INFO)
    main._announce(Settings(), AT, AT, command.split(), issues=True)
    assert caplog.messages == [f"listening on 127.0.0.1:7946; others join with: peerd start {told}"]


def test_how_many_there_are_may_be_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PEERD_PEERS", "4")
    caplog.set_level(logging.INFO)
    main._announce(Settings(), AT, AT, ["digits"], issues=True)
    assert caplog.messages[0].endswith(f"{OPTIONS} -- digits --rank THEIR_RANK --peers 4")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (Settings(mode="diloco:4", outer_lr="0.5"), "--mode diloco:4 --outer-lr 0.5"),
        (Settings(mode="allreduce", every=9), "--mode allreduce"),
        (Settings(robust=False), "--mode gossip --no-robust"),
    ],
)
def test_who_pastes_it_is_not_refused_for_the_mode(
    settings: Settings, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    main._announce(settings, AT, AT, ["train.py"], issues=True)
    assert caplog.messages == [f"listening on 127.0.0.1:7946; others join with: peerd start train.py {OPTIONS} {told}"]


def test_nor_for_the_run_which_has_no_option(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    main._announce(Settings(run="fold-2"), AT, AT, ["train.py"], issues=True)
    line = f"listening on 127.0.0.1:7946; others join with: PEERD_RUN=fold-2 peerd start train.py {OPTIONS}"
    assert caplog.messages == [line]
