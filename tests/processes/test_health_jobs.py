"""`--health-command` in real jobs: a node that fails is parked, a spare is taken, and the node comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.conftest import JobFolder, SmallDisk, c10d, coordinators_first

FAST = "settle=0.1,join_timeout=4"


def check(folder: Path, body: str, name: str = "check.sh") -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_a_healthy_node_trains(job_folder: JobFolder) -> None:
    command = check(job_folder.folder, "exit 0")
    script = job_folder.script("note('ran')")
    agent = job_folder.ends(0, "--standalone", "--health-command", command, script)
    (health,) = agent.events("health")
    assert health["reason"] == ""


def test_a_job_without_a_healthy_node_starts_nothing_and_ends_with_the_reason(
    job_folder: JobFolder, endpoint: str
) -> None:
    command = check(job_folder.folder, "echo GPU 2 is lost >&2; exit 3")
    script = job_folder.script("note('ran')")
    line = c10d(endpoint, "1", "--rdzv-conf", FAST, "--health-command", command)
    agent = job_folder.ends(1, *line, script)
    assert "HF310" in agent.text
    assert "ended with 3: GPU 2 is lost" in agent.text
    assert job_folder.trail("ran") == []


def test_a_spare_takes_the_place_of_a_node_that_fails(job_folder: JobFolder, endpoint: str) -> None:
    """Three agents for two nodes: the first check on the second agent fails."""
    fit, unfit = check(job_folder.folder, "exit 0"), check(job_folder.folder, "echo broken; exit 1", "unfit.sh")
    script = job_folder.script("meet()")
    line = c10d(endpoint, "2", "--rdzv-conf", "settle=0.1")
    job_folder.start(*line, "--health-command", fit, script)
    job_folder.joined(1)
    bad = job_folder.start(*line, "--health-command", unfit, script)
    job_folder.joined(2)
    job_folder.start(*line, "--health-command", fit, script)
    assert [job_folder.agents[0].end(), job_folder.agents[2].end()] == [0, 0]
    bad.end()
    leader = coordinators_first(job_folder.agents)[0]
    (parked,) = leader.events("coordinator.parked")
    assert "ended with 1: broken" in parked["reason"]
    assert {each["agent"] for each in job_folder.trail("up")} == {"0", "2"}


@pytest.mark.parametrize("body", ["exec sleep 600", "setsid sleep 600 & sleep 600"])
def test_a_command_that_hangs_is_ended_with_all_that_it_has_started(job_folder: JobFolder, body: str) -> None:
    command = check(job_folder.folder, f"echo $$ >> {job_folder.folder}/pids; {body}")
    change = "from holdfast.extensions.health import node\nnode.OnNode.__init__.__defaults__ = (0.5, 30.0)"
    script = job_folder.script("note('ran')")
    line = ("--standalone", "--rdzv-conf", FAST, "--health-command", command)
    agent = job_folder.ends(1, *line, script, program=job_folder.changed(change))
    assert "has not ended within 0.5 s" in agent.text
    assert job_folder.trail("ran") == []


def test_a_node_that_recovers_takes_part(job_folder: JobFolder) -> None:
    """The check fails the first time."""
    command = check(job_folder.folder, f"mkdir {job_folder.folder}/seen && exit 1; exit 0")
    change = "from holdfast.extensions.health import node\nnode.OnNode.__init__.__defaults__ = (20.0, 0.2)"
    line = ("--standalone", "--health-command", command, job_folder.script("note('ran')"))
    agent = job_folder.ends(0, *line, program=job_folder.changed(change))
    assert len(job_folder.trail("ran")) == 1
    assert len(agent.events("coordinator.parked")) == len(agent.events("coordinator.unparked")) == 1


def test_a_node_without_faults_passes_its_preflight_once(job_folder: JobFolder) -> None:
    script = job_folder.script("note('ran')\nif ROUND == 0: sys.exit(1)")
    agent = job_folder.ends(0, "--standalone", "--max-restarts", "1", "--preflight", "quick", script)
    (preflight,) = agent.events("preflight")
    assert preflight["fit"] is True
    assert len(job_folder.trail("ran")) == 2


def refused(job_folder: JobFolder, level: str, env: dict[str, str]) -> str:
    """Run a job whose node does not pass. Returns what is on the screen."""
    line = ("--standalone", "--rdzv-conf", FAST, "--preflight", level)
    agent = job_folder.ends(1, *line, job_folder.script("note('ran')"), env=env)
    assert "HF310" in agent.text
    assert job_folder.trail("ran") == []
    return agent.text


def test_a_node_whose_temporary_folder_is_full_starts_nothing(job_folder: JobFolder, disk: SmallDisk) -> None:
    disk.fill_and_take_inodes()
    text = refused(job_folder, "quick", {"TMPDIR": str(disk.path)})
    assert f"--preflight HF519 folder: {disk.path} cannot be written" in text


def test_a_full_preflight_imports_torch(job_folder: JobFolder) -> None:
    (job_folder.folder / "torch").mkdir()
    (job_folder.folder / "torch" / "__init__.py").write_text("raise OSError('libcudart.so: not found')")
    text = refused(job_folder, "full", {"PYTHONPATH": str(job_folder.folder)})
    assert "libcudart.so: not found" in text
