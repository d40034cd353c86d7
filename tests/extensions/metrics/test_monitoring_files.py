"""The alert rules and the Grafana dashboard of examples/monitoring: their metrics exist, and promtool accepts rules and expressions."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.extensions.metrics.exposition import Metrics
from holdfast.extensions.metrics.vitals import VitalsSample
from holdfast.protocol.rank_progress import JobView
from tests.support.limits import limit_s, until
from tests.support.ports import free_port

FOLDER = Path(__file__).parents[3] / "examples" / "monitoring"
ALERTS, TESTS, DASHBOARD = (FOLDER / f"holdfast-{name}" for name in ("alerts.yml", "alerts.test.yml", "dashboard.json"))
SUFFIXES = {"counter": "_total", "info": "_info", "gauge": ""}
VARIABLES = {"$run_id": "r", "${datasource}": "d"}
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def exposed() -> set[str]:
    """The names of all series that an agent serves."""
    job = JobView(
        run_id="r", phase="", generation=1, restarts=0, restarts_max=0, world_size=0, since_s=0, job_s=0, training_s=0,
        nodes_min=1, nodes_max=2, nodes_wanted=2, left_s=1.0,
    )  # fmt: skip
    facts = VitalsSample(taken_s=0.0, run_id="r", node="a", job=job)
    families = text_string_to_metric_families(Metrics(lambda: facts).text().decode())
    return {family.name + SUFFIXES[family.type] for family in families}


def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text())


def expressions() -> list[str]:
    """All of the dashboard, with values for its variables."""
    found = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    found += [each["expr"] for each in dashboard()["annotations"]["list"]]
    for name, value in VARIABLES.items():
        found = [text.replace(name, value) for text in found]
    return found


@pytest.mark.parametrize("file", [ALERTS, TESTS, DASHBOARD], ids=lambda file: file.name)
def test_every_metric_that_is_named_is_served(file: Path) -> None:
    named = set(re.findall(r"\bholdfast_\w+", file.read_text()))
    assert len(named) > 8
    assert named - exposed() == set()


def test_every_metric_that_is_served_is_on_the_dashboard() -> None:
    assert exposed() - set(re.findall(r"\bholdfast_\w+", DASHBOARD.read_text())) == set()


@needs_promtool
def test_the_alerts_fire_when_they_should_and_only_then() -> None:
    for command in (("check", "rules", ALERTS), ("test", "rules", TESTS)):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, timeout=limit_s(60))
        assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_tested_and_says_what_to_do() -> None:
    alerts = re.findall(r"- alert: (\w+)", ALERTS.read_text())
    tested = re.findall(r'alertname="(\w+)"', TESTS.read_text())
    assert sorted(alerts) == sorted(tested)
    assert ALERTS.read_text().count("what_to_do:") == len(alerts)


@needs_promtool
def test_every_expression_of_the_dashboard_is_one(tmp_path: Path) -> None:
    rules = [{"record": f"r{number}", "expr": text} for number, text in enumerate(expressions())]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "g", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, timeout=limit_s(60))
    assert done.returncode == 0, done.stdout + done.stderr


def test_panels_have_own_numbers_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    fields = [
        {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        for at in (panel["gridPos"] for panel in panels)
    ]
    assert all(x < 24 for field in fields for x, _ in field)
    assert not any(one & other for one, other in itertools.combinations(fields, 2))


# --- a real Prometheus ------------------------------------------------------------------------------------------------

SCRIPT = """
import time
from holdfast.worker import beat
while True:
    beat()
    time.sleep(0.05)
"""
SHOWN = (
    "Steps per second",
    "Since the newest step",
    "Ranks",
    "Nodes by state",
    "Silence of nodes and agents",
)
"""Panels that have a value within seconds of a job that trains."""


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_a_real_prometheus_shows_a_real_job(tmp_path: Path) -> None:
    """It scrapes the job, loads the alerts, and answers every expression of the dashboard."""
    scraped, port = free_port(), free_port()
    (tmp_path / "train.py").write_text(SCRIPT)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [{"job_name": "t", "static_configs": [{"targets": [f"127.0.0.1:{scraped}"]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    run = f"run --standalone --nproc-per-node 2 --rdzv-id r --metrics {scraped} train.py"
    prometheus = f"--config.file prometheus.yml --storage.tsdb.path data --web.listen-address 127.0.0.1:{port}"
    commands = [[sys.executable, "-m", "holdfast", *run.split()], ["prometheus", *prometheus.split()]]

    def asked(path: str) -> Any:
        with closing(urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=limit_s(10))) as answer:
            return json.loads(answer.read())["data"]

    def values(text: str) -> list[Any]:
        found: list[Any] = asked("query?" + urllib.parse.urlencode({"query": text.replace("$run_id", "r")}))["result"]
        return found

    def rules() -> list[Any]:
        (group,) = asked("rules")["groups"]
        found: list[Any] = group["rules"]
        return found

    def shows_all() -> bool:
        try:
            return all(
                values(panel["targets"][0]["expr"]) for panel in dashboard()["panels"] if panel["title"] in SHOWN
            )
        except OSError:  # it does not listen yet
            return False

    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    processes = [subprocess.Popen(command, cwd=tmp_path, **streams) for command in commands]
    try:
        until(shows_all, "values of all these panels", 60)
        assert {panel["title"] for panel in dashboard()["panels"]} >= set(SHOWN)
        (info,) = values("holdfast_agent_info")
        assert info["metric"]["run_id"] == "r"
        for text in expressions():
            assert isinstance(values(text), list), text
        until(lambda: {rule["health"] for rule in rules()} == {"ok"}, "the evaluation of each rule", 30)
        # Under load an agent may stall for a moment: then a rule is pending, which is no alert.
        assert not [rule for rule in rules() if rule["state"] == "firing"]
    finally:
        for process in processes:
            process.terminate()
            process.wait(limit_s(30))
