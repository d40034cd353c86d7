"""The variables that workers see, in torchrun's spelling."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from holdfast.protocol.errors import BindingError
from holdfast.protocol.messages import Assign, Start
from holdfast.protocol.options import CommandKind, Endpoint, LogOptions, RunOptions, WorkerCommand
from holdfast.protocol.policy import JobSpec, Limits
from holdfast.supervisor.worker_command import worker_environment

ASSIGN = Assign(
    generation=4,
    restart_count=2,
    group_rank=1,
    group_world_size=3,
    rank_base=10,
    world_size=16,
    role_rank_base=4,
    role_world_size=6,
    hosts_store=False,
)
START = Start(generation=4, master_addr="10.0.0.7", master_port=41234)


def options(**changes: Any) -> RunOptions:
    return RunOptions(
        job=JobSpec(run_id="job-1", min_nodes=1, max_nodes=3, backend="c10d", max_restarts=5),
        limits=Limits(),
        command=WorkerCommand(kind=CommandKind.SCRIPT, target="train.py"),
        logs=LogOptions(log_dir=None),
        endpoint=Endpoint(host="localhost", port=0),
        **{"nproc": 2, "role": "trainer", **changes},
    )


def environment(
    local_rank: int = 1, parent: dict[str, str] | None = None, assign: Assign = ASSIGN, **changes: Any
) -> dict[str, str]:
    return worker_environment(options(**changes), assign, START, local_rank, error_file="/e.json", parent=parent or {})


def test_ranks_have_no_gap_where_a_local_rank_is_missing() -> None:
    found = environment(local_rank=3, nproc=4, assign=structs.replace(ASSIGN, local_ranks=(0, 3)))
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_RANK")
    assert [found[name] for name in names] == ["11", "3", "2", "5"]


def test_every_variable() -> None:
    assert environment() == {
        "RANK": "11",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "16",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "NODE_RANK": "1",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_NAME": "trainer",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "41234",
        "TORCHELASTIC_RUN_ID": "job-1",
        "HOLDFAST_RUN_ID": "job-1",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/e.json",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


@pytest.mark.parametrize(
    ("changes", "parent", "name", "value"),
    [
        ({"share_store": False}, {}, "TORCHELASTIC_USE_AGENT_STORE", "False"),
        ({}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"),
        ({"omp_num_threads": 1}, {}, "OMP_NUM_THREADS", "1"),
        ({"compile_threads": 4}, {}, "TORCHINDUCTOR_COMPILE_THREADS", "4"),
        ({"signals_text": "SIGTERM,SIGINT"}, {}, "TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT"),
        ({"virtual_local_rank": True}, {}, "LOCAL_RANK", "0"),
        ({"virtual_local_rank": True}, {}, "LOCAL_WORLD_SIZE", "2"),
        ({"virtual_local_rank": True}, {}, "CUDA_VISIBLE_DEVICES", "1"),
        ({"virtual_local_rank": True}, {"CUDA_VISIBLE_DEVICES": "4, GPU-7f"}, "CUDA_VISIBLE_DEVICES", "GPU-7f"),
        ({"virtual_local_rank": True}, {"HIP_VISIBLE_DEVICES": "4, 6"}, "HIP_VISIBLE_DEVICES", "6"),
    ],
)
def test_choices(changes: dict[str, Any], parent: dict[str, str], name: str, value: str) -> None:
    assert environment(parent=parent, **changes)[name] == value


def test_devices_are_left_alone_without_virtual_ranks() -> None:
    assert "CUDA_VISIBLE_DEVICES" not in environment(parent={"CUDA_VISIBLE_DEVICES": "3"})


@pytest.mark.parametrize("visible", ["", "0"])
def test_too_few_devices(visible: str) -> None:
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        with pytest.raises(BindingError, match=f"local rank 1 has no device in {variable}"):
            environment(virtual_local_rank=True, parent={variable: visible})


def test_no_variable_of_rocms_is_made_where_there_was_none() -> None:
    assert "HIP_VISIBLE_DEVICES" not in environment(virtual_local_rank=True)


@pytest.mark.parametrize(
    ("run_id", "parent", "wanted"),
    [
        ("bert", {}, "bert"),
        ("bert", {"HOLDFAST_RUN_ID": "mine"}, "mine"),
        ("none", {"HOLDFAST_RUN_ID": "mine"}, "mine"),
        ("none", {}, None),
    ],
)
def test_the_id_for_loggers_is_the_users_else_the_jobs_own(
    run_id: str, parent: dict[str, str], wanted: str | None
) -> None:
    given = options()
    given = structs.replace(given, job=structs.replace(given.job, run_id=run_id))
    found = worker_environment(given, ASSIGN, START, 0, error_file="", parent=parent)
    assert found.get("HOLDFAST_RUN_ID") == wanted
