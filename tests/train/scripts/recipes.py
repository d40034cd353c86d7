"""A training with one of several recipes, in which ranks are lost: recipes.py FOLDER CASE

CASE is as lost_ranks.py has it, with `recipe`: a name in RECIPES, and `loader`. Places are "first pass" or "second pass" (of a
step, in the backward pass), "forward", "optimizer" (between its step and `snaps.step()`), "between steps" and "end of an epoch".
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from lost_ranks import BATCH, CASE, FOLDER, World, digest, end, loader_options, reach, row, step_is_done
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast.train as ht

SAMPLES, EPOCHS = CASE.get("samples", 48), 2

Loss = Callable[[], torch.Tensor]
"""Forward and backward pass of one batch."""


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return row(index)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.0 if CASE.get("exact") else 0.2), nn.Linear(16, 3)
        )
        self.body[3].weight.register_hook(self.in_backward)
        self.step = self.passes = 0

    def begin(self, step: int) -> None:
        self.step, self.passes = step, 0

    def in_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        reach({1: "first pass", 2: "second pass"}.get(self.passes, "later pass"), self.step)
        return gradient

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        within = self.body[0](rows)
        reach("forward", self.step)
        return self.body[1:](within).square().mean()


class Recipe:
    """One optimizer, stepped as usual."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def tracked(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer}

    def step(self, loss: Loss) -> None:
        loss()
        self.optimizer.step()

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad()
        self.net.zero_grad()

    def changed(self) -> list[torch.Tensor]:
        """Tensors beside those of the model and the optimizer that have to come out equal."""
        return []


class Averaged(Recipe):
    """An average of the weights, updated after the optimizer's step."""

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.average = AveragedModel(net.body, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def tracked(self) -> dict[str, Any]:
        return {**super().tracked(), "average": self.average}

    def step(self, loss: Loss) -> None:
        super().step(loss)
        self.average.update_parameters(self.net.body)

    def changed(self) -> list[torch.Tensor]:
        return [*self.average.parameters()]


class Closure(Recipe):
    """LBFGS: the passes are inside the optimizer's step."""

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        net.body[2].p = 0.0  # a search along a line needs the same function
        self.optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2)

    def step(self, loss: Loss) -> None:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            return loss()

        self.optimizer.step(closure)


class SharpnessAware(torch.optim.Optimizer):
    """SAM as its well-known implementation has it: two passes, and another optimizer inside."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **options})
        self.base_optimizer = torch.optim.SGD(self.param_groups, momentum=0.9, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for each in self.param_groups[0]["params"]:
            moved = each.grad * (self.param_groups[0]["rho"] / (each.grad.norm() + 1e-12))
            each.add_(moved)
            self.state[each]["moved"] = moved
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for each in self.param_groups[0]["params"]:
            each.sub_(self.state[each]["moved"])
        self.base_optimizer.step()


class Sam(Recipe):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.optimizer = SharpnessAware(net.parameters(), lr=0.05)

    def tracked(self) -> dict[str, Any]:
        return {**super().tracked(), "base": self.optimizer.base_optimizer}

    def step(self, loss: Loss) -> None:
        loss()
        self.optimizer.first_step()
        loss()
        self.optimizer.second_step()


class SamAlone(Sam):
    """The inner optimizer's momentum would be lost."""

    def tracked(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer}


class Adversarial(Recipe):
    """Weights are moved and moved back through `.data`, which torch does not count: in the second epoch's first step,
    the 9th of all."""

    def step(self, loss: Loss) -> None:
        loss()
        if self.net.step != 8:
            self.optimizer.step()
            return
        for each in self.net.parameters():
            each.data.add_(0.01)
        loss()
        for each in self.net.parameters():
            each.data.sub_(0.01)
        self.optimizer.step()


class AdversarialOnOne(Recipe):
    """On rank 1 alone."""

    def step(self, loss: Loss) -> None:
        before = [each.detach().clone() for each in self.net.parameters()]
        if os.environ["RANK"] == "1":
            for each in self.net.parameters():
                each.data.add_(0.01)
        loss()
        for each, value in zip(self.net.parameters(), before, strict=True):
            each.data.copy_(value)
        self.optimizer.step()


class Momentum(Recipe):
    """A second network follows the first one, by assignments to `.data` before the optimizer's step, as in MoCo."""

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.key = Net()
        self.key.load_state_dict(net.state_dict())

    def tracked(self) -> dict[str, Any]:
        return {**super().tracked(), "key": self.key}

    def step(self, loss: Loss) -> None:
        for key, query in zip(self.key.parameters(), self.net.parameters(), strict=True):
            key.data = key.data * 0.9 + query.data * 0.1
        super().step(loss)

    def changed(self) -> list[torch.Tensor]:
        return [*self.key.parameters()]


class MomentumAfter(Momentum):
    """Between the optimizer's step and `snaps.step()`."""

    def step(self, loss: Loss) -> None:
        Recipe.step(self, loss)
        for key, query in zip(self.key.parameters(), self.net.parameters(), strict=True):
            key.data = key.data * 0.9 + query.data * 0.1


