"""Workers that go on in another generation: real processes under a supervisor, without torch, and their worker group."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from msgspec import structs

from holdfast import seqpacket
from holdfast.agent.events import (
    Event,
    FailureRead,
    NodePrepared,
    RegroupRefused,
    ReplacementsReady,
    TreeGone,
    WorkerEnded,
    WorkersCanGoOn,
)
from holdfast.agent.local_generation import Work
from holdfast.diagnosis.causes.find import cause_of
from holdfast.journal import Journal
from holdfast.linux import process_stat
from holdfast.protocol.board_layout import channel_name
from holdfast.protocol.messages import Assign, Start
from holdfast.protocol.options import CommandKind, Endpoint, LogOptions, RunOptions, WorkerCommand
from holdfast.protocol.policy import JobSpec, Limits
from holdfast.protocol.train_contract import Survive
from holdfast.run_folder import RunFolder
from holdfast.runtime.node_extension import NodeExtensions
from holdfast.runtime.worker_group import WorkerGroup
from holdfast.supervisor import processes
from holdfast.supervisor.channel import SaysCanGoOn, SaysReady, SaysUnable, WorkerChannel
from holdfast.supervisor.console import Console
from holdfast.supervisor.log_router import LogRouter
from holdfast.supervisor.release import allowed_s
from holdfast.supervisor.supervisor import exec_supervisor
from tests.support.limits import limit_s, settled, until

SCRIPT = str(Path(__file__).parent / "scripts" / "survivor.py")
RANKS = 3
E = TypeVar("E")


class Crew:
    """The worker group of one node with three workers, and what it reports."""

    def __init__(
        self, tasks: asyncio.TaskGroup, folder: Path, out: Any, *how: str, survive: Survive, **limits: float
    ) -> None:
        options = RunOptions(
            job=JobSpec(run_id="x", min_nodes=1, max_nodes=1, backend="c10d", survive=survive),
            limits=Limits(**limits),
            nproc=RANKS,
            command=WorkerCommand(kind=CommandKind.SCRIPT, target=SCRIPT, args=how, python=sys.executable),
            logs=LogOptions(log_dir=str(folder), dedup=False),
            endpoint=Endpoint(host="localhost", port=0),
        )
        self.others = processes.descendants(os.getpid())  # of this test process, which stands for the agent
        self.folder = RunFolder.create(options.logs, "x")
        assert self.folder.path is not None
        self.path = self.folder.path
        self.console = Console(out, out)
        self.journal = Journal(None)
        self.notes: list[dict[str, Any]] = []
        self.journal.listen(lambda event, fields: self.notes.append({"event": event, **fields}))
        self.router = LogRouter(options.logs, self.folder, node="n", role="default", console=self.console)
        self.work = Work.IDLE
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.seen: list[Event] = []
        node: Any = None  # there is no extension that could look at it
        self.group = WorkerGroup(
            options,
            exec_supervisor(()),
            self.folder,
            self.router,
            self.journal,
            tasks,
            self.events.put_nowait,
            NodeExtensions((), node, lambda _: None, self.journal.fault),
            host="n",
            work=lambda: self.work,
            on_store=lambda _port: None,
            on_notice=lambda _text: None,
        )

    async def next(self, kind: type[E]) -> E:
        """The next event of this kind; others are kept in `seen`."""
        while True:
            event = await asyncio.wait_for(self.events.get(), limit_s(30))
            self.seen.append(event)
            if isinstance(event, kind):
                return event

    async def can_go_on(self, generation: int, *local_ranks: int) -> None:
        """Wait until these are the workers that can go on."""
        while await self.next(WorkersCanGoOn) != WorkersCanGoOn(generation, local_ranks):
            pass

    async def start(self) -> None:
        self.work = Work.PREPARING
        self.group.prepare(place(1))
        prepared = await self.next(NodePrepared)
        assert prepared.store_port is not None
        self.work = Work.RUNNING
        self.group.start(place(1), Start(1, "localhost", prepared.store_port))

    async def begin(self) -> None:
        await self.start()
        await self.can_go_on(1, 0, 1, 2)

    async def regroup(self, generation: int, *local_ranks: int, safe_point: int = 0) -> None:
        """Another generation of these workers, until all can go on again."""
        assign = place(generation, *local_ranks)
        self.group.regroup(assign, safe_point)
        prepared = await self.next(NodePrepared)
        assert prepared.generation == generation
        assert prepared.store_port is not None
        self.group.go_on(Start(generation, "localhost", prepared.store_port))
        await self.can_go_on(generation, *local_ranks)

    async def lose(self, local_rank: int) -> WorkerEnded:
        os.kill(self.pids()[local_rank], signal.SIGKILL)
        return await self.next(WorkerEnded)

    def pids(self) -> dict[int, int]:
        assert self.group._running is not None
        return self.group._running._living()

    def lines(self, folder: str, stream: str = "stdout") -> list[str]:
        """What a worker has printed so far."""
        assert self.router._mover.finish(limit_s(5))
        return (self.path / "attempt_0" / folder / f"{stream}.log").read_text().splitlines()

    def noted(self, event: str) -> list[dict[str, Any]]:
        """The journal's events of this name."""
        return [note for note in self.notes if note["event"] == event]

    def descriptors(self) -> int:
        """How many this process has open, without the logs, which the console opens when there is something to read."""
        found = 0
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the folder's own
                found += not os.readlink(f"/proc/self/fd/{fd}").startswith(str(self.path))
        return found

    async def end(self) -> None:
        self.work = Work.KILLING
        self.group.kill_tree()
        await self.next(TreeGone)

    async def close(self) -> None:
        await self.group.close()
        self.router.close(1.0)
        self.console.close(1.0)
        self.journal.close()


