"""Restarts: one budget, everything fresh, nothing of the generation before alive."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.processes.conftest import c10d, children, is_alive
from tests.support.limits import until

ONCE = "meet()\nif RANK == 1 and ROUND == 0: raise RuntimeError('once')\n"


def test_all_ranks_begin_again(job_folder) -> None:
    script = job_folder.script(ONCE + "if ROUND == 0: hold()\nnote('end')")
    agent = job_folder.ends(0, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", script)
    ups = job_folder.trail("up")
    assert sorted((each["round"], each["rank"]) for each in ups) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({each["port"] for each in ups}) == 2, "a store of its own for each generation"
    assert {path.name for path in agent.folder.iterdir() if path.is_dir()} == {"attempt_0", "attempt_1"}
    assert (agent.folder / "attempt_0" / "1" / "error.json").is_file()
    assert "Traceback" not in (agent.folder / "attempt_1" / "1" / "stderr.log").read_text()


def test_the_budget_is_one_for_all_nodes(job_folder, endpoint: str) -> None:
    """Both nodes fail in turn: two restarts in all, not two for each."""
    script = job_folder.script("meet()\nif NODE == ROUND % 2: sys.exit(10 + ROUND)\nhold()")
    args = (*c10d(endpoint), "--max-restarts", "2", script)
    agents = [job_folder.start(*args) for _ in range(2)]
    assert [agent.end() for agent in agents] == [12, 12], agents[0].text
    ups = job_folder.trail("up")
    assert sorted((each["round"], each["rank"]) for each in ups) == [(r, n) for r in range(3) for n in range(2)]
    assert len({each["port"] for each in ups}) == 3
    seats = {(each["agent"], each["rank"]) for each in ups}
    assert len(seats) == 2, f"ranks are sticky: {seats}"
    assert "all 2 restarts are used" in agents[0].text


def test_the_others_get_sigterm_and_their_children_do_not(job_folder) -> None:
    script = job_folder.script(
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
    job_folder.ends(0, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", script)
    assert [each["child_alive"] for each in job_folder.trail("told")] == [True]
    assert job_folder.trail("child-told") == []
    job_folder.all_gone()


def test_grandchildren_of_failed_finished_and_stopped_workers_are_gone(job_folder) -> None:
    """Nothing of generation 1 is alive when generation 2 starts."""
    script = job_folder.script(
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
    job_folder.ends(0, "--standalone", "--nproc-per-node", "3", "--max-restarts", "1", script)
    assert [(each["alive"], each["count"]) for each in job_folder.trail("old")] == [([], 6)] * 3


def test_who_ignores_sigterm_is_killed_after_the_timeout(job_folder) -> None:
    script = job_folder.script(
        """
