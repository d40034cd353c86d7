"""Every manifest that submit prints and that examples/ has, created in a real API server: `make test-kubernetes`.

The server stores an object as it understood it. What it gives back is compared with what was sent: nothing is dropped.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
import subprocess
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.cli import main
from tests.kubernetes.control_plane import DEFINITIONS, ControlPlane, RefusedError, differences, program, why_not
from tests.kubernetes.manifests import IMAGE, IN_PLACE, OLDEST, job_of, jobs_in, pod_of, printed, submit
from tests.support.limits import limit_s
from tests.support.ports import free_port
from tests.support.tables import tables

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
LINES = tables(__file__)["lines"]
Kubectl = Callable[..., str]
pytestmark = [pytest.mark.xdist_group("kubernetes"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """The server, with the CRDs of the folder that the environment names, and a namespace `team`."""
    if why := why_not():
        pytest.skip(why)
    with ControlPlane(tmp_path_factory.mktemp("plane"), free_port) as made:
        if folder := os.environ.get(DEFINITIONS):
            assert made.define(Path(folder)), f"no CRD in {folder}"
        for name in ("team", "empty"):
            made.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        yield made


def needs(plane: ControlPlane, manifests: list[dict[str, Any]]) -> None:
    """Skip, if the server lacks a kind or is too old for these manifests."""
    missing = [
        f"{each['kind']} of {each['apiVersion']}"
        for each in manifests
        if not plane.path_of(each["apiVersion"], each["kind"], "default")
    ]
    if missing:
        pytest.skip(f"NOT TESTED: the server has no {', '.join(missing)}; ${DEFINITIONS} names a folder of CRDs")
    in_place = any("RestartAllContainers" in str(each) for each in manifests)
    needs_version(plane, IN_PLACE if in_place else OLDEST)


def needs_version(plane: ControlPlane, least: str) -> None:
    if plane.version < tuple(map(int, least.split("."))):
        pytest.skip(f"NOT TESTED: this is Kubernetes {'.'.join(map(str, plane.version))}, not {least} or newer")


def created(plane: ControlPlane, manifests: list[dict[str, Any]]) -> None:
    """Create them, first only as a trial; then nothing of them may be missing."""
    for manifest in manifests:
        plane.create(manifest, dry=True)
    for manifest in manifests:
        stored = plane.create(manifest)
        assert differences(manifest, stored) == []
        path = plane.path_of(manifest["apiVersion"], manifest["kind"], stored["metadata"].get("namespace", ""))
        read = plane.ask("GET", f"{path}/{stored['metadata']['name']}")
        assert differences(manifest, read) == [], "as read back"
        plane.ask("DELETE", f"{path}/{stored['metadata']['name']}?gracePeriodSeconds=0&propagationPolicy=Background")


def pod_alone(template: dict[str, Any]) -> dict[str, Any]:
    """A pod of the template, with nothing that only this server lacks: a priority class or an account."""
    spec = {
        key: value for key, value in template["spec"].items() if key not in ("priorityClassName", "serviceAccountName")
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {**template.get("metadata", {}), "name": "p"}, "spec": spec}


def templates(manifests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Jobs and pods that controllers make of these custom resources: no CRD judges all of their fields."""
    for manifest in manifests:
        for replicated in jobs_in(manifest):
            job = copy.deepcopy(replicated["template"])
            job["spec"].setdefault("completions", 2)  # by numNodes of a TrainJob
            job["spec"].setdefault("parallelism", 2)
            yield {"apiVersion": "batch/v1", "kind": "Job", **job, "metadata": {**job.get("metadata", {}), "name": "t"}}
        for one in manifest.get("spec", {}).get("pytorchReplicaSpecs", {}).values():
            yield pod_alone(one["template"])


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_what_submit_prints_is_created_without_loss(plane: ControlPlane, line: tuple[str, ...]) -> None:
    manifests = printed(*line)
    needs(plane, manifests)
    created(plane, manifests)
    created(plane, list(templates(manifests)))


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_the_pods_are_created_without_loss(plane: ControlPlane, line: tuple[str, ...]) -> None:
    """Also by a server that knows the pods, and not what makes them."""
    manifests = printed(*line)
    if "--restart-agent" in line:
        needs_version(plane, IN_PLACE)
    created(plane, [pod_alone(job_of(manifests)["template"])])


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_every_example_is_created_without_loss(plane: ControlPlane, file: Path) -> None:
    manifests = list(yaml.safe_load_all(file.read_text()))
    needs(plane, manifests)
    created(plane, manifests)
    created(plane, list(templates(manifests)))