def place(generation: int, *local_ranks: int) -> Assign:
    size = len(local_ranks) or RANKS
    given = None if size == RANKS else local_ranks
    return Assign(generation, 0, 0, 1, 0, size, 0, size, True, True, local_ranks=given)


@pytest.fixture
def crew(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AbstractAsyncContextManager[Crew]]:
    """A running crew. Parameter: how its workers behave, and more."""
    given = dict(getattr(request, "param", {}))
    how = given.pop("how", ())

    @asynccontextmanager
    async def opened() -> AsyncIterator[Crew]:
        async with asyncio.TaskGroup() as tasks:
            limits = {"release_s": limit_s(60), "survive": Survive.SHRINK} | given
            made = Crew(tasks, tmp_path, null.fileno(), *how, **limits)
            try:
                yield made
            finally:
                await made.close()

    with open(os.devnull, "w") as null:
        yield opened()
    processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 0)


async def test_the_others_go_on_and_a_replacement_joins(crew: Any) -> None:
    await crew.begin()
    survivors = [crew.pids()[rank] for rank in (0, 2)]
    ended = await crew.lose(1)
    assert (ended.generation, ended.local_rank, ended.failure.exit_code) == (1, 1, -signal.SIGKILL)
    await crew.regroup(2, 0, 2)
    assert crew.lines("0") == ["up 0 3 0 3", "released 2 now", "goes on 2 0 2 0 2"]
    assert crew.lines("2") == ["up 2 3 2 3", "released 2 now", "goes on 2 1 2 2 2"]

    crew.group.replace(2, (1,))
    assert await crew.next(ReplacementsReady) == ReplacementsReady(2, (1,))
    assert crew.lines("1.1") == ["up 1 3 1 3"]
    assert crew.group.progress()[-1].local_rank == 2
    assert len(crew.group.progress()) == 2

    await crew.regroup(3, 0, 1, 2, safe_point=9)
    assert crew.lines("1.1")[1:] == ["released 3 later", "goes on 3 1 3 1 3"]
    assert crew.lines("2")[-2:] == ["released 3 later", "goes on 3 2 3 2 3"]
    assert [crew.pids()[rank] for rank in (0, 2)] == survivors
    assert [each.local_rank for each in crew.group.progress()] == [0, 1, 2]
    await crew.end()
    read = next(event for event in crew.seen if isinstance(event, FailureRead))
    assert (read.generation, read.failure.rank) == (1, 1)  # where it died, however long the reading took


@pytest.mark.parametrize("crew", [{"how": ["2=deaf"], "release_s": limit_s(1.5)}], indirect=True)
async def test_a_worker_that_is_not_at_the_gate_in_time_is_killed_and_the_others_go_on_without_it(crew: Any) -> None:
    await crew.begin()
    await crew.lose(1)
    crew.group.regroup(place(2, 0, 2), 0)
    ended = await crew.next(WorkerEnded)
    assert (ended.generation, ended.local_rank, ended.failure.exit_code) == (2, 2, -signal.SIGKILL)
    assert not ended.failure.after_stop
    assert [note["local_rank"] for note in crew.noted("not_released")] == [2]
    read = await crew.next(FailureRead)
    while read.failure.local_rank != 2:
        read = await crew.next(FailureRead)
    assert cause_of(read.failure).code == "HF240", "holdfast has killed it, nobody outside"
    await crew.regroup(3, 0)
    assert crew.lines("0")[-2:] == ["released 3 now", "goes on 3 0 1 0 1"]
    await crew.end()


