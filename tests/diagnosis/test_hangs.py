"""What is found in the samples of 8 ranks on 2 nodes: kind, code, whom it names, and the words."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from holdfast.diagnosis.hangs import examine
from holdfast.protocol.rank_progress import Finding, Frame, HangKind, KernelWait, Polling, RankSample, RankStory

DATA = tomllib.loads((Path(__file__).parent / "hangs.toml").read_text())
SITE = "/env/lib/python3.11/site-packages"
STD = "/usr/lib/python3.11"
C10D = f"{SITE}/torch/distributed/distributed_c10d.py"


def frames_of(stack: list[list[Any]]) -> tuple[Frame, ...]:
    inner = (Frame(file.replace("{SITE}", SITE).replace("{STD}", STD), *place) for file, *place in stack)
    return (*inner, Frame("/srv/train.py", 90, "<module>"))


STACKS = {name: frames_of(stack) for name, stack in DATA["stacks"].items()} | {"": ()}


def stack(*inner: Frame, at: int = 42) -> tuple[Frame, ...]:
    return (*inner, Frame("/srv/train.py", at, "main"), Frame("/srv/train.py", 90, "<module>"))


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
    stolen: bool = False
    """Other machines have most of this one's processors."""
    saves: int = 0
    """Bytes between two samples, of its own and of its children's each half."""
    talks: int = 0
    """Bytes between two samples, over the network."""
    disk: bool = False
    copies: bool = False
    note: str = ""
    broken_child: bool = False
    waits_for: KernelWait = KernelWait.UNKNOWN
    child_awaited: bool = False
    prints: int = 0
    """Bytes that its main thread writes between two samples."""
    hears: int = 0
    """Bytes between two samples, over the connection for which its main thread waits."""
    thread_hears: int = 0
    """The same for one of its other threads."""
    polled: Polling = Polling.NOTHING
    polls: str = ""
    source: str = ""
    samples: int = 3
    gap_s: float = 1.7


def rank_of(stack: str | None = None, stacks: Sequence[str] = (), **more: Any) -> Rank:
    """A rank of hangs.toml."""
    enums = {"polled": Polling, "waits_for": KernelWait}
    more |= {name: enums[name](value) for name, value in more.items() if name in enums}
    return Rank([STACKS[name] for name in (stacks if stack is None else [stack] * 3)], **more)


WAITS = rank_of("all_reduce")
SLEEPS = rank_of("data", source="    time.sleep(3600)  # wait for the disk")


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
            children_cpu_s=3.0 + index * (0.1 if rank.children and rank.stolen else 1.9 if rank.children else 0.02),
            children_bytes=index * rank.saves // 2,
            disk_bytes=10**12 + index * (80_000_000 if rank.disk else 0),
            at_s=100.0 + index * rank.gap_s,
            talked_bytes=index * rank.talks,
            wanted_s=index * (1.6 if rank.starved else 0.75 if rank.hindered else 0.3),
            children_wanted_s=index * (1.6 if rank.starved_children else 0.1 if rank.stolen else 0.3),
            stolen_s=index * 1.4 * rank.stolen,
            waits_for=rank.waits_for,
            child_awaited=rank.child_awaited,
            main_moved_bytes=index * (50_000_000 if rank.copies else rank.saves // 2),
            main_wrote_bytes=index * rank.prints,
            awaited_bytes=index * rank.hears,
            threads_awaited_bytes=index * rank.thread_hears,
            broken_child=rank.broken_child,
            polled=rank.polled,
            polls=rank.polls,
        )
        for index, frames in enumerate(rank.frames)
    )
    return RankStory(number, "a" if number < 4 else "b", number % 4, 71.0, samples[3 - rank.samples :])


def found(odd: dict[int, Rank], others: Rank = WAITS, world: int = 8) -> Finding:
    return examine([story(number, odd.get(number, others)) for number in range(world)])


@pytest.mark.parametrize("case", DATA["case"].values(), ids=list(DATA["case"]))
def test_what_is_found(case: dict[str, Any]) -> None:
    odd = {int(number): rank_of(**rank) for number, rank in case.get("rank", {}).items()}
    finding = found(odd, rank_of(**case.get("others", {"stack": "all_reduce"})), case.get("world", 8))
    assert (finding.kind, finding.code) == (HangKind(case["kind"]), case["code"]), finding
    for field in ("busy", "slow", "lively"):
        assert getattr(finding, field) == case.get(field, getattr(finding, field))
    assert finding.culprits == tuple(case.get("culprits", finding.culprits))
    assert case.get("words", "") in finding.text
    assert "\n" not in finding.text
    assert len(finding.text) < 500
    assert sorted(rank for place in finding.groups for rank in place.ranks) == list(range(case.get("world", 8)))


