"""Notices: what people are told, and that a receiver that fails, stalls or is gone costs the job nothing."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from holdfast.linux import process_stat
from holdfast.metrics.notices import QUEUE_MAX, TRIES, Notices, Sender, deliver, shown
from tests.support.limits import until


class Hook(HTTPServer):
    """A web hook that refuses the first requests."""

    refuses = 0

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if hook.refuses:
                    hook.refuses -= 1
                    self.send_response(503)
                else:
                    hook.got.append(json.loads(body))
                    self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}/services/SECRET"


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook()
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def told(*events: tuple[str, dict[str, Any]]) -> list[tuple[str, str]]:
    sent: list[dict[str, Any]] = []
    notices = Notices("job", "a", sent.append)
    for event, fields in events:
        notices.heard(event, fields)
    assert all(each["run_id"] == "job" and each["host"] == "a" and each["text"].startswith("job: ") for each in sent)
    return [(each["event"], each["text"].removeprefix("job: ")) for each in sent]


ASSIGNED = ("coordinator.assigned", {"generation": 1, "world_size": 4, "order": ["a#1", "b#1"]})
STARTED = ("coordinator.started", {"generation": 1, "master": "a:1"})
AGAIN = ("coordinator.started", {"generation": 2, "master": "a:1"})


def test_each_turn_of_a_job_is_one_line() -> None:
    verdict = {"generation": 1, "cause": "rank 1 raised ValueError", "code": "HF201", "advice": "look"}
    hang = {"generation": 2, "kind": "hung", "code": "HF240", "text": "rank 3 does not join", "culprits": [3]}
    slow = {"generation": 2, "code": "HF250", "host": "b", "ranks": [2], "own_s": 0.05, "peers_s": 0.03, "step_s": 0.1}
    lost = {"member": "b#1", "reason": "silent for 6 s", "silent_s": 6.0}
    end = {
        "kind": "failed",
        "exit_code": 1,
        "text": "",
        "code": "HF201",
        "cause": "rank 1 raised ValueError",
        "advice": "",
    }
    assert told(
        ASSIGNED,
        STARTED,
        ("coordinator.verdict", verdict),
        ("coordinator.stopping", {"generation": 1, "reason": "worker_failed", "text": "rank 1 failed"}),
        ASSIGNED,
        AGAIN,
        ("coordinator.hang", {**hang, "kind": "paused"}),
        ("coordinator.hang", hang),
        ("coordinator.straggler", slow),
        ("coordinator.lost", lost),
        ("coordinator.over", {"kind": "failed", "exit_code": 1}),
        ("coordinator.lost", lost),
        ("ended", end),
    ) == [
        ("start", "started: 4 ranks on 2 nodes"),
        ("restart", "generation 2, 4 ranks on 2 nodes: rank 1 raised ValueError (HF201)"),
        ("hang", "hangs: rank 3 does not join (HF240)"),
        ("straggler", "slow: b, rank 2: 50 ms of its own per step, its peers 30 ms (HF250)"),
        ("lost_node", "lost node b: silent for 6 s"),
        ("end", "failed, exit code 1: rank 1 raised ValueError (HF201)"),
    ]


def test_only_the_node_of_the_coordinator_tells_of_the_end() -> None:
    assert told(("ended", {"kind": "succeeded", "exit_code": 0, "text": ""})) == []


def test_a_successor_goes_on_with_the_notices() -> None:
    """The job does not start again, and it ends once: on the node that has the coordinator then."""
    elected, end = ("leads", {"term": 2, "founds": False}), ("ended", {"kind": "succeeded", "exit_code": 0, "text": ""})
    ended = ("end", "succeeded, exit code 0")
    assert told(elected, ASSIGNED, AGAIN, end) == [
        ("restart", "generation 2, 4 ranks on 2 nodes: this node has the coordinator now"),
        ended,
    ]
    assert told(("coordinator.resumed", {"generation": 1}), end) == [ended]
    assert told(ASSIGNED, STARTED, ("coordinator.steps_down", {"reason": "alone", "term": 1}), end)[1:] == []


def test_survivors_tell_what_was_lost() -> None:
    begun = {"generation": 2, "world_size": 3, "order": ["a#1"], "text": "rank 3 was lost"}
    assert told(ASSIGNED, STARTED, ("coordinator.regroup_begun", begun), ("coordinator.regrouped", {"generation": 2}))[
        1
    ] == (
        "restart",
        "generation 2, 3 ranks on 1 node: rank 3 was lost",
    )


def test_a_hook_and_a_command_get_every_notice_and_a_refused_one_is_sent_again(hook: Hook, tmp_path: Path) -> None:
    lost: list[tuple[str, str]] = []
    hook.refuses = 1
    sender = Sender(
        [hook.address, f"sh -c 'cat >> {tmp_path}/got; echo >> {tmp_path}/got'"], lambda *why: lost.append(why)
    )
    sender.send({"text": "one"})
    until(lambda: hook.got == [{"text": "one"}], "the second try")
    sender.send({"text": "two"})
    sender.close()
    assert hook.got == [{"text": "one"}, {"text": "two"}]
    assert [json.loads(line) for line in (tmp_path / "got").read_text().splitlines()] == hook.got
    assert lost == []


def test_an_answer_that_is_not_http_loses_one_notice_and_not_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.metrics.notices.PAUSE_S", 0.0)
    lost: list[tuple[str, str]] = []
    with socket.create_server(("127.0.0.1", 0)) as strange:
        sender = Sender([f"http://127.0.0.1:{strange.getsockname()[1]}/"], lambda *why: lost.append(why))
        for _ in range(2):
            sender.send({"text": "one"})
            for _ in range(TRIES):
                connection, _ = strange.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")
        sender.close()
    assert [why for _, why in lost] == ["BadStatusLine"] * 2


def test_a_command_that_stalls_is_killed_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("holdfast.metrics.notices.SEND_S_MAX", 0.5)
    assert deliver(f"sh -c 'sleep 1000 & echo $! > {tmp_path}/pid; yes'", b"{}") == "it did not end within 0.5 s"
    pid = int((tmp_path / "pid").read_text())
    until(lambda: (stat := process_stat(pid)) is None or stat.state == "Z", "the end of its child")


def test_a_target_that_fails_or_stalls_is_given_up_and_its_secret_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.metrics.notices.SEND_S_MAX", 0.2)
    lost: list[tuple[str, str]] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        stalls = f"http://127.0.0.1:{silent.getsockname()[1]}/services/SECRET"
        sender = Sender([stalls, "false --key SECRET", "http://127.0.0.1:1/SECRET"], lambda *why: lost.append(why))
        sender.send({"text": "one"})
        sender.close()
        until(lambda: len(lost) == 3, lambda: str(lost))
    assert [to for to, _ in lost] == ["http://127.0.0.1/…", "false", "http://127.0.0.1/…"]
    assert lost[1][1] == "exit code 1"
    assert "SECRET" not in str(lost)


def test_the_queue_is_bounded() -> None:
    lost: list[tuple[str, str]] = []
    sender = Sender(["sleep 600"], lambda *why: lost.append(why))
    sender._queue.put(None)  # the thread ends, and takes nothing more
    until(lambda: not sender._thread.is_alive(), "its end")
    for _ in range(QUEUE_MAX + 3):
        sender.send({"text": "x"})
    assert len(lost) == 3


def test_what_is_shown_of_a_target() -> None:
    assert [shown(each) for each in ("https://user:pw@hooks.example:8443/T/B?x=1", "/bin/mail -s x ops@example")] == [
        "https://hooks.example/…",
        "/bin/mail",
    ]
    assert "No such file" in deliver("/nowhere/program", b"{}")
