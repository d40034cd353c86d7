"""torch over the network: ranks meet at MASTER_ADDR, talk by gloo, and go on when a node is gone."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from tests.network.fleet import Fleet, until

STEPS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
site, world = os.environ["SITE"], dist.get_world_size()
progress = os.open(f"{site}/world{world}.rank{dist.get_rank()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
while True:
    total = torch.tensor([1.0, float(os.path.exists(site + "/finish"))])
    dist.all_reduce(total)
    assert total[0].item() == world, total
    os.write(progress, b".")
    if total[1].item() == world:
        break
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_training_goes_on_without_a_killed_node(fleet) -> None:
    job: Fleet = fleet(3)
    job.c10d("2:3")
    job.script.write_text(STEPS)
    agents = job.start_all([1, 2, 3])
    until(lambda: steps(job, 3) > 20, job.story, 90)
    job.hosts[3].kill()
    until(lambda: steps(job, 2) > 0, job.story)
    job.finish_all(agents[:2])


def steps(job: Fleet, world: int) -> int:
    """How many steps the slowest rank of this world has done."""
    files = [job.folder / f"world{world}.rank{rank}" for rank in range(world)]
    return min(os.path.getsize(file) if file.exists() else 0 for file in files)
