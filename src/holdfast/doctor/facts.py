"""Gathers all facts about this node concurrently: what Linux reports, torch, GPUs, the endpoint. Judges nothing.

Calls and processes may hang on a faulty machine, so each has a time limit. torch runs in a separate process,
so that its crash or hang is a result, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from math import isinf
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import structs

from holdfast import own_folders
from holdfast.detached import run_detached
from holdfast.doctor.findings import Folder, Gpu, Interface, LocalFacts, TorchFacts, TorchState
from holdfast.doctor.machine_reader import read_machine
from holdfast.doctor.machine_state import FullMeasure, MachineState
from holdfast.linux import (
    GroupLimits,
    default_interface,
    own_address,
    read_int,
    read_text,
    room_in_groups_bytes,
)
from holdfast.protocol.errors import EndpointError, PortInUseError
from holdfast.protocol.options import Endpoint
from holdfast.protocol.train_contract import CHECKUP, GPU_CHECKUP
from holdfast.rendezvous.bind import claim, who_holds
from holdfast.supervisor.attached import attached
from holdfast.version import __version__

ROOT = Path("/")
SHM = "/dev/shm"
CAP_SYS_PTRACE = 19
STA_UNSYNC = 0x40


def soft_limits() -> dict[str, int | None]:
    kinds = {name: getattr(resource, f"RLIMIT_{name.upper()}") for name in ("nofile", "nproc", "memlock", "core")}
    soft = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    return {name: None if limit == resource.RLIM_INFINITY else limit for name, limit in soft.items()}


def may_trace(root: Path = ROOT) -> bool:
    for line in read_text(root / "proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_SYS_PTRACE & 1)
    return False


def driver_version(root: Path = ROOT) -> str:
    """NVIDIA's driver, from `NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu …`; empty: none."""
    first = read_text(root / "proc/driver/nvidia/version").partition("\n")[0]
    return next((word for word in first.split() if word[:1].isdecimal() and "." in word), "")


def infiniband(root: Path = ROOT) -> tuple[str, ...]:
    folder = root / "sys/class/infiniband"
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError:
        return ()


def interface_states() -> dict[str, Any]:
    """psutil's states of the network interfaces, by name; empty: an emulated kernel does not tell."""
    import psutil

    try:
        return dict(psutil.net_if_stats())
    except OSError:
        return {}


def interfaces() -> tuple[Interface, ...]:
    import psutil

    stats = interface_states()
    return tuple(
        Interface(
            name=name,
            # Where the kernel tells of none, none can be called down.
            up=stats[name].isup if name in stats else not stats,
            addresses=tuple(
                each.address
                for each in sorted(addresses, key=lambda each: each.family)
                if each.family in (socket.AF_INET, socket.AF_INET6) and not each.address.startswith("fe80:")
            ),
            speed_mbit_s=stats[name].speed if name in stats else 0,
        )
        for name, addresses in psutil.net_if_addrs().items()
    )


def ephemeral_ports(root: Path = ROOT) -> tuple[int, int] | None:
    words = read_text(root / "proc/sys/net/ipv4/ip_local_port_range").split()
    return (int(words[0]), int(words[1])) if len(words) == 2 and all(map(str.isdecimal, words)) else None


def folder_facts(path: str) -> Folder:
    """Free space on its file system, and why the folder is not writable; for a missing folder, of its parent: a job
    makes it. Nobody makes /dev/shm."""
    there = path
    while path != SHM and not os.path.lexists(there) and there != os.path.dirname(there):
        there = os.path.dirname(there)
    try:
        room = os.statvfs(there)
        _probe(os.path.join(there, f".holdfast-doctor-{os.getpid()}-{os.urandom(8).hex()}"))
    except OSError as error:
        return Folder(path=path, error=error.strerror or str(error))
    return Folder(path=path, total_bytes=room.f_blocks * room.f_frsize, free_bytes=room.f_bavail * room.f_frsize)


PROBE_BYTES = 4096


def _probe(path: str) -> None:
    """Write a file, read it and delete it. Without `tempfile`, whose import would delay the start of a job."""
    with open(path, "xb+", buffering=0) as file:
        try:
            # A file server may take what is written, and fail when it is to be kept or read.
            file.write(b"\0" * PROBE_BYTES)
            os.fsync(file.fileno())
            file.seek(0)
            file.read(PROBE_BYTES)
        finally:
            os.unlink(path)


