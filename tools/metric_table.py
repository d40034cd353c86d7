"""Make docs/metric-names.md: the metrics that an agent serves, from what its exposition yields, so that the two cannot differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import fields
from prometheus_client.core import Metric

from holdfast.extensions.metrics.exposition import Metrics
from holdfast.extensions.metrics.vitals import VitalsSample
from holdfast.protocol.rank_progress import JobView

PATH = Path(__file__).resolve().parent.parent / "docs" / "metric-names.md"

HEAD = """# Names of metrics

This page is made from `src/holdfast/extensions/metrics/exposition.py` by `make fmt`. How the metrics are served: [metrics.md](metrics.md).

## Of each agent

"""
JOB_HEAD = """
## Of the job

Only the agent on the coordinator's node reports these. With etcd, or a backend of another package, counts begin again with another coordinator.

"""
NUMBERS = (int, float, int | None, float | None)
# Every number is given, also one that is added later: a metric whose number is unknown would not be on the page.
JOB = JobView(**{"run_id": "", "phase": "", **{each.name: 1 for each in fields(JobView) if each.type in NUMBERS}})


def render() -> str:
    """The whole page."""
    families = list(Metrics(lambda: VitalsSample(taken_s=0.0, run_id="", node="", job=JOB)).collect())
    of_job = [family for family in families if family.name.startswith("holdfast_job_")]
    return HEAD + table(family for family in families if family not in of_job) + JOB_HEAD + table(of_job)


def table(families: Iterator[Metric] | list[Metric]) -> str:
    return "\n".join(["| metric | type | labels | what |", "|---|---|---|---|", *map(row, families)]) + "\n"


def row(family: Metric) -> str:
    suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
    named = {name for sample in family.samples for name in sample.labels} or set(getattr(family, "_labelnames", ()))
    return f"| `{family.name}{suffix}` | {family.type} | {', '.join(sorted(named))} | {family.documentation} |"
