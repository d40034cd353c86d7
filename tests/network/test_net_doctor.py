"""`holdfast doctor` on pretend hosts: all well, a pair cut, a firewall, a node missing, versions and names that differ."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.network.hosts import PretendHosts, Program, why_not
from tests.support.documents import checked
from tests.support.limits import limit_s, until

END_S_MAX = 60.0
TIMEOUT_S = round(limit_s(15))
"""Of a check to which all come: also the slowest is there by then."""
WAITED_S = round(limit_s(3))
"""Of a check to which somebody does not come, so that all of this time passes; those who do come are there by then. Those
that the endpoint's node waits for are started before it: its time begins when it listens."""
LINE = ("--nnodes", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:29400", "--rdzv-id", "check")
OF_THE_MACHINE = {"HF510", "HF511", "HF514", "HF515", "HF516", "HF530", "HF563", "HF564"}
"""What the machine that runs the tests may well have, and how quick it is just now."""

FAKE_TORCH = """
class distributed:
    is_available = staticmethod(lambda: True)
    is_gloo_available = staticmethod(lambda: True)
class version:
    cuda = None
"""


REAL_TO_REDUCE = """
import sys
if "reduce" in sys.argv:
    sys.path.remove(__file__.rpartition("/torch/")[0])
    del sys.modules["torch"]
    import torch
else:
    exec({fake!r})
"""


class Consultation:
    """Doctors of several hosts, and what each said."""

    def __init__(self, hosts: PretendHosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self._programs: dict[int, Program] = {}

    def torch(self, version: str) -> dict[str, str]:
        """An environment in which torch is of this version, says its own process."""
        package = self.folder / f"torch-{version}" / "torch"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(f"__version__ = {version!r}\n{FAKE_TORCH}")
        return {"PYTHONPATH": str(package.parent)}

    def torch_to_reduce_with(self) -> dict[str, str]:
        """An environment in which the facts are those of the fake, which is quick, and the all-reduce is torch's own."""
        made = self.torch("2.13.0")
        package = Path(made["PYTHONPATH"]) / "torch" / "__init__.py"
        package.write_text(REAL_TO_REDUCE.format(fake=package.read_text()))
        return made

    def call(self, number: int, *more: str, env: Mapping[str, str] | None = None) -> None:
        """Start a doctor on this host; without an environment torch is a fake, which is quick."""
        out = self.folder / f"node{number}.json"
        line = (sys.executable, "-m", "holdfast", "doctor", "--json", *LINE, *more)
        shell = ["sh", "-c", f'exec "$@" >{out} 2>{out}.err', "sh", *line]
        chosen = self.torch("2.13.0") if env is None else dict(env)
        self._programs[number] = self.hosts[number].start(shell, cwd=self.folder, env=chosen)

    def call_all(self, numbers: tuple[int, ...], *more: str, env: Mapping[str, str] | None = None) -> None:
        for number in numbers:
            self.call(number, *more, env=env)

    def answer(self, number: int) -> dict[str, Any]:
        """What this host's doctor said in the end; its exit code is the one that it names."""
        program = self._programs[number]
        until(lambda: not program.running, lambda: f"node{number}'s doctor to end: {self.errors(number)}", END_S_MAX)
        code = program.wait(limit_s(1.0))
        try:
            told: dict[str, Any] = checked("doctor", (self.folder / f"node{number}.json").read_text())
        except ValueError:
            pytest.fail(f"node{number}'s doctor ended with {code}: {self.errors(number)}")
        assert told["exit_code"] == code
        return told

    def errors(self, number: int) -> str:
        return (self.folder / f"node{number}.json.err").read_text()


@pytest.fixture
def consult(tmp_path: Path) -> Iterator[Callable[[int], Consultation]]:
    if why := why_not():
        pytest.skip(why)
    with ExitStack() as stack:
        yield lambda count: Consultation(stack.enter_context(PretendHosts(count, tmp_path / "hosts")), tmp_path)


def problems(told: dict[str, Any]) -> dict[str, str]:
    """Codes of what is not well, and what was said of each."""
    found = [each for each in told["findings"] if each["level"] != "pass"]
    return {each["code"]: each["why"] for each in found if each["code"] not in OF_THE_MACHINE}


def said(told: dict[str, Any], code: str) -> list[str]:
    return [each["why"] for each in told["findings"] if each["code"] == code]


def test_three_nodes_on_which_all_is_well(consult) -> None:
    doctors: Consultation = consult(3)
    doctors.call_all((1, 2, 3), "--all-reduce", "off")
    for number in (1, 2, 3):
        told = doctors.answer(number)
        assert problems(told) == {}, told
        assert told["nodes"][0]["name"] == "node1"
        assert sorted(node["name"] for node in told["nodes"]) == ["node1", "node2", "node3"]
        assert said(told, "HF560") == ["all 6 connections between 3 nodes work, each pair both ways"]
        ends = {(pair["from"], pair["to"]) for pair in told["pairs"]}
        assert ends == {(f"node{one}", f"node{other}") for one in (1, 2, 3) for other in (1, 2, 3) if one != other}
        for pair in told["pairs"]:
            assert pair["names"] == [doctors.hosts[int(pair["to"][-1])].v4]
            assert pair["latency_s"] > 0
            assert pair["bytes_s"] > 0
            assert abs(pair["clock_offset_s"]) < limit_s(1)


def test_a_pair_that_is_cut_is_named_on_all_nodes(consult) -> None:
    doctors: Consultation = consult(3)
    doctors.hosts.partition([2], [3])
    doctors.call_all((1, 2, 3))
    for number in (1, 2, 3):
        told = doctors.answer(number)
        assert told["level"] == "fatal"
        assert set(problems(told)) == {"HF560"}, told
        (text,) = said(told, "HF560")
        assert "node2 → node3 (10.77.0.3:" in text
        assert "node3 → node2 (10.77.0.2:" in text
        assert text.count("timed out") == 2
        assert "node1" not in text
        assert said(told, "HF570") == ["not tried: not all pairs work"]


def test_a_firewall_that_opens_the_endpoint_alone_is_found_one_way(consult) -> None:
    doctors: Consultation = consult(3)
    wall = "add table inet wall; add chain inet wall in { type filter hook input priority 0; }; "
    wall += "add rule inet wall in tcp flags syn / syn,ack tcp dport != 29400 ip saddr 10.77.0.2 reject with tcp reset"
    doctors.hosts[1].run(["nft", wall])
    doctors.call_all((1, 2, 3))
    for number in (1, 2, 3):
        (text,) = said(doctors.answer(number), "HF560")
        assert "node1 → node2 works" in text
        assert "node2 → node1 (10.77.0.1:" in text
        assert "refused" in text
        assert "node3" not in text


def test_a_node_that_does_not_come_is_missed(consult) -> None:
    doctors: Consultation = consult(3)
    doctors.call_all((2, 1), "--timeout", str(WAITED_S), "--all-reduce", "off")
    for number in (1, 2):
        told = doctors.answer(number)
        assert told["level"] == "retry"
        assert problems(told) == {"HF550": "2 of 3 joined: node1, node2"}
        assert said(told, "HF560") == ["all 2 connections between 2 nodes work, each pair both ways"]


def test_a_node_that_cannot_reach_the_endpoint_says_so(consult) -> None:
    doctors: Consultation = consult(3)
    doctors.hosts.partition([1], [3])
    doctors.call_all((3, 2, 1), "--timeout", str(WAITED_S), "--all-reduce", "off")
    assert problems(doctors.answer(2)) == {"HF550": "2 of 3 joined: node1, node2"}
    told = doctors.answer(3)
    assert told["level"] == "fatal"
    assert set(problems(told)) == {"HF551"}
    assert f"no answer at node1:29400 within {WAITED_S} s: 10.77.0.1: no answer" in problems(told)["HF551"]


def test_different_versions_of_torch_and_a_name_that_means_something_else_are_named(consult) -> None:
    doctors: Consultation = consult(3)
    doctors.hosts[2].hosts_file.write_text(doctors.hosts.phone_book().replace("10.77.0.3 node3", "10.77.0.9 node3"))
    for number, version in ((1, "2.13.0"), (2, "2.9.1"), (3, "2.13.0")):
        doctors.call(number, "--all-reduce", "off", env=doctors.torch(version))
    for number in (1, 2, 3):
        told = doctors.answer(number)
        found = problems(told)
        assert told["level"] == "fatal"
        assert found.pop("HF561") == "node3 is 10.77.0.9 on node2, but is reached at 10.77.0.3"
        (text,) = found.values()
        assert "torch 2.9.1 on node2" in text
        assert "torch 2.13.0 on node1, node3" in text or "torch 2.13.0 on node3, node1" in text


def test_another_token_and_a_job_at_the_endpoint_are_told_apart(consult) -> None:
    doctors: Consultation = consult(2)
    doctors.call(2, "--timeout", str(TIMEOUT_S), env={**doctors.torch("2.13.0"), "HOLDFAST_TOKEN": "another"})
    doctors.call(1, "--timeout", str(WAITED_S), env={**doctors.torch("2.13.0"), "HOLDFAST_TOKEN": "one"})
    told = doctors.answer(2)
    assert "HF552" in problems(told), told
    assert "token" in problems(told)["HF552"]
    assert problems(doctors.answer(1)) == {"HF550": "1 of 3 joined: node1"}


def test_the_witness_is_checked_and_the_job_is_found_after_a_succession(consult) -> None:
    """Before the job the witness answers. Later the first host is lost, and the witness knows where the job is."""
    doctors: Consultation = consult(3)
    line = ("--nnodes", "1:2", "--rdzv-endpoint", "node1:29400,node3:29500", "--timeout", str(TIMEOUT_S))
    screens = {name: doctors.folder / f"{name}.txt" for name in ("witness", "node1", "node2")}

    def start(number: int, name: str, *words: str) -> None:
        with screens[name].open("wb") as file:
            doctors.hosts[number].start([sys.executable, "-m", *words], cwd=doctors.folder, stdout=file)

    start(3, "witness", "holdfast", "witness", "--bind", "10.77.0.3:29500")
    until(lambda: "listens" in screens["witness"].read_text(), screens["witness"].read_text, END_S_MAX)
    doctors.call_all((1, 2), *line, "--all-reduce", "off")
    for number in (1, 2):
        told = doctors.answer(number)
        assert problems(told) == {}
        assert said(told, "HF555") == ["one answers at node3:29500"]
    logs = str(doctors.folder / "logs")
    job = ("holdfast.run", *LINE, *line[:-2], "--rdzv-conf", "lease=3600", "--log-dir", logs, "--no-python")
    for number in (1, 2):
        start(number, f"node{number}", *job, "sleep", "600")

    def started_with_three_votes() -> bool:
        told = "".join(path.read_text() for path in Path(logs).glob("*/events.jsonl"))
        return "coordinator.started" in told and re.search(r'"voters": ?3', told) is not None

    until(started_with_three_votes, screens["node2"].read_text, END_S_MAX)
    doctors.hosts[1].kill()
    until(lambda: "is the coordinator now" in screens["node2"].read_text(), screens["node2"].read_text, END_S_MAX)
    doctors.call(2, *line)
    told = doctors.answer(2)
    assert told["level"] == "retry"
    assert "a job runs at 10.77.0.2:" in problems(told)["HF553"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_a_host_name_that_means_loopback_breaks_the_all_reduce_and_its_fix_mends_it(consult) -> None:
    """Debian's 127.0.1.1: every pair works, and gloo announces loopback to the others."""
    doctors: Consultation = consult(2)
    for host in doctors.hosts:
        trap = doctors.hosts.phone_book().replace(f"{host.v4} {host.name}\n", f"127.0.1.1 {host.name}\n")
        host.hosts_file.write_text(trap)
    line = ("--nnodes", "2", "--rdzv-endpoint", "10.77.0.1:29400")
    # The ranks have to have imported torch by then, and the first ones wait for each other until then.
    for fix, level, timeout in (
        ({}, "fatal", str(round(limit_s(6)))),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "pass", str(round(limit_s(30)))),
    ):
        doctors.call_all((1, 2), *line, "--timeout", timeout, env={**doctors.torch_to_reduce_with(), **fix})
        for number in (1, 2):
            told = doctors.answer(number)
            (reduced,) = [each for each in told["findings"] if each["code"] == "HF570"]
            assert reduced["level"] == level, told
            if not fix:
                assert "GLOO_SOCKET_IFNAME" in reduced["fix"]
                assert "node2 eth0" in reduced["fix"]
                assert "HF532" in problems(told)
