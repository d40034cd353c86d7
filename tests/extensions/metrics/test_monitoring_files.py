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
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
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
    tested = re.findall(r"- alertname: (\w+)", TESTS.read_text())
    assert sorted(alerts) == sorted(tested)
    assert ALERTS.read_text().count("what_to_do:") == len(alerts)


@needs_promtool
def test_every_expression_of_the_dashboard_is_one(tmp_path: Path) -> None:
    rules = [{"record": f"r{number}", "expr": text} for number, text in enumerate(expressions())]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "g", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, timeout=limit_s(60))
    assert done.returncode == 0, done.stdout + done.stderr


def missing(wanted: Any, got: Any, place: str = "") -> Iterator[str]:
    """Where the second value has not what the first one has."""
    match wanted, got:
        case dict(), dict():
            for key, value in wanted.items():
                yield from missing(value, got[key], f"{place}.{key}") if key in got else [f"{place}.{key}"]
        case list(), list() if len(wanted) == len(got):
            for one, other in zip(wanted, got, strict=True):
                yield from missing(one, other, place)
        case _ if wanted != got:
            yield f"{place}: {wanted} is {got}"


def test_grafana_knows_every_key_of_the_dashboard() -> None:
    """By its own schemas, generated from Grafana's source: what they do not know is dropped when they read it. No package has a Grafana itself."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    read = Dashboard.from_json(dashboard())
    assert {type(panel.options).__module__.rpartition(".")[2] for panel in read.panels} == {"stat", "timeseries"}
    assert set(missing(dashboard(), json.loads(JSONEncoder().encode(read)))) == {
        ".templating.list.definition",  # shown in the list of variables; Grafana writes it, too
        ".annotations.list.titleFormat",  # read by the data source, whose part of an annotation has no schema
    }
    changed = dashboard()
    changed["panels"][0]["fieldConfig"]["defaults"]["units"] = changed["panels"][7]["options"]["legends"] = "s"
    found = missing(changed, json.loads(JSONEncoder().encode(Dashboard.from_json(changed))))
    assert {".panels.fieldConfig.defaults.units", ".panels.options.legends"} < set(found)


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
import os, time
from holdfast.worker import at_step, beat
step = 0
while True:
    beat()
    step += 1
    at_step(step, 1_000_000)
    if step == 20 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("once")
    time.sleep(0.05)
"""
EMPTY = {"Seconds per copy"}
"""Panels without a value in a job of one node."""
LOOSER = (
    (r"> (600|0|3|15)\b", ">= 0"),
    (r"< 0\.5", "< 2"),
    (r"< max_over_time", "<= max_over_time"),
    (r"> on \(run_id\) group_left \(\) \(1\.5", ">= on (run_id) group_left () (0"),
    (r"1h:1m", "1h:1s"),
)
"""What makes each alert true for a job that is well."""


def loosened(text: str) -> str:
    for pattern, replacement in LOOSER:
        text = re.sub(pattern, replacement, text)
    return text


@dataclass
class Prometheus:
    """One that runs, and what it is asked."""

    port: int

    def asked(self, path: str, **words: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(words)}"
        with closing(urllib.request.urlopen(url, timeout=limit_s(10))) as answer:
            return json.loads(answer.read())["data"]

    def values(self, text: str) -> list[Any]:
        found: list[Any] = self.asked("query", query=text.replace("$run_id", "r"))["result"]
        return [each for each in found if each["value"][1] != "NaN"]

    def rules(self) -> list[Any]:
        (group,) = self.asked("rules")["groups"]
        found: list[Any] = group["rules"]
        return found


@pytest.fixture
def watched_job(tmp_path: Path) -> Iterator[Prometheus]:
    """A real job of two ranks, one of which fails once, and a real Prometheus that scrapes it and has the alerts."""
    scraped, port = free_port(), free_port()
    (tmp_path / "train.py").write_text(SCRIPT)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [{"job_name": "t", "static_configs": [{"targets": [f"127.0.0.1:{scraped}"]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    run = f"run --standalone --nproc-per-node 2 --max-restarts 1 --rdzv-id r --metrics {scraped} train.py"
    prometheus = f"--config.file prometheus.yml --storage.tsdb.path data --web.listen-address 127.0.0.1:{port}"
    commands = [[sys.executable, "-m", "holdfast", *run.split()], ["prometheus", *prometheus.split()]]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    processes = [subprocess.Popen(command, cwd=tmp_path, **streams) for command in commands]
    try:
        yield Prometheus(port)
    finally:
        for process in processes:
            process.terminate()
            process.wait(limit_s(30))


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_a_real_prometheus_shows_a_real_job(watched_job: Prometheus) -> None:
    def without_value() -> set[str]:
        return {
            f"{panel['title']}: {target['expr']}"
            for panel in dashboard()["panels"]
            for target in panel["targets"]
            if panel["title"] not in EMPTY and not watched_job.values(target["expr"])
        }

    def alerts_without_value() -> set[str]:
        return {rule["name"] for rule in watched_job.rules() if not watched_job.values(loosened(rule["query"]))}

    until(lambda: answers(watched_job), "an answer of Prometheus", 30)
    until(lambda: without_value() == set(), lambda: f"values of {without_value()}", 60)
    until(lambda: alerts_without_value() == set(), lambda: f"values of {alerts_without_value()}", 60)
    assert exposed() - set(watched_job.asked("label/__name__/values")) == set()
    assert watched_job.asked("label/run_id/values", **{"match[]": "holdfast_agent_info"}) == ["r"]  # the variable
    for text in expressions():
        watched_job.values(text)  # raises for one that cannot be evaluated, as by two series where one is needed
    until(lambda: {rule["health"] for rule in watched_job.rules()} == {"ok"}, "the evaluation of each rule", 30)
    for rule in watched_job.rules():
        for found in watched_job.values(loosened(rule["query"])):
            wanted = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
            assert wanted - set(found["metric"]) == set(), rule["name"]
            assert found["metric"].get("run_id", "r") == "r"
    # The only restart is used up. Under load an agent may stall for a moment: then a rule is pending, which is no alert.
    assert [rule["name"] for rule in watched_job.rules() if rule["state"] == "firing"] == ["HoldfastNoRestartLeft"]


def answers(prometheus: Prometheus) -> bool:
    try:
        return bool(prometheus.asked("query", query="1"))
    except OSError:
        return False
