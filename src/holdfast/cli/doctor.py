"""This machine: `holdfast doctor [options of a run]` checks it, `holdfast env` describes it.

The doctor takes the line of `holdfast run` unchanged, with the script, and starts nothing of it; with the same line on
several nodes it checks each pair of them. The package doctor gathers and judges the facts.
`holdfast env` prints this machine and its software in Markdown, for an issue; secrets are masked. It reads files and
metadata, and runs a few quick programs; it imports none of the packages that it describes.
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
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import psutil

from holdfast import compile_caches
from holdfast.cli import config, grammar, print_version, say
from holdfast.cli.option_table import FLAG, FLOAT, OPTIONS, TEXT, Option
from holdfast.cli.option_table import line as help_line
from holdfast.cli.printing import Parser, print_json
from holdfast.linux import GroupLimits, read_text
from holdfast.protocol.errors import RendezvousConfigError, UsageError
from holdfast.text import shortened, without_passwords
from holdfast.version import __version__

if TYPE_CHECKING:
    import asyncio

    from holdfast.cli.grammar import Parsed
    from holdfast.cli.rendezvous import RendezvousOptions
    from holdfast.doctor.facts import FactsRequest
    from holdfast.doctor.findings import DoctorFinding, LocalFacts
    from holdfast.doctor.joint import JointOptions, JointResult

ALL_REDUCE = "a small one with gloo: auto (where all nodes have torch) or off"
GPU_CHECK = "GPUs: what their driver reports (quick), or also what they compute and copy (full: a minute)"
OWN = tuple(
    Option(name, kind, default, text, metavar, env=False, choices=choices, ours=True)
    for name, kind, default, text, metavar, choices in (
        ("--timeout", FLOAT, 60.0, "limit of the wait for other nodes, and of each check", "S", ()),
        ("--all-reduce", TEXT, "auto", ALL_REDUCE, "auto|off", ("auto", "off")),
        ("--gpu", TEXT, "quick", GPU_CHECK, "off|quick|full", ("off", "quick", "full")),
        ("--strict", FLAG, False, "exit with 10 for warnings (otherwise 0)", "", ()),
        ("--json", FLAG, False, "print JSON", "", ()),
    )
)
TABLE = (*OPTIONS, *OWN)
USED = (
    *("--nnodes", "--nproc-per-node", "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
    *("--master-addr", "--master-port", "--local-addr", "--log-dir"),
)
"""Options of a run that matter here. The others are accepted, so that the line of a run can be checked as it is."""
TIMEOUT_S_MAX = 3600.0
CACHES_S_MAX = 2.0
"""Limit of the time in which the size of the folder with compiled kernels is found out (s)."""
LOCAL_TORCH_S_MIN = 60.0
"""Least limit for the import of torch, however short --timeout is."""
LOCAL_TEST_S_MIN = 120.0
"""The same for the test of the GPUs."""
BUSY_S = 2.0
"""Time without output after which a line reports what is in progress."""


class Found(NamedTuple):
    """The results to print."""

    findings: tuple[DoctorFinding, ...]
    facts: LocalFacts
    joint: JointResult
    """The result of several nodes together; without a check and a trouble if this node was checked alone."""


def main(argv: Sequence[str]) -> int:
    """Run `holdfast doctor` with these arguments. Returns the exit status. Raises HoldfastError."""
    parsed = grammar.parse(argv, os.environ, TABLE, needs_script=False, configure=config.configure)
    if parsed.values.help:
        print(usage())
        return 0
    if parsed.values.version:
        return print_version()
    if not 0 < parsed.values.timeout <= TIMEOUT_S_MAX:
        raise parsed.error("timeout", UsageError, f"must be a positive number of seconds, {TIMEOUT_S_MAX:g} at most")
    found = check(parsed)
    from holdfast.doctor.findings import exit_code, render

    strict: bool = parsed.values.strict
    if parsed.values.json:
        print_json(as_json(found, strict=strict))
    else:
        print(render(found.findings, strict=strict))
    return exit_code(found.findings, strict=strict)


def usage() -> str:
    used = [option for option in OPTIONS if option.name in USED]
    return "\n".join(
        [
            "usage: holdfast doctor [options] [the options and script of holdfast run]",
            "",
            "Checks this node: Python, torch, GPUs, memory, limits, clock, names, interfaces, ports. With --nnodes and",
            "--rdzv-endpoint, run on all nodes at once: also every pair of them. Nothing of the job is started.",
            "Exit codes: 0 pass or warn (10 with --strict), 20 retry, 30 fatal; 2 for an invalid line.",
            "",
            "options:",
            *(help_line(option) for option in OWN),
            "",
            "as in holdfast run (its other options are accepted and have no effect):",
            *(help_line(option) for option in used),
        ]
    )


def check(parsed: Parsed) -> Found:
    """Check this node, and the others. Raises CallerError for an invalid line."""
    import asyncio

    from holdfast.cli.rendezvous import resolve
    from holdfast.inherited import forget_secrets
    from holdfast.protocol.policy import Limits

    notices = list(parsed.notices)
    patience = Limits(hang_timeout_s=parsed.values.hang_timeout)
    rdzv = resolve(parsed, os.environ, patience=patience, notices=notices)
    forget_secrets()
    for notice in notices:
        say(notice)
    together = rdzv.job.max_nodes > 1 and not rdzv.standalone
    if together and (rdzv.etcd is not None or rdzv.shared_value is not None):
        raise RendezvousConfigError(
            f"--rdzv-backend {rdzv.job.backend}: for the doctor the nodes connect to a port of one of them; "
            "give --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
        )
    return asyncio.run(examine(parsed, rdzv, together=together))


async def examine(parsed: Parsed, rdzv: RendezvousOptions, *, together: bool) -> Found:
    import asyncio

    from holdfast.cli.program import interpreter
    from holdfast.cli.resolve import node_size
    from holdfast.doctor.facts import FactsRequest, GpuCheck, gather_facts
    from holdfast.doctor.joint import JointResult, check_together
    from holdfast.doctor.local import examine as examine_facts
    from holdfast.doctor.local import time_outs
    from holdfast.doctor.together import examine_together
    from holdfast.protocol.time_outs import ladder

    python = interpreter(os.environ)
    timeout_s: float = parsed.values.timeout
    asked = FactsRequest(
        python=python,
        nproc=node_size(parsed, os.environ).number,
        nodes=rdzv.job.max_nodes,
        log_dir=log_folder(parsed),
        endpoint=None if rdzv.standalone or not rdzv.endpoint.port else rdzv.endpoint,
        try_port=not together,  # the joint check binds it otherwise
        environ=os.environ,
        torch_s_max=max(timeout_s, LOCAL_TORCH_S_MIN),
        gpu=GpuCheck(parsed.values.gpu),
        gpu_test_s_max=max(timeout_s, LOCAL_TEST_S_MIN),
    )

    facts = asyncio.create_task(gather_facts(asked))
    saying = asyncio.create_task(say_busy(facts))
    options = joint_options(parsed, rdzv, asked)
    joint = await check_together(options, facts, examine_facts, say) if together else JointResult(None)
    known = await facts
    await saying

    from holdfast.supervisor.worker_command import nccl_is_nccl2  # only here

    gpus = known.torch.gpus > 0
    nccl2 = gpus and nccl_is_nccl2(sys.path, os.environ)
    rungs = ladder(rdzv.limits, os.environ, gpus=gpus, nodes=rdzv.job.max_nodes, nccl2=nccl2)
    findings = [*examine_facts(known), time_outs(rungs)]
    if joint.check is not None:
        findings += examine_together(joint.check, joint.me)
    if joint.trouble is not None:
        findings.append(joint.trouble)
    return Found(tuple(findings), known, joint)


async def say_busy(facts: asyncio.Task[LocalFacts]) -> None:
    """Report that the check is in progress: importing torch takes long, and nothing else is printed before the end."""
    import asyncio
    import time

    from holdfast.protocol.policy import Pauses

    began = time.monotonic()
    pauses = Pauses.begin(began, BUSY_S)
    while not facts.done():
        await asyncio.wait([facts], timeout=max(0.0, pauses.at_s - time.monotonic()))
        if not facts.done() and pauses.due(now := time.monotonic()):
            say(f"still checking this node, {now - began:.0f} s so far; importing torch takes longest")


def joint_options(parsed: Parsed, rdzv: RendezvousOptions, asked: FactsRequest) -> JointOptions:
    from holdfast.doctor.facts import GpuCheck
    from holdfast.doctor.joint import JointOptions

    is_host = rdzv.is_host
    if is_host is None and rdzv.job.fixed_ranks and rdzv.node_rank:
        is_host = False  # static: the endpoint is node 0's
    return JointOptions(
        endpoint=rdzv.endpoint,
        others=rdzv.more_endpoints,
        run_id=rdzv.job.run_id,
        nodes=(rdzv.job.min_nodes, rdzv.job.max_nodes),
        token=rdzv.token,
        is_host=is_host,
        local_addr=parsed.values.local_addr,
        timeout_s=parsed.values.timeout,
        reduce=parsed.values.all_reduce == "auto",
        python=asked.python,
        gpu_test_s=asked.gpu_test_s_max if asked.gpu is GpuCheck.FULL else 0.0,
    )


def log_folder(parsed: Parsed) -> str | None:
    from holdfast.run_folder import default_log_dir

    if parsed.values.log_dir == os.devnull:
        return None
    return os.path.abspath(parsed.values.log_dir or default_log_dir())


def as_json(found: Found, *, strict: bool = False) -> dict[str, object]:
    """The output of --json: findings, facts, and every pair."""
    import msgspec

    from holdfast.doctor.findings import as_json as findings_json

    document: dict[str, object] = {"host": found.facts.host, **findings_json(found.findings, strict=strict)}
    check = found.joint.check
    if check is not None:
        document["nodes"] = [
            {"name": name, **(msgspec.to_builtins(report.summary) if report is not None else {"silent": True})}
            for name, report in zip(check.came, check.reports, strict=True)
        ]
        document["pairs"] = [
            {"from": check.came[start], **msgspec.to_builtins(link), "to": check.came[link.to]}
            for start, report in enumerate(check.reports)
            if report is not None
            for link in report.links
        ]
    document["facts"] = msgspec.to_builtins(found.facts)
    return document


# --- holdfast env ----------------------------------------------------------------------------------------------------

PACKAGES = ("torch", "numpy", "msgspec", "psutil", "accelerate", "lightning", "transformers", "py-spy")
NVIDIA_PACKAGES = re.compile(r"nvidia[-_](nccl|cuda[-_]runtime|cudnn)")
VARIABLES = re.compile(
    r"^(PET_|HOLDFAST_|TORCH|PYTORCH_|NCCL_|GLOO_|UCC_|UCX_|FI_|SLURM_|CUDA_|OMP_|MKL_|MASTER_|PYTHON|LD_)"
    r"|^(RANK|LOCAL_RANK|WORLD_SIZE|XDG_RUNTIME_DIR|TMPDIR|KUBERNETES_SERVICE_HOST)$"
)
SECRET = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
MASK = "***"
COMMIT_FILE = "commit.txt"
"""A file in the package with the commit; `make dist` writes it."""
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

VERSIONS = "versions"
"""The section of --short."""

Facts = dict[str, str]


class Described(TypedDict):
    """This machine and its software."""

    sections: dict[str, Facts]
    """Facts by name, by section."""


JSON_FORMS = {"env": ((Described,),)}
"""The doctor's is in the package doctor."""


