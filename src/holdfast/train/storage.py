"""Snapshots for scripts that call torch.distributed.checkpoint themselves: its StorageWriter and StorageReader.

    dcp.save(state_dict, storage_writer=ht.SnapshotWriter("runs/a", step=120))
    dcp.load(state_dict, storage_reader=ht.SnapshotReader("runs/a"))

The planner of the call, of any class, divides and finds the pieces; files, digests and the commit are those of all
snapshots (docs/internals/snapshot-format.md). State that is not in tensors is stored as JSON (state_codec.py). The
reader also reads snapshots of `Snapshots`, under the names that `dcp.save` would give: `model.<fqn>`,
`optimizer.state.<fqn>.<what>`, `optimizer.param_groups.0.lr`, `step`.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from holdfast.protocol.errors import (
    NoSnapshotError,
    ShardingError,
    SnapshotError,
    SnapshotGoneError,
    TrackingError,
)
from holdfast.protocol.train_contract import RUN_ID_VARIABLE
from holdfast.train import state_codec as codec
from holdfast.train import torch_private
from holdfast.train.choosing import newest_finite
from holdfast.train.reading import Saved, opened
from holdfast.train.sharding import OWN, TEXT, EntryViews, Layout, Piece, image_of
from holdfast.train.snapshots import changes
from holdfast.train.snapshots import folder as folders
from holdfast.train.snapshots.changes import SaveRequest
from holdfast.train.snapshots.folder import Snapshot
from holdfast.train.snapshots.layout import DCP_PATHS, FolderKind, check_step, parse_name
from holdfast.train.snapshots.remote import Location, absolute

_T = TypeVar("_T")

FORMAT = "dcp"
"""The format in a rank's text that means a state of `dcp.save`, not of `Snapshots`."""
RUN_ID = "run_id"
"""Name in the manifest's metadata, and in the texts of a state of `Snapshots`: the id of the training."""


