"""`peerd average`: one exact average of all models, in the middle of a run."""

from __future__ import annotations

from pathlib import Path

from peerd.cli import Interrupted
from peerd.cli.output import Format, FormatOption, NameOption, echo, print_json, size
from peerd.local.local_socket import find_node, request


def average(name: NameOption = None, format: FormatOption = Format.TEXT) -> None:
    """Make every member's model the exact mean of all, to the bit; then train on in the mode that was.

    Every trainer stops at its next step until all members hold the mean, in float32 whatever the mode's codec, and
    trains on from there. A node that trains no more takes part, too, and keeps the mean. Ctrl-C takes it back.
    """
    path = find_node(name)
    try:
        answer = request(path, "average", meanwhile=_Waiting(path).tell)
    except KeyboardInterrupt:
        raise Interrupted("interrupted: the node takes the average back, and the swarm goes on as before") from None
    if format is Format.JSON:
        print_json(answer)
        return
    not_in_it = f"not in it: {', '.join(answer['not_in_it'])}" if answer["not_in_it"] else ""
    if len(answer["members"]) == 1:
        echo(f"nothing was averaged: {not_in_it or 'no other member has the model'}")
        return
    sent, received = size(answer["bytes_sent"]), size(answer["bytes_received"])
    echo(f"averaged {len(answer['members'])} members in {answer['seconds']:.1f} s: {', '.join(answer['members'])}")
    if not_in_it:
        echo(not_in_it)
    echo(f"this node was {answer['distance']:.3%} from the mean; it sent {sent}, received {received}")
    echo(f"plan {answer['plan']}: mode {answer['mode']} again")


class _Waiting:
    """Tells for whom an average waits, when that changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._told = ""

    def tell(self) -> None:
        answer = request(self._path, "mode")
        missing = [row for row in answer["members"] if row["plan"] <= answer["plan"] and not row["stands"]]
        names = [f"{row['name']} (no step for long)" if row["stalled"] else row["name"] for row in missing]
        told = f"waiting for the next step of {', '.join(names)}" if names else "all have come"
        if told != self._told:
            echo(told, err=True)
        self._told = told