def main_env(argv: Sequence[str]) -> int:
    """Run `holdfast env` with these arguments. Returns the exit status. Raises HoldfastError."""
    chosen = env_parser().parse_args(argv)
    if chosen.short:
        facts = version_facts()
        if chosen.json:
            print_json(Described(sections={VERSIONS: facts}))
        else:
            print("\n".join(f"{name} {value}" for name, value in facts.items()))
        return 0
    sections = {title: gather() for title, gather in SECTIONS.items()}
    if chosen.json:
        print_json(Described(sections=sections))
    else:
        print(markdown(sections))
    return 0


def env_parser() -> Parser:
    made = Parser(prog="holdfast env", description="Describe this machine, to paste into an issue.")
    made.add_json()
    made.add_argument(
        "--short", action="store_true", help="versions only: holdfast and its commit, Python, torch, kernel"
    )
    return made


def markdown(sections: Mapping[str, Facts]) -> str:
    """One table for each section that has facts."""
    parts = []
    for title, facts in sections.items():
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
    from holdfast.supervisor.worker_command import backends_text  # the doctor does not need it

    if backends := backends_text(sys.path, os.environ):
        facts["torch backends"] = backends
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


def version_facts() -> Facts:
    """The minimal facts for an issue; also printed by `holdfast --version --verbose`."""
    facts = {"holdfast": __version__, "commit": commit(), "Python": platform.python_version()}
    try:
        facts["torch"] = metadata.version("torch")
    except metadata.PackageNotFoundError:
        facts["torch"] = "not installed beside holdfast"
    facts["kernel"] = f"{platform.system()} {platform.release()}"
    return facts


