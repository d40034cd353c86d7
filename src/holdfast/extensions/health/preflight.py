"""The checks of --preflight: those of `holdfast doctor` that say whether this node can train at all.

quick: memory, /dev/shm, the folders for logs and temporary files, limits of open files and processes, the clock, GPUs
and network ports; each file system and the driver have their own limit of time. full: also Python and the import of
torch, a test of what the GPUs compute, and all else that the doctor checks on one node.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence

from msgspec import structs

from holdfast import own_folders
from holdfast.detached import run_detached
from holdfast.doctor.facts import (
    FactsRequest,
    GpuCheck,
    folder,
    gather_facts,
    machine_facts,
    machine_state,
)
from holdfast.doctor.findings import DoctorFinding, Level, LocalFacts
from holdfast.doctor.gpu_full import full_traits
from holdfast.doctor.local import (
    clock,
    examine,
    folders,
    gpu_health,
    gpu_use,
    memory,
    network_ports,
    open_files,
    processes,
    shared_memory,
)
from holdfast.doctor.machine_state import VISIBLE, used_gpus
from holdfast.doctor.majority import profile
from holdfast.extensions.health.found import FailedCheck, Preflight
from holdfast.protocol.options import RunOptions

FULL = "full"
QUICK = (gpu_health, gpu_use, network_ports, memory, shared_memory, folders, open_files, processes, clock)
TORCH_S_MAX = 12.0
"""Limit for the import of torch (s): all of it must end before Limits.prepare_s."""
GPU_TEST_S_MAX = 15.0
"""Limit for the test of the GPUs (s), which follows. One that takes longer is a warning."""


async def check_node(options: RunOptions, host: str) -> Preflight:
    began_s = time.monotonic()
    if options.preflight == FULL:
        facts = await _all_facts(options)
        found: Sequence[DoctorFinding] = examine(facts)
    else:
        facts = await _quick_facts(options, host)
        found = [finding for check in QUICK for finding in check(facts)]
    speeds = [each.speed_mbit_s for each in facts.interfaces if each.name == facts.default_interface]
    traits = profile(
        facts.machine, used_gpus(facts.machine, facts.variables), speeds[0] if speeds else 0
    ) | full_traits(facts.gpu_test)
    used = {gpu.index: gpu.memory_used_bytes for gpu in facts.machine.gpus if gpu.memory_used_bytes is not None}
    problems = tuple(problem(finding) for finding in found if finding.level is not Level.PASS)
    return Preflight(problems, traits, used, time.monotonic() - began_s)


async def _quick_facts(options: RunOptions, host: str) -> LocalFacts:
    paths = [path for path in (options.logs.log_dir, own_folders.temporary(os.environ)) if path]
    state, shm, *others = await asyncio.gather(machine_state(), *map(folder, ("/dev/shm", *paths)))
    machine = await run_detached(lambda: machine_facts(host, ""))  # it loads psutil, and reads many files
    visible = {name: os.environ[name] for name in VISIBLE if name in os.environ}
    return structs.replace(
        machine, nproc=options.nproc, machine=state, shm=shm, folders=tuple(others), variables=visible
    )


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
            gpu=GpuCheck.FULL_IF_ANY,
            gpu_test_s_max=GPU_TEST_S_MAX,
        )
    )


def problem(finding: DoctorFinding) -> FailedCheck:
    text = f"{finding.code} {finding.what}: {finding.why}"
    return FailedCheck(text, stops=finding.level in (Level.RETRY, Level.FATAL))