def test_who_computes_no_more_stands_elsewhere() -> None:
    """So the time until it is ended begins then."""
    computing, asleep = found({3: rank_of("numpy", state="R", busy=True)}), found({3: rank_of("numpy")})
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

    def test_the_source_of_a_line_within_the_loop_is_not_that_of_the_loop(self) -> None:
        looks = [self.LOOK, self.SLEEP, self.LOOK]
        finding = found({3: Rank(looks, source="    time.sleep(0.1)")})
        assert finding.text == found({3: Rank(looks)}).text

    def test_it_stands_where_it_stands(self) -> None:
        one = found({3: Rank([self.LOOK, self.SLEEP, self.LOOK])})
        assert one.signature == found({3: Rank([self.SLEEP, self.LOOK, self.SLEEP])}).signature

    @pytest.mark.parametrize("what", ["busy", "stirs"])
    def test_processor_time_alone_is_no_work_and_its_end_is_put_off(self, what: str) -> None:
        rank = replace(Rank([self.LOOK, self.SLEEP, self.LOOK]), **{what: True})  # type: ignore[arg-type]
        finding = found({3: rank})
        assert (finding.kind, finding.culprits, finding.lively, finding.busy) == (HangKind.HUNG, (3,), True, False)

    def test_rank_0_that_computes_in_a_loop_while_the_others_wait_in_a_barrier_works(self) -> None:
        rank = Rank([self.LOOK, self.SLEEP, self.LOOK], busy=True)
        assert found({0: rank}, rank_of("barrier")).kind is HangKind.MOVING

    def test_on_a_disk_it_is_work(self) -> None:
        assert found({3: Rank([self.LOOK, self.SLEEP, self.LOOK], "D")}).kind is HangKind.MOVING

    def test_called_from_another_line_it_came_further(self) -> None:
        assert found({3: Rank([self.LOOK, self.SLEEP, self.LATER])}).kind is HangKind.MOVING


def test_nobody_is_left() -> None:
    assert examine([]).kind is HangKind.PAUSED


def test_places_of_many_ranks_stay_short() -> None:
    ranks = {number: Rank([stack(Frame(C10D, 1, "recv"), at=number)] * 3) for number in range(64)}
    finding = examine([story(number, rank) for number, rank in ranks.items()])
    assert finding.kind is HangKind.HUNG
    assert finding.culprits == (), "64 places of one rank each say nothing about who is wrong"
    assert finding.text.endswith("61 elsewhere")


class TestSignature:
    def test_it_stays_while_all_stand(self) -> None:
        assert found({3: SLEEPS}).signature == found({3: SLEEPS}).signature

    def test_the_innermost_line_of_a_loop_may_move(self) -> None:
        one = found({3: rank_of("spins", state="R", busy=True)})
        other = found({3: rank_of("spins_on", state="S", busy=True)})
        assert one.signature == other.signature

    @pytest.mark.parametrize(
        "other",
        [
            {3: rank_of("regex")},
            {3: SLEEPS, 4: Rank([STACKS["all_reduce"][:-2] + stack(at=43)] * 3)},
            {4: SLEEPS},
            {3: rank_of("", state="T")},
            {},
        ],
        ids=["another place", "another line of a call", "another rank", "stopped", "gone on"],
    )
    def test_it_changes_when_somebody_moves(self, other: dict[int, Rank]) -> None:
        assert found({3: SLEEPS}).signature != found(other).signature

    def test_data_that_comes_slowly_is_a_change_and_a_loader_that_is_asleep_is_none(self) -> None:
        """An evaluation of which each batch takes half a minute to load is met waiting at one line, each time."""
        first = [story(number, rank_of("loader")) for number in range(8)]
        later = [
            structs.replace(
                each, samples=tuple(structs.replace(one, main_cpu_s=one.main_cpu_s + 0.2) for one in each.samples)
            )
            for each in first
        ]
        assert examine(first).kind is examine(later).kind is HangKind.PAUSED
        assert examine(first).signature != examine(later).signature
        assert examine(first).signature == examine([story(number, rank_of("loader")) for number in range(8)]).signature

    def test_the_order_of_stories_does_not_matter(self) -> None:
        stories = [story(number, SLEEPS if number == 3 else WAITS) for number in range(8)]
        assert examine(stories) == examine(stories[::-1])
