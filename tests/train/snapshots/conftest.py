"""Savers to try."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.snapshots.saves import Bench, Memory


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "snaps")
    yield made
    made.close()


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    made.close()
