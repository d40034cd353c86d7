"""Ranks whose replicas are compared while they train. Prints what each rank found, as JSON.

checked_ranks.py CASE ARGUMENTS
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from snapshot_ranks import build, ranks, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast.train as ht
from holdfast.train import replica_check, snapshots_api  # noqa: F401 - before the fork
from holdfast.train.snapshots import folder as folders

NO_HOOK: Callable[[int], None] = lambda _: None  # noqa: E731


class Net(nn.Module):
    """Dropout, BatchNorm, a table that does not change, and what DDP ignores: each rank has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.last = nn.Linear(8, 3)
        self.register_buffer("table", torch.linspace(0, 1, 5), persistent=False)
        self.register_buffer("noise", torch.zeros(4))
        self.ignored = nn.Parameter(torch.rand(3), requires_grad=False)
        self._ddp_params_and_buffers_to_ignore = ["ignored", "noise"]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.noise.normal_()
        return self.last(self.drop(torch.relu(self.norm(self.first(inputs)))))


def made(*, apart: bool = True, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`apart`: each rank has another value of the parameter that DDP ignores."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), **options)
    with torch.no_grad():
        model.module.ignored += dist.get_rank() if apart else -model.module.ignored
    torch.manual_seed(100 + dist.get_rank())
    return model, torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, count: int, before: Callable[[int], None] = NO_HOOK
) -> None:
    """Steps on data of this rank's own, of another size on each. `before`: called between backward pass and step."""
    for number in range(1, count + 1):
        with ht.accumulate(model, 1) as micro:
            micro.backward(model(torch.randn(3 + dist.get_rank(), 5)).square().mean())
        before(number)
        optimizer.step()
        optimizer.zero_grad()


def flip(tensor: torch.Tensor) -> None:
    """As faulty memory does: torch does not count it as a change."""
    tensor.data.view(-1).view(torch.uint8)[5] ^= 16


def flipped(place: str) -> str:
    """What is raised after a bit has flipped in the last rank."""
    model, optimizer = made()
    ht.check_replicas(model, optimizer, every=1)
    done = 0

    def fault(number: int) -> None:
        nonlocal done
        done = number - 1
        if number == 5 and dist.get_rank() == dist.get_world_size() - 1:
            net = model.module
            match place:
                case "parameter":
                    flip(net.last.weight)
                case "momentum":
                    flip(optimizer.state[net.last.weight]["exp_avg"])
                case _:
                    flip(net.table)

    try:
        steps(model, optimizer, 8, fault)
    except Exception as error:  # noqa: BLE001 - it is the result
        return f"{getattr(error, 'code', '')} {type(error).__name__} after {done} steps: {error}"
    return "nothing was found"


def case_flips(world: str) -> Any:
    return {place: ranks(int(world), lambda: flipped(place)) for place in ("parameter", "momentum", "buffer")}  # noqa: B023


