"""What warm_reduce.py and warm_ddp.py share: say when torch ranks have done their first work, then crash, idle or end.

WARM_CRASH_S: rank 1 of the first attempt dies so long after that, while the others wait in a collective. WARM_IDLE: sleep.
"""

import os
import time

import torch
import torch.distributed as dist

OUT = os.environ["BENCH_OUT"]
CRASH_S = float(os.environ.get("WARM_CRASH_S", "-1"))


def begin() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def finish() -> None:
    now_ns = time.monotonic_ns()
    if CRASH_S >= 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(CRASH_S)
        if dist.get_rank() == 1:
            stamp("crash", time.monotonic_ns())
            os._exit(1)
        dist.all_reduce(torch.ones(1))
    stamp("pid", os.getpid())
    stamp("done", now_ns)
    if "WARM_IDLE" in os.environ:
        time.sleep(120)
    dist.barrier()
    os._exit(0)  # torch's destructor of a group that DDP has used may hang, under any launcher


def stamp(name: str, number: int) -> None:
    beside = f"{OUT}/.{name}.{dist.get_rank()}"
    with open(beside, "w") as file:
        file.write(str(number))
    os.rename(beside, f"{OUT}/{name}.{dist.get_rank()}")
