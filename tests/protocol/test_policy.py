"""The pauses after which a wait is reported again; how often agents report."""

from __future__ import annotations

from itertools import pairwise

import pytest

from holdfast.protocol.policy import PAUSE_S_MAX, Limits, Pauses


def test_it_is_said_at_growing_pauses_up_to_a_minute() -> None:
    pauses = Pauses.begin(100.0, 5.0)
    said = [second for second in range(100, 500) if pauses.due(float(second))]
    assert said[0] == 105
    gaps = [after - before for before, after in pairwise(said)]
    assert gaps[:4] == [10, 20, 40, 60]
    assert set(gaps[3:]) == {PAUSE_S_MAX}
    assert pauses.at_s > 500


@pytest.mark.parametrize(
    ("limits", "agents", "ping_s", "progress_s"),
    [
        (Limits(), 1, 1.0, 1.0),
        (Limits(), 100, 1.0, 1.0),
        (Limits(), 500, 1.0, 5.0),
        (Limits(), 600, 1.2, 6.0),
        (Limits(), 1_000, 2.0, 10.0),
        (Limits(), 6_000, 2.0, 10.0),
        (Limits(), 100_000, 2.0, 10.0),
        (Limits(lease_s=3.0, fence_s=2.0, ping_interval_s=0.5), 100_000, 1.0, 10.0),
        (Limits(hang_report_s=3.0), 100_000, 2.0, 2.5),
        (Limits(hang_report_s=0.6), 100_000, 2.0, 1.0),
    ],
)
def test_the_load_is_bounded_as_far_as_fence_and_hang_detection_allow(
    limits: Limits, agents: int, ping_s: float, progress_s: float
) -> None:
    assert limits.ping_interval_of(agents) == pytest.approx(ping_s)
    assert limits.progress_interval_of(agents) == pytest.approx(progress_s)
