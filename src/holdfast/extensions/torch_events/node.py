"""Writes torchelastic's events as JSON lines to the console.

Names, sources and metadata keys are those of torch 2.13 (torch.distributed.elastic.events). Knows the journal's events.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.protocol.options import CommandKind, RunOptions
from holdfast.runtime.node_extension import Node, NodeExtension, Send

PREFIX = "torchelastic.worker.status."


class TorchEvents:
    """Converts the journal's events. `write` gets each event as one line without the newline."""

    def __init__(self, options: RunOptions, write: Callable[[str], None]) -> None:
        self._options = options
        self._write = write
        self._host = socket.gethostname()
        self._began_s = self._free_s = time.monotonic()
        """`_began_s`: the agent's start. `_free_s`: the time from which this node has had no workers (monotonic s)."""
        self._world: Mapping[str, Any] = {}
        self._total_s = 0
        """Torchrun's total_run_time (s): 0 until the workers have ended."""

    def heard(self, event: str, fields: Mapping[str, Any]) -> None:
        """Handle an event of the journal."""
        match event:
            case "generation" if "local_ranks" in fields:  # torchrun knows no workers that go on
                self._world = fields
            case "generation":
                duration_ms = (time.monotonic() - self._free_s) * 1000
                self._emit("RENDEZVOUS", duration_ms=duration_ms)  # with the previous world's values, as in torchrun
                self._emit("ASSIGN_WORKER_RANKS", duration_ms=0.0)
                self._world = fields
            case "worker_started":
                self._emit("START", worker=fields)
            case "worker_ended":
                self._free_s = time.monotonic()
                self._total_s = int(self._free_s - self._began_s)
                if fields["exit_code"] == 0:
                    self._emit("SUCCEEDED", worker=fields)
                elif fields["stopped"]:
                    self._emit("TERMINATED", worker=fields)
            case "worker_failed" if not fields["after_stop"]:
                error = {"message": {"message": fields["message"], "errorCode": fields["exit_code"]}}
                self._emit("FAILED", worker=fields, raw_error=json.dumps(error))
            case "ended":
                self._emit("SUCCEEDED" if fields["exit_code"] == 0 else "FAILED")

    def _emit(
        self,
        state: str,
        *,
        worker: Mapping[str, Any] | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
    ) -> None:
        world, options = self._world, self._options
        more: dict[str, object] = {
            "group_world_size": world.get("group_world_size"),
            "entry_point": self._entry_point(),
        }
        if worker is not None:
            # All nodes nearly always have the same role: then the ranks of the role are those of the job.
            more |= {
                "local_rank": worker["local_rank"],
                "role_rank": worker["rank"],
                "role_world_size": world.get("world_size"),
                "exit_code": worker.get("exit_code"),
                "worker_pid": worker["pid"],
            }
        metadata = {
            "run_id": options.job.run_id,
            "global_rank": worker["rank"] if worker is not None else None,
            "group_rank": world.get("group_rank"),
            "worker_id": str(worker["pid"]) if worker is not None else None,
            "role": options.role,
            "hostname": self._host,
            "state": state,
            "total_run_time": self._total_s,
            "rdzv_backend": options.job.backend,
            "raw_error": raw_error,
            "metadata": json.dumps(more),
            "agent_restarts": world.get("restart_count", 0),
            "duration_ms": duration_ms,
        }
        event = {
            "name": PREFIX + state,
            "source": "WORKER" if worker is not None else "AGENT",
            "timestamp": int(time.time() * 1000),
            "metadata": metadata,
        }
        self._write(json.dumps(event))

    def _entry_point(self) -> str:
        """Torchrun's entry_point: the name of the executable."""
        command = self._options.command
        program = command.target if command.kind is CommandKind.PROGRAM else command.python or sys.executable
        return os.path.basename(program)


class OnNode(NodeExtension):
    def __init__(self, node: Node, send: Send) -> None:
        super().__init__(node, send)
        node.listen(TorchEvents(node.options, lambda line: node.say(line, prefix="")).heard)
