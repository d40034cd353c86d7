"""torchelastic's events, made from the journal's."""

from __future__ import annotations

import json

from holdfast.extensions.torch_events.node import TorchEvents
from holdfast.protocol.options import CommandKind, Endpoint, LogOptions, RunOptions, WorkerCommand
from holdfast.protocol.policy import JobSpec, Limits

GENERATION = {"restart_count": 0, "world_size": 4, "rank_base": 2, "nproc": 2}
OPTIONS = RunOptions(
    job=JobSpec(run_id="r", backend="c10d", min_nodes=1, max_nodes=1, max_restarts=1),
    limits=Limits(),
    nproc=2,
    command=WorkerCommand(kind=CommandKind.SCRIPT, target="t.py", python="/x/python3"),
    logs=LogOptions(log_dir=None),
    endpoint=Endpoint(host="h", port=1),
)
PLACE = {"generation": 1, "local_rank": 1, "rank": 1, "pid": 7}


def test_torchelastics_events() -> None:
    written: list[str] = []
    events = TorchEvents(OPTIONS, written.append)
    events.heard("generation", {"generation": 1, **GENERATION, "group_rank": 0, "group_world_size": 1})
    events.heard("worker_started", PLACE)
    events.heard("worker_ended", {**PLACE, "exit_code": 1, "stopped": False})
    failed = {**PLACE, "exit_code": 1, "message": "ValueError: x", "after_stop": False}
    events.heard("worker_failed", failed)
    events.heard("worker_failed", failed | {"after_stop": True})
    events.heard("worker_ended", {**PLACE, "exit_code": -15, "stopped": True})
    events.heard("worker_ended", {**PLACE, "exit_code": 0, "stopped": False})
    events.heard("ended", {"kind": "failed", "exit_code": 1})
    told = [json.loads(line) for line in written]
    assert [(each["source"], each["metadata"]["state"]) for each in told] == [
        ("AGENT", "RENDEZVOUS"),
        ("AGENT", "ASSIGN_WORKER_RANKS"),
        ("WORKER", "START"),
        ("WORKER", "FAILED"),
        ("WORKER", "TERMINATED"),
        ("WORKER", "SUCCEEDED"),
        ("AGENT", "FAILED"),
    ]
    assert all(each["name"] == f"torchelastic.worker.status.{each['metadata']['state']}" for each in told)
    assert json.loads(told[3]["metadata"]["raw_error"])["message"]["message"] == "ValueError: x"
    assert json.loads(told[2]["metadata"]["metadata"])["entry_point"] == "python3"
