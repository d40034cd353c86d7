"""What follows from the collectives in which ranks are: who is named, and in which words."""

from __future__ import annotations

import pytest
from msgspec import structs

from holdfast.diagnosis.hangs import examine
from holdfast.protocol.rank_progress import Collective, Finding, Frame, HangKind, RankSample, RankStory

C10D = "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
WORLD = 4


def call(function: str, line: int) -> tuple[Frame, ...]:
    return (Frame(C10D, 100, function), Frame("/srv/train.py", line, "main"))


def at(number: int, operation: str = "all_reduce", tensors: str = "[4096] float32", **more: object) -> Collective:
    return structs.replace(Collective("default_pg", number, operation, tensors), **more)


WAITS = call("all_reduce", 42)
SLEEPS = (Frame("/srv/data.py", 17, "fetch"), Frame("/srv/train.py", 30, "main"))
Rank = tuple[tuple[Frame, ...], list[list[Collective]]]
"""The stack of a rank, and its collectives in each sample."""


def rank(*collectives: Collective, frames: tuple[Frame, ...] = WAITS) -> Rank:
    return frames, [list(collectives)] * 3


def found(odd: dict[int, Rank], others: Rank) -> Finding:
    stories = []
    for number in range(WORLD):
        frames, collectives = odd.get(number, others)
        samples = tuple(
            RankSample(number, 4700 + number, "S", 10.0, frames, at_s=100.0 + 1.7 * look, collectives=tuple(each))
            for look, each in enumerate(collectives)
        )
        stories.append(RankStory(number, "a", number, 71.0, samples))
    return examine(stories)


def test_ranks_at_one_line_in_different_collectives_do_not_match() -> None:
    finding = found({2: rank(at(812), at(811, done=True))}, rank(at(813), at(812, done=True)))
    assert (finding.kind, finding.code, finding.culprits) == (HangKind.HUNG, "HF244", (2,))
    words = "rank 2 on a is at collective 812 all_reduce [4096] float32 (train.py:42), 3 others at 813 all_reduce"
    assert finding.collectives == f"{words} [4096] float32 (train.py:42)"


def test_ranks_with_different_sizes_do_not_match_where_sizes_have_to_be_equal() -> None:
    finding = found({2: rank(at(812, tensors="[8] float32"))}, rank(at(812)))
    assert (finding.code, finding.culprits) == ("HF244", (2,))


def test_the_root_of_a_scatter_gives_more_than_the_others_and_matches() -> None:
    finding = found({2: rank(at(812, "scatter", "[4] float32"))}, rank(at(812, "scatter", "")))
    assert (finding.kind, finding.code, finding.culprits) == (HangKind.STUCK, "HF241", ())


def test_ranks_in_one_collective_match_although_they_called_different_functions() -> None:
    finding = found({2: rank(at(812), frames=call("backward", 50))}, rank(at(812)))
    assert (finding.kind, finding.code) == (HangKind.STUCK, "HF241")


def test_all_ranks_in_one_collective_are_shown_in_one_clause() -> None:
    finding = found({}, rank(at(812)))
    assert finding.collectives == "all 4 ranks are at collective 812 all_reduce [4096] float32 (train.py:42)"


def test_half_of_the_ranks_elsewhere_names_nobody() -> None:
    other = rank(at(812, "broadcast", "[1] float32"))
    finding = found({0: other, 1: other}, rank(at(812)))
    assert (finding.code, finding.culprits) == ("HF244", ())
    assert ", 2 others at 812 " in finding.collectives


def test_a_rank_that_does_something_else_is_shown_with_its_last_collective() -> None:
    finding = found({2: rank(at(811, done=True), frames=SLEEPS)}, rank(at(812), at(811, done=True)))
    assert (finding.code, finding.culprits) == ("HF240", (2,))
    own = "rank 2 on a has done collective 811 all_reduce [4096] float32 and begun no other"
    assert finding.collectives == f"{own}, 3 others are at 812 all_reduce [4096] float32 (train.py:42)"


def test_a_rank_that_does_not_answer_is_left_out() -> None:
    finding = found({2: rank(frames=SLEEPS)}, rank(at(812)))
    assert finding.culprits == (2,)
    assert finding.collectives.startswith("ranks 0, 1 and 3 on a are at collective 812 all_reduce")


def test_if_one_rank_does_not_answer_stacks_decide_as_before() -> None:
    finding = found({2: rank(frames=call("barrier", 50)), 3: rank(at(811))}, rank(at(812)))
    assert (finding.code, finding.culprits) == ("HF244", (2,))


def test_without_a_flight_recorder_nothing_is_shown() -> None:
    finding = found({2: rank(frames=SLEEPS)}, rank())
    assert (finding.culprits, finding.collectives) == ((2,), "")


def test_another_group_is_named_and_others_groups_are_not_compared() -> None:
    pair = rank(at(7, group="1 pair"))
    finding = found({0: rank(at(900))}, pair)
    assert finding.kind is HangKind.STUCK
    assert finding.collectives.startswith("ranks 1 to 3 on a are at group 1 pair's collective 7 all_reduce")


def test_sends_and_receives_are_not_compared() -> None:
    waits = call("recv", 60)
    sends = at(3, "recv 0<-1", between_two=True)
    finding = found({2: (waits, [[at(5, "recv 2<-1", between_two=True)]] * 3)}, (waits, [[sends]] * 3))
    assert (finding.kind, finding.collectives) == (HangKind.STUCK, "")


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [((812, 830, 851), HangKind.MOVING), ((812, 830, 830), HangKind.STUCK), ((812, 812, 812), HangKind.STUCK)],
)
def test_ranks_that_begin_more_collectives_move(numbers: tuple[int, ...], kind: HangKind) -> None:
    """An evaluation that gathers small results again and again, at one line."""
    finding = found({}, (WAITS, [[at(number)] for number in numbers]))
    assert finding.kind is kind


def test_samples_without_an_answer_show_no_movement() -> None:
    assert found({}, (WAITS, [[at(812)], [], [at(851)]])).kind is HangKind.STUCK
