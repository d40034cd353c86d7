"""Saved on some ranks, loaded on others: real process groups, real shards, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.protocol.errors import ShardingError
from holdfast.train.sharding import Piece, assign, local_pieces
from tests.warm import Warm

SCRIPT = Path(__file__).parent / "scripts" / "snapshot_ranks.py"
pytestmark = [pytest.mark.xdist_group("torch lives"), pytest.mark.timeout(180)]


def agree(results: list[Any], reference: Any, source: str, world_then: int) -> None:
    for result in results:
        assert "error" not in result, result
        assert (result["resumed"]["source"], result["resumed"]["world_then"]) == (source, world_then)
        assert result["state"] == reference


@pytest.mark.usefixtures("fsdp_on_cpus")
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
def test_saved_on_four_ranks_loaded_on_any(warm: Warm, kind: str, tmp_path: Path) -> None:
    found = warm.found(SCRIPT, f"reshard_{kind}", tmp_path)
    reference = found["saved"][0]
    assert all(state == reference for state in found["saved"])
    for name, results in found["loaded"].items():
        agree(results, reference, name.split()[2], 4)
    # Replicas are saved once, and dealt evenly.
    assert max(found["sizes"]) < 1.1 * min(found["sizes"])


def test_each_node_has_enough_in_memory_and_the_disk_has_everything_once(warm: Warm, tmp_path: Path) -> None:
    found = warm.found(SCRIPT, "nodes", tmp_path)
    reference = found["saved"][0]
    agree(found["memory"], reference, "memory", 4)
    agree(found["resized"], reference, "disk", 4)
    assert max(found["sizes"]) < 1.1 * min(found["sizes"])


# --- which rank writes which piece ------------------------------------------------------------------------------------


class Counted(list[Any]):
    """Pieces that know how often somebody has begun to go through them."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return super().__iter__()


def replicated(name: str, items: int) -> Piece:
    return Piece(name, (0,), (items,), (items,), torch.float32)


def job(chance: random.Random) -> tuple[list[Counted], list[str]]:
    """A world of ranks on nodes: replicated tensors, sharded ones, and shards that have replicas (HSDP)."""
    world = chance.randint(1, 12)
    nodes = [f"node{chance.randrange(chance.randint(1, 4))}" for _ in range(world)]
    held = [Counted() for _ in range(world)]
    for number in range(chance.randint(0, 40)):
        items = chance.choice([1, 7, 64, 4096])
        shards = chance.choice([each for each in range(1, world + 1) if world % each == 0])
        for rank, pieces in enumerate(held):
            at = rank % shards * items
            pieces.append(Piece(f"p{number}", (at,), (items,), (items * shards,), torch.float32))
    for pieces in held:
        chance.shuffle(pieces)
    return held, nodes


@pytest.mark.parametrize("seed", range(60))
def test_every_piece_is_on_the_disk_once_and_at_hand_on_every_node(seed: int) -> None:
    held, nodes = job(random.Random(seed))
    said = [[(piece.key, piece.offsets) for piece in pieces] for pieces in held]
    shares = assign(held, nodes)
    disk = [said[rank][number] for rank, share in enumerate(shares) for number in share.disk]
    assert sorted(disk) == sorted({index for pieces in said for index in pieces})
    for node in set(nodes):
        ranks = [rank for rank, each in enumerate(nodes) if each == node]
        there = [said[rank][number] for rank in ranks for number in (*shares[rank].disk, *shares[rank].beside)]
        assert len(there) == len(set(there))
        assert set(there) == {index for rank in ranks for index in said[rank]}


def test_what_a_node_keeps_beside_is_dealt_evenly_among_its_ranks() -> None:
    held = [[replicated(f"p{number}", 1024) for number in range(300)] for _ in range(6)]
    shares = assign(held, ["a", "a", "a", "b", "b", "b"])
    counts = [len(share.disk) + len(share.beside) for share in shares]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("seed", range(20))
def test_replicas_are_what_the_same_ranks_hold(seed: int) -> None:
    held, nodes = job(random.Random(seed))
    loose = [[number for number, piece in enumerate(pieces) if piece.key == "p0"] for pieces in held]
    shares = assign(held, nodes, loose)
    for rank, (pieces, share) in enumerate(zip(held, shares, strict=True)):
        compared = {number: ranks for ranks, numbers in share.replicas for number in numbers}
        for number, piece in enumerate(pieces):
            holders = [other for other, theirs in enumerate(held) if (piece.key, piece.offsets) in _indices(theirs)]
            assert compared.get(number, [rank]) == (holders if piece.key != "p0" else [rank])


def _indices(pieces: list[Piece]) -> set[tuple[str, tuple[int, ...]]]:
    return {(piece.key, piece.offsets) for piece in pieces}


def test_what_may_differ_is_written_by_one_rank() -> None:
    held = [[replicated(f"p{number}", 64) for number in range(9)] for _ in range(3)]
    shares = assign(held, ["a"] * 3, [range(9)] * 3)
    assert [len(share.disk) for share in shares] == [9, 0, 0]


def test_of_whole_tensors_torch_s_planner_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes several objects for each on each rank: 80,000 tensors took half a minute."""
    monkeypatch.delattr("holdfast.train.sharding.WriteItem")
    monkeypatch.delattr("holdfast.train.sharding.create_default_local_save_plan")
    tensors = {f"p{number}": torch.zeros(2) for number in range(3)} | {"q": torch.nn.Parameter(torch.zeros(()))}
    held = [local_pieces(tensors)] * 2
    assert sum(len(share.disk) for share in assign(held, ["a", "a"])) == 4


def test_a_tensor_of_two_shapes_is_refused() -> None:
    held = [[replicated("p", 64)], [replicated("p", 65)]]
    with pytest.raises(ShardingError, match=r"p is float32 \[64\] on rank 0, and float32 \[65\] on rank 1"):
        assign(held, ["a", "a"])


def test_no_rank_looks_through_what_another_holds_for_each_piece() -> None:
    held = [Counted(replicated(f"p{number}", 64) for number in range(50)) for _ in range(8)]
    assign(held, ["a", "b"] * 4)
    assert max(pieces.passes for pieces in held) < 8
