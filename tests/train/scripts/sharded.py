"""A training that makes its sharded model in the function, in which ranks are lost: sharded.py FOLDER CASE

CASE is as lost_ranks.py has it, with `kind` (fsdp, hsdp, tensor, pipeline, ddp, grid: replicas of tensor parallel models), `steps` of
an epoch, `memory` (steps from one state in memory to the next), `disk` (steps between saves to the disk), `drawn` (dropout),
`pause_s` (of each step), `late` ([local rank, step]: in this step the rank does its last
all-reduce after another rank was lost), `slots` (each rank says which memory slots it had after each step), `plain` (ranks exchange nothing but gradients) and `by rank` (rank 0 writes each step into FOLDER/now, and each rank its end into FOLDER/end.RANK).
"""

from __future__ import annotations

import hashlib
import os
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lost_ranks import CASE, FOLDER, LOCAL_RANK, Stopping, World, end, reach, row
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast.train as ht
from holdfast.train import remaking, step_links
from holdfast.train import save as saving
from holdfast.train.step_agreement import StepAgreement, StepEntry

GLOBAL = 12
STEPS = CASE.get("steps", 8)
EPOCHS = CASE.get("epochs", 2)
GRADIENT_EXCHANGES = 3
"""All-reduces of a rank in a step of HSDP: one for each module that is sharded."""


