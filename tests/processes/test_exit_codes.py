"""What a job ends with: the first failing worker's own code, 128+N for a signal, 75 for a requeue, 0 only for all 0."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139),
        ("os.abort()", 134),
        ("os._exit(7)", 7),
        ("sys.exit('no more')", 1),
        ("raise ValueError('x')", 1),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143),
    ],
)
def test_the_failing_workers_code_is_the_jobs(site, ending: str, code: int) -> None:
    script = site.script(f"meet()\nif RANK == 1: {ending}\nhold()")
    done, agent = site.run("--standalone", "--nproc-per-node", "2", script)
    assert done == code, agent.text
    assert agent.verdict["verdict"]["culprit"]["rank"] == 1
    site.all_gone()


def test_zero_when_all_end_with_zero_and_early_ends_are_fine(site) -> None:
    script = site.script("meet()\nif RANK == 0: sys.exit(0)\ntime.sleep(0.4)\nnote('late')")
    done, agent = site.run("--standalone", "--nproc-per-node", "3", script)
    assert done == 0, agent.text
    assert len(site.trail("late")) == 2
    assert agent.text == ""


def test_a_late_failure_after_early_successes_still_counts(site) -> None:
    script = site.script("meet()\nif RANK == 0: sys.exit(0)\ntime.sleep(0.2)\nsys.exit(4 if RANK == 2 else 0)")
    assert site.run("--standalone", "--nproc-per-node", "3", script)[0] == 4


def test_requeue_is_75_everywhere_and_is_not_restarted(site, endpoint: str) -> None:
    script = site.script("meet()\nif RANK == 1: sys.exit(75)\nhold()")
    args = ("--nnodes", "2", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, script)
    agents = [site.start(*args) for _ in range(2)]
    assert [agent.end() for agent in agents] == [75, 75], agents[0].text
    assert {each["round"] for each in site.trail("up")} == {0}
    assert "requeue" in agents[0].text


def test_no_files_at_all(site) -> None:
    script = site.script("print('seen', flush=True)\nmeet()\nsys.exit(RANK * 5)")
    done, agent = site.run("--log-dir", "/dev/null", "--standalone", "--nproc-per-node", "2", script)
    assert done == 5, agent.text
    assert agent.text.count("seen") == 2
    assert "exit code 5" in agent.text


def test_program_that_cannot_be_executed(site) -> None:
    done, agent = site.run("--standalone", "--no-python", "/nowhere/program")
    assert done in (2, 127), agent.text
    assert "/nowhere/program" in agent.text
    assert "Traceback" not in agent.text


# --- an exception is reported when it leaves the program, before that process ends ------------------------------------


def test_the_generation_ends_while_exit_functions_still_run(site) -> None:
    """And they run to their end, before the next generation begins."""
    script = site.script(
        """
import atexit, signal
if ROUND:
    note("again")
    sys.exit()
def stop(*_):
    note("stopped")
    os._exit(1)
signal.signal(signal.SIGTERM, stop)
meet()
if RANK == 1:
    hold()
def upload():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end = time.monotonic() + 10 * SLOWNESS
    while not notes("stopped") and time.monotonic() < end:
        time.sleep(0.01)
    note("uploaded", stopped=len(notes("stopped")))
atexit.register(upload)
raise ValueError("the loss is nan")
"""
    )
    done, agent = site.run("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", script)
    assert done == 0, agent.text
    order = [note["event"] for note in site.trail() if note["event"] in ("stopped", "uploaded", "again")]
    assert order == ["stopped", "uploaded", "again", "again"], agent.text
    failed = [each for each in agent.events("worker_failed") if not each["after_stop"]]
    assert [(each["rank"], each["message"]) for each in failed] == [(0, "ValueError: the loss is nan")]
    assert [each["rank"] for each in agent.events("worker_raised")] == [0]


def test_the_exception_of_a_forked_child_is_its_own(site) -> None:
    script = site.script(
        """
if os.fork() == 0:
    raise ValueError("only the child")
os.wait()
"""
    )
    done, agent = site.run("--standalone", script)
    assert done == 0, agent.text
    assert not agent.events("worker_raised")


LOADS_BADLY = """
import sys
from holdfast.cli import entry, run

def load_end():
    raise ImportError("no such module")

run.load_end = load_end
sys.argv[1:1] = ["run"]
entry()
"""


def test_what_is_loaded_for_the_end_is_asked_for_while_workers_are_stopped(site, tmp_path: Path) -> None:
    """And nothing but time hangs on it."""
    program = tmp_path / "program.py"
    program.write_text(LOADS_BADLY)
    line = (
        "--standalone",
        "--nproc-per-node",
        "2",
        site.script("meet()\nif RANK:\n    hold()\nraise ValueError('nan')"),
    )
    agent = site.start(*line, program=[sys.executable, str(program)])
    assert agent.end() == 1, agent.text
    assert agent.verdict["verdict"]["culprit"]["message"] == "ValueError: nan"
    assert [each["what"] for each in agent.events("insight_fault")] == ["load"]


LEAVES = """
import atexit, sys
from holdfast.cli import entry
atexit.register(print, "the interpreter's last phase")
sys.argv[1:1] = ["run"]
entry()
"""


def test_the_command_ends_when_the_job_has(site, tmp_path: Path) -> None:
    """It does not take its own modules apart first."""
    program = tmp_path / "program.py"
    program.write_text(LEAVES)
    agent = site.start("--standalone", site.script("sys.exit(7)"), program=[sys.executable, str(program)])
    assert agent.end() == 7, agent.text
    assert "exit code    7" in agent.text
    assert "last phase" not in agent.text


def test_the_others_are_stopped_while_what_a_worker_left_is_read(site) -> None:
    """Its error file cannot be read before the other worker has been stopped; the verdict has it all the same."""
    script = site.script(
        """
import json, signal
file = os.path.join(os.path.dirname(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])), "1", "error.json")
def stop(*_):
    with open(file, "w") as pipe:
        json.dump({"message": "Sneeze: loud"}, pipe)
    note("stopped")
    os._exit(1)
signal.signal(signal.SIGTERM, stop)
meet()
if RANK == 0:
    hold()
os.mkfifo(file)
os._exit(7)
"""
    )
    done, agent = site.run("--standalone", "--nproc-per-node", "2", script)
    assert done == 7, agent.text
    assert [note["event"] for note in site.trail() if note["event"] == "stopped"] == ["stopped"]
    assert agent.verdict["verdict"]["culprit"]["message"] == "Sneeze: loud"


LOADS_EARLY = """
import os, sys
from holdfast.cli import entry, run

load_end = run.load_end

def noted():
    load_end()
    open(os.environ["TRAIL"] + ".loaded", "w").close()

run.load_end = noted
sys.argv[1:1] = ["run"]
entry()
"""


def test_what_the_verdict_needs_is_loaded_while_workers_run(site, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LOADS_EARLY)
    wait = "while not os.path.exists(os.environ['TRAIL'] + '.loaded'):\n    time.sleep(0.01)"
    agent = site.start("--standalone", site.script(wait), program=[sys.executable, str(program)])
    assert agent.end() == 0, agent.text
