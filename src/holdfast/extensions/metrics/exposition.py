"""The facts about an agent in Prometheus' text format. Runs in the server's thread.

Only this module needs prometheus-client, from the extra `metrics`; docs/metric-names.md is made from what it yields.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.extensions.metrics.vitals import VitalsSample
from holdfast.protocol.rank_progress import JobView
from holdfast.version import __version__

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics(Collector):
    """Builds the metrics from the newest facts at each scrape, without state in between."""

    def __init__(self, facts: Callable[[], VitalsSample]) -> None:
        self._facts = facts

    def text(self) -> bytes:
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        facts = self._facts()
        yield from self._agent(facts)
        yield from _ranks(facts)
        if facts.job is not None:
            yield from _job(facts.job, facts.failures)

    @staticmethod
    def _agent(facts: VitalsSample) -> Iterator[Metric]:
        about = {"version": __version__, "run_id": facts.run_id, "node": facts.node}
        yield InfoMetricFamily("holdfast_agent", "The version, run id and node of this agent.", value=about)
        yield _gauge(
            "agent_stalled_seconds",
            "Seconds since the agent's event loop last ran; above 2 is a problem.",
            time.monotonic() - facts.taken_s,
        )
        yield _gauge("generation", "The newest generation that this node took part in.", facts.generation)
        yield _counter("restarts", "Restarts charged to the job's budget, before this generation.", facts.restart_count)
        yield _counter(
            "regroups", "Generations that workers of this node formed without a restart (ht.survive).", facts.regroups
        )
        yield _gauge("world_size", "Ranks of this generation.", facts.world_size)
        yield _gauge("workers", "Workers that are alive on this node.", facts.alive)
        exits = CounterMetricFamily(
            "holdfast_worker_exits", "Workers of this node that have ended; -N is signal N.", labels=["exit_code"]
        )
        for code, number in sorted(facts.exits.items()):
            exits.add_metric([code], number)
        yield exits
        phases = GaugeMetricFamily(
            "holdfast_start_phase_seconds",
            "Parts of the newest start of this node's workers, as `holdfast report` names them.",
            labels=["phase"],
        )
        for phase, seconds in facts.phases_s.items():
            phases.add_metric([phase], seconds)
        yield phases
        copies = CounterMetricFamily(
            "holdfast_copies",
            "Copies of states in memory (copies=1): sent, failed; on rank 0's node also the steps that were skipped.",
            labels=["result"],
        )
        for result, number in facts.copies.items():
            copies.add_metric([result], number)
        yield copies
        yield _counter("copies_bytes", "Bytes of the copies that arrived.", facts.copied_bytes)
        yield _counter("copies_seconds", "Seconds that the copies took.", facts.copied_s)


def _ranks(facts: VitalsSample) -> Iterator[Metric]:
    labels = ["rank", "local_rank"]
    steps = CounterMetricFamily("holdfast_steps", "Steps made, or beats, over all generations.", labels=labels)
    own = CounterMetricFamily(
        "holdfast_own_seconds", "Seconds of the steps that the rank itself used; slow ranks have more.", labels=labels
    )
    last = GaugeMetricFamily(
        "holdfast_step_seconds",
        "Mean duration of a step over the last half minute; missing if there was none.",
        labels=labels,
    )
    age = GaugeMetricFamily("holdfast_step_age_seconds", "Seconds since the newest step.", labels=labels)
    for each in facts.ranks:
        place = [str(each.rank), str(each.local_rank)]
        steps.add_metric(place, each.steps_total)
        own.add_metric(place, each.own_s_total)
        age.add_metric(place, each.age_s)
        if each.step_s is not None:
            last.add_metric(place, each.step_s)
    yield from (steps, own, last, age)


def _job(job: JobView, failures: dict[str, int]) -> Iterator[Metric]:
    """Metrics of the whole job, only from the agent that hosts the coordinator."""
    yield _counter(
        "job_seconds", "Age of the job; it continues when another node takes over the coordinator.", job.job_s
    )
    yield _counter("job_training_seconds", "Seconds of effective training time.", job.training_s)
    yield _gauge("job_restarts_left", "Restarts left in the budget.", job.restarts_max - job.restarts)
    if job.nodes_max:
        yield _gauge("job_nodes_min", "Nodes with which the job runs at least.", job.nodes_min)
        yield _gauge("job_nodes_wanted", "Nodes that should exist now: for an autoscaler.", job.nodes_wanted)
    if job.left_s:
        yield _gauge(
            "job_left_seconds",
            "Time for the steps that are left, at the present rate; missing if the script does not report them.",
            job.left_s,
        )
    yield _gauge("job_notices", "Hangs and slow ranks that are reported at this moment.", len(job.notices))
    states: dict[str, int] = {}
    heard = GaugeMetricFamily(
        "holdfast_job_node_heard_seconds", "Seconds since the node's last message.", labels=["node"]
    )
    for node in job.nodes:
        states[node.state] = states.get(node.state, 0) + 1
        heard.add_metric([node.member], node.heard_s)
    nodes = GaugeMetricFamily("holdfast_job_nodes", "Nodes by state.", labels=["state"])
    for state, number in sorted(states.items()):
        nodes.add_metric([state], number)
    failed = CounterMetricFamily(
        "holdfast_job_failures", "Generations that failed and were tried again, by the verdict's code.", labels=["code"]
    )
    for code, number in sorted(failures.items()):
        failed.add_metric([code], number)
    yield from (nodes, heard, failed)


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(f"holdfast_{name}", words, value=value)


def _counter(name: str, words: str, value: float) -> Metric:
    return CounterMetricFamily(f"holdfast_{name}", words, value=value)
