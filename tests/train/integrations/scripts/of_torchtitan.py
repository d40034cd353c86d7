"""torchtitan's optimizers, schedulers and data loader with holdfast's checkpointer, in the loop of torchtitan's trainer."""

from typing import Any

import torch.distributed as dist
import trail
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from holdfast.train.integrations.torchtitan import HoldfastCheckpointer


class Numbers(IterableDataset):
    """As torchtitan's: endless, a rank's own part, with a state."""

    def __init__(self) -> None:
        self.next = trail.RANK

    def __iter__(self):
        while True:
            number, self.next = self.next, self.next + trail.WORLD
            yield number % trail.SAMPLES

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.next = saved["next"]


class TrainState:
    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.step = saved["step"]


dist.init_process_group("gloo")
net = trail.Net()
fully_shard(net, mesh=dist.device_mesh.init_device_mesh("cpu", (trail.WORLD,)))
group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.05})
optimizers = OptimizersContainer.Config(param_groups=[group], implementation="for-loop").build(model_parts=[net])
schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=12)
loader = ParallelAwareDataloader(
    Numbers(), dp_rank=trail.RANK, dp_world_size=trail.WORLD, batch_size=2 * trail.BATCH, snapshot_every_n_steps=1
)
train_state = TrainState()
checkpointer = HoldfastCheckpointer.Config(
    enable=True, folder="snapshots", every=None, memory_every=1, optional=trail.CASE["optional"]
).build(
    dataloader=loader,
    model_parts=[net],
    optimizers=optimizers,
    lr_schedulers=schedulers,
    states={"train_state": train_state},
    sd_adapter=None,
    base_folder=trail.CASE["folder"],
)
checkpointer.load()
batches = iter(loader)
while train_state.step < 12:
    train_state.step += 1
    numbers = next(batches)
    optimizers.zero_grad()
    loss = net(trail.VALUES[numbers]).square().mean()
    trail.note(train_state.step, numbers, loss)
    loss.backward()
    optimizers.step()
    schedulers.step()
    trail.fault(train_state.step)
    checkpointer.save(train_state.step, last_step=train_state.step == 12)
checkpointer.close()
