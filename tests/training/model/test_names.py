"""A model has one set of names, whatever it is wrapped in; and names say what stays private."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from peerd.training.model.flat import FlatModel
from peerd.training.model.names import patterns_of, plain_keys


class Model(nn.Module):
    """With a submodule that is called as a wrapper calls what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.module: nn.Module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.head = nn.Linear(2, 2)
        self.tied = nn.Linear(2, 2, bias=False)
        self.tied.weight = self.head.weight


class Net(nn.Module):
    """A user's own class of the name that torch has."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Model()


Net.__name__ = Net.__qualname__ = "DataParallel"


def compiled(model: nn.Module) -> nn.Module:
    """Nothing is compiled before the first forward pass; inductor, the usual backend, would be loaded at once."""
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def compiled_inside(model: Model) -> nn.Module:
    model.head = compiled(model.head)  # type: ignore[assignment]
    return model


def checkpointed_inside(model: Model) -> nn.Module:
    model.module = checkpoint_wrapper(model.module)
    return model


WRAPPERS = [
    compiled,
    nn.DataParallel,
    lambda model: compiled(nn.DataParallel(model)),
    compiled_inside,
    checkpointed_inside,
]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapped_model_is_the_same_model(wrap) -> None:  # type: ignore[no-untyped-def]
    plain, wrapped = FlatModel(Model()), FlatModel(wrap(Model()))
    assert wrapped.tensors == plain.tensors
    assert wrapped.signature == plain.signature
    assert [piece.name for piece in wrapped.pieces] == [piece.name for piece in plain.pieces]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_keys_of_a_state_are_the_plain_ones(wrap) -> None:  # type: ignore[no-untyped-def]
    wrapped = wrap(Model())
    plain = plain_keys(wrapped)
    assert [plain(key) for key in wrapped.state_dict()] == list(Model().state_dict())


def test_a_users_own_module_keeps_its_name() -> None:
    assert FlatModel(Net()).tensors[0].startswith("module.module.0.weight ")


# ---------------------------------------------------------------- private tensors


def test_private_tensors_are_neither_shared_nor_compared() -> None:
    one, other = Model(), Model()
    other.head = nn.Linear(2, 5)
    other.tied = nn.Linear(2, 2)
    exclude = ("head.*", "tied.*", "module.1.running_var")
    with pytest.raises(ValueError, match=r"tied\.\*"):
        FlatModel(one, exclude=exclude)  # a tied tensor has one name
    first = FlatModel(one, exclude=("head.*", "module.1.running_var"))
    second = FlatModel(other, exclude=exclude)
    assert first.signature == second.signature
    assert [piece.name for piece in first.pieces] == [
        "module.0.weight", "module.0.bias", "module.1.weight", "module.1.bias", "module.1.running_mean",
    ]  # fmt: skip
    before = one.head.weight.detach().clone()
    first.load(first.gather().numpy() + 1)
    assert torch.equal(one.head.weight, before)
    assert first.unshared() == []


def test_a_pattern_that_fits_nothing_is_refused_in_one_line() -> None:
    with pytest.raises(
        ValueError, match=r"exclude='heads\.\*' fits no tensor of the model \(module\.0\.weight is one\)"
    ):
        FlatModel(Model(), exclude=["heads.*"])


def test_patterns_are_words() -> None:
    assert patterns_of("head.*") == patterns_of(["head.*"]) == ("head.*",)
    for given in (None, 5, [1]):
        with pytest.raises(ValueError, match=r"^exclude=.*: give names of tensors, or patterns"):
            patterns_of(given)


def test_a_model_that_is_all_private_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to train together"):
        FlatModel(Model(), exclude=["*"])


def test_a_parameter_without_a_shape_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet: run one batch"):
        FlatModel(nn.Sequential(nn.LazyLinear(3)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")  # of what category depends on torch
def test_a_scripted_model_is_the_same_one() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    scripted = torch.jit.script(plain)
    assert FlatModel(scripted).signature == FlatModel(plain).signature
