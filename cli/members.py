"""`peerd members`: who is in the swarm, as one node sees it."""

from __future__ import annotations

from typing import Any

from peerd.cli.output import Format, FormatOption, NameOption, print_json, print_table
from peerd.local.local_socket import find_node, request

ID_SHOWN = 16  # digits that tell members apart; all are in the JSON


def members(name: NameOption = None, format: FormatOption = Format.TEXT) -> None:
    """List the members of the swarm: alive, suspect, failed or left.

    "no steps": its trainer has made none for more than ten times its slowest, and ten seconds.

    CARRIER is what large chunks travel over between that member and this node, while they are linked.
    """
    rows = request(find_node(name), "members")["members"]
    if format is Format.JSON:
        print_json(rows)
        return
    print_table(
        ["NAME", "ADDRESS", "STATE", "CARRIER", "MODE", "MODEL", "ID"],
        [
            [
                _marked(row),
                row["address"],
                f"{row['state']}, no steps" if row["stalled"] and row["state"] == "alive" else row["state"],
                row["carrier"] or "-",
                row["mode"],
                row["model"] or "-",
                row["id"][:ID_SHOWN],
            ]
            for row in rows
        ],
    )


def _marked(row: dict[str, Any]) -> str:
    return f"{row['name']} (this node)" if row["self"] else row["name"]
