"""How far is the end of a worker's run?

A worker whose last push has come says Finished, so that nobody waits for its next. When all have, the servers send the
final weights to all. A trainer may train on at any time; then its run has another end.
"""

from __future__ import annotations

from enum import IntEnum


class RunEnd(IntEnum):
    """Each is nearer to the end than those before it."""

    TRAINING = 0
    FINISHING = 1  # its last step is made
    DRAINED = 2  # every push of its has been answered, and Finished is said
    SETTLED = 3  # its model is the final weights


_ANOTHER_RUN = {RunEnd.TRAINING: "a step, or a gradient, after the last one: another run"}
TRANSITIONS: dict[RunEnd, dict[RunEnd, str]] = {
    RunEnd.TRAINING: {RunEnd.FINISHING: "a report that ends the run"},
    RunEnd.FINISHING: {RunEnd.DRAINED: "the trainer waits, and every shard has answered: Finished", **_ANOTHER_RUN},
    RunEnd.DRAINED: {RunEnd.SETTLED: "final weights of every shard, which the model has become", **_ANOTHER_RUN},
    RunEnd.SETTLED: _ANOTHER_RUN,
}
"""What each may be followed by, and why."""
