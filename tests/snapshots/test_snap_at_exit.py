"""What runs while the interpreter ends: its thread pools take nothing any more, and saves and retention go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from holdfast.snapshots.retention import Keep, prune
from tests.snapshots.saves import is_whole, newest
from tests.support.limits import limit_s

SCRIPT = """
import atexit, sys
sys.path.insert(0, {root!r})
from holdfast.snapshots.retention import Keep, prune
from tests.snapshots import saves

saves.WEIGHT_ITEMS = 3 << 20                     # three chunks and more: one alone needs no pool
def late():
    for step in (1, 2):
        saves.save(saves.Path(sys.argv[1]), step, 1)
    assert len(prune(sys.argv[1], Keep(last=1)).deleted) == 1
    print("done")

atexit.register(late)
"""


def test_saves_and_retention_at_exit(tmp_path: Path) -> None:
    script = SCRIPT.format(root=str(Path(__file__).parents[2]))
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=limit_s(60)
    )
    assert (done.stdout, done.stderr) == ("done\n", "")
    assert newest(tmp_path).step == 2
    assert prune(tmp_path, Keep(last=1)).deleted == ()
    assert is_whole(newest(tmp_path))
