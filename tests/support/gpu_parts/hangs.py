"""Measures something, and hangs then, with a child that ignores signals."""

import signal
import subprocess
import sys

from benchmarks.gpu.measuring import note

IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", IGNORES], start_new_session=True, stdout=subprocess.PIPE)
assert child.stdout is not None
child.stdout.readline()
note("left behind", child.pid)


def wait_for_ever() -> None:
    signal.pause()
    wait_for_ever()


wait_for_ever()
