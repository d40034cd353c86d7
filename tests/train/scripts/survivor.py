"""A training in which ranks are lost: survivor.py FOLDER CASE

CASE is a JSON object; see `Case`. At the end each rank writes FOLDER/end.LOCAL_RANK, a JSON object. Its `counts` say how
often each sample was trained: they are weights, so a sample that was lost, or whose gradients were counted twice, shows.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import io
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dying import die
from torch import nn

import holdfast.train as ht
from holdfast.memory_folder import COPIES
from holdfast.train import copies, replica_check
from holdfast.train import save as saving
from holdfast.train.agent_channel import UNINTERRUPTED_S, AgentChannel
from holdfast.train.snapshots import lease as leases
from holdfast.train.snapshots.copy_service import all_slots

GLOBAL = 24
FOLDER = Path(sys.argv[1])
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))


@dataclass
class Case:
    steps: int = 16
    """Of an epoch."""
    epochs: int = 2
    more: int = 0
    """Epochs of a second training function, with the same objects."""
    always: bool = False
    """The first training function trains whenever it is called."""
    other: str = ""
    """Other Snapshots are resumed: "before" the training function, or "after" it, for a function of their own."""
    drawn: bool = True
    """Dropout and batch normalization: another world computes something else."""
    batch: int | None = None
    """Samples of a micro-batch, of which several make an optimizer step."""
    processes: int = 0
    """Of the data loader."""
    meet: int = -1
    """In this step all ranks meet between the optimizer's step and snaps.step()."""
    group: int = -1
    """In this step all ranks make another process group."""
    disk: int = -1
    """After this step all ranks save to the disk."""
    apart: bool = False
    """Each process has a machine of its own."""
    copies: int = 0
    """1: each rank pretends to be a node, and they keep copies of each other's states."""
    checked: int = 500
    """Replicas are compared after the first step, and after every so many."""
    node: int = -1
    """Each node has one worker, and this is its number among them, in place of the local rank."""
    step: int = 0
    """The one that is done now."""
    faults: list[list[Any]] = field(default_factory=list)
    """[local rank, where, step, what], see `reach`."""


case = Case(**json.loads(sys.argv[2]))
if case.node >= 0:
    LOCAL_RANK = case.node


def reach(where: str, number: int | None = None) -> None:
    """A place where something may happen to this rank: each fault happens once, whatever process is this rank then. A rank
    is killed when the others have come to their faults of the same step: what they do is not left to chance."""
    at = case.step if number is None else number
    for index, (rank, its_where, its_step, what) in enumerate(case.faults):
        if (rank, its_where, its_step) == (LOCAL_RANK, where, at):
            try:
                (FOLDER / f"fault.{index}").touch(exist_ok=False)
            except FileExistsError:
                continue
            while what == "kill" and not all(each.exists() for each in faults_of(its_step)):
                time.sleep(0.002)
            if what == "flip":  # as faulty memory does: torch does not count it as a change
                weight = next(each for each in gc.get_objects() if isinstance(each, Net)).first.weight
                weight.data.view(-1).view(torch.uint8)[5] ^= 16
            else:
                suffer(what)


def faults_of(step: int) -> list[Path]:
    """Those that have happened exist."""
    return [FOLDER / f"fault.{index}" for index, each in enumerate(case.faults) if each[2] == step]


def kill_rank() -> None:
    in_loader = torch.utils.data.get_worker_info() is not None
    if in_loader:
        os.kill(os.getppid(), signal.SIGKILL)
    else:
        die()


def suffer(what: str) -> None:
    match what:
        case "pass":
            pass
        case "kill":
            kill_rank()
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "wait":
            while not (FOLDER / f"go on after {case.step}").exists():
                time.sleep(0.002)
        case "compute":
            while True:
                torch.nn.Identity()(1)  # a forward pass, which may be interrupted
        case "hold the lock":
            ctypes.PyDLL(None).sleep(600)
        case "leave an operation":
            dist.broadcast(torch.zeros(1), src=2 - LOCAL_RANK, async_op=True)  # nobody sends
            raise ConnectionError("before the news of the loss")
        case "kill the store":
            for stat in Path("/proc").glob("[0-9]*/stat"):
                with contextlib.suppress(OSError):
                    parent = int(stat.read_text().rpartition(")")[2].split()[1])
                    if parent == os.getppid() and "store_server.py" in (stat.parent / "cmdline").read_text():
                        os.kill(int(stat.parent.name), signal.SIGKILL)
        case "be late":
            await_release()
            late_s = time.monotonic() + 3 * UNINTERRUPTED_S
            while time.monotonic() < late_s:
                time.sleep(0.001)
        case "exit":
            sys.exit(0)
        case "exit at once":
            os._exit(0)
        case "bug":
            raise ValueError("a bug of the program")
        case "bug after release":
            await_release()
            raise ValueError("a bug of the program")
        case "memory after release":
            await_release()
            raise torch.OutOfMemoryError("no memory is left")


