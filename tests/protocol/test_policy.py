"""The pauses after which a wait is reported again."""

from __future__ import annotations

from itertools import pairwise

from holdfast.protocol.policy import PAUSE_S_MAX, Pauses


def test_it_is_said_at_growing_pauses_up_to_a_minute() -> None:
    pauses = Pauses.begin(100.0, 5.0)
    said = [second for second in range(100, 500) if pauses.due(float(second))]
    assert said[0] == 105
    gaps = [after - before for before, after in pairwise(said)]
    assert gaps[:4] == [10, 20, 40, 60]
    assert set(gaps[3:]) == {PAUSE_S_MAX}
    assert pauses.at_s > 500
