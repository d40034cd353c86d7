"""What `holdfast submit --k8s` prints, read by somebody else's YAML, and judged by Kubernetes' own schemas."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from holdfast.cli import main

OLDEST = "1.31"
"""The first with all fields that are used switched on: successPolicy came last."""
IN_PLACE = "1.35"
"""The first with RestartAllContainers."""
NEWEST = kubernetes_validate.latest_version()

IMAGE = ("--image", "registry.example/team/train:1")

TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS = {"type": "array", "items": TEXT}
ANYTHING = {"type": "object"}


def strict(*required: str, **properties: Any) -> dict[str, Any]:
    """An object without other keys than these."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": properties,
    }


def items(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


FAILURE_ACTIONS = (
    "FailJobSet",
    "RestartJobSet",
    "RestartJobSetAndIgnoreMaxRestarts",
    "RestartJob",
    "RestartJobAndIgnoreMaxRestarts",
)
JOBSET_SPEC = strict(
    "replicatedJobs",
    coordinator=strict("replicatedJob", replicatedJob=TEXT, jobIndex=NUMBER, podIndex=NUMBER),
    failurePolicy=strict(
        maxRestarts=NUMBER,
        restartStrategy={"enum": ["Recreate", "BlockingRecreate", "InPlaceRestart"]},
        rules=items(
            strict(
                *("action", "name"),
                action={"enum": list(FAILURE_ACTIONS)},
                name=TEXT,
                onJobFailureReasons=TEXTS,
                onJobFailureMessagePatterns=TEXTS,
                targetReplicatedJobs=TEXTS,
            )
        ),
    ),
    managedBy=TEXT,
    network=strict(enableDNSHostnames=FLAG, publishNotReadyAddresses=FLAG, subdomain=TEXT),
    replicatedJobs=items(
        strict(
            *("name", "template"),
            name=TEXT,
            groupName=TEXT,
            replicas=NUMBER,
            template=strict("spec", metadata=ANYTHING, spec=ANYTHING),
        )
    ),
    successPolicy=strict("operator", operator={"enum": ["All", "Any"]}, targetReplicatedJobs=TEXTS),
    suspend=FLAG,
    ttlSecondsAfterFinished=NUMBER,
)
RUNTIME_SPEC = strict(
    mlPolicy=strict(numNodes=NUMBER, torch=strict(envInjection=ANYTHING)),
    podGroupPolicy=ANYTHING,
    template=strict(metadata=ANYTHING, spec=JOBSET_SPEC),
)
TRAINJOB_SPEC = strict(
    "runtimeRef",
    runtimeRef=strict("name", name=TEXT, kind=TEXT, apiGroup=TEXT),
    trainer=strict(
        image=TEXT,
        command=TEXTS,
        args=TEXTS,
        env=items(ANYTHING),
        numNodes=NUMBER,
        numProcPerNode={"type": "integer", "minimum": 1},
        resourcesPerNode=ANYTHING,
    ),
    suspend=FLAG,
    managedBy=TEXT,
    activeDeadlineSeconds={"type": "integer", "minimum": 1},
)
PYTORCHJOB_SPEC = strict(
    "pytorchReplicaSpecs",
    elasticPolicy=strict(
        minReplicas=NUMBER,
        maxReplicas=NUMBER,
        nProcPerNode=NUMBER,
        rdzvBackend={"enum": ["c10d", "etcd", "etcd-v2"]},
        maxRestarts=NUMBER,
    ),
    nprocPerNode=TEXT,
    runPolicy=strict(cleanPodPolicy={"enum": ["None", "All", "Running"]}, backoffLimit=NUMBER, suspend=FLAG),
    pytorchReplicaSpecs=strict(
        Worker=strict(
            replicas=NUMBER, restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]}, template=ANYTHING
        )
    ),
)
SCALED_SPEC = strict(
    *("scaleTargetRef", "triggers"),
    scaleTargetRef=strict("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
    minReplicaCount=NUMBER,
    maxReplicaCount=NUMBER,
    pollingInterval=NUMBER,
    cooldownPeriod=NUMBER,
    advanced=strict(horizontalPodAutoscalerConfig=strict(behavior=ANYTHING)),
    triggers=items(
        strict(
            *("type", "metadata"),
            type=TEXT,
            metricType={"enum": ["AverageValue", "Value", "Utilization"]},
            metadata={"type": "object", "additionalProperties": TEXT},
        )
    ),
)
CUSTOM = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): JOBSET_SPEC,
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): RUNTIME_SPEC,
    ("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime"): RUNTIME_SPEC,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): TRAINJOB_SPEC,
    ("kubeflow.org/v1", "PyTorchJob"): PYTORCHJOB_SPEC,
    ("keda.sh/v1alpha1", "ScaledObject"): SCALED_SPEC,
}
"""What the custom resources may contain, by the definitions of JobSet 0.12, Kubeflow Trainer 2.3 (both read in their
repositories), Training Operator 1 and KEDA 2: facts, as far as they are of use here. Jobs and pods in them are
Kubernetes' own."""


def submit(*line: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["submit", "--k8s", *line])
    return code, out.getvalue(), err.getvalue()


def printed(*line: str) -> list[dict[str, Any]]:
    """The manifests, read by PyYAML."""
    code, out, err = submit(*line)
    assert code == 0, err
    return list(yaml.safe_load_all(out))


def validate(manifest: dict[str, Any], version: str) -> None:
    """By the strict schema: no key that the server does not know. Raises an error of jsonschema's."""
    spec = CUSTOM.get((manifest["apiVersion"], manifest["kind"]))
    if spec is None:
        kubernetes_validate.validate(manifest, version, strict=True)
        return
    jsonschema.validate(manifest, strict("spec", apiVersion=TEXT, kind=TEXT, metadata=ANYTHING, spec=spec))
    for replicated in jobs_in(manifest):
        job = {"apiVersion": "batch/v1", "kind": "Job", **replicated["template"]}
        kubernetes_validate.validate(job, version, strict=True)


def validate_all(manifests: list[dict[str, Any]], version: str) -> None:
    for manifest in manifests:
        validate(manifest, version)


def jobs_in(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The replicated jobs of a JobSet, or of a runtime of Kubeflow Trainer."""
    spec = manifest.get("spec", {})
    jobset = spec.get("template", {}).get("spec", {}) if manifest["kind"].endswith("TrainingRuntime") else spec
    found: list[dict[str, Any]] = jobset.get("replicatedJobs", [])
    return found


def job_of(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    """The spec of the Indexed Job."""
    for manifest in manifests:
        if manifest["kind"] == "Job":
            plain: dict[str, Any] = manifest["spec"]
            return plain
        for replicated in jobs_in(manifest):
            inner: dict[str, Any] = replicated["template"]["spec"]
            return inner
    raise AssertionError(f"no job in {[each['kind'] for each in manifests]}")


def pod_of(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    pod: dict[str, Any] = job_of(manifests)["template"]["spec"]
    return pod


def agent_of(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    (agent,) = pod_of(manifests)["containers"]
    return agent


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` replaced where there is such a variable; `$$` is one `$` and protects what follows."""

    def one(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([A-Za-z0-9_.-]+)\)", one, text)
