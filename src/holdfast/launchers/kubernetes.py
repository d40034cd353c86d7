"""The manifests of a job for Kubernetes: an Indexed Job with a headless Service, or a JobSet. PURE.

Makes data, and from data YAML with comments by ruamel.yaml; the same data gives the same text. Knows the meaning of the
fields; the comments in the manifest give the reasons. Knows no option of the command line and starts nothing.

kubectl reads YAML 1.1, where `no` is false and `1:30` is 90. ruamel.yaml writes 1.2, or a directive that kubectl does
not expect. So a text is in double quotes unless it is a plain word in both versions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

from holdfast.launchers.kubernetes_names import Volume
from holdfast.protocol.errors import EXIT_NO_PROGRESS, EXIT_REQUEUE, EXIT_USAGE, MissingPackageError

INDENT = 2
LINE_CHARACTERS_MAX = 2**30
"""Line width for ruamel.yaml, so large that no command is wrapped."""
PLAIN = re.compile(r"(--)?[A-Za-z_/][A-Za-z0-9_./@=+,-]*(:[A-Za-z0-9_./@=+,-]+)*")
"""Words that no YAML reader interprets as a number, a date or syntax."""
WORDS_WITH_A_MEANING = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null"})


@dataclass(frozen=True)
class Commented:
    """A value with a comment above it."""

    value: object
    note: str


Manifest = dict[str, object]

RENDEZVOUS_PORT = 29400
HEALTH_PORT = 9400
CONTAINER = "agent"
REPLICATED_JOB = "node"
"""Name in a JobSet, and part of its pods' host names."""
RUNS_PATH = "/var/holdfast/runs"
SHM_PATH = "/dev/shm"
GRACE_SLACK_S = 15
"""Time for the end of the logs and of the container, after draining, stopping and writing snapshots."""
STARTUP_S_MAX = 120
"""Limit for the agent's first answer to /livez. Then the kubelet kills the container."""
LIVENESS_S = 20
LIVENESS_FAILURES_MAX = 6
"""Missed answers, LIVENESS_S apart, after which the kubelet kills the container: 2 min, for a node under heavy load."""
OWN_VARIABLES = ("POD_IP", "JOB_COMPLETION_INDEX")
POD_ADDRESS, POD_INDEX = (f"$({name})" for name in OWN_VARIABLES)
"""Kubernetes replaces them in the arguments."""


@dataclass(frozen=True, kw_only=True)
class KubernetesJob:
    """A job as requested. Names are Kubernetes' own; values have been checked. Empty texts: not requested."""

    name: str
    image: str
    least: int
    """Smallest number of nodes with which the job runs."""
    most: int
    """Number of pods."""
    run_options: tuple[str, ...]
    """Further options of `holdfast run`. They come last, so they take precedence."""
    args: tuple[str, ...]
    """The script and its own arguments."""
    namespace: str
    jobset: bool
    gpus: int
    gpu_resource: str
    cpus: str
    memory: str
    shm: str
    volumes: tuple[Volume, ...]
    env: tuple[tuple[str, str], ...]
    env_from: tuple[tuple[str, str], ...]
    cwd: str
    service_account: str
    pull_secret: str
    priority_class: str
    run_as: tuple[int, int] | None
    labels: tuple[tuple[str, str], ...]
    node_selector: tuple[tuple[str, str], ...]
    retries: int
    ttl_s: int | None
    token_secret: str
    """Name of the Secret whose key `token` is the job's token; empty: none."""
    drain_s: float
    stop_grace_s: float
    save_s: float
    """Time that an agent gets for snapshots that are being written: those in memory go with the pod."""
    health_port: int
    metrics_port: int | None

    @property
    def alone(self) -> bool:
        """Whether the job has one node."""
        return self.most == 1

    @property
    def grace_s(self) -> int:
        """Time from SIGTERM to SIGKILL: all that an agent may need."""
        return math.ceil(self.drain_s + self.stop_grace_s + self.save_s) + GRACE_SLACK_S

    @property
    def endpoint(self) -> str:
        """Pod 0, by a name that stays the same over restarts."""
        host = f"{self.name}-{REPLICATED_JOB}-0-0" if self.jobset else f"{self.name}-0"
        return f"{host}.{self.name}:{RENDEZVOUS_PORT}"

    @property
    def own_labels(self) -> Manifest:
        return {
            "app.kubernetes.io/name": "holdfast",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/component": "training",
            "app.kubernetes.io/managed-by": "holdfast-submit",
        }

    @property
    def all_labels(self) -> Manifest:
        return {**self.own_labels, **dict(self.labels)}


