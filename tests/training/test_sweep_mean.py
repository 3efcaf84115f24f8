"""The short form of the sweep (sweep_mean.py), and that its ledger sees what it is there to see."""

from __future__ import annotations

import pytest
from sweep_mean import MODES, Broken, LedgerSwarm, quick, run

from peerd.training.pairs.ended import EndedLinks
from peerd.training.pairs.reference import PairedReference

SEEDS = 8
ONCE_BROKEN = [
    "elastic:17837",  # a centre that reigned again gave a link of its first reign anew, from another model
    "elastic:18873",  # two members, neither the centre, each named the other to all who asked
    "push-sum:19014",  # two members without weight asked each other for some, at the end of the run
    "push-sum:17320",  # an answer said again by a model that had become NaN
]


@pytest.mark.cases(2)
@pytest.mark.parametrize("mode", MODES)
def test_each_mode_keeps_what_it_promises(mode: str) -> None:
    with quick():
        for seed in range(SEEDS):
            broken, _ = run(mode, seed)
            assert not broken, f"python tests/training/sweep_mean.py --replay {mode}:{seed}: {broken}"


@pytest.mark.parametrize("replay", ONCE_BROKEN)
def test_what_was_broken_once_is_kept(replay: str) -> None:
    mode, _, seed = replay.partition(":")
    with quick():
        broken, _ = run(mode, int(seed))
    assert not broken


def test_an_exchange_that_one_end_alone_applied_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was when a link that was let go left nothing behind."""

    def forget(self: EndedLinks, peer: str, reference: PairedReference) -> None:
        reference.cancel()
        self.remember(reference.link, reference.version)

    monkeypatch.setattr(EndedLinks, "let_go", forget)
    monkeypatch.setattr("sweep_mean.ROBUST", 0.0)  # all of the one exchange is to be seen
    with quick():
        swarm = LedgerSwarm("gossip", 2, 1, "float32", 0)
        swarm.everyone_alive()
        swarm.settle()
        swarm.step("a", 1.0)
        swarm.deliver("a", "b")
        swarm.lose("b", "a")
        swarm.nodes["b"].core._links.end("a", swarm.now)
        swarm.calm()
        with pytest.raises(Broken, match="applied by"):
            swarm.check(someone_is_dead=False)
    assert swarm.sum_off > 0.01