def torch_build() -> Facts:
    """What torch was built with, read from its own version.py: importing torch takes seconds."""
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
        facts["GPUs"] = "there are devices, but nvidia-smi does not answer"
    if Path("/dev/kfd").exists():
        facts["AMD"] = "there is /dev/kfd"
    return facts


def network() -> Facts:
    from holdfast.doctor.facts import infiniband, interface_states

    states = interface_states()
    facts = {}
    for name, addresses in psutil.net_if_addrs().items():
        shown = [each.address for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)]
        state = states.get(name)
        how = f"{'up' if state.isup else 'down'}, mtu {state.mtu}, " if state is not None else ""
        facts[name] = how + (", ".join(shown) or "no address")
    if devices := infiniband():
        facts["InfiniBand"] = ", ".join(devices)
    return facts


def limits() -> Facts:
    return {name: " / ".join(map(limit_text, resource.getrlimit(number))) for name, number in LIMITS.items()}


def limit_text(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def variables(environ: Mapping[str, str] | None = None) -> Facts:
    """The variables that affect training, with masked secrets."""
    environ = os.environ if environ is None else environ
    return {name: masked(name, environ[name]) for name in sorted(environ) if VARIABLES.search(name)}


def masked(name: str, value: str) -> str:
    """The value without secrets.

    >>> masked("HOLDFAST_TOKEN", "abc"), masked("PET_RDZV_ENDPOINT", "http://me:secret@host:1/")
    ('***', 'http://***@host:1/')
    >>> masked("PET_RDZV_CONF", "user=u, password = hush")
    'user=u, password = ***'
    """
    if SECRET.search(name) and value:
        return MASK
    value = re.sub(r"(?i)\b([\w-]*(?:token|secret|passw|key|auth)[\w-]*\s*=\s*)[^,\s]+", rf"\1{MASK}", value)
    value = without_passwords(value)
    return shortened(value, VALUE_CHARS_MAX)


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
    """The output of a program; empty: it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S_MAX, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def caches() -> Facts:
    """The places in which compiled kernels are kept, by --cache-dir and by variables that the user has set."""
    folder = compile_caches.folder_of(os.environ.get("HOLDFAST_CACHE_DIR", ""), os.environ)
    facts = {"--cache-dir": folder or "off"}
    if folder is not None:
        until_s = time.monotonic() + CACHES_S_MAX
        size = compile_caches.size_of(folder, lambda: time.monotonic() >= until_s)
        facts["size"] = UNKNOWN if size is None else f"{size / 2**20:.1f} MiB"
    return facts | {name: os.environ[name] for name in compile_caches.VARIABLES if name in os.environ}


SECTIONS: dict[str, Callable[[], Facts]] = {
    "Software": software,
    "Machine": machine,
    "GPUs": gpus,
    "Network": network,
    "Limits (soft / hard)": limits,
    "Variables": variables,
    "Compiled kernels": caches,
}
