"""`peerd start [SCRIPT [ARGS]]`: run a node in the foreground."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from peerd.carriers import CARRIERS
from peerd.cli import interrupts_end_at_once
from peerd.cli.mode_options import MODE, with_mode_options
from peerd.cli.whose_option import ScriptStarter, options_of, refuse_slips, tell_near_misses
from peerd.training.modes import MODES
from peerd.transport.errors import UserError

NODE, SWARM, NETWORK = "This node", "The swarm", "Network"  # of what --help shows together
COMMAND, CONTEXT = ScriptStarter, {"ignore_unknown_options": True, "allow_extra_args": False}


def _spelt(name: str, argument: str) -> list[str]:
    if not argument:
        return [name]
    usual, *others = (kind.split()[0] for kind in argument.split(", or "))
    return [f"{name}[:{usual}]", *(f"{name}:{other}" for other in others)]


_SPELT = [spelt for name, mode in MODES.items() for spelt in _spelt(name, mode.ARGUMENT)]


@with_mode_options()
def start(
    context: typer.Context,
    *,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT [ARGS]", help="a training script, a built-in task, or -- a whole command"),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="this node's name (default: the host's)", rich_help_panel=NODE)
    ] = None,
    bind: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="default 127.0.0.1:7946; port 0: any", rich_help_panel=NODE)
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="where others reach it: behind address translation, in a container",
            rich_help_panel=NODE,
        ),
    ] = None,
    relay: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="where nobody can dial it: a member that lends it a port; or the next",
            rich_help_panel=NODE,
        ),
    ] = None,
    relay_ports: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST-LAST", help="lend these ports to members that nobody can dial", rich_help_panel=NODE
        ),
    ] = None,
    join: Annotated[
        list[str] | None, typer.Option(metavar="HOST:PORT", help="a member of the swarm to join", rich_help_panel=SWARM)
    ] = None,
    token: Annotated[
        str | None, typer.Option(help="what peerd token printed on a member, or @FILE", rich_help_panel=SWARM)
    ] = None,
    insecure_plaintext: Annotated[
        bool | None,
        typer.Option(
            "--insecure-plaintext", help="neither encrypt nor ask who it is, on all nodes", rich_help_panel=SWARM
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="a TOML file with the same keys", rich_help_panel=NODE)] = None,
    swarm: Annotated[
        str | None,
        typer.Option(help="only nodes of the same swarm talk to each other (default: peerd)", rich_help_panel=SWARM),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help=f"how models are combined: {', '.join(_SPELT)}, FILE.py:CLASS (default: gossip)", rich_help_panel=MODE
        ),
    ] = None,
    told: dict[str, Any],
    wait_for: Annotated[
        int | None,
        typer.Option(help="hold the first step until this many members are ready (default: 1)", rich_help_panel=SWARM),
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(
            help=f"how models travel between machines: {', '.join(CARRIERS)} (default: tcp)", rich_help_panel=NETWORK
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="send no more than this over TCP and UDP, as 2Mbit (default: no limit)",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    rdma_subnets: Annotated[
        list[str] | None,
        typer.Option(
            "--rdma-subnet",
            metavar="CIDR",
            help="RDMA only with peers in this network; may be given again",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    rdma_allow_fallback: Annotated[
        bool | None,
        typer.Option(
            "--rdma-allow-fallback", help="without RDMA take whatever UCX has, for tests", rich_help_panel=NETWORK
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="not from this name's last checkpoint, which is put aside", rich_help_panel=NODE),
    ] = False,
    log: Annotated[
        str | None,
        typer.Option(
            help="auto (json where stderr is no terminal), human or json (default: auto)", rich_help_panel=NODE
        ),
    ] = None,
) -> None:
    """Run a node in the foreground: join a swarm, launch SCRIPT, gossip. Ctrl-C leaves in good order.

    Options of the script go after it; those that peerd start has too, after a --:

    \b
    peerd start train.py --lr 0.1 -- --name run7

    Of a running swarm, peerd mode set changes --mode and its options, on all nodes at once and without a restart. Not
    so --exchange, --server-optimizer, --robust, --swarm and --insecure-plaintext, which all nodes must have alike: stop
    all, and start them anew. The others are this node's own: peerd leave, and start it again with what it should have.
    """
    with interrupts_end_at_once():
        import trio

        from peerd import settings
        from peerd.daemon import main
        from peerd.local import identity
        from peerd.local.local_socket import runtime_dir
        from peerd.security import secrets_folder

    file = config if config is not None else _config_from_environment()
    flags = {
        "name": name, "bind": bind, "advertise": advertise, "relay": tuple(relay) if relay else None,
        "relay_ports": relay_ports, "join": tuple(join) if join else None, "token": token,
        "insecure_plaintext": insecure_plaintext, "swarm": swarm, "mode": mode, **told, "wait_for": wait_for,
        "transport": transport, "budget": budget,
        "rdma_subnets": tuple(rdma_subnets) if rdma_subnets else None, "rdma_allow_fallback": rdma_allow_fallback,
        "log": log,
    }  # fmt: skip
    refuse_slips(command or [])
    loaded = settings.load(flags, os.environ, file)
    tell_near_misses(command or [], options_of(context.command))
    with identity.taken(loaded.state_path, runtime_dir(), secrets_folder.FILES) as mine:
        code = trio.run(main.run, loaded, mine, command or [], fresh)
    if code:
        raise typer.Exit(code)


def _config_from_environment() -> Path | None:
    given = os.environ.get("PEERD_CONFIG")
    if given and not os.path.isfile(given):
        raise UserError(f"PEERD_CONFIG: no such file: {given}")
    return Path(given) if given else None