def test_the_server_would_say_what_it_does_not_know(plane: ControlPlane) -> None:
    """The judge is awake: a field too many, a value that is no value, and what it drops when it is not asked to be strict."""
    service, job = printed(*LINES["plain"])
    service["spec"]["ports"][0]["name"] = "no name of a port"
    with pytest.raises(RefusedError, match="ports"):
        plane.create(service, dry=True)
    needs(plane, [job])
    pod_of([job])["nope"] = 1
    with pytest.raises(RefusedError, match="nope"):
        plane.create(job, dry=True)
    path = plane.path_of("batch/v1", "Job", "default")
    stored = plane.ask("POST", f"{path}?dryRun=All&fieldValidation=Ignore", job)
    assert differences(job, stored) == [".spec.template.spec.nope: was dropped"]
    del pod_of([job])["nope"]
    job_of([job])["podFailurePolicy"]["rules"][1]["onExitCodes"]["containerName"] = "another"
    with pytest.raises(RefusedError, match="containerName"):
        plane.create(job, dry=True)
    if plane.path_of("jobset.x-k8s.io/v1alpha2", "JobSet", "default"):
        (jobset,) = printed(*LINES["jobset"])
        pod_of([jobset])["nope"] = 1
        with pytest.raises(RefusedError, match="nope"):
            plane.create(jobset, dry=True)


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_pods_are_allowed_by_the_standard_that_run_as_promises(plane: ControlPlane, line: tuple[str, ...]) -> None:
    """`--run-as`: "by the restricted security standard"; the server enforces it by the namespace's label."""
    needs_version(plane, IN_PLACE if "--restart-agent" in line else OLDEST)
    words = list(line)
    if "/raid:/raid" in words:  # a folder of the machine, which the standard forbids
        at = words.index("/raid:/raid")
        del words[at - 1 : at + 1]
    manifests = printed("--run-as", "1000", *words)
    plane.ask(
        "PATCH",
        "/api/v1/namespaces/empty",
        {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}},
        "application/merge-patch+json",
    )
    pod = pod_alone(job_of(manifests)["template"])
    plane.create(pod, namespace="empty", dry=True)
    del pod["spec"]["securityContext"]
    with pytest.raises(RefusedError, match="violates PodSecurity"):
        plane.create(pod, namespace="empty", dry=True)


@pytest.fixture
def kubectl(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    """`kubectl("get", "job")`: what the real one prints. It, and what submit starts, asks this server."""
    path = program("kubectl")
    if path is None:
        pytest.skip("NOT TESTED: kubectl is not installed")
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig()))
    monkeypatch.setenv("PATH", f"{Path(path).parent}:{os.environ['PATH']}")

    def run(*words: str, code: int = 0) -> str:
        done = subprocess.run([path, *words], capture_output=True, text=True, timeout=limit_s(60), check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def named(*beginnings: str) -> list[list[str]]:
    """The words of the lines of docs/kubernetes.md that begin so, in a block or in backticks."""
    lines = [match for beginning in beginnings for match in re.findall(rf"{re.escape(beginning)}[^`\n#]*", PAGE)]
    assert len(lines) == len(beginnings), lines
    return [shlex.split(line)[1:] for line in lines]


@pytest.mark.parametrize(
    ("words", "kinds"),
    [((), "job"), (("--jobset",), "jobset"), (("--trainjob",), "trainjob")],
    ids=str,
)
def test_a_job_is_applied_suspended_continued_and_removed(
    plane: ControlPlane, kubectl: Kubectl, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], kinds: str
) -> None:
    """By the lines that the page and submit itself name."""
    line = (*IMAGE, "--nodes", "4:8", "--name", "llama", *words)
    needs(plane, printed(*line, "train.py"))
    assert main(["submit", "--k8s", *line, "--apply", "train.py"]) == 0
    said = capfd.readouterr().err
    assert len(kubectl("get", "secret", "llama-token", "-o", "jsonpath={.data.token}")) == len(b64encode(b"0" * 64))
    suspend = [
        "patch",
        kinds,
        "llama",
        *([] if kinds == "job" else ["--type", "merge"]),
        "-p",
        '{"spec": {"suspend": true}}',
    ]
    if kinds == "job":
        assert named('kubectl patch job llama -p \'{"spec": {"suspend"') == [suspend]
    kubectl(*suspend)
    assert kubectl("get", kinds, "llama", "-o", "jsonpath={.spec.suspend}") == "true"
    kubectl(*suspend[:-1], suspend[-1].replace("true", "false"))
    (remove,) = re.findall(r"kubectl (delete .*)$", said, re.MULTILINE)
    kubectl(*shlex.split(remove))
    for kind in ("secret", *shlex.split(remove)[1].split(",")):
        assert "llama" not in kubectl("get", kind)


def test_an_elastic_job_is_scaled_as_the_page_says(
    plane: ControlPlane, kubectl: Kubectl, capfd: pytest.CaptureFixture[str]
) -> None:
    manifests = printed(*IMAGE, "--nodes", "4:8", "--name", "llama", "train.py")
    needs(plane, manifests)
    for manifest in manifests:
        plane.create(manifest)
    (scale,) = named('kubectl patch job llama -p \'{"spec": {"parallelism"')
    for number in ("6", "8", "4"):
        kubectl(*(word.replace("6", number) for word in scale))
        assert kubectl("get", "job", "llama", "-o", "jsonpath={.spec.completions}") == number
    refused = kubectl(*(word.replace("6", "3") for word in scale), code=1)
    assert "maxFailedIndexes" in refused, "not below MAX - MIN"
    (remove,) = named("kubectl delete job,service,secret")
    kubectl(*remove)


def test_the_line_that_makes_the_secret(
    plane: ControlPlane, kubectl: Kubectl, capfd: pytest.CaptureFixture[str]
) -> None:
    """Printed manifests begin with it."""
    _, text, _ = submit(*IMAGE, "--nodes", "2", "--name", "llama", "train.py")
    (line,) = re.findall(r"^#\s+(holdfast token \| kubectl create .*)$", text, re.MULTILINE)
    maker, _, rest = line.partition(" | kubectl ")
    assert main(shlex.split(maker)[1:]) == 0
    token = capfd.readouterr().out
    done = subprocess.run(["kubectl", *shlex.split(rest)], input=token, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stored = kubectl("get", "secret", "llama-token", "-o", "jsonpath={.data.token}")
    assert b64decode(stored).decode().strip() == token.strip()
    kubectl("delete", "secret", "llama-token")
