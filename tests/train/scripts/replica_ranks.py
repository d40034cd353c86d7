"""Jobs of several ranks whose replicas are equal, or are not. Prints what each rank found, as JSON.

replica_ranks.py CASE FOLDER
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import snapshot_ranks
import torch
import torch.distributed as dist
from snapshot_ranks import ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast.train as ht
from holdfast.protocol.errors import ReplicasDifferError, StateTypeError
from holdfast.train import snapshots_api  # noqa: F401 - before the fork
from holdfast.train.snapshots import folder as folders
from holdfast.train.snapshots.folder import RankFile


class Mixed(nn.Module):
    """Dropout, BatchNorm, a tied weight, a parameter that DDP ignores, and a buffer that each rank draws."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(6, 5), nn.BatchNorm1d(5)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(5, 6, bias=False)
        self.head.weight = self.embed.weight
        self.ignored = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self._ddp_params_and_buffers_to_ignore = ["ignored", "noise"]
        self.register_buffer("noise", torch.zeros(4))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        self.noise.normal_()
        return self.head(self.drop(self.norm(self.embed(indices))))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """On data of this rank's own, of another size on each."""
    indices = torch.randint(6, (4 + dist.get_rank(),))
    model(indices).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def healthy(folder: Path, *, saves: int = 4, **options: Any) -> Any:
    torch.manual_seed(0)
    model = DistributedDataParallel(Mixed(), broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(dist.get_rank())
    snaps = ht.Snapshots(folder, **options)
    snaps.track(model=model, optimizer=optimizer)
    snaps.resume()
    for _ in range(saves):
        step(model, optimizer)
        snaps.step()
        snaps.save(wait=True)
    norm = model.module.norm
    found = [model.module.noise.tolist(), norm.running_mean.tolist(), norm.running_var.tolist()]
    snaps.close()
    return found


def case_healthy(folder: Path) -> Any:
    """What each rank had in its buffers, and the snapshot has."""
    said = ranks(3, lambda: healthy(folder, every=None, memory_every=None))
    return {
        "said": said,
        "saved": [saved(folder, f"model.{name}") for name in ("noise", "norm.running_mean", "norm.running_var")],
    }


def saved(folder: Path, name: str) -> Any:
    snapshot = folders.survey(folder).committed[-1]
    for rank in range(snapshot.manifest.world):
        with RankFile(snapshot, rank) as file:
            if name in file.image.spans:
                return torch.frombuffer(file.load([name])[file.image.spans[name]], dtype=torch.float32).tolist()
    return None


def diverged(folder: Path, odd: int, change: Callable[[nn.Module, torch.optim.Optimizer], None], **options: Any) -> Any:
    """What is raised, and what is on the disk, when this rank changes something that is not the others'."""
    torch.manual_seed(0)
    model = DistributedDataParallel(snapshot_ranks.Net())
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    snaps = ht.Snapshots(folder, **{"every": None, "memory_every": None, **options})
    snaps.track(model=model, optimizer=optimizer)
    snaps.resume()
    error = ""
    try:
        for number in range(3):
            snapshot_ranks.train(model, optimizer, number)
            if number == 1 and dist.get_rank() == odd:
                with torch.no_grad():
                    change(model.module, optimizer)
            snaps.step()
            snaps.save(wait=True)
    except Exception as raised:  # noqa: BLE001 - it is the result
        error = f"{getattr(raised, 'code', '')} {type(raised).__name__}: {raised}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        snaps._abandon()
    return error


def one_bit(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model.last.weight.view(torch.int32)[2, 12] ^= 1


def moment(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.first.weight]["exp_avg"][0, 0] += 1


def counter(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.scale]["step"] += 1


def frozen(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model.frozen.fill_(0.75)


def swapped(model: nn.Module, _: torch.optim.Optimizer) -> None:
    """The same values in other places."""
    model.first.weight.copy_(model.first.weight.flip(0))


def statistics(model: nn.Module, _: torch.optim.Optimizer) -> None:
    """Only a buffer: no fault."""
    model.norm.running_mean += 1


def lost(world: int, odd: int, change: str, folder: Path, **options: Any) -> Any:
    said = ranks(world, partial(diverged, folder, odd, globals()[change], **options))
    return {"said": said, "steps": [each.step for each in folders.survey(folder).committed]}


CHANGES = {
    "one_bit": (3, 1), "moment": (2, 1), "counter": (3, 0), "frozen": (4, 3), "swapped": (2, 0), "statistics": (2, 1)
}  # fmt: skip
"""Ranks, and the one that changes it."""


def case_diverged(folder: Path) -> Any:
    return {change: lost(*which, change, folder / change) for change, which in CHANGES.items()}


def case_clock(folder: Path) -> Any:
    """Saves to the disk by the clock, of which only rank 0 knows."""
    return lost(2, 1, "one_bit", folder, every="0.001s", memory_every=1)


def case_allowed(folder: Path) -> Any:
    """The snapshot has rank 0's values; what was saved of the parameter that rank 1 has changed."""
    found = lost(2, 1, "frozen", folder / "a", options=ht.SnapshotOptions(replicas_differ=True))
    return {**found, "saved": saved(folder / "a", "model.frozen")}


class Private(nn.Module):
    """Not in DDP: each rank has its own values."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(3, 2)


def private(folder: Path) -> Any:
    torch.manual_seed(dist.get_rank())
    model = Private()
    snaps = ht.Snapshots(folder, every=None, memory_every=None)
    snaps.track(model=model)
    snaps.resume()
    try:
        snaps.save(wait=True)
    except Exception as raised:  # noqa: BLE001
        snaps._abandon()
        return str(raised)
    return ""


def case_private(folder: Path) -> Any:
    return ranks(4, lambda: private(folder))


class Remaker:
    """Stands for `ht.survive` with a function that makes its model: others take this rank's state when one is lost."""

    def check(self, _: Any) -> None:
        """All fits."""

    def resumed(self, _: int) -> bool:
        return True

    def outlives(self, _: BaseException) -> bool:
        return False


def in_memory(folder: Path, *, seed: str, remade: bool) -> Any:
    """A model that no DDP keeps equal, with states in memory alone. `seed`: "own" for each rank, or "common", so that
    it is equal before the first step. Returns what was raised, after which step, and the steps that are in memory."""
    torch.manual_seed(dist.get_rank() if seed == "own" else 0)
    model = Private()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snaps = ht.Snapshots(folder, every=None, memory_every=2)
    snaps.track(model=model, optimizer=optimizer)
    snaps._remaker = Remaker() if remade else None
    equal = None
    snaps.resume()
    assert snaps._saving is not None
    if seed == "own" and not remade:
        equal = snaps._saving.is_equal_everywhere()
    began_with = held(snaps)
    error = ""
    try:
        for _ in range(2):
            model.own(torch.full((4, 3), float(dist.get_rank() + 1))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            snaps.step()
    except ReplicasDifferError as raised:
        error = str(raised)
    found = {"error": error, "step": snaps.state.step, "began_with": began_with, "held": held(snaps), "equal": equal}
    snaps._abandon()
    return found


def held(snaps: ht.Snapshots) -> list[int]:
    """The steps whose states are in memory, for others to take."""
    assert snaps._saving is not None
    return [each.request.step for each in snaps._saving.tier.held(str(snaps.path)) if each.request is not None]


def case_in_memory(folder: Path) -> Any:
    cases = [("own", False), ("own", True), ("common", False), ("common", True)]
    return {
        f"{seed} {'remade' if remade else 'saved'}": ranks(
            2, partial(in_memory, folder / f"{seed}{remade}", seed=seed, remade=remade), f"{seed}{remade}"
        )
        for seed, remade in cases
    }


class Parted(nn.Module):
    """A table of which each rank has its part, and a buffer that is equal at first."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("part", torch.full((3,), float(rank)))
        self.register_buffer("seen", torch.zeros(2))


def grouped(folder: Path) -> Any:
    """Pairs of ranks draw the same random numbers. Saves if there is nothing yet; else the values that a resume gave,
    and what it said."""
    rank = dist.get_rank()
    torch.manual_seed(rank // 2)
    model = Parted(rank)
    with warnings.catch_warnings(), ht.Snapshots(folder, every=None, memory_every=None) as snaps:
        warnings.simplefilter("ignore")
        snaps.track(model=model)
        resumed = snaps.resume()
        if resumed is None:
            model.seen += rank + 1
            snaps.step()
            snaps.save(wait=True)
            return None
        return {"part": model.part.tolist(), "seen": model.seen.tolist(), "notes": resumed.notes}


def case_grouped(folder: Path) -> Any:
    ranks(4, lambda: grouped(folder))
    return {str(world): ranks(world, lambda: grouped(folder), f"again{world}") for world in (4, 2)}


def inner(folder: Path, *, raw: bool) -> Any:
    """The weights, where the module inside DDP is tracked, and then DDP."""
    torch.manual_seed(0 if raw else 1)
    module = snapshot_ranks.Net()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    snaps = ht.Snapshots(folder, every=None, memory_every=None)
    snaps.track(model=module if raw else model, optimizer=optimizer)
    resumed = snaps.resume()
    if raw:
        for number in range(2):
            snapshot_ranks.train(model, optimizer, number)
            snaps.step()
        snaps.save(wait=True)
    found = [resumed is not None, module.first.weight.tolist()]
    snaps.close()
    return found


def case_inner(folder: Path) -> Any:
    return [ranks(3, lambda: inner(folder, raw=raw), f"inner{raw}")[0] for raw in (True, False)]  # noqa: B023


class Average:
    """An average of the weights, as a script has it: its tensors are of the kind that the parameters are."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: each.detach().clone() for name, each in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def said_of_average(folder: Path, model: nn.Module) -> str:
    snaps = ht.Snapshots(folder, every=None, memory_every=None)
    snaps.track(model=model, average=Average(model))
    snaps.resume()
    try:
        snaps.save(wait=True)
    except StateTypeError as refused:
        return str(refused)
    finally:
        snaps._abandon()
    return ""


def hsdp(folder: Path) -> Any:
    """Rank 3 holds a replica of rank 1's shard. Before, what is said of an average of the weights as DTensors."""
    model, optimizer = snapshot_ranks.build("hsdp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused = said_of_average(folder / "average", model)
    snaps = ht.Snapshots(folder, every=None, memory_every=None)
    snaps.track(model=model, optimizer=optimizer)
    snaps.resume()
    for number in range(2):
        snapshot_ranks.train(model, optimizer, number)
        snaps.step()
        snaps.save(wait=True)
    if dist.get_rank() == 3:
        with torch.no_grad():
            model.first.weight._local_tensor += 1
    try:
        snaps.save(wait=True)
    except Exception as raised:  # noqa: BLE001
        snaps._abandon()
        return [refused, str(raised)]
    return [refused, ""]


def case_hsdp(folder: Path) -> Any:
    found = ranks(4, lambda: hsdp(folder))
    refused, said = zip(*found, strict=True)
    return {"refused": refused, "said": said, "steps": [each.step for each in folders.survey(folder).committed]}


def poisoned(folder: Path, action: Any) -> Any:
    """What is said when a shard of rank 1 becomes nan; or the step from which another life goes on."""
    model, optimizer = snapshot_ranks.build("fsdp")
    options = ht.SnapshotOptions(nonfinite=action.split()[0])
    snaps = ht.Snapshots(folder, every="2 steps", memory_every=1, options=options)
    snaps.track(model=model, optimizer=optimizer)
    said = ""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if (resumed := snaps.resume()) is not None:
            snaps._abandon()
            return resumed.step
        try:
            with snaps:
                for number in range(4 if action == "stop at the end" else 5):
                    while number == 4 and snaps._saving is not None and snaps._saving.busy:
                        snaps._saving.gather_errors()  # step 4 is being written
                        time.sleep(0.01)
                    snapshot_ranks.train(model, optimizer, number)
                    if number == 3 and dist.get_rank() == 1:
                        with torch.no_grad():
                            model.first.weight._local_tensor[0, 0] = float("nan")
                    snaps.step()
        except Exception as error:  # noqa: BLE001 - it is the result
            return f"{getattr(error, 'code', '')} {error}"
        said += "".join(str(each.message) for each in told if "not finite" in str(each.message))
    return said


def case_poisoned(folder: Path, action: str) -> Any:
    said = ranks(3, lambda: poisoned(folder, action))
    found = [[each.step, each.manifest.finite] for each in folders.survey(folder).committed]
    return {"said": said, "finite": found, "resumed": ranks(3, lambda: poisoned(folder, action))}


def accumulated(folder: Path, *, wide: bool) -> None:
    """Three batches make an optimizer step, by hand. `wide`: their gradients are added up in another type."""
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if wide else None
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    fully_shard(model[0], **({"mp_policy": policy} if policy else {}))
    fully_shard(model, **({"mp_policy": policy} if policy else {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ht.Snapshots(folder, every="2 steps", memory_every=1, keep=None) as snaps:
        snaps.track(model=model, optimizer=optimizer)
        snaps.resume()
        for number in range(6):
            model.set_requires_gradient_sync(number % 3 == 2)
            model(torch.ones(5, 4)).sum().backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
            snaps.step()


def case_accumulated(folder: Path) -> Any:
    """The steps that were saved."""
    found = []
    for name in ("plain", "wide"):
        ranks(2, partial(accumulated, folder / name, wide=name == "wide"))
        found.append([each.step for each in folders.survey(folder / name).committed])
    return found


if __name__ == "__main__":
    case, place, *more = sys.argv[1:]
    print(json.dumps(globals()[f"case_{case}"](Path(place), *more)))
