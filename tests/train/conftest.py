"""What several tests of training share."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.snapshots.in_process import InProcessStaging


@pytest.fixture
def own_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """No saver process: what is staged stays in this one."""
    monkeypatch.setattr("holdfast.train.snapshots.open_tier", lambda **_: InProcessStaging())


def damage(file: Path) -> None:
    """One bit of its last byte."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
