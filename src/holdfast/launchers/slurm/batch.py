"""The batch script of `holdfast submit --slurm`: readable, commented, and good to be submitted again by hand; and
sbatch's options: which there are, which take a value, and which a job of holdfast cannot have. PURE.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from signal import Signals
from typing import NamedTuple

from holdfast.protocol.errors import EXIT_REQUEUE, UsageError

VALUES = frozenset(
    [
        *("account", "acctg-freq", "array", "batch", "bb", "bbf", "begin", "chdir", "cluster-constraint", "clusters"),
        *("comment", "constraint", "container", "container-id", "core-spec", "cores-per-socket", "cpu-freq"),
        *("cpus-per-gpu", "cpus-per-task", "deadline", "delay-boot", "dependency", "distribution", "error", "exclude"),
        *("export", "export-file", "extra", "extra-node-info", "gid", "gpu-bind", "gpu-freq", "gpus", "gpus-per-node"),
        *("gpus-per-socket", "gpus-per-task", "gres", "gres-flags", "hint", "input", "job-name"),
        *("kill-on-invalid-dep", "licenses", "mail-type", "mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu"),
        *("mem-per-gpu", "mincpus", "network", "nodefile", "nodelist", "nodes", "ntasks", "ntasks-per-core"),
        *(
            "ntasks-per-gpu",
            "ntasks-per-node",
            "ntasks-per-socket",
            "oom-kill-step",
            "open-mode",
            "output",
            "partition",
        ),
        *("power", "prefer", "priority", "profile", "qos", "reservation", "resv-ports", "segment", "signal"),
        *("sockets-per-node", "switches", "thread-spec", "threads-per-core", "time", "time-min", "tmp", "tres-bind"),
        *("tres-per-task", "uid", "wait-all-nodes", "wckey", "wrap"),
    ]
)
FLAGS = frozenset(
    [
        *("contiguous", "exclusive", "get-user-env", "hold", "ignore-pbs", "nice", "no-kill", "no-requeue"),
        *("overcommit", "oversubscribe", "parsable", "propagate", "quiet", "reboot", "requeue", "spread-job"),
        *("stepmgr", "test-only", "use-min-nodes", "verbose", "wait"),
    ]
)
"""Some of them may have a value all the same, but only glued on by `=`."""
SHORT = dict(
    [
        *(("A", "account"), ("a", "array"), ("b", "begin"), ("B", "extra-node-info"), ("C", "constraint")),
        *(
            ("c", "cpus-per-task"),
            ("D", "chdir"),
            ("d", "dependency"),
            ("e", "error"),
            ("F", "nodefile"),
            ("G", "gpus"),
        ),
        *(("H", "hold"), ("i", "input"), ("J", "job-name"), ("k", "no-kill"), ("L", "licenses"), ("M", "clusters")),
        *(("N", "nodes"), ("n", "ntasks"), ("O", "overcommit"), ("o", "output"), ("p", "partition"), ("Q", "quiet")),
        *(("q", "qos"), ("s", "oversubscribe"), ("S", "core-spec"), ("t", "time"), ("v", "verbose"), ("W", "wait")),
        *(("w", "nodelist"), ("x", "exclude")),
    ]
)
"""sbatch's -m (--distribution) is missing: `-m` is the training script's, as in `python -m`."""
ONE_AGENT = "holdfast starts one agent on each node, which starts its workers; say -N NODES and --nproc-per-node"
REFUSED = {
    "ntasks": ONE_AGENT,
    "ntasks-per-core": ONE_AGENT,
    "ntasks-per-gpu": ONE_AGENT,
    "ntasks-per-socket": ONE_AGENT,
    "ntasks-per-node": ONE_AGENT,
    "wrap": "the training script is what is run",
    "parsable": "holdfast submit has an output of its own",
    "test-only": "look at the batch script with --dry-run",
    "wait": "it waits anyway, unless --no-follow says otherwise",
}


class Directive(NamedTuple):
    """One option of sbatch, in its long spelling."""

    name: str
    value: str | None = None

    def __str__(self) -> str:
        return f"--{self.name}" if self.value is None else f"--{self.name}={self.value}"


HARMLESS = Directive("ntasks-per-node", "1")
"""As every job of holdfast has it."""


def check(directives: list[Directive]) -> None:
    """Raises UsageError for what contradicts one agent per node, or what would break the batch script."""
    for directive in directives:
        if directive.name in REFUSED and directive != HARMLESS:
            raise UsageError(f"{directive}: {REFUSED[directive.name]}")
        if "\n" in (directive.value or ""):
            raise UsageError(f"--{directive.name}: a value of sbatch's has one line")
    preempt_signal(directives)


def preempt_signal(directives: list[Directive]) -> str | None:
    """The signal of `--signal=[R:]SIGNAL[@SECONDS]`; None where none is asked for. Raises UsageError."""
    text = next((each.value for each in reversed(directives) if each.name == "signal"), None)
    if text is None:
        return None
    flags, colon, rest = text.rpartition(":")
    if colon and "B" in flags.upper():
        raise UsageError(f"--signal={text}: B: means the batch script alone; the agents need it, write --signal={rest}")
    name = rest.partition("@")[0].upper()
    if name.isdigit():
        return known_signal(text, int(name))
    name = name if name.startswith("SIG") else f"SIG{name}"
    if name not in Signals.__members__:
        raise UsageError(f"--signal={text}: {name} is no signal")
    return name.removeprefix("SIG")


def known_signal(text: str, number: int) -> str:
    try:
        return Signals(number).name.removeprefix("SIG")
    except ValueError:
        raise UsageError(f"--signal={text}: {number} is no signal") from None


MARK = "# Written by `holdfast submit --slurm`"
"""Only a file with it is overwritten."""


class Batch(NamedTuple):
    """What is to be submitted."""

    directives: tuple[Directive, ...]
    """As the caller gave them."""
    command: tuple[str, ...]
    """What starts the job within the allocation."""
    name: str
    """Of the job, unless a directive says another one."""

    @property
    def requeues(self) -> bool:
        return not self.gave("no-requeue")

    @property
    def is_array(self) -> bool:
        return self.gave("array")

    def gave(self, name: str) -> bool:
        return any(each.name == name for each in self.directives)


def script(batch: Batch) -> str:
    """The whole file."""
    return "\n".join([*head(batch), "", *token(), "", *start(batch), ""])


def head(batch: Batch) -> list[str]:
    lines = ["#!/bin/bash", f"{MARK}; sbatch takes it again as it is."]
    if not batch.gave("job-name"):
        lines.append(f"#SBATCH --job-name={batch.name}")
    lines += [f"#SBATCH {each}" for each in batch.directives]
    if not batch.gave("ntasks-per-node"):
        lines += ["# One agent on each node; it starts that node's workers.", "#SBATCH --ntasks-per-node=1"]
    if not batch.gave("no-kill"):
        lines += [
            "# A node that dies does not end the job: holdfast goes on without it if --nnodes allows.",
            "#SBATCH --no-kill",
        ]
    if batch.requeues:
        lines += ["# After a preemption the job goes on where it was, and so does its log."]
        lines += [f"#SBATCH {name}" for name in missing(batch, "requeue", "open-mode=append")]
    return lines


def missing(batch: Batch, *options: str) -> list[str]:
    return [f"--{option}" for option in options if not batch.gave(option.partition("=")[0])]


def token() -> Sequence[str]:
    return (
        "# The job's secret, drawn again each time it starts. It travels in the environment, never on a command line.",
        "HOLDFAST_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
        "export HOLDFAST_TOKEN",
    )


def start(batch: Batch) -> list[str]:
    command = shlex.join(batch.command)
    # One task of an array has the array's own number, and `scontrol requeue` would start all of them again.
    job = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' if batch.is_array else '"$SLURM_JOB_ID"'
    if not batch.requeues:
        return [command]
    return [
        command,
        "code=$?",
        "",
        f"# {EXIT_REQUEUE}: preempted, and everything is saved. Back into the queue, to go on from there.",
        "# Otherwise preempted: Slurm is to start it again, and would not if it ended before its time.",
        f"preempted() {{ scontrol --oneliner show job {job} | grep -q 'PreemptTime=[0-9]'; }}",
        f'if [ "$code" -eq {EXIT_REQUEUE} ] || {{ [ "$code" -ne 0 ] && preempted; }}; then',
        f"    scontrol requeue {job}",
        "fi",
        'exit "$code"',
    ]
