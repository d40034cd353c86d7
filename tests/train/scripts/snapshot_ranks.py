"""Jobs of several ranks, forked from one process that has imported torch once. Prints what each phase found as JSON.

snapshot_ranks.py CASE FOLDER
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP and optimizers would import it in every rank
import torch.distributed as dist
from forked import limit_s
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast.train as ht
from holdfast.train import snapshots_api  # noqa: F401 - before the fork
from holdfast.train.snapshots import folder as folders
from holdfast.train.snapshots.folder import RankFile

LIMIT_S = limit_s(60)


class Net(nn.Module):
    """Shapes that divide by nothing, a buffer, a frozen parameter, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.norm = nn.BatchNorm1d(13)
        self.last = nn.Linear(13, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.full((5,), 0.5), requires_grad=False)

    def forward(self, step: int) -> torch.Tensor:
        """The same samples on all ranks, so that the statistics of BatchNorm are replicas, too."""
        x = torch.randn(24, 7, generator=torch.Generator().manual_seed(step))
        return self.last(torch.relu(self.norm(self.first(x)))) * self.scale + self.frozen[:3]


class Tied(nn.Module):
    """Three rows: on four ranks one has nothing of the tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.head = nn.Embedding(3, 5), nn.Linear(5, 5), nn.Linear(5, 3, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, _: int) -> torch.Tensor:
        return self.head(self.first(self.embed(torch.tensor([0, 1, 2]))))


def build(kind: str, seed: int = 0, net: type[nn.Module] = Net) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = net()
    world = dist.get_world_size()
    if kind == "ddp" and world > 1:
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copy", "shard"))
        fully_shard(model, mesh=mesh)
    weights = [each for each in model.parameters() if each.requires_grad]
    return model, torch.optim.AdamW(
        [{"params": weights[:2], "lr": 0.02}, {"params": weights[2:]}], lr=0.01, foreach=True
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    loss = model(step).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything, unsharded, as lists."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=False)
    state: dict[str, Any] = {"model": get_model_state_dict(model, options=options)}
    if optimizer.state:
        told = get_optimizer_state_dict(model, optimizer, options=options)
        state["state"], state["groups"] = told["state"], told["param_groups"]
    return plain(state)


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return [str(value.dtype), list(value.shape), value.flatten().tolist()]
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def ranks(world: int, work: Callable[[], Any], run_id: str = "ranks", per_node: int = 0) -> list[Any]:
    """Fork `world` ranks, have each do the work, return what each returned: "killed N" for one that a signal ended.

    The same run id finds the memory of the ranks before. `per_node`: so many pretend to be on one node; 0: all.
    """
    host, port = _store_host()
    children = []
    for rank in range(world):
        out, into = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(out)
            node, local_rank = divmod(rank, per_node or world)
            # Nodes count restarts differently under torchrun; these share a /dev/shm besides, and have a shared-memory folder each.
            os.environ.update(LOCAL_RANK=str(local_rank), TORCHELASTIC_RUN_ID=f"{run_id}-{node}")
            os.environ.update(TORCHELASTIC_RESTART_COUNT=str(node))
            _be_rank(rank, world, port, work, into)
        os.close(into)
        children.append((pid, out))
    results = []
    for pid, out in children:
        with os.fdopen(out) as file:
            text = file.read()
        _, status = os.waitpid(pid, 0)
        results.append(json.loads(text) if text else _end(os.waitstatus_to_exitcode(status)))
    os.kill(host, signal.SIGKILL)
    os.waitpid(host, 0)
    return results


def _end(code: int) -> str:
    """Of a rank that returned nothing."""
    return f"killed {-code}" if code < 0 else f"exit code {code}"


def _store_host() -> tuple[int, int]:
    """A process that serves the store: it has threads, and who forks must have none. Returns its pid and port."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(2 * LIMIT_S))
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        os.write(into, str(store.port).encode())
        while True:
            signal.pause()
    os.close(into)
    port = int(os.read(out, 16))
    os.close(out)
    return pid, port


