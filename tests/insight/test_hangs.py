"""What is found in the samples of 8 ranks on 2 nodes: kind, code, whom it names, and the words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from msgspec import structs

from holdfast.core.hang import Finding, HangKind, RankStory
from holdfast.core.stacks import Frame, RankSample
from holdfast.insight.hangs import examine

SITE = "/env/lib/python3.11/site-packages"
STD = "/usr/lib/python3.11"
C10D = f"{SITE}/torch/distributed/distributed_c10d.py"

TRAIN = Frame("/srv/train.py", 42, "main")
START = Frame("/srv/train.py", 90, "<module>")
LOGGED = Frame(f"{SITE}/torch/distributed/c10d_logger.py", 83, "wrapper")
CALL = Frame(f"{SITE}/torch/nn/modules/module.py", 1789, "_call_impl")


def stack(*inner: Frame, at: int = 42) -> tuple[Frame, ...]:
    return (*inner, Frame(TRAIN.file, at, TRAIN.function), START)


ALL_REDUCE = stack(Frame(C10D, 3252, "all_reduce"), LOGGED)
BARRIER = stack(Frame(C10D, 5356, "barrier"), LOGGED, at=50)
BACKWARD = stack(
    Frame(f"{SITE}/torch/autograd/graph.py", 979, "_engine_run_backward"),
    Frame(f"{SITE}/torch/autograd/__init__.py", 395, "backward"),
    Frame(f"{SITE}/torch/_tensor.py", 623, "backward"),
    at=40,
)
INIT = stack(
    Frame(f"{SITE}/torch/distributed/rendezvous.py", 198, "_create_c10d_store"),
    Frame(f"{SITE}/torch/distributed/rendezvous.py", 278, "_env_rendezvous_handler"),
    Frame(C10D, 1800, "init_process_group"),
    LOGGED,
    at=10,
)
FORWARD = stack(Frame(f"{SITE}/torch/nn/modules/linear.py", 134, "forward"), CALL, at=60)
OTHER_FORWARD = stack(Frame(f"{SITE}/torch/nn/modules/conv.py", 553, "forward"), CALL, at=60)
LOADER = stack(
    Frame(f"{STD}/selectors.py", 415, "select"),
    Frame(f"{STD}/multiprocessing/connection.py", 930, "wait"),
    Frame(f"{STD}/multiprocessing/queues.py", 113, "get"),
    Frame(f"{SITE}/torch/utils/data/dataloader.py", 1291, "_try_get_data"),
    Frame(f"{SITE}/torch/utils/data/dataloader.py", 725, "__next__"),
    at=30,
)
QUEUE = stack(Frame(f"{STD}/multiprocessing/queues.py", 103, "get"), at=31)
DATA = (Frame("/srv/data.py", 17, "fetch"), *stack(at=30))
SPINS = (Frame("/srv/data.py", 20, "spin"), *stack(at=30))
SPINS_ON = (Frame("/srv/data.py", 21, "spin"), *stack(at=30))
REGEX = (Frame(f"{STD}/re/__init__.py", 166, "match"), Frame("/srv/text.py", 9, "clean"), *stack(at=30))
SAVES = stack(
    Frame(f"{SITE}/torch/serialization.py", 900, "_save"), Frame(f"{SITE}/torch/serialization.py", 800, "save")
)
SHARDED_SAVE = stack(Frame(f"{SITE}/torch/distributed/checkpoint/filesystem.py", 500, "_write_item"), at=70)
PLAIN = stack(at=55)


@dataclass(frozen=True)
class Rank:
    """Three samples of one rank."""

    frames: Sequence[tuple[Frame, ...]]
    state: str = "S"
    busy: bool = False
    starved: bool = False
    """It waits for a processor all the while."""
    hindered: bool = False
    """It computes a little and sleeps a little, and waits for a processor in between."""
    starved_children: bool = False
    stirs: bool = False
    main_cpu_s: float = 0.0
    """Processor time of its main thread between two samples."""
    children: bool = False
    """Its children use the processor."""
    saves: int = 0
    """Bytes between two samples, of its own and of its children's each half."""
    talks: int = 0
    """Bytes between two samples, over the network."""
    disk: bool = False
    copies: bool = False
    note: str = ""
    source: str = ""
    samples: int = 3
    gap_s: float = 1.7


