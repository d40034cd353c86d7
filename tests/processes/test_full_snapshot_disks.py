"""A disk of snapshots that takes nothing, under jobs of two ranks: while they train, when they restart, at their last save.

The disks are small tmpfs mounts that are full, or break in the middle (tests/support/breaking_disks.py).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from holdfast.train.snapshots import folder
from tests.processes.conftest import LACKS, Agent, JobFolder, SmallDisk, WarmAgents
from tests.support.breaking_disks import FAULTS, BreakingDisk, over_quota
from tests.support.limits import until

pytestmark = [pytest.mark.xdist_group("torch jobs"), pytest.mark.timeout(240)]

CODES = {"over quota": "HF214", "read-only": "HF218", "dead": "HF217"}
"""Of the verdict, by fault."""

TRAIN = """
import torch
import torch.distributed as dist
import holdfast.train as ht
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Linear(300, 300)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
keep = ht.Keep(last=2) if sys.argv[3] == "some" else None
snaps = ht.Snapshots(sys.argv[1], every="2 steps", memory_every=1, keep=keep, options=ht.SnapshotOptions(failed_saves_max=10_000))
state = snaps.track(model=model, optimizer=optimizer)
resumed = snaps.resume()
note("resumed", step=resumed and resumed.step, source=resumed and resumed.source)
last = 10**9
while state.step < last:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    snaps.step()
    time.sleep(0.02)
    note("step", step=state.step)
    end = os.path.exists(sys.argv[2])
    ends = [None] * WORLD
    dist.all_gather_object(ends, end)
    last = state.step if all(ends) else last
    if last == state.step:
        snaps.save()
snaps.close()
"""


@pytest.fixture(scope="module")
def agent_server(warm_agents: WarmAgents) -> WarmAgents:
    return warm_agents


class Training:
    """A job of two ranks that trains until it is asked to make its last save."""

    def __init__(
        self, job_folder: JobFolder, disk: SmallDisk | BreakingDisk, *options: str, keep: str = "some"
    ) -> None:
        self.job_folder = job_folder
        self.snapshots = disk.path / "snapshots"
        self.gate = job_folder.folder / "gate"
        head = ("--standalone", "--nproc-per-node", "2", "--preload", "torch,torch._dynamo", *options)
        self.agent: Agent = job_folder.start(*head, job_folder.script(TRAIN), str(self.snapshots), self.gate, keep)

    def make_steps(self, count: int) -> None:
        """Wait until both ranks have done so many more."""
        self.job_folder.wait(len(self.job_folder.trail("step")) + 2 * count, "step", 90.0)

    def fill(self, disk: SmallDisk, lack: str) -> None:
        """Leave no room until a save has failed. One that was being written may still be committed, and the deletion of
        an older one then makes room for the next."""

        def failed() -> bool:
            LACKS[lack](disk)
            return "No space left on device" in self.agent.text

        until(failed, "a save fails", 90.0)

    def breaks(self, disk: BreakingDisk) -> None:
        """Let no save succeed until one has failed."""
        disk.fails()
        self.agent.says(disk.reason, 90.0)

    def end(self) -> int:
        self.gate.touch()
        return self.agent.end(90.0)

    @property
    def steps(self) -> list[int]:
        """Of the committed snapshots."""
        return [each.step for each in folder.survey(self.snapshots).committed]


@pytest.mark.parametrize("lack", LACKS)
def test_a_full_disk_at_the_last_save_ends_the_job_with_its_reason(
    job_folder: JobFolder, disk: SmallDisk, lack: str
) -> None:
    job = Training(job_folder, disk, keep="all")  # else the deletion of older ones makes room
    job.make_steps(5)
    job.fill(disk, lack)
    assert job.end() == 1
    text = job.agent.text
    assert "HF214" in text, text
    assert "SnapshotWriteError" in text
    assert "No space left on device" in text
    assert "a snapshot is still being written" not in text, "nobody is waited for"
    assert job.steps, "older snapshots are there"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_disk_that_breaks_costs_the_saves_and_the_last_one_says_why(
    job_folder: JobFolder, tmp_path: Path, fault: str
) -> None:
    with FAULTS[fault](tmp_path) as disk:
        job = Training(job_folder, disk)
        job.make_steps(5)
        job.breaks(disk)
        job.make_steps(10)
        assert job.end() == 1
        text = job.agent.text
    assert CODES[fault] in text, text
    assert "SnapshotWriteError" in text
    assert text.count(disk.reason) > 1, text
    assert "training goes on" not in text[text.index("Traceback") :], text
    assert "has not ended" not in text, "nothing is waited for"


def test_a_quota_that_is_raised_later_costs_saves_and_nothing_else(job_folder: JobFolder, tmp_path: Path) -> None:
    with over_quota(tmp_path) as disk:
        job = Training(job_folder, disk)
        until(lambda: job.steps, "a first snapshot", 90.0)
        job.breaks(disk)
        job.make_steps(10)
        newest = max(job.steps)
        disk.recovers()
        job.make_steps(40)
        assert job.end() == 0, job.agent.text
        assert len(job.steps) == 2
        assert min(job.steps) > newest


def test_a_disk_that_is_full_for_a_while_costs_saves_and_retention_goes_on(
    job_folder: JobFolder, disk: SmallDisk
) -> None:
    job = Training(job_folder, disk)
    job.make_steps(5)
    job.fill(disk, "no blocks")
    job.make_steps(20)
    newest = max(job.steps)
    disk.free()
    job.make_steps(40)
    assert job.end() == 0, job.agent.text
    assert len(job.steps) == 2
    assert min(job.steps) > newest


@pytest.mark.parametrize("lack", ["no blocks"])  # a lease needs an inode on a tmpfs
def test_a_restart_on_a_full_disk_goes_on_from_memory(job_folder: JobFolder, disk: SmallDisk, lack: str) -> None:
    job = Training(job_folder, disk, "--max-restarts", "1")
    job.make_steps(6)
    job.fill(disk, lack)
    job.make_steps(6)
    newest = max(job.steps)
    os.kill(job_folder.trail("resumed", rank=1)[-1]["pid"], signal.SIGKILL)
    resumed = job_folder.wait(4, "resumed", 90.0)[2:]
    assert {each["source"] for each in resumed} == {"memory"}, job.agent.text
    assert {each["step"] > newest for each in resumed} == {True}
    job.make_steps(5)
    disk.free()
    assert job.end() == 0, job.agent.text
    assert max(job.steps) > newest


def test_a_snapshot_folder_on_a_disk_that_is_full_from_the_start_is_an_error_before_training(
    job_folder: JobFolder, disk: SmallDisk, tmp_path: Path
) -> None:
    disk.fill_and_take_inodes()
    job = Training(job_folder, disk)
    assert job.end() == 1
    assert "HF214" in job.agent.text
    assert "No space left on device" in job.agent.text
    assert not job_folder.trail("step")