@pytest.mark.parametrize("crew", [{"how": ["2=starved"], "release_s": limit_s(1)}], indirect=True)
async def test_the_time_for_which_a_worker_waits_for_a_processor_does_not_count(crew: Any) -> None:
    await crew.begin()
    await crew.lose(1)
    crew.group.regroup(place(2, 0, 2), 0)
    await crew.next(WorkerEnded)
    (note,) = crew.noted("not_released")
    assert note["local_rank"] == 2
    assert note["waited_s"] > 0
    assert note["seconds"] + 0.001 >= allowed_s(limit_s(1), note["waited_s"])
    await crew.regroup(3, 0)
    await crew.end()


@pytest.mark.parametrize("crew", [{"suspended_s": 0.5, "progress_interval_s": 0.05}], indirect=True)
async def test_a_worker_that_is_suspended_while_others_run_is_killed(crew: Any) -> None:
    await crew.begin()
    pids = crew.pids()
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)  # somebody pauses the node
    # The loop does not run meanwhile: on a busy machine the group would see some stopped before the others.
    until(lambda: all((stat := process_stat(pid)) and stat.state == "T" for pid in pids.values()), "all to be stopped")
    await asyncio.sleep(2 * 0.5)
    assert not crew.noted("suspended")
    for rank in (0, 2):
        os.kill(pids[rank], signal.SIGCONT)
    ended = await crew.next(WorkerEnded)
    assert (ended.local_rank, ended.failure.exit_code) == (1, -signal.SIGKILL)
    assert [note["pid"] for note in crew.noted("suspended")] == [pids[1]]
    read = await crew.next(FailureRead)
    assert cause_of(read.failure).code == "HF242"
    await crew.regroup(2, 0, 2)
    await crew.end()


@pytest.mark.parametrize("crew", [{"how": ["0=refuses"]}], indirect=True)
async def test_a_worker_can_refuse(crew: Any) -> None:
    await crew.begin()
    await crew.lose(1)
    crew.group.regroup(place(2, 0, 2), 0)
    assert await crew.next(RegroupRefused) == RegroupRefused(2, "rank 0: it grew")
    assert [(note["rank"], note["why"]) for note in crew.noted("cannot_regroup")] == [(0, "it grew")]
    await crew.end()
    assert not [event for event in crew.seen if isinstance(event, NodePrepared) and event.generation == 2]


@pytest.mark.parametrize("crew", [{"how": ["0=returns"]}], indirect=True)
async def test_a_worker_whose_function_has_ended_is_not_able_and_refuses_when_it_is_to_go_on(crew: Any) -> None:
    await crew.begin()
    await crew.lose(1)
    crew.group.regroup(place(2, 0, 2), 0)
    refused = await crew.next(RegroupRefused)
    assert refused == RegroupRefused(2, "rank 0: its training function has ended")
    await crew.end()


@pytest.mark.parametrize("crew", [{"how": ["0=returns"]}], indirect=True)
async def test_workers_refuse_to_wait_at_a_safe_point_for_one_that_has_ended_before_it(crew: Any) -> None:
    await crew.begin()
    crew.group.regroup(place(2, 0, 1, 2), 9)
    refused = await crew.next(RegroupRefused)
    assert refused.text.endswith(": waits at the safe point, and rank 0 has ended before it")
    await crew.end()


async def test_a_second_loss_forms_the_generation_again_and_who_waits_stays(crew: Any) -> None:
    await crew.begin()
    await crew.lose(1)
    crew.group.regroup(place(2, 0, 2), 0)
    await crew.next(NodePrepared)
    await crew.lose(2)
    await crew.regroup(3, 0)
    assert crew.lines("0") == ["up 0 3 0 3", "released 2 now", "released 3 now", "goes on 3 0 1 0 1"]
    await crew.end()


async def test_workers_can_wait_for_a_replacement(crew: Any) -> None:
    await crew.begin()
    await crew.lose(1)
    crew.group.regroup(place(2, 0, 2), 0)
    await crew.next(NodePrepared)
    crew.group.replace(2, (1,))
    await crew.next(ReplacementsReady)
    await crew.regroup(3, 0, 1, 2)
    assert crew.lines("0") == ["up 0 3 0 3", "released 2 now", "released 3 now", "goes on 3 0 3 0 3"]
    assert crew.lines("1.1") == ["up 1 3 1 3", "released 3 later", "goes on 3 1 3 1 3"]
    await crew.end()