if RANK == 0: signal.signal(signal.SIGTERM, signal.SIG_IGN)
meet()
if RANK == 1 and ROUND == 0: sys.exit(1)
if ROUND == 0: hold()
"""
    )
    args = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--shutdown-timeout", "1", script)
    agent = job_folder.ends(0, *args)
    began, killed = (
        next(each["monotonic"] for each in agent.events(name) if each.get("exit_code") == code)
        for name, code in (("worker_ended", 1), ("worker_ended", -signal.SIGKILL))
    )
    assert killed - began >= 0.9


@pytest.mark.slow
def test_the_same_error_again_and_again_is_given_up(job_folder) -> None:
    script = job_folder.script("note('up')\nraise KeyError('always')")
    args = ("--standalone", "--max-restarts", "20", script)
    agent = job_folder.ends(1, *args, limit_s=60)
    rounds = len(job_folder.trail("up"))
    assert 2 <= rounds < 20
    assert f"the same error {rounds} times in a row" in agent.text
    assert agent.text.rstrip().endswith("KeyError: 'always'")


def test_a_failure_after_usr1_costs_a_restart(job_folder) -> None:
    """A signal that is passed on is no order to stop: what fails afterwards is a failure."""
    script = job_folder.script("on_signal('SIGUSR1')\nmeet()\nwhile not notes('signal'): time.sleep(0.01)\nsys.exit(6)")
    agent = job_folder.start("--standalone", script)
    job_folder.wait(1, "up")
    agent.signal(signal.SIGUSR1)
    assert agent.end() == 6, agent.text
    assert len(job_folder.trail("up")) == 1


# --- whole jobs whose workers are forked: restarts, hard kills, and that nobody pays who does not import torch --------


HEAVY = "import os\nopen('imports', 'a').write(f'{os.getpid()}\\n')\n"
WAITS = "import heavy\nchild()\ndaemon()\nmeet()\nhold()"


def lines_below(agent: Any) -> list[str]:
    """The command lines of all that the supervisor has."""
    below = children(agent.supervisor)
    return [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in below]


@pytest.fixture
def heavy(job_folder: Any) -> Any:
    """`heavy()`: the processes that have imported the heavy module."""
    (job_folder.folder / "heavy.py").write_text(HEAVY)
    return lambda: [int(line) for line in (job_folder.folder / "imports").read_text().split()]


def test_a_restart_imports_nothing_again(job_folder: Any, heavy: Any) -> None:
    script = job_folder.script("import heavy\nmeet()\nif ROUND < 2 and RANK == 1: os._exit(3)\nif ROUND < 2: hold()")
    line = ("--standalone", "--nproc-per-node", "3", "--max-restarts", "2", "--preload", "heavy", script)
    agent = job_folder.ends(0, *line)
    assert len(job_folder.trail("up")) == 9
    assert len(heavy()) == 1
    said = [each for each in agent.events("preload") if "why" in each]
    assert [(each["modules"], each["why"]) for each in said] == [(["heavy"], "as asked for")]


def test_nothing_outlives_a_killed_agent_nor_does_the_fork_server(job_folder: Any, heavy: Any) -> None:
    agent = job_folder.start("--standalone", "--nproc-per-node", "2", "--preload", "heavy", job_folder.script(WAITS))
    job_folder.wait(2, "up")
    (fork_server,) = heavy()
    agent.signal(signal.SIGKILL)
    job_folder.all_gone()
    until(lambda: not is_alive(fork_server), "the end of the fork server", 10.0)


def test_a_killed_supervisor_gets_a_successor_with_a_fork_server(job_folder: Any, heavy: Any) -> None:
    script = job_folder.script("import heavy\nmeet()\nif len({n['port'] for n in all_notes()}) < 2: hold()")
    agent = job_folder.start(
        "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--preload", "heavy", script
    )
    job_folder.wait(2, "up")
    os.kill(agent.supervisor, signal.SIGKILL)
    assert agent.end() == 0, agent.text
    assert len(heavy()) == 2, "one import for each supervisor"
    job_folder.all_gone()


def test_workers_go_on_when_the_fork_server_is_killed(job_folder: Any, heavy: Any) -> None:
    script = job_folder.script("import heavy\nmeet()\nwhile not os.path.exists('go'): time.sleep(0.01)")
    agent = job_folder.start("--standalone", "--nproc-per-node", "2", "--preload", "heavy", script)
    job_folder.wait(2, "up")
    os.kill(heavy()[0], signal.SIGKILL)
    agent.says("the fork server ended with exit code -9; it is built again")
    (job_folder.folder / "go").touch()
    assert agent.end() == 0, agent.text
    assert len(job_folder.trail("up")) == 2


SLOW = "import os, time\nopen('importing', 'w').write(str(os.getpid()))\ntime.sleep(100)\n"


@pytest.fixture
def slow(job_folder: Any) -> Any:
    """A torch whose _dynamo is never imported to the end. `slow()`: the process that tries."""
    (job_folder.folder / "numpy.py").touch()
    torch = job_folder.folder / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("class default_generator:\n    seed = staticmethod(lambda: 0)\n")
    (torch / "_dynamo.py").write_text(SLOW)
    pid = job_folder.folder / "importing"

    def importing() -> int:
        until(lambda: pid.exists() and pid.read_text(), "the import for restarts")
        return int(pid.read_text())

    return importing


def test_a_restart_does_not_wait_for_what_is_imported_for_restarts(job_folder: Any, slow: Any) -> None:
    waits = "while ROUND == 0 and not os.path.exists('importing'): time.sleep(0.01)"
    fails = "if ROUND == 0 and RANK == 1: os._exit(3)\nif ROUND == 0: hold()"
    script = job_folder.script(f"import torch\nmeet()\n{waits}\n{fails}")
    agent = job_folder.ends(0, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", script)
    assert len(job_folder.trail("up")) == 4
    assert [each["text"] for each in agent.events("preload") if each.get("trouble")] == []
    assert not is_alive(slow())


def test_nothing_outlives_an_agent_that_is_killed_while_modules_are_imported_for_restarts(
    job_folder: Any, slow: Any
) -> None:
    line = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    agent = job_folder.start(*line, job_folder.script("import torch\nmeet()\nhold()"))
    following = slow()
    agent.signal(signal.SIGKILL)
    job_folder.all_gone()
    until(lambda: not is_alive(following), "the end of the next fork server", 10.0)


def test_a_script_without_torch_has_no_fork_server(job_folder: Any) -> None:
    agent = job_folder.start("--standalone", "--nproc-per-node", "2", job_folder.script("meet()\nhold()"))
    job_folder.wait(2, "up")
    assert len(lines_below(agent)) == 2
    assert all("train.py" in line for line in lines_below(agent))
    agent.signal(signal.SIGTERM)
    agent.end()


TORCH = """
import torch
import torch.distributed as dist
meet()
while not os.path.exists("go"): time.sleep(0.01)
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
note("reduced", value=value.item())
meet("stay")
while not os.path.exists("end"): time.sleep(0.01)
dist.destroy_process_group()
"""


@pytest.mark.xdist_group("torch jobs")
def test_the_store_is_forked_when_the_first_client_connects(job_folder: Any) -> None:
    agent = job_folder.start("--standalone", "--nproc-per-node", "2", job_folder.script(TORCH))
    job_folder.wait(2, "up", limit_s=60)
    assert not any("store_server" in line for line in lines_below(agent))
    (job_folder.folder / "go").touch()
    job_folder.wait(2, "reduced", limit_s=60)
    (store,) = [line for line in lines_below(agent) if "store_server" in line]
    assert "bootstrap" in store, "forked, not started"
    job_folder.wait(2, "stay")
    (job_folder.folder / "end").touch()
    assert agent.end() == 0, agent.text
    assert [each["value"] for each in job_folder.trail("reduced")] == [2.0, 2.0]
    imported = [each["text"] for each in agent.events("preload") if "text" in each]
    assert len(imported) == 1, imported
    assert imported[0].startswith("imported numpy, torch in ")


def test_what_cannot_be_imported_is_said_on_the_console(job_folder: Any) -> None:
    agent = job_folder.ends(0, "--standalone", "--preload", "no_such_module", job_folder.script("note('ran')"))
    assert len(job_folder.trail("ran")) == 1
    assert "no_such_module cannot be imported: ModuleNotFoundError" in agent.text
