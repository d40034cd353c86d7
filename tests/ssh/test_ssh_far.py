"""The far side by itself: sent to a bare Python as ssh would, with a stand-in for the agent. Needs no ssh and no root."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.launchers.ssh.hosts import HostSpec
from holdfast.launchers.ssh.session import FAR, client_line
from tests.conftest import alive
from tests.support.limits import limit_s, until

MARK = "\x1etest "
WAIT_S = 20.0
SILENCE_S = round(limit_s(0.5))
"""A beat that comes on time on a slow machine too is no silence."""
AGENT = """
import json, os, signal, sys, time

def run_command(name, argv):
    note = open(os.environ["NOTE"], "a", buffering=1)
    if "stubborn" in argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for name in ("SIGTERM", "SIGUSR1") if "stubborn" not in argv else ("SIGUSR1",):
        signal.signal(getattr(signal, name), lambda number, _: (note.write(json.dumps({"got": number}) + "\\n"), end(number)))
    def end(number):
        if number == signal.SIGTERM:
            os.write(int(argv[0]), json.dumps({"kind": "signalled", "text": "asked to"}).encode())
            os._exit(3)
    note.write(json.dumps({"pid": os.getpid(), "argv": argv, "cwd": os.getcwd(), "pwd": os.environ["PWD"], "x": os.environ.get("X")}) + "\\n")
    if "quick" in argv:
        print("its own line", flush=True)
        return 4
    while True:
        time.sleep(600)
