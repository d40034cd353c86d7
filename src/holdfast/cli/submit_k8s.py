"""`holdfast submit --k8s`: prints the manifests of a job, or pipes them to kubectl.

Knows kubectl, its own options, and how a line becomes a KubernetesJob; launchers/kubernetes.py makes the manifests.
Options of `holdfast run` are read only from the line and go into the pods' line: variables and files of this machine
mean nothing there.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from holdfast.cli import grammar, print_version, say
from holdfast.cli.devices import NAMES, THIS_NODE
from holdfast.cli.option_table import FLAG, HOSTS, INT, OPTIONS, TEXT, Option, flag_of, in_group, own
from holdfast.cli.option_table import line as help_line
from holdfast.cli.printing import print_json
from holdfast.cli.program import command_kind
from holdfast.cli.rendezvous import conf_to_publish, node_range
from holdfast.cli.resolve import (
    check_plain_values,
    is_number,
    node_size,
    preempt_signal,
    served,
    signals_to_handle,
    stop_grace_s,
    streams,
)
from holdfast.inherited import TOKEN_VARIABLE, draw_token
from holdfast.launchers import kubernetes
from holdfast.launchers import kubernetes_names as checks
from holdfast.launchers.kubernetes import (
    HEALTH_PORT,
    OWN_VARIABLES,
    RENDEZVOUS_PORT,
    RUNS_PATH,
    SHM_PATH,
    Form,
    KubernetesJob,
    last_pod,
)
from holdfast.launchers.kubernetes_yaml import documents, plain
from holdfast.protocol.errors import (
    EndpointError,
    MissingPackageError,
    NodesError,
    ScriptError,
    SubmitError,
    UsageError,
)
from holdfast.protocol.train_contract import FINISH_LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.cli.grammar import CommandLine, Parsed


T = TypeVar("T")
K8S, POD = "Kubernetes", "each pod (a node of the job)"
JOINER = "\0"
"""A character that no argument of a command line can contain."""
SECRETIVE = frozenset({"TOKEN", "SECRET", "PASSWORD", "PASSWD", "KEY", "CREDENTIALS"})
JOIN_S = 3600
"""Limit for the nodes to join: pods may wait long for machines, and the other pods wait for them."""
NODES_MAX = 10_000
NUMBER_MAX = 2**31 - 1
"""Largest value of Kubernetes' counters."""


def ours(name: str, kind: str, default: object, text: str, metavar: str = "", *, many: bool = False) -> Option:
    return own(name, kind, default, text, metavar, env=False, many=many, joiner=JOINER)


