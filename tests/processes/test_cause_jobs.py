"""Causes in real jobs: what the verdict is called, what the machine adds, nodes that differ, a culprit slower than its victims."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


def nodes(endpoint: str) -> tuple[str, ...]:
    return ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--nproc-per-node", "1")


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        ("import flash_attn", "HF211", "No module named 'flash_attn'"),
        ("open('/no/such/file')", "HF217", "/no/such/file"),
        ("open('/dev/full', 'w').write('x' * 100_000)", "HF214", "% full"),
        ("import argparse\nargparse.ArgumentParser().parse_args(['--lr'])", "HF232", "unrecognized arguments: --lr"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "HF223", "SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGTERM)\nhold()", "HF235", "SIGTERM"),
    ],
)
def test_the_cause_has_a_code_and_its_machine_adds_what_it_knows(site, body: str, code: str, told: str) -> None:
    _, agent = site.run("--standalone", "--nproc-per-node", "2", site.script(f"if RANK == 1: hold()\n{body}"))
    assert f"holdfast: {code}: job FAILED" in agent.text
    assert told in agent.text
    assert agent.verdict["code"] == code


def test_who_holds_the_port_is_told(site) -> None:
    """The other rank does, and waits with it until the verdict is made."""
    body = """
import socket
sock = socket.socket()
if RANK == 1:
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    note("held", number=sock.getsockname()[1])
    hold()
def held():
    return notes("held")
while not held():
    time.sleep(0.01)
try:
    sock.bind(("127.0.0.1", held()[0]["number"]))
except OSError as error:
    raise OSError(error.errno, f"{error.strerror}: port {held()[0]['number']}")
"""
    _, agent = site.run("--standalone", "--nproc-per-node", "2", site.script(body))
    (held,) = site.trail("held")
    assert agent.verdict["code"] == "HF213"
    assert f"port {held['number']} is held by pid {held['pid']} " in agent.text


def test_a_culprit_that_ends_more_slowly_than_its_victim(site) -> None:
    body = """
if RANK == 1:
    def slowly(*what):
        sys.__excepthook__(*what)
        meet("raised")
        time.sleep(20)
    sys.excepthook = slowly
    raise KeyError("tokens")
meet("raised")
import socket
ours, theirs = socket.socketpair()
theirs.close()
ours.send(b"to a peer that is gone")
"""
    done, agent = site.run("--standalone", "--nproc-per-node", "2", site.script(body))
    assert (agent.verdict["verdict"]["culprit"]["rank"], agent.verdict["code"]) == (1, "HF201")
    assert agent.text.rstrip().endswith("KeyError: 'tokens'")
    assert done == 1, "not the signal by which we hastened its end"


def test_nodes_with_different_scripts_are_told_on_both(site, free_port: Callable[[], int]) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    one = site.script("meet()")
    other = Path(str(one)).with_name("other.py")
    other.write_text(Path(str(one)).read_text() + "\n# changed\n")
    agents = [site.start(*nodes(endpoint), script) for script in (one, other)]
    assert [agent.end() for agent in agents] == [0, 0], agents[0].text + agents[1].text
    assert [agent.text.count("HF307: the script is not the same file") for agent in agents] == [1, 1]


def test_nodes_with_different_torch_are_told_without_importing_it(
    site, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    package = tmp_path / "other" / "torch"
    package.mkdir(parents=True)
    (package / "version.py").write_text("__version__ = '1.0.0+other'\nraise SystemExit('nobody imports this')\n")
    path = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    script = site.script("meet()")
    agents = [site.start(*nodes(endpoint), script, env=more) for more in ({}, {"PYTHONPATH": path})]
    assert [agent.end() for agent in agents] == [0, 0], agents[0].text + agents[1].text
    for agent in agents:
        assert agent.text.count("HF307: torch differs: ") == 1, agent.text
        assert "1.0.0+other" in agent.text


def test_equal_nodes_say_nothing(site, free_port: Callable[[], int]) -> None:
    endpoint, script = f"127.0.0.1:{free_port()}", site.script("meet()")
    agents = [site.start(*nodes(endpoint), script) for _ in range(2)]
    assert [agent.end() for agent in agents] == [0, 0]
    assert "HF307" not in agents[0].text + agents[1].text


def test_the_rank_that_left_is_named_with_what_it_printed_last(site) -> None:
    body = """
if RANK == 0:
    note("leaves")
    print("no batches left for this rank")
    sys.exit(0)
while not notes("leaves"):
    time.sleep(0.01)
pid = notes("leaves")[0]["pid"]
while os.path.exists(f"/proc/{pid}/stat") and " Z " not in open(f"/proc/{pid}/stat").read():
    time.sleep(0.01)
raise RuntimeError("[/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:8123")
"""
    code, agent = site.run("--standalone", "--nproc-per-node", "2", site.script(body))
    assert (code, agent.verdict["code"]) == (1, "HF229"), agent.text
    assert agent.verdict["verdict"]["culprit"]["rank"] == 0
    assert "rank 0 on " in agent.verdict["verdict"]["cause"]
    assert agent.verdict["verdict"]["cause"].endswith("; it said last: no batches left for this rank")


def test_the_stacks_of_those_that_did_not_come_are_taken_before_they_are_stopped(site) -> None:
    body = """
def oversleeps():
    meet("asleep")
    time.sleep(600)
if RANK == 1:
    oversleeps()
meet("asleep")
time.sleep(0.5)
raise RuntimeError("[/x/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 500ms for recv operation to complete")
"""
    code, agent = site.run("--standalone", "--nproc-per-node", "2", site.script(body))
    verdict = agent.verdict["verdict"]
    assert (code, agent.verdict["code"], verdict["culprit"]["rank"]) == (1, "HF209", 1), agent.text
    assert "rank 1 on " in verdict["cause"]
    assert "did not come: it was in time.sleep at train.py:" in verdict["cause"]
    assert "rank 0 waited for it in vain, at train.py:" in verdict["cause"]