def last_pod(most: int, *, jobset: bool) -> str:
    """The suffix of the last pod's host name, which is the longest one."""
    return f"-{REPLICATED_JOB}-0-{most - 1}" if jobset else f"-{most - 1}"


def manifests(job: KubernetesJob) -> list[object]:
    """The manifests in the order of their creation: the pods' names exist before the pods."""
    if job.jobset:
        return [jobset(job)]
    return [*([] if job.alone else [service(job)]), indexed_job(job)]


def secret(job: KubernetesJob, token: str) -> Manifest:
    """The Secret with the job's token. Immutable: later agents must know the same token."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(job, job.token_secret),
        "type": "Opaque",
        "immutable": True,
        "stringData": {"token": token},
    }


def metadata(job: KubernetesJob, name: str) -> Manifest:
    made: Manifest = {"name": name}
    if job.namespace:
        made["namespace"] = job.namespace
    return {**made, "labels": job.all_labels}


def service(job: KubernetesJob) -> Manifest:
    """The Service that gives the pods names in DNS."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, job.name),
        "spec": {
            "clusterIP": Commented("None", "No cluster address: the Service gives every pod a name in DNS."),
            "publishNotReadyAddresses": Commented(True, "The nodes meet before they are ready."),
            "selector": job.own_labels,
            "ports": [{"name": "rendezvous", "port": RENDEZVOUS_PORT}],
        },
    }


def indexed_job(job: KubernetesJob) -> Manifest:
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata(job, job.name), "spec": job_spec(job)}


def jobset(job: KubernetesJob) -> Manifest:
    """The JobSet, from which the controller makes the Service and one Indexed Job."""
    template: Manifest = {"metadata": {"labels": job.all_labels}, "spec": job_spec(job)}
    spec: Manifest = {
        "network": {
            "enableDNSHostnames": True,
            "subdomain": job.name,
            "publishNotReadyAddresses": Commented(True, "The nodes meet before they are ready."),
        },
        "failurePolicy": Commented(
            {"maxRestarts": 0}, "The Job below counts failures; a restart of all pods would stop the healthy ones."
        ),
        "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": template}],
    }
    if job.ttl_s is not None:
        spec["ttlSecondsAfterFinished"] = job.ttl_s
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(job, job.name),
        "spec": spec,
    }


def job_spec(job: KubernetesJob) -> Manifest:
    elastic = job.least != job.most
    spec: Manifest = {
        "completionMode": "Indexed",
        "completions": job.most,
        "parallelism": job.most,
        "backoffLimitPerIndex": Commented(job.retries, "How often a pod may fail: --retries."),
        "maxFailedIndexes": Commented(
            job.most - job.least,
            "The job can continue without this many nodes."
            if elastic
            else "Every node is needed: the job ends if one fails finally.",
        ),
        "podReplacementPolicy": Commented("Failed", "Never two pods of one index at a time."),
        "podFailurePolicy": {"rules": failure_rules()},
    }
    if elastic:
        spec["successPolicy"] = Commented(
            {"rules": [{"succeededIndexes": "0"}]},
            "Pod 0 knows when the job is done; pods that were never scheduled are not waited for.",
        )
    if job.ttl_s is not None and not job.jobset:
        spec["ttlSecondsAfterFinished"] = job.ttl_s
    spec["template"] = {"metadata": {"labels": job.all_labels}, "spec": pod_spec(job)}
    return spec


def failure_rules() -> list[object]:
    """The ends of a pod that count as failures. The first matching rule decides; without one the end counts."""
    return [
        Commented(
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            "Preemption, eviction, a drained or lost node: the pod is replaced and joins again.",
        ),
        Commented(
            {
                "action": "Ignore",
                "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [EXIT_REQUEUE]},
            },
            f"{EXIT_REQUEUE}: it was asked to leave, and has saved and left.",
        ),
        Commented(
            {
                "action": "FailJob",
                "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [EXIT_USAGE, EXIT_NO_PROGRESS]},
            },
            f"{EXIT_USAGE}: the line or the configuration is wrong; {EXIT_NO_PROGRESS}: the job fails at the same step "
            "again and again. Another attempt would not help.",
        ),
    ]