def told(work: Callable[[], Any]) -> tuple[list[str], Any]:
    """What is warned of, and the result."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = work()
    return [str(each.message) for each in caught if "replicas" in str(each.message)], result


def by_default() -> Any:
    with ht.process_group() as pg:
        torch.manual_seed(0)
        model = ht.ddp(Net(), pg)
        if pg.rank == 1:
            with torch.no_grad():
                model.module.first.bias[2] += 0.5
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.01)
        replica_check._current.checks[0].every = 2  # type: ignore[union-attr]
        done = []
        said, _ = told(lambda: steps(model, optimizer, 6, done.append))
        return said, len(done)


def case_default() -> Any:
    import os

    def on_nodes() -> Any:
        os.environ["LOCAL_RANK"] = "0"  # each on a node of its own
        return by_default()

    return ranks(3, on_nodes)


def repaired(*, whole: bool = True) -> Any:
    model, optimizer = made()
    ht.check_replicas(model, every=2, action="repair")
    odd = dist.get_world_size() - 1

    def fault(number: int) -> None:
        if number == 5 and dist.get_rank() == odd:
            flip(model.module.first.weight)
            flip(optimizer.state[model.module.first.weight]["exp_avg"])
            optimizer.state[model.module.last.bias]["step"] += 1

    try:
        said, _ = told(lambda: steps(model, optimizer, 8, fault))
    except Exception as error:  # noqa: BLE001 - it is the result
        return str(error)
    net = model.module
    state = [each.tolist() for each in (net.first.weight, net.last.weight)]
    state += [optimizer.state[each]["exp_avg"].tolist() for each in (net.first.weight, net.last.bias)]
    state += [optimizer.state[net.last.bias]["step"].item()]
    return said, 8, state


def case_repaired() -> Any:
    return {"majority": ranks(3, repaired), "none": ranks(2, repaired)}


def healthy(kind: str) -> Any:
    match kind:
        case "accumulated":
            model, optimizer = made()
        case "own buffers":
            model, optimizer = made(broadcast_buffers=False)
        case "fsdp" | "hsdp":
            model, optimizer = build(kind)
        case _:
            model, optimizer = made()
    ht.check_replicas(model, every=1)

    def work() -> None:
        if kind in ("fsdp", "hsdp"):
            for number in range(40):
                train(model, optimizer, number)
        elif kind == "accumulated":
            for number in range(80):
                with ht.accumulate(model, 2) as micro:
                    micro.backward(model(torch.randn(2 + dist.get_rank() + number % 2, 5)).square().mean())
                if micro.last:
                    optimizer.step()
                    optimizer.zero_grad()
        elif kind == "evaluated":
            for number in range(40):
                steps(model, optimizer, 1)
                model.train(number % 3 > 0)  # BatchNorm's averages rest for a while, and are each rank's own
        else:
            steps(model, optimizer, 40)

    with warnings.catch_warnings():
        said, _ = told(work)
    assert replica_check._current is not None
    (check,) = replica_check._current.checks
    return {"said": said, "checks": check.steps}


def case_healthy() -> Any:
    kinds = ("plain", "own buffers", "accumulated", "evaluated", "fsdp", "hsdp")
    return {kind: ranks(4, lambda: healthy(kind)) for kind in kinds}  # noqa: B023


def sharded() -> str:
    model, optimizer = build("hsdp")
    ht.check_replicas(model, every=1)
    try:
        for number in range(4):
            if number == 2 and dist.get_rank() == 3:
                flip(model.first.weight._local_tensor)
            train(model, optimizer, number)
    except Exception as error:  # noqa: BLE001 - it is the result
        return str(error)
    return ""


def case_sharded() -> Any:
    return ranks(4, sharded)


def joined() -> list[str]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    ht.check_replicas(model, every=1)

    def work() -> None:
        with model.join():
            for _ in range(4 + 2 * dist.get_rank()):
                model(torch.randn(3, 5)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    return told(work)[0]


def case_joined() -> Any:
    return ranks(3, joined)


def saved(folder: Path) -> Any:
    """A save to the disk, states in memory after it, and then a difference."""
    model, optimizer = made(apart=False)
    ht.check_replicas(model, every=1)
    snaps = ht.Snapshots(folder, every=None, memory_every=1)
    snaps.track(model=model, optimizer=optimizer)
    resumed = snaps.resume()
    if resumed is not None:
        snaps._abandon()
        return resumed.step

    def fault(_: int) -> None:
        if snaps.state.step == 4 and dist.get_rank() == 1:
            flip(model.module.last.bias)

    try:
        with snaps:
            for number in range(1, 6):
                steps(model, optimizer, 1, fault)
                snaps.step()
                if number == 2:
                    snaps.save(wait=True)
    except Exception as error:  # noqa: BLE001 - it is the result
        return str(error)
    return ""


def case_saved(place: str) -> Any:
    folder = Path(place)
    said = ranks(3, lambda: saved(folder))
    again = ranks(3, lambda: saved(folder))
    return {"said": said, "steps": [each.step for each in folders.survey(folder).committed], "resumed": again}


if __name__ == "__main__":
    case, *rest = sys.argv[1:]
    print(json.dumps(globals()[f"case_{case}"](*rest)))
