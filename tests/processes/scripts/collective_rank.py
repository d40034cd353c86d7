"""A rank of a job of four that hangs or fails. CASE is what ranks 0, 1 and 3 do, and behind a `/` what rank 2 does; all before it alike.

Usage: collective_rank.py CASE FILE
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import without_compiler  # noqa: F401

case, file = sys.argv[1:]
rank, ODD, WORLD = int(os.environ["RANK"]), 2, 4
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD)
odd = rank == ODD


def tensor(size):
    return torch.ones(size)


def all_gather():
    dist.all_gather([tensor(4) for _ in range(WORLD)], tensor(4))


def gather():
    dist.gather(tensor(4), [tensor(4) for _ in range(WORLD)] if odd else None, dst=ODD)


def scatter():
    dist.scatter(tensor(4), [tensor(4) for _ in range(WORLD)] if odd else None, src=ODD)


def all_to_all():
    dist.all_to_all_single(tensor(4), tensor(4))


def objects():
    dist.all_gather_object([None] * WORLD, {"rank": rank})


def two_async():
    works = [dist.all_reduce(tensor(size), async_op=True) for size in (16, 32)]
    for work in works:
        work.wait()


def handles():
    try:
        int("bad row 17")
    except ValueError:
        dist.broadcast(tensor(1), src=0)


def inside(*ranks):
    """A smaller group of these ranks; None: this rank is not in it."""
    group = dist.new_group(list(ranks))
    return group if rank in ranks else None


def of_three(call):
    """Ranks 1 to 3 call it in a group of theirs, and rank 0 waits for all."""
    group = inside(1, 2, 3)
    call(group) if group is not None else dist.barrier()


def of_two(call):
    """Ranks 2 and 3 call it in a group of theirs, and the others do something else."""
    group = inside(2, 3)
    call(group) if group is not None else time.sleep(600)


CALLS = {
    "all_reduce": lambda: dist.all_reduce(tensor(4096)),
    "broadcast": lambda: dist.broadcast(tensor(1), src=ODD),
    "reduce": lambda: dist.reduce(tensor(64), dst=ODD),
    "all_gather": all_gather,
    "gather": gather,
    "scatter": scatter,
    "all_to_all": all_to_all,
    "barrier": dist.barrier,
    "objects": objects,
    "two_async": two_async,
    "handles": handles,
    "of_three_all_reduce": lambda: of_three(lambda group: dist.all_reduce(tensor(16), group=group)),
    "of_three_broadcast": lambda: of_three(lambda group: dist.broadcast(tensor(1), src=ODD, group=group)),
    "of_three_asleep": lambda: of_three(lambda _: time.sleep(600)),
    "of_two_all_reduce": lambda: of_two(lambda group: dist.all_reduce(tensor(16), group=group)),
    "of_two_asleep": lambda: of_two(lambda _: time.sleep(600)),
    "small_all_reduce": lambda: dist.all_reduce(tensor(8)),
    "small_all_gather": lambda: dist.all_gather([tensor(2) for _ in range(WORLD)], tensor(2)),
    "asleep": lambda: time.sleep(600),
}

for _ in range(5):
    dist.all_reduce(tensor(8))
others, own = case.split("/")
for call in (own if odd else others).split("+"):
    CALLS[call]()
dist.barrier()
time.sleep(600)