class _Timex(ctypes.Structure):
    """The kernel's `struct timex`; the fields that are not used are in `room`."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("room", ctypes.c_char * 256),
    )


def clock_synchronised() -> bool | None:
    """Whether NTP keeps the clock, by the kernel's flag; None: it is not readable."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        state = _Timex()  # modes 0: changes nothing
        if libc.adjtimex(ctypes.byref(state)) < 0:
            return None
    except (OSError, AttributeError):
        return None
    return not state.status & STA_UNSYNC


def resolve(host: str) -> tuple[tuple[str, ...], str]:
    """The addresses of a host name on this machine, or why it does not resolve."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return (), (error.strerror if isinstance(error, OSError) else "") or str(error)
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found)), ""


Result = TypeVar("Result")

FOLDER_S_MAX = 5.0
RESOLVE_S_MAX = 10.0
PYTHON_S_MAX = 10.0

GPUS_S_MAX = 15.0
"""Limit for the GPUs' driver (s): without persistence it initialises all GPUs first."""
ERROR_CHARS_MAX = 400
ANSWER_BYTES_MAX = 256 * 1024
REAP_S_MAX = 2.0

PREFIXES = ("NCCL_", "TORCH_", "GLOO_", "OMP_", "CUDA_", "HIP_", "ROCR_", "MASTER_", "PYTORCH_")
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LD_PRELOAD")
"""Prefixes and whole names of variables that matter to a training job."""


class GpuCheck(Enum):
    """The extent of the checks of GPUs (--gpu)."""

    OFF = "off"
    QUICK = "quick"
    """Their driver's report."""
    FULL = "full"
    """Their driver's report, and a test of what they compute; on a node without GPUs the processor is tested."""
    FULL_IF_ANY = "full, if there are GPUs"


class FactsRequest(NamedTuple):
    """Options of the command line on which facts depend."""

    python: str
    """Path of the workers' interpreter."""
    nproc: int
    nodes: int
    log_dir: str | None
    endpoint: Endpoint | None
    try_port: bool
    """Whether to test if the endpoint is this machine's. A check of several nodes binds the port itself."""
    environ: Mapping[str, str]
    torch_s_max: float
    """Limit for the import of torch."""
    gpu: GpuCheck = GpuCheck.QUICK
    gpu_test_s_max: float = 120.0
    """Limit for the GPUs' test."""


async def gather_facts(asked: FactsRequest) -> LocalFacts:
    """Gather all facts. Never raises because of a faulty machine, and ends within the longest of its time limits."""
    host = socket.gethostname()
    paths = [path for path in (asked.log_dir, own_folders.temporary(asked.environ)) if path]
    began = time.monotonic()

    async def own_name() -> tuple[tuple[str, ...], str, float]:
        return *await addresses_of(host), time.monotonic() - began

    async with asyncio.TaskGroup() as tasks:
        torch = tasks.create_task(ask_torch(asked.python, asked.torch_s_max))
        python = tasks.create_task(python_version(asked.python))
        machine = tasks.create_task(machine_state(asked.gpu))
        shm, *folders = [tasks.create_task(folder(path)) for path in (SHM, *paths)]
        names = tasks.create_task(own_name())
        port = tasks.create_task(endpoint_here(asked.endpoint if asked.try_port else None))
        towards = asked.endpoint.host if asked.endpoint else ""
        address_towards = tasks.create_task(bounded(lambda: own_address(towards), RESOLVE_S_MAX, ""))

    addresses, resolve_error, resolved_s = names.result()
    here, holder = port.result()
    state = machine.result()
    return structs.replace(
        machine_facts(host, python.result()),
        nproc=asked.nproc,
        nodes=asked.nodes,
        torch=torch.result(),
        machine=state,
        gpu_test=await gpu_test(asked, torch.result()),
        gpus=shown_gpus(state),
        gpu_error=state.error,
        shm=shm.result(),
        folders=tuple(each.result() for each in folders),
        own_addresses=addresses,
        resolve_error=resolve_error,
        resolve_s=resolved_s,
        endpoint=str(asked.endpoint or ""),
        endpoint_port=asked.endpoint.port if asked.endpoint else 0,
        endpoint_from=address_towards.result(),
        endpoint_is_here=here,
        endpoint_holder=holder,
        variables=relevant(asked.environ),
    )


