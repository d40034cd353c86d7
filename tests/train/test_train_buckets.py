"""The order of the gradients in DDP's buckets, on which sums over more than two ranks depend in their last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.warm import Warm

SCRIPT = Path(__file__).parent / "scripts" / "restarted.py"
pytestmark = [pytest.mark.xdist_group("torch lives"), pytest.mark.timeout(180)]


def test_after_the_death_of_all_ranks_the_weights_are_those_of_an_undisturbed_job(warm: Warm, tmp_path: Path) -> None:
    found = warm.found(SCRIPT, tmp_path)
    (whole, buckets), (again, buckets_again), (_, buckets_older) = found["whole"], found["again"], found["older"]
    assert again == whole
    assert buckets == 1, "DDP begins with one"
    assert buckets_again > 2
    assert buckets_older == 1, "what has no order is resumed all the same"
