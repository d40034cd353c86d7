"""One node's checks: facts in, findings out. PURE.

The checks cover the machine or container, installed software, variables, names and interfaces; `examine` runs all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from holdfast.doctor import gpu_rules
from holdfast.doctor.findings import (
    GIB,
    MIB,
    DoctorFinding,
    Interface,
    LocalFacts,
    TorchFacts,
    TorchState,
    fatal,
    passed,
    retry,
    size,
    warn,
)
from holdfast.doctor.gpu_full import judge_full
from holdfast.doctor.machine_state import VISIBLE, used_gpus
from holdfast.linux import VIRTUAL
from holdfast.protocol.time_outs import TimeOut, inversions
from holdfast.text import is_loopback, listed

SHM_BYTES_MIN = 1 * GIB
"""Size of /dev/shm below which loaders and NCCL run out of it; containers have 64 MiB by default."""
SHM_FREE_BYTES_MIN = 256 * MIB
NOFILE_MIN = 4096
NPROC_MIN = 2048
PIDS_LEFT_PER_WORKER = 256
"""Number of processes and threads of one worker with its data loaders."""
MEMLOCK_BYTES_MIN = 1 * GIB
"""Locked memory that InfiniBand registers for its buffers."""
MEMORY_PER_WORKER_BYTES_MIN = 1 * GIB
"""Memory that torch uses with a small model."""
FOLDER_FREE_BYTES_MIN = 1 * GIB


def shared_memory(facts: LocalFacts) -> Iterator[DoctorFinding]:
    what, shm = "/dev/shm", facts.shm
    enlarge = "docker run --shm-size=16g or --ipc=host; on Kubernetes an emptyDir with medium: Memory"
    if shm.error:
        yield fatal("HF510", what, f"cannot be used: {shm.error}", "mount a tmpfs there that this user can write")
    elif 0 < shm.total_bytes < SHM_BYTES_MIN:
        yield warn("HF510", what, f"has only {size(shm.total_bytes)}", enlarge)
    elif shm.total_bytes > 0 and shm.free_bytes < SHM_FREE_BYTES_MIN:
        why = f"{size(shm.free_bytes)} of {size(shm.total_bytes)} free"
        yield warn("HF510", what, why, "remove files that dead jobs left there (ls -l /dev/shm)")
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
    """Threads count, too: the cgroup's limit is the container's, RLIMIT_NPROC that of the user on the whole machine."""
    what = "processes"
    limit = facts.limits.get("nproc")
    if facts.pids_limit is not None:
        left = facts.pids_limit - facts.pids_used
        if left < PIDS_LEFT_PER_WORKER * facts.nproc:
            why = f"the cgroup allows {facts.pids_limit} processes and threads, {facts.pids_used} exist"
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
    if limit == 0 or facts.core_pattern.startswith("|"):  # a program gets the core and decides about its size
        yield passed("HF514", "core dumps", "off" if limit == 0 else f"go to {facts.core_pattern[1:].strip()}")
    else:
        why = f"a worker that crashes writes its whole memory to {facts.core_pattern or 'core'}"
        yield warn("HF514", "core dumps", why, "ulimit -c 0")


def memory(facts: LocalFacts) -> Iterator[DoctorFinding]:
    what = "memory"
    if not facts.memory_bytes:
        return
    limit, needed = facts.memory_limit_bytes, MEMORY_PER_WORKER_BYTES_MIN * facts.nproc
    bounded = limit is not None and limit < facts.memory_bytes
    bounds = (facts.memory_available_bytes, limit, facts.memory_room_bytes)
    left = min(each for each in bounds if each is not None)
    shown = f"{size(facts.memory_available_bytes)} of {size(facts.memory_bytes)} available"
    if bounded and limit is not None:
        room = facts.memory_room_bytes
        shown += f", the cgroup allows {size(limit)}" + ("" if room is None else f" and has {size(room)} left")
    if left < needed:
        workers = f"{facts.nproc} workers" if facts.nproc > 1 else "a worker"
        why = f"{shown}: not enough for {workers}"
        yield retry("HF515", what, why, "end processes that use it, or raise the container's limit")
    else:
        yield passed("HF515", what, shown + (f", {size(facts.swap_bytes)} swap" if facts.swap_bytes else ""))


def cpus(facts: LocalFacts) -> Iterator[DoctorFinding]:
    what = "CPUs"
    usable = min(float(facts.cpus_allowed), facts.cpu_quota or float(facts.cpus_allowed))
    shown = f"{facts.cpus_allowed} of {facts.cpus}"
    if facts.cpu_quota is not None:
        shown += f", {facts.cpu_quota:.3g} CPUs by cgroup quota"
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
    what, other = "folder", "choose another one: --log-dir for logs, TMPDIR for temporary files"
    for folder in facts.folders:
        free = f"{folder.path} has {size(folder.free_bytes)} free"
        if folder.error:
            why = f"{folder.path} cannot be written: {folder.error}"
            yield fatal("HF519", what, why, f"make it writable, or {other}")
        elif folder.free_bytes < FOLDER_FREE_BYTES_MIN:
            yield warn("HF519", what, free, f"free space, or {other}")
        else:
            yield passed("HF519", what, free)


def clock(facts: LocalFacts) -> Iterator[DoctorFinding]:
    what = "clock"
    if facts.clock_synchronised is False:
        yield warn("HF530", what, "not synchronised by NTP", "start chronyd or systemd-timesyncd")
    elif facts.clock_synchronised:
        yield passed("HF530", what, "synchronised by NTP")


PYTHON_MIN = (3, 11)
IMPORT_SLOW_S = 20.0
BUSY_SHARE = 0.6
"""A process that computes for this share of its time does not wait for a disk."""
BUSY_LOAD = 1.5
"""Load per CPU from which processes wait for a CPU."""

SLOW = {
    "CUDA_LAUNCH_BLOCKING": "the CPU waits for every kernel",
    "TORCH_DISTRIBUTED_DEBUG": "every collective is compared between ranks",
    "NCCL_P2P_DISABLE": "GPUs of a node communicate through main memory",
    "NCCL_SHM_DISABLE": "GPUs of a node communicate through the network",
    "NCCL_IB_DISABLE": "InfiniBand is not used",
    "TORCH_NCCL_BLOCKING_WAIT": "collectives block the CPU",
    "TORCH_SHOW_CPP_STACKTRACES": "every exception is symbolised, which takes seconds",
}
"""Variables that cost speed when they are on, and why."""
HARMLESS = {"TORCH_DISTRIBUTED_DEBUG": ("", "OFF", "INFO")}
"""Values that cost nothing, for variables that know more than on and off."""
OFF = ("", "0", "false", "FALSE", "False", "OFF", "no")
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a launcher sets for its workers. In a shell they are left over."""


