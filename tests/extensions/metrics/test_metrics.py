"""The server for whoever watches: bounded, in a thread of its own, answering while the agent's loop stands still."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.extensions.metrics import node as node_module
from holdfast.extensions.metrics import server as module
from holdfast.extensions.metrics.exposition import Metrics
from holdfast.extensions.metrics.server import HttpResponse, Server
from holdfast.extensions.metrics.vitals import STALL_S, STEP_WINDOW_S, Vitals, VitalsSample, health
from holdfast.listening import bind_named
from holdfast.protocol.errors import MissingPackageError, PortInUseError
from holdfast.protocol.options import Endpoint
from holdfast.protocol.rank_progress import JobView, NodeView, RankProgress, Stage
from tests.support.limits import limit_s

BIG = 50_000_000
"""Bytes; no buffer on the way has room for them."""


Serve = Callable[[module.Pages], int]
"""Serves these pages; returns the port."""


@pytest.fixture
def served() -> Iterator[Serve]:
    made: list[Server] = []

    def serve(pages: module.Pages) -> int:
        sock = bind_named(Endpoint(host="127.0.0.1", port=0), "--x")
        server = Server([(sock, pages)])
        server.start()
        made.append(server)
        port: int = sock.getsockname()[1]
        return port

    yield serve
    for server in made:
        server.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "holdfast-observing"]


def talk(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), limit_s(5)) as sock:
        sock.sendall(request)
        answer = b""
        while more := sock.recv(65536):
            answer += more
        return answer


def ok() -> HttpResponse:
    return HttpResponse(200, "text/plain", b"fine")


def test_get_and_head(served: Serve) -> None:
    port = served({"/a": ok})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/a?x=1", timeout=limit_s(5)) as answer:
        assert (answer.status, answer.read(), answer.headers["Content-Type"]) == (200, b"fine", "text/plain")
    head = talk(port, b"HEAD /a HTTP/1.1\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: 4\r\n" in head
    assert head.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /b HTTP/1.1\r\n\r\n", 404),
        (b"GET /a/../a HTTP/1.1\r\n\r\n", 404),
        (b"POST /a HTTP/1.1\r\n\r\n", 405),
        (b"nonsense\r\n\r\n", 400),
        (b"GET /a FTP/1.1\r\n\r\n", 400),
        (b"\xff\x00\xfe\r\n\r\n", 400),
        (b"GET /" + b"a" * 3 * module.REQUEST_BYTES_MAX, 400),
    ],
)
def test_bad_requests(served: Serve, request_: bytes, status: int) -> None:
    assert f" {status} ".encode() in talk(served({"/a": ok}), request_).partition(b"\r\n")[0]


def test_who_says_nothing_is_hung_up_on_and_keeps_nobody_waiting(
    served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REQUEST_S_MAX", limit_s(1))
    port = served({"/a": ok})
    with socket.create_connection(("127.0.0.1", port), limit_s(5)) as silent:
        silent.sendall(b"GET /a")
        assert talk(port, b"GET /a HTTP/1.1\r\n\r\n").endswith(b"fine")
        assert silent.recv(1) == b""


def test_silent_connections_keep_no_health_check_out(served: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest ones make room; how long each may be silent does not matter."""
    monkeypatch.setattr(module, "REQUEST_S_MAX", limit_s(60))
    port = served({"/a": ok})
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), limit_s(5)))
            for _ in range(module.CONNECTIONS_MAX)
        ]
        for _ in range(3):
            assert talk(port, b"GET /a HTTP/1.1\r\n\r\n").endswith(b"fine")
        with contextlib.suppress(ConnectionResetError):
            assert silent[0].recv(1) == b""
        silent[-1].sendall(b"GET /a HTTP/1.1\r\n\r\n")
        assert silent[-1].recv(8) == b"HTTP/1.1", "the newest ones have stayed"


