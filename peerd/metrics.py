"""What can be measured on a running node? Its loop's latency, and every number of its status in Prometheus form."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import trio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

SAMPLE_EVERY_S = 0.02
SAMPLES = 3000  # the last minute


class LoopLatency:
    """How late the event loop wakes a task that slept: what every message and probe waits on top of the network."""

    def __init__(self) -> None:
        self._late: deque[float] = deque(maxlen=SAMPLES)

    async def run(self) -> None:
        """Sample for ever."""
        while True:
            due = trio.current_time() + SAMPLE_EVERY_S
            await trio.sleep_until(due)
            self._late.append(trio.current_time() - due)

    def percentile(self, percent: float) -> float:
        """Seconds, over the last minute; 0 before the first sample."""
        return float(np.percentile(list(self._late), percent)) if self._late else 0.0


def exposition(status: dict[str, Any]) -> str:
    """The status of one node (`peerd status --format json`) in the Prometheus text format."""
    registry = CollectorRegistry()
    registry.register(_Status(status))
    return generate_latest(registry).decode()


class _Status(Collector):
    def __init__(self, status: dict[str, Any]) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        status = self._status
        yield _counter("peerd_sent_bytes", "Bytes written to sockets", status["bytes_sent"])
        yield _counter("peerd_received_bytes", "Bytes read from sockets", status["bytes_received"])
        yield _gauge(
            "peerd_consensus_distance_ratio", "Distance of models over their norm", status["consensus_distance"]
        )
        yield _gauge("peerd_loop_latency_p99_seconds", "How late the event loop wakes", status["loop_latency_p99_s"])
        if trainer := status.get("trainer"):
            yield _counter("peerd_steps", "Optimizer steps", trainer["step"])
            yield _counter("peerd_samples", "Training samples", trainer["samples"])
            if trainer["loss"] is not None:
                yield _gauge("peerd_loss", "Last training loss", trainer["loss"])
        yield from _counts(status["counts"])


def _counts(counts: dict[str, int]) -> Iterator[Metric]:
    decisions = CounterMetricFamily("peerd_trigger_decisions", "Trigger decisions", labels=["decision"])
    events = CounterMetricFamily("peerd_events", "What happened, by kind", labels=["kind"])
    for name, value in sorted(counts.items()):
        decision = name.removeprefix("trigger_")
        (events if decision == name else decisions).add_metric([decision], value)
    yield decisions
    yield events


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)