def python(facts: LocalFacts) -> Iterator[DoctorFinding]:
    what = "Python"
    parts = tuple(int(part) for part in facts.python.split(".")[:2] if part.isdecimal())
    if not parts:
        yield fatal("HF500", what, f"the workers' Python gives no version: {facts.python}", "see PYTHON_EXEC and PATH")
    elif parts < PYTHON_MIN:
        yield fatal("HF500", what, f"the workers' Python is {facts.python}", "install Python 3.11 or newer")
    else:
        yield passed("HF500", what, f"{facts.python}, holdfast {facts.holdfast}")


def torch(facts: LocalFacts) -> Iterator[DoctorFinding]:
    what, found = "torch", facts.torch
    match found.state:
        case TorchState.ABSENT:
            why = "not installed for the workers' Python"
            yield warn("HF501", what, why, "run pip install torch, if your script needs it")
        case TorchState.BROKEN:
            yield fatal("HF501", what, f"cannot be imported: {found.error}", "reinstall torch in this environment")
        case TorchState.SILENT:
            why = f"its import did not end within {found.seconds:.0f} s"
            fix = "put the environment on a local disk, or see what it waits for (py-spy)"
            yield fatal("HF501", what, why, fix)
        case TorchState.OK if found.seconds > IMPORT_SLOW_S:
            why = f"{found.version} takes {found.seconds:.0f} s to import"
            yield warn("HF501", what, *slow_import(found, why))
        case TorchState.OK:
            platform = built_for(found)
            yield passed("HF501", what, f"{found.version} {f'with {platform}' if platform else 'for CPUs'}")

    if found.state is TorchState.OK:
        part = "torch.distributed"
        if found.distributed and found.gloo:
            yield passed("HF502", part, f"gloo{f', NCCL {found.nccl}' if found.nccl else ''}")
        else:
            why = f"this torch was built without {'gloo' if found.distributed else part}"
            yield fatal("HF502", part, why, "install an official build")


