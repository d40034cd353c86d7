"""Plans which rank saves which part of each tensor, and which saved parts a rank needs: with torch's planner, for our
files.

**Saving.** Rank 0 gathers the local plans of all ranks, and divides replicated tensors evenly among the ranks.
torch.distributed.checkpoint's planner checks that no part of a sharded tensor is missing. The plan is valid until the
names, shapes or placements change.

**Loading.** The planner finds the saved pieces of the tensors that this rank has now, whatever the world was at the
save.

A rank's file (snapshots/layout.py) has an entry for each piece. A piece that is a whole tensor has the tensor's name;
any other has `name@offsets`, and a line in the header's metadata that says to which part of the tensor it belongs.

A restarted worker must find all that it needs on its own node. So the ranks of a node save, together, all that any of
them has. A piece that another node writes to the disk comes after the rank's file in the slot, in a second image.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from holdfast.protocol.errors import ShardingError, SnapshotDamagedError
from holdfast.train import torch_private
from holdfast.train.agreement import Peers
from holdfast.train.copying import copy_alike
from holdfast.train.replicas import ReplicaGroup
from holdfast.train.snapshots.layout import ALIGNMENT_BYTES, PIECES, Image, TensorEntry

CODES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""safetensors' names of torch's types. Others are stored as bytes, with torch's own name in the metadata."""
DTYPES = {code: dtype for dtype, code in CODES.items()}
TEXT = "holdfast.text"
"""Name of the entry with this rank's state that is not in tensors, as JSON padded with spaces."""

OWN = "own/"
"""Beginning of the names of tensors that belong to one rank alone."""
TIED = "tied"
"""Key of the text with the further names of tied tensors, which are stored under their first names."""


@dataclass(frozen=True)
class Piece:
    """A rectangular part of a tensor."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: tuple[int, ...]
    """The shape of the whole tensor."""
    dtype: torch.dtype

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.sizes == self.whole

    @property
    def name(self) -> str:
        """Name of this piece's entry in the slot."""
        return self.key if self.is_whole else f"{self.key}@{','.join(map(str, self.offsets))}"

    @property
    def entry(self) -> TensorEntry:
        code = CODES.get(self.dtype)
        if code is not None:
            return TensorEntry(self.name, code, self.sizes)
        return TensorEntry(self.name, "U8", (math.prod(self.sizes) * self.dtype.itemsize,))

    @property
    def described(self) -> list[Any] | None:
        """The description for the header; None: the entry describes the piece completely."""
        if self.is_whole and self.dtype in CODES:
            return None
        return self.packed()

    def packed(self) -> list[Any]:
        """The fields as JSON; see `unpacked`."""
        return [self.key, self.offsets, self.sizes, self.whole, str(self.dtype).removeprefix("torch.")]

    @classmethod
    def unpacked(cls, packed: Sequence[Any]) -> Piece:
        """The piece with these packed fields. Raises TypeError or ValueError if they are wrong."""
        key, offsets, sizes, whole, dtype = packed
        return cls(str(key), tuple(offsets), tuple(sizes), tuple(whole), _dtype(dtype))

    @classmethod
    def of_item(cls, item: WriteItem) -> Piece | None:
        """The piece that torch's planner wants written. None: this rank has no part, because the tensor is too short
        for all ranks."""
        data = item.tensor_data
        if data is None:
            raise ShardingError(f"{item.index.fqn} is no tensor")
        sizes, whole = tuple(data.chunk.sizes), tuple(data.size)
        if math.prod(sizes) == 0 and math.prod(whole):
            return None
        return cls(item.index.fqn, tuple(data.chunk.offsets), sizes, whole, data.properties.dtype)

    @classmethod
    def own(cls, key: str, tensor: torch.Tensor) -> Piece:
        """The piece of a tensor that belongs to this rank alone: the part that this process has of it."""
        local = local_tensor(tensor)
        return cls(key, (0,) * local.dim(), tuple(local.shape), tuple(local.shape), local.dtype)

    @classmethod
    def of_entry(cls, entry: TensorEntry, described: Any) -> Piece:
        """The piece in this entry. Raises SnapshotDamagedError."""
        if described is None:
            return cls(entry.name, (0,) * len(entry.shape), entry.shape, entry.shape, DTYPES[entry.dtype])
        try:
            piece = cls.unpacked(described)
            fits = piece.entry.dtype == entry.dtype and piece.entry.shape == entry.shape
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise SnapshotDamagedError(f"tensor {entry.name!r} is not described as holdfast would")
        return piece


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(name)  # noqa: TRY004
    return found


