"""Real jobs that stand still: who keeps the others waiting is said on every node, and after the time-out all start again."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from holdfast.protocol.exit_codes import EXIT_HUNG
from tests.processes.conftest import c10d
from tests.support.limits import limit_s, until

SCRIPTS = Path(__file__).parent / "scripts"
HOST = socket.gethostname().partition(".")[0]

STEPS = '''
import pathlib
from holdfast.worker import beat

# Ranks that wait for each other as in a collective. By its file's name it is one: nothing here needs torch.
exec(compile("""
def all_reduce(step):
    place = f"step_{PORT}_{step}_"
    pathlib.Path(place + str(RANK)).touch()
    others = [place + str(rank) for rank in range(WORLD)]
    while not all([os.access(other, os.F_OK) for other in others]):
        time.sleep(0.01)
""", "/lib/torch/distributed/pretend.py", "exec"))

def work(step):
    time.sleep(0.02)
    if ROUND == 0 and step == 40:
        note("last")
        trouble()

def all_sleep(until="go"):
    while not os.access(until, os.F_OK):
        time.sleep(0.05)

def finish():
    pass

def rank_1(action):
    if RANK == 1:
        action()

TROUBLE
meet()
for step in range(80):
    work(step)
    all_reduce(step)
    beat()
finish()
note("done")
'''
ASLEEP = """
def wait():
    print("shard 17 is late", file=sys.stderr, flush=True)
    time.sleep(600)
def trouble(): rank_1(wait)
"""
LATE = """
def until_go():
    with open("go") as pipe:
        pipe.read()
def trouble(): rank_1(until_go)
def finish(): all_sleep("end")
"""
# Four of them, which sleep for most of the time: together they get what a look asks for on a busy machine too.
BUSY_CHILD = """
import subprocess
WORKS = "import os, time\\nos.fork(), os.fork()\\nwhile not os.access('go', os.F_OK): sum(range(300_000)), time.sleep(0.04)"
def trouble(): rank_1(lambda: subprocess.run([sys.executable, "-c", WORKS]))
"""

HANG_S = limit_s(0.5)
"""A rank that gets no processor for so long seems to hang: more on a slow machine."""
FAST = ("--rdzv-conf", f"hang_report={HANG_S:g},settle=0.1")


def script(job_folder, trouble: str):
    return job_folder.script(STEPS.replace("TROUBLE", trouble))


def two_nodes(job_folder, endpoint: str, *args) -> tuple:
    line = (*c10d(endpoint, "2", "--nproc-per-node", "2"), *FAST, *args)
    return job_folder.start(*line), job_folder.start(*line)


def hangs(*agents) -> list:
    return [event for agent in agents for event in agent.events("coordinator.hang")]


def test_a_rank_that_sleeps_is_named_on_every_node_and_all_start_again(job_folder, endpoint: str) -> None:
    agents = two_nodes(
        job_folder, endpoint, "--max-restarts", "1", "--hang-timeout", f"{3 * HANG_S:g}", script(job_folder, ASLEEP)
    )
    for agent in agents:
        agent.says(f"rank 1 on {HOST} is in time.sleep at train.py:")
        agent.says("waits in all_reduce" if "waits in all_reduce" in agent.text else "wait in all_reduce")
        agent.says("workers are ended (--hang-timeout)")
        agent.says("nothing has moved for ")
    assert [agent.end() for agent in agents] == [0, 0], agents[0].text
    assert {each["round"] for each in job_folder.trail("done")} == {1}
    assert len(job_folder.trail("done")) == 4
    (hang,) = hangs(*agents)
    assert (hang["kind"], hang["code"], hang["culprits"]) == ("hung", "HF240", [1])
    assert [sorted(group["ranks"]) for group in hang["groups"]] == [[1], [0, 2, 3]]
    with open(hang["files"]["1"]) as file:
        assert "trouble" in file.read(), "the evidence outlives the workers"
    job_folder.all_gone()


def test_without_restarts_the_hang_is_the_verdict(job_folder) -> None:
    args = ("--standalone", "--nproc-per-node", "2", *FAST, "--hang-timeout", f"{HANG_S:g}")
    agent = job_folder.ends(EXIT_HUNG, *args, script(job_folder, ASLEEP))
    assert agent.verdict["verdict"]["code"] == "HF240"
    assert agent.verdict["verdict"]["culprit"]["rank"] == 1
    assert f"HF240: job FAILED after 0 restarts: rank 1 on {HOST} is in time.sleep at train.py:" in agent.text
    _, _, shown = agent.text.partition("where rank 1 hung:")
    assert "in wait\n    time.sleep(600)\n" in shown, "its stack with its line"
    assert "last lines of rank 1's stderr:\nshard 17 is late" in shown
    job_folder.all_gone()


def test_a_hang_that_passes_is_told_to_be_over(job_folder) -> None:
    os.mkfifo(job_folder.folder / "go")  # a loop that looks for a file would be reported later
    agent = job_folder.start("--standalone", "--nproc-per-node", "2", *FAST, script(job_folder, LATE))
    agent.says(f"rank 1 on {HOST} is in until_go at train.py:")
    (job_folder.folder / "go").write_text("now")
    agent.says("the job goes on after ")
    (job_folder.folder / "end").touch()
    assert agent.end() == 0, agent.text
    assert {each["round"] for each in job_folder.trail("done")} == {0}


def test_work_of_a_child_is_no_hang(job_folder) -> None:
    """A hang would be reported and ended with the third look."""
    slow_enough = f"hang_report={4 * HANG_S:g},settle=0.1"
    args = ("--standalone", "--nproc-per-node", "2", "--rdzv-conf", slow_enough, "--hang-timeout", f"{HANG_S:g}")
    agent = job_folder.start(*args, script(job_folder, BUSY_CHILD))
    job_folder.wait(2, "last")
    stacks = agent.folder / "stacks"
    until(lambda: stacks.is_dir() and len(list(stacks.glob("gen1_3_rank*"))) == 2, lambda: agent.text)
    (job_folder.folder / "go").touch()
    assert agent.end() == 0, agent.text
    assert {each["round"] for each in job_folder.trail("done")} == {0}
    assert hangs(agent) == []


TORCH = f"""
sys.path.append({str(SCRIPTS)!r})
import pathlib, torch, torch.distributed as dist, without_compiler
if RANK == 1:
    while not pathlib.Path("come").exists():
        time.sleep(0.05)
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    if RANK == 1:
        time.sleep(0.1)
        if pathlib.Path("hang").exists():
            time.sleep(600)
    loss = model(torch.ones(4, 8)).sum()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
