"""Checks of what is installed and set: Python, torch, CUDA, GPUs, variables. PURE."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.core.doctor import DoctorFinding, LocalFacts, TorchFacts, TorchState
from holdfast.insight.doctor.making import fatal, named, passed, warn

PYTHON_MIN = (3, 11)
IMPORT_SLOW_S = 20.0
BUSY_SHARE = 0.6
"""Of its time: a process that computes so much does not wait for a disk."""
BUSY_LOAD = 1.5
"""Per CPU: a process waits for a processor."""
GPU_BUSY_MIB = 1024
"""Less than this is what drivers and desktops hold."""

SLOW = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "TORCH_DISTRIBUTED_DEBUG": "collectives are checked against each other",
    "NCCL_P2P_DISABLE": "GPUs of a node talk through main memory",
    "NCCL_SHM_DISABLE": "GPUs of a node talk through the network",
    "NCCL_IB_DISABLE": "InfiniBand stays unused",
    "TORCH_NCCL_BLOCKING_WAIT": "collectives block the CPU",
    "TORCH_SHOW_CPP_STACKTRACES": "every exception is symbolised, which takes seconds",
}
"""Variables that cost speed when they are on, and why."""
HARMLESS = {"TORCH_DISTRIBUTED_DEBUG": ("", "OFF", "INFO")}
OFF = ("", "0", "false", "FALSE", "False", "OFF", "no")
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""A launcher gives these to its workers; in a shell they are left over."""


def python(facts: LocalFacts) -> Iterator[DoctorFinding]:
    what = "Python"
    parts = tuple(int(part) for part in facts.python.split(".")[:2] if part.isdecimal())
    if parts < PYTHON_MIN:
        yield fatal("HF500", what, f"the workers' Python is {facts.python}", "install Python 3.11 or newer")
    else:
        yield passed("HF500", what, f"{facts.python}, holdfast {facts.holdfast}")


def torch(facts: LocalFacts) -> Iterator[DoctorFinding]:
    what, found = "torch", facts.torch
    match found.state:
        case TorchState.ABSENT:
            yield warn(
                "HF501", what, "not installed for the workers' Python", "pip install torch, if your script needs it"
            )
        case TorchState.BROKEN:
            yield fatal("HF501", what, f"cannot be imported: {found.error}", "reinstall torch in this environment")
        case TorchState.SILENT:
            why = f"its import did not end within {found.seconds:.0f} s"
            yield fatal(
                "HF501", what, why, "put the environment on a local disk, or look at what it waits for (py-spy)"
            )
        case TorchState.OK if found.seconds > IMPORT_SLOW_S:
            why = f"{found.version} takes {found.seconds:.0f} s to import"
            yield warn("HF501", what, *slow_import(found, why))
        case TorchState.OK:
            yield passed("HF501", what, f"{found.version} {f'with CUDA {found.cuda}' if found.cuda else 'for CPUs'}")
    if found.state is TorchState.OK:
        if found.distributed and found.gloo:
            yield passed("HF502", "torch.distributed", f"gloo{f', NCCL {found.nccl}' if found.nccl else ''}")
        else:
            lacking = "gloo" if found.distributed else "torch.distributed"
            yield fatal(
                "HF502", "torch.distributed", f"this torch was built without {lacking}", "install an official build"
            )


def slow_import(found: TorchFacts, why: str) -> tuple[str, str]:
    """What the time went into, and what helps: a disk keeps a process waiting, not computing."""
    if found.cpu_s > BUSY_SHARE * found.seconds:
        return (
            f"{why}, {found.cpu_s:.0f} s of it computing",
            "this processor is slow, or Python's cached bytecode cannot be written",
        )
    if found.load > BUSY_LOAD:
        return f"{why}; the processor is busy ({found.load:.1f} processes per CPU)", "see what else runs here (top)"
    return why, "put the environment on a local disk"


def cuda(facts: LocalFacts) -> Iterator[DoctorFinding]:
    """Whether torch can use what is there."""
    what, found = "CUDA", facts.torch
    seen = len(facts.gpus)
    hidden = facts.variables.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if found.state is not TorchState.OK or not (facts.driver or seen):
        return
    driver = f"driver {facts.driver or facts.gpus[0].driver}"
    if not found.cuda:
        why = f"{driver} and {seen or 'some'} GPUs are here, but torch {found.version} is a build for CPUs"
        yield warn("HF503", what, why, "install a torch build for CUDA")
    elif hidden:
        yield warn("HF503", what, "CUDA_VISIBLE_DEVICES hides every GPU", "unset CUDA_VISIBLE_DEVICES")
    elif found.gpus == 0:
        why = (
            f"torch can use no GPU: {found.gpu_error or 'CUDA gives no reason'} ({driver}, torch for CUDA {found.cuda})"
        )
        yield fatal("HF503", what, why, f"install a driver for CUDA {found.cuda}, or a torch build for this driver")
    elif found.unsupported:
        why = f"torch {found.version} has no code for {named(found.unsupported)}"
        yield fatal("HF503", what, why, "install a torch build that supports these GPUs")
    else:
        yield passed("HF503", what, f"{found.gpus} GPUs, {driver}, CUDA {found.cuda}")


