"""Real nodes and who may join them: a token lets one in; everybody else is told why not, in one line at both ends."""

from __future__ import annotations

import json
import socket
import stat
from signal import SIGINT

import pytest
from machine import Machine, Node
from scripts import TRAIN

from peerd.security.token import parse


def own_address() -> str:
    """One that other machines reach; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


def another_user(machine: Machine, who: str = "other") -> str:
    """Their XDG_STATE_HOME."""
    return str(machine.path / who)


def token(machine: Machine, node: Node, *arguments: str) -> str:
    node.eventually(lambda: node.ask("info"))  # it listens
    ran = machine.peerd("token", "--name", node.name, *arguments)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 1
    return ran.stdout.strip()


def refusal(node: Node) -> str:
    """The last line of one that did not start."""
    assert node.end() == 1
    assert "Traceback" not in node.log
    assert "leaving the swarm" not in node.log, "it never was in it"
    return node.log.splitlines()[-1]


def test_from_nothing_to_a_swarm_with_one_pasted_line(machine: Machine) -> None:
    script, host = machine.script("train.py", TRAIN), own_address()
    a = machine.start("a", script, "--bind", f"{host}:0")
    a.says("the first node of a new swarm")
    line = token(machine, a)
    b = machine.start("b", script, "--bind", f"{host}:0", PEERD_TOKEN=line, XDG_STATE_HOME=another_user(machine))
    b.says("let in with a token")
    a.says("let in ")
    for node in (a, b):
        node.trains()
        node.sees(a="alive", b="alive")
    info = b.ask("info")
    assert info["authority"] == a.ask("info")["authority"] == parse(line).pin.hex()
    assert line not in json.dumps(info)
    b.eventually(lambda: b.ask("info")["issuers"] == ["a"])

    b.process.kill()
    b.process.wait()
    again = machine.start("b", script, "--bind", f"{host}:0", "--token", line, XDG_STATE_HOME=another_user(machine))
    again.trains()
    assert again.log.count("let in with a token") == 1, "of its first life: the token is used up"
    assert "begins alone" not in again.log
    again.signal(SIGINT)
    again.end()
    told = (
        f"this node left a swarm that had a member at {a.address}, and begins another, alone",
        "knows no address there: it begins alone. peerd leave and Ctrl-C forget the members; start it again",
    )
    for line_of_it in told:
        alone = machine.start("b", script, "--bind", f"{host}:0", XDG_STATE_HOME=another_user(machine))
        alone.says(line_of_it)
        alone.says("peerd token on the swarm's first node prints the TOKEN")
        alone.signal(SIGINT)
        alone.end()
    again = machine.start("b", script, "--bind", f"{host}:0", join=a, XDG_STATE_HOME=another_user(machine))
    again.trains()
    assert alone.log.count("begins alone") == 1, "not where it is told whom to join"

    other = machine.start("c", script, "--bind", f"{host}:0", "--token", line)
    assert "the token was used already; make another token with peerd token" in refusal(other)
    a.says("its token was used already")
    no_token = machine.start("d", script, "--bind", f"{host}:0", join=a)
    assert "run peerd token there" in refusal(no_token)
    assert not [name for name in "cd" if (machine.state / "peerd" / name).exists()], "they are no nodes yet"
    ran = machine.peerd("token", "--name", "b")
    assert ran.stderr.strip() == "peerd: b issues no tokens; run peerd token on a"
    machine.end()
    private = [path for folder in (machine.state, machine.path / "other") for path in folder.glob("peerd/**/*")]
    assert not [path for path in private if stat.S_IMODE(path.stat().st_mode) & 0o077]


def test_tokens_of_a_user_for_another(machine: Machine) -> None:
    script = machine.script("train.py", TRAIN)
    a = machine.start("a", script)
    a.trains()

    file = machine.path / "line"
    file.write_text(token(machine, a, "--uses", "2", "--issuer") + "\n")
    b = machine.start("b", script, "--token", f"@{file}", XDG_STATE_HOME=another_user(machine))
    b.trains()
    b.sees(a="alive", b="alive")
    line = token(machine, b)
    taken = machine.start("c", script, "--name", "a", "--token", line, XDG_STATE_HOME=another_user(machine, "third"))
    assert "a node called 'a' runs here already" in refusal(taken), "and the token is not spent"
    c = machine.start("c", script, "--token", line, XDG_STATE_HOME=another_user(machine, "third"))
    c.trains()
    for node in (a, b, c):
        node.sees(a="alive", b="alive", c="alive")

    expired = token(machine, a)
    tokens = machine.state / "peerd" / ".authority" / "tokens.json"
    rows = json.loads(tokens.read_text())
    tokens.write_text(json.dumps([{**row, "expires": 1} for row in rows]))
    late = machine.start("late", script, "--token", expired, XDG_STATE_HOME=another_user(machine, "fourth"))
    assert "the token has expired; make another token" in refusal(late)
    a.says("its token has expired")


def test_who_is_of_another_authority_or_of_none(machine: Machine) -> None:
    script = machine.script("train.py", TRAIN)
    a = machine.start("a", script)
    a.trains()
    other = machine.start("other", script, join=a, XDG_STATE_HOME=another_user(machine))
    assert "its certificate is of another authority" in refusal(other)
    assert "peerd token on a member" in refusal(other)
    a.says("dialled, and is of another authority than this node; a node joins with a token")
    assert "refused this node" not in a.log, "it was not the member that came"
    looked = machine.peerd("doctor", "--name", "n", "--join", a.address, XDG_STATE_HOME=another_user(machine)).stdout
    assert "cure: --token with what peerd token prints on a member of that swarm" in " ".join(looked.split())

    plain = machine.start("plain", script, "--insecure-plaintext", join=a)
    assert "its encryption is 'on', ours 'off'" in refusal(plain)
    a.says("its encryption is 'off', ours 'on'")
    assert "start all nodes with --insecure-plaintext, or all without" in refusal(plain)

    alone = machine.start("alone", script, "--insecure-plaintext")
    alone.trains()
    sealed = machine.start("sealed", script, join=alone)
    assert "its encryption is 'off', ours 'on'" in refusal(sealed)
    alone.says("its encryption is 'on', ours 'off'")
    ran = machine.peerd("token", "--name", "alone")
    assert "whoever reaches it is a member" in ran.stderr
    assert "Traceback" not in machine.logs()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--token", "x"), "token: it does not begin with 'peerd2.'"),
        (("--token", "peerd2.AAAA"), "token: it is damaged, or was not copied whole"),
        (("--token", "@/nowhere"), "token: /nowhere: No such file or directory"),
        (("--bind", "192.0.2.1:0", "--join", "192.0.2.1:1"), "cannot listen on"),
        (("--join", "192.0.2.1:1"), "bind: 127.0.0.1 is reached from this machine alone, and 192.0.2.1:1, which"),
    ],
)
def test_bad_tokens_are_one_line_and_leave_nothing(machine: Machine, arguments: tuple[str, ...], said: str) -> None:
    ran = machine.peerd("start", "--name", "a", *arguments)
    assert ran.returncode == 1
    assert said in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert not machine.state.exists() or not list(machine.state.rglob("*")), list(machine.state.rglob("*"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--uses", "0"), "uses: 0 is not from 1 to 1024"), (("--expires", "1"), "expires: '1' is not a number with")],
)
def test_bad_wishes_for_a_token(machine: Machine, arguments: tuple[str, ...], said: str) -> None:
    a = machine.start("a")
    assert a.address
    ran = machine.peerd("token", *arguments)
    assert ran.returncode == 1
    assert said in ran.stderr
    assert "where no other machine reaches it" in machine.peerd("token").stderr
    answer = json.loads(machine.peerd("token", "--format", "json", "--expires", "7d").stdout)
    assert parse(answer["token"]).expires == answer["expires"]


def test_the_doctor_looks_at_the_node_that_is_meant_and_its_measurement_is_no_traffic(machine: Machine) -> None:
    host = own_address()
    a = machine.start("a", "--bind", f"{host}:0")
    address = a.address
    alone = machine.peerd("doctor", "--format", "json")
    assert "a: an authority of this node's own" in found(alone.stdout, "member")[0], "the only one"
    b = machine.start("b", "--bind", f"{host}:0", "--token", token(machine, a), XDG_STATE_HOME=another_user(machine))
    b.sees(a="alive", b="alive")
    unnamed = machine.peerd("doctor")
    taken = "cannot listen on TCP 127.0.0.1:7946" in unnamed.stdout  # by a node of this machine's user
    assert unnamed.returncode == int(taken), unnamed.stdout
    assert unnamed.stdout.startswith("note  node      a, b run here;")
    assert not [line for line in unnamed.stdout.splitlines() if len(line) > 80 and "/" not in line], "but for a path"
    before = a.ask("status")["bytes_sent"]
    of_b = machine.peerd("doctor", "--name", "b", "--join", address, "--format", "json")
    assert "b: a certificate until" in found(of_b.stdout, "member")[0]
    assert "Mbit/s from there to here" in found(of_b.stdout, "peer")[1]
    assert a.ask("status")["bytes_sent"] - before < 1 << 20, "a sample is as much, and there were many"
    assert (
        "a: an authority of this node's own"
        in found(machine.peerd("doctor", "--name", "a", "--format", "json").stdout, "member")[0]
    )
    new = machine.peerd("doctor", "--name", "new", "--format", "json")
    assert "new: the user's own authority" in found(new.stdout, "member")[0]


def found(findings: str, check: str) -> list[str]:
    """What the doctor says of this."""
    return [one["found"] for one in json.loads(findings) if one["check"] == check]
