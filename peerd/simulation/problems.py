"""What does a simulated swarm train? A quadratic, a large model's bytes, or a real task with real torch models.

Each node has a `Learner`: the trainer's half of production, without its process. All three kinds run under the
same node, modes and codecs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector
from peerd.training.plain_numbers import number
from peerd.transport.errors import UserError

STEP_MIN_S, STEP_MAX_S = 1e-4, 1e6
TRACE_CHARACTERS = 10_000_000  # the most that is read of a file of step times
SPREAD, NOISE = 0.3, 0.2  # deviations in `Quadratic`: of each value of the c_i, of each gradient's; the optimum's is 4
MOVE = 0.003  # in `BytesOnly`: ||x after a step - x|| / ||x|| in the first steps
SURROGATE_VALUES = 4096  # stand for a large model: a codec's bytes a value are the same on as many


@dataclass(frozen=True, slots=True)
class Moved:
    """What one optimizer step did."""

    loss: float
    lr_ratio: float  # learning rate / the largest so far


class Learner(Protocol):
    """One node's model and how it moves."""

    layout: Layout

    def step(self, number: int) -> Moved:
        """Optimizer step `number`: `descend` with its `gradient`."""
        ...

    @property
    def rate(self) -> float:
        """The learning rate of its next step."""
        ...

    def gradient(self, number: int) -> Vector:
        """What that step would follow, as `Layout.gradients` has it: of its batch, at the model as it is."""
        ...

    @property
    def samples(self) -> float:
        """Of how many the last `gradient` is the mean; 1 of one that has no samples."""
        ...

    def descend(self, number: int, gradient: Vector | None) -> Moved:
        """Optimizer step `number`, with this gradient of the same shape; without any the model stays."""
        ...

    def change(self) -> float:
        """||x - x at the last publish|| of the parameters, without corrections."""
        ...

    def publish(self) -> Vector:
        """A copy of `values`, from which `change` measures now."""
        ...

    def values(self) -> Vector:
        """The model as it is, and behind it `Layout.states` of the optimizer; read only."""
        ...

    def add(self, correction: Vector) -> None:
        """x += correction."""
        ...

    def load(self, values: Vector) -> None:
        """x = values."""
        ...


class Problem(Protocol):
    """What all nodes of a swarm train."""

    size_scale: float  # bytes on the line for each byte of payload

    def learner(self, rank: int) -> Learner:
        """The learner of one node; every one starts from the same model."""
        ...

    def score(self, models: Sequence[Vector]) -> dict[str, float]:
        """How good the nodes' models are."""
        ...

    def look(self, model: Vector) -> dict[str, float]:
        """How good one model, float64, is by a quick look: `loss`, and `accuracy` where there is such a thing."""
        ...


class FlatLearner:
    """A learner whose model is one numpy vector, without what it learns."""

    def __init__(self, start: Vector, tensors: tuple[int, ...] = (), states: int = 0) -> None:
        """`start`, shape (parameters,), is copied; `tensors` and `states`, which begin as zeros, are a Layout's."""
        self.layout = Layout(len(start), len(start) + states, tensors=tensors, states=states)
        self.x = np.concatenate([start, np.zeros(states, start.dtype)])
        self._base = self.x.copy()

    def change(self) -> float:
        """See `Learner`."""
        parameters = self.layout.parameters
        difference = self.x[:parameters] - self._base[:parameters]
        return math.sqrt(float(difference @ difference))

    def publish(self) -> Vector:
        """See `Learner`."""
        np.copyto(self._base, self.x)
        return self.x.copy()

    def values(self) -> Vector:
        """See `Learner`."""
        return self.x

    def add(self, correction: Vector) -> None:
        """See `Learner`."""
        self.x += correction
        self._base += correction

    def load(self, values: Vector) -> None:
        """See `Learner`."""
        np.copyto(self.x, values)
        np.copyto(self._base, values)

    @property
    def rate(self) -> float:
        """See `Learner`: 1 of one whose gradient is the step."""
        return 1.0

    @property
    def samples(self) -> float:
        """See `Learner`."""
        return 1.0

    def step(self, number: int) -> Moved:
        """See `Learner`."""
        return self.descend(number, self.gradient(number))

    def gradient(self, number: int) -> Vector:
        """See `Learner`."""
        raise NotImplementedError

    def descend(self, number: int, gradient: Vector | None) -> Moved:
        """See `Learner`."""
        raise NotImplementedError


