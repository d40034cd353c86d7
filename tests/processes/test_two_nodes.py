"""Several agents on loopback: who is in, who comes and goes, how all of them end alike, and how they drain."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable

import pytest

from tests.processes.conftest import c10d, coordinators_first, is_alive, told
from tests.support.limits import limit_s, until


def nodes(endpoint: str, nnodes: str, *more: str) -> tuple[str, ...]:
    return c10d(endpoint, nnodes, "--rdzv-conf", "settle=5", *more)


def ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def places(job_folder) -> list[tuple[int, int]]:
    return sorted((each["rank"], each["world"]) for each in job_folder.trail("up"))


# --- formation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_nodes_of_different_sizes(job_folder, free_port: Callable[[], int], host: str) -> None:
    if host == "[::1]" and not ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    script = job_folder.script("meet()\nnote('size', local_world=os.environ['LOCAL_WORLD_SIZE'])")
    args = nodes(f"{host}:{free_port()}", "2")
    agents = [job_folder.start(*args, "--nproc-per-node", str(n), script) for n in (1, 3)]
    assert [agent.end() for agent in agents] == [0, 0], agents[0].text + agents[1].text
    assert places(job_folder) == [(rank, 4) for rank in range(4)]
    assert {(each["agent"], each["local_world"]) for each in job_folder.trail("size")} == {("0", "1"), ("1", "3")}


def test_static_failure_restarts_both(job_folder, free_port: Callable[[], int]) -> None:
    port = str(free_port())
    script = job_folder.script("meet()\nif ROUND == 0:\n  if RANK == 1: sys.exit(1)\n  hold()")
    args = ("--nnodes", "2", "--max-restarts", "1", "--master-addr", "127.0.0.1", "--master-port", port)
    agents = [job_folder.start(*args, "--node-rank", str(rank), script) for rank in range(2)]
    assert [agent.end() for agent in agents] == [0, 0], agents[0].text + agents[1].text
    assert len(job_folder.trail("up", round=1)) == 2


# --- failure ----------------------------------------------------------------------------------------------------------


def test_the_culprit_and_not_the_victim(job_folder, endpoint: str) -> None:
    """Node A's rank complains, node B's was killed; whatever comes first, B's is named, on both nodes, with one text."""
    script = job_folder.script(
        """
meet()
if LOCAL_RANK == 0 and os.environ["AGENT"] == "0":
    note("killed")
    os.kill(os.getpid(), signal.SIGKILL)
while not notes("killed"):
    time.sleep(0.001)
raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")
"""
    )
    agents = [job_folder.start(*nodes(endpoint, "2"), "--nproc-per-node", "2", script) for _ in range(2)]
    assert [agent.end() for agent in agents] == [137, 137], agents[0].text + agents[1].text
    verdicts = [agent.verdict for agent in agents]
    assert verdicts[0] == verdicts[1]
    (dead,) = job_folder.trail("killed")
    assert verdicts[0]["verdict"]["culprit"]["rank"] == dead["rank"]
    assert verdicts[0]["verdict"]["culprit"]["exit_code"] == -9
    last = [agent.text[agent.text.index("job FAILED") :] for agent in agents]
    last = [text.replace(f"run folder   {agent.folder}", "") for text, agent in zip(last, agents, strict=True)]
    last = ["".join(line for line in text.splitlines(True) if not line.startswith("  log  ")) for text in last]
    assert last[0] == last[1]
    assert f"rank {dead['rank']} " in last[0].splitlines()[0]


CONNECTED = """
import socket
name = f"\\0holdfast-test-{PORT}"
if RANK == 1:
    server = socket.socket(socket.AF_UNIX)
    server.bind(name)
    server.listen(WORLD)
    meet()
    peers = [server.accept()[0] for _ in range(WORLD - 1)]
    leave()
meet()
peer = socket.socket(socket.AF_UNIX)
peer.connect(name)
peer.sendall(b"nobody reads this, so the end is a reset")
peer.recv(1)
"""
"""All ranks are connected to rank 1, which leaves in the way that a function `leave` before this says."""


def test_the_culprit_on_the_same_node(job_folder) -> None:
    """Its own node's other ranks may complain before the agent has read what the dead one left."""
    leave = """
def leave():
    sys.stderr.write("many words before the end\\n" * 20000)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    script = job_folder.script(leave + CONNECTED)
    for _ in range(3):
        agent = job_folder.ends(137, "--standalone", "--nproc-per-node", "4", "--redirects", "3", script)
        assert agent.verdict["verdict"]["culprit"]["rank"] == 1


def test_a_kill_that_is_seen_after_the_complaints_is_still_the_reason(job_folder) -> None:
    """Being stopped is SIGTERM: nobody of ours has sent SIGKILL."""
    leave = """
