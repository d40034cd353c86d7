"""torchtitan: a checkpointer, chosen in the trainer's configuration.

trainer_config.checkpoint = HoldfastCheckpointer.Config(enable=True, every="2min", memory_every=20)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from holdfast.protocol.errors import TrackingError
from holdfast.train.integrations import missing
from holdfast.train.snapshots_api import Keep, Snapshots

try:
    from torchtitan.components.checkpointer.base import BaseCheckpointManager
except ImportError as error:
    raise missing("torchtitan", error) from error


class HoldfastCheckpointer(BaseCheckpointManager):  # type: ignore[misc]
    """Snapshots of all that torchtitan's trainer gives its checkpointer, in `checkpoint.folder`.

    Raises TrackingError for options that it does not have: a step to load, an initial checkpoint."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """The checkpointer's options. `interval` is not used: `every` and `memory_every` say when it saves."""

        every: str | None = "5min"
        """Time from one snapshot on the disk to the next, as in `ht.Snapshots`."""
        memory_every: int | None = 20
        """Steps from one copy in memory to the next."""
        optional: tuple[str, ...] = ()
        """Objects that may keep their initial state, as in `resume()`; `("dataloader",)` for another world."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future = None
        if not self.enable:
            return
        if config.initial_load_path or config.create_seed_checkpoint or config.exclude_from_loading:
            raise TrackingError(
                "HoldfastCheckpointer continues from its own snapshots: without initial_load_path, "
                "create_seed_checkpoint and exclude_from_loading"
            )
        self._load_only, self._optional = config.load_only, config.optional
        self.snapshots = Snapshots(
            os.path.join(base_folder, config.folder),
            every=config.every,
            memory_every=config.memory_every,
            keep=Keep(last=config.keep_latest_k) if config.keep_latest_k else None,
        )
        parts = [*_numbered("model", model_parts), *_numbered("optimizer", optimizers.optimizers)]
        loader = {} if dataloader is None else {"dataloader": dataloader}
        self.snapshots.track(**dict(parts), lr_scheduler=lr_schedulers, **loader, **states)

    def _load(self, step: int = -1) -> bool:
        if step != -1:
            raise TrackingError(f"load_step={step}: HoldfastCheckpointer continues from the newest snapshot")
        return self.snapshots.resume(optional=self._optional) is not None

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._load_only:
            return False
        self.snapshots.step()
        if last_step:
            self.snapshots.save(wait=True)
        return True

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: a snapshot is a copy already."""

    def _wait_for_saving(self) -> None:
        """Do nothing: torchtitan calls this only for a `save_future`."""

    def _close(self) -> None:
        self.snapshots.close()


def _numbered(name: str, parts: list[Any]) -> list[tuple[str, Any]]:
    """`model`, or `model0`, `model1` … for the parts of a pipeline's rank."""
    return [(name, parts[0])] if len(parts) == 1 else [(f"{name}{number}", each) for number, each in enumerate(parts)]
