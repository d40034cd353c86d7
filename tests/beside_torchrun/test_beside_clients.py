"""What third parties do under torchrun works under holdfast: torch's stores and groups, launchers inside of workers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.beside_torchrun.beside import PROBE, SCRIPTS, Launchers, Line
from tests.beside_torchrun.compare import differences
from tests.beside_torchrun.installed import MASTER_PORT, takes_the_default_port
from tests.beside_torchrun.recording import Mode

CLIENT, NESTED = str(SCRIPTS / "client.py"), str(SCRIPTS / "nested.py")
CALM = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

pytestmark = [pytest.mark.xdist_group("torch jobs"), pytest.mark.timeout(180)]


def told(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in re.findall(r"client (\{.*\})", text)]
    return sorted(found, key=json.dumps)


def test_torchs_stores_and_groups(launchers: Launchers) -> None:
    theirs, ours = launchers.pair("--nproc-per-node", "2", CLIENT, "a", env=CALM)
    assert (theirs.code, ours.code) == (0, 0), f"{theirs}\n{ours}"
    for said in told(
        theirs.out
    ):  # under torchrun the ranks may tear each other's lines: then there is nothing to compare
        assert said in told(ours.out)
    assert [said["sum"] for said in told(ours.out)] == [3.0, 3.0]
    assert all(said["launched"] for said in told(ours.out))


def test_rank_0_serves_the_store(launchers: Launchers) -> None:
    env = {**CALM, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    ours = launchers.holdfast(Line(["--no-dedup", "--nproc-per-node", "2", CLIENT], env)).finish()
    assert ours.code == 0, ours
    assert [said["sum"] for said in told(ours.out)] == [3.0, 3.0]


def test_static_ports_store(launchers: Launchers, free_port) -> None:
    """The port that was given serves torch's store to all, also to a client of a second node."""
    lines = [
        Line(
            ["--nnodes", "2", "--node-rank", rank, "--master-addr", "127.0.0.1", "--master-port", port, CLIENT],
            env=CALM,
        )
        for port in [str(free_port())]
        for rank in ("0", "1")
    ]
    ends = [job.finish() for job in [launchers.holdfast(line) for line in lines]]
    assert [end.code for end in ends] == [0, 0], ends
    assert [said["sum"] for end in ends for said in told(end.out)] == [3.0, 3.0]


def test_a_launcher_inside_of_a_worker(launchers: Launchers, torchrun_mode: Mode) -> None:
    """What the inner workers see is what they see under torchrun inside of torchrun, PET_ variables inherited."""
    if takes_the_default_port(torchrun_mode):
        pytest.skip(f"an older torchrun cannot be inside of another one: both listen at port {MASTER_PORT}")
    env = {**CALM, "PET_NPROC_PER_NODE": "2", "PET_ROLE": "pet", "PET_MAX_RESTARTS": "1"}
    argv = ["--nproc-per-node", "1", "--role", "outer", NESTED]
    theirs = launchers.torchrun(Line([*argv, "torchrun", PROBE, "x"], env)).finish()
    assert theirs.code == 0, theirs
    for inner in ("torchrun", "holdfast"):
        ours = launchers.holdfast(Line([*argv, inner, PROBE, "x"], env)).finish()
        assert ours.code == 0, ours
        assert sorted(ours.probes()) == ["0.0", "1.0"]
        assert differences(theirs, ours) == []
        assert {probe["env"]["ROLE_NAME"] for probe in ours.probes().values()} == {"pet"}


def test_holdfast_inside_of_torchrun(live_launchers: Launchers) -> None:
    """Live, and not compared: a recording would have what another version of holdfast has done."""
    env = {**CALM, "PET_NPROC_PER_NODE": "2"}
    job = live_launchers.torchrun(Line(["--nproc-per-node", "1", NESTED, "holdfast", PROBE], env))
    side = job.finish()
    assert side.code == 0, side
    assert sorted(side.probes()) == ["0.0", "1.0"]
