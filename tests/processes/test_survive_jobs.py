"""Jobs with torch whose ranks go on in `ht.survive` when one is lost: agents, fork servers and workers as users have them.

tests/train/test_survival.py loses ranks at every place of a training; test_survivors.py has the launcher's side without torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.protocol.exit_codes import EXIT_REQUEUE
from tests.processes.conftest import (
    Agent,
    JobFolder,
    WarmAgents,
    c10d,
    coordinators_first,
    holdfast,
    told,
    while_running,
)

SURVIVOR = Path(__file__).parents[1] / "train" / "scripts" / "survivor.py"
SHARDED = SURVIVOR.with_name("sharded.py")
SLOW_SURVIVOR = SURVIVOR.with_name("slow_survivor.py")
WORLD = 3
LIMIT_S = 90.0
"""torch's connections to its store look up names, which may take seconds each."""

pytestmark = [pytest.mark.xdist_group("torch survivor jobs"), pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def agent_server(warm_agents: WarmAgents) -> WarmAgents:
    """Where the agents of a job_folder come from."""
    return warm_agents


def trained(job_folder: JobFolder, *options: str, faults: Sequence[Sequence[Any]] = (), epochs: int = 2) -> Agent:
    """A job of three ranks, in the job_folder's folder, which has to succeed."""
    case = json.dumps({"epochs": epochs, "faults": faults})
    line = (
        "--standalone",
        "--nproc-per-node",
        str(WORLD),
        "--preload",
        "torch",
        *options,
        SURVIVOR,
        job_folder.folder,
        case,
    )
    return job_folder.ends(0, *line, limit_s=LIMIT_S)


def ends(job_folder: JobFolder, count: int = WORLD) -> list[dict[str, Any]]:
    return [json.loads((job_folder.folder / f"end.{local_rank}").read_text()) for local_rank in range(count)]


def safe_point_is_agreed(agents: Sequence[Agent]) -> bool:
    """All go on from it, with a replacement or without a node."""
    begun = [each for agent in agents if agent.begun for each in agent.events("coordinator.regroup_begun")]
    return any(each["safe_point"] for each in begun)


def joined_by_a_replacement(job_folder: JobFolder, *agents: Agent, waits_in: int) -> None:
    """A rank waits in this step until it is agreed where the replacement joins. The job ends well."""
    while_running(lambda: safe_point_is_agreed(agents), *agents, limit_s=LIMIT_S)
    (job_folder.folder / f"go on after {waits_in}").touch()
    for agent in agents:
        assert agent.end(LIMIT_S) == 0, agent.text


def test_the_others_go_on_and_a_replacement_joins(job_folder: JobFolder) -> None:
    case = json.dumps({"faults": [[1, "backward", 20, "kill"], [0, "begin", 25, "wait"]]})
    line = ("--standalone", "--nproc-per-node", str(WORLD), "--preload", "torch", "--max-restarts", "1", SURVIVOR)
    agent = job_folder.start(*line, job_folder.folder, case)
    joined_by_a_replacement(job_folder, agent, waits_in=25)
    found = ends(job_folder)
    assert [each["worlds"] for each in found] == [[3, 2, 3], [3], [3, 2, 3]], agent.text
    assert [each["counts"] for each in found] == [[-2]] * WORLD
    assert len({each["parameters"] for each in found}) == 1
    assert len(list(agent.folder.glob("attempt_*"))) == 1


def processes(agent: Agent) -> dict[int, list[int]]:
    """The processes that were started for each local rank, in order."""
    found: dict[int, list[int]] = {}
    for each in agent.events("worker_started"):
        found.setdefault(each["local_rank"], []).append(each["pid"])
    return found


def test_a_rank_that_is_lost_while_the_others_wait_for_it_in_the_next_world_costs_nobody_else(
    job_folder: JobFolder,
) -> None:
    """Rank 2 waits in init_process_group, whose limit is 30 minutes, for rank 1. It goes on alone at once."""
    case = {"faults": [[0, "backward", 20, "kill"], [1, "join", 2, "kill"], [2, "begin", 25, "wait"]]}
    line = ("--standalone", "--nproc-per-node", str(WORLD), "--preload", "torch", "--max-restarts", "2", SURVIVOR)
    agent = job_folder.start(*line, job_folder.folder, json.dumps(case))
    joined_by_a_replacement(job_folder, agent, waits_in=25)
    end = json.loads((job_folder.folder / "end.2").read_text())
    assert end["worlds"][:2] == [3, 1], agent.text
    assert end["counts"] == [-2]
    assert len(processes(agent)[2]) == 1
    assert {each["steps_lost"] for each in agent.events("went_on")} == {0}
    assert len(list(agent.folder.glob("attempt_*"))) == 1


@pytest.mark.parametrize("lost", [0, 1], ids=["the replacement", "another rank"])
def test_a_rank_that_is_killed_while_a_replacement_joins_is_replaced_and_the_others_stay(
    job_folder: JobFolder, lost: int, torch_lacks: dict[str, str]
) -> None:
    if lost and torch_lacks["half a group"]:
        pytest.skip(torch_lacks["half a group"])
    faults = [[0, "backward", 20, "kill"], [lost, "join", 2, "kill"]]
    agent = trained(job_folder, "--survive", "wait", "--max-restarts", "2", faults=faults)
    started = processes(agent)
    assert {rank: len(pids) for rank, pids in started.items()} == (
        {0: 3, 1: 1, 2: 1} if lost == 0 else {0: 2, 1: 2, 2: 1}
    )
    found = ends(job_folder)
    assert found[2]["worlds"] == [3, 3], agent.text
    assert [each["counts"] for each in found] == [[-2]] * WORLD
    assert len({each["parameters"] for each in found}) == 1
    assert {each["steps_lost"] for each in agent.events("went_on")} == {0}
    assert len(list(agent.folder.glob("attempt_*"))) == 1


def test_a_second_training_function_goes_on_too(job_folder: JobFolder) -> None:
    """The first one ends at step 16."""
    case = {"epochs": 1, "more": 1, "faults": [[1, "backward", 20, "kill"], [0, "begin", 25, "wait"]]}
    line = ("--standalone", "--nproc-per-node", str(WORLD), "--preload", "torch", "--max-restarts", "1", SURVIVOR)
    agent = job_folder.start(*line, job_folder.folder, json.dumps(case))
    joined_by_a_replacement(job_folder, agent, waits_in=25)
    found = ends(job_folder)
    assert [each["worlds"] for each in found] == [[3, 3, 2, 3], [3, 3], [3, 3, 2, 3]], agent.text
    assert [each["counts"] for each in found] == [[-2]] * WORLD
    assert len({each["parameters"] for each in found}) == 1
    assert {each["steps_lost"] for each in agent.events("went_on")} == {0}
    assert len(list(agent.folder.glob("attempt_*"))) == 1


@pytest.mark.usefixtures("meshes_made_again")
def test_a_sharded_model_is_made_again_for_the_ranks_that_are_there(job_folder: JobFolder) -> None:
    """A state is in memory each 30 steps; before a replacement joins, the ranks save theirs, so no step is lost then."""
    case = json.dumps({"epochs": 6, "memory": 30, "faults": [[1, "backward", 37], [0, "begin", 40, "wait"]]})
    line = ("--standalone", "--nproc-per-node", str(WORLD), "--preload", "torch", "--max-restarts", "1", SHARDED)
    agent = job_folder.start(*line, job_folder.folder, case)
    joined_by_a_replacement(job_folder, agent, waits_in=40)
    found = ends(job_folder)
    assert [[world for _, _, world, *_ in each["calls"]] for each in found] == [[3, 2, 3], [3], [3, 2, 3]], agent.text
    for each in (found[0], found[2]):
        assert len({process for process, *_ in each["calls"]}) == 1
        assert [(step, source) for *_, step, source, _ in each["calls"][:2]] == [(0, ""), (30, "memory")]
    assert len({str(each["parameters"]) for each in found}) == 1
    # The report of a generation that is left at once may come too late.
    lost = {each["generation"]: each["steps_lost"] for each in agent.events("went_on")}
    assert lost.pop(3) == 0, agent.text
    assert lost in ({}, {2: 7}), agent.text
    assert len(list(agent.folder.glob("attempt_*"))) == 1


@pytest.mark.usefixtures("meshes_made_again")
def test_a_spare_comes_to_the_safe_point_at_which_a_replacement_joins(job_folder: JobFolder) -> None:
    """It makes no steps, and the others make no more than they have to."""
    case = {"epochs": 6, "memory": 30, "kind": "hsdp", "multiple": 2, "nothing of its own": True}
    case["faults"] = [[1, "backward", 37], [0, "begin", 40, "wait"]]
    line = ("--standalone", "--nproc-per-node", "4", "--preload", "torch", "--max-restarts", "1", SHARDED)
    agent = job_folder.start(*line, job_folder.folder, json.dumps(case))
    joined_by_a_replacement(job_folder, agent, waits_in=40)
    found = ends(job_folder, 4)
    worlds = [[world for _, _, world, *_ in each["calls"]] for each in found]
    assert worlds == [[4, 2, 4], [4], [4, 2, 4], [4, 4]], agent.text
    assert {each["generation"]: each["steps_lost"] for each in agent.events("went_on")}[3] == 0
    assert len(list(agent.folder.glob("attempt_*"))) == 1


@pytest.mark.usefixtures("meshes_made_again")
def test_a_spare_ends_with_the_others_though_a_replacement_is_about_to_join(job_folder: JobFolder) -> None:
    """The training ends before the safe point at which it would have joined, and nobody is started again."""
    case = {"epochs": 1, "kind": "hsdp", "multiple": 2, "nothing of its own": True, "replacements wait": True}
    case["faults"] = [[1, "backward", 3], [0, "end of an epoch", 8, "wait"]]
    line = ("--standalone", "--nproc-per-node", "4", "--preload", "torch", "--max-restarts", "1", SHARDED)
    agent = job_folder.start(*line, job_folder.folder, json.dumps(case))
    while_running((job_folder.folder / "fault.1").exists, agent, limit_s=LIMIT_S)
    (job_folder.folder / "go on after 0").touch()
    while_running(lambda: safe_point_is_agreed([agent]), agent, limit_s=LIMIT_S)
    (job_folder.folder / "go on after 8").touch()
    assert agent.end(LIMIT_S) == 0, agent.text
    assert len(list(agent.folder.glob("attempt_*"))) == 1


@pytest.mark.usefixtures("meshes_made_again")
def test_a_spare_is_seen_with_the_reason(job_folder: JobFolder) -> None:
    case = {
        "epochs": 8,
        "memory": 30,
        "kind": "hsdp",
        "multiple": 2,
        "nothing of its own": True,
        "replacements wait": True,
    }
    case["faults"] = [[1, "backward", 37], [0, "build again", 0, "wait"]]
    line = ("--standalone", "--nproc-per-node", "4", "--preload", "torch", "--max-restarts", "1", SHARDED)
    agent = job_folder.start(*line, job_folder.folder, json.dumps(case))
    while_running((job_folder.folder / "fault.1").exists, agent, limit_s=LIMIT_S)
    status = while_running(
        lambda: (seen := told("status", agent.folder.name))["spares"] and seen, agent, limit_s=LIMIT_S
    )
    (waits,) = [rank for node in status["nodes"] for rank in node["ranks"] if rank["stage"] == "spare"]
    assert [waits["rank"]] == status["spares"] == [2]
    why = "rank 2 waits as a spare: ht.survive(ranks=…) uses fewer than the 3 ranks that are there"
    assert status["spares_why"] == why
    assert why in holdfast("status", agent.folder.name).stdout
    (job_folder.folder / "go on after 0").touch()
    assert agent.end(LIMIT_S) == 0, agent.text


@pytest.mark.usefixtures("meshes_made_again")
def test_a_stopped_rank_of_a_sharded_model_keeps_no_other_from_going_on(job_folder: JobFolder) -> None:
    """Rank 1 is killed. Rank 2 is stopped, so it neither leaves its operation nor ends its part of the others'. No
    replacement is ready before the two ranks that are left have trained to the end."""
    case = json.dumps({"epochs": 4, "memory": 6, "replacements wait": True, "faults": [[1, "forward", 20, "wait"]]})
    line = ("--standalone", "--nproc-per-node", "4", "--preload", "torch", "--max-restarts", "2", SHARDED)
    agent = job_folder.start(*line, job_folder.folder, case)
    while_running((job_folder.folder / "fault.0").exists, agent, limit_s=LIMIT_S)
    pids = {each["local_rank"]: each["pid"] for each in agent.events("worker_started")}
    os.kill(pids[2], signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    assert agent.end(LIMIT_S) == 0, agent.text
    found = [json.loads((job_folder.folder / f"end.{local_rank}").read_text()) for local_rank in (0, 3)]
    calls = [[(process, world, step, source) for process, _, world, step, source, _ in each["calls"]] for each in found]
    assert calls == [[(pids[rank], 4, 0, ""), (pids[rank], 2, 18, "memory")] for rank in (0, 3)], agent.text
    assert found[0]["parameters"] == found[1]["parameters"]
    assert len(list(agent.folder.glob("attempt_*"))) == 1


def test_steps_that_are_longer_than_the_limit_of_a_release_cost_no_other_process(job_folder: JobFolder) -> None:
    """Neither when a rank is lost in the middle of one, nor when its replacement joins."""
    line = ("--standalone", "--nproc-per-node", str(WORLD), "--preload", "torch", "--max-restarts", "1")
    agent = job_folder.ends(0, *line, SLOW_SURVIVOR, job_folder.folder, "7", limit_s=LIMIT_S)
    worlds = [json.loads(path.read_text()) for path in job_folder.folder.glob("end.*")]
    assert sorted(worlds) == [[3], [3, 2, 3], [3, 2, 3]], agent.text
    assert agent.events("not_released") == []


def test_all_go_on_with_another_store(job_folder: JobFolder) -> None:
    agent = trained(job_folder, faults=[[1, "forward", 20, "kill the store"]], epochs=6)
    assert [(each["worlds"], each["counts"]) for each in ends(job_folder)] == [([3, 3], [-6])] * WORLD, agent.text
    assert "the store host on" in agent.text


def test_waiting_for_the_replacement_changes_nothing(job_folder: JobFolder, tmp_path: Path) -> None:
    agent = trained(job_folder, "--survive", "off")
    reference = ends(job_folder)
    faults = [[1, "backward", 20, "kill"], [2, "optimizer", 25, "kill"]]
    (tmp_path / "lost").mkdir()
    with contextlib.closing(JobFolder(tmp_path / "lost", job_folder.server)) as lost:
        agent = trained(lost, "--max-restarts", "2", "--survive", "wait", faults=faults)
    assert [each["worlds"] for each in ends(lost)] == [[3, 3, 3], [3, 3], [3]], agent.text
    assert [{**each, "worlds": 0} for each in ends(lost)] == [{**each, "worlds": 0} for each in reference]


def test_after_an_exception_of_the_program_all_are_started_again(job_folder: JobFolder) -> None:
    agent = trained(job_folder, "--max-restarts", "1", faults=[[1, "backward", 20, "bug"]])
    assert [(each["worlds"], each["counts"]) for each in ends(job_folder)] == [([3], [-2])] * WORLD
    assert len(list(agent.folder.glob("attempt_*"))) == 2


@pytest.mark.parametrize("how", ["exit", "exit at once"])
def test_a_rank_that_exits_with_0_ends_the_job_in_its_name(job_folder: JobFolder, how: str) -> None:
    """The others need it in their next step. They do not wait for it as at the common end, until somebody finds a hang."""
    case = json.dumps({"epochs": 2, "faults": [[1, "begin", 20, how]]})
    line = ("--standalone", "--nproc-per-node", str(WORLD), "--preload", "torch", SURVIVOR, job_folder.folder, case)
    agent = job_folder.ends(1, *line, limit_s=LIMIT_S)
    assert "rank 1 on" in agent.verdict["verdict"]["cause"], agent.text
    assert agent.verdict["verdict"]["code"] == "HF229"
    assert ("rank 1 ends: sys.exit(0) in its training function after step 20" in agent.text) == (how == "exit")
    assert "ranks go on" not in agent.text


def test_ranks_that_all_exit_with_0_have_succeeded(job_folder: JobFolder) -> None:
    agent = trained(job_folder, faults=[[rank, "begin", 20, "exit"] for rank in range(WORLD)])
    assert agent.text.count("ends: sys.exit(0)") == WORLD


def test_the_others_go_on_when_the_coordinators_node_is_lost(job_folder: JobFolder, endpoint: str) -> None:
    """Everything on the coordinator's node is killed at once. The others elect a successor and go on in their processes:
    a list of each one has both worlds. No step is lost, and each sample counts once."""
    options = ("--nproc-per-node", "1", "--rdzv-conf", "settle=60", "--preload", "torch")
    line = (*c10d(endpoint, "2:3", *options), SURVIVOR, job_folder.folder)

    def start(number: int) -> Agent:
        return job_folder.start(*line, json.dumps({"node": number, "faults": [[0, "backward", 20, "wait"]]}))

    lost = start(0)
    lost.says("waiting: 1 of 2 to 3 nodes are here")
    others = [start(number) for number in (1, 2)]
    while_running((job_folder.folder / "fault.0").exists, lost, limit_s=LIMIT_S)
    assert lost.events("coordinator.started")
    kill_all_of(lost)
    for agent in others:
        assert agent.end(LIMIT_S) == 0, agent.text
    assert sum("this node is the coordinator now" in agent.text for agent in others) == 1
    assert [len(list(agent.folder.glob("attempt_*"))) for agent in others] == [1, 1], "nobody was started again"
    found = [json.loads((job_folder.folder / f"end.{number}").read_text()) for number in (1, 2)]
    assert [(each["worlds"], each["counts"], each["step"]) for each in found] == [([3, 2], [-2], 32)] * 2
    assert len({each["parameters"] for each in found}) == 1


def three_nodes(
    job_folder: JobFolder, endpoint: str, leaver: int, *options: str, script: Path = SURVIVOR, **case: Any
) -> list[Agent]:
    """One rank on each. In step 20 the leaver's waits in its forward pass, and its agent gets SIGTERM."""
    agents = three_waiting(job_folder, endpoint, leaver, *options, script=script, **case)
    agents[leaver].signal(signal.SIGTERM)
    return agents


def three_waiting(
    job_folder: JobFolder, endpoint: str, waits: int, *options: str, script: Path, where: str = "forward", **case: Any
) -> list[Agent]:
    """One rank on each of three nodes. In step 20 one of them waits in its forward pass, or there."""
    options = ("--nproc-per-node", "1", *options, "--rdzv-conf", "settle=60", "--preload", "torch")
    line = (*c10d(endpoint, "1:3", *options), script, job_folder.folder)

    def start(number: int) -> Agent:
        return job_folder.start(*line, json.dumps({"node": number, "faults": [[waits, where, 20, "wait"]], **case}))

    agents = [start(0)]
    agents[0].says("waiting: 1 of 1 to 3 nodes are here")
    agents += [start(number) for number in (1, 2)]
    while_running((job_folder.folder / "fault.0").exists, *agents, limit_s=LIMIT_S)
    return agents


@pytest.mark.parametrize("leaver", [0, 2], ids=["the coordinator's", "another"])
def test_a_node_that_leaves_ends_no_other_process(job_folder: JobFolder, endpoint: str, leaver: int) -> None:
    agents = three_nodes(job_folder, endpoint, leaver)
    while_running(lambda: safe_point_is_agreed(agents), *agents, limit_s=LIMIT_S)
    (job_folder.folder / "go on after 20").touch()
    assert agents[leaver].end(LIMIT_S) == EXIT_REQUEUE, agents[leaver].text
    others = [number for number in range(3) if number != leaver]
    for number in others:
        assert agents[number].end(LIMIT_S) == 0, agents[number].text
    assert [len(agents[number].events("worker_started")) for number in others] == [1, 1]
    found = [json.loads((job_folder.folder / f"end.{number}").read_text()) for number in others]
    assert [(each["worlds"], each["counts"], each["step"]) for each in found] == [([3, 2], [-2], 32)] * 2
    assert len({each["parameters"] for each in found}) == 1
    assert {each["steps_lost"] for number in others for each in agents[number].events("went_on")} == {0}
    assert not (job_folder.folder / f"end.{leaver}").exists()


@pytest.mark.usefixtures("meshes_made_again")
def test_a_node_that_leaves_a_sharded_model_saves_its_part_for_the_others(job_folder: JobFolder, endpoint: str) -> None:
    """Its memory goes with it, so the ranks save to the disk at the safe point, and no step is lost."""
    agents = three_nodes(job_folder, endpoint, 2, script=SHARDED, steps=20, memory=100)
    while_running(lambda: safe_point_is_agreed(agents), *agents, limit_s=LIMIT_S)
    (job_folder.folder / "go on after 20").touch()
    assert agents[2].end(LIMIT_S) == EXIT_REQUEUE, agents[2].text
    found = others_of_sharded(job_folder, agents[:2])
    assert {(source, step > 20) for each in found for *_, step, source, _ in each["calls"][1:]} == {("disk", True)}
    assert {each["steps_lost"] for agent in agents[:2] for each in agent.events("went_on")} == {0}


@pytest.mark.usefixtures("meshes_made_again")
def test_a_lost_nodes_part_of_a_sharded_model_comes_from_its_copy(job_folder: JobFolder, endpoint: str) -> None:
    """All that was on the node is gone. The others have a copy of its state of step 18, and nothing is on the disk."""
    agents = three_waiting(job_folder, endpoint, 2, script=SHARDED, steps=20, memory=6, copies=1)
    while_running(lambda: copied(agents, WORLD) == 18, *agents, limit_s=LIMIT_S)
    kill_all_of(agents[2])
    found = others_of_sharded(job_folder, agents[:2])
    assert {(step, source) for each in found for *_, step, source, _ in each["calls"][1:]} == {(18, "memory")}


@pytest.mark.usefixtures("meshes_made_again")
def test_the_node_that_coordinates_and_decides_is_lost_when_one_of_two_knows_that_a_step_is_done(
    job_folder: JobFolder, endpoint: str
) -> None:
    """Replicas on three nodes. The third one's rank has its gradients, and finds out from the second: no step is lost."""
    case = {"kind": "ddp", "steps": 20, "memory": 100, "nothing of its own": True}
    agents = three_waiting(job_folder, endpoint, 0, where="told", script=SHARDED, **case)
    kill_all_of(agents[0])
    for agent in agents[1:]:
        assert agent.end(LIMIT_S) == 0, agent.text
        assert len(agent.events("worker_started")) == 1
        assert {each["steps_lost"] for each in agent.events("went_on")} == {0}, agent.text
    found = [json.loads((job_folder.folder / f"end.{number}").read_text()) for number in (1, 2)]
    for each in found:
        assert [(world, step) for _, _, world, step, *_ in each["calls"]] == [(3, 0), (2, 21)]
    assert found[0]["parameters"] == found[1]["parameters"]


def others_of_sharded(job_folder: JobFolder, agents: Sequence[Agent]) -> list[dict[str, Any]]:
    """The ends of two ranks that went on without the third in their processes."""
    for agent in agents:
        assert agent.end(LIMIT_S) == 0, agent.text
    assert [len(agent.events("worker_started")) for agent in agents] == [1, 1]
    found = ends(job_folder, 2)
    assert [[world for _, _, world, *_ in each["calls"]] for each in found] == [[3, 2]] * 2
    assert found[0]["parameters"] == found[1]["parameters"]
    return found


def test_a_node_that_is_killed_while_it_leaves_is_lost_and_no_more(job_folder: JobFolder, endpoint: str) -> None:
    """Its rank has not done the step that the others wait for."""
    agents = three_nodes(job_folder, endpoint, 2)
    while_running(lambda: safe_point_is_agreed(agents), *agents, limit_s=LIMIT_S)
    kill_all_of(agents[2])
    for agent in agents[:2]:
        assert agent.end(LIMIT_S) == 0, agent.text
    assert [len(agent.events("worker_started")) for agent in agents[:2]] == [1, 1]
    found = [json.loads((job_folder.folder / f"end.{number}").read_text()) for number in range(2)]
    assert [(each["worlds"], each["counts"], each["step"]) for each in found] == [([3, 2], [-2], 32)] * 2


def test_a_worker_that_is_killed_while_another_node_leaves_is_replaced_at_no_cost(
    job_folder: JobFolder, endpoint: str
) -> None:
    """As it was when all were stopped for that node. No restart is allowed here."""
    agents = three_nodes(job_folder, endpoint, 2)
    while_running(lambda: safe_point_is_agreed(agents), *agents, limit_s=LIMIT_S)
    os.kill(agents[1].events("worker_started")[0]["pid"], signal.SIGKILL)
    assert agents[2].end(LIMIT_S) == EXIT_REQUEUE, agents[2].text
    for agent in agents[:2]:
        assert agent.end(LIMIT_S) == 0, agent.text
    assert len(agents[0].events("worker_started")) == 1
    found = json.loads((job_folder.folder / "end.0").read_text())
    assert (found["worlds"][:2], found["counts"], found["step"]) == ([3, 1], [-2], 32)


def test_where_too_few_are_left_all_save_at_the_safe_point_and_start_again(
    job_folder: JobFolder, endpoint: str
) -> None:
    agents = three_nodes(job_folder, endpoint, 2, "--min-ranks", "3")
    while_running(lambda: any(agent.events("coordinator.drain_to") for agent in agents), *agents, limit_s=LIMIT_S)
    (job_folder.folder / "go on after 20").touch()
    assert agents[2].end(LIMIT_S) == EXIT_REQUEUE, agents[2].text
    for agent in agents[:2]:
        assert agent.end(LIMIT_S) == 0, agent.text
    found = [json.loads((job_folder.folder / f"end.{number}").read_text()) for number in range(2)]
    assert [(each["worlds"], each["counts"], each["step"]) for each in found] == [([2], [-2], 32)] * 2


def copied(agents: Sequence[Agent], ranks: int) -> int:
    """The newest step of which other nodes have the states of all ranks; 0: there is none."""
    arrived = [each for agent in agents for each in agent.events("snapshot_copy") if not each["why"]]
    steps = [{each["step"] for each in arrived if each["rank"] == rank} for rank in range(ranks)]
    return max(set.intersection(*steps), default=0)


def kill_all_of(agent: Agent) -> None:
    """A node without power."""
    for process in [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


# --- copies of states in memory on other nodes ------------------------------------------------------------------------

COPIED = SURVIVOR.with_name("copied_job.py")


def two_nodes(endpoint: str, nproc: int, *more: str) -> tuple[str, ...]:
    return c10d(endpoint, "2", "--nproc-per-node", str(nproc), *more, "--preload", "torch")


def steps_of(job_folder: JobFolder, rank: int) -> list[list[Any]]:
    path = job_folder.folder / str(rank)
    return (
        [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")] if path.exists() else []
    )


def saver_of(agent: Agent) -> psutil.Process:
    return psutil.Process(
        while_running(lambda: agent.find_below("holdfast.train.snapshots.saver"), agent, limit_s=LIMIT_S)
    )


def test_a_newcomer_s_saver_may_die_while_it_fetches(job_folder: JobFolder, endpoint: str) -> None:
    """Its worker waits for it, and fetches then itself."""
    line = (*two_nodes(endpoint, 1, "--rdzv-conf", "settle=5"), COPIED, job_folder.folder, "ddp", "60")
    (job_folder.folder / "hold").touch()
    agents = [job_folder.start(*line) for _ in range(2)]
    while_running(lambda: len(steps_of(job_folder, 1)) > 20, *agents, limit_s=LIMIT_S)
    stays, lost = coordinators_first(agents)
    giver = saver_of(stays)
    giver.suspend()
    kill_all_of(lost)
    (job_folder.folder / "hold").unlink()
    newcomer = job_folder.start(*line)
    while_running(lambda: newcomer.begun and newcomer.events("worker_started"), newcomer, limit_s=LIMIT_S)
    saver_of(newcomer).kill()  # it fetches
    giver.resume()
    for agent in (stays, newcomer):
        assert agent.end(LIMIT_S) == 0, agent.text
    assert [source for _, source, _ in steps_of(job_folder, 0) if source] == ["memory"]
    assert not any(each.get("ahead") for each in newcomer.events("snapshot_fetched"))


def test_copies_that_are_too_slow_are_skipped(job_folder: JobFolder, endpoint: str) -> None:
    line = (*two_nodes(endpoint, 1), COPIED, job_folder.folder, "ddp", "60", "1000")
    agents = [job_folder.start(*line) for _ in range(2)]
    for agent in agents:
        assert agent.end(LIMIT_S) == 0, agent.text
    assert steps_of(job_folder, 0)[-1][0] == 60
    copies = [each for agent in agents for each in agent.events("snapshot_copy")]
    assert {each["why"] for each in copies if each["rank"] == -1} == {"the copy before it is still on its way"}
    assert len([each for each in copies if each["rank"] == -1]) > 5


def test_copies_go_on_after_a_loss_that_was_survived(job_folder: JobFolder, endpoint: str) -> None:
    faults = [[1, "optimizer", 20, "kill"], [0, "begin", 25, "wait"]]
    case = json.dumps({"epochs": 6, "copies": 1, "faults": faults})
    line = (*two_nodes(endpoint, 2, "--max-restarts", "1"), SURVIVOR, job_folder.folder, case)
    agents = [job_folder.start(*line) for _ in range(2)]
    joined_by_a_replacement(job_folder, *agents, waits_in=25)
    worlds = [each["worlds"] for each in ends(job_folder, 2)]
    assert [4, 3, 4] in worlds, agents[0].text
    arrived = [each for agent in agents for each in agent.events("snapshot_copy") if not each["why"]]
    assert {each["rank"] for each in arrived if each["step"] > 30} == {0, 1, 2, 3}


@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_a_lost_node_s_state_comes_from_another_node_s_memory(
    job_folder: JobFolder, endpoint: str, kind: str, torch_lacks: dict[str, str]
) -> None:
    """Everything of a node is killed at once, and a node that has nothing takes its place. The disk has nothing.
    tests/train/test_train_copies.py does it with FSDP2, again and again."""
    if kind != "ddp" and torch_lacks["fsdp"]:
        pytest.skip(torch_lacks["fsdp"])
    line = (*two_nodes(endpoint, 2, "--rdzv-conf", "settle=5"), COPIED, job_folder.folder, kind, "90")
    (job_folder.folder / "hold").touch()  # else the job may be over before the kill
    agents = [job_folder.start(*line) for _ in range(2)]
    while_running(lambda: len(steps_of(job_folder, 3)) > 40, *agents, limit_s=LIMIT_S)
    known = while_running(lambda: (step := copied(agents, 4)) > 30 and step, *agents, limit_s=LIMIT_S)
    lost = coordinators_first(agents)[1]
    kill_all_of(lost)
    (job_folder.folder / "hold").unlink()
    newcomer = job_folder.start(*line)
    assert newcomer.end(LIMIT_S) == 0, newcomer.text
    before: dict[int, str] = {}
    for rank in range(4):
        done = steps_of(job_folder, rank)
        first = next(number for number, each in enumerate(done) if each[1])
        step, source, fingerprint = done[first]
        assert source == "memory", newcomer.text
        assert [each[2] for each in done[:first] if each[0] == step] == [fingerprint]  # bit for bit
        assert step >= known
        before[rank] = step
    assert len(set(before.values())) == 1
    assert any(each.get("ahead") for each in newcomer.events("snapshot_fetched")), "fetched while its workers started"
    report = holdfast("report", *(each.folder for each in [*agents, newcomer]))
    assert f": resumed from copies on other nodes at step {before[0]}; " in report.stdout
    assert "copies on other nodes: " in report.stdout
