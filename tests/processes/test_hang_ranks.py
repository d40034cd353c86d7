"""Three real ranks with gloo, one of which hangs in some way while the others wait: it is named, each time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import pytest

from holdfast.diagnosis.hangs import examine
from holdfast.protocol.board_layout import BOARD_VARIABLE
from holdfast.protocol.rank_progress import Finding, HangKind, RankSample, RankStory, Stage
from holdfast.supervisor import processes, stack_sampler
from holdfast.supervisor.board import Board
from holdfast.supervisor.stack_sampler import StackSampler
from holdfast.supervisor.worker_command import BOOTSTRAP
from tests.support.gloo_lines import without_gloo_lines
from tests.support.limits import limit_s
from tests.support.ports import free_port

pytest.importorskip("torch")
pytestmark = pytest.mark.xdist_group("hang_ranks")  # one job for all

SCRIPT = Path(__file__).parent / "scripts" / "hang_ranks.py"
WORLD, ODD = 3, 1
LOOKS, GAP_S = 3, limit_s(0.1)
"""Between two looks a rank that spins must get more than places.BUSY_S of a processor: more time on a slow machine."""
DEADLINE_S = limit_s(60.0)


@dataclass(frozen=True)
class Rank:
    pid: int
    orders: FileIO
    answers: FileIO


class Job:
    """Ranks that do as they are told, forked from one process that has imported torch."""

    def __init__(self) -> None:
        self.busy: set[int] = set()
        """Ranks that were given an order and have not said that it is over."""
        self.board = Board(WORLD)
        common = {"WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environments = [
            {**common, BOARD_VARIABLE: self.board.address(rank), "RANK": str(rank)} for rank in range(WORLD)
        ]
        orders, answers = [os.pipe() for _ in range(WORLD)], [os.pipe() for _ in range(WORLD)]
        theirs = [(read, write) for (read, _), (_, write) in zip(orders, answers, strict=True)]
        passed = [fd for pair in theirs for fd in pair]
        line = [sys.executable, "-u", str(SCRIPT), BOOTSTRAP, json.dumps(environments)]
        self._parent = subprocess.Popen(
            [*line, *(f"{read},{write}" for read, write in theirs)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            pass_fds=passed,
            start_new_session=True,
            bufsize=0,
        )
        for fd in passed:
            os.close(fd)
        assert isinstance(self._parent.stdout, FileIO)
        pids = map(int, self._line(self._parent.stdout).split())
        self.ranks = [
            Rank(pid, FileIO(write, "w"), FileIO(read))
            for pid, (_, write), (read, _) in zip(pids, orders, answers, strict=True)
        ]

    def tell(self, rank: int, word: str) -> None:
        self.busy.add(rank)
        self.ranks[rank].orders.write(f"{word}\n".encode())
        assert self.hear(rank) == "doing"

    def hear(self, rank: int) -> str:
        answer = self._line(self.ranks[rank].answers)
        while answer and not without_gloo_lines(f"{answer}\n"):
            answer = self._line(self.ranks[rank].answers)
        if answer == "ok":
            self.busy.discard(rank)
        return answer

    @staticmethod
    def _line(stream: FileIO) -> str:
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            assert selector.select(DEADLINE_S), "nothing is said"
        return stream.readline().decode().strip()

    def all_do(self, word: str) -> None:
        for rank in range(WORLD):
            self.tell(rank, word)
        self.all_are_done()

    def all_are_done(self) -> None:
        assert [self.hear(rank) for rank in range(WORLD)] == ["ok"] * WORLD

    async def looks(self) -> Finding:
        """An examination, as the coordinator makes it."""
        stack_sampler = StackSampler(self.board, generation=1, rank_of=int, started_epoch_s=time.time())
        samples: list[tuple[RankSample, ...]] = []
        for number in range(LOOKS):
            await asyncio.sleep(GAP_S if number else 0.0)
            samples.append(await stack_sampler.look({rank: each.pid for rank, each in enumerate(self.ranks)}, None))
        await stack_sampler.close()
        return examine(
            [RankStory(rank, f"node{rank}", rank, 71.0, tuple(each[rank] for each in samples)) for rank in range(WORLD)]
        )

    def found(self, kind: HangKind) -> Finding:
        """The finding, once it is of this kind: how fast the ranks come to where they stay is the machine's affair."""
        deadline = time.monotonic() + DEADLINE_S
        while (finding := asyncio.run(self.looks())).kind is not kind:
            assert time.monotonic() < deadline, finding
        return finding

    def release(self, rank: int) -> None:
        """End what it does, and wait until it answers."""
        self.send_signal(rank, signal.SIGCONT)
        pid = self.ranks[rank].pid
        for child in processes.families({pid: b""})[pid]:
            os.kill(child.pid, signal.SIGKILL)
        deadline = time.monotonic() + DEADLINE_S
        with selectors.DefaultSelector() as selector:
            selector.register(self.ranks[rank].answers, selectors.EVENT_READ)
            while True:
                # The kernel may give a signal to another thread, and Python may have looked for signals just before it
                # waits for the lock: then the main thread sleeps on, and needs another one.
                self.send_signal(rank, signal.SIGUSR1)
                if selector.select(1.0):
                    return
                assert time.monotonic() < deadline, f"rank {rank} is not released"

    def release_all(self) -> None:
        for rank in range(WORLD):
            self.release(rank)
        self.all_are_done()

    def rejoins(self, rank: int) -> None:
        """It is released, and does what the others wait for."""
        self.release(rank)
        assert self.hear(rank) == "ok"
        self.tell(rank, "reduce")
        self.all_are_done()

    def send_signal(self, rank: int, signum: int) -> None:
        os.kill(self.ranks[rank].pid, signum)

    def close(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.orders.close()
            rank.answers.close()
        self._parent.wait()
        self._parent.stdout.close()
        self.board.close()


@contextlib.contextmanager
def new_job() -> Iterator[Job]:
    made = Job()
    try:
        assert [made.hear(rank) for rank in range(WORLD)] == ["up"] * WORLD
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def shared_job() -> Iterator[Job]:
    """One for all tests: after each the ranks are where they were."""
    with new_job() as made:
        yield made


@pytest.fixture
def job(shared_job: Job) -> Iterator[Job]:
    """The shared one; another one after a test that failed before the ranks were free again."""
    with new_job() if shared_job.busy else contextlib.nullcontext(shared_job) as made:
        yield made


HANGS = {
    "asleep": ("HF240", "rank 1 on node1 is in time.sleep at hang_rank.py:"),
    "spin": ("HF240", "rank 1 on node1 is in spin at hang_rank.py:"),
    "spin_over_two_lines": ("HF240", "rank 1 on node1 is in spin_over_two_lines at hang_rank.py:"),
    "regex": ("HF240", "rank 1 on node1 is in match at hang_rank.py:"),
    "native": ("HF240", "rank 1 on node1 is in native at hang_rank.py:"),
    "loader": ("HF243", "rank 1 on node1 waits for its data loader at hang_rank.py:"),
    "event_and_metrics": ("HF240", "rank 1 on node1 is in wait at hang_rank.py:"),
    "silent_peer_and_metrics": ("HF240", "rank 1 on node1 is in silent_peer_and_metrics at hang_rank.py:"),
    "lock_and_sampler": ("HF240", "rank 1 on node1 is in lock_and_sampler at hang_rank.py:"),
    "loop_over_functions": ("HF240", "rank 1 on node1 is in "),
    "refused": ("HF240", "rank 1 on node1 is in "),
    "handles": ("HF240", "rank 1 on node1 is in wait at hang_rank.py:"),
    "dead_queue": ("HF243", "rank 1 on node1 waits for another process at hang_rank.py:"),
}


@pytest.mark.parametrize("word", HANGS)
def test_the_rank_that_hangs_is_named(job: Job, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if word == "handles":
        # The program is read and the rank answers, however busy the machine is: a finding without the answer is a hang.
        for limit in ("READ_S_MAX", "PARSE_S_MAX", "HANDLED_S_MAX"):
            monkeypatch.setattr(stack_sampler, limit, limit_s(10))
    code, words = HANGS[word]
    for rank in range(WORLD):
        job.tell(rank, word if rank == ODD else "reduce")
    finding = job.found(HangKind.HUNG)
    assert (finding.code, finding.culprits) == (code, (ODD,)), finding
    assert finding.text.startswith(words)
    assert finding.text.partition("; 2 others")[2].startswith(" wait in all_reduce at hang_rank.py:"), finding.text
    assert "is stopped" in finding.text or word != "loader"
    assert "is dead" in finding.text or word != "dead_queue"
    assert "handling ValueError: shard 17 is corrupt, raised at hang_rank.py:" in finding.text or word != "handles"
    if word in ("asleep", "spin_over_two_lines"):
        assert job.found(HangKind.HUNG).signature == finding.signature
    job.rejoins(ODD)


def test_the_rank_that_is_stopped_is_named(job: Job) -> None:
    for rank in (0, 2):
        job.tell(rank, "reduce")
    job.send_signal(ODD, signal.SIGSTOP)
    finding = job.found(HangKind.HUNG)
    assert (finding.code, finding.culprits) == ("HF242", (ODD,)), finding
    assert f"kill -CONT {job.ranks[ODD].pid}" in finding.text
    job.send_signal(ODD, signal.SIGCONT)
    job.tell(ODD, "reduce")
    job.all_are_done()


def test_evaluation_on_one_rank_is_no_hang(job: Job) -> None:
    for rank in range(WORLD):
        job.tell(rank, "evaluate" if rank == 0 else "reduce")
    finding = job.found(HangKind.MOVING)
    assert finding.text.startswith("rank 0 on node0 is in forward at hang_rank.py:"), finding.text
    job.rejoins(0)


def test_a_rank_that_polls_a_file_pauses(job: Job) -> None:
    for rank in range(WORLD):
        job.tell(rank, "polls_a_file" if rank == 0 else "barrier")
    finding = job.found(HangKind.PAUSED)
    assert (finding.culprits, finding.lively) == ((0,), True), finding
    assert finding.text.startswith("rank 0 on node0 is polling os.path.exists at hang_rank.py:"), finding.text
    job.release(0)
    assert job.hear(0) == "ok"
    job.tell(0, "barrier")
    job.all_are_done()


def test_evaluation_on_all_ranks_is_no_hang(job: Job) -> None:
    for rank in range(WORLD):
        job.tell(rank, "evaluate")
    assert asyncio.run(job.looks()).kind in (HangKind.MOVING, HangKind.PAUSED)
    job.release_all()


def test_a_sleep_that_all_share_is_a_pause(job: Job) -> None:
    for rank in range(WORLD):
        job.tell(rank, "asleep")
    finding = job.found(HangKind.PAUSED)
    assert finding.culprits == ()
    job.release_all()


def test_their_own_part_of_a_step(job: Job) -> None:
    for _ in range(4):
        job.all_do("step")
    before = job.board.progress(time.monotonic_ns())
    time.sleep(0.2)  # all of it passes before the next backward
    job.all_do("step")
    job.all_do("step")
    after = job.board.progress(time.monotonic_ns())
    for one, other in zip(before, after, strict=True):
        assert one.stage is other.stage is Stage.STEPPING
        assert other.steps == one.steps + 2
        assert other.own_s - one.own_s > 0.2
