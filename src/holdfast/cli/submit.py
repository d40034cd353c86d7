"""`holdfast submit`: hand a job to a scheduler. Finds out to which one; the rest is in submit_slurm.py, submit_k8s.py."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from holdfast.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEDULERS = {"--slurm": "holdfast.cli.submit_slurm", "--k8s": "holdfast.cli.submit_k8s"}
USAGE = """\
usage: holdfast submit --slurm [options of sbatch and of holdfast run] script.py [its arguments]
       holdfast submit --k8s [options] script.py [its arguments]

Hands a training job to a scheduler. `holdfast submit --slurm --help` tells more of one."""


def main(argv: Sequence[str]) -> int:
    """Returns the exit status. Raises HoldfastError."""
    words = list(argv)
    if words[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if not words or words[0] not in SCHEDULERS:
        raise UsageError(f"to which scheduler? write holdfast submit {' or '.join(SCHEDULERS)} first, then the rest")
    status: int = import_module(SCHEDULERS[words[0]]).main(words[1:])
    return status
