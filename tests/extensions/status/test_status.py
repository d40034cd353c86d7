"""What `status` answers."""

from __future__ import annotations

import msgspec

from holdfast.extensions.status.messages import ANSWER_BYTES_MAX, body_of
from holdfast.protocol.rank_progress import JobView, NodeView, RankView, Stage
from tests.coordinator.coordinator_harness import running


def test_a_member_gets_the_view_of_the_job() -> None:
    harness = running()
    harness.ask("status", 2)
    view = msgspec.convert(harness.answer(2), JobView)
    assert (view.world_size, view.phase, [node.host for node in view.nodes]) == (2, "running", ["n1", "n2"])
    assert harness.answers == []


def test_the_answer_fits_into_a_frame() -> None:
    ranks = tuple(
        RankView(rank=number, local_rank=0, stage=Stage.STEPPING, steps=10**9, step_s=0.1, own_s=0.1, age_s=0.1)
        for number in range(60_000)
    )
    node = NodeView(member="a#1", host="a", group_rank=0, state="running", heard_s=0.0, ranks=ranks)
    view = JobView(
        run_id="x", phase="running", generation=1, restarts=0, restarts_max=0, world_size=60_000,
        since_s=0, job_s=0, training_s=0, nodes=(node,),
    )  # fmt: skip
    body = body_of(view)
    assert len(body) <= ANSWER_BYTES_MAX
    shown = msgspec.json.decode(body, type=JobView)
    assert shown.nodes[0].host == "a"
    assert shown.notices == ("60000 ranks are too many for one answer: their steps are not shown",)
