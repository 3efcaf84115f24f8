"""How is an experiment run? Its cells in a few processes, each kept as it ends, and judged when all are there."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from peerd.reproduce.cells import CannotKeep, CellStore
from peerd.reproduce.experiment import (
    Cell,
    Experiment,
    Findings,
    Judged,
    NotRun,
    Result,
    Size,
    Verdict,
    judge,
    verdict,
)
from peerd.simulation.laboratory import as_they_end, processes
from peerd.transport.errors import UserError


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an experiment is."""

    name: str
    done: int  # cells
    of: int  # cells that are known of; a study asks for more when it has chosen learning rates
    left_s: float | None  # for these; None: nothing has been measured yet


@dataclass(frozen=True, slots=True)
class Report:
    """An experiment that was run."""

    experiment: Experiment
    size: Size
    date: str  # on which the cells were measured: a day, or the first and the last
    seeds: Sequence[int]
    cells: int
    verdict: Verdict
    judged: Sequence[Judged]
    findings: Findings


Tell = Callable[[Progress], None]


def run_experiment(
    experiment: Experiment, size: Size, store: CellStore, jobs: int, tell: Tell = lambda progress: None
) -> Report:
    """Run what is not yet kept. What the user can mend makes it NOT RUN, with the reason; whatever else is a bug."""
    with processes(1 if experiment.alone else jobs) as pool:
        runner = _Runner(experiment, store, pool, tell)
        try:
            findings = experiment.study(size, runner)
        except CannotKeep:
            raise
        except UserError as error:
            missing = NotRun(str(error))
            figures = {criterion.key: missing for criterion in experiment.criteria}
            findings = Findings(f"It was not run: {error}.", figures, [])
    judged = [judge(criterion, findings.figures[criterion.key]) for criterion in experiment.criteria]
    return Report(
        experiment, size, _days(runner.dates), sorted(runner.seeds), runner.done, verdict(judged), judged, findings
    )


def _days(dates: Collection[str]) -> str:
    """From the first to the last; today where nothing was measured."""
    first, last = (min(dates), max(dates)) if dates else [time.strftime("%Y-%m-%d", time.gmtime())] * 2
    return first if first == last else f"{first} to {last}"


class _Runner:
    """What a study calls to have its cells measured."""

    def __init__(self, experiment: Experiment, store: CellStore, pool: ProcessPoolExecutor | None, tell: Tell) -> None:
        self.done = 0
        self.seeds: set[int] = set()
        self.dates: set[str] = set()
        self._of = 0
        self._measured = 0
        self._began = time.monotonic()
        self._experiment = experiment
        self._store = store
        self._pool = pool
        self._tell = tell

    def __call__(self, cells: Sequence[Cell]) -> list[Result]:
        experiment, store = self._experiment, self._store
        self._of += len(cells)
        self.seeds |= {cell.seed for cell in cells}
        found: dict[int, Result] = {}
        for number, cell in enumerate(cells):
            if (kept := store.find(experiment, cell)) is not None:
                found[number] = kept.result
                self.dates.add(kept.date)
                self.done += 1
        self._say()
        missing = [number for number in range(len(cells)) if number not in found]
        for place, result in as_they_end(self._pool, experiment.measure, [cells[number] for number in missing]):
            number = missing[place]
            found[number] = result
            self.dates.add(store.keep(experiment, cells[number], result).date)
            self.done += 1
            self._measured += 1
            self._say()
        return [found[number] for number in range(len(cells))]

    def _say(self) -> None:
        each_s = (time.monotonic() - self._began) / self._measured if self._measured else None
        left = self._of - self.done
        self._tell(Progress(self._experiment.name, self.done, self._of, each_s * left if each_s is not None else None))
