"""Chooses the snapshot from which a program takes values without going on with the run: an export, the weights for
another run, a load by torch.distributed.checkpoint.

The newest whose values are finite, as in a resume. Its writer has noted in the manifest whether they are. Where that is
not known, all that an optimizer of the snapshot changes is read: each rank reads the same bytes, so all choose the same
snapshot without asking each other. What `dcp.save` has written names no optimizer, so nothing is looked for there: a
mask may well be infinite."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence

from holdfast.protocol.errors import SnapshotError
from holdfast.train import state_codec as codec
from holdfast.train.reading import Saved, opened
from holdfast.train.snapshots.folder import Snapshot
from holdfast.train.snapshots.layout import DCP_PATHS


def newest_finite(snapshots: Sequence[Snapshot]) -> Snapshot:
    """The newest of these, which are in ascending order, whose values are finite; the newest one if there is none. It
    warns of each that is passed over, or of the values of the one that is used nevertheless."""
    passed: list[str] = []
    for each in reversed(snapshots):
        why = not_finite(each)
        if not why:
            for text in passed:
                warnings.warn(f"holdfast: passed over: {text}", RuntimeWarning, stacklevel=4)
            return each
        passed.append(f"{each.path.name}: {why}")
    warnings.warn(f"holdfast: used nevertheless: {passed[0]}", RuntimeWarning, stacklevel=4)
    return snapshots[-1]


def not_finite(snapshot: Snapshot) -> str:
    """What is not finite in this snapshot, for a message; empty: nothing, as far as it can be known."""
    if snapshot.manifest.finite is not None:
        return "" if snapshot.manifest.finite else "it has values that are not finite"
    if DCP_PATHS in snapshot.manifest.metadata:
        return ""
    with contextlib.suppress(SnapshotError), opened(snapshot) as saved:  # damage is an error of the load that follows
        name = saved.first_not_finite(_trained(saved))
        return f"{name} has values that are not finite" if name else ""
    return ""


def _trained(saved: Saved) -> set[str]:
    """The keys of the tensors that an optimizer in this state changes: its parameters, and what it keeps for them."""
    keys: set[str] = set()
    for text in saved.texts:
        models = codec.section(text, "models")
        for name, part in codec.section(text, "optimizers").items():
            named = {fqn for group in part.get("params", ()) for fqn in group}
            # Beside other models a parameter has its model's name already.
            keys |= named | {f"{model}.{fqn}" for model in models for fqn in named}
            keys |= {key for key in saved.pieces if key.startswith(f"{name}.state.")}
    return keys
