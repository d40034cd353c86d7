"""The manifests of a job for Kubernetes, as data: an Indexed Job with a headless Service, a JobSet, or a TrainJob with
its TrainingRuntime. PURE.

Knows the meaning of the fields; the comments in the manifest give the reasons. Knows no option of the command line and
starts nothing. kubernetes_yaml.py makes the text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from holdfast.launchers.kubernetes_names import Volume
from holdfast.launchers.kubernetes_yaml import Commented
from holdfast.protocol.exit_codes import ExitCode, Scheduler, codes_for

Manifest = dict[str, object]

RENDEZVOUS_PORT = 29400
HEALTH_PORT = 9400
CONTAINER = "agent"
REPLICATED_JOB = "node"
"""Name in a JobSet, and part of its pods' host names. Kubeflow Trainer wants it, for the container as well."""
TRAINER_API = "trainer.kubeflow.org/v1alpha1"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
RESTART_CONTAINER = "restart-agent"
RESTART_PORT = 8081
"""Port at which JobSet's agent for restarts in place reports that all pods are there."""
BARRIER_S_MAX = 3600
"""Limit for that: pods may wait long for machines."""
RETRIES_MAX = 2**31 - 1
AGAIN, NEVER = codes_for(Scheduler.AGAIN), codes_for(Scheduler.NEVER)
"""Exit codes after which the same container must not be started again."""
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


class Form(Enum):
    """The kind of object that makes the pods."""

    JOB = "Job"
    JOBSET = "JobSet"
    TRAINJOB = "TrainJob"
    """Kubeflow Trainer v2; it makes a JobSet of the same name."""


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
    form: Form
    restart_agent: str
    """Image of JobSet's in-place-restart-agent; empty: pods that end are replaced."""
    queue: str
    """Kueue's LocalQueue."""
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
        host = f"{self.name}-0" if self.form is Form.JOB else f"{self.name}-{REPLICATED_JOB}-0-0"
        return f"{host}.{self.name}:{RENDEZVOUS_PORT}"

    @property
    def elastic(self) -> bool:
        return self.least != self.most

    @property
    def nodes(self) -> str:
        """The value of --nnodes."""
        return f"{self.least}:{self.most}" if self.elastic else str(self.most)

    @property
    def container(self) -> str:
        """Name of the agent's container."""
        return REPLICATED_JOB if self.form is Form.TRAINJOB else CONTAINER

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


def last_pod(most: int, form: Form) -> str:
    """The suffix of the last pod's host name, which is the longest one."""
    return f"-{most - 1}" if form is Form.JOB else f"-{REPLICATED_JOB}-0-{most - 1}"


def manifests(job: KubernetesJob) -> list[object]:
    """The manifests in the order of their creation: what the pods refer to exists before the pods."""
    account = restart_account(job) if job.restart_agent and not job.service_account else []
    match job.form:
        case Form.JOB:
            return [*([] if job.alone else [service(job)]), indexed_job(job)]
        case Form.JOBSET:
            return [*account, jobset(job)]
        case Form.TRAINJOB:
            return [training_runtime(job), train_job(job)]


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


def queued(job: KubernetesJob) -> Manifest:
    """The metadata of the object that Kueue admits."""
    made = metadata(job, job.name)
    if job.queue:
        made["labels"] = {**job.all_labels, QUEUE_LABEL: job.queue}
        if job.elastic and job.form is Form.JOB:
            # Kueue may also set completions to that number, but maxFailedIndexes must not be above it.
            made["annotations"] = Commented(
                {"kueue.x-k8s.io/job-min-parallelism": str(job.least)},
                f"Kueue starts as many pods as the queue has room for, {job.least} or more.",
            )
    return made


def indexed_job(job: KubernetesJob) -> Manifest:
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": queued(job), "spec": job_spec(job)}


def jobset(job: KubernetesJob) -> Manifest:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": queued(job),
        "spec": jobset_spec(job),
    }


