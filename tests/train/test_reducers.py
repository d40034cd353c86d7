"""DDP modules with each option, in `ht.survive`: ranks are lost in every pass, and the replicas stay equal.

scripts/ddp_options.py has the models; docs/survive.md the table of what is kept.
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.train.test_survival import (
    SCRIPTS,
    WORLD,
    Ends,
    finished,
    grown,
    jobs,
    shrunk,
    started,
    undisturbed,
    with_replacements,
)
from tests.warm_jobs import WarmJobs

OPTIONS, REASONS = SCRIPTS / "ddp_options.py", SCRIPTS / "ddp_reasons.py"

pytestmark = [pytest.mark.xdist_group("torch survivors"), pytest.mark.timeout(400)]
__all__ = ["jobs"]  # a fixture


@pytest.fixture(scope="module")
def reference(jobs: WarmJobs, tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return undisturbed(jobs, tmp_path_factory.mktemp("undisturbed") / "job", OPTIONS)


def differing(ends: Ends, others: Ends) -> list[str]:
    """The models of which some rank came to another state."""
    pairs = list(zip(ends, others, strict=True))
    return [name for name in ends[0]["ends"] if any(own["ends"][name] != other["ends"][name] for own, other in pairs)]


LOSSES = [
    (2, "backward judge", 2),
    (1, "backward static", 3),
    (1, "forward unfreezing", 4),
    (0, "backward reentrant", 5),
    (2, "forward static twice", 6),
    (1, "backward unfreezing", 7),
    (2, "backward accumulating", 8),
    (0, "backward gan", 9),
    (1, "forward branches", 11),
    (2, "between", 12),
    (1, "backward sparse", 13),
    (2, "backward static view", 15),
    (1, "forward gan", 16),
    (0, "backward wrapped hook", 17),
    (2, "forward generator", 18),
]
"""The first is not in the first two passes: then a loss shows in the last bit of a static graph's sums."""

UNSYNCED = (0, "forward accumulating", 8, "wait")
"""Rank 0 is interrupted in no_sync(), after which DDP does not broadcast buffers; the others are beyond it."""


def test_with_replacements_every_option_computes_what_an_undisturbed_job_does(
    jobs: WarmJobs, tmp_path: Path, reference: Ends
) -> None:
    """Parameters are frozen and needed again meanwhile, by code that runs once."""
    ends = with_replacements(jobs, tmp_path / "lost", OPTIONS, LOSSES, others=[UNSYNCED]).ends
    assert differing(ends, reference) == []


def test_fewer_ranks_stay_equal_with_every_option(jobs: WarmJobs, tmp_path: Path, reference: Ends) -> None:
    faults = [
        [1, "backward static", 3],
        [0, "begin", 6, "wait"],
        [0, "backward judge", 8],
        [2, "forward unfreezing", 9],
        [1, "begin", 11, "wait"],
        [1, "backward static twice", 13],
        [2, "between", 15],
    ]
    folder = tmp_path / "lost"
    with started(jobs, folder, OPTIONS, faults=faults) as agent:
        agent.ended([1])
        shrunk(agent, 0, 2)
        grown(agent, folder / "go on after 6", 1)

        agent.ended([0])
        shrunk(agent, 1, 2)
        agent.ended([2])
        shrunk(agent, 1)
        grown(agent, folder / "go on after 11", 0, 2)

        agent.ended([1])
        shrunk(agent, 0, 2)
        agent.ended([2])
        shrunk(agent, 0)
        ends = finished(agent, folder, [0])
    assert agent.said("refuse") == set()
    assert weights_differ(ends, reference[:1], 1e-6) == {}


OF_FEWER_DIGITS = {
    "float16": 0.02,
    "float16 of all": 0.02,
    "wrapped hook": 0.02,
    "built-in float16": 0.02,
    "kinds": 1e-3,
}
OF_THE_BATCH = ("norm", "own norm", "norm unsynced", "accumulating")
"""Batch normalization computes something else with other batches."""


