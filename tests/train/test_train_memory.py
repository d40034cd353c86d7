"""Ranks that run out of memory: all repeat the optimizer step with smaller micro-batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import holdfast.train as ht
from holdfast.protocol.errors import DataError
from tests.train.conftest import SCRIPTS, on_ranks
from tests.train.test_train_data_loader import Numbers, loader, samples
from tests.warm import Warm

SCRIPT = SCRIPTS / "short_memory.py"


def ranks(warm: Warm, folder: Path, *runs: tuple[int, str, str]) -> list[list[dict[str, Any]]]:
    """What the ranks of each run say, in their order: its world, case and folder."""
    printed = on_ranks(warm, "", *((world, SCRIPT, (case, str(folder / name))) for world, case, name in runs))
    said = [[json.loads(line) for line in each.splitlines() if line] for each in printed]
    return [sorted(each, key=lambda rank: rank["rank"]) for each in said]


def test_one_rank_runs_out_of_memory_and_all_repeat_the_step(warm: Warm, tmp_path: Path) -> None:
    """In the forward pass and in the backward pass, in the last micro-batch, which is the only one."""
    small, forward, backward = ranks(warm, tmp_path, (2, "small", "a"), (2, "forward", "b"), (2, "backward", "c"))
    assert small[0]["whole"] == small[1]["whole"]
    assert small[0]["said"] == []
    for found in (forward, backward):
        assert [each["whole"] for each in found] == [each["whole"] for each in small]  # bit for bit
        assert [each["losses"] for each in found] == [each["losses"] for each in small]
        assert [each["size"] for each in found] == [2, 2]
        assert [each["taken"] for each in found] == [[8, 4, 4, *each["taken"]] for each in small]
        assert [len(each["said"]) for each in found] == [2, 0]
        assert (
            "rank 1 ran out of memory with 8 samples at once: this optimizer step is repeated with 4"
            in found[0]["said"][0]
        )


def test_gradients_that_are_exchanged_afterwards_are_those_of_ddp(warm: Warm, tmp_path: Path) -> None:
    ours, torchs = ranks(warm, tmp_path, (3, "none", "a"), (3, "torch", "b"))
    assert ours[0]["weights"] == pytest.approx(torchs[0]["weights"], rel=1e-5)
    assert ours[0]["losses"] == pytest.approx(torchs[0]["losses"], rel=1e-4)
    assert [each["whole"] for each in ours] == [ours[0]["whole"]] * 3
    assert ours[0]["said"] == []


def test_it_is_remembered_in_the_snapshot(warm: Warm, tmp_path: Path) -> None:
    first, second, one = ranks(warm, tmp_path, (2, "resumed", "a"), (2, "resumed", "a"), (1, "single", "b"))
    assert [len(each["said"]) for each in first] == [2, 0]
    assert [len(each["said"]) for each in second] == [0, 0]
    assert set(second[0]["taken"]) <= {1, 2}
    assert [each["whole"] for each in second] == [each["whole"] for each in first]
    assert one[0]["size"] == 2
    assert len(one[0]["said"]) == 2


def test_a_single_sample_that_does_not_fit_is_an_error(warm: Warm, tmp_path: Path) -> None:
    line = [SCRIPTS / "on_ranks.py", "", "2", SCRIPT, "never", tmp_path]
    done = warm.run(line, timeout=150)
    assert done.returncode == 1
    assert "torch.OutOfMemoryError: CUDA out of memory (pretended)" in done.stderr


def test_every_sample_comes_once_in_smaller_batches() -> None:
    data = loader(40, 4, global_batch_size=8, shrink_on_oom=True, ranks=(0, 1))
    seen = []
    for batch in data:
        if len(seen) == 16 and data.batch_size == 4:
            data._shrink()  # as ht.accumulate does
            continue
        seen += batch
    assert seen == samples(loader(40, 4, ranks=(0, 1)))
    assert data.batch_size == 2
    assert data.micro_batches == 4
    state = data.state_dict()
    wider = loader(40, 4, global_batch_size=8, shrink_on_oom=True, ranks=(1, 2))
    wider.load_state_dict(state)
    assert wider.batch_size == 2
    plain = loader(40, 4, global_batch_size=8, ranks=(1, 2))
    plain.load_state_dict(state)
    assert plain.batch_size == 4
    lower = loader(40, 1, global_batch_size=8, shrink_on_oom=True, ranks=(1, 2))
    lower.load_state_dict(state)
    assert lower.batch_size == 1


def test_what_cannot_shrink() -> None:
    with pytest.raises(DataError, match="needs global_batch_size="):
        ht.DataLoader(Numbers(4), batch_size=2, shrink_on_oom=True)
