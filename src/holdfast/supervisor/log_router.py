"""Routes each worker stream to a file, to the console, and under a prefix, as -r, -t and the filters say.

Knows the log options. Must not read, cut or write lines itself: `log_tail` does, in the console's thread.

A worker writes into memory, which a thread moves to its file (log_spool.py): neither a blocked console, nor a stopped
or killed agent, nor a disk loses a byte or makes a worker fail or wait. Where the agent has a terminal, the worker gets
a pseudo-terminal (see console.py).

| stream named by       | run folder | console                         |
|-----------------------|------------|---------------------------------|
| -r / --redirects      | yes        | no                              |
| -t / --tee            | yes        | `[<role><local_rank>]:` + line  |
| neither               | yes        | `<node>:<rank>| ` + line; lines and tracebacks are folded (log_fold.py) |
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

from holdfast.protocol.errors import LogDirError
from holdfast.protocol.options import LogOptions, Std
from holdfast.run_folder import RunFolder, WorkerSlot
from holdfast.supervisor.console import Console, ConsoleStream, Terminal, TerminalPump
from holdfast.supervisor.log_fold import HeldTraceback, LineFold
from holdfast.supervisor.log_spool import LogMover, Spool, StreamFds, WorkerStreams
from holdfast.supervisor.log_tail import LogTail, StreamTail, TailGroup
from holdfast.text import spans

__all__ = ["LogRouter", "RunFolder", "WorkerSlot"]

RANK_COLOURS = (b"36", b"33", b"32", b"35", b"34", b"96", b"93", b"92", b"95", b"94")
"""Terminal colour numbers of the `node:rank|` prefix, taken in turn; red is left to errors."""


FILES_S_MAX = 2.0
"""Limit for making the files of workers before they start (s): programs may write their error file beside them."""
DISK_STALL_S_MAX = 5.0
"""Limit for a disk that takes nothing of the logs at the end (s)."""
TERMINALS_S_MAX = 5.0
"""Limit for copying the rest of the workers' terminals at the end (s)."""


class WorkerOutput(NamedTuple):
    """What one worker writes into."""

    spools: list[Spool]
    terminals: list[Terminal]


