"""How did a simulated run go? One HTML file with everything in it: plots, settings, figures."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from peerd.simulation.options import Scenario
from peerd.simulation.outcome import Outcome, Sample
from peerd.training.modes import class_of

STYLE = (
    "body{font:15px sans-serif;margin:2em auto;max-width:1100px}td,th{padding:.15em 1em .15em 0;text-align:left;"
    "vertical-align:top}svg{width:100%;height:auto}code{background:#eee;padding:.2em .4em}.bad{color:#b00}"
)


def as_html(runs: Sequence[tuple[Scenario, Outcome]]) -> str:
    """The page of one run, or of several to compare; it loads nothing."""
    scenario = runs[0][0]
    compared = _plots_of_all(runs) + _side_by_side([outcome.result for _, outcome in runs]) if len(runs) > 1 else ""
    return page(
        f"peerd simulate, seed {scenario.seed}",
        f"{scenario.peers} peers, {scenario.problem}, seed {scenario.seed}",
        compared + "".join(_section(*run) for run in runs),
    )


def page(title: str, heading: str, body: str) -> str:
    """A whole page around `body`, which is HTML."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><h1>{html.escape(heading)}</h1>{body}</html>"
    )


def _section(scenario: Scenario, outcome: Outcome) -> str:
    result = outcome.result
    violations = "".join(f'<p class="bad">violation: {html.escape(text)}</p>' for text in result["violations"])
    return (
        f"<h2>{html.escape(scenario.label)}</h2>{violations}<p><code>{html.escape(result['replay'])}</code></p>"
        f"{_plots(outcome)}<h3>Result</h3>{table(result)}<h3>Settings</h3>{table(asdict(scenario))}"
    )


def _side_by_side(results: list[dict[str, Any]]) -> str:
    names = {name: None for result in results for name in result if name not in ("replay", "mode", "run", "series")}
    head = "".join(f"<th>{html.escape(result['run'])}" for result in results)
    rows = (
        f"<tr><th>{name}" + "".join(f"<td>{html.escape(_shown(result.get(name)))}" for result in results)
        for name in names
    )
    return f"<table><tr><th>{head}{''.join(rows)}</table>"


def table(values: dict[str, Any]) -> str:
    """A row a value."""
    rows = "".join(f"<tr><th>{html.escape(str(key))}<td>{html.escape(_shown(value))}" for key, value in values.items())
    return f"<table>{rows}</table>"


def _shown(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


Curve = tuple[str, str, list[float], list[float]]
"""What the plot says, what is across, and the two."""


def _curves(looks: list[Sample]) -> list[Curve]:
    """What runs are compared by."""
    minutes = [look.at / 60 for look in looks]
    with_loss = [look for look in looks if not math.isnan(look.loss)]
    losses = [look.loss for look in with_loss]
    return [
        ("training loss", "minutes", [look.at / 60 for look in with_loss], losses),
        ("training loss", "MB sent", [look.bytes_sent / 1e6 for look in with_loss], losses),
        ("consensus distance / model norm", "minutes", minutes, [look.distance for look in looks]),
        ("uplinks in use", "minutes", minutes, [look.busy for look in looks]),
    ]


def _plots_of_all(runs: Sequence[tuple[Scenario, Outcome]]) -> str:
    def draw(axes: list[Any]) -> None:
        for scenario, outcome in runs:
            _draw(axes, _curves(outcome.series), scenario.label)
        axes[0].legend(fontsize=8)

    return picture(2, draw)


def _plots(outcome: Outcome) -> str:
    looks = outcome.series
    minutes = [look.at / 60 for look in looks]
    members = {
        "up": [float(look.up) for look in looks],
        "alive": [look.alive for look in looks],
        "suspect": [look.suspect for look in looks],
        "failed": [look.failed for look in looks],
    }

    def draw(axes: list[Any]) -> None:
        _draw(axes, _curves(looks))
        for state, values in members.items():
            _draw(axes[4:], [("membership, in the mean view", "minutes", minutes, values)], state)
        axes[4].legend(fontsize=8)
        steps = sorted(outcome.staleness)
        axes[5].bar(steps, [outcome.staleness[step] for step in steps])
        has_servers = "servers" in class_of(outcome.result["mode"]).TAKES
        of = "of pushes, in updates of the weights" if has_servers else "own steps during an exchange"
        axes[5].set_title(f"staleness: {of}", fontsize=10)
        axes[5].set_xlabel("updates" if has_servers else "steps")

    return picture(3, draw)


def _draw(axes: Sequence[Any], curves: list[Curve], label: str | None = None) -> None:
    for axis, (title, below, across, values) in zip(axes, curves, strict=False):
        axis.plot(across, values, label=label, linewidth=1.2)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(below)
        axis.grid(visible=True, alpha=0.3)


def picture(rows: int, draw: Callable[[list[Any]], None]) -> str:
    """SVG, two plots a row."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, 2, figsize=(11, 10 / 3 * rows), layout="constrained")
    draw(list(axes.flat))
    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):  # words as words, not their outlines
        figure.savefig(text, format="svg", metadata={"Date": None})  # the same run draws the same page
    pyplot.close(figure)
    drawn = text.getvalue()
    return drawn[drawn.index("<svg") :]
