"""Whole jobs whose workers are forked: restarts, hard kills, and that nobody pays who does not import torch."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.limits import until

HEAVY = "import os\nopen('imports', 'a').write(f'{os.getpid()}\\n')\n"
WAITS = "import heavy\nchild()\ndaemon()\nmeet()\nhold()"


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ended(pid: int) -> bool:
    """Gone, or a zombie that somebody will reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True


def lines_below(agent: Any) -> list[str]:
    """The command lines of all that the keeper has."""
    (keeper,) = children(agent.pid)
    return [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in children(keeper)]


@pytest.fixture
def heavy(site: Any) -> Any:
    """`heavy()`: the processes that have imported the heavy module."""
    (site.folder / "heavy.py").write_text(HEAVY)
    return lambda: [int(line) for line in (site.folder / "imports").read_text().split()]


def test_a_restart_imports_nothing_again(site: Any, heavy: Any) -> None:
    script = site.script("import heavy\nmeet()\nif ROUND < 2 and RANK == 1: os._exit(3)\nif ROUND < 2: hold()")
    line = ("--standalone", "--nproc-per-node", "3", "--max-restarts", "2", "--preload", "heavy", script)
    code, agent = site.run(*line)
    assert code == 0, agent.text
    assert len(site.trail("up")) == 9
    assert len(heavy()) == 1
    said = [each for each in agent.events("preload") if "why" in each]
    assert [(each["modules"], each["why"]) for each in said] == [(["heavy"], "as asked for")]


def test_nothing_outlives_a_killed_agent_nor_does_the_nursery(site: Any, heavy: Any) -> None:
    agent = site.start("--standalone", "--nproc-per-node", "2", "--preload", "heavy", site.script(WAITS))
    site.wait(2, "up")
    (nursery,) = heavy()
    agent.signal(signal.SIGKILL)
    site.all_gone(limit_s=1.0)
    until(lambda: ended(nursery), "the end of the nursery", 1.0)


def test_a_killed_keeper_gets_a_successor_with_a_nursery(site: Any, heavy: Any) -> None:
    script = site.script("import heavy\nmeet()\nif len({n['port'] for n in all_notes()}) < 2: hold()")
    agent = site.start("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--preload", "heavy", script)
    site.wait(2, "up")
    (keeper,) = children(agent.pid)
    os.kill(keeper, signal.SIGKILL)
    assert agent.end() == 0, agent.text
    assert len(heavy()) == 2, "one import for each keeper"
    site.all_gone()


def test_workers_go_on_when_the_nursery_is_killed(site: Any, heavy: Any) -> None:
    script = site.script("import heavy\nmeet()\nwhile not os.path.exists('go'): time.sleep(0.01)")
    agent = site.start("--standalone", "--nproc-per-node", "2", "--preload", "heavy", script)
    site.wait(2, "up")
    os.kill(heavy()[0], signal.SIGKILL)
    agent.says("the nursery ended with exit code -9; it is built again")
    (site.folder / "go").touch()
    assert agent.end() == 0, agent.text
    assert len(site.trail("up")) == 2


def test_a_script_without_torch_has_no_nursery(site: Any) -> None:
    agent = site.start("--standalone", "--nproc-per-node", "2", site.script("meet()\nhold()"))
    site.wait(2, "up")
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
def test_the_store_is_forked_when_the_first_client_connects(site: Any) -> None:
    agent = site.start("--standalone", "--nproc-per-node", "2", site.script(TORCH))
    site.wait(2, "up", limit_s=60)
    assert not any("store_server" in line for line in lines_below(agent))
    (site.folder / "go").touch()
    site.wait(2, "reduced", limit_s=60)
    (store,) = [line for line in lines_below(agent) if "store_server" in line]
    assert "bootstrap" in store, "forked, not started"
    site.wait(2, "stay")
    (site.folder / "end").touch()
    assert agent.end() == 0, agent.text
    assert [each["value"] for each in site.trail("reduced")] == [2.0, 2.0]
    imported = [each["text"] for each in agent.events("preload") if "text" in each]
    assert len(imported) == 1, imported
    assert imported[0].startswith("imported numpy, torch in ")


def test_what_cannot_be_imported_is_said_on_the_console(site: Any) -> None:
    code, agent = site.run("--standalone", "--preload", "no_such_module", site.script("note('ran')"))
    assert code == 0, agent.text
    assert len(site.trail("ran")) == 1
    assert "no_such_module cannot be imported: ModuleNotFoundError" in agent.text
