"""Exports a committed snapshot for other programs: `python -m holdfast.train.export FOLDER --to PATH --format torch`.

    torch        one file for torch.load(weights_only=True): {"model": …, "optimizer": …, …, "step": …}
    safetensors  one file with the tensors of the models alone
    dcp          a folder for torch.distributed.checkpoint.load

It needs no job and no launcher. Tensors are whole, however they were sharded, and the stages of a pipeline are all
there. State that differs between the ranks (random numbers, iterators) is that of the first rank that has it. Every
byte is checked against its digest. The result appears complete or not at all."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from holdfast import own_folders
from holdfast.protocol.errors import (
    HoldfastError,
    NoSnapshotError,
    SnapshotDamagedError,
    SnapshotError,
    SnapshotWriteError,
)
from holdfast.protocol.exit_codes import EXIT_FAILURE
from holdfast.train.choosing import newest_finite
from holdfast.train.reading import opened
from holdfast.train.snapshots import folder as folders
from holdfast.train.snapshots.folder import Snapshot
from holdfast.train.snapshots.remote import Location, location_of
from holdfast.train.storage import is_dcp, load_all, load_nested, models_of


def load(snapshot: Snapshot) -> dict[str, Any]:
    """The whole state: a state_dict for each tracked name. Raises SnapshotError."""
    with opened(snapshot) as saved:
        return load_nested(snapshot, saved) if is_dcp(saved) else load_all(saved)


# --- formats ----------------------------------------------------------------------------------------------------------


def to_torch(snapshot: Snapshot, path: Path) -> None:
    """Write a file for torch.load."""
    torch.save(load(snapshot), path)


def to_safetensors(snapshot: Snapshot, path: Path) -> None:
    """Write a file with the models' tensors; with several models each name begins with that of the model."""
    from safetensors.torch import save_file

    state = load(snapshot)
    models, others = {}, []
    for name in _models_of(snapshot, state):
        models[name] = {key: value for key, value in state[name].items() if isinstance(value, torch.Tensor)}
        others += [f"{name}.{key}" for key in state[name].keys() - models[name].keys()]
    if not any(models.values()):
        raise SnapshotError(f"{snapshot.path.name} has no model")
    if others:
        warnings.warn(f"holdfast: left out, since they are no tensors: {', '.join(sorted(others))}", stacklevel=2)
    several = len(models) > 1
    tensors = {(f"{n}.{key}" if several else key): value for n, each in models.items() for key, value in each.items()}
    # `save_file` refuses tensors that share memory, as tied ones do.
    tensors = {key: each.clone() for key, each in tensors.items()}
    save_file(tensors, path, {"format": "pt", "step": str(snapshot.step)})


def _models_of(snapshot: Snapshot, state: Mapping[str, Any]) -> list[str]:
    """The names of the models. A checkpoint of torch.distributed does not say which of its entries are some: those that
    have nothing but tensors."""
    with opened(snapshot) as saved:
        if not is_dcp(saved):
            return list(models_of(saved))
    return [
        name
        for name, each in state.items()
        if isinstance(each, dict) and each and all(isinstance(value, torch.Tensor) for value in each.values())
    ]


def to_dcp(snapshot: Snapshot, path: Path) -> None:
    """Write a folder for torch.distributed.checkpoint.load."""
    from torch.distributed.checkpoint import CheckpointException, FileSystemWriter, save

    state = load(snapshot)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is no process group
        try:
            save(state, storage_writer=FileSystemWriter(path))
        except CheckpointException as error:  # it is a BaseException
            raise RuntimeError(str(error)) from error


FORMATS: dict[str, Callable[[Snapshot, Path], None]] = {
    "torch": to_torch,
    "dcp": to_dcp,
    "safetensors": to_safetensors,
}


def export(folder: Location, to: Path, kind: str, step: int | None = None) -> Snapshot:
    """Export the newest snapshot whose values are finite, or that of this step. Returns it. The file appears complete
    or not at all. Raises SnapshotError, FileExistsError, OSError."""
    survey = folders.survey(folder)
    committed = list((survey.committed or survey.suspects) if step is None else (*survey.committed, *survey.suspects))
    committed.sort(key=lambda each: each.key)
    found = [each for each in committed if step is None or each.step == step]
    if not found:
        raise NoSnapshotError(f"{folder} has no valid snapshot" + ("" if step is None else f" of step {step}"))
    if to.exists():
        raise FileExistsError(17, "exists already", str(to))
    if not to.absolute().parent.is_dir():
        raise FileNotFoundError(2, f"there is no folder {to.parent}", str(to))
    chosen = newest_finite(found)
    # A folder that only this user can write to: the libraries follow a link that another user may have put there.
    try:
        private = Path(tempfile.mkdtemp(dir=to.absolute().parent, prefix=f"{to.name}.", suffix=".part"))
    except OSError as error:
        raise SnapshotWriteError(f"{to} was not written: {error.strerror}") from error
    beside = private / to.name
    try:
        try:
            FORMATS[kind](chosen, beside)
        except SnapshotDamagedError as error:
            older = [each.step for each in committed if each.step < chosen.step]
            hint = f"\nThe one before it: --step {older[-1]}" if older else ""
            raise SnapshotDamagedError(f"{error}{hint}") from error
        except HoldfastError:
            raise
        except Exception as error:
            # The libraries that write have exceptions of their own for a full disk and the like; the last line of the
            # text has the cause.
            text = str(error).strip() or type(error).__name__
            raise SnapshotWriteError(f"{to} was not written: {text.splitlines()[-1]}") from error
        beside.rename(to)
    finally:
        with contextlib.suppress(OSError):
            own_folders.remove(private)
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m holdfast.train.export", description="Export a snapshot.")
    parser.add_argument("folder", help="the snapshot folder, or its URL")
    parser.add_argument("--step", type=int, help="of this step; otherwise the newest whose values are finite")
    parser.add_argument("--to", type=Path, required=True, metavar="PATH", help="must not exist")
    parser.add_argument("--format", choices=sorted(FORMATS), default="torch")
    options = parser.parse_args(arguments)
    try:
        done = export(location_of(options.folder), options.to, options.format, options.step)
    except HoldfastError as error:
        sys.stderr.write(f"holdfast: {error} [{error.code}]\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"holdfast: {options.to}: {error.strerror or error}\n")
        return EXIT_FAILURE
    sys.stdout.write(f"{done.path.name} -> {options.to}\n")
    return 0


if __name__ == "__main__":
    # One line each: this file's line says nothing to the user of a command.
    warnings.formatwarning = lambda message, *_, **__: f"{message}\n"
    sys.exit(main())
