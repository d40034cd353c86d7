"""Which spans the events of a job make, where no generation is simply restarted."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from holdfast.extensions.otel.spans import Span, Spans


def spans_of(*events: tuple[str, dict[str, Any]]) -> list[Span]:
    """The spans that were sent; each look at the clock is a nanosecond later."""
    clock: Iterator[int] = count(1)
    sent: list[Span] = []
    spans = Spans({"holdfast.run_id": "r"}, sent.append, now_ns=lambda: next(clock))
    for event, fields in events:
        spans.heard(event, fields)
    return sent


ASSIGNED = ("coordinator.assigned", {"generation": 1, "world_size": 4, "order": ["a", "b"]})
STARTED = ("coordinator.started", {"generation": 1})
ENDED = ("ended", {"kind": "succeeded", "exit_code": 0, "text": ""})


def test_survivors_that_go_on_begin_another_generation_and_the_loss_is_its_cause() -> None:
    verdict = {"generation": 1, "code": "HF202", "cause": "rank 3 on b was killed"}
    regroup = {"generation": 2, "world_size": 3, "order": ["a", "b"], "text": "rank 3 was lost"}
    first, second, run = spans_of(
        *(ASSIGNED, STARTED, ("coordinator.verdict", verdict), ("coordinator.regroup_begun", regroup)),
        *(("coordinator.regrouped", {"generation": 2, "world_size": 3, "took_s": 0.1}), ENDED),
    )
    assert (first.attributes["holdfast.world_size"], second.attributes["holdfast.world_size"]) == (4, 3)
    assert second.attributes["holdfast.went_on"] is True
    assert second.attributes["holdfast.restart.reason"] == "regroup"
    assert second.attributes["holdfast.restart.code"] == "HF202"
    assert (first.failure, second.failure, run.failure) == ("rank 3 on b was killed", "", "")


def test_a_successor_sends_the_generation_that_it_takes_over_and_the_run() -> None:
    taken_over, run = spans_of(("coordinator.resumed", {"generation": 7, "order": ["b", "c"]}), ENDED)
    assert taken_over.name == "generation 7"
    assert taken_over.attributes["holdfast.restart.reason"] == "succession"
    assert run.is_run
    assert run.began_ns < taken_over.began_ns


def test_a_coordinator_that_steps_down_leaves_the_end_to_its_successor() -> None:
    assert spans_of(ASSIGNED, STARTED, ("coordinator.steps_down", {"reason": "", "term": 1}), ENDED) == []


def test_a_node_without_the_coordinator_sends_nothing() -> None:
    assert spans_of(("begins", {"run_id": "r"}), ENDED) == []


def test_a_save_while_the_job_runs_ends_no_generation() -> None:
    saves = {"generation": 1, "safe_point": 5, "save": True}
    first, _second, run = spans_of(
        *(ASSIGNED, STARTED, ("coordinator.draining", {"reason": "member_left", "text": "alice"})),
        *(("coordinator.drain_to", saves), ("coordinator.stopping", {"reason": "failed", "text": "rank 3 failed"})),
        *(("coordinator.assigned", {"generation": 2, "world_size": 4, "order": ["a"]}), STARTED, ENDED),
    )
    assert first.attributes["holdfast.end.reason"] == "failed"
    assert first.ended_ns > first.began_ns
    assert run.is_run
