"""What connections promise the modes: order, a bounded queue, and a word when messages flow again after a break."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.simulation.connections import TRANSITIONS, Connection, State
from peerd.simulation.network import Network, Profile, uniform
from peerd.simulation.world import World
from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId
from peerd.transport.messages import LinkOpen, LinkSnapshot, RoundPhase, RoundReport
from peerd.transport.patience import DIAL_TIMEOUT_S, GREETING_DEADLINE_S, PATIENCE_S, RETRY_MAX_S
from peerd.transport.peer_queue import QUEUE_MAX

LATENCY_S = 0.05
AGAIN_S = RETRY_MAX_S + GREETING_DEADLINE_S + 1.0  # the longest until a peer that is back has been dialled


class Process:
    """An end that remembers what it was given."""

    def __init__(self, index: int, life: int = 1) -> None:
        self.index = index
        self.life = life
        self.up = self.running = True
        self.bytes_sent = 0
        self.received: list[bytes] = []
        self.refuses = False

    def hears(self, source: NodeId) -> bool:
        return not self.refuses

    def receive(self, source: NodeId, frame: bytes) -> None:
        if frame.startswith(b"bad"):
            raise PeerError("damaged")
        self.received.append(frame)


class Pair:
    """One connection, and both its ends. Its messages are bytes."""

    def __init__(self, seed: int = 0, profile: Profile | None = None, says_again: bytes = b"") -> None:
        self.world = World(seed)
        self.network = Network(self.world, uniform(profile or Profile(LATENCY_S), 2))
        self._target: Process | None = Process(1)
        self.reconnected_at: list[float] = []
        self.unreached_at: list[float] = []
        self.connection = Connection[bytes](
            self.world, self.network, Process(0), lambda: self._target, "n0", 1, self._reconnected,
            lambda: self.unreached_at.append(self.world.now),
        )  # fmt: skip
        self._says_again = says_again
        self._said = 0

    @property
    def target(self) -> Process:
        assert self._target is not None, "it has crashed"
        return self._target

    def _reconnected(self) -> None:
        self.reconnected_at.append(self.world.now)
        if self._says_again:
            self.send(self._says_again)

    def send(self, *frames: bytes, size: float = 100.0) -> None:
        for frame in frames:
            self._said += 1
            self.connection.send(LinkOpen(self._said), frame, size)

    def run(self, seconds: float) -> None:
        self.world.run(self.world.now + seconds)

    def crash(self) -> None:
        self._target = None

    def restart(self, life: int) -> Process:
        self._target = Process(1, life)
        return self._target


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def test_a_message_comes_after_the_dial_and_its_own_flight() -> None:
    pair = Pair()
    pair.send(b"first")
    pair.run(3 * LATENCY_S - 0.001)
    assert pair.target.received == []
    pair.run(0.002)
    assert pair.target.received == [b"first"]
    assert not pair.reconnected_at, "the first connection is no new one"


def test_dials_in_vain_are_told_of_until_there_is_a_connection_again() -> None:
    pair = Pair()
    pair.send(b"first")
    pair.run(1.0)
    broke_at = pair.world.now
    pair.network.cut = lambda source, target: (source, target) == (0, 1)
    pair.send(b"second")
    pair.run(60.0)
    first, *more = pair.unreached_at
    assert DIAL_TIMEOUT_S <= first - broke_at <= PATIENCE_S + AGAIN_S
    assert more
    assert not pair.reconnected_at
    pair.network.cut = lambda source, target: False
    pair.run(AGAIN_S)
    pair.unreached_at.clear()
    assert len(pair.reconnected_at) == 1
    pair.restart(2)
    pair.send(b"third")
    pair.run(60.0)
    assert pair.unreached_at == [], "it was dialled again at once"


@given(
    st.integers(0, 2**32),
    st.lists(st.floats(1.0, 1e6), min_size=2, max_size=20),
    st.sampled_from([0.0, 0.01, 0.3]),
    st.floats(0.0, 0.5),
)
@settings(deadline=None, print_blob=True)
def test_everything_comes_once_and_in_order(seed: int, sizes: list[float], loss: float, jitter_s: float) -> None:
    pair = Pair(seed, Profile(LATENCY_S, jitter_s=jitter_s, loss=loss, uplink_mbit=100.0))
    frames = numbered(len(sizes))
    for frame, size in zip(frames, sizes, strict=True):
        pair.send(frame, size=size)
    pair.run(600.0)
    assert pair.target.received == frames, f"seed {seed}"


def test_messages_that_overtake_on_the_line_wait_for_those_before() -> None:
    """Each message of one packet is repeated by itself, up to eight times."""
    seed = 3
    pair = Pair(seed, Profile(LATENCY_S, loss=0.5))
    pair.run(2 * LATENCY_S)
    pair.send(*numbered(QUEUE_MAX), size=10.0)
    pair.run(60.0)
    assert pair.target.received == numbered(QUEUE_MAX), f"seed {seed}"


def test_the_queue_is_bounded_and_drops_what_comes_last() -> None:
    pair = Pair()
    pair.send(*numbered(QUEUE_MAX + 10))
    assert pair.connection.queued == QUEUE_MAX
    pair.run(10.0)
    assert pair.connection.queued == 0
    assert pair.target.received == numbered(QUEUE_MAX)


def test_of_models_no_more_wait_than_a_nodes_own_connections_hold() -> None:
    pair = Pair()
    for link in range(9):
        model = LinkSnapshot(link, "float32", (bytes(10),))
        pair.connection.send(model, b"%d" % link, size=10.0, bulk_max=40.0)
    assert pair.connection.queued == 4
    pair.run(10.0)
    assert pair.target.received == [b"0", b"1", b"2", b"3"]


def test_what_was_on_the_way_to_a_crashed_process_is_lost() -> None:
    pair = Pair()
    pair.run(1.0)
    pair.send(b"1", b"2", b"3", size=1e5)
    pair.run(0.01)
    pair.crash()
    pair.run(1.0)
    again = pair.restart(life=2)
    pair.run(AGAIN_S)
    assert again.received == []
    assert len(pair.reconnected_at) == 1
    pair.send(b"4")
    pair.run(1.0)
    assert again.received == [b"4"]


def test_a_process_that_came_back_unnoticed_gets_nothing_meant_for_the_former() -> None:
    pair = Pair()
    pair.run(1.0)
    again = pair.restart(life=2)
    pair.send(b"for the former", b"this one too")
    pair.run(AGAIN_S)
    assert again.received == []
    assert len(pair.reconnected_at) == 1


def test_what_was_queued_before_a_reconnect_must_not_overtake_what_is_said_again() -> None:
    pair = Pair(says_again=b"said again")
    pair.crash()
    pair.run(1.0)
    pair.send(b"old")
    again = pair.restart(life=2)
    pair.run(AGAIN_S)
    assert again.received == [b"said again"]


def test_a_peer_that_was_away_for_an_hour_is_found_within_seconds() -> None:
    pair = Pair()
    pair.crash()
    pair.run(3600.0)
    pair.restart(life=2)
    back_at = pair.world.now
    pair.run(AGAIN_S)
    (found_at,) = pair.reconnected_at
    assert found_at - back_at <= RETRY_MAX_S + 2 * LATENCY_S


def test_a_damaged_message_breaks_the_connection_and_those_behind_it_are_lost() -> None:
    pair = Pair()
    pair.send(b"1", b"bad", b"3")
    pair.run(5.0)
    assert pair.target.received == [b"1"]
    assert len(pair.reconnected_at) == 1
    pair.send(b"4")
    pair.run(5.0)
    assert pair.target.received == [b"1", b"4"]


def test_who_is_not_heard_dials_again_until_it_is() -> None:
    pair = Pair()
    pair.target.refuses = True
    pair.send(b"1")
    pair.run(60.0)
    assert pair.target.received == []
    pair.target.refuses = False
    pair.run(AGAIN_S)
    pair.send(b"2")
    pair.run(5.0)
    assert pair.target.received == [b"2"]


@pytest.mark.parametrize("kind", ["stopped", "cut"])
def test_a_short_stop_or_cut_delays_and_loses_nothing(kind: str) -> None:
    pair = Pair()
    pair.run(1.0)
    hold(pair, kind, True)
    pair.send(*numbered(5))
    pair.run(PATIENCE_S - 2.0)
    assert pair.target.received == []
    hold(pair, kind, False)
    pair.run(2.0)
    assert pair.target.received == numbered(5)
    assert not pair.reconnected_at


@pytest.mark.parametrize("kind", ["stopped", "cut"])
def test_a_long_stop_or_cut_breaks_the_connection(kind: str) -> None:
    pair = Pair()
    pair.run(1.0)
    hold(pair, kind, True)
    pair.send(*numbered(5))
    pair.run(PATIENCE_S + 5.0)
    hold(pair, kind, False)
    pair.run(AGAIN_S)
    assert pair.target.received == []
    assert len(pair.reconnected_at) == 1


def hold(pair: Pair, kind: str, held: bool) -> None:
    if kind == "cut":
        pair.network.cut = lambda source, target: held and (source, target) == (0, 1)
    else:
        pair.target.running = not held


@pytest.mark.parametrize("after_s", [0.01, 1.0, 1.03])
def test_nothing_comes_out_of_a_closed_connection(after_s: float) -> None:
    """Closed while it dials, when it is idle, and with a message on the way."""
    pair = Pair()
    pair.run(min(after_s, 1.0))
    if after_s > 1.0:
        pair.send(b"on the way")
        pair.run(after_s - 1.0)
    pair.connection.close()
    pair.send(b"late")
    pair.run(60.0)
    assert pair.target.received == []
    assert not pair.reconnected_at


def test_a_process_that_is_gone_is_noticed_without_a_message() -> None:
    pair = Pair(seed=1)
    pair.world.run(1.0)
    pair.crash()
    pair.connection.reset()
    pair.restart(life=2)
    pair.world.run(3.0)
    assert pair.reconnected_at, "the sender was not told"


def test_what_has_not_left_is_not_queued_again() -> None:
    pair = Pair()
    pair.world.run(1.0)
    for _ in range(3):
        pair.connection.send(LinkOpen(7), b"once", 1e6)
    pair.world.run(100.0)
    assert pair.target.received == [b"once"]
    pair.connection.send(LinkOpen(7), b"again", 1e6)
    pair.world.run(200.0)
    assert pair.target.received == [b"once", b"again"]


def test_a_report_that_waits_makes_way_for_a_newer_one() -> None:
    pair = Pair()
    pair.world.run(1.0)
    for progress in range(4):
        report = RoundReport(1, RoundPhase.RUNNING, 0, 0, 1, progress, False, False, False)
        pair.connection.send(report, b"%d" % progress, 1e6)
    pair.world.run(100.0)
    assert pair.target.received == [b"0", b"3"], "the first was leaving"


@given(st.lists(st.sampled_from(State), max_size=9))
def test_a_connection_goes_only_where_the_table_says(states: list[State]) -> None:
    connection = Pair().connection
    for state in states:
        before = connection._state
        if state in TRANSITIONS[before]:
            connection._enter(state)
            assert connection._state is state
        else:
            with pytest.raises(AssertionError, match=f"{before.name} -> {state.name}"):
                connection._enter(state)
            assert connection._state is before


def test_every_way_in_the_table_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: set[tuple[State, State]] = set()
    enter = Connection._enter

    def seen(connection: Connection[bytes], state: State) -> None:
        gone.add((connection._state, state))
        enter(connection, state)

    def dialling() -> Pair:
        return Pair()

    def idle() -> Pair:
        pair = dialling()
        pair.run(1.0)
        return pair

    def sending() -> Pair:
        pair = idle()
        pair.send(b"long", size=1e9)
        return pair

    def broken() -> Pair:
        pair = sending()
        pair.crash()
        pair.connection.reset()
        pair.run(LATENCY_S + 0.01)
        return pair

    monkeypatch.setattr(Connection, "_enter", seen)
    for begun in (dialling, idle, sending, broken):
        begun().connection.close()
        pair = begun()
        pair.crash()
        pair.connection.reset()
        pair.run(AGAIN_S)
        pair.restart(2)
        pair.run(AGAIN_S)
        pair.send(b"short")
        pair.run(1.0)
        assert pair.target.received == [b"short"]
    assert gone == {(before, after) for before, following in TRANSITIONS.items() for after in following}