def test_a_reader_that_stalls_is_cut_off(served: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_S_MAX", limit_s(1))
    port = served({"/big": lambda: HttpResponse(200, "text/plain", b"x" * BIG), "/a": ok})
    with socket.create_connection(("127.0.0.1", port), limit_s(5)) as stalled:
        stalled.sendall(b"GET /big HTTP/1.1\r\n\r\n")
        assert stalled.recv(1) == b"H"
        assert talk(port, b"GET /a HTTP/1.1\r\n\r\n").endswith(b"fine")
        time.sleep(3 * module.REQUEST_S_MAX)  # longer than anybody waits
        got = 1
        with contextlib.suppress(ConnectionResetError):
            while more := stalled.recv(1_000_000):
                got += len(more)
        assert got < BIG


def test_a_port_that_is_taken() -> None:
    first = bind_named(Endpoint(host="127.0.0.1", port=0), "--x")
    with pytest.raises(PortInUseError, match=r"--metrics: cannot listen on 127.0.0.1:\d+: Address already in use"):
        bind_named(Endpoint(host="127.0.0.1", port=first.getsockname()[1]), "--metrics")
    first.close()
    with pytest.raises(PortInUseError, match=r"cannot listen on no\.such\.host\.invalid"):
        bind_named(Endpoint(host="no.such.host.invalid", port=0), "--metrics")


def test_a_page_that_fails_is_told_to_who_asked(served: Serve) -> None:
    def broken() -> module.HttpResponse:
        raise KeyError("x")

    port = served({"/": broken})
    text = talk(port, b"GET / HTTP/1.0\r\n\r\n")
    assert text.startswith(b"HTTP/1.1 500 ")
    assert text.endswith(b"KeyError: 'x'\n")


# --- what metrics and health checks are told, from the journal's events and looks at the workers ----------------------


GENERATION = {"restart_count": 0, "world_size": 4, "rank_base": 2, "nproc": 2}


def unexpected(what: str, error: Exception) -> None:
    raise AssertionError(what) from error


def with_vitals(play: Callable[[Vitals, dict[str, Any]], None], job: JobView | None = None) -> VitalsSample:
    """`play` gets the vitals and a table by which it says how far the workers are."""
    world: dict[str, Any] = {"now": 0.0, "ranks": ()}

    async def scenario() -> VitalsSample:
        vitals = Vitals("run", "a", lambda: world["ranks"], lambda: job, unexpected)
        vitals._loop = type("Clock", (), {"time": staticmethod(lambda: world["now"])})()  # type: ignore[assignment]
        play(vitals, world)
        return vitals.facts

    return asyncio.run(scenario())


def ranks(*steps: int, own_s: float = 0.0) -> tuple[RankProgress, ...]:
    return tuple(RankProgress(rank, Stage.STEPPING, number, 0.5, own_s) for rank, number in enumerate(steps))


def test_steps_count_on_over_generations_and_their_duration_is_of_this_one() -> None:
    def play(vitals: Vitals, world: dict[str, Any]) -> None:
        vitals.heard("generation", {"generation": 1, **GENERATION})
        world["ranks"] = ranks(100, 90, own_s=5.0)
        vitals._gather()
        vitals.heard("generation", {"generation": 2, **GENERATION, "restart_count": 1})
        world |= {"now": 10.0, "ranks": ranks(0, 0)}
        vitals._gather()
        world |= {"now": 14.0, "ranks": ranks(8, 0, own_s=1.0)}
        vitals._gather()

    facts = with_vitals(play)
    assert [(each.rank, each.steps_total, each.own_s_total, each.step_s) for each in facts.ranks] == [
        (2, 108, 6.0, 0.5),
        (3, 90, 6.0, None),
    ]
    assert (facts.generation, facts.restart_count, facts.world_size) == (2, 1, 4)


def test_workers_that_go_on_are_alive_with_their_new_ranks() -> None:
    def play(vitals: Vitals, world: dict[str, Any]) -> None:
        vitals.heard("generation", {"generation": 1, **GENERATION, "nproc": 3})
        for _ in range(3):
            vitals.heard("worker_started", {})
        world["ranks"] = ranks(100, 90, 80)
        vitals._gather()
        vitals.heard("worker_ended", {"exit_code": -9})
        vitals.heard("generation", {"generation": 2, **GENERATION, "local_ranks": [0, 2], "folders": []})
        world["ranks"] = tuple(each for each in ranks(4, 0, 5) if each.local_rank != 1)
        vitals._gather()

    facts = with_vitals(play)
    assert (facts.alive, facts.wanted, facts.regroups) == (2, 2, 1)
    assert [(each.local_rank, each.rank, each.steps_total) for each in facts.ranks] == [(0, 2, 104), (2, 3, 85)]


def test_a_worker_whose_rank_is_not_known_yet_is_left_out() -> None:
    """A replacement makes steps a moment before the event of its generation; another rank's number would be wrong."""

    def play(vitals: Vitals, world: dict[str, Any]) -> None:
        vitals.heard("generation", {"generation": 1, **GENERATION})
        vitals.heard("generation", {"generation": 2, **GENERATION, "local_ranks": [1], "folders": []})
        world["ranks"] = ranks(5, 90)
        vitals._gather()

    assert [(each.local_rank, each.rank) for each in with_vitals(play).ranks] == [(1, 2)]


def test_a_spare_has_no_steps_that_could_be_old() -> None:
    def play(vitals: Vitals, world: dict[str, Any]) -> None:
        vitals.heard("generation", {"generation": 1, **GENERATION})
        world["ranks"] = ranks(100, 90)
        vitals._gather()
        vitals.heard("generation", {"generation": 2, **GENERATION, "local_ranks": [0, 1], "folders": []})
        world["ranks"] = (ranks(5)[0], RankProgress(1, Stage.SPARE, 0, 70.0))
        vitals._gather()
        vitals.heard("generation", {"generation": 3, **GENERATION, "local_ranks": [0, 1], "folders": []})
        world["ranks"] = ranks(1, 1)
        vitals._gather()

    assert [(each.local_rank, each.steps_total) for each in with_vitals(play).ranks] == [(0, 106), (1, 91)]


def test_a_steps_duration_is_of_the_last_half_minute() -> None:
    def play(vitals: Vitals, world: dict[str, Any]) -> None:
        vitals.heard("generation", {"generation": 1, **GENERATION})
        for second in range(100):
            world |= {"now": float(second), "ranks": ranks(second if second < 60 else 60 + (second - 60) // 2)}
            vitals._gather()

    (rank,) = with_vitals(play).ranks
    assert rank.step_s == pytest.approx(2.0, rel=2 / STEP_WINDOW_S)


def test_workers_come_and_go() -> None:
    def play(vitals: Vitals, world: dict[str, Any]) -> None:
        vitals.heard("generation", {"generation": 1, **GENERATION})
        for _ in range(2):
            vitals.heard("worker_started", {})
        vitals.heard("worker_ended", {"exit_code": -9})
        vitals.heard("coordinator.verdict", {"code": "HF204"})
        vitals.heard("phases", {"form_s": 1.0, "spawn_s": 0.5, "until_monotonic": 9.0})
        vitals.heard("something.else", {})
        vitals._gather()

    facts = with_vitals(play)
    assert (facts.alive, facts.wanted, facts.exits, facts.failures) == (1, 2, {"-9": 1}, {"HF204": 1})
    assert facts.phases_s == {"form": 1.0, "spawn": 0.5}


FACTS = VitalsSample(taken_s=100.0, run_id="r", node="a", wanted=2, alive=2)


@pytest.mark.parametrize(
    ("facts", "now_s", "status", "alive", "ready"),
    [
        (FACTS, 101.0, "ok", True, True),
        (VitalsSample(taken_s=100.0, run_id="r", node="a"), 101.0, "ok", True, False),
        (VitalsSample(taken_s=100.0, run_id="r", node="a", wanted=2, alive=1), 101.0, "ok", True, False),
        (FACTS, 101.0 + STALL_S, "stalled", False, False),
        (VitalsSample(taken_s=100.0, run_id="r", node="a", ended="failed", exit_code=1), 101.0, "failed", False, False),
        (VitalsSample(taken_s=100.0, run_id="r", node="a", ended="succeeded"), 101.0, "succeeded", True, False),
    ],
)
def test_health(facts: VitalsSample, now_s: float, status: str, alive: bool, ready: bool) -> None:
    told = health(facts, now_s)
    assert (told["status"], told["alive"], told["ready"]) == (status, alive, ready)


def test_metrics_parse_and_hold_the_facts() -> None:
    node = NodeView(member="a#1", host="a", group_rank=0, state="running", heard_s=0.25)
    job = JobView(
        run_id="r", phase="running", generation=1, restarts=1, restarts_max=3, world_size=4, since_s=1.0, job_s=20.0,
        training_s=15.0, nodes=(node,), notices=("slow",), nodes_min=1, nodes_max=3, nodes_wanted=4, left_s=60.0,
    )  # fmt: skip

    def play(vitals: Vitals, world: dict[str, Any]) -> None:
        vitals.heard("generation", {"generation": 1, **GENERATION})
        vitals.heard("worker_ended", {"exit_code": 1})
        vitals.heard("coordinator.verdict", {"code": "HF201"})
        for rank, why in ((0, ""), (1, "cut"), (-1, "late")):
            vitals.heard("snapshot_copy", {"rank": rank, "why": why, "size_bytes": 0 if why else 9, "took_s": 0.5})
        world["ranks"] = ranks(7, 8, own_s=2.0)
        vitals._gather()

    facts = with_vitals(play, job)
    text = Metrics(lambda: facts).text().decode()
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["holdfast_steps_total", "0", "2"] == 7
    assert samples["holdfast_own_seconds_total", "1", "3"] == 2.0
    assert samples["holdfast_worker_exits_total", "1"] == 1
    assert samples["holdfast_job_failures_total", "HF201"] == 1
    assert samples["holdfast_job_nodes", "running"] == 1
    wanted = {name: samples[f"holdfast_job_{name}",] for name in ("nodes_min", "nodes_wanted", "left_seconds")}
    assert wanted == {"nodes_min": 1, "nodes_wanted": 4, "left_seconds": 60.0}
    assert samples["holdfast_job_training_seconds_total",] == 15.0
    assert samples["holdfast_job_restarts_left",] == 2
    assert samples["holdfast_agent_info", "0.1.0", "a", "run"] == 1
    assert [samples["holdfast_copies_total", each] for each in ("sent", "failed", "skipped")] == [1, 1, 1]
    assert (samples["holdfast_copies_bytes_total",], samples["holdfast_copies_seconds_total",]) == (9, 1.5)


def test_vitals_that_fail_say_so_once_and_beat_on() -> None:
    faults: list[str] = []

    async def scenario() -> VitalsSample:
        vitals = Vitals("run", "a", lambda: 1 / 0, lambda: None, lambda what, error: faults.append(f"{what}: {error}"))  # type: ignore[arg-type, return-value]
        before = vitals.facts
        vitals.start()
        vitals._beat()
        assert vitals.facts.taken_s >= before.taken_s
        assert vitals.facts is not before, "the agent is alive"
        vitals.close()
        return vitals.facts

    asyncio.run(scenario())
    assert faults == ["vitals: division by zero"]


def test_a_metrics_library_that_is_broken_is_said_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "prometheus_client"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "holdfast.extensions.metrics.exposition", raising=False)
    (tmp_path / "prometheus_client.py").write_text("raise RuntimeError('built for another Python')")
    monkeypatch.syspath_prepend(str(tmp_path))
    vitals: Any = None
    with pytest.raises(MissingPackageError, match=r"\(RuntimeError: built for another Python\): pip install"):
        node_module.metrics_pages(vitals)
