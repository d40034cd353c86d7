"""The saver of an agent, in real jobs: workers, savers, supervisors and agents are killed, and saves are finished."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.processes.conftest import children, is_alive
from tests.support.limits import until
from tests.train.snapshots.saves import savers

ONE = ("--standalone", "--nproc-per-node", "1")
SIZE = 1 << 20
SAVES = f"""
from holdfast.protocol.errors import SnapshotError
from holdfast.train.snapshots.changes import SaveRequest, begin
from holdfast.train.snapshots.saver_client import SaverClient
from holdfast.train.snapshots.saver_connection import SaverAddress
from holdfast.train.snapshots.flush import rescue_attempt
SIZE, SNAPS = {SIZE}, os.path.join(os.path.dirname(os.environ["TRAIL"]), "snaps")
METADATA = {{"metrics": {{"loss": 0.5, "lr": float("nan"), "step": 3}}}}
place = SaverAddress.find()
saver = SaverClient(place, rank=RANK, world=WORLD)
own = saver.slots

def stage(step, rescue=0):
    memory = own.stage(step, SIZE)
    memory[:] = bytes([step % 251]) * SIZE
    saver.commit(SaveRequest(SNAPS, step, rescue, RANK, WORLD, metadata={{"kept": step}}) if rescue else None)

def persist(step):
    stage(step)
    saver.persist(SaveRequest(SNAPS, step, begin(SNAPS, step), RANK, WORLD, {{"stall_s": 0.25}}, METADATA))

def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def snapshots(job_folder) -> list[int]:
    return sorted(int(path.name[5:14]) for path in (job_folder.folder / "snaps").glob("step_*"))


def saver_of(place: Path) -> int:
    """The process that looks after this shared-memory folder."""
    return int(until(lambda: savers(place), "a saver")[0])


def memory_folder_of(job_folder) -> Path:
    return Path(job_folder.wait(1, "place")[0]["place"])


def script(job_folder, body: str) -> Path:
    path: Path = job_folder.script(
        SAVES + "note('place', place=str(place.folder), generation=place.generation)\n" + body
    )
    return path


def test_workers_killed_right_after_persist_lose_no_save(job_folder) -> None:
    """0 to 100 ms after it returned, six workers in each of two generations, each with snapshots of its own: all are saved."""
    body = """
on_signal("SIGTERM")
SNAPS += str(RANK)
if ROUND < 2:
    stage(ROUND)
    meet()
    saver.persist(SaveRequest(SNAPS, ROUND, begin(SNAPS, ROUND), 0, 1))
    time.sleep([0, 0.001, 0.005, 0.02, 0.05, 0.1][RANK])
    die()
"""
    agent = job_folder.ends(0, "--standalone", "--nproc-per-node", "6", "--max-restarts", "2", script(job_folder, body))
    found = {
        path.name: sorted(int(each.name[5:14]) for each in path.glob("step_*"))
        for path in job_folder.folder.glob("snaps*")
    }
    assert found == {f"snaps{rank}": [0, 1] for rank in range(6)}, agent.text
    assert not memory_folder_of(job_folder).exists()


def test_what_only_memory_had_is_on_disk_when_the_job_has_failed(job_folder) -> None:
    body = "persist(20)\nsaver.wait(20 * SLOWNESS)\nmeet()\nstage(40, 600000000)\nmeet('staged')\ndie()"
    agent = job_folder.ends(137, *ONE, "--max-restarts", "0", script(job_folder, body))
    assert snapshots(job_folder) == [20, 40]
    saved = agent.events("snapshot")
    assert [(each["step"], each.get("stall_s")) for each in saved] == [(20, 0.25), (40, None)], (
        "none waited for a rescue"
    )
    assert [each.get("metrics") for each in saved] == [{"loss": 0.5, "step": 3.0}, None]
    assert Path(saved[1]["path"]) == job_folder.folder / "snaps" / "step_000000040.600000000"
    assert (job_folder.folder / "snaps" / "step_000000040.600000000").is_dir()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_an_agent_that_is_told_to_end_waits_for_a_save(job_folder, signum: int) -> None:
    body = "on_signal('SIGTERM', 'SIGINT', exit_code=0)\nnote('ready')\nwhile not os.path.exists(SNAPS): time.sleep(0.01)\npersist(5)\nnote('handed')\nhold()"
    agent = job_folder.start(*ONE, script(job_folder, body))
    saver = saver_of(memory_folder_of(job_folder))
    os.kill(saver, signal.SIGSTOP)
    (job_folder.folder / "snaps").mkdir()
    job_folder.wait(1, "handed")
    agent.signal(signum)
    agent.says("a snapshot is still being written")
    assert agent.process.poll() is None
    assert snapshots(job_folder) == []
    os.kill(saver, signal.SIGCONT)
    assert agent.end() == 128 + signum, agent.text
    assert snapshots(job_folder) == [5]
    assert not is_alive(saver)
    assert not memory_folder_of(job_folder).exists()


