"""What mends a refusal? The handshake (transport/hello.py) says what differs, this what a user does about it."""

from __future__ import annotations

import re
import shlex
import traceback
from collections.abc import Sequence
from typing import Any

from peerd.training.mode_settings import ALIKE_AT_START, OPTIONS, ModeSettings
from peerd.training.modes import MODES, alike_at_start, check_given, check_options
from peerd.training.modes.own_mode import as_told, whose
from peerd.transport.hello import Refused

BUFFERS_NAMED_MAX = 4  # in one line
TOLD = re.compile(r"[a-z_]+=[A-Za-z0-9.:,=_-]+", re.ASCII)  # of a mode and its options; a member may say anything
OF_ITSELF = "what peerd mode set has changed since then it takes over by itself"

CURES = {
    "protocol": "install one version of peerd on all nodes",
    "swarm": "give all nodes the same --swarm, or join a node of your own swarm",
    "run": "give all nodes the same run (PEERD_RUN, or in the file of --config)",
    "mode": (
        "start newcomers with the --mode and options that the members were started with: what peerd mode set has "
        "changed since then they take over by themselves"
    ),
    "encryption": "start all nodes with --insecure-plaintext, or all without",
    "authority": "a node joins with a token of the swarm that it is to be in: peerd token on a member, --token on it",
    "certificate": "look at the clocks of both machines",
    "revoked": "who was put out stays out: its machine enters again with another --name and a new token",
    "issuer": "who let that node in was put out, and all that it let in with it: give that node a new token",
    "node": "a state folder belongs to one node: give this one another --name",
}

ALONE = "let this script train alone by PEERD_NAME=none"
ONE_AFTER_THE_OTHER = (
    "attach all that a script trains at once, before it is frozen: several models go in one attach([a, b], "
    "[optimizer_a, optimizer_b])"
)


def told_of_own(error: Exception) -> str | None:
    """The one line of what comes from the user's own mode: whose code fails, and where; None: it comes from no such."""
    if (own := whose(error)) is None:
        return None
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
    return f"{own}, line {lines[-1]}, fails with {type(error).__name__}: {error}"


def cured(failure: Exception, *, joins: bool = False) -> str:
    """What a user is told of it: a refusal with its cure, where there is one.

    `joins`: this node is the newcomer, and was refused by a member.
    """
    if not isinstance(failure, Refused):
        return str(failure)
    cure = CURES.get(failure.field)
    if failure.field == "model":
        cure = cure_of_model(failure.here, failure.there)
    elif failure.field == "mode" and joins and (options := options_of(failure.here)) is not None:
        cure = f"start this node with {options}, as the members were started: {OF_ITSELF}"
    return f"{failure}; {cure}" if cure is not None else str(failure)


def options_of(alike: str) -> str | None:
    """What is typed to have what `alike_at_start` has said; None: it never says so of a mode that this node has.

    Who types it trusts that it is of the mode alone: a member may name an option that gives this node away.
    """
    mode, *told = alike.split("+")
    given = {key: value for key, _, value in (one.partition("=") for one in told)}
    known = mode.partition(":")[0] in MODES and given.keys() <= {*ALIKE_AT_START}
    if not known or not all(TOLD.fullmatch(one) for one in (f"mode={mode}", *told)):
        return None
    flags = {key: value != str(False) for key, value in given.items() if isinstance(OPTIONS[key].default, bool)}
    values: dict[str, Any] = given | flags
    try:
        settings = ModeSettings(**values)
        check_options(mode, settings)
        check_given(mode, values, settings.exchange)
        if alike_at_start(mode, settings) != alike:
            return None
    except Exception:  # a mode of the user's own file may raise any
        return None
    options = {key.replace("_", "-"): value for key, value in values.items()}
    typed = (f"--no-{key}" if value is False else f"--{key} {value}" for key, value in options.items())
    return " ".join([f"--mode {shlex.quote(as_told(mode))}", *typed])


def cure_of_buffers(lines: Sequence[str], others: Sequence[str]) -> str | None:
    """What to do where two models differ in nothing but which of their buffers are shared; None: in something else."""
    odd = {*lines} ^ {*others}
    names = sorted({line.split(" ")[0] for line in odd})
    if not odd or len(names) < len(odd) or not all(line.endswith(" buffer") for line in odd):
        return None
    shown = [f'"{name}"' for name in names[:BUFFERS_NAMED_MAX]] + ["..."] * (len(names) > BUFFERS_NAMED_MAX)
    return (
        "a buffer that holds an infinity as its script attaches is not shared: where both have it, "
        f"exclude=[{', '.join(shown)}] in peerd.attach keeps it private whatever it holds"
    )


def cure_of_model(one: str, other: str) -> str:
    """What to do where two models first differ in these lines of theirs; a line that is none: the other has no more."""
    (tensor, frozen, _), (other_tensor, other_frozen, _) = one.partition(" frozen "), other.partition(" frozen ")
    if any(line.startswith("optimizer.") for line in (tensor, other_tensor)):
        return "give the optimizer the same kind, options and param_groups on all nodes"
    if tensor == other_tensor and frozen and other_frozen:
        return "its frozen values differ: load the same base on all nodes before peerd.attach"
    if tensor == other_tensor:
        return "freeze the same tensors (requires_grad) on all nodes before peerd.attach"
    if tensor.split(" ")[0] == other_tensor.split(" ")[0]:
        return "build the model with the same sizes and types on all nodes"
    frozen = ", frozen base" if " " not in one + other else ""  # only the whole signatures are known to differ
    return f"all nodes need the same layers under the same names{frozen}, and the same exclude= in peerd.attach"
