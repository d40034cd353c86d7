"""The workers of one node, from the order to start until no process of them is alive, and their replacements.

Workers that can go on take part in several generations: they are released from one, wait for the next, and get
their place in it.

Executes; decides nothing. Only the agent's machine knows the phase of the generation: `work` returns it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from math import inf

from msgspec.structs import replace

from holdfast.agent.events import Event, RegroupRefused, ReplacementsReady, WorkerEnded, WorkersCanGoOn
from holdfast.agent.local_generation import Work
from holdfast.journal import Journal
from holdfast.linux import process_stat
from holdfast.protocol.board_layout import BOARD_VARIABLE, channel_name
from holdfast.protocol.messages import Assign, Start
from holdfast.protocol.options import RunOptions
from holdfast.protocol.outcome import Failure
from holdfast.protocol.rank_progress import RankProgress
from holdfast.protocol.train_contract import REPLACEMENT_VARIABLE, SURVIVE_VARIABLE, Survive
from holdfast.supervisor.board import Board, Phases
from holdfast.supervisor.channel import (
    Refuses,
    SaysCanGoOn,
    SaysReady,
    SaysUnable,
    Waits,
    WentOn,
    WorkerChannel,
    WorkerMessage,
)
from holdfast.supervisor.client import CONFIRM_S_MAX, ProcessEnded, ProcessStarted, SpawnFailed, SupervisorClient
from holdfast.supervisor.ends import EXIT_AFTER_EXCEPTION, Ends, Worker
from holdfast.supervisor.log_spool import Spool, WorkerStreams
from holdfast.supervisor.release import Lateness, LongestStep, allowed_s
from holdfast.supervisor.worker_command import worker_argv, worker_environment, worker_fds
from holdfast.text import spans

ENDING = (Work.STOPPING, Work.KILLING)
"""A worker that ends in one of these states was stopped."""


Variables = Callable[[int, int], Mapping[str, str]]
"""More variables of a worker, by generation and local rank."""


def taking_part(assign: Assign, nproc: int) -> Sequence[int]:
    """The local ranks of a node with `nproc` workers that take part in a generation."""
    return range(nproc) if assign.local_ranks is None else assign.local_ranks


def _folder(streams: WorkerStreams) -> str:
    """The folder with a worker's logs, relative to the run folder; empty: there are no files."""
    file = streams.stdout_file
    return os.path.join(file.parent.parent.name, file.parent.name) if file is not None else ""


def _keep_logs(
    worker: Worker, supervisor: SupervisorClient, *, first: bool, ended: WorkerStreams | None = None
) -> None:
    """`ended`: the streams of the worker whose place this one takes."""
    spools = {str(spool.path): spool.memory_fd for spool in _spools(worker.streams)}
    supervisor.keep_logs(spools, first=first, ended=[str(spool.path) for spool in _spools(ended)])


def _spools(streams: WorkerStreams | None) -> list[Spool]:
    both = (streams.stdout, streams.stderr) if streams is not None else ()
    return [spool for spool in both if spool is not None]


