"""The console: the launcher's own lines, and what blocks or breaks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from holdfast.runtime.workers import console as console_module
from holdfast.runtime.workers.console import Console
from tests.support.limits import limit_s, until


@pytest.fixture
def pipes() -> Iterator[tuple[int, int, int, int]]:
    """out reader, out writer, err reader, err writer"""
    fds = (*os.pipe(), *os.pipe())
    yield fds
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            continue


def test_say_prefixes_every_line_and_goes_to_stderr(pipes: tuple[int, int, int, int]) -> None:
    _, out, err_reader, err = pipes
    console = Console(out, err)
    console.say("one\ntwo")
    console.say("bare", prefix="")
    assert console.close()
    assert os.read(err_reader, 1000) == b"holdfast: one\nholdfast: two\nbare\n"
    console.say("ignored")


def test_no_thread_before_the_first_use() -> None:
    threads = threading.active_count()
    assert Console().close()
    assert threading.active_count() == threads


def test_a_blocked_console_blocks_nobody(pipes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "SAID_LINES_MAX", 100)
    _, out, _, err = pipes
    console = Console(out, err)
    console.say("x" * 200_000)
    until(lambda: not console.err.free, "the console to have it written")
    for number in range(150):  # nobody reads: the first line that blocked would never return
        console.say(str(number))
    assert not console.close(0.1)


def test_dropped_lines_are_counted(pipes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "SAID_LINES_MAX", 2)
    _, out, err_reader, err = pipes
    console = Console(out, err)
    console.say("x" * 200_000)
    until(lambda: not console.err.free, "the console to have it written")
    for number in range(5):
        console.say(str(number))
    got = b""
    while b"dropped" not in got:
        got += os.read(err_reader, 65_536)
    assert got.splitlines()[1:] == [
        b"holdfast: 0",
        b"holdfast: 1",
        b"holdfast: (3 more lines dropped: the console was blocked)",
    ]
    assert console.close()


def test_a_blocked_stdout_does_not_hold_back_stderr(pipes: tuple[int, int, int, int]) -> None:
    _, out, err_reader, err = pipes
    os.set_blocking(out, False)
    try:
        while True:
            os.write(out, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(out, True)
    console = Console(out, err)
    console.out.put(b"waits\n")
    console.say("through")
    assert os.read(err_reader, 100) == b"holdfast: through\n"
    assert not console.close(0.1)


def test_a_reader_that_left_breaks_one_stream_only(pipes: tuple[int, int, int, int]) -> None:
    _, out, err_reader, err = pipes
    os.close(err_reader)
    console = Console(out, err)
    console.say("nobody")
    assert console.close()
    assert console.err.broken
    assert not console.out.broken


def test_who_reads_stderr_is_told_once_that_nobody_reads_stdout(pipes: tuple[int, int, int, int]) -> None:
    out_reader, out, err_reader, err = pipes
    os.close(out_reader)
    console = Console(out, err)
    console.out.put(b"lost\n")
    console.say("one")
    console.say("two")
    assert console.close()
    assert os.read(err_reader, 4096).count(b"nobody reads standard output any more; the job goes on") == 1


def test_the_same_pipe_behind_both_is_one_stream(pipes: tuple[int, int, int, int]) -> None:
    _, out, _, err = pipes
    shared = os.dup(out)
    joined, separate = Console(out, shared), Console(out, err)
    assert joined.out is joined.err
    assert separate.out is not separate.err
    assert joined.close()
    assert separate.close()
    os.close(shared)


def test_closed_descriptors_are_survived() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    console = Console(reader, writer)
    console.say("nobody")
    assert console.close()


def test_idle_costs_nothing(pipes: tuple[int, int, int, int]) -> None:
    _, out, err_reader, err = pipes
    console = Console(out, err)
    console.say("hello")
    assert os.read(err_reader, 100)
    thread = next(each for each in threading.enumerate() if each.name == "holdfast-console")

    def switches() -> int:
        with open(f"/proc/self/task/{thread.native_id}/status", encoding="ascii") as status:
            return sum(int(line.split()[1]) for line in status if "ctxt_switches" in line)

    time.sleep(0.1)
    before = switches()
    time.sleep(0.3)
    assert switches() - before <= 1
    assert console.close()


def test_a_process_with_a_blocked_console_still_ends() -> None:
    code = (
        "from holdfast.runtime.workers.console import Console\n"
        "console = Console()\n"
        "console.say('x' * 1_000_000)\n"
        "raise SystemExit(5 if not console.close(0.1) else 6)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    assert process.stderr is not None
    with process.stderr:
        assert process.wait(limit_s(10)) == 5
