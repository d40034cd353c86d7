"""What workers may see differently under holdfast, and why; everything else has to be the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from holdfast.protocol.board_layout import HANDLED_SIGNAL, LOOK_MAIN_SIGNAL, LOOK_SIGNAL, PROFILE_SIGNAL
from tests.beside_torchrun.beside import Probe, Side

INTENDED = {
    "env HOLDFAST_SURVIVE": "new: what `ht.survive` does when a worker is lost",
    "env HOLDFAST_BOARD": "new: where should_stop() asks and steps are counted",
    "env HOLDFAST_SAVER": "new: where memory snapshots are kept and written out",
    "env HOLDFAST_RUN_ID": "new: one id for loggers",
    "env HOLDFAST_JOB_UID": "new: identifies the job through all its generations",
    "env HOLDFAST_PREVIOUS_END": "new: after a restart, how the workers before ended",
    "env NODE_RANK": "new: what Lightning and others read as the node's number",
    "env MASTER_ADDR": "an address that answers, where torchrun gives getfqdn()'s guess",
    "env OMP_NUM_THREADS": "the node's CPUs are shared out, where torchrun says 1",
    "env TORCHINDUCTOR_COMPILE_THREADS": "new: the node's CPUs are shared out, where each worker would start one process for each",
    "env TORCHINDUCTOR_CACHE_DIR": "new: compiled kernels are kept on the node, over restarts and jobs (--cache-dir)",
    "env TRITON_CACHE_DIR": "the same",
    "env CUDA_CACHE_PATH": "the same",
    "env TORCH_EXTENSIONS_DIR": "the same",
    "fds 1": "a file in the run folder, also where torchrun's workers share the console; the console is fed from it",
    "fds 2": "the same",
    "fds 600": "memory of the agent's, where a worker's stacks are written when it is looked at",
    "modules": "one more: faulthandler (and __future__)",
    "caught": "faulthandler shows where a worker crashed, and on two real-time signals where it is; a third is for profiles, a"
    " fourth for the exception that it handles",
    f"handlers {PROFILE_SIGNAL}": "begins and ends a profile that counts seconds",
    f"handlers {HANDLED_SIGNAL}": "writes the exception that the main thread handles, when a hang is examined",
    "parent death signal": "SIGKILL: no worker outlives its agent",
}
"""Kind and name of a fact, and the reason. Each has a row in docs/differences.md."""

ADDRESS = re.compile(r" at 0x[0-9a-f]+|(?<=/dev/pts/)\d+")
BY_NATURE = ("env MASTER_PORT", "env PROBE_DIR", "env PET_LOG_DIR", "env TORCHINDUCTOR_CACHE_DIR")
"""The last one is left in torchrun's own environment when it happens to load torch's compiler."""
OF_AN_OLDER_TORCHRUN = {
    ("env TORCHELASTIC_SIGNALS_TO_HANDLE", None),
    ("env TORCHELASTIC_RUN_ID", "none"),  # it draws none where there is nobody to meet
    ("env TORCHELASTIC_USE_AGENT_STORE", "True"),  # also with TORCH_DISABLE_SHARE_RDZV_TCP_STORE
}
"""Facts of torchrun's side that are right there and not in the torchrun whose contract holdfast keeps."""
FAULTHANDLER = 0x4E8 | 1 << (LOOK_SIGNAL - 1) | 1 << (LOOK_MAIN_SIGNAL - 1) | 1 << (PROFILE_SIGNAL - 1)
FAULTHANDLER |= 1 << (HANDLED_SIGNAL - 1)
"""SIGSEGV, SIGFPE, SIGABRT, SIGBUS, SIGILL and the signals that ask for stacks, exceptions and profiles in SigCgt: all
that may differ there."""
BOOTSTRAPS_MODULES = {"__future__", "faulthandler"}
"""All that may be there in addition."""


def differences(theirs: Side, ours: Side, intended: Mapping[str, str] = INTENDED) -> list[str]:
    """Every fact that differs and is not in `intended`."""
    left, right = theirs.probes(), ours.probes()
    assert left, f"no worker reported:\n{theirs}"
    if left.keys() != right.keys():
        return [f"workers: {sorted(left)} | {sorted(right)}\n{theirs}\n{ours}"]
    return [
        f"{rank} {name}: {a} | {b}"
        for rank in left
        for name, a, b in facts(left[rank], right[rank])
        if a != b and name not in intended and name not in BY_NATURE
        if (name, a) not in OF_AN_OLDER_TORCHRUN
    ]


def facts(theirs: Probe, ours: Probe) -> Iterator[tuple[str, str | None, str | None]]:
    """Name and both values; those that have to differ in part are cut down to what has to be the same."""
    for kind in {**theirs, **ours}:
        left, right = theirs.get(kind), ours.get(kind)
        if isinstance(left, dict) and isinstance(right, dict):
            for name in sorted({*left, *right}):
                yield f"{kind} {name}", plain(name, left.get(name)), plain(name, right.get(name))
        elif kind == "modules":
            yield kind + ", the rest", str(sorted(left)), str(sorted(set(right) - (BOOTSTRAPS_MODULES - set(left))))
        elif kind == "caught":
            yield kind + ", the rest", *(hex(int(side, 16) & ~FAULTHANDLER) for side in (left, right))
        else:
            yield kind, plain(kind, left), plain(kind, right)


def plain(name: str, value: object) -> str | None:
    if value is None:
        return None
    text = ADDRESS.sub("", str(value))
    if name == "TORCHELASTIC_ERROR_FILE":
        return "/".join(text.split("/")[-3:])
    if name == "TORCHELASTIC_RUN_ID" and re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", text):
        return "random"
    return text


RUN_PATH = {
    **INTENDED,
    "orig_argv": "a program of its own, where torchrun's is a child of multiprocessing",
    "main __annotations__": "as under python itself",
    "main __file__": "absolute, as under python itself",
    "main __loader__": "as under python itself",
    "main __package__": "as under python itself",
    "main loader": "as under python itself",
    "main builtins": "as under python itself",
    "leads its session": "like every other worker, where torchrun's share the agent's",
    "leads its group": "the same",
    "modules, the rest": "torch is not imported before the script asks for it",
    "threads": "torch's",
    "caught, the rest": "the same",
    **{f"fds {number}": "multiprocessing's pipes" for number in range(3, 64)},
}
"""The same for --run-path, which torchrun runs inside of a multiprocessing child."""
