"""Record what this version writes, for later versions to read.

    python -m tests.compatibility.record

Writes tests/compatibility/recorded/VERSION: run/ (the folder of a run that was restarted and failed), snapshots/ (two ranks, two steps). Run it once per released version; recorded files are never changed afterwards.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from holdfast.version import __version__
from tests.train.snapshots import saves

RECORDED = Path(__file__).parent / "recorded"
SNAPSHOT_ITEMS = 100
SCRIPT = """
import os, sys
print("rank", os.environ["RANK"])
if os.environ["RANK"] == "1":
    raise ValueError("the loss is nan")
"""


def record_run(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="holdfast-record-") as scratch:
        script = Path(scratch) / "train.py"
        script.write_text(SCRIPT)
        flags = [
            "--standalone",
            "--nproc-per-node",
            "2",
            "--max-restarts",
            "1",
            "--log-dir",
            scratch,
            "--redirects",
            "3",
        ]
        line = [sys.executable, "-m", "holdfast.run", *flags, script]
        subprocess.run(line, capture_output=True, check=False)
        (made,) = (path for path in Path(scratch).iterdir() if path.is_dir())
        for name in ("events.jsonl", "verdict.json"):
            text = (made / name).read_text()
            for private, public in (
                (str(made), "/runs/job"),
                (scratch, "/srv/job"),
                (socket.gethostname(), "node0"),
                (sys.prefix, "/usr"),
            ):
                text = text.replace(private, public)
            (folder / "run" / name).write_text(text)


def main() -> int:
    folder = RECORDED / __version__
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "run").mkdir(parents=True)
    record_run(folder)
    for step in (10, 20):
        saves.save(folder / "snapshots", step, items=SNAPSHOT_ITEMS)
    print(f"recorded: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
