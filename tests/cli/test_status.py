"""What `peerd status` shows a user who has never seen it: no word without a line that explains it."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from peerd.cli.main import app
from peerd.cli.members import _state
from peerd.cli.status import status
from peerd.local import local_socket
from peerd.training.trigger import TRIGGERS
from peerd.transport.errors import UserError

TRAINING = Path(__file__).parent.parent.parent / "training"


def test_the_help_explains_every_trigger_decision() -> None:
    decisions = {
        name for path in TRAINING.rglob("*.py") for name in re.findall(r'"trigger_([a-z_]+)"', path.read_text())
    }
    assert {"quiet", "finishing"} <= decisions
    assert not {word for word in {*decisions, *TRIGGERS, "silence", "of its shards"} if word not in str(status.__doc__)}


ANSWER: dict[str, Any] = {
    "name": "a", "phase": "training", "mode": "allreduce", "members": {"alive": 2}, "trainer": None,
    "joining": [], "no_steps": [], "same_batches": [], "crash": "",
    "no_partner_s": None, "refused": {}, "consensus_distance": 0.0, "bytes_sent": 0, "bytes_received": 0,
    "snapshots": 0, "budget_bytes_s": None, "budget_waited_s": 0.0,
    "address_gone": "", "address_unreached": "", "relay_lost_s": None, "relayed_for": [], "relayed_bytes": 0,
    "loop_latency_p99_s": 0.0, "staleness": {},
}  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "of_link", "unit"),
    [
        ({"rounds": 7, "attempts": 8}, 7, "rounds"),
        ({"exchanges": 7}, 7, "exchanges"),
        ({}, 0, "exchanges"),
        ({"rounds": 0}, 0, "rounds"),
    ],
)
def test_what_is_counted_in_all_is_what_the_table_counts(
    monkeypatch: pytest.MonkeyPatch, counts: dict[str, int], of_link: int, unit: str
) -> None:
    link = {
        "peer": "b",
        "exchanges": of_link,
        "distance": 1.0,
        "gain": 0.5,
        "last_reason": "",
        "codec": "" if unit == "rounds" else "sign",
    }
    answer = {**ANSWER, "exchanges": counts.get("exchanges", 0), "counts": counts, "links": [link]}
    monkeypatch.setattr("peerd.cli.status.find_node", lambda name: name)
    monkeypatch.setattr("peerd.cli.status.request", lambda path, verb: json.loads(json.dumps(answer)))
    shown = CliRunner().invoke(app, ["status"], catch_exceptions=False).stdout
    assert f"{of_link} {unit} since this mode began" in shown
    (row,) = (line.split() for line in shown.splitlines() if line.startswith("b "))
    assert row[1] == str(of_link)
    assert re.search(rf"^PARTNER +{unit.upper()} ", shown, re.MULTILINE)
    assert ("LAST REASON" in shown) == (unit == "exchanges"), "a round has no reason of this node's"
    assert "received 0 B; 0 models sent whole" in shown
    assert "budget" not in shown


def test_a_node_that_serves_itself_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in members: with elastic and parameter servers one of the partners is the node itself."""
    link = {"exchanges": 1, "distance": 1.0, "gain": 0.3, "last_reason": "change", "codec": "sign"}
    answer = {**ANSWER, "counts": {"exchanges": 2}, "links": [{**link, "peer": "a"}, {**link, "peer": "b"}]}
    monkeypatch.setattr("peerd.cli.status.find_node", lambda name: name)
    monkeypatch.setattr("peerd.cli.status.request", lambda path, verb: answer)
    shown = CliRunner().invoke(app, ["status"], catch_exceptions=False).stdout
    assert re.search(r"^a \(this\) +1 ", shown, re.MULTILINE)
    assert re.search(r"^b +1 ", shown, re.MULTILINE)


