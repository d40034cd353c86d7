"""A training job whose snapshots are in an object store, with the saver and with a worker that is killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.train.snapshots import folder
from tests.support.limits import until
from tests.support.object_store import BUCKET, SECRET, ObjectStore, forget_connections, running_store, variables
from tests.warm import Warm
from tests.warm_jobs import WarmJobs

pytestmark = pytest.mark.allow_threads("fsspecIO", "asyncio_")

JOB = """
import json, os, signal, sys, torch
import holdfast.train as ht
url, stage, last, kill = sys.argv[1], sys.argv[2], int(sys.argv[3]), len(sys.argv) > 4
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
snaps = ht.Snapshots(url, every="3 steps", memory_every=1, keep=ht.Keep(last=2), options=ht.SnapshotOptions(staging_folder=stage))
state = snaps.track(model=model, optimizer=optimizer)
resumed = snaps.resume()
while state.step < last:
    if kill and state.step == last - 1:
        snaps.save(wait=True)  # nothing is being written then: there is memory for the last step
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    snaps.step(loss=loss)
if kill:
    os.kill(os.getpid(), signal.SIGKILL)
snaps.save(wait=True)
snaps.close()
weights = torch.cat([each.flatten() for each in model.parameters()]).tolist()
print(json.dumps([resumed and [resumed.step, resumed.source], weights]))
"""

POISONED = """
import json, sys, torch
import holdfast.train as ht
class Level(dict):
    state_dict, load_state_dict = dict.copy, dict.update
model, level = torch.nn.Linear(2, 2), Level(now=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with ht.Snapshots(sys.argv[1]) as snaps:
    state = snaps.track(model=model, optimizer=optimizer, level=level)
    resumed = snaps.resume()
    while state.step < 6:
        if level["now"] < 0 and state.step == 4:
            raise ValueError(f"step {state.step}: no such level")
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        snaps.step()
        if state.step == 3 and len(sys.argv) > 2:
            level["now"] = -1
        if state.step in (2, 4):
            snaps.save(wait=True)
print(json.dumps([resumed.step, resumed.skipped]))
"""


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with running_store() as started:
        yield started


@pytest.fixture(scope="module")
def jobs(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmJobs]:
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "job.py").write_text(JOB)
    (folder / "poisoned.py").write_text(POISONED)
    with WarmJobs(warm, folder, "holdfast.train.snapshots_api", "s3fs") as made:
        yield made


def test_goes_on_after_a_kill_from_what_the_saver_has_uploaded(
    store: ObjectStore, jobs: WarmJobs, tmp_path: Path
) -> None:
    """Step 7 was in memory alone when the worker was killed: the saver, which has no packages of its own, uploads it."""
    script, url = jobs.folder / "job.py", f"s3://{BUCKET}/killed"
    with variables(store.environ()):
        calm = jobs.run(script, f"s3://{BUCKET}/calm", tmp_path, "10")
        assert calm.returncode == 0, calm.stderr
        assert jobs.run(script, url, tmp_path, "7", "kill").returncode == -9
        until(lambda: [each.step for each in folder.survey(url).committed][-1:] == [7], "step 7 is in the store")
        again = jobs.run(script, url, tmp_path, "10")
        assert again.returncode == 0, again.stderr
        assert json.loads(again.stdout) == [[7, "disk"], json.loads(calm.stdout)[1]]
        found = folder.survey(url)
        assert [each.step for each in found.committed] == [9, 10]
        for each in found.committed:
            folder.verify(each)
            (text,) = {(each.path / name).read(0, 1 << 20).decode() for name in ("MANIFEST.json",)}
            assert SECRET not in text
        forget_connections()
    assert list(tmp_path.iterdir()) == []


def test_a_poisoned_state_is_left_out(store: ObjectStore, jobs: WarmJobs) -> None:
    """With default options, and without a launcher that knows how the life before ended."""
    script, url = jobs.folder / "poisoned.py", f"s3://{BUCKET}/poisoned"
    with variables(store.environ()):
        for arguments in ([url, "poison"], [url]):
            failed = jobs.run(script, *arguments)
            assert failed.stderr.rstrip().endswith("ValueError: step 4: no such level"), failed.stderr
        done = jobs.run(script, url)
        assert done.returncode == 0, done.stderr
        step, skipped = json.loads(done.stdout)
        assert step == 2
        assert "training failed at step 4" in skipped[0]
        assert [each.step for each in folder.survey(url).suspects] == [4]
        forget_connections()
