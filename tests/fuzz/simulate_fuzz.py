"""Runs of `peerd simulate` with options drawn at random, for so many seconds.

`python tests/fuzz/simulate_fuzz.py --seconds 600 --seed 0`. Sought are violations, errors and runs that come to no end;
each is shown with the command that makes it again.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import signal
import sys
import time
import traceback
from collections import Counter
from types import FrameType

from typer.testing import CliRunner

from peerd.cli.main import app
from peerd.simulation.byzantine import ATTACKS
from peerd.simulation.faults import FAULTS
from peerd.training.codecs import CODECS
from peerd.training.mode_settings import GRADIENTS, WEIGHTS
from peerd.training.modes import MODES, heeds
from peerd.transport.errors import UserError

LIMIT_S = 100.0  # of processor time; most runs of those below take a second
FRAMES_SHOWN = 6
ARGUMENTS = {"elastic": ":pairwise", "diloco": ":3", "softsync": ":2"}
SETTINGS = {
    "codec": tuple(CODECS),
    "trigger": ("change:0.01", "change:0.3", "period:3", "always"),
    "view": ("1", "2", "5"),
    "every": ("2", "5", "12"),
    "overlap": ("blocking", "quorum", "delayed", "hpsgd"),
    "topology": ("ring", "tree:2", "halving"),
    "min-peers": ("2", "3"),
}
SERVED = {"servers": ("2", "3"), "topology": ("adv:2",)}
LOSSY = ("gossip-push", "gossip-pull", "push-sum")  # modes that can do with lost messages


class EndlessError(Exception):
    """A run took longer than LIMIT_S."""


def command(rng: random.Random) -> list[str]:
    """The options of one run."""
    problem = rng.choices(("consensus", "digits", "bytes"), (6, 3, 1))[0]
    peers, steps, step_s = rng.randint(3, 12), rng.randint(1, 60), rng.choice((0.02, 0.1, 0.5, 2.0))
    words = ["--peers", str(peers), "--seed", str(rng.randrange(10**6)), "--problem", problem, "--steps", str(steps)]
    words += ["--compute", rng.choice((f"fixed:{step_s}", f"lognormal:{step_s}:0.6"))]

    def perhaps(share: float, option: str, values: tuple[object, ...]) -> None:
        if rng.random() < share:
            words.extend((f"--{option}", str(rng.choice(values))))

    name = rng.choice(list(MODES))
    exchange = GRADIENTS if GRADIENTS in MODES[name].EXCHANGES and rng.random() < 0.3 else WEIGHTS
    words += ["--mode", name + rng.choice(("", ARGUMENTS.get(name, ""))), "--exchange", exchange]
    served = heeds(name, "servers", exchange)
    for setting, values in (SETTINGS | SERVED if served else SETTINGS).items():
        if heeds(name, setting.replace("-", "_"), exchange):
            perhaps(0.35, setting, values)
    if problem == "bytes":
        perhaps(1, "parameters", (10_000, 5_000_000))
    perhaps(0.4, "network", ("lan", "wan", "home"))
    perhaps(0.3, "uplink-mbit", (1, 10, 1000))
    if faults := rng.sample(list(FAULTS), rng.randint(0, 3)):
        # seldom enough that such a run gets somewhere
        words += ["--faults", ",".join(faults), "--fault-every", str(rng.choice((20, 60)) + steps * step_s / 10)]
    else:
        words += ["--faults", "none"]
    perhaps(0.3, "join-over", (1, 10, 60))
    if problem != "bytes":
        perhaps(0.25, "byzantine", tuple(f"{lie}:{rng.randint(1, max(1, peers // 4))}" for lie in ATTACKS))
    if name in LOSSY:
        perhaps(0.5, "drop", (0.01, 0.1, 0.3))
    perhaps(0.2, "slow-node", (0.2, 4, 20))
    if problem == "digits":
        perhaps(0.4, "shard", ("sorted", "dirichlet:0.3"))
    words += ["--ends-together"] * (rng.random() < 0.2)
    return words


def _endless(signum: int, frame: FrameType | None) -> None:
    raise EndlessError


def came_to(words: list[str]) -> tuple[str, str]:
    """One of held, refused and wrong, and what was said."""
    before = signal.signal(signal.SIGPROF, _endless)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        ran = CliRunner().invoke(app, ["simulate", *words, "--format", "json"])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    if isinstance(ran.exception, UserError):
        return "refused", str(ran.exception)
    if ran.exc_info and not isinstance(ran.exception, SystemExit | None):
        frames = traceback.format_exception(*ran.exc_info)
        return "wrong", "".join(frames[-FRAMES_SHOWN:])
    try:
        violations = json.loads(ran.stdout)["violations"]
    except (ValueError, KeyError, TypeError):
        return "wrong", ran.output
    return ("wrong", "\n".join(violations)) if violations or ran.exit_code else ("held", "")


def main() -> int:
    """0 if nothing was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    until = time.monotonic() + asked.seconds
    tally: Counter[str] = Counter()
    while time.monotonic() < until:
        words = command(random.Random(f"{asked.seed}:{tally.total()}"))
        verdict, said = came_to(words)
        tally[verdict] += 1
        if verdict != "held":
            print(f"{verdict}: peerd simulate {shlex.join(words)}\n{said}\n", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in tally.items()))
    return 1 if tally["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
