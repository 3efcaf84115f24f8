"""What a node was told: which source wins, and that every mistake is one line naming the key."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peerd.carriers import CARRIERS
from peerd.security.token import Token
from peerd.settings import (
    DEFAULT_BIND,
    DEFAULT_PORT,
    OF_RDMA,
    Settings,
    load,
    parse_address,
    planned,
    unknown_variables,
    where_to_listen,
)
from peerd.simulation.scenario import Scenario
from peerd.training.codecs import CODECS
from peerd.training.modes import (
    MODES,
    ModeMaker,
    ModeSettings,
    alike_at_start,
    class_of,
    heeds,
    in_full,
    in_one_form,
    parse_mode,
    settings_of,
)
from peerd.training.pairs.outer import WHOLE_MODEL_CODECS
from peerd.transport.errors import UserError, WrongSetting

ROOT = Path(__file__).parent.parent.parent
PRINTED = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(UserError, match="set XDG_STATE_HOME"):
        _ = Settings().authority_path


def token_at(host: str) -> str:
    return Token(((host, 1),), bytes(32), bytes(8), bytes(16), 1).pack()


# a good value of every setting, another one for each source
GOOD: dict[str, tuple[Any, Any, Any]] = {
    "name": ("a", "b.c", "D-1_2"),
    "bind": ("127.0.0.1:1", "[::1]:2", "host"),
    "advertise": ("192.0.2.1", "[::1]:2", "host:9"),
    "relay": ((), (), ()),  # with which advertise and relay_ports are refused
    "relay_ports": ("7950", "7950-7957", "64-127"),
    "join": (("h:1",), ("h:2", "i:3"), ("[::1]",)),
    "token": (token_at("h"), token_at("i"), token_at("::1")),
    "insecure_plaintext": (False, False, False),  # which no token goes with
    "swarm": ("s1", "s2", ""),
    "run": ("r1", "r2", "r3"),
    "mode": ("diloco", "gossip", "allreduce"),
    "codec": tuple((list(CODECS) * 3)[:3]),  # type: ignore[dict-item]
    "trigger": ("change:0.1", "period:3", "always"),
    "view": (1, 2, 9),
    "every": (1, 2, 0),
    "overlap": ("blocking", "quorum", "delayed"),
    "topology": ("auto", "ring", "tree:3"),
    "servers": (1, 2, 9),
    "min_peers": (1, 2, 9),
    "outer_lr": ("1", "0.5", "auto"),
    "outer_momentum": ("0", "0.9", "auto"),
    "exchange": ("weights", "weights", "weights"),  # with gossip, gradients are refused
    "server_optimizer": ("adamw", "sgd", "sgd:momentum=0.9"),
    "robust": (False, True, False),
    "wait_for": (1, 2, 9),
    "network": ("lan", "wan", "lan"),
    "transport": ("rdma", "auto", "rdma"),  # with tcp, what is RDMA's is refused
    "budget": ("2Mbit", "1500kbit/s", ""),
    "rdma_subnets": (("10.1.0.0/16",), ("fd00::/8", "10.0.0.1"), ()),
    "rdma_allow_fallback": (True, False, True),
    "checkpoint_every_s": (1.0, 0.5, 3600.0),
    "state_dir": ("/tmp/a", "/tmp/b", "/tmp/c"),
    "log": ("human", "json", "auto"),
}


def as_text(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def as_toml(values: dict[str, Any]) -> str:
    lines = (
        f"{key} = {json.dumps(list(value) if isinstance(value, tuple) else value)}" for key, value in values.items()
    )
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("bind", "host", "outer_host", "listens"),
    [
        (DEFAULT_BIND, "127.0.0.1", "203.0.113.5", "0.0.0.0"),
        (DEFAULT_BIND, "127.0.0.1", "2001:db8::1", "::"),
        (DEFAULT_BIND, "127.0.0.1", "127.0.0.2", "127.0.0.1"),
        ("10.0.0.1", "10.0.0.1", "203.0.113.5", "10.0.0.1"),
    ],
)
def test_who_is_reached_from_outside_listens_there_unless_told_otherwise(
    bind: str, host: str, outer_host: str, listens: str
) -> None:
    assert where_to_listen(bind, host, outer_host) == listens
    with pytest.raises(UserError, match=r"bind: nothing goes from ::1 to other machines.*leave --bind out"):
        where_to_listen("[::1]:7946", "::1", outer_host if outer_host != "127.0.0.2" else "10.0.0.1")


def test_a_number_in_the_file_is_one_where_a_setting_may_be_auto(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('mode = "diloco"\nouter_lr = 0.5\nouter_momentum = 0\n')
    settings = load({}, {}, tmp_path / "c.toml")
    assert (settings.outer_lr, settings.outer_momentum) == ("0.5", "0")


@pytest.mark.parametrize(
    ("mode", "told", "in_force"),
    [
        *((mode, {}, {"codec": known.CODEC}) for mode, known in MODES.items() if known.KEEPS_LINKS),
        ("elastic", {}, {"codec": "sign"}),
        ("gossip", {}, {"codec": "auto"}),
        ("noloco", {}, {"codec": "float32", "every": 50, "outer_lr": "0.7", "outer_momentum": "0.5"}),
        *(("noloco", {"codec": codec}, {"codec": "bfloat16"}) for codec in CODECS if codec not in WHOLE_MODEL_CODECS),
        ("noloco", {"codec": "int8", "every": 7, "outer_lr": "1"}, {"codec": "int8", "every": 7, "outer_lr": "1.0"}),
        ("diloco", {}, {"codec": "float32", "every": 50, "outer_lr": "0.7", "outer_momentum": "0.9"}),
        ("diloco:5", {}, {"every": 50}),
        ("diloco", {"every": 1}, {"every": 1}),
        ("noloco", {"every": 1}, {"every": 1}),
        ("allreduce", {}, {"codec": "auto", "every": 0, "overlap": "quorum"}),
        ("allreduce", {"every": 1}, {"codec": "auto", "every": 1, "overlap": "quorum"}),
        ("allreduce", {"overlap": "delayed"}, {"every": 0}),
        ("allreduce", {"overlap": "blocking"}, {"codec": "float32", "every": 1, "overlap": "blocking"}),
        ("allreduce", {"overlap": "hpsgd"}, {"codec": "float32", "every": 1, "overlap": "hpsgd"}),
        ("allreduce", {"codec": "sign"}, {"codec": "sign", "every": 0, "overlap": "quorum"}),
        ("allreduce", {"exchange": "gradients"}, {"codec": "float32"}),
        ("hardsync", {}, {"codec": "float32", "server_optimizer": "sgd"}),
    ],
)  # fmt: skip
def test_what_a_mode_is_left_is_shown_as_what_it_takes(
    mode: str, told: dict[str, Any], in_force: dict[str, Any]
) -> None:
    shown = settings_of(mode, Settings(mode=mode, **told))
    assert {key: getattr(shown, key) for key in in_force} == in_force
    assert settings_of(mode, shown) == shown, "what is in force is what it would be told"


@pytest.mark.parametrize(
    ("mode", "told", "steps"),
    [
        ("allreduce", {}, 0), ("allreduce", {"overlap": "delayed"}, 20),
        ("allreduce", {"overlap": "delayed", "every": 1}, 0), ("allreduce", {"overlap": "delayed", "every": 2}, 0),
        ("diloco", {}, 20), ("diloco:1", {}, 20), ("diloco:2", {}, 0), ("gossip", {}, 0),
    ],
)  # fmt: skip
def test_steps_that_pass_after_a_round_whatever_is_told(mode: str, told: dict[str, Any], steps: int) -> None:
    in_force = settings_of(mode, ModeSettings(**told))
    assert class_of(mode).settle_steps(mode.partition(":")[2], in_force) == steps


def test_who_was_told_another_outer_step_is_refused_by_its_text() -> None:
    rates = ("0.1234567", "0.1234568", "auto", "0.50", ".5")
    texts = [alike_at_start("diloco", ModeSettings(outer_lr=text)) for text in rates]
    assert len({*texts}) == 4
    assert texts[2] == "diloco"
    assert texts[3] == texts[4] == "diloco+outer_lr=0.5"


def test_a_mode_is_shown_with_the_number_that_none_stands_for() -> None:
    told = ("softsync", "softsync:4", "softsync:1:mean", "async", "of-another-version", "")
    assert [in_full(mode) for mode in told] == ["softsync:1", *told[1:]]


@pytest.mark.parametrize(
    ("modes", "form"),
    [
        (("elastic:pairwise", "elastic:pairwise:0.25", "elastic:pairwise:.250"), "elastic:pairwise"),
        (("elastic:pairwise:0.1", "elastic:pairwise:1e-1"), "elastic:pairwise:0.1"),
        (("elastic", "elastic:0.9", "elastic:.90"), "elastic"),
        (("elastic:0.5", "elastic:5e-1"), "elastic:0.5"),
        (("softsync", "softsync:1", "softsync:01:staleness"), "softsync"),
        (("softsync:2", "softsync:02", "softsync:2:staleness"), "softsync:2"),
        (("softsync:1:mean", "softsync:01:mean"), "softsync:1:mean"),
        (("async", "async:staleness"), "async"),
        (("async:mean",), "async:mean"),
        (("diloco", "diloco:1"), "diloco"),
        (("diloco:4", "diloco:004"), "diloco:4"),
        (("hardsync:batch=8:backup=1", "hardsync:backup=01:batch=08"), "hardsync:backup=1:batch=8"),
        (("gossip",), "gossip"),
    ],
)  # fmt: skip
def test_who_means_the_same_argument_is_told_the_same_mode(modes: tuple[str, ...], form: str) -> None:
    def made(maker: ModeMaker) -> tuple[Any, dict[str, Any]]:
        keywords = getattr(maker, "keywords", {})
        return getattr(maker, "func", maker), {} if keywords in ({"fragments": 1}, {"beta": 0.9}) else keywords

    told: dict[str, Any] = {"exchange": "gradients"} if form.startswith("hardsync") else {}
    for mode in modes:
        started = Settings(mode=mode, codec="bfloat16", **told)
        assert alike_at_start(mode, started).partition("+")[0] == in_one_form(mode) == form
        assert planned(started, form).codec == "bfloat16", "it is no other mode, whose defaults would count"
        assert made(parse_mode(mode)) == made(parse_mode(form))


@pytest.mark.parametrize(
    ("mode", "one", "other"),
    [
        ("diloco", {}, {"outer_lr": "0.7", "outer_momentum": ".90"}),
        ("noloco", {"outer_momentum": "0.5"}, {"outer_lr": "0.70"}),
        ("hardsync", {"exchange": "gradients"}, {"exchange": "gradients", "server_optimizer": "sgd:momentum=0"}),
        ("async", {"exchange": "gradients", "server_optimizer": "adamw:eps=1e-6,beta1=0.8"},
         {"exchange": "gradients", "server_optimizer": "adamw:beta1=.8,beta2=0.999,eps=0.000001"}),
    ],
)  # fmt: skip
def test_who_was_told_the_same_in_other_words_is_not_refused(
    mode: str, one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert alike_at_start(mode, Settings(mode=mode, **one)) == alike_at_start(mode, Settings(mode=mode, **other))


def test_every_setting_is_tested_here() -> None:
    assert set(GOOD) == {item.name for item in fields(Settings)}


keys = st.sets(st.sampled_from(sorted(GOOD)))


@PRINTED
@given(in_file=keys, in_environment=keys, as_flag=keys)
def test_flags_win_over_variables_over_the_file_over_defaults(
    tmp_path: Path, in_file: set[str], in_environment: set[str], as_flag: set[str]
) -> None:
    mode = GOOD["mode"][2] if "mode" in as_flag else GOOD["mode"][1] if "mode" in in_environment else None
    mode = mode or (GOOD["mode"][0] if "mode" in in_file else Settings().mode)
    in_file, in_environment, as_flag = (
        {key for key in source if heeds(mode, key)} | ({"transport"} if source & set(OF_RDMA) else set())
        for source in (in_file, in_environment, as_flag)
    )
    file = tmp_path / "peerd.toml"
    file.write_text(as_toml({key: GOOD[key][0] for key in in_file}))
    environment = {f"PEERD_{key.upper()}": as_text(GOOD[key][1]) for key in in_environment}
    flags = {key: GOOD[key][2] if key in as_flag else None for key in GOOD}
    loaded = load(flags, environment, file)
    for key, (of_file, of_environment, of_flag) in GOOD.items():
        expected = (
            of_flag if key in as_flag
            else of_environment if key in in_environment
            else of_file if key in in_file
            else getattr(Settings(), key)
        )  # fmt: skip
        assert getattr(loaded, key) == expected


@pytest.mark.parametrize("source", ["flag", "variable"])
@pytest.mark.parametrize("key", OF_RDMA)
@pytest.mark.parametrize("transport", CARRIERS)
def test_what_has_no_effect_with_the_transport_is_refused(transport: str, key: str, source: str) -> None:
    value = GOOD[key][0]
    flags, environment = ({key: value}, {}) if source == "flag" else ({}, {f"PEERD_{key.upper()}": as_text(value)})
    flags["transport"] = transport
    if transport != "tcp":
        assert getattr(load(flags, environment, None), key) == value
    else:
        where = "" if source == "flag" else f"PEERD_{key.upper()}: "
        with pytest.raises(UserError, match=f"^{where}{key}: without effect with transport tcp"):
            load(flags, environment, None)


MODE_SETTINGS = tuple(item.name for item in fields(ModeSettings) if item.name != "robust")  # which all have
A_TOPOLOGY = {"hardsync": "adv:2", "softsync:3": "adv:2", "async": "adv:2"}


@pytest.mark.parametrize("mode", [*MODES, "softsync:3", "diloco:4", "elastic:pairwise:0.1"])
@pytest.mark.parametrize("key", MODE_SETTINGS)
def test_what_has_no_effect_in_the_mode_is_refused_wherever_it_is_given(tmp_path: Path, mode: str, key: str) -> None:
    value = A_TOPOLOGY.get(mode, "auto") if key == "topology" else GOOD[key][1]
    (tmp_path / "peerd.toml").write_text(as_toml({key: value}))
    variable, file = f"PEERD_{key.upper()}", tmp_path / "peerd.toml"
    sources: dict[str, Any] = {
        "": ({"mode": mode, key: value}, {}, None),
        f"{variable}: ": ({"mode": mode}, {variable: as_text(value)}, None),
        f"config {file}: ": ({"mode": mode}, {}, file),
    }
    for where, source in sources.items():
        if key in class_of(mode).TAKES:
            assert getattr(load(*source), key) == value
        else:
            said = f"^{re.escape(where)}{key}: without effect in mode {mode}, which takes codec, "
            with pytest.raises(UserError, match=said):
                load(*source)


def test_it_is_known_of_every_mode_what_has_an_effect() -> None:
    assert {key for mode in MODES.values() for key in mode.TAKES} == set(MODE_SETTINGS)
    assert heeds("gossip", "name")
    assert heeds("nonsense", "every"), "the mode itself is refused, by another line"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("nmae = 'x'", "unknown key 'nmae'; did you mean 'name'?"),
        ("zzz = 1", "unknown key 'zzz'; known keys: codec, trigger, "),
        ("[peerd]\nname = 'x'", "unknown key 'peerd'; settings stand above all tables: leave the line [peerd] out"),
        ("mode = 'foo'", "mode: 'foo' is not one of"),
        ("codec = 'int8'\noverlap = 'quorum'", "overlap: without effect in mode gossip"),
        ("view = 'three'", "view must be a whole number, not 'three'"),
        ("view = true", "view must be a whole number, not True"),
        ("view = 2.0", "view must be a whole number, not 2.0"),
        ("checkpoint_every_s = '1'", "checkpoint_every_s must be a number, not '1'"),
        ("name = 5", "name must be a string, not 5"),
        ("join = [1]", "join must be a list of strings, not [1]"),
        ("= 3", "Invalid"),
        ("view = 1\nview = 2", "Cannot overwrite"),
        *(
            (f"{key} = {number}", "Exceeds the limit (4300 digits) for integer string conversion")
            for key in ("view", "checkpoint_every_s", "every", "outer_lr", "name")
            for number in ("9" * 5000, f"0x{'f' * 5000}", f"[0o{'7' * 5000}]")
        ),
        ("view = -" + "9" * 4000, "view: -9999999999999999999... is too large a number"),
        ("join = [" + "1" * 4000 + "]", f"join must be a list of strings, not [{'1' * 79}"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "peerd.toml"
    file.write_text(text)
    with pytest.raises(UserError) as failure:
        load({}, {}, file)
    assert str(failure.value).startswith(f"config {file}: ")
    assert line in str(failure.value)
    assert "set_int_max_str_digits" not in str(failure.value), "no user can call that"
    assert "\n" not in str(failure.value)


def test_a_file_in_another_encoding_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "peerd.toml"
    file.write_text("view = 3", encoding="utf-16")
    with pytest.raises(UserError, match=r"peerd\.toml: it is not UTF-8: save it as such$"):
        load({}, {}, file)


def test_a_number_may_be_whole_and_a_list_one_string(tmp_path: Path) -> None:
    file = tmp_path / "peerd.toml"
    file.write_text("checkpoint_every_s = 5\njoin = 'host:1'")
    loaded = load({}, {}, file)
    assert (loaded.checkpoint_every_s, loaded.join) == (5.0, ("host:1",))


def test_more_than_a_greeting_can_say_is_refused() -> None:
    digits = "1234567890123456"
    values = f"beta1=0.9{digits},beta2=0.98{digits},eps=1.{digits}e-06,weight_decay=0.{digits},clip=1.{digits}"
    optimizer = f"adamw:{values}"
    told = {"mode": "hardsync:batch=4096:backup=1", "exchange": "gradients", "server_optimizer": optimizer}
    with pytest.raises(UserError, match="mode: more than 200 characters that all nodes must have alike: 'hardsync"):
        load(told, {}, None)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config .*missing\.toml: No such file or directory"):
        load({}, {}, tmp_path / "missing.toml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"config .*binary: "):
        load({}, {}, tmp_path / "binary")
    (tmp_path / "endless").symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"config .*endless: more than 1000000 characters are no settings"):
        load({}, {}, tmp_path / "endless")


def test_a_file_is_utf_8_wherever_it_is_read(tmp_path: Path) -> None:
    (file := tmp_path / "peerd.toml").write_text("# f\u00fcr drei\nview = 3\n", encoding="utf-8")
    code = (
        f"from pathlib import Path; from peerd.settings import load; print(load({{}}, {{}}, Path({str(file)!r})).view)"
    )
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **locale})
    assert (done.stdout, done.stderr) == ("3\n", "")


@pytest.mark.parametrize(
    ("variable", "text", "line"),
    [
        ("PEERD_VIEW", "many", "PEERD_VIEW: 'many' is not a whole number"),
        ("PEERD_VIEW", "0", "view: 0 must be at least 1"),
        ("PEERD_WAIT_FOR", "-1", "wait_for: -1 must be at least 1"),
        ("PEERD_CHECKPOINT_EVERY_S", "nan", "PEERD_CHECKPOINT_EVERY_S: 'nan' is not a number"),
        ("PEERD_CODEC", "int9", "codec: 'int9' is not one of .*; did you mean 'int8'?"),
        ("PEERD_MODE", "gosip", "did you mean 'gossip'?"),
        ("PEERD_NETWORK", "moon", "network: 'moon' is not one of lan, wan"),
        ("PEERD_TRIGGER", "never", "trigger 'never' is not one"),
        ("PEERD_BIND", "host:99999", "bind: 'host:99999' has a port above 65535"),
        ("PEERD_RDMA_SUBNETS", "10.1.0.0/16,10.1.2.3/8", "rdma_subnets: 10.1.2.3/8 has host bits set; an example is"),
        ("PEERD_JOIN", "--steps", "join: '--steps' is not HOST:PORT"),
        ("PEERD_JOIN", "a:1, :2", "join: ':2' is not HOST:PORT"),
        ("PEERD_NAME", "", "name: it is empty; leave --name and PEERD_NAME out"),
        ("PEERD_NAME", "..", "name: '..' must be"),
        ("PEERD_NAME", "a/b", "name: 'a/b' must be"),
        ("PEERD_MODE", "", "mode: '' is not one of"),
        ("PEERD_MODE", "diloco:0", "--mode diloco:0: with an argument it is"),
        ("PEERD_TOKEN", "@", "token: '@' and no file"),
        ("PEERD_TOKEN", "@/dev/null", "token: /dev/null is empty"),
        ("PEERD_TOKEN", "", "PEERD_TOKEN: token: empty; it should be the line that peerd token printed"),
    ],
)
def test_a_mistake_in_a_variable_is_one_line(variable: str, text: str, line: str) -> None:
    with pytest.raises(UserError) as failure:
        load({}, {variable: text}, None)
    assert str(failure.value).startswith(f"{variable}: ")
    pieces = line.split(".*")
    assert all(piece in str(failure.value) for piece in pieces), str(failure.value)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (["PEERD_TRIGER"], "PEERD_TRIGER (did you mean PEERD_TRIGGER?)"),
        (["PEERD_CHECKPOINT_EVERY"], "PEERD_CHECKPOINT_EVERY (did you mean PEERD_CHECKPOINT_EVERY_S?)"),
        (
            ["PEERD_PORT", "PEERD_JOINS", "PEERD_UCX_LIBRARY", "HOME"],
            "PEERD_JOINS (did you mean PEERD_JOIN?), PEERD_PORT (did you mean PEERD_TRANSPORT?)",
        ),
    ],
)
def test_variables_that_nothing_reads_are_one_line(variables: list[str], told: str) -> None:
    line = unknown_variables(dict.fromkeys(variables, ""))
    assert line == f"peerd knows no such settings, they are ignored: {told}"
    assert load({}, dict.fromkeys(variables, ""), None) == Settings()


def test_every_variable_that_our_code_names_is_known() -> None:
    sources = [path for folder in ("cli", "peerd", "training") for path in (ROOT / folder).rglob("*.py")]
    named = {name for path in sources for name in re.findall(r"\bPEERD_[A-Z_]*[A-Z]\b", path.read_text())}
    assert {"PEERD_SOCKET", "PEERD_NAME", "PEERD_DATA"} <= named
    assert unknown_variables(dict.fromkeys(named, "")) is None


def test_lists_in_variables_are_separated_by_commas() -> None:
    assert load({}, {"PEERD_JOIN": " a:1 ,b:2,, "}, None).join == ("a:1", "b:2")
    assert load({}, {"PEERD_JOIN": ""}, None).join == ()


@PRINTED
@given(st.text(max_size=20) | st.from_regex(r"\[?[a-z0-9.:]{1,8}\]?:?[0-9]{0,6}"))
def test_any_text_is_an_address_or_a_user_error(text: str) -> None:
    try:
        host, port = parse_address(text, "bind")
    except UserError as error:
        told = str(error)
    else:
        told = f"bind: {host}"
        assert host
        assert host in text
        assert 0 <= port <= 65535
    assert told.startswith("bind: ")


@PRINTED
@given(st.text(max_size=70))
def test_a_good_name_is_one_folder_below_the_state(name: str) -> None:
    try:
        told = Settings(name=name)
    except UserError:
        return
    assert told.state_path.name == name
    assert told.state_path.parent == Settings(name="x").state_path.parent


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("host", ("host", DEFAULT_PORT)),
        ("host:0", ("host", 0)),
        ("[::1]", ("::1", DEFAULT_PORT)),
        ("[::1]:9", ("::1", 9)),
        ("::1", ("::1", DEFAULT_PORT)),
        ("::", ("::", DEFAULT_PORT)),
        ("fd00::2", ("fd00::2", DEFAULT_PORT)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text, "bind") == address
    assert Settings(bind=text).bind_address == address
    assert Settings(join=(text, text)).seeds == (address, address)


def test_an_address_that_may_have_a_port_or_not_needs_brackets() -> None:
    with pytest.raises(UserError, match=re.escape("bind: '::1:7946' needs brackets: [::1]:7946")):
        parse_address("::1:7946", "bind")


def test_the_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert Settings(name="n").state_path == tmp_path / "peerd" / "n"
    assert Settings(name="n", state_dir="elsewhere").state_path == Path("elsewhere").absolute()
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert Settings(name="n").state_path == Path("/home/me/.local/state/peerd/n")


@pytest.mark.parametrize("hostname", ["gpu-1", "gpu 1.lan", "ü", "", ".hidden", "-x", "a" * 100])
def test_the_default_name_is_always_a_good_one(monkeypatch: pytest.MonkeyPatch, hostname: str) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: hostname)
    assert Settings().name


def test_the_toml_of_these_tests_is_toml() -> None:
    assert tomllib.loads(as_toml({"a": 1.5, "b": ("x",)})) == {"a": 1.5, "b": ["x"]}


@pytest.mark.parametrize(
    ("told", "line"),
    [
        ({"codec": "int9"}, "codec: 'int9' is not one of .*; did you mean 'int8'?"),
        ({"overlap": "delay"}, "overlap: 'delay' is not one of .*; did you mean 'delayed'?"),
        ({"exchange": "weight"}, "exchange: 'weight' is not one of weights, gradients; did you mean 'weights'?"),
        ({"view": 0}, "view: 0 must be at least 1"),
    ],
)
def test_nobody_makes_nonsense_for_a_mode_by_hand_either(told: dict[str, Any], line: str) -> None:
    for kind in (ModeSettings, Settings, Scenario):
        with pytest.raises(UserError, match=line):
            kind(**told)


def test_commas_alone_are_no_list() -> None:
    with pytest.raises(UserError, match=r"^PEERD_JOIN: join: ', ,' has nothing between its commas$"):
        load({}, {"PEERD_JOIN": ", ,"}, None)
    assert load({}, {"PEERD_JOIN": ""}, None).join == ()


def test_a_flag_is_not_blamed_on_the_variable_that_it_overrides() -> None:
    with pytest.raises(UserError, match=r"^mode: .foo. is not one of"):
        load({"mode": "foo"}, {"PEERD_MODE": "gossip"}, None)


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ({"name": "a/b"}, "name"),
        ({"bind": "host:99999"}, "bind"),
        ({"advertise": "host:0"}, "advertise"),
        ({"relay": ("a:1:2",)}, "relay"),
        ({"relay": ("10.0.0.5",), "relay_ports": "7950"}, "relay_ports"),
        ({"relay_ports": "9-1"}, "relay_ports"),
        ({"join": ("a:1:2",)}, "join"),
        ({"token": "@"}, "token"),
        ({"token": "peerd1-"}, "token"),
        ({"swarm": "a/b"}, "swarm"),
        ({"run": "a/b"}, "run"),
        ({"mode": "gosip"}, "mode"),
        ({"mode": "diloco:0"}, "mode"),
        ({"mode": "gossip:1"}, "mode"),
        ({"mode": "no_file.py:Mode"}, "mode"),
        ({"every": 5}, "every"),
        ({"servers": 2, "mode": "diloco"}, "servers"),
        ({"codec": "int9"}, "codec"),
        ({"trigger": "never"}, "trigger"),
        ({"view": 0}, "view"),
        ({"topology": "star", "mode": "allreduce"}, "topology"),
        ({"topology": "star", "mode": "hardsync"}, "topology"),
        ({"overlap": "hpsgd", "mode": "diloco:2"}, "overlap"),
        ({"outer_lr": "x", "mode": "diloco"}, "outer_lr"),
        ({"outer_momentum": "1", "mode": "diloco"}, "outer_momentum"),
        ({"exchange": "gradients"}, "exchange"),
        ({"server_optimizer": "adamw", "mode": "hardsync"}, "server_optimizer"),
        ({"server_optimizer": "x", "mode": "hardsync", "exchange": "gradients"}, "server_optimizer"),
        ({"wait_for": 0}, "wait_for"),
        ({"network": "moon"}, "network"),
        ({"transport": "air"}, "transport"),
        ({"budget": "much"}, "budget"),
        ({"rdma_subnets": ("10.0.0.0/8",)}, "rdma_subnets"),
        ({"rdma_subnets": ("x",), "transport": "auto"}, "rdma_subnets"),
        ({"checkpoint_every_s": 0.0}, "checkpoint_every_s"),
        ({"log": "loud"}, "log"),
    ],
)
def test_who_refuses_a_setting_names_it(flags: dict[str, Any], key: str) -> None:
    """Of several that are given one is wrong."""
    with pytest.raises(WrongSetting) as failure:
        load(flags, {}, None)
    assert failure.value.key == key