class Now:
    """The state of the loop."""

    step = 0
    slots: ClassVar[list[list[str]]] = []
    """The memory slots of this rank after each step."""


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return STEPS * GLOBAL

    def __getitem__(self, index: int) -> torch.Tensor:
        return row(index)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)
        self.dropout = nn.Dropout(0.2 if CASE.get("drawn") else 0.0)
        self.register_buffer("passes", torch.zeros(1), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if CASE.get("counted"):
            self.passes += 1
        return rows + self.down(self.dropout(torch.relu(self.up(rows))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        within = self.blocks[0](rows)
        reach("forward", Now.step)
        within.register_hook(in_backward)
        return self.head(self.blocks[1](within)).square().mean()


class Stage(nn.Module):
    """One of two stages of a pipeline: the first block, or the rest."""

    def __init__(self, net: Net, *, first: bool) -> None:
        super().__init__()
        self.first = net.blocks[0] if first else None
        self.second = None if first else nn.Sequential(net.blocks[1], net.head)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        reach("forward", Now.step)
        rows = rows if self.first is None else self.first(rows)
        if rows.requires_grad:
            rows.register_hook(in_backward)
        return rows if self.second is None else self.second(rows)


def train_a_step(model: nn.Module, loader: ht.DataLoader[torch.Tensor], rows: torch.Tensor, pg: Any) -> float:
    """Returns the loss."""
    if CASE.get("kind") == "grid":
        return train_a_step_of_replicas(model, rows, pg)
    if CASE.get("plain"):
        loss = model(rows)
        loss.backward()
        return float(loss.detach())
    if not isinstance(model, Stage):
        with ht.accumulate(model, loader) as micro:
            micro.backward(model(rows))
        return float(micro.loss)
    stage = PipelineStage(model, pg.rank, pg.world, pg.device)
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, _: output.square().mean())
    losses: list[torch.Tensor] = []
    schedule.step(*([rows] if pg.rank == 0 else []), target=rows if pg.rank else None, losses=losses)
    loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
    dist.broadcast(loss, src=1)
    return float(loss)


def train_a_step_of_replicas(model: nn.Module, rows: torch.Tensor, pg: Any) -> float:
    """Each replica has as many rows, and ranks with the same shards average their gradients. Returns the loss."""
    loss = model(rows)
    loss.backward()
    group = model.replicas.get_group()
    for each in model.parameters():
        gradient = each.grad.to_local() if isinstance(each.grad, DTensor) else each.grad
        dist.all_reduce(gradient, group=group)
        gradient /= model.replicas.size()
    loss = (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()
    dist.all_reduce(loss)
    return float(loss) / pg.world


def in_backward(gradient: torch.Tensor) -> torch.Tensor:
    """The gradients of the second block are on their way."""
    reach("backward", Now.step)
    return gradient


def made(pg: Any) -> nn.Module:
    net = Net()
    kind = CASE.get("kind", "fsdp")
    if kind == "ddp":
        return ht.ddp(net, pg)
    if kind == "pipeline":
        return Stage(net, first=pg.rank == 0)
    if kind in ("tensor", "grid"):
        mesh = pg.mesh(tensor=pg.world) if kind == "tensor" else pg.mesh(replicate=-1, tensor=2)
        if kind == "grid":
            net.replicas, mesh = mesh["replicate"], mesh["tensor"]
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for each in net.blocks:
            parallelize_module(each, mesh, plan)
        return net
    mesh = init_device_mesh("cpu", (pg.world,)) if kind == "fsdp" else pg.mesh(replicate=-1, shard=2)
    for each in net.blocks:
        fully_shard(each, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def ranks_of_data(pg: Any) -> tuple[int, int] | None:
    """Ranks of one tensor parallel model, and all stages of a pipeline, have the same rows. None: each rank its own."""
    kind = CASE.get("kind")
    if kind == "grid":
        return pg.rank // 2, pg.world // 2
    return (0, 1) if kind in ("tensor", "pipeline") else None


def made_loader(ranks: tuple[int, int] | None) -> ht.DataLoader[torch.Tensor]:
    return ht.DataLoader(Rows(), GLOBAL, True, global_batch_size=GLOBAL, seed=7, ranks=ranks)


def made_before(before: str | None) -> Any:
    """A loader that is made before the training function; None: there is none."""
    if before == "stream":
        return Stream()
    return made_loader((0, 1) if before == "ranks" else None) if before in ("loader", "ranks") else None


class Stream:
    """Data of another library: only its position is known."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        rows = Rows()
        while self.at < CASE["steps"]:
            self.at += 1
            yield torch.stack([rows[self.at]] * 2)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def digest(tensors: Iterable[torch.Tensor]) -> str:
    held = hashlib.sha256()
    for each in tensors:
        held.update(whole(each).contiguous().numpy().tobytes())
    return held.hexdigest()[:16]


def of_all_ranks(text: str) -> list[str]:
    """The stages of a pipeline have different parameters."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, text)
    return sorted(set(found))


def in_saves() -> None:
    """A rank may be lost when its part is copied, before the others learn of it."""
    fill = saving.fill

    def filled(*arguments: Any) -> bool:
        done = fill(*arguments)
        reach("save", Now.step)
        return done

    saving.fill = filled

    persist = saving.Saving._persist

    def persisted(*arguments: Any) -> None:
        reach("hand over", Now.step)
        persist(*arguments)

    saving.Saving._persist = persisted


def come_late(snaps: ht.Snapshots) -> None:
    """The last exchange of gradients in a step of HSDP is that of the root's shards, with the other replica."""
    rank, late_step = CASE.get("late", [-1, 0])
    all_reduce, calls = dist.all_reduce, [0]

    def late(*arguments: Any, **keywords: Any) -> Any:
        calls[0] += Now.step == late_step
        if calls[0] == GRADIENT_EXCHANGES:
            while not snaps._remaker._calls.is_cut():
                time.sleep(0.002)
        return all_reduce(*arguments, **keywords)

    if rank == LOCAL_RANK:
        dist.all_reduce = late


def in_joins() -> None:
    """A rank may be lost while the ranks of a further world make its process group: it waits for the others there."""
    make, worlds = dist.init_process_group, [0]

    def made(*arguments: Any, **keywords: Any) -> None:
        worlds[0] += 1
        reach("join", worlds[0])
        make(*arguments, **keywords)

    dist.init_process_group = made


def in_agreements() -> None:
    """A rank may be lost at each point of an agreement on a step."""
    announce, look, say = StepAgreement.announce, StepAgreement.look, step_links.StepLink.say

    def announced(self: StepAgreement, step: int) -> None:
        announce(self, step)
        reach("announced", step - 1)

    def looked(self: StepAgreement, step: int, is_cut: Any) -> StepEntry | None:
        entry = look(self, step, is_cut)
        if entry is StepEntry.DONE:
            reach("decided", step - 1)
        return entry

    def said(self: step_links.StepLink, step: int) -> None:
        reach("about to tell", step - 1)
        say(self, step)
        reach("told", step - 1)

    StepAgreement.announce, StepAgreement.look, step_links.StepLink.say = announced, looked, said


def train_made_before(snaps: ht.Snapshots, model: nn.Module) -> None:
    snaps.track(model=model)
    snaps.resume()

    @ht.survive(snaps)
    def train() -> None:
        assert isinstance(model, nn.Module)

    train()


def note_step(snaps: ht.Snapshots, step: int, rank: int) -> None:
    Now.slots.append(sorted(each.name for each in Path(snaps.memory_place).glob(f"{LOCAL_RANK}.[0-9]")))
    if CASE.get("by rank"):
        if rank == 0:
            (FOLDER / "now").write_text(str(step))
        time.sleep(CASE.get("pause_s", 0.0))


def hold_back_replacements() -> None:
    while CASE.get("replacements wait") and (FOLDER / "fault.0").exists() and not (FOLDER / "go on after 0").exists():
        time.sleep(0.01)


def what_is_there(step: int, model: nn.Module, adam: Any, schedule: Any) -> dict[str, Any]:
    """What a rank has at its end."""
    moments = [each for held in adam.state.values() for each in held.values()]
    return {
        "step": step,
        "parameters": of_all_ranks(digest([*model.parameters(), *moments])),
        "weights": [whole(each).double().sum().item() for each in model.parameters()],
        "random": digest([torch.get_rng_state()]),
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"] if CASE.get("compiled") else 0,
        "rates": schedule.get_last_lr(),
        **({"slots": Now.slots} if CASE.get("slots") else {}),
    }


def adam_for(model: nn.Module) -> torch.optim.Adam:
    """Without `foreach` torch finds out for each shape and operation how it is sharded, in each process. With it, it takes
    no plain parameters beside sharded ones."""
    alike = len({type(each.data) for each in model.parameters()}) == 1
    return torch.optim.Adam(model.parameters(), lr=1e-2, foreach=alike)


def main() -> None:
    in_saves()
    disk = CASE.get("disk")
    every, copies = f"{disk} steps" if disk else None, CASE.get("copies", 0)
    snaps = ht.Snapshots(FOLDER / "runs", every, memory_every=CASE.get("memory", 3), copies=copies)
    with ht.process_group() as pg, snaps:
        index, calls = ["made", "once"], list[Any]()
        stopping = None if CASE.get("nothing of its own") else Stopping()
        older = list[weakref.ref[nn.Module]]()
        torch.manual_seed(1)
        come_late(snaps)
        before = CASE.get("before")
        loader_before = made_before(before)
        mesh = pg.mesh(shard=-1) if before == "mesh" else None
        older_model = Net() if before == "plain" else made(pg) if before in ("model", "resumed") else None
        if before == "resumed":
            train_made_before(snaps, older_model)
            return

        @ht.survive(snaps, ranks=ht.multiple_of(CASE["multiple"]) if "multiple" in CASE else None)
        def train() -> dict[str, Any]:
            World.size = pg.world
            left = sum(each() is not None for each in older)
            reach("build again" if (FOLDER / "fault.0").exists() else "build", 0)
            if mesh is not None:
                mesh.get_group()
            model = made(pg) if older_model is None else fully_shard(older_model)
            if CASE.get("compiled"):
                for each in model.blocks:
                    each.compile(backend="aot_eager")
            older.append(weakref.ref(model))
            adam = adam_for(model)
            schedule = torch.optim.lr_scheduler.StepLR(adam, 5, 0.8)
            loader = loader_before or made_loader(ranks_of_data(pg))
            own = {} if stopping is None else {"stopping": stopping}
            state = snaps.track(model=model, adam=adam, schedule=schedule, loader=loader, **own)
            resumed = snaps.resume()
            source = "" if resumed is None else resumed.source
            calls.append([os.getpid(), id(index), pg.world, state.step, source, left])
            Now.step = state.step
            reach("resumed", state.step)
            for _ in state.epochs(EPOCHS):
                for rows in loader:
                    Now.step = state.step
                    reach("begin", state.step)
                    loss = train_a_step(model, loader, rows, pg)
                    reach("gradients", state.step)
                    adam.step()
                    reach("optimizer", state.step)
                    adam.zero_grad()
                    schedule.step()
                    if stopping is not None:
                        stopping.losses.append(loss)
                    snaps.step(loss=loss)
                    note_step(snaps, state.step, pg.rank)
                    reach("between steps", state.step)
                reach("end of an epoch", state.step)
            return what_is_there(state.step, model, adam, schedule)

        found = train()
        if CASE.get("again"):
            train()
        dist.barrier()
        end(
            str(pg.rank) if CASE.get("by rank") else None,
            **found,
            losses=[] if stopping is None else stopping.losses,
            calls=calls,
        )


remaking.NONE_FIT_S = CASE.get("too few wait", remaking.NONE_FIT_S)
hold_back_replacements()
in_joins()
in_agreements()
main()
