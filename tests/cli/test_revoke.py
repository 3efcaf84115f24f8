"""`peerd revoke` on real nodes: who is out, who hears of it, and that nobody else loses anything by it."""

from __future__ import annotations

import json
from signal import SIGKILL

from machine import Machine, Node
from scripts import TRAIN


def counts(node: Node) -> dict[str, int]:
    return dict(node.ask("status")["counts"])


def kept_private(machine: Machine, node: Node) -> bool:
    """Are both files there, and nobody else's to read? They are written by a thread, after the node acted."""
    files = [machine.state / "peerd" / node.name / name for name in ("keyring.hex", "revocations.hex")]
    return all(file.is_file() and file.stat().st_mode & 0o777 == 0o600 for file in files)


def is_told_why(node: Node) -> None:
    """It ends, or does not start, and its user reads what to do."""
    assert node.end() == 1
    last = node.log.splitlines()[-1]
    assert "this node was revoked" in last
    assert "another --name" in last
    assert "new token" in last


def test_a_node_is_put_out_and_the_others_go_on(machine: Machine) -> None:
    a, b, c = machine.three(machine.script("train.py", TRAIN))
    for node in (a, b, c):
        node.sees(a="alive", b="alive", c="alive")
        node.eventually(lambda node=node: counts(node)["datagram_key_number"] == 1)  # type: ignore[misc]
    node_id, where = str(c.ask("info")["id"]), c.address

    ran = machine.peerd("revoke", "c", "--name", "a", "--format", "json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {"revoked": node_id, "name": "c", "new": True, "key": 2}
    for node in (a, b):
        node.sees(a="alive", b="alive", c="revoked")
        node.says("was revoked: it is out for ever")
        assert node.ask("status")["members"] == {"alive": 2, "suspect": 0, "failed": 0, "left": 0, "revoked": 1}
        node.eventually(lambda node=node: counts(node)["datagram_key_number"] == 2)  # type: ignore[misc]
        node.eventually(lambda node=node: kept_private(machine, node))  # type: ignore[misc]
        node.trains(beyond=node.step)
    changed = machine.peerd("mode", "set", "gossip", "--view", "2", "--name", "b").stdout
    assert changed.endswith("not c: revoked, out for ever\n")
    assert "failed" not in changed
    assert "was out already" in machine.peerd("revoke", node_id, "--name", "b").stdout

    is_told_why(c)
    before = {node.name: counts(node)["snapshots_given"] for node in (a, b)}
    is_told_why(machine.start("c", join=a))
    is_told_why(machine.start("c", join=b))
    assert "Traceback" not in machine.logs()
    for node in (a, b):
        node.says("its certificate is revoked")
        assert f"{where}) failed" not in node.log
        assert "trying again" not in node.log, "nobody waits for who is out"
        assert node.members()["c"] == "revoked"
        assert counts(node)["snapshots_given"] == before[node.name], "it gets no model"
        assert counts(node)["unforeseen_errors"] == 0
        assert "failures" not in counts(node), "nobody was accused for want of a key"


def test_what_is_remembered_outlives_a_restart(machine: Machine) -> None:
    a = machine.start("a")
    b = machine.start("b", join=a)
    b.sees(a="alive", b="alive")
    assert machine.peerd("revoke", "b", "--name", "a").returncode == 0
    a.signal(SIGKILL)
    a.end()
    b.signal(SIGKILL)
    b.end()
    again = machine.start("a")
    again.eventually(lambda: counts(again)["revocations"] == 1)
    assert counts(again)["datagram_key_number"] == 2
    is_told_why(machine.start("b", join=again))
    assert "Traceback" not in machine.logs()
    assert again.members() == {"a": "alive"}


def test_what_makes_no_sense_is_refused_in_a_line(machine: Machine) -> None:
    a = machine.start("a")
    a.eventually(lambda: counts(a)["datagram_keys"] == 1)
    unknown = "0" * 32
    for arguments, line in (
        (["nobody"], "no member is called 'nobody'"),
        (["a"], "this is the node itself"),
    ):
        ran = machine.peerd("revoke", *arguments)
        assert ran.returncode == 1
        assert line in ran.stderr
        assert len(ran.stderr.splitlines()) == 1
    assert "out for ever" in machine.peerd("revoke", unknown).stdout
    assert counts(a)["revocations"] == 1
    plain = machine.start("p", "--insecure-plaintext")
    plain.eventually(lambda: plain.ask("info"))
    assert "insecure-plaintext" in machine.peerd("revoke", unknown, "--name", "p").stderr
