"""A relay with a member, and a guest, each end of a veth pair: run in a user namespace by test_advertise.py."""

from __future__ import annotations

import sys

from forks import PEERD
from machine import Machine, Node
from scripts import TRAIN

RELAY, GUEST = "10.9.0.1", "10.9.0.2"
SET_UP = f"""
set -e
ip link set lo up
unshare -n sleep 300 & other=$!
trap "kill $other" EXIT
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep .05; done
ip link add v0 type veth peer name v1
ip link set v1 netns $other
ip addr add {GUEST}/24 dev v0
ip link set v0 up
nsenter -t $other -n bash -c "ip link set lo up; ip addr add {RELAY}/24 dev v1; ip link set v1 up"
nsenter -t $other -n "$1" {__file__} relay & relay=$!
"$1" {__file__} guest
wait $relay
"""


def _plain(machine: Machine, name: str, *options: str) -> Node:
    script = str(machine.script("train.py", TRAIN))
    return machine.spawn(name, [*PEERD, "start", "--name", name, "--insecure-plaintext", *options, script])


def main(role: str) -> None:
    """Print what the guest could not send, and where it listens."""
    with Machine() as machine:
        if role == "relay":
            _plain(machine, "relay", "--bind", f"{RELAY}:7946", "--relay-ports", "7950-7957").trains()
            member = _plain(machine, "member", "--bind", f"{RELAY}:0", "--join", f"{RELAY}:7946")
            for state in ("alive", "failed"):  # as the guest's machine ends
                member.sees(guest=state)
            return
        guest = _plain(machine, "guest", "--relay", f"{RELAY}:7946")
        guest.sees(relay="alive", member="alive")
        guest.eventually(lambda: guest.ask("status")["counts"].get("acks", 0) > 3)  # and so it has probed both
        unsendable, bound = guest.ask("status")["counts"]["datagrams_unsendable"], guest.ask("info")["bound"]
        sys.stdout.write(f"{unsendable} unsendable from {bound}\n")


if __name__ == "__main__":
    main(sys.argv[1])
