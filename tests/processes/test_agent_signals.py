"""Signals to the agent: it hands them on, ends with 128+N, and leaves nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from holdfast.supervisor.client import ProcessEnded, SupervisorClient, SupervisorEvent
from holdfast.supervisor.supervisor import SupervisorHandle, fork_supervisor
from tests.processes.conftest import c10d
from tests.support.limits import limit_s, until

ALL = "on_signal('SIGTERM', 'SIGINT', 'SIGHUP', 'SIGQUIT', exit_code=9)\n"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_workers_get_that_signal(job_folder, signum: signal.Signals) -> None:
    script = job_folder.script(ALL + "child()\ndaemon()\nmeet()\nhold()")
    agent = job_folder.start("--standalone", "--nproc-per-node", "2", script)
    job_folder.wait(2, "up")
    agent.signal(signum)
    assert agent.end() == 128 + signum, agent.text
    job_folder.all_gone()
    assert sorted((each["rank"], each["name"]) for each in job_folder.trail("signal")) == [
        (0, signum.name),
        (1, signum.name),
    ]
    assert signum.name in agent.text


@pytest.mark.parametrize(
    ("backend", "node", "signum"),
    [
        ("c10d", 0, signal.SIGTERM),
        ("c10d", 1, signal.SIGINT),
        ("static", 0, signal.SIGINT),
        ("static", 1, signal.SIGTERM),
    ],
)
def test_while_waiting_for_peers(job_folder, endpoint: str, backend: str, node: int, signum: signal.Signals) -> None:
    port = endpoint.rpartition(":")[2]
    where = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port, "--node-rank", str(node))
    if backend == "c10d":
        where = c10d(endpoint, "2", "--rdzv-conf", f"is_host={1 - node}")
    agent = job_folder.start(*where, job_folder.script("note('up')"))
    until_dialing(agent)
    agent.signal(signum)
    assert agent.end() == 128 + signum, agent.text
    assert "Traceback" not in agent.text
    assert job_folder.trail() == []


def test_while_a_silent_listener_keeps_us_waiting(job_folder, endpoint: str) -> None:
    """The handshake waits for its answer; a signal does not wait for the handshake."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", int(endpoint.rpartition(":")[2])))
        silent.listen()
        silent.settimeout(limit_s(20))
        agent = job_folder.start(*c10d(endpoint), job_folder.script("note('up')"))
        with silent.accept()[0]:
            agent.signal(signal.SIGTERM)
            assert agent.end() == 143, agent.text


def until_dialing(agent) -> None:
    until(lambda: agent.begun and agent.events("claim"), lambda: agent.text)


def test_all_agents_are_asked_at_once(job_folder, endpoint: str) -> None:
    """As a scheduler does at the end of an allocation."""
    script = job_folder.script("on_signal('SIGTERM', exit_code=0)\ndaemon()\nmeet()\nhold()")
    args = (*c10d(endpoint), "--max-restarts", "3", script)
    agents = [job_folder.start(*args) for _ in range(2)]
    job_folder.wait(2, "up")
    for agent in agents:
        agent.signal(signal.SIGTERM)
    assert [agent.end() for agent in agents] == [143, 143], agents[0].text + agents[1].text
    assert len(job_folder.trail("up")) == 2
    job_folder.all_gone()


def test_the_second_interrupt_kills_at_once(job_folder) -> None:
    script = job_folder.script("on_signal('SIGINT', 'SIGTERM')\nmeet()\nwhile True: time.sleep(1)")
    agent = job_folder.start("--standalone", "--nproc-per-node", "2", script)
    job_folder.wait(2, "up")
    agent.signal(signal.SIGINT)
    job_folder.wait(2, "signal")
    assert agent.process.poll() is None
    agent.signal(signal.SIGINT)
    assert agent.end() == 130, agent.text
    job_folder.all_gone()


def test_the_timeout_holds_for_signals_too(job_folder) -> None:
    script = job_folder.script("on_signal('SIGTERM')\nmeet()\nwhile True: time.sleep(1)")
    agent = job_folder.start("--standalone", "--shutdown-timeout", "1", script)
    job_folder.wait(1, "up")
    agent.signal(signal.SIGTERM)
    assert agent.end() == 143, agent.text
    job_folder.all_gone()


def test_user_signals_are_passed_on(job_folder) -> None:
    script = job_folder.script(
        "on_signal('SIGUSR1', 'SIGUSR2')\nmeet()\nwhile len(notes('signal')) < 2 * WORLD: time.sleep(0.01)\nnote('end')"
    )
    agent = job_folder.start("--standalone", "--nproc-per-node", "2", script)
    job_folder.wait(2, "up")
    agent.signal(signal.SIGUSR1)
    job_folder.wait(2, "signal", name="SIGUSR1")
    agent.signal(signal.SIGUSR2)
    assert agent.end() == 0, agent.text
    assert len(job_folder.trail("signal")) == 4


def test_user_signals_while_nothing_runs_are_harmless(job_folder, endpoint: str) -> None:
    args = (*c10d(endpoint), job_folder.script("note('up')"))
    agent = job_folder.start(*args)
    job_folder.joined(1)
    agent.signal(signal.SIGUSR1)
    other = job_folder.start(*args)
    assert (agent.end(), other.end()) == (0, 0), agent.text


