"""`holdfast doctor`, and its checks of GPUs where it has them: exit code, time, and what it says."""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.gpu.measuring import left_s, note, say

RETRY, FATAL = 20, 30
"""Exit codes: see docs/doctor.md."""


def doctor(*flags: str) -> str:
    began_s = time.monotonic()
    line = [sys.executable, "-m", "holdfast", "doctor", *flags]
    done = subprocess.run(line, capture_output=True, text=True, timeout=max(1.0, left_s()))
    name = " ".join(["doctor", *flags])
    note(name, time.monotonic() - began_s, "s")
    if done.returncode not in (0, RETRY, FATAL):
        raise RuntimeError(f"{name}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    for text in done.stdout.splitlines():
        if text.startswith(("WARN", "RETRY", "FATAL")) or "GPU" in text or "CUDA" in text:
            say(name, text)
    return done.stdout


def main() -> None:
    doctor()
    known = subprocess.run([sys.executable, "-m", "holdfast", "doctor", "--help"], capture_output=True, text=True)
    if "--gpu" not in known.stdout:
        say("doctor --gpu", "this version has no such option")
        return
    doctor("--gpu", "quick")
    doctor("--gpu", "full")


if __name__ == "__main__":
    main()
