"""Metrics and health of real jobs: served while they run, 503 while an agent stands still, nothing started without the port."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from holdfast.diagnosis.reference import problems
from tests.support.limits import limit_s, until


def ask(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=limit_s(5)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def address_of(agent: Any, what: str) -> str:
    until(lambda: agent.begun and agent.events("serving"), lambda: agent.text)
    return next(each["address"] for each in agent.events("serving") if what in each["what"])


def test_one_port_for_both(site) -> None:
    agent = site.start(
        "--standalone", "--nproc-per-node", "2", "--metrics", "0", "--health", "0", site.script("meet(); hold()")
    )
    site.wait(2, "up")
    (serving,) = agent.events("serving")
    assert serving["what"] == ["metrics", "health"]
    assert f"metrics and health at http://{serving['address']}" in agent.text
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


def test_torchruns_variable(site, free_port) -> None:
    port = free_port()
    script = site.script("meet(); hold()")
    agent = site.start("--standalone", script, env={"TORCHELASTIC_HEALTH_CHECK_PORT": str(port)})
    site.wait(1, "up")
    assert ask(f"127.0.0.1:{port}", "/health")[0] == 200
    other = site.start("--standalone", script, env={"TORCHELASTIC_HEALTH_CHECK_PORT": str(port)})
    site.wait(2, "up")
    other.says("no health check is served (TORCHELASTIC_HEALTH_CHECK_PORT)")
    for each in (agent, other):
        each.signal(signal.SIGTERM)
        each.end()


def test_a_port_that_is_taken_starts_nothing(site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option in ("--metrics", "--health"):
            code, agent = site.run("--standalone", option, str(port), site.script("note('up')"))
            assert code == 2, agent.text
            assert f"HF109: {option}: cannot listen on 127.0.0.1:{port}: Address already in use" in agent.text
            assert len(agent.text.splitlines()) == 1, agent.text
    assert not site.trail()


def test_bad_places(site) -> None:
    for text in ("x", "1:2:3", "70000", "host:", ":9", "-1", ""):
        code, agent = site.run("--standalone", f"--metrics={text}", site.script("note('up')"))
        assert (code, agent.text.startswith("holdfast: HF101: --metrics")) == (2, True), agent.text
    code, agent = site.run("--standalone", site.script(""), env={"TORCHELASTIC_HEALTH_CHECK_PORT": "http"})
    assert code == 0
    assert "TORCHELASTIC_HEALTH_CHECK_PORT=http is not a port" in agent.text


def test_without_the_package(site, tmp_path: Path) -> None:
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "prometheus_client.py").write_text("raise ModuleNotFoundError('no', name='prometheus_client')")
    path = os.pathsep.join([str(tmp_path / "hide"), *filter(None, [os.environ.get("PYTHONPATH")])])
    code, agent = site.run("--standalone", "--metrics", "0", site.script("note('up')"), env={"PYTHONPATH": path})
    assert code == 2
    assert "HF117: --metrics needs prometheus-client: pip install 'holdfast[metrics]'" in agent.text
    assert not site.trail()


STALLS = """
import sys, threading, time
from holdfast.metrics import listeners
listeners.STALL_S = 0.5
import holdfast.runtime.agent_service as agents
begun = agents.AgentService.view
def view(self):
    import os
    while os.path.exists(os.environ["STALL"]):
        time.sleep(0.05)
    return begun(self)
agents.AgentService.view = view
from holdfast.run import main
sys.exit(main())
"""


def test_an_agent_that_stands_still_is_answered_for(site, tmp_path: Path) -> None:
    stall, program = tmp_path / "stall", tmp_path / "stalling.py"
    program.write_text(STALLS)
    agent = site.start(
        "--standalone", "--health", "0", site.script("meet(); hold()"),
        env={"STALL": str(stall)}, program=(sys.executable, str(program)),
    )  # fmt: skip
    site.wait(1, "up")
    address = address_of(agent, "health")
    until(lambda: ask(address, "/livez")[0] == 200, lambda: agent.text)
    stall.touch()
    until(lambda: ask(address, "/livez")[0] == 503, lambda: agent.text)
    assert json.loads(ask(address, "/livez")[1])["status"] == "stalled"
    stall.unlink()
    until(lambda: ask(address, "/livez")[0] == 200, lambda: agent.text)
    agent.signal(signal.SIGTERM)
    agent.end()


def test_nothing_is_loaded_when_nobody_watches(site) -> None:
    program = site.folder / "look.py"
    program.write_text(
        "import sys\nfrom holdfast.run import main\ncode = main()\n"
        "print('loaded', sorted(name for name in sys.modules if name.startswith(('prometheus', 'holdfast.metrics.'))))\n"
        "sys.exit(code)\n"
    )
    agent = site.start("--standalone", site.script(""), program=(sys.executable, str(program)))
    assert agent.end() == 0
    assert "loaded []" in agent.text


# --- events.jsonl: every record is what the table of events says ------------------------------------------------------


FAILS_ONCE = """
note("up")
if RANK == 1 and ROUND == 0:
    raise ValueError("first\\nsecond")
"""


def wrong(site) -> list[str]:
    """In the journals of all agents."""
    journals = [agent.folder / "events.jsonl" for agent in site.agents]
    records = [json.loads(line) for path in journals for line in path.read_text().splitlines()]
    assert records
    return [problem for record in records for problem in problems(record)]


def names(agent) -> list[str]:
    return [each["event"] for each in agent.events()]


def test_a_job_that_restarts(site) -> None:
    code, agent = site.run("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", site.script(FAILS_ONCE))
    assert code == 0, agent.text
    assert wrong(site) == []
    (failed,) = (each for each in agent.events("worker_failed") if not each["after_stop"])
    assert (failed["rank"], failed["generation"], failed["error_type"]) == (1, 1, "ValueError")
    assert failed["message"] == "ValueError: first"
    first, second = agent.events("generation")
    assert (first["generation"], second["generation"], second["restart_count"]) == (1, 2, 1)
    assert {each["generation"] for each in agent.events("worker_started")} == {1, 2}
    assert names(agent)[0] == "begins"
    assert names(agent)[-1] == "ended"


def test_two_nodes_of_which_one_leaves(site, endpoint: str) -> None:
    stays = "note('up')\nwhile not notes('go'): time.sleep(0.01)\n"
    line = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--max-restarts", "3")
    for _ in range(2):
        site.start(*line, site.script(stays))
    site.wait(2, "up")
    other = next(agent for agent in site.agents if not agent.events("coordinator.joined"))
    other.signal(15)
    other.end()
    here = next(agent for agent in site.agents if agent is not other)
    port = site.wait(1, "up", world=1)[-1]["port"]
    with Path(site.folder / "trail.jsonl").open("ab", buffering=0) as trail:
        trail.write(repr({"event": "go", "rank": 0, "port": port, "pid": here.pid}).encode() + b"\n")
    assert here.end() == 0, here.text
    assert wrong(site) == []
    assert here.events("coordinator.leaving")
    assert any(each["stopped"] for each in other.events("worker_ended"))


def test_a_program_that_cannot_be_started(site) -> None:
    program = site.folder / "program"
    program.write_text("no magic number")
    program.chmod(0o755)
    site.run("--standalone", "--no-python", program)
    assert wrong(site) == []