def test_signals_to_handle(job_folder) -> None:
    """USR1 ends the job when it is named; SIGTERM, no longer named, kills the agent, and the supervisor all the rest."""
    script = job_folder.script("on_signal('SIGUSR1', exit_code=0)\nchild()\nmeet()\nhold()")
    args = ("--standalone", "--signals-to-handle", "SIGUSR1", script)
    agent = job_folder.start(*args)
    job_folder.wait(1, "up")
    agent.signal(signal.SIGUSR1)
    assert agent.end() == 128 + signal.SIGUSR1, agent.text
    job_folder.all_gone()
    agent = job_folder.start(*args)
    job_folder.wait(2, "up")
    agent.signal(signal.SIGTERM)
    assert agent.end() == 143
    job_folder.all_gone()


def test_an_ignored_hangup_stays_ignored(job_folder) -> None:
    """As under nohup; the workers inherit it."""
    script = job_folder.script(
        "meet()\nos.kill(os.getpid(), signal.SIGHUP)\nnote('hung_up')\n"
        "while not os.path.exists('finish'): time.sleep(0.01)\nnote('end')"
    )
    nohup = ("sh", "-c", 'trap \'\' HUP; exec "$0" "$@"', sys.executable, "-m", "holdfast.run")
    agent = job_folder.start("--standalone", script, program=nohup)
    job_folder.wait(1, "hung_up")
    agent.signal(signal.SIGHUP)
    (job_folder.folder / "finish").touch()
    assert agent.end() == 0, agent.text
    assert len(job_folder.trail("end")) == 1


@pytest.mark.parametrize("name", ["INT", "QUIT"])
def test_what_a_shell_script_ignores_in_the_background_ends_the_job(job_folder, name: str) -> None:
    """Agent and workers: `holdfast run ... &` in a script, as with torchrun."""
    background = ("sh", "-c", f'trap \'\' {name}; exec "$0" "$@"', sys.executable, "-m", "holdfast.run")
    agent = job_folder.start("--standalone", job_folder.script("meet()\nhold()"), program=background)
    job_folder.wait(1, "up")
    agent.signal(signal.Signals[f"SIG{name}"])
    assert agent.end() == 128 + signal.Signals[f"SIG{name}"], agent.text
    job_folder.all_gone()


def test_interrupt_of_a_terminals_foreground_group(job_folder) -> None:
    """Ctrl-C reaches the agent alone: workers have their own sessions and hear of it through the agent, once."""
    script = job_folder.script("on_signal('SIGINT', exit_code=0)\nmeet()\nprint(os.getpid(), os.getsid(0))\nhold()")
    agent = job_folder.start("--standalone", "--nproc-per-node", "2", script)
    job_folder.wait(2, "up")
    os.killpg(agent.pid, signal.SIGINT)
    assert agent.end() == 130, agent.text
    assert len(job_folder.trail("signal")) == 2


def test_signals_during_the_start(job_folder) -> None:
    """At whatever moment it comes, it ends the agent and leaves nothing."""
    script = job_folder.script("child()\nmeet()\nhold()")
    for pause_ms in (0, 10, 25, 45, 70, 100, 150, 250):
        agent = job_folder.start("--standalone", "--nproc-per-node", "2", script)
        time.sleep(pause_ms / 1000)
        agent.signal(signal.SIGTERM)
        assert agent.end() in (143, 1), (pause_ms, agent.text)
        assert "Traceback" not in agent.text, (pause_ms, agent.text)
    job_folder.all_gone()


def test_a_pipeline_sees_the_end(job_folder) -> None:
    """Nobody keeps the agent's stdout open after its end: `holdfast run … | tee` ends too."""
    script = job_folder.script("child()\ndaemon()\nmeet()\nprint('last', flush=True)")
    agent = job_folder.start("--standalone", script, stdout=subprocess.PIPE)
    out, _ = agent.process.communicate(timeout=limit_s(20))
    assert b"last" in out
    assert agent.end() == 0


# --- a worker that is signalled before it runs its own program has not been spared ------------------------------------


WORKERS = 100


def test_a_signal_right_after_the_spawn_is_not_lost() -> None:
    handle = fork_supervisor()
    assert asyncio.run(spawn_and_signal(handle)) == [-signal.SIGTERM] * WORKERS


async def spawn_and_signal(handle: SupervisorHandle) -> list[int]:
    codes: list[int] = []
    over = asyncio.Event()

    def on_event(event: SupervisorEvent) -> None:
        if isinstance(event, ProcessEnded):
            codes.append(event.exit_code)
            if len(codes) == WORKERS:
                over.set()

    supervisor = SupervisorClient(handle, on_event)
    for number in range(WORKERS):
        supervisor.spawn(f"worker{number}", ["sleep", "30"])
        supervisor.signal(f"worker{number}", signal.SIGTERM)
    try:
        async with asyncio.timeout(limit_s(15)):
            await over.wait()
    except TimeoutError:
        pass
    finally:
        await supervisor.close()
    return codes


def test_a_signal_after_the_end_does_not_cost_the_verdict(job_folder) -> None:
    """As where a scheduler ends the step of a job that fails at that moment."""
    program = job_folder.changed(
        "import os, signal, time\n"
        "from holdfast.runtime import agent_service\n"
        "write = agent_service.write_reports\n"
        "def write_at_a_signal(*given):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(0.2)\n"
        "    write(*given)\n"
        "agent_service.write_reports = write_at_a_signal\n"
    )
    agent = job_folder.ends(1, "--standalone", job_folder.script("raise ValueError('bad row')"), program=program)
    assert agent.verdict["code"] == "HF201"
    assert "ValueError: bad row" in agent.text
