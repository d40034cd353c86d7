"""Lists of hosts, what ssh complains of, what hosts tell: pure."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.launchers.ssh import hosts
from holdfast.launchers.ssh.hosts import (
    AgentExit,
    Discovery,
    Expected,
    HostFacts,
    HostSpec,
    expected_from,
    parse_file,
    parse_list,
    problems,
    remarks,
    rendezvous_address,
    same_machine,
    select,
)
from holdfast.launchers.ssh.launcher import chosen_end
from holdfast.launchers.ssh.session import connection_message, explain, has_too_many_logins, last_message
from holdfast.protocol.errors import HostsError
from tests.support.limits import limit_s
from tests.support.tables import tables

TABLES = tables(__file__)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [HostSpec("a")]),
        ("a:8,b:2, c ,", [HostSpec("a", 8), HostSpec("b", 2), HostSpec("c")]),
        ("me@a:8", [HostSpec("me@a", 8)]),
        ("[fe80::1],me@[::1]:4", [HostSpec("fe80::1"), HostSpec("me@::1", 4)]),
        ("10.0.0.1:1", [HostSpec("10.0.0.1", 1)]),
    ],
)
def test_lists(text: str, hosts: list[HostSpec]) -> None:
    assert parse_list(text) == hosts


@pytest.mark.parametrize(("text", "said"), TABLES["bad_lists"])
def test_bad_lists(text: str, said: str) -> None:
    with pytest.raises(HostsError, match=said.replace("$", r"\$")):
        parse_list(text)


def test_hostfiles_of_all_kinds() -> None:
    text = "# my hosts\nn1 slots=8 max_slots=16\n\nn2:4 # the old one\nme@n3\n[::1] slots=2\r\n"
    assert parse_file(text, "f") == [HostSpec("n1", 8), HostSpec("n2", 4), HostSpec("me@n3"), HostSpec("::1", 2)]


@pytest.mark.parametrize(("text", "said"), TABLES["bad_hostfiles"])
def test_bad_hostfiles(text: str, said: str) -> None:
    with pytest.raises(HostsError, match=said):
        parse_file(text, "f")


def test_include_and_exclude() -> None:
    hosts = parse_list("n1:2,n2,me@m1")

    def left(include: str, exclude: str) -> list[str]:
        return [spec.name for spec in select(hosts, include, exclude)]

    assert left("", "") == ["n1", "n2", "me@m1"]
    assert left("m1,n1", "") == ["n1", "me@m1"]
    assert left("n*", "n2") == ["n1"]
    assert left("", "n?") == ["me@m1"]
    with pytest.raises(HostsError, match=r"--exclude x: no such host; there are n1, n2, m1"):
        left("", "x")
    with pytest.raises(HostsError, match="leave no host"):
        left("n1", "n1")


B = HostSpec("b", 2)


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("ssh: Could not resolve hostname b: Name or service not known\r\n", 255, "does not resolve"),
        ("ssh: connect to host b port 22: Connection refused\r\n", 255, "cannot be reached by ssh"),
        ("kex_exchange_identification: read: Connection reset by peer\r\n", 255, "cannot be reached"),
        ("b: Permission denied (publickey,password).\r\n", 255, "no login without a password"),
        ("@@@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", 255, "has changed"),
        ("No ED25519 host key is known for b\nHost key verification failed.\n", 255, "not known here"),
        ("sh: 1: exec: /x/python: not found\n", 127, "/x/python cannot be started there"),
        ("Killed\n", 137, "/x/python ended with 137 there"),
        ("too old for holdfast: Python 3.6.8\n", 1, "/x/python is Python 3.6.8 there"),
        ("", -9, "ssh was killed by signal 9"),
        ("", None, "no login within 30 s"),
        ("Bad configuration option: foo\n", 255, "ssh failed (Bad configuration option: foo)"),
    ],
)
def test_complaints_name_the_host_and_what_to_do(text: str, code: int | None, said: str) -> None:
    line = explain(B, text, code, "/x/python")
    assert line.startswith("host b: ")
    assert said in line
    assert "\n" not in line


def test_words_of_a_login_shell_that_lets_nobody_in() -> None:
    assert "(Not available)" in explain(B, "", 1, "/x/python", "Not available.\n")


def test_words_of_ssh() -> None:
    assert has_too_many_logins("Warning: x\nkex_exchange_identification: Connection closed by remote host\r\n")
    assert not has_too_many_logins("ssh: connect to host b port 22: Connection refused\r\n")
    assert last_message("") == ""
    assert last_message("@@@@\nWarning: Permanently added 'b' to the list.\r\n\r\n") == ""
    assert connection_message("Timeout, server b not responding.\r\n") == "Timeout, server b not responding"
    assert connection_message("node1:0| Connection to my database\n") == ""


SAME = Expected(
    python="3.11.7", holdfast="1", torch="2.13", script="ab" * 32, path="train.py", cwd="/w", interpreter="/p"
)
FACTS = HostFacts(host="b", python="3.11.7", holdfast="1", torch="2.13", script="ab" * 32, cores=4, machine="m")


def differing(**changes: object) -> list[str]:
    return problems(
        B, HostFacts(**{**{name: getattr(FACTS, name) for name in FACTS.__struct_fields__}, **changes}), SAME, 2
    )


@pytest.mark.parametrize(("changes", "said"), TABLES["differences"])
def test_what_differs_is_one_line_with_the_host(changes: dict[str, object], said: str) -> None:
    (line,) = differing(**changes)
    assert line.startswith("host b: ")
    assert said in line


def test_hosts_that_are_alike() -> None:
    assert differing() == []
    assert remarks(B, HostFacts(host="b", python="", gpus=1), 2) == ["host b: 2 workers, but 1 GPU there"]
    assert remarks(B, FACTS, 2) == []


def test_what_this_machine_does_not_know_the_first_host_says() -> None:
    here = Expected(python="3.11.7", holdfast="1", cwd="/w", interpreter="/p", path="train.py")
    assert expected_from(here, FACTS) == SAME


def test_two_names_of_one_machine() -> None:
    other = HostFacts(host="c", python="", machine="n")
    assert same_machine([(HostSpec("a"), FACTS), (HostSpec("c"), other)]) == []
    ((spec, line),) = same_machine([(HostSpec("a"), FACTS), (HostSpec("c"), other), (B, FACTS)])
    assert spec == B
    assert "host b is the same machine as a" in line


def test_where_they_meet() -> None:
    far = HostFacts(host="a", python="", address="10.0.0.1", client="10.0.0.9")
    here = HostFacts(host="h", python="", address="127.0.0.1", client="127.0.0.1")
    assert rendezvous_address(far, [here]) == "10.0.0.1"
    assert rendezvous_address(here, [far]) == "10.0.0.9"
    assert rendezvous_address(here, []) == "127.0.0.1"
    assert rendezvous_address(here, [here]) == ""


def test_whose_end_is_the_jobs() -> None:
    a, b, c = HostSpec("a"), HostSpec("b"), HostSpec("c")
    left = (a, AgentExit(code=143, kind="signalled"))
    done = (b, AgentExit(code=0, kind="succeeded"))
    failed = (c, AgentExit(code=7, kind="failed"))
    assert chosen_end([left, done], ["a", "b"]) == done
    assert chosen_end([left, failed], ["a", "b", "c"]) == failed
    assert chosen_end([(b, AgentExit(code=2)), left], ["a", "b"]) == left
    assert chosen_end([], ["a"]) is None


# --- the user's program that tells which hosts there are: when its answer counts --------------------------------------


DISCOVERY_S = round(limit_s(0.25), 1)
"""A program that answers at all does so within this time on a slow machine too."""


async def test_an_answer_counts_when_it_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "DISCOVERY_S", DISCOVERY_S)
    program, told = tmp_path / "hosts", list[str]()

    async def answers(*texts: str) -> list[list[HostSpec] | None]:
        one = Discovery(str(program), told.append)
        found = []
        for text in texts:
            program.write_text(text)
            program.chmod(0o755)
            found.append(await one.ask())
        return found

    good, nothing = "#!/bin/sh\necho a:2; echo; echo b", "#!/bin/sh\n"
    two = [HostSpec("a", 2), HostSpec("b")]
    assert await answers(nothing, good, nothing, good) == [[], two, None, two]
    assert told == [f"--host-discovery {program} no longer names any host; the hosts stay as they are"]
    told.clear()
    bad = [
        "#!/bin/sh\necho a; exit 3",
        "#!/bin/sh\necho a; exit 3",  # said once
        "#!/bin/sh\necho a; echo a:2",
        "#!/bin/sh\necho error: no route",
        "#!/bin/sh\nsleep 600",
        "#!/bin/sh\nsleep 600 & echo a",  # holds our pipe
        "#!/not/here\n",
    ]
    assert await answers(*bad) == [None] * len(bad)
    said = (
        "ended with 3",
        "a is listed twice",
        "line 1: 'error:'",
        f"no answer within {DISCOVERY_S:g} s",
        "No such file",
    )
    for line, part in zip(told, said, strict=True):
        assert part in line
        assert line.endswith("; the hosts stay as they are")
