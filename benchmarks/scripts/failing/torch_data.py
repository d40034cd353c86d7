"""Data loaders and checkpoints of torch."""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from .parts import every, one


class Items:
    """A dataset whose seventh item is something else."""

    def __init__(self, seventh: Any) -> None:
        self._seventh = seventh

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        import torch

        return self._seventh() if index == 7 else torch.ones(4)


def load(seventh: Any, **options: Any) -> None:
    from torch.utils.data import DataLoader

    from .parts import meet

    for _ in DataLoader(Items(seventh), batch_size=2, **{"num_workers": 2, **options}):  # type: ignore[arg-type]
        meet()


@one(1, "HF201", says="caption", torch=True)
def worker_of_the_loader_raises() -> None:
    load(lambda: {"image": 1}["caption"])


@one(2, "HF217", says="img_0007.jpg", torch=True, ranks=3)
def worker_of_the_loader_finds_no_file() -> None:
    load(lambda: Path("/datasets/coco/img_0007.jpg").read_bytes())


@one(1, "HF215", torch=True)
def worker_of_the_loader_is_killed() -> None:
    load(lambda: os.kill(os.getpid(), signal.SIGKILL))


@one(1, "HF215", torch=True)
def worker_of_the_loader_crashes() -> None:
    load(lambda: ctypes.string_at(0))


@one(0, "HF215", torch=True)
def worker_of_the_loader_is_too_slow() -> None:
    load(lambda: time.sleep(30), timeout=2)


@one(1, "HF201", says="equal size", torch=True)
def samples_of_different_sizes() -> None:
    import torch

    load(lambda: torch.ones(5))


@one(1, "HF201", says="pickle", torch=True)
def dataset_cannot_be_pickled() -> None:
    load(lambda: None, multiprocessing_context="spawn")


@one(1, "HF215")
def pin_memory_thread() -> None:
    raise RuntimeError("Pin memory thread exited unexpectedly")


@every("0 1", "HF237")
def checkpoint_of_another_model() -> None:
    import torch

    torch.nn.Linear(3, 4).load_state_dict({"module.weight": torch.ones(4, 3), "module.bias": torch.ones(4)})


@every("0 1", "HF237")
def optimizer_of_another_model() -> None:
    import torch

    saved = torch.optim.Adam(torch.nn.Linear(3, 4).parameters()).state_dict()
    torch.optim.Adam([*torch.nn.Linear(3, 4).parameters(), torch.nn.Parameter(torch.ones(1))]).load_state_dict(saved)


@one(1, "HF237")
def checkpoint_cut_short() -> None:
    import torch

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "last.pt")
        torch.save(torch.zeros(1000), path)
        path.write_bytes(path.read_bytes()[:2000])
        torch.load(path)


@one(1, "HF237")
def checkpoint_with_an_object() -> None:
    import torch

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "last.pt")
        torch.save({"args": Items(None)}, path)
        torch.load(path)


@one(0, "HF237")
def safetensors_cut_short() -> None:
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        path.write_bytes(b"\x40\x9c\0\0\0\0\0\0{")
        load_file(path)
