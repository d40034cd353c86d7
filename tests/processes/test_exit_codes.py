"""How a job ends: its exit code, its last screen, the code of its verdict."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes.conftest import c10d
from tests.support.limits import limit_s


@pytest.mark.parametrize(
    ("ending", "code"),
    [("sys.exit(3)", 3), ("os.abort()", 134)],
)
def test_the_failing_workers_code_is_the_jobs(job_folder, ending: str, code: int) -> None:
    """Of two workers; tests/beside_torchrun has all ways in which one can end."""
    script = job_folder.script(f"meet()\nif RANK == 1: {ending}\nhold()")
    agent = job_folder.ends(code, "--standalone", "--nproc-per-node", "2", script)
    assert agent.verdict["verdict"]["culprit"]["rank"] == 1
    job_folder.all_gone()


def test_zero_when_all_end_with_zero_and_early_ends_are_fine(job_folder) -> None:
    script = job_folder.script("meet()\nif RANK == 0: sys.exit(0)\ntime.sleep(0.4)\nnote('late')")
    agent = job_folder.ends(0, "--standalone", "--nproc-per-node", "3", script)
    assert len(job_folder.trail("late")) == 2
    assert agent.text == ""


def test_a_late_failure_after_early_successes_still_counts(job_folder) -> None:
    script = job_folder.script("meet()\nif RANK == 0: sys.exit(0)\ntime.sleep(0.2)\nsys.exit(4 if RANK == 2 else 0)")
    assert job_folder.run("--standalone", "--nproc-per-node", "3", script)[0] == 4


def test_requeue_is_75_everywhere_and_is_not_restarted(job_folder, endpoint: str) -> None:
    script = job_folder.script("meet()\nif RANK == 1: sys.exit(75)\nhold()")
    args = (*c10d(endpoint), "--max-restarts", "3", script)
    agents = [job_folder.start(*args) for _ in range(2)]
    assert [agent.end() for agent in agents] == [75, 75], agents[0].text
    assert {each["round"] for each in job_folder.trail("up")} == {0}
    assert "requeue" in agents[0].text


def test_no_files_at_all(job_folder) -> None:
    script = job_folder.script("print('seen', flush=True)\nmeet()\nsys.exit(RANK * 5)")
    agent = job_folder.ends(5, "--log-dir", "/dev/null", "--standalone", "--nproc-per-node", "2", script)
    assert agent.text.count("seen") == 2
    assert "exit code 5" in agent.text


def test_program_that_cannot_be_executed(job_folder) -> None:
    done, agent = job_folder.run("--standalone", "--no-python", "/nowhere/program")
    assert done in (2, 127), agent.text
    assert "/nowhere/program" in agent.text
    assert "Traceback" not in agent.text


# --- an exception is reported when it leaves the program, before that process ends ------------------------------------


def test_the_generation_ends_while_exit_functions_still_run(job_folder) -> None:
    """And they run to their end, before the next generation begins."""
    script = job_folder.script(
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
    agent = job_folder.ends(0, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", script)
    order = [note["event"] for note in job_folder.trail() if note["event"] in ("stopped", "uploaded", "again")]
    assert order == ["stopped", "uploaded", "again", "again"], agent.text
    failed = [each for each in agent.events("worker_failed") if not each["after_stop"]]
    assert [(each["rank"], each["message"]) for each in failed] == [(0, "ValueError: the loss is nan")]
    assert [each["rank"] for each in agent.events("worker_raised")] == [0]


def test_the_exception_of_a_forked_child_is_its_own(job_folder) -> None:
    script = job_folder.script(
        """
if os.fork() == 0:
    raise ValueError("only the child")
os.wait()
"""
    )
    agent = job_folder.ends(0, "--standalone", script)
    assert not agent.events("worker_raised")


LOADS_BADLY = """
from holdfast.cli import run

def load_end():
    raise ImportError("no such module")

