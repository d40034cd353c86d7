"""Lines that cannot be run: holdfast answers each in one or two lines with a code and exit 2; torchrun fails as well.

The parser's own refusals are held against torchrun's in tests/cli; these go through the whole command.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.beside_torchrun.beside import Launchers, Line, Side

SAME, STRICTER, SLOW = "", "torchrun runs it, or waits for minutes", "torchrun refuses it after importing torch again"
"""torchrun is asked for the first kind only."""

BAD: list[tuple[str, dict[str, str], str, str]] = [
    ("", {}, "HF101", SAME),
    ("--no-such-flag 1 probe.py", {}, "HF101", SAME),
    ("--max-restarts -1 probe.py", {}, "HF101", SAME),
    ("--monitor-interval 0 probe.py", {}, "HF101", SAME),
    ("--numa-binding core probe.py", {}, "HF101", SAME),
    ("--event-log-handler nobody probe.py", {}, "HF101", SAME),
    ("--logs-specs nobody probe.py", {}, "HF101", SAME),
    ("--shutdown-timeout -1 probe.py", {}, "HF101", SAME),
    ("--signals-to-handle SIGTERM,SIGKILL probe.py", {}, "HF101", SAME),
    ("--no-python -m probe", {}, "HF101", SAME),
    ("missing.py", {}, "HF102", SAME),
    (".", {}, "HF102", SAME),
    ("--no-python missing", {}, "HF102", SAME),
    ("--no-python ./probe.py", {}, "HF102", SAME),
    ("--run-path missing.py", {}, "HF102", SLOW),
    ("--nnodes 0 probe.py", {}, "HF103", SAME),
    ("--nnodes 3:1 probe.py", {}, "HF103", SAME),
    ("--nnodes two probe.py", {}, "HF103", SAME),
    ("--nnodes 1:2:3 probe.py", {}, "HF103", SAME),
    ("--standalone --nnodes 2 probe.py", {}, "HF103", STRICTER),
    ("--nnodes 2 --node-rank 2 --master-port 1234 probe.py", {}, "HF103", STRICTER),
    ("--nproc-per-node 0 probe.py", {}, "HF104", SAME),
    ("--nproc-per-node -1 probe.py", {}, "HF104", SAME),
    ("--nproc-per-node gpu probe.py", {"CUDA_VISIBLE_DEVICES": ""}, "HF104", SAME),
    ("--nproc-per-node AUTO probe.py", {}, "HF104", SAME),
    ("--nproc-per-node mps probe.py", {}, "HF104", SAME),
    ("--nproc-per-node 1.5 probe.py", {}, "HF104", SAME),
    ("--nproc-per-node= probe.py", {}, "HF104", SAME),
    ("--nproc-per-node privateuseone probe.py", {}, "HF104", SAME),
    ("--rdzv-backend c10d --rdzv-endpoint :29400 probe.py", {}, "HF105", SAME),
    ("--rdzv-backend c10d --rdzv-endpoint localhost:99999 probe.py", {}, "HF105", SAME),
    ("--rdzv-backend c10d --rdzv-endpoint localhost:http probe.py", {}, "HF105", SAME),
    ("--rdzv-backend c10d --rdzv-endpoint 'a b:1' probe.py", {}, "HF105", SAME),
    ("--rdzv-endpoint localhost probe.py", {}, "HF105", SAME),
    ("--master-port 99999 probe.py", {}, "HF105", SAME),
    ("--rdzv-backend c10d --nnodes 2 --rdzv-endpoint localhost:0 probe.py", {}, "HF105", STRICTER),
    ("--rdzv-backend nobody probe.py", {}, "HF106", SAME),
    ("--rdzv-backend etcd --rdzv-endpoint localhost:1 --rdzv-conf lease_ttl=1 probe.py", {}, "HF106", SAME),
    ("--rdzv-backend etcd-v2 --rdzv-endpoint localhost:1 --rdzv-conf lease_ttl=1 probe.py", {}, "HF106", SAME),
    ("--rdzv-conf novalue probe.py", {}, "HF106", SAME),
    ("--rdzv-conf =1 probe.py", {}, "HF106", SAME),
    ("--rdzv-conf run_id=3 probe.py", {}, "HF106", SAME),
    ("--rdzv-backend c10d --rdzv-conf join_timeout=1.5 probe.py", {}, "HF106", SAME),
    ("probe.py", {"PET_NNODES": "two"}, "HF107", SAME),
    ("probe.py", {"PET_NPROC_PER_NODE": ""}, "HF107", SAME),
    ("probe.py", {"PET_STANDALONE": "on"}, "HF107", SAME),
    ("probe.py", {"PET_START_METHOD": "thread"}, "HF107", STRICTER),
    ("probe.py", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}, "HF107", SAME),
    ("probe.py", {"PYTHON_EXEC": "/no/such/python"}, "HF107", SAME),
    ("--log-dir probe.py/deeper probe.py", {}, "HF108", SAME),
    ("-r 7 probe.py", {}, "HF113", SAME),
    ("-r 10:9 probe.py", {}, "HF113", SAME),
    ("-t 0:1, probe.py", {}, "HF113", SAME),
    ("--local-ranks-filter 0,,1 probe.py", {}, "HF113", SAME),
    ("--virtual-local-rank --nproc-per-node 2 probe.py", {"CUDA_VISIBLE_DEVICES": "0"}, "HF114", SAME),
]


@pytest.mark.parametrize(("line", "env", "code", "compared"), BAD)
def test_a_bad_line(
    launchers: Launchers, tmp_path: Path, line: str, env: dict[str, str], code: str, compared: str
) -> None:
    state = tmp_path / "state"
    bad = Line(shlex.split(line), {"XDG_STATE_HOME": str(state), "TMPDIR": str(tmp_path), **env})
    job = launchers.holdfast(bad)
    if compared == SAME:
        theirs = launchers.torchrun(bad).finish()
        assert theirs.code in (1, 2), theirs
        assert theirs.probes() == {}
    ours = job.finish()
    assert ours.code == 2, ours
    said = ours.err.splitlines()
    assert 1 <= len(said) <= 2, ours
    assert re.match(rf"holdfast: {code}: \S", said[0]), ours
    assert ours.out == ""
    assert untouched(ours, state)


def untouched(ours: Side, state: Path) -> bool:
    return not state.exists() and not ours.logs.exists() and ours.probes() == {}


def test_a_module_is_looked_for_by_python_alone(launchers: Launchers) -> None:
    """Finding it would mean importing its package: the worker's interpreter says that it is missing, under both."""
    theirs, ours = launchers.pair("-m", "missing.module")
    assert (theirs.code, ours.code) == (1, 1), f"{theirs}\n{ours}"
    for side in (theirs, ours):
        assert "No module named 'missing'" in side.err


KINDER = [
    # torchrun fails at these.
    ("probe.py", {"PET_STANDALONE": "true"}),
    ("-r 10:1,0:1 probe.py", {}),
    ("probe.py --m 3 --n", {}),
    ("--log-dir /dev/null -t 1 --duplicate-stdout-filters a probe.py", {}),
    ("--rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id a/b --log-dir {logs} probe.py", {}),
]


@pytest.mark.parametrize(("line", "env"), KINDER)
def test_lines_that_only_torchrun_refuses(launchers: Launchers, line: str, env: dict[str, str]) -> None:
    theirs, ours = launchers.pair(*shlex.split(line), env=env)
    assert theirs.code in (1, 2), theirs
    assert ours.code == 0, ours
    assert list(ours.probes()) == ["0.0"]
