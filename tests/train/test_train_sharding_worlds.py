"""Saved on some ranks, loaded on others: real process groups, real shards, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.warm import Warm

SCRIPT = Path(__file__).parent / "scripts" / "snapshot_ranks.py"
pytestmark = [pytest.mark.xdist_group("torch lives"), pytest.mark.timeout(180)]


def found_by(warm: Warm, case: str, folder: Path) -> Any:
    done = warm.run([SCRIPT, case, folder], timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def agree(results: list[Any], reference: Any, source: str, world_then: int) -> None:
    for result in results:
        assert "error" not in result, result
        assert (result["resumed"]["source"], result["resumed"]["world_then"]) == (source, world_then)
        assert result["state"] == reference


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
def test_saved_on_four_ranks_loaded_on_any(warm: Warm, kind: str, tmp_path: Path) -> None:
    found = found_by(warm, f"reshard_{kind}", tmp_path)
    reference = found["saved"][0]
    assert all(state == reference for state in found["saved"])
    for name, results in found["loaded"].items():
        agree(results, reference, name.split()[2], 4)
    # Replicas are saved once, and dealt evenly.
    assert max(found["sizes"]) < 1.1 * min(found["sizes"])


def test_each_node_has_enough_in_memory_and_the_disk_has_everything_once(warm: Warm, tmp_path: Path) -> None:
    found = found_by(warm, "nodes", tmp_path)
    reference = found["saved"][0]
    agree(found["memory"], reference, "memory", 4)
    agree(found["resized"], reference, "disk", 4)
    assert max(found["sizes"]) < 1.1 * min(found["sizes"])


def test_a_killed_job_goes_on_as_if_nothing_had_happened(warm: Warm, tmp_path: Path) -> None:
    found = found_by(warm, "curve", tmp_path)
    assert "killed 9" in found["killed"]
    for calm, resumed in zip(found["calm"], found["resumed"], strict=True):
        assert "error" not in resumed, resumed
        step = resumed["resumed"]["step"]
        # The newest step in memory that the dead rank had, too: 12, while the disk has 8.
        assert (step, resumed["resumed"]["source"]) == (12, "memory")
        assert resumed["losses"] == calm["losses"][step:]
        assert resumed["drawn"] == calm["drawn"][step:]
        assert resumed["state"] == calm["state"]


def test_what_one_rank_cannot_do_is_told_to_all(warm: Warm, tmp_path: Path) -> None:
    for result in found_by(warm, "unequal", tmp_path):
        assert "odd['what']['is'][1]" in result["error"]