run.load_end = load_end
"""


def test_what_is_loaded_for_the_end_is_asked_for_while_workers_are_stopped(job_folder) -> None:
    """And nothing but time hangs on it."""
    script = job_folder.script("meet()\nif RANK:\n    hold()\nraise ValueError('nan')")
    agent = job_folder.ends(1, "--standalone", "--nproc-per-node", "2", script, program=job_folder.changed(LOADS_BADLY))
    assert agent.verdict["verdict"]["culprit"]["message"] == "ValueError: nan"
    assert [each["what"] for each in agent.events("observer_fault")] == ["load"]


LEAVES = """
import atexit, sys
from holdfast.cli import entry
atexit.register(print, "the interpreter's last phase")
sys.argv[1:1] = ["run"]
entry()
"""


def test_the_command_ends_when_the_job_has(job_folder) -> None:
    """It does not take its own modules apart first."""
    agent = job_folder.ends(7, "--standalone", job_folder.script("sys.exit(7)"), program=job_folder.program(LEAVES))
    assert "exit code    7" in agent.text
    assert "last phase" not in agent.text


def test_the_others_are_stopped_while_what_a_worker_left_is_read(job_folder) -> None:
    """Its error file cannot be read before the other worker has been stopped; the verdict has it all the same."""
    script = job_folder.script(
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
    agent = job_folder.ends(7, "--standalone", "--nproc-per-node", "2", script)
    assert [note["event"] for note in job_folder.trail() if note["event"] == "stopped"] == ["stopped"]
    assert agent.verdict["verdict"]["culprit"]["message"] == "Sneeze: loud"


LOADS_EARLY = """
import os
from holdfast.cli import run

load_end = run.load_end

def noted():
    load_end()
    open(os.environ["TRAIL"] + ".loaded", "w").close()

run.load_end = noted
"""


def test_what_the_verdict_needs_is_loaded_while_workers_run(job_folder) -> None:
    wait = "while not os.path.exists(os.environ['TRAIL'] + '.loaded'):\n    time.sleep(0.01)"
    job_folder.ends(0, "--standalone", job_folder.script(wait), program=job_folder.changed(LOADS_EARLY))


# --- the last screen: at most fifteen lines and the user's own traceback, which comes last ----------------------------


def screen(agent) -> tuple[list[str], list[str]]:
    """What holdfast says at the end, and what follows: the traceback or the tail of stderr."""
    headings = [found.start() for found in re.finditer(r"^holdfast: HF\d+: job FAILED", agent.text, re.MULTILINE)]
    lines = agent.text[headings[0] :].splitlines()
    assert len(headings) == 1 + (lines[-1] == lines[0]), "said twice only at the end of a long screen"
    assert len(lines) <= 60
    if len(headings) > 1:
        lines.pop()
    words = next(number for number, line in enumerate(lines, start=1) if line.startswith("  exit code "))
    return lines[:words], lines[words:]


def check(agent) -> list[str]:
    ours, users = screen(agent)
    assert len(ours) <= 15, agent.text
    assert "holdfast" not in "".join(users).replace(str(agent.logs), ""), "the user's own lines only"
    return users


@pytest.mark.parametrize(
    ("body", "last", "code"),
    [
        ("raise ValueError('the loss is nan')", "ValueError: the loss is nan", 1),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'", 1),
        ("sys.exit('text of an exit')", "text of an exit", 1),
        ("os.write(2, b'before the end\\n')\nos._exit(7)", "before the end", 7),
        ("raise KeyError('ключ')", "KeyError: 'ключ'", 1),
        ("class Odd(Exception):\n  def __str__(self): raise TypeError\nraise Odd", "", 1),
        ("raise ExceptionGroup('several', [ValueError(1), KeyError(2)])", "", 1),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded", 1),
    ],
)
def test_endings(job_folder, body: str, last: str, code: int) -> None:
    agent = job_folder.ends(
        code, "--standalone", "--nproc-per-node", "2", job_folder.script(f"if RANK == 1: hold()\n{body}")
    )
    users = check(agent)
    assert not last or users[-1].startswith(last), agent.text
    assert last.split("'", maxsplit=1)[0] in str(agent.verdict)


def test_a_script_that_changes_its_folder(job_folder) -> None:
    """Every path given to it is absolute."""
    script = job_folder.script("os.mkdir('elsewhere')\nos.chdir('elsewhere')\nraise ValueError('from afar')")
    done, agent = job_folder.run("--standalone", "--log-dir", "relative", "train.py")
    assert script.exists()
    assert done == 1
    assert agent.text.rstrip().endswith("ValueError: from afar")
    assert list((job_folder.folder / "relative").glob("*/attempt_0/0/error.json"))
    assert not any((job_folder.folder / "elsewhere").iterdir())


def test_an_unwritable_folder(job_folder, tmp_path: Path) -> None:
    """Nothing is written where the user stands."""
    place = tmp_path / "readonly"
    place.mkdir()
    place.chmod(0o500)
    script = job_folder.script("raise ValueError('all the same')")
    agent = job_folder.ends(1, "--standalone", script, cwd=place)
    assert agent.text.rstrip().endswith("ValueError: all the same")
    assert list(place.iterdir()) == []


def test_a_long_message_with_newlines_is_one_line_of_ours(job_folder) -> None:
    script = job_folder.script("raise RuntimeError('first line\\n' + 'more\\n' * 500 + 'x' * 100_000)")
    agent = job_folder.ends(1, "--standalone", script)
    ours, _ = screen(agent)
    assert len(ours) <= 15
    assert max(map(len, ours)) < 400


def test_the_rank_whose_error_the_others_report_is_to_blame(job_folder) -> None:
    """They are faster, because it still cleans up."""
    script = job_folder.script(
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is not faster than the stop on a slow machine
meet()
if RANK != 1:
    raise RuntimeError("stopping: another rank failed")
others = [each["pid"] for each in notes("up") if each["rank"] != 1]
while any(os.path.exists(f"/proc/{pid}/exe") for pid in others):  # a zombie has none
    time.sleep(0.01)
raise ValueError("bad sample 17")
"""
    )
    agent = job_folder.ends(1, "--standalone", "--nproc-per-node", "3", script)
    verdict = agent.verdict["verdict"]
    assert (verdict["culprit"]["rank"], verdict["culprit"]["message"]) == (1, "ValueError: bad sample 17")
    assert len(verdict["collateral"]) == 2