class FilteredFile:
    """The sink behind a duplicate filter: `<attempt>/filtered_stdout.log`, by way of memory as all logs: a disk
    must not keep the console from showing lines."""

    live = False
    free = True
    broken = False

    def __init__(self, spool: Spool) -> None:
        """Raises OSError."""
        self.spool = spool
        self._fd = spool.writer()

    def put(self, lines: bytes, transient: bytes | None = None) -> None:  # noqa: ARG002 - a file has no transient line
        with contextlib.suppress(OSError):  # no memory is left: the workers' own files have every line
            while lines:
                lines = lines[os.write(self._fd, lines) :]

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
        self._mover = LogMover(console.say)
        self._spools: list[Spool] = []
        """The spools of the newest attempt."""
        self._files_finished = self._files_complete = self._limit_reported = False
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
        self._outputs: dict[int, WorkerOutput] = {}
        """What the newest worker of each local rank writes into."""
        self._folders = set[Path]()
        """The folders of all workers of the newest attempt, also those that the disk has not taken yet."""
        self._attempt: Path | None = None
        """The folder of the newest attempt; None: it has no files."""
        self._by_sink: dict[ConsoleStream, TailGroup] = {}
        self._filtered: list[tuple[Std, tuple[bytes, ...], TailGroup]] = []
        """The filtered files of the newest attempt: their stream, the texts to find, and the group that fills them."""
        self._shown: dict[int, list[tuple[StreamTail, ConsoleStream, bool]]] = {}
        """The streams of the newest attempt that are shown: tail, sink, and whether --tee asks for it, by local
        rank."""
        if folder.path is None and _wants_files(options):
            console.say(
                f"{folder.why_none}: there are no log files, so --redirects, --tee and the filters on lines do nothing."
            )

    def open(self, attempt: Path | None, workers: Sequence[WorkerSlot]) -> dict[int, WorkerStreams]:
        """Make the streams of all workers of an attempt. Their files are in `<attempt>/<local_rank>/`, if the disk
        allows. `hide_tracebacks` may be called meanwhile.

        Raises LogDirError if no descriptors are left; then nothing stays open.
        """
        self.end_attempt()
        self._mover.retire(self._spools)
        self._spools = []
        self._next_groups = []
        if attempt is not None and not _wants_files(self._options) and file_size_limit() is not None:
            # The limit counts for memory files as well: a worker would get SIGXFSZ or EFBIG from its own print.
            self._report_limit()
            attempt = None
        self._attempt, self._by_sink, self._shown, self._filtered = attempt, {}, {}, []
        self._outputs, self._folders = {}, set()
        if attempt is None:
            return {worker.local_rank: self._inherited(worker) for worker in workers}
        shown: dict[ConsoleStream, list[StreamTail]] = {}
        filtered: list[tuple[Std, tuple[bytes, ...], FilteredFile]] = []
        try:
            streams = {
                worker.local_rank: self._open_worker(attempt / str(worker.local_rank), worker, shown)
                for worker in workers
            }
            self._open_filtered(attempt, filtered)
            self._mover.add([*self._spools, *(file.spool for _, _, file in filtered)])
            self._mover.await_files(FILES_S_MAX)
        except OSError as error:
            self._release(shown.values())
            for _, _, file in filtered:
                file.close()
                file.spool.leave()
            self.end_attempt()
            raise LogDirError(f"The output of the workers cannot be collected: {error.strerror}.") from error
        for sink, tails in shown.items():
            self._next_groups.append(self._show(sink, tails))
        for std, needles, file in filtered:
            group = TailGroup((), done=partial(self._close_filtered, file))
            self._filtered.append((std, needles, group))
            self._follow(file, group)
        for worker in workers:
            self._filter(worker, streams[worker.local_rank])
        self._pump.add(self._terminals)
        if self._attached:
            self._console.wake()
        else:
            self._attached = True
            self._console.attach(self._tail)
        return streams

    def _report_limit(self) -> None:
        if not self._limit_reported:
            self._limit_reported = True
            self.say(
                "the size of files is limited (ulimit -f): the workers write to this console, not to log files, which "
                "could reach the limit"
            )

    def add(self, worker: WorkerSlot) -> WorkerStreams:
        """The streams of a worker that takes the place of one that has ended, in a folder beside that one's."""
        if self._attempt is None:
            return self._inherited(worker)
        self._retire(worker.local_rank)
        shown: dict[ConsoleStream, list[StreamTail]] = {}
        terminals, spools = len(self._terminals), len(self._spools)
        name = str(worker.local_rank)
        folders = (self._attempt / each for each in chain([name], (f"{name}.{number}" for number in count(1))))
        folder = next(each for each in folders if each not in self._folders)
        try:
            streams = self._open_worker(folder, worker, shown)
            self._mover.add(self._spools[spools:])
            self._mover.await_files(FILES_S_MAX)
        except OSError as error:
            self.started(worker.local_rank)
            self._outputs.pop(worker.local_rank, None)
            self._release(shown.values(), spools=spools, terminals=terminals)
            self.say(f"The output of rank {worker.rank} cannot be collected: {error.strerror}.")
            return self._inherited(worker)
        for sink, tails in shown.items():
            if sink not in self._by_sink:
                self._last_groups.append(self._show(sink, []))
            for tail in tails:
                self._by_sink[sink].add(tail)
        self._filter(worker, streams)
        self._pump.add(self._terminals[terminals:])
        self._console.wake()
        return streams

    def _retire(self, local_rank: int) -> None:
        """The worker of this local rank has ended, and another one takes its place: let its streams go as soon as they
        are in the files and shown."""
        output = self._outputs.pop(local_rank, None)
        if output is None:
            return
        spools, terminals = output
        self._shown.pop(local_rank, None)
        self._spools = [each for each in self._spools if each not in spools]
        self._terminals = [each for each in self._terminals if each not in terminals]
        groups = list(self._groups)

        def end() -> None:
            for group in groups:
                group.end(spools)
            self._mover.retire(spools)
            self._console.wake()

        self._pump.finish(terminals, end)

    def moved(self, ranks: Mapping[int, int]) -> None:
        """Show the lines of these workers under other ranks from now on. `ranks`: the new rank of each local rank."""
        for local_rank, rank in ranks.items():
            for tail, sink, teed in self._shown.get(local_rank, ()):
                tail.prefix = self._tail_prefix(WorkerSlot(local_rank, rank), sink, teed=teed)
                tail.rank = rank if tail.rank is not None else None
                tail.hidden = self._hides(rank)

    def begin_attempt(self) -> None:
        """The workers of the attempt that was opened are being started."""
        # The attempt before has had its verdict by now, or gets none.
        self._show_undecided()
        # Only now: the next attempt is opened while the verdict on this one is still awaited
        # (test_a_traceback_waits_for_its_verdict_while_the_next_attempt_is_opened).
        self._last_groups, self._next_groups, self._tracebacks = self._next_groups, [], {}

    def failed(self, rank: int, traceback: str) -> None:
        """Record the traceback with which a worker of the newest attempt ended."""
        self._tracebacks[rank] = traceback

    def hide_tracebacks(self, ranks: Iterable[int]) -> None:
        """Hide the tracebacks of these ranks of the newest attempt, because the verdict shows them or says where they
        are. Show all others."""
        shown = {rank: self._tracebacks[rank] for rank in ranks if self._tracebacks.get(rank)}
        for group in self._last_groups:
            group.shown_elsewhere = shown
        if self._attached:
            self._console.wake()

    def _show_undecided(self) -> None:
        """Show the tracebacks of the newest attempt if there was no verdict on them: there will be none."""
        if any(group.shown_elsewhere is None for group in self._last_groups):
            self.hide_tracebacks(())

    def say(self, text: str) -> None:
        """Show a line of the launcher about the logs."""
        self._console.say(text)

    def started(self, local_rank: int) -> None:
        """Close our copies of a worker's descriptors: the worker has its own, or will never start."""
        for fd in self._fds.pop(local_rank, ()):
            os.close(fd)

    def resized(self) -> None:
        """Apply the new size of the agent's terminal to the workers' terminals. The caller passes the signal on."""
        self._pump.resize()

    def end_attempt(self) -> None:
        """Show the files of the attempt to their end, also a last line without newline: no worker of it lives. Returns
        at once."""
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

    def finish_files(self) -> None:
        """Wait until the output of all workers is in the files, as far as their disk takes it; not for the console.
        Call it when no worker lives and none will be started."""
        self.end_attempt()
        if not self._files_finished:
            self._files_finished = True
            # First the terminals: what they still hold goes into the spools, and from there to the disk.
            self._pump.await_finished(TERMINALS_S_MAX)
            self._files_complete = self._mover.finish(DISK_STALL_S_MAX)

    def close(self, drain_s_max: float) -> bool:
        """Wait until everything is in the files and shown; False if the console did not move for `drain_s_max` (files
        are complete in any case, unless their disk takes nothing).

        Also True when the console has no reader any more: then nothing can be shown.
        """
        self.finish_files()
        self._show_undecided()
        shown = not self._attached or self._console.wait(lambda: self._tail.idle, drain_s_max)
        self._pump.close()
        if self._filtered and self._files_complete:  # the console has filled these meanwhile
            self._mover.finish(DISK_STALL_S_MAX)
        self._mover.close()
        self._tail.abandoned = True
        if self._attached:
            # The console's thread closes its tails as soon as it can. If it is stuck, nothing waits for that.
            if shown and self._console.wait(lambda: self._tail.closed, drain_s_max):
                self._console.detach(self._tail)
            self._console.wake()
        return shown

    def _inherited(self, worker: WorkerSlot) -> WorkerStreams:
        """Streams without files. As in torchrun, ranks outside the filter are discarded and the others write to the
        agent's own streams."""
        if self._passes(worker) and not self._hides(worker.rank):
            return WorkerStreams(StreamFds(None, None), None, None, None)
        fds = [os.open(os.devnull, os.O_WRONLY) for _ in range(2)]
        self._fds[worker.local_rank] = fds
        return WorkerStreams(StreamFds(*fds), None, None, None)

    def _open_worker(
        self, folder: Path, worker: WorkerSlot, shown: dict[ConsoleStream, list[StreamTail]]
    ) -> WorkerStreams:
        self._folders.add(folder)
        output = self._outputs[worker.local_rank] = WorkerOutput([], [])
        spools = [self._spool(folder / name) for name in ("stdout.log", "stderr.log")]
        output.spools.extend(spools)
        fds = StreamFds(
            self._open_stream(spools[0], Std.OUT, self._console.out, worker, shown),
            self._open_stream(spools[1], Std.ERR, self._console.err, worker, shown),
        )
        return WorkerStreams(fds, spools[0].path, spools[1].path, folder / "error.json", *spools)

    def _spool(self, path: Path) -> Spool:
        self._spools.append(spool := Spool(path))
        return spool

    def _open_stream(
        self,
        spool: Spool,
        std: Std,
        sink: ConsoleStream,
        worker: WorkerSlot,
        shown: dict[ConsoleStream, list[StreamTail]],
    ) -> int:
        """The descriptor for the worker; if the stream goes to the console, its tail is added to `shown`."""
        fd = spool.writer()
        self._fds.setdefault(worker.local_rank, []).append(fd)
        teed = bool(self._options.tee.get(worker.local_rank, Std.NONE) & std)
        redirected = bool(self._options.redirects.get(worker.local_rank, Std.NONE) & std)
        if not self._passes(worker) or (redirected and not teed):
            return fd
        # Lines with a prefix of torchrun's may be read by programs: they are not folded.
        plain = self._options.dedup and not teed and not self._options.prefix_template
        held = HeldTraceback() if plain and std is Std.ERR else None
        tail = StreamTail(
            spool,
            self._tail_prefix(worker, sink, teed=teed),
            live=sink.live,
            asks=sink.live and os.isatty(0),
            rank=worker.rank if plain else None,
            held=held,
        )
        tail.hidden = self._hides(worker.rank)
        shown.setdefault(sink, []).append(tail)
        self._shown.setdefault(worker.local_rank, []).append((tail, sink, teed))
        # Without a terminal here, a worker must not believe that it has one: it would draw bars into a file.
        if not sink.is_terminal:
            return fd
        prefix = self._prefix(worker, teed=teed)
        terminal = Terminal(sink.fd, fd, columns_taken=len(prefix.decode(errors="replace")))
        self._terminals.append(terminal)
        self._outputs[worker.local_rank].terminals.append(terminal)
        self._fds[worker.local_rank][-1] = terminal.worker_fd
        return terminal.worker_fd

    def _open_filtered(self, attempt: Path, opened: list[tuple[Std, tuple[bytes, ...], FilteredFile]]) -> None:
        """Add the filtered files to `opened`. They exist when the option is given; only tee'd streams are written to
        them, as in torchrun. Raises OSError."""
        for std, name, needles in (
            (Std.OUT, "stdout", self._options.duplicate_stdout_filters),
            (Std.ERR, "stderr", self._options.duplicate_stderr_filters),
        ):
            if needles:
                file = FilteredFile(Spool(attempt / f"filtered_{name}.log"))
                opened.append((std, tuple(needle.encode(errors="surrogateescape") for needle in needles), file))

    def _close_filtered(self, file: FilteredFile) -> None:
        """Everything was put into it. Called in the console's thread."""
        file.close()
        self._mover.retire([file.spool])

    def _filter(self, worker: WorkerSlot, streams: WorkerStreams) -> None:
        for std, needles, group in self._filtered:
            if self._passes(worker) and self._options.tee.get(worker.local_rank, Std.NONE) & std:
                spool = streams.stdout if std is Std.OUT else streams.stderr
                assert spool is not None
                group.add(StreamTail(spool, self._prefix(worker, teed=True), needles=needles))

    def _show(self, sink: ConsoleStream, tails: Sequence[StreamTail]) -> TailGroup:
        several = len({tail.rank for tail in tails}) > 1
        fold = LineFold(partial(self._prefix_of, sink)) if several and self._options.dedup else None
        group = self._by_sink[sink] = TailGroup(tails, fold=fold)
        self._follow(sink, group)
        return group

    def _follow(self, sink: ConsoleStream | FilteredFile, group: TailGroup) -> None:
        self._groups.append(group)
        self._tail.add(sink, group)

    def _release(self, shown: Iterable[Sequence[StreamTail]], *, spools: int = 0, terminals: int = 0) -> None:
        """Close what a failed `open` left open. `shown`: tails that will not be shown. `spools`, `terminals`: how many
        there were before."""
        for tail in chain.from_iterable(shown):
            tail.close(None)
        for terminal in self._terminals[terminals:]:
            terminal.close()
        for spool in self._spools[spools:]:
            spool.leave()
        del self._terminals[terminals:], self._spools[spools:]

    def _passes(self, worker: WorkerSlot) -> bool:
        wanted = self._options.local_ranks_filter
        return not wanted or worker.local_rank in wanted

    def _hides(self, rank: int) -> bool:
        """Whether the console shows nothing of this rank. Its output is read all the same: when ranks are lost, the
        others may get its rank and go on."""
        wanted = self._options.ranks_filter
        return wanted is not None and rank not in wanted

    def _prefix_of(self, sink: ConsoleStream, ranks: Sequence[int]) -> bytes:
        """The prefix of a line that these ranks have printed."""
        prefix = f"{self._node}:{spans(ranks).replace(', ', ',')}| ".encode(errors="surrogateescape")
        return _coloured(prefix, ranks[0]) if sink.colour else prefix

    def _tail_prefix(self, worker: WorkerSlot, sink: ConsoleStream, *, teed: bool) -> bytes:
        prefix = self._prefix(worker, teed=teed)
        return prefix if teed or self._options.prefix_template or not sink.colour else _coloured(prefix, worker.rank)

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


def file_size_limit() -> int | None:
    """The largest file that a worker may write, in bytes; None: any size."""
    import resource  # lazily: not before workers start

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _wants_files(options: LogOptions) -> bool:
    chosen = any(options.redirects.values()) or any(options.tee.values())
    return chosen or bool(options.duplicate_stdout_filters or options.duplicate_stderr_filters)
