"""Loads the weights of a model from a snapshot of another run, for a new run.

Every rank reads the parts that it has of the model, and checks the bytes that it reads. Nothing else of the snapshot is
restored: no step, no optimizer, no random numbers. To go on with a run, see resuming.py."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from holdfast.protocol.errors import NoSnapshotError, StateMismatchError
from holdfast.train import state_codec as codec
from holdfast.train.choosing import newest_finite
from holdfast.train.reading import Saved, opened
from holdfast.train.snapshots import folder as folders
from holdfast.train.snapshots.folder import Snapshot
from holdfast.train.snapshots.layout import FolderKind, parse_name
from holdfast.train.snapshots.remote import absolute
from holdfast.train.state import text_of
from holdfast.train.storage import models_of
from holdfast.train.tracked import Compared, Shared, TrackedModel, check_tied, listed_names


def load_weights(
    model: nn.Module, folder_or_snapshot: str | os.PathLike[str], *, name: str | None = None, strict: bool = True
) -> int:
    """Give this model the weights and buffers that a run has saved. Returns the step at which they were saved.

    It is for a new run, in a folder of its own, that begins with the weights of another one. Call it on every rank,
    before the first step and before `resume()`; the model may be wrapped or sharded. `folder_or_snapshot`: a snapshot
    folder, or one snapshot in it (`runs/a/step_000000120.0001`), or the URL of either. Of a folder it is the newest
    snapshot whose values are finite, as far as that is known; a warning names those that are passed over. One that is
    given is used, with a warning if its values are not finite.

    name     that of the model in the snapshot, as it was tracked; None: the one that fits best. If several fit equally,
             as a teacher and its student do, the name has to be given
    strict   False: tensors that are on one side only are named in a warning, and numbers are converted to the
             model's types

    Raises StateMismatchError if the model does not fit, NoSnapshotError without a snapshot, SnapshotError.
    """
    snapshot = _snapshot(folder_or_snapshot)
    with opened(snapshot) as saved:
        text_of(saved, 0)  # refuses a state of torch.distributed.checkpoint, and one of another format
        models = models_of(saved)
        if name is not None and name not in models:
            raise StateMismatchError(f"{snapshot.path} has no model {name!r}; it has {listed_names(sorted(models))}")
        candidates = models if name is None else [name]
        found = {each: _compared(TrackedModel(each, model), saved, models) for each in candidates}
        name = _fitting(found, snapshot)
        notes = _notes(found[name], name)
        if notes and (strict or name in found[name].problems):
            raise StateMismatchError(
                "\n".join(
                    [
                        f"the model does not fit {name!r} in {snapshot.path}",
                        *notes,
                        "load_weights(…, strict=False) loads what is on both sides, in the model's types.",
                    ]
                )
            )
        _load(TrackedModel(name, model), saved, models, {*found[name].missing.get(name, ())})
    for note in notes:
        warnings.warn(f"holdfast: load_weights: {note}", RuntimeWarning, stacklevel=2)
    return snapshot.step


def _snapshot(given: str | os.PathLike[str]) -> Snapshot:
    path = absolute(given)
    named = parse_name(path.name)
    if named is not None and named.kind is FolderKind.COMMITTED:
        return newest_finite([folders.inspect(path)])
    survey = folders.survey(path)
    newest = folders.choose(survey)
    if newest is None:
        raise NoSnapshotError(f"{path} holds no snapshot")
    return newest_finite(survey.committed or [newest])


def _compared(model: TrackedModel, saved: Saved, models: Mapping[str, Any]) -> Compared:
    found = Compared()
    model.compare(saved, models, models.keys(), found)
    return found


def _fitting(found: Mapping[str, Compared], snapshot: Snapshot) -> str:
    """The name of the saved model that fits best. Raises StateMismatchError if there is none, or several."""
    if not found:
        raise StateMismatchError(f"{snapshot.path} has no model: it was saved without track(model=…)")
    misfits = {name: _misfit(found[name], name) for name in found}
    best = min(misfits.values())
    equal = sorted(name for name in found if misfits[name] == best)
    if len(equal) > 1 and not best[0]:
        raise StateMismatchError(
            f"the models {listed_names(equal)} in {snapshot.path} fit equally: say which, "
            f"load_weights(…, name={equal[0]!r})"
        )
    return equal[0]


def _misfit(found: Compared, name: str) -> tuple[bool, int]:
    return name in found.problems, len(found.missing.get(name, ())) + len(found.unexpected) + len(found.converted)


def _notes(found: Compared, name: str) -> list[str]:
    notes = [found.problems[name]] if name in found.problems else []
    if name in found.missing:
        notes.append(f"not in the snapshot, and left as they are: {listed_names(found.missing[name])}")
    if found.unexpected:
        notes.append(f"in the snapshot, and not in the model: {listed_names(found.unexpected)}")
    return notes + list(found.converted.values())


def _load(model: TrackedModel, saved: Saved, models: Mapping[str, Any], missing: set[str]) -> None:
    shared = Shared()
    model.collect(model.live(), shared, codec.Encoder())
    for name, first in shared.tied.items():
        check_tied(saved, name, first)
    saved.prepare({name: each for name, each in shared.tensors.items() if name not in missing}).load()
    model.restore_rest(codec.section(models, model.name), saved.fresh)
