"""A worker cannot tell that it was forked: the same script under --preload none and auto sees and does the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

SCRIPTS = Path(__file__).parent / "scripts"
RANKS = 2
FORKED = "numpy,torch"


def run_with(
    run_cli: Any, preload: str, folder: Path, line: list[str], *options: str, ranks: int = RANKS, **more: Any
) -> Any:
    """A finished job, and the events of its journal."""
    logs = folder / preload
    common = ["--standalone", "--nproc-per-node", str(ranks), "--preload", preload, "--log-dir", str(logs)]
    done = run_cli([*common, *options, *line], cwd=SCRIPTS, **more)
    assert done.code == 0, done
    (journal,) = logs.glob("*/events.jsonl")
    return done, [json.loads(text) for text in journal.read_text().splitlines()]


def was_forked(events: list[dict[str, Any]]) -> bool:
    told = [event for event in events if event["event"] == "preload" and "text" in event]
    return bool(told) and not any(event["trouble"] for event in told)


def probed(run_cli: Any, preload: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    env = {"HOLDFAST_PROBE_FILE": str(folder / f"{preload}."), "ODD_VALUE": "\udcff\n ü", "EMPTY": ""}
    _, events = run_with(run_cli, preload, folder, [*options, "a", "b c"], env=env)
    assert was_forked(events) is (preload == "auto"), events
    return [json.loads((folder / f"{preload}.{rank}").read_text()) for rank in range(RANKS)]


def differences(one: Any, other: Any, name: str = "") -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted(one.keys() | other.keys())
        return [line for key in keys for line in differences(one.get(key), other.get(key), f"{name}.{key}")]
    return [] if one == other else [f"{name}: exec {one!r}, forked {other!r}"]


@pytest.mark.parametrize(
    "options",
    [["probe.py"], ["-m", "probe"], ["--run-path", "probe.py"], ["--virtual-local-rank", "../scripts/probe.py"]],
    ids=["script", "module", "run-path", "virtual"],
)
def test_it_sees_the_same(run_cli: Any, tmp_path: Path, options: list[str]) -> None:
    executed = probed(run_cli, "none", tmp_path, *options)
    forked = probed(run_cli, "auto", tmp_path, *options)
    for rank in range(RANKS):
        assert differences(executed[rank]["same"], forked[rank]["same"]) == []
        assert set(executed[rank]["modules"]) <= set(forked[rank]["modules"])
        assert not {"nursery", "birth"} & set(forked[rank]["modules"])
        assert 0 <= forked[rank]["drawn"].pop("relative_ms") < 30_000
    assert forked[0]["hash"] == forked[1]["hash"], "inherited, and told in the docs; else these were not forked"
    for what, value in forked[0]["drawn"].items():
        assert value != forked[1]["drawn"][what], f"{what} is the same in two ranks"


def test_one_that_has_stood_by_sees_the_same(run_cli: Any, tmp_path: Path) -> None:
    # By name: `auto` has imported torch._dynamo for restarts, and what that leaves behind can be seen.
    told: dict[str, list[dict[str, Any]]] = {}
    for preload in ("none", FORKED):
        env = {"HOLDFAST_PROBE_FILE": str(tmp_path / f"{preload}."), "LOGS_OF_PROBE": str(tmp_path / preload)}
        line = ["--max-restarts", "1", "probe.py", "a"]
        _, events = run_with(run_cli, preload, tmp_path, line, env=env)
        told[preload] = [json.loads((tmp_path / f"{preload}.{rank}").read_text()) for rank in range(RANKS)]
        parked = [pid for event in events if event["event"] == "standby" for pid in event["pids"]][:RANKS]
        started = [event["pid"] for event in events if event["event"] == "worker_started"][RANKS:]
        assert set(parked) == (set(started) if preload == FORKED else set())
    for executed, forked in zip(told["none"], told[FORKED], strict=True):
        assert differences(executed["same"], forked["same"]) == []
        assert 0 <= forked["drawn"].pop("relative_ms") < 30_000
    for what, value in told[FORKED][0]["drawn"].items():
        assert value != told[FORKED][1]["drawn"][what], f"{what} is the same in two ranks"


def lines_by_rank(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        rank, _, rest = line.partition("| ")
        found.setdefault(rank, []).append(rest)
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", ["exercise.py", "compiled.py"])
def test_it_does_the_same(run_cli: Any, tmp_path: Path, script: str) -> None:
    """One rank: each brings up more processes that import torch."""
    executed, _ = run_with(run_cli, "none", tmp_path, [script], ranks=1, timeout=140)
    forked, events = run_with(run_cli, "auto", tmp_path, [script], ranks=1, timeout=140)
    assert was_forked(events), events
    assert lines_by_rank(forked.out) == lines_by_rank(executed.out)
    without_numbers = [
        sorted(re.sub(r"\d+", "#", line) for line in done.err.splitlines()) for done in (executed, forked)
    ]
    assert without_numbers[0] == without_numbers[1]
    assert len(lines_by_rank(forked.out)) == 1