OWN = (
    *in_group(
        K8S,
        ours("--nodes", TEXT, "", "number of pods, or a range; --nnodes is the same", "N|MIN:MAX"),
        ours("--name", TEXT, "", "name of the job, by default the script's", "NAME"),
        ours("--namespace", TEXT, "", "the namespace; by default kubectl's own", "NAME"),
        ours("--jobset", FLAG, False, "a JobSet instead of an Indexed Job with a Service"),
        ours("--trainjob", FLAG, False, "a TrainJob of Kubeflow Trainer v2, with its TrainingRuntime"),
        ours("--restart-agent", TEXT, "", "with --jobset: restart in place by this in-place-restart-agent", "IMAGE"),
        ours("--queue", TEXT, "", "the LocalQueue of Kueue", "NAME"),
        ours("--retries", INT, 3, "how often a pod may fail; preemption does not count", "N"),
        ours("--ttl", INT, None, "delete the job this time after its end", "SECONDS"),
        ours("--label", TEXT, "", "a label on all objects, for example of a queue", "KEY=VALUE", many=True),
        ours("--token-secret", TEXT, "", "an existing Secret whose key `token` is the job's token", "NAME"),
        ours("--no-token", FLAG, False, "agents join without a job token"),
        ours("--apply", FLAG, False, "create it by kubectl, with a new token in a Secret"),
        ours("--dry-run", FLAG, False, "only print the manifests, as without --apply"),
        ours("--json", FLAG, False, "print JSON"),
    ),
    *in_group(
        POD,
        ours("--image", TEXT, "", "with holdfast, the script and what it imports", "IMAGE"),
        ours("--gpus", INT, 0, "number of GPUs, and of workers", "N"),
        ours("--gpu-resource", TEXT, "nvidia.com/gpu", "name of the GPU resource", "DOMAIN/NAME"),
        ours("--cpus", TEXT, "", "CPUs", "N"),
        ours("--memory", TEXT, "", "memory, /dev/shm included", "SIZE"),
        ours("--shm", TEXT, "", "limit of /dev/shm, by default that of the memory", "SIZE"),
        ours(
            "--volume",
            TEXT,
            "",
            "mount a CLAIM, configmap/NAME, secret/NAME or /FOLDER",
            "SOURCE:/PATH[:ro]",
            many=True,
        ),
        ours("--env", TEXT, "", "an environment variable", "NAME=VALUE", many=True),
        ours("--env-from", TEXT, "", "all keys of a Secret or ConfigMap as variables", "secret/NAME", many=True),
        ours("--cwd", TEXT, "", "working folder, by default the image's", "/FOLDER"),
        ours("--service-account", TEXT, "", "run as this account; without it no account is mounted", "NAME"),
        ours("--pull-secret", TEXT, "", "Secret for pulling the image", "NAME"),
        ours("--priority-class", TEXT, "", "priority class of the pods", "NAME"),
        ours("--node-selector", TEXT, "", "only on machines with this label", "KEY=VALUE", many=True),
        ours("--run-as", TEXT, "", "run as this user, by the restricted security standard", "UID[:GID]"),
    ),
)
READ_HERE = ("nnodes", "rdzv_conf", "drain_timeout", "shutdown_timeout", "health", "metrics")
"""Options of a run that the manifest sets."""
OF_THE_POD = ("standalone", "node_rank", "master_addr", "master_port", "local_addr")
"""Options that differ from pod to pod: the manifest sets them, and the line may not."""
NOT_FOR_PODS = ("slurm", "config", "no_config", "plan", "json")
"""Options of a run that mean nothing here, like all options for ssh."""
OF_A_RUN = tuple(option for option in OPTIONS if option.group != HOSTS and option.dest not in NOT_FOR_PODS)
TABLE = (*OWN, *(option for option in OF_A_RUN if option.dest not in {each.dest for each in OWN}))


def read_job(parsed: Parsed, line: CommandLine, notices: list[str]) -> KubernetesJob:
    """The job of this line. Raises CallerError for the first invalid option."""
    given = parsed.values
    check_text(line)
    check_plain_values(parsed)
    refuse_what_the_manifest_says(parsed)
    if not given.image:
        raise UsageError("--image is missing: an image with holdfast, the script and what it imports")
    least, most = nodes(parsed)
    form = form_of(parsed)
    name = job_name(parsed, most, form)
    gpus = at_least_0(parsed, "gpus")
    processes = workers(parsed, gpus)
    check_run(parsed, processes, notices)
    env = several(parsed, "env", checks.variable)
    check_env(env, notices)
    cpus = checked(parsed, "cpus", checks.cpus)
    job = KubernetesJob(
        name=name,
        image=checked(parsed, "image", checks.image),
        least=least,
        most=most,
        run_options=run_words(parsed, line, processes, alone=most == 1),
        args=(line.script or "", *line.args),
        namespace=checked(parsed, "namespace", checks.label),
        form=form,
        restart_agent=restart_agent(parsed, form, elastic=least != most),
        queue=checked(parsed, "queue", checks.label),
        gpus=gpus,
        gpu_resource=checked(parsed, "gpu_resource", checks.resource),
        cpus=cpus,
        memory=checked(parsed, "memory", checks.size),
        shm=checked(parsed, "shm", checks.size),
        volumes=volumes(parsed),
        env=(*threads(cpus, processes, dict(env)), *env),
        env_from=several(parsed, "env_from", checks.source),
        cwd=checked(parsed, "cwd", checks.folder),
        service_account=checked(parsed, "service_account", checks.subdomain),
        pull_secret=checked(parsed, "pull_secret", checks.subdomain),
        priority_class=checked(parsed, "priority_class", checks.subdomain),
        run_as=parsed.converted("run_as", checks.user) if given.run_as else None,
        labels=several(parsed, "label", checks.pair),
        node_selector=several(parsed, "node_selector", checks.pair),
        retries=at_least_0(parsed, "retries"),
        ttl_s=None if given.ttl is None else at_least_0(parsed, "ttl"),
        token_secret=token_secret(parsed, name, alone=most == 1),
        drain_s=given.drain_timeout,
        stop_grace_s=stop_grace_s(parsed, {}),  # the pods' environment, not this one
        save_s=FINISH_LIMIT_S,
        health_port=port(parsed, "health") or HEALTH_PORT,
        metrics_port=port(parsed, "metrics"),
    )
    for key, value in job.labels:
        if key in job.own_labels:
            raise UsageError(f"--label {key}={value}: the Service selects the pods by this label; use another")
    if job.grace_s > NUMBER_MAX:
        raise UsageError("--drain-timeout, --shutdown-timeout: longer than Kubernetes can wait")
    return job


