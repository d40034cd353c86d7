"""What the tests of jobs by etcd share: the options, the script, and what the agents noted."""

from __future__ import annotations

import pytest

from tests.support.limits import limit_s

LEASE_S_MAX = 60
"""The largest `lease_ttl`."""
LEASE_S = min(LEASE_S_MAX, round(limit_s(5)))
"""Also a machine that is slow renews a lease of this length in time."""
UNTIL_TOLD = "on_signal('SIGTERM', exit_code=0)\nmeet()\nwhile not os.path.exists('finish'): time.sleep(0.02)\n"
BOTH = pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])


def by(backend: str, endpoint: str, nnodes: str, *conf: str) -> tuple[str, ...]:
    patience = "timeout" if backend == "etcd" else "join_timeout"
    settings = ",".join((f"{patience}={round(limit_s(15))}", f"settle={limit_s(2):g}", *conf))
    return ("--nnodes", nnodes, "--rdzv-backend", backend, "--rdzv-endpoint", endpoint, "--rdzv-conf", settings)


def hosts(agents):
    """The agents that were ever elected, the latest last."""
    terms = [(each["monotonic"], agent) for agent in agents for each in agent.events("elected")]
    return [agent for _, agent in sorted(terms, key=lambda term: term[0])]


def finish(job_folder) -> None:
    (job_folder.folder / "finish").touch()


def keys(etcd) -> str:
    return etcd.ctl("get", "--prefix", "/", "--keys-only").strip()


def started(agents) -> list[int]:
    """Generations that any coordinator started, in the order of time."""
    notes = [each for agent in agents for each in agent.events("coordinator.started")]
    return [each["generation"] for each in sorted(notes, key=lambda each: each["monotonic"])]
