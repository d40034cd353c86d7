"""Real ranks with gloo that hang in different or missing collectives: torch's flight recorder says who is at which one."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from holdfast.diagnosis.causes import judge
from holdfast.diagnosis.hangs import examine
from holdfast.protocol.board_layout import BOARD_VARIABLE
from holdfast.protocol.outcome import Evidence, Failure, Verdict
from holdfast.protocol.rank_progress import Finding, HangKind, RankStory
from holdfast.supervisor import stack_sampler
from holdfast.supervisor.board import Board
from holdfast.supervisor.ends import read_error_file
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
        self._folder = folder
        self._number = 0
        """Number of cases so far."""
        self._pids: list[int] = []

    def _say(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        return self._process.stdout.readline()

    def _start(self, case: str) -> None:
        for rank in range(WORLD):
            self.board.clear(rank)
        self._number += 1
        self._pids = [int(pid) for pid in self._say(case).split()]

    def hung(self, case: str) -> Finding:
        """The finding about this case, once it is a hang."""
        self._start(case)
        found: list[Finding] = []

        def hangs() -> bool:
            found[:] = [asyncio.run(self._look())]
            return found[0].kind is HangKind.HUNG

        try:
            until(hangs, lambda: str(found), 60)
        finally:
            assert self._say("kill")
        return found[0]

    def verdict(self, case: str) -> Verdict:
        """The verdict on the ranks of this case, which end by themselves."""
        self._start(case)
        number = self._number - 1
        codes = [int(code) for code in self._say("wait").split()]
        failures = []
        for rank, code in enumerate(codes):
            recorded = read_error_file(f"{self._folder}/error{number}.{rank}")
            bare = Failure(rank=rank, local_rank=rank, host=f"node{rank}", pid=self._pids[rank], exit_code=code)
            failures.append(
                structs.replace(
                    bare,
                    error_type=recorded.error_type,
                    message=recorded.message,
                    traceback=recorded.traceback,
                    collective=recorded.collective,
                    tensors=recorded.tensors,
                    collectives=recorded.collectives,
                    stderr_tail=(self._folder / f"stderr{number}.{rank}").read_text()[-4096:],
                )
            )
        return judge(Evidence(generation=1, restarts=0, failures=tuple(failures), lost_nodes=(), gave_up=""))

    async def _look(self) -> Finding:
        sampler = StackSampler(self.board, generation=1, rank_of=int, started_epoch_s=time.time())
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


@pytest.fixture(autouse=True)
def patient_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks answer, however busy the machine is: without an answer a finding is a hang too, and shows less."""
    monkeypatch.setattr(stack_sampler, "RECORDED_S_MAX", limit_s(10))


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


OF_GROUP = "at group 1's collective 1"
IN_GROUPS = {
    "of_three_all_reduce/of_three_broadcast": ("HF244", f"rank 2 on node2 is {OF_GROUP} broadcast [1]"),
    "of_three_all_reduce/of_three_asleep": ("HF240", f"ranks 1 and 3 are {OF_GROUP} all_reduce [16]"),
    "of_two_all_reduce/of_two_asleep": ("HF240", f"rank 3 on node3 is {OF_GROUP} all_reduce [16]"),
}
"""Code, and the beginning of the line. Ranks outside of the group wait in a barrier, or sleep."""


@pytest.mark.parametrize("case", IN_GROUPS)
def test_in_a_smaller_group_no_rank_outside_of_it_is_named(jobs: Jobs, case: str) -> None:
    finding = jobs.hung(case)
    code, begins = IN_GROUPS[case]
    assert (finding.code, finding.culprits) == (code, (ODD,)), finding
    assert finding.collectives.startswith(begins)


RAISED = {
    "all_reduce/small_all_reduce": "ranks 0-1, 3 were at collective 6 all_reduce [4096] float32",
    "all_gather/small_all_gather": "ranks 0-1, 3 were at collective 6 all_gather [4] float32",
    "small_all_reduce/all_reduce": "rank 2 was at collective 6 all_reduce [4096] float32, ranks ",
}
"""What the ranks say that were not aborted: rank 2 in the first two cases, and one of its victims in the third."""


@pytest.mark.parametrize("case", RAISED)
def test_the_verdict_on_other_sizes_has_the_number_of_the_collective(jobs: Jobs, case: str) -> None:
    verdict = jobs.verdict(case)
    assert (verdict.code, verdict.culprit and verdict.culprit.rank) == ("HF225", ODD), verdict
    assert verdict.collectives.startswith(RAISED[case])
    assert "at 6 all_reduce [8] float32" in verdict.collectives or verdict.collectives == RAISED[case]


def test_the_exception_that_a_rank_handles_while_it_waits_in_a_collective_is_shown(jobs: Jobs) -> None:
    """Nothing of Python runs in its main thread until the collective ends."""
    finding = jobs.hung("all_reduce/handles")
    assert (finding.code, finding.culprits) == ("HF244", (ODD,)), finding
    assert (
        "handling ValueError: invalid literal for int() with base 10: 'bad row 17', raised at collective_rank.py:"
        in finding.text
    )
