"""Ways through `process_group()`: group_cases.py CASE …

Under a launcher this rank tells what it saw in the case. Without one each case is run on two ranks, and there is a line
of JSON for it: {"case", "codes", "told"}, see forked.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist

import holdfast.train as ht
from holdfast.protocol.errors import ProcessGroupError
from holdfast.train import torch_private
from holdfast.train.group import ProcessGroup


def tell(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def total(pg: ProcessGroup) -> int:
    count = torch.ones((), dtype=torch.int64)
    dist.all_reduce(count)
    return int(count)


def place() -> None:
    with ht.process_group() as pg:
        pg.store.set(f"here/{pg.rank}", "x")
        pg.store.wait([f"here/{rank}" for rank in range(pg.world)])
        facts = {"rank": pg.rank, "world": pg.world, "local_rank": pg.local_rank, "device": str(pg.device)}
        tell(total=total(pg), backend=dist.get_backend(), **facts)
    tell(left=not dist.is_initialized())


def trained() -> None:
    """DDP models that outlive their group, and a second group after the first."""
    models = []
    for _ in range(2):
        with ht.process_group() as pg:
            model = ht.ddp(torch.nn.Linear(300, 300), pg)
            models.append(model)
            for _ in range(3):
                model(torch.ones(4, 300)).sum().backward()
    tell(left=not dist.is_initialized())


def sharded() -> None:
    from torch.distributed.fsdp import fully_shard  # here: it costs every other case a second

    with ht.process_group() as pg:
        try:
            ht.ddp(fully_shard(torch.nn.Linear(4, 4)), pg)
        except ProcessGroupError as error:
            tell(refused=str(error))


def replicated(*, of_mesh: bool = False) -> None:
    """torch's composable `replicate`. `of_mesh`: the losses are tensors of a mesh."""
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.tensor import DTensor, Partial

    with ht.process_group() as pg:
        torch.manual_seed(0)
        model = replicate(torch.nn.Linear(2, 1, bias=False))
        mesh = pg.mesh(ranks=-1)
        for number in range(2):
            with ht.accumulate(model, 2) as micro:
                loss = model(torch.full((1, 2), 1.0 + pg.rank + 2 * number)).sum()
                micro.backward(DTensor.from_local(loss, mesh, [Partial("avg")]) if of_mesh else loss)
        weights, gradient = model.weight.detach().sum(), model.weight.grad.mean()
        tell(loss=float(micro.loss / weights), plain=type(micro.loss) is torch.Tensor, gradient=float(gradient))


def replicated_over_a_mesh() -> None:
    replicated(of_mesh=True)


def own_group() -> None:
    """The program has made its group itself."""
    dist.init_process_group("gloo")
    with ht.process_group() as pg, ht.process_group() as inner:
        tell(same=(pg.rank, pg.world) == (inner.rank, inner.world), world=total(pg))
    tell(kept=dist.is_initialized())
    dist.barrier()
    dist.destroy_process_group()


def raises() -> None:
    """Rank 1 fails while the others are in a collective."""
    with ht.process_group(timeout_s=100) as pg:
        total(pg)
        if pg.rank == 1:
            raise ValueError("boom")
        total(pg)


def raises_late() -> None:
    """Rank 1 fails while the others wait for it at their exit."""
    try:
        with ht.process_group() as pg:
            total(pg)
            if pg.rank == 1:
                time.sleep(0.2)
                raise ValueError("boom")
    finally:
        tell(left=not dist.is_initialized())


def killed() -> None:
    """Rank 1 is gone without a word, in a collective of the others."""
    with ht.process_group(timeout_s=100) as pg:
        total(pg)
        if pg.rank == 1:
            os.kill(os.getpid(), 9)
        total(pg)


def lost_receive() -> None:
    """Rank 1's data come for an operation that rank 0 has given up, so that gloo reads nothing more from it."""
    with ht.process_group(timeout_s=100) as pg:
        total(pg)
        assert pg.connection is not None
        if pg.rank == 1:
            pg.store.wait(["given up"])
            sent = dist.isend(torch.ones(9), 0, tag=1)
            pg.store.set("sent", "")
            with contextlib.suppress(RuntimeError):
                pg.store.wait(["never set"])  # until rank 0, which has the store, is gone
            assert sent is not None
            os._exit(0)
        given_up = dist.irecv(torch.empty(9), 1, tag=1)
        del given_up
        pg.store.set("given up", "")
        pg.store.wait(["sent"])
        waiting = [threading.Thread(target=_wait_for_rank_1, args=(tag,)) for tag in (2, 3)]
        for each in waiting:
            each.start()
        time.sleep(0.2)
        pg.connection.sockets.cut()
        torch_private.end_gloo_operations()
        for each in waiting:
            each.join()
        torch_private.end_gloo_operations()  # as for another loss
        os._exit(0)


def lost_receive_checked() -> None:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    lost_receive()


def lost_receive_of_interfaces() -> None:
    """The threads wait for different connections."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo,lo"
    lost_receive()


def _wait_for_rank_1(tag: int) -> None:
    try:
        dist.recv(torch.empty(4), 1, tag=tag)
    except RuntimeError as error:
        tell(tag=tag, raised=str(error))


def exits() -> None:
    with ht.process_group() as pg:
        total(pg)
        sys.exit(0)


def crashes_once() -> None:
    """The first attempt fails after its collectives have been set up."""
    with ht.process_group() as pg:
        total(pg)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and pg.rank == 1:
            raise ValueError("boom")
        tell(rank=pg.rank, total=total(pg))


def meets_in_a_kept_store() -> None:
    """As under torchrun on several nodes: the store has what an earlier group of the same number of ranks has left, and
    each node has its own count of restarts."""
    with ht.process_group() as pg:
        tell(rank=pg.rank, total=total(pg))
        if pg.rank == 0:
            time.sleep(0.3)
            tell(slow=True)
    if pg.rank == 1:
        tell(left=True)


def run(case: str, port: int = 0) -> None:
    """On two ranks without a launcher. `port`: of a store that is kept."""
    from forked import run_ranks  # here: it imports what each worker of a launcher would import again

    from tests.support.gloo_lines import without_gloo_lines

    with tempfile.TemporaryFile("w+") as output:

        def rank() -> None:
            if port:
                os.environ["MASTER_PORT"] = str(port)
            os.dup2(output.fileno(), 1)
            globals()[case]()

        codes = run_ranks(2, rank)
        output.seek(0)
        told = [json.loads(line) for line in without_gloo_lines(output.read()).splitlines()]
    tell(case=case, codes=codes, told=told)


def run_in_a_kept_store() -> None:
    """Two lives with one store, that an agent has: torchrun's on several nodes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", GROUP_WORLD_SIZE="2")
    for _ in range(2):
        run("meets_in_a_kept_store", port=store.port)


if __name__ == "__main__":
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        globals()[sys.argv[1]]()
    else:
        for each in sys.argv[1:]:
            run_in_a_kept_store() if each == "kept_store" else run(each)
