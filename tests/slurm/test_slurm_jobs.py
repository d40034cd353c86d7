"""Jobs on a real Slurm: one line trains, lives of a job never mix, nobody meets a neighbour."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import descendants
from tests.processes.conftest import JobFolder, is_alive
from tests.slurm.cluster import Cluster, why_not
from tests.slurm.conftest import Jobs
from tests.support.limits import until

pytestmark = pytest.mark.xdist_group("slurm")

ALL = "--rdzv-conf settle=60"
"""The job begins with all of its nodes, however slowly they start."""
UNTIL_TOLD = """
import os
def life():
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))
def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.02)
"""


def test_one_line_trains(jobs: Jobs) -> None:
    jobs.script('meet(); note("token", long=len(os.environ.get("HOLDFAST_TOKEN", "")))')
    number = jobs.batch("holdfast run --slurm --nproc-per-node 2 train.py", "-N3", "--exclusive")
    assert jobs.ended(number) == "COMPLETED", jobs.told(number)
    notes = jobs.trail("up")
    assert sorted(each["rank"] for each in notes) == list(range(6))
    assert {(each["node"], each["rank"] // 2) for each in notes} == {(0, 0), (1, 1), (2, 2)}, "ranks follow the nodes"
    assert {each["long"] for each in jobs.trail("token")} == {0}, "the job has one, and its workers do not see it"


def test_a_plain_srun_does_too(jobs: Jobs) -> None:
    jobs.script('meet(); note("id", id=os.environ["TORCHELASTIC_RUN_ID"])')
    number = jobs.batch("srun --ntasks-per-node=1 $H run train.py", "-N3", "--exclusive")
    assert jobs.ended(number) == "COMPLETED", jobs.told(number)
    assert [(each["rank"], each["id"]) for each in sorted(jobs.trail("id"), key=lambda each: each["rank"])] == [
        (rank, f"{number}_0") for rank in range(3)
    ]


def test_neighbours_never_meet(jobs: Jobs) -> None:
    """Two tasks of an array, another job, and two steps of it: five on the same two nodes at the same time."""
    jobs.script(UNTIL_TOLD + 'meet(); note("id", id=os.environ["TORCHELASTIC_RUN_ID"]); wait_for("go"); note("end")')
    line = "srun --ntasks-per-node=1 --overlap $H run train.py"
    places = ("-N2", "--nodelist=n1,n2", "--ntasks-per-node=1")
    array = jobs.batch(line, *places, "--array=0-1")
    other = jobs.batch(f"{line} & {line} & wait", *places)
    jobs.wait(8, "id", 30)
    (jobs.folder / "go").touch()
    for number in (f"{array}_0", f"{array}_1", other):
        assert jobs.ended(number) == "COMPLETED", jobs.told(number)
    ids: dict[str, set[int]] = {}
    for each in jobs.trail("id"):
        ids.setdefault(each["id"], set()).add(each["rank"])
    assert list(ids.values()) == [{0, 1}] * 4, ids
    assert len({each["port"] for each in jobs.trail("id")}) == 4, "a store each"


def test_a_crashed_node_is_survived(jobs: Jobs) -> None:
    jobs.script(UNTIL_TOLD + 'meet(); wait_for("go") if WORLD == 2 else hold()')
    number = jobs.batch(f"holdfast run --slurm --nnodes 2:3 {ALL} train.py", "-N3", "--exclusive", "--no-kill")
    jobs.wait(3, "up")
    lost = next(each for each in jobs.trail("up") if each["node"] == 2)
    jobs.cluster.crash("n3")
    jobs.cluster.declare_down("n3")
    jobs.wait(2, "up", world=2)
    assert not is_alive(lost["pid"])
    (jobs.folder / "go").touch()
    until(lambda: jobs.cluster.is_over(number), lambda: jobs.told(number))
    assert {each["world"] for each in jobs.trail("up")} == {3, 2}
    assert "COMPLETED" in jobs.told(number)


@pytest.mark.parametrize("stale", ["n1", "n2"], ids=["first node", "second node"])
def test_what_a_dead_slurmd_leaves_never_makes_a_second_generation(jobs: Jobs, stale: str) -> None:
    """Its tasks live on while Slurm starts the job anew: their workers end before it does."""
    jobs.script(UNTIL_TOLD + 'note("life", life=life()); meet(); hold() if life() == 0 else note("end")')
    number = jobs.batch(
        f"holdfast run --slurm --nnodes 1:2 {ALL} train.py",
        *("-N2", "--exclusive", "--requeue"),
        env={"HOLDFAST_SLURM_CHECK_S": "1"},
    )
    jobs.wait(2, "up")
    assert jobs.cluster.job(number)["NodeList"] == "n[1-2]"
    jobs.cluster.kill_slurmd(stale)
    jobs.cluster.declare_down(stale)
    until(lambda: jobs.cluster.job(number).get("Restarts") == "1", lambda: jobs.told(number))
    first = {each["pid"] for each in jobs.trail("life", life=0)}
    until(lambda: not any(map(is_alive, first)), lambda: jobs.told(number))
    jobs.cluster.release(number, f"excnodelist={stale}")
    jobs.wait(2, "end", 30)
    assert jobs.ended(number) == "COMPLETED", jobs.told(number)
    second = jobs.trail("life", life=1)
    assert {each["world"] for each in second} == {2}
    assert {each["rank"] for each in second} == {0, 1}


def test_a_notice_of_slurm_saves_and_requeues(jobs: Jobs) -> None:
    """--signal's USR1: drain, 75, back into the queue, and on with the same run."""
    jobs.script(
        UNTIL_TOLD
        + """
from holdfast.worker import should_stop
meet()
should_stop()  # from here on it can save: a notice that comes earlier finds nothing to wait for
note("id", id=os.environ["TORCHELASTIC_RUN_ID"], life=life())
while life() == 0:
    time.sleep(0.02)
    if should_stop():
        note("saved"); sys.exit(0)
"""
    )
    jobs.submit("-N2", "--exclusive", "--signal=USR1@30")
    jobs.wait(2, "id")
    number = jobs.trail("id")[0]["id"].partition("_")[0]
    jobs.cluster.call("scancel", "--signal=USR1", number)
    jobs.wait(2, "saved")
    jobs.cluster.release(number)
    jobs.wait(4, "id")
    assert jobs.ended(number) == "COMPLETED", jobs.told(number)
    assert {(each["id"], each["life"]) for each in jobs.trail("id")} == {(f"{number}_0", 0), (f"{number}_0", 1)}


