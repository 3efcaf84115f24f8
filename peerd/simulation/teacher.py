"""A task without data or torch: a seeded teacher network labels Gaussian inputs, and each node's perceptron learns it.

Everything is drawn from the run's seed: another seed is another task. Training examples are shared out among the nodes
as any task's are (training/tasks/data_partition.py); validation examples are for looks at a run and for choices such as
a learning rate, test examples for its end. All have the same share of labels that say nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from peerd.simulation.options import QUASI_GLOBAL, Learning
from peerd.simulation.perceptron import Examples, Gradient, Inputs, initial, layers, logits, score, tensors
from peerd.simulation.problems import FlatLearner, Learner, Moved, scores_of
from peerd.training.effects import Vector
from peerd.training.parameter_server.optimizer import AdamW, Optimizer, Sgd
from peerd.training.plain_numbers import number, whole
from peerd.training.tasks import TASKS, data_partition
from peerd.transport.errors import UserError

NAME = "teacher"
SIZES = (32, 64, 10)  # of the student: 2762 parameters
SIZE_MAX, LAYERS_MAX = 4096, 8
EXAMPLES = 20_000
NOISE = 0.05  # share of the labels that are drawn anew, evenly from all classes
VALIDATION_EXAMPLES = 2_000
TEST_EXAMPLES = 10_000
HIDDEN = 8  # of the teacher: fewer than the student's, so that it can be learnt
DECAY = 0.5  # the k-th input's deviation is k to the power of minus this: few directions matter much, as in real data
LR, MOMENTUM, BATCH = 0.05, 0.9, 16
LR_ADAMW, WEIGHT_DECAY_ADAMW = 2e-3, 0.01
LR_FLOOR = 0.005  # of the peak, where a cosine ends: see training/tasks/schedule.py


class Teacher:
    """All nodes' perceptrons, and what they are to learn."""

    size_scale = 1.0

    def __init__(
        self, text: str, peers: int, steps: int | None, seed: int, split: str, learning: Learning,
        *, shares_optimizer: bool = False,
    ) -> None:  # fmt: skip
        """`text` is `teacher[:SIZES][:hidden=COUNT][:noise=SHARE][:examples=COUNT]`, as `teacher:32-64-10`.

        With `shares_optimizer` its state is a part of the model. Raises UserError.
        """
        self.sizes, hidden, noise, examples = _parsed(text)
        if learning.schedule == "cosine" and steps is None:
            raise UserError("--schedule cosine: say how many --steps the run has")
        self._peers, self._steps, self._seed, self._learning = peers, steps, seed, learning
        self._shares_optimizer = shares_optimizer
        rng = np.random.default_rng((seed, 2))
        labels = _Labels((self.sizes[0], hidden, self.sizes[-1]), noise, rng)
        self.train, self.validation, self.test = map(labels.draw, (examples, VALIDATION_EXAMPLES, TEST_EXAMPLES))
        self._start = initial(self.sizes, rng)
        self._split = data_partition.parse(split)

    def learner(self, rank: int) -> Learner:
        """See `Problem.learner`."""
        mine = data_partition.of_rank(self._split, self.train.labels, rank, self._peers, self._seed)
        return _Student(
            self.sizes, self._start, self.train, mine, rank, self._seed, self._steps, self._learning,
            shares_optimizer=self._shares_optimizer,
        )  # fmt: skip

    def score(self, models: Sequence[Vector]) -> dict[str, float]:
        """On the test examples: of the averaged model, and the mean and worst of the nodes' own."""
        return scores_of(models, lambda model: score(self.sizes, model, self.test))

    def look(self, model: Vector) -> dict[str, float]:
        """On the validation examples."""
        return score(self.sizes, model, self.validation)


