"""What a worker sees of its launcher: the same under torchrun and under holdfast, but for the list in compare.py."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from holdfast import compile_caches
from tests.beside_torchrun.beside import PROBE, Launchers, Line
from tests.beside_torchrun.compare import INTENDED, RUN_PATH, differences
from tests.support.tables import tables

TABLES = tables(__file__)

LINES = TABLES["worker_lines"]


@pytest.mark.parametrize(("line", "env"), LINES)
def test_one_node(launchers: Launchers, line: str, env: dict[str, str]) -> None:
    theirs, ours = launchers.pair(*shlex.split(line), env=env)
    assert (theirs.code, ours.code) == (0, 0), f"{theirs}\n{ours}"
    assert differences(theirs, ours) == []


@pytest.mark.parametrize(
    "line", ["--master-port {port} probe.py", "--master_port={port} --node_rank 0 --rdzv-id j probe.py"]
)
def test_static_on_one_node(launchers: Launchers, free_port, line: str) -> None:
    lines = [Line(shlex.split(line), port=str(free_port())) for _ in range(2)]
    theirs, ours = launchers.torchrun(lines[0]).finish(), launchers.holdfast(lines[1]).finish()
    assert (theirs.code, ours.code) == (0, 0), f"{theirs}\n{ours}"
    assert differences(theirs, ours, INTENDED.keys() - {"env MASTER_ADDR"}) == []
    for side, given in zip((theirs, ours), lines, strict=True):
        assert side.probes()["0.0"]["env"]["MASTER_PORT"] == given.port


@pytest.mark.parametrize("job", ["my-job", "none"])
def test_the_job_id_that_was_given_is_kept(launchers: Launchers, job: str) -> None:
    """torchrun draws one where there is nobody to meet, and says nothing. An older one keeps it, too."""
    theirs, ours = launchers.pair("--rdzv-id", job, PROBE)
    kept = theirs.probes()["0.0"]["env"]["TORCHELASTIC_RUN_ID"] == job
    assert differences(theirs, ours) == ([] if kept else [f"0.0 env TORCHELASTIC_RUN_ID: random | {job}"])


NODES = {
    "static": [
        "--nnodes 2 --node-rank 0 --master-addr 127.0.0.1 --master-port {port} --nproc-per-node 2 probe.py",
        "--nnodes 2 --node-rank 1 --master-addr 127.0.0.1 --master-port {port} --nproc-per-node 2 probe.py",
    ],
    "static with different sizes, endpoint": [
        "--nnodes 2 --node-rank 1 --rdzv-endpoint localhost:{port} --nproc-per-node 2 --role b probe.py",
        "--nnodes 2 --node-rank 0 --rdzv-endpoint localhost:{port} --rdzv-id none --role a probe.py",
    ],
}


@pytest.mark.parametrize("name", NODES)
def test_static_on_two_nodes(launchers: Launchers, free_port, name: str) -> None:
    theirs, ours = [
        [job.finish() for job in [start(Line(shlex.split(line), port=port)) for line in NODES[name]]]
        for start, port in ((launchers.torchrun, str(free_port())), (launchers.holdfast, str(free_port())))
    ]
    assert [side.code for side in (*theirs, *ours)] == [0] * 4, "\n".join(map(str, (*theirs, *ours)))
    for left, right in zip(theirs, ours, strict=True):
        assert differences(left, right, INTENDED.keys() - {"env MASTER_ADDR"}) == []


def test_c10d_on_two_nodes(launchers: Launchers, free_port) -> None:
    """Ranks of nodes are drawn by torchrun, so the nodes are compared by role."""
    ends = []
    for start in (launchers.torchrun, launchers.holdfast):
        common = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint localhost:{port} --rdzv-id two --max-restarts 1"
        lines = [f"{common} --role one probe.py", f"{common} --role two --nproc-per-node 2 probe.py"]
        port = str(free_port())
        ends.append([job.finish() for job in [start(Line(shlex.split(line), port=port)) for line in lines]])
    assert [side.code for sides in ends for side in sides] == [0] * 4, ends
    worlds = [world([probe["env"] for side in sides for probe in side.probes().values()]) for sides in ends]
    assert worlds[0] == worlds[1]


RANKS = {
    "HOLDFAST_BOARD",
    "HOLDFAST_JOB_UID",
    "HOLDFAST_RUN_ID",
    "HOLDFAST_SAVER",
    "HOLDFAST_SURVIVE",
    "RANK",
    "GROUP_RANK",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PROBE_DIR",
    "TORCHELASTIC_ERROR_FILE",
}


def world(environments: list[dict[str, str]]) -> list[dict[str, str]]:
    """Environments by role and rank in it, without what names a rank; that the ranks are in order is checked here."""
    assert sorted(env["RANK"] for env in environments) == ["0", "1", "2"]
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in environments}) == 1
    groups = {env["ROLE_NAME"]: (int(env["GROUP_RANK"]), env) for env in environments}
    assert sorted(rank for rank, _ in groups.values()) == [0, 1]
    first = min(groups, key=lambda role: groups[role][0])
    assert {env["ROLE_NAME"] for env in environments if env["RANK"] == "0"} == {first}
    ordered = sorted(environments, key=lambda env: (env["ROLE_NAME"], env["ROLE_RANK"]))
    shared_out = {"OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS", *compile_caches.VARIABLES}
    of_later = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}  # an older torchrun has none: compare.py
    without = RANKS | shared_out | of_later
    return [{name: value for name, value in env.items() if name not in without} for env in ordered]


def test_standard_input_is_the_agents(launchers: Launchers, tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.write_text("from outside\n")
    theirs, ours = launchers.pair("--no-python", "cat", stdin=str(words))
    assert theirs.out == "from outside\n"
    assert ours.out.endswith("| from outside\n"), ours


@pytest.mark.usefixtures("unmeasured")
def test_python_exec(launchers: Launchers, tmp_path: Path) -> None:
    """One path, also one with spaces in it; the probe sees by `flags` and `executable` which it was."""
    other = tmp_path / "my python"
    other.symlink_to(sys.executable)
    env = {"PYTHON_EXEC": str(other), "PYTHONPATH": os.pathsep.join(sys.path[1:])}
    theirs, ours = launchers.pair(PROBE, env=env)
    assert differences(theirs, ours) == []
    assert ours.probes()["0.0"]["executable"] == str(other)


def test_run_path(launchers: Launchers) -> None:
    """It wins over -m and --no-python."""
    theirs, ours = launchers.pair("--run-path", "--no-python", "-m", "./probe.py", "a", "${local_rank}", "$$")
    assert (theirs.code, ours.code) == (0, 0), f"{theirs}\n{ours}"
    assert differences(theirs, ours, RUN_PATH) == []


def test_on_a_terminal(launchers: Launchers) -> None:
    """Where the agent has one, the workers see one too; sizes and modes are the console's affair."""
    ends = []
    for start in (launchers.torchrun, launchers.holdfast):
        ours, theirs = os.openpty()
        try:
            ends.append(start(Line([PROBE]), terminal=os.ttyname(theirs)).finish())
        finally:
            os.close(ours)
            os.close(theirs)
    assert [end.code for end in ends] == [0, 0], ends
    assert differences(*ends) == []
    assert ends[1].probes()["0.0"]["terminals"] == [True, True, True]


