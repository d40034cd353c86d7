"""The batch script of `holdfast submit --slurm`: readable, commented, and good to be submitted again by hand. PURE."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.core.errors import EXIT_REQUEUE
from holdfast.schedulers.slurm_options import Directive

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
        "# The job's secret, drawn anew each time it starts. It travels in the environment, never on a command line.",
        "HOLDFAST_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
        "export HOLDFAST_TOKEN",
    )


def start(batch: Batch) -> list[str]:
    command = shlex.join(batch.command)
    # One task of an array has the array's own number, and `scontrol requeue` would start all of them anew.
    job = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' if batch.is_array else '"$SLURM_JOB_ID"'
    if not batch.requeues:
        return [command]
    return [
        command,
        "code=$?",
        "",
        f"# {EXIT_REQUEUE}: preempted, and everything is saved. Back into the queue, to go on from there.",
        "# Otherwise preempted: Slurm means to start it anew, and would not when it has ended before its time.",
        f"preempted() {{ scontrol --oneliner show job {job} | grep -q 'PreemptTime=[0-9]'; }}",
        f'if [ "$code" -eq {EXIT_REQUEUE} ] || {{ [ "$code" -ne 0 ] && preempted; }}; then',
        f"    scontrol requeue {job}",
        "fi",
        'exit "$code"',
    ]