def training_runtime(job: KubernetesJob) -> Manifest:
    """The pods of a TrainJob. Kubeflow Trainer makes a JobSet from it, with TrainJob's number of nodes."""
    return {
        "apiVersion": TRAINER_API,
        "kind": "TrainingRuntime",
        "metadata": metadata(job, job.name),
        "spec": {
            "mlPolicy": Commented(
                {"numNodes": job.most, "torch": {}},
                "Kubeflow sets torchrun's variables (PET_NNODES and others); the arguments below take precedence.",
            ),
            "template": {"spec": jobset_spec(job)},
        },
    }


def train_job(job: KubernetesJob) -> Manifest:
    return {
        "apiVersion": TRAINER_API,
        "kind": "TrainJob",
        "metadata": queued(job),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
            "trainer": {"numNodes": job.most},
        },
    }


def jobset_spec(job: KubernetesJob) -> Manifest:
    """The JobSet, from which the controller makes the Service and one Indexed Job."""
    labels = job.all_labels
    if job.form is Form.TRAINJOB:
        labels = {**labels, "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    template: Manifest = {"metadata": {"labels": labels}, "spec": job_spec(job)}
    spec: Manifest = {
        "network": {
            "enableDNSHostnames": True,
            "subdomain": job.name,
            "publishNotReadyAddresses": Commented(True, "The nodes meet before they are ready."),
        },
        "failurePolicy": failure_policy(job),
        "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": template}],
    }
    if job.ttl_s is not None:
        spec["ttlSecondsAfterFinished"] = job.ttl_s
    return spec


