"""Who may read what a node keeps? Its user, and nobody else, whatever the umask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from peerd.daemon import known_members
from peerd.local import identity
from peerd.local.durable import replace
from peerd.security import authority_folder, kept, secrets_folder, wall_clock
from peerd.security.authority import request_of
from peerd.security.enrolment import granted
from peerd.security.token_store import TokenStore
from peerd.settings import Settings
from peerd.trainer.checkpoint import capture, save
from peerd.trainer.rest import Rest
from peerd.training.model.flat import FlatModel
from peerd.transport.messages import Plan


@pytest.fixture(params=[0o000, 0o022], autouse=True, ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def test_all_that_is_in_the_state_folder(tmp_path: Path) -> None:
    settings = Settings(name="a", state_dir=str(tmp_path / "state"))
    mine = identity.take(settings.state_path)
    os.close(mine.lock)
    key = mine.key
    known_members.write(settings, (("10.0.0.1", 1),))
    known_members.write_plan(settings, Plan(3, "a"), lambda: False)
    model = nn.Linear(2, 1)
    flat = FlatModel(model)
    save(settings.state_path / "checkpoints", capture(model, torch.optim.SGD(model.parameters(), 0.1), 1, "signature"))
    Rest(model, flat.pieces, flat.signature).write(settings.state_path / "checkpoints")
    by, now = authority_folder.at(settings.state_path / "authority", wall_clock.now()), wall_clock.now()
    kept.write(settings.state_path, granted(by, request_of(key), now, issuer=True))
    for folder in (settings.state_path, settings.state_path / "authority"):
        TokenStore(folder).make((("10.0.0.1", 1),), bytes(32), 1, 60, 0, issuer=False)
    found = [settings.state_path, *settings.state_path.rglob("*")]
    assert len(found) > 8
    assert {str(path): path.stat().st_mode & 0o777 for path in found} == {
        str(path): 0o700 if path.is_dir() else 0o600 for path in found
    }


def test_secrets_of_a_backup_that_was_put_back_are_closed_to_others(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    store.make((("10.0.0.1", 1),), bytes(32), 1, 60, 0, issuer=False)
    (tmp_path / "keyring.hex").touch()
    paths = tmp_path / "tokens.json", tmp_path / "keyring.hex"
    for path in paths:
        path.chmod(0o644)
    store.make((("10.0.0.1", 1),), bytes(32), 1, 60, 0, issuer=False)
    secrets_folder.read(tmp_path)
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o600] * 2


def test_a_checkpoint_folder_that_the_rest_of_the_model_comes_to_first(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    flat = FlatModel(model)
    Rest(model, flat.pieces, flat.signature).write(tmp_path / "checkpoints")
    assert (tmp_path / "checkpoints").stat().st_mode & 0o777 == 0o700


def test_what_was_left_open_to_others_is_closed(tmp_path: Path) -> None:
    for name in ("kept.json", "kept.tmp"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o666)
    replace(tmp_path / "kept.json", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]
    assert (tmp_path / "kept.json").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "kept.json").read_text() == "{}"


def test_a_link_in_a_files_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "kept.tmp").symlink_to(tmp_path / "elsewhere")
    replace(tmp_path / "kept.json", "{}")
    assert (tmp_path / "elsewhere").read_text() == "mine"
