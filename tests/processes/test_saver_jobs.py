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


def snapshots(site) -> list[int]:
    return sorted(int(path.name[5:14]) for path in (site.folder / "snaps").glob("step_*"))


def saver_of(place: Path) -> int:
    """The process that looks after this shared-memory folder."""
    return int(until(lambda: savers(place), "a saver")[0])


def memory_folder_of(site) -> Path:
    return Path(site.wait(1, "place")[0]["place"])


def script(site, body: str) -> Path:
    path: Path = site.script(SAVES + "note('place', place=str(place.folder), generation=place.generation)\n" + body)
    return path


def test_workers_killed_right_after_persist_lose_no_save(site) -> None:
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
    agent = site.ends(0, "--standalone", "--nproc-per-node", "6", "--max-restarts", "2", script(site, body))
    found = {
        path.name: sorted(int(each.name[5:14]) for each in path.glob("step_*")) for path in site.folder.glob("snaps*")
    }
    assert found == {f"snaps{rank}": [0, 1] for rank in range(6)}, agent.text
    assert not memory_folder_of(site).exists()


def test_what_only_memory_had_is_on_disk_when_the_job_has_failed(site) -> None:
    body = "persist(20)\nsaver.wait(20 * SLOWNESS)\nmeet()\nstage(40, 600000000)\nmeet('staged')\ndie()"
    agent = site.ends(137, *ONE, "--max-restarts", "0", script(site, body))
    assert snapshots(site) == [20, 40]
    saved = agent.events("snapshot")
    assert [(each["step"], each.get("stall_s")) for each in saved] == [(20, 0.25), (40, None)], (
        "none waited for a rescue"
    )
    assert [each.get("metrics") for each in saved] == [{"loss": 0.5, "step": 3.0}, None]
    assert Path(saved[1]["path"]) == site.folder / "snaps" / "step_000000040.600000000"
    assert (site.folder / "snaps" / "step_000000040.600000000").is_dir()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_an_agent_that_is_told_to_end_waits_for_a_save(site, signum: int) -> None:
    body = "on_signal('SIGTERM', 'SIGINT', exit_code=0)\nnote('ready')\nwhile not os.path.exists(SNAPS): time.sleep(0.01)\npersist(5)\nnote('handed')\nhold()"
    agent = site.start(*ONE, script(site, body))
    saver = saver_of(memory_folder_of(site))
    os.kill(saver, signal.SIGSTOP)
    (site.folder / "snaps").mkdir()
    site.wait(1, "handed")
    agent.signal(signum)
    agent.says("a snapshot is still being written")
    assert agent.process.poll() is None
    assert snapshots(site) == []
    os.kill(saver, signal.SIGCONT)
    assert agent.end() == 128 + signum, agent.text
    assert snapshots(site) == [5]
    assert not is_alive(saver)
    assert not memory_folder_of(site).exists()


def test_a_killed_agent_leaves_no_process_and_no_file(site) -> None:
    agent = site.start(*ONE, script(site, "stage(6)\nmeet()\nhold()"))
    site.wait(1, "up")
    place = memory_folder_of(site)
    saver = saver_of(place)
    agent.signal(signal.SIGKILL)
    site.all_gone()
    until(lambda: not is_alive(saver) and not place.exists(), "saver and slots are gone", 1.0)


def test_what_a_killed_agent_and_supervisor_left_goes_with_the_next_start(site) -> None:
    agent = site.start(*ONE, script(site, "persist(5)\nsaver.wait(20 * SLOWNESS)\nstage(6)\nmeet()\nhold()"))
    site.wait(1, "up")
    place = memory_folder_of(site)
    saver = saver_of(place)
    os.kill(saver, signal.SIGSTOP)
    (supervisor,) = children(agent.pid)
    agent.signal(signal.SIGSTOP)  # so that it does not start another one
    os.kill(supervisor, signal.SIGKILL)
    agent.signal(signal.SIGKILL)
    site.all_gone()
    until(lambda: not is_alive(saver), "the saver is gone", 1.0)
    site.ends(0, *ONE, site.script("note('second')", "second.py"))
    assert not place.exists()
    assert snapshots(site) == [5]


def test_a_killed_saver_is_told_to_the_worker_and_replaced(site) -> None:
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
    agent = site.start(
        *ONE,
        script(
            site,
            "saver.await_previous_worker(20 * SLOWNESS)\nnote('served')\nwhile not os.path.exists(SNAPS): time.sleep(0.01)\n"
            + body,
        ),
    )
    site.wait(1, "served")
    saver = saver_of(memory_folder_of(site))
    os.kill(saver, signal.SIGSTOP)
    (site.folder / "snaps").mkdir()
    site.wait(1, "first")
    os.kill(saver, signal.SIGKILL)
    assert agent.end() == 0, agent.text
    assert [each["code"] for each in site.trail("error")] == ["HF411"]
    assert snapshots(site) == [2]


def test_a_killed_supervisor_takes_the_saver_along_and_slots_stay(site) -> None:
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
    agent = site.start(*ONE, "--max-restarts", "1", script(site, body))
    site.wait(1, "up")
    saver = saver_of(memory_folder_of(site))
    (supervisor,) = children(agent.pid)
    os.kill(supervisor, signal.SIGKILL)
    assert agent.end() == 0, agent.text
    assert not is_alive(saver)
    assert [each["step"] for each in site.trail("found")] == [40]
    assert snapshots(site) == [41]


@pytest.mark.parametrize("wait", ["pass", "saver.wait(20 * SLOWNESS)"], ids=["at once", "with the answer"])
def test_a_failed_save_of_a_dead_worker_is_told_on_the_console(site, wait: str) -> None:
    """The worker dies before the saver answers, or has got the answer and said nothing."""
    body = f"stage(1)\nsaver.persist(SaveRequest('/nowhere', 1, 1, 0, 1))\ntry: {wait}\nfinally: die()"
    agent = site.ends(137, *ONE, "--max-restarts", "0", script(site, body))
    assert "snapshots: rank 0, after its end: /nowhere" in agent.text, agent.text


def test_a_job_that_saves_nothing_has_no_saver_and_leaves_nothing(site) -> None:
    body = "note('env', saver=os.environ['HOLDFAST_SAVER'], children=open(f'/proc/{os.getppid()}/task/{os.getppid()}/children').read())"
    site.ends(0, "--standalone", "--nproc-per-node", "2", "--virtual-local-rank", site.script(body))
    told = [each["saver"].rsplit("@", 2) for each in site.trail("env")]
    assert sorted(each[2] for each in told) == ["0", "1"]  # the real local rank
    assert not Path(told[0][0]).exists()
    assert all(len(each["children"].split()) <= 2 for each in site.trail("env"))


def test_two_agents_on_one_machine_have_a_memory_folder_each(site, endpoint: str) -> None:
    args = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
    body = "note('held', names=os.listdir(place.folder.parent))\nmeet('noted')\nsaver.close()"
    agents = [site.start(*args, script(site, body)) for _ in range(2)]
    assert [agent.end() for agent in agents] == [0, 0], agents[0].text + agents[1].text
    places = {each["place"] for each in site.trail("place")}
    assert len(places) == 2
    assert not any(Path(each).exists() for each in places)
