"""Profiles and saves on demand, of real jobs: the files, the trace that each leaves, and all that can go wrong."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from holdfast.train.snapshots import folder
from tests.processes.conftest import Agent, JobFolder, SmallDisk, WarmAgents, holdfast, told
from tests.processes.test_control_jobs import beside, entries, refused
from tests.processes.test_dashboard_jobs import place, visitor
from tests.processes.test_hang_jobs import SCRIPTS
from tests.support.documents import checked
from tests.support.limits import limit_s, until

pytestmark = [
    pytest.mark.usefixtures("registry"),
    pytest.mark.xdist_group("torch jobs"),
    pytest.mark.timeout(240),
]
TORCH = f"""
sys.path.append({str(SCRIPTS)!r})
import torch, without_compiler
torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model(torch.ones(4, 8)).sum().backward()
meet()
if RANK == 2:
    while True: time.sleep(0.01)
while True:
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
"""
PY_SPY = """#!/bin/sh
line=$*
while [ "$1" != --output ]; do shift; done
trap 'echo "spied $line" > "$2"; exit' INT
while :; do sleep 0.05; done
"""
"""As soon as it is there, it can be interrupted: Python may take longer to start than the record lasts."""


@pytest.fixture(scope="module")
def agent_server(warm_agents: WarmAgents) -> WarmAgents:
    return warm_agents


def begun(job_folder: JobFolder, script: str, count: int, *args: str | Path, **more: Any) -> Agent:
    agent = job_folder.start("--standalone", f"--nproc-per-node={count}", *args, job_folder.script(script), **more)
    job_folder.wait(count, "up", 90)
    until(lambda: entries(job_folder), "an entry in the list")
    return agent


def why(done: Any) -> str:
    """Of the only rank that was asked for and not profiled."""
    assert done.returncode == 1, done.stderr
    (rank,) = checked("profile", done.stdout)["ranks"]
    return str(rank["why"])


def test_steps_and_seconds_of_ranks_are_profiled_and_what_cannot_be_is_said(job_folder: JobFolder) -> None:
    agent = begun(job_folder, TORCH, 3, "--dashboard=0", "--preload", "torch,torch._dynamo")
    until(lambda: holdfast("profile", "0,1", "--steps", "1").returncode == 0, "steps of both ranks", 60)
    view = told("profile", "0-1", "--steps", "3")
    assert [rank["rank"] for rank in view["ranks"]] == [0, 1]
    for rank in view["ranks"]:
        trace, table = map(Path, rank["files"])
        assert trace.parent == agent.folder / "profiles" / view["name"]
        names = [each.get("name", "") for each in json.loads(trace.read_bytes())["traceEvents"]]
        assert names.count("Optimizer.step#SGD.step") == 3
        assert "aten::addmm" in table.read_text()
        assert 1 <= len(rank["operations"]) <= 10
    assert "operation" in holdfast("profile", "1", "--seconds", "0.3").stdout
    # Without steps, only seconds.
    assert "--seconds 5" in why(holdfast("profile", "2", "--json"))
    assert told("profile", "2", "--seconds", "0.2")["ranks"][0]["files"]
    assert "rank 7: not running now; there are 3 ranks" in refused("profile", "0,7")
    for line, text in (
        (("0", "--steps", "0"), "1 to"),
        (("x",), "RANKS"),
        (("0-99",), "at most"),
        (("0", "--seconds", "-1"), "more"),
    ):
        assert text in refused("profile", *line), line
    # The page.
    client = visitor(agent)
    status, view = client.act(f"{place(agent)}act", do="profile", ranks="0", steps=2)
    assert (status, [rank["why"] for rank in view["ranks"]]) == (200, [""])
    file = f"profile/{view['name']}/rank0.trace.json"
    assert json.loads(client.get(place(agent) + file))["traceEvents"]
    assert client.act(f"{place(agent)}act", do="save")[0] == 409
    # Asked twice; then the rank dies.
    with beside("profile", "0", "--seconds", "60", "--json") as first:
        asked = "coordinator.profile_asked"
        until(lambda: any(each["for_s"] == 60 for each in agent.events(asked)), "the order")
        assert why(holdfast("profile", "0", "--steps", "1", "--json")) == "it is being profiled already"
        (pid,) = {each["pid"] for each in job_folder.trail("up") if each["rank"] == 0}
        os.kill(pid, signal.SIGKILL)
        assert "ended while it was profiled" in first.communicate()[0]
    agent.end()
    by = next(each for each in agent.events(asked) if each["steps"] == 3)
    assert (by["ranks"], by["steps"], by["by"].startswith("holdfast profile on ")) == ([0, 1], 3, True)
    assert {each["rank"] for each in agent.events("profile")} == {0, 1, 2}
    job_folder.all_gone()


def test_py_spy_records_where_it_is_and_a_program_without_torch_is_told_so(job_folder: JobFolder) -> None:
    spy = job_folder.folder / "bin" / "py-spy"
    spy.parent.mkdir()
    spy.write_text(PY_SPY)
    spy.chmod(0o755)
    path = f"{spy.parent}:{os.environ['PATH']}"
    agent = begun(job_folder, "meet()\nwhile True: time.sleep(0.01)", 2, env={"PATH": path})
    done = holdfast("profile", "1", "--seconds", f"{limit_s(0.3):g}", "--json")
    assert why(done) == "its program has not imported torch"
    (record,) = json.loads(done.stdout)["ranks"][0]["files"]
    assert record.endswith("rank1.speedscope.json")
    assert "--format speedscope" in Path(record).read_text()
    assert "torch optimizer" in why(holdfast("profile", "1", "--json"))
    assert "not every rank asks at a safe point" in refused("save")
    holdfast("kill")
    agent.end()
    job_folder.all_gone()


def test_a_full_disk_is_said_and_leaves_no_half_file(job_folder: JobFolder, disk: SmallDisk) -> None:
    agent = begun(job_folder, TORCH, 1, "--log-dir", disk.path / "logs", "--preload", "torch,torch._dynamo")
    until(lambda: holdfast("profile", "0", "--steps", "1").returncode == 0, "one fits", 60)
    disk.fill()
    assert "is the disk full?" in why(holdfast("profile", "0", "--steps", "100", "--json"))
    (run,) = (disk.path / "logs").iterdir()
    newest = max((run / "profiles").iterdir())
    assert list(newest.iterdir()) == []
    assert told("status")["phase"] == "running", "training goes on"
    holdfast("kill")
    agent.end()


SAVES = """
import torch
import holdfast.train as ht

