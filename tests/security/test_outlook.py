"""What `peerd doctor` says of who may join: it makes nothing, and agrees with what a start does."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from peerd.local.node_key import NodeKey
from peerd.security import authority, authority_folder, kept, wall_clock
from peerd.security.authority import request_of, succeed
from peerd.security.certificates import der, pin_of
from peerd.security.enrolment import granted
from peerd.security.entry import Told
from peerd.security.outlook import credentials, outlook
from peerd.security.secrets_folder import Kept, write
from peerd.security.token import Token

NOW = wall_clock.now()
ROOT = authority.generate(NOW)
KEY = NodeKey.generate()


def told(folder: Path, token: Token | None = None, *, loopback: bool = False, joins: bool = False) -> Told:
    return Told(folder, folder / "users", loopback, token, joins)


def token(life_s: int) -> Token:
    return Token((("h", 1),), pin_of(ROOT.certificate), bytes(8), bytes(16), int(NOW.timestamp()) + life_s)


def let_in(folder: Path) -> None:
    KEY.write(folder / "key.pem")
    kept.write(folder, granted(ROOT, request_of(KEY), NOW, issuer=False))


def test_nothing_is_made(tmp_path: Path) -> None:
    assert outlook(told(tmp_path, loopback=True))[0] == "ok"
    assert outlook(told(tmp_path))[:2] == ("ok", "none yet: it would be the first node of a swarm, and its authority")
    assert outlook(told(tmp_path, joins=True))[0] == "fail"
    assert credentials(told(tmp_path, joins=True)) is None
    assert not list(tmp_path.iterdir())


def test_the_users_own_authority(tmp_path: Path) -> None:
    made = authority_folder.at(tmp_path / "users", NOW)
    state, found, _ = outlook(told(tmp_path, loopback=True))
    assert state == "ok"
    assert pin_of(made.certificate).hex()[:16] in found
    trust = credentials(told(tmp_path, loopback=True))
    assert trust is not None
    assert trust.authorities == (made.certificate,)


def test_a_first_node(tmp_path: Path) -> None:
    authority_folder.at(tmp_path / "authority", NOW)
    assert "lets others in" in outlook(told(tmp_path))[1]
    assert credentials(told(tmp_path))


def test_a_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_in(tmp_path)
    assert outlook(told(tmp_path, joins=True))[1].startswith("a certificate until 20")
    mine = credentials(told(tmp_path, joins=True))
    assert mine is not None
    assert mine.identity(der(mine.certificate)) == KEY.id
    monkeypatch.setattr(wall_clock, "now", lambda: NOW + timedelta(days=100))
    assert outlook(told(tmp_path, joins=True))[0] == "fail"


@pytest.mark.parametrize(("life_s", "state"), [(3600, "ok"), (-1, "fail")])
def test_a_token(tmp_path: Path, life_s: int, state: str) -> None:
    assert outlook(told(tmp_path, token(life_s)))[0] == state


@pytest.mark.parametrize("file", ["key.pem", "certificate.pem"])
def test_damage(tmp_path: Path, file: str) -> None:
    let_in(tmp_path)
    (tmp_path / file).write_text("x")
    state, found, _ = outlook(told(tmp_path))
    assert state == "fail"
    assert "damaged" in found
    assert credentials(told(tmp_path)) is None


def test_an_authority_that_is_replaced(tmp_path: Path) -> None:
    let_in(tmp_path)
    for until, state, what in ((NOW + timedelta(days=7), "ok", "it is being replaced"), (NOW, "fail", "has replaced")):
        write(tmp_path, Kept([succeed(ROOT, authority.generate(NOW), NOW, until)]))
        found = outlook(told(tmp_path))
        assert found[0] == state
        assert what in found[1]
        mine = credentials(told(tmp_path))
        assert mine is not None
        assert (ROOT.certificate in mine.authorities) == (state == "ok")
