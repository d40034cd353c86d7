"""torch.distributed.checkpoint with our storage, on forked ranks. Prints what each phase found as JSON.

storage_ranks.py CASE FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from snapshot_ranks import build, ranks, save_on, train, whole
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

import holdfast.train as ht
from holdfast.protocol.errors import TrackingError
from holdfast.train.snapshots import disk

warnings.simplefilter("ignore")
EXTRA: dict[str, Any] = {
    "note": "text",
    "range": (1, float("inf")),
    "mixed": [torch.arange(3), {"deep": None}],
    "bytes": b"\x00\xff",
}


def save(kind: str, folder: Path, **options: Any) -> Any:
    model, optimizer = build(kind)
    for step in range(3):
        train(model, optimizer, step)
    weights, moments = get_state_dict(model, optimizer)
    writer = ht.SnapshotWriter(folder, step=3, metrics={"loss": 0.5})
    dcp.save({"model": weights, "optimizer": moments, "extra": EXTRA, **options}, storage_writer=writer)
    return {"state": whole(model, optimizer), "committed": writer.committed and writer.committed.name}


def load(kind: str, path: Path) -> Any:
    model, optimizer = build(kind, seed=99)
    train(model, optimizer, 7)
    weights, moments = get_state_dict(model, optimizer)
    extra: dict[str, Any] = {
        "note": "",
        "range": (),
        "mixed": [torch.zeros(3, dtype=torch.int64), {"deep": 1}],
        "bytes": b"",
    }
    state: dict[str, Any] = {"model": weights, "optimizer": moments, "step": -1}
    reader = ht.SnapshotReader(path)
    if "extra.note" in reader.read_metadata().state_dict_metadata:
        state = {"model": weights, "optimizer": moments, "extra": extra}
    dcp.load(state, storage_reader=reader)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    found = {"state": whole(model, optimizer), "step": state.get("step"), "has_id": reader.run_id != ""}
    if "extra" in state:
        same: bool = torch.equal(extra["mixed"][0], EXTRA["mixed"][0]) and extra["mixed"][1:] == EXTRA["mixed"][1:]
        found["extra"] = same and all(extra[key] == EXTRA[key] for key in ("note", "range", "bytes"))
    return found


def case_dcp(folder: Path) -> Any:
    """Saved by dcp.save."""
    saved = ranks(2, lambda: save("fsdp", folder))
    loaded = {"fsdp 3": ranks(3, lambda: load("fsdp", folder)), "plain 1": ranks(1, lambda: load("ddp", folder))}
    return {"saved": saved, "loaded": loaded}


def case_tracked(folder: Path) -> Any:
    """Saved by Snapshots."""
    saved = ranks(2, lambda: {"state": save_on("fsdp", folder)}, "tracked")
    (newest,) = folder.glob("step_*")
    return {"saved": saved, "loaded": {"ddp 2": ranks(2, lambda: load("ddp", newest))}}


def case_failing(folder: Path) -> Any:
    """One rank's disk is full; then it is not."""

    def failing() -> Any:
        if dist.get_rank() == 1:

            def full(*_: Any, **__: Any) -> None:
                raise OSError(28, "No space left on device")

            disk.write_all = full
        try:
            save("ddp", folder)
        except dcp.CheckpointException as error:
            return {"said": str(error)}

    found = ranks(2, failing)
    left = sorted(os.listdir(folder))
    return {"found": found, "left": left, "again": ranks(2, lambda: save("ddp", folder))}


def case_fsdp1(folder: Path) -> Any:
    """What `track` refuses can be saved so."""

    def fsdp1() -> Any:
        torch.manual_seed(0)
        model = FullyShardedDataParallel(torch.nn.Linear(7, 5), device_id=torch.device("cpu"))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        try:
            ht.Snapshots(folder).track(model=torch.nn.Sequential(model))
        except TrackingError as error:
            said = str(error)
        state, moments = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": moments}, storage_writer=ht.SnapshotWriter(folder, step=1))
        before = whole(model, optimizer)
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        changed = whole(model, optimizer) != before
        state, moments = get_state_dict(model, optimizer)
        dcp.load({"model": state, "optimizer": moments}, storage_reader=ht.SnapshotReader(folder))
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=moments)
        return {"said": said, "changed": changed, "same": whole(model, optimizer) == before}

    return ranks(2, fsdp1)


if __name__ == "__main__":
    case, place = sys.argv[1], Path(sys.argv[2])
    print(json.dumps(globals()[f"case_{case}"](place)))