async def test_a_node_without_workers_takes_part_and_gets_its_workers_later(crew: Any) -> None:
    """A node that joins a running job; or that has lost its last worker, which is the same."""
    empty = structs.replace(place(1, 0), local_ranks=(), world_size=2, rank_base=2)
    crew.work = Work.PREPARING
    crew.group.prepare(empty)
    prepared = await crew.next(NodePrepared)
    crew.work = Work.RUNNING
    crew.group.start(empty, Start(1, "localhost", prepared.store_port))
    crew.group.regroup(structs.replace(empty, generation=2), 0)
    assert (await crew.next(NodePrepared)).generation == 2
    crew.group.go_on(Start(2, "localhost", prepared.store_port))
    crew.group.replace(2, (0, 1, 2))
    while (await crew.next(ReplacementsReady)).local_ranks != (0, 1, 2):
        pass
    assert crew.lines("2") == ["up 4 5 2 3"]
    await crew.regroup(3, 0, 1, 2, safe_point=3)
    await crew.end()


async def test_a_replacement_that_fails_is_reported_and_another_one_can_be_started(crew: Any) -> None:
    await crew.begin()
    await crew.lose(1)
    await crew.regroup(2, 0, 2)
    for _ in range(2):
        crew.group.replace(2, (1,))
        await crew.next(ReplacementsReady)
        ended = await crew.lose(1)
        assert (ended.generation, ended.local_rank, ended.failure.rank) == (2, 1, 1)
    crew.group.replace(2, (1,))
    await crew.next(ReplacementsReady)
    await crew.regroup(3, 0, 1, 2, safe_point=4)
    assert crew.lines("1.3")[-1] == "goes on 3 1 3 1 3"
    assert [note["folder"] for note in crew.noted("replacing")] == [f"attempt_0/1.{number}" for number in (1, 2, 3)]
    last = crew.noted("generation")[-1]
    assert (last["local_ranks"], last["folders"]) == ([0, 1, 2], ["attempt_0/0", "attempt_0/1.3", "attempt_0/2"])
    await crew.end()


async def test_a_stop_while_the_workers_come_to_the_gate_ends_them(crew: Any) -> None:
    await crew.begin()
    await crew.lose(1)
    crew.group.regroup(place(2, 0, 2), 0)
    crew.work = Work.STOPPING
    crew.group.signal(signal.SIGTERM, to_end=True)
    ended = [await crew.next(WorkerEnded) for _ in range(2)]
    assert all(each.failure.after_stop for each in ended)
    await crew.end()


@pytest.mark.parametrize("crew", [{"how": ["1=family"]}], indirect=True)
async def test_what_a_lost_worker_has_started_ends_when_the_others_go_on(crew: Any) -> None:
    await crew.begin()
    child = int(crew.lines("1")[0].split()[1])
    await crew.lose(1)
    assert processes.is_alive(child)
    await crew.regroup(2, 0, 2)
    deadline = asyncio.get_running_loop().time() + limit_s(30)
    while processes.is_alive(child):
        assert asyncio.get_running_loop().time() < deadline, "it lives"
        await asyncio.sleep(0.01)
    await crew.end()


STRANGER = """
import socket, sys
channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
channel.connect(bytes.fromhex(sys.argv[1]))
try:
    channel.send(b'{"is": "unable"}')
    print(channel.recv(100))
except (BrokenPipeError, ConnectionResetError):
    print(b"")
"""


async def test_no_other_process_can_speak_for_a_worker(crew: Any) -> None:
    await crew.begin()
    name = channel_name(crew.group._running.board.inode).hex()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", STRANGER, name, stdout=subprocess.PIPE)
    output, _ = await asyncio.wait_for(process.communicate(), limit_s(30))
    assert output == b"b''\n"
    await crew.regroup(2, 0, 1, 2)  # all workers are able still
    await crew.end()


@pytest.mark.parametrize("crew", [{"survive": Survive.OFF}], indirect=True)
async def test_with_survive_off_nobody_listens(crew: Any) -> None:
    await crew.start()
    ended = [await crew.next(WorkerEnded) for _ in range(RANKS)]  # the script has no other way
    assert all(each.failure.exit_code == 1 for each in ended)
    await crew.end()


