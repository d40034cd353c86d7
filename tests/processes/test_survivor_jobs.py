"""Workers that go on in their processes when another one is lost: whole jobs, with a script that has no torch.

The script keeps the worker's side of the channel, as `ht.survive` does.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from holdfast.diagnosis.reference import problems
from tests.processes.conftest import c10d
from tests.support.limits import until

SCRIPT = '''
import json, socket
LAST = int(sys.argv[1])
"""The generation in which all end with 0."""
fresh = os.environ.pop("HOLDFAST_REPLACEMENT", "") == ""
channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

def tell(**message):
    channel.send(json.dumps(message).encode())

def went_on(message):
    os.environ.update(message["environment"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    note("went_on", generation=message["generation"], now=(rank, world), fresh=fresh)
    if message["generation"] == LAST:
        sys.exit(0)
    tell(**{"is": "can_go_on", "generation": message["generation"]})
    tell(**{"is": "went_on", "generation": message["generation"], "step": 1, "steps_lost": 0, "seconds": 0.1})

note("up", fresh=fresh)
if ROUND and fresh:
    sys.exit(0)  # it was started again with all others
try:
    channel.connect(b"\\\\0holdfast-board-%d" % os.stat(os.environ["HOLDFAST_BOARD"].rpartition("@")[0]).st_ino)
except ConnectionRefusedError:
    note("refused")
    hold()
tell(**({"is": "can_go_on", "generation": 0} if fresh else {"is": "ready"}))
while packet := channel.recv(65536):
    message = json.loads(packet)
    if message["do"] == "release":
        tell(**{"is": "waits", "generation": message["generation"]})
    else:
        went_on(message)
'''.replace("\\\\0", "\\0")


def all_can_go_on(agent: Any, generation: int, count: int) -> None:
    """Wait until so many workers of this node can go on."""
    until(
        lambda: (
            agent.begun
            and any(
                each["generation"] == generation and len(each["local_ranks"]) == count
                for each in agent.events("can_go_on")
            )
        ),
        lambda: f"not able in generation {generation}: {agent.text}",
    )


def kill_rank(job_folder: Any, rank: int) -> None:
    os.kill(job_folder.trail("up", rank=rank)[-1]["pid"], signal.SIGKILL)


def places(job_folder: Any, generation: int) -> list[tuple[int, int]]:
    """Rank and world size of each worker that went on in this generation."""
    return sorted(each["now"] for each in job_folder.trail("went_on", generation=generation))


def test_the_others_go_on_and_a_replacement_joins(job_folder) -> None:
    line = ("--standalone", "--nproc-per-node", "3", "--max-restarts", "1", job_folder.script(SCRIPT), "3")
    agent = job_folder.start(*line)
    all_can_go_on(agent, 1, 3)
    kill_rank(job_folder, 1)
    assert agent.end() == 0, agent.text
    assert places(job_folder, 2) == [(0, 2), (1, 2)]
    assert places(job_folder, 3) == [(0, 3), (1, 3), (2, 3)]
    assert len(job_folder.trail("up")) == 4, "three workers and one replacement"
    assert [each["fresh"] for each in job_folder.trail("went_on", generation=3, rank=1)] == [False]
    assert "2 ranks go on" in agent.text
    assert "it counts as restart 1 of 1" in agent.text
    assert {path.name for path in (agent.folder / "attempt_0").iterdir()} == {"0", "1", "1.1", "2"}
    assert [problem for event in agent.events() for problem in problems(event)] == []
    job_folder.all_gone()


def test_workers_of_two_nodes_go_on(job_folder, endpoint: str) -> None:
    args = c10d(endpoint, "2", "--nproc-per-node", "2", "--max-restarts", "1")
    agents = [job_folder.start(*args, job_folder.script(SCRIPT), "3") for _ in range(2)]
    for agent in agents:
        all_can_go_on(agent, 1, 2)
    kill_rank(job_folder, 0)
    assert [agent.end() for agent in agents] == [0, 0], agents[0].text
    assert places(job_folder, 2) == [(0, 3), (1, 3), (2, 3)]
    assert places(job_folder, 3) == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_a_lost_node_costs_no_restart_and_a_new_one_joins(job_folder, endpoint: str) -> None:
    args = c10d(endpoint, "1:2", "--nproc-per-node", "2")
    first = job_folder.start(*args, job_folder.script(SCRIPT), "3")
    job_folder.joined(1)
    second = job_folder.start(*args, job_folder.script(SCRIPT), "3")
    for agent in (first, second):
        all_can_go_on(agent, 1, 2)
    second.signal(signal.SIGKILL)
    all_can_go_on(first, 2, 2)
    assert places(job_folder, 2) == [(0, 2), (1, 2)]
    third = job_folder.start(*args, job_folder.script(SCRIPT), "3")
    assert (first.end(), third.end()) == (0, 0), first.text
    assert places(job_folder, 3) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert len(job_folder.trail("up", agent="0")) == 2


@pytest.mark.parametrize("option", [("--survive", "off"), ("--min-ranks", "3")], ids=lambda option: option[0])
def test_all_are_started_again_where_they_must_not_go_on(job_folder, option: tuple[str, str]) -> None:
    line = ("--standalone", "--nproc-per-node", "3", "--max-restarts", "1", *option, job_folder.script(SCRIPT), "9")
    agent = job_folder.start(*line)
    if option[0] == "--survive":
        job_folder.wait(3, "refused")
    else:
        all_can_go_on(agent, 1, 3)
    kill_rank(job_folder, 1)
    assert agent.end() == 0, agent.text
    assert len(job_folder.trail("up", round=1)) == 3
    assert job_folder.trail("went_on") == []


def test_without_a_restart_left_the_job_ends_as_ever(job_folder) -> None:
    agent = job_folder.start("--standalone", "--nproc-per-node", "2", job_folder.script(SCRIPT), "9")
    all_can_go_on(agent, 1, 2)
    kill_rank(job_folder, 1)
    assert agent.end() == 137, agent.text
    assert (agent.verdict["code"], agent.verdict["verdict"]["culprit"]["rank"]) == ("HF204", 1)
    assert job_folder.trail("went_on") == []


def test_the_others_can_wait_for_the_replacement(job_folder) -> None:
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--survive", "wait")
    agent = job_folder.start("--standalone", *options, job_folder.script(SCRIPT), "3")
    all_can_go_on(agent, 1, 2)
    kill_rank(job_folder, 0)
    assert agent.end() == 0, agent.text
    assert (places(job_folder, 2), places(job_folder, 3)) == ([], [(0, 2), (1, 2)])
    assert len(job_folder.trail("up")) == 3
