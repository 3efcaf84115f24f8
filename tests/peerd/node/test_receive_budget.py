"""The budget of half messages, in plain numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peerd.node.receive_budget import ReceiveBudget

LIMIT = 100
STEPS = st.lists(st.tuples(st.sampled_from(["begin", "whole", "end"]), st.integers(0, 9), st.integers(1, 60)))


@given(STEPS, st.frozensets(st.integers(0, 9)))
def test_it_is_never_exceeded_but_by_what_has_come_whole(
    steps: list[tuple[str, int, int]], proved: frozenset[int]
) -> None:
    budget: ReceiveBudget[int] = ReceiveBudget()
    sizes: dict[int, int] = {}
    whole: set[int] = set()
    for what, connection, size in steps:
        if what == "begin":
            gone = budget.begin(connection, size, LIMIT, proved.__contains__)
            sizes[connection] = size
            whole.discard(connection)
            assert not whole & set(gone), "nobody is given up for what has come"
            assert len(gone) == len(set(gone))
            for each in gone:
                del sizes[each]
        elif what == "whole":
            budget.whole(connection)  # be it of one that was given up as its last bytes came
            whole |= {connection} & sizes.keys()
        elif what == "end":
            budget.end(connection)
            sizes.pop(connection, None)
            whole.discard(connection)
        assert budget.bytes == sum(sizes.values()) <= LIMIT


@given(st.lists(st.integers(1, 10), min_size=1, max_size=10))
def test_honest_peers_each_with_a_message_are_all_heard(sizes: list[int]) -> None:
    budget: ReceiveBudget[int] = ReceiveBudget()
    for connection, size in enumerate(sizes):
        assert budget.begin(connection, size, 10 * len(sizes), lambda _: False) == []


def test_the_oldest_goes_first_and_who_has_proved_something_last() -> None:
    budget: ReceiveBudget[str] = ReceiveBudget()
    for connection in ("honest", "older", "newer"):
        assert budget.begin(connection, 30, LIMIT, lambda connection: connection == "honest") == []
    assert budget.begin("next", 60, LIMIT, lambda connection: connection == "honest") == ["older", "newer"]
    assert budget.begin("last", 60, LIMIT, lambda connection: connection in ("honest", "last")) == ["next"]
