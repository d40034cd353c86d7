"""`holdfast env`: this machine and its software in Markdown, to paste into an issue; secrets are masked.

Reads files, metadata and a few quick programs; imports none of the packages that it describes.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import psutil

from holdfast.cli.printing import Parser, print_json
from holdfast.linux import GroupLimits, read_text
from holdfast.version import __version__

PACKAGES = ("torch", "numpy", "msgspec", "psutil", "accelerate", "lightning", "transformers", "py-spy")
NVIDIA_PACKAGES = re.compile(r"nvidia[-_](nccl|cuda[-_]runtime|cudnn)")
VARIABLES = re.compile(
    r"^(PET_|HOLDFAST_|TORCH|PYTORCH_|NCCL_|GLOO_|UCC_|UCX_|FI_|SLURM_|CUDA_|OMP_|MKL_|MASTER_|PYTHON|LD_)"
    r"|^(RANK|LOCAL_RANK|WORLD_SIZE|XDG_RUNTIME_DIR|TMPDIR|KUBERNETES_SERVICE_HOST)$"
)
SECRET = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
IN_URL = re.compile(r"(://)[^/@\s]*@")
MASK = "***"
COMMIT_FILE = "commit.txt"
"""Inside the package; `make dist` writes it."""
UNKNOWN = "unknown"
VALUE_CHARS_MAX = 400
PROGRAM_S_MAX = 5.0
LIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "stack": resource.RLIMIT_STACK,
    "core": resource.RLIMIT_CORE,
}
GIB = 2**30

Facts = dict[str, str]


def main(argv: Sequence[str]) -> int:
    """Run `holdfast env` with these arguments; returns the exit status. Raises HoldfastError."""
    chosen = parser().parse_args(argv)
    if chosen.short:
        print("\n".join(version_lines()))
        return 0
    told = {title: gather() for title, gather in SECTIONS.items()}
    if chosen.json:
        print_json(told)
    else:
        print(markdown(told))
    return 0


def parser() -> Parser:
    made = Parser(prog="holdfast env", description="Describe this machine, to paste into an issue.", allow_abbrev=False)
    made.add_argument("--json", action="store_true", help="print JSON")
    made.add_argument(
        "--short", action="store_true", help="versions only: holdfast and its commit, Python, torch, kernel"
    )
    return made


def markdown(told: Mapping[str, Facts]) -> str:
    """One table for each section that has facts."""
    parts = []
    for title, facts in told.items():
        if facts:
            rows = "\n".join(f"| {cell(name)} | {cell(value)} |" for name, value in facts.items())
            parts.append(f"### {title}\n| | |\n|---|---|\n{rows}")
    return "\n\n".join(parts)


def cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def software() -> Facts:
    facts = {
        "holdfast": __version__,
        "holdfast commit": commit(),
        "Python": f"{platform.python_version()} ({sys.executable})",
    }
    for name in PACKAGES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    for package in metadata.distributions():
        name = package.metadata["Name"] or ""
        if NVIDIA_PACKAGES.match(name):
            facts[name] = package.version
    for name, setting in torch_build().items():
        facts["torch commit" if name == "git_version" else f"torch built with {name}"] = setting
    return facts


def commit() -> str:
    """The commit of holdfast: recorded in a built package, read from git in a checkout, else unknown."""
    package = Path(__file__).parent.parent
    root = package.parent.parent
    with contextlib.suppress(OSError):
        return (package / COMMIT_FILE).read_text().strip()
    if not (root / ".git").exists():  # git would look in the folders above, where another project may be
        return UNKNOWN
    return output(["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]).strip() or UNKNOWN


def version_lines() -> list[str]:
    """The minimal facts for an issue; also printed by `holdfast --version --verbose`."""
    facts = {"commit": commit(), "Python": platform.python_version()}
    try:
        facts["torch"] = metadata.version("torch")
    except metadata.PackageNotFoundError:
        facts["torch"] = "not installed beside holdfast"
    facts["kernel"] = f"{platform.system()} {platform.release()}"
    return [f"holdfast {__version__}", *(f"{name} {value}" for name, value in facts.items())]


def torch_build() -> Facts:
    """CUDA and the like, read from torch's own version.py: importing torch takes seconds."""
    try:
        package = metadata.distribution("torch")
        text = Path(str(package.locate_file("torch/version.py"))).read_text()
    except (metadata.PackageNotFoundError, OSError):
        return {}
    found = re.findall(r"^(cuda|hip|xpu|git_version)\b[^=]*= *'([^']+)'", text, re.MULTILINE)
    return dict(found)


