"""The listener's caps, in plain numbers."""

from __future__ import annotations

from peerd.transport.admission import ACCEPTED_MAX, ACCEPTS_PER_S, BURST, PENDING_MAX, Admission


def test_a_burst_then_a_steady_rate() -> None:
    admission = Admission(now=100.0)
    for _ in range(int(BURST)):
        assert admission.delay_s(100.0) == 0.0
        admission.enter("127.0.0.1")
        admission.admit("127.0.0.1")
        admission.leave()
    assert admission.delay_s(100.0) == 1 / ACCEPTS_PER_S
    assert admission.delay_s(100.0 + 1 / ACCEPTS_PER_S) < 1e-9
    assert admission.delay_s(1000.0) == 0.0


def test_one_host_has_four_in_their_handshake() -> None:
    admission = Admission(now=0.0)
    assert [admission.enter("10.0.0.1") for _ in range(5)] == [True] * 4 + [False]
    assert admission.enter("10.0.0.2")
    admission.admit("10.0.0.1")
    assert admission.enter("10.0.0.1")
    assert admission.refused == 1


def test_loopback_is_exempt_up_to_the_total() -> None:
    admission = Admission(now=0.0)
    for host in ("127.0.0.1", "::1") * (PENDING_MAX // 2):
        assert not admission.full
        assert admission.enter(host)
    assert admission.full
    admission.admit("::1")
    assert not admission.full


def test_the_admitted_are_counted_until_they_leave() -> None:
    admission = Admission(now=0.0)
    for _ in range(ACCEPTED_MAX):
        admission.enter("10.0.0.1")
        admission.admit("10.0.0.1")
    assert admission.pending == 0
    assert admission.full
    admission.leave()
    assert not admission.full
