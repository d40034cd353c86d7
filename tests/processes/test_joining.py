"""At the endpoint: nobody comes, too many come, other jobs, other services, and bytes that are no protocol."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.processes.conftest import c10d, coordinators_first
from tests.support.limits import limit_s, until


def test_a_missing_peer(job_folder, endpoint: str) -> None:
    agent = job_folder.ends(1, *c10d(endpoint, "2", "--rdzv-conf", "join_timeout=1"), job_folder.script("note('up')"))
    assert "HF301" in agent.text
    assert "1 of at least 2 nodes" in agent.text
    assert "here: " in agent.text
    assert len(agent.text.splitlines()) <= 3
    assert job_folder.trail() == []


def test_a_missing_host(job_folder, endpoint: str) -> None:
    agent = job_folder.ends(
        1, *c10d(endpoint, "2", "--rdzv-conf", "join_timeout=1,is_host=0"), job_folder.script("note('up')")
    )
    assert "HF302" in agent.text
    assert endpoint in agent.text
    assert "refused" in agent.text


def test_a_host_that_does_not_resolve(job_folder) -> None:
    args = c10d("no-such-host.invalid:29400", "2", "--rdzv-conf", "join_timeout=1")
    agent = job_folder.ends(2, *args, job_folder.script("note('up')"))
    assert "HF110" in agent.text
    assert "no-such-host.invalid" in agent.text
    assert "does not resolve" in agent.text


def test_two_agents_with_one_node_rank(job_folder, free_port: Callable[[], int]) -> None:
    args = ("--nnodes", "3", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    script = job_folder.script("meet()")
    host = job_folder.start(*args, "--node-rank", "0", script)
    first = job_folder.start(*args, "--node-rank", "1", script)
    job_folder.joined(2)
    second = job_folder.ends(2, *args, "--node-rank", "1", script)
    assert "--node-rank 1 is taken" in second.text
    third = job_folder.start(*args, "--node-rank", "2", script)
    assert [agent.end() for agent in (host, first, third)] == [0, 0, 0], host.text


def test_two_agents_that_both_are_node_0(job_folder, free_port: Callable[[], int]) -> None:
    args = ("--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    script = job_folder.script("meet()")
    job_folder.start(*args, script)
    job_folder.joined(1)
    second = job_folder.ends(2, *args, script)
    assert "Traceback" not in second.text


def test_the_endpoint_comes_up_later(job_folder, endpoint: str) -> None:
    args = c10d(endpoint)
    script = job_folder.script("meet()")
    guest = job_folder.start(*args, "--rdzv-conf", "is_host=0", script)
    until(lambda: guest.begun and guest.events("claim"), lambda: guest.text)
    host = job_folder.start(*args, script)
    assert (host.end(), guest.end()) == (0, 0), host.text + guest.text


# --- one of three agents is killed while the job forms; the others form and finish ------------------------------------


LEASE_S = limit_s(0.75)
"""Of a killed agent on another machine; a closed connection says as much at once."""


def events(job_folder: Any, name: str) -> int:
    """So many of this name in the journals of all agents."""
    return sum(len(agent.events(name)) for agent in job_folder.agents if agent.begun)


MOMENTS: dict[str, Callable[[Any], object]] = {
    "forked": lambda job_folder: True,
    "first run folder": lambda job_folder: any(agent.begun for agent in job_folder.agents),
    "first claim": lambda job_folder: events(job_folder, "claim"),
    "one joined": lambda job_folder: events(job_folder, "coordinator.joined") >= 1,
    "all joined": lambda job_folder: events(job_folder, "coordinator.joined") >= 3,
    "being prepared": lambda job_folder: events(job_folder, "coordinator.assigned"),
    "formed": lambda job_folder: events(job_folder, "coordinator.started"),
    "first worker runs": lambda job_folder: job_folder.trail("up"),
    "all have met": lambda job_folder: job_folder.trail("child"),
}


def started(job_folder: Any, endpoint: str, body: str) -> list[Any]:
    conf = ("--rdzv-conf", f"settle=0.3,lease={LEASE_S:g}", "--max-restarts", "1", "--shutdown-timeout", "3")
    args = (*c10d(endpoint, "2:3", *conf), job_folder.script(body))
    return [job_folder.start(*args) for _ in range(3)]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_at_any_moment(job_folder: Any, endpoint: str, moment: str) -> None:
    """The killed one may host the coordinator: then another takes the endpoint. Nobody waits for a time-out."""
    agents = started(job_folder, endpoint, "meet()\nchild()\ntime.sleep(0.2)\nnote('end')")
    until(lambda: MOMENTS[moment](job_folder), moment)
    agents.pop(list(MOMENTS).index(moment) % 3).signal(signal.SIGKILL)
    codes = [agent.end() for agent in agents]
    story = "".join(f"\n--- {agent.text}" for agent in agents)
    assert codes == [0, 0], story
    ends = job_folder.trail("end")
    finished = {each["rank"] for each in ends if each["port"] == ends[-1]["port"]}
    assert finished == set(range(ends[-1]["world"])), story
    job_folder.all_gone()


@pytest.mark.parametrize("moment", ["first claim", "one joined", "formed", "first worker runs"])
def test_a_clean_end_at_any_moment(job_folder: Any, endpoint: str, moment: str) -> None:
    """The same with SIGTERM: whoever leaves says so, and ends with 143."""
    agents = started(job_folder, endpoint, "meet()\ntime.sleep(0.2)")
    until(lambda: MOMENTS[moment](job_folder), moment)
    leaver = agents.pop(list(MOMENTS).index(moment) % 3)
    leaver.signal(signal.SIGTERM)
    assert leaver.end() in (0, 143), leaver.text
    assert [agent.end() for agent in agents] == [0, 0], "".join(agent.text for agent in agents)
    job_folder.all_gone()


# --- at the endpoint: other jobs, other services, and bytes that are no protocol --------------------------------------


WAITS = "meet()\nwhile not os.path.exists('finish'): time.sleep(0.02)\n"


def mine(endpoint: str) -> tuple[str, ...]:
    return c10d(endpoint, "2", "--rdzv-id", "mine")


@pytest.mark.parametrize(
    ("change", "both"),
    [
        (("--rdzv-id", "yours"), ("mine", "yours")),
        (("--nnodes", "3"), ("2", "3")),
        (("--rdzv-conf", "token_file=token"), ("token",)),
    ],
)
def test_another_job_is_refused(job_folder, endpoint: str, change: tuple[str, ...], both: tuple[str, ...]) -> None:
    (job_folder.folder / "token").write_text("secret-of-this-job")
    script = job_folder.script("meet()")
    host = job_folder.start(*mine(endpoint), script)
    job_folder.joined(1)
    stranger = job_folder.ends(2, *mine(endpoint), *change, script)
    assert all(word in stranger.text for word in both), stranger.text
    assert "Traceback" not in stranger.text
    assert len(stranger.text.splitlines()) <= 4
    guest = job_folder.start(*mine(endpoint), script)
    assert (host.end(), guest.end()) == (0, 0), "the job is unharmed"


def test_a_second_job_of_one_node_is_refused(job_folder, endpoint: str) -> None:
    """Two lines on one endpoint, neither of them with a name: the second one is no spare of the first."""
    one = c10d(endpoint, "1")
    host = job_folder.start(*one, job_folder.script(WAITS))
    job_folder.wait(1, "up")
    second = job_folder.ends(2, *one, job_folder.script("note('never')", name="other.py"))
    assert "HF103" in second.text
    assert "--rdzv-id" in second.text
    (job_folder.folder / "finish").touch()
    assert host.end() == 0, host.text
    assert job_folder.trail("never") == []


def test_two_tokens(job_folder, endpoint: str) -> None:
    script = job_folder.script("meet()")
    host = job_folder.start(*mine(endpoint), script, env={"HOLDFAST_TOKEN": "one-secret-of-the-job"})
    job_folder.joined(1)
    stranger = job_folder.ends(2, *mine(endpoint), script, env={"HOLDFAST_TOKEN": "another-secret-entirely"})
    assert "token" in stranger.text
    assert "secret" not in stranger.text + host.text
    guest = job_folder.start(*mine(endpoint), script, env={"HOLDFAST_TOKEN": "one-secret-of-the-job"})
    assert (host.end(), guest.end()) == (0, 0), host.text
    assert "HOLDFAST_TOKEN" not in str(job_folder.trail())


FOREIGN = """
import socket, sys, time
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    print("up", flush=True)
    while True:
        connection, _ = server.accept()
        connection.sendall(b"220 mail.example.org ESMTP\\r\\n")
        connection.recv(1000)
