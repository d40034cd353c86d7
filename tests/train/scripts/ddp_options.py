"""A training of many small models, each in DDP with other options, in which ranks are lost: ddp_options.py FOLDER CASE

All models do their forward and backward passes one after the other, and then all optimizers step. CASE is a JSON object;
faults: [[local rank, where, step]], each a kill that happens once; `where` is "forward NAME", "backward NAME", "begin"
or "between". With a fourth item the rank waits for a file instead. At the end each rank writes FOLDER/end.LOCAL_RANK, a
JSON object with the digest and the weights of each model.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import holdfast.train as ht

FOLDER = Path(sys.argv[1])
LOCAL_RANK = int(os.environ["LOCAL_RANK"])
CASE = json.loads(sys.argv[2])
FAULTS = CASE.get("faults", [])
STEPS, GLOBAL, WIDTH = CASE.get("steps", 20), 12, 8
UNFROZEN_AT = 5
"""The step at which the layers of `unfreezing` are unfrozen, by code that runs once."""


def reach(where: str, step: int) -> None:
    for index, (rank, its_where, its_step, *what) in enumerate(FAULTS):
        mark = FOLDER / f"fault.{index}"
        if (rank, its_where, its_step) == (LOCAL_RANK, where, step) and not mark.exists():
            mark.touch()
            if not what:
                os.kill(os.getpid(), signal.SIGKILL)
            while not (FOLDER / f"go on after {step}").exists():
                time.sleep(0.002)


class Net(nn.Module):
    """Its gradients are made in another order than that of the parameters."""

    def __init__(self, name: str, between: nn.Module | None = None) -> None:
        super().__init__()
        self.name = name
        self.last = nn.Linear(WIDTH, 3)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.between = nn.Tanh() if between is None else between
        self.second = nn.Linear(WIDTH, WIDTH)
        self.step = 0
        self.backward_hook()

    def backward_hook(self) -> None:
        self.first.bias.register_hook(self.in_backward)

    def in_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        reach(f"backward {self.name}", self.step)
        return gradient

    def middle(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(self.between(self.first(rows))))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        middle = self.middle(rows)
        reach(f"forward {self.name}", self.step)
        return self.last(middle)


class Checkpointed(Net):
    def __init__(self, name: str, reentrant: bool) -> None:
        super().__init__(name)
        self.reentrant = reentrant

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clone().requires_grad_()
        middle = checkpoint(self.middle, rows, use_reentrant=self.reentrant)
        reach(f"forward {self.name}", self.step)
        return self.last(middle)


class Twice(Net):
    """Two checkpoints of the same layers, and a parameter that is not used."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.unused = nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        once = checkpoint(self.middle, rows.clone().requires_grad_(), use_reentrant=True)
        reach(f"forward {self.name}", self.step)
        return self.last(checkpoint(self.middle, once, use_reentrant=True))


class Branches(Net):
    """Some parameters are used in every second step, and one never."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.other, self.never = nn.Linear(WIDTH, 3), nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        middle = self.middle(rows)
        reach(f"forward {self.name}", self.step)
        return (self.other if self.step % 2 else self.last)(middle)


class Tied(Net):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.second.weight = self.first.weight


class Sparse(Net):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.table = nn.Embedding(16, WIDTH, sparse=True)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows + self.table((rows[:, 0] * 100).long() % 16))


class Kinds(Net):
    """Parameters of two kinds, so in other buckets."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.second.float()

    def middle(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(self.between(self.first(rows)).float())).double()


class Ignoring(Net):
    """A parameter without a gradient and a buffer that DDP is to leave alone."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.fixed = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.register_buffer("own", torch.full((WIDTH,), 0.5))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ["fixed", "own"])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows * self.fixed + self.own)


class Around(nn.Module):
    """A larger module, which has a DDP module within."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.wrapped(rows) * 2.0


class Trained:
    """One model in training. `tracked`: what is tracked, if that is not the model itself."""

    none = True
    """Gradients become None after a step."""

    def __init__(self, model: nn.Module, tracked: nn.Module | None = None, sgd: bool = False) -> None:
        self.model = model
        self.tracked = tracked or model
        self.net = next(each for each in model.modules() if isinstance(each, Net))
        parameters = list(model.parameters())
        self.optimizer = torch.optim.SGD(parameters, 0.05) if sgd else torch.optim.Adam(parameters, 0.01)

    def passes(self, step: int, rows: torch.Tensor) -> None:
        self.net.step = step
        self.model(rows).square().mean().backward()