def test_preemption_without_a_notice_starts_the_job_anew(jobs: Jobs) -> None:
    """Without --signal Slurm sends SIGTERM to all processes, and does not requeue a job that ends of it in time."""
    jobs.script(UNTIL_TOLD + 'meet(); note("life", life=life()); hold() if life() == 0 else None')
    jobs.submit("-N1", "--exclusive")
    number = jobs.cluster.call("squeue", "-h", "-o", "%i")
    jobs.wait(1, "life")
    jobs.ended(jobs.batch("true", "-N3", "--exclusive", "--partition=high"))
    jobs.cluster.release(number)
    assert jobs.ended(number) == "COMPLETED", jobs.told(number)
    assert [each["life"] for each in jobs.trail("life")] == [0, 1]


TRAINING = """
import holdfast.train as ht
import torch
from trail import *

SIZE, BATCH = 60, 2
data = [torch.tensor([float(number)]) for number in range(SIZE)]
with ht.process_group() as pg, ht.Snapshots("snaps", every="1h") as snaps:
    model = ht.ddp(torch.nn.Linear(1, 1), pg)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loader = ht.DataLoader(data, batch_size=BATCH, shuffle=True, seed=3)
    state = snaps.track(model=model, optimizer=optimizer, loader=loader)
    snaps.resume()
    for epoch in state.epochs(1):
        for batch in loader:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            note("trained", samples=[int(each) for each in batch.flatten()], life=int(os.environ.get("SLURM_RESTART_COUNT", "0")))
            time.sleep(0.1)
            snaps.step()
"""


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_preemption_by_a_higher_partition_loses_no_sample_and_repeats_none(jobs: Jobs) -> None:
    (jobs.folder / "train.py").write_text(TRAINING)
    jobs.submit("-N1", "--exclusive", "--signal=USR1@30")
    number = jobs.cluster.call("squeue", "-h", "-o", "%i")
    jobs.wait(3, "trained", 40)
    urgent = jobs.batch("sleep 1", "-N3", "--exclusive", "--partition=high")
    assert jobs.ended(urgent) == "COMPLETED", jobs.told(number)
    jobs.cluster.release(number)
    assert jobs.ended(number) == "COMPLETED", jobs.told(number)
    samples = [sample for each in jobs.trail("trained") for sample in each["samples"]]
    assert sorted(samples) == list(range(60)), jobs.told(number)
    assert {each["life"] for each in jobs.trail("trained")} == {0, 1}