# --- the plan of a save -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The entries that this rank writes, and their positions in the slot."""

    file: Image
    """The image that goes to the disk."""
    beside: Image | None
    """The image that only this node's memory needs, because another node writes it to the disk."""
    keys: tuple[tuple[str, str], ...]
    """Name of the entry and key of the tensor, of all entries except the text."""
    replicas: tuple[ReplicaGroup, ...] = ()
    """The tensors that other ranks have as well, by groups of ranks."""

    @cached_property
    def images(self) -> list[tuple[int, Image]]:
        """The one or two images, each with its offset in the slot in bytes."""
        if self.beside is None:
            return [(0, self.file)]
        return [(0, self.file), (-(-self.file.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, self.beside)]

    @cached_property
    def size_bytes(self) -> int:
        """The size of both images in the slot."""
        begin, last = self.images[-1]
        return begin + last.size_bytes

    def views(self, memory: memoryview) -> dict[str, torch.Tensor]:
        """The entries in this memory, as tensors of their type and shape that share it; the text is not among them."""
        return {
            entry.name: _view(memory, begin + image.spans[entry.name].start, entry)
            for begin, image in self.images
            for entry in image.entries
            if entry.name != TEXT
        }


def _view(memory: memoryview, at: int, entry: TensorEntry) -> torch.Tensor:
    dtype = DTYPES[entry.dtype]
    count = math.prod(entry.shape)
    if count == 0:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=at).view(entry.shape)


def local_pieces(tensors: Mapping[str, torch.Tensor]) -> list[Piece]:
    """The pieces that this rank has of these tensors; those of sharded ones come from torch's planner."""
    pieces: list[Piece] = []
    for key, tensor in tensors.items():
        if type(tensor) in (torch.Tensor, nn.Parameter):  # torch's planner would take seconds for 80,000 of these
            shape = tuple(tensor.shape)
            pieces.append(Piece(key, (0,) * len(shape), shape, shape, tensor.dtype))
            continue
        plan = create_default_local_save_plan({key: tensor}, False)
        pieces += [piece for item in plan.items if (piece := Piece.of_item(item)) is not None]
    return pieces


_Index = tuple[str, tuple[int, ...]]


def _holders(held: Sequence[Sequence[Piece]]) -> dict[_Index, tuple[Piece, list[int]]]:
    """Each piece once, with the ranks that have it; the largest first. Raises ShardingError."""
    found: dict[_Index, tuple[Piece, list[int]]] = {}
    for rank, pieces in enumerate(held):
        for piece in pieces:
            first, ranks = found.setdefault((piece.key, piece.offsets), (piece, []))
            if piece != first:
                raise ShardingError(
                    f"{piece.key} is {_kind(first)} on rank {ranks[0]}, and {_kind(piece)} on rank {rank}\n"
                    "Track what all ranks have alike, or what belongs to one rank alone under a name of its own."
                )
            ranks.append(rank)
    return dict(sorted(found.items(), key=lambda each: (-each[1][0].entry.nbytes, each[1][0].name)))


def _kind(piece: Piece) -> str:
    return f"{str(piece.dtype).removeprefix('torch.')} {list(piece.sizes)}"