def machine_facts(host: str, python: str) -> LocalFacts:
    """Facts that are available without waiting."""
    import psutil

    groups, memory, swap = GroupLimits(), psutil.virtual_memory(), psutil.swap_memory()
    sysctl = ROOT / "proc/sys"
    room_bytes = room_in_groups_bytes()
    return LocalFacts(
        host=host,
        python=python,
        holdfast=__version__,
        driver=driver_version(),
        limits=soft_limits(),
        infiniband=infiniband(),
        memory_bytes=memory.total,
        memory_available_bytes=memory.available,
        swap_bytes=swap.total,
        memory_limit_bytes=groups.memory_bytes,
        # A group may hold a little more than its limit, for a moment.
        memory_room_bytes=None if isinf(room_bytes) else max(0, int(room_bytes)),
        pids_limit=groups.pids,
        pids_used=groups.pids_used,
        cpus=os.cpu_count() or 1,
        cpus_allowed=len(os.sched_getaffinity(0)),
        cpu_quota=groups.cpus,
        overcommit=read_int(sysctl / "vm/overcommit_memory") or 0,
        ptrace_scope=read_int(sysctl / "kernel/yama/ptrace_scope"),
        privileged=may_trace(),
        core_pattern=read_text(sysctl / "kernel/core_pattern").strip(),
        clock_synchronised=clock_synchronised(),
        interfaces=interfaces(),
        default_interface=default_interface(),
        ephemeral_ports=ephemeral_ports(),
    )


async def addresses_of(host: str) -> tuple[tuple[str, ...], str]:
    """`resolve` with a time limit: a DNS server that does not answer would hold the check for minutes."""
    late: tuple[tuple[str, ...], str] = ((), f"no answer within {RESOLVE_S_MAX:g} s")
    return await bounded(lambda: resolve(host), RESOLVE_S_MAX, late)


async def folder(path: str) -> Folder:
    return await bounded(
        lambda: folder_facts(path), FOLDER_S_MAX, Folder(path=path, error=f"no answer within {FOLDER_S_MAX:g} s")
    )


async def python_version(python: str) -> str:
    """Version of the workers' Python, which may differ from this process'."""
    if python == sys.executable:
        return platform.python_version()
    try:
        done = await run_bounded([python, "-c", "import platform; print(platform.python_version())"], PYTHON_S_MAX)
    except OSError as error:
        return f"{python}: {error.strerror}"
    if done.code is None:
        return f"{python} did not answer within {PYTHON_S_MAX:g} s"
    return done.out.strip() or f"{python} ended with {done.code}"


async def endpoint_here(endpoint: Endpoint | None) -> tuple[bool | None, str]:
    """Whether the endpoint is this machine's, and who holds its port."""
    if endpoint is None or not endpoint.port:
        return None, ""
    return await bounded(lambda: try_to_bind(endpoint), RESOLVE_S_MAX, (None, ""))


def try_to_bind(endpoint: Endpoint) -> tuple[bool | None, str]:
    """Test by binding, as a run does. The port is free again afterwards."""
    try:
        claimed = claim(endpoint)
    except (OSError, EndpointError, PortInUseError):
        return False, ""
    claimed.close()
    if claimed.is_host:
        return True, ""
    if claimed.is_taken:
        return True, who_holds(endpoint.port) or "a process of another user or container"
    return False, ""


