"""torchrun's rendezvous parameters as RunOptions. Reads the token; opens no socket and imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

from holdfast.coordinator.ending import UNBOUNDED
from holdfast.protocol.options import CommandKind, LogOptions, RunOptions, WorkerCommand
from holdfast.protocol.policy import JobSpec, Limits
from holdfast.rendezvous.conf import default_port, limits_from_conf, parse_endpoint, read_is_host, unknown_key_notices
from holdfast.runtime.secret_variables import read_token

BACKEND = "holdfast"
LIKE = "c10d"
"""Endpoint and --rdzv-conf keys are those of `holdfast run` with this backend."""
NEVER = UNBOUNDED
"""torchrun's agents count restarts themselves, each its own: the coordinator's budget must not end the job earlier."""
INJECTED = frozenset({"timeout", "rank"})
"""torchrun adds these to every configuration; as with its own c10d, `join_timeout` counts."""


class Parameters(Protocol):
    """The part of torch's RendezvousParameters that is read here."""

    endpoint: str
    run_id: str
    min_nodes: int
    max_nodes: int
    local_addr: str | None
    config: Mapping[str, Any]


def options_from(params: Parameters) -> RunOptions:
    """Raises EndpointError, RendezvousConfigError or EnvironmentValueError."""
    conf = {str(key): str(value) for key, value in params.config.items() if key not in INJECTED}
    return RunOptions(
        job=JobSpec(
            run_id=params.run_id,
            min_nodes=params.min_nodes,
            max_nodes=params.max_nodes,
            backend=BACKEND,
            max_restarts=NEVER,
        ),
        limits=limits_from_conf(LIKE, conf, Limits(identical_failures_max=NEVER)),
        nproc=1,  # the coordinator sees a node as one worker: torchrun gives its workers their ranks itself
        command=WorkerCommand(kind=CommandKind.PROGRAM, target="torchrun"),
        logs=LogOptions(log_dir=None),
        endpoint=parse_endpoint(params.endpoint, default_port(LIKE)),
        is_host=read_is_host(conf),
        token=read_token(conf.get("token_file"), os.environ),
        local_addr=params.local_addr,
        notices=tuple(unknown_key_notices(LIKE, conf, name=BACKEND)),
    )
