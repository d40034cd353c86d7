"""Snapshots for those who call torch.distributed.checkpoint themselves: its StorageWriter and StorageReader.

    dcp.save(state_dict, storage_writer=ht.SnapshotWriter("runs/a", step=120))
    dcp.load(state_dict, storage_reader=ht.SnapshotReader("runs/a"))

The planner deals and finds the pieces, whichever planner it is; files, digests and the commit are those of all
snapshots (docs/internals/snapshot-format.md). What is no tensor is stored as JSON (codec.py). The reader also takes
what `Snapshots` has saved, under the names that `dcp.save` would give: `model.<fqn>`,
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
    NoValidSnapshotError,
    ShardingError,
    SnapshotError,
    SnapshotGoneError,
    TrackingError,
)
from holdfast.train import state_codec as codec
from holdfast.train import torch_private
from holdfast.train.reading import Saved, opened
from holdfast.train.sharding import OWN, TEXT, Layout, Piece, Places, image_of
from holdfast.train.snapshots import changes
from holdfast.train.snapshots import folder as folders
from holdfast.train.snapshots.changes import SaveRequest
from holdfast.train.snapshots.folder import Snapshot
from holdfast.train.snapshots.layout import FolderKind, check_step, parse_name
from holdfast.train.snapshots.remote import Location, absolute

_T = TypeVar("_T")

FORMAT = "dcp"
"""In a rank's text: the state is one of `dcp.save`, not of `Snapshots`."""
PATHS = "dcp_paths"
"""In the manifest's metadata: where in the nested state each name belongs, for who has no state dict to fill."""


