"""Routes each worker stream to a file, to the console, and under a prefix, as -r, -t and the filters say.

Knows the log options. Must not read, cut or write lines itself: `log_tail` does, in the console's thread.

A worker writes directly into its file, so neither a blocked console nor a stopped or killed agent loses a byte or makes
a worker wait. Where the agent has a terminal, the worker gets a pseudo-terminal, so that progress bars and colours
work; a thread that can block on the disk copies it into the file.

| stream named by       | run folder | console                         |
|-----------------------|------------|---------------------------------|
| -r / --redirects      | yes        | no                              |
| -t / --tee            | yes        | `[<role><local_rank>]:` + line  |
| neither               | yes        | `<node>:<rank>| ` + line; lines and tracebacks are folded (log_fold.py) |
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from holdfast.protocol.errors import LogDirError
from holdfast.protocol.options import LogOptions, Std
from holdfast.supervisor.console import Console, ConsoleStream
from holdfast.supervisor.log_fold import HeldTraceback, LineFold
from holdfast.supervisor.log_layout import RunFolder, StreamFds, WorkerSlot, WorkerStreams, open_log
from holdfast.supervisor.log_tail import LogTail, StreamTail, TailGroup
from holdfast.text import spans

COPY_BYTES_MAX = 65_536
HANGUP_S_MAX = 0.5
"""After the workers are dead, how long a left-over process may keep their terminal open before we stop listening."""
COLUMNS_MIN = 20
_OPOST_INDEX, _LOCAL_INDEX = 1, 3


class Terminal:
    """One worker stream's pseudo-terminal and the log file behind it."""

    def __init__(self, model_fd: int, file_fd: int, *, columns_taken: int = 0) -> None:
        """`model_fd` is the agent's terminal: its size is used, less the columns of our prefix. Owns `file_fd`. Raises
        OSError."""
        self.master_fd, self.worker_fd = os.openpty()
        self.file_fd = file_fd
        self._model_fd = model_fd
        self._columns_taken = columns_taken
        self.hangup_due: float | None = None
        os.set_blocking(self.master_fd, False)
        modes = termios.tcgetattr(self.worker_fd)
        modes[_OPOST_INDEX] &= ~termios.OPOST  # bytes reach the file as they were written
        modes[_LOCAL_INDEX] &= ~termios.ECHO
        termios.tcsetattr(self.worker_fd, termios.TCSANOW, modes)
        self.resize()

    def resize(self) -> None:
        """Apply the size of the agent's terminal, so that a progress bar and our prefix fit into one row together."""
        try:
            size = fcntl.ioctl(self._model_fd, termios.TIOCGWINSZ, bytes(8))
            rows, columns, *pixels = struct.unpack("HHHH", size)
            if columns:
                columns = max(COLUMNS_MIN, columns - self._columns_taken)
            fcntl.ioctl(self.master_fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, *pixels))
        except OSError:  # the agent's terminal is gone: the size no longer matters
            pass

    def copy(self) -> bool:
        """Copy the available bytes into the file; False at the end."""
        try:
            while data := os.read(self.master_fd, COPY_BYTES_MAX):
                self._store(data)
        except BlockingIOError:
            return True
        except OSError:  # EIO: the last process closed it
            return False
        return False

    def close(self) -> None:
        os.close(self.master_fd)
        os.close(self.file_fd)

    def _store(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self.file_fd, data) :]
        except OSError:  # the disk is full: the worker goes on, as on a real terminal
            pass


