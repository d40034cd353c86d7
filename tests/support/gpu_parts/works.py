"""Measures two things, and leaves a process in a session of its own behind."""

import subprocess
import sys

from benchmarks.gpu.measuring import note, say

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
note("left behind", child.pid)
note("figure", 1.5, "ms/GB")
say("found", "something")
