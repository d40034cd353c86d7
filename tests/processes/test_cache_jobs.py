"""Compiled kernels are kept over jobs and come from other nodes: `--cache-dir` and `--cache-from` in real jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.conftest import JobFolder

COMPILED = """
import os, torch
from torch._dynamo.utils import counters

@torch.compile
def double(x):
    return torch.sin(x) * 2

double(torch.ones(8))
found = counters["inductor"]
note("hits", hits=found["fxgraph_cache_hit"], misses=found["fxgraph_cache_miss"])
"""


@pytest.mark.xdist_group("torch jobs")
@pytest.mark.timeout(600)
def test_a_second_job_compiles_nothing_again_on_another_node(job_folder: JobFolder, tmp_path: Path) -> None:
    """Its folder is another one: what the first job has compiled comes from the shared one."""
    script = job_folder.script(COMPILED)
    for number in range(2):
        folders = ("--cache-dir", tmp_path / f"node{number}", "--cache-from", tmp_path / "shared")
        # A compiler is started, in processes of lower priority.
        agent = job_folder.ends(0, "--standalone", "--preload", "none", *folders, script, limit_s=90.0)
        (bounded,) = agent.events("caches_bounded")
        (seeded,), (shared,) = agent.events("caches_seeded"), agent.events("caches_shared")
        assert [event["event"] for event in agent.events()][:2] == ["begins", "caches"]
        assert (bounded["whole"], bounded["bytes"] > 0) == (True, True), bounded
        assert (seeded["files"] > 0, shared["files"] > 0) == (number == 1, number == 0)
    first, second = job_folder.wait(2, "hits")
    assert (first["hits"], first["misses"]) == (0, 1)
    assert (second["hits"], second["misses"]) == (1, 0)


def test_a_folder_into_which_others_may_write_starts_nothing(job_folder: JobFolder, tmp_path: Path) -> None:
    (tmp_path / "caches").mkdir()
    (tmp_path / "caches").chmod(0o777)
    agent = job_folder.ends(2, "--standalone", "--cache-dir", tmp_path / "caches", job_folder.script("note('ran')"))
    assert "HF145" in agent.text
    assert [event["event"] for event in agent.events()] == ["begins", "ended"]
    assert job_folder.wait(0, "ran") == []
