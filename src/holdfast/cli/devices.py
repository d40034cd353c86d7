"""`--nproc-per-node`: the number of workers of this node, without importing torch.

Knows where Linux shows accelerators (NVML, /dev/nvidia*, /sys/class/kfd) and the rules of CUDA_VISIBLE_DEVICES. Asks
torch only for other kinds of devices, in a separate process.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from holdfast.linux import read_text
from holdfast.protocol.errors import ProcessesError
from holdfast.protocol.policy import WORKERS_PER_NODE_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TORCH_ANSWER_S_MAX = 120.0
"""Limit for torch's answer: its import from a slow network file system takes long."""

NAMES = ("auto", "cpu", "gpu", "xpu")
REFUSED_NAMES = {"cuda": "gpu", "rocm": "gpu", "mps": "auto", "hpu": "auto", "mtia": "auto"}
"""Names that torchrun refuses although torch knows them, and what to write instead."""
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
TORCH_OWN_BACKEND = "privateuseone"
"""The name of torch's extra backend if no package has renamed it."""
BACKEND_PACKAGES = "torch.backends"
"""Entry points by which torch loads such packages."""


class Count(NamedTuple):
    """The number of workers, and where it comes from."""

    number: int
    kind: str
    """What was counted: gpu, cpu, another device, or `workers` if the number was given."""
    source: str
    """The source of the number, for `--plan` and messages."""


class Probes(NamedTuple):
    """Sources of information about devices; tests pass their own."""

    root: str = "/"
    """Root of the tree that holds dev and sys."""
    nvml: Callable[[], list[str] | None] | None = None
    """A function that returns the UUIDs of all GPUs by index, or None without a driver; by default NVML itself."""
    torch: Callable[[str], int] | None = None
    """A function that asks torch for the number of devices of a kind; by default in a subprocess. Raises
    ProcessesError."""
    backends: Callable[[str], bool] | None = None
    """A function that returns whether an installed package may give torch a backend of this name."""
    cpus: int | None = None
    """Size of the affinity mask; by default this process's."""
    installed: Callable[[str], bool] | None = None
    """A function that returns whether this Python would find a module of this name; by default its finders."""


THIS_NODE = Probes()


def count_processes(text: str, environ: Mapping[str, str], probes: Probes = THIS_NODE) -> Count:
    """The number of workers for `--nproc-per-node TEXT` on this node. Raises ProcessesError."""
    try:
        number = int(text)
    except ValueError:
        return count_devices(text, environ, probes)
    if number <= 0:
        raise ProcessesError("the number of workers must be at least 1")
    if number > WORKERS_PER_NODE_MAX:
        raise ProcessesError(f"a node has at most {WORKERS_PER_NODE_MAX} workers")
    return Count(number, "workers", "given")


def count_devices(name: str, environ: Mapping[str, str], probes: Probes) -> Count:
    if name == "cpu":
        return count_cpus(probes)
    if name == "gpu":
        found = count_gpus(environ, probes)
        if found.number == 0:
            raise ProcessesError(f"this node has no GPU to use ({found.source}); use cpu, auto or a number")
        return found
    if name == "auto":
        found = count_gpus(environ, probes)
        return found if found.number > 0 else count_cpus(probes)
    if name != "xpu":
        refuse_typing_error(name)
        if not (probes.backends or may_be_backend)(name):
            raise ProcessesError("must be a number, auto, gpu, cpu or xpu; no package here gives torch another backend")
    number = (probes.torch or ask_torch)(name)
    if number <= 0:
        raise ProcessesError(f"torch finds no {name} device on this node; use cpu, auto or a number")
    return Count(number, name, "torch")


def refuse_typing_error(name: str) -> None:
    """Raise ProcessesError for a text that cannot be the name of a torch backend, or is nearly one of ours."""
    import difflib

    word = name.strip().lower()
    meant = str(NUMBERS.index(word) + 1) if word in NUMBERS else REFUSED_NAMES.get(name.lower())
    if meant is None and (matches := difflib.get_close_matches(name.lower(), NAMES, n=1, cutoff=0.8)):
        meant = matches[0]
    if meant is not None:
        raise ProcessesError(f"unknown number of workers; did you mean {meant}?")
    if not name.isidentifier():
        raise ProcessesError("must be a number, auto, gpu, cpu, xpu or the name of torch's extra backend")


def may_be_backend(name: str) -> bool:
    """Whether a package may have given torch's extra backend this name, without importing torch, which takes long."""
    from importlib.metadata import entry_points
    from importlib.util import find_spec

    return (
        name == TORCH_OWN_BACKEND
        or bool(entry_points(group=BACKEND_PACKAGES))
        or find_spec(f"torch_{name}") is not None
    )


def count_cpus(probes: Probes) -> Count:
    """The CPUs on which this process may run."""
    return Count(probes.cpus or len(os.sched_getaffinity(0)), "cpu", "affinity mask")


def count_gpus(environ: Mapping[str, str], probes: Probes) -> Count:
    """The GPUs that a worker would see: NVIDIA's, else AMD's."""
    # A container may have the device files without NVML's library. AMD's GPUs obey CUDA_VISIBLE_DEVICES, too, unless
    # one of their own variables is set.
    uuids = (probes.nvml or nvml_uuids)()
    if uuids:
        return visible(environ, "CUDA_VISIBLE_DEVICES", len(uuids), uuids, "NVML")
    if nodes := nvidia_device_files(probes.root):
        return visible(environ, "CUDA_VISIBLE_DEVICES", nodes, [], "/dev/nvidia*")
    if amd := kfd_gpus(probes.root):
        name = next((name for name in ROCM_FILTERS if name in environ), "CUDA_VISIBLE_DEVICES")
        return visible(environ, name, amd, [], "/sys/class/kfd")
    return Count(0, "gpu", "no driver shows one")


