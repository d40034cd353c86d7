"""What several tests of training share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.train.snapshots.in_process import InProcessStaging
from tests.warm import Warm

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(autouse=True)
def no_run_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots set this variable in their process, which is the tests' here."""
    monkeypatch.setenv("HOLDFAST_RUN_ID", "")  # so that it is removed again
    monkeypatch.delenv("HOLDFAST_RUN_ID")


@pytest.fixture
def own_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """No saver process: what is staged stays in this one."""
    monkeypatch.setattr("holdfast.train.snapshots_api.open_tier", lambda **_: InProcessStaging())


def damage(file: Path) -> None:
    """One bit of its last byte."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def on_ranks(warm: Warm, modules: str, *runs: tuple[int, Path, tuple[str, ...]]) -> list[str]:
    """What each run printed (ranks without a launcher, or 0 for one plain process; script; arguments): see on_ranks.py."""
    words = [word for world, script, arguments in runs for word in ("--", str(world), script, *arguments)]
    done = warm.run([SCRIPTS / "on_ranks.py", modules, *words[1:]], timeout=200)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in re.sub(r".*FSDP2-wrapped module.* returned a view tensor.*", "", done.stderr)
    printed = done.stdout.split("\f")
    assert len(printed) == len(runs) + 1
    return printed[:-1]