class RunningGeneration:
    """Holds the workers' board and channel, and reports what they say and how each of them ends."""

    def __init__(
        self,
        options: RunOptions,
        assign: Assign,
        start: Start,
        streams: Mapping[int, WorkerStreams],
        *,
        host: str,
        work: Callable[[], Work],
        emit: Callable[[Event], None],
        journal: Journal,
        phases: Phases,
        ends: Ends,
        on_waiting: Callable[[], None],
        parent: Mapping[str, str],
        variables: Variables,
    ) -> None:
        """`streams`: those of each worker, by local rank. `on_waiting` is called when one more worker waits for
        the next generation, or will not. `parent`: the environment that workers inherit; `variables`: what they get
        beside their place."""
        self.number = assign.generation
        self.board = Board(options.nproc)
        self._options = options
        self.assign = assign
        self._start = start
        self._began_in = assign.generation
        self._host = host
        self._work = work
        self._emit = emit
        self._journal = journal
        self._phases = phases
        self._ends = ends
        self._on_waiting = on_waiting
        self._parent = parent
        self._variables = variables
        self._loop = asyncio.get_running_loop()
        self._ranks = {rank: assign.rank_base + rank for rank in range(options.nproc)}
        """The newest rank of each local rank, whether it takes part now or not."""
        self._gathering = False
        """The workers leave their generation, or wait for the next one."""
        self._at_once = False
        """They have to leave it at once, and not at a safe point."""
        self._ended_before = set[int]()
        """Local ranks that have ended before the safe point at which the others leave. It was not reported yet."""
        self._released_s = 0.0
        """The time of the order to leave it (s of the loop's clock)."""
        self._longest = LongestStep()
        self._late: dict[str, Lateness] = {}
        """Workers that had not left it at the first look, by key."""
        self._replacing = self.number
        """The generation in which the newest replacements were ordered."""
        self._ended_pids: list[int] = []
        """The processes of workers that have ended. Their children may live."""
        self._workers = {
            rank: self._new_worker(rank, its_streams, self.number) for rank, its_streams in streams.items()
        }

        self._loop.add_reader(self.board.raised_fd, self._on_raised)
        self._channel = self._open_channel()

    def _new_worker(self, local_rank: int, streams: WorkerStreams, generation: int) -> Worker:
        key = f"worker#{self.number}#{local_rank}"
        return Worker(local_rank, streams, key, generation, began_s=self._loop.time())

    def _open_channel(self) -> WorkerChannel | None:
        """Open the channel to the workers; None: they cannot go on after a loss."""
        if self._options.job.survive is Survive.OFF:
            return None
        try:
            return WorkerChannel(channel_name(self.board.inode), self._living, self._on_message, self._on_invalid)
        except OSError as error:
            self._journal.write("channel", problem=error.strerror or str(error))
            return None

    @property
    def _taking_part(self) -> Sequence[int]:
        return taking_part(self.assign, self._options.nproc)

    def rank_of(self, local_rank: int) -> int:
        return self._ranks[local_rank]

    # ---------------------------------------------------------------- commands

    def spawn(
        self, supervisor: SupervisorClient, cpus: Mapping[int, Sequence[int]], started: Callable[[int], None]
    ) -> None:
        """Order all workers to start. `cpus`: by local rank, with --numa-binding. `started` is called with each local
        rank."""
        for number, worker in enumerate(self._workers.values()):
            _keep_logs(worker, supervisor, first=not number)
            self._spawn(worker, supervisor, cpus, started)

    def replace(
        self,
        supervisor: SupervisorClient,
        streams: Mapping[int, WorkerStreams],
        cpus: Mapping[int, Sequence[int]],
        started: Callable[[int], None],
    ) -> None:
        """Order replacements to start for these local ranks. `cpus` and `started` as for `spawn`."""
        self._replacing = self.number
        for local_rank, its_streams in streams.items():
            lost = self._workers.get(local_rank)
            worker = self._workers[local_rank] = self._new_worker(local_rank, its_streams, 0)
            # Else the step of the lost worker would hold back that of the job, which is the slowest one's
            # (test_how_many_steps_there_will_be_is_said_once).
            self.board.clear(local_rank)
            self._journal.write("replacing", **self._place(worker), folder=_folder(its_streams))
            _keep_logs(worker, supervisor, first=False, ended=lost.streams if lost is not None else None)
            self._spawn(worker, supervisor, cpus, started)

    def _spawn(
        self,
        worker: Worker,
        supervisor: SupervisorClient,
        cpus: Mapping[int, Sequence[int]],
        started: Callable[[int], None],
    ) -> None:
        rank, fds = worker.local_rank, worker.streams.fds
        # A replacement has no place yet: it starts with the environment of a complete node, and gets its own at `go`.
        environment = self._environment(self._full_assign(), self._start, worker)
        if not worker.generation:
            environment[REPLACEMENT_VARIABLE] = "1"
        wanted = {1: fds.stdout, 2: fds.stderr, **worker_fds(self._options, rank)}
        supervisor.spawn(
            worker.key,
            worker_argv(self._options, rank),
            env_set=environment,
            fds={number: fd for number, fd in wanted.items() if fd is not None},
            cpus=cpus.get(rank),
            warm=bool(self._options.preload.modules),
        )
        worker.began_s = self._loop.time()
        started(rank)

    def _full_assign(self) -> Assign:
        """The place that this node would have if all its workers took part."""
        missing = self._options.nproc - len(self._taking_part)
        return replace(
            self.assign,
            local_ranks=None,
            world_size=self.assign.world_size + missing,
            role_world_size=self.assign.role_world_size + missing,
        )

    def _environment(self, assign: Assign, start: Start, worker: Worker) -> dict[str, str]:
        rank, file = worker.local_rank, worker.streams.error_file
        return {
            **worker_environment(self._options, assign, start, rank, error_file=str(file or ""), parent=self._parent),
            BOARD_VARIABLE: self.board.address(rank),
            SURVIVE_VARIABLE: self._options.job.survive.value,
            **self._variables(self.number, rank),
        }

    def regroup(self, supervisor: SupervisorClient, assign: Assign, safe_point: int) -> None:
        """Release the workers that take part in this generation, at this safe point; 0: at once. They wait for it, and
        so do those without a place in it, which then end: their node leaves."""
        self.assign = assign
        self.number = self._ends.generation = assign.generation
        self._gathering, self._at_once = True, not safe_point
        self._released_s, self._late = self._loop.time(), {}
        for local_rank in self._taking_part:
            self._ranks[local_rank] = assign.rank_base + assign.place(local_rank)

        # What dead workers have left behind would end with the tree of their generation. This tree lives on.
        while self._ended_pids:
            supervisor.kill_session(self._ended_pids.pop())

        # All were able when the safe point was agreed: those that are not any more have ended their training since.
        ended = {rank for rank, worker in self._workers.items() if worker.generation and not worker.can_go_on}
        self._ended_before = set() if self._at_once else ended
        for worker in self._workers.values():
            worker.can_go_on, worker.waits_for = False, 0
            if self._is_expected(worker) and self._channel is not None:
                at_once, leaves = self._at_once and worker.generation > 0, worker.local_rank not in self._taking_part
                order = {"do": "release", "generation": self.number, "at_once": at_once, "leaves": leaves}
                order["nodes"] = assign.group_world_size
                self._channel.send(worker.local_rank, order)
        self.board.release(safe_point)  # after the messages: a worker that stops there finds its own

    def _is_expected(self, worker: Worker) -> bool:
        """Whether this worker has to wait for its place: a replacement without a place does not."""
        return worker.generation > 0 or worker.local_rank in self._taking_part

    def survivors(self) -> dict[str, object]:
        """Fields of the event `generation` for workers that went on: which take part, and the folder of each one's
        logs."""
        if self.number == self._began_in:
            return {}
        there = [self._workers.get(rank) for rank in self._taking_part]
        folders = [_folder(worker.streams) if worker is not None else "" for worker in there]
        return {"local_ranks": list(self._taking_part), "folders": folders}

    @property
    def all_wait(self) -> bool:
        """Whether all workers that have to wait for their place do."""
        complete = self._gathering and self._workers.keys() >= set(self._taking_part)
        expected = [worker for worker in self._workers.values() if self._is_expected(worker)]
        return complete and all(worker.waits_for == self.number for worker in expected)

    @property
    def release_s(self) -> float:
        """Limit for a worker to leave its generation after a loss (s)."""
        return self._options.limits.release_of(self._longest.seconds)

    def kill_missing(self, supervisor: SupervisorClient) -> float:
        """Kill the workers that have not left their generation although their time is over. Returns the seconds
        until the time of another one may be over; 0: there is none."""
        took_s, limit_s, left_s = self._loop.time() - self._released_s, self.release_s, list[float]()
        for worker in [each for each in self._workers.values() if each.generation and each.waits_for != self.number]:
            late = self._late.setdefault(worker.key, Lateness(worker.pid))
            waited_s = late.waited_s()
            # On a busy machine a healthy worker is late, too
            # (test_who_has_to_share_a_processor_waits_and_who_is_suspended_does_not).
            if took_s < allowed_s(limit_s, waited_s):
                left_s.append(allowed_s(limit_s, waited_s) - took_s)
            elif not worker.facts:  # else it was killed before, and has not ended yet
                worker.facts = {"unreleased": f"not released within {took_s:.1f} s"}
                waited = {"seconds": round(took_s, 3), "waited_s": round(waited_s, 3)}
                self._journal.write("not_released", **self._place(worker), pid=worker.pid, **waited)
                supervisor.signal(worker.key, signal.SIGKILL, to_end=True)
        return min(left_s, default=0.0)

    def look_at_processes(self, supervisor: SupervisorClient) -> None:
        """Kill the workers in `ht.survive` that somebody has suspended for too long while others of this node run. If
        all are suspended, somebody wants to pause this node.

        Also check the supervisor, if it has not reported the end of a worker yet: it may hang.
        """
        pids, now, limit_s = self.pids(), self._loop.time(), self._options.limits.suspended_s
        stats = {rank: process_stat(pid) for rank, pid in pids.items()}
        if any(stat is None or stat.has_ended for stat in stats.values()):
            supervisor.demand(CONFIRM_S_MAX)
        suspended = {rank for rank, stat in stats.items() if stat is not None and stat.state == "T"}
        for rank, worker in self._workers.items():
            if rank not in suspended or not worker.can_go_on or len(suspended) == len(pids):
                worker.suspended_at_s = inf
                continue
            worker.suspended_at_s = min(now, worker.suspended_at_s)
            if now >= worker.suspended_at_s + limit_s and not worker.facts:
                worker.facts = {"suspended": f"suspended for {limit_s:g} s while other ranks waited for it"}
                self._journal.write("suspended", **self._place(worker), pid=worker.pid)
                supervisor.signal(worker.key, signal.SIGKILL, to_end=True)

    def go_on(self, start: Start) -> None:
        """Give each waiting worker its place in the generation that `regroup` announced."""
        self._gathering = False
        self._start = start
        self.board.begin_again()
        for worker in self._workers.values():
            # Who is not there was killed meanwhile, or is a replacement that comes later.
            if worker.waits_for == self.number:
                worker.generation, worker.ready, worker.waits_for = self.number, False, 0
                worker.rank = self.rank_of(worker.local_rank)
                environment = self._environment(self.assign, start, worker)
                assert self._channel is not None
                self._channel.send(
                    worker.local_rank, {"do": "go", "generation": self.number, "environment": environment}
                )

    def signal(self, supervisor: SupervisorClient, signum: int, *, to_end: bool) -> None:
        """Signal the worker processes, not their children. A worker that has raised is already ending: a signal to end
        would interrupt its exit functions."""
        for worker in self._workers.values():
            if not (to_end and worker.raised):
                supervisor.signal(worker.key, signum, to_end=to_end)

    # ---------------------------------------------------------------- observing workers

    @property
    def master(self) -> tuple[str, int]:
        """MASTER_ADDR and MASTER_PORT of these workers."""
        return self._start.master_addr, self._start.master_port

    def pids(self) -> dict[int, int]:
        """The processes of the workers that take part, by local rank."""
        return {rank: pid for rank, pid in self._living().items() if pid and rank in self._taking_part}

    def progress(self) -> tuple[RankProgress, ...]:
        """The progress of the workers that take part, as they wrote it on the board."""
        everybody, pids = self.board.progress(time.monotonic_ns()), self._living()
        self._longest.add(self._loop.time(), everybody)
        return tuple(
            replace(each, pid=pids.get(each.local_rank, 0))
            for each in everybody
            if each.local_rank in self._taking_part
        )

    def job_position(self) -> tuple[int, int]:
        """The step of the whole job, and how many it will have, as the workers that take part report it."""
        return self.board.job_position(self._taking_part)

    def _living(self) -> dict[int, int]:
        return {rank: worker.pid for rank, worker in self._workers.items()}

    # ---------------------------------------------------------------- messages of workers

    def _on_message(self, local_rank: int, message: WorkerMessage) -> None:
        worker = self._workers.get(local_rank)
        if worker is None:
            return
        match message:
            case SaysCanGoOn(generation):
                # A message from before the release of this generation comes too late.
                if (generation or worker.generation) == self.number and not self._gathering:
                    self._set_can_go_on(worker, can_go_on=True)
            case SaysUnable():
                self._set_can_go_on(worker, can_go_on=False)
                # If the safe point lies behind the last step, all of them end before it: that is no refusal.
                if self._gathering and local_rank in self._taking_part and worker.generation:
                    if self._at_once:
                        self._refused(worker, "its training function has ended")
                    else:
                        self._ends_before(local_rank)
            case SaysReady():
                self._ready(worker)
            case Waits(generation):
                # A worker that waits for an earlier generation has not seen the newer order yet.
                if self._gathering and generation == self.number:
                    worker.waits_for = generation
                    self._look_for_ended()
                    self._on_waiting()
            case Refuses(why):
                self._refused(worker, why)
            case WentOn(generation, step, steps_lost, seconds):
                # The next regroup may have begun meanwhile: the step was done, and its place is that of its generation.
                if generation == worker.generation and worker.rank >= 0:
                    place = {"generation": generation, "local_rank": local_rank, "rank": worker.rank}
                    fields = {"step": step, "steps_lost": steps_lost, "seconds": seconds}
                    self._journal.write("went_on", **place, **fields)
                    worker.stepped = generation
                    all_stepped = all(each.stepped == generation for each in self._workers.values() if each.generation)
                    if generation == self.number and all_stepped:
                        self._phases.went_on()

    def _on_invalid(self, local_rank: int) -> None:
        """The worker's connection was closed, so that it cannot be released any more."""
        worker = self._workers.get(local_rank)
        if worker is not None:
            self._set_can_go_on(worker, can_go_on=False)

    def _set_can_go_on(self, worker: Worker, *, can_go_on: bool) -> None:
        if worker.can_go_on != can_go_on:
            worker.can_go_on = can_go_on
            ranks = tuple(sorted(rank for rank, each in self._workers.items() if each.can_go_on))
            self._journal.write("can_go_on", generation=self.number, local_ranks=list(ranks))
            self._emit(WorkersCanGoOn(self.number, ranks))
            if set(ranks) == set(self._taking_part):
                self._phases.joined_process_group()

    def _ready(self, worker: Worker) -> None:
        if worker.generation or worker.ready:
            return
        worker.ready = True
        seconds = round(self._loop.time() - worker.began_s, 3)
        self._journal.write("replacement_ready", **self._place(worker), pid=worker.pid, seconds=seconds)
        ranks = tuple(sorted(rank for rank, each in self._workers.items() if each.ready))
        self._emit(ReplacementsReady(self._replacing, ranks))

    def _ends_before(self, local_rank: int) -> None:
        """This worker ends before the safe point."""
        if not self._at_once:
            self._ended_before.add(local_rank)
            self._look_for_ended()

    def _look_for_ended(self) -> None:
        """Refuse if a worker waits at the safe point for another one that has ended before it: without this the job
        would stand still until the limit of a hang. The coordinator sees the same of several nodes."""
        waiting = [each for each in self._workers.values() if each.waits_for == self.number and each.generation]
        if waiting and self._ended_before:
            ranks = spans(sorted(map(self.rank_of, self._ended_before)))
            self._ended_before = set()  # it is reported once
            self._refused(waiting[0], f"waits at the safe point, and rank {ranks} has ended before it")

    def _refused(self, worker: Worker, why: str) -> None:
        self._journal.write("cannot_regroup", **self._place(worker), why=why)
        self._emit(RegroupRefused(self.number, f"rank {self.rank_of(worker.local_rank)}: {why}"))

    # ---------------------------------------------------------------- ends of workers

    def started(self, event: ProcessStarted) -> None:
        worker = self._by_key(event.key)
        if worker is not None:
            worker.pid = event.pid
            if self._channel is not None:
                self._channel.started()
            self._phases.spawned()
            self._journal.write("worker_started", **self._place(worker), pid=event.pid)

    def not_started(self, event: SpawnFailed) -> None:
        worker = self._by_key(event.key)
        if worker is not None:
            self._remove(worker)
            self._ends.not_started(self._bare(worker, 0), event.errno, event.text)

    def ended(self, event: ProcessEnded) -> None:
        if self._channel is not None:
            # What it said before its end decides what the end means.
            self._channel.catch_up()
        worker = self._by_key(event.key)
        if worker is not None:
            self._remove(worker)
            worker.pid = event.pid
            self._ended_pids.append(event.pid)
            work = self._work()
            # A stop sends SIGTERM: a SIGKILL that we did not send is a cause of its own, even when it is seen late.
            killed_by_others = event.exit_code == -signal.SIGKILL and work is not Work.KILLING
            self._report(worker, event.exit_code, stopped=work in ENDING and not killed_by_others)
            if self._gathering:
                if event.exit_code == 0 and worker.waits_for != self.number and worker.local_rank in self._taking_part:
                    self._ends_before(worker.local_rank)
                self._on_waiting()  # it may have been the last one that was missing

    def lost(self) -> Callable[[], None] | None:
        """Remove all workers, because the supervisor was killed and the workers with it. Returns a function that
        reports their ends; None: there were no workers."""
        lost = list(self._workers.values())
        for worker in lost:
            self._remove(worker)
        stopped = self._work() in ENDING  # orders given from now on must not affect how these ends are recorded

        def report() -> None:
            for worker in lost:
                self._report(worker, -signal.SIGKILL, stopped=stopped)

        return report if lost else None

    def _by_key(self, key: str) -> Worker | None:
        return next((worker for worker in self._workers.values() if worker.key == key), None)

    def _remove(self, worker: Worker) -> None:
        del self._workers[worker.local_rank]
        if self._channel is not None:
            self._channel.forget(worker.local_rank)

    def _stop_seen(self, local_rank: int) -> bool:
        """Whether the worker has seen the order to stop. A safe point for another generation is no such order."""
        return self.board.stop_seen(local_rank) and not self._gathering

    def _on_raised(self) -> None:
        """Report exceptions at once: exit functions after one can take seconds, and the other ranks wait."""
        for local_rank in self.board.raised():
            worker = self._workers.get(local_rank)
            if worker is not None and worker.pid and not worker.raised:
                worker.raised = True
                self._journal.write("worker_raised", **self._place(worker), pid=worker.pid)
                self._phases.trouble()
                after_stop = self._work() in ENDING or self._stop_seen(local_rank)
                self._ends.report(worker, self._bare(worker, EXIT_AFTER_EXCEPTION, after_stop=after_stop), raised=True)

    def _report(self, worker: Worker, exit_code: int, *, stopped: bool) -> None:
        stop_seen = self._stop_seen(worker.local_rank)
        after_stop = stopped or stop_seen
        self._journal.write(
            "worker_ended", **self._place(worker), pid=worker.pid, exit_code=exit_code, stopped=after_stop
        )
        # It has saved and left at the safe point: that is no success of its rank, and no failure.
        if exit_code == 0 and stop_seen:
            self._emit(WorkerEnded(self.number, worker.local_rank, None, drained=True))
            return
        if exit_code != 0:
            self._phases.trouble()
        self._ends.report(worker, self._bare(worker, exit_code, after_stop=after_stop and exit_code != 0))

    def _bare(self, worker: Worker, exit_code: int, *, after_stop: bool = False) -> Failure:
        """The failure as it is known at the moment of the end, before any file is read."""
        return Failure(
            rank=self.rank_of(worker.local_rank),
            local_rank=worker.local_rank,
            host=self._host,
            pid=worker.pid,
            exit_code=exit_code,
            after_stop=after_stop,
            lived_s=round(self._loop.time() - worker.began_s, 3),
            timestamp=int(time.time()),
            step=self.board.step(worker.local_rank),
            stepped=self.board.stepped(worker.local_rank),
            in_group=self.board.in_group(worker.local_rank),
            facts=worker.facts,
        )

    def _place(self, worker: Worker) -> dict[str, int]:
        """The fields of an event that say which worker it is about."""
        local_rank = worker.local_rank
        return {"generation": self.number, "local_rank": local_rank, "rank": self.rank_of(local_rank)}

    async def all_reported(self) -> None:
        """Wait until the last WorkerEnded was emitted."""
        await self._ends.all_reported()

    def close(self) -> None:
        """Close board and channel: other workers start, or the job is over."""
        if self._channel is not None:
            self._channel.close()
        self._loop.remove_reader(self.board.raised_fd)
        self.board.close()