class _Student(FlatLearner):
    def __init__(
        self,
        sizes: Sequence[int],
        start: Vector,
        train: Examples,
        mine: data_partition.Indices,
        rank: int,
        seed: int,
        steps: int | None,
        learning: Learning,
        *,
        shares_optimizer: bool,
    ) -> None:
        self._optimizer, self._peak = _optimizer(learning)
        count = len(start)
        states = np.zeros(self._optimizer.rows * count + 1, np.float32)
        super().__init__(start, tensors(sizes), states=len(states) if shares_optimizer else 0)
        self._parameters = self.x[:count]
        if shares_optimizer:
            states = self.x[count:]
        self._state, self._made = states[:-1].reshape(-1, count), states[-1:]  # steps, which fits: below 2^24
        self._train, self._mine, self._rank, self._seed = train, mine, rank, seed
        self._slopes = np.ones(self.layout.gradients.total, self.x.dtype)  # its flags stay 1
        self._gradient = Gradient(sizes, self._parameters, self._slopes[:count])
        self._cosine_steps = steps if learning.schedule == "cosine" else None
        self._size = learning.batch or BATCH
        self._batches: Iterator[data_partition.Indices] = iter(())
        self._next = -1
        self._loss = math.nan
        self._samples = 0  # of the last gradient
        self._ratio = 1.0

    @property
    def rate(self) -> float:
        """See `Learner`."""
        return self._peak * self._ratio

    @property
    def samples(self) -> float:
        """See `Learner`."""
        return float(self._samples)

    def gradient(self, number: int) -> Vector:
        """See `Learner`."""
        if number != self._next:
            self._batches = data_partition.batches(self._mine, self._size, self._rank, self._seed, number)
        self._next = number + 1
        batch = next(self._batches)
        self._samples = len(batch)
        self._loss = self._gradient(Examples(self._train.inputs[batch], self._train.labels[batch]))
        self._schedule(number)
        return self._slopes

    def descend(self, number: int, gradient: Vector | None) -> Moved:
        """See `Learner`."""
        self._schedule(number)  # whoever has taken over a model since its gradient is at another step
        if gradient is not None:
            self._made += 1
            x = self._parameters
            self._optimizer.step(x, gradient[: len(x)], self._state, self.rate, int(self._made[0]))
        return Moved(self._loss, self._ratio)

    def _schedule(self, number: int) -> None:
        if self._cosine_steps is not None:
            done = min(1.0, number / self._cosine_steps)
            self._ratio = LR_FLOOR + (1 - LR_FLOOR) * 0.5 * (1 + math.cos(math.pi * done))


def _optimizer(learning: Learning) -> tuple[Optimizer, float]:
    if learning.optimizer == "adamw":
        decay = WEIGHT_DECAY_ADAMW if learning.weight_decay is None else learning.weight_decay
        return AdamW(weight_decay=decay), learning.lr or LR_ADAMW
    if learning.optimizer == QUASI_GLOBAL:
        raise UserError(f"--optimizer {QUASI_GLOBAL}: needs a task of torch: --problem {', '.join(TASKS)}")
    momentum = MOMENTUM if learning.momentum is None else learning.momentum
    return Sgd(momentum, learning.weight_decay or 0.0, learning.optimizer == "nesterov"), learning.lr or LR


class _Labels:
    """What the teacher says, each class about as often as the others."""

    def __init__(self, sizes: Sequence[int], noise: float, rng: np.random.Generator) -> None:
        self._sizes, self._noise, self._rng = sizes, noise, rng
        self._teacher = initial(sizes, rng)
        said = self._says(self._inputs(TEST_EXAMPLES))
        self._mean, self._deviation = said.mean(axis=0), said.std(axis=0) + np.float32(1e-6)

    def draw(self, count: int) -> Examples:
        rng = self._rng
        inputs = self._inputs(count)
        labels = ((self._says(inputs) - self._mean) / self._deviation).argmax(axis=1).astype(np.int64)
        wrong = rng.random(count) < self._noise
        labels[wrong] = rng.integers(0, self._sizes[-1], int(wrong.sum()))
        return Examples(inputs, labels)

    def _inputs(self, count: int) -> Inputs:
        inputs = self._rng.standard_normal((count, self._sizes[0]), dtype=np.float32)
        inputs *= np.arange(1, self._sizes[0] + 1, dtype=np.float32) ** -DECAY
        return inputs

    def _says(self, inputs: Inputs) -> Inputs:
        return logits(layers(self._sizes, self._teacher), inputs)


def _parsed(text: str) -> tuple[tuple[int, ...], int, float, int]:
    """The student's sizes, the teacher's, the labels' noise, the training examples. Raises UserError."""
    sizes: tuple[int, ...] = SIZES
    hidden, noise, examples = HIDDEN, NOISE, EXAMPLES
    try:
        for part in text.split(":")[1:]:
            key, equals, value = part.partition("=")
            if not equals:
                sizes = tuple(whole(size) for size in part.split("-"))
            elif key == "hidden":
                hidden = whole(value)
            elif key == "noise":
                noise = number(value)
            elif key == "examples":
                examples = whole(value)
            else:
                raise ValueError(key)
        in_bounds = all(1 <= size <= SIZE_MAX for size in (*sizes, hidden)) and 3 <= len(sizes) <= LAYERS_MAX
        if not (in_bounds and sizes[-1] >= 2 and 0 <= noise <= 1 and 1 <= examples <= 10_000_000):
            raise ValueError(text)
    except ValueError:
        raise UserError(
            f"--problem {text}: wanted teacher[:SIZES][:hidden=COUNT][:noise=SHARE][:examples=COUNT], as "
            f"teacher:32-64-10:noise=0.05:examples=20000, with 3 to {LAYERS_MAX} sizes of at most {SIZE_MAX}"
        ) from None
    return sizes, hidden, noise, examples
