"""The coordinator's fast path (see the comment in coordinator.py) leaves out work, and no decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from holdfast.coordinator.coordinator import Coordinator
from tests.support.simulator.cluster import SimCluster
from tests.support.simulator.succession import SuccessionCluster
from tests.support.simulator.sweep import run_seed, run_succession

LATER = ": gathering {"
"""The note of why no generation is formed may come later, and of nothing else."""


@pytest.mark.parametrize(("run", "seeds"), [(run_seed, range(1, 15)), (run_succession, (3, 10))])
def test_with_and_without_the_fast_path_the_histories_are_equal(
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., SimCluster | SuccessionCluster], seeds: Sequence[int]
) -> None:
    left_out = 0
    nothing_follows = Coordinator._nothing_follows

    def counted(self: Coordinator, now: float, event: object) -> bool:
        nonlocal left_out
        answer = nothing_follows(self, now, event)  # type: ignore[arg-type]
        left_out += answer
        return answer

    for seed in seeds:
        with monkeypatch.context() as fast:
            fast.setattr(Coordinator, "_nothing_follows", counted)
            expected = [line for line in run(seed, story_lines_max=None).story if LATER not in line]
        with monkeypatch.context() as slow:
            slow.setattr(Coordinator, "_is_quiet", lambda self, now: False)
            slow.setattr(Coordinator, "_is_frequent", staticmethod(lambda event: False))
            story = [line for line in run(seed, story_lines_max=None).story if LATER not in line]
        assert story == expected, seed
    assert left_out > 0
