"""What a job shows: the workers' output on the console and in files, metrics, health, events."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from holdfast.diagnosis.reference import problems
from tests.processes.conftest import c10d, coordinators_first
from tests.support.limits import limit_s, until

LINES = "for n in range(20000): print(f'{RANK} {n} ' + 'x' * 80)\n"


def written(agent, rank: int) -> list[str]:
    return (agent.folder / "attempt_0" / str(rank) / "stdout.log").read_text().splitlines()


def test_every_line_on_the_console_and_in_the_files(job_folder) -> None:
    script = job_folder.script(LINES)
    agent = job_folder.ends(0, "--standalone", "--nproc-per-node", "2", "--tee", "3", script)
    shown = agent.text.splitlines()
    for rank in range(2):
        wanted = [f"{rank} {n} " + "x" * 80 for n in range(20000)]
        assert written(agent, rank) == wanted
        assert [line.partition(":")[2] for line in shown if line.startswith(f"[default{rank}]:")] == wanted
    assert len(shown) == 40000


def piped(job_folder, *args) -> tuple[Any, int]:
    """A job whose console is a pipe, and the end of the pipe from which it is read."""
    read_end, write_end = os.pipe()
    agent = job_folder.start("--standalone", *args, stdout=write_end)
    os.close(write_end)
    return agent, read_end


def test_a_pipe_that_nobody_reads_holds_up_nobody(job_folder) -> None:
    """The workers end and their files are complete while the console is blocked; then somebody reads, and gets it all."""
    script = job_folder.script(LINES + "sys.stdout.flush()\nnote('end')")
    agent, read_end = piped(job_folder, "--nproc-per-node", "2", script)
    job_folder.wait(2, "end")
    until(lambda: [len(written(agent, rank)) for rank in range(2)] == [20000, 20000], "the files are complete")
    with os.fdopen(read_end, "rb") as pipe:
        assert len(pipe.read().splitlines()) == 40000
    assert agent.end() == 0


def test_an_interrupt_while_the_console_is_blocked_at_the_end(job_folder) -> None:
    script = job_folder.script(LINES + "sys.stdout.flush()\nnote('end')")
    agent, read_end = piped(job_folder, script)
    job_folder.wait(1, "end")
    until(lambda: "ended" in names(agent), "the end of the job, and not of its worker")
    agent.signal(signal.SIGINT)
    assert agent.end() == 130, "it waited until nobody read, and not until it was interrupted"
    os.close(read_end)


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_for_workers_that_have_ended_does_not_end_the_agent(job_folder, signum: int) -> None:
    """Such as the notice of a preemption while the end of a job is being shown."""
    script = job_folder.script(LINES + "sys.stdout.flush()\nnote('end')")
    agent, read_end = piped(job_folder, "--preempt-signal", "USR1", script)
    job_folder.wait(1, "end")
    until(lambda: "ended" in names(agent), "the end of the job, and not of its worker")
    agent.signal(signum)
    with os.fdopen(read_end, "rb") as pipe:
        assert len(pipe.read().splitlines()) == 20000
    assert agent.end() == 0


def test_a_blocked_console_does_not_hold_up_a_restart(job_folder) -> None:
    script = job_folder.script(
        LINES + "sys.stdout.flush()\nmeet()\nif ROUND == 0:\n  if RANK == 1: sys.exit(1)\n  hold()\nnote('end')"
    )
    agent, read_end = piped(job_folder, "--nproc-per-node", "2", "--max-restarts", "1", script)
    job_folder.wait(2, "end")
    with os.fdopen(read_end, "rb") as pipe:
        text = pipe.read().decode()
    assert agent.end() == 0
    shown = [line for line in text.splitlines() if "x" * 80 in line]
    reports = [line for line in shown if line.startswith("holdfast:")]
    assert len(shown) - len(reports) == 80000
    assert len(reports) <= 1, "only the report of the failure repeats the worker's last line"


def test_a_reader_that_goes_away(job_folder) -> None:
    """`holdfast run … | head -1`: the job goes on, its files are complete, its exit code is its own."""
    script = job_folder.script("print('first', flush=True)\nmeet()\n" + LINES + "sys.exit(3)")
    agent, read_end = piped(job_folder, script)
    os.read(read_end, 1)
    os.close(read_end)
    assert agent.end() == 3
    assert len(written(agent, 0)) == 20001


def test_all_that_a_killed_worker_wrote_is_in_its_file(job_folder) -> None:
    script = job_folder.script("os.write(1, b'y' * 100_000 + b'\\nlast words')\nos.kill(os.getpid(), signal.SIGKILL)")
    agent = job_folder.ends(137, "--standalone", script)
    assert (agent.folder / "attempt_0" / "0" / "stdout.log").read_bytes() == b"y" * 100_000 + b"\nlast words"
    assert "last words" in agent.text


def test_all_is_in_the_file_when_the_agent_is_killed(job_folder) -> None:
    script = job_folder.script("os.write(1, b'written\\n')\nmeet()\nhold()")
    agent = job_folder.start("--standalone", "--nproc-per-node", "2", script)
    job_folder.wait(2, "up")
    agent.signal(signal.SIGKILL)
    agent.end()
    # Its supervisor writes what the agent had not yet moved.
    until(lambda: [written(agent, rank) for rank in range(2)] == [["written"]] * 2, "both files have it")
    job_folder.all_gone()


@pytest.mark.parametrize("preload", ["none", "json"], ids=["executed", "forked"])
def test_on_a_terminal_workers_see_one(job_folder, preload: str) -> None:
    script = job_folder.script(
        "note('tty', out=os.isatty(1), err=os.isatty(2))\nprint('line')\nprint('bar', end='\\r')"
    )
    ours, theirs = pty.openpty()
    options = ("--standalone", "--no-dedup", f"--preload={preload}", "--nproc-per-node", "2")
    agent = job_folder.start(*options, script, stdout=theirs)
    os.close(theirs)
    seen = b""
    end = time.monotonic() + limit_s(20)
    while time.monotonic() < end:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the last who had the other end is gone
            break
        if not piece:
            break
        seen += piece
    os.close(ours)
    assert agent.end() == 0
    assert [(each["out"], each["err"]) for each in job_folder.trail("tty")] == [(True, True)] * 2
    assert seen.count(b"line") == 2, seen
    assert b"preload" not in seen, "the fork server says when it cannot fork"
    assert b"line" in (agent.folder / "attempt_0" / "0" / "stdout.log").read_bytes()


# --- metrics and health: served while the job runs, 503 while an agent stands still, nothing started without the port ------


def ask(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=limit_s(5)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def address_of(agent: Any, what: str) -> str:
    until(lambda: agent.begun and agent.events("serving"), lambda: agent.text)
    return next(each["address"] for each in agent.events("serving") if what in each["what"])


def test_one_port_for_both(job_folder) -> None:
    agent = job_folder.start(
        "--standalone", "--nproc-per-node", "2", "--metrics", "0", "--health", "0", job_folder.script("meet(); hold()")
    )
    job_folder.wait(2, "up")
    (serving,) = until(lambda: agent.events("serving"), lambda: agent.text)
    assert serving["what"] == ["metrics", "health"]
    agent.says(f"metrics and health at http://{serving['address']}")
    assert serving["address"].startswith("127.0.0.1:")
    until(lambda: ask(serving["address"], "/readyz")[0] == 200, lambda: agent.text)
    status, text = ask(serving["address"], "/metrics")
    assert status == 200
    assert "holdfast_workers 2.0" in text
    assert json.loads(ask(serving["address"], "/healthz")[1])["workers"] == 2
    assert ask(serving["address"], "/nothing")[0] == 404
    agent.signal(signal.SIGTERM)
    assert agent.end() == 143
    assert "Traceback" not in agent.text


def test_torchruns_variable(job_folder, free_port) -> None:
    port = free_port()
    script = job_folder.script("meet(); hold()")
    agent = job_folder.start("--standalone", script, env={"TORCHELASTIC_HEALTH_CHECK_PORT": str(port)})
    job_folder.wait(1, "up")
    assert ask(f"127.0.0.1:{port}", "/health")[0] == 200
    other = job_folder.start("--standalone", script, env={"TORCHELASTIC_HEALTH_CHECK_PORT": str(port)})
    job_folder.wait(2, "up")
    other.says("no health check is served (TORCHELASTIC_HEALTH_CHECK_PORT)")
    for each in (agent, other):
        each.signal(signal.SIGTERM)
        each.end()


def test_a_port_that_is_taken_starts_nothing(job_folder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option in ("--metrics", "--health"):
            agent = job_folder.ends(2, "--standalone", option, str(port), job_folder.script("note('up')"))
            assert f"HF109: {option}: cannot listen on 127.0.0.1:{port}: Address already in use" in agent.text
            assert len(agent.text.splitlines()) == 1, agent.text
    assert not job_folder.trail()


def test_a_bad_port_in_torchruns_variable(job_folder) -> None:
    agent = job_folder.ends(0, "--standalone", job_folder.script(""), env={"TORCHELASTIC_HEALTH_CHECK_PORT": "http"})
    assert "TORCHELASTIC_HEALTH_CHECK_PORT=http is not a port" in agent.text


def test_without_the_package(job_folder, tmp_path: Path) -> None:
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "prometheus_client.py").write_text("raise ModuleNotFoundError('no', name='prometheus_client')")
    path = os.pathsep.join([str(tmp_path / "hide"), *filter(None, [os.environ.get("PYTHONPATH")])])
    agent = job_folder.ends(
        2, "--standalone", "--metrics", "0", job_folder.script("note('up')"), env={"PYTHONPATH": path}
    )
    assert "HF117: --metrics needs prometheus-client: pip install 'holdfast[metrics]'" in agent.text
    assert not job_folder.trail()


STALLS = """
import time
from holdfast.extensions.metrics import vitals
vitals.STALL_S = 0.5
import holdfast.runtime.agent_service as agents
begun = agents.AgentService.view
def view(self):
    import os
    while os.path.exists(os.environ["STALL"]):
        time.sleep(0.05)
    return begun(self)