"""


@pytest.mark.xdist_group("torch jobs")
def test_with_torch_three_ranks_are_named(job_folder) -> None:
    """One that comes late to init_process_group, then is slow, and then hangs."""
    agent = job_folder.start(
        "--standalone", "--nproc-per-node", "2", *FAST, "--preload", "torch", job_folder.script(TORCH)
    )
    agent.says(f"; rank 1 on {HOST} has not come", 90)  # it polls a file, and may go on at any time
    until(lambda: hangs(agent), "the journal, which a thread writes, to have it")
    assert [hang["culprits"] for hang in hangs(agent)] == [[1]]
    (job_folder.folder / "come").touch()
    agent.says(f"rank 1 on {HOST} is slow: ", 90)
    (job_folder.folder / "hang").touch()
    until(lambda: len(hangs(agent)) == 2, lambda: agent.text, 60)
    agent.says("waits in all_reduce at train.py:")
    assert [hang["culprits"] for hang in hangs(agent)] == [[1], [1]]
    (straggler,) = agent.events("coordinator.straggler")
    assert (straggler["code"], straggler["ranks"]) == ("HF250", [1])
    assert straggler["own_s"] > max(0.1, straggler["peers_s"])
    agent.signal(signal.SIGTERM)
    assert agent.end() == 143
    job_folder.all_gone()


MISMATCHED = f"""
sys.path.append({str(SCRIPTS)!r})
import torch, torch.distributed as dist, without_compiler
from holdfast.worker import beat
dist.init_process_group("gloo")
for _ in range(40):
    dist.all_reduce(torch.ones(8))
    beat()
if RANK == 2:
    dist.broadcast(torch.ones(1), src=0)
else:
    dist.all_reduce(torch.ones(4096))
time.sleep(600)
"""


@pytest.mark.xdist_group("torch jobs")
def test_report_verdict_and_evidence_have_the_collectives(job_folder, torch_lacks: dict[str, str]) -> None:
    if torch_lacks["recorder"]:
        pytest.skip(torch_lacks["recorder"])
    line = ("--standalone", "--nproc-per-node", "4", "--hang-timeout", f"{HANG_S:g}", *FAST, "--preload", "torch")
    agent = job_folder.ends(EXIT_HUNG, *line, job_folder.script(MISMATCHED), limit_s=limit_s(60))
    own = f"rank 2 on {HOST} is at collective 41 broadcast [1] float32 (train.py:"
    others = "), 3 others at 41 all_reduce [4096] float32 (train.py:"
    assert f"holdfast: {own}" in agent.text
    assert f"  collectives  {own}" in agent.text
    verdict = agent.verdict["verdict"]
    assert verdict["code"] == "HF244"
    assert verdict["collectives"].startswith(own)
    assert others in verdict["collectives"]
    (hang,) = hangs(agent)
    assert hang["collectives"] == verdict["collectives"]
    evidence = Path(hang["files"]["2"]).read_text()
    assert "collective 41 of default_pg: broadcast [1] float32, not done\n" in evidence
    job_folder.all_gone()
