"""`peerd info`: what a node is and was told."""

from __future__ import annotations

from peerd.cli.output import Format, FormatOption, NameOption, echo, print_json
from peerd.local.local_socket import find_node, request


def info(name: NameOption = None, format: FormatOption = Format.TEXT) -> None:
    """Show a node's id, the SHA-256 of its key (FINGERPRINT, which begins with the id), address and settings.

    \b
    sealed          connections are encrypted, and each end has proved who it is
    issuers         the members that make tokens: ask one of them for peerd token
    epoch           how often this node has been started
    mode_in_force   what the swarm does now; the settings below it are as started
    """
    answer = request(find_node(name), "info")
    if format is Format.JSON:
        print_json(answer)
        return
    shown = {**answer, **answer["settings"]}
    del shown["settings"]
    for key, value in shown.items():
        text = ", ".join(value) if isinstance(value, list) else str(value)
        echo(f"{key:<20} {text or '-'}")