def leave():
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    for each in peers:
        each.close()
    hold()
"""
    agent = job_folder.ends(137, "--standalone", "--nproc-per-node", "3", job_folder.script(leave + CONNECTED))
    assert agent.verdict["verdict"]["culprit"]["rank"] == 1


def test_a_victim_that_dies_of_the_stop_is_not_the_culprit(job_folder, endpoint: str) -> None:
    script = job_folder.script(
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(99))\nmeet()\nif RANK == 1: raise ValueError('mine')\nhold()"
    )
    agents = [job_folder.start(*nodes(endpoint, "2"), script) for _ in range(2)]
    assert [agent.end() for agent in agents] == [1, 1]
    assert agents[0].verdict["verdict"]["culprit"]["message"] == "ValueError: mine"
    assert agents[0].text.rstrip().endswith("ValueError: mine")
    assert agents[1].text.rstrip().endswith("ValueError: mine")


# --- coming and going -------------------------------------------------------------------------------------------------

UNTIL_TOLD = "on_signal('SIGTERM', exit_code=0)\nmeet()\nwhile not os.path.exists('finish'): time.sleep(0.02)\n"


def finish(job_folder) -> None:
    (job_folder.folder / "finish").touch()


def test_a_killed_guest_is_done_without_and_replaced(job_folder, endpoint: str) -> None:
    args = (*nodes(endpoint, "1:2"), job_folder.script(UNTIL_TOLD))
    host, guest = pair(job_folder, args)
    guest.signal(signal.SIGKILL)
    alone = job_folder.wait(1, "up", world=1)
    assert alone[0]["agent"] == number(job_folder, host)
    replacement = job_folder.start(*args)
    job_folder.wait(4, "up", world=2)
    finish(job_folder)
    assert (host.end(), replacement.end()) == (0, 0), host.text + replacement.text
    assert {each["round"] for each in job_folder.trail("up")} == {0}, "no restart was spent"
    job_folder.all_gone()


def test_a_killed_host_is_succeeded(job_folder, endpoint: str) -> None:
    """On one machine the other agent can take the endpoint itself."""
    args = (*nodes(endpoint, "1:2"), "--max-restarts", "1", job_folder.script(UNTIL_TOLD))
    host, guest = pair(job_folder, args)
    host.signal(signal.SIGKILL)
    alone = job_folder.wait(1, "up", world=1)
    assert alone[0]["agent"] == number(job_folder, guest)
    finish(job_folder)
    assert guest.end() == 0, guest.text
    job_folder.all_gone()


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_node_that_is_asked_to_leave(job_folder, endpoint: str, leaver: int) -> None:
    args = (*nodes(endpoint, "1:2"), job_folder.script(UNTIL_TOLD))
    agents = pair(job_folder, args)
    stays, goes = agents[1 - leaver], agents[leaver]
    goes.signal(signal.SIGTERM)
    assert goes.end() == 143, goes.text
    alone = job_folder.wait(1, "up", world=1)
    assert alone[0]["agent"] == number(job_folder, stays)
    finish(job_folder)
    assert stays.end() == 0, stays.text
    assert len(job_folder.trail("signal", name="SIGTERM")) == 2


def test_a_late_joiner_is_taken_in(job_folder, endpoint: str) -> None:
    args = (*nodes(endpoint, "1:3", "--rdzv-conf", "settle=0.2"), job_folder.script(UNTIL_TOLD))
    first = job_folder.start(*args)
    job_folder.wait(1, "up", world=1)
    late = [job_folder.start(*args) for _ in range(2)]
    job_folder.wait(3, "up", world=3)
    finish(job_folder)
    assert [agent.end() for agent in (first, *late)] == [0, 0, 0], first.text
    assert next(iter(job_folder.trail("up", world=3, agent="0")))["rank"] == 0, "who stays keeps its rank"


def test_one_too_many_waits_and_ends_with_the_job(job_folder, endpoint: str) -> None:
    args = (
        *nodes(endpoint, "2"),
        job_folder.script("meet()\nwhile not os.path.exists('finish'): time.sleep(0.02)\nsys.exit(5)"),
    )
    agents = [job_folder.start(*args) for _ in range(2)]
    job_folder.wait(2, "up")
    spare = job_folder.start(*args)
    job_folder.joined(3)
    finish(job_folder)
    assert [agent.end() for agent in (*agents, spare)] == [5, 5, 5]
    assert {each["agent"] for each in job_folder.trail("up")} == {"0", "1"}


def test_a_spare_replaces_who_is_killed(job_folder, endpoint: str) -> None:
    args = (*nodes(endpoint, "2"), job_folder.script(UNTIL_TOLD))
    host, guest = pair(job_folder, args)
    spare = job_folder.start(*args)
    job_folder.joined(3)
    guest.signal(signal.SIGKILL)
    job_folder.wait(4, "up", world=2)
    finish(job_folder)
    assert (host.end(), spare.end()) == (0, 0), host.text + spare.text


def test_who_finishes_early_waits_for_the_others(job_folder, endpoint: str) -> None:
    """No barrier at the exit: who is done ends with the job, and the job with the last rank."""
    script = job_folder.script("meet()\nwhile RANK and not notes('end'): time.sleep(0.01)\nnote('end')")
    agents = [job_folder.start(*nodes(endpoint, "2"), script) for _ in range(2)]
    assert [agent.end() for agent in agents] == [0, 0]
    assert [each["rank"] for each in job_folder.trail("end")] == [0, 1]


def test_an_agent_killed_after_its_ranks_are_done_does_not_fail_the_job(job_folder, endpoint: str) -> None:
    script = job_folder.script(
        """
