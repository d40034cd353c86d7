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
NEWEST = kubernetes_validate.latest_version()

IMAGE = ("--image", "registry.example/team/train:1")

OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": False}
JOBSET_SCHEMA: dict[str, Any] = {
    **OBJECT,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "kind": {"const": "JobSet"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            **OBJECT,
            "required": ["replicatedJobs"],
            "properties": {
                "ttlSecondsAfterFinished": {"type": "integer", "minimum": 0},
                "suspend": {"type": "boolean"},
                "managedBy": {"type": "string"},
                "network": {
                    **OBJECT,
                    "properties": {
                        "enableDNSHostnames": {"type": "boolean"},
                        "subdomain": {"type": "string"},
                        "publishNotReadyAddresses": {"type": "boolean"},
                    },
                },
                "failurePolicy": {**OBJECT, "properties": {"maxRestarts": {"type": "integer", "minimum": 0}}},
                "replicatedJobs": {
                    "type": "array",
                    "items": {
                        **OBJECT,
                        "required": ["name", "template"],
                        "properties": {
                            "name": {"type": "string"},
                            "groupName": {"type": "string"},
                            "replicas": {"type": "integer", "minimum": 0},
                            "template": {"type": "object"},
                        },
                    },
                },
            },
        },
    },
}
"""What is used of the JobSet controller's own schema (v1alpha2). The Job in it is Kubernetes'."""


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
    if manifest["kind"] == "JobSet":
        jsonschema.validate(manifest, JOBSET_SCHEMA)
        for replicated in manifest["spec"]["replicatedJobs"]:
            job = {"apiVersion": "batch/v1", "kind": "Job", **replicated["template"]}
            kubernetes_validate.validate(job, version, strict=True)
    else:
        kubernetes_validate.validate(manifest, version, strict=True)


def job_of(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    """The spec of the Indexed Job."""
    last = manifests[-1]
    spec: dict[str, Any] = last["spec"]
    return spec["replicatedJobs"][0]["template"]["spec"] if last["kind"] == "JobSet" else spec


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
