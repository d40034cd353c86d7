"""No torch: says when its first line ran. BENCH_MODE: exit | sleep | crash (rank 1 of the first attempt) | children."""

import time

NOW_NS = time.monotonic_ns()  # before anything else is imported: this is the measurement

import os
import subprocess
import sys

OUT, RANK, MODE = os.environ["BENCH_OUT"], os.environ["RANK"], os.environ.get("BENCH_MODE", "exit")
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def stamp(name: str, number: int) -> None:
    beside = f"{OUT}/.{name}.{RANK}"
    with open(beside, "w") as file:
        file.write(str(number))
    os.rename(beside, f"{OUT}/{name}.{RANK}")


def main() -> None:
    if MODE == "crash" and ATTEMPT == 0:
        stamp("first", NOW_NS)
        while not os.path.exists(f"{OUT}/first.0"):
            time.sleep(0.01)
        time.sleep(0.3)
        if RANK == "1":
            stamp("crash", time.monotonic_ns())
            os._exit(1)
        time.sleep(120)
    if MODE == "children":
        sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(120)"]
        stamp("plain", subprocess.Popen(sleeper).pid)
        stamp("session", subprocess.Popen(sleeper, start_new_session=True).pid)
    stamp("pid", os.getpid())
    stamp("main", NOW_NS)
    if MODE in ("sleep", "children"):
        time.sleep(120)


if __name__ == "__main__":
    main()