def _deal(
    holders: Mapping[_Index, tuple[Piece, list[int]]], world: int, lowest: Collection[_Index]
) -> list[set[_Index]]:
    """The pieces that each rank writes, in order of rank. Each piece is written once, by that of its ranks which has to
    write the fewest bytes so far. `lowest`: pieces that the first of their ranks writes."""
    dealt: list[set[_Index]] = [set() for _ in range(world)]
    size = [0] * world
    for index, (piece, ranks) in holders.items():
        rank = ranks[0] if index in lowest else min(ranks, key=size.__getitem__)
        dealt[rank].add(index)
        size[rank] += piece.entry.nbytes
    return dealt


def _check_whole(holders: Mapping[_Index, tuple[Piece, list[int]]], world: int) -> None:
    """Let torch's planner check the pieces, each once. Raises ShardingError if a part is missing, or parts overlap."""
    sharded = {piece.key for piece, _ in holders.values() if not piece.is_whole}
    items: list[list[WriteItem]] = [[] for _ in range(max(world, 2))]  # the planner checks a single plan less strictly
    for piece, ranks in holders.values():
        if piece.key in sharded:
            items[ranks[0]].append(_write_item(piece))
    if not sharded:
        return
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({}, is_coordinator=True)
    try:
        planner.create_global_plan([SavePlan(each) for each in items])
    except (ValueError, AssertionError) as error:
        raise ShardingError(f"the ranks' shards do not make whole tensors: {error}") from error


def _write_item(piece: Piece) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(piece.key, torch.Size(piece.offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)),
            properties=TensorProperties(dtype=piece.dtype),
            size=torch.Size(piece.whole),
        ),
    )


@dataclass(frozen=True)
class WriteShare:
    """One rank's part of a plan. Pieces are given by their numbers in the rank's list."""

    disk: list[int]
    """The pieces that the rank writes to the disk."""
    beside: list[int]
    """The pieces that only the memory of the rank's node needs."""
    replicas: list[tuple[list[int], list[int]]]
    """Groups of ranks, this one among them, that have the same pieces; each with these pieces."""


def assign(
    held: Sequence[Sequence[Piece]], nodes: Sequence[str], loose: Sequence[Collection[int]] = ()
) -> list[WriteShare]:
    """The share of each rank, in order of rank. Raises ShardingError.

    `held`: the pieces of each rank. `nodes`: the node of each rank. `loose`: for each rank the numbers of its pieces
    that may differ between the ranks that have them: the first of these ranks writes all of them, so that they belong
    together."""
    holders = _holders(held)
    _check_whole(holders, len(held))
    free = {(pieces[n].key, pieces[n].offsets) for pieces, some in zip(held, loose, strict=False) for n in some}
    disk = _deal(holders, len(held), free)
    beside: list[set[_Index]] = [set() for _ in held]
    ranks_of: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_of.setdefault(node, []).append(rank)
    for ranks in ranks_of.values():
        _deal_beside(held, ranks, disk, beside)
    return [_share_of(pieces, disk[rank], beside[rank], holders, free) for rank, pieces in enumerate(held)]


def _share_of(
    pieces: Sequence[Piece],
    disk: set[_Index],
    beside: set[_Index],
    holders: Mapping[_Index, tuple[Piece, list[int]]],
    free: set[_Index],
) -> WriteShare:
    share = WriteShare([], [], [])
    replicas: dict[tuple[int, ...], list[int]] = {}
    for number, piece in enumerate(pieces):
        index = (piece.key, piece.offsets)
        if index in disk:
            share.disk.append(number)
        if index in beside:
            share.beside.append(number)
        if len(ranks := holders[index][1]) > 1 and index not in free:
            replicas.setdefault(tuple(ranks), []).append(number)
    share.replicas.extend((list(ranks), numbers) for ranks, numbers in sorted(replicas.items()))
    return share


def _deal_beside(
    held: Sequence[Sequence[Piece]], ranks: Sequence[int], disk: Sequence[set[_Index]], beside: list[set[_Index]]
) -> None:
    """Divide the pieces that none of a node's ranks writes to the disk. Each piece is written once, by that of its
    ranks which has to write the fewest bytes so far."""
    on_disk = set().union(*(disk[rank] for rank in ranks))
    holders: dict[_Index, list[int]] = {}
    wanted: dict[_Index, Piece] = {}
    for rank in ranks:
        for piece in held[rank]:
            index = (piece.key, piece.offsets)
            if index not in on_disk:
                wanted.setdefault(index, piece)
                holders.setdefault(index, []).append(rank)
    size = dict.fromkeys(ranks, 0)
    for index, piece in wanted.items():
        least = min(holders[index], key=size.__getitem__)
        beside[least].add(index)
        size[least] += piece.entry.nbytes