def built_for(found: TorchFacts) -> str:
    """What torch computes with on GPUs, and its version; empty: it is a build for CPUs."""
    if found.hip:
        return f"ROCm {found.hip}"
    return f"CUDA {found.cuda}" if found.cuda else ""


def slow_import(found: TorchFacts, why: str) -> tuple[str, str]:
    """The cause of a slow import, and advice. A slow disk makes a process wait, not compute."""
    if found.cpu_s > BUSY_SHARE * found.seconds:
        fix = "this processor is slow, or Python's cached bytecode cannot be written"
        return f"{why}, {found.cpu_s:.0f} s of it computing", fix
    if found.load > BUSY_LOAD:
        return (
            f"{why}; the processor is busy ({found.load:.1f} processes per CPU)",
            "see which other programs run here (top)",
        )
    return why, "put the environment on a local disk"


def cuda(facts: LocalFacts) -> Iterator[DoctorFinding]:
    """Whether torch can use the GPUs of this node."""
    found, seen, platform = facts.torch, len(facts.gpus), built_for(facts.torch)
    if found.state is not TorchState.OK or not (facts.driver or seen):
        return
    what = platform.partition(" ")[0] or "CUDA"
    names = VISIBLE if found.hip else ("CUDA_VISIBLE_DEVICES",)
    hiding = [name for name in names if facts.variables.get(name) in ("", "-1")]
    # AMD's GPUs are read from /sys, which has no version of their driver.
    driver = f"driver {facts.driver or facts.gpus[0].driver}".strip()
    if not seen and not found.gpus and not facts.gpu_error:
        # The driver's file in /proc is there in containers of a node with GPUs, and on login nodes with its packages.
        why = f"{driver} is here, but no GPU"
        yield warn("HF503", what, why, "nothing on a login node; in a container, give it GPUs (--gpus all)")
    elif not platform:
        why = f"{driver} and {seen or 'some'} GPUs are here, but torch {found.version} is a build for CPUs"
        yield warn("HF503", what, why, "install a torch build for these GPUs")
    elif hiding:
        yield warn("HF503", what, f"{hiding[0]} hides every GPU", f"unset {hiding[0]}")
    elif found.gpus == 0:
        reason = found.gpu_error or f"{what} gives no reason"
        why = f"torch can use no GPU: {reason} ({driver}, torch for {platform})"
        yield fatal("HF503", what, why, f"install a driver for {platform}, or a torch build for this driver")
    elif found.unsupported:
        why = f"torch {found.version} has no code for {listed(found.unsupported)}"
        yield fatal("HF503", what, why, "install a torch build that supports these GPUs")
    else:
        yield passed("HF503", what, f"{found.gpus} GPUs, {driver}, {platform}")


def gpu_health(facts: LocalFacts) -> Iterator[DoctorFinding]:
    yield from gpu_rules.gpu_health(facts.machine, used_gpus(facts.machine, facts.variables))


