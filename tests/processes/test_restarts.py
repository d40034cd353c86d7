"""Restarts: one budget, everything fresh, nothing of the generation before alive."""

from __future__ import annotations

import itertools
import signal

import pytest

ONCE = "meet()\nif RANK == 1 and ROUND == 0: raise RuntimeError('once')\n"


def test_all_ranks_begin_again(site) -> None:
    script = site.script(ONCE + "if ROUND == 0: hold()\nnote('end')")
    done, agent = site.run("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", script)
    assert done == 0, agent.text
    ups = site.trail("up")
    assert sorted((each["round"], each["rank"]) for each in ups) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({each["port"] for each in ups}) == 2, "a store of its own for each generation"
    assert {path.name for path in agent.folder.iterdir() if path.is_dir()} == {"attempt_0", "attempt_1"}
    assert (agent.folder / "attempt_0" / "1" / "error.json").is_file()
    assert "Traceback" not in (agent.folder / "attempt_1" / "1" / "stderr.log").read_text()


def test_the_budget_is_one_for_all_nodes(site, endpoint: str) -> None:
    """Both nodes fail in turn: two restarts in all, not two for each."""
    script = site.script("meet()\nif NODE == ROUND % 2: sys.exit(10 + ROUND)\nhold()")
    args = ("--nnodes", "2", "--max-restarts", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, script)
    agents = [site.start(*args) for _ in range(2)]
    assert [agent.end() for agent in agents] == [12, 12], agents[0].text
    ups = site.trail("up")
    assert sorted((each["round"], each["rank"]) for each in ups) == [(r, n) for r in range(3) for n in range(2)]
    assert len({each["port"] for each in ups}) == 3
    seats = {(each["agent"], each["rank"]) for each in ups}
    assert len(seats) == 2, f"ranks are sticky: {seats}"
    assert "all 2 restarts are used" in agents[0].text


def test_the_others_get_sigterm_and_their_children_do_not(site) -> None:
    script = site.script(
        """
if ROUND == 0 and RANK == 0:
    program = (
        "import os, signal, time\\n"
        "def told(*_):\\n"
        "    open(os.environ['TRAIL'], 'a').write(repr(dict(event='child-told', pid=os.getpid())) + chr(10))\\n"
        "signal.signal(signal.SIGTERM, told)\\n"
        "print('ready', flush=True)\\n"
        "time.sleep(60)\\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    process.stdout.readline()
    note("child", child=process.pid)
    def saved(*_):
        time.sleep(0.3)
        note("told", child_alive=process.poll() is None)
        sys.exit(0)
    signal.signal(signal.SIGTERM, saved)
meet()
if RANK == 1 and ROUND == 0: sys.exit(1)
if ROUND == 0: hold()
"""
    )
    done, agent = site.run("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", script)
    assert done == 0, agent.text
    assert [each["child_alive"] for each in site.trail("told")] == [True]
    assert site.trail("child-told") == []
    site.all_gone()


def test_grandchildren_of_failed_finished_and_stopped_workers_are_gone(site) -> None:
    """Nothing of generation 1 is alive when generation 2 starts."""
    script = site.script(
        """
if ROUND == 0:
    child()
    daemon()
    meet()
    if RANK == 1:  # finished
        sys.exit(0)
    if RANK == 2:  # failed, once the other is surely gone
        time.sleep(0.3)
        sys.exit(1)
    hold()  # stopped
else:
    old = [each["child"] for each in all_notes() if each["event"] == "child"]
    note("old", alive=[pid for pid in old if os.path.exists(f"/proc/{pid}")], count=len(old))
"""
    )
    done, agent = site.run("--standalone", "--nproc-per-node", "3", "--max-restarts", "1", script)
    assert done == 0, agent.text
    assert [(each["alive"], each["count"]) for each in site.trail("old")] == [([], 6)] * 3


def test_children_of_the_last_to_finish_do_not_outlive_the_job(site) -> None:
    script = site.script("child()\ndaemon()\nmeet()")
    done, agent = site.run("--standalone", "--nproc-per-node", "2", script)
    assert done == 0, agent.text
    assert len(site.trail("child")) == 4
    site.all_gone()


def test_who_ignores_sigterm_is_killed_after_the_timeout(site) -> None:
    script = site.script(
        """
if RANK == 0: signal.signal(signal.SIGTERM, signal.SIG_IGN)
meet()
if RANK == 1 and ROUND == 0: sys.exit(1)
if ROUND == 0: hold()
"""
    )
    args = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--shutdown-timeout", "1", script)
    done, agent = site.run(*args)
    assert done == 0, agent.text
    began, killed = (
        next(each["monotonic"] for each in agent.events(name) if each.get("exit_code") == code)
        for name, code in (("worker_ended", 1), ("worker_ended", -signal.SIGKILL))
    )
    assert killed - began >= 0.9


def test_twenty_quick_restarts(site) -> None:
    """Each with another error, so that nothing gives up; the back-off is cut short by a first failure of its own kind."""
    script = site.script("note('up')\nif ROUND < 4: sys.exit(1 + ROUND)")
    done, agent = site.run("--standalone", "--max-restarts", "20", script)
    assert done == 0, agent.text
    assert [each["round"] for each in site.trail("up")] == [0, 1, 2, 3, 4]
    begun = [each["monotonic"] for each in agent.events("coordinator.started")]
    pauses = [b - a for a, b in itertools.pairwise(begun)]
    assert pauses[2] > 0.5, f"the pauses grow: {pauses}"


@pytest.mark.slow
def test_the_same_error_again_and_again_is_given_up(site) -> None:
    script = site.script("note('up')\nraise KeyError('always')")
    args = ("--standalone", "--max-restarts", "20", script)
    done, agent = site.run(*args, limit_s=60)
    assert done == 1
    rounds = len(site.trail("up"))
    assert 2 <= rounds < 20
    assert f"the same error {rounds} times in a row" in agent.text
    assert agent.text.rstrip().endswith("KeyError: 'always'")


def test_a_failure_after_usr1_costs_a_restart(site) -> None:
    """A signal that is passed on is no order to stop: what fails afterwards is a failure."""
    script = site.script("on_signal('SIGUSR1')\nmeet()\nwhile not notes('signal'): time.sleep(0.01)\nsys.exit(6)")
    agent = site.start("--standalone", script)
    site.wait(1, "up")
    agent.signal(signal.SIGUSR1)
    assert agent.end() == 6, agent.text
    assert len(site.trail("up")) == 1