async def test_an_end_is_reported_after_what_workers_have_said_before_it(crew: Any) -> None:
    await crew.start()
    await settled(lambda: all(crew.pids().values()))
    until(lambda: all(crew.lines(str(each), "stderr") for each in range(RANKS)), "all are able")  # and nobody listens
    lost = crew.pids()[1]
    os.kill(lost, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{lost}").exists(), "the supervisor has seen the end")
    await crew.next(WorkerEnded)
    assert WorkersCanGoOn(1, (0, 1, 2)) in crew.seen
    await crew.end()


async def test_a_worker_that_sends_nonsense_is_not_able_any_more() -> None:
    """This process stands for the worker."""
    told: list[object] = []
    gone: asyncio.Queue[int] = asyncio.Queue()
    name = f"\0holdfast-test-{os.getpid()}".encode()
    channel = WorkerChannel(name, lambda: {3: os.getpid()}, lambda *message: told.append(message), gone.put_nowait)
    try:
        for packet in (b"\xff", b'{"is": "can_go_on", "generation": -1}', b'{"is": "rules"}', b"[]"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as worker:
                worker.connect(name)
                worker.send(b'{"is": "ready", "more": 1}')
                worker.send(packet)
                assert await asyncio.wait_for(gone.get(), limit_s(30)) == 3
        channel.send(3, {"do": "release"})  # nobody is connected
    finally:
        channel.close()
    assert told == [(3, SaysReady())] * 4


def channel_of(pid: int) -> tuple[WorkerChannel, bytes, list[object]]:
    """A channel to local rank 3, which is this process; its address, and what comes through it."""
    told: list[object] = []
    name = f"\0holdfast-test-{os.getpid()}".encode()
    return WorkerChannel(name, lambda: {3: pid}, lambda _, message: told.append(message), told.append), name, told


async def test_what_a_worker_has_sent_is_read_though_it_takes_no_order_any_more() -> None:
    """Its training function has returned when the others are regrouped. This process stands for the worker."""
    channel, name, told = channel_of(os.getpid())
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as worker:
            worker.connect(name)
            channel.catch_up()
            worker.send(b'{"is": "unable"}')
        channel.send(3, {"do": "release"})
        channel.catch_up()
    finally:
        channel.close()
    assert told == [SaysUnable()]


async def test_a_process_of_another_container_is_no_worker_that_is_being_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both have the number 0."""
    channel, name, told = channel_of(0)
    monkeypatch.setattr(seqpacket, "peer", lambda _: (0, os.geteuid()))
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(name)
            stranger.send(b'{"is": "can_go_on", "generation": 2}')
            channel.catch_up()
    finally:
        channel.close()
    assert told == []


async def test_what_a_worker_has_sent_on_its_older_connection_comes_first() -> None:
    """It opens one for each training function. This process stands for the worker."""
    channel, name, told = channel_of(os.getpid())
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as older:
            older.connect(name)
            older.send(b'{"is": "unable"}')
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as newer:
                newer.connect(name)
                newer.send(b'{"is": "can_go_on", "generation": 2}')
                channel.catch_up()
    finally:
        channel.close()
    assert told == [SaysUnable(), SaysCanGoOn(2)]


@pytest.mark.parametrize("crew", [{"how": ("2=late",)}], indirect=True)
async def test_a_first_step_that_is_reported_when_the_next_regroup_has_begun_counts_for_its_generation(
    crew: Any,
) -> None:
    await crew.begin()
    await crew.lose(0)
    await crew.regroup(2, 1, 2)
    await settled(lambda: crew.noted("went_on"))
    await crew.lose(1)
    await crew.regroup(3, 2)
    noted = [(each["generation"], each["local_rank"], each["rank"]) for each in crew.noted("went_on")]
    assert noted == [(2, 1, 0), (2, 2, 1)], "as rank 1: it is rank 0 of the generation that was formed meanwhile"
    await crew.end()


async def test_a_hundred_generations_leave_nothing_open(crew: Any) -> None:
    await crew.begin()
    await crew.regroup(2, 0, 1, 2)
    before = crew.descriptors()
    for generation in range(3, 103):
        expected = RANKS * (generation - 2)
        await settled(lambda expected=expected: len(crew.noted("went_on")) == expected)
        await crew.regroup(generation, 0, 1, 2, safe_point=generation % 2)
    assert crew.descriptors() == before
    await crew.end()


@pytest.mark.parametrize("crew", [{"how": ("0=stubborn",), "stop_grace_s": 3600.0}], indirect=True)
async def test_a_child_in_its_own_session_is_killed_with_its_worker_and_has_no_grace_of_its_own(crew: Any) -> None:
    await crew.begin()
    worker, child = crew.pids()[0], int(crew.lines("0")[0].removeprefix("child "))
    assert os.getsid(child) == child
    crew.work = Work.STOPPING
    crew.group.signal(signal.SIGTERM, to_end=True)
    assert {(await crew.next(WorkerEnded)).local_rank for _ in (1, 2)} == {1, 2}
    assert processes.is_alive(worker)
    assert processes.is_alive(child)
    await crew.end()  # a grace for the child would be an hour
    assert not processes.is_alive(worker)
    assert not processes.is_alive(child)