def check_text(line: CommandLine) -> None:
    """Raise UsageError for text that no manifest can contain."""
    for word in (*line.values.values(), line.script, *line.args):
        if isinstance(word, str) and not word.isascii():
            try:
                word.encode()
            except UnicodeEncodeError:
                raise UsageError(f"{word!a}: not UTF-8, which manifests must be") from None


def workers(parsed: Parsed, gpus: int) -> str:
    """The value of --nproc-per-node in the pods."""
    text: str = parsed.values.nproc_per_node
    if not parsed.given("nproc_per_node"):
        return str(gpus or 1)
    if text not in NAMES:  # only the pod knows their number
        node_size(parsed, {}, THIS_NODE._replace(torch=lambda _: 1))
    return text


def check_run(parsed: Parsed, processes: str, notices: list[str]) -> None:
    """Raise CallerError for what the agents would refuse, as far as it is known here."""
    if not parsed.values.training_script:
        raise ScriptError("the training script's name is empty")
    command_kind(parsed, notices)
    signals_to_handle(parsed, notices)
    preempt_signal(parsed)
    for dest in ("redirects", "tee"):
        streams(parsed, dest, int(processes) if is_number(processes) else NODES_MAX, notices)


def volumes(parsed: Parsed) -> tuple[checks.Volume, ...]:
    """The volumes. Raises UsageError for two volumes at one path."""
    found = several(parsed, "volume", checks.volume)
    taken = {SHM_PATH: "used by the pods, see --shm", RUNS_PATH: "used for run folders, see --log-dir"}
    for each in found:
        if each.path in taken:
            raise UsageError(f"--volume {each.name}:{each.path}: that path is {taken[each.path]}")
        taken[each.path] = f"used by {each.name}"
    return found


def refuse_what_the_manifest_says(parsed: Parsed) -> None:
    for dest in OF_THE_POD:
        if parsed.given(dest):
            raise UsageError(f"{parsed.as_written(dest)}: not valid with --k8s: the manifest sets it")
    if parsed.given("rdzv_endpoint") != parsed.given("rdzv_backend"):
        raise UsageError(
            "--rdzv-backend and --rdzv-endpoint: leave both out (the endpoint is pod 0), or give both, as for etcd"
        )


def nodes(parsed: Parsed) -> tuple[int, int]:
    """The range in --nodes, or in --nnodes as with torchrun."""
    dest = "nodes" if parsed.given("nodes") else "nnodes"
    if not parsed.given(dest):
        raise NodesError("--nodes is missing: how many pods, as in --nodes 4 or --nodes 4:8")
    if dest == "nodes" and parsed.given("nnodes"):
        raise NodesError(f"{parsed.as_written('nodes')} and {parsed.as_written('nnodes')} mean the same; leave one out")
    least, most = parsed.converted(dest, node_range, NodesError)
    if most > NODES_MAX:
        raise parsed.error(dest, NodesError, f"more than {NODES_MAX} pods")
    return least, most


def form_of(parsed: Parsed) -> Form:
    if not parsed.values.trainjob:
        return Form.JOBSET if parsed.values.jobset else Form.JOB
    if parsed.values.jobset:
        raise UsageError("--jobset and --trainjob exclude each other: Kubeflow makes a JobSet from a TrainJob")
    if parsed.given("ttl"):
        raise UsageError("--ttl: not valid with --trainjob: a TrainJob whose JobSet is deleted would begin again")
    return Form.TRAINJOB


def restart_agent(parsed: Parsed, form: Form, *, elastic: bool) -> str:
    """The image of JobSet's agent for restarts in place; empty: none."""
    if not parsed.given("restart_agent"):
        return ""
    if form is not Form.JOBSET:
        raise UsageError("--restart-agent: only with --jobset: restarts in place are a strategy of JobSet")
    if elastic:
        raise NodesError(
            "--restart-agent: not with a range of --nodes: JobSet starts the containers when all pods are there"
        )
    if not (parsed.values.namespace or parsed.values.service_account):
        raise UsageError("--restart-agent: give --namespace too, for the rights of the account that it runs as")
    return parsed.converted("restart_agent", checks.image)


