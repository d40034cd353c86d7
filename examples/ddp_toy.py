"""The smallest DDP program: two steps on random numbers. Good for trying a launcher, or a new machine.

holdfast run --standalone --nproc-per-node 2 examples/ddp_toy.py
holdfast run --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint node0:29400 --rdzv-id toy examples/ddp_toy.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    torch.set_num_threads(1)
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")

    torch.manual_seed(20)
    model = DistributedDataParallel(nn.Linear(10, 5).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())  # from here on every rank draws other numbers
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(20, 10, device=device)).square().mean().backward()
        optimizer.step()

    # Different data, averaged gradients: the weights are the same everywhere.
    weight = model.module.weight.detach()
    mean = weight.clone()
    dist.all_reduce(mean)
    same = torch.allclose(mean / dist.get_world_size(), weight)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} on {device}: weights agree: {same}", flush=True)

    dist.barrier()  # nobody takes its end of the connections away while another still uses them
    del model  # DDP holds on to the group: it goes first
    dist.destroy_process_group()
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
