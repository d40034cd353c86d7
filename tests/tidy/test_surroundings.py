"""The next test finds environment, folder, file mask and signal handlers as they were."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.support.surroundings import Surroundings


def test_what_a_test_changes_in_its_process_is_changed_back(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    before = Surroundings.now()
    os.environ["A_NEW_ONE"] = os.environ["PATH"] = "changed"
    del os.environ["HOME"]
    os.chdir(gone)
    gone.rmdir()
    os.umask(0o777)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    before.restore()
    assert Surroundings.now() == before
