"""Worker streams to files and to a console that is a pipe: who is shown where, and that nothing is lost."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.protocol.errors import LogDirError
from holdfast.protocol.options import LogOptions, Std
from holdfast.supervisor import log_router, log_tail
from holdfast.supervisor.console import Console
from holdfast.supervisor.log_router import LogRouter, RunFolder, WorkerSlot
from holdfast.supervisor.log_spool import KEPT_BYTES_MAX, WorkerStreams
from tests.support.limits import limit_s, until

TEE = dict.fromkeys(range(16), Std.ALL)


class PipeConsole:
    """A console whose two ends are pipes; what arrives is collected from `read_on()` on."""

    def __init__(self) -> None:
        self.readers: list[int] = []
        writers = []
        for _ in range(2):
            reader, writer = os.pipe()
            self.readers.append(reader)
            writers.append(writer)
        self.writers = writers
        self.console = Console(*writers)
        self.out, self.err = bytearray(), bytearray()
        self._threads: list[threading.Thread] = []

    def read_on(self) -> PipeConsole:
        for reader, into in zip(self.readers, (self.out, self.err), strict=True):
            thread = threading.Thread(target=self._collect, args=(reader, into), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def collect(self) -> None:
        """Nothing more is shown, and all that was is in `out` and `err` when this returns."""
        assert self.console.close(limit_s(20))
        self._end()

    def close(self) -> None:
        self.console.close(0.1)
        self._end()
        for fd in self.readers:
            os.close(fd)

    def _end(self) -> None:
        while self.writers:
            os.close(self.writers.pop())
        for thread in self._threads:
            thread.join()

    def _collect(self, reader: int, into: bytearray) -> None:
        while data := os.read(reader, 65_536):
            into += data


@pytest.fixture
def pipe() -> Iterator[PipeConsole]:
    pipe = PipeConsole()
    yield pipe
    pipe.close()


class Node:
    """One agent's routing, with this process in the workers' place."""

    def __init__(self, pipe: PipeConsole, tmp_path: Path, **options: Any) -> None:
        self.options = LogOptions(**{"log_dir": str(tmp_path / "logs")} | options)
        self.folder = RunFolder.create(self.options, "job")
        self.router = LogRouter(self.options, self.folder, node="n1", role="default", console=pipe.console)
        self.workers: dict[int, WorkerStreams] = {}
        self.attempt: Path | None = None

    def open(self, *local_ranks: int, generation: int = 1, restarts: int = 0) -> Node:
        self.attempt = self.folder.attempt(generation, restarts)
        self.workers = self.router.open(self.attempt, [WorkerSlot(rank, rank + 100) for rank in local_ranks])
        self.router.begin_attempt()
        return self

    def write(self, local_rank: int, text: bytes, *, stream: int = 0) -> None:
        fd = self.workers[local_rank].fds[stream]
        assert fd is not None
        while text:
            text = text[os.write(fd, text) :]

    def end(self) -> bool:
        return self.router.close(limit_s(5))


def written(node: Node, local_rank: int) -> bytes:
    """What is in the worker's log file."""
    file = node.workers[local_rank].stdout_file
    assert file is not None
    return file.read_bytes() if file.exists() else b""


