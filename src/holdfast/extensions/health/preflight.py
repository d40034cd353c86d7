"""The checks of --preflight: those of `holdfast doctor` that say whether this node can train at all.

quick: memory, /dev/shm, the folders for logs and temporary files, limits of open files and processes, the clock; each
file system has its own limit of time. full: also Python and the import of torch, and all else that the doctor checks on
one node.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence

from msgspec import structs

from holdfast.detached import run_detached
from holdfast.doctor import DoctorFinding, Level, LocalFacts
from holdfast.doctor.facts import FactsRequest, folder, gather_facts, machine_facts
from holdfast.doctor.local import clock, examine, folders, memory, open_files, processes, shared_memory
from holdfast.protocol.options import RunOptions

FULL = "full"
QUICK = (memory, shared_memory, folders, open_files, processes, clock)
TORCH_S_MAX = 15.0
"""Limit for the import of torch (s): all of it must end before Limits.prepare_s."""


async def problems(options: RunOptions, host: str) -> tuple[DoctorFinding, ...]:
    """The findings on this node that did not pass."""
    if options.preflight == FULL:
        found: Sequence[DoctorFinding] = examine(await _all_facts(options))
    else:
        facts = await _quick_facts(options, host)
        found = [finding for check in QUICK for finding in check(facts)]
    return tuple(finding for finding in found if finding.level is not Level.PASS)


async def _quick_facts(options: RunOptions, host: str) -> LocalFacts:
    # Python goes on with another folder where this one cannot be written, but other programs do not.
    temporary = os.environ.get("TMPDIR") or tempfile.gettempdir()
    paths = [path for path in (options.logs.log_dir, temporary) if path]
    shm, *others = await asyncio.gather(*map(folder, ("/dev/shm", *paths)))
    machine = await run_detached(lambda: machine_facts(host, ""))  # it loads psutil, and reads many files
    return structs.replace(machine, nproc=options.nproc, shm=shm, folders=tuple(others))


async def _all_facts(options: RunOptions) -> LocalFacts:
    return await gather_facts(
        FactsRequest(
            python=options.command.python or sys.executable,
            nproc=options.nproc,
            nodes=options.job.max_nodes,
            log_dir=options.logs.log_dir,
            endpoint=None,
            try_port=False,
            environ=os.environ,
            torch_s_max=TORCH_S_MAX,
        )
    )


def unfit(finding: DoctorFinding) -> bool:
    """Whether a node with this finding cannot train: a warning parks no node."""
    return finding.level in (Level.RETRY, Level.FATAL)