torch.set_num_threads(1)
torch.manual_seed(0)  # the ranks have the same model
with ht.process_group(), ht.Snapshots("runs", every=None) as snaps:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snaps.track(model=model, optimizer=optimizer)
    snaps.resume()
    meet()
    while True:
        optimizer.step()
        snaps.step()
        time.sleep(0.01)
"""


def test_save_has_all_ranks_save_at_one_step_and_go_on(job_folder: JobFolder) -> None:
    agent = begun(job_folder, SAVES, 2, "--preload", "torch,torch._dynamo")
    until(lambda: holdfast("save").returncode == 0, lambda: f"a save\n{agent.text}", 60)
    runs = job_folder.folder / "runs"
    first = until(lambda: folder.survey(runs).newest_valid, lambda: f"a snapshot\n{agent.text}")
    assert told("status")["phase"] == "running"
    assert "all ranks save" in holdfast("save").stdout
    until(lambda: len(folder.survey(runs).committed) == 2, lambda: f"the second\n{agent.text}")
    assert folder.survey(runs).newest_valid.manifest.step > first.manifest.step
    assert agent.events("coordinator.save_asked")[-1]["by"].startswith("holdfast save on ")
    assert {each["generation"] for each in agent.events("generation")} == {1}, "nothing was restarted"
    assert told("stop")["kind"] == "preempted"
    agent.end()