"""


class Far:
    """One far side, at the other end of two pipes."""

    def __init__(self, folder: Path, silence_s: float = 60.0, grace_s: float = 0.3) -> None:
        self.note = folder / f"note{time.monotonic_ns()}"
        self.note.touch()
        self.env = {"NOTE": str(self.note), "X": "value", "PYTHONPATH": str(folder)}
        source = FAR.read_text()
        for name, value in (("SILENCE_S = 15.0", silence_s), ("LOSS_GRACE_S = 5.0", grace_s)):
            assert f"\n{name}\n" in source
            source = source.replace(name, f"{name.partition(' ')[0]} = {value}")
        data = source.encode()
        line = client_line(HostSpec("h"), sys.executable, len(data), "run")[-1]
        self.process = subprocess.Popen(
            ["sh", "-c", line],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            env={**os.environ, "SSH_CONNECTION": "10.0.0.9 1 127.0.0.1 22"},
        )
        self.send(data)

    def send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def ask(self, **more: Any) -> dict[str, Any]:
        request = {"mark": MARK, "env": self.env, "cwd": os.path.dirname(self.note), "script": "", "program": False}
        self.send(json.dumps({**request, **more}).encode() + b"\n")
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """The next marked line."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline().decode():
            if MARK in line:
                heard: dict[str, Any] = json.loads(line.partition(MARK)[2])
                return heard
        raise AssertionError("it says no more")

    def go(self, *argv: str, detach: bool = False, lock: str = "", also: bytes = b"") -> None:
        lock = lock or f"test-{self.note}"
        self.send(json.dumps({"argv": list(argv), "lock": lock, "detach": detach}).encode() + b"\n" + also)

    def notes(self, count: int) -> list[dict[str, Any]]:
        until(lambda: self.note.read_text().count("\n") >= count, f"{count} notes", WAIT_S)
        return [json.loads(line) for line in self.note.read_text().splitlines()]

    def hang_up(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def close(self) -> None:
        for note in self.notes(0):
            if "pid" in note and self.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(note["pid"], signal.SIGKILL)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self.process.kill()
        self.process.wait(limit_s(WAIT_S))


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "holdfast" / "cli").mkdir(parents=True)
    (tmp_path / "holdfast" / "__init__.py").touch()
    (tmp_path / "holdfast" / "version.py").write_text("__version__ = '7'\n")
    (tmp_path / "holdfast" / "cli" / "__init__.py").write_text(AGENT)
    made: list[Far] = []

    def make(**options: float) -> Far:
        made.append(Far(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_it_tells_of_its_host_and_runs_the_agent(far: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print()\n")
    one = far()
    facts = one.ask(script="train.py")
    assert (facts["host"], facts["holdfast"], facts["trouble"]) == (socket.gethostname(), "7", "")
    assert (facts["client"], facts["address"], len(facts["script"])) == ("10.0.0.9", "127.0.0.1", 64)
    one.go("quick", "a b")
    end = one.hear()
    assert end == {"end": 4}
    assert one.process.wait(limit_s(WAIT_S)) == 4
    (note,) = one.notes(1)
    assert note["argv"][1:] == ["quick", "a b"]
    assert (note["cwd"], note["pwd"], note["x"]) == (str(tmp_path), str(tmp_path), "value")


def test_the_port_it_holds_is_given_to_nobody_but_can_be_bound_by_its_agent(far: Any) -> None:
    one = far()
    port = one.ask()["port"]
    with socket.socket() as plain:  # noqa: SIM117
        with pytest.raises(OSError, match="in use"):
            plain.bind(("127.0.0.1", port))
    with socket.socket() as agents:
        agents.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        agents.bind(("127.0.0.1", port))
        agents.listen()


@pytest.mark.parametrize(
    ("request_", "trouble"),
    [
        ({"cwd": "/not/here"}, "cwd: No such file or directory"),
        ({"script": "gone.py"}, "script: No such file or directory"),
        ({"script": "gone", "program": True}, "script: no such executable"),
        ({"script": "sh", "program": True}, ""),
        ({"script": os.path.basename(sys.executable), "program": True, "env": {"PATH": "/not/here"}}, ""),
        ({"script": ""}, ""),
    ],
)
def test_what_is_missing(far: Any, request_: dict[str, Any], trouble: str) -> None:
    assert far().ask(**request_)["trouble"] == trouble


def test_it_goes_away_when_nobody_tells_it_to_start(far: Any) -> None:
    one = far()
    one.ask()
    one.hang_up()
    assert one.process.wait(limit_s(WAIT_S)) == 0
    assert one.notes(0) == []


def test_signals_arrive_also_those_that_came_with_the_order(far: Any) -> None:
    one = far()
    one.ask()
    one.send(b"signal 10\n")  # for no agent yet
    one.go()
    one.notes(1)
    one.send(b"beat\nsignal 10\n")
    assert one.notes(2)[1] == {"got": 10}
    one.send(b"signal 15\n")
    assert one.hear() == {"end": 3, "kind": "signalled", "text": "asked to"}
    other = far()
    other.ask()
    other.go("stubborn", also=b"beat\nkill\n")
    assert other.hear() == {"end": 137}


def test_the_end_of_the_connection_ends_the_agent(far: Any) -> None:
    one = far()
    one.ask()
    one.go()
    one.notes(1)
    one.hang_up()
    assert one.hear()["end"] is None  # of the connection, not of the job
    assert one.process.wait(limit_s(WAIT_S)) == 3
    stubborn = far()
    stubborn.ask()
    stubborn.go("stubborn")
    stubborn.notes(1)
    stubborn.hang_up()
    assert stubborn.process.wait(limit_s(WAIT_S)) == 137


def beat_for_longer_than_a_silence(one: Far) -> None:
    for _ in range(6):
        one.send(b"beat\n")
        time.sleep(SILENCE_S / 4)
    assert one.process.poll() is None


def test_silence_is_a_lost_connection_and_beats_are_not(far: Any) -> None:
    one = far(silence_s=SILENCE_S)
    one.ask()
    one.go()
    one.notes(1)
    beat_for_longer_than_a_silence(one)
    assert one.hear() == {"end": None, "text": f"no message from the launcher for {SILENCE_S} s"}


def test_a_launcher_that_never_says_go_is_not_waited_for(far: Any) -> None:
    """A cable that is pulled while others log in sends no end of input."""
    one = far(silence_s=SILENCE_S)
    one.ask()
    beat_for_longer_than_a_silence(one)
    assert one.process.wait(limit_s(WAIT_S)) == 0


def test_a_detached_agent_goes_on(far: Any) -> None:
    one = far(silence_s=0.2, grace_s=0.1)
    one.ask()
    one.go(detach=True)
    (note,) = one.notes(1)
    one.hang_up()
    time.sleep(0.5)
    assert one.process.poll() is None
    os.kill(note["pid"], signal.SIGTERM)
    assert one.hear()["end"] == 3


def test_a_new_connection_takes_the_host_over(far: Any) -> None:
    old, new = far(), far()
    for each in (old, new):
        each.ask()
    lock = f"test-{os.getpid()}-{time.monotonic_ns()}"
    old.go("stubborn", lock=lock)
    old.notes(1)
    new.go("quick", lock=lock)
    assert old.hear()["end"] == 137
    assert new.hear()["end"] == 4


def test_a_guard_that_is_killed_takes_its_agent_along(far: Any) -> None:
    one = far()
    one.ask()
    one.go("stubborn")
    (note,) = one.notes(1)
    one.process.kill()
    one.process.wait(limit_s(WAIT_S))
    until(lambda: not alive(note["pid"]), "the agent to end", WAIT_S)