def failure_policy(job: KubernetesJob) -> object:
    if not job.restart_agent:
        return Commented(
            {"maxRestarts": 0}, "The Job below counts failures; a restart of all pods would stop the healthy ones."
        )
    return Commented(
        {
            "maxRestarts": job.retries,
            "restartStrategy": "InPlaceRestart",
            "rules": [
                {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
            ],
        },
        "If a container ends with a failure, all pods restart their containers and keep their machines: --retries.",
    )


def job_spec(job: KubernetesJob) -> Manifest:
    spec: Manifest = {
        "completionMode": "Indexed",
        "completions": job.most,
        "parallelism": job.most,
        **retry_limits(job),
        "podReplacementPolicy": Commented("Failed", "Never two pods of one index at a time."),
        "podFailurePolicy": {"rules": failure_rules(job)},
    }
    if job.elastic:
        spec["successPolicy"] = Commented(
            {"rules": [{"succeededIndexes": "0"}]},
            "Pod 0 knows when the job is done; pods that were never scheduled are not waited for.",
        )
    if job.ttl_s is not None and job.form is Form.JOB:
        spec["ttlSecondsAfterFinished"] = job.ttl_s
    spec["template"] = {"metadata": {"labels": job.all_labels}, "spec": pod_spec(job)}
    return spec


def retry_limits(job: KubernetesJob) -> Manifest:
    if job.restart_agent:
        return {"backoffLimit": Commented(RETRIES_MAX, "The JobSet counts failures.")}
    return {
        "backoffLimitPerIndex": Commented(job.retries, "How often a pod may fail: --retries."),
        "maxFailedIndexes": Commented(
            job.most - job.least,
            "The job can continue without this many nodes."
            if job.elastic
            else "Every node is needed: the job ends if one fails finally.",
        ),
    }


def failure_rules(job: KubernetesJob) -> list[object]:
    """The ends of a pod that count as failures. The first matching rule decides; without one the end counts."""
    ended = {"containerName": job.container, "operator": "In"}
    return [
        Commented(
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            "Preemption, eviction, a drained or lost node: the pod is replaced and joins again.",
        ),
        Commented(
            {"action": "Ignore", "onExitCodes": {**ended, "values": numbers_of(AGAIN)}},
            meanings_of(AGAIN),
        ),
        Commented(
            {"action": "FailJob", "onExitCodes": {**ended, "values": numbers_of(NEVER)}},
            meanings_of(NEVER),
        ),
    ]


def numbers_of(codes: Iterable[ExitCode]) -> list[int]:
    return sorted(each.number for each in codes)


def meanings_of(codes: Iterable[ExitCode]) -> str:
    """The comment of a rule about these codes."""
    return "; ".join(f"{each.number}: {each.meaning}" for each in codes) + "."


def pod_spec(job: KubernetesJob) -> Manifest:
    spec: Manifest = {
        "restartPolicy": Commented("Never", "A pod that ended is replaced by a new one, by the rules above.")
    }
    if not job.alone and job.form is Form.JOB:
        spec["subdomain"] = Commented(job.name, "With the Service: pods are called NAME-INDEX.NAME.")
    spec["terminationGracePeriodSeconds"] = Commented(
        job.grace_s,
        f"--drain-timeout {seconds(job.drain_s)}, --shutdown-timeout {seconds(job.stop_grace_s)}, "
        f"{seconds(job.save_s)} to write snapshots, and {GRACE_SLACK_S} for the end.",
    )
    spec["enableServiceLinks"] = False
    if account := job.service_account or (restart_account_name(job) if job.restart_agent else ""):
        spec["serviceAccountName"] = account
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
    if job.restart_agent:
        spec["initContainers"] = [restart_container(job)]
    spec["containers"] = [container(job)]
    spec["volumes"] = volumes(job)
    return spec


def restart_container(job: KubernetesJob) -> Manifest:
    """JobSet's agent for restarts in place (KEP-467), beside our agent: it ends when all pods are to restart.

    Not around our agent, its other mode: it would end it by SIGKILL, without time to save.
    """
    fields = {"JOBSET_NAME": "metadata.annotations['jobset.sigs.k8s.io/jobset-name']", "POD_NAME": "metadata.name"}
    return {
        "name": RESTART_CONTAINER,
        "image": job.restart_agent,
        "restartPolicy": Commented("Always", "A container that runs beside the next ones."),
        "restartPolicyRules": [
            {"action": "RestartAllContainers", "exitCodes": {"operator": "NotIn", "values": [0]}},
        ],
        "startupProbe": Commented(
            {
                "httpGet": {"path": "/barrier-is-down", "port": RESTART_PORT},
                "periodSeconds": 1,
                "failureThreshold": BARRIER_S_MAX,
            },
            "The nodes start when all pods are there.",
        ),
        "env": [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }


def restart_account_name(job: KubernetesJob) -> str:
    return f"{job.name}-restart"


def restart_account(job: KubernetesJob) -> list[Manifest]:
    """The account of JobSet's agent for restarts in place, which marks its own pod and watches the JobSet."""
    meta, group = metadata(job, restart_account_name(job)), "rbac.authorization.k8s.io"
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]},
        {"apiGroups": ["jobset.x-k8s.io"], "resources": ["jobsets"], "verbs": ["get", "list", "watch"]},
    ]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": meta, "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "subjects": [{"kind": "ServiceAccount", "name": restart_account_name(job), "namespace": job.namespace}],
            "roleRef": {"apiGroup": group, "kind": "Role", "name": restart_account_name(job)},
        },
    ]


def container(job: KubernetesJob) -> Manifest:
    made: Manifest = {
        "name": job.container,
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
    if job.restart_agent:
        made["restartPolicy"] = "Never"
        made["restartPolicyRules"] = Commented(
            [
                {
                    "action": "RestartAllContainers",
                    "exitCodes": {"operator": "NotIn", "values": [0, *numbers_of((*AGAIN, *NEVER))]},
                }
            ],
            "Any other failure restarts the containers of this pod, and then those of all pods.",
        )
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
        rendezvous = [
            f"--nnodes={job.nodes}",
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