def test_before_there_is_a_model_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode of rounds had exchanges then, of which it never has any."""
    monkeypatch.setattr("peerd.cli.status.find_node", lambda name: name)
    monkeypatch.setattr("peerd.cli.status.request", lambda path, verb: {**ANSWER, "counts": {}, "links": []})
    shown = CliRunner().invoke(app, ["status"], catch_exceptions=False).stdout
    assert "models sent whole" in shown
    assert "since this mode began" not in shown


def test_all_nodes_of_this_machine_in_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"a": {**ANSWER, "trainer": {"step": 7, "loss": 0.25}}, "c": {**ANSWER, "name": "c"}}

    def request(path: Path, verb: str, meanwhile: Callable[[], None]) -> dict[str, Any]:
        if path.stem == "b":
            raise UserError("the node 'b' is starting")
        return answers[path.stem]

    monkeypatch.setattr("peerd.cli.status.running_nodes", lambda: ["a", "b", "c"])
    monkeypatch.setattr("peerd.cli.status.request", request)
    done = CliRunner().invoke(app, ["status", "--all"], catch_exceptions=False)
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["NAME", "PHASE", "STEP", "LOSS", "MODE", "MEMBERS", "SENT"],
        ["a", "training", "7", "0.2500", "allreduce", "2", "alive", "0", "B"],
        ["b", "no", "answer", "-", "-", "-", "-", "-"],
        ["c", "training", "-", "-", "allreduce", "2", "alive", "0", "B"],
    ]
    assert done.stderr == "b: the node 'b' is starting\n"
    told = CliRunner().invoke(app, ["status", "--all", "--format", "json"], catch_exceptions=False)
    assert json.loads(told.stdout) == [answers["a"], {"name": "b", "error": "the node 'b' is starting"}, answers["c"]]
    assert (done.exit_code, told.exit_code) == (0, 0)


@pytest.mark.parametrize("format", ["text", "json"])
def test_all_nodes_without_an_answer_are_a_failure(monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    def request(path: Path, verb: str, meanwhile: Callable[[], None]) -> dict[str, Any]:
        raise UserError("the node's process 7 is stopped")

    monkeypatch.setattr("peerd.cli.status.running_nodes", lambda: ["a", "b"])
    monkeypatch.setattr("peerd.cli.status.request", request)
    done = CliRunner().invoke(app, ["status", "--all", "--format", format], catch_exceptions=False)
    assert done.exit_code == 1
    assert "stopped" in done.output


def test_a_node_that_hangs_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped one is told of sooner; this one's process runs."""
    monkeypatch.setattr(local_socket, "LOOK_EVERY_S", 0.01)
    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as hangs:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        local_socket.runtime_dir().mkdir(mode=0o700)
        hangs.bind(str(local_socket.socket_path("a")))
        hangs.listen()
        told = CliRunner().invoke(app, ["status", "--all", "--format", "json"], catch_exceptions=False)
    assert json.loads(told.stdout) == [{"name": "a", "error": "the node does not answer"}]


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\1\0\0\0\xc1", b"\1\0\0\0\x90"])
def test_what_is_no_node_hides_none(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    """Any program may listen in that folder; what it says is no message, or no map."""

    def answer(listener: socket.socket) -> None:
        for _ in range(2):  # first it is only looked whether somebody listens
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.sendall(said)
                connection.recv(1 << 10)

    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as other:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        local_socket.runtime_dir().mkdir(mode=0o700)
        other.bind(str(path := local_socket.socket_path("a")))
        other.listen()
        thread = Thread(target=answer, args=[other])
        thread.start()
        told = CliRunner().invoke(app, ["status", "--all", "--format", "json"], catch_exceptions=False)
        thread.join()
    (row,) = json.loads(told.stdout)
    assert row["name"] == "a"
    assert row["error"].startswith(f"what listens at {path} is no node of this version of peerd: ")


@pytest.mark.parametrize("said", [{"x": 1}, {"members": [{}]}, {"phase": "training", "members": [{}], "y": [1]}])
@pytest.mark.parametrize(
    "verb", [["status"], ["status", "--all"], ["members"], ["info"], ["mode", "show"], ["join", "h:1"]]
)
def test_a_node_of_another_version_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, verb: list[str], said: dict[str, Any]
) -> None:
    """Its answers may lack what this one shows: that was a KeyError."""

    def answer(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    if connection.recv(1 << 10):
                        connection.sendall(local_socket.pack(said))

    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as other:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        local_socket.runtime_dir().mkdir(mode=0o700)
        other.bind(str(local_socket.socket_path("a")))
        other.listen()
        thread = Thread(target=answer, args=[other])
        thread.start()
        told = CliRunner().invoke(app, verb)
        other.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert isinstance(told.exception, UserError | SystemExit), told.exception
    shown = f"{told.output}{told.exception}"
    assert "it runs another version of peerd; start it again by this one" in shown


@pytest.mark.parametrize("other", [["--watch"], ["--name", "a"], ["--format", "prometheus"]])
def test_what_is_of_one_node_is_not_of_all(other: list[str]) -> None:
    with pytest.raises(UserError, match=r"^--all: not with --name"):
        CliRunner().invoke(app, ["status", "--all", *other], catch_exceptions=False)


@pytest.mark.parametrize(
    ("who", "line"),
    [
        ("no_steps", "no steps from b, c: the script hangs, or has died"),
        ("same_batches", "same batches as b, c: together they learn what one learns; see the log"),
    ],
)
def test_who_does_no_good_is_named(monkeypatch: pytest.MonkeyPatch, who: str, line: str) -> None:
    answer = {**ANSWER, who: ["b", "c"], "exchanges": 0, "counts": {}, "links": []}
    monkeypatch.setattr("peerd.cli.status.find_node", lambda name: name)
    monkeypatch.setattr("peerd.cli.status.request", lambda path, verb: answer)
    shown = CliRunner().invoke(app, ["status"], catch_exceptions=False).stdout.splitlines()
    assert [each for each in shown if "b, c" in each] == [line]


def test_what_a_budget_has_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {**ANSWER, "budget_bytes_s": 250_000.0, "budget_waited_s": 32.4, "exchanges": 0, "counts": {}, "links": []}
    monkeypatch.setattr("peerd.cli.status.find_node", lambda name: name)
    monkeypatch.setattr("peerd.cli.status.request", lambda path, verb: answer)
    shown = CliRunner().invoke(app, ["status"], catch_exceptions=False).stdout
    assert "budget 2 Mbit/s; sends waited 32 s for it, together\n" in shown


def test_tables_fit_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of usual names; nobody watches here, so that a table is as wide as it needs to be."""
    row = {
        "name": "gpu-node-7", "address": "255.255.255.255:65535", "state": "suspect", "carrier": "tcp", "self": True,
        "mode": "allreduce", "model": "0" * 16, "id": "0123456789abcdef", "stalled": False, "refused_s": None,
        "unreached_s": None, "ready": True, "expects": True, "ended": False,
    }  # fmt: skip
    monkeypatch.setattr("peerd.cli.members.find_node", lambda name: name)
    monkeypatch.setattr("peerd.cli.members.request", lambda path, verb: {"members": [row]})
    shown = CliRunner().invoke(app, ["members"], catch_exceptions=False).stdout
    assert "gpu-node-7 (this)" in shown
    assert "01234567" in shown
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80


@pytest.mark.parametrize(
    ("about", "state"),
    [
        ({}, "alive"),
        ({"stalled": True}, "alive, no steps"),
        ({"ended": True}, "alive, finished"),
        ({"ready": False}, "alive, no model"),
        ({"ready": False, "expects": False}, "alive, no trainer"),
        ({"ended": True, "refused_s": 60.0}, "alive, finished, refused for 1 min"),
        ({"unreached_s": 31.0}, "alive, not reached"),
        ({"ended": True, "state": "failed"}, "failed"),
    ],
)
def test_what_a_member_does_is_in_its_state(about: dict[str, Any], state: str) -> None:
    row = {"state": "alive", "stalled": False, "ready": True, "expects": True, "ended": False}
    row |= {"refused_s": None, "unreached_s": None}
    assert _state({**row, **about}) == state


def test_the_help_fits_a_narrow_terminal() -> None:
    """A row of its table that is cut goes on at the left edge, where a new one would begin."""
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["status", "--help"]).stdout
    own = [line for line in str(status.__doc__).splitlines() if "  " in line.strip()]
    assert len(own) > 10
    assert not [line for line in own if line.strip() not in shown]


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_what_a_crash_took_is_named(monkeypatch: pytest.MonkeyPatch, cut: int) -> None:
    answer = {**ANSWER, "exchanges": 9, "counts": {"exchanges": 9, "exchanges_cut": cut}, "links": []}
    monkeypatch.setattr("peerd.cli.status.find_node", lambda name: name)
    monkeypatch.setattr("peerd.cli.status.request", lambda path, verb: json.loads(json.dumps(answer)))
    shown = CliRunner().invoke(app, ["status"], catch_exceptions=False).stdout
    assert [line.split(":")[0] for line in shown.splitlines() if " cut" in line] == {
        0: [],
        1: ["1 exchange cut"],
        3: ["3 exchanges cut"],
    }[cut]


@pytest.mark.parametrize(
    ("staleness", "served", "rows"),
    [
        ({0: 1}, "1 push", [["0", "1", "100.0%"]]),
        ({0: 5, 2: 15}, "20 pushes", [["0", "5", "25.0%"], ["2", "15", "75.0%"]]),
        (
            {0: 1, 12: 2, 25: 1},
            "4 pushes",
            [
                ["0", "to", "2", "1", "25.0%"],
                ["12", "to", "14", "2", "50.0%"],
                ["24", "to", "26", "1", "25.0%"],
            ],
        ),
    ],
)
def test_how_stale_pushes_were(
    monkeypatch: pytest.MonkeyPatch, staleness: dict[int, int], served: str, rows: list[list[str]]
) -> None:
    """The whole histogram, in a few rows, none of them empty."""
    answer = {**ANSWER, "exchanges": 0, "counts": {}, "links": [], "staleness": staleness}
    monkeypatch.setattr("peerd.cli.status.find_node", lambda name: name)
    monkeypatch.setattr("peerd.cli.status.request", lambda path, verb: json.loads(json.dumps(answer)))
    shown = CliRunner().invoke(app, ["status"], catch_exceptions=False).stdout.splitlines()
    (head,) = (number for number, line in enumerate(shown) if line.startswith("STALENESS"))
    assert shown[head - 1].startswith(f"served {served}; ")
    table = [line.split() for line in shown[head + 1 :]]
    assert table == rows


GONE = "this machine has the address 10.0.1.2 no more, to which this node is bound: others cannot reach it; start it "
UNREACHED = "no member reaches this node at 10.0.1.2:7, as they are told: open that port to TCP and UDP, or "


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ({"address_gone": "10.0.1.2"}, f"{GONE}again with --bind ADDRESS"),
        ({"address_unreached": "10.0.1.2:7"}, UNREACHED),
    ],
    ids=["the machine has it no more", "nobody comes there"],
)
def test_an_address_that_does_not_serve_is_told(
    monkeypatch: pytest.MonkeyPatch, why: dict[str, str], told: str
) -> None:
    answer = {**ANSWER, **why, "exchanges": 0, "counts": {}, "links": []}
    monkeypatch.setattr("peerd.cli.status.find_node", lambda name: name)
    monkeypatch.setattr("peerd.cli.status.request", lambda path, verb: answer)
    assert told in " ".join(CliRunner().invoke(app, ["status"], catch_exceptions=False).stdout.split())


@pytest.mark.parametrize(
    ("distance", "counts", "shown"),
    [
        (None, {}, "not measured yet: no exchange"),
        (None, {"rounds": 0}, "not measured yet: no round"),
        (0.0, {}, "0.00%"),
        (0.02, {"rounds": 1}, "2.00%"),
    ],
)
def test_a_distance_that_was_not_measured_is_none(
    monkeypatch: pytest.MonkeyPatch, distance: float | None, counts: dict[str, int], shown: str
) -> None:
    trainer = {
        "phase": "training", "step": 8, "loss": None, "metrics": {}, "last_step_s_ago": None, "checkpoint_failed": None,
    }  # fmt: skip
    answer = {**ANSWER, "trainer": trainer, "consensus_distance": distance, "counts": counts, "links": []}
    monkeypatch.setattr("peerd.cli.status.find_node", lambda name: name)
    monkeypatch.setattr("peerd.cli.status.request", lambda path, verb: answer)
    assert f"consensus distance {shown}\n" in CliRunner().invoke(app, ["status"], catch_exceptions=False).stdout


@pytest.mark.parametrize("why", ["at step 8706: No space left on device; there is none yet", None])
def test_a_checkpoint_that_is_not_written_is_told(monkeypatch: pytest.MonkeyPatch, why: str | None) -> None:
    trainer = {
        "phase": "training", "step": 8710, "loss": None, "metrics": {}, "last_step_s_ago": None,
        "checkpoint_failed": why,
    }  # fmt: skip
    answer = {**ANSWER, "trainer": trainer, "exchanges": 0, "counts": {}, "links": []}
    monkeypatch.setattr("peerd.cli.status.find_node", lambda name: name)
    monkeypatch.setattr("peerd.cli.status.request", lambda path, verb: answer)
    out = " ".join(CliRunner().invoke(app, ["status"], catch_exceptions=False).stdout.split())
    assert (f"no checkpoint written {why}" in out) is (why is not None)


@pytest.mark.parametrize(
    "crash", ["train.py exited with code 1, 2 times within 3 s; it is started again, after 2 s", ""]
)
def test_a_script_that_crashed_is_told(monkeypatch: pytest.MonkeyPatch, crash: str) -> None:
    answer = {**ANSWER, "phase": "gone", "crash": crash, "exchanges": 0, "counts": {}, "links": []}
    monkeypatch.setattr("peerd.cli.status.find_node", lambda name: name)
    monkeypatch.setattr("peerd.cli.status.request", lambda path, verb: answer)
    out = CliRunner().invoke(app, ["status"], catch_exceptions=False).stdout
    assert (f"{crash}; the log says why" in " ".join(out.split())) is bool(crash)


def test_what_was_not_set_is_said_to_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"name": "a", "issuers": ["a", "b"], "settings": {"run": "", "join": [], "wait_for": 1}}
    monkeypatch.setattr("peerd.cli.info.find_node", lambda name: name)
    monkeypatch.setattr("peerd.cli.info.request", lambda path, verb: answer)
    rows = CliRunner().invoke(app, ["info"], catch_exceptions=False).stdout.splitlines()
    assert [row.split(maxsplit=1) for row in rows] == [
        ["name", "a"], ["issuers", "a, b"], ["run", "-"], ["join", "-"], ["wait_for", "1"],
    ]  # fmt: skip


def test_a_whole_export_of_a_node_that_leaves_without_a_model_is_refused_in_its_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Such a node is not among the members that it shows, as it waits for its script's end."""

    def request(node: Path, verb: str, /, **arguments: Any) -> dict[str, Any]:
        if verb == "export":
            raise UserError("this node has no model yet")
        return {"members": [], "state_dir": str(tmp_path)}

    monkeypatch.setattr("peerd.cli.export.find_node", lambda name: Path("a.sock"))
    monkeypatch.setattr("peerd.cli.export.request", request)
    done = CliRunner().invoke(app, ["export", "--complete", f"{tmp_path}/m.safetensors"])
    assert isinstance(done.exception, UserError), done.exception
    assert str(done.exception) == "this node has no model yet"
    assert not [*tmp_path.iterdir()]
