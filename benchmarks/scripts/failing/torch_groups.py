"""Ranks that wait for each other in vain, within short time-outs."""

from __future__ import annotations

import datetime
import os
import time

from .parts import every, group, meet, rank
from .torch_steps import ddp

SHORT_S = 4.0
ASLEEP_S = 25.0


@every("1", "HF209", ranks=3)
def sleeps_in_front_of_a_reduction() -> None:
    group(SHORT_S)
    meet()
    if rank() == 1:
        time.sleep(ASLEEP_S)
    meet()


@every("2", "HF209", ranks=3)
def sleeps_in_front_of_a_backward() -> None:
    import torch

    group(SHORT_S)
    model = ddp()
    for step in range(10):
        if rank() == 2 and step == 3:
            _evaluate()
        model(torch.ones(1, 8)).sum().backward()


def _evaluate() -> None:
    until_s = time.monotonic() + ASLEEP_S
    while time.monotonic() < until_s:
        sum(range(1000))


@every("2", "HF209", ranks=3)
def misses_the_monitored_barrier() -> None:
    import torch.distributed as dist

    group()
    meet()
    if rank() == 2:
        time.sleep(ASLEEP_S)
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=SHORT_S))


@every("0", "HF209", ranks=3)
def never_sets_a_key() -> None:
    import torch.distributed as dist

    group()
    meet()
    store = dist.distributed_c10d._get_default_store()
    if rank() == 0:
        time.sleep(ASLEEP_S)
        store.set("tokenizer/ready", "1")
    store.wait(["tokenizer/ready"], datetime.timedelta(seconds=SHORT_S))


@every("0", "HF209 HF225 HF244", ranks=3)
def barrier_of_the_first_rank_alone() -> None:
    import torch.distributed as dist

    group(SHORT_S)
    for step in range(10):
        if rank() == 0 and step == 3:
            dist.barrier()
        meet()


@every("1", "HF209 HF225 HF244", ranks=3)
def skips_backward() -> None:
    import torch
    import torch.distributed as dist

    group(SHORT_S)
    model = ddp()
    for step in range(5):
        loss = model(torch.ones(1, 8)).sum()
        if rank() == 1 and step == 3:
            dist.barrier()
            continue
        loss.backward()


@every("1", "HF209 HF225 HF244 HF229", ranks=3)
def takes_another_collective() -> None:
    import torch
    import torch.distributed as dist

    group(SHORT_S)
    meet()
    if rank() == 1:
        dist.all_gather([torch.ones(2) for _ in range(3)], torch.ones(2))
    else:
        dist.broadcast(torch.ones(2), src=1)
        meet()
    time.sleep(1)


@every("0 1 2", "HF225", ranks=3)
def sizes_differ() -> None:
    import torch
    import torch.distributed as dist

    group(SHORT_S)
    meet()
    dist.all_reduce(torch.ones(1000 + 24 * (rank() == 2)))


@every("1", "HF225", ranks=3)
def sizes_differ_under_debug() -> None:
    import torch.distributed as dist

    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    group(SHORT_S)
    meet()
    if rank() == 1:
        dist.barrier()
    else:
        meet()


@every("1", "HF224 HF209 HF245", ranks=3)
def never_reaches_the_group() -> None:
    if rank() == 1:
        time.sleep(ASLEEP_S)
    group(SHORT_S)


@every("0 1", "HF224")
def address_of_its_own_choice() -> None:
    os.environ["MASTER_ADDR"] = "head-node.cluster.invalid"
    group(SHORT_S)


@every("0 1", "HF201 HF224")
def backend_misspelt() -> None:
    import torch.distributed as dist

    dist.init_process_group("ncll")


@every("0 1", "HF201", says="Default process group")
def group_never_made() -> None:
    meet()


@every("0 1", "HF201", says="twice")
def group_made_twice() -> None:
    group()
    group()


@every("1", "HF209", ranks=3)
def sub_group_waits_for_a_sleeper() -> None:
    import torch
    import torch.distributed as dist

    group()
    pair = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=SHORT_S))
    if rank() == 1:
        time.sleep(ASLEEP_S)
    if rank() == 0:
        dist.all_reduce(torch.ones(1), group=pair)
    meet()


@every("0", "HF209 HF210 HF234", ranks=3)
def saves_for_too_long() -> None:
    import torch
    import torch.distributed as dist

    group(SHORT_S)
    model = ddp()
    for step in range(6):
        model(torch.ones(1, 8)).sum().backward()
        if rank() == 0 and step == 3:
            _save_checkpoint(model.state_dict())
        dist.barrier()


def _save_checkpoint(state: dict[str, object]) -> None:
    for _ in state:
        time.sleep(ASLEEP_S)
