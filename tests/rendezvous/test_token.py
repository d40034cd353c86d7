"""Tokens: how strong one has to be, and drawing one that is."""

from __future__ import annotations

import pytest

from holdfast import cli
from holdfast.inherited import TOKEN_CHARS_MIN, draw_token, weakness


def test_a_drawn_token_is_strong_and_new() -> None:
    tokens = {draw_token() for _ in range(100)}
    assert len(tokens) == 100
    assert not any(weakness(token.encode()) for token in tokens)


def test_a_short_token_is_warned_about() -> None:
    assert "holdfast token" in weakness(b"x" * (TOKEN_CHARS_MIN - 1))
    assert weakness(b"x" * TOKEN_CHARS_MIN) == ""


def test_the_command_prints_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command("token", []) == 0
    assert len(capsys.readouterr().out.strip()) == 64
