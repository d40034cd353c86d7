"""The files of examples/kubernetes: valid, and in agreement with what `holdfast submit` prints and agents serve."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kubernetes.manifests import IMAGE, NEWEST, OLDEST, agent_of, job_of, pod_of, printed, validate
from tests.support.limits import limit_s

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
RUNTIME = FOLDER / "cluster-training-runtime.yaml"


def read(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_file_is_valid_by_the_strict_schemas(file: Path, version: str) -> None:
    for manifest in read(file):
        validate(manifest, version)
        if manifest["kind"] == "PyTorchJob":
            template = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
            pod = {"apiVersion": "v1", "kind": "Pod", **template}
            pod["metadata"]["name"] = "pod"
            validate(pod, version)


def test_the_runtime_of_the_cluster_treats_pods_as_submit_does() -> None:
    ours, theirs = printed(*IMAGE, "--nodes", "1:2", "--trainjob", "train.py")[:1], read(RUNTIME)
    for key in ("podFailurePolicy", "podReplacementPolicy", "backoffLimitPerIndex", "successPolicy"):
        assert job_of(ours)[key] == job_of(theirs)[key], key
    for key in ("restartPolicy", "terminationGracePeriodSeconds", "volumes"):
        assert pod_of(ours)[key] == pod_of(theirs)[key], key
    for key in ("startupProbe", "readinessProbe", "livenessProbe", "volumeMounts"):
        assert agent_of(ours)[key] == agent_of(theirs)[key], key


def test_a_trainjob_sets_no_variable_that_kubeflow_reserves() -> None:
    """Its webhook refuses them."""
    (job,) = read(FOLDER / "trainjob-of-the-runtime.yaml")
    names = {each["name"] for each in job["spec"]["trainer"]["env"]}
    assert names == {"MIN_NODES"}
    assert job["spec"]["runtimeRef"]["name"] == read(RUNTIME)[0]["metadata"]["name"]


def test_an_autoscaler_asks_for_metrics_that_exist(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    job, scaled = read(FOLDER / "autoscaled-pytorchjob.yaml")
    assert scaled["spec"]["scaleTargetRef"]["name"] == job["metadata"]["name"]
    assert scaled["spec"]["maxReplicaCount"] == job["spec"]["elasticPolicy"]["maxReplicas"]
    queries = [each["metadata"]["query"] for each in scaled["spec"]["triggers"]]
    named = set(re.findall(r"\bholdfast_\w+", " ".join(queries)))
    assert named == {"holdfast_job_nodes_wanted", "holdfast_job_left_seconds", "holdfast_agent_info"}
    series = [
        {"series": 'holdfast_agent_info{instance="a", run_id="llama"}', "values": "1"},
        {"series": 'holdfast_job_nodes_wanted{instance="a"}', "values": "8"},
        {"series": 'holdfast_job_left_seconds{instance="a"}', "values": "3597523200"},  # twice the time until 2027
        {"series": 'holdfast_agent_info{instance="b", run_id="other"}', "values": "1"},
        {"series": 'holdfast_job_nodes_wanted{instance="b"}', "values": "64"},
    ]
    asked = [
        {"expr": query, "eval_time": "0s", "exp_samples": [{"value": value}]}
        for query, value in zip(queries, (8, 2), strict=True)
    ]
    file = tmp_path / "asked.yml"
    file.write_text(json.dumps({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": asked}]}))
    done = subprocess.run(
        ["promtool", "test", "rules", file], capture_output=True, text=True, timeout=limit_s(60), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