def job_name(parsed: Parsed, most: int, form: Form) -> str:
    end = last_pod(most, form)
    if parsed.given("name"):
        return parsed.converted("name", lambda text: checks.job_name(text, end))
    return checks.job_name(checks.name_from(parsed.values.training_script), end)


def run_words(parsed: Parsed, line: CommandLine, processes: str, *, alone: bool) -> tuple[str, ...]:
    """The options of this line that go into the pods' line."""
    manifests_own = {option.dest for option in OWN}
    found = [f"--nproc-per-node={processes}"]
    for option in OF_A_RUN:
        text = line.values.get(option.dest)
        if text is None or option.dest in manifests_own or option.dest in (*READ_HERE, "nproc_per_node"):
            continue
        found.append(option.name if option.kind == FLAG else f"{option.name}={text}")
    if conf := rdzv_conf(parsed, alone=alone):
        found.append(f"--rdzv-conf={conf}")
    return tuple(found)


def rdzv_conf(parsed: Parsed, *, alone: bool) -> str:
    """The user's settings, with a longer join_timeout unless one is given."""
    conf = conf_to_publish(parsed, "the manifest; mount a Secret and use password_file=")
    if not alone and not parsed.given("rdzv_backend"):
        conf = {"join_timeout": str(JOIN_S), **conf}
    return ",".join(f"{key}={value}" for key, value in conf.items())