class TerminalPump:
    """The one thread that copies from all pseudo-terminals of this agent. It starts with the first terminal."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._terminals: dict[int, Terminal] = {}
        self._finishing: list[tuple[set[int], Callable[[], None]]] = []
        self._wake_fd = -1
        self._closed = False

    def add(self, terminals: Sequence[Terminal]) -> None:
        if not terminals:
            return
        with self._lock:
            self._terminals.update({terminal.master_fd: terminal for terminal in terminals})
            if self._wake_fd < 0:
                self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                # A daemon: a disk that stalls must not delay the agent's exit.
                threading.Thread(target=self._run, name="holdfast-terminals", daemon=True).start()
            os.eventfd_write(self._wake_fd, 1)

    def finish(self, terminals: Sequence[Terminal], then: Callable[[], None]) -> None:
        """The writers are dead: copy the rest, close, and call `then` (from the pump's thread). Returns at once."""
        if not terminals:
            then()
            return
        due = time.monotonic() + HANGUP_S_MAX
        with self._lock:
            for terminal in terminals:
                terminal.hangup_due = due
            # A terminal that was closed at end-of-file is done already.
            open_fds = {each.master_fd for each in terminals if self._terminals.get(each.master_fd) is each}
            self._finishing.append((open_fds, then))
            os.eventfd_write(self._wake_fd, 1)

    def resize(self) -> None:
        with self._lock:
            for terminal in self._terminals.values():
                terminal.resize()

    def close(self) -> None:
        """End the thread; unfinished terminals are not copied."""
        with self._lock:
            if self._wake_fd >= 0 and not self._closed:
                os.eventfd_write(self._wake_fd, 1)
            self._closed = True

    def _run(self) -> None:
        while not self._closed:
            with self._lock:
                terminals = dict(self._terminals)
            poller = select.poll()
            poller.register(self._wake_fd, select.POLLIN)
            for fd in terminals:
                poller.register(fd, select.POLLIN)
            dues = [terminal.hangup_due for terminal in terminals.values() if terminal.hangup_due is not None]
            timeout_ms = max(0.0, min(dues) - time.monotonic()) * 1000 if dues else None
            for fd, _ in poller.poll(timeout_ms):
                if fd == self._wake_fd:
                    os.eventfd_read(fd)
                elif not terminals[fd].copy():
                    self._remove(terminals[fd])
            now = time.monotonic()
            for terminal in terminals.values():
                if terminal.hangup_due is not None and terminal.hangup_due <= now:
                    self._remove(terminal)
            self._call_finished()
        with self._lock:
            for terminal in self._terminals.values():
                terminal.close()
            self._terminals.clear()
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _remove(self, terminal: Terminal) -> None:
        with self._lock:
            if self._terminals.get(terminal.master_fd) is not terminal:
                return
            del self._terminals[terminal.master_fd]
            for fds, _ in self._finishing:
                fds.discard(terminal.master_fd)
            terminal.close()

    def _call_finished(self) -> None:
        with self._lock:
            done = [then for fds, then in self._finishing if not fds]
            self._finishing = [(fds, then) for fds, then in self._finishing if fds]
        for then in done:
            then()


__all__ = ["LogRouter", "RunFolder", "StreamFds", "WorkerSlot", "WorkerStreams"]

RANK_COLOURS = (b"36", b"33", b"32", b"35", b"34", b"96", b"93", b"92", b"95", b"94")
"""Terminal colour numbers of the `node:rank|` prefix, taken in turn; red is left to errors."""


class FilteredFile:
    """The sink behind a duplicate filter: `<attempt>/filtered_stdout.log`."""

    live = False
    free = True

    def __init__(self, path: Path) -> None:
        self.broken = False
        self._fd = open_log(path)

    def put(self, lines: bytes, transient: bytes | None = None) -> None:  # noqa: ARG002 - a file has no transient line
        try:
            while lines:
                lines = lines[os.write(self._fd, lines) :]
        except OSError:  # the disk is full; the workers' own files are what counts
            self.broken = True

    def put_prompt(self, text: bytes) -> None:
        """A file shows no prompts."""

    def close(self) -> None:
        os.close(self._fd)


class LogRouter:
    """The log files and console lines of one agent's workers, over all attempts. Use it in one thread at a time."""

    def __init__(self, options: LogOptions, folder: RunFolder, *, node: str, role: str, console: Console) -> None:
        """`node` is this host's short name, for the prefix."""
        self._options = options
        self._node = node
        self._role = role
        self._console = console
        self._tail = LogTail()
        self._attached = False
        self._pump = TerminalPump()
        self._fds: dict[int, list[int]] = {}
        """The descriptors that `started` has to close, by local rank."""
        self._groups: list[TailGroup] = []
        self._last_groups: list[TailGroup] = []
        """The groups of the newest attempt that has begun; it may have ended."""
        self._next_groups: list[TailGroup] = []
        """The groups of the attempt that was opened and has not begun."""
        self._tracebacks: dict[int, str] = {}
        """The tracebacks of the newest attempt, by rank."""
        self._terminals: list[Terminal] = []
        if folder.path is None and _wants_files(options):
            console.say(
                "--log-dir /dev/null: there are no log files, so --redirects, --tee and the filters on lines do "
                "nothing."
            )

    def open(self, attempt: Path | None, workers: Sequence[WorkerSlot]) -> dict[int, WorkerStreams]:
        """Make `<attempt>/<local_rank>/` and the streams of all workers of an attempt. Raises LogDirError; then nothing
        stays open. `tell_elsewhere` may be called meanwhile."""
        self.end_attempt()
        self._next_groups = []
        if attempt is None:
            return {worker.local_rank: self._inherited(worker) for worker in workers}
        shown: dict[ConsoleStream, list[StreamTail]] = {}
        try:
            streams = {worker.local_rank: self._open_worker(attempt, worker, shown) for worker in workers}
            for sink, tails in shown.items():
                several = len({tail.rank for tail in tails}) > 1
                fold = LineFold(partial(self._prefix_of, sink)) if several and self._options.dedup else None
                self._follow(sink, TailGroup(tails, fold=fold))
            self._next_groups = [*self._groups]
            self._open_filtered(attempt, workers)
        except OSError as error:
            self._release()
            raise LogDirError(f"The log folder {attempt} cannot be written: {error.strerror}.") from error
        self._pump.add(self._terminals)
        if self._attached:
            self._console.wake()
        else:
            self._attached = True
            self._console.attach(self._tail)
        return streams

    def begin_attempt(self) -> None:
        """The workers of the attempt that was opened are being started."""
        self._tell_undecided()
        self._last_groups, self._next_groups, self._tracebacks = self._next_groups, [], {}

    def failed(self, rank: int, traceback: str) -> None:
        """Record the traceback with which a worker of the newest attempt ended."""
        self._tracebacks[rank] = traceback

    def tell_elsewhere(self, ranks: Iterable[int]) -> None:
        """The end of the newest attempt is known: hide the tracebacks of these ranks, because the verdict shows them or
        says where they are. Show all others."""
        told = {rank: self._tracebacks[rank] for rank in ranks if self._tracebacks.get(rank)}
        for group in self._last_groups:
            group.told_elsewhere = told
        if self._attached:
            self._console.wake()

    def _tell_undecided(self) -> None:
        """Show the tracebacks of the newest attempt if no verdict on them came: none will come."""
        if any(group.told_elsewhere is None for group in self._last_groups):
            self.tell_elsewhere(())

    def say(self, text: str) -> None:
        """Show a line of the launcher about the logs."""
        self._console.say(text)

    def started(self, local_rank: int) -> None:
        """The worker has its descriptors (or will never start): the agent closes its copies."""
        for fd in self._fds.pop(local_rank, ()):
            os.close(fd)

    def resized(self) -> None:
        """The agent's terminal changed its size: apply it to the workers' terminals. (The caller passes the signal
        on.)"""
        self._pump.resize()

    def end_attempt(self) -> None:
        """No worker of the attempt lives: show its files to their end, also a last line without newline. Returns at
        once."""
        for local_rank in list(self._fds):
            self.started(local_rank)
        groups, terminals = self._groups, self._terminals
        self._groups, self._terminals = [], []

        def end() -> None:
            for group in groups:
                group.ended = True
            self._console.wake()

        if groups:
            self._pump.finish(terminals, end)

    def close(self, drain_s_max: float) -> bool:
        """Wait until everything is shown; False if the console did not move for `drain_s_max` (files are complete in
        any case).

        Also True when the console has no reader any more: then nothing can be shown.
        """
        self.end_attempt()
        self._tell_undecided()
        shown = not self._attached or self._console.wait(lambda: self._tail.idle, drain_s_max)
        self._pump.close()
        self._tail.abandoned = True
        if self._attached:
            # The console's thread closes its tails as soon as it can; `close` does not wait for it where it is stuck.
            if shown and self._console.wait(lambda: self._tail.closed, drain_s_max):
                self._console.detach(self._tail)
            self._console.wake()
        return shown

    def _inherited(self, worker: WorkerSlot) -> WorkerStreams:
        """Streams without files. As in torchrun, ranks outside the filter are discarded and the others write to the
        agent's own streams."""
        if self._passes(worker):
            return WorkerStreams(StreamFds(None, None), None, None, None)
        fds = [os.open(os.devnull, os.O_WRONLY) for _ in range(2)]
        self._fds[worker.local_rank] = fds
        return WorkerStreams(StreamFds(*fds), None, None, None)

    def _open_worker(
        self, attempt: Path, worker: WorkerSlot, shown: dict[ConsoleStream, list[StreamTail]]
    ) -> WorkerStreams:
        folder = attempt / str(worker.local_rank)
        folder.mkdir(parents=True, exist_ok=True)
        stdout_file, stderr_file = folder / "stdout.log", folder / "stderr.log"
        fds = StreamFds(
            self._open_stream(stdout_file, Std.OUT, self._console.out, worker, shown),
            self._open_stream(stderr_file, Std.ERR, self._console.err, worker, shown),
        )
        return WorkerStreams(fds, stdout_file, stderr_file, folder / "error.json")

    def _open_stream(
        self,
        path: Path,
        std: Std,
        sink: ConsoleStream,
        worker: WorkerSlot,
        shown: dict[ConsoleStream, list[StreamTail]],
    ) -> int:
        """The descriptor for the worker; if the stream goes to the console, its tail is added to `shown`."""
        fd = open_log(path)
        self._fds.setdefault(worker.local_rank, []).append(fd)
        teed = bool(self._options.tee.for_rank(worker.local_rank) & std)
        redirected = bool(self._options.redirects.for_rank(worker.local_rank) & std)
        if not self._passes(worker) or (redirected and not teed):
            return fd
        prefix = self._prefix(worker, teed=teed)
        tail_prefix = (
            prefix if teed or self._options.prefix_template or not sink.colour else _coloured(prefix, worker.rank)
        )
        plain = self._options.dedup and not teed and not self._options.prefix_template
        held = HeldTraceback() if plain and std is Std.ERR else None
        shown.setdefault(sink, []).append(
            StreamTail(
                path,
                tail_prefix,
                live=sink.live,
                asks=sink.live and os.isatty(0),
                rank=worker.rank if plain else None,
                held=held,
            )
        )
        if not sink.is_terminal:
            return fd
        terminal = Terminal(sink.fd, fd, columns_taken=len(prefix.decode(errors="replace")))
        self._terminals.append(terminal)
        self._fds[worker.local_rank][-1] = terminal.worker_fd
        return terminal.worker_fd

    def _open_filtered(self, attempt: Path, workers: Sequence[WorkerSlot]) -> None:
        """The files exist when the option is given; only tee'd streams are written to them, as in torchrun."""
        for std, name, needles in (
            (Std.OUT, "stdout", self._options.duplicate_stdout_filters),
            (Std.ERR, "stderr", self._options.duplicate_stderr_filters),
        ):
            if not needles:
                continue
            encoded = tuple(needle.encode(errors="surrogateescape") for needle in needles)
            tails = [
                StreamTail(
                    attempt / str(worker.local_rank) / f"{name}.log", self._prefix(worker, teed=True), needles=encoded
                )
                for worker in workers
                if self._passes(worker) and self._options.tee.for_rank(worker.local_rank) & std
            ]
            file = FilteredFile(attempt / f"filtered_{name}.log")
            self._follow(file, TailGroup(tails, done=file.close))

    def _follow(self, sink: ConsoleStream | FilteredFile, group: TailGroup) -> None:
        self._groups.append(group)
        self._tail.add(sink, group)

    def _release(self) -> None:
        """Close what a failed `open` left open."""
        for terminal in self._terminals:
            terminal.close()
        self._terminals = []
        self.end_attempt()

    def _passes(self, worker: WorkerSlot) -> bool:
        wanted = self._options.local_ranks_filter
        return not wanted or worker.local_rank in wanted

    def _prefix_of(self, sink: ConsoleStream, ranks: Sequence[int]) -> bytes:
        """The prefix of a line that these ranks have printed."""
        prefix = f"{self._node}:{spans(ranks).replace(', ', ',')}| ".encode(errors="surrogateescape")
        return _coloured(prefix, ranks[0]) if sink.colour else prefix

    def _prefix(self, worker: WorkerSlot, *, teed: bool) -> bytes:
        template = self._options.prefix_template
        if template is not None:
            import socket  # both lazily: rarely used
            from string import Template

            names = {"role_name": self._role, "rank": worker.rank, "local_rank": worker.local_rank}
            names |= {"node": self._node, "hostname": socket.gethostname()}
            text = Template(template).safe_substitute(names)
        elif teed:
            text = f"[{self._role}{worker.local_rank}]:"
        else:
            text = f"{self._node}:{worker.rank}| "
        return text.encode(errors="surrogateescape")


def _coloured(prefix: bytes, rank: int) -> bytes:
    """Colour all but the space at the end."""
    return b"\x1b[%bm%b\x1b[0m " % (RANK_COLOURS[rank % len(RANK_COLOURS)], prefix.rstrip(b" "))


def _wants_files(options: LogOptions) -> bool:
    choices = (options.redirects, options.tee)
    named = any(choice.every or any(choice.by_local_rank.values()) for choice in choices)
    return named or bool(options.duplicate_stdout_filters or options.duplicate_stderr_filters)