"""


def test_the_port_is_a_foreign_services(job_folder, endpoint: str) -> None:
    port = endpoint.rpartition(":")[2]
    foreign = subprocess.Popen([sys.executable, "-c", FOREIGN, port], stdout=subprocess.PIPE)
    try:
        foreign.stdout.readline()
        agent = job_folder.ends(2, *mine(endpoint), job_folder.script("meet()"))
        assert f"{foreign.pid}" in agent.text
        assert "python" in agent.text
        assert "HF109" in agent.text
        assert len(agent.text.splitlines()) <= 2
    finally:
        foreign.kill()
        foreign.communicate()


NOISE = {
    "garbage": os.urandom(300),
    "http": b"GET / HTTP/1.1\r\nHost: holdfast\r\n\r\n",
    "tls": bytes.fromhex("1603010200010001fc0303") + b"\0" * 200,
    "torn": b"HOLDFAST",
    "oversized": b"\xff" * 70_000,
}


def test_noise_at_a_running_job(job_folder, endpoint: str) -> None:
    """Each costs its connection and one line."""
    args = (*mine(endpoint), job_folder.script(WAITS))
    agents = [job_folder.start(*args) for _ in range(2)]
    job_folder.wait(2, "up")
    host = coordinators_first(agents)[0]
    address = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
    for count, noise in enumerate(NOISE.values(), start=1):
        with socket.create_connection(address, timeout=limit_s(10)) as stranger:
            stranger.sendall(noise)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(limit_s(10))
            try:
                while stranger.recv(4096):
                    pass
            except ConnectionResetError:
                pass
        until(lambda: host.text.count("dropped a connection from 127.0.0.1") >= count, lambda: host.text)  # noqa: B023
    (job_folder.folder / "finish").touch()
    assert [agent.end() for agent in agents] == [0, 0]
    assert host.text.count("\n") == len(NOISE), host.text
    assert len(job_folder.trail("up")) == 2


# --- nothing that a job starts finds the job's secret in its environment, nor in that of its launcher -----------------


SECRET = "a-secret-of-32-characters-0123456"

LOOKS = """
def environment(pid):
    with open(f"/proc/{pid}/environ", "rb") as file:
        return file.read()

