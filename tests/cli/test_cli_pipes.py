"""Of all broken pipes only that of our own output is `| head`."""

from __future__ import annotations

import os
import sys

import pytest

from holdfast import cli
from holdfast.cli import run


def test_a_broken_pipe_elsewhere_is_told(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def broken(_: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(run, "main", broken)
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    assert cli.run_command("run", []) == 70
    assert "HF901" in capfd.readouterr().err


def test_whatever_nobody_caught_is_a_fault_of_ours(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> int:
        raise BlockingIOError(11, os.strerror(11))

    monkeypatch.setattr(run, "main", broken)
    assert cli.run_command("run", []) == 70
    said = capfd.readouterr().err
    assert "Traceback" in said
    assert "HF901: holdfast failed: BlockingIOError" in said
