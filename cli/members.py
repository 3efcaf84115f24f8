"""`peerd members`: who is in the swarm, as one node sees it."""

from __future__ import annotations

from peerd.cli.output import Format, FormatOption, NameOption, print_json, print_table
from peerd.local_socket import find_node, request


def members(name: NameOption = None, format: FormatOption = Format.TEXT) -> None:
    """List the members of the swarm: alive, suspect, failed or left.

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
                row["state"],
                row["carrier"] or "-",
                row["mode"],
                row["model"] or "-",
                row["id"],
            ]
            for row in rows
        ],
    )


def _marked(row: dict[str, str]) -> str:
    return f"{row['name']} (this node)" if row["self"] else row["name"]
