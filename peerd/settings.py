"""What was this node told? Flags, then PEERD_* variables, then a TOML file, then defaults; unknown keys are refused."""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import socket
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from peerd.carriers import CARRIERS, CarrierSettings
from peerd.protocol import plan
from peerd.security.token import TEXT_MAX, Token
from peerd.security.token import parse as parse_token
from peerd.training.mode_settings import AUTO, OPTIONS, PLANNED, WEIGHTS, check_choice, check_count
from peerd.training.modes import (
    MODES,
    ModeSettings,
    alike_at_start,
    check_given,
    check_options,
    in_one_form,
    settings_of,
)
from peerd.training.modes.own_mode import adopted
from peerd.training.plain_numbers import DIGITS_MAX, number, whole
from peerd.transport.admission import GUESTS_MAX
from peerd.transport.errors import UserError, WrongSetting, wrong
from peerd.transport.ids import Address
from peerd.transport.messages import NAME, VISIBLE_MAX
from peerd.transport.sending.budget import Budget, parse_rate

DEFAULT_PORT, PORT_MAX = 7946, 65535
DEFAULT_BIND = f"127.0.0.1:{DEFAULT_PORT}"
OTHER_VARIABLES = (
    "CONFIG",
    "DAEMON",
    "DATA",
    "PEERS",
    "RANK",
    "SOCKET",
    "UCX_LIBRARY",
)  # PEERD_ variables that are no settings
OF_RDMA = ("rdma_subnets", "rdma_allow_fallback")
MEMBERS_MAX = 4096  # of a swarm
FILE_CHARACTERS_MAX = 1_000_000
_WORDS = {tuple: "a list of strings", int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ModeSettings):
    """Everything a node can be told; each field is a TOML key, a PEERD_ variable and, for most, a flag.

    `codec` may be `auto` here: `mode_settings` has it by name.
    """

    name: str = field(
        default_factory=lambda: re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip(".-")[:64] or "node"
    )
    bind: str = DEFAULT_BIND
    advertise: str = ""  # where others reach this node; "": where it is bound
    relay: tuple[str, ...] = ()  # members at a port of which others reach this node, which nobody can dial
    relay_ports: str = ""  # that this node lends to such nodes: FIRST-LAST
    join: tuple[str, ...] = ()
    token: str = field(default="", repr=False)  # what `peerd token` printed; @FILE is replaced by what is in it
    insecure_plaintext: bool = False  # connections are neither encrypted nor authenticated, and all nodes must do so
    swarm: str = "peerd"  # nodes of another swarm are refused
    run: str = ""  # nodes of another run are refused
    mode: str = "gossip"
    wait_for: int = 1  # the first step waits until this many members hold the model, so that all start together
    network: str = "lan"
    transport: str = "tcp"  # what connections are made of: one of CARRIERS
    budget: str = ""  # a rate such as 2Mbit: no more is sent over TCP and UDP; none: whatever the line takes
    rdma_subnets: tuple[str, ...] = ()  # peers in these alone may have RDMA to this node's buffers; none: all may
    rdma_allow_fallback: bool = False  # take whatever UCX has where there is no RDMA: for tests
    checkpoint_every_s: float = 60.0
    state_dir: str = ""  # "" means $XDG_STATE_HOME/peerd/NAME
    log: str = "auto"

    def __post_init__(self) -> None:
        """Check what a type cannot say. Raises UserError."""
        if not self.name:
            raise wrong("name", "it is empty; leave --name and PEERD_NAME out for the host's name")
        if not NAME.fullmatch(self.name) or len(self.name) > 64:
            raise wrong(
                "name", f"{self.name!r} must be 1 to 64 letters, digits, '_', '.' or '-', the first no '.' or '-'"
            )
        for key, text in (("swarm", self.swarm), ("run", self.run)):
            if text and (not NAME.fullmatch(text) or len(text) > 64):
                rule = "up to 64 letters, digits, '_', '.' or '-', the first no '.' or '-'"
                raise wrong(key, f"{text[:80]!r} must be {rule}")
        parse_address(self.bind, "bind")
        if (where := self.advertised(DEFAULT_PORT)) is not None and where[1] == 0:
            raise wrong("advertise", f"{self.advertise!r}: port 0 is nobody's; give the one that others reach")
        for seed in self.join:
            parse_address(seed, "join")
        if self.relays:
            for key, other in (("advertise", self.advertise), ("relay_ports", self.relay_ports)):
                if other:
                    raise wrong(key, "without effect with relay, at whose address others reach this node")
        if self.bind_address[1] in self.lent_ports:
            raise wrong("relay_ports", f"{self.relay_ports} has the port of bind, {self.bind_address[1]}")
        if self.invitation is not None and self.insecure_plaintext:
            raise wrong("token", "with insecure_plaintext nobody asks for one; leave out one of the two")
        ModeSettings.__post_init__(self)
        check_choice("mode", self.mode.partition(":")[0], list(MODES))
        check_options(self.mode, self)
        check_choice("network", self.network, ["lan", "wan"])
        check_choice("transport", self.transport, list(CARRIERS))
        for subnet in self.rdma_subnets:
            try:
                ipaddress.ip_network(subnet)
            except ValueError as error:
                raise wrong("rdma_subnets", f"{error}; an example is 10.1.0.0/16") from None
        if self.budget:
            try:
                parse_rate(self.budget)
            except ValueError as error:
                raise wrong("budget", str(error)) from None
        check_choice("log", self.log, ["auto", "human", "json"])
        check_count("wait_for", self.wait_for, MEMBERS_MAX)
        if not self.checkpoint_every_s > 0:
            raise wrong("checkpoint_every_s", f"{self.checkpoint_every_s} must be above 0")

    @property
    def state_path(self) -> Path:
        """The folder of this node's identity and checkpoints; the script, and who exports, may be in another one."""
        return Path(self.state_dir).absolute() if self.state_dir else _state_home() / self.name

    @property
    def checkpoints(self) -> Path:
        """The folder of this node's checkpoints."""
        return self.state_path / "checkpoints"

    @property
    def authority_path(self) -> Path:
        """The folder of the user's own authority, for nodes that only this machine reaches. No node has this name."""
        return _state_home() / ".authority"

    @property
    def invitation(self) -> Token | None:
        """`token`, parsed."""
        return parse_token(self.token) if self.token else None

    @property
    def mode_settings(self) -> ModeSettings:
        """What the mode is told."""
        return settings_of(self.mode, self)

    @property
    def carrier_settings(self) -> CarrierSettings:
        """What the carrier is told."""
        budget = Budget(parse_rate(self.budget)) if self.budget else None
        return CarrierSettings(self.swarm, self.run, self.view, self.rdma_subnets, self.rdma_allow_fallback, budget)

    @property
    def bind_address(self) -> Address:
        """`bind`, parsed."""
        return parse_address(self.bind, "bind")

    def advertised(self, port: int) -> Address | None:
        """`advertise`, parsed; without a port of its own with this one, which the node is bound to."""
        return parse_address(self.advertise, "advertise", port) if self.advertise else None

    @property
    def relays(self) -> tuple[Address, ...]:
        """`relay`, parsed."""
        return tuple(parse_address(relay, "relay") for relay in self.relay)

    @property
    def lent_ports(self) -> range:
        """`relay_ports`, parsed. Raises UserError."""
        found = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", self.relay_ports or "0", re.ASCII)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if self.relay_ports and not (0 < first <= last <= PORT_MAX and last - first < GUESTS_MAX):
            rule = f"FIRST-LAST, at most {GUESTS_MAX} ports up to {PORT_MAX}, as 7950-7957"
            raise wrong("relay_ports", f"{self.relay_ports[:80]!r} must be {rule}")
        return range(first, last + 1) if self.relay_ports else range(0)

    @property
    def seeds(self) -> tuple[Address, ...]:
        """Whom to join through: `join`, parsed, else who made the token, else the relays."""
        if not self.join and self.invitation is not None:
            return self.invitation.addresses
        return tuple(parse_address(seed, "join") for seed in self.join) or self.relays