def await_release() -> None:
    """A rank was lost, and the others were ordered to wait for the next generation."""
    channels = [each for each in gc.get_objects() if isinstance(each, AgentChannel)]
    (FOLDER / f"awaits release.{LOCAL_RANK}").touch()
    while not any(each.released for each in channels):
        time.sleep(0.001)


def in_joins() -> None:
    """A rank may be lost on its way into a further world: while the ranks make its process group, where it waits for the
    others, or while they agree on a state."""
    make, worlds = dist.init_process_group, [0]

    def made(*arguments: Any, **keywords: Any) -> None:
        worlds[0] += 1
        (FOLDER / f"makes world {worlds[0]}.{LOCAL_RANK}").touch()
        if [LOCAL_RANK, "join", worlds[0], "kill"] in case.faults:
            while len([*FOLDER.glob(f"makes world {worlds[0]}.*")]) < int(os.environ["WORLD_SIZE"]):
                time.sleep(0.002)
        reach("join", worlds[0])
        make(*arguments, **keywords)

    receive, go_on = dist.recv, ht.Snapshots._go_on

    def received(*arguments: Any, **keywords: Any) -> Any:
        """Of the state there is the size first."""
        source = receive(*arguments, **keywords)
        reach("received", worlds[0])
        return source

    def agreed(snaps: ht.Snapshots, *arguments: Any) -> None:
        """This rank has the state from which all go on; others may not have it yet."""
        reach("agreed", worlds[0])
        go_on(snaps, *arguments)

    dist.init_process_group, dist.recv, ht.Snapshots._go_on = made, received, agreed


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    fetched = 0

    def __len__(self) -> int:
        return case.steps * GLOBAL

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.fetched += 1
        if torch.utils.data.get_worker_info() is None:
            reach("loader")
        else:
            reach("loader's process", self.fetched)
        return torch.sin(torch.arange(8.0) * (index + 1)), index


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        between = [nn.Dropout(0.3), nn.BatchNorm1d(32)] if case.drawn else []
        self.first = nn.Linear(8, 32)
        self.rest = nn.Sequential(nn.ReLU(), *between, nn.Linear(32, 33), nn.ReLU(), nn.Linear(33, 3))
        self.counts = nn.Parameter(torch.zeros(case.steps * GLOBAL))
        self.passes = 0
        """In no state: a replacement counts from 0."""
        self.first.weight.register_hook(self.in_backward)

    def in_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """Of the first layer: those of the others are on their way."""
        reach("backward")
        return gradient

    def forward(self, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        within = self.first(rows)
        self.passes += 1
        reach("forward")
        return self.rest(within).square().mean() + self.counts[index].mean()


class Schedule(torch.optim.lr_scheduler.StepLR):
    def state_dict(self) -> dict[str, Any]:
        """Called when the state at a step's end is kept."""
        reach("boundary")
        return super().state_dict()


def in_saves_and_checks() -> None:
    """A rank may be lost when its part is copied, before the others learn of it, and when they wait for its digests."""
    fill, check = saving.fill, replica_check.ReplicaCheck._check

    def filled(*arguments: Any) -> bool:
        done = fill(*arguments)
        reach("save")
        return done

    def checked(of: replica_check.ReplicaCheck) -> None:
        reach("check")
        check(of)

    saving.fill = filled
    replica_check.ReplicaCheck._check = checked


def note_copies(snaps: ht.Snapshots) -> None:
    """What there is before the first step of another world."""
    tier = snaps._opened
    while tier.copying:
        tier.check()
        time.sleep(0.005)
    dist.barrier()  # the others' have arrived, too
    held = sorted((slot.rank, slot.step) for path, slot in all_slots(Path(tier.place)) if path.name == COPIES)
    (FOLDER / f"copies.{LOCAL_RANK}").write_text(json.dumps([snaps.state.step, tier.copy_error, held]))


def a_traceback() -> str:
    """What one line of it looks like."""
    with contextlib.redirect_stderr(io.StringIO()) as text:
        sys.excepthook(ValueError, ValueError("unlucky"), None)
    return text.getvalue()


def digest(*tensors: torch.Tensor) -> str:
    held = hashlib.sha256()
    for each in tensors:
        held.update(each.detach().numpy().tobytes())
    return held.hexdigest()[:16]


def what_is_there(
    model: nn.Module, moments: list[Any], step: int, worlds: list[int], counts: torch.Tensor
) -> dict[str, object]:
    """What a rank has at its end."""
    return {
        "step": step,
        "worlds": worlds,
        "counts": sorted({round(each, 3) for each in counts.tolist()}),
        "parameters": digest(*model.parameters(), *moments),
        "buffers": digest(*model.buffers()),
        "random": digest(torch.get_rng_state()),
    }


def note_end(end: dict[str, object]) -> None:
    whole_file = FOLDER / f"end of {os.getpid()}"  # two nodes may have a worker of this number
    whole_file.write_text(json.dumps(end))
    whole_file.rename(FOLDER / f"end.{LOCAL_RANK}")


def train_other(pg: Any) -> None:
    """Train another model, with Snapshots of its own."""
    model = ht.ddp(nn.Linear(8, 1), pg)
    with ht.Snapshots(FOLDER / "others", every=None) as others:
        state = others.track(model=model, sgd=(sgd := torch.optim.SGD(model.parameters(), lr=0.1)))
        others.resume()

        @ht.survive(others)
        def train() -> None:
            while state.step < 2:
                model(torch.ones(2, 8)).sum().backward()
                sgd.step()
                sgd.zero_grad()
                others.step()

        train()


def between_the_two(adam: torch.optim.Optimizer, schedule: Schedule) -> None:
    """What a script may do between two training functions. A replacement comes by here with what it has taken."""
    torch.rand(LOCAL_RANK + 1)
    adam.param_groups[0]["lr"] *= 0.5
    schedule.step()


def set_up() -> None:
    torch.set_num_threads(1)
    in_saves_and_checks()
    if case.apart:  # nobody sees that the owner of the folder's lease is dead, and to wait for that never ends
        leases._machine, leases.POLL_S = lambda: f"of {os.getpid()}", 3600.0
    if case.copies:
        copies.node_key = lambda: str(LOCAL_RANK)


def main() -> None:
    set_up()
    snaps = ht.Snapshots(FOLDER / "runs", every=None, memory_every=5, copies=case.copies)
    with ht.process_group() as pg, snaps:
        torch.manual_seed(1)
        net = Net()
        model = ht.ddp(net, pg, bucket_cap_mb=0.001)
        torch.manual_seed(pg.rank)
        counts = net.counts
        others = [each for each in model.parameters() if each is not counts]
        adam = torch.optim.Adam(others, lr=1e-2)
        sgd = torch.optim.SGD([counts], lr=GLOBAL)
        schedule = Schedule(adam, 5, 0.8)
        loader = ht.DataLoader(Rows(), case.batch, True, global_batch_size=GLOBAL, seed=7, num_workers=case.processes)
        state = snaps.track(model=model, adam=adam, sgd=sgd, schedule=schedule, loader=loader)
        ht.check_replicas(model, every=case.checked)
        if case.other == "before":
            train_other(pg)
        snaps.resume()

        @ht.survive(snaps)
        def train() -> None:
            if case.always:
                model(torch.ones(2, 8), torch.tensor([0, 1]))
            train_until(case.epochs)

        @ht.survive(snaps)
        def train_on() -> None:
            train_until(case.epochs + case.more)

        def train_until(epochs: int) -> None:
            worlds.append(pg.world)
            case.step = state.step
            if case.copies and state.step:
                note_copies(snaps)
            for _ in state.epochs(epochs):
                for rows, index in loader:
                    case.step = state.step
                    reach("begin")
                    if case.step == case.group:
                        reach("group")
                        dist.new_group()
                    with ht.accumulate(model, loader) as micro:
                        micro.backward(model(rows, index))
                        reach("backward done")
                    if micro.last:
                        reach("gradients")
                        adam.step()
                        sgd.step()
                        reach("optimizer")
                        if case.step == case.meet:
                            dist.barrier()
                        model.zero_grad()
                        schedule.step()
                    snaps.step(loss=micro.loss)
                    if state.step == case.disk:
                        snaps.save()

        worlds: list[int] = []
        train()
        if case.more:
            between_the_two(adam, schedule)
            train_on()
        if case.other == "after":
            train_other(pg)
        moments = [value for each in adam.state.values() for value in each.values()]
        end = what_is_there(model, moments, state.step, worlds, counts)
        end["weights"] = [each.detach().double().sum().item() for each in others]
        end |= {"rates": schedule.get_last_lr(), "a traceback": a_traceback().count(f"[rank{pg.rank}]: ")}
        note_end(end)


in_joins()
main()