def test_what_a_worker_raises_cannot_change_our_lines(job_folder) -> None:
    script = job_folder.script("raise ValueError('\\x1b[2J\\x1b[1mgone\\u202e' if ROUND == 0 else 'again')")
    agent = job_folder.ends(1, "--standalone", "--max-restarts", "1", script)
    ours = [line for line in agent.text.splitlines() if line.startswith("holdfast: ")]
    assert any("\\x1b[2J\\x1b[1mgone\\u202e" in line for line in ours), agent.text
    assert not any(character in "".join(ours) for character in "\x1b\u202e")


def test_the_failing_ranks_traceback_is_shown_once_and_its_victims_are_one_line(job_folder) -> None:
    script = job_folder.script(
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the victims complain, however fast they are asked to stop
meet()
print("loading the data", flush=True)
if RANK == 1:
    raise ValueError("bad shape")
(culprit,) = [each["pid"] for each in notes("up") if each["rank"] == 1]
while os.path.exists(f"/proc/{culprit}/exe"):  # a zombie has none
    time.sleep(0.01)
raise RuntimeError(f"[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.8]:4036{RANK}")
"""
    )
    agent = job_folder.ends(1, "--standalone", "--nproc-per-node", "4", script)
    assert agent.text.count("Traceback (most recent call last)") == 1
    assert agent.text.rstrip().endswith("ValueError: bad shape")
    assert "loading the data (×4)" in agent.text
    (victims,) = (line for line in agent.text.splitlines() if line.startswith("  because of it"))
    assert victims.endswith("; in their logs")
    assert "log          holdfast logs " in agent.text


def test_no_dedup_shows_all(job_folder) -> None:
    script = job_folder.script(
        "meet()\nprint('loading', flush=True)\nmeet('printed')\nif RANK == 1: raise ValueError('bad shape')\nhold()"
    )
    agent = job_folder.ends(1, "--standalone", "--no-dedup", "--nproc-per-node", "4", script)
    assert agent.text.count("| loading\n") == 4
    assert agent.text.count("Traceback (most recent call last)") == 2


# --- causes: the code of the verdict, what the machine adds, nodes that differ, slow culprits -------------------------


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        ("import flash_attn", "HF211", "No module named 'flash_attn'"),
        ("open('/no/such/file')", "HF217", "/no/such/file"),
        ("open('/dev/full', 'w').write('x' * 100_000)", "HF214", "% full"),
        ("import argparse\nargparse.ArgumentParser().parse_args(['--lr'])", "HF232", "unrecognized arguments: --lr"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "HF223", "SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGTERM)\nhold()", "HF235", "SIGTERM"),
    ],
)
def test_the_cause_has_a_code_and_its_machine_adds_what_it_knows(job_folder, body: str, code: str, told: str) -> None:
    _, agent = job_folder.run(
        "--standalone", "--nproc-per-node", "2", job_folder.script(f"if RANK == 1: hold()\n{body}")
    )
    assert f"holdfast: {code}: job FAILED" in agent.text
    assert told in agent.text
    assert agent.verdict["code"] == code


def test_a_culprit_that_ends_more_slowly_than_its_victim(job_folder) -> None:
    body = """
if RANK == 1:
    def slowly(*what):
        sys.__excepthook__(*what)
        meet("raised")
        time.sleep(20)
    sys.excepthook = slowly
    raise KeyError("tokens")
meet("raised")
import socket
ours, theirs = socket.socketpair()
theirs.close()
ours.send(b"to a peer that is gone")
"""
    done, agent = job_folder.run("--standalone", "--nproc-per-node", "2", job_folder.script(body))
    assert (agent.verdict["verdict"]["culprit"]["rank"], agent.verdict["code"]) == (1, "HF201")
    assert agent.text.rstrip().endswith("KeyError: 'tokens'")
    assert done == 1, "not the signal by which we hastened its end"


def test_nodes_with_different_scripts_are_told_on_both(job_folder, endpoint: str) -> None:
    one = job_folder.script("meet()")
    other = Path(str(one)).with_name("other.py")
    other.write_text(Path(str(one)).read_text() + "\n# changed\n")
    agents = [job_folder.start(*c10d(endpoint), script) for script in (one, other)]
    assert [agent.end() for agent in agents] == [0, 0], agents[0].text + agents[1].text
    assert [agent.text.count("HF307: the script is not the same file") for agent in agents] == [1, 1]


def test_the_stacks_of_those_that_did_not_come_are_taken_before_they_are_stopped(job_folder) -> None:
    body = """
def oversleeps():
    note("asleep")
    time.sleep(600)
if RANK == 1:
    oversleeps()
while not (asleep := notes("asleep")): time.sleep(0.01)
while " S " not in open(f"/proc/{asleep[0]['pid']}/stat").read(): time.sleep(0.01)
raise RuntimeError("[/x/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 500ms for recv operation to complete")
"""
    # The evidence and the stacks come in time on a slow machine, too. All of PLACES_S passes: rank 1 might still report.
    change = (
        "from holdfast.coordinator import stop_delay\n"
        f"stop_delay.EVIDENCE_S, stop_delay.PLACES_S = {limit_s(30)}, {limit_s(3)}"
    )
    line = ("--standalone", "--nproc-per-node", "2", job_folder.script(body))
    code, agent = job_folder.run(*line, program=job_folder.changed(change))
    verdict = agent.verdict["verdict"]
    assert (code, agent.verdict["code"], verdict["culprit"]["rank"]) == (1, "HF209", 1), agent.text
    assert "rank 1 on " in verdict["cause"]
    assert "did not join: it was in time.sleep at train.py:" in verdict["cause"]
    assert "rank 0 waited for it until the time-out, at train.py:" in verdict["cause"]
