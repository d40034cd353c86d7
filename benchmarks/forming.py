"""N agents form one c10d generation on one machine: `python -m benchmarks.forming torchrun|holdfast N` prints seconds.

Like for like: a template process imports what an agent needs, forks N agents, and lets them all go at once. Each does
exactly what its launcher's agent does between "modules are loaded" and "I know my ranks", in a process of its own.
Time runs from the start signal until the last agent knows its ranks; import and fork are not in it.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

Form = Callable[[int, int], tuple[int, int]]
"""(port, count) -> (group rank, group world size)"""


def prepare_torchrun() -> Form:
    """torchrun's own agent: next_rendezvous(), then the rank assignment through the store."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    def form(port: int, count: int) -> tuple[int, int]:
        parameters = RendezvousParameters("c10d", f"localhost:{port}", "formation", count, count)
        handler = get_rendezvous_handler(parameters)
        spec = WorkerSpec("default", 1, handler, entrypoint="true", max_restarts=0)
        agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=os.devnull))
        group = agent.get_worker_group()
        agent._rendezvous(group)
        return group.group_rank, group.group_world_size

    return form


def prepare_holdfast() -> Form:
    """holdfast's own agent and coordinator: the endpoint is claimed, joined, and the place in the world received."""
    import holdfast.rendezvous.bind
    import holdfast.runtime.connection
    import holdfast.runtime.listener  # noqa: F401  - what an agent loads on its way; import is not measured on either side
    from holdfast.protocol.options import Endpoint
    from holdfast.protocol.policy import JobSpec, NodeSpec
    from benchmarks.agents import join_once

    def form(port: int, count: int) -> tuple[int, int]:
        job = JobSpec(run_id="formation", min_nodes=count, max_nodes=count, backend="c10d")
        node = NodeSpec(member=f"bench#{os.getpid()}", host="bench", nproc=1)
        assign = join_once(Endpoint(host="localhost", port=port), job, node)
        return assign.group_rank, assign.group_world_size

    return form


SIDES = {"torchrun": prepare_torchrun, "holdfast": prepare_holdfast}


def agent(form: Form, port: int, count: int, go: int, report: int, release: int) -> None:
    """One forked agent: wait for the signal, form, report, and stay (the host serves the others) until released."""
    os.read(go, 1)
    try:
        rank, size = form(port, count)
        line = f"{rank} {size} {time.monotonic_ns()}\n"
    except Exception:  # noqa: BLE001  - whatever it is, the template must hear of it
        traceback.print_exc()
        line = "failed\n"
    os.write(report, line.encode())
    os.read(release, 1)
    os._exit(0)


def measure(side: str, count: int) -> float:
    """Seconds. Raises RuntimeError when the ranks are not 0..count-1, each once."""
    form = SIDES[side]()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    go, release, report = os.pipe(), os.pipe(), os.pipe()
    children = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            for descriptor in (go[1], release[1], report[0]):
                os.close(descriptor)
            agent(form, port, count, go[0], report[1], release[0])
        children.append(pid)
    os.close(report[1])
    time.sleep(0.2)
    began_ns = time.monotonic_ns()
    os.close(go[1])
    with os.fdopen(report[0], "rb") as reports:
        lines = [reports.readline().decode() for _ in range(count)]
        os.close(release[1])
    for pid in children:
        os.waitpid(pid, 0)
    if any(line.strip() in ("", "failed") for line in lines):
        raise RuntimeError(f"{sum(line.strip() in ('', 'failed') for line in lines)} of {count} agents failed")
    found = [tuple(map(int, line.split())) for line in lines]
    if sorted(rank for rank, _, _ in found) != list(range(count)) or {size for _, size, _ in found} != {count}:
        raise RuntimeError(f"not one generation of {count}: {sorted(found)}")
    return (max(stamp for _, _, stamp in found) - began_ns) / 1e9


def main() -> None:
    os.environ.setdefault("HOME", str(Path.cwd()))
    print(measure(sys.argv[1], int(sys.argv[2])))


if __name__ == "__main__":
    main()