meet()
while not os.path.exists("finish"):
    time.sleep(0.01)
    if os.path.exists("guest" + os.environ["AGENT"]):
        note("done")
        sys.exit(0)
"""
    )
    host, guest = pair(job_folder, (*nodes(endpoint, "2"), script))
    (job_folder.folder / f"guest{number(job_folder, guest)}").touch()
    job_folder.wait(1, "done")
    until(
        lambda: "done" in stages(host), lambda: host.text
    )  # before, the coordinator does not know that the rank is done
    guest.signal(signal.SIGKILL)
    until(lambda: host.events("coordinator.lost"), lambda: host.text)
    finish(job_folder)
    assert host.end() == 0, host.text
    assert len(job_folder.trail("up")) == 2


def pair(job_folder, args) -> tuple:
    """Two agents that are up: the one that hosts the coordinator, and the other."""
    agents = [job_folder.start(*args) for _ in range(2)]
    job_folder.wait(2, "up", world=2)
    return tuple(coordinators_first(agents))


def stages(agent) -> list[str]:
    """How far the coordinator believes each rank to be."""
    return [rank["stage"] for node in told("status", agent.folder)["nodes"] for rank in node["ranks"]]


def number(job_folder, agent) -> str:
    return str(job_folder.agents.index(agent))


# --- workers that ask `should_stop()`: all leave at one step, nothing is done twice, and no restart is counted ------------


STEPS = """
from pathlib import Path
from holdfast.worker import on_stop, should_stop

SNAPSHOT = Path("snapshot")
START = int(SNAPSHOT.read_text()) if SNAPSHOT.exists() else 0
on_stop(lambda: note("told"))
meet()


def together(step):
    # Nobody begins a step before everybody is there, as in a collective.
    note("step", step=step, generation=PORT)
    while len({each["rank"] for each in notes("step") if each["step"] == step}) < WORLD:
        if Path("finish").exists():
            break  # another rank may have seen it before this step
        time.sleep(0.002)


for step in range(START, 100000):
    if Path("finish").exists():
        break
    together(step)
    time.sleep(0.02)
    if should_stop():
        note("left", step=step)
        if RANK == 0:
            SNAPSHOT.write_text(str(step + 1))
        sys.exit(0)