def load(flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None) -> Settings:
    """Merge the three sources over the defaults. Raises UserError naming the key and where it came from.

    What is given but has no effect in the mode, or with the transport, is refused, too.
    """
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values.update(_from_file(file))
        except UserError as error:
            raise WrongSetting(str(error), "config") from None
    origins = dict.fromkeys(values, f"config {file}")
    for item in fields(Settings):
        variable = f"PEERD_{item.name.upper()}"
        if variable in environment:
            values[item.name], origins[item.name] = _from_text(item.name, environment[variable], variable), variable
    said = {key: value for key, value in flags.items() if value is not None}
    try:
        return _checked(values | said)
    except WrongSetting as error:
        if error.key in origins and error.key not in said:
            raise UserError(f"{origins[error.key]}: {error}") from None
        raise


def _checked(values: dict[str, Any]) -> Settings:
    if values.get("token") == "":  # without one the node would be the first of another swarm
        raise wrong("token", "empty; it should be the line that peerd token printed on a member, or left out")
    if str(values.get("token", "")).startswith("@"):
        values["token"] = _read_token(Path(str(values["token"])[1:]))
    if "mode" in values:
        values["mode"] = adopted(str(values["mode"]))
    loaded = replace(Settings(), **values)
    check_given(loaded.mode, values, loaded.exchange)
    if len(alike := alike_at_start(loaded.mode, loaded.mode_settings)) > VISIBLE_MAX:
        raise wrong("mode", f"more than {VISIBLE_MAX} characters that all nodes must have alike: {alike[:60]!r}...")
    if loaded.transport == "tcp" and (idle := [key for key in values if key in OF_RDMA]):
        raise WrongSetting(
            f"{', '.join(idle)}: without effect with transport tcp; leave it out, or take rdma or auto", idle[0]
        )
    return loaded


