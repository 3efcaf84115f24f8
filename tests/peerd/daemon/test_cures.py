"""What a user is told to do about a refusal: something for all that may differ, and nothing about the rest."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from peerd.cli.mode_options import with_mode_options
from peerd.daemon.cures import CURES, cure_of_buffers, cure_of_model, cured
from peerd.settings import Settings, load
from peerd.training.modes import alike_at_start
from peerd.transport.connection import ConnectionLost
from peerd.transport.hello import Refused, first_difference
from peerd.transport.messages import Hello, Refuse

HELLO = Hello(1, "swarm", "run", "id", "name", 1, "10.0.0.1", 7946, "gossip", "ab12", ())


@pytest.mark.parametrize(
    ("mine", "theirs", "cure"),
    [
        ("w float32 2x2", "w float32 2x3", "the same sizes and types"),
        ("w float32 2x2", "w bfloat16 2x2", "the same sizes and types"),
        ("w float32 2x2", "w float32 2x2 frozen 0011223344556677", "freeze the same tensors"),
        ("w float32 2x2 frozen 0011223344556677", "w float32 2x2 frozen 8899aabbccddeeff", "load the same base"),
        ("w float32 2x2", "v float32 2x2", "the same exclude="),
        ("w float32 2x2", "no such tensor", "the same layers under the same names, and the same exclude="),
        ("ab12", "x", "the same layers under the same names, frozen base, and the same exclude="),
    ],
)
def test_where_models_differ_both_ends_are_told_what_to_do(mine: str, theirs: str, cure: str) -> None:
    for one, other in ((mine, theirs), (theirs, mine)):
        assert cure in cure_of_model(one, other)
        assert cure in cured(Refused("told", Refuse("model", one, other)))


def test_a_buffer_that_one_of_them_shares_alone_is_named() -> None:
    model = ["w float32 2", "a.mean float32 2 buffer"]
    low, high = "a.low float32 scalar buffer", "a.high float32 scalar buffer"
    for one, other in ((model, [model[0], low, model[1], high]), ([low, high, *model], model)):
        assert 'exclude=["a.high", "a.low"] in peerd.attach' in str(cure_of_buffers(one, other))
    many = [f"a.{at} float32 scalar buffer" for at in range(9)]
    assert 'exclude=["a.0", "a.1", "a.2", "a.3", ...]' in str(cure_of_buffers(model, model + many))
    for others in (model, ["w float32 3", model[1]], [model[0], "a.mean float32 3 buffer"]):
        assert cure_of_buffers(model, others) is None


def test_every_field_that_may_differ_has_a_cure() -> None:
    others: dict[type, Any] = {int: 99, str: "other"}
    changed = [replace(HELLO, **{item.name: others[type(getattr(HELLO, item.name))]}) for item in fields(Hello)[:-1]]
    refusals = [first_difference(HELLO, hello) for hello in changed]
    compared = {refusal.field for refusal in refusals if refusal is not None}
    told_before = {"encryption", "authority", "certificate", "revoked", "issuer"}  # by the handshake
    assert compared == {*CURES.keys() - told_before - {"node"}, "model"}  # one's own identity is told by the daemon


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (Settings(mode="gossip"), "--mode gossip"),
        (Settings(mode="diloco:4", outer_lr="0.5"), "--mode diloco:4 --outer-lr 0.5"),
        (Settings(robust=False), "--mode gossip --no-robust"),
        (
            Settings(mode="hardsync", exchange="gradients", server_optimizer="adamw:beta1=0.8,clip=1.5"),
            "--mode hardsync --exchange gradients --server-optimizer adamw:beta1=0.8,clip=1.5",
        ),
    ],
)
def test_a_newcomer_is_told_what_to_type_to_have_its_members_mode(settings: Settings, options: str) -> None:
    refused = Refused("told", Refuse("mode", alike_at_start(settings.mode, settings), "push-sum"))
    assert cured(refused, joins=True).startswith(f"told; start this node with {options}, as the members were started: ")
    told: dict[str, Any] = {}
    typed = CliRunner().invoke(_start(told), options.split())
    assert typed.exit_code == 0, typed.output
    assert alike_at_start(told["mode"], load(told, {}, None)) == refused.here


@pytest.mark.parametrize(
    "said",
    [
        "mine",
        "gossip+robust=$(reboot)",
        "gossip+\x1b[2J",
        "gossip: --join x",
        "",
        "+",
        "gossip+insecure_plaintext=True",
        "gossip+join=there:7946",
        "gossip+view=7",
        "gossip+robust=script.py",
        "gossip+robust=True",
        "gossip+exchange=False",
        "gossip+server_optimizer=False",
        "gossip+outer_lr=0.5",
        "diloco:-h",
        "diloco+robust=False+outer_lr=0.5",
    ],
)
def test_what_is_no_mode_here_is_told_as_it_is(said: str) -> None:
    assert cured(Refused("told", Refuse("mode", said, "gossip")), joins=True) == f"told; {CURES['mode']}"


def _start(into: dict[str, Any]) -> typer.Typer:
    """A command with those options of peerd start that are a mode's; what is typed goes into the dictionary."""
    app = typer.Typer()

    @app.command()
    @with_mode_options()
    def start(*, mode: str = "gossip", told: dict[str, Any]) -> None:
        into.update(told, mode=mode)

    return app


def test_the_cure_follows_what_is_told() -> None:
    for field in CURES:
        assert cured(Refused("told", Refuse(field, "a", "b"))) == f"told; {CURES[field]}"
    assert cured(Refused("told", Refuse("of a later version", "a", "b"))) == "told"
    assert cured(ConnectionLost("gone")) == "gone"