def test_a_killed_agent_leaves_no_process_and_no_file(job_folder) -> None:
    agent = job_folder.start(*ONE, script(job_folder, "stage(6)\nmeet()\nhold()"))
    job_folder.wait(1, "up")
    place = memory_folder_of(job_folder)
    saver = saver_of(place)
    agent.signal(signal.SIGKILL)
    job_folder.all_gone()
    until(lambda: not is_alive(saver) and not place.exists(), "saver and slots are gone", 10.0)


def test_what_a_killed_agent_and_supervisor_left_goes_with_the_next_start(job_folder) -> None:
    agent = job_folder.start(
        *ONE, script(job_folder, "persist(5)\nsaver.wait(20 * SLOWNESS)\nstage(6)\nmeet()\nhold()")
    )
    job_folder.wait(1, "up")
    place = memory_folder_of(job_folder)
    saver = saver_of(place)
    os.kill(saver, signal.SIGSTOP)
    (supervisor,) = children(agent.pid)
    agent.signal(signal.SIGSTOP)  # so that it does not start another one
    os.kill(supervisor, signal.SIGKILL)
    agent.signal(signal.SIGKILL)
    job_folder.all_gone()
    until(lambda: not is_alive(saver), "the saver is gone", 10.0)
    job_folder.ends(0, *ONE, job_folder.script("note('second')", "second.py"))
    assert not place.exists()
    assert snapshots(job_folder) == [5]


def test_a_killed_saver_is_told_to_the_worker_and_replaced(job_folder) -> None:
    body = """
persist(1)
note("first")
while len(own.committed()) < 2:
    try:
        saver.check()
    except SnapshotError as error:
        note("error", code=error.code)
        persist(2)
    time.sleep(0.01)
saver.wait(20 * SLOWNESS)
saver.check()
saver.close()
"""
    agent = job_folder.start(
        *ONE,
        script(
            job_folder,
            "saver.await_previous_worker(20 * SLOWNESS)\nnote('served')\nwhile not os.path.exists(SNAPS): time.sleep(0.01)\n"
            + body,
        ),
    )
    job_folder.wait(1, "served")
    saver = saver_of(memory_folder_of(job_folder))
    os.kill(saver, signal.SIGSTOP)
    (job_folder.folder / "snaps").mkdir()
    job_folder.wait(1, "first")
    os.kill(saver, signal.SIGKILL)
    assert agent.end() == 0, agent.text
    assert [each["code"] for each in job_folder.trail("error")] == ["HF411"]
    assert snapshots(job_folder) == [2]


def test_a_killed_supervisor_takes_the_saver_along_and_slots_stay(job_folder) -> None:
    body = """
found = own.committed()
if not found:
    stage(40)
    meet()
    hold()
note("found", step=found[0].step)
persist(41)
saver.wait(20 * SLOWNESS)
saver.check()
"""
    agent = job_folder.start(*ONE, "--max-restarts", "1", script(job_folder, body))
    job_folder.wait(1, "up")
    saver = saver_of(memory_folder_of(job_folder))
    (supervisor,) = children(agent.pid)
    os.kill(supervisor, signal.SIGKILL)
    assert agent.end() == 0, agent.text
    assert not is_alive(saver)
    assert [each["step"] for each in job_folder.trail("found")] == [40]
    assert snapshots(job_folder) == [41]


@pytest.mark.parametrize("wait", ["pass", "saver.wait(20 * SLOWNESS)"], ids=["at once", "with the answer"])
def test_a_failed_save_of_a_dead_worker_is_told_on_the_console(job_folder, wait: str) -> None:
    """The worker dies before the saver answers, or has got the answer and said nothing."""
    body = f"stage(1)\nsaver.persist(SaveRequest('/nowhere', 1, 1, 0, 1))\ntry: {wait}\nfinally: die()"
    agent = job_folder.ends(137, *ONE, "--max-restarts", "0", script(job_folder, body))
    assert "snapshots: rank 0, after its end: /nowhere" in agent.text, agent.text


def test_a_job_that_saves_nothing_has_no_saver_and_leaves_nothing(job_folder) -> None:
    body = "note('env', saver=os.environ['HOLDFAST_SAVER'], children=open(f'/proc/{os.getppid()}/task/{os.getppid()}/children').read())"
    job_folder.ends(0, "--standalone", "--nproc-per-node", "2", "--virtual-local-rank", job_folder.script(body))
    told = [each["saver"].rsplit("@", 2) for each in job_folder.trail("env")]
    assert sorted(each[2] for each in told) == ["0", "1"]  # the real local rank
    assert not Path(told[0][0]).exists()
    assert all(len(each["children"].split()) <= 2 for each in job_folder.trail("env"))


def test_two_agents_on_one_machine_have_a_memory_folder_each(job_folder, endpoint: str) -> None:
    args = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
    body = "note('held', names=os.listdir(place.folder.parent))\nmeet('noted')\nsaver.close()"
    agents = [job_folder.start(*args, script(job_folder, body)) for _ in range(2)]
    assert [agent.end() for agent in agents] == [0, 0], agents[0].text + agents[1].text
    places = {each["place"] for each in job_folder.trail("place")}
    assert len(places) == 2
    assert not any(Path(each).exists() for each in places)
