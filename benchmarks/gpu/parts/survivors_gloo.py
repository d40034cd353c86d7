"""Three ranks on one GPU, with gloo on its tensors: one is killed in `ht.survive`, the others go on in their processes,
and a replacement joins them."""

from __future__ import annotations

import os
import signal
import time

from benchmarks.gpu.measuring import note, say
from benchmarks.gpu.surviving import surviving

KILLS = 2


def main() -> None:
    with surviving() as job:
        before = job.await_warm()
        note("start → 20 steps", time.monotonic() - job.job.began_s, "s")
        for number in range(KILLS):
            victim = before[1]
            killed_s = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            note(f"kill {number} → next step of the others", job.next_step_s(killed_s, victim) - killed_s, "s")
            note(f"kill {number} → all train again", job.await_training(killed_s, victim) - killed_s, "s")
            after = job.processes()
            kept = set(before.values()) & set(after.values())
            if kept != set(before.values()) - {victim}:
                raise RuntimeError(f"not only the killed process was replaced: {before} → {after}")
            before = after
        job.stop()
    say("weights", "equal on all ranks")


if __name__ == "__main__":
    main()