def machine() -> Facts:
    memory = psutil.virtual_memory()
    facts = {
        "host": socket.gethostname(),
        "system": os_name(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "processor": f"{cpu_model()}, {os.cpu_count()} CPUs, {len(os.sched_getaffinity(0))} for this process",
        "memory": f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} GiB available",
        "container": container(),
    }
    group = GroupLimits()
    if group.memory_bytes is not None:
        facts["memory limit of the cgroup"] = f"{group.memory_bytes / GIB:.1f} GiB"
    if group.cpus is not None:
        facts["CPU limit of the cgroup"] = f"{group.cpus:g} CPUs"
    try:
        shared = shutil.disk_usage("/dev/shm")
        facts["/dev/shm"] = f"{shared.total / GIB:.1f} GiB, {shared.free / GIB:.1f} GiB free"
    except OSError as error:
        facts["/dev/shm"] = error.strerror or "missing"
    return {name: value for name, value in facts.items() if value}


def gpus() -> Facts:
    query = ["nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader"]
    lines = output(query).splitlines()
    facts = {}
    for line in lines:
        number, _, rest = line.partition(", ")
        facts[f"GPU {number}"] = rest
    if any(Path("/dev").glob("nvidia[0-9]*")) and not lines:
        facts["GPUs"] = "there are devices, and nvidia-smi does not answer"
    if Path("/dev/kfd").exists():
        facts["AMD"] = "there is /dev/kfd"
    return facts


def network() -> Facts:
    states = psutil.net_if_stats()
    facts = {}
    for name, addresses in psutil.net_if_addrs().items():
        shown = [each.address for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)]
        state = states.get(name)
        how = f"{'up' if state.isup else 'down'}, mtu {state.mtu}, " if state is not None else ""
        facts[name] = how + (", ".join(shown) or "no address")
    from holdfast.doctor.facts import infiniband

    if devices := infiniband():
        facts["InfiniBand"] = ", ".join(devices)
    return facts


def limits() -> Facts:
    return {name: " / ".join(map(limit_text, resource.getrlimit(number))) for name, number in LIMITS.items()}


def limit_text(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def variables(environ: Mapping[str, str] | None = None) -> Facts:
    """Variables that affect training; secrets masked."""
    environ = os.environ if environ is None else environ
    return {name: masked(name, environ[name]) for name in sorted(environ) if VARIABLES.search(name)}


def masked(name: str, value: str) -> str:
    """
    >>> masked("HOLDFAST_TOKEN", "abc"), masked("PET_RDZV_ENDPOINT", "http://me:secret@host:1/")
    ('***', 'http://***@host:1/')
    """
    if SECRET.search(name) and value:
        return MASK
    value = re.sub(r"(?i)\b([\w-]*(?:token|secret|passw|key|auth)[\w-]*)=[^,\s]+", rf"\1={MASK}", value)
    value = IN_URL.sub(rf"\1{MASK}@", value)
    return value if len(value) <= VALUE_CHARS_MAX else f"{value[:VALUE_CHARS_MAX]}…"


def os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        return "Linux"


def cpu_model() -> str:
    found = re.search(r"^model name\s*: (.+)$", read_text(Path("/proc/cpuinfo")), re.MULTILINE)
    return found.group(1) if found else platform.machine()


def container() -> str:
    if Path("/.dockerenv").exists():
        return "Docker"
    if Path("/run/.containerenv").exists():
        return "Podman"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "Kubernetes"
    return os.environ.get("APPTAINER_CONTAINER", os.environ.get("container", ""))  # noqa: SIM112 - systemd's name


def output(command: list[str]) -> str:
    """The output of a program; empty where it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S_MAX, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


SECTIONS: dict[str, Callable[[], Facts]] = {
    "Software": software,
    "Machine": machine,
    "GPUs": gpus,
    "Network": network,
    "Limits (soft / hard)": limits,
    "Variables": variables,
}
