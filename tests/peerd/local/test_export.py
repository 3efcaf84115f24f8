"""A flat vector as a file of named tensors: what the trainer has, read back by safetensors."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from peerd.local import export
from peerd.local.export import write_safetensors
from peerd.training.model.flat import FlatModel
from peerd.transport.errors import UserError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.first = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.low = nn.Linear(2, 2, dtype=torch.bfloat16)
        self.sixteen = nn.Linear(2, 1, dtype=torch.float16)
        self.high = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))
        self.tied = nn.Linear(3, 2)
        self.tied.weight = self.first.weight
        self.names = nn.ModuleDict({"a buffer": nn.Linear(1, 1), "x frozen float32 3": nn.Linear(1, 1)})


def test_every_trained_tensor_comes_back(tmp_path: Path) -> None:
    model = Net()
    flat = FlatModel(model)
    path = tmp_path / "model.safetensors"
    size = write_safetensors(path, flat.gather().numpy(), flat.tensors)
    assert path.stat().st_size == size
    found = load_file(path)
    state = model.state_dict()
    left_out = {"frozen", "norm.num_batches_tracked", "tied.weight"}
    assert found.keys() == state.keys() - left_out
    for name, tensor in found.items():
        assert tensor.shape == state[name].shape
        assert tensor.dtype == (torch.float32 if state[name].dtype == torch.bfloat16 else state[name].dtype), name
        assert torch.equal(tensor.float(), state[name].float()), name
    model.load_state_dict(found, strict=False)
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_who_may_read_it_is_for_the_umask_to_say(tmp_path: Path, mask: int, mode: int) -> None:
    flat = FlatModel(nn.Linear(2, 1))
    path = tmp_path / "model.safetensors"
    before = os.umask(mask)
    try:
        write_safetensors(path, flat.gather().numpy(), flat.tensors)
        assert path.stat().st_mode & 0o777 == mode
        path.chmod(0o640)
        write_safetensors(path, flat.gather().numpy(), flat.tensors)
        assert path.stat().st_mode & 0o777 == 0o640  # a file that is written again stays as its owner made it
    finally:
        os.umask(before)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed(tmp_path: Path, there: bool) -> None:
    flat = FlatModel(nn.Linear(2, 1))
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "kept.safetensors", tmp_path / "model.safetensors"
    if there:
        target.write_text("old")
    link.symlink_to("elsewhere/kept.safetensors")
    write_safetensors(link, flat.gather().numpy(), flat.tensors)
    assert link.is_symlink()
    assert load_file(target).keys() == {"weight", "bias"}
    assert os.listdir(target.parent) == [target.name]


@settings(max_examples=30, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=3), st.booleans()), min_size=1, max_size=5))
def test_any_shapes_in_any_order(tmp_path: Path, shapes: list[tuple[list[int], bool]]) -> None:
    """Buffers come after the parameters in the vector, wherever their lines are."""
    lines: list[str] = []
    parameters: dict[str, npt.NDArray[np.float32]] = {}
    buffers: dict[str, npt.NDArray[np.float32]] = {}
    for index, (shape, is_buffer) in enumerate(shapes):
        text = "x".join(map(str, shape)) or "scalar"
        lines.append(f"t{index} float32 {text}" + (" buffer" if is_buffer else ""))
        (buffers if is_buffer else parameters)[f"t{index}"] = np.full(shape, index, np.float32)
    vector = np.concatenate([tensor.reshape(-1) for tensor in (*parameters.values(), *buffers.values())])
    write_safetensors(tmp_path / "m", vector, lines)
    found = load_file(tmp_path / "m")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in {**parameters, **buffers}.items()
    }


def test_what_cannot_be_written_is_one_line_and_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write .*model.safetensors: File too large$"):
            write_safetensors(path, np.zeros(1 << 20, np.float32), ["w float32 1048576"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing, folder = tmp_path / "missing", tmp_path / "folder"
    folder.mkdir()
    for path, cause in (
        (missing / "m", f"no such folder: {missing}"),
        (folder, "it is a folder"),
    ):
        with pytest.raises(UserError, match=f"^cannot write {path}: {cause}$"):
            write_safetensors(path, np.zeros(1, np.float32), ["w float32 1"])
    monkeypatch.setattr(os, "access", lambda *_: False)  # the tests may run as root, who may write anywhere
    with pytest.raises(UserError, match=f"^cannot write {folder / 'm'}: the folder {folder} is not writable$"):
        write_safetensors(folder / "m", np.zeros(1, np.float32), ["w float32 1"])
    assert not list(folder.iterdir())


def test_two_exports_to_one_path_at_once_are_each_whole(tmp_path: Path) -> None:
    path, failed = tmp_path / "model.safetensors", []
    both = threading.Barrier(2)

    def export(value: float) -> None:
        both.wait()
        for _ in range(30):
            try:
                write_safetensors(path, np.full(1000, value, np.float32), ["w float32 1000"])
            except UserError as error:
                failed.append(str(error))

    threads = [threading.Thread(target=export, args=[value]) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(set(load_file(path)["w"].tolist())) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_float32_values_are_written_from_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of each would be a model more in the daemon."""
    values = np.arange(8, dtype=np.float32)
    shares: list[bool] = []

    def save(named: dict[str, npt.NDArray[np.float32]], path: Path, **_: object) -> None:
        shares.extend(np.shares_memory(each, values) for each in named.values())
        path.touch()

    monkeypatch.setattr(export, "save_file", save)
    write_safetensors(tmp_path / "model.safetensors", values, ["a float32 2x3", "b bfloat16 2"])
    assert shares == [True, True]
