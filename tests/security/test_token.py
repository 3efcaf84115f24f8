"""Tokens: one line there and back, and never more uses than it has."""

from __future__ import annotations

import base64
import stat
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.local.locked import locked
from peerd.security import token
from peerd.security.token import EXPIRED, UNKNOWN, USED_UP, WRONG_SECRET, Kept, Token, parse, parse_life, proof, used
from peerd.security.token_store import TokenStore
from peerd.transport.errors import UserError

HOSTS = st.from_regex(r"[A-Za-z0-9._:%-]{1,255}", fullmatch=True)
TOKENS = st.builds(
    Token,
    st.lists(st.tuples(HOSTS, st.integers(1, 65535)), min_size=1, max_size=8).map(tuple),
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=8, max_size=8),
    st.binary(min_size=16, max_size=16),
    st.integers(0, token.TIME_MAX),
)
EXAMPLE = Token((("10.0.0.5", 7946),), bytes(32), b"12345678", b"s" * 16, 1_800_000_000)
NODES = st.sampled_from(["a", "b", "c", "d"])


@given(TOKENS)
def test_there_and_back(made: Token) -> None:
    line = made.pack()
    assert "\n" not in line
    if len(line) <= token.TEXT_MAX:
        assert parse(f" {line}\n") == made
    assert made.secret.hex() not in repr(made)


def test_it_is_short_enough_to_paste() -> None:
    assert len(EXAMPLE.pack()) < 140


@given(st.text() | st.text().map(lambda text: token.PREFIX + text) | st.binary().map(lambda data: _line(data)))
def test_anything_else_is_one_line(text: str) -> None:
    with pytest.raises(UserError, match=r"^token: [^\n]*$"):
        parse(text)


def _line(data: bytes) -> str:
    return token.PREFIX + base64.urlsafe_b64encode(data).decode()


@given(st.data())
def test_a_line_that_was_not_copied_whole_is_seen(data: st.DataObject) -> None:
    line = EXAMPLE.pack()
    with pytest.raises(UserError):
        parse(line[: data.draw(st.integers(0, len(line) - 1))])
    with pytest.raises(UserError):
        parse(line + data.draw(st.text(min_size=1).filter(str.strip)))
    at = data.draw(st.integers(len(token.PREFIX), len(line) - 1))
    slip = data.draw(st.sampled_from(sorted({*string.ascii_letters, *string.digits, "-", "_"} - {line[at]})))
    with pytest.raises(UserError, match="it is damaged, or was not copied whole"):
        parse(line[:at] + slip + line[at + 1 :])


@given(st.lists(st.tuples(NODES, st.booleans(), st.integers(0, 20))), st.integers(1, 3))
def test_no_more_nodes_than_uses_and_none_late_or_without_the_secret(
    tries: list[tuple[str, bool, int]], uses: int
) -> None:
    kept = Kept(b"12345678", b"s" * 16, uses, 10)
    let_in: list[str] = []
    for node, knows, now in tries:
        result = used(kept, node, b"proof", b"proof" if knows else b"other", now)
        if isinstance(result, Kept):
            assert knows
            assert now < 10
            let_in.append(node)
            kept = result
        else:
            assert result == (WRONG_SECRET if not knows else EXPIRED if now >= 10 else USED_UP)
    assert len(set(let_in)) <= uses
    assert set(let_in) == set(kept.used_by)


def test_a_token_that_nobody_made() -> None:
    assert used(None, "a", b"", b"", 0) == UNKNOWN


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=5, max_size=5))
def test_a_proof_is_for_all_that_was_said(parts: list[bytes]) -> None:
    made = proof(*parts)
    assert made == proof(*parts)
    for index in range(5):
        other = [part + b"x" if at == index else part for at, part in enumerate(parts)]
        assert proof(*other) != made


@pytest.mark.parametrize(("text", "seconds"), [("60s", 60), ("30m", 1800), ("24h", 86400), ("365d", 31536000)])
def test_a_life(text: str, seconds: int) -> None:
    assert parse_life(text) == seconds


@pytest.mark.parametrize("text", ["", "24", "h", "1.5h", "-1h", "59s", "366d", "999999999d", "24h\n", "٣h"])
def test_no_life(text: str) -> None:
    with pytest.raises(UserError, match=r"^expires: [^\n]*$"):
        parse_life(text)


# ------------------------------------------------------------------------------------------------------ on the disk


def made(store: TokenStore, uses: int = 1, now: int = 0) -> Token:
    return store.make((("10.0.0.5", 7946),), bytes(32), uses, 100, now, issuer=False)


def use(store: TokenStore, it: Token, node: str, now: int = 1, knows: bool = True) -> Kept | str:
    return store.use(it.id, node, lambda secret: secret, it.secret if knows else b"", now)


def test_uses_are_kept(tmp_path: Path) -> None:
    it = made(TokenStore(tmp_path), uses=2)
    assert isinstance(use(TokenStore(tmp_path), it, "a"), Kept)
    assert isinstance(use(TokenStore(tmp_path), it, "a"), Kept), "it may not have heard the answer"
    assert isinstance(use(TokenStore(tmp_path), it, "b"), Kept)
    assert use(TokenStore(tmp_path), it, "c") == USED_UP
    assert use(TokenStore(tmp_path), it, "a", now=100) == EXPIRED
    assert use(TokenStore(tmp_path), it, "a", knows=False) == WRONG_SECRET
    assert stat.S_IMODE((tmp_path / "tokens.json").stat().st_mode) == 0o600


def test_a_use_that_cannot_be_noted_is_not_granted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TokenStore(tmp_path)
    it = made(store)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("peerd.security.token_store.durable.replace", full)
        with pytest.raises(UserError, match="No space left"):
            use(store, it, "a")
    assert isinstance(use(store, it, "b"), Kept)


def test_a_process_that_does_not_let_go_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerd.local.locked.PATIENCE_S", 0.02)
    with locked(tmp_path / "tokens.lock"), pytest.raises(UserError, match=r"another process holds tokens\.lock"):
        made(TokenStore(tmp_path))
    assert made(TokenStore(tmp_path))


def test_tokens_that_are_over_make_room_and_those_that_are_not_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peerd.security.token_store.TOKENS_MAX", 4)
    store = TokenStore(tmp_path)
    old = [made(store, now=0) for _ in range(3)]
    with pytest.raises(UserError, match="tokens wait to be used"):
        made(store, now=1)
    new = [made(store, now=200) for _ in range(3)]
    assert all(isinstance(use(store, it, "a", now=201), Kept) for it in new)
    assert EXPIRED in [use(store, it, "a", now=201) for it in old], "the last of the old is still known"


@pytest.mark.parametrize("content", ["", "{}", "[1]", '[{"id": "00"}]', "[" * 100_000, "\xff"])
def test_a_damaged_file_is_one_line(tmp_path: Path, content: str) -> None:
    it = made(store := TokenStore(tmp_path))
    (tmp_path / "tokens.json").write_text(content, encoding="latin-1")
    if content == "{}":
        assert use(store, it, "a") == UNKNOWN
    else:
        with pytest.raises(UserError, match="damaged; remove it"):
            use(store, it, "a")