def threads(cpus: str, processes: str, env: dict[str, str]) -> list[tuple[str, str]]:
    """The variable OMP_NUM_THREADS by the pod's share of CPUs: a pod sees all CPUs of its machine."""
    if not cpus or "OMP_NUM_THREADS" in env or not is_number(processes) or int(processes) == 0:
        return []
    number = float(cpus[:-1]) / 1000 if cpus.endswith("m") else float(cpus)
    return [("OMP_NUM_THREADS", str(max(1, math.floor(number) // int(processes))))]


def check_env(env: tuple[tuple[str, str], ...], notices: list[str]) -> None:
    """Raise SubmitError for the job's token, and UsageError for variables that Kubernetes sets. Warn of other secrets:
    many people can read a manifest."""
    for name, value in env:
        if name in OWN_VARIABLES:
            raise UsageError(f"--env {name}=...: Kubernetes sets this variable in each pod; use another name")
        if name == TOKEN_VARIABLE:
            raise SubmitError(f"--env {name}=...: would be readable in the manifest; use --apply or --token-secret")
        if value and any(part in SECRETIVE for part in name.upper().split("_")):
            notices.append(f"--env {name}=... is readable in the manifest; use --env-from secret/NAME")


def token_secret(parsed: Parsed, name: str, *, alone: bool) -> str:
    """The name of the Secret with the job's token; empty: no Secret."""
    if parsed.values.no_token:
        if parsed.given("token_secret"):
            raise UsageError("--no-token and --token-secret exclude each other")
        return ""
    if parsed.given("token_secret"):
        return parsed.converted("token_secret", checks.subdomain)
    # A pod alone has nobody to exclude, and a user who mounts a token file has a Secret already.
    return "" if alone or "token_file" in parsed.values.rdzv_conf else f"{name}-token"


def port(parsed: Parsed, dest: str) -> int | None:
    """The port of --health or --metrics, served at the pod's address; None: not given."""
    place = served(parsed, dest)
    if place is None:
        return None
    if place.port == 0 or ":" in getattr(parsed.values, dest):
        raise parsed.error(dest, EndpointError, "must be a port only: a pod serves at its own address")
    if place.port == RENDEZVOUS_PORT:
        raise parsed.error(dest, EndpointError, "the rendezvous uses this port")
    return place.port


def at_least_0(parsed: Parsed, dest: str) -> int:
    number: int = getattr(parsed.values, dest)
    if not 0 <= number <= NUMBER_MAX:
        raise parsed.error(dest, UsageError, "must be 0 or more" if number < 0 else f"must be {NUMBER_MAX} or less")
    return number


def checked(parsed: Parsed, dest: str, check: Callable[[str], str]) -> str:
    """The checked value; empty: not given."""
    return parsed.converted(dest, check) if getattr(parsed.values, dest) else ""


def several(parsed: Parsed, dest: str, check: Callable[[str], T]) -> tuple[T, ...]:
    found = []
    for text in filter(None, getattr(parsed.values, dest).split(JOINER)):
        try:
            found.append(check(text))
        except ValueError as error:
            raise UsageError(f"{flag_of(dest)} {text}: {error}") from None
    return tuple(found)


REQUEST_S_MAX = 60


def main(argv: Sequence[str]) -> int:
    """Run `holdfast submit --k8s` with these arguments. Returns the exit status. Raises CallerError."""
    parsed = grammar.parse(argv, {}, TABLE)
    if parsed.values.help:
        print(usage())
        return 0
    if parsed.values.version:
        return print_version()
    given = parsed.values
    if given.apply and given.dry_run:
        raise UsageError("--apply and --dry-run exclude each other")
    notices = list(parsed.notices)
    job = read_job(parsed, grammar.read_line(argv, TABLE), notices)
    for notice in notices:
        say(notice)
    return (apply if given.apply else show)(job, own_secret=not given.token_secret, as_json=given.json)


def usage() -> str:
    lines = [
        "usage: holdfast submit --k8s --nodes N --image IMAGE [options, also of holdfast run] script.py [arguments]",
        "",
        "Prints the manifests of a job for Kubernetes, or creates them by kubectl (--apply). The image has the script;",
        "options of `holdfast run` go into the pods' line (see holdfast run --help).",
    ]
    for group in (K8S, POD):
        lines += ["", f"{group}:", *(help_line(option) for option in OWN if option.group == group)]
    return "\n".join(lines)


class ManifestsData(TypedDict):
    """A job for Kubernetes."""

    name: str
    namespace: str
    """Empty: kubectl's own."""
    created: bool
    """False: it was only printed."""
    manifests: list[Any]
    """All objects but the Secret."""


JSON_FORMS = {"submit": ((ManifestsData,),)}


def manifests_data(job: KubernetesJob, *, created: bool) -> ManifestsData:
    return ManifestsData(
        name=job.name, namespace=job.namespace, created=created, manifests=plain(kubernetes.manifests(job))
    )


def show(job: KubernetesJob, *, own_secret: bool, as_json: bool) -> int:
    """Print the manifests, without secrets: the same line prints the same text."""
    if as_json:
        print_json(manifests_data(job, created=False))
        return 0
    head = f"{job.name}: a job of holdfast. Start it with: kubectl create -f FILE"
    if job.token_secret and own_secret:
        space = f" -n {job.namespace}" if job.namespace else ""
        head += (
            "\nBefore that, create its token (--apply does both):\n"
            f"  holdfast token | kubectl create{space} secret generic {job.token_secret} "
            "--from-file=token=/dev/stdin"
        )
    print(documents(kubernetes.manifests(job), head), end="")
    return 0


def apply(job: KubernetesJob, *, own_secret: bool, as_json: bool) -> int:
    """Pipe the manifests, the Secret first, to `kubectl create`, which never changes an existing job.

    Raises MissingPackageError or SubmitError.
    """
    program = shutil.which("kubectl")
    if program is None:
        raise MissingPackageError(
            "kubectl is not on PATH: install it, or leave --apply out and apply the manifests yourself"
        )
    made = kubernetes.manifests(job)
    if job.token_secret and own_secret:
        made.insert(0, kubernetes.secret(job, draw_token()))
    sys.stdout.flush()
    try:
        done = subprocess.run(
            [program, "create", f"--request-timeout={REQUEST_S_MAX}s", "-f", "-"],
            input=documents(made).encode(),
            stdout=2 if as_json else None,  # only our JSON goes to stdout
            check=False,
        )
    except OSError as error:
        raise SubmitError(f"{program} does not run: {error.strerror}") from None
    if done.returncode < 0:
        raise SubmitError(f"kubectl create was ended by signal {-done.returncode}")
    if done.returncode > 0:
        raise SubmitError(f"kubectl create ended with exit code {done.returncode}; its message is above")
    if as_json:
        print_json(manifests_data(job, created=True))
    space = f" -n {job.namespace}" if job.namespace else ""
    selector = f"-l app.kubernetes.io/instance={job.name}"
    kinds = f"{','.join(kinds_of(job))},secret"
    # kubectl refuses to follow more than 5 pods without a larger limit.
    say(f"watch it:   kubectl logs{space} {selector} --prefix --follow --max-log-requests={max(job.most, 5)}")
    say(f"remove it:  kubectl delete{space} {kinds} {selector}")
    return 0


def kinds_of(job: KubernetesJob) -> list[str]:
    """The kinds of the manifests, as kubectl calls them; the job itself first."""
    return [str(plain(each)["kind"]).lower() for each in reversed(kubernetes.manifests(job))]
