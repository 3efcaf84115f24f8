"""How did a simulated run go? One HTML file with everything in it: plots, settings, figures."""

from __future__ import annotations

import html
import io
import math
from dataclasses import asdict
from typing import Any

from peerd.simulation.scenario import Outcome, Scenario

STYLE = (
    "body{font:15px sans-serif;margin:2em auto;max-width:1100px}td,th{padding:.15em 1em .15em 0;text-align:left;"
    "vertical-align:top}svg{width:100%;height:auto}code{background:#eee;padding:.2em .4em}.bad{color:#b00}"
)


def write_report(scenario: Scenario, outcome: Outcome) -> str:
    """The page; it loads nothing."""
    result = outcome.result
    violations = "".join(f'<p class="bad">violation: {html.escape(text)}</p>' for text in result["violations"])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>peerd simulate, seed {scenario.seed}</title>'
        f"<style>{STYLE}</style><h1>{scenario.peers} peers, {html.escape(scenario.problem)}, seed {scenario.seed}</h1>"
        f"{violations}<p><code>{html.escape(result['replay'])}</code></p>{_plots(outcome)}"
        f"<h2>Result</h2>{_table(result)}<h2>Settings</h2>{_table(asdict(scenario))}</html>"
    )


def _table(values: dict[str, Any]) -> str:
    rows = "".join(f"<tr><th>{html.escape(str(key))}<td>{html.escape(_shown(value))}" for key, value in values.items())
    return f"<table>{rows}</table>"


def _shown(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _plots(outcome: Outcome) -> str:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    looks = outcome.looks
    minutes = [look.at / 60 for look in looks]
    with_loss = [look for look in looks if not math.isnan(look.loss)]
    losses = [look.loss for look in with_loss]
    figure, axes = pyplot.subplots(3, 2, figsize=(11, 10), layout="constrained")
    lines: list[tuple[str, str, list[float], dict[str, list[float]]]] = [
        ("training loss", "minutes", [look.at / 60 for look in with_loss], {"": losses}),
        ("training loss", "MB sent", [look.bytes_sent / 1e6 for look in with_loss], {"": losses}),
        ("consensus distance / model norm", "minutes", minutes, {"": [look.distance for look in looks]}),
        ("uplinks in use", "minutes", minutes, {"": [look.busy for look in looks]}),
        (
            "membership, in the mean view", "minutes", minutes,
            {
                "up": [float(look.up) for look in looks],
                "alive": [look.alive for look in looks],
                "suspect": [look.suspect for look in looks],
                "failed": [look.failed for look in looks],
            },
        ),
    ]  # fmt: skip
    for axis, (title, below, across, curves) in zip(axes.flat, lines, strict=False):
        for label, values in curves.items():
            axis.plot(across, values, label=label or None, linewidth=1.2)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(below)
        axis.grid(alpha=0.3)
    axes[2][0].legend(fontsize=8)
    histogram = axes[2][1]
    steps = sorted(outcome.staleness)
    histogram.bar(steps, [outcome.staleness[step] for step in steps])
    histogram.set_title("own steps during an exchange (staleness)", fontsize=10)
    histogram.set_xlabel("steps")
    picture = io.StringIO()
    figure.savefig(picture, format="svg", metadata={"Date": None})  # the same run draws the same page
    pyplot.close(figure)
    drawn = picture.getvalue()
    return drawn[drawn.index("<svg") :]