agents.AgentService.view = view
"""


def test_an_agent_that_stands_still_is_answered_for(job_folder, tmp_path: Path) -> None:
    stall = tmp_path / "stall"
    agent = job_folder.start(
        "--standalone", "--health", "0", job_folder.script("meet(); hold()"),
        env={"STALL": str(stall)}, program=job_folder.changed(STALLS),
    )  # fmt: skip
    job_folder.wait(1, "up")
    address = address_of(agent, "health")
    until(lambda: ask(address, "/livez")[0] == 200, lambda: agent.text)
    stall.touch()
    until(lambda: ask(address, "/livez")[0] == 503, lambda: agent.text)
    assert json.loads(ask(address, "/livez")[1])["status"] == "stalled"
    stall.unlink()
    until(lambda: ask(address, "/livez")[0] == 200, lambda: agent.text)
    agent.signal(signal.SIGTERM)
    agent.end()


def test_nothing_is_loaded_when_nobody_watches(job_folder) -> None:
    program = job_folder.program(
        "import sys\nfrom holdfast.run import main\ncode = main()\n"
        "print('loaded', sorted(name for name in sys.modules if name.startswith(('prometheus', 'holdfast.extensions.metrics'))))\n"
        "sys.exit(code)\n"
    )
    agent = job_folder.ends(0, "--standalone", job_folder.script(""), program=program)
    assert "loaded []" in agent.text


# --- events.jsonl: every record is what the table of events says ------------------------------------------------------


FAILS_ONCE = """
note("up")
if RANK == 1 and ROUND == 0:
    raise ValueError("first\\nsecond")