class Accumulating(Trained):
    def passes(self, step: int, rows: torch.Tensor) -> None:
        self.net.step = step
        half = len(rows) // 2
        with self.model.no_sync():
            self.model(rows[:half]).square().mean().backward()
        self.model(rows[half:]).square().mean().backward()


class Zeroing(Trained):
    """Gradients become zeros after a step."""

    none = False


class Critic(Trained):
    """Two optimizers step in one step, and each one's parameters are frozen while the other one's are trained."""

    def __init__(self, model: nn.Module, generator: Trained) -> None:
        super().__init__(model)
        self.generator = generator

    def passes(self, step: int, rows: torch.Tensor) -> None:
        self.net.step = self.generator.net.step = step
        self.model.requires_grad_(True)
        self.generator.model.requires_grad_(False)
        self.model(self.made(rows)).square().mean().neg().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.requires_grad_(False)
        self.generator.model.requires_grad_(True)
        self.model(self.made(rows)).square().mean().backward()

    def made(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.generator.model(rows)] * 3, 1)[:, :WIDTH]


class Unfreezing(Trained):
    """Built with all parameters; some are frozen at first, and after a while others are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.net.second.requires_grad_(False)
        self.net.last.weight.requires_grad_(False)

    def passes(self, step: int, rows: torch.Tensor) -> None:
        if step == UNFROZEN_AT:
            self.net.second.requires_grad_(True)
            self.net.first.weight.requires_grad_(False)
        super().passes(step, rows)


class Generating(Trained):
    """A generator, trained in every second step. In the others its judge is."""

    judge: Trained

    def passes(self, step: int, rows: torch.Tensor) -> None:
        self.net.step = self.judge.net.step = step
        trained, other = (self, self.judge) if step % 2 else (self.judge, self)
        trained.model.requires_grad_(True)
        other.model.requires_grad_(False)
        made = torch.cat([self.model(rows)] * 3, 1)[:, :WIDTH]
        loss = self.judge.model(made).square().mean()
        (loss if step % 2 else -loss).backward()


class Judging(Trained):
    def passes(self, step: int, rows: torch.Tensor) -> None:
        """Those of the generator, or of the critic, are its own."""


KNOWN = frozenset(inspect.signature(DistributedDataParallel).parameters)


def wrapped(net: nn.Module, **options: Any) -> DistributedDataParallel:
    """The module in DDP with those of the options that this torch has."""
    given = {"bucket_cap_mb": 0.0004} | options
    return DistributedDataParallel(net, **{name: value for name, value in given.items() if name in KNOWN})


def hooked(name: str, hook: Callable[..., Any], state: object = None) -> Trained:
    model = wrapped(Net(name))
    model.register_comm_hook(state, hook)
    return Trained(model)


def of_options(name: str, **options: Any) -> Trained:
    return Trained(wrapped(Net(name), **options))


def built_in(name: str, kind: str) -> Trained:
    model = wrapped(Net(name))
    model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))
    return Trained(model)


def frozen(name: str) -> Trained:
    net = Net(name)
    net.second.requires_grad_(False)
    return Trained(wrapped(net))


def late_frozen(name: str) -> Trained:
    model = wrapped(Net(name), find_unused_parameters=True)
    return Unfreezing(model)


def apart(name: str) -> Trained:
    net = Net(name)
    return Trained(wrapped(net), tracked=net)


def generating() -> dict[str, Trained]:
    generator, judge = Generating(wrapped(Net("gan"))), Judging(wrapped(Net("judge")))
    generator.judge = judge
    return {"gan": generator, "judge": judge}


def criticized() -> dict[str, Trained]:
    """The last ones: from the critic's step on, an interrupted step cannot be undone."""
    generator = Judging(wrapped(Net("generator")))
    return {"generator": generator, "critic": Critic(wrapped(Net("critic")), generator)}


def compiled() -> dict[str, Trained]:
    def made(name: str) -> nn.Module:
        return torch.compile(Net(name), backend="eager")

    around = torch.compile(DistributedDataParallel(Net("compiled around")), backend="eager")
    return {
        "compiled within": Trained(DistributedDataParallel(made("compiled within"))),
        "compiled around": Trained(around),
        "static compiled": Trained(DistributedDataParallel(made("static compiled"), static_graph=True)),
    }