"""


def drains(endpoint: str, nnodes: str, *more: str) -> tuple[str, ...]:
    return nodes(endpoint, nnodes, "--rdzv-conf", "settle=0.1", *more)


def left_together(job_folder, world: int) -> int:
    """The step at which all ranks of this world have left; fails unless it is one and the same."""
    steps = {each["step"] for each in job_folder.wait(world, "left", world=world)}
    assert len(steps) == 1, steps
    return steps.pop()


def test_a_notice_drains_the_whole_job(job_folder) -> None:
    agent = job_folder.start("--nproc-per-node", "3", job_folder.script(STEPS))
    job_folder.wait(15, "step")
    agent.signal(signal.SIGTERM)
    assert agent.end() == 75, agent.text
    assert "preempted by SIGTERM: its workers stopped at a safe point" in agent.text
    step = left_together(job_folder, 3)
    assert max(each["step"] for each in job_folder.trail("step")) == step, "nobody is a step ahead"
    assert len(job_folder.trail("told")) == 3


def test_a_node_that_leaves_takes_nobodys_steps_with_it(job_folder, endpoint: str) -> None:
    script = job_folder.script(STEPS)
    args = drains(endpoint, "1:2", "--max-restarts", "0", "--nproc-per-node", "2")
    stays = job_folder.start(*args, script)
    job_folder.wait(2, "up")
    leaves = job_folder.start(*args, script)
    job_folder.wait(8, "step", world=4)
    leaves.signal(signal.SIGTERM)
    assert leaves.end() == 75, leaves.text
    step = left_together(job_folder, 4)
    job_folder.wait(2, "step", step=step + 3)
    (job_folder.folder / "finish").touch()
    assert stays.end() == 0, stays.text
    done = sorted({each["step"] for each in job_folder.trail("step")})
    assert done == list(range(len(done))), "no step is missing"
    for step in done:
        assert len({each["generation"] for each in job_folder.trail("step", step=step)}) == 1, (
            f"step {step} was done twice"
        )
    assert {each["round"] for each in job_folder.trail("step")} == {0}, "no restart was counted"


def test_a_newcomer_is_taken_in_between_two_steps(job_folder, endpoint: str) -> None:
    script = job_folder.script(STEPS)
    first = job_folder.start(*drains(endpoint, "1:2"), script)
    job_folder.wait(5, "step")
    second = job_folder.start(*drains(endpoint, "1:2"), script)
    job_folder.wait(4, "step", world=2)
    (job_folder.folder / "finish").touch()
    assert [first.end(), second.end()] == [0, 0], first.text + second.text
    step = left_together(job_folder, 1)
    assert min(each["step"] for each in job_folder.trail("step", world=2)) == step + 1


def test_a_preemption_signal_is_the_agents_alone(job_folder) -> None:
    """Schedulers send it to every process of a step: workers must not die of it."""
    agent = job_folder.start("--preempt-signal", "usr1", "--nproc-per-node", "2", job_folder.script(STEPS))
    ups = job_folder.wait(2, "up")
    job_folder.wait(6, "step")
    for each in ups:
        os.kill(each["pid"], signal.SIGUSR1)
    agent.signal(signal.SIGUSR1)
    assert agent.end() == 75, agent.text
    left_together(job_folder, 2)


def test_a_preempted_script_that_asks_nothing_gets_sigterm(job_folder) -> None:
    agent = job_folder.start(
        "--preempt-signal", "SIGUSR1", job_folder.script("on_signal('SIGTERM', exit_code=0)\nmeet()\nhold()")
    )
    job_folder.wait(1, "up")
    agent.signal(signal.SIGUSR1)
    assert agent.end() == 75, agent.text
    assert [each["name"] for each in job_folder.trail("signal")] == ["SIGTERM"]
    assert "its workers were stopped" in agent.text


def test_a_worker_that_never_comes_to_its_safe_point_is_stopped(job_folder) -> None:
    """Rank 1 asks once and then no more."""
    body = (
        "from holdfast.worker import should_stop\nmeet()\nshould_stop()\nnote('asked')\n"
        "if RANK == 1: hold()\nwhile not should_stop(): time.sleep(0.01)\nnote('left')\nhold()"
    )
    agent = job_folder.start(
        "--nproc-per-node", "2", "--drain-timeout", "1", "--shutdown-timeout", "1", job_folder.script(body)
    )
    job_folder.wait(2, "asked")
    agent.signal(signal.SIGTERM)
    assert agent.end() == 143, agent.text
    job_folder.all_gone()


def test_a_save_that_fails_in_a_drain_costs_no_restart(job_folder, endpoint: str) -> None:
    body = STEPS.replace("sys.exit(0)", "sys.exit(RANK)")
    script = job_folder.script(body)
    first = job_folder.start(*drains(endpoint, "1:2", "--max-restarts", "0", "--nproc-per-node", "2"), script)
    job_folder.wait(10, "step")
    second = job_folder.start(*drains(endpoint, "1:2", "--max-restarts", "0", "--nproc-per-node", "2"), script)
    job_folder.wait(8, "step", world=4)
    (job_folder.folder / "finish").touch()
    assert [first.end(), second.end()] == [0, 0], first.text + second.text


# --- an agent that stands still ---------------------------------------------------------------------------------------


def test_workers_of_a_stopped_agent_die_at_its_fence(job_folder, endpoint: str) -> None:
    """Nobody is awake there to kill them, and the others are about to go on without them."""
    conf = ("--rdzv-conf", f"settle=0.1,lease={limit_s(1.5):g}")
    args = c10d(endpoint, "1:2", *conf)
    script = job_folder.script("meet()\nwhile not os.path.exists('finish'): time.sleep(0.02)")
    first = job_folder.start(*args, script)
    job_folder.wait(1, "up")
    second = job_folder.start(*args, script)
    job_folder.wait(2, "up", world=2)
    second.signal(signal.SIGSTOP)
    job_folder.wait(1, "up", agent="0", world=1)
    ups = job_folder.wait(2, "up", agent="0", world=1)
    frozen = job_folder.trail("up", agent="1")[-1]["pid"]
    assert len(ups) >= 2
    assert not is_alive(frozen), "two generations are alive at once"
    second.signal(signal.SIGCONT)
    job_folder.wait(4, "up", world=2)
    time.sleep(0.1)
    (job_folder.folder / "finish").touch()
    assert [first.end(), second.end()] == [0, 0], first.text + second.text