class Quadratic:
    """Node i holds f_i(x) = ||x - c_i||^2 / 2 and sees noisy gradients; the swarm's optimum is the mean of all c_i.

    float64, so that what is conserved can be checked to rounding.
    """

    size_scale = 1.0

    def __init__(self, seed: int, values: int = 64, lr: float = 0.05) -> None:
        self._seed = seed
        self._values = values
        self._lr = lr
        self._optimum = np.random.default_rng((seed, 0)).normal(size=values) * 4

    def learner(self, rank: int) -> Learner:
        """See `Problem.learner`."""
        rng = np.random.default_rng((self._seed, 1, rank))
        target = self._optimum + SPREAD * rng.normal(size=self._values)
        return _Descent(np.ones(self._values), target, self._lr, rng)

    def score(self, models: Sequence[Vector]) -> dict[str, float]:
        """`error`: distance of the averaged model from the optimum of infinitely many nodes, relative."""
        mean = np.mean(models, axis=0)
        return {"error": float(np.linalg.norm(mean - self._optimum) / np.linalg.norm(self._optimum))}

    def look(self, model: Vector) -> dict[str, float]:
        """`loss`: what no node's noise and no node's own share has a part in."""
        return {"loss": float(np.sum((model - self._optimum) ** 2)) / 2}


class _Descent(FlatLearner):
    def __init__(self, start: Vector, target: Vector, lr: float, rng: np.random.Generator) -> None:
        super().__init__(start)
        self._target = target
        self._lr = lr
        self._rng = rng
        self._loss = math.nan

    @property
    def rate(self) -> float:
        return self._lr

    def gradient(self, number: int) -> Vector:
        slope = self.x - self._target
        self._loss = float(slope @ slope) / 2
        slope += NOISE * self._rng.normal(size=len(slope))
        return slope

    def descend(self, number: int, gradient: Vector | None) -> Moved:
        if gradient is not None:
            self.x -= self._lr * gradient
        return Moved(self._loss, 1.0)


class BytesOnly:
    """A model too large to hold, for what it costs: a few thousand values move as far as its would, and stand for all.

    Every node walks at random, by a share of its norm each step, which falls towards the end as a learning rate does.
    The mode, the trigger and the codec are the real ones; what they send is weighed at the size of the real model.
    There is no accuracy to report.
    """

    def __init__(self, seed: int, parameters: int, steps: int) -> None:
        if parameters < SURROGATE_VALUES:
            raise UserError(
                f"--parameters {parameters}: at least {SURROGATE_VALUES}; for less, simulate the model itself"
            )
        self.size_scale = parameters / SURROGATE_VALUES
        self._seed = seed
        self._steps = steps

    def learner(self, rank: int) -> Learner:
        """See `Problem.learner`."""
        start = np.random.default_rng((self._seed, 0)).normal(size=SURROGATE_VALUES).astype(np.float32)
        return _Walk(start, self._steps, np.random.default_rng((self._seed, 1, rank)))

    def score(self, models: Sequence[Vector]) -> dict[str, float]:
        """Nothing: nothing was learnt."""
        return {}

    def look(self, model: Vector) -> dict[str, float]:
        """Nothing either."""
        return {}