class SnapshotWriter(StorageWriter):  # type: ignore[misc] # torch is not followed
    """Lets `torch.distributed.checkpoint.save` write a snapshot: complete or not at all, with digests, without pickle.

    folder   the snapshot folder, which all ranks see, made if it is missing; or the URL of an object store
    step     the step of the training; a second save of it is the newer attempt of the same step
    metrics  numbers that go into the manifest, for `Keep(best=…)`
    run_id   the id of the training for loggers, which the reader of the snapshot gets; None: HOLDFAST_RUN_ID

    It takes no lease: during a job with `Snapshots` use another folder. Raises SnapshotWriteError, StateTypeError;
    torch wraps the error of a rank in a CheckpointException on all ranks, and then nothing is committed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        step: int,
        metrics: Mapping[str, float] | None = None,
        run_id: str | None = None,
    ) -> None:
        check_step(step)
        self.path = absolute(folder)
        self.step = step
        self.metrics = dict(metrics or {})
        self.run_id = os.environ.get(RUN_ID_VARIABLE, "") if run_id is None else run_id
        self.committed: Location | None = None
        """The committed folder, on rank 0 after the save; None before, and on other ranks."""
        self._request: SaveRequest | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another save. `checkpoint_id`: the snapshot folder, if it is another one now."""
        self.committed = self._request = None
        if checkpoint_id is not None:
            self.path = absolute(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the attempt folder, and give each rank its request. torch calls this on rank 0."""
        number = changes.begin(self.path, self.step)
        requests = [SaveRequest(str(self.path), self.step, number, rank, len(plans)) for rank in range(len(plans))]
        self._request = requests[0]
        return [replace(plan, storage_data=request) for plan, request in zip(plans, requests, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file and record."""
        request = plan.storage_data
        if not isinstance(request, SaveRequest) or torch_private.caches_plans(planner):
            raise TrackingError(
                "SnapshotWriter: a planner that caches plans (enable_plan_caching=True) is not supported"
            )
        try:
            changes.write_rank(request, _put_together(plan, planner, request))
        except BaseException:
            changes.abandon(request)  # torch does not call `finish` after an error
            raise
        return _done([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002
        """Commit. torch calls this on rank 0, when all ranks have written."""
        assert self._request is not None
        paths = {name: list(path) for name, path in (metadata.planner_data or {}).items()}
        about = {"metrics": self.metrics, RUN_ID: self.run_id, DCP_PATHS: paths}
        self.committed = changes.commit(replace(self._request, metadata=about))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any path is one."""
        return isinstance(checkpoint_id, (str, os.PathLike))


def _put_together(plan: SavePlan, planner: SavePlanner, request: SaveRequest) -> memoryview:
    """This rank's image, in memory that begins at a page."""
    encoder = codec.Encoder(f"{OWN}{request.rank}/")
    tensors: list[tuple[Piece, torch.Tensor]] = []
    objects: dict[str, Any] = {}
    for item in plan.items:
        if item.type is WriteItemType.BYTE_IO:
            objects[item.index.fqn] = encoder.encode(_look_up(planner, item.index), item.index.fqn)
        elif (piece := Piece.of_item(item)) is not None:
            tensors.append((piece, planner.resolve_data(item)))
    tensors += [(Piece.own(key, tensor), tensor) for key, tensor in encoder.tensors.items()]
    tree = {"format": FORMAT, "rank": request.rank, "world": request.world, "step": request.step, "objects": objects}
    text = codec.dumps(tree)
    try:
        image = image_of([piece for piece, _ in tensors], len(text))
    except ValueError as error:
        raise ShardingError(str(error)) from error
    memory = memoryview(mmap.mmap(-1, image.size_bytes))
    memory[: len(image.header)] = image.header
    memory[image.spans[TEXT]] = text
    views = Layout(image, None, ()).views(memory)
    if not EntryViews([views[piece.name] for piece, _ in tensors]).fill([tensor for _, tensor in tensors]):
        raise ShardingError("the planner gives tensors of other shapes or types than it has planned")
    return memory


def _look_up(planner: SavePlanner, index: MetadataIndex) -> Any:
    """The object itself. `resolve_data` would give it pickled."""
    look_up = getattr(planner, "lookup_object", None)
    if look_up is None:
        raise TrackingError(
            f"SnapshotWriter: {index.fqn} is no tensor, and a {type(planner).__name__} gives it pickled only"
        )
    return look_up(index)


class SnapshotReader(StorageReader):  # type: ignore[misc] # torch is not followed
    """Lets `torch.distributed.checkpoint.load` read a committed snapshot, on any number of ranks. Every byte is
    checked.

    path  a committed snapshot (`runs/a/step_000000120.0001`), or a snapshot folder (`runs/a`): then the newest in it
          whose values are finite, as far as that is known
    step  the step of the snapshot; None: any

    State of a `Snapshots` that differs between the ranks (random numbers, a tracked object's) is that of rank 0. Raises
    NoSnapshotError when there is none, SnapshotDamagedError, SnapshotGoneError, SnapshotVersionError.
    """

    def __init__(self, path: str | os.PathLike[str], *, step: int | None = None) -> None:
        self.path = absolute(path)
        self.snapshot = _find(self.path, step)
        """The snapshot that is read."""
        self.run_id = ""
        """The id of the training that made the snapshot, for loggers, after a load; empty: it had none."""
        self._step = step
        self._files = contextlib.ExitStack()
        self._saved = Saved(())
        self._objects: dict[str, Any] = {}
        """The values that are not tensors, by name; those of `dcp.save` are still encoded."""
        self._aliases: dict[str, str] = {}
        """The keys of tensors in the files, by the names that torch's planner knows."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another load. `checkpoint_id`: another snapshot, or another folder."""
        self.close()
        if checkpoint_id is not None:
            self.path = absolute(checkpoint_id)
            self.snapshot = _find(self.path, self._step)

    def close(self) -> None:
        """Close the files. A load that came to its end has closed them."""
        self._files.close()

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """torch's description of the snapshot. It opens the files: from now on retention cannot remove them."""
        self.close()
        self._saved = self._files.enter_context(opened(self.snapshot))
        try:
            return self._described()
        except SnapshotError:
            self.close()
            raise

    def _described(self) -> Metadata:
        if is_dcp(self._saved):
            paths = _paths(self.snapshot)
            self.run_id = self.snapshot.manifest.metadata.get(RUN_ID, "")
            self._aliases = {key: key for key in self._saved.pieces if not key.startswith(OWN)}
            self._objects = {name: each for text in self._saved.texts for name, each in text["objects"].items()}
        else:
            paths = self._describe_tracked()
            self.run_id = self._saved.texts[0].get(RUN_ID, "")
        pieces = self._saved.metadata(set(self._aliases.values())).state_dict_metadata
        described: dict[str, Any] = {name: pieces[key] for name, key in self._aliases.items()}
        described.update({name: BytesStorageMetadata() for name in self._objects})
        return Metadata(described, planner_data=paths)

    def _describe_tracked(self) -> dict[str, tuple[Any, ...]]:
        """Describe a snapshot that `Snapshots` made. Returns the path of each name in the nested state."""
        keys: dict[int, str] = {}
        stand_ins: list[torch.Tensor] = []  # kept, because their identities are the keys of `keys`

        def stand_in(key: str) -> torch.Tensor:
            shape, dtype = self._saved.whole_shape(key) or ((), torch.uint8)
            stand_ins.append(torch.empty(shape, dtype=dtype, device="meta"))
            keys[id(stand_ins[-1])] = key
            return stand_ins[-1]

        flat, paths = torch_private.flat_state(assembled(self._saved, stand_in, self._saved.fresh))
        self._aliases = {name: keys[id(each)] for name, each in flat.items() if id(each) in keys}
        self._objects = {name: each for name, each in flat.items() if id(each) not in keys}
        return {name: tuple(path) for name, path in paths.items()}

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Add the snapshot to the plans; torch calls this on rank 0. Each rank has looked for the newest by itself, and
        they may have found different ones: `read_data` compares."""
        return [replace(plan, storage_data=str(self.snapshot.path)) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of the plan. Raises SnapshotDamagedError, SnapshotGoneError."""
        if plan.storage_data != str(self.snapshot.path):
            raise SnapshotGoneError(f"rank 0 reads {plan.storage_data}, this rank {self.snapshot.path}: load again")
        tensors = []
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._pickled(name))
            else:
                tensors.append(replace(item, storage_index=replace(item.storage_index, fqn=self._aliases[name])))
        self._saved.fill(replace(plan, items=tensors), planner)
        self.close()
        return _done(None)

    def _pickled(self, name: str) -> io.BytesIO:
        """An object in the form that planners take. The pickle is made here, from JSON: none comes from the disk."""
        value = self._objects[name]
        if is_dcp(self._saved):
            value = codec.decode(value, self._saved.fresh)
        stream = io.BytesIO()
        torch.save(value, stream)
        stream.seek(0)
        return stream

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any path is one."""
        return isinstance(checkpoint_id, (str, os.PathLike))


def _done(result: _T) -> Future[_T]:
    """The result as a future, which torch expects."""
    done: Future[_T] = Future()
    done.set_result(result)
    return done


def is_dcp(saved: Saved) -> bool:
    """Whether `dcp.save` has made the snapshot, not `Snapshots`."""
    return any(text.get("format") == FORMAT for text in saved.texts)


def load_nested(snapshot: Snapshot, saved: Saved) -> dict[str, Any]:
    """The state dict that was given to `dcp.save`, with whole tensors. Raises SnapshotError."""
    flat: dict[str, Any] = {key: saved.fresh(key) for key in saved.pieces if not key.startswith(OWN)}
    for text in saved.texts:
        flat.update({name: codec.decode(each, saved.fresh) for name, each in text["objects"].items()})
    paths = _paths(snapshot)
    nested: dict[str, Any] = torch_private.nested_state(flat, {name: paths.get(name, (name,)) for name in flat})
    return nested


def _paths(snapshot: Snapshot) -> dict[str, tuple[Any, ...]]:
    return {name: tuple(path) for name, path in snapshot.manifest.metadata.get(DCP_PATHS, {}).items()}


def _find(path: Location, step: int | None) -> Snapshot:
    """The snapshot at this path, or the newest in this folder whose values are finite. Raises SnapshotError."""
    named = parse_name(path.name)
    if named is not None and named.kind is FolderKind.COMMITTED:
        return newest_finite([folders.inspect(path)])
    found = folders.survey(path)
    fitting: Sequence[Snapshot] = [each for each in found.committed if step is None or each.step == step]
    for problem in found.problems:
        if (step is None or problem.key.step == step) and (not fitting or problem.key > fitting[-1].key):
            raise problem.error if isinstance(problem.error, SnapshotError) else SnapshotError(str(problem.error))
    if not fitting:
        raise NoSnapshotError(f"{path} has no snapshot" + ("" if step is None else f" of step {step}"))
    return newest_finite(fitting)


# --- a saved state as nested dicts ------------------------------------------------------------------------------------
# {"step": 3, "epoch": 0, "model": {fqn: tensor}, "optimizer": {"state": …}, …}


def load_all(saved: Saved) -> dict[str, Any]:
    """The whole state, with whole tensors. Raises SnapshotError."""
    tensors: dict[str, torch.Tensor] = {}
    same: dict[int, torch.Tensor] = {}
    for key, pieces in saved.pieces.items():
        found = saved.whole_shape(key)
        if found is not None and not key.startswith(OWN):
            shape, dtype = found
            tensors[key] = same.setdefault(id(pieces), torch.empty(shape, dtype=dtype))  # tied tensors are one
    saved.prepare(tensors).load()
    return assembled(saved, lambda key: tensors[key] if key in tensors else saved.fresh(key), saved.fresh)


def of_all_ranks(saved: Saved) -> list[dict[str, Any]]:
    """The texts of all ranks, by rank."""
    return sorted(saved.texts, key=lambda each: int(each["rank"]))


def models_of(saved: Saved) -> dict[str, dict[str, Any]]:
    """The models that any rank has tracked, with their state that is not in tensors: those of a pipeline differ, and so
    do parts of one name."""
    models: dict[str, dict[str, Any]] = {}
    for text in of_all_ranks(saved):
        for name, rest in codec.section(text, "models").items():
            models[name] = {**rest, **models.get(name, {})}
    return models


def assembled(saved: Saved, tensor: codec.Get, array: codec.Get) -> dict[str, Any]:
    """The whole state as nested dicts. `tensor` gives the value for a tensor of this name, `array` the bytes of a numpy
    array. What several ranks have is that of the first of them."""
    texts = of_all_ranks(saved)
    keys = [key for key in saved.pieces if not key.startswith(OWN)]
    state: dict[str, Any] = {"step": texts[0]["step"], "epoch": texts[0]["epoch"]}
    for name, rest in models_of(saved).items():
        prefix = f"{name}."
        state[name] = {key.removeprefix(prefix): tensor(key) for key in keys if key.startswith(prefix)}
        state[name].update({fqn: codec.decode(value, tensor, array, plain=True) for fqn, value in rest.items()})
    for text in texts:
        for name in codec.section(text, "optimizers"):
            if name not in state:
                state[name] = _optimizer(texts, name, tensor, array)
    for text in texts:
        for name, tree in codec.section(text, "others").items():
            if name not in state:
                state[name] = codec.decode(tree, tensor, array, plain=True)
    return state


def _optimizer(texts: Sequence[dict[str, Any]], name: str, tensor: codec.Get, array: codec.Get) -> dict[str, Any]:
    """The state of an optimizer by names of parameters, like that of torch's get_optimizer_state_dict.

    The ranks of a pipeline have groups of other parameters: groups of one number and equal options are one, and any
    other group is one of its own. So each parameter has the options that its rank had."""
    state: dict[str, Any] = {}
    groups: list[tuple[int, dict[str, Any]]] = []
    known: set[str] = set()
    for text in texts:
        part = codec.section(codec.section(text, "optimizers"), name)
        for fqn, rest in codec.section(part, "state").items():
            if fqn not in state:
                state[fqn] = {
                    what: tensor(f"{name}.state.{fqn}.{what}")
                    if value is None
                    else codec.decode(value[0], tensor, array, plain=True)
                    for what, value in rest.items()
                }
        found = zip(part.get("groups", []), part.get("params", []), strict=True)
        for number, (group, params) in enumerate(found):
            new = [fqn for fqn in params if fqn not in known]
            if not new and any(other == number for other, _ in groups):
                continue
            known.update(new)
            options = codec.decode(group, tensor, array, plain=True)
            for other, there in groups:
                if other == number and _equal(options, {key: there[key] for key in there if key != "params"}):
                    there["params"] += new
                    break
            else:
                groups.append((number, {**options, "params": new}))
    return {"state": state, "param_groups": [group for _, group in groups]}


def _equal(one: Any, other: Any) -> bool:
    """Whether two values of options are equal. Of tensors that have no values here, the shapes are."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.is_meta or other.is_meta:
            return bool(one.shape == other.shape and one.dtype == other.dtype)
        return bool(torch.equal(one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
