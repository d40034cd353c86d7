"""A worker cannot tell that it was forked: the same script under --preload none and auto sees and does the same."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.limits import limit_s

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


def probe(
    run_cli: Any, preload: str, folder: Path, *options: str, ranks: int, probed: int, **env: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the first `probed` ranks saw, those of the first attempt first; and the journal's events."""
    env |= {"HOLDFAST_PROBE_FILE": str(folder / f"{preload}."), "HOLDFAST_PROBE_RANKS": str(probed)}
    env |= {"ODD_VALUE": "\udcff\n ü", "EMPTY": ""}
    _, events = run_with(run_cli, preload, folder, [*options, "a", "b c"], ranks=ranks, env=env)
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{preload}.[0-9].[0-9]"))], events


def differences(one: Any, other: Any, name: str = "") -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted((one.keys() | other.keys()) - {"HOLDFAST_JOB_UID", "HOLDFAST_RUN_ID"})  # of two jobs
        return [line for key in keys for line in differences(one.get(key), other.get(key), f"{name}.{key}")]
    return [] if one == other else [f"{name}: exec {one!r}, forked {other!r}"]


@pytest.mark.parametrize(
    "options",
    [["--virtual-local-rank", "-m", "probe"], ["--run-path", "../scripts/probe.py"]],
    ids=["module", "run-path"],
)
def test_it_sees_the_same(run_cli: Any, tmp_path: Path, options: list[str]) -> None:
    (executed,), _ = probe(run_cli, "none", tmp_path, *options, "light", ranks=1, probed=1)
    (forked,), events = probe(run_cli, "decimal", tmp_path, *options, "light", ranks=1, probed=1)
    assert was_forked(events), events
    see_the_same(executed, forked)


def see_the_same(executed: dict[str, Any], forked: dict[str, Any]) -> None:
    assert differences(executed["same"], forked["same"]) == []
    assert set(executed["modules"]) <= set(forked["modules"])
    assert not {"fork-server", "fork"} & set(forked["modules"])
    assert 0 <= forked["drawn"]["relative_ms"] < limit_s(30) * 1000


def test_one_with_torch_and_one_that_has_stood_by_see_the_same(run_cli: Any, tmp_path: Path) -> None:
    """Two attempts of one job: the second one's workers were forked ahead and have waited."""
    told: dict[str, list[dict[str, Any]]] = {}
    for preload, probed in (("none", 1), (FORKED, RANKS)):
        # By name: `auto` would have imported torch._dynamo for restarts, and what that leaves behind can be seen.
        options = ["--max-restarts", "1", "probe.py"]
        logs = {"LOGS_OF_PROBE": str(tmp_path / preload)}
        told[preload], events = probe(run_cli, preload, tmp_path, *options, ranks=RANKS, probed=probed, **logs)
        assert was_forked(events) is (preload == FORKED), events
        parked = [pid for event in events if event["event"] == "standby" for pid in event["pids"]][:RANKS]
        started = [event["pid"] for event in events if event["event"] == "worker_started"][RANKS:]
        assert set(parked) == (set(started) if preload == FORKED else set())
    first, first_of_rank_1, second, second_of_rank_1 = told[FORKED]
    for executed, forked in zip(told["none"], (first, second), strict=True):
        see_the_same(executed, forked)
    assert first["hash"] == first_of_rank_1["hash"], "inherited, as the docs say; else these were not forked"
    for one, other in ((first, first_of_rank_1), (second, second_of_rank_1)):
        same = [what for what, value in one["drawn"].items() if value == other["drawn"][what]]
        assert set(same) <= {"relative_ms"}, "drawn alike by two ranks"


def lines_by_rank(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        rank, _, rest = line.partition("| ")
        found.setdefault(rank, []).append(rest)
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_does_the_same(run_cli: Any, tmp_path: Path) -> None:
    """One rank: each brings up more processes that import torch."""
    executed, _ = run_with(run_cli, "none", tmp_path, ["exercise.py"], ranks=1, timeout=140)
    forked, events = run_with(run_cli, "auto", tmp_path, ["exercise.py"], ranks=1, timeout=140)
    assert was_forked(events), events
    assert lines_by_rank(forked.out) == lines_by_rank(executed.out)
    without_numbers = [
        sorted(re.sub(r"\d+", "#", line) for line in done.err.splitlines()) for done in (executed, forked)
    ]
    assert without_numbers[0] == without_numbers[1]
    assert len(lines_by_rank(forked.out)) == 1


# --- a forked worker ends as one that was executed does, in each way in which a program can end -----------------------


ENDS = 5
"""Children of ends.py; it ends itself, too."""


def ends(run_cli: Any, preload: str, *modules: str) -> str:
    """What all of them print."""
    done = run_cli(["--standalone", "--preload", preload, "ends.py", *modules], cwd=SCRIPTS)
    assert done.code == 0, done
    assert done.err.count("ValueError: boom") == 2, done.err
    assert "\nKeyboardInterrupt\n" in done.err.replace("0| ", "\n"), done.err
    return str(done.out + done.err)


@pytest.mark.parametrize("preload", ["none", "cycle"])
def test_what_was_imported_ahead_is_collected_at_the_end(run_cli: Any, preload: str) -> None:
    assert ends(run_cli, preload, "cycle").count("collected") == ENDS + 1


def nanobind_watches() -> bool:
    """Whether torch brings a library that looks for objects which nobody has freed when the interpreter ends."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return False
    library = Path(found.origin).parent / "_C" / "libtriton.so"
    return library.exists() and b"nanobind: leaked" in library.read_bytes()


@pytest.mark.xdist_group("torch jobs")
@pytest.mark.parametrize("preload", ["none", "torch,torch._dynamo"])
def test_no_library_of_torchs_complains_at_the_end(run_cli: Any, preload: str) -> None:
    pytest.importorskip("torch")
    if not nanobind_watches():
        pytest.skip("this torch has no triton that is built with nanobind")
    assert "nanobind" not in ends(run_cli, preload, "torch", "torch._dynamo")
