"""`holdfast submit --k8s`: a job's manifests, printed or piped to the user's kubectl.

Knows kubectl; the line is read by submit_k8s_line.py, what a manifest says is schedulers/kubernetes.py's.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from holdfast.cli import grammar
from holdfast.cli.helptext import line as help_line
from holdfast.cli.submit_k8s_line import K8S, OWN, POD, TABLE, read_job
from holdfast.core.errors import MissingPackageError, SubmitError, UsageError
from holdfast.runtime.secret_variables import draw_token
from holdfast.schedulers import kubernetes
from holdfast.schedulers.kubernetes_yaml import documents

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.schedulers.kubernetes import KubernetesJob

REQUEST_S_MAX = 60


def main(argv: Sequence[str]) -> int:
    """Returns the exit status. Raises CallerError."""
    parsed = grammar.parse(argv, {}, TABLE)
    if parsed.values.help:
        print(usage())
        return 0
    if parsed.values.version:
        from holdfast.cli import print_version

        return print_version()
    given = parsed.values
    if given.apply and given.dry_run:
        raise UsageError("--apply and --dry-run exclude each other")
    notices = list(parsed.notices)
    job = read_job(parsed, grammar.read_line(argv, TABLE), notices)
    for notice in notices:
        say(notice)
    return (apply if given.apply else show)(job, own_secret=not given.token_secret)


def usage() -> str:
    lines = [
        "usage: holdfast submit --k8s --nodes N --image IMAGE [options] [options of holdfast run] script.py [arguments]",
        "",
        "Prints the manifests of a job for Kubernetes, or hands them to kubectl (--apply). The script is the image's;",
        "options of `holdfast run` go into the pods' line (see holdfast run --help).",
    ]
    for group in (K8S, POD):
        lines += ["", f"{group}:", *(help_line(option) for option in OWN if option.group == group)]
    return "\n".join(lines)


def show(job: KubernetesJob, *, own_secret: bool) -> int:
    """Prints the manifests. The same line prints the same text, so there is no secret in it."""
    head = f"{job.name}: a job of holdfast. Start it with: kubectl create -f FILE"
    if job.token_secret and own_secret:
        space = f" -n {job.namespace}" if job.namespace else ""
        head += (
            "\nFirst, once, give it a token (--apply does both):\n"
            f"  holdfast token | kubectl create{space} secret generic {job.token_secret} "
            "--from-file=token=/dev/stdin"
        )
    print(documents(kubernetes.manifests(job), head), end="")
    return 0


def apply(job: KubernetesJob, *, own_secret: bool) -> int:
    """Pipes the manifests, the Secret first, to kubectl. `create`: a job that is there already is never changed.

    Raises MissingPackageError or SubmitError.
    """
    program = shutil.which("kubectl")
    if program is None:
        raise MissingPackageError(
            "kubectl is not on PATH: install it, or leave --apply out and hand what is printed to your cluster"
        )
    made = kubernetes.manifests(job)
    if job.token_secret and own_secret:
        made.insert(0, kubernetes.secret(job, draw_token()))
    sys.stdout.flush()
    try:
        done = subprocess.run(
            [program, "create", f"--request-timeout={REQUEST_S_MAX}s", "-f", "-"],
            input=documents(made).encode(),
            check=False,
        )
    except OSError as error:
        raise SubmitError(f"{program} does not run: {error.strerror}") from None
    if done.returncode < 0:
        raise SubmitError(f"kubectl create was ended by signal {-done.returncode}")
    if done.returncode > 0:
        raise SubmitError(f"kubectl create ended with exit code {done.returncode}; what it says is above")
    space = f" -n {job.namespace}" if job.namespace else ""
    selector = f"-l app.kubernetes.io/instance={job.name}"
    kinds = "jobset,secret" if job.jobset else "job,service,secret"
    say(f"watch it:   kubectl logs{space} {selector} --prefix --follow --max-log-requests={max(job.most, 5)}")
    say(f"remove it:  kubectl delete{space} {kinds} {selector}")
    return 0


def say(text: str) -> None:
    print(f"holdfast: {text}", file=sys.stderr)