"""


def wrong(job_folder) -> list[str]:
    """In the journals of all agents."""
    journals = [agent.folder / "events.jsonl" for agent in job_folder.agents]
    records = [json.loads(line) for path in journals for line in path.read_text().splitlines()]
    assert records
    return [problem for record in records for problem in problems(record)]


def names(agent) -> list[str]:
    return [each["event"] for each in agent.events()]


def test_a_job_that_restarts(job_folder) -> None:
    agent = job_folder.ends(
        0, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", job_folder.script(FAILS_ONCE)
    )
    assert wrong(job_folder) == []
    (failed,) = (each for each in agent.events("worker_failed") if not each["after_stop"])
    assert (failed["rank"], failed["generation"], failed["error_type"]) == (1, 1, "ValueError")
    assert failed["message"] == "ValueError: first"
    first, second = agent.events("generation")
    assert (first["generation"], second["generation"], second["restart_count"]) == (1, 2, 1)
    assert {each["generation"] for each in agent.events("worker_started")} == {1, 2}
    assert names(agent)[0] == "begins"
    assert names(agent)[-1] == "ended"


def test_two_nodes_of_which_one_leaves(job_folder, endpoint: str) -> None:
    stays = "note('up')\nwhile not notes('go'): time.sleep(0.01)\n"
    line = c10d(endpoint, "1:2", "--rdzv-conf", "settle=20", "--max-restarts", "3")
    agents = [job_folder.start(*line, job_folder.script(stays)) for _ in range(2)]
    job_folder.wait(2, "up")
    here, other = coordinators_first(agents)
    other.signal(15)
    other.end()
    port = job_folder.wait(1, "up", world=1)[-1]["port"]
    with Path(job_folder.folder / "trail.jsonl").open("ab", buffering=0) as trail:
        trail.write(repr({"event": "go", "rank": 0, "port": port, "pid": here.pid}).encode() + b"\n")
    assert here.end() == 0, here.text
    assert wrong(job_folder) == []
    assert here.events("coordinator.leaving")
    assert any(each["stopped"] for each in other.events("worker_ended"))


def test_a_program_that_cannot_be_started(job_folder) -> None:
    program = job_folder.folder / "program"
    program.write_bytes(b"\x7fELF and no more")
    program.chmod(0o755)
    job_folder.ends(126, "--standalone", "--no-python", program)
    assert wrong(job_folder) == []
