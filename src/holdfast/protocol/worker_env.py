"""The variables that a worker gets in addition to its agent's environment, with torchrun's names.

Pure: knows the options, the node's place in the world and a local rank; reads no environment and no machine.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.protocol.errors import BindingError
from holdfast.protocol.messages import Assign, Start
from holdfast.protocol.options import RunOptions


def worker_environment(
    options: RunOptions,
    assign: Assign,
    start: Start,
    local_rank: int,
    *,
    error_file: str,
    parent: Mapping[str, str],
) -> dict[str, str]:
    """Variables to set for one worker of `assign`. `parent` is the agent's own environment; `error_file` empty: none.

    Raises BindingError when --virtual-local-rank finds too few entries in CUDA_VISIBLE_DEVICES.
    """
    environment = {
        "RANK": str(assign.rank_base + assign.place(local_rank)),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(assign.world_size),
        "LOCAL_WORLD_SIZE": str(options.nproc if assign.local_ranks is None else len(assign.local_ranks)),
        "GROUP_RANK": str(assign.group_rank),
        "NODE_RANK": str(assign.group_rank),
        "GROUP_WORLD_SIZE": str(assign.group_world_size),
        "ROLE_NAME": options.role,
        "ROLE_RANK": str(assign.role_rank_base + assign.place(local_rank)),
        "ROLE_WORLD_SIZE": str(assign.role_world_size),
        "MASTER_ADDR": start.master_addr,
        "MASTER_PORT": str(start.master_port),
        "TORCHELASTIC_RUN_ID": options.job.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(assign.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(options.job.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": str(options.share_store),
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": options.signals_text,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": parent.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if options.omp_num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(options.omp_num_threads)
    if options.virtual_local_rank:
        environment["LOCAL_RANK"] = "0"
        environment["CUDA_VISIBLE_DEVICES"] = _own_device(parent, "CUDA_VISIBLE_DEVICES", local_rank)
        if "HIP_VISIBLE_DEVICES" in parent:  # ROCm reads it first and would ignore the variable above
            environment["HIP_VISIBLE_DEVICES"] = _own_device(parent, "HIP_VISIBLE_DEVICES", local_rank)
    return environment


def _own_device(parent: Mapping[str, str], variable: str, local_rank: int) -> str:
    """The only device that a worker with virtual local rank 0 may see."""
    visible = parent.get(variable)
    if visible is None:
        return str(local_rank)
    devices = visible.split(",")
    if local_rank >= len(devices):
        raise BindingError(
            f"--virtual-local-rank: local rank {local_rank} has no device in {variable}={visible!r}.\n"
            f"It names {len(devices)}; start at most that many processes."
        )
    return devices[local_rank].strip()
