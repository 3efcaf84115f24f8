"""What is shown of reproduced experiments? One HTML page that loads nothing, and the same as JSON's types."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from peerd.reproduce.experiment import Judged, NotRun, Plot, Verdict
from peerd.reproduce.runs import Report
from peerd.reproduce.statistics import CONFIDENCE, Estimate
from peerd.simulation.report import page, picture


def as_json(reports: Sequence[Report]) -> dict[str, Any]:
    """All of it: verdicts, figures, tables and the points of the plots."""
    return {"confidence": CONFIDENCE, "experiments": [_one(report) for report in reports]}


def as_html(reports: Sequence[Report]) -> str:
    """The whole page."""
    overview = "".join(
        f'<tr><th><a href="#{each.experiment.name}">{each.experiment.name}</a><td>{html.escape(each.experiment.title)}'
        f"<td{_mark(each.verdict)}>{each.verdict}<td>{each.size}"
        for each in reports
    )
    body = f"<table><tr><th><th>experiment<th>verdict<th>size{overview}</table>"
    return page(
        "peerd reproduce", "What the papers claimed, and what peerd saw", body + "".join(map(_section, reports))
    )


def command(report: Report) -> str:
    """What runs this again."""
    return f"peerd reproduce {report.experiment.name}" + ("" if report.size == "full" else f" --{report.size}")


def shown(judged: Judged) -> str:
    """The figure of a criterion, in a line, or why there is none."""
    figure = judged.figure
    if isinstance(figure, NotRun):
        return figure.reason
    between = ""
    if figure.low < figure.high:  # not of what is exact, nor of what is infinite
        one = figure.count == 1
        between = " (one seed: no interval)" if one else f" [{figure.low:.4g}, {figure.high:.4g}]"
    unsure = (
        "; the interval includes the bound, so this is not sure" if between.startswith(" [") and not judged.sure else ""
    )
    wanted = f" (wanted: {judged.criterion.bound})" if judged.criterion.bound else ""
    return f"{figure.mean:.4g}{between}{wanted}{unsure}"


def met(said: bool | None) -> str:
    """In a word: a `Judged.met`, or a criterion's in the JSON."""
    return {True: "met", False: "not met", None: "not run"}[said]


def rows_of(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The table's columns and cells, of findings or the JSON."""
    columns = list({name: None for row in rows for name in row})
    return columns, [[_cell_text(row.get(name)) for name in columns] for row in rows]


def drawn(plots: Sequence[Plot]) -> str:
    """SVG, two plots a row."""

    def draw(axes: list[Any]) -> None:
        for axis, plot in zip(axes, plots, strict=False):
            _draw(axis, plot)
        for axis in axes[len(plots) :]:
            axis.set_visible(False)

    return picture(math.ceil(len(plots) / 2), draw)


def _draw(axis: Any, plot: Plot) -> None:
    for curve in plot.curves:
        style: dict[str, Any] = {"label": curve.label, "linewidth": 1.2, "marker": "o", "markersize": 3}
        if not curve.line:
            style["linestyle"] = "none"
        if curve.low:
            errors = [
                [_finite(value - low) for value, low in zip(curve.values, curve.low, strict=True)],
                [_finite(high - value) for value, high in zip(curve.values, curve.high, strict=True)],
            ]
            axis.errorbar(curve.across, curve.values, yerr=errors, capsize=2, **style)
        else:
            axis.plot(curve.across, curve.values, **style)
    axis.set_title(plot.title, fontsize=10)
    axis.set_xlabel(plot.across)
    axis.grid(visible=True, alpha=0.3)
    if plot.log_across:
        axis.set_xscale("log")
    if plot.log_values:
        axis.set_yscale("log")
    if len(plot.curves) > 1:
        axis.legend(fontsize=7)


def _finite(length: float) -> float:
    return max(0.0, length) if math.isfinite(length) else 0.0


def seeds_of(seeds: Sequence[int]) -> str:
    """In words, of a report or the JSON."""
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    return f"seeds {', '.join(map(str, seeds))}" if seeds else "no seed"


def _section(report: Report) -> str:
    experiment, findings = report.experiment, report.findings
    judged = "".join(
        f"<tr><td>{html.escape(each.criterion.text)}<td>{html.escape(shown(each))}<td>{met(each.met)}"
        for each in report.judged
    )
    columns, rows = rows_of(findings.rows)
    table = ""
    if rows:
        head = "".join(f"<th>{html.escape(name)}" for name in columns)
        lines = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in row) for row in rows)
        table = f"<h3>All arms, the controls among them</h3><table><tr>{head}{lines}</table>"
    notes = "".join(f"<li>{html.escape(note)}" for note in (*experiment.notes, *findings.notes))
    return (
        f'<h2 id="{experiment.name}">{experiment.name} {html.escape(experiment.title)}: '
        f"<span{_mark(report.verdict)}>{report.verdict}</span></h2>"
        f"<p>{html.escape(experiment.claim)} {html.escape(findings.seen)}</p>"
        f"<p><code>{html.escape(command(report))}</code> {report.date}, {report.cells} cells, "
        f"{seeds_of(report.seeds)}; {html.escape(experiment.paper)}</p>"
        f"<table><tr><th>criterion, fixed before the run<th>mean [{CONFIDENCE:.0%} interval]<th>{judged}</table>"
        f"{drawn(findings.plots) if findings.plots else ''}{table}<ul>{notes}</ul>"
    )


def _mark(said: Verdict) -> str:
    return ' class="bad"' if said is Verdict.NOT_REPRODUCED else ""


def _one(report: Report) -> dict[str, Any]:
    experiment, findings = report.experiment, report.findings
    return {
        "name": experiment.name,
        "title": experiment.title,
        "paper": experiment.paper,
        "claim": experiment.claim,
        "seen": findings.seen,
        "verdict": report.verdict.value,
        "size": report.size.value,
        "command": command(report),
        "date": report.date,
        "seeds": list(report.seeds),
        "cells": report.cells,
        "criteria": [_criterion(each) for each in report.judged],
        "rows": [dict(row) for row in findings.rows],
        "notes": [*experiment.notes, *findings.notes],
        "plots": [asdict(plot) for plot in findings.plots],
    }


def _criterion(judged: Judged) -> dict[str, Any]:
    criterion, figure = judged.criterion, judged.figure
    said: Mapping[str, Any] = asdict(figure) if isinstance(figure, Estimate) else {"not_run": figure.reason}
    return {**asdict(criterion), **said, "met": judged.met, "sure": judged.sure, "shown": shown(judged)}


def _cell_text(value: Any) -> str:
    """Of a table."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)