def has_gpus(probes: Probes) -> bool:
    """Whether this machine has GPUs whose groups use NCCL or RCCL, by its files: loading NVML would take time."""
    return nvidia_device_files(probes.root) > 0 or kfd_gpus(probes.root) > 0


def has_infiniband(probes: Probes) -> bool:
    """Whether this machine has InfiniBand or RoCE adapters."""
    try:
        return bool(os.listdir(os.path.join(probes.root, "sys/class/infiniband")))
    except OSError:
        return False


ROCM_FILTERS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def visible(environ: Mapping[str, str], variable: str, present: int, uuids: list[str], source: str) -> Count:
    """The GPUs that are present and that the variable, if it is set, makes visible."""
    listed = environ.get(variable)
    if listed is None:
        return Count(present, "gpu", source)
    number = count_listed(listed, present, uuids)
    return Count(number, "gpu", f"{number} of {present} by {source} and {variable}={listed}")


def count_listed(listed: str, present: int, uuids: list[str]) -> int:
    """The number of `present` devices that the list makes visible, by CUDA's rules.

    The items are numbers or UUIDs (a unique beginning is enough). The list ends at the first device that does not
    exist; a duplicate makes none visible. CUDA shows a process only one MIG slice. If no UUIDs are known, each is
    valid.
    """
    items = [item.strip() for item in listed.split(",")]
    if items[0].startswith("MIG-"):
        return 1
    seen: list[int | str] = []
    for item in items:
        index = resolve_uuid(item, uuids) if items[0].startswith("GPU-") else leading_number(item)
        if index is None or (isinstance(index, int) and not 0 <= index < present):
            break
        if index in seen:
            return 0
        seen.append(index)
    return min(len(seen), present)


def resolve_uuid(item: str, uuids: list[str]) -> int | str | None:
    """The index of the only device whose UUID begins like this; None: there is none; the item itself if no UUIDs are
    known."""
    if not item.startswith("GPU-"):
        return None
    if not uuids:
        return item
    matches = [index for index, uuid in enumerate(uuids) if uuid.startswith(item)]
    return matches[0] if len(matches) == 1 else None


def leading_number(item: str) -> int | None:
    """The number as C's strtoul reads it: `1x` is 1; None: no leading digit."""
    digits = ""
    for letter in item.removeprefix("+"):
        if letter not in "0123456789":
            break
        digits += letter
    return int(digits) if digits else None


def nvml_uuids() -> list[str] | None:
    """UUID of every NVIDIA GPU by index; None: no driver."""
    try:
        import pynvml  # here and not above: it is large, and most command lines name a number
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return [nvml_uuid(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def nvml_uuid(index: int) -> str:
    """The UUID of a device; empty when the device does not report it."""
    import pynvml

    try:
        return str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)))
    except pynvml.NVMLError:
        return ""


def nvidia_device_files(root: str) -> int:
    """The number of files /dev/nvidiaN."""
    try:
        names = os.listdir(os.path.join(root, "dev"))
    except OSError:
        return 0
    return sum(name.removeprefix("nvidia").isdecimal() for name in names if name.startswith("nvidia"))


def kfd_gpus(root: str) -> int:
    """The number of AMD compute nodes with SIMD units (the others are CPUs)."""
    nodes = os.path.join(root, "sys/class/kfd/kfd/topology/nodes")
    try:
        names = os.listdir(nodes)
    except OSError:
        return 0
    return sum(has_simd(os.path.join(nodes, name, "properties")) for name in names)


def has_simd(path: str) -> bool:
    pairs = [line.split() for line in read_text(path).splitlines()]
    return any(len(pair) == 2 and pair[0] == "simd_count" and pair[1] != "0" for pair in pairs)


QUESTION = """
import sys, torch
name = sys.argv[1]
if name != "xpu" and name != torch._C._get_privateuse1_backend_name():
    sys.exit("there is no backend of that name")
module = getattr(torch, name, None)
print(module.device_count() if module is not None and module.is_available() else 0)
"""


def ask_torch(name: str, python: str | None = None) -> int:
    """The number of devices of a kind that only torch can count, from a process that imports it. Raises
    ProcessesError."""
    import subprocess
    import sys

    from holdfast.inherited import without_secrets

    env = without_secrets(os.environ)
    command = [python or sys.executable, "-c", QUESTION, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_ANSWER_S_MAX, check=False, env=env)
    except subprocess.TimeoutExpired:
        raise ProcessesError(f"torch did not report its devices within {TORCH_ANSWER_S_MAX:g} s") from None
    except OSError as error:
        raise ProcessesError(f"only torch can count these, and {command[0]} does not run: {error.strerror}") from None
    if done.returncode != 0 or not done.stdout.strip().isdecimal():
        lines = done.stderr.strip().splitlines()
        reason = lines[-1] if lines else "no message"
        raise ProcessesError(f"not a number, auto, gpu, cpu or xpu, and torch reports for such a device: {reason}")
    return int(done.stdout)
