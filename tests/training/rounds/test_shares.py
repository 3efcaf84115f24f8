"""Rounds where members' batches differ in size: the mean is by their samples, and nothing is lost of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from round_swarm import formed

from peerd.training.batch_sizes import Work, shares
from peerd.training.rounds.choice import DENSE
from peerd.transport.errors import PeerError
from peerd.transport.messages import RoundBegin

SIZE = 40
LOSSY: list[dict[str, str]] = [
    *(
        {"codec": codec, "overlap": overlap}
        for codec in ("sign", "int8", "top_k")
        for overlap in ("delayed", "blocking")
    ),
    {"codec": "auto", "overlap": "quorum"},
    {"mode": "diloco", "codec": "sign", "outer_lr": "1", "outer_momentum": "0"},
]


@pytest.mark.cases(2)
@pytest.mark.parametrize("settings", LOSSY)
@pytest.mark.parametrize("seed", range(3))
def test_what_a_codec_drops_of_a_share_is_made_good(settings: dict[str, str], seed: int) -> None:
    """Once nobody moves, all come to the weighted mean of what each had made."""
    names, samples = "abc", (64.0, 16.0, 8.0)
    swarm = formed(names, SIZE, seed=seed, robust=False, every=2, **settings)
    for name, size in zip(names, samples, strict=True):
        swarm.nodes[name].samples = size
    start = swarm.nodes["a"].x.copy()
    moves = [swarm.integers() for _ in names]
    parameters = swarm.layout.parameters
    wanted = start + np.average(moves, axis=0, weights=shares([Work(size, 2) for size in samples]))
    wanted[parameters:] = (start + np.mean(moves, axis=0))[parameters:]
    for name, move in zip(names, moves, strict=True):
        swarm.step(name, move)
    swarm.settle()
    for _ in range(400):
        for name in names:
            swarm.step(name, 0.0)
        swarm.settle()
    mean = np.mean([node.x for node in swarm.nodes.values()], axis=0)
    assert np.linalg.norm(mean - wanted) < 0.02 * np.linalg.norm(wanted - start)


def test_a_chosen_dense_codec_keeps_of_its_loss_what_the_share_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own part stays in the model, the rest waits beside it: together the next round has all of it."""
    swarm = formed("ab", SIZE, codec="auto", overlap="quorum", every=2, robust=False)
    monkeypatch.setattr("peerd.training.codecs.concentration.CONCENTRATED", 2.0)
    swarm.nodes["a"].samples, swarm.nodes["b"].samples = 64.0, 16.0
    for _ in range(4):
        for name in "ab":
            swarm.step(name, swarm.integers())
        swarm.settle()
    core = swarm.nodes["b"].core
    assert core._codec == DENSE
    stays = swarm.nodes["b"].x - core._agreed
    parameters = swarm.layout.parameters
    assert stays[:parameters].any()
    np.testing.assert_allclose(core._lost[:parameters], 0.75 * stays[:parameters], rtol=1e-3, atol=1e-2)
    assert not swarm.nodes["a"].core._lost[:parameters].any()


@pytest.mark.parametrize(
    "forge",
    [
        lambda begin: replace(begin, shares=(1.0, 1e-9)),
        lambda begin: replace(begin, shares=(1.0,)),
        lambda begin: replace(begin, shares=(1.0, 0.5), whole=True, codec="float32"),
        lambda begin: replace(begin, shares=(1.0, 0.5), final=True),
    ],
)
def test_an_order_with_shares_that_cannot_be_is_refused(forge: Callable[[RoundBegin], RoundBegin]) -> None:
    swarm = formed("ab", SIZE, codec="int8", every=2)
    for name in "ab":
        swarm.step(name)
    swarm.settle()
    for name in "ab":
        swarm.step(name)
    orders = [(to, one) for (source, to), queue in swarm.queues.items() for one in queue if isinstance(one, RoundBegin)]
    while not orders:
        assert any(swarm.deliver(source, to) for source, to in list(swarm.queues))
        orders = [
            (to, one) for (source, to), queue in swarm.queues.items() for one in queue if isinstance(one, RoundBegin)
        ]
    ((to, order),) = orders[:1]
    with pytest.raises(PeerError, match="shares"):
        swarm.nodes[to].core.on_message("a" if to == "b" else "b", forge(order), swarm.now)