def steady(frames: tuple[Frame, ...], state: str = "S", **more: object) -> Rank:
    return Rank([frames] * 3, state, **more)  # type: ignore[arg-type]


WAITS = steady(ALL_REDUCE)


def story(number: int, rank: Rank) -> RankStory:
    samples = tuple(
        RankSample(
            local_rank=number % 4,
            pid=4700 + number,
            state=rank.state,
            cpu_s=10.0 + index * (1.9 if rank.busy else 0.1 if rank.hindered else 0.01),
            frames=frames,
            note=rank.note,
            source=rank.source,
            main_cpu_s=8.0 + index * (rank.main_cpu_s or (0.04 if rank.stirs else 0.01)),
            moved_bytes=index * (50_000_000 if rank.copies else 9_000 + rank.saves // 2),
            children_cpu_s=3.0 + index * (1.9 if rank.children else 0.02),
            children_bytes=index * rank.saves // 2,
            disk_bytes=10**12 + index * (80_000_000 if rank.disk else 0),
            at_s=100.0 + index * rank.gap_s,
            talked_bytes=index * rank.talks,
            wanted_s=index * (1.6 if rank.starved else 0.75 if rank.hindered else 0.3),
            children_wanted_s=index * (1.6 if rank.starved_children else 0.3),
        )
        for index, frames in enumerate(rank.frames)
    )
    return RankStory(number, "a" if number < 4 else "b", number % 4, 71.0, samples[3 - rank.samples :])


def found(odd: dict[int, Rank], others: Rank = WAITS, world: int = 8) -> Finding:
    return examine([story(number, odd.get(number, others)) for number in range(world)])


SLEEPS = steady(DATA, source="    time.sleep(3600)  # wait for the disk")
OTHERS = "7 others wait in all_reduce at train.py:42"
CASES: dict[str, tuple[Finding, HangKind, str, tuple[int, ...], str]] = {
    "asleep": (
        found({3: SLEEPS}), HangKind.HUNG, "HF240", (3,),
        f"rank 3 on a is in time.sleep at data.py:17 for 71 s; {OTHERS}",
    ),
    "spinning": (
        found({5: Rank([SPINS, SPINS_ON, SPINS], "R", busy=True, source="    turns += 1")}), HangKind.HUNG, "HF240", (5,),
        f"rank 5 on b is in spin at data.py:20 for 71 s, using the processor; {OTHERS}",
    ),
    "stopped": (
        found({6: Rank([()] * 3, "T")}), HangKind.HUNG, "HF242", (6,),
        f"rank 6 on b is stopped by a signal (kill -CONT 4706 lets it go on) for 71 s; {OTHERS}",
    ),
    "stopped, while another one works": (
        found({6: Rank([()] * 3, "T"), 1: Rank([FORWARD, OTHER_FORWARD, FORWARD], "R", busy=True)}),
        HangKind.HUNG, "HF242", (6,), "rank 6 on b is stopped by a signal",
    ),
    "all stopped": (found({}, Rank([()] * 3, "T")), HangKind.HUNG, "HF242", tuple(range(8)), "kill -CONT 4700"),
    "in a regular expression, with the lock": (
        found({0: steady(REGEX, "R", busy=True)}), HangKind.HUNG, "HF240", (0,),
        f"rank 0 on a is in match at text.py:9 for 71 s, busy outside Python; {OTHERS}",
    ),
    "no Python stack, busy": (
        found({2: Rank([()] * 3, "R", busy=True)}), HangKind.HUNG, "HF240", (2,),
        "rank 2 on a is busy without a Python stack (process 4702) for 71 s",
    ),
    "no Python stack, asleep": (
        found({2: Rank([()] * 3)}), HangKind.HUNG, "HF240", (2,), "asleep without a Python stack (process 4702)",
    ),
    "in the kernel": (found({2: Rank([()] * 3, "D")}), HangKind.HUNG, "HF240", (2,), "a disk or a device does not"),
    "a node that does not answer": (
        found({number: Rank([]) for number in range(4, 8)}), HangKind.HUNG, "HF240", (4, 5, 6, 7),
        "ranks 4 to 7 on b are not heard of (its node did not answer) for 71 s; 4 others wait in all_reduce",
    ),
    "a stopped loader": (
        found({4: steady(LOADER, note="its data loader's process 99 is stopped")}), HangKind.HUNG, "HF243", (4,),
        "rank 4 on b waits for its data loader at train.py:30 (its data loader's process 99 is stopped) for 71 s; "
        + OTHERS,
    ),
    "a loader that is only slow": (
        found({4: steady(LOADER, note="its data loader's process waits too (99)")}), HangKind.HUNG, "HF243", (4,),
        "rank 4 on b waits for its data loader at train.py:30 (its data loader's process waits too (99)) for 71 s",
    ),
    "a dead process behind a queue": (
        found({4: steady(QUEUE, note="its process (python) 99 is dead")}), HangKind.HUNG, "HF243", (4,),
        "rank 4 on b waits for another process at train.py:31 (its process (python) 99 is dead) for 71 s",
    ),
    "a stopped loader in a world of one": (
        found({}, steady(LOADER, note="its data loader's process 99 is stopped"), world=1), HangKind.HUNG, "HF243",
        (0,), "its data loader's process 99 is stopped",
    ),
    "a stopped child that nobody waits for": (
        found({}, steady(ALL_REDUCE, note="its process (tensorboard) 99 is stopped")), HangKind.STUCK, "HF241", (),
        "all 8 ranks wait in all_reduce at train.py:42 (its process (tensorboard) 99 is stopped) for 71 s",
    ),
    "all in one collective": (
        found({}), HangKind.STUCK, "HF241", (), "all 8 ranks wait in all_reduce at train.py:42 for 71 s",
    ),
    "all in init_process_group": (
        found({}, steady(INIT)), HangKind.STUCK, "HF241", (), "all 8 ranks wait in init_process_group at train.py:10",
    ),
    "in another collective": (
        found({7: steady(BARRIER)}), HangKind.HUNG, "HF244", (7,),
        f"rank 7 on b waits in barrier at train.py:50 for 71 s; {OTHERS}",
    ),
    "half of them in another collective": (
        found({number: steady(BARRIER) for number in range(4)}), HangKind.HUNG, "HF244", (),
        "ranks 0 to 3 on a wait in barrier at train.py:50 for 71 s; 4 others wait in all_reduce at train.py:42",
    ),
    "waiting in backward": (
        found({1: SLEEPS}, steady(BACKWARD)), HangKind.HUNG, "HF240", (1,),
        "7 others wait in backward at train.py:40",
    ),
    "computing in backward": (found({1: steady(BACKWARD, "R", busy=True)}), HangKind.MOVING, "", (), "rank 1 on a"),
    "others in backward, others in all_reduce": (
        found({1: SLEEPS, 2: steady(BACKWARD)}), HangKind.HUNG, "HF240", (1,),
        "6 others wait in all_reduce at train.py:42; rank 2 on a waits in backward at train.py:40",
    ),
    "evaluation on one rank": (
        found({0: Rank([FORWARD, OTHER_FORWARD, FORWARD], "R", busy=True)}, steady(BARRIER)), HangKind.MOVING, "", (),
        "rank 0 on a is in forward at train.py:60 for 71 s",
    ),
    "evaluation on one rank, all samples alike": (
        found({0: steady(FORWARD, "R", busy=True)}, steady(BARRIER)), HangKind.MOVING, "", (), "rank 0 on a",
    ),
    "evaluation on all ranks": (
        found({}, Rank([FORWARD, OTHER_FORWARD, FORWARD], "R", busy=True)), HangKind.MOVING, "", (), "ranks 0 to 7 are",
    ),
    "a forward that nobody advances": (found({2: steady(FORWARD)}, steady(BARRIER)), HangKind.HUNG, "HF240", (2,), ""),
    "saving on one rank": (
        found({0: Rank([SAVES, SHARDED_SAVE, SAVES], "D")}, steady(BARRIER)), HangKind.MOVING, "", (), "rank 0 on a",
    ),
    "a save that does not end": (
        found({0: steady(SAVES, "D")}, steady(BARRIER)), HangKind.HUNG, "HF240", (0,),
        "rank 0 on a is in save at train.py:42 for 71 s; 7 others wait in barrier at train.py:50",
    ),
    "a sharded save is no communication": (
        found({0: steady(SHARDED_SAVE)}), HangKind.HUNG, "HF240", (0,), "in _write_item at train.py:70",
    ),
    "all asleep": (
        found({}, SLEEPS), HangKind.PAUSED, "", (),
        "ranks 0 to 7 are in time.sleep at data.py:17 for 71 s; nobody waits for another rank",
    ),
    "asleep each time, and yet at work": (
        found({3: replace(SLEEPS, stirs=True)}), HangKind.PAUSED, "HF240", (3,),
        f"rank 3 on a is in time.sleep at data.py:17 for 71 s; {OTHERS}",
    ),
    "one works, one does not": (
        found({3: replace(SLEEPS, stirs=True), 4: SLEEPS}), HangKind.HUNG, "HF240", (3, 4),
        "ranks 3 and 4 are in time.sleep at data.py:17 for 71 s; 6 others wait in all_reduce at train.py:42",
    ),
    "rank 0 alone, the others in a barrier": (
        found({0: SLEEPS}, steady(BARRIER)), HangKind.HUNG, "HF240", (0,),
        "rank 0 on a is in time.sleep at data.py:17 for 71 s; 7 others wait in barrier at train.py:50",
    ),
    "one that writes for minutes, in one call": (
        found({3: steady(SAVES, "D", copies=True)}), HangKind.MOVING, "", (), "rank 3 on a",
    ),
    "a collective that is slow": (found({}, steady(ALL_REDUCE, copies=True)), HangKind.MOVING, "", (), "ranks 0 to 7 are"),
    "rank 1 alone, the others in a barrier": (
        found({1: SLEEPS}, steady(BARRIER)), HangKind.HUNG, "HF240", (1,),
        "rank 1 on a is in time.sleep at data.py:17 for 71 s; 7 others wait in barrier at train.py:50",
    ),
    "rank 0 is stopped, the others in a barrier": (
        found({0: Rank([()] * 3, "T")}, steady(BARRIER)), HangKind.HUNG, "HF242", (0,),
        "rank 0 on a is stopped by a signal (kill -CONT 4700 lets it go on) for 71 s; 7 others wait in barrier at train.py:50",
    ),
    "all wait for data": (found({}, steady(LOADER)), HangKind.PAUSED, "", (), "nobody waits for another rank"),
    "a world of one in communication": (
        found({}, WAITS, world=1), HangKind.PAUSED, "", (), "rank 0 on a waits in all_reduce at train.py:42 for 71 s",
    ),
    "a world of one that stands": (
        found({}, SLEEPS, world=1), HangKind.PAUSED, "HF246", (0,), "rank 0 on a is in time.sleep at data.py:17 for 71 s",
    ),
    "a world of one that sleeps and works": (
        found({}, replace(SLEEPS, stirs=True), world=1), HangKind.PAUSED, "", (), "nobody waits for another rank",
    ),
    "one that waits for the device": (
        found({3: SLEEPS}, steady(PLAIN, source="total += loss.item()")), HangKind.HUNG, "HF240", (3,),
        "7 others wait in item at train.py:55",
    ),
    "one that waits for work": (
        found({3: SLEEPS}, steady(PLAIN, source="work.wait()")), HangKind.HUNG, "HF240", (3,),
        "7 others wait in work.wait at train.py:55",
    ),
    "a debugger": (found({3: Rank([()] * 3, "t")}), HangKind.MOVING, "", (), "held by a debugger (process 4703)"),
    "gone meanwhile": (found({3: Rank([()] * 3, "")}), HangKind.MOVING, "", (), "rank 3 on a is gone"),
    "two at two places": (
        found({3: SLEEPS, 6: steady(REGEX, "R", busy=True)}), HangKind.HUNG, "HF240", (3, 6),
        "rank 3 on a is in time.sleep at data.py:17 for 71 s; rank 6 on b is in match at text.py:9 for 71 s, busy",
    ),
    "one look only": (
        found({3: Rank([DATA] * 3, samples=1)}, steady(BACKWARD, samples=1)), HangKind.HUNG, "HF240", (3,),
        "rank 3 on a is in fetch at data.py:17 for 71 s; 7 others wait in backward at train.py:40",
    ),
}  # fmt: skip


# What goes on outside of the rank's own Python: nobody of these is ended, and of most nothing is said.
CALLS_CHILD = stack(
    Frame(f"{STD}/subprocess.py", 1201, "communicate"), Frame(f"{STD}/subprocess.py", 548, "run"), at=33
)
NUMPY = stack(Frame(f"{SITE}/numpy/linalg/_linalg.py", 1681, "svd"), at=34)
MAIN = stack(at=35)
QUIET: dict[str, tuple[Finding, HangKind, str, bool, bool]] = {
    "a busy child, rank 3": (found({3: steady(CALLS_CHILD, children=True)}), HangKind.MOVING, "", False, False),
    "a busy child, rank 0": (
        found({0: steady(CALLS_CHILD, children=True)}, steady(BARRIER)), HangKind.MOVING, "", False, False,
    ),
    "a child that copies": (found({3: steady(CALLS_CHILD, saves=200_000)}), HangKind.MOVING, "", False, False),
    "a slow download": (found({3: steady(CALLS_CHILD, talks=16_000)}), HangKind.MOVING, "", False, False),
    "who only says that it is alive": (
        found({3: steady(CALLS_CHILD, talks=1_000)}), HangKind.HUNG, "HF240", False, False,
    ),
    "a collective that is slow": (found({}, steady(ALL_REDUCE, talks=16_000)), HangKind.STUCK, "HF241", False, False),
    "a busy child that gets no processor": (
        found({3: steady(CALLS_CHILD, starved_children=True)}), HangKind.MOVING, "", False, False,
    ),
    "numpy that gets no processor": (
        found({3: steady(NUMPY, "R", starved=True)}), HangKind.HUNG, "HF240", True, False,
    ),
    "short work, again and again, that gets little of the processor": (
        found({3: steady(NUMPY, hindered=True)}), HangKind.HUNG, "HF240", True, False,
    ),
    "an evaluation in short steps": (
        found({3: steady(NUMPY, main_cpu_s=0.1)}), HangKind.HUNG, "HF240", True, False,
    ),
    "an idle child": (found({3: steady(CALLS_CHILD)}), HangKind.HUNG, "HF240", False, False),
    "all wait, and one has a busy child": (
        found({3: steady(ALL_REDUCE, children=True)}), HangKind.STUCK, "HF241", False, False,
    ),
    "numpy, rank 3": (found({3: steady(NUMPY, "R", busy=True)}), HangKind.HUNG, "HF240", True, False),
    "numpy, rank 0": (found({0: steady(NUMPY, "R", busy=True)}, steady(BARRIER)), HangKind.MOVING, "", True, False),
    "numpy without a frame of its own": (
        found({3: steady(MAIN, "R", busy=True, source="u, s, v = svd(a)")}), HangKind.HUNG, "HF240", True, False,
    ),
    "an operator of numpy": (
        found({3: steady(MAIN, "R", busy=True, source="c = a @ b")}), HangKind.HUNG, "HF240", True, False,
    ),
    "a loop of Python for ever": (
        found({3: steady(MAIN, "R", busy=True, source="pass")}), HangKind.HUNG, "HF240", False, False,
    ),
    "work with pauses on all ranks": (found({}, replace(SLEEPS, stirs=True)), HangKind.PAUSED, "", True, False),
    "numpy on all ranks": (found({}, steady(NUMPY, "R", busy=True)), HangKind.PAUSED, "", True, False),
    "numpy in a world of one": (found({}, steady(NUMPY, "R", busy=True), world=1), HangKind.PAUSED, "", True, False),
    "another program, busy": (found({2: Rank([()] * 3, "R", busy=True)}), HangKind.HUNG, "HF240", True, False),
    "another program with a busy child": (found({2: Rank([()] * 3, children=True)}), HangKind.MOVING, "", False, False),
    "a slow save": (found({0: steady(SAVES, saves=200_000)}, steady(BARRIER)), HangKind.MOVING, "", False, False),
    "a save that is brought to the disk": (
        found({0: steady(SAVES, "D", disk=True)}, steady(BARRIER)), HangKind.MOVING, "", False, False,
    ),
    "a sleep while the disk is busy": (found({3: replace(SLEEPS, disk=True)}), HangKind.HUNG, "HF240", False, False),
    "rank 0 asleep for which all wait": (found({0: SLEEPS}, steady(BARRIER)), HangKind.HUNG, "HF240", False, True),
    "data that is loaded": (found({4: steady(LOADER, children=True)}), HangKind.PAUSED, "HF243", True, False),
    "data that does not come": (found({4: steady(LOADER)}), HangKind.HUNG, "HF243", False, True),
    "idle threads over a longer time": (
        found({3: replace(steady(DATA), busy=True, gap_s=40.0)}), HangKind.HUNG, "HF240", False, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", QUIET)
def test_what_goes_on_outside_of_python(name: str) -> None:
    finding, kind, code, busy, slow = QUIET[name]
    assert (finding.kind, finding.code, finding.busy, finding.slow) == (kind, code, busy, slow), finding


def test_who_computes_no_more_stands_elsewhere() -> None:
    """So the time until it is ended begins then."""
    computing, asleep = found({3: steady(NUMPY, "R", busy=True)}), found({3: steady(NUMPY)})
    assert computing.signature != asleep.signature


class TestPolling:
    """A loop of looks and sleeps over several functions."""

    WAIT = (Frame("/srv/wait.py", 5, "until_there"), *stack(at=36))
    LOOK = (Frame("/srv/wait.py", 20, "is_there"), *WAIT)
    SLEEP = (Frame("/srv/wait.py", 30, "pause"), Frame("/srv/wait.py", 6, "until_there"), *stack(at=36))
    LATER = (Frame("/srv/wait.py", 30, "pause"), Frame("/srv/wait.py", 6, "until_there"), *stack(at=37))

    def test_it_is_no_work(self) -> None:
        finding = found({3: Rank([self.LOOK, self.SLEEP, self.LOOK])})
        assert (finding.kind, finding.code, finding.culprits, finding.slow) == (HangKind.HUNG, "HF240", (3,), False)
        assert "rank 3 on a is in until_there at wait.py:" in finding.text

    def test_it_stands_where_it_stands(self) -> None:
        one = found({3: Rank([self.LOOK, self.SLEEP, self.LOOK])})
        assert one.signature == found({3: Rank([self.SLEEP, self.LOOK, self.SLEEP])}).signature

    @pytest.mark.parametrize("what", ["busy", "stirs"])
    def test_with_processor_time_it_is_work(self, what: str) -> None:
        rank = replace(Rank([self.LOOK, self.SLEEP, self.LOOK]), **{what: True})  # type: ignore[arg-type]
        assert found({3: rank}).kind is HangKind.MOVING

    def test_on_a_disk_it_is_work(self) -> None:
        assert found({3: Rank([self.LOOK, self.SLEEP, self.LOOK], "D")}).kind is HangKind.MOVING

    def test_called_from_another_line_it_came_further(self) -> None:
        assert found({3: Rank([self.LOOK, self.SLEEP, self.LATER])}).kind is HangKind.MOVING


@pytest.mark.parametrize("name", CASES)
def test_what_is_found(name: str) -> None:
    finding, kind, code, culprits, words = CASES[name]
    assert (finding.kind, finding.code, finding.culprits) == (kind, code, culprits), finding
    assert words in finding.text
    assert "\n" not in finding.text
    assert len(finding.text) < 500
    assert sorted(rank for place in finding.groups for rank in place.ranks) == list(range(len(finding_ranks(finding))))


def finding_ranks(finding: Finding) -> list[int]:
    return [rank for place in finding.groups for rank in place.ranks]


def test_nobody_is_left() -> None:
    assert examine([]).kind is HangKind.PAUSED


def test_places_of_many_ranks_stay_short() -> None:
    ranks = {number: steady(stack(Frame(C10D, 1, "recv"), at=number)) for number in range(64)}
    finding = examine([story(number, rank) for number, rank in ranks.items()])
    assert finding.kind is HangKind.HUNG
    assert finding.culprits == (), "64 places of one rank each say nothing about who is wrong"
    assert finding.text.endswith("61 elsewhere")


class TestSignature:
    def test_it_stays_while_all_stand(self) -> None:
        assert found({3: SLEEPS}).signature == found({3: SLEEPS}).signature

    def test_the_innermost_line_of_a_loop_may_move(self) -> None:
        one = found({3: Rank([SPINS] * 3, "R", busy=True)})
        other = found({3: Rank([SPINS_ON] * 3, "S", busy=True)})
        assert one.signature == other.signature

    @pytest.mark.parametrize(
        "other",
        [
            {3: steady(REGEX)},
            {3: SLEEPS, 4: steady(ALL_REDUCE[:-2] + stack(at=43))},
            {4: SLEEPS},
            {3: Rank([()] * 3, "T")},
            {},
        ],
        ids=["another place", "another line of a call", "another rank", "stopped", "gone on"],
    )
    def test_it_changes_when_somebody_moves(self, other: dict[int, Rank]) -> None:
        assert found({3: SLEEPS}).signature != found(other).signature

    def test_data_that_comes_slowly_is_a_change_and_a_loader_that_is_asleep_is_none(self) -> None:
        """An evaluation of which each batch takes half a minute to load is met waiting at one line, each time."""
        first = [story(number, steady(LOADER)) for number in range(8)]
        later = [
            structs.replace(
                each, samples=tuple(structs.replace(one, main_cpu_s=one.main_cpu_s + 0.2) for one in each.samples)
            )
            for each in first
        ]
        assert examine(first).kind is examine(later).kind is HangKind.PAUSED
        assert examine(first).signature != examine(later).signature
        assert examine(first).signature == examine([story(number, steady(LOADER)) for number in range(8)]).signature

    def test_the_order_of_stories_does_not_matter(self) -> None:
        stories = [story(number, SLEEPS if number == 3 else WAITS) for number in range(8)]
        assert examine(stories) == examine(stories[::-1])
