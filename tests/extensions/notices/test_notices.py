"""Which notices the events of a job make, and that one target that does not answer holds up no other."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from holdfast.extensions.notices import sender
from holdfast.extensions.notices.node import Notices
from holdfast.extensions.notices.sender import Sender
from tests.support.limits import limit_s, until


def test_a_save_is_no_reason_for_a_restart() -> None:
    sent: list[dict[str, Any]] = []
    notices = Notices("r", "a", sent.append)
    for event, fields in (
        ("coordinator.assigned", {"generation": 1, "world_size": 2, "order": ["a"]}),
        ("coordinator.started", {"generation": 1}),
        ("coordinator.draining", {"reason": "member_left", "text": "alice"}),
        ("coordinator.drain_to", {"generation": 1, "safe_point": 5, "save": True}),
        ("coordinator.stopping", {"generation": 1, "reason": "joined", "text": "c has arrived"}),
        ("coordinator.assigned", {"generation": 2, "world_size": 4, "order": ["a", "c"]}),
        ("coordinator.started", {"generation": 2}),
    ):
        notices.heard(event, fields)
    assert [each["text"] for each in sent if each["event"] == "restart"] == [
        "r: generation 2, 4 ranks on 2 nodes: c has arrived"
    ]


def test_a_target_that_does_not_answer_loses_its_own_notices_alone_and_that_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hangs, answers, taken = threading.Event(), threading.Event(), []
    failed: list[tuple[str, str]] = []

    def deliver(target: str, body: bytes) -> str:
        if "hangs" in target:
            hangs.set()
            answers.wait()
        else:
            taken.append(body)
        return ""

    monkeypatch.setattr(sender, "deliver", deliver)
    close_s = limit_s(0.5)
    monkeypatch.setattr(sender, "CLOSE_S_MAX", close_s)
    sends = Sender(["http://hangs/secret", "http://works/secret"], lambda *about: failed.append(about))
    try:
        for number in range(3):
            sends.send({"text": str(number)})
        until(lambda: len(taken) == 3 and hangs.is_set(), "one target to have all, and the other one to hang")
        sends.close()
        assert failed == [("http://hangs/…", f"3 notices not sent within {close_s:g} s of the job's end")]
    finally:
        answers.set()


def test_a_host_that_is_none_is_shown_without_its_path() -> None:
    assert sender.shown("http://[::1:8080/secret") == "http://[…"
