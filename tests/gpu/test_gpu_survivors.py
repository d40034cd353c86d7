"""Ranks with NCCL that go on in their processes when another one is killed.

One rank needs one GPU: NCCL refuses two ranks on the same one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.limits import limit_s

torch = pytest.importorskip("torch")
RANKS = 3
if not torch.cuda.is_available():
    pytest.skip("this machine has no GPU that torch can use", allow_module_level=True)
if torch.cuda.device_count() < RANKS:
    pytest.skip(f"{RANKS} ranks with NCCL need {RANKS} GPUs", allow_module_level=True)

SCRIPT = """
    import os, signal, sys, time
    import torch, torch.distributed as dist
    from torch import nn
    import holdfast.train as ht

    where, folder = sys.argv[1:]
    STEPS, KILLED_AT = 60, 20


    def dies(pg, state):
        return pg.rank == 1 and state.step == KILLED_AT and not os.path.exists(f"{folder}/killed")


    def die(*_):
        open(f"{folder}/killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


    with ht.process_group() as pg, ht.Snapshots(f"{folder}/snapshots", every="1h", memory_every=5) as snaps:
        model = ht.ddp(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)), pg)
        optimizer = torch.optim.Adam(model.parameters())
        state = snaps.track(model=model, optimizer=optimizer)
        snaps.resume()

        @ht.survive(snaps)
        def train():
            print(f"rank {pg.rank} of {pg.world} pid {os.getpid()} after step {state.step}", flush=True)
            while state.step < STEPS or pg.world < int(os.environ["RANKS"]):
                ones = torch.ones(32, 64, device=pg.device)
                if where == "all-reduce" and dies(pg, state):
                    die()
                dist.all_reduce(ones)
                loss = model(ones / pg.world).square().mean()
                if where == "backward" and dies(pg, state):
                    loss.register_hook(die)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                snaps.step()
                time.sleep(0.02)

        train()
        sums = torch.stack([each.detach().double().sum() for each in model.parameters()]).sum()
        low, high = sums.clone(), sums.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
        print(f"weights agree: {bool(low == high)}", flush=True)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["all-reduce", "backward"])
def test_the_others_go_on_after_a_kill(where: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    line = ["--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "1", "--log-dir", str(tmp_path / "logs")]
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.run", *line, str(script), where, str(tmp_path)],
        env={**os.environ, "RANKS": str(RANKS)},
        capture_output=True,
        text=True,
        timeout=limit_s(200),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pids = {
        world: set(re.findall(rf"rank \d of {world} pid (\d+)", done.stdout)) for world in range(RANKS - 1, RANKS + 1)
    }
    assert len(pids[RANKS - 1]) == RANKS - 1, "the others went on without it"
    assert len(pids[RANKS]) == RANKS + 1, "one replacement joined them, and nothing else was started"
    assert pids[RANKS - 1] < pids[RANKS]
    assert done.stdout.count("weights agree: True") == RANKS