# --- Slurm sends --signal's USR1 to every process of a step; no Slurm is needed to do the same ------------------------


DRAINS = """
from holdfast.worker import should_stop
should_stop()  # from here on it can save
meet()
while not should_stop():
    time.sleep(0.01)
note("saved")
"""


def test_a_signal_to_every_process_is_a_notice(job_folder: JobFolder) -> None:
    agent = job_folder.start("--preempt-signal", "USR1", "--nproc-per-node", "2", job_folder.script(DRAINS))
    job_folder.wait(2, "up")
    for pid in {agent.pid, *descendants(agent.pid)}:
        os.kill(pid, signal.SIGUSR1)
    assert agent.end() == 75, agent.text
    assert len(job_folder.trail("saved")) == 2


def test_workers_get_the_default_back(job_folder: JobFolder) -> None:
    """Without --preempt-signal it is torchrun's: passed on, and deadly to who has not asked for it."""
    agent = job_folder.start(job_folder.script("meet(); hold()"))
    job_folder.wait(1, "up")
    agent.signal(signal.SIGUSR1)
    assert agent.end() == 128 + signal.SIGUSR1, agent.text


def test_a_chain_goes_on_until_the_training_is_done(jobs: Jobs) -> None:
    """The first job saves and leaves with 75, the second ends the training, the third is cancelled."""
    jobs.script(
        UNTIL_TOLD
        + """
from holdfast.worker import should_stop
meet()
should_stop()
first = not os.path.exists("saved")
note("up in the chain", first=first, id=os.environ["HOLDFAST_RUN_ID"])
while first:
    time.sleep(0.02)
    if should_stop():
        open("saved", "w"); sys.exit(0)
"""
    )
    jobs.submit("-N1", "--exclusive", "--signal=USR1@30", "--chain", "3")
    jobs.wait(1, "up in the chain")
    numbers = jobs.cluster.call("squeue", "--noheader", "--format=%i", "--sort=i").split()
    assert len(numbers) == 3
    jobs.cluster.call("scancel", "--signal=USR1", numbers[0])
    jobs.wait(2, "up in the chain")
    assert [jobs.ended(number) for number in numbers] == ["FAILED", "COMPLETED", "CANCELLED"], jobs.told(numbers[1])
    assert [each["first"] for each in jobs.trail("up in the chain")] == [True, False]
    (run_id,) = {each["id"] for each in jobs.trail("up in the chain")}
    assert run_id.startswith("train-"), "both have one id for loggers"


def test_a_spare_takes_the_place_of_a_lost_node(jobs: Jobs) -> None:
    jobs.script(UNTIL_TOLD + 'meet(); note("at", host=os.environ["SLURMD_NODENAME"]); wait_for("go")')
    jobs.submit("-N2", "--spares", "1", "--exclusive")
    number = jobs.cluster.call("squeue", "-h", "-o", "%i")
    first = {each["host"]: each["rank"] for each in jobs.wait(2, "at")}
    assert len(first) == 2
    (lost,) = (host for host, rank in first.items() if rank == 1)
    (spare,) = {"n1", "n2", "n3"} - first.keys()
    jobs.cluster.crash(lost)
    jobs.cluster.declare_down(lost)
    jobs.wait(4, "at", 40)
    (jobs.folder / "go").touch()
    until(lambda: jobs.cluster.is_over(number), lambda: jobs.told(number))
    assert {(each["host"], each["rank"], each["world"]) for each in jobs.trail("at")[2:]} == {
        *((host, 0, 2) for host in first if host != lost),
        (spare, 1, 2),
    }


def test_ranks_of_one_switch_are_neighbours(tmp_path: Path) -> None:
    """Slurm's own order of the nodes is n1, n2, n3."""
    if why := why_not():
        pytest.skip(why)
    leaves = "SwitchName=leaf1 Nodes=n1,n3\nSwitchName=leaf2 Nodes=n2\nSwitchName=core Switches=leaf[1-2]\n"
    cluster = Cluster(leaves)
    try:
        cluster.start()
        jobs = Jobs(tmp_path, cluster)
        jobs.script('import os; meet(); note("at", host=os.environ["SLURMD_NODENAME"])')
        number = jobs.batch(f"holdfast run --slurm {ALL} train.py", "-N3", "--exclusive")
        assert jobs.ended(number) == "COMPLETED", jobs.told(number)
        ranks = {each["rank"]: each["host"] for each in jobs.trail("at")}
        assert ranks == {0: "n1", 1: "n3", 2: "n2"}, jobs.told(number)
    finally:
        cluster.stop()