def fds_of_this_process() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- who goes where ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "out", "err"),
    [
        ({}, b"n1:100| out\n", b"n1:100| err\n"),
        ({"tee": TEE}, b"[default0]:out\n", b"[default0]:err\n"),
        ({"tee": {0: Std.OUT}}, b"[default0]:out\n", b"n1:100| err\n"),
        ({"redirects": {0: Std.ALL}}, b"", b""),
        ({"redirects": {0: Std.ERR}}, b"n1:100| out\n", b""),
        ({"redirects": {0: Std.ALL}, "tee": {0: Std.ERR}}, b"", b"[default0]:err\n"),
        ({"local_ranks_filter": frozenset({1})}, b"", b""),
        ({"ranks_filter": frozenset({0, 101})}, b"", b""),
        ({"ranks_filter": frozenset({100}), "local_ranks_filter": frozenset({0})}, b"n1:100| out\n", b"n1:100| err\n"),
        ({"ranks_filter": frozenset({100}), "local_ranks_filter": frozenset({1})}, b"", b""),
        ({"local_ranks_filter": frozenset({0}), "tee": TEE}, b"[default0]:out\n", b"[default0]:err\n"),
        (
            {"prefix_template": "<${role_name}/${rank}/${local_rank}/${node}/${other}> "},
            b"<default/100/0/n1/${other}> out\n",
            b"<default/100/0/n1/${other}> err\n",
        ),
        ({"prefix_template": "", "tee": TEE}, b"out\n", b"err\n"),
        ({"tee": {1: Std.ALL}}, b"n1:100| out\n", b"n1:100| err\n"),
    ],
)
def test_each_stream_to_its_places(
    pipe: PipeConsole, tmp_path: Path, options: dict[str, Any], out: bytes, err: bytes
) -> None:
    node = Node(pipe.read_on(), tmp_path, **options).open(0)
    node.write(0, b"out\n")
    node.write(0, b"err\n", stream=1)
    assert node.end()
    pipe.console.close()
    until(lambda: len(pipe.out) >= len(out) and len(pipe.err) >= len(err), "the router to have done it")
    assert (bytes(pipe.out), bytes(pipe.err)) == (out, err)
    streams = node.workers[0]
    assert streams.stdout_file == node.attempt / "0" / "stdout.log" if node.attempt else False
    assert streams.stdout_file is not None
    assert streams.stderr_file is not None
    assert streams.error_file == streams.stdout_file.parent / "error.json"
    assert streams.stdout_file.read_bytes() == b"out\n"
    assert streams.stderr_file.read_bytes() == b"err\n"


def test_ranks_of_ten_and_more(pipe: PipeConsole, tmp_path: Path) -> None:
    tee = {10: Std.OUT, 11: Std.OUT}
    redirects = {9: Std.OUT}
    node = Node(pipe.read_on(), tmp_path, tee=tee, redirects=redirects).open(*range(12))
    for rank in range(12):
        node.write(rank, b"%d\n" % rank)
    assert node.end()
    expected = {b"n1:%d| %d" % (rank + 100, rank) for rank in range(9)} | {b"[default10]:10", b"[default11]:11"}
    until(lambda: set(bytes(pipe.out).splitlines()) == expected, "the router to have done it")


def test_workers_append_and_their_descriptors_are_not_inherited(pipe: PipeConsole, tmp_path: Path) -> None:
    before = fds_of_this_process()
    node = Node(pipe.read_on(), tmp_path).open(0, 1)
    fds = [fd for streams in node.workers.values() for fd in streams.fds if fd is not None]
    assert len(fds) == 4
    assert not any(os.get_inheritable(fd) for fd in fds)
    assert node.workers[0].stdout_file is not None
    child = os.open(f"/proc/self/fd/{fds[0]}", os.O_WRONLY | os.O_APPEND)  # as a shell's `>> /dev/stdout`
    os.write(child, b"first\n")
    node.write(0, b"second\n")
    os.close(child)
    until(lambda: written(node, 0) == b"first\nsecond\n", "both in the file")
    node.router.started(0)
    node.router.started(0)
    assert node.end()
    assert fds_of_this_process() == before


def test_dev_null_inherits_and_filtered_ranks_are_lost(pipe: PipeConsole, tmp_path: Path) -> None:
    node = Node(
        pipe, tmp_path, log_dir=None, tee=TEE, local_ranks_filter=frozenset({1}), duplicate_stdout_filters=("x",)
    ).open(0, 1)
    assert node.workers[1] == WorkerStreams((None, None), None, None, None)
    assert node.workers[0].stdout_file is None
    node.write(0, b"lost\n")
    for fd in node.workers[0].fds:
        assert fd is not None
        assert os.readlink(f"/proc/self/fd/{fd}") == os.devnull
    assert node.end()
    assert b"--log-dir /dev/null" in os.read(pipe.readers[1], 4096)