def weights_differ(ends: Ends, others: Ends, digits: float) -> dict[str, float]:
    """The models whose weights differ by more, and by how much."""
    found = {}
    for name, limit in {name: OF_FEWER_DIGITS.get(name, digits) for name in ends[0]["ends"]}.items():
        pairs = [
            (own, other)
            for end, its in zip(ends, others, strict=True)
            for own, other in zip(flat(end["ends"][name]), flat(its["ends"][name]), strict=True)
        ]
        largest = max(abs(own - other) for own, other in pairs)
        if largest > limit and name not in OF_THE_BATCH:
            found[name] = largest
    return found


def flat(end: dict[str, Any]) -> list[float]:
    return [*chain.from_iterable(end["weights"])]


def test_compiled_modules_are_carried_too(jobs: WarmJobs, tmp_path: Path) -> None:
    case = {"compiled": True, "steps": 6}
    faults = [(1, "backward compiled within", 3), (2, "backward compiled around", 4)]
    whole = undisturbed(jobs, tmp_path / "reference", OPTIONS, **case)
    ends = with_replacements(jobs, tmp_path / "lost", OPTIONS, faults, **case).ends
    assert differing(ends, whole) == []


def test_a_join_within_the_training_function_ends_what_survives(jobs: WarmJobs, tmp_path: Path) -> None:
    """It is known after the first step: from then on a loss restarts all."""
    with started(jobs, tmp_path / "job", OPTIONS, joined=True, steps=3, faults=[[0, "begin", 2, "wait"]]) as agent:
        agent.await_said(WORLD, "can_go_on", generation=0)
        agent.await_said(WORLD, "unable")
        (tmp_path / "job" / "go on after 2").touch()
        finished(agent, tmp_path / "job")


# --- what cannot be carried -------------------------------------------------------------------------------------------

CARRIED = ("plain", "default group", "float16", "float16 of all", "wrapped sum", "of a module")
CANNOT = {
    "mixed_precision": "has mixed_precision",
    "delayed": "has delay_all_reduce_named_params",
    "all delayed": "has delay_all_reduce_named_params",
    "python reducer": "has torch._dynamo.config.optimize_ddp = 'python_reducer'",
    "own group": "has a process group of its own",
    "mesh": "has a process group of its own",
    "buffer hook": "has a hook for its buffers",
    "optimizer in backward": "has optimizers that step in the backward pass",
    "fused optimizer": "has the communication hook _hook_then_optimizer",
    "PowerSGD": "has the communication hook powerSGD_hook",
    "wrapped PowerSGD": "has the communication hook fp16_compress_wrapper",
    "local SGD": "has the communication hook post_localSGD_hook",
    "quantization": "has the communication hook quantization_pertensor_hook",
    "no exchange": "has the communication hook noop_hook",
    "own hook": "has the communication hook counting",
    "wrapped own hook": "has the communication hook fp16_compress_wrapper",
    "float16 of some": "has the communication hook fp16_compress_hook",
    "ignored": "does not exchange gradients of second.weight",
    "synced norm": "1.process_group is a ProcessGroup",
    "holds a group": "module.group is a ProcessGroup",
    "holds a mesh": "module.mesh is a DeviceMesh",
    "sparse and frozen": "has sparse gradients",
    "joined": "is in join()",
    "untracked": "is not tracked",
    "without a name": "needs Reducer._gone, which torch",
}


def test_what_cannot_be_carried_is_known_before_training(jobs: WarmJobs) -> None:
    done = jobs.run(REASONS)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    reasons = found["reasons"]
    assert {name: reasons.pop(name) for name in CARRIED} == dict.fromkeys(CARRIED, "")
    assert {name: why for name, why in reasons.items() if CANNOT[name] not in why} == {}
    assert reasons.keys() == CANNOT.keys() - ({"mixed_precision"} if found["no_device"] else set())
    buckets, needing = found["resumed"]
    assert [*chain.from_iterable(buckets)] == ["first.bias", "first.weight", "second.bias", "second.weight"]
    assert needing == [False, True, True, True], "it stays frozen, and in its bucket"
    assert "has other parameters than those that it was built with" in found["exchanged"]
    kept = ("tracked", "the module within is tracked")
    assert found["hooks"] == {"halves": False, **dict.fromkeys(kept, True), "another one is tracked": False}
