"""A multilayer perceptron in numpy, one flat vector, with its gradient by hand: thousands of steps a second.

h = relu(x W + b) for each hidden layer;  logits = h W + b;  loss = mean cross-entropy
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from peerd.training.effects import Vector

Inputs = npt.NDArray[np.floating[Any]]
"""Shape (samples, inputs)."""
Labels = npt.NDArray[np.int64]
"""Shape (samples,)."""


ONE_THREAD = 200_000
"""Multiplications of a matrix product that BLAS leaves to one thread: runs share the cores, and threads that wait for
each other took twenty times as long; nor do the bits then depend on how many cores there are."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Inputs and the class of each."""

    inputs: Inputs
    labels: Labels


def tensors(sizes: Sequence[int]) -> tuple[int, ...]:
    """Where each weight matrix and each bias ends in the flat vector; the last is the number of parameters."""
    ends, end = [], 0
    for into, out in pairwise(sizes):
        ends += [end + into * out, end + into * out + out]
        end = ends[-1]
    return tuple(ends)


def layers(sizes: Sequence[int], flat: Vector) -> list[tuple[Vector, Vector]]:
    """Views of a flat vector: W, shape (in, out), and b, shape (out,), of each layer."""
    ends = (0, *tensors(sizes))
    return [
        (flat[ends[2 * at] : ends[2 * at + 1]].reshape(into, out), flat[ends[2 * at + 1] : ends[2 * at + 2]])
        for at, (into, out) in enumerate(pairwise(sizes))
    ]


def initial(sizes: Sequence[int], rng: np.random.Generator) -> Vector:
    """He's initial weights (2015, arXiv:1502.01852), float32; biases are 0."""
    flat: Vector = np.zeros(tensors(sizes)[-1], np.float32)
    for weights, _ in layers(sizes, flat):
        weights[:] = rng.standard_normal(weights.shape) * np.sqrt(2 / len(weights))
    return flat


def logits(model: Sequence[tuple[Vector, Vector]], inputs: Inputs) -> Inputs:
    """Of each class, shape (samples, classes)."""
    for weights, bias in model[:-1]:
        inputs = inputs @ weights
        inputs += bias
        np.maximum(inputs, 0, out=inputs)
    weights, bias = model[-1]
    out: Inputs = inputs @ weights
    out += bias
    return out


class Gradient:
    """The gradient of the mean cross-entropy of a batch."""

    def __init__(self, sizes: Sequence[int], flat: Vector, out: Vector) -> None:
        """At the model that `flat`, shape (parameters,), holds at each call; `out`, of that shape, is overwritten."""
        self._model = layers(sizes, flat)
        self._slopes = layers(sizes, out)

    def __call__(self, batch: Examples) -> float:
        """Fill `out`; returns the loss."""
        model, slopes = self._model, self._slopes
        rows = np.arange(len(batch.labels))
        kept = [batch.inputs]
        for weights, bias in model[:-1]:
            hidden = kept[-1] @ weights
            hidden += bias
            kept.append(np.maximum(hidden, 0, out=hidden))
        error = kept[-1] @ model[-1][0]
        error += model[-1][1]
        error -= error.max(axis=1, keepdims=True)
        right = error[rows, batch.labels]
        np.exp(error, out=error)
        sums = error.sum(axis=1)
        loss = float((np.log(sums) - right).mean())
        error /= sums[:, None]
        error[rows, batch.labels] -= 1
        error *= 1 / len(rows)
        for at in range(len(model) - 1, -1, -1):
            weights, bias = slopes[at]
            np.matmul(kept[at].T, error, out=weights)
            error.sum(axis=0, out=bias)
            if at:
                error = error @ model[at][0].T
                error *= kept[at] > 0
        return loss


def score(sizes: Sequence[int], flat: Vector, examples: Examples) -> dict[str, float]:
    """`loss`, the mean cross-entropy, and `accuracy`."""
    model = layers(sizes, flat.astype(examples.inputs.dtype, copy=False))
    rows = max(1, ONE_THREAD // max(into * out for into, out in pairwise(sizes)))
    losses, right = [], 0
    for start in range(0, len(examples.labels), rows):
        found, labels = logits(model, examples.inputs[start : start + rows]), examples.labels[start : start + rows]
        found -= found.max(axis=1, keepdims=True)
        losses.append(np.log(np.exp(found).sum(axis=1)) - found[np.arange(len(found)), labels])
        right += int((found.argmax(axis=1) == labels).sum())
    return {"loss": float(np.concatenate(losses).mean()), "accuracy": right / len(examples.labels)}