def test_without_descriptors_nothing_stays_open(
    pipe: PipeConsole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(pipe, tmp_path)
    left = iter((os.memfd_create("one"), os.memfd_create("two"), os.memfd_create("three")))

    def refused(*_: object) -> int:
        fd = next(left, -1)
        if fd < 0:
            raise OSError(24, "Too many open files")
        return fd

    before = fds_of_this_process() - 3
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", refused)
        with pytest.raises(LogDirError, match="Too many open files"):
            node.open(0, 1)
    assert fds_of_this_process() == before
    assert node.end()


# --- whole lines ------------------------------------------------------------------------------------------------------


def test_lines_of_two_ranks_never_mix(pipe: PipeConsole, tmp_path: Path) -> None:
    node = Node(pipe.read_on(), tmp_path).open(0, 1)
    for step in range(300):
        for rank in (0, 1):
            node.write(rank, b"%d-" % rank * 20)
        if step % 7 == 0:
            time.sleep(0.001)
        for rank in (1, 0):
            node.write(rank, b"end %d\n" % step)
    assert node.end()
    until(lambda: pipe.out.count(b"\n") == 600, "the router to have done it")
    for rank in (0, 1):
        mine = [line for line in bytes(pipe.out).splitlines() if line.startswith(b"n1:10%d| " % rank)]
        assert mine == [b"n1:10%d| " % rank + b"%d-" % rank * 20 + b"end %d" % step for step in range(300)]


def test_both_streams_into_one_pipe_stay_whole(tmp_path: Path) -> None:
    pipe = PipeConsole()
    shared = Console(pipe.writers[0], pipe.writers[0])
    pipe.read_on()
    options = LogOptions(log_dir=str(tmp_path))
    folder = RunFolder.create(options, "job")
    router = LogRouter(options, folder, node="n1", role="default", console=shared)
    streams = router.open(folder.attempt(1, 0), [WorkerSlot(0, 0)])[0]
    for step in range(2000):
        for fd, name in zip(streams.fds, (b"out", b"err"), strict=True):
            assert fd is not None
            os.write(fd, b"%s %d %s\n" % (name, step, b"." * 90))
    assert router.close(limit_s(5))
    assert shared.close(limit_s(20))
    pipe.close()
    lines = bytes(pipe.out).splitlines()
    assert len(lines) == 4000
    for name in (b"out", b"err"):
        numbers = [int(line.split()[2]) for line in lines if line.startswith(b"n1:0| " + name)]
        assert numbers == list(range(2000))


def test_a_last_line_without_newline_and_odd_bytes_are_shown(pipe: PipeConsole, tmp_path: Path) -> None:
    node = Node(pipe.read_on(), tmp_path).open(0)
    node.write(0, b"\xff\xfe bytes\nno end")
    assert node.end()
    until(lambda: bytes(pipe.out) == b"n1:100| \xff\xfe bytes\nn1:100| no end\n", "the router to have done it")


def test_a_progress_bar_on_a_pipe(pipe: PipeConsole, tmp_path: Path) -> None:
    """At most one line a second, and the final state exactly once."""
    began = time.monotonic()
    node = Node(pipe.read_on(), tmp_path).open(0)
    for percent in range(0, 101, 2):
        node.write(0, b"\r%d%%" % percent)
    node.write(0, b"\r\nafter\n")
    assert node.end()
    until(lambda: bytes(pipe.out).endswith(b"after\n"), "the router to have done it")
    lines = bytes(pipe.out).splitlines()
    assert lines[-2:] == [b"n1:100| 100%", b"n1:100| after"]
    assert len(lines) <= 3 + (time.monotonic() - began)


def test_a_progress_bar_comes_after_the_lines_before_it(pipe: PipeConsole, tmp_path: Path) -> None:
    node = Node(pipe.read_on(), tmp_path).open(0, 1)
    node.write(0, b"begins\n\r50%\r")
    node.write(0, b"Traceback (most recent call last):\n\r50%\r", stream=1)
    until(lambda: b"50%" in pipe.out and b"50%" in pipe.err, "the bars to be shown")
    assert bytes(pipe.out) == b"n1:100| begins\nn1:100| 50%\n"
    assert bytes(pipe.err).startswith(b"n1:100| Traceback")
    assert node.end()


def test_a_shown_state_is_not_repeated(pipe: PipeConsole, tmp_path: Path) -> None:
    node = Node(pipe.read_on(), tmp_path).open(0)
    node.write(0, b"only\r")
    until(lambda: bytes(pipe.out) == b"n1:100| only\n", "the router to have done it")
    node.write(0, b"\nnext\n")
    assert node.end()
    until(lambda: bytes(pipe.out) == b"n1:100| only\nn1:100| next\n", "the router to have done it")


def test_a_held_back_state_comes_by_itself(pipe: PipeConsole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_tail, "PROGRESS_S", 0.1)
    node = Node(pipe.read_on(), tmp_path).open(0)
    node.write(0, b"1%\r")
    until(lambda: pipe.out.endswith(b"1%\n"), "the router to have done it")
    node.write(0, b"2%\r3%\r")
    until(lambda: pipe.out.endswith(b"3%\n"), "the router to have done it")
    assert bytes(pipe.out) == b"n1:100| 1%\nn1:100| 3%\n"
    assert node.end()


def truncate(node: Node) -> None:
    fd = node.workers[0].fds.stdout
    assert fd is not None
    os.ftruncate(fd, 0)


def test_a_truncated_file_is_read_from_its_start(pipe: PipeConsole, tmp_path: Path) -> None:
    node = Node(pipe.read_on(), tmp_path).open(0)
    node.write(0, b"before, a longer line\n")
    until(lambda: b"before" in pipe.out, "the router to have done it")
    truncate(node)
    node.write(0, b"after\n")
    assert node.end()
    until(lambda: pipe.out.endswith(b"n1:100| after\n"), "the router to have done it")


def test_an_unfinished_line_of_a_truncated_file_does_not_go_on_in_the_next_one(
    pipe: PipeConsole, tmp_path: Path
) -> None:
    node = Node(pipe.read_on(), tmp_path).open(0)
    node.write(0, b"whole\nthe loss is 0.")
    until(lambda: b"whole" in pipe.out, "the router to have read it")
    truncate(node)
    node.write(0, b"7 ranks\n")
    assert node.end()
    until(lambda: bytes(pipe.out) == b"n1:100| whole\nn1:100| the loss is 0.\nn1:100| 7 ranks\n", "both lines")


def test_without_inotify_files_are_polled(pipe: PipeConsole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(log_tail.ChangeWatch):
        def __init__(self) -> None:
            super().__init__()
            self.close()
            self.reliable = False

    monkeypatch.setattr(log_tail, "ChangeWatch", Refused)
    node = Node(pipe.read_on(), tmp_path).open(0)
    node.write(0, b"one\n")
    until(lambda: b"one" in pipe.out, "the router to have done it")
    node.write(0, b"two\n")
    until(lambda: b"two" in pipe.out, "the router to have done it")
    assert node.end()


# --- filters ----------------------------------------------------------------------------------------------------------


def test_duplicate_filters_collect_teed_lines_of_passing_ranks(pipe: PipeConsole, tmp_path: Path) -> None:
    node = Node(
        pipe.read_on(),
        tmp_path,
        tee={0: Std.ALL, 1: Std.OUT, 2: Std.ALL},
        local_ranks_filter=frozenset({0, 1}),
        duplicate_stdout_filters=("loss", "warn"),
        duplicate_stderr_filters=("error",),
    ).open(0, 1, 2)
    for rank in range(3):
        node.write(rank, b"loss=%d\nstep\nwarn\n" % rank)
        node.write(rank, b"an error\nloss\n", stream=1)
    assert node.end()
    assert node.attempt is not None
    filtered = (node.attempt / "filtered_stdout.log").read_bytes().splitlines()
    assert sorted(filtered) == [b"[default0]:loss=0", b"[default0]:warn", b"[default1]:loss=1", b"[default1]:warn"]
    assert (node.attempt / "filtered_stderr.log").read_bytes() == b"[default0]:an error\n"
    until(
        lambda: pipe.out.count(b"\n") == 6, "the router to have done it"
    )  # the console has all lines of ranks 0 and 1


def test_a_filter_without_tee_makes_an_empty_file(pipe: PipeConsole, tmp_path: Path) -> None:
    node = Node(pipe.read_on(), tmp_path, duplicate_stdout_filters=("loss",)).open(0)
    node.write(0, b"loss\n")
    assert node.end()
    assert node.attempt is not None
    assert (node.attempt / "filtered_stdout.log").read_bytes() == b""
    assert not (node.attempt / "filtered_stderr.log").exists()


def test_a_disk_that_stalls_delays_no_attempt(
    pipe: PipeConsole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is made on it, the mover's thread alone waits."""
    goes_on = threading.Event()

    def stalls(call: Callable[..., Any]) -> Callable[..., Any]:
        def stalling(path: Any, *arguments: Any, **named: Any) -> Any:
            if "attempt_" in str(path):
                assert threading.current_thread().name == "holdfast-log-files"
                goes_on.wait()
            return call(path, *arguments, **named)

        return stalling

    monkeypatch.setattr(log_router, "FILES_S_MAX", 0.01)
    with monkeypatch.context() as patch:
        for name in ("open", "mkdir"):
            patch.setattr(os, name, stalls(getattr(os, name)))
        node = Node(pipe.read_on(), tmp_path, tee=TEE, duplicate_stdout_filters=("o",)).open(0)
        node.write(0, b"one\n")
        node.router.add(WorkerSlot(0, 100))
        node.open(0, generation=2, restarts=1)
        until(lambda: b"one" in pipe.out, "it on the console")
        goes_on.set()
        node.write(0, b"two\n")
        assert node.end()
    assert written(node, 0) == b"two\n"
    assert node.attempt is not None
    assert (node.attempt / "filtered_stdout.log").read_bytes() == b"[default0]:two\n"
    assert (node.attempt.with_name("attempt_0") / "filtered_stdout.log").read_bytes() == b"[default0]:one\n"


# --- attempts ---------------------------------------------------------------------------------------------------------


def test_attempts_follow_each_other_and_keep_their_files(pipe: PipeConsole, tmp_path: Path) -> None:
    node = Node(pipe.read_on(), tmp_path)
    files: list[Path] = []
    before = fds_of_this_process()
    for generation, restarts in ((1, 0), (2, 0), (3, 1)):
        node.open(0, 1, generation=generation, restarts=restarts)
        for rank in (0, 1):
            node.write(
                rank, b"generation %d of %d\n" % (generation, rank) * 1000 + b"tail %d of %d" % (generation, rank)
            )
        node.router.end_attempt()
        files.extend(streams.stdout_file for streams in node.workers.values() if streams.stdout_file)
    assert node.end()
    assert fds_of_this_process() == before
    until(lambda: pipe.out.count(b"\n") == 6006, "the router to have done it")
    for rank in (0, 1):
        mine = [line.split()[2] for line in bytes(pipe.out).splitlines() if line.startswith(b"n1:10%d|" % rank)]
        assert mine == sorted(mine)
    assert len({file.parent.parent.name for file in files}) == 3
    assert all(file.read_bytes().count(b"\n") == 1000 for file in files)


def test_replacements_have_files_beside_the_lost_workers_and_are_shown(pipe: PipeConsole, tmp_path: Path) -> None:
    node = Node(pipe.read_on(), tmp_path, tee=TEE, duplicate_stdout_filters=("new",)).open(0, 1)
    assert node.attempt is not None
    for number in (1, 2):
        node.workers[1] = node.router.add(WorkerSlot(1, 101))
        node.write(1, b"new %d\n" % number)
        assert node.workers[1].stdout_file == node.attempt / f"1.{number}" / "stdout.log"
        until(lambda number=number: written(node, 1) == b"new %d\n" % number, "it in its file")
    until(lambda: b"new 1" in pipe.out and b"new 2" in pipe.out, "both to be shown")
    until(lambda: "new 2" in (node.attempt / "filtered_stdout.log").read_text(), "both to be collected")
    node.attempt.rename(tmp_path / "gone")
    node.workers[1] = node.router.add(WorkerSlot(1, 101))  # the mover makes the folder again
    node.write(1, b"new 3\n")
    until(lambda: written(node, 1) == b"new 3\n", "it in its file")
    assert node.end()


def test_many_replacements_need_no_more_descriptors_than_one(pipe: PipeConsole, tmp_path: Path) -> None:
    """What a lost worker has written last is shown all the same."""
    node = Node(pipe.read_on(), tmp_path, tee=TEE, duplicate_stdout_filters=("line",)).open(0, 1)
    counts: list[int] = []
    for number in range(5):
        node.write(1, b"line of %d\nlast of %d" % (number, number))
        node.write(1, b"Traceback (most recent call last):\n", stream=1)
        node.workers[1] = node.router.add(WorkerSlot(1, 101))
        node.router.started(1)
        until(lambda number=number: b"last of %d\n" % number in pipe.out, "its last line to be shown")
        until(lambda: all(len(group.tails) == 2 for group in node.router._groups), "the others to be closed")
        until(lambda: len(node.router._mover._spools) == 5, "the others to be on the disk")
        counts.append(fds_of_this_process())
        node.workers[1] = node.router.add(WorkerSlot(1, 101))
    assert counts[-1] - counts[0] <= 1, "the filtered file alone, which may be opened later"
    assert node.end()


def test_a_worker_that_has_another_rank_is_shown_with_it(pipe: PipeConsole, tmp_path: Path) -> None:
    node = Node(pipe.read_on(), tmp_path).open(0, 1)
    node.write(1, b"before\n")
    until(lambda: b"n1:101| before\n" in pipe.out, "the first line")
    node.router.moved({1: 7})
    node.write(1, b"after\n")
    until(lambda: b"n1:7| after\n" in pipe.out, "the second line")
    assert node.end()


def test_a_worker_that_gets_a_rank_of_the_filter_is_shown_from_then_on(pipe: PipeConsole, tmp_path: Path) -> None:
    node = Node(pipe.read_on(), tmp_path, ranks_filter=frozenset({100})).open(0, 1)
    node.write(0, b"leads\n")
    node.write(1, b"hidden\n")
    until(lambda: pipe.out == b"n1:100| leads\n" and written(node, 1) == b"hidden\n", "the first lines")
    node.router.moved({0: 101, 1: 100})
    node.write(0, b"follows\n")
    node.write(1, b"leads now\n")
    until(lambda: written(node, 0).endswith(b"follows\n"), "the second lines")
    assert node.end()
    pipe.collect()
    assert pipe.out == b"n1:100| leads\nn1:100| leads now\n"


def test_a_traceback_waits_for_its_verdict_while_the_next_attempt_is_opened(pipe: PipeConsole, tmp_path: Path) -> None:
    node = Node(pipe.read_on(), tmp_path).open(0, 1)
    for rank in (0, 1):
        traceback = f"Traceback (most recent call last):\n  here\nValueError: {rank}\n"
        node.write(rank, traceback.encode(), stream=1)
        node.router.failed(rank + 100, traceback)
    node.router.end_attempt()
    following = node.router.open(node.folder.attempt(2, 1), [WorkerSlot(0, 100)])
    node.router.hide_tracebacks((101,))
    node.router.begin_attempt()
    fd = following[0].fds.stdout
    assert fd is not None
    os.write(fd, b"again\n")
    assert node.end()
    pipe.collect()
    assert pipe.out.endswith(b"n1:100| again\n")
    assert b"ValueError: 0" in pipe.err
    assert b"ValueError: 1" not in pipe.err


# --- consoles that block or break -------------------------------------------------------------------------------------


def test_a_blocked_console_loses_nothing(pipe: PipeConsole, tmp_path: Path) -> None:
    line_count = 100_000  # of 52 bytes, twice: more than 10 MB
    node = Node(pipe, tmp_path, tee={0: Std.OUT, 1: Std.OUT}, duplicate_stdout_filters=("99999",)).open(0, 1)
    text = b"".join(b"%051d\n" % number for number in range(line_count))
    for rank in (0, 1):
        node.write(rank, text)
        node.write(rank, b"through\n", stream=1)
    for streams in node.workers.values():
        assert streams.stdout_file is not None
        until(lambda file=streams.stdout_file: file.stat().st_size == len(text), "the file to be complete")
    # stderr has its own way to the console, and so have the filtered files
    assert os.read(pipe.readers[1], 4096)
    assert node.attempt is not None
    filtered = node.attempt / "filtered_stdout.log"
    until(lambda: filtered.read_bytes().count(b"\n") == 2, "the router to have done it")
    node.router.end_attempt()
    pipe.read_on()
    assert node.end()
    until(lambda: pipe.out.count(b"\n") == 2 * line_count, "the router to have done it")
    for rank in (0, 1):
        header = b"[default%d]:" % rank
        mine = b"".join(each[len(header) :] for each in bytes(pipe.out).splitlines(True) if each.startswith(header))
        assert mine == text


@pytest.mark.parametrize("line_count", [30_000, 300_000])
def test_a_disk_that_breaks_costs_a_console_that_is_behind_the_oldest_lines_and_their_number_is_shown(
    pipe: PipeConsole, tmp_path: Path, line_count: int
) -> None:
    """The file takes all lines, and cannot be read when the console comes to them. The newest are in memory."""
    node = Node(pipe, tmp_path).open(0)
    text = b"".join(b"%09d\n" % number for number in range(line_count))
    node.write(0, text)
    until(lambda: written(node, 0) == text, "the file to be complete")
    file = node.workers[0].stdout_file
    assert file is not None
    file.unlink()
    node.router.end_attempt()
    pipe.read_on()
    assert node.end()
    pipe.collect()
    # Where the bytes are missing, a line is in pieces.
    shown = bytes(pipe.out).replace(b"n1:100| ", b"").removesuffix(b"\n") + b"\n"
    head, note, tail = shown.partition(b"holdfast: ")
    if len(text) <= KEPT_BYTES_MAX:
        assert (head, note) == (text, b"")
        return
    missing, newest = tail.split(b" bytes of output are missing here\n")
    whole = len(head) + int(missing) + len(newest)
    assert whole - len(text) in (0, 1), "the newline before the message"
    assert text.startswith(head[:-1])
    assert text.endswith(newest)
    assert len(newest) >= KEPT_BYTES_MAX


def test_close_gives_up_on_a_console_that_stays_blocked(pipe: PipeConsole, tmp_path: Path) -> None:
    node = Node(pipe, tmp_path).open(0)
    node.write(0, b"x" * 99 + b"\n" * 10_000)
    assert not node.router.close(0.1)


def test_a_slow_reader_is_waited_for(pipe: PipeConsole, tmp_path: Path) -> None:
    node = Node(pipe, tmp_path).open(0)
    node.write(0, (b"x" * 99 + b"\n") * 4000)
    got = bytearray()

    def read_slowly() -> None:
        while got.count(b"\n") < 4000:
            got.extend(os.read(pipe.readers[0], 32_768))
            time.sleep(limit_s(0.1))

    reader = threading.Thread(target=read_slowly)
    began = time.monotonic()
    reader.start()
    assert node.router.close(limit_s(1))
    assert time.monotonic() - began > limit_s(1), "it takes longer than that, but moves"
    reader.join()


def test_a_console_nobody_reads_any_more_stops_nothing(pipe: PipeConsole, tmp_path: Path) -> None:
    node = Node(pipe, tmp_path).open(0)
    os.close(pipe.readers[0])
    node.write(0, b"line\n" * 100_000)
    node.write(0, b"still here\n", stream=1)
    assert node.end()
    said = sorted(os.read(pipe.readers[1], 1000).splitlines())
    assert said[-1] == b"n1:100| still here"
    assert [b"standard output has no reader any more" in line for line in said] == [True, False]
    assert node.workers[0].stdout_file is not None
    assert node.workers[0].stdout_file.stat().st_size == 500_000
    pipe.readers[0] = os.open(os.devnull, os.O_RDONLY)


# --- real workers -----------------------------------------------------------------------------------------------------


def start(node: Node, command: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    processes = []
    for local_rank, streams in node.workers.items():
        processes.append(subprocess.Popen(command, stdout=streams.fds.stdout, stderr=streams.fds.stderr))
        node.router.started(local_rank)
    return processes


def test_four_hundred_thousand_lines(pipe: PipeConsole, tmp_path: Path) -> None:
    code = "import sys\nline = 'x' * 99 + '\\n'\nfor _ in range(200_000): sys.stdout.write(line)"
    node = Node(pipe.read_on(), tmp_path, tee=TEE).open(0, 1)
    for process in start(node, [sys.executable, "-S", "-c", code]):
        assert process.wait(limit_s(30)) == 0
    assert node.end()
    until(lambda: pipe.out.count(b"\n") == 400_000, "the router to have done it")
    for rank in (0, 1):
        assert pipe.out.count(b"[default%d]:%s\n" % (rank, b"x" * 99)) == 200_000


def test_the_prefix_may_hold_the_whole_name_of_the_host(pipe: PipeConsole, tmp_path: Path) -> None:
    node = Node(pipe.read_on(), tmp_path, prefix_template="${hostname}:${rank}: ")
    node.open(3)
    node.write(3, b"up\n")
    node.router.end_attempt()
    assert node.end()
    until(lambda: f"{socket.gethostname()}:".encode() in pipe.out, "the name of the host")
