"""A carrier of one's own is one file and one line: the one in CONTRIBUTING, from its contract to nodes that train."""

from __future__ import annotations

import re
import sys
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import test_transport_contract as contract
import trio
from thin import STEP_S, Swarm, Trainer, simulate

from peerd.carriers import CARRIERS
from peerd.daemon.node import running
from peerd.daemon.verbs import Verbs
from peerd.doctor import examine
from peerd.local.identity import Identity
from peerd.local.node_key import NodeKey
from peerd.settings import load
from peerd.transport.errors import UserError
from peerd.transport.memory import MemoryNetwork

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
STEPS = 100


@pytest.fixture
def carrier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the page shows, in a file of its own and in the table."""
    (example,) = re.findall(r'```python\n("""Nodes of one process.*?)```', PAGE.read_text(), re.DOTALL)
    path = tmp_path / "own_carrier.py"
    path.write_text(example)
    spec = spec_from_file_location("own_carrier", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "own_carrier", module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(CARRIERS, "memory", module.Memory)
    return module.Memory


def test_it_is_a_value_of_the_setting(carrier: Any) -> None:
    assert load({"transport": "memory"}, {}, None).transport == "memory"
    with pytest.raises(UserError, match=f"is not one of {', '.join(CARRIERS)}; did you mean 'memory'"):
        load({"transport": "memori"}, {}, None)


def test_the_doctor_asks_it(carrier: Any) -> None:
    settings = load({"transport": "memory", "bind": "127.0.0.1:0"}, {}, None)
    (finding,) = [finding for finding in examine(settings) if finding.check == "memory"]
    assert finding.state == "ok"


async def test_it_keeps_the_contract_of_a_transport(carrier: Any) -> None:
    make, make_datagrams = (
        partial(contract.of_peerd, name="memory"),
        partial(contract.datagrams_of_peerd, name="memory"),
    )
    async with trio.open_nursery() as nursery:
        carrier.network = MemoryNetwork(nursery)
        await contract.test_every_message_arrives_as_it_was_sent_in_both_directions(make)
        await contract.test_bulk_arrives_whole(make)
        await contract.test_dialling_nobody_says_whom_and_why(make)
        await contract.test_datagrams_arrive_with_their_source(make_datagrams)
        nursery.cancel_scope.cancel()


def test_two_nodes_train_over_it(carrier: Any) -> None:
    async def scenario(swarm: Swarm) -> None:
        carrier.network = swarm.network
        trainers = [Trainer(name, STEPS, STEP_S) for name in "ab"]

        async def live(name: str, trainer: Trainer) -> None:
            (host, port), (first, _) = (swarm.network.place(each) for each in (name, "a"))
            join = (f"{first}:{port}",) if name != "a" else ()
            flags = {"name": name, "bind": f"{host}:{port}", "join": join, "wait_for": 2}
            settings = load({"transport": "memory", "insecure_plaintext": True, **flags}, {}, None)
            async with running(settings, Identity(NodeKey.generate(), 1, -1), expects=True) as (daemon, address):
                assert address == (host, port)
                daemon.nursery.start_soon(trainer.run, daemon)
                for each in trainers:
                    await each.finished.wait()
                status = await Verbs(daemon).table()["status"]({})
                assert status["counts"]["exchanges"] > 0
                assert status["carriers"] == ["memory"]

        async with trio.open_nursery() as nursery:
            for name, trainer in zip("ab", trainers, strict=True):
                nursery.start_soon(live, name, trainer)

    simulate(1, scenario)