def test_the_server_is_torchrun(live_launchers: Launchers) -> None:
    """What the forked torchrun gives to its workers is what the installed command gives to them, and what is recorded."""
    line = Line(["--nproc-per-node", "2", "--log-dir", "{logs}", "-t", "3", PROBE, "a", "--b"])
    # One after the other: an older torchrun has one port for all.
    left = live_launchers.torchrun(line).finish()
    right = live_launchers.holdfast(line, ["torch.distributed.run"]).finish()
    assert (left.code, right.code) == (0, 0), f"{left}\n{right}"
    assert differences(left, right, {"fds 1": "a file of its own", "fds 2": "the same"}) == []
    assert left.tree().keys() == right.tree().keys()


@pytest.mark.parametrize(
    "line", ["--nproc-per-node 2 --max-restarts 1 probe.py fail", "-m pkg.module -m b", "missing.py"]
)
def test_a_live_torchrun_does_what_is_recorded(live_launchers: Launchers, line: str) -> None:
    """A few of all the lines, without a change of the recording; `make test-torch` compares each."""
    side = live_launchers.torchrun(Line(shlex.split(line))).finish()
    assert side.code == (1 if "missing" in line else 0), side


def test_omp_num_threads(launchers: Launchers) -> None:
    """Set by both or by neither; holdfast shares the CPUs out where torchrun says 1."""
    cpus = len(os.sched_getaffinity(0))
    for nproc in (1, 2):
        theirs, ours = launchers.pair("--nproc-per-node", str(nproc), PROBE)
        values = [side.probes()["0.0"]["env"].get("OMP_NUM_THREADS") for side in (theirs, ours)]
        assert values == ([None, None] if nproc == 1 else ["1", str(max(1, cpus // nproc))])


def test_intended_differences_are_documented() -> None:
    """A variable that may differ is explained to users."""
    text = (Path(__file__).parents[2] / "docs" / "differences.md").read_text()
    assert [name for name in INTENDED if name.startswith("env ") and name.removeprefix("env ") not in text] == []
