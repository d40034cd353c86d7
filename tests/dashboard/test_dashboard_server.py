"""The dashboard's server: who may come in, what they get, and that slow or hostile clients cost nothing."""

from __future__ import annotations

import http.client
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

from holdfast.dashboard import web_app
from holdfast.dashboard.feed import (
    CURVE_MAX,
    LAST_BYTES,
    LINES_MAX,
    LOAD_NODES_MAX,
    LOAD_POINTS_MAX,
    Curve,
    JobFeed,
    LoadCurves,
    LogLines,
    Mailbox,
)
from holdfast.dashboard.job_source import METRIC_POINTS_MAX, PROGRESS_MAX, JournalTail, ShownJob, encoded, now_of
from holdfast.dashboard.saved_page import render
from holdfast.extensions.dashboard import credentials as module
from holdfast.extensions.load.messages import SHOWN_MAX, GpuLoad, NodeLoad
from holdfast.extensions.load.node import Machine
from holdfast.protocol.errors import MissingPackageError
from holdfast.protocol.outcome import Outcome, OutcomeKind
from holdfast.protocol.rank_progress import JobView, NodeView, RankView, Stage, Standing
from tests.support.limits import limit_s, until
from tests.support.pages import MadeUpJob, Visitor, served

STORY = {
    "run_id": "job",
    "generations": [],
    "history": None,
    "incidents": [],
    "excluded": [],
    "actions": [],
    "snapshots": [],
    "outcome": None,
    "advice": {},
    "logs": {},
    "curve": [],
}


GPUS = (GpuLoad(91, 60 * 2**30, 80 * 2**30, 66), GpuLoad(97, 62 * 2**30, 80 * 2**30, 71))
LOAD = NodeLoad(64, 37, 2**34, 2**36, 2**38, 2**40, 3 * 2**20, 2**20, 4, GPUS)


