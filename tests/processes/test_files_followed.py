"""How many files of holdfast one has to open to follow what happens: those that the agent executes meanwhile.

Each call of a function in the agent's process is recorded with its time; the body of a class or a module is none. The
list is shown when there are more files than the limit. What a command executes in its own process, and the supervisor
in its, is not in it.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping

import pytest

from tests.processes.conftest import JobFolder, holdfast
from tests.support.limits import until

pytestmark = pytest.mark.usefixtures("registry")

TRACED = """
import collections, inspect, json, os, sys, threading, time
from pathlib import Path
import holdfast

ROOT = os.path.dirname(holdfast.__file__) + os.sep
agent = os.getpid()
calls = {}
detached = collections.Counter()

def called(frame, _event, _argument):
    code = frame.f_code
    is_function = code.co_flags & inspect.CO_OPTIMIZED
    if code.co_filename.startswith(ROOT) and is_function and os.getpid() == agent:
        calls.setdefault(code.co_filename[len(ROOT):], set()).add(round(time.monotonic(), 3))
        if code.co_filename == ROOT + "detached.py":
            detached[code.co_name] += 1

def tell_when_loaded():
    # What the end of a generation needs is imported in a thread, soon after the first start of the workers. The event
    # loop may get the thread's result much later, on a busy machine. run_detached is entered twice for each thread:
    # when it starts the thread, and with its result.
    while "holdfast.diagnosis.causes.find" not in sys.modules or detached["run_detached"] != 2 * detached["run"]:
        time.sleep(0.01)
    Path("loaded").touch()

threading.Thread(target=tell_when_loaded, daemon=True).start()
threading.settrace(called)
sys.settrace(called)
from holdfast.run import main
code = main()
sys.settrace(None)
if os.getpid() == agent:
    Path("calls.json").write_text(json.dumps({file: sorted(times) for file, times in calls.items()}))
sys.exit(code)
"""


SCRIPT = """
from holdfast.worker import should_save, should_stop
meet()
if ROUND == 0 and RANK == 1:
    while not os.path.exists("fail"): time.sleep(0.01)
    note("fails", at=time.monotonic())
    sys.exit(7)
began_s = time.monotonic()
while not should_stop():
    should_save()
    if ROUND == 1 and began_s and time.monotonic() > began_s + 4:  # the load of the node is read meanwhile
        note("rested")
        began_s = None
    time.sleep(0.01)
"""
LIMITS = {"a worker's death": 28, "a save": 16, "status": 8}
"""Number of files at most. A death is detected, judged, shown on the console, and followed by another generation: the
judgement alone has eight files, and the logs and the console have six."""
Window = tuple[float, float]


def files_in(calls: Mapping[str, list[float]], window: Window) -> set[str]:
    return {file for file, times in calls.items() if any(window[0] <= at <= window[1] for at in times)}


def test_few_files_are_executed_for_a_death_a_save_and_a_status(job_folder: JobFolder) -> None:
    """Files that run all the time, because progress is reported and timers ring, are not counted."""
    line = ("--standalone", "--nproc-per-node=2", "--max-restarts=1", job_folder.script(SCRIPT))
    agent = job_folder.start(*line, program=job_folder.program(TRACED))
    job_folder.wait(2, "up")
    until((job_folder.folder / "loaded").exists, "the modules for the end of a generation")
    (job_folder.folder / "fail").touch()
    job_folder.wait(2, "rested")
    rested_s = time.monotonic()
    windows: dict[str, Window] = {}
    for what, command in (("status", "status"), ("a save", "save")):
        began_s = time.monotonic()
        assert holdfast(command).returncode == 0
        windows[what] = began_s, time.monotonic()
    agent.signal(signal.SIGTERM)
    agent.end()

    calls: dict[str, list[float]] = json.loads((job_folder.folder / "calls.json").read_text())
    (failed,) = job_folder.trail("fails")
    started_s = agent.events("worker_started")[-1]["monotonic"]
    windows["a worker's death"] = failed["at"], started_s
    always = files_in(calls, (started_s + 0.5, rested_s))
    assert always
    found = {what: sorted(files_in(calls, window) - always) for what, window in windows.items()}
    text = "\n".join(f"{what}: {len(files)}\n    {'  '.join(files)}" for what, files in found.items())
    assert {what: len(files) for what, files in found.items() if len(files) > LIMITS[what]} == {}, text
    assert "coordinator/incident.py" in found["a worker's death"]
    assert "extensions/save/coordinator.py" in files_in(calls, windows["a save"])
    assert "extensions/status/coordinator.py" in found["status"]
