"""The console: the launcher's own lines, and what blocks or breaks."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.protocol.options import LogOptions, Std
from holdfast.supervisor import console as console_module
from holdfast.supervisor.console import ERASE, Console, ConsoleStream, Terminal, TerminalPump
from holdfast.supervisor.log_router import LogRouter, RunFolder, WorkerSlot
from holdfast.supervisor.log_spool import WorkerStreams
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
    assert console.close(limit_s(20))
    assert os.read(err_reader, 1000) == b"holdfast: one\nholdfast: two\nbare\n"
    console.say("ignored")


def test_after_a_full_disk_the_next_line_begins_on_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run … > file`: the disk has taken half a line."""
    room, write = 7, os.write
    file = tmp_path / "out"

    def takes(fd: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = write(fd, data[:room])
        room -= count
        return count

    with file.open("wb") as out:
        stream = ConsoleStream(out.fileno(), dumb=True, no_colour=True)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", takes)
            for line in (b"one\n", b"two, half of it\n", b"lost\n"):
                stream.put(line)
        stream.put(b"three\n")
        stream.put(b"four\n")
    assert file.read_bytes() == b"one\ntwo\nthree\nfour\n"


def test_no_thread_before_the_first_use() -> None:
    threads = threading.active_count()
    assert Console().close()
    assert threading.active_count() == threads


def test_a_blocked_console_blocks_nobody(pipes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "OWN_LINES_MAX", 100)
    _, out, _, err = pipes
    console = Console(out, err)
    console.say("x" * 200_000)
    until(lambda: not console.err.free, "the console to have it written")
    for number in range(150):  # nobody reads: the first line that blocked would never return
        console.say(str(number))
    assert not console.close(0.1)


def test_dropped_lines_are_counted(pipes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "OWN_LINES_MAX", 2)
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
    assert console.close(limit_s(20))


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
    assert console.close(limit_s(20))
    assert console.err.broken
    assert not console.out.broken


def test_who_reads_stderr_is_told_once_that_nobody_reads_stdout(pipes: tuple[int, int, int, int]) -> None:
    out_reader, out, err_reader, err = pipes
    os.close(out_reader)
    console = Console(out, err)
    console.out.put(b"lost\n")
    console.say("one")
    console.say("two")
    assert console.close(limit_s(20))
    assert os.read(err_reader, 4096).count(b"standard output has no reader any more; the job continues") == 1


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
    assert console.close(limit_s(20))


def test_idle_costs_nothing(pipes: tuple[int, int, int, int]) -> None:
    _, out, err_reader, err = pipes
    console = Console(out, err)
    console.say("hello")
    assert os.read(err_reader, 100)
    thread = next(each for each in threading.enumerate() if each.name == "holdfast-console")

    def switches() -> int:
        with open(f"/proc/self/task/{thread.native_id}/status", encoding="ascii") as status:
            return sum(int(line.split()[1]) for line in status if "ctxt_switches" in line)

    def rests() -> bool:
        before = switches()
        time.sleep(0.3)
        return switches() == before

    until(rests, "the thread to rest")
    assert console.close(limit_s(20))


def test_a_process_with_a_blocked_console_still_ends() -> None:
    code = (
        "from holdfast.supervisor.console import Console\n"
        "console = Console()\n"
        "console.say('x' * 1_000_000)\n"
        "raise SystemExit(5 if not console.close(0.1) else 6)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    assert process.stderr is not None
    with process.stderr:
        assert process.wait(limit_s(10)) == 5


# --- workers on pseudo-terminals, where the agent's console is a terminal ---------------------------------------------


COLUMNS = 90
PLAIN = b"n1:0| "
COLOURED = b"\x1b[36mn1:0|\x1b[0m "


def set_size(fd: int, rows: int, columns: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class Screen:
    """A terminal as both ends of a console, and what was written to it."""

    def __init__(self, folder: Path, **options: dict[int, Std]) -> None:
        self.master, self.slave = os.openpty()
        modes = termios.tcgetattr(self.slave)
        modes[1] &= ~termios.OPOST
        termios.tcsetattr(self.slave, termios.TCSANOW, modes)
        set_size(self.slave, 30, COLUMNS)
        self.shown = bytearray()
        self.console = Console(self.slave, self.slave)
        log_options = LogOptions(log_dir=str(folder), **options)
        self.folder = RunFolder.create(log_options, "job")
        self.router = LogRouter(log_options, self.folder, node="n1", role="default", console=self.console)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def open(self, *ranks: int) -> dict[int, WorkerStreams]:
        return self.router.open(self.folder.attempt(1, 0), [WorkerSlot(rank, rank) for rank in ranks])

    def close(self) -> None:
        self.router.close(2)
        self.console.close()
        os.close(self.slave)
        self._reader.join()
        os.close(self.master)

    def _read(self) -> None:
        try:
            while data := os.read(self.master, 65_536):
                self.shown += data
        except OSError:
            return


@pytest.fixture
def screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Screen(tmp_path)
    yield screen
    screen.close()


def run(screen: Screen, code: str) -> WorkerStreams:
    streams = screen.open(0)[0]
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=streams.fds.stdout,
        stderr=streams.fds.stderr,
        start_new_session=True,
    )
    screen.router.started(0)
    assert process.wait(limit_s(20)) == 0
    screen.router.end_attempt()
    return streams


def comes(file: Path, expected: bytes) -> None:
    """The output is moved to the file by a thread, some milliseconds after the screen has it."""
    until(lambda: file.read_bytes() == expected, lambda: f"{file.read_bytes()[-200:]!r} is not all of it")


def test_a_worker_that_prints_without_pause_leaves_the_other_terminals_their_turn(tmp_path: Path) -> None:
    paths = [tmp_path / "endless", tmp_path / "other"]
    model = os.open("/dev/null", os.O_RDONLY)
    endless, other = (Terminal(model, os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)) for path in paths)
    os.close(model)
    os.close(endless.file_fd)
    os.close(endless.master_fd)
    endless.file_fd, endless.master_fd = os.open("/dev/null", os.O_WRONLY), os.open("/dev/zero", os.O_RDONLY)
    pump = TerminalPump()
    pump.add([endless, other])
    try:
        os.write(other.worker_fd, b"one line\n")
        comes(paths[1], b"one line\n")
    finally:
        pump.close()
        for each in (endless, other):
            os.close(each.worker_fd)


def test_a_worker_sees_a_terminal_and_its_size(screen: Screen) -> None:
    streams = run(
        screen,
        "import os, sys\n"
        "print(sys.stdout.isatty(), sys.stderr.isatty(), *os.get_terminal_size(1))\n"
        "print('\\033[31mred\\033[0m', file=sys.stderr)\n",
    )
    size = b"True True %d 30\n" % (COLUMNS - len(PLAIN))
    until(lambda: COLOURED + size in screen.shown and b"\x1b[31mred" in screen.shown, "the screen to show it")
    assert streams.stdout_file is not None
    assert streams.stderr_file is not None
    comes(streams.stdout_file, size)
    comes(streams.stderr_file, b"\x1b[31mred\x1b[0m\n")


def test_every_byte_of_a_worker_that_ends_at_once_is_kept(screen: Screen) -> None:
    streams = run(screen, "import os\nfor n in range(20_000): os.write(1, b'%05d\\n' % n)")
    until(lambda: screen.shown.endswith(b"19999\n"), "the screen to show it")
    assert streams.stdout_file is not None
    comes(streams.stdout_file, b"".join(b"%05d\n" % number for number in range(20_000)))


def test_a_new_size_reaches_the_workers(screen: Screen) -> None:
    fd = screen.open(0)[0].fds.stdout
    assert fd is not None
    assert os.get_terminal_size(fd) == (COLUMNS - len(PLAIN), 30)
    set_size(screen.slave, 40, 120)
    screen.router.resized()
    assert os.get_terminal_size(fd) == (120 - len(PLAIN), 40)


def test_a_progress_bar_is_a_transient_last_line(screen: Screen) -> None:
    streams = screen.open(0, 1)
    bar, other = streams[0].fds.stderr, streams[1].fds.stdout
    assert bar is not None
    assert other is not None
    os.write(bar, b"\r10%")
    os.write(bar, b"\r20%")
    until(lambda: ERASE + COLOURED + b"20%" in screen.shown, "the screen to show it")
    at = len(screen.shown)
    os.write(other, b"line\n")
    # the bar goes away for the line and comes back below it
    line = b"\x1b[33mn1:1|\x1b[0m line\n"
    until(lambda: COLOURED + b"20%" in screen.shown[at:], "the screen to show it")
    assert bytes(screen.shown[at:]).startswith(ERASE + line)
    at = len(screen.shown)
    os.write(bar, b"\r100%\n")
    until(lambda: screen.shown.endswith(b"100%\n"), "the screen to show it")
    assert bytes(screen.shown[at:]) == ERASE + COLOURED + b"100%\n"
    assert streams[0].stderr_file is not None
    comes(streams[0].stderr_file, b"\r10%\r20%\r100%\n")


def test_a_bar_is_redrawn_at_most_ten_times_a_second(screen: Screen) -> None:
    bar = screen.open(0)[0].fds.stderr
    assert bar is not None
    started = time.monotonic()
    for number in range(100):
        os.write(bar, b"\r%d" % number)
        time.sleep(0.003)
    until(lambda: COLOURED + b"99" in screen.shown, "the screen to show it")
    elapsed = time.monotonic() - started
    assert screen.shown.count(COLOURED) <= elapsed * 10 + 2


def test_a_prompt_is_shown_and_becomes_a_line_at_the_end(screen: Screen) -> None:
    fd = screen.open(0)[0].fds.stdout
    assert fd is not None
    os.write(fd, b"name? ")
    until(lambda: COLOURED + b"name? " in screen.shown, "the screen to show it")
    screen.router.started(0)
    screen.router.end_attempt()
    until(lambda: screen.shown.endswith(ERASE + COLOURED + b"name? \n"), "the screen to show it")


def test_two_bars_at_rest_cost_nothing(screen: Screen) -> None:
    streams = screen.open(0, 1)
    for rank in (0, 1):
        fd = streams[rank].fds.stderr
        assert fd is not None
        os.write(fd, b"\rbar")
    until(lambda: screen.shown.count(b"bar") == 2, "the screen to show it")
    size = len(screen.shown)
    time.sleep(0.3)
    assert len(screen.shown) == size


def test_said_lines_keep_the_transient_line_below(screen: Screen) -> None:
    fd = screen.open(0)[0].fds.stdout
    assert fd is not None
    os.write(fd, b"\rbar")
    until(lambda: b"bar" in screen.shown, "the screen to show it")
    at = len(screen.shown)
    screen.console.say("news")
    until(lambda: b"bar" in screen.shown[at:], "the screen to show it")
    assert bytes(screen.shown[at:]).startswith(ERASE + b"holdfast: news\n")


def test_streams_that_are_not_shown_get_no_terminal(tmp_path: Path) -> None:
    screen = Screen(tmp_path, redirects={0: Std.OUT})
    fds = screen.open(0)[0].fds
    assert fds.stdout is not None
    assert fds.stderr is not None
    assert (os.isatty(fds.stdout), os.isatty(fds.stderr)) == (False, True)
    screen.close()


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colours_where_they_are_not_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    screen = Screen(tmp_path)
    run(screen, "print('line')")
    screen.close()
    assert bytes(screen.shown) == PLAIN + b"line\n"


def test_a_stopped_terminal_blocks_no_worker(screen: Screen) -> None:
    termios.tcflow(screen.slave, termios.TCOOFF)  # as Ctrl-S does
    streams = run(screen, "import os\nfor n in range(40_000): os.write(1, b'%099d\\n' % n)")
    assert streams.stdout_file is not None
    file = streams.stdout_file
    until(lambda: file.stat().st_size == 4_000_000, "the screen to show it")
    termios.tcflow(screen.slave, termios.TCOON)
    until(lambda: screen.shown.endswith(b"%099d\n" % 39_999), "the screen to show it")
    assert screen.shown.count(b"\n") == 40_000


def test_a_left_over_process_does_not_hold_up_the_end(screen: Screen) -> None:
    fd = screen.open(0)[0].fds.stdout
    assert fd is not None
    left_over = os.dup(fd)
    os.write(fd, b"last words")
    screen.router.started(0)
    screen.router.end_attempt()
    until(lambda: screen.shown.endswith(b"last words\n"), "the screen to show it")
    os.close(left_over)


def test_a_question_is_shown_once_whatever_is_typed_and_whatever_comes_after(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.isatty
    monkeypatch.setattr(os, "isatty", lambda fd: fd == 0 or real(fd))
    streams = screen.open(0, 1)
    out, other = streams[0].fds.stdout, streams[1].fds.stdout
    assert out is not None
    assert other is not None
    os.write(out, b"before\nname? ")
    until(lambda: COLOURED + b"name? " in screen.shown, lambda: f"on the screen: {screen.shown!r}")
    os.write(other, b"meanwhile\n")
    until(lambda: b"meanwhile" in screen.shown, lambda: f"on the screen: {screen.shown!r}")
    os.write(out, b"hi bob\n")
    until(lambda: COLOURED + b"hi bob" in screen.shown, lambda: f"on the screen: {screen.shown!r}")
    for rank in (0, 1):
        screen.router.started(rank)
    screen.router.end_attempt()
    until(lambda: COLOURED + b"hi bob" in screen.shown, lambda: f"on the screen: {screen.shown!r}")
    assert screen.shown.count(b"name? ") == 1
    assert screen.shown.index(b"before") < screen.shown.index(b"name? ") < screen.shown.index(b"meanwhile")
    assert streams[0].stdout_file is not None
    comes(streams[0].stdout_file, b"before\nname? hi bob\n")
