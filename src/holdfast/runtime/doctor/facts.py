"""All facts of this node, gathered at once, each within its time. Judges nothing."""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from holdfast.core.doctor import Folder, LocalFacts
from holdfast.rendezvous.claim import who_holds
from holdfast.runtime.doctor import programs, system
from holdfast.runtime.doctor.bounded import bounded, run_bounded
from holdfast.version import __version__

if TYPE_CHECKING:
    from holdfast.core.options import Endpoint

FOLDER_S_MAX = 5.0
RESOLVE_S_MAX = 10.0
PYTHON_S_MAX = 10.0

MATTER = ("NCCL_", "TORCH_", "GLOO_", "OMP_", "CUDA_", "MASTER_", "PYTORCH_")
MATTER_TOO = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LD_PRELOAD")
"""Beginnings, and whole names, of variables that matter to a training job."""


class FactsRequest(NamedTuple):
    """What the command line says that facts depend on."""

    python: str
    """The workers' interpreter."""
    nproc: int
    nodes: int
    log_dir: str | None
    endpoint: Endpoint | None
    try_port: bool
    """Whether to find out whose the endpoint is."""
    environ: Mapping[str, str]
    torch_s_max: float


async def gather_facts(asked: FactsRequest) -> LocalFacts:
    """Never raises for what a sick machine does, and ends within the longest of its bounds."""
    host = socket.gethostname()
    paths = [path for path in (asked.log_dir, tempfile.gettempdir()) if path]
    began = time.monotonic()
    resolved_s = 0.0

    async def own_name() -> tuple[tuple[str, ...], str]:
        nonlocal resolved_s
        late: tuple[tuple[str, ...], str] = ((), f"no answer within {RESOLVE_S_MAX:g} s")
        found = await bounded(lambda: system.own_addresses(host), RESOLVE_S_MAX, late)
        resolved_s = time.monotonic() - began
        return found

    async with asyncio.TaskGroup() as tasks:
        torch = tasks.create_task(programs.ask_torch(asked.python, asked.torch_s_max))
        python = tasks.create_task(python_version(asked.python))
        smi = tasks.create_task(programs.ask_smi())
        shm, *folders = [tasks.create_task(folder(path)) for path in ("/dev/shm", *paths)]
        names = tasks.create_task(own_name())
        place = tasks.create_task(endpoint_here(asked.endpoint if asked.try_port else None))
    addresses, resolve_error = names.result()
    here, holder = place.result()
    gpus, gpu_error = smi.result()
    return msgspec.structs.replace(
        machine_facts(host, python.result()),
        nproc=asked.nproc,
        nodes=asked.nodes,
        torch=torch.result(),
        gpus=gpus,
        gpu_error=gpu_error,
        shm=shm.result(),
        folders=tuple(each.result() for each in folders),
        own_addresses=addresses,
        resolve_error=resolve_error,
        resolve_s=resolved_s,
        endpoint=str(asked.endpoint or ""),
        endpoint_port=asked.endpoint.port if asked.endpoint else 0,
        endpoint_is_here=here,
        endpoint_holder=holder,
        variables=those_that_matter(asked.environ),
    )


def machine_facts(host: str, python: str) -> LocalFacts:
    """What needs no waiting."""
    import psutil

    groups, memory, swap = system.GroupLimits(), psutil.virtual_memory(), psutil.swap_memory()
    sysctl = system.ROOT / "proc/sys"
    return LocalFacts(
        host=host,
        python=python,
        holdfast=__version__,
        driver=system.driver_version(),
        limits=system.soft_limits(),
        infiniband=system.infiniband(),
        memory_bytes=memory.total,
        memory_available_bytes=memory.available,
        swap_bytes=swap.total,
        memory_limit_bytes=groups.memory_bytes,
        pids_limit=groups.pids,
        pids_used=groups.pids_used,
        cpus=os.cpu_count() or 1,
        cpus_allowed=len(os.sched_getaffinity(0)),
        cpu_quota=groups.cpus,
        overcommit=system.read_int(sysctl / "vm/overcommit_memory") or 0,
        ptrace_scope=system.read_int(sysctl / "kernel/yama/ptrace_scope"),
        privileged=system.may_trace(),
        core_pattern=system.read_text(sysctl / "kernel/core_pattern").strip(),
        clock_synchronised=system.clock_synchronised(),
        interfaces=system.interfaces(),
        default_interface=system.default_interface(),
        ephemeral_ports=system.ephemeral_ports(),
    )


async def folder(path: str) -> Folder:
    return await bounded(
        lambda: system.folder_facts(path), FOLDER_S_MAX, Folder(path=path, error=f"no answer within {FOLDER_S_MAX:g} s")
    )


async def python_version(python: str) -> str:
    """The workers' Python need not be ours."""
    if python == sys.executable:
        return platform.python_version()
    try:
        done = await run_bounded([python, "-c", "import platform; print(platform.python_version())"], PYTHON_S_MAX)
    except OSError:
        return "0"
    return done.out.strip() or "0"


async def endpoint_here(endpoint: Endpoint | None) -> tuple[bool | None, str]:
    """Whether the endpoint is this machine's, and who holds its port."""
    if endpoint is None or not endpoint.port:
        return None, ""
    return await bounded(lambda: try_to_bind(endpoint), RESOLVE_S_MAX, (None, ""))


def try_to_bind(endpoint: Endpoint) -> tuple[bool | None, str]:
    """By binding, as a run does it; the port is free again afterwards."""
    from holdfast.core.errors import EndpointError, PortInUseError
    from holdfast.rendezvous.claim import claim

    try:
        place = claim(endpoint)
    except (OSError, EndpointError, PortInUseError):
        return False, ""
    place.close()
    if place.is_host:
        return True, ""
    if "already bound" in place.reason:
        return True, who_holds(endpoint.port) or "a process of another user or container"
    return False, ""


def those_that_matter(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(MATTER) or name in MATTER_TOO}