def planned(started: Settings, text: str) -> Settings:
    """What a plan's text makes of what this node was started with. Raises UserError.

    Settings that the text leaves out keep their value in the mode that the node was started with, which is every
    member's, and take the default in another mode: a codec that suits one may ruin the other.
    """
    if not text:
        return started
    if len(text.encode()) > plan.TEXT_BYTES:
        raise UserError(f"mode: longer than {plan.TEXT_BYTES} bytes")
    mode, changes = plan.parts(text)
    if unknown := [key for key in changes if key not in PLANNED]:
        raise UserError(f"mode: unknown setting {unknown[0]!r}; known: {', '.join(PLANNED)}")
    check_choice("mode", mode.partition(":")[0], list(MODES))
    stays = in_one_form(mode) == in_one_form(started.mode)
    if started.exchange != WEIGHTS and not stays:
        raise UserError(f"mode {mode}: a swarm that exchanges {started.exchange} keeps its mode; stop all nodes first")
    others = {} if stays else {key: OPTIONS[key].default for key in PLANNED}
    told = {key: _from_text(key, value, f"mode {mode}") for key, value in changes.items()}
    return replace(started, mode=mode, **{**others, **told})


def unknown_variables(environment: Mapping[str, str]) -> str | None:
    """One line about PEERD_* variables that nothing reads, or None.

    They are told, not refused: Kubernetes sets seven of its own beside a service that is called peerd.
    """
    known = [*OTHER_VARIABLES, *(item.name.upper() for item in fields(Settings))]
    given = sorted(variable[6:] for variable in environment if variable.startswith("PEERD_"))
    told = []
    for key in (key for key in given if key not in known):
        near = difflib.get_close_matches(key, known, 1)
        told.append(f"PEERD_{key} (did you mean PEERD_{near[0]}?)" if near else f"PEERD_{key}")
    return f"peerd knows no such settings, they are ignored: {', '.join(told)}" if told else None


def parse_address(text: str, where: str, default: int = DEFAULT_PORT) -> Address:
    """HOST:PORT, HOST (the default port), [V6]:PORT or V6. Raises UserError."""
    bare, _, after = text.rpartition(":")
    if _is_ipv6(text):
        if after.isdecimal() and _is_ipv6(bare):
            raise wrong(where, f"{text!r} needs brackets: [{bare}]:{after}, or [{text}]:{DEFAULT_PORT}")
        return text, default
    match = re.fullmatch(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^-:\[\]][^:\[\]]*))(?::(?P<port>[0-9]{1,9}))?", text)
    if match is None:
        raise wrong(where, f"{text!r} is not HOST:PORT (for example 10.0.0.5:{DEFAULT_PORT})")
    if int(match["port"] or default) > PORT_MAX:
        raise wrong(where, f"{text!r} has a port above {PORT_MAX}, the largest there is")
    return match["v6"] or match["host"], int(match["port"] or default)


