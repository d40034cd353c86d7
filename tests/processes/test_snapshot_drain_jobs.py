"""Two real agents whose workers train with holdfast.train: a node leaves, one comes, and no sample is lost or trained twice."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from holdfast.train.snapshots import folder
from tests.processes.conftest import WarmAgents, c10d

pytestmark = [pytest.mark.xdist_group("torch jobs"), pytest.mark.timeout(240)]
LIMIT_S = 90.0
PRELOAD = "torch,torch._dynamo"
"""An optimizer imports the second, which takes as long as the first: once for each node, not in each of ten workers."""
GLOBAL = 24
TRAIN = f"""
import torch
import holdfast.train as ht
from torch import nn


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return torch.tensor([float(index)])


torch.manual_seed(0)
torch.set_num_threads(1)
with ht.process_group() as pg, ht.Snapshots("runs", every=None, memory_every=3) as snaps:
    model = ht.ddp(nn.Linear(1, 1), pg)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12, momentum=0.9)
    loader = ht.DataLoader(Rows(), batch_size=4, global_batch_size={GLOBAL}, shuffle=True, seed=5)
    state = snaps.track(model=model, optimizer=optimizer, loader=loader)
    resumed = snaps.resume()
    note("begun", resumed=resumed and resumed.step, source=resumed and resumed.source, cursor=loader.cursor)
    for epoch in state.epochs(1):
        for rows in loader:
            with ht.accumulate(model, loader) as micro:
                micro.backward(model(rows).square().mean())
            note("trained", samples=rows.flatten().long().tolist() if loader.share.weight else [])
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()
                note("stepped", weight=model.module.weight.item() if WORLD > 1 else model.weight.item())
            time.sleep(0.01)
            snaps.step()
"""


@pytest.fixture(scope="module")
def agent_server(warm_agents: WarmAgents) -> WarmAgents:
    return warm_agents


def check(job_folder: Any, worlds: list[int]) -> None:
    """The trail of all lives together is a prefix of the epoch, each sample once, and it is what the last snapshot says."""
    (cursor,) = {each["cursor"] for each in [last_state(job_folder.folder / "runs")]}
    trained = Counter(sample for each in job_folder.trail("trained") for sample in each["samples"])
    assert set(trained.values()) == {1}, [sample for sample, count in trained.items() if count > 1][:9]
    assert trained.total() == cursor
    assert cursor % GLOBAL == 0
    lives: dict[str, list[Any]] = {}
    for each in job_folder.trail("begun"):
        lives.setdefault(each["port"], []).append(each)
    assert [len(each) for each in lives.values()] == worlds
    for life in lives.values():
        assert len({(each["resumed"], each["source"], each["cursor"]) for each in life}) == 1, life
    # Each life begins with the sample after the last one of the life before.
    begun = [life[0]["cursor"] for life in lives.values()]
    counts = [sum(len(each["samples"]) for each in job_folder.trail("trained", port=port)) for port in lives]
    assert begun == [sum(counts[:number]) for number in range(len(counts))]


def last_state(runs: Path) -> dict[str, Any]:
    newest = folder.survey(runs).newest_valid
    assert newest is not None
    from holdfast.train import export  # imports torch

    state: dict[str, Any] = export.load(newest)["loader"]
    return state


def test_a_node_leaves_and_another_comes(job_folder, endpoint: str) -> None:
    script = job_folder.script(TRAIN)
    args = c10d(endpoint, "1:2", "--rdzv-conf", "settle=0.1", "--grow", "drain", "--max-restarts", "0")
    args = (*args, "--nproc-per-node", "2", "--preload", PRELOAD)
    stays = job_folder.start(*args, script)
    leaves = job_folder.start(*args, script)
    job_folder.wait(24, "stepped", LIMIT_S, world=4)
    leaves.signal(signal.SIGTERM)
    assert leaves.end(LIMIT_S) == 75, leaves.text
    job_folder.wait(8, "stepped", LIMIT_S, world=2)
    comes = job_folder.start(*args, script)
    before = len(job_folder.trail("stepped", world=4))
    job_folder.wait(before + 12, "stepped", LIMIT_S, world=4)
    for agent in (stays, comes):
        agent.signal(signal.SIGTERM)
    assert stays.end(LIMIT_S) == 75, stays.text
    assert comes.end(LIMIT_S) == 75, comes.text
    worlds = [len({n["rank"] for n in job_folder.trail("begun", port=port)}) for port in ports(job_folder)]
    assert worlds[-3:] == [4, 2, 4]
    check(job_folder, worlds)
    job_folder.all_gone()


def ports(job_folder: Any) -> list[str]:
    return list(dict.fromkeys(each["port"] for each in job_folder.trail("begun")))