def plan(
    peers: Peers,
    node: str,
    shared: Mapping[str, torch.Tensor],
    own: Mapping[str, torch.Tensor],
    text_bytes: int,
    loose: Collection[str] = (),
) -> Layout:
    """Agree with all ranks on the pieces that each of them writes; all ranks call this. Raises ShardingError.

    `node`: a key of this rank's node. `shared`: tensors that are sharded or replicated. `own`: this rank's own tensors,
    which it writes itself. `text_bytes`: room for the text. `loose`: names of shared tensors that may differ between
    the ranks that have them.
    """
    pieces = local_pieces(shared)
    free = [number for number, piece in enumerate(pieces) if piece.key in loose]
    gathered = peers.gather([node, [piece.packed() for piece in pieces], free])
    shares: list[Any] = []
    if gathered:
        try:
            held = [[Piece.unpacked(each) for each in packed] for _, packed, _ in gathered]
            found = assign(held, [node for node, _, _ in gathered], [each for _, _, each in gathered])
            shares = [[each.disk, each.beside, each.replicas] for each in found]
        except ShardingError as error:
            shares = [str(error)] * peers.world

    share = peers.scatter(shares)
    if isinstance(share, str):
        raise ShardingError(share)
    mine, beside = ([pieces[number] for number in numbers] for numbers in share[:2])
    mine += [Piece.own(key, tensor) for key, tensor in own.items()]
    file = image_of(mine, text_bytes)
    return Layout(
        file,
        image_of(beside, 0) if beside else None,
        tuple((piece.name, piece.key) for piece in (*mine, *beside)),
        tuple(
            ReplicaGroup(tuple(ranks), tuple(pieces[number].key for number in numbers)) for ranks, numbers in share[2]
        ),
    )


def alone(shared: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], text_bytes: int) -> Layout:
    """The layout for all pieces that this rank has, whatever the others have."""
    pieces = [*local_pieces(shared), *(Piece.own(key, tensor) for key, tensor in own.items())]
    return Layout(image_of(pieces, text_bytes), None, tuple((piece.name, piece.key) for piece in pieces))


def image_of(pieces: Sequence[Piece], text_bytes: int) -> Image:
    """Layout of the rank's file with these pieces and `text_bytes` of text."""
    described = {piece.name: piece.described for piece in pieces if piece.described is not None}
    entries = [piece.entry for piece in pieces]
    if text_bytes:
        entries.append(TensorEntry(TEXT, "U8", (text_bytes,)))
    return Image.plan(entries, {PIECES: json.dumps(described, separators=(",", ":"))})


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of this tensor that this process has."""
    return torch_private.local_part(tensor) if isinstance(tensor, DTensor) else tensor.detach()


class EntryViews:
    """A layout's entries in a slot, as tensors that share its memory."""

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self.views = views
        self._kinds = [(view.dtype, view.shape) for view in views]

    def sources(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The parts of these tensors that this process has, each with the type and shape of its entry; None: they do
        not fit."""
        sources = []
        for (dtype, shape), tensor in zip(self._kinds, tensors, strict=True):
            local = torch_private.local_part(tensor) if isinstance(tensor, DTensor) else tensor
            if local.dtype != dtype and local.dtype not in CODES:
                local = local.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
            if local.dtype != dtype or local.shape != shape:
                return None
            sources.append(local)
        return sources

    def fill(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Copy each tensor into its entry; the copies are complete when this returns. Returns False, without copying,
        if they do not fit."""
        sources = self.sources(tensors)
        if sources is not None:
            copy_alike(self.views, sources)
        return sources is not None
