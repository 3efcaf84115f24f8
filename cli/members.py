"""`peerd members`: who is in the swarm, as one node sees it."""

from __future__ import annotations

from typing import Any

from peerd.cli.output import Format, FormatOption, NameOption, print_json, print_table
from peerd.local.local_socket import find_node, request

ID_SHOWN = 8  # digits that tell members apart; all are in the JSON


def members(name: NameOption = None, format: FormatOption = Format.TEXT) -> None:
    """List the members of the swarm as one node sees it: alive, suspect, failed, left or revoked.

    The JSON says more.

    "no model": it has none yet; "no trainer": nor does a script come; "finished": its script's run has ended.

    "no steps": its trainer has made none for more than ten times its slowest, and ten seconds; or it has died.

    "refused": this node exchanges nothing with it, for broken rules or a model far from all others'; see peerd forgive.

    "not reached": for half a minute or longer this node could make no connection to it: it hears nothing from here.

    VIA is how models travel between that member and this node, while they exchange: tcp, shm (memory that nodes of one
    machine share), rdma, or ucx (for tests: what the library for RDMA has without it).
    """
    rows = request(find_node(name), "members")["members"]
    if format is Format.JSON:
        print_json(rows)
        return
    print_table(
        ["NAME", "ADDRESS", "STATE", "VIA", "MODE", "ID"],
        [
            [
                _marked(row),
                row["address"],
                _state(row),
                row["carrier"] or "-",
                row["mode"],
                row["id"][:ID_SHOWN],
            ]
            for row in rows
        ],
    )


def _state(row: dict[str, Any]) -> str:
    refused = f", refused for {row['refused_s'] / 60:.0f} min" if row["refused_s"] else ""
    unreached = ", not reached" if row["unreached_s"] else ""
    return f"{row['state']}{_trainers(row) if row['state'] == 'alive' else ''}{unreached}{refused}"


def _trainers(row: dict[str, Any]) -> str:
    if row["ended"]:
        return ", finished"
    if not row["expects"]:
        return ", no trainer"
    if row["stalled"]:
        return ", no steps"
    return "" if row["ready"] else ", no model"


def _marked(row: dict[str, Any]) -> str:
    return f"{row['name']} (this)" if row["self"] else row["name"]