def _be_rank(rank: int, world: int, port: int, work: Callable[[], Any], into: int) -> None:
    code = 1
    signal.alarm(int(LIMIT_S))
    faulthandler.enable()
    faulthandler.dump_traceback_later(LIMIT_S - 10)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    try:
        store = dist.TCPStore("127.0.0.1", port, None, False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - the parent looks at it
            result = {"error": f"{type(error).__name__}: {error}"}
            if os.environ.get("SHOW"):
                traceback.print_exc()
        with contextlib.suppress(BrokenPipeError):
            os.write(into, json.dumps(result).encode())
        code = 0
    except Exception:
        traceback.print_exc()  # nobody else would: the process ends before Python could
        raise
    finally:
        os._exit(code)


# --- the cases --------------------------------------------------------------------------------------------------------


def save_on(kind: str, folder: Path, net: type[nn.Module] = Net) -> dict[str, Any]:
    model, optimizer = build(kind, net=net)
    snaps = ht.Snapshots(folder, every=None, memory_every=None)
    snaps.track(model=model, optimizer=optimizer)
    if snaps.resume() is not None:
        raise RuntimeError("there was something already")
    for step in range(3):
        snaps.step(loss=train(model, optimizer, step))
    snaps.save(wait=True)
    state = whole(model, optimizer)
    snaps.close()
    return state


def load_on(kind: str, folder: Path, net: type[nn.Module] = Net) -> dict[str, Any]:
    """What was resumed; then training goes on."""
    model, optimizer = build(kind, 99, net)
    snaps = ht.Snapshots(folder, every=None, memory_every=None)
    snaps.track(model=model, optimizer=optimizer)
    resumed = snaps.resume()
    if resumed is None:
        return {"resumed": None}
    state = whole(model, optimizer)
    train(model, optimizer, resumed.step)
    snaps.close()
    plain = getattr(model, "module", model)
    return {"resumed": vars(resumed), "state": state, "tied": net is Tied and plain.head.weight is plain.embed.weight}


LOADS = {
    "ddp": ((1, "ddp", "disk"), (3, "fsdp", "memory"), (4, "hsdp", "memory")),
    "fsdp": ((2, "fsdp", "disk"), (3, "ddp", "memory"), (6, "fsdp", "disk")),
    "hsdp": ((1, "ddp", "disk"), (3, "fsdp", "disk"), (4, "hsdp", "disk")),
}
"""How each kind is loaded: on so many ranks, in this way or another, from memory or from the disk."""


def reshard(kind: str, folder: Path) -> Any:
    """Saved on 4 ranks; loaded as LOADS has it."""
    states = ranks(4, lambda: save_on(kind, folder), kind)
    sizes = sorted(each.stat().st_size for each in folder.glob("step_*/rank_*.safetensors"))
    loads = {}
    for world, other, source in LOADS[kind]:
        run_id = kind if source == "memory" else f"{kind}-{world}-{other}"
        loads[f"{other} {world} {source}"] = ranks(world, lambda: load_on(other, folder), run_id)  # noqa: B023
    return {"saved": states, "loaded": loads, "sizes": sizes}


case_reshard_ddp = partial(reshard, "ddp")
case_reshard_fsdp = partial(reshard, "fsdp")
case_reshard_hsdp = partial(reshard, "hsdp")


def case_nodes(folder: Path) -> Any:
    """Two pretended nodes of two ranks, DDP: each node's memory is enough for it, and the disk has every tensor once."""
    saved = ranks(4, lambda: save_on("ddp", folder), "nodes", per_node=2)
    sizes = sorted(each.stat().st_size for each in folder.glob("step_*/rank_*.safetensors"))
    return {
        "saved": saved,
        "sizes": sizes,
        "memory": ranks(4, lambda: load_on("ddp", folder), "nodes", per_node=2),
        "resized": ranks(2, lambda: load_on("ddp", folder), "nodes", per_node=1),
    }


def case_tied(folder: Path) -> Any:
    """DDP and FSDP2: loaded from memory on as many ranks, and from the disk as the other kind."""
    told = {}
    for kind, world, other, other_world in (("ddp", 2, "fsdp", 4), ("fsdp", 4, "ddp", 1)):
        place = folder / kind
        told[kind] = {
            "saved": ranks(world, lambda: save_on(kind, place, Tied), kind),  # noqa: B023
            "once": stored_once(place),
            "memory": ranks(world, lambda: load_on(kind, place, Tied), kind),  # noqa: B023
            "disk": ranks(other_world, lambda: load_on(other, place, Tied), f"{kind}-{other}"),  # noqa: B023
        }
    return told


def stored_once(place: Path) -> bool:
    (snapshot,) = folders.survey(place).committed
    keys = set()
    for rank in range(snapshot.manifest.world):
        with RankFile(snapshot, rank) as file:
            keys |= {each.name.partition("@")[0] for each in file.image.entries}
    return "model.embed.weight" in keys and "model.head.weight" not in keys


if __name__ == "__main__":
    case, place = sys.argv[1], Path(sys.argv[2])
    print(json.dumps(globals()[f"case_{case}"](place)))
