"""From the launcher's start to the third step of DDP, and from the kill of the rank to the third step of its restart:
holdfast and torchrun in turn, so that a slow minute meets both."""

from __future__ import annotations

from statistics import median

from benchmarks.gpu.measuring import LAUNCHERS, ON_GPU, launched, left_s, note, say

REPEAT = 3 if ON_GPU else 1
ONE_S = 20.0
"""A repetition is not begun if less time is left."""


def main() -> None:
    taken: dict[str, list[float]] = {}
    for _ in range(REPEAT):
        for launcher in LAUNCHERS:
            if left_s() < ONE_S and taken:
                continue
            with launched(
                launcher, ["--standalone", "--nproc-per-node", "1", "--max-restarts", "1"], "third_step.py"
            ) as job:
                job.end()
                third, killed = job.stamps("third"), job.stamps("killed")
            if set(third) != {"0", "1"}:
                raise RuntimeError(f"{launcher}: not two attempts: {third}\n{job.tail()}")
            taken.setdefault(f"{launcher}: start → third step", []).append(third["0"] - job.began_s)
            taken.setdefault(f"{launcher}: kill → third step", []).append(third["1"] - killed["0"])
            if used := job.stamps("used"):
                lost = (used["1"] - used["0"]) / 2**20
                taken.setdefault(f"{launcher}: device memory in use, restart beside start", []).append(lost)
            for name, values in taken.items():
                if name.startswith(launcher):
                    say(f"{name}, {len(values)}", f"{values[-1]:.3f}")  # what was measured before a hang counts
    for name, values in taken.items():
        note(f"{name}, median of {len(values)}", median(values), "MiB" if "memory" in name else "s")


if __name__ == "__main__":
    main()
