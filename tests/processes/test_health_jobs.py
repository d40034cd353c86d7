"""`--health-command` in real jobs: a node that fails is parked, a spare is taken, and the node comes back."""

from __future__ import annotations

import re
import textwrap
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


# --- GPUs: NVML is a double in the agent's process ---------------------------------------------------------------------

GPUS = """
import sys
sys.path.insert(0, {root!r})
from tests.support.fake_nvml import FakeNvml
from holdfast.cli import resolve
from holdfast.doctor import machine_reader
resolve.has_gpus = lambda probes: True
machine_reader.has_nvidia = lambda *root: True
import pathlib
folder = pathlib.Path({folder!r})

class Machine(FakeNvml):
    # The memory of the second GPU is in a file.

    def _device(self, name, handle, rest):
        file = folder / "used"
        if name == "MemoryInfo" and handle == 1 and file.exists():
            self.gpus[1]["MemoryInfo"] = {{"total": 80 << 30, "used": int(file.read_text()) << 20}}
        return super()._device(name, handle, rest)

GPU = {{"Name": "NVIDIA H100 80GB HBM3", "MemoryInfo": {{"total": 80 << 30, "used": 0}}}}
machine_reader._own_nvml = lambda: Machine([GPU, {{**GPU, **{answers!r}}}], file=folder / "xids")
"""


def on_gpus(job_folder: JobFolder, **answers: object) -> tuple[str, ...]:
    """`holdfast run` on a machine with two GPUs; the second one has these answers."""
    text = GPUS.format(root=str(Path(__file__).parents[2]), folder=str(job_folder.folder), answers=answers)
    return job_folder.changed(text)


def test_where_there_are_gpus_a_node_is_checked_without_being_asked(job_folder: JobFolder) -> None:
    agent = job_folder.ends(0, "--standalone", job_folder.script("note('ran')"), program=on_gpus(job_folder))
    (preflight,) = agent.events("preflight")
    assert preflight["fit"] is True
    assert len(job_folder.trail("ran")) == 1


def test_a_node_with_a_lost_gpu_starts_nothing_and_says_which(job_folder: JobFolder) -> None:
    line = ("--standalone", "--rdzv-conf", FAST, job_folder.script("note('ran')"))
    agent = job_folder.ends(1, *line, program=on_gpus(job_folder, all="error:GPU_IS_LOST"))
    assert "--preflight HF504 GPU health: GPU 1: GPU is lost" in agent.text
    assert job_folder.trail("ran") == []


def test_a_gpu_that_no_worker_sees_keeps_no_node_from_training(job_folder: JobFolder) -> None:
    line = ("--standalone", job_folder.script("note('ran')"))
    program = on_gpus(job_folder, all="error:GPU_IS_LOST")
    job_folder.ends(0, *line, program=program, env={"CUDA_VISIBLE_DEVICES": "0"})
    assert len(job_folder.trail("ran")) == 1


def test_an_xid_is_in_the_verdict_and_in_the_journal(job_folder: JobFolder) -> None:
    """The script has the driver report the XID, waits until its agent has written it down, and fails."""
    folder = job_folder.folder
    script = job_folder.script(
        textwrap.dedent(f"""
        from pathlib import Path
        Path("{folder}/xids").write_text("1 79\\n")
        until_s = time.monotonic() + 20
        while time.monotonic() < until_s and not any("coordinator.device" in each.read_text() for each in Path("{folder}").rglob("events.jsonl")):
            time.sleep(0.05)
        raise RuntimeError("CUDA error: unspecified launch failure")
        """)
    )
    agent = job_folder.ends(1, "--standalone", script, program=on_gpus(job_folder))
    (device,) = [each for each in agent.events() if each["event"] == "device"]
    assert (device["device"], device["xid"], device["severe"]) == ("GPU 1", 79, True)
    assert re.search(r"on GPU 1 of node \S+ [\d.]+ s before", agent.text)


def test_a_restart_waits_for_the_memory_of_the_workers_before(job_folder: JobFolder) -> None:
    """The first worker leaves memory in use. The test frees it when the agent waits for it."""
    used = job_folder.folder / "used"
    script = job_folder.script(
        textwrap.dedent(f"""
        from pathlib import Path
        if ROUND == 0:
            Path("{used}").write_text("30000")
            note("takes")
            sys.exit(1)
        note("ran", used=Path("{used}").read_text())
        """)
    )
    agent = job_folder.start("--standalone", "--max-restarts", "1", script, program=on_gpus(job_folder))
    job_folder.wait(1, "takes")
    used.write_text("0")
    assert agent.end() == 0
    (memory,) = agent.events("gpu_memory")
    assert memory["left_bytes"] == {}
    assert [each["used"] for each in job_folder.trail("ran")] == ["0"]
