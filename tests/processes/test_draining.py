"""Workers that ask `should_stop()`: all leave at one step, nothing is done twice, and no restart is counted."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.processes.conftest import is_alive
from tests.support.limits import limit_s

STEPS = """
from pathlib import Path
from holdfast.worker import on_stop, should_stop

SNAPSHOT = Path("snapshot")
START = int(SNAPSHOT.read_text()) if SNAPSHOT.exists() else 0
on_stop(lambda: note("told"))
meet()


def together(step):
    # Nobody begins a step before everybody is there, as in a collective.
    note("step", step=step, generation=PORT)
    while len({each["rank"] for each in notes("step") if each["step"] == step}) < WORLD:
        if Path("finish").exists():
            break  # another rank may have seen it before this step
        time.sleep(0.002)


for step in range(START, 100000):
    if Path("finish").exists():
        break
    together(step)
    time.sleep(0.02)
    if should_stop():
        note("left", step=step)
        if RANK == 0:
            SNAPSHOT.write_text(str(step + 1))
        sys.exit(0)
"""


def c10d(endpoint: str, nnodes: str, *more: str) -> tuple[str, ...]:
    conf = ("--rdzv-conf", "settle=0.1")
    return ("--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, *conf, *more)


def left_together(site, world: int) -> int:
    """The step at which all ranks of this world have left; fails unless it is one and the same."""
    steps = {each["step"] for each in site.wait(world, "left", world=world)}
    assert len(steps) == 1, steps
    return steps.pop()


def test_a_notice_drains_the_whole_job(site) -> None:
    agent = site.start("--nproc-per-node", "3", site.script(STEPS))
    site.wait(15, "step")
    agent.signal(signal.SIGTERM)
    assert agent.end() == 75, agent.text
    assert "preempted by SIGTERM: its workers stopped at a safe point" in agent.text
    step = left_together(site, 3)
    assert max(each["step"] for each in site.trail("step")) == step, "nobody is a step ahead"
    assert len(site.trail("told")) == 3


def test_a_node_that_leaves_takes_nobodys_steps_with_it(site, endpoint: str) -> None:
    script = site.script(STEPS)
    args = c10d(endpoint, "1:2", "--max-restarts", "0", "--nproc-per-node", "2")
    stays = site.start(*args, script)
    site.wait(2, "up")
    leaves = site.start(*args, script)
    site.wait(8, "step", world=4)
    leaves.signal(signal.SIGTERM)
    assert leaves.end() == 75, leaves.text
    step = left_together(site, 4)
    site.wait(2, "step", step=step + 3)
    (site.folder / "finish").touch()
    assert stays.end() == 0, stays.text
    done = sorted({each["step"] for each in site.trail("step")})
    assert done == list(range(len(done))), "no step is missing"
    for step in done:
        assert len({each["generation"] for each in site.trail("step", step=step)}) == 1, f"step {step} was done twice"
    assert {each["round"] for each in site.trail("step")} == {0}, "no restart was counted"


def test_a_newcomer_is_taken_in_between_two_steps(site, endpoint: str) -> None:
    script = site.script(STEPS)
    first = site.start(*c10d(endpoint, "1:2"), script)
    site.wait(5, "step")
    second = site.start(*c10d(endpoint, "1:2"), script)
    site.wait(4, "step", world=2)
    (site.folder / "finish").touch()
    assert [first.end(), second.end()] == [0, 0], first.text + second.text
    step = left_together(site, 1)
    assert min(each["step"] for each in site.trail("step", world=2)) == step + 1


def test_a_preemption_signal_is_the_agents_alone(site) -> None:
    """Schedulers send it to every process of a step: workers must not die of it."""
    agent = site.start("--preempt-signal", "usr1", "--nproc-per-node", "2", site.script(STEPS))
    ups = site.wait(2, "up")
    site.wait(6, "step")
    for each in ups:
        os.kill(each["pid"], signal.SIGUSR1)
    agent.signal(signal.SIGUSR1)
    assert agent.end() == 75, agent.text
    left_together(site, 2)


def test_a_preempted_script_that_asks_nothing_gets_sigterm(site) -> None:
    agent = site.start("--preempt-signal", "SIGUSR1", site.script("on_signal('SIGTERM', exit_code=0)\nmeet()\nhold()"))
    site.wait(1, "up")
    agent.signal(signal.SIGUSR1)
    assert agent.end() == 75, agent.text
    assert [each["name"] for each in site.trail("signal")] == ["SIGTERM"]
    assert "its workers were stopped" in agent.text


def test_a_worker_that_never_comes_to_its_safe_point_is_stopped(site) -> None:
    """Rank 1 asks once and then no more."""
    body = (
        "from holdfast.worker import should_stop\nmeet()\nshould_stop()\nnote('asked')\n"
        "if RANK == 1: hold()\nwhile not should_stop(): time.sleep(0.01)\nnote('left')\nhold()"
    )
    agent = site.start("--nproc-per-node", "2", "--drain-timeout", "1", "--shutdown-timeout", "1", site.script(body))
    site.wait(2, "asked")
    agent.signal(signal.SIGTERM)
    assert agent.end() == 143, agent.text
    site.all_gone()


def test_a_save_that_fails_in_a_drain_costs_no_restart(site, endpoint: str) -> None:
    body = STEPS.replace("sys.exit(0)", "sys.exit(RANK)")
    script = site.script(body)
    first = site.start(*c10d(endpoint, "1:2", "--max-restarts", "0", "--nproc-per-node", "2"), script)
    site.wait(10, "step")
    second = site.start(*c10d(endpoint, "1:2", "--max-restarts", "0", "--nproc-per-node", "2"), script)
    site.wait(8, "step", world=4)
    (site.folder / "finish").touch()
    assert [first.end(), second.end()] == [0, 0], first.text + second.text


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--grow=soon", "--grow"),
        ("--drain-timeout=0", "must be a positive number of seconds"),
        ("--preempt-signal=KILL", "SIGKILL cannot be handled by any process"),
        ("--preempt-signal=FOO", "is not a signal"),
        ("--preempt-signal=TERM", "SIGTERM announces a preemption too"),
        ("--exclude-after=-1", "must be 0 or more"),
    ],
)
def test_bad_words(site, option: str, text: str) -> None:
    code, agent = site.run(option, site.script("note('up')"))
    assert code == 2
    assert text in agent.text
    assert not site.trail()


# --- an agent that stands still ---------------------------------------------------------------------------------------


def test_workers_of_a_stopped_agent_die_at_its_fence(site, endpoint: str) -> None:
    """Nobody is awake there to kill them, and the others are about to go on without them."""
    conf = ("--rdzv-conf", f"settle=0.1,lease={limit_s(1.5):g}")
    args = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, *conf)
    script = site.script("meet()\nwhile not os.path.exists('finish'): time.sleep(0.02)")
    first = site.start(*args, script)
    site.wait(1, "up")
    second = site.start(*args, script)
    site.wait(2, "up", world=2)
    second.signal(signal.SIGSTOP)
    site.wait(1, "up", agent="0", world=1)
    ups = site.wait(2, "up", agent="0", world=1)
    frozen = site.trail("up", agent="1")[-1]["pid"]
    assert len(ups) >= 2
    assert not is_alive(frozen), "two generations are alive at once"
    second.signal(signal.SIGCONT)
    site.wait(4, "up", world=2)
    time.sleep(0.1)
    (site.folder / "finish").touch()
    assert [first.end(), second.end()] == [0, 0], first.text + second.text