def pod_spec(job: KubernetesJob) -> Manifest:
    spec: Manifest = {
        "restartPolicy": Commented("Never", "A pod that ended is replaced by a new one, by the rules above.")
    }
    if not job.alone and not job.jobset:
        spec["subdomain"] = Commented(job.name, "With the Service: pods are called NAME-INDEX.NAME.")
    spec["terminationGracePeriodSeconds"] = Commented(
        job.grace_s,
        f"--drain-timeout {seconds(job.drain_s)}, --shutdown-timeout {seconds(job.stop_grace_s)}, "
        f"{seconds(job.save_s)} to write snapshots, and {GRACE_SLACK_S} for the end.",
    )
    spec["enableServiceLinks"] = False
    if job.service_account:
        spec["serviceAccountName"] = job.service_account
    else:
        spec["automountServiceAccountToken"] = False
    if job.pull_secret:
        spec["imagePullSecrets"] = [{"name": job.pull_secret}]
    if job.priority_class:
        spec["priorityClassName"] = job.priority_class
    if job.node_selector:
        spec["nodeSelector"] = dict(job.node_selector)
    if job.run_as is not None:
        spec["securityContext"] = {
            "runAsNonRoot": True,
            "runAsUser": job.run_as[0],
            "runAsGroup": job.run_as[1],
            "fsGroup": job.run_as[1],
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    spec["containers"] = [container(job)]
    spec["volumes"] = volumes(job)
    return spec


def container(job: KubernetesJob) -> Manifest:
    made: Manifest = {
        "name": CONTAINER,
        "image": job.image,
        "command": ["holdfast", "run"],
        "args": arguments(job),
        "env": environment(job),
    }
    if job.cwd:
        made["workingDir"] = job.cwd
    if job.env_from:
        made["envFrom"] = [
            {"secretRef" if kind == "secret" else "configMapRef": {"name": name}} for kind, name in job.env_from
        ]
    if resources := amounts(job):
        made["resources"] = resources
    made["ports"] = ports(job)
    made |= probes()
    made["securityContext"] = {"allowPrivilegeEscalation": False}
    if job.run_as is not None:
        made["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    made["volumeMounts"] = mounts(job)
    return made


def arguments(job: KubernetesJob) -> list[object]:
    """The arguments of `holdfast run`. The user's come last and take precedence."""
    if job.alone:
        rendezvous: list[object] = ["--standalone"]
    else:
        nodes = str(job.most) if job.least == job.most else f"{job.least}:{job.most}"
        rendezvous = [
            f"--nnodes={nodes}",
            f"--node-rank={POD_INDEX}",
            "--rdzv-backend=c10d",
            Commented(f"--rdzv-endpoint={job.endpoint}", "Pod 0, by a name that it keeps when it is replaced."),
        ]
    served = [f"--health=[{POD_ADDRESS}]:{job.health_port}"]
    if job.metrics_port is not None:
        served.append(f"--metrics=[{POD_ADDRESS}]:{job.metrics_port}")
    fixed = [
        f"--rdzv-id={verbatim(job.name)}",
        f"--log-dir={RUNS_PATH}",
        f"--drain-timeout={seconds(job.drain_s)}",
        f"--shutdown-timeout={seconds(job.stop_grace_s)}",
        *served,
    ]
    return [*rendezvous, *fixed, *map(verbatim, job.run_options), "--", *map(verbatim, job.args)]


def seconds(number: float) -> str:
    """Write the number without an exponent, which `:g` uses for large ones."""
    return str(int(number)) if number == int(number) else str(number)


def verbatim(word: str) -> str:
    """Escape a word: Kubernetes replaces `$(NAME)` in arguments and values, and `$$` by `$`.

    >>> verbatim("--tag=$(date)")
    '--tag=$$(date)'
    """
    return word.replace("$", "$$")


def environment(job: KubernetesJob) -> list[object]:
    made: list[object] = [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    if job.token_secret:
        reference = {"secretKeyRef": {"name": job.token_secret, "key": "token"}}
        made.append(
            Commented(
                {"name": "HOLDFAST_TOKEN", "valueFrom": reference},
                "Agents prove to each other that they know it. It is on no command line.",
            )
        )
    return made + [{"name": name, "value": verbatim(value)} for name, value in job.env]


def amounts(job: KubernetesJob) -> Manifest:
    """Resources; requests and limits are equal."""
    asked: Manifest = {}
    if job.cpus:
        asked["cpu"] = job.cpus
    if job.memory:
        asked["memory"] = job.memory
    if job.gpus:
        asked[job.gpu_resource] = job.gpus
    return {"requests": asked, "limits": dict(asked)} if asked else {}


def ports(job: KubernetesJob) -> list[object]:
    made: list[object] = [{"name": "health", "containerPort": job.health_port}]
    if job.metrics_port not in (None, job.health_port):
        made.append({"name": "metrics", "containerPort": job.metrics_port})
    if not job.alone:
        made.append({"name": "rendezvous", "containerPort": RENDEZVOUS_PORT})
    return made


def probes() -> Manifest:
    def get(path: str, **timing: int) -> Manifest:
        return {"httpGet": {"path": path, "port": "health"}, "timeoutSeconds": 5, **timing}

    return {
        "startupProbe": get("/livez", periodSeconds=2, failureThreshold=STARTUP_S_MAX // 2),
        "readinessProbe": Commented(get("/readyz", periodSeconds=10), "Ready: all workers of this node run."),
        "livenessProbe": Commented(
            get("/livez", periodSeconds=LIVENESS_S, failureThreshold=LIVENESS_FAILURES_MAX),
            "Alive: the agent runs. It handles hanging workers itself (--hang-timeout).",
        ),
    }


def volumes(job: KubernetesJob) -> list[object]:
    shm: Manifest = {"medium": "Memory"}
    if job.shm:
        shm["sizeLimit"] = job.shm
    made: list[object] = [
        Commented(
            {"name": "shm", "emptyDir": shm},
            "Otherwise /dev/shm has 64 MB, too little for loaders, NCCL and snapshots in memory. It counts as memory.",
        ),
        {"name": "runs", "emptyDir": {}},
    ]
    return made + [{"name": f"volume-{number}", **source(each)} for number, each in enumerate(job.volumes)]


def source(volume: Volume) -> Manifest:
    match volume.kind:
        case "pvc":
            return {"persistentVolumeClaim": {"claimName": volume.name}}
        case "configmap":
            return {"configMap": {"name": volume.name}}
        case "secret":
            return {"secret": {"secretName": volume.name, "defaultMode": 0o400}}
        case _:
            return {"hostPath": {"path": volume.name}}


def mounts(job: KubernetesJob) -> list[object]:
    made: list[object] = [{"name": "shm", "mountPath": SHM_PATH}, {"name": "runs", "mountPath": RUNS_PATH}]
    for number, volume in enumerate(job.volumes):
        mount: Manifest = {"name": f"volume-{number}", "mountPath": volume.path}
        if volume.read_only:
            mount["readOnly"] = True
        made.append(mount)
    return made


def documents(values: Sequence[object], head: str = "") -> str:
    """Several documents in one text, under a comment. Raises MissingPackageError."""
    try:
        from ruamel.yaml import YAML
    except ImportError:
        raise MissingPackageError("holdfast submit --k8s needs ruamel.yaml: pip install 'holdfast[k8s]'") from None
    emitter = YAML()
    emitter.indent(mapping=INDENT, sequence=2 * INDENT, offset=INDENT)
    emitter.width = LINE_CHARACTERS_MAX
    texts = []
    for value in values:
        text = StringIO()
        emitter.dump(emittable(value), text)
        texts.append(text.getvalue())
    return "".join(f"{f'# {line}'.rstrip()}\n" for line in comment(head)) + "---\n".join(texts)


def plain(value: object) -> Any:
    """The value without its comments, for JSON."""
    match value:
        case Commented():
            return plain(value.value)
        case Mapping():
            return {key: plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
    return value


def emittable(value: object, column: int = 0) -> Any:
    """Convert the value for ruamel.yaml, with its comments at `column`. Raises TypeError for a type that YAML lacks."""
    from ruamel.yaml.comments import CommentedMap, CommentedSeq
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString

    match value:
        case Commented():
            return emittable(value.value, column)
        case None | bool() | int():
            return value
        case str():
            is_plain = PLAIN.fullmatch(value) and value.lower() not in WORDS_WITH_A_MEANING
            return value if is_plain else DoubleQuotedScalarString(value)
        case Mapping():
            made: Any = CommentedMap()
            for key, item in value.items():
                made[emittable(key)] = emittable(item, column + INDENT)
        case Sequence():
            made = CommentedSeq(emittable(item, column + INDENT) for item in value)
        case _:
            raise TypeError(f"{type(value).__name__} is not for YAML")
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        if isinstance(item, Commented):
            made.yaml_set_comment_before_after_key(key, before="\n".join(comment(item.note)), indent=column)
    return made


def comment(note: str) -> Iterator[str]:
    """The lines of a comment. A character that is not printable would end the comment, or the document."""
    for line in note.splitlines():
        yield "".join(letter if letter.isprintable() else "?" for letter in line)