class _Walk(FlatLearner):
    def __init__(self, start: Vector, steps: int, rng: np.random.Generator) -> None:
        super().__init__(start)
        self._length = MOVE * float(np.linalg.norm(start)) / math.sqrt(len(start))
        self._steps = steps
        self._rng = rng
        self._ratio = 1.0

    def gradient(self, number: int) -> Vector:
        self._ratio = math.sqrt(max(0.0, 1 - number / max(1, self._steps)))
        return (-self._length * self._ratio) * self._rng.standard_normal(len(self.x), dtype=np.float32)

    def descend(self, number: int, gradient: Vector | None) -> Moved:
        if gradient is not None:
            self.x -= gradient
        return Moved(math.nan, max(0.05, self._ratio))


class Compute:
    """How long a step takes, drawn anew each time: `fixed:S`, `lognormal:MEDIAN:SIGMA` or `trace:FILE`."""

    def __init__(self, text: str) -> None:
        """Raises UserError."""
        kind, _, rest = text.partition(":")
        self._sigma, self._trace = 0.0, [1.0]
        try:
            match kind:
                case "fixed":
                    self._median = number(rest)
                case "lognormal":
                    median, sigma = rest.split(":")
                    self._median, self._sigma = number(median), number(sigma)
                case "trace":
                    with open(rest, encoding="utf-8") as file:
                        lines = file.read(TRACE_CHARACTERS + 1)
                    if len(lines) > TRACE_CHARACTERS:
                        raise ValueError("too long")
                    self._median, self._trace = (
                        1.0,
                        [number(line.strip()) for line in lines.splitlines() if line.strip()],
                    )
                case _:
                    raise ValueError(kind)
            seconds = [self._median, *self._trace]
            in_bounds = all(STEP_MIN_S <= each < STEP_MAX_S for each in seconds)
            if not (in_bounds and 0 <= self._sigma <= 3 and self._trace):
                raise ValueError(text)
        except OSError as error:
            raise UserError(f"--compute {text}: cannot read {rest}: {error.strerror}") from None
        except ValueError:
            raise UserError(
                f"--compute {text}: wanted fixed:SECONDS, lognormal:MEDIAN:SIGMA (at most 3), "
                "or trace:FILE with one number of seconds a line, "
                f"each from {STEP_MIN_S:g} to {STEP_MAX_S:g}, and {TRACE_CHARACTERS:,} characters at most"
            ) from None

    @property
    def median_s(self) -> float:
        """Of a step."""
        return self._median * sorted(self._trace)[len(self._trace) // 2]

    def draw(self, rng: random.Random) -> float:
        """Seconds."""
        scale = math.exp(rng.gauss(0.0, self._sigma)) if self._sigma else 1.0
        trace = self._trace[rng.randrange(len(self._trace))] if len(self._trace) > 1 else self._trace[0]
        return self._median * scale * trace


def scores_of(models: Sequence[Vector], score: Callable[[Vector], dict[str, float]]) -> dict[str, float]:
    """Accuracy and loss of the averaged model, and the mean and worst of the nodes' own."""
    averaged = score(np.mean(models, axis=0, dtype=np.float64))
    scores = [score(model) for model in models]
    accuracies = [one["accuracy"] for one in scores]
    return {
        "accuracy": averaged["accuracy"],
        "loss": averaged["loss"],
        "accuracy_mean": sum(accuracies) / len(accuracies),
        "accuracy_worst": min(accuracies),
        "loss_mean": sum(one["loss"] for one in scores) / len(scores),
    }


def is_of_use(model: Vector) -> bool:
    """Whether its squared norm is a number to float32, in which real nodes train; simulated ones may use float64."""
    exact = np.asarray(model, dtype=np.float64)
    return bool(exact @ exact <= np.finfo(np.float32).max)


def mean_and_distance(models: Sequence[Vector]) -> tuple[Vector, float]:
    """The averaged model, and the root mean square distance from it over its norm; nan of models that diverged."""
    stacked = np.asarray(models, dtype=np.float64)
    mean = stacked.mean(axis=0)
    norm = float(np.linalg.norm(mean))
    spread = float(np.sqrt(((stacked - mean) ** 2).sum(axis=1).mean()))
    return mean, spread / norm if norm != 0 else 0.0
