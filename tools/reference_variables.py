"""Make docs/variables.md: the variables that workers see and those that holdfast reads.

Their names are found in the source; what is said of each stands here. A name without a word, or a word without a name,
is an error: so neither can be forgotten.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from pathlib import Path

from holdfast.cli.option_table import LAUNCH_OPTIONS
from holdfast.supervisor import worker_command

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "holdfast"
PATH = ROOT / "docs" / "variables.md"

HEAD = """# Environment variables

This page is made by `make fmt`; names without an explanation, and explanations without a name in the source, fail the build.

## What a worker sees

Its agent's environment, and on top of it torchrun's variables with torchrun's meaning, and two of ours:

| variable | |
|---|---|
"""

READ_HEAD = """
## What holdfast reads

Every option has a variable of its own: `PET_` and its name for torchrun's options, `HOLDFAST_` for ours; they are listed with the
options in [options.md](options.md). Besides these:

| variable | read by | |
|---|---|---|
"""

WORKERS = {
    "RANK": "this worker's number in the world: 0 … WORLD_SIZE - 1",
    "LOCAL_RANK": "its number on its node; 0 for all with `--virtual-local-rank`",
    "WORLD_SIZE": "workers of the whole job in this generation",
    "LOCAL_WORLD_SIZE": "workers on this node; nodes may differ",
    "GROUP_RANK": "its node's number",
    "NODE_RANK": "the same; torchrun does not set it",
    "GROUP_WORLD_SIZE": "number of nodes",
    "ROLE_NAME": "`--role`",
    "ROLE_RANK": "its number among the workers of that role",
    "ROLE_WORLD_SIZE": "workers of that role",
    "MASTER_ADDR": "where the process group meets: the address from which rank 0's node reached the coordinator, or its `--local-addr`; loopback on one node",
    "MASTER_PORT": "the port there, another one for each generation (with static: always the endpoint's)",
    "TORCHELASTIC_RUN_ID": "`--rdzv-id`",
    "TORCHELASTIC_RESTART_COUNT": "restarts of the job so far, the same on every node; changes of membership do not count",
    "TORCHELASTIC_MAX_RESTARTS": "`--max-restarts`",
    "TORCHELASTIC_USE_AGENT_STORE": "`True`: the generation's store is served by the launcher, also to rank 0",
    "TORCHELASTIC_ERROR_FILE": "where the exception that ends this worker is recorded; always absolute, empty without log files",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "`--signals-to-handle`",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1, unless it is set",
    "OMP_NUM_THREADS": "CPUs of the node divided by its workers, unless it is set",
    "TORCHINDUCTOR_COMPILE_THREADS": "the same for the processes with which torch.compile compiles, 32 at most; not set for a single worker",
    "CUDA_VISIBLE_DEVICES": "only with `--virtual-local-rank`: its one GPU",
    "HIP_VISIBLE_DEVICES": "the same, where it was set: for ROCm it comes before CUDA_VISIBLE_DEVICES",
    "HOLDFAST_BOARD": "memory shared with its agent: safe points ([elastic.md](elastic.md)) and counted steps ([hangs.md](hangs.md))",
    "HOLDFAST_SAVER": "the folder in /dev/shm where its snapshots in memory are kept ([train.md](train.md#memory-and-the-saver))",
    "HOLDFAST_REPLACEMENT": "1 for a worker that is started while the others train: it gets its place in the job when it is ready (`--survive`)",
    "HOLDFAST_RUN_ID": "one id of the training for loggers, the same after a requeue ([metrics.md](metrics.md#one-id-for-loggers)); missing if `--rdzv-id` was not given; `resume()` sets the one in the snapshot",
    "HOLDFAST_JOB_UID": "identifies the job through all its generations; unlike `--rdzv-id` it is never used twice",
    "HOLDFAST_PREVIOUS_END": "from the second generation on: how the workers of the one before ended ([train.md](train.md#suspect-snapshots))",
}
OUTSIDE_OF_WORKER_ENV = {"HOLDFAST_BOARD", "HOLDFAST_SAVER", "HOLDFAST_REPLACEMENT"}

READ = {
    "HOLDFAST_TOKEN": (
        "run, launch, doctor, torchrun's handler",
        "the job's secret: only agents that know it join. A file does better: `--rdzv-conf token_file=`",
    ),
    "HOLDFAST_RUNTIME_DIR": (
        "all commands",
        "where running jobs are listed, if not in `$XDG_RUNTIME_DIR/holdfast` ([commands.md](commands.md))",
    ),
    "HOLDFAST_RUN_ID": (
        "run, launch",
        "what the workers get under this name, instead of `--rdzv-id` ([metrics.md](metrics.md#one-id-for-loggers))",
    ),
    "HOLDFAST_SLURM_CHECK_S": (
        "run, in a Slurm step",
        "so often, in seconds, Slurm is asked whether it still means this job; 30; 0: never ([slurm.md](slurm.md#nodes-that-fail))",
    ),
    "HOLDFAST_FAILURE_DOMAIN": (
        "holdfast.train",
        "what fails together with this node, if Slurm does not say it: copies of its states go to another domain ([train.md](train.md#memory-and-the-saver))",
    ),
    "HOLDFAST_COPY_ADDR": (
        "holdfast.train",
        "this node's address for copies of states, instead of the fastest ([train.md](train.md#memory-and-the-saver))",
    ),
    "HOLDFAST_GUARDS": ("holdfast.train", "0 turns its warnings off ([train.md](train.md#guards))"),
    "XDG_STATE_HOME": ("run", "run folders are made below it, in `holdfast/runs`; `~/.local/state` when it is not set"),
    "PYTHON_EXEC": ("run", "the Python of the workers, one path; that of holdfast when it is not set"),
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": ("run", "the prefix of console lines ([logs.md](logs.md))"),
    "TORCHELASTIC_HEALTH_CHECK_PORT": ("run", "a port for health checks, as `--health` ([metrics.md](metrics.md))"),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": (
        "run",
        "1: TORCHELASTIC_USE_AGENT_STORE becomes `False`, and rank 0 serves its own store",
    ),
    "NO_COLOR": ("run", "no colours on the console"),
}
INTERNAL = {"HOLDFAST_STORE_FULL_TORCH"}
"""Between processes of ours, or for tests."""


def render() -> str:
    """The whole page. Raises LookupError for a variable that is unknown here or in the source."""
    check()
    workers = "\n".join(f"| `{name}` | {said} |" for name, said in WORKERS.items())
    read = "\n".join(f"| `{name}` | {by} | {said} |" for name, (by, said) in READ.items())
    return HEAD + workers + "\n" + READ_HEAD + read + "\n"


def check() -> None:
    differ = worker_names() ^ (WORKERS.keys() - OUTSIDE_OF_WORKER_ENV)
    if differ:
        raise LookupError(f"worker_environment and the table of this page differ in {sorted(differ)}")
    options = {name for option in LAUNCH_OPTIONS for name in option.variables}
    own = own_names()
    unknown = own - options - INTERNAL - WORKERS.keys() - READ.keys()
    gone = {name for name in (*WORKERS, *READ) if name.startswith("HOLDFAST_")} - own
    if unknown or gone:
        raise LookupError(
            f"variables that this page does not explain: {sorted(unknown)}; that are no more: {sorted(gone)}"
        )


def worker_names() -> set[str]:
    """Names that supervisor/worker_command.py puts into a worker's environment."""
    found: set[str] = set()
    functions = (worker_command.worker_environment, worker_command._read_at_import)
    for node in itertools.chain.from_iterable(ast.walk(ast.parse(inspect.getsource(each))) for each in functions):
        if isinstance(node, ast.Dict):
            found |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            key = node.targets[0].slice
            found.add(getattr(worker_command, key.id) if isinstance(key, ast.Name) else ast.literal_eval(key))
    return found


def own_names() -> set[str]:
    """HOLDFAST_ variables anywhere in the source, as whole strings."""
    texts = (path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    return {name for text in texts for name in re.findall(r"""["'](HOLDFAST_[A-Z_]*[A-Z])["']""", text)}
