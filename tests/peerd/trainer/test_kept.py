"""What a script keeps beside its model comes back as it was, whatever it is made of, and nothing else is touched."""

from __future__ import annotations

import random
import time
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio
from hypothesis import example, given
from hypothesis import strategies as st
from test_trainer import normed, path, with_daemon
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import peerd
from peerd.daemon.catch_up import CatchUp
from peerd.local.generations import newest_step
from peerd.trainer import checkpoint, groups, kept
from peerd.trainer.kept import Kept
from peerd.trainer.swarm import Swarm
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector

assert path is not None  # a fixture


class Holder:
    """An object of a script's own, whose state is anything."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
ARRAYS = ["<f4", ">f8", "<i2", "<u4", "|b1", "<c16", "<U3", "<M8[s]"]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    values = torch.from_numpy(np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2, shape))
    tensor = values.to(draw(st.sampled_from(DTYPES)))
    return tensor.transpose(0, 1) if tensor.ndim > 1 and draw(st.booleans()) else tensor


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    values = np.zeros(draw(st.lists(st.integers(0, 3), max_size=2)), draw(st.sampled_from(ARRAYS)))
    return values if values.size == 0 or draw(st.booleans()) else values.reshape(-1)[0]


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=[]), max_size=5)
)
KEYS = SCALARS.filter(lambda key: key == key)
STATES: st.SearchStrategy[Any] = st.recursive(
    SCALARS | st.binary(max_size=9) | tensors() | arrays(),
    lambda inside: (
        st.lists(inside, max_size=3)
        | st.lists(inside, max_size=3).map(tuple)
        | st.builds(deque, st.lists(inside, max_size=3), st.none() | st.just(3))
        | st.dictionaries(KEYS | st.tuples(KEYS, KEYS), inside, max_size=3)
        | st.dictionaries(KEYS, inside, max_size=3).map(OrderedDict)
        | st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter)
        | st.builds(defaultdict, st.sampled_from([int, list, set]), st.dictionaries(KEYS, inside, max_size=3))
        | st.sets(KEYS, max_size=3)
        | st.frozensets(KEYS, max_size=3)
    ),
    max_leaves=12,
)


def is_same(one: Any, other: Any) -> bool:
    """To the bit, and of the same types, in the same order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, defaultdict) and one.default_factory is not other.default_factory:
        return False
    if isinstance(one, dict):
        return is_same(list(one.items()), list(other.items()))
    if isinstance(one, deque):
        return one.maxlen == other.maxlen and is_same(list(one), list(other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, set | frozenset):
        return is_same(sorted(one, key=repr), sorted(other, key=repr))
    return bool(one == other or one != one)


def again(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Write a checkpoint with these, and give it back to those; returns what was told."""
    told: list[str] = []
    model, optimizer = normed()
    checkpoint.save(folder, checkpoint.capture(model, optimizer, 7, "s", (), Kept(before, told.append)))
    found = checkpoint.newest(folder, "s", told.append)
    assert found is not None
    assert checkpoint.restore(found, *normed())
    Kept(now, told.append).restore(found.kept, found.tensors, found.step)
    return told


@given(st.dictionaries(st.text(max_size=3), STATES, max_size=3))
@example({"": np.str_("")})
def test_any_state_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, states: dict[str, Any]) -> None:
    now = {name: Holder() for name in states}
    told = again(tmp_path_factory.mktemp("kept"), {name: Holder(state) for name, state in states.items()}, now)
    assert len(told) <= 1
    for name, state in states.items():
        assert is_same(now[name].state, state)


def test_a_default_of_the_scripts_own_is_left_out(tmp_path: Path) -> None:
    now: dict[str, Any] = {}
    again(tmp_path, {"words": {"own": defaultdict(lambda: 7, a=1), "none": defaultdict(None, b=2)}}, {"words": now})
    assert now == {"own": {"a": 1}, "none": {"b": 2}}


def test_a_dictionary_that_has_a_state_of_its_own_is_kept_by_that(tmp_path: Path) -> None:
    class Table(Holder, dict[str, int]):
        """What is in it is no part of its state."""

    again(tmp_path, {"table": Table(7)}, {"table": (now := Table())})
    assert now.state == 7


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 5, 5, 8]),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30),
    "rates of its own": lambda optimizer: lr_scheduler.SequentialLR(  # the optimizer's at first are the other's
        optimizer,
        [
            lr_scheduler.LambdaLR(optimizer, lambda epoch: (1 + epoch) / 5),
            lr_scheduler.CyclicLR(optimizer, 0.001, 0.05, step_size_up=4, cycle_momentum=False),
        ],
        [5],
    ),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, 20)],
        [6],
    ),
    "warm restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
}


class Walk:
    """A loader that knows where it is: numbers drawn from a generator of its own."""

    def __init__(self) -> None:
        self.random, self.torch, self.numpy = (
            random.Random(3),
            torch.Generator().manual_seed(4),
            np.random.default_rng(5),
        )
        self.count = 0

    def __next__(self) -> tuple[float, float, float]:
        self.count += 1
        return self.random.random(), float(torch.rand((), generator=self.torch)), float(self.numpy.random())

    def state_dict(self) -> dict[str, Any]:
        generators = {"random": self.random.getstate(), "torch": self.torch.get_state()}
        return {**generators, "numpy": self.numpy.bit_generator.state, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.setstate(state["random"])
        self.torch.set_state(state["torch"])
        self.numpy.bit_generator.state = state["numpy"]
        self.count = state["count"]


class Run:
    """A script's objects; what it makes of them can be told from `seen`."""

    def __init__(self, kind: str) -> None:
        self.model, self.optimizer = normed()
        self.scheduler = SCHEDULERS[kind](self.optimizer)
        self.averaged = AveragedModel(self.model, avg_fn=get_ema_avg_fn(0.9))  # type: ignore[no-untyped-call]
        self.walk = Walk()
        self.keep = {"scheduler": self.scheduler, "ema": self.averaged, "walk": self.walk}

    def step(self) -> tuple[Any, ...]:
        drawn = next(self.walk)
        self.model(torch.full((2, 3), drawn[0]) + torch.eye(2, 3)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.averaged.update_parameters(self.model)
        self.scheduler.step()
        averages = [float(value.double().sum()) for value in self.averaged.state_dict().values()]
        return drawn, self.scheduler.get_last_lr(), self.optimizer.param_groups[0]["lr"], averages


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # which schedulers of torch 2.6 give to one another
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_objects_that_are_interrupted_go_on_as_if_they_were_not(kind: str, tmp_path: Path) -> None:
    expected = [uninterrupted.step() for uninterrupted in [Run(kind)] for _ in range(12)]
    before, now, told = Run(kind), Run(kind), list[str]()
    seen = [before.step() for _ in range(7)]
    generation = checkpoint.capture(before.model, before.optimizer, 7, "s", (), Kept(before.keep))
    before.step()
    checkpoint.save(tmp_path, generation)
    found = checkpoint.newest(tmp_path, "s", told.append)
    assert found is not None
    assert checkpoint.restore(found, now.model, now.optimizer, told.append)
    Kept(now.keep, told.append).restore(found.kept, found.tensors, found.step)
    assert told == ["from the checkpoint of step 7 also: scheduler, ema, walk"]
    assert is_same([*seen, *(now.step() for _ in range(5))], expected)


class Accelerated:
    """As Accelerate wraps a scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)


@pytest.mark.parametrize("around", [lambda it: it, lambda it: lr_scheduler.ChainedScheduler([it]), Accelerated])
def test_a_rate_that_was_changed_in_the_script_is_not_undone_by_its_schedule(
    around: Callable[[Any], Any], tmp_path: Path
) -> None:
    def made(rate: float) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
        groups.remember(optimizer)
        return model, optimizer, around(scheduler)

    model, optimizer, scheduler = made(0.1)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    checkpoint.save(tmp_path, checkpoint.capture(model, optimizer, 3, "s", (), Kept({"scheduler": scheduler})))
    for rate in (0.1, 0.5):
        found = checkpoint.newest(tmp_path, "s", pytest.fail)
        assert found is not None
        model, optimizer, scheduler = made(rate)
        checkpoint.restore(found, model, optimizer)
        Kept({"scheduler": scheduler}).restore(found.kept, found.tensors, found.step)
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate / 5)


def test_a_script_that_is_started_again_goes_on_as_if_it_were_not(path: Path) -> None:
    expected = [uninterrupted.step() for uninterrupted in [Run("one cycle")] for _ in range(12)]
    seen: list[Any] = []

    def script(run: Run, steps: int) -> None:
        with peerd.attach(run.model, run.optimizer, keep=run.keep) as swarm:
            for _ in range(steps):
                seen.append(run.step())
                swarm.step()

    with_daemon(path, lambda: script(Run("one cycle"), 7))
    with_daemon(path, lambda: script(Run("one cycle"), 5))
    assert is_same(seen, expected)


def test_what_this_process_has_trained_with_is_not_taken_back(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    holder, other, words = Holder(0), Holder(0), {"epoch": 0}

    def script() -> None:
        for at in range(3):
            keep = {"mine": holder, "words": words}
            with peerd.attach(*normed(), keep=keep if at else {**keep, "other": other}) as swarm:
                swarm.step()
                holder.state = words["epoch"] = 10 * (at + 1)
            assert holder.state == words["epoch"] == 10 * (at + 1)

    with_daemon(path, script)
    with_daemon(path, script)
    assert "also: " not in capsys.readouterr().err
    fresh, anew = Holder(), {"epoch": 0, "new": 1}

    def resumed() -> None:
        with peerd.attach(*normed(), keep={"mine": fresh, "words": anew}):
            assert fresh.state == 30
            assert anew == {"epoch": 30}

    with_daemon(path, resumed)
    assert "peerd: from the checkpoint of step 6 also: mine, words\n" in capsys.readouterr().err


def dies_before_its_first_checkpoint(swarm: Swarm) -> None:
    """The daemon has its model."""
    swarm._session._report(swarm.step_count, 1.0, copies=True, rolled_back=False)  # type: ignore[union-attr]
    swarm._close()


def test_a_script_that_comes_back_without_what_it_keeps_is_told(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that died before its first checkpoint: the model was the daemon's, the rest began anew without a word."""

    def script() -> None:
        for _ in range(2):
            swarm = peerd.attach(*normed(), keep={"mine": Holder(0), "words": {}})
            for _ in range(3):
                swarm.step()
            dies_before_its_first_checkpoint(swarm)

    with_daemon(path, script)
    said = "peerd: this node has no checkpoint with mine, words: they begin as the script made them, with the model of"
    assert [line for line in capsys.readouterr().err.splitlines() if "begin" in line] == [f"{said} step 3"]


def test_a_scheduler_that_begins_anew_with_a_model_that_does_not_is_told(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node that came late ended at the highest rate of a schedule that others had come to the end of."""
    told: list[bool] = []

    def script() -> None:
        def train(*, kept: bool = False, own: bool = False) -> None:
            model, optimizer = normed()
            if own:  # as the script's own checkpoint has it, with the scheduler's beside it
                optimizer.state[next(model.parameters())] = {"step": torch.tensor(3.0)}
            scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, 20)
            capsys.readouterr()
            swarm = peerd.attach(model, optimizer, keep={"mine": scheduler} if kept else {})
            told.append(f"the model is of step {swarm.step_count};" in capsys.readouterr().err)
            swarm.step()
            dies_before_its_first_checkpoint(swarm)

        train()
        train()
        train(kept=True)
        train(own=True)

    with_daemon(path, script)
    assert told == [False, True, False, False]


def test_a_dictionary_that_the_script_has_let_go_of_is_not_held() -> None:
    class Big:
        pass

    mine: dict[str, Any] = {"count": 0}
    gone: list[weakref.ref[Big]] = []
    for _ in range(3):
        theirs: dict[str, Any] = {}
        Kept({"mine": mine, "theirs": theirs}).came()
        theirs["big"] = big = Big()
        gone.append(weakref.ref(big))
        del theirs, big
    Kept({}).came()
    assert [each() for each in gone] == [None] * 3
    Kept({"mine": mine}).restore({"mine": {"dict": []}}, {}, 1)
    assert mine == {"count": 0}


def test_what_came_from_a_checkpoint_that_is_put_aside_is_soon_in_another(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in none for a minute: a script that died in that had its optimizer and its scheduler anew."""

    folder, holder = path.parent / "state" / "checkpoints", Holder(0)

    def before() -> None:
        with peerd.attach(*normed(), keep={"mine": Holder(5)}) as swarm:
            for _ in range(5):
                swarm.step()

    def after() -> None:
        deadline = time.monotonic() + 30
        with peerd.attach(*normed(), keep={"mine": holder}) as swarm:
            assert holder.state == 5
            while newest_step(folder) < 3 and time.monotonic() < deadline:
                swarm.step()
            assert newest_step(folder) >= 3, "while it trains"

    async def fetch(_: CatchUp, layout: Layout, own: Vector, *, is_news: bool) -> tuple[Vector, int]:
        await trio.lowlevel.checkpoint()
        return own.copy(), 2

    with_daemon(path, before)
    monkeypatch.setattr(CatchUp, "fetch", fetch)
    with_daemon(path, after)


CANNOT = "keep: it cannot be kept: it"
TOO_MUCH = f"all states together are over {kept.PLAIN_BYTES_MAX} bytes, tensors and arrays aside"
NO_TENSOR = f"{CANNOT} is a tensor that no checkpoint can hold"


class Within(torch.Tensor):
    """One whose values are in another tensor."""

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> Within:
        made: Within = torch.Tensor._make_wrapper_subclass(cls, inside.shape)
        made.inside = inside
        return made

    inside: torch.Tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*(each.inside if isinstance(each, Within) else each for each in args), **(kwargs or {}))


class Fails(Holder):
    def state_dict(self) -> Any:
        raise KeyError("deep\nwithin")


@pytest.mark.parametrize(
    ("keep", "why"),
    [
        ([Holder(1)], 'keep is no dictionary of names and objects: keep={"scheduler": scheduler}'),
        ({3: Holder(1)}, 'keep is no dictionary of names and objects: keep={"scheduler": scheduler}'),
        ({"it": 7}, "keep: it is a int: neither a dictionary, nor with state_dict and load_state_dict"),
        ({"it": Holder(open)}, f"{CANNOT} is a builtin_function_or_method, which no checkpoint can hold"),
        ({"it": Holder({"a": [1, {"b": Holder()}]})}, f"{CANNOT}.a.1.b is a Holder, which no checkpoint can hold"),
        ({"it": Holder(torch.zeros(2).to_sparse())}, f"{NO_TENSOR} (torch.float32)"),
        ({"it": Holder(torch.ones(1, dtype=torch.cdouble))}, f"{NO_TENSOR} (torch.complex128)"),
        ({"it": Holder(Within(torch.ones(2)))}, f"{NO_TENSOR} (torch.float32)"),
        ({"it": Holder(np.array([{}]))}, f"{CANNOT} is a ndarray, which no checkpoint can hold"),
        ({"it": Holder(np.zeros(2, [("x", "f4")]))}, f"{CANNOT} is a ndarray, which no checkpoint can hold"),
        ({"it": Holder(np.ma.array([1.0], mask=[True]))}, f"{CANNOT} is a MaskedArray, which no checkpoint can hold"),
        ({"it": Holder([7] * kept.PLAIN_BYTES_MAX)}, f"keep: it cannot be kept: {TOO_MUCH}"),
        (
            {"a": Holder({"b": {"c": torch.ones(1)}}), "a.b": Holder({"c": torch.ones(1)})},
            "keep: a.b cannot be kept: another one has a tensor of the name kept.a.b.c",
        ),
        ({"it": Fails()}, r"keep: it cannot be kept: 'deep\nwithin'"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_ends_the_script_with_a_line(keep: Any, why: str, path: Path) -> None:
    def script() -> None:
        with pytest.raises(SystemExit) as ended:
            peerd.attach(*normed(), keep=keep)
        assert str(ended.value) == f"peerd: {why}"

    with_daemon(path, script)


def endless() -> Iterator[Any]:
    while True:
        yield None


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (endless(), "it.odd is a generator, which no checkpoint can hold"),
        ("x" * (kept.PLAIN_BYTES_MAX + 1), TOO_MUCH),
        (torch.zeros(1, device="meta"), "it.odd is a tensor that no checkpoint can hold (torch.float32)"),
    ],
)
def test_what_cannot_be_kept_later_is_left_out_and_named_once(state: Any, why: str, tmp_path: Path) -> None:
    told: list[str] = []
    holder, other = Holder({"even": torch.ones(2)}), Holder([5])
    both = Kept({"it": holder, "other": other}, told.append)
    holder.state["odd"] = state
    for step in (1, 2):
        checkpoint.save(tmp_path, checkpoint.capture(*normed(), step, "s", (), both))
    assert told == [f"checkpoints are written without it: {why}"]
    found = checkpoint.newest(tmp_path, "s", told.append)
    assert found is not None
    assert found.kept == {"other": [5]}
    assert not [name for name in found.tensors if name.startswith("kept.")]


NOT_FIT = "does not fit, and may be there in part: "


def test_what_does_not_fit_stays_and_is_named(tmp_path: Path) -> None:
    scheduler, linear = SCHEDULERS["cosine"](normed()[1]), nn.Linear(3, 2)
    before = {"scheduler": scheduler, "linear": nn.Linear(2, 2), "gone": Holder(1)}
    told = again(tmp_path, before, {"scheduler": Holder(), "linear": linear, "new": (new := Holder(9))})
    assert told[0].startswith(f"linear of the checkpoint of step 7 {NOT_FIT}Error(s) in loading state_dict for Linear:")
    assert told[1:] == [
        "the checkpoint of step 7 has no new: it begins as the script made it",
        "from the checkpoint of step 7 also: scheduler",
    ]
    assert new.state == 9


def test_a_checkpoint_that_nobody_wrote_so_gives_a_line_and_no_error() -> None:
    told: list[str] = []
    odd: list[Any] = [
        {}, {"tensor": "x"}, {"array": ["<f4", [9], "t"]}, {"array": ["|O", [1], "t"]}, {"bytes": 3}, {"deque": [1]},
        {"os.system": ["true"]}, {"dict": 3}, {"tuple": 1}, {"a": 1, "b": 2}, {"Counter": [[[], 1]]}, {"bytes": "é"},
    ]  # fmt: skip
    for tree in odd:
        held = Holder("as it was")
        Kept({"it": held}, told.append).restore({"it": tree}, {"t": torch.zeros(4, dtype=torch.uint8)}, 3)
        assert held.state == "as it was", tree
    assert len(told) == len(odd)
    assert all(line.startswith(f"it of the checkpoint of step 3 {NOT_FIT}") for line in told)