def parents(pid):
    while pid > 1:
        yield pid
        with open(f"/proc/{pid}/stat", "rb") as file:
            pid = int(file.read().rpartition(b")")[2].split()[1])
        if f"AGENT={os.environ['AGENT']}".encode() not in environment(pid):
            return

child = subprocess.run(["env"], capture_output=True, text=True).stdout
secret = os.environ["WANTED"].encode()[::-1]
note("found", own=[name for name, value in os.environ.items() if secret in value.encode()],
     child=secret.decode() in child, above=[secret in environment(pid) for pid in parents(os.getpid())])
"""


@pytest.mark.parametrize(
    "given",
    [
        {"HOLDFAST_TOKEN": SECRET},
        {"PET_RDZV_CONF": f"password={SECRET}"},
    ],
    ids=["token", "password"],
)
def test_no_worker_has_the_secret(job_folder, given: dict[str, str]) -> None:
    env = {**given, "WANTED": SECRET[::-1]}
    # Executed, as users do: a forked agent has the memory of its parent.
    job_folder.ends(
        0, "--standalone", job_folder.script(LOOKS), env=env, program=(sys.executable, "-m", "holdfast", "run")
    )
    (found,) = job_folder.trail("found")
    assert found["own"] == []
    assert not found["child"]
    assert len(found["above"]) >= 3, "worker, supervisor, agent"
    assert not any(found["above"]), found