class SnapshotWriter(StorageWriter):  # type: ignore[misc] # torch is not followed
    """Has `torch.distributed.checkpoint.save` write a snapshot: whole or not at all, with digests, without pickle.

    folder   the snapshot folder, which all ranks see; made when it is not there. Or the URL of an object store
    step     of the training; saved once more, it becomes the newer attempt of the same step
    metrics  numbers that go into the manifest, for `Keep(best=…)`

    It takes no lease: beside a running job's `Snapshots` use another folder. Raises SnapshotWriteError, StateTypeError;
    torch wraps what a rank raises into a CheckpointException on all ranks, and nothing is committed then.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, step: int, metrics: Mapping[str, float] | None = None
    ) -> None:
        check_step(step)
        self.path = absolute(folder)
        self.step = step
        self.metrics = dict(metrics or {})
        self.committed: Location | None = None
        """Rank 0, after the save: the committed folder."""
        self._request: SaveRequest | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """`checkpoint_id`: the snapshot folder, if it is another one now."""
        self.committed = self._request = None
        if checkpoint_id is not None:
            self.path = absolute(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Rank 0: make the attempt folder, and give each rank its request."""
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
            changes.abandon(request)  # nobody will call `finish`
            raise
        return _done([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002
        """Rank 0, when all ranks have written: commit."""
        assert self._request is not None
        paths = {name: list(path) for name, path in (metadata.planner_data or {}).items()}
        self.committed = changes.commit(replace(self._request, metadata={"metrics": self.metrics, PATHS: paths}))

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
    if not Places([views[piece.name] for piece, _ in tensors]).fill([tensor for _, tensor in tensors]):
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
    """Has `torch.distributed.checkpoint.load` read a committed snapshot, on any number of ranks; every byte is checked.

    path  a committed snapshot (`runs/a/step_000000120.0001`), or a snapshot folder (`runs/a`): then the newest in it
    step  the newest of this step

    Raises NoValidSnapshotError when there is none, SnapshotDamagedError, SnapshotGoneError, SnapshotVersionError.
    State of a `Snapshots` that differs between the ranks (random numbers, a tracked object's) is rank 0's.
    """

    def __init__(self, path: str | os.PathLike[str], *, step: int | None = None) -> None:
        self.path = absolute(path)
        self.snapshot = _find(self.path, step)
        """What is read."""
        self._step = step
        self._files = contextlib.ExitStack()
        self._saved = Saved(())
        self._objects: dict[str, Any] = {}
        """By name: what is no tensor, still encoded when `dcp.save` wrote it."""
        self._aliases: dict[str, str] = {}
        """Names of tensors, if they are not those in the files."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """`checkpoint_id`: another snapshot, or another folder."""
        self.close()
        if checkpoint_id is not None:
            self.path = absolute(checkpoint_id)
            self.snapshot = _find(self.path, self._step)

    def close(self) -> None:
        """Close the files; a load that came to its end has done so."""
        self._files.close()

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """torch's description of what there is. Opens the files: from here on retention takes nothing away."""
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
            self._aliases = {key: key for key in self._saved.pieces if not key.startswith(OWN)}
            self._objects = {name: each for text in self._saved.texts for name, each in text["objects"].items()}
        else:
            paths = self._describe_tracked()
        pieces = self._saved.metadata(set(self._aliases.values())).state_dict_metadata
        described: dict[str, Any] = {name: pieces[key] for name, key in self._aliases.items()}
        described.update({name: BytesStorageMetadata() for name in self._objects})
        return Metadata(described, planner_data=paths)

    def _describe_tracked(self) -> dict[str, tuple[Any, ...]]:
        """Of a snapshot that `Snapshots` made. Returns where each name belongs."""
        keys: dict[int, str] = {}
        stand_ins: list[torch.Tensor] = []  # each has to live as long as its id is looked up

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
        """Rank 0: say which snapshot it is. Each rank looks for the newest by itself, and one may have become that
        between."""
        return [replace(plan, storage_data=str(self.snapshot.path)) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan wants. SnapshotDamagedError."""
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
        """An object as planners take it. The pickle is made here, from JSON: none comes from the disk."""
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
    """torch expects a future."""
    done: Future[_T] = Future()
    done.set_result(result)
    return done


def is_dcp(saved: Saved) -> bool:
    """Whether `dcp.save` made it, not `Snapshots`."""
    return any(text.get("format") == FORMAT for text in saved.texts)


def load_nested(snapshot: Snapshot, saved: Saved) -> dict[str, Any]:
    """The state dict that was given to `dcp.save`, whole tensors. SnapshotError."""
    flat: dict[str, Any] = {key: saved.fresh(key) for key in saved.pieces if not key.startswith(OWN)}
    for text in saved.texts:
        flat.update({name: codec.decode(each, saved.fresh) for name, each in text["objects"].items()})
    paths = _paths(snapshot)
    nested: dict[str, Any] = torch_private.nested_state(flat, {name: paths.get(name, (name,)) for name in flat})
    return nested


def _paths(snapshot: Snapshot) -> dict[str, tuple[Any, ...]]:
    return {name: tuple(path) for name, path in snapshot.manifest.metadata.get(PATHS, {}).items()}


def _find(path: Location, step: int | None) -> Snapshot:
    """The snapshot at, or the newest in this folder. SnapshotError."""
    named = parse_name(path.name)
    if named is not None and named.kind is FolderKind.COMMITTED:
        return folders.inspect(path)
    found = folders.survey(path)
    fitting: Sequence[Snapshot] = [each for each in found.committed if step is None or each.step == step]
    for problem in found.problems:
        if (step is None or problem.key.step == step) and (not fitting or problem.key > fitting[-1].key):
            raise problem.error if isinstance(problem.error, SnapshotError) else SnapshotError(str(problem.error))
    if not fitting:
        raise NoValidSnapshotError(f"{path} has no snapshot" + ("" if step is None else f" of step {step}"))
    return fitting[-1]


# --- a saved state as nested dicts ------------------------------------------------------------------------------------
# {"step": 3, "epoch": 0, "model": {fqn: tensor}, "optimizer": {"state": …}, …}


def load_all(saved: Saved) -> dict[str, Any]:
    """The whole state, whole tensors. SnapshotError."""
    tensors: dict[str, torch.Tensor] = {}
    same: dict[int, torch.Tensor] = {}
    for key, pieces in saved.pieces.items():
        found = saved.whole_shape(key)
        if found is not None and not key.startswith(OWN):
            shape, dtype = found
            tensors[key] = same.setdefault(id(pieces), torch.empty(shape, dtype=dtype))  # tied tensors are one
    saved.prepare(tensors).load()
    return assembled(saved, lambda key: tensors[key] if key in tensors else saved.fresh(key), saved.fresh)


def assembled(saved: Saved, tensor: codec.Get, array: codec.Get) -> dict[str, Any]:
    """`tensor` gives what stands for a tensor of this name, `array` the bytes of a numpy array."""
    told = min(saved.texts, key=lambda text: int(text["rank"]))
    keys = [key for key in saved.pieces if not key.startswith(OWN)]
    state: dict[str, Any] = {"step": told["step"], "epoch": told["epoch"]}
    for name, rest in codec.section(told, "models").items():
        prefix = f"{name}."
        state[name] = {key.removeprefix(prefix): tensor(key) for key in keys if key.startswith(prefix)}
        state[name].update({fqn: codec.decode(value, tensor, array, plain=True) for fqn, value in rest.items()})
    for name in codec.section(told, "optimizers"):
        state[name] = _optimizer(saved, name, tensor, array)
    for name, tree in codec.section(told, "others").items():
        state[name] = codec.decode(tree, tensor, array, plain=True)
    return state


def _optimizer(saved: Saved, name: str, tensor: codec.Get, array: codec.Get) -> dict[str, Any]:
    """As torch's get_optimizer_state_dict has it: by names of parameters."""
    state: dict[str, Any] = {}
    groups: list[Any] = []
    for text in saved.texts:
        told = codec.section(codec.section(text, "optimizers"), name)
        for fqn, rest in codec.section(told, "state").items():
            if fqn not in state:
                state[fqn] = {
                    what: tensor(f"{name}.state.{fqn}.{what}")
                    if value is None
                    else codec.decode(value[0], tensor, array, plain=True)
                    for what, value in rest.items()
                }
        groups = groups or [
            {**codec.decode(group, tensor, array, plain=True), "params": params}
            for group, params in zip(told.get("groups", []), told.get("params", []), strict=True)
        ]
    return {"state": state, "param_groups": groups}