class ByHand(Recipe):
    """Gradients of two batches make a step."""

    def step(self, loss: Loss) -> None:
        loss()
        if self.net.step % 2:
            self.optimizer.step()

    def drop_gradients(self) -> None:
        if self.net.step % 2:
            super().drop_gradients()


class Scaled(Recipe):
    """A scaler skips one step, in which all ranks have gradients that are not finite."""

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)

    def tracked(self) -> dict[str, Any]:
        return {**super().tracked(), "scaler": self.scaler}

    def step(self, loss: Loss) -> None:
        loss()
        for each in self.net.parameters():
            each.grad.mul_(float("inf") if self.net.step == 3 else self.scaler.scale(torch.ones(())))
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def changed(self) -> list[torch.Tensor]:
        return [torch.tensor(self.scaler.get_scale())]


class Varied(Recipe):
    """Two optimizers, a schedule of torch's, and an option that the program sets itself."""

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.optimizer = torch.optim.AdamW(net.body[0].parameters(), lr=1e-2)
        self.other = torch.optim.SGD(net.body[3].parameters(), lr=0.05, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)

    def tracked(self) -> dict[str, Any]:
        return {**super().tracked(), "other": self.other, "schedule": self.schedule}

    def step(self, loss: Loss) -> None:
        self.other.zero_grad()  # here, and not after the step
        super().step(loss)
        self.other.step()
        self.schedule.step()
        self.other.param_groups[0]["lr"] *= 0.95


class StepsWithoutHooks(Recipe):
    """As a captured graph that is replayed: no hook, and no count of changes."""

    def step(self, loss: Loss) -> None:
        loss()
        for each in self.net.parameters():
            each.data.sub_(each.grad, alpha=0.01)


class Flattening(Recipe):
    """The memory of parameters moves in each forward pass, as LSTMs' do on a GPU in `flatten_parameters()`."""

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        net.body[0].register_forward_pre_hook(self.move)

    def move(self, module: nn.Module, _: Any) -> None:
        for each in module.parameters():
            each.data = each.data.clone()


RECIPES = {
    each.__name__: each
    for each in (
        *(Averaged, Closure, Sam, SamAlone, Adversarial, AdversarialOnOne, Momentum, MomentumAfter, StepsWithoutHooks),
        *(Flattening, ByHand, Scaled, Varied),
    )
}


def loader_of(dataset: Rows, rank: int, world: int) -> tuple[Any, dict[str, Any]]:
    """What the loop is over, and what is tracked of it."""
    if CASE.get("loader") == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        sampler = torch.utils.data.DistributedSampler(dataset, world, rank, shuffle=True, seed=7)
        loader: Any = StatefulDataLoader(dataset, BATCH, sampler=sampler)
        return loader, {"loader": loader}
    if CASE.get("loader") == "sampler":
        follows = ht.DistributedSampler(dataset, seed=7, batch_size=BATCH)
        return torch.utils.data.DataLoader(dataset, BATCH, sampler=follows), {"sampler": follows}
    loader = ht.DataLoader(dataset, **loader_options())
    return loader, {"loader": loader}


class Centered(nn.Module):
    """Its state is not tracked."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return loss


def main() -> None:
    snaps = ht.Snapshots(FOLDER / "runs", every=None, memory_every=5)
    with ht.process_group() as pg, snaps:
        torch.manual_seed(1)
        net = Net()
        recipe = RECIPES.get(CASE.get("recipe", ""), Recipe)(net)
        model = ht.ddp(net, pg)
        torch.manual_seed(pg.rank)
        loader, parts = loader_of(Rows(), pg.rank, pg.world)
        state = snaps.track(model=model, **recipe.tracked(), **parts)
        snaps.resume()

        center = Centered() if CASE.get("recipe") == "Adversarial" else nn.Identity()

        @ht.survive(snaps)
        def train() -> None:
            worlds.append(pg.world)
            World.size = pg.world
            for epoch in state.epochs(EPOCHS):
                if CASE.get("loader") == "stateful":
                    loader.sampler.set_epoch(epoch)
                for rows in loader:
                    net.begin(state.step)

                    def loss(rows: torch.Tensor = rows) -> torch.Tensor:
                        found = center(model(rows))
                        found.backward()
                        return found

                    recipe.step(loss)
                    recipe.drop_gradients()
                    reach("optimizer", state.step)
                    snaps.step()
                    step_is_done(state.step, net.parameters())
                    reach("between steps", state.step)
                reach("end of an epoch", state.step)

        worlds: list[int] = []
        train()
        moments = [value for each in recipe.optimizer.state.values() for value in each.values()]
        moments = [each for each in moments if isinstance(each, torch.Tensor)]
        end(
            step=state.step,
            worlds=worlds,
            parameters=digest([*net.parameters(), *recipe.changed(), *moments]),
            weights=[each.double().sum().item() for each in (*net.parameters(), *recipe.changed())],
            drawn=torch.rand(1).item(),
        )


main()