def gpu_health(facts: LocalFacts) -> Iterator[DoctorFinding]:
    what = "GPU health"
    if facts.gpu_error:
        yield fatal("HF504", what, f"nvidia-smi: {facts.gpu_error}", "see dmesg; reset the GPU or reboot")
    broken = [f"GPU {gpu.index} has {gpu.ecc_errors}" for gpu in facts.gpus if gpu.ecc_errors]
    if broken:
        why = f"uncorrected memory errors since the driver was loaded: {named(broken)}"
        yield fatal("HF504", what, why, "reset the GPU (nvidia-smi -r), and replace it if they come back")
    elif facts.gpus:
        yield passed("HF504", what, f"{len(facts.gpus)} × {facts.gpus[0].name}, no uncorrected memory errors")


def gpu_use(facts: LocalFacts) -> Iterator[DoctorFinding]:
    what = "GPU use"
    busy = [gpu for gpu in facts.gpus if gpu.users or (gpu.memory_used_mib or 0) > GPU_BUSY_MIB]
    if busy:
        shown = [
            f"GPU {gpu.index}: {gpu.memory_used_mib or 0} of {gpu.memory_total_mib or 0} MiB in use"
            + (f" by {named(gpu.users, 3)}" if gpu.users else "")
            for gpu in busy
        ]
        yield warn("HF505", what, "; ".join(shown), "wait for them, end what was left behind, or use other GPUs")
    elif facts.gpus:
        yield passed("HF505", what, "all free")


def threads(facts: LocalFacts) -> Iterator[DoctorFinding]:
    text = facts.variables.get("OMP_NUM_THREADS")
    what = "OMP_NUM_THREADS"
    cpus = max(1, int(min(facts.cpus_allowed, facts.cpu_quota or facts.cpus_allowed)))
    if text is None:
        yield passed("HF521", what, "unset: workers share the CPUs evenly")
    elif not text.strip().isdecimal() or int(text) < 1:
        yield warn("HF521", what, f"{text!r} is no number of threads", "unset OMP_NUM_THREADS")
    elif int(text) * facts.nproc > cpus and int(text) > 1:
        why = f"{text} threads × {facts.nproc} workers on {cpus} CPUs"
        yield warn("HF521", what, why, f"unset it, or set it to {max(1, cpus // facts.nproc)}")
    else:
        yield passed("HF521", what, f"{text}, for {facts.nproc} workers on {cpus} CPUs")


def variables(facts: LocalFacts) -> Iterator[DoctorFinding]:
    what, given = "variables", facts.variables
    before = len(given)
    odd = False
    for name, why in SLOW.items():
        if name in given and given[name] not in HARMLESS.get(name, OFF):
            odd = True
            yield warn("HF539", what, f"{name}={given[name]}: {why}", f"unset {name} when you are done looking")
    if given.get("NCCL_DEBUG", "").upper() == "TRACE":
        odd = True
        yield warn("HF539", what, "NCCL_DEBUG=TRACE: a line for every call", "NCCL_DEBUG=WARN or INFO tells enough")
    file = given.get("NCCL_DEBUG_FILE", "")
    if file and "%p" not in file:
        odd = True
        why = f"NCCL_DEBUG_FILE={file}: all ranks write into one file"
        yield warn("HF539", what, why, "put %h and %p into the name")
    if given.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0" or given.get("NCCL_ASYNC_ERROR_HANDLING") == "0":
        odd = True
        why = "…NCCL_ASYNC_ERROR_HANDLING=0: a collective that fails hangs for ever"
        yield warn("HF539", what, why, "unset it")
    left = [name for name in FOREIGN if name in given]
    if left:
        odd = True
        why = f"{named(left)} set in this shell; workers get their own, whatever else you start does not"
        yield warn("HF539", what, why, f"unset {' '.join(left)}")
    if not odd and before:
        yield passed("HF539", what, f"{before} that matter are set, none of them hurts")
    elif not odd:
        yield passed("HF539", what, "none set that hurts")