def trainings() -> dict[str, Trained]:
    if CASE.get("compiled"):
        return compiled()
    if CASE.get("joined"):
        return {"plain": of_options("plain")}
    return {
        "plain": of_options("plain"),
        "default": Trained(DistributedDataParallel(Net("default"))),
        "static": of_options("static", static_graph=True),
        "static view": of_options("static view", static_graph=True, gradient_as_bucket_view=True),
        "static twice": Trained(wrapped(Twice("static twice"), static_graph=True)),
        "static branch": Trained(wrapped(Checkpointed("static branch", False), static_graph=True)),
        "reentrant": Trained(wrapped(Checkpointed("reentrant", True))),
        "not reentrant": Trained(wrapped(Checkpointed("not reentrant", False))),
        "branches": Trained(wrapped(Branches("branches"), find_unused_parameters=True)),
        "branches skipped": Trained(
            wrapped(Branches("branches skipped"), find_unused_parameters=True, skip_all_reduce_unused_params=True)
        ),
        "view": of_options("view", gradient_as_bucket_view=True),
        "batched": of_options("batched", batched_grad_copy=True),
        "caps": Trained(wrapped(Net("caps"), bucket_cap_mb=None, bucket_cap_mb_list=[0.0001, 0.0004])),
        "no first sync": of_options("no first sync", init_sync=False),
        "norm": Trained(wrapped(Net("norm", nn.BatchNorm1d(WIDTH)))),
        "own norm": Trained(wrapped(Net("own norm", nn.BatchNorm1d(WIDTH)), broadcast_buffers=False)),
        "norm unsynced": Trained(wrapped(Net("norm unsynced", nn.BatchNorm1d(WIDTH)), forward_sync_buffers=False)),
        "accumulating": Accumulating(wrapped(Net("accumulating", nn.BatchNorm1d(WIDTH)))),
        "ignoring": Trained(wrapped(Ignoring("ignoring"))),
        "float16": hooked("float16", default_hooks.fp16_compress_hook),
        "float16 of all": hooked("float16 of all", default_hooks.fp16_compress_hook, dist.group.WORLD),
        "wrapped hook": hooked("wrapped hook", default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        "built-in float16": built_in("built-in float16", "FP16_COMPRESS"),
        "built-in sum": built_in("built-in sum", "ALLREDUCE"),
        "within": Trained(Around(wrapped(Net("within")))),
        "apart": apart("apart"),
        "tied": Trained(wrapped(Tied("tied"))),
        "sparse": Trained(wrapped(Sparse("sparse")), sgd=True),
        "kinds": Trained(wrapped(Kinds("kinds"))),
        "frozen": frozen("frozen"),
        "unfreezing": late_frozen("unfreezing"),
        "zeroing": Zeroing(wrapped(Branches("zeroing"), find_unused_parameters=True)),
        **generating(),
        **criticized(),
    }


def digest(*tensors: torch.Tensor) -> str:
    held = hashlib.sha256()
    for each in tensors:
        held.update(each.detach().numpy().tobytes())
    return held.hexdigest()[:16]


def end_of(each: Trained) -> dict[str, Any]:
    moments = [value for held in each.optimizer.state.values() for value in held.values()]
    state = [*each.model.parameters(), *(value for value in moments if isinstance(value, torch.Tensor))]
    weights = [value.double().flatten().tolist() for value in each.model.parameters()]
    return {
        "state": digest(*state),
        "weights": weights,
        "frozen": [not one.requires_grad for one in each.model.parameters()],
    }


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    snaps = ht.Snapshots(FOLDER / "runs", every=None, memory_every=5)
    with ht.process_group(guards=False) as pg, snaps:
        torch.manual_seed(1)
        every = trainings()
        parts = {name.replace(" ", "_").replace("-", "_"): each for name, each in every.items()}
        tracked = {f"model_{name}": each.tracked for name, each in parts.items()}
        tracked |= {f"optimizer_{name}": each.optimizer for name, each in parts.items()}
        state = snaps.track(**tracked)
        snaps.resume()

        @ht.survive(snaps)
        def train() -> None:
            worlds.append(pg.world)
            with every["plain"].model.join() if CASE.get("joined") else contextlib.nullcontext():
                steps()

        def steps() -> None:
            while state.step < STEPS:
                step = state.step
                reach("begin", step)
                rows = torch.sin(torch.arange(float(GLOBAL * WIDTH)).reshape(GLOBAL, WIDTH) * (step + 1.5))
                for each in every.values():
                    each.passes(step, rows[pg.rank :: pg.world])
                for each in every.values():
                    each.optimizer.step()
                    each.optimizer.zero_grad(each.none)
                snaps.step()
                reach("between", step)

        worlds: list[int] = []
        train()
        ends = {name: end_of(each) for name, each in every.items()}
        end = {"parameters": digest_of(ends), "worlds": worlds, "ends": ends}
        (FOLDER / f"end.{LOCAL_RANK}").write_text(json.dumps(end))


def digest_of(ends: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(ends).encode()).hexdigest()


main()
