"""What is told of workers, on a loop of its own."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from holdfast.agent.events import Event, WorkersProgress
from holdfast.protocol import board_layout as layout
from holdfast.protocol.messages import Start
from holdfast.protocol.rank_progress import RankSample, Stage
from holdfast.supervisor import board as board_module
from holdfast.supervisor.board import Board, Observer
from tests.support.limits import limit_s

pytestmark = pytest.mark.usefixtures("patient_looks")


class Post:
    """An observer of one worker: this very process."""

    def __init__(self, tasks: asyncio.TaskGroup, folder: Path | None) -> None:
        self.told: list[Event] = []
        self.faults: list[str] = []
        self.news = asyncio.Event()
        self.board = Board(1)
        self.observer = Observer(tasks, self._emit, folder=folder, fault=self._failed)
        self.observer.start(Start(3, "127.0.0.1", 1, 0.01), self.board, int, self.report)

    def report(self, generation: int) -> WorkersProgress:
        return WorkersProgress(generation, self.board.progress(0), *self.board.job_position([0]))

    def _emit(self, event: Event) -> None:
        self.told.append(event)
        self.news.set()

    def _failed(self, what: str, error: Exception) -> None:
        self.faults.append(f"{what}: {error}")

    async def until(self, kind: type[Event]) -> Event:
        while not (found := [event for event in self.told if isinstance(event, kind)]):
            self.news.clear()
            await self.news.wait()
        return found[0]


def observe(act: Callable[[Post], Awaitable[None]], folder: Path | None = None) -> Post:
    async def run() -> Post:
        async with asyncio.timeout(limit_s(20)), asyncio.TaskGroup() as tasks:
            post = Post(tasks, folder)
            try:
                await act(post)
            finally:
                await post.observer.close()
                post.board.close()
        return post

    return asyncio.run(run())


def test_progress_is_told_again_and_again_until_it_stops() -> None:
    async def act(post: Post) -> None:
        await post.until(WorkersProgress)
        post.told.clear()
        event = await post.until(WorkersProgress)
        assert isinstance(event, WorkersProgress)
        assert event.generation == 3
        assert [rank.local_rank for rank in event.ranks] == [0]
        post.observer.stop()
        post.told.clear()
        await asyncio.sleep(0.05)
        assert post.told == []

    observe(act)


def test_a_spare_is_told_as_one_and_its_old_step_is_not_the_jobs() -> None:
    board = Board(2)
    try:
        for rank, step in enumerate((50, 30)):
            board._words[layout.slot(rank) + layout.AT] = step + 1
            board._words[layout.slot(rank) + layout.TOTAL] = 100
        board._words[layout.slot(1) + layout.BEATS] = 5
        assert board.job_position([0, 1]) == (30, 100)
        board._words[layout.slot(0) + layout.SAVES] = 1
        assert not board.all_save([0, 1])
        board._words[layout.slot(1) + layout.SPARE] = 1
        assert board.job_position([0, 1]) == (50, 100)
        assert board.all_save([0, 1])
        assert [each.stage for each in board.progress(0)] == [Stage.STARTING, Stage.SPARE]
    finally:
        board.close()


def samples_of(generation: int) -> tuple[tuple[RankSample, ...], list[str]]:
    """What is seen of the worker in a look at this generation, and the faults."""
    seen: list[RankSample] = []

    async def look(post: Post) -> None:
        seen.extend(await post.observer.samples(generation, {0: os.getpid()}))

    faults = observe(look).faults
    return tuple(seen), faults


def test_workers_are_sampled_while_their_generation_runs() -> None:
    (sample,), faults = samples_of(3)
    assert (sample.pid, faults) == (os.getpid(), [])
    assert samples_of(2) == ((), [])


def test_what_was_recorded_before_the_first_question_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "trace_"))

    async def record_and_look(post: Post) -> None:
        (tmp_path / "trace_0").write_bytes(b"of this generation")
        os.utime(tmp_path / "trace_0", (time.time(), time.time()))
        await asyncio.sleep(0.05)
        await post.observer.samples(3, {0: os.getpid()})

    observe(record_and_look, tmp_path)
    assert (tmp_path / "stacks" / "gen3_nccl_trace_rank0").read_bytes() == b"of this generation"


def test_a_look_that_fails_shows_nobody_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> tuple[RankSample, ...]:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(board_module.StackSampler, "look", broken)
    assert samples_of(3) == ((), ["look: can't start new thread"])


def test_a_board_that_is_closed_during_a_look_is_no_fault() -> None:
    """The workers have ended meanwhile, and others are started."""

    async def close_and_look(post: Post) -> None:
        post.observer.stop()
        looking = asyncio.create_task(post.observer.samples(3, {0: os.getpid()}))
        await asyncio.sleep(0)  # it has begun
        post.board.close()
        await looking
        post.board = Board(1)

    assert observe(close_and_look).faults == []


# --- the pipe of the board: what workers report, and what anything else writes there ----------------------------------


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board(3)
    yield board
    board.close()


def write(board: Board, raw: bytes) -> None:
    """As a worker does: by the number that the board holds."""
    path = board.address(0).rpartition("@")[0]
    with open(path, "rb") as file:
        number = int.from_bytes(os.pread(file.fileno(), 8, layout.RAISED * layout.WORD_BYTES), "little")
    with open(f"{os.path.dirname(path)}/{number}", "wb", buffering=0) as pipe:
        pipe.write(raw)


def report(local_rank: int) -> bytes:
    return layout.slot(local_rank).to_bytes(layout.REPORT_BYTES, "little")


def test_each_report_is_read_once(board: Board) -> None:
    assert board.raised() == set()
    write(board, report(2) + report(0) + report(2))
    assert board.raised() == {0, 2}
    assert board.raised() == set()


@pytest.mark.parametrize("raw", [b"\0" * 4, b"\xff" * 4, report(3), b"!", b"#" * 60_000])
def test_what_is_no_slot_of_a_worker_is_ignored(board: Board, raw: bytes) -> None:
    write(board, raw)
    seen = set[int]()
    for _ in range(1_000):
        seen |= board.raised()
    assert seen == set()
    write(board, report(1))
    assert board.raised() == {1}
