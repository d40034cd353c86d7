"""The dashboard beside real jobs: it is killed, stopped and watched; the job goes on, and its end is told."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import descendants
from tests.processes.conftest import Agent, JobFolder, c10d, holdfast, while_running
from tests.support.limits import limit_s, until
from tests.support.pages import Visitor, browsing

pytestmark = pytest.mark.usefixtures("registry")
STEPS = """
from holdfast.worker import beat
meet()
for step in range(100_000):
    time.sleep(0.01)
    beat()
    note("step", step=step) if step % 10 == 0 else None
"""
FAILS = """
from holdfast.worker import beat
meet()
while not os.path.exists("fail"):
    time.sleep(0.05)
    beat()
if RANK == 1:
    raise ValueError("boom <b>in</b> rank 1")
hold()
"""


def link(text: str) -> str:
    found = re.search(r"dashboard (http://\S+)", text)
    return found[1] if found else ""


def visitor(agent: Agent) -> Visitor:
    made = Visitor(until(lambda: link(agent.text), lambda: agent.text))
    assert made.login() == 303
    return made


def place(agent: Agent) -> str:
    return f"/job/{agent.folder.name}/"


def only_job(client: Visitor) -> str:
    return client.ask("GET", "/")[1]["location"].removeprefix(".")


def dashboard_pid(agent: Agent) -> int:
    return until(lambda: agent.find_below("holdfast.dashboard"), "the dashboard's process")


def steps(job_folder: JobFolder) -> int:
    return len(job_folder.trail("step"))


def begun(job_folder: JobFolder, script: str, **more: Any) -> Agent:
    line = ("--standalone", "--nproc-per-node=2", "--dashboard=0", job_folder.script(script))
    agent = job_folder.start(*line, **more)
    job_folder.wait(2, "up")
    return agent


@contextlib.contextmanager
def opened(*args: str | Path, browser: str = "") -> Iterator[Visitor]:
    """`holdfast dashboard`, which ends with Ctrl-C. `browser`: a command that gets the link."""
    line = [sys.executable, "-m", "holdfast", "dashboard", *([] if browser else ["--no-open"]), *map(str, args)]
    environment = {**os.environ, "BROWSER": browser}
    with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            made = Visitor(link(process.stdout.readline()))
            assert browser or made.login() == 303
            yield made
        finally:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=limit_s(20))
            assert process.returncode == 130
            assert "Traceback" not in errors, "also while pages are open"


def now(visitor: Visitor, path: str, kind: str = "now") -> Any:
    with visitor.stream(f"{path}events") as events:
        return next(data for what, data in events if what == kind and (kind != "now" or "phase" in data))


def test_a_killed_dashboard_comes_back_and_a_stopped_one_stalls_nothing(job_folder: JobFolder) -> None:
    agent = begun(job_folder, STEPS)
    client = visitor(agent)
    assert Visitor(client.link).login() == 401, "the link works once"
    path = place(agent)
    assert now(client, path)["world_size"] == 2
    first = dashboard_pid(agent)
    os.kill(first, signal.SIGKILL)
    until(lambda: dashboard_pid(agent) != first, "another process")
    assert now(client, path)["run_id"], "at the same address, with the same cookie"
    assert Visitor(client.link).login() == 401, "it is still used"
    ended = until(lambda: agent.events("dashboard_ended"), "the event")
    assert [each["why"] for each in ended] == ["ended with exit code -9"]
    os.kill(dashboard_pid(agent), signal.SIGSTOP)
    before = steps(job_folder)
    until(lambda: steps(job_folder) > before + 5, "the job goes on")
    assert holdfast("kill").returncode == 0
    assert agent.end() == 137
    job_folder.all_gone()


def test_a_job_whose_dashboard_cannot_be_imported_says_once_what_to_install(job_folder: JobFolder) -> None:
    (job_folder.folder / "uvicorn").mkdir()
    (job_folder.folder / "uvicorn" / "__init__.py").write_text("raise ImportError('no click')")
    script = job_folder.script("until_said = open('go on')\nuntil_said.read()")
    os.mkfifo(job_folder.folder / "go on")
    line = ("--standalone", "--dashboard=0", script)
    agent = job_folder.start(*line, env={"PYTHONPATH": str(job_folder.folder)})
    agent.says("no dashboard: uvicorn is installed and cannot be imported (ImportError: no click): pip install")
    while_running(lambda: agent.events("dashboard_ended"), agent)
    (job_folder.folder / "go on").write_text("")
    assert agent.end() == 0, agent.text
    assert agent.text.count("no dashboard") == 1
    assert len(agent.events("dashboard_ended")) == 1


def test_a_job_that_fails_while_a_page_watches_tells_why(job_folder: JobFolder) -> None:
    # The end of the job waits until the page has been told, however slow the machine is.
    change = "from holdfast.extensions.dashboard import node\nnode.FINISH_LIMIT_S = 60.0"
    agent = begun(job_folder, FAILS, program=job_folder.changed(change))
    with browsing(until(lambda: link(agent.text), lambda: agent.text)) as page:
        page.wait_for_selector("text=Training")
        (job_folder.folder / "fail").touch()
        page.wait_for_selector("text=Failed")
        page.wait_for_selector("text=boom <b>in</b> rank 1")
        assert agent.end() == 1
        closed = "[page.source, page.logs.source].every((each) => !each || each.readyState === EventSource.CLOSED)"
        until(lambda: page.evaluate(closed), "nothing more is asked")
        assert "HF201" in page.inner_text("#verdict"), "it is kept when the dashboard has gone"
        assert page.locator("#actions button:enabled").count() == 0
    job_folder.all_gone()
    # Later, from the run folder.
    with contextlib.ExitStack() as pages, opened(agent.folder) as client:
        for stream in ("events", "logs"):
            next(pages.enter_context(client.stream(f"{place(agent)}{stream}")))
        story = now(client, place(agent), "story")
        assert story["outcome"]["verdict"]["code"] == "HF201"
        status, told = client.act(f"{place(agent)}act", do="stop")
        assert (status, "does not run" in told["error"]) == (409, True)


def test_stop_from_the_page_is_stop_from_the_command_line(job_folder: JobFolder) -> None:
    agent = begun(job_folder, STEPS)
    client = visitor(agent)
    until(lambda: now(client, place(agent)), "the dashboard has found the agent")
    assert client.act(f"{place(agent)}act", do="stacks")[1]["groups"]
    host = now(client, place(agent))["nodes"][0]["host"]
    for command in ("drain", "exclude"):
        status, told = client.act(f"{place(agent)}act", do=command, host=host)
        assert (status, "has the job's coordinator" in told["error"]) == (409, True)
        assert "has the job's coordinator" in holdfast(command, host).stderr
    assert client.act(f"{place(agent)}act", do="readmit", host=host)[0] == 200
    assert holdfast("readmit", host).returncode == 0
    asked = until(lambda: agent.events("coordinator.readmitted")[1:], "both are recorded") and agent.events(
        "readmitted"
    )
    assert [each["by"].partition(" on ")[0] for each in asked] == [
        "holdfast readmit, from the dashboard at 127.0.0.1,",
        "holdfast readmit",
    ]
    assert holdfast("exclude", "nowhere", "--for", "soon").returncode == 2
    assert client.act(f"{place(agent)}act", do="stop")[0] == 200
    assert agent.end() == 143
    assert not agent.events("observer_fault")
    (order,) = agent.events("coordinator.quit")
    assert order["by"].startswith("holdfast stop, from the dashboard at 127.0.0.1, on ")
    job_folder.all_gone()


def test_only_the_coordinators_node_serves_and_any_node_can_open_a_page(job_folder: JobFolder, endpoint: str) -> None:
    script = job_folder.script(STEPS)
    line = (*c10d(endpoint, "2", "--rdzv-id=two", "--dashboard=0"), script)
    agents = [job_folder.start(*line) for _ in range(2)]
    job_folder.wait(2, "up")
    until(lambda: any(link(agent.text) for agent in agents), "the link of one")
    (second,) = (agent for agent in agents if not link(agent.text))
    with opened(second.folder) as client:
        view = now(client, place(second))
        assert (view["world_size"], len(view["nodes"]), view["whole"]) == (2, 2, True)
    with opened("--port", "localhost:0", "two") as client:
        assert now(client, only_job(client))["run_id"] == "two"
    assert holdfast("kill", "two").returncode == 0
    assert [agent.end() for agent in agents] == [137, 137]
    with opened() as client:
        listed = client.get("/jobs")
        assert listed.startswith(b"[")
    job_folder.all_gone()


def test_a_port_in_use_is_no_reason_not_to_train(job_folder: JobFolder) -> None:
    one = begun(job_folder, STEPS)
    port = Visitor(until(lambda: link(one.text), lambda: one.text)).host.rpartition(":")[2]
    two = job_folder.ends(
        0, "--standalone", f"--dashboard={port}", "--rdzv-id=second", job_folder.script("pass", "other.py")
    )
    assert f"cannot listen on 127.0.0.1:{port}" in two.text
    assert link(two.text)
    assert holdfast("kill").returncode == 0
    one.end()


def test_a_restart_and_the_end_are_notified(job_folder: JobFolder) -> None:
    got = job_folder.folder / "got"
    body = "meet()\nsys.exit(0 if ROUND else 3)"
    line = ("--standalone", "--nproc-per-node=2", "--max-restarts=1", f"--notify=sh -c 'cat >> {got}; echo >> {got}'")
    agent = job_folder.ends(0, *line, "--notify=false", job_folder.script(body))
    told = [json.loads(each) for each in got.read_text().splitlines()]
    assert [each["event"] for each in told] == ["start", "restart", "end"]
    assert (told[1]["generation"], told[2]["exit_code"]) == (2, 0)
    assert "exit code 3" in told[1]["text"]
    assert {each["to"] for each in agent.events("notice_lost")} == {"false"}
    bad = job_folder.ends(2, "--standalone", "--notify=/nowhere/program", job_folder.script(body))
    assert "is neither a URL nor a program" in bad.text


def test_a_browser_that_stays_in_the_foreground_gets_the_page(tmp_path: Path) -> None:
    """As lynx does, and each command in BROWSER: it returns when its user leaves it."""
    script = tmp_path / "browser.py"
    script.write_text(
        "import sys, time, urllib.request\n"
        "page = urllib.request.build_opener(urllib.request.HTTPCookieProcessor()).open(sys.argv[1]).read()\n"
        f"open({str(tmp_path / 'page')!r}, 'wb').write(page)\n"
        "sys.stdin.read() or time.sleep(1000)\n"
    )
    with opened(browser=f"{sys.executable} {script} %s"):
        until((tmp_path / "page").exists, "the page")
        for pid in descendants(os.getpid()):
            if b"browser.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
