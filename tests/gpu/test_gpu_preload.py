"""Forked workers and CUDA: the fork server never holds a context, and its workers initialise CUDA and train with NCCL."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("this machine has no GPU that torch can use", allow_module_level=True)

TRAINS = """
    import glob, os
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    assert not torch.cuda.is_initialized()
    supervisor = os.getppid()
    below = open(f"/proc/{supervisor}/task/{supervisor}/children").read().split()
    names = {pid: open(f"/proc/{pid}/comm").read().strip() for pid in below}
    (fork_server,) = [pid for pid, name in names.items() if name == "hf-fork-server"]
    for pid in (supervisor, fork_server):
        links = [os.readlink(fd) for fd in glob.glob(f"/proc/{pid}/fd/*")]
        assert not [link for link in links if "nvidia" in link], links
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    ones = torch.ones(4, device="cuda")
    dist.all_reduce(ones)
    model = DistributedDataParallel(torch.nn.Linear(4, 4).cuda(), device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(ones).square().sum().backward()
        optimizer.step()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(3)
    print("trained", float(ones.sum()), flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.timeout(180)
def test_a_forked_rank_trains_on_the_gpu_and_is_restarted(run_cli: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAINS))
    line = ["--standalone", "--max-restarts", "1", "--log-dir", str(tmp_path / "logs"), str(script)]
    done = run_cli(line, timeout=150)
    assert done.code == 0, done
    assert "trained 4.0" in done.out
    assert "exec" not in done.err, "it was not forked"
