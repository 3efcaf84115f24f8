"""What a model has beside what is shared: put together again it is the model, to the bit and in its own types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from peerd.local.export import write_safetensors
from peerd.trainer.complete import write_complete
from peerd.trainer.rest import FrozenBase, Incomplete, Rest, _sum, read
from peerd.training.model.flat import FlatModel
from peerd.training.model.published import PART_ON_CPU
from peerd.transport.errors import UserError


class Part(nn.Module):
    """A parameter and buffers of any kind."""

    def __init__(self, dtype: torch.dtype, *, frozen: bool, size: int, persistent: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, 2).to(dtype), requires_grad=not frozen)
        self.register_buffer("count", torch.arange(size))
        self.register_buffer("mask", torch.full((size,), -torch.inf))
        self.register_buffer("mean", torch.randn(size), persistent=persistent)


KINDS = st.tuples(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.booleans(),
    st.integers(0, 3),
    st.booleans(),
)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(KINDS, min_size=1, max_size=3), st.booleans())
def test_a_complete_export_is_the_model(tmp_path: Path, kinds: list[Any], tied: bool) -> None:
    parts = [Part(dtype, frozen=frozen, size=size, persistent=kept) for dtype, frozen, size, kept in kinds]
    model = nn.ModuleList([nn.Linear(2, 1), *parts])
    if tied:
        again = nn.Module()
        again.weight, again.base = model[0].weight, parts[0].weight
        model.append(again)
    for path in tmp_path.iterdir():
        path.unlink()
    flat = FlatModel(model)
    write_safetensors(tmp_path / "shared.safetensors", flat.gather().numpy(), flat.tensors)
    Rest(model, flat.pieces, flat.signature).write(tmp_path)
    whole = tmp_path / "whole.safetensors"
    count, missing = write_complete(whole, tmp_path / "shared.safetensors", tmp_path, flat.signature[:16])
    found, expected = load_file(whole), model.state_dict()
    assert missing == []
    assert count == len(expected)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    model.load_state_dict(found, strict=True)


def test_what_the_checkpoint_has_is_newer_than_what_there_was_at_first(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].weight.requires_grad_(False)
    flat = FlatModel(model)
    rest = Rest(model, flat.pieces, flat.signature)
    model(torch.randn(4, 2))
    rest.write(tmp_path)
    shared = {piece.name: piece.held.detach() for piece in flat.pieces}
    moved = {"0.weight": torch.full((2, 2), 7.0), "1.num_batches_tracked": torch.tensor(9)}
    kept = read(tmp_path, flat.signature)
    assert kept.complete(shared, {})["1.num_batches_tracked"] == 0  # as it was when described
    found = kept.complete(shared, moved)
    assert torch.equal(found["0.weight"], moved["0.weight"])
    assert found["1.num_batches_tracked"] == 9


@pytest.mark.parametrize("how", ["missing", "damaged", "another model's"])
def test_what_cannot_be_complete_is_told(tmp_path: Path, how: str) -> None:
    model = nn.Linear(2, 2)
    flat = FlatModel(model)
    Rest(model, flat.pieces, flat.signature).write(tmp_path)
    (path,) = tmp_path.glob("rest-*")
    if how == "missing":
        path.unlink()
    elif how == "damaged":
        path.write_bytes(path.read_bytes()[:20])
    signature = "0" * 64 if how == "another model's" else flat.signature
    write_safetensors(tmp_path / "shared.safetensors", flat.gather().numpy(), flat.tensors)
    with pytest.raises(UserError, match=r"^the model cannot be complete: .*rest-.*; without --complete "):
        write_complete(tmp_path / "whole.safetensors", tmp_path / "shared.safetensors", tmp_path, signature)
    assert not (tmp_path / "whole.safetensors").exists()


def frozen_base(tmp_path: Path) -> tuple[Rest, str, Path]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    flat = FlatModel(model)
    rest = Rest(model, flat.pieces, flat.signature)
    rest.write(tmp_path)
    (path,) = tmp_path.glob("rest-*")
    return rest, flat.signature, path


@pytest.mark.parametrize("left", [0, 20, -1], ids=["nothing", "a beginning", "all but a byte"])
def test_a_file_that_is_not_whole_is_written_anew(tmp_path: Path, left: int) -> None:
    rest, signature, path = frozen_base(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:left])
    rest.write(tmp_path)
    assert path.read_bytes() == whole
    read(tmp_path, signature)


def test_values_that_are_not_what_was_written_are_refused(tmp_path: Path) -> None:
    _, signature, path = frozen_base(tmp_path)
    path.write_bytes(path.read_bytes()[:-4] + bytes(4))
    with pytest.raises(Incomplete, match=r"rest-.* is not what was written; delete it, and the next start"):
        read(tmp_path, signature)


def test_a_name_of_which_only_the_script_knows_what_it_holds(tmp_path: Path) -> None:
    class Renamed(nn.Linear):
        def state_dict(self, *arguments: Any, **options: Any) -> Any:
            return {f"my.{name}": value + 0 for name, value in super().state_dict(*arguments, **options).items()}

    model = Renamed(2, 2)
    flat = FlatModel(model)
    Rest(model, flat.pieces, flat.signature).write(tmp_path)
    with pytest.raises(Incomplete, match=r"my\.weight is in no file of this node"):
        read(tmp_path, flat.signature).complete({}, {})


def test_the_file_of_an_earlier_model_goes(tmp_path: Path) -> None:
    for width in (2, 3):
        flat = FlatModel(model := nn.Linear(2, width))
        for _ in range(2):
            Rest(model, flat.pieces, flat.signature).write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"rest-{flat.signature[:16]}.safetensors"]


class Sums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes of how many values there are sums."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.of: list[int] = []

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if "sum" in str(operation):
            self.of.append(arguments[0].numel())
        return operation(*arguments, **(named or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_a_frozen_base_is_summed_in_parts(dtype: torch.dtype) -> None:
    """Of whole tensors torch made int64: of bfloat16 weights four times their memory, on their GPU."""
    model = nn.Linear(2, 2)
    model.base = nn.Parameter(torch.arange(3 * PART_ON_CPU + 5).to(dtype), requires_grad=False)
    with Sums() as sums:
        base = FrozenBase(model)
    assert sums.of == 3 * [PART_ON_CPU] + [5]
    assert base.unchanged(model) == {"base"}
    model.base.data[-1] = 1
    assert not base.unchanged(model)


def test_the_sum_of_a_files_tensor_is_what_it_was() -> None:
    """Of all at once, modulo 2^64: files of before are read."""
    for values in (
        torch.full((PART_ON_CPU + 3,), -1e300, dtype=torch.float64),
        torch.randn(7).bfloat16(),
        torch.ones(0),
    ):
        bits = values.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[values.itemsize])
        assert _sum(values) == int(bits.sum())


@pytest.mark.parametrize(
    ("change", "stays"),
    [
        ("nothing", True),
        ("in place", False),
        ("through .data", False),
        ("another tensor behind it", False),
        ("one element", False),
        ("it is trained now", False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_a_frozen_parameter_that_changes_is_no_base(change: str, stays: bool, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].bias = nn.Parameter(torch.ones(5).to(dtype), requires_grad=False)
    model.append(nn.Module())
    model[2].tied = model[1].bias
    base = FrozenBase(model)
    with torch.no_grad():
        match change:
            case "in place":
                model[1].bias.mul_(2)
            case "through .data":
                model[1].bias.data.mul_(3)
            case "another tensor behind it":
                model[1].bias.data = 2 * model[1].bias.data
            case "one element":
                model[1].bias[4] = 9
            case "it is trained now" if dtype != torch.uint8:
                model[1].bias.requires_grad_(True)
            case "it is trained now":
                stays = True
    assert base.unchanged(model) == ({"1.bias", "2.tied"} if stays else set())
