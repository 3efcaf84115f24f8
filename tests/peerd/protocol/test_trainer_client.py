"""What the trainer's end knows of its session: it goes where the table says, whatever is said and in whatever order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.protocol.trainer import (
    FROM_DAEMON,
    Added,
    BarrierHeard,
    BarrierIs,
    Corrections,
    Finished,
    Go,
    GradientIs,
    Load,
    Publish,
    Resume,
    Said,
    Spare,
    Start,
    Stop,
    Welcome,
)
from peerd.protocol.trainer_client import TRANSITIONS, ClientState, TrainerClient

STARTING, TRAINING, AT_BARRIER, WITH_GRADIENT, FINISHING, FINISHED, LEAVING = ClientState
SAID = (
    Welcome("", 1.0), Start(None, 7, 0.1, 4), Go(), Publish(), Spare(), Corrections(1), Resume(), Load(0, 8),
    GradientIs(mean=True), BarrierIs(0), Finished(), Stop(),
)  # fmt: skip
OWN = (AT_BARRIER, WITH_GRADIENT, FINISHING)
ENDS = {
    (STARTING, Go): TRAINING, (AT_BARRIER, Resume): TRAINING, (AT_BARRIER, BarrierIs): TRAINING,
    (WITH_GRADIENT, GradientIs): TRAINING, (FINISHING, Finished): FINISHED,
}  # fmt: skip
EVENTS: list[Said | ClientState] = [*SAID, *OWN]
happenings = st.lists(st.sampled_from(EVENTS), max_size=12)


def happens(client: TrainerClient, event: Said | ClientState) -> None:
    if isinstance(event, ClientState):
        client.enter(event)
    else:
        client.hear(event)


def after(state: ClientState, event: Said | ClientState) -> ClientState:
    """Whatever is not said here changes nothing."""
    if state is LEAVING or isinstance(event, Stop):
        return LEAVING
    return event if isinstance(event, ClientState) else ENDS.get((state, type(event)), state)


def may_happen(state: ClientState, event: Said | ClientState) -> bool:
    """A trainer that has not begun to train makes no step and has no gradient."""
    return state is not STARTING or not isinstance(event, ClientState)


def test_all_that_a_daemon_says_is_tried() -> None:
    assert {type(said) for said in SAID} == set(FROM_DAEMON.values())


@given(happenings)
def test_it_goes_where_the_table_says_or_stays(events: list[Said | ClientState]) -> None:
    client = TrainerClient()
    for event in events:
        before = client.state
        if not may_happen(before, event):
            with pytest.raises(AssertionError, match=f"STARTING -> {event.name}"):  # type: ignore[union-attr]
                happens(client, event)
            continue
        waited = client.waits
        happens(client, event)
        assert client.state is after(before, event)
        assert client.state is before or client.state in TRANSITIONS[before]
        assert waited or not client.waits or isinstance(event, ClientState), "the daemon makes nobody wait"
        assert client.waits == (client.state in {state for state, _ in ENDS})
        assert client.leaves == (client.state is LEAVING)


def test_every_way_in_the_table_is_gone() -> None:
    ways: dict[ClientState, Callable[[], TrainerClient]] = {STARTING: TrainerClient}
    gone: set[tuple[ClientState, ClientState]] = set()
    todo = [STARTING]
    while todo:
        before = todo.pop()
        for event in EVENTS:
            if not may_happen(before, event):
                continue

            def way(
                event: Said | ClientState = event, begun: Callable[[], TrainerClient] = ways[before]
            ) -> TrainerClient:
                client = begun()
                happens(client, event)
                return client

            state = way().state
            if state is not before or (state is event and state is not LEAVING):
                gone.add((before, state))
            if state not in ways:
                ways[state] = way
                todo.append(state)
    assert gone == {(before, state) for before, following in TRANSITIONS.items() for state in following}


def test_what_is_no_state_is_known_in_all_of_them() -> None:
    client = TrainerClient()
    assert client.hear(Start(None, 7, 0.1, 4)) is None
    assert client.barrier == 4
    assert client.hear(Corrections(1)) == Added(1)
    client.hear(Publish())
    assert client.copy_asked
    assert client.next_copy == 1
    client.published(1)
    assert (client.copy_asked, client.next_copy) == (False, 0)
    assert client.hear(BarrierIs(0)) == BarrierHeard()
    assert client.barrier == 0, "nobody waits"


@pytest.mark.parametrize("mean", [False, True])
def test_a_gradient_that_comes_is_a_mean_or_none(mean: bool) -> None:
    client = TrainerClient()
    for event in (Go(), WITH_GRADIENT, GradientIs(mean)):
        happens(client, event)
    assert (client.state, client.mean) == (TRAINING, mean)


@given(happenings, happenings)
def test_after_stop_nobody_waits(before: list[Said | ClientState], later: list[Said | ClientState]) -> None:
    client = TrainerClient()
    client.hear(Go())
    for event in (*before, Stop(), *later):
        happens(client, event)
    assert client.leaves
    assert not client.waits
