"""The demo: two ranks train, one of them is killed in the middle, training goes on from its snapshot.

    make demo        or        python examples/demo.py

Runs examples/multigpu_torchrun.py under `holdfast run`, sends one SIGKILL to rank 1, and tells what happened when.
Ends with 0 only if the job survived and the test accuracy is at least 95 %.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

SCRIPT = Path(__file__).with_name("multigpu_torchrun.py")
KILL_AT_STEP = 126  # half-way through the sixth of twelve epochs
ACCURACY_MIN = 0.95
LIMIT_S = 300.0


@dataclass
class Story:
    """What was seen on the job's output, and when (seconds since the launch)."""

    started: float = field(default_factory=time.monotonic)
    pids: dict[int, int] = field(default_factory=dict)
    step: int = 0
    killed_at_s: float | None = None
    last_step: int = 0
    """The newest step that was done before the crash."""
    resumed_step: int | None = None
    caught_up: bool = False
    accuracy: float | None = None

    def now_s(self) -> float:
        return time.monotonic() - self.started

    def tell(self, text: str) -> None:
        print(f"{self.now_s():6.1f} s  {text}", flush=True)

    def hear(self, line: str) -> None:
        """Take in one line of the job's output; whatever stands before the words (a prefix) does not matter."""
        for match in re.finditer(r"rank (\d+) of (\d+) is pid (\d+)", line):
            self.on_start(int(match[1]), int(match[2]), int(match[3]))
        if match := re.search(r"resuming after epoch (\d+) step (\d+)", line):
            self.resumed_step = int(match[2])
            # Some steps were done between the line that was read and the kill, and the last one may have no line.
            self.last_step = max(self.step, self.resumed_step)
            self.tell(f"the snapshot is loaded: going on after epoch {match[1]}, step {match[2]}")
        elif match := re.search(r"step (\d+) loss", line):
            self.on_step(int(match[1]))
        elif match := re.search(r"test accuracy ([\d.]+)", line):
            self.accuracy = float(match[1])

    def on_start(self, rank: int, world_size: int, pid: int) -> None:
        self.pids[rank] = pid
        if len(self.pids) == world_size and self.killed_at_s is None:
            self.tell(f"{world_size} ranks are up and have found each other")

    def on_step(self, step: int) -> None:
        if self.step == 0:
            self.tell("first training step")
        self.step = step
        if self.killed_at_s is None and step >= KILL_AT_STEP:
            os.kill(self.pids[1], signal.SIGKILL)
            self.killed_at_s = self.now_s()
            self.tell(f"step {step}: kill -9 {self.pids[1]} (rank 1)")
        elif self.resumed_step is not None and not self.caught_up and step > self.last_step:
            self.caught_up = True
            lost_s = self.now_s() - (self.killed_at_s or 0.0)
            again = self.last_step - self.resumed_step
            self.tell(f"step {step}: past the crash. Lost: {lost_s:.1f} s; {again} steps were done again")


def run(module: str) -> tuple[Story, int, list[str]]:
    """The job under `python -m module`: its story, exit code and last lines."""
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as folder:
        flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
        command = [
            sys.executable,
            "-m",
            module,
            *flags,
            str(SCRIPT),
            "--log-every",
            "1",
            "--snapshot",
            f"{folder}/digits.pt",
        ]
        print("$ holdfast run " + " ".join([*flags, "examples/" + SCRIPT.name]), flush=True)
        story = Story()
        job = subprocess.Popen(
            command,
            env={**os.environ, "HOLDFAST_NO_DEDUP": "1"},  # we act on its lines: none may wait for its like
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        watchdog = threading.Timer(LIMIT_S, job.kill)
        watchdog.start()
        lines: list[str] = []
        try:
            assert job.stdout is not None
            for line in job.stdout:
                lines.append(line)
                story.hear(line)
            return story, job.wait(), lines
        finally:
            watchdog.cancel()
            if job.poll() is None:
                job.terminate()
                job.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--module", default="holdfast.run", help="the launcher; torch.distributed.run shows the difference"
    )
    story, code, lines = run(parser.parse_args().module)
    good = code == 0 and story.caught_up and story.accuracy is not None and story.accuracy >= ACCURACY_MIN
    if not good:
        print("".join(lines[-60:]), file=sys.stderr)
    accuracy = "none" if story.accuracy is None else f"{story.accuracy:.4f}"
    story.tell(f"exit code {code}, test accuracy {accuracy} on 360 images it never trained on")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