def gpu_use(facts: LocalFacts) -> Iterator[DoctorFinding]:
    yield from gpu_rules.gpu_use(used_gpus(facts.machine, facts.variables))


def gpu_full_test(facts: LocalFacts) -> Iterator[DoctorFinding]:
    if facts.gpu_test is not None:
        yield from judge_full(facts.gpu_test)


def network_ports(facts: LocalFacts) -> Iterator[DoctorFinding]:
    yield from gpu_rules.port_health(facts.machine.ports)


def threads(facts: LocalFacts) -> Iterator[DoctorFinding]:
    text = facts.variables.get("OMP_NUM_THREADS")
    what = "OMP_NUM_THREADS"
    cpus = max(1, int(min(facts.cpus_allowed, facts.cpu_quota or facts.cpus_allowed)))
    if text is None:
        yield passed("HF521", what, "unset: workers share the CPUs evenly")
        return
    first = text.partition(",")[0].strip()  # the others are for nested regions
    if not first.isdecimal() or int(first) < 1:
        yield warn("HF521", what, f"{text!r} is not a number of threads", "unset OMP_NUM_THREADS")
    elif int(first) * facts.nproc > cpus and int(first) > 1:
        why = f"{text} threads × {facts.nproc} workers on {cpus} CPUs"
        yield warn("HF521", what, why, f"unset it, or set it to {max(1, cpus // facts.nproc)}")
    else:
        yield passed("HF521", what, f"{text}, for {facts.nproc} workers on {cpus} CPUs")


def variables(facts: LocalFacts) -> Iterator[DoctorFinding]:
    what, given = "variables", facts.variables
    problems = tuple(variable_problems(given))
    for why, fix in problems:
        yield warn("HF539", what, why, fix)
    if not problems:
        yield passed("HF539", what, f"{len(given)} relevant ones are set, without problems" if given else "none is set")


