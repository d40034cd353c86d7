"""Checks of the machine, or the container: memory, CPUs, limits, folders, clock. PURE."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.core.doctor import DoctorFinding, Folder, LocalFacts
from holdfast.insight.doctor.making import GIB, MIB, fatal, passed, retry, size, warn

SHM_BYTES_MIN = 1 * GIB
SHM_FREE_BYTES_MIN = 256 * MIB
NOFILE_MIN = 4096
NPROC_MIN = 2048
PIDS_LEFT_PER_WORKER = 256
"""A worker with its threads and loader processes."""
MEMLOCK_BYTES_MIN = 1 * GIB
MEMORY_PER_WORKER_BYTES_MIN = 1 * GIB
"""torch with a small model."""
FOLDER_FREE_BYTES_MIN = 1 * GIB


def shared_memory(facts: LocalFacts) -> Iterator[DoctorFinding]:
    what, shm = "/dev/shm", facts.shm
    enlarge = "docker run --shm-size=16g or --ipc=host; on Kubernetes an emptyDir with medium: Memory"
    if shm.error:
        yield fatal("HF510", what, f"cannot be used: {shm.error}", "mount a tmpfs there that this user can write")
    elif 0 < shm.total_bytes < SHM_BYTES_MIN:
        yield warn("HF510", what, f"has only {size(shm.total_bytes)} in all", enlarge)
    elif shm.total_bytes > 0 and shm.free_bytes < SHM_FREE_BYTES_MIN:
        why = f"{size(shm.free_bytes)} of {size(shm.total_bytes)} free"
        yield warn("HF510", what, why, "remove what dead jobs left there (ls -l /dev/shm)")
    else:
        yield passed("HF510", what, f"{size(shm.free_bytes)} of {size(shm.total_bytes)} free")


def open_files(facts: LocalFacts) -> Iterator[DoctorFinding]:
    what = "open files"
    if "nofile" not in facts.limits:
        return
    limit = facts.limits["nofile"]
    if limit is not None and limit < NOFILE_MIN:
        yield warn("HF511", what, f"at most {limit} per process", "ulimit -n 65536")
    else:
        yield passed("HF511", what, "unlimited" if limit is None else f"up to {limit} per process")


def processes(facts: LocalFacts) -> Iterator[DoctorFinding]:
    what = "processes"
    limit = facts.limits.get("nproc")
    if facts.pids_limit is not None:
        left = facts.pids_limit - facts.pids_used
        if left < PIDS_LEFT_PER_WORKER * facts.nproc:
            why = f"the cgroup allows {facts.pids_limit} processes and threads, {facts.pids_used} are there"
            yield warn("HF512", what, why, "raise --pids-limit, or the pod's limit")
            return
    if limit is not None and limit < NPROC_MIN:
        yield warn("HF512", what, f"this user may have {limit} processes and threads", "ulimit -u 65536")
    else:
        bounds = [str(each) for each in (limit, facts.pids_limit) if each is not None]
        yield passed("HF512", what, f"up to {' and '.join(bounds)}" if bounds else "unlimited")


def locked_memory(facts: LocalFacts) -> Iterator[DoctorFinding]:
    what = "locked memory"
    if not facts.infiniband or "memlock" not in facts.limits:
        return
    limit = facts.limits["memlock"]
    if limit is not None and limit < MEMLOCK_BYTES_MIN:
        why = f"at most {size(limit)}, but there is {', '.join(facts.infiniband)}"
        yield warn("HF513", what, why, "ulimit -l unlimited; docker run --ulimit memlock=-1")
    else:
        yield passed("HF513", what, "unlimited" if limit is None else f"up to {size(limit)}")


def core_dumps(facts: LocalFacts) -> Iterator[DoctorFinding]:
    if "core" not in facts.limits:
        return
    limit = facts.limits["core"]
    if limit == 0 or facts.core_pattern.startswith("|"):
        yield passed("HF514", "core dumps", "off" if limit == 0 else f"go to {facts.core_pattern[1:].split()[0]}")
    else:
        why = f"a worker that crashes writes its whole memory to {facts.core_pattern or 'core'}"
        yield warn("HF514", "core dumps", why, "ulimit -c 0")


def memory(facts: LocalFacts) -> Iterator[DoctorFinding]:
    what = "memory"
    if not facts.memory_bytes:
        return
    limit, needed = facts.memory_limit_bytes, MEMORY_PER_WORKER_BYTES_MIN * facts.nproc
    bounded = limit is not None and limit < facts.memory_bytes
    left = min(facts.memory_available_bytes, limit) if limit is not None else facts.memory_available_bytes
    shown = f"{size(facts.memory_available_bytes)} of {size(facts.memory_bytes)} available"
    if bounded and limit is not None:
        shown += f", the cgroup allows {size(limit)}"
    if left < needed:
        workers = f"{facts.nproc} workers" if facts.nproc > 1 else "a worker"
        yield retry("HF515", what, f"{shown}: little for {workers}", "end what uses it, or raise the container's limit")
    else:
        yield passed("HF515", what, shown + (f", {size(facts.swap_bytes)} swap" if facts.swap_bytes else ""))


def cpus(facts: LocalFacts) -> Iterator[DoctorFinding]:
    what = "CPUs"
    usable = min(float(facts.cpus_allowed), facts.cpu_quota or float(facts.cpus_allowed))
    shown = f"{facts.cpus_allowed} of {facts.cpus}"
    if facts.cpu_quota is not None:
        shown += f", with {facts.cpu_quota:.3g} CPUs' time by cgroup"
    if usable < facts.nproc:
        yield warn("HF516", what, f"{shown}, for {facts.nproc} workers", "allow more CPUs, or start fewer workers")
    else:
        yield passed("HF516", what, shown)


def overcommit(facts: LocalFacts) -> Iterator[DoctorFinding]:
    if facts.overcommit == 2:
        why = "vm.overcommit_memory=2: large reservations and forks of large processes fail"
        yield warn("HF517", "overcommit", why, "sysctl vm.overcommit_memory=0")
    else:
        yield passed("HF517", "overcommit", f"vm.overcommit_memory={facts.overcommit}")


def tracing(facts: LocalFacts) -> Iterator[DoctorFinding]:
    what, scope = "ptrace", facts.ptrace_scope
    if scope is None or scope == 0 or (facts.privileged and scope < 3):
        yield passed("HF518", what, "allowed: py-spy can show native stacks")
    elif scope == 1:
        yield passed("HF518", what, "restricted: Python stacks as always, native ones (py-spy) only as root")
    else:
        why = f"kernel.yama.ptrace_scope={scope}: py-spy cannot show native stacks of a worker that hangs"
        yield warn("HF518", what, why, "sysctl kernel.yama.ptrace_scope=1, or --cap-add SYS_PTRACE")


def folders(facts: LocalFacts) -> Iterator[DoctorFinding]:
    for folder in facts.folders:
        yield folder_finding(folder)


def folder_finding(folder: Folder) -> DoctorFinding:
    what = "folder"
    if folder.error:
        fix = "make it writable, or name another one: --log-dir for logs, TMPDIR for temporary files"
        return fatal("HF519", what, f"{folder.path} cannot be written: {folder.error}", fix)
    free = f"{folder.path} has {size(folder.free_bytes)} free"
    if folder.free_bytes < FOLDER_FREE_BYTES_MIN:
        return warn(
            "HF519", what, free, "make room, or name another one: --log-dir for logs, TMPDIR for temporary files"
        )
    return passed("HF519", what, free)


def clock(facts: LocalFacts) -> Iterator[DoctorFinding]:
    what = "clock"
    if facts.clock_synchronised is False:
        yield warn("HF530", what, "not kept by NTP", "start chronyd or systemd-timesyncd")
    elif facts.clock_synchronised:
        yield passed("HF530", what, "kept by NTP")