def _state_home() -> Path:
    if told := os.environ.get("XDG_STATE_HOME"):
        return Path(told).absolute() / "peerd"
    try:
        return Path.home() / ".local" / "state" / "peerd"
    except RuntimeError:  # a container's user may have none
        raise UserError("this user has no home folder for peerd's state: set XDG_STATE_HOME") from None


def _read_token(file: Path) -> str:
    if file == Path():
        raise wrong("token", "'@' and no file; @FILE reads it from there")
    try:
        with file.open() as lines:
            text = lines.read(TEXT_MAX + 1).strip()
    except (OSError, ValueError) as error:
        raise wrong("token", f"{file}: {(isinstance(error, OSError) and error.strerror) or error}") from None
    if not text:
        raise wrong("token", f"{file} is empty; it should hold the line that peerd token printed on a member")
    return text


def where_to_listen(bind: str, host: str, outer_host: str) -> str:
    """The host of a node whose `bind` leads to `host`, and which others reach at `outer_host`. Raises UserError.

    Linux sends nothing from loopback to another machine.
    """
    if not is_loopback(host) or is_loopback(outer_host):
        return host
    if bind != DEFAULT_BIND:
        cure = "leave --bind out, or give 0.0.0.0"
        raise wrong("bind", f"nothing goes from {host} to other machines, nor comes from there; {cure}")
    return "::" if ":" in outer_host else "0.0.0.0"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address. False for a name, and for what is no address at all."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _from_file(file: Path) -> dict[str, Any]:
    text = ""
    try:
        with file.open(encoding="utf-8-sig") as opened:  # some editors begin a file with a byte order mark
            text = opened.read(FILE_CHARACTERS_MAX + 1)
        if len(text) > FILE_CHARACTERS_MAX:
            raise UserError(f"config {file}: more than {FILE_CHARACTERS_MAX} characters are no settings")
        table = tomllib.loads(text)
        repr(table)  # a hexadecimal number that is read may be too long for a line that names it
    except OSError as error:
        raise UserError(f"config {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not TOML's own alone: Python reads no whole number of 4,301 digits
        why = str(error).partition("; use sys.")[0]  # no user can call that
        if isinstance(error, UnicodeDecodeError):
            why = "it is not UTF-8: save it as such"
        raise UserError(f"config {file}: {why}{_line_of(text, why)}") from None
    names = [item.name for item in fields(Settings)]
    for key, value in table.items():
        if key not in names:
            near = difflib.get_close_matches(key, names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(names)}"
            if isinstance(value, dict):
                hint = f"; settings stand above all tables: leave the line [{key}] out"
            raise UserError(f"config {file}: unknown key {key!r}{hint}")
        table[key] = _typed(key, value, f"config {file}")
    return table


def _line_of(text: str, error: str) -> str:
    """The line that an error names by its number, to be seen without opening the file."""
    number = re.search(r"at line (\d+)", error)
    lines = text.splitlines()
    named = number is not None and int(number[1]) <= len(lines)
    return f": {lines[int(number[1]) - 1].strip()[:100]}" if named and number else ""


def _typed(key: str, value: Any, where: str) -> Any:
    if isinstance(value, int) and len(str(value)) > DIGITS_MAX:
        raise UserError(f"{where}: {key}: {value!r:.20}... is too large a number")
    default = getattr(Settings(), key)
    if isinstance(default, tuple):
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list) and all(isinstance(item, str) for item in items):
            return tuple(items)
    elif isinstance(default, float) and isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):
            return float(value)
    elif type(value) is type(default):
        return value
    elif default == AUTO and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise UserError(f"{where}: {key} must be {_WORDS[type(default)]}, not {value!r:.80}")


def _from_text(key: str, text: str, where: str) -> Any:
    default = getattr(Settings(), key)
    if isinstance(default, tuple):
        parts = tuple(part.strip() for part in text.split(",") if part.strip())
        if text.strip() and not parts:
            raise UserError(f"{where}: {key}: {text[:80]!r} has nothing between its commas")
        return parts
    if isinstance(default, str):
        return text
    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return (whole if isinstance(default, int) else number)(text)
    except (KeyError, ValueError):
        raise UserError(f"{where}: {text!r:.80} is not {_WORDS[type(default)]}") from None
