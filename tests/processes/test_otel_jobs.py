"""`--otel`: what a real OTLP/HTTP receiver gets of a job, and that a receiver which fails costs the job nothing."""

from __future__ import annotations

import gzip
import os
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.processes.conftest import JobFolder

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed: pip install 'holdfast[otel]'")

STANDALONE = ("--standalone", "--nproc-per-node=2")
PATIENT = "from holdfast.extensions.otel import exporter\nexporter.CLOSE_S_MAX = 120.0"
"""The end of the job waits for the last spans, however slow the machine is."""
FAILS_ONCE = "meet()\nif ROUND == 0:\n    raise ValueError('a bad batch') if RANK == 1 else hold()"


class Receiver(ThreadingHTTPServer):
    """Takes spans as a collector does. `requests`: paths and decoded spans, each with its resource's attributes."""

    def __init__(self, answer: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.paths: list[str] = []
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(values(resource.resource.attributes))
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.paths.append(self.path)
        if self.server.answer == 200:
            self.server.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
        self.send_response(self.server.answer)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing on the console of the tests."""


def values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    thread = Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def test_each_generation_is_a_span_with_what_ended_it_and_what_it_restarted(
    job_folder: JobFolder, receiver: Receiver
) -> None:
    line = (*STANDALONE, "--max-restarts=1", "--rdzv-id=r", "--otel", receiver.url, job_folder.script(FAILS_ONCE))
    job_folder.ends(0, *line, program=job_folder.changed(PATIENT))
    first, second, run = receiver.spans
    assert [each.name for each in receiver.spans] == ["generation 1", "generation 2", "run"]
    assert set(receiver.paths) == {"/v1/traces"}
    assert len({each.trace_id for each in receiver.spans}) == 1
    assert (run.parent_span_id, first.parent_span_id, second.parent_span_id) == (b"", run.span_id, run.span_id)
    assert run.start_time_unix_nano <= first.start_time_unix_nano < first.end_time_unix_nano
    assert first.end_time_unix_nano <= second.start_time_unix_nano < second.end_time_unix_nano
    assert second.end_time_unix_nano <= run.end_time_unix_nano
    ended, restarted = values(first.attributes), values(second.attributes)
    assert ended["holdfast.run_id"] == "r"
    assert (ended["holdfast.world_size"], ended["holdfast.nodes"]) == (2, 1)
    assert (ended["holdfast.end.reason"], ended["holdfast.end.code"]) == ("worker_failed", "HF201")
    assert "a bad batch" in ended["holdfast.end.cause"]
    assert {name: restarted[f"holdfast.restart.{name}"] for name in ("reason", "code", "cause")} == {
        name: ended[f"holdfast.end.{name}"] for name in ("reason", "code", "cause")
    }
    error, ok = 2, 1
    assert [each.status.code for each in receiver.spans] == [error, ok, ok]
    assert values(run.attributes)["holdfast.exit_code"] == 0
    assert receiver.resources[0]["service.name"] == "holdfast"


def test_a_job_that_fails_is_a_run_with_an_error(job_folder: JobFolder, receiver: Receiver) -> None:
    env = {"OTEL_SERVICE_NAME": "bert", "OTEL_RESOURCE_ATTRIBUTES": "team=a"}
    script = job_folder.script("raise ValueError('a bad batch')")
    line = (*STANDALONE, f"--otel={receiver.url}/taken/here", script)
    agent = job_folder.ends(1, *line, env={**os.environ, **env}, program=job_folder.changed(PATIENT))
    generation, run = receiver.spans
    for span in (generation, run):
        assert values(span.attributes)["holdfast.end.code"] == "HF201"
        assert "a bad batch" in span.status.message
    assert values(run.attributes)["holdfast.exit_code"] == 1
    assert set(receiver.paths) == {"/taken/here"}
    assert {(each["service.name"], each["team"]) for each in receiver.resources} == {("bert", "a")}
    assert agent.events("span_lost") == []


@pytest.mark.parametrize("kind", ["silent", "absent", "refusing"])
def test_a_receiver_that_takes_nothing_is_in_the_journal_and_ends_no_job(
    job_folder: JobFolder, receiver: Receiver, kind: str
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if kind == "silent":
            silent.listen()  # connections are made, and nobody reads them
        receiver.answer = 400
        url = receiver.url if kind == "refusing" else f"http://127.0.0.1:{silent.getsockname()[1]}"
        agent = job_folder.ends(0, *STANDALONE, "--otel", url, job_folder.script("meet()"))
    assert len(job_folder.trail("up")) == 2
    assert agent.events("span_lost"), agent.events()
    assert "opentelemetry" not in agent.text.lower()


def test_without_the_extra_the_job_is_refused_in_one_line(job_folder: JobFolder, tmp_path: Path) -> None:
    (tmp_path / "lacking" / "opentelemetry").mkdir(parents=True)
    (tmp_path / "lacking" / "opentelemetry" / "__init__.py").touch()
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "lacking")}
    agent = job_folder.ends(2, *STANDALONE, "--otel=http://127.0.0.1:1", job_folder.script("meet()"), env=env)
    assert agent.text.count("\n") == 1
    assert agent.text.startswith("holdfast: HF")
    assert "pip install 'holdfast[otel]'" in agent.text
    assert job_folder.trail() == []


def test_a_broken_package_is_in_the_journal_and_ends_no_job(job_folder: JobFolder, tmp_path: Path) -> None:
    folder = tmp_path / "broken" / "opentelemetry"
    for name in ("", "sdk", "exporter", "exporter/otlp", "exporter/otlp/proto", "exporter/otlp/proto/http"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()  # nothing of another folder is found below it then
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "broken")}
    agent = job_folder.ends(0, *STANDALONE, "--otel=http://127.0.0.1:1", job_folder.script("meet()"), env=env)
    (lost,) = agent.events("span_lost")
    assert lost["span"] == "all"
    assert lost["why"].startswith("ModuleNotFoundError")
    assert "Traceback" not in agent.text


def test_a_receiver_that_is_no_url_is_refused(job_folder: JobFolder) -> None:
    agent = job_folder.ends(2, *STANDALONE, "--otel=collector:4318", job_folder.script("meet()"))
    assert "must be the URL of an OTLP/HTTP receiver" in agent.text
