"""Retention while a job trains: the saver reads back what stays, damage is found before anything older goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.warm import Warm

pytestmark = pytest.mark.xdist_group("torch")

JOB = """
import os, signal, sys
from pathlib import Path
import torch
import holdfast.train as ht
from holdfast.snapshots import folder as folders

folder, what = Path(sys.argv[1]), sys.argv[2]
model = torch.nn.Linear(3, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
real, here = folders.verify, []

def verify(snapshot, *given):
    here.append(snapshot.step)
    real(snapshot, *given)

folders.verify = verify

def saver():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        line = path.read_bytes()
        if b"holdfast.snapshots.saver" in line and line.split(b"\\0")[-2] == str(os.getpid()).encode():
            return int(path.parent.name)
    raise SystemExit("there is no saver")

with ht.Snapshots(folder, every=None, memory_every=None, keep=ht.Keep(last=2)) as snaps:
    snaps.track(model=model, optimizer=optimizer)
    snaps.resume()
    for step in range(1, 5):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        snaps.step()
        snaps.save(wait=True)
        if step == 3 and what == "damage":
            file = next(folder.glob("step_000000003.*/*.safetensors"))
            file.write_bytes(bytes(file.stat().st_size))
        if step == 4 and what == "kill":
            os.kill(saver(), signal.SIGKILL)
        snaps._pruner.finish()
        print("after", step, *sorted(path.name for path in folder.glob("step_*")))
print("read here", here)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


@pytest.mark.parametrize(
    ("what", "left", "read_here"),
    [
        ("nothing", ["step_000000003.0001", "step_000000004.0001"], []),
        ("damage", ["step_000000002.0001", "step_000000004.0001"], []),
        ("kill", ["step_000000003.0001", "step_000000004.0001"], [4]),
    ],
)
def test_what_stays(warm: Warm, job: Path, tmp_path: Path, what: str, left: list[str], read_here: list[int]) -> None:
    done = warm.run([job, str(tmp_path / "snaps"), what], timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"after 4 {' '.join(left)}" in done.stdout, done.stdout
    assert f"read here {read_here}" in done.stdout, "the saver reads, unless there is none"
    assert sorted(path.name for path in (tmp_path / "snaps").glob("step_*")) == left
    assert ("step_000000003.0001 was set aside" in done.stderr) == (what == "damage")
    assert len(list((tmp_path / "snaps").glob("bad.*"))) == (what == "damage")
