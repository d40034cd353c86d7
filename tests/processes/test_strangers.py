"""At the endpoint: other jobs, other services, and bytes that are no protocol."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from tests.support.limits import limit_s, until

WAITS = "meet()\nwhile not os.path.exists('finish'): time.sleep(0.02)\n"


def c10d(endpoint: str, *more: str) -> tuple[str, ...]:
    return ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "mine", *more)


@pytest.mark.parametrize(
    ("change", "both"),
    [
        (("--rdzv-id", "yours"), ("mine", "yours")),
        (("--nnodes", "3"), ("2", "3")),
        (("--rdzv-conf", "token_file=token"), ("token",)),
    ],
)
def test_another_job_is_refused(site, endpoint: str, change: tuple[str, ...], both: tuple[str, ...]) -> None:
    (site.folder / "token").write_text("secret-of-this-job")
    script = site.script("meet()")
    host = site.start(*c10d(endpoint), script)
    site.joined(1)
    code, stranger = site.run(*c10d(endpoint), *change, script)
    assert code == 2, stranger.text
    assert all(word in stranger.text for word in both), stranger.text
    assert "Traceback" not in stranger.text
    assert len(stranger.text.splitlines()) <= 3
    guest = site.start(*c10d(endpoint), script)
    assert (host.end(), guest.end()) == (0, 0), "the job is unharmed"


def test_a_second_job_of_one_node_is_refused(site, endpoint: str) -> None:
    """Two lines on one endpoint, neither of them with a name: the second one is no spare of the first."""
    one = ("--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
    host = site.start(*one, site.script(WAITS))
    site.wait(1, "up")
    code, second = site.run(*one, site.script("note('never')", name="other.py"))
    assert code == 2, second.text
    assert "HF103" in second.text
    assert "--rdzv-id" in second.text
    (site.folder / "finish").touch()
    assert host.end() == 0, host.text
    assert site.trail("never") == []


def test_two_tokens(site, endpoint: str) -> None:
    script = site.script("meet()")
    host = site.start(*c10d(endpoint), script, env={"HOLDFAST_TOKEN": "one-secret-of-the-job"})
    site.joined(1)
    stranger = site.start(*c10d(endpoint), script, env={"HOLDFAST_TOKEN": "another-secret-entirely"})
    assert stranger.end() == 2, stranger.text
    assert "token" in stranger.text
    assert "secret" not in stranger.text + host.text
    guest = site.start(*c10d(endpoint), script, env={"HOLDFAST_TOKEN": "one-secret-of-the-job"})
    assert (host.end(), guest.end()) == (0, 0), host.text
    assert "HOLDFAST_TOKEN" not in str(site.trail())


FOREIGN = """
import socket, sys, time
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    print("up", flush=True)
    while True:
        connection, _ = server.accept()
        connection.sendall(b"220 mail.example.org ESMTP\\r\\n")
        connection.recv(1000)
"""


def test_the_port_is_a_foreign_services(site, endpoint: str) -> None:
    port = endpoint.rpartition(":")[2]
    foreign = subprocess.Popen([sys.executable, "-c", FOREIGN, port], stdout=subprocess.PIPE)
    try:
        foreign.stdout.readline()
        code, agent = site.run(*c10d(endpoint), site.script("meet()"))
        assert code == 2, agent.text
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


def test_noise_at_a_running_job(site, endpoint: str) -> None:
    """Each costs its connection and one line."""
    args = (*c10d(endpoint), site.script(WAITS))
    agents = [site.start(*args) for _ in range(2)]
    site.wait(2, "up")
    host = max(agents, key=lambda agent: len(agent.events("coordinator.joined")))
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
    (site.folder / "finish").touch()
    assert [agent.end() for agent in agents] == [0, 0]
    assert host.text.count("\n") == len(NOISE), host.text
    assert len(site.trail("up")) == 2


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
def test_no_worker_has_the_secret(site, given: dict[str, str]) -> None:
    env = {**given, "WANTED": SECRET[::-1]}
    # Executed, as users do: a forked agent has the memory of its parent.
    agent = site.start("--standalone", site.script(LOOKS), env=env, program=(sys.executable, "-m", "holdfast", "run"))
    assert agent.end() == 0, agent.text
    (found,) = site.trail("found")
    assert found["own"] == []
    assert not found["child"]
    assert len(found["above"]) >= 3, "worker, supervisor, agent"
    assert not any(found["above"]), found