def view(ranks: int = 4, *, steps: int = 100, hung: int = -1, nodes: int = 2) -> JobView:
    """A job that trains; `hung`: the rank for which the others wait."""

    def rank(number: int) -> RankView:
        standing = None if hung < 0 else Standing.HUNG if number == hung else Standing.WAITING
        place = "" if hung < 0 else "in time.sleep at data.py:17" if number == hung else "waits in all_reduce"
        return RankView(
            rank=number,
            local_rank=number % 8,
            stage=Stage.STEPPING,
            pid=1000 + number,
            counts_job=True,
            steps=steps,
            step_s=0.1 + 0.001 * (number % 7),
            own_s=0.04,
            age_s=0.5,
            standing=standing,
            place=place,
        )

    each = -(-ranks // nodes)
    return JobView(
        run_id="job",
        phase="running",
        generation=2,
        restarts=1,
        restarts_max=3,
        world_size=ranks,
        since_s=60.0,
        job_s=100.0,
        training_s=90.0,
        why="rank 1 failed on b",
        nodes=tuple(
            NodeView(
                member=f"node{place}#1",
                host=f"node{place}",
                group_rank=place,
                state="running",
                heard_s=0.2,
                more={"load": to_builtins(LOAD) if place < SHOWN_MAX else None},
                ranks=tuple(rank(number) for number in range(place * each, min(ranks, (place + 1) * each))),
            )
            for place in range(nodes)
        ),
        notices=("rank 3 hangs: the others wait for it",) if hung >= 0 else (),
        job_step=4000 + steps,
        job_steps=10_000,
        left_s=0.0 if hung >= 0 else 590.0,
    )


# --- access -----------------------------------------------------------------------------------------------------------


def test_nothing_is_shown_without_the_link_which_works_once() -> None:
    with served(MadeUpJob(view(), STORY)) as dashboard:
        stranger = Visitor(dashboard.address)
        for path in ("/", "/job/made-up/", "/job/made-up/events", "/static/app.js", "/login", "/login?token="):
            assert stranger.ask("GET", path)[0] == 401, path
        first, second = dashboard.visitor(), dashboard.visitor()
        assert (first.login(), dashboard.used) == (303, 1)
        assert b"<main" in first.get("/job/made-up/")
        assert (second.login(), second.cookie) == (401, "")
        assert first.login() == 303, "whoever has the cookie may use the link again"
        status, _, _ = Visitor(dashboard.address).ask("GET", "/", Authorization=f"Bearer {dashboard.credentials.token}")
        assert status == 401, "a token that works once is no password"


@pytest.mark.parametrize("unit", ["\\1", '\\"', "a=b; ", "=", ";", '"', " "])
def test_the_work_for_a_cookie_grows_with_its_length_alone(unit: str) -> None:
    """Nobody has to log in to send one. http.cookies took 13 s for 40,000 bytes of the first kind: 16 times as long for
    a header that is four times as long."""

    def work_s(count: int) -> float:
        header, least = f'a="{unit * count}"', math.inf
        for _ in range(20):
            began = time.process_time()
            assert web_app.cookie_of(header, "ours") == ""
            least = min(least, time.process_time() - began)
        return least

    assert work_s(8000) <= 10 * work_s(2000) + 1e-4
    assert web_app.cookie_of(f"a=b;{unit * 3}; ours=x ;c=d", "ours") == "x"
    assert web_app.cookie_of("ours=x" + unit * 70_000, "ours") == "", "far more than a browser sends"


def test_at_other_addresses_the_token_works_again() -> None:
    with served(MadeUpJob(view(), STORY), once=False) as dashboard:
        assert [dashboard.visitor().login() for _ in range(2)] == [303, 303]
        robot = Visitor(dashboard.address)
        token = f"Bearer {dashboard.credentials.token}"
        assert robot.ask("GET", "/job/made-up/", Authorization=token)[0] == 200
        assert robot.ask("GET", "/job/made-up/", Authorization="Bearer x")[0] == 401
        assert dashboard.used == 0


def test_actions_need_a_post_from_our_own_page() -> None:
    job = MadeUpJob(view(), STORY)
    with served(job) as dashboard:
        visitor = dashboard.entered()
        stop = json.dumps({"do": "stop"})
        for headers in ({}, {"Origin": "https://elsewhere.example"}, {"Origin": "null"}, {"Origin": "file://"}):
            assert visitor.ask("POST", "/job/made-up/act", stop, **headers)[0] == 403, headers
        assert visitor.ask("GET", "/job/made-up/act")[0] == 405
        assert job.asked == []
        assert visitor.act("/job/made-up/act", do="stop") == (200, {"nodes": 2})
        assert visitor.act("/job/made-up/act", do="kill")[0] == 200
        assert [what for what, _ in job.asked] == ["stop", "kill"]
        assert all("from the dashboard at 127.0.0.1" in by for _, by in job.asked)
        # Behind a proxy that changes Host.
        proxied = {"Origin": "https://jobs.example", "X-Forwarded-Host": "jobs.example"}
        assert visitor.ask("POST", "/job/made-up/act", stop, **proxied)[0] == 200
        for wrong in ({"do": "format"}, {"do": "stop", "now": True}, {}):
            status, told = visitor.act("/job/made-up/act", **wrong)
            assert (status, told["code"]) == (409, "HF101"), wrong
        status, _, _ = visitor.ask("POST", "/job/made-up/act", "x" * 5000, Origin=dashboard.address)
        assert status == 413


def test_a_page_may_load_nothing_from_elsewhere_and_no_script_of_its_text() -> None:
    with served(MadeUpJob(view(), STORY)) as dashboard:
        visitor = dashboard.entered()
        for path in ("/job/made-up/", "/static/app.js", "/job/made-up/nothing"):
            _, headers, _ = visitor.ask("GET", path)
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff"
        status, headers, _ = visitor.ask("GET", "/static/../web_app.py")
        assert status == 404
        assert visitor.ask("GET", "/static/%2e%2e/web_app.py")[0] == 404
        assert visitor.ask("GET", "/jobs")[0] == 404, "a job's own dashboard shows no other job"


def test_the_cookie_stays_valid_when_the_dashboard_is_started_again() -> None:
    credentials = module.Credentials.make(once=True)
    assert credentials.cookie() == module.Credentials(token="", secret=credentials.secret, once=True).cookie()
    assert credentials.cookie() != module.Credentials.make(once=True).cookie()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(MissingPackageError, match=r"holdfast\[dashboard\]"):
        module.check_packages()


@pytest.mark.parametrize("source", ["raise ImportError('no click')", "import nothing_of_that_name", "def"])
def test_a_package_that_cannot_be_imported_is_named(tmp_path: Path, source: str) -> None:
    (tmp_path / "uvicorn").mkdir()
    (tmp_path / "uvicorn" / "__init__.py").write_text(source)
    line = [sys.executable, "-m", "holdfast", "dashboard", "--no-open"]
    done = subprocess.run(line, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == MissingPackageError.exit_code
    (text,) = done.stderr.splitlines()
    assert MissingPackageError.code in text
    assert "uvicorn is installed and cannot be imported" in text
    assert text.endswith("pip install --force-reinstall 'holdfast[dashboard]'")


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_page_gets_the_state_the_story_and_what_changes() -> None:
    job = MadeUpJob(view(steps=100), STORY)
    with served(job) as dashboard:
        visitor = dashboard.entered()
        with visitor.stream("/job/made-up/events") as events:
            seen: dict[str, Any] = {}
            while not seen.keys() >= {"now", "story", "curve"}:  # the story is made after the first state
                seen |= [next(events)]
            assert (seen["now"]["step"], len(seen["now"]["ranks"]["rank"])) == ("100", 4)
            job.view = view(steps=200)
            assert next(data for kind, data in events if kind == "now" and data["step"] == "200")
            job.told = {**STORY, "incidents": [{"what": "hang"}]}
            assert next(data for kind, data in events if kind == "story")["incidents"]


def test_who_never_reads_delays_nobody() -> None:
    with served(MadeUpJob(view(4000), STORY)) as dashboard:
        visitor = dashboard.entered()
        stalled = []
        for _ in range(3):
            sock = socket.create_connection(visitor.host.split(":"))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.sendall(f"GET /job/made-up/events HTTP/1.1\r\nHost: x\r\nCookie: {visitor.cookie}\r\n\r\n".encode())
            stalled.append(sock)
        with visitor.stream("/job/made-up/events") as events:
            times: list[float] = []
            for kind, data in events:
                times += [data["at"]] if kind == "now" else []
                if len(times) == 4:
                    break
        assert times == sorted(set(times))
        for sock in stalled:
            sock.close()


def test_a_mailbox_keeps_the_newest_of_each_kind() -> None:
    mailbox = Mailbox()
    for number in range(1000):
        mailbox.put("now", b"%d" % number)
        mailbox.put("story", b"s")
    assert mailbox._waiting == {"now": b"999", "story": b"s"}


def test_a_curve_of_days_has_a_bounded_number_of_points() -> None:
    curve = Curve()
    for second in range(200_000):
        curve.add({"at": float(second), "median_ms": 1.0, "p99_ms": 2.0, "own_ms": 0.5, "steps_s": 3.0})
    assert CURVE_MAX / 4 < len(curve.points) <= CURVE_MAX
    assert (curve.points[0][0], curve.points[-1][0] > 190_000) == (0.0, True)


def test_loads_of_days_have_a_bounded_number_of_points() -> None:
    curves = LoadCurves()
    told = now_of(view(1000, nodes=100))
    for second in range(0, 40_000, 5):
        curves.add({**told, "at": float(second)})
    assert len(curves.nodes) == LOAD_NODES_MAX
    points = curves.nodes["node0"]
    assert LOAD_POINTS_MAX / 4 < len(points) <= LOAD_POINTS_MAX
    assert (points[0], points[-1][0] > 39_000) == ((0.0, 37, 25.0, 94.0), True)


# --- what is read -----------------------------------------------------------------------------------------------------


def test_a_journal_is_read_as_it_grows_in_bounded_memory(tmp_path: Path) -> None:
    begins = {"time": 1.0, "monotonic": 1.0, "event": "begins", "member": "a#1", "run_id": "r", "endpoint": "e"}
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps(begins) + "\n" + '{"time": 2.0, "torn')
    tail = JournalTail(tmp_path)
    assert tail.read()
    assert [each["event"] for each in tail.events] == ["begins"]
    with path.open("a") as file:
        file.write("\nnot json\n")
        for number in range(3 * PROGRESS_MAX):
            steps = {"generation": 1, "ranks": [0], "steps": [number], "own_s": [0.0], "began_at": [-1], "at": [-1]}
            file.write(json.dumps({"time": 3.0 + number, "monotonic": 1.0, "event": "progress", **steps}) + "\n")
    assert tail.read()
    assert not tail.read()
    progress = [each for each in tail.events if each["event"] == "progress"]
    assert PROGRESS_MAX / 4 < len(progress) <= PROGRESS_MAX + 1
    assert progress[-1]["time"] > 2.5 * PROGRESS_MAX
    assert tail.events[0]["event"] == "begins"


def test_ten_thousand_ranks_fit_into_a_message() -> None:
    body = json.dumps(now_of(view(10_000, nodes=1250, hung=77)))
    assert len(body) < 1_500_000
    told = json.loads(body)
    assert (told["ranks"]["stage"], told["standing"]["77"][0]) == ("t" * 10_000, "hung")


def job_in(folder: Path, *events: dict[str, Any]) -> ShownJob:
    """The job whose journal has these events; it has been read."""
    lines = [json.dumps({"time": 1.0, "monotonic": 1.0, **each}) for each in events]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    source = ShownJob(str(folder), [folder])
    assert source.read()
    return source


def log_job(tmp_path: Path) -> ShownJob:
    for local_rank in range(2):
        (tmp_path / "attempt_0" / str(local_rank)).mkdir(parents=True)
        for stream in ("stdout", "stderr"):
            (tmp_path / "attempt_0" / str(local_rank) / f"{stream}.log").touch()
    begun = {"event": "generation", "generation": 1, "restart_count": 0, "rank_base": 4, "nproc": 2}
    return job_in(tmp_path, begun)


def test_logs_are_followed_filtered_and_searched(tmp_path: Path) -> None:
    source = log_job(tmp_path)
    out = tmp_path / "attempt_0" / "1" / "stdout.log"
    out.write_text("".join(f"step {number}\n" for number in range(3 * LINES_MAX)) + "half a li")
    everything, other = LogLines(source, frozenset(), 0, ""), LogLines(source, frozenset({4}), 0, "")
    told = everything.read()
    assert told is not None
    assert (told["generation"], told["left_out"], len(told["lines"])) == (1, 2 * LINES_MAX, LINES_MAX)
    assert told["lines"][-1] == (5, "stdout", f"step {3 * LINES_MAX - 1}", "")
    assert other.read() is None
    assert everything.read() is None
    with out.open("a") as file:
        file.write("ne\n\x1b[31m<b>\xff")
    found = everything.read()
    assert found is not None
    assert found["lines"] == [(5, "stdout", "half a line", "")]
    searched = LogLines(source, frozenset(), 1, "STEP 77").read()
    assert searched is not None
    assert {line[2][:7] for line in searched["lines"]} == {"step 77"}


def test_a_worker_that_writes_faster_than_a_page_reads_is_shown_at_its_newest_lines(tmp_path: Path) -> None:
    source = log_job(tmp_path)
    out = tmp_path / "attempt_0" / "1" / "stdout.log"
    lines = LogLines(source, frozenset(), 0, "")
    out.write_text("first\n")
    assert lines.read() is not None
    with out.open("a") as file:
        file.write("".join(f"{number:09}\n" for number in range(LAST_BYTES // 5)) + "newest\n")
    news = lines.read()
    assert news is not None
    assert news["lines"][-1] == (5, "stdout", "newest", "")
    assert LAST_BYTES / 2 < news["bytes_left_out"] < 2 * LAST_BYTES
    assert lines.read() is None


def test_a_log_that_grows_while_it_is_loaded_arrives_whole(tmp_path: Path) -> None:
    source, size = log_job(tmp_path), (16 << 20) + 7
    out = tmp_path / "attempt_0" / "0" / "stdout.log"
    out.write_bytes(b"x" * size)
    with served(source) as dashboard:
        visitor = dashboard.entered()
        connection = http.client.HTTPConnection(visitor.host, timeout=limit_s(20))
        connection.request("GET", f"/job/{source.title}/log/1/4/stdout", headers={"Cookie": visitor.cookie})
        answer = connection.getresponse()  # the rest waits until it is read
        with out.open("ab") as file:
            file.write(b"y" * size)
        body = answer.read()
        assert (len(body), body.strip(b"x")) == (size, b"")
        connection.close()


def test_a_run_folder_that_is_deleted_costs_only_what_was_in_it(tmp_path: Path) -> None:
    source = log_job(tmp_path)
    shutil.rmtree(tmp_path)
    load = Machine().load(source.folders[0])
    assert (load.disk_total_bytes, load.memory_total_bytes > load.memory_bytes > 0) == (0, True)


def test_names_that_are_no_text_are_shown_nevertheless(tmp_path: Path) -> None:
    source = job_in(tmp_path, {"event": "coordinator.quit", "drain": True, "by": "x\udcff"})
    assert json.loads(encoded(source.story()))["actions"][0]["by"] == "x\udcff"
    assert "x\\udcff" in render([tmp_path])


def test_an_object_store_is_not_asked_for_each_page(tmp_path: Path) -> None:
    saved = {"event": "snapshot", "path": "s3://bucket/run/step_000000120.0001", "step": 120, "took_s": 1.0}
    (shown,) = job_in(tmp_path, saved).story()["snapshots"]
    assert (shown["folder"], shown["newest"]["step"], shown["count"]) == ("s3://bucket/run", 120, None)


def test_metrics_of_many_snapshots_are_a_bounded_curve_that_ends_with_the_newest(tmp_path: Path) -> None:
    saved = {"event": "snapshot", "path": "s3://bucket/run/step", "took_s": 1.0}
    events = [{**saved, "step": step, "time": float(step), "metrics": {"loss": 1 / step}} for step in range(1, 3001)]
    metrics = job_in(tmp_path, {**saved, "step": 0}, *events).story()["metrics"]
    assert (metrics["names"], metrics["rows"][-1]) == (["loss"], [3000.0, 3000, 1 / 3000])
    assert METRIC_POINTS_MAX / 4 < len(metrics["rows"]) <= METRIC_POINTS_MAX


@pytest.mark.parametrize(("at", "counts"), [([-1, 7], False), ([7, 7], True)])
def test_steps_are_those_of_the_job_if_its_script_reports_them(tmp_path: Path, at: list[int], counts: bool) -> None:
    generation = {"event": "generation", "generation": 1, "restart_count": 0, "rank_base": 0, "nproc": 2}
    progress = {"event": "progress", "generation": 1, "steps": [5, 5], "began_at": [-1, -1], "at": at}
    assert job_in(tmp_path, {**generation, "world_size": 2}, progress).story()["counts_job"] is counts


def test_whole_logs_are_plain_text(tmp_path: Path) -> None:
    source = log_job(tmp_path)
    (tmp_path / "attempt_0" / "0" / "stdout.log").write_text("<script>alert(1)</script>\n")
    with served(source) as dashboard:
        visitor = dashboard.entered()
        base = f"/job/{source.title}"
        status, headers, body = visitor.ask("GET", f"{base}/log/1/4/stdout")
        assert (status, body) == (200, b"<script>alert(1)</script>\n")
        assert headers["content-type"].startswith("text/plain")
        for wrong in ("log/1/4/error", "log/2/4/stdout", "log/1/9/stdout", "log/1/4/..%2f..%2fevents.jsonl"):
            assert visitor.ask("GET", f"{base}/{wrong}")[0] == 404, wrong
        with visitor.stream(f"{base}/logs?ranks=4-5") as lines:
            assert next(lines)[1]["lines"] == [[4, "stdout", "<script>alert(1)</script>", ""]]
        assert visitor.ask("GET", f"{base}/logs?ranks=x")[0] == 409
        status, _, body = visitor.ask("GET", "/job/other/events")
        assert status == 404
        with visitor.stream(f"{base}/events") as events:
            until(lambda: next(events)[1].get("logs") == {"1": [4, 5]}, "the story names the logs")


def test_profiles_are_listed_and_no_other_file_is_served(tmp_path: Path) -> None:
    taken = tmp_path / "run" / "profiles" / "p-1"
    taken.mkdir(parents=True)
    (taken / "rank0.trace.json").write_text("{}")
    (taken / "rank0.operations.txt").write_text("<b>aten::mm</b>")
    event = {"event": "profile", "generation": 1, "name": "p-1", "rank": 0}
    asked = {**event, "event": "coordinator.profile_asked", "ranks": [0, 1], "by": "somebody", "steps": 5, "for_s": 0.0}
    story = job_in(tmp_path / "run", asked, {**event, "files": ["/elsewhere/rank0.trace.json"]}).story()
    assert [(each["name"], each["rank"], each["files"]) for each in story["profiles"]] == [
        ("p-1", 0, ["rank0.trace.json"])
    ]
    assert [(each["what"], each["by"]) for each in story["actions"]] == [("profile 0-1", "somebody")]
    job = MadeUpJob(view(), STORY)
    job.add_folder(tmp_path / "run")
    with served(job) as dashboard:
        visitor = dashboard.entered()
        status, headers, text = visitor.ask("GET", "/job/made-up/profile/p-1/rank0.operations.txt")
        assert (status, headers["content-type"].split(";")[0], text) == (200, "text/plain", b"<b>aten::mm</b>")
        assert visitor.ask("GET", "/job/made-up/profile/p-1/rank0.trace.json")[0] == 200
        for path in (
            "p-1/rank9.trace.json",
            "../events.jsonl",
            "..%2F..%2Frun/events.jsonl",
            "p-1/..%2F..%2Fevents.jsonl",
        ):
            assert visitor.ask("GET", f"/job/made-up/profile/{path}")[0] == 404, path


async def test_the_last_story_has_what_came_after_the_last_look(tmp_path: Path) -> None:
    """What ended the job is newer than that."""
    begun = {"event": "generation", "generation": 1, "restart_count": 0, "rank_base": 0, "nproc": 1}
    source = job_in(tmp_path, begun)
    feed = JobFeed(source)
    ended = {"time": 2.0, "monotonic": 2.0, "event": "coordinator.verdict", "generation": 1}
    ended |= {"code": "HF201", "cause": "rank 0: ValueError: boom", "advice": ""}
    with (tmp_path / "events.jsonl").open("a") as journal:
        journal.write(json.dumps(ended) + "\n")
    await feed.finish(Outcome(kind=OutcomeKind.FAILED, exit_code=1))
    assert "ValueError: boom" in feed._newest["story"].decode()


def test_an_ended_job_says_that_this_was_all(tmp_path: Path) -> None:
    source = log_job(tmp_path)
    (tmp_path / "attempt_0" / "0" / "stdout.log").write_text("last words\n")
    with served(source) as dashboard:
        visitor = dashboard.entered()
        base = f"/job/{source.title}"
        source.outcome = Outcome(kind=OutcomeKind.SUCCEEDED, exit_code=0)
        with visitor.stream(f"{base}/events") as events:
            kinds = []
            while not kinds or kinds[-1] != "end":
                kinds.append(next(events)[0])
        assert {"now", "story"} <= set(kinds)
        with visitor.stream(f"{base}/logs") as lines:
            assert [kind for kind, _ in lines] == ["", "end"]
