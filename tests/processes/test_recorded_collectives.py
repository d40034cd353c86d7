"""Real ranks with gloo that hang in different or missing collectives: torch's flight recorder says who is at which one."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.diagnosis.hangs import examine
from holdfast.protocol.board_layout import BOARD_VARIABLE
from holdfast.protocol.rank_progress import Finding, HangKind, RankStory
from holdfast.supervisor.board import Board
from holdfast.supervisor.stack_sampler import StackSampler
from holdfast.supervisor.worker_command import BOOTSTRAP
from tests.support.limits import limit_s, until

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.xdist_group("hang_ranks"),  # one import of torch for all
    pytest.mark.skipif(
        not hasattr(torch._C._distributed_c10d, "FlightRecorderHook"),
        reason=f"torch {torch.__version__} does not record the collectives of every backend; 2.15 does",
    ),
]

CASES = Path(__file__).parent / "scripts" / "collective_cases.py"
WORLD, ODD = 4, 2
LOOKS, GAP_S = 3, limit_s(0.1)

MISSING = {
    "all_reduce": "6 all_reduce [4096] float32",
    "barrier": "6 barrier",
    "broadcast": "6 broadcast [1] float32",
    "reduce": "6 reduce [64] float32",
    "all_gather": "6 all_gather [4] float32",
    "gather": "6 gather [4] float32",
    "scatter": "6 scatter",
    "all_to_all": "6 all_to_all [4] float32",
    "objects": "6 all_gather [1] int64",
    "two_async": "6 all_reduce [16] float32",
}
"""What the others are at while rank 2 sleeps, by what they call."""
MISMATCHED = {
    "all_reduce/barrier": ("6 barrier", "6 all_reduce [4096] float32"),
    "all_reduce/broadcast": ("6 broadcast [1] float32", "6 all_reduce [4096] float32"),
    "all_reduce/all_gather": ("6 all_gather [4] float32", "6 all_reduce [4096] float32"),
    "barrier/all_gather": ("6 all_gather [4] float32", "6 barrier"),
    "all_reduce/reduce": ("6 reduce [64] float32", "6 all_reduce [4096] float32"),
    "all_gather/all_to_all": ("6 all_to_all [4] float32", "6 all_gather [4] float32"),
    "all_reduce+all_reduce/all_reduce": ("7 barrier", "7 all_reduce [4096] float32"),
    "broadcast/barrier": ("6 barrier", "6 broadcast [1] float32"),
    "gather/broadcast": ("6 broadcast [1] float32", "6 gather [4] float32"),
    "scatter/barrier": ("6 barrier", "6 scatter"),
}
"""What rank 2 and the others are at, by what the others and rank 2 call."""


class Jobs:
    """Jobs of four ranks, one after the other, forked from one process that has imported torch."""

    def __init__(self, folder: Path) -> None:
        self.board = Board(WORLD)
        self._environments = [
            {BOARD_VARIABLE: self.board.address(rank), "RANK": str(rank), "OMP_NUM_THREADS": "1"}
            for rank in range(WORLD)
        ]
        line = [sys.executable, "-u", str(CASES), BOOTSTRAP, json.dumps(self._environments), str(folder)]
        self._output = (folder / "output").open("w")
        self._process = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._output, text=True, bufsize=1
        )
        self._pids: list[int] = []

    def _say(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        return self._process.stdout.readline()

    def hung(self, case: str) -> Finding:
        """The finding about this case, once it is a hang."""
        for rank in range(WORLD):
            self.board.clear(rank)
        self._pids = [int(pid) for pid in self._say(case).split()]
        found: list[Finding] = []

        def hangs() -> bool:
            found[:] = [asyncio.run(self._look())]
            return found[0].kind is HangKind.HUNG

        try:
            until(hangs, lambda: str(found), 60)
        finally:
            assert self._say("") == "gone\n"
        return found[0]

    async def _look(self) -> Finding:
        sampler = StackSampler(self.board, generation=1, rank_of=int)
        looks = []
        for number in range(LOOKS):
            await asyncio.sleep(GAP_S if number else 0.0)
            looks.append(await sampler.look(dict(enumerate(self._pids)), None))
        await sampler.close()
        return examine(
            [RankStory(rank, f"node{rank}", rank, 71.0, tuple(each[rank] for each in looks)) for rank in range(WORLD)]
        )

    def close(self) -> None:
        self._process.communicate(timeout=limit_s(20))
        self._output.close()
        self.board.close()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    made = Jobs(tmp_path_factory.mktemp("jobs"))
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("call", MISSING)
def test_the_last_collective_of_a_missing_rank_and_that_of_the_others_are_shown(jobs: Jobs, call: str) -> None:
    finding = jobs.hung(f"{call}/asleep")
    assert (finding.code, finding.culprits) == ("HF240", (ODD,)), finding
    own, _, others = finding.collectives.partition(", 3 others are at ")
    assert own == "rank 2 on node2 has done collective 5 all_reduce [8] float32 and begun no other"
    assert others.partition(" (collective_rank.py:")[0] == MISSING[call]


@pytest.mark.parametrize("case", MISMATCHED)
def test_the_collective_of_a_rank_that_calls_another_one_is_shown(jobs: Jobs, case: str) -> None:
    finding = jobs.hung(case)
    assert (finding.code, finding.culprits) == ("HF244", (ODD,)), finding
    own, _, others = finding.collectives.partition(", 3 others at ")
    expected = MISMATCHED[case]
    assert own.partition(" (collective_rank.py:")[0] == f"rank 2 on node2 is at collective {expected[0]}"
    assert others.partition(" (collective_rank.py:")[0] == expected[1]


def test_the_exception_that_a_rank_handles_while_it_waits_in_a_collective_is_shown(jobs: Jobs) -> None:
    """Nothing of Python runs in its main thread until the collective ends."""
    finding = jobs.hung("all_reduce/handles")
    assert (finding.code, finding.culprits) == ("HF244", (ODD,)), finding
    assert (
        "handling ValueError: invalid literal for int() with base 10: 'bad row 17', raised at collective_rank.py:"
        in finding.text
    )
