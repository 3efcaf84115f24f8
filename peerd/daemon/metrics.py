"""What can be measured on a running node? Its loop's latency, and every number of its status in Prometheus form."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import trio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

SAMPLE_EVERY_S = 0.1  # 50 wakes a second were half of what a daemon costs that has nothing to do
SAMPLES = 600  # the last minute


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
        if not self._late:
            return 0.0
        late = sorted(self._late)  # not by np.percentile, which imports numpy.ma: the loop stood for 50 ms for that
        below, share = divmod(percent / 100 * (len(late) - 1), 1)
        first = int(below)
        return late[first] + share * (late[min(first + 1, len(late) - 1)] - late[first])


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
        yield self._counter("peerd_sent_bytes", "Bytes written to sockets", status["bytes_sent"])
        yield self._counter("peerd_received_bytes", "Bytes read from sockets", status["bytes_received"])
        if (distance := status["consensus_distance"]) is not None and status.get("no_partner_s") is None:
            yield self._gauge("peerd_consensus_distance_ratio", "Distance of models over their norm", distance)
        yield self._gauge(
            "peerd_loop_latency_p99_seconds", "How late the event loop wakes", status["loop_latency_p99_s"]
        )
        yield self._gauge("peerd_members", "Members that this node knows, by state", status["members"], by="state")
        yield self._gauge("peerd_members_refused", "Members that this node does not listen to", len(status["refused"]))
        if trainer := status["trainer"]:
            yield self._counter("peerd_steps", "Optimizer steps", trainer["step"])
            yield self._counter("peerd_samples", "Training samples", trainer["samples"])
            if (ago := trainer.get("last_step_s_ago")) is not None:
                yield self._gauge("peerd_last_step_age_seconds", "Since the trainer's last step", ago)
            if trainer["loss"] is not None:
                yield self._gauge("peerd_loss", "Last training loss", trainer["loss"])
            yield self._gauge("peerd_trainer_metric", "Numbers given to swarm.step()", trainer["metrics"], by="metric")
        decisions = {name[8:]: value for name, value in status["counts"].items() if name.startswith("trigger_")}
        events = {name: value for name, value in status["counts"].items() if not name.startswith("trigger_")}
        yield self._counter("peerd_trigger_decisions", "Trigger decisions", decisions, by="decision")
        yield self._counter("peerd_events", "What happened, by kind", events, by="kind")

    def _counter(self, name: str, text: str, value: float | dict[str, float], by: str | None = None) -> Metric:
        return self._fill(CounterMetricFamily(name, text, labels=_labels(by)), value)

    def _gauge(self, name: str, text: str, value: float | dict[str, float], by: str | None = None) -> Metric:
        return self._fill(GaugeMetricFamily(name, text, labels=_labels(by)), value)

    def _fill(self, metric: CounterMetricFamily | GaugeMetricFamily, value: float | dict[str, float]) -> Metric:
        """One sample, or one for each key."""
        node = self._status["name"]
        if not isinstance(value, dict):
            metric.add_metric([node], value)
        else:
            for key, number in sorted(value.items()):
                metric.add_metric([node, key], number)
        return metric


def _labels(by: str | None) -> list[str]:
    """The node's name is on every sample: to a scraper, the nodes of one machine are one instance."""
    return ["node"] if by is None else ["node", by]