def relevant(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter to a training job."""
    return {name: value for name, value in environ.items() if name.startswith(PREFIXES) or name in NAMES}


async def ask_torch(python: str, limit_s: float) -> TorchFacts:
    """Import torch in a separate process, which also reports what torch can do on this node."""
    began = time.monotonic()
    try:
        done = await run_bounded([python, CHECKUP, "facts"], limit_s)
    except OSError as fault:
        return TorchFacts(state=TorchState.BROKEN, error=f"{python}: {fault.strerror}")
    seconds = time.monotonic() - began
    if done.code is None:
        return TorchFacts(state=TorchState.SILENT, seconds=seconds)

    answer = last_json(done.out)
    if answer is None:
        last = next((line for line in reversed(done.err.splitlines()) if line.strip()), "no word")
        error = f"its process ended with {done.code}: {last.strip()[:ERROR_CHARS_MAX]}"
        return TorchFacts(state=TorchState.BROKEN, error=error, seconds=seconds)

    error = str(answer.get("error", ""))
    if error.startswith("ModuleNotFoundError: No module named 'torch'"):
        return TorchFacts(state=TorchState.ABSENT, seconds=seconds)
    if error:
        return TorchFacts(state=TorchState.BROKEN, error=error[:ERROR_CHARS_MAX], seconds=seconds)
    try:
        return msgspec.convert({**answer, "state": "ok", "seconds": seconds}, TorchFacts)
    except msgspec.ValidationError as invalid:
        return TorchFacts(state=TorchState.BROKEN, error=f"an odd answer: {invalid}", seconds=seconds)


def last_json(text: str) -> dict[str, Any] | None:
    """The last line that is a JSON object; None: there is none. Other lines may come from a sitecustomize."""
    for line in reversed(text.splitlines()):
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict):
            return answer
    return None


async def machine_state(check: GpuCheck = GpuCheck.QUICK) -> MachineState:
    """GPUs and network ports. A driver that does not answer is an error of the state."""
    if check is GpuCheck.OFF:
        return MachineState()
    late = MachineState(source="the driver", error=f"no answer within {GPUS_S_MAX:g} s")
    return await bounded(read_machine, GPUS_S_MAX, late)


async def gpu_test(asked: FactsRequest, torch: TorchFacts) -> FullMeasure | None:
    """What the GPUs compute, or why that is not known; None: it was not asked for."""
    kind = "cuda" if torch.gpus else "cpu"
    if asked.gpu is not GpuCheck.FULL and (asked.gpu is not GpuCheck.FULL_IF_ANY or kind == "cpu"):
        return None
    if torch.state is not TorchState.OK:
        return FullMeasure(error="torch cannot be imported")
    try:
        done = await run_bounded([asked.python, GPU_CHECKUP, "measure", kind, str(GPU_TEST_S)], asked.gpu_test_s_max)
    except OSError as error:
        return FullMeasure(error=f"{asked.python}: {error.strerror}")
    if done.code is None:
        return FullMeasure(error=f"it did not end within {asked.gpu_test_s_max:g} s")
    try:
        return msgspec.convert(last_json(done.out) or {"error": f"its process ended with {done.code}"}, FullMeasure)
    except msgspec.ValidationError as invalid:
        return FullMeasure(error=f"an odd answer: {invalid}")


GPU_TEST_S = 1.0
"""Time for which each GPU computes (s)."""


def shown_gpus(state: MachineState) -> tuple[Gpu, ...]:
    """The GPUs in the figures of earlier versions."""

    def mib(bytes_: int | None) -> int | None:
        return None if bytes_ is None else bytes_ >> 20

    return tuple(
        Gpu(
            index=each.index,
            name=each.name,
            driver=state.driver,
            memory_total_mib=mib(each.memory_bytes),
            memory_used_mib=mib(each.memory_used_bytes),
            ecc_errors=each.ecc_uncorrected,
            users=tuple(f"pid {user.pid} {user.name}, {mib(user.used_bytes)} MiB" for user in each.users),
        )
        for each in state.gpus
    )


class ProcessResult(NamedTuple):
    """The exit code and output of a process."""

    code: int | None
    """The exit code; None: the process did not end within its time limit and was killed."""
    out: str
    err: str


async def bounded(function: Callable[[], Result], limit_s: float, otherwise: Result) -> Result:
    """The function's result, or `otherwise` after the limit.

    A call that waits for a dead file system cannot be cancelled: its thread is left behind.
    """
    try:
        async with asyncio.timeout(limit_s):
            return await run_detached(function)
    except TimeoutError:
        return otherwise


async def run_bounded(command: Sequence[str], limit_s: float) -> ProcessResult:
    """Run a program to its end or the limit. Raises OSError when it cannot be started."""
    process = await asyncio.create_subprocess_exec(
        *attached(command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(limit_s):
            out, err = await process.communicate()
        return ProcessResult(process.returncode, _text(out), _text(err))
    except TimeoutError:
        return ProcessResult(None, "", "")
    finally:
        await end(process)


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill the process and its children. Does not wait for one that cannot be killed (a dead disk)."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REAP_S_MAX):
                await process.wait()


def _text(data: bytes) -> str:
    return data[-ANSWER_BYTES_MAX:].decode(errors="replace")