def variable_problems(given: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The reason and the advice for each problem."""
    for name, why in SLOW.items():
        if name in given and given[name] not in HARMLESS.get(name, OFF):
            yield f"{name}={given[name]}: {why}", f"unset {name} when you have finished debugging"
    if given.get("NCCL_DEBUG", "").upper() == "TRACE":
        yield "NCCL_DEBUG=TRACE: a line for every call", "use NCCL_DEBUG=WARN or INFO"
    file = given.get("NCCL_DEBUG_FILE", "")
    if file and "%p" not in file:
        yield f"NCCL_DEBUG_FILE={file}: all ranks write into one file", "put %h and %p into the name"
    if "0" in (given.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"), given.get("NCCL_ASYNC_ERROR_HANDLING")):
        yield "…NCCL_ASYNC_ERROR_HANDLING=0: a collective that fails hangs for ever", "unset it"
    if left := [name for name in FOREIGN if name in given]:
        why = f"{listed(left)} set in this shell; workers get their own values, other programs do not"
        yield why, f"unset {' '.join(left)}"


def time_outs(rungs: tuple[TimeOut, ...]) -> DoctorFinding:
    """The order of the time-outs of a line. The first fault is shown."""
    what = "time-outs"
    for each in inversions(rungs):
        why = f"{each.then.words} ({each.then.source}) is not after {each.first.words}"
        return warn("HF540", what, why, each.text)
    return passed("HF540", what, ", ".join(each.words for each in rungs))


RESOLVE_SLOW_S = 2.0
EPHEMERAL_PORTS_MIN = 4096
CHOOSERS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def own_name(facts: LocalFacts) -> Iterator[DoctorFinding]:
    """Check the own host name: gloo announces its address, or loopback if that is not an address of this machine."""
    what, host = "own name", facts.host
    alone = stays_here(facts)
    choose = f"set GLOO_SOCKET_IFNAME={proposed(facts) or 'INTERFACE'}, or add `ADDRESS {host}` to /etc/hosts"
    if "GLOO_SOCKET_IFNAME" in facts.variables:
        yield passed("HF531", what, f"{host} (GLOO_SOCKET_IFNAME is set, so it matters little)")
    elif facts.resolve_error:
        why = f"{host} does not resolve: {facts.resolve_error}"
        yield passed("HF531", what, why) if alone else warn("HF531", what, why, choose)
    elif facts.own_addresses and all(is_loopback(address) for address in facts.own_addresses):
        why = f"{host} is {listed(facts.own_addresses)}, a loopback address"
        if alone:
            yield passed("HF532", what, f"{why}: good for one node, not for several")
        else:
            yield warn("HF532", what, f"{why}: gloo would announce it to the other nodes", choose)
    elif facts.resolve_s > RESOLVE_SLOW_S:
        why = f"{host} took {facts.resolve_s:.1f} s to resolve"
        yield warn("HF531", what, why, "add it to /etc/hosts, or fix DNS")
    else:
        yield passed("HF531", what, f"{host} is {listed(facts.own_addresses)}")


def interfaces(facts: LocalFacts) -> Iterator[DoctorFinding]:
    what = "interfaces"
    usable = candidates(facts)
    if not usable and stays_here(facts):
        yield passed("HF534", what, "loopback only: good for one node")
        return
    if not usable:
        fix = "start the network; in a container use --network host"
        yield fatal("HF534", what, "none is up but loopback", fix)
        return
    shown = listed([f"{each.name} {each.addresses[0]}" for each in usable])
    yield passed("HF534", what, shown)

    # NCCL and gloo choose by order and name, so the bridge of a container runtime may be taken for the network.
    misleading = [each.name for each in usable if each.name.startswith(VIRTUAL)]
    if not stays_here(facts) and misleading and not any(name in facts.variables for name in CHOOSERS):
        best = proposed(facts)
        why = f"{listed(misleading)} beside {best}: NCCL or gloo may take the wrong one"
        yield warn("HF536", what, why, f"export NCCL_SOCKET_IFNAME={best} GLOO_SOCKET_IFNAME={best}")


def endpoint_link(facts: LocalFacts) -> Iterator[DoctorFinding]:
    """Compare the link towards the endpoint with the node's other ones."""
    known = [each for each in candidates(facts) if each.speed_mbit_s > 0]
    for own in [each for each in known if facts.endpoint_from in each.addresses]:
        best = max(
            [own, *(each for each in known if not each.name.startswith(VIRTUAL))], key=lambda each: each.speed_mbit_s
        )
        why = f"{own.name} has {own.speed_mbit_s} Mbit/s"
        if best.speed_mbit_s > own.speed_mbit_s:
            fix = f"give the endpoint an address that is reached over {best.name}, which has {best.addresses[0]}"
            yield warn("HF533", "way to the endpoint", f"{why}, {best.name} {best.speed_mbit_s}", fix)
        else:
            yield passed("HF533", "way to the endpoint", why)


def chosen_interfaces(facts: LocalFacts) -> Iterator[DoctorFinding]:
    """Check the interfaces that variables such as NCCL_SOCKET_IFNAME name."""
    for variable in CHOOSERS:
        text = facts.variables.get(variable)
        if not text:
            continue
        best = proposed(facts)
        fix = f"export {variable}={best}" if best else f"unset {variable}"
        taken = chosen(text, facts.interfaces, nccl=variable.startswith("NCCL"))
        usable = [each for each in taken if each.up and each.addresses]
        if not taken:
            here = listed([each.name for each in facts.interfaces]) or "none"
            yield fatal("HF535", variable, f"{text}: no such interface here; existing: {here}", fix)
        elif not usable:
            yield fatal("HF535", variable, f"{text}: {taken[0].name} is down or has no address", fix)
        elif not stays_here(facts) and all(is_local(each) or each.name.startswith(VIRTUAL) for each in usable):
            yield warn("HF535", variable, f"{text}: {usable[0].name} probably does not reach other nodes", fix)
        else:
            yield passed("HF535", variable, f"{text}: {listed([each.name for each in usable])}")


def ports(facts: LocalFacts) -> Iterator[DoctorFinding]:
    what = "ports"
    if facts.ephemeral_ports is None:
        return
    first, last = facts.ephemeral_ports
    if last - first + 1 < EPHEMERAL_PORTS_MIN:
        why = f"only {last - first + 1} for connections between ranks ({first} to {last})"
        yield warn("HF537", what, why, "sysctl net.ipv4.ip_local_port_range='32768 60999'")
    elif facts.endpoint_is_here is not False and first <= facts.endpoint_port <= last:
        why = f"the kernel may give the endpoint's {facts.endpoint_port} to any program ({first} to {last})"
        yield warn("HF537", what, why, "use a port outside of it, such as 29400")
    else:
        yield passed("HF537", what, f"{first} to {last} for connections between ranks")


def endpoint_port(facts: LocalFacts) -> Iterator[DoctorFinding]:
    if not facts.endpoint_port or facts.endpoint_is_here is None:
        return
    what = "endpoint"
    if not facts.endpoint_is_here:
        yield passed("HF538", what, f"{facts.endpoint} is another node's")
    elif facts.endpoint_holder:
        why = f"port {facts.endpoint_port} is used by {facts.endpoint_holder}"
        yield retry("HF538", what, why, "end it, or use another port on all nodes")
    else:
        yield passed("HF538", what, f"{facts.endpoint} is this node's, and free")


def stays_here(facts: LocalFacts) -> bool:
    """Whether all traffic stays on this machine: one node, or several that meet on loopback."""
    host = facts.endpoint.rpartition(":")[0].strip("[]")
    return facts.nodes == 1 or is_loopback(host)


def proposed(facts: LocalFacts) -> str:
    """The interface to use: that of the default route, else the fastest that is not a bridge; empty: none."""
    usable = candidates(facts)
    real = [each for each in usable if not each.name.startswith(VIRTUAL)] or usable
    for each in real:
        if each.name == facts.default_interface:
            return each.name
    return max(real, key=lambda each: each.speed_mbit_s).name if real else ""


def candidates(facts: LocalFacts) -> list[Interface]:
    """Interfaces that may lead to other nodes."""
    return [each for each in facts.interfaces if each.up and each.addresses and not is_local(each)]


def chosen(text: str, interfaces: tuple[Interface, ...], *, nccl: bool) -> list[Interface]:
    """The interfaces that such a variable selects. NCCL: prefixes, `=exact`, `^not`; gloo: exact names."""
    negated, exact = nccl and text.startswith("^"), not nccl
    text = text[1:] if negated else text
    if nccl and text.startswith("="):
        exact, text = True, text[1:]
    names = [name.strip() for name in text.split(",") if name.strip()]

    def fits(interface: Interface) -> bool:
        return any(interface.name == name if exact else interface.name.startswith(name) for name in names)

    return [each for each in interfaces if fits(each) != negated]


def is_local(interface: Interface) -> bool:
    return interface.name == "lo" or (bool(interface.addresses) and all(map(is_loopback, interface.addresses)))


Check = Callable[[LocalFacts], Iterator[DoctorFinding]]

CHECKS: tuple[Check, ...] = (
    *(python, torch, cuda, gpu_health, gpu_use, gpu_full_test, network_ports),
    *(shared_memory, open_files, processes, locked_memory, core_dumps, memory, cpus, overcommit, tracing, folders),
    *(threads, clock, own_name, interfaces, endpoint_link, chosen_interfaces, ports, endpoint_port, variables),
)
"""All checks in the order of output."""


def examine(facts: LocalFacts) -> tuple[DoctorFinding, ...]:
    """The findings of all checks. A check gives at least one if its facts are known."""
    return tuple(finding for check in CHECKS for finding in check(facts))
