"""What saves of a state on the device cost, in ms per GB, and whether the state is equal after a kill and a resume."""

from __future__ import annotations

import json

from benchmarks.gpu.measuring import launched, note, say

UNITS = {"state": "GB", "step": "ms"}


def main() -> None:
    with launched("holdfast", ["--standalone", "--nproc-per-node", "1", "--max-restarts", "1"], "saves.py") as job:
        figures = job.folder / "figures.json"
        try:
            job.end()
        finally:
            for name, value in json.loads(figures.read_text() if figures.exists() else "{}").items():
                note(name, value, UNITS.get(name, "ms/GB"))
        if job.stamps("equal") != {"0": 1.0}:
            raise RuntimeError(f"what was resumed is not what was saved\n{job.tail()}")
    say("resumed", "equal bit for bit")


if __name__ == "__main__":
    main()
