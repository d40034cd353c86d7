"""What a job ends with: the first failing worker's own code, 128+N for a signal, 75 for a requeue, 0 only for all 0."""

from __future__ import annotations

import signal

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


def test_signal_names_are_in_the_verdict(site) -> None:
    script = site.script("os.kill(os.getpid(), signal.SIGBUS)")
    done, agent = site.run("--standalone", script)
    assert done == 128 + signal.SIGBUS
    assert "SIGBUS" in agent.text
    assert "/dev/shm" in agent.text
