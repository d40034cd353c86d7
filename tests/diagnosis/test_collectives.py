"""What follows from the collectives in which ranks are: who is named, and in which words."""

from __future__ import annotations

import pytest
from msgspec import structs

from holdfast.diagnosis.causes import judge
from holdfast.diagnosis.collectives import ComparedCollectives, compared
from holdfast.diagnosis.hangs import examine
from holdfast.protocol.outcome import Evidence, Failure, Verdict
from holdfast.protocol.rank_progress import Collective, Finding, Frame, HangKind, RankSample, RankStory
from tests.corpus.telling import GLOO_CLOSED, fails, named

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


def of(first: int, last: int, step: int = 1) -> dict[str, object]:
    """A group of these ranks."""
    return {"group": f"1 ranks {first} to {last} by {step}", "members": ((first, last, step),)}


def jobs(*ranks: Rank) -> Finding:
    return found(dict(enumerate(ranks)), ranks[0])


def test_of_a_group_that_waits_only_its_own_missing_rank_is_named() -> None:
    elsewhere = rank(at(5, done=True), frames=SLEEPS)
    finding = jobs(rank(at(7, **of(0, 1))), elsewhere, elsewhere, elsewhere)
    assert (finding.code, finding.culprits) == ("HF240", (1,))
    assert finding.collectives.startswith("rank 0 on a is at group 1 ranks 0 to 1 by 1's collective 7 all_reduce")
    assert "rank 1 on a is in fetch at data.py:17" in finding.text
    assert "2 others are in fetch at data.py:17" in finding.text


def test_ranks_that_wait_for_those_of_a_group_do_not_hide_that_group() -> None:
    """Ranks 2 and 3 are in a barrier of all ranks, for which rank 1 keeps rank 0 waiting."""
    barrier = rank(at(6, "barrier", ""), frames=call("barrier", 50))
    finding = jobs(rank(at(7, **of(0, 1))), rank(at(5, done=True), frames=SLEEPS), barrier, barrier)
    assert (finding.code, finding.culprits) == ("HF240", (1,))
    assert finding.collectives.startswith("rank 0 on a is at group 1 ranks 0 to 1 by 1's collective 7 all_reduce")


@pytest.mark.parametrize("outside", [0, 1, 3])
def test_a_mismatch_within_a_group_is_not_blamed_on_a_rank_outside(outside: int) -> None:
    """Three of four ranks belong to the group, and the fourth one waits in a barrier of all."""
    inside = {0: of(1, 3), 1: {"group": "1 g", "members": ((0, 0, 1), (2, 3, 1))}, 3: of(0, 2)}[outside]
    ranks = {number: rank(at(7, **inside)) for number in range(WORLD)}
    ranks[2] = rank(at(7, "broadcast", "[1] float32", **inside))
    ranks[outside] = rank(at(6, "barrier", ""), frames=call("barrier", 50))
    finding = found(ranks, ranks[0])
    assert (finding.code, finding.culprits) == ("HF244", (2,))
    assert "rank 2 on a is at group" in finding.collectives
    assert "barrier" not in finding.collectives


def test_a_group_whose_ranks_match_and_others_that_wait_for_them_name_nobody() -> None:
    barrier = rank(at(6, "barrier", ""), frames=call("barrier", 50))
    pair = rank(at(7, **of(0, 2, 2)))
    finding = jobs(pair, barrier, pair, barrier)
    assert (finding.kind, finding.code, finding.culprits) == (HangKind.STUCK, "HF241", ())
    assert finding.collectives.startswith("ranks 0 and 2 on a are at group 1 ranks 0 to 2 by 2's collective 7")


def test_a_rank_of_which_no_collective_is_known_may_wait_for_any_rank() -> None:
    elsewhere = rank(at(5, done=True), frames=SLEEPS)
    finding = jobs(rank(at(7, **of(0, 1))), elsewhere, rank(), elsewhere)
    assert finding.culprits == (1, 3)


def test_a_group_of_which_a_rank_has_left_is_not_compared_alone() -> None:
    """Rank 4 has ended: what the others wait for is not among them."""
    finding = jobs(*[rank(at(7, **of(0, 4)))] * 2, *[rank(at(6, "barrier", ""))] * 2)
    assert finding.kind is HangKind.STUCK


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


# --- after exceptions -------------------------------------------------------------------------------------------------


def begun(last: int, other: dict[int, Collective] | None = None, first: int = 1) -> list[Collective]:
    """The newest collectives of a rank that all-reduces, but for the others."""
    return [(other or {}).get(number, at(number)) for number in range(first, last + 1)]


SMALL = at(6, tensors="[8] float32")


def test_the_first_collective_that_differs_counts_though_ranks_went_on() -> None:
    found = compared({0: begun(9), 1: begun(6), 2: begun(7, {6: SMALL}), 3: begun(6)})
    assert found == ComparedCollectives(
        "rank 2 was at collective 6 all_reduce [8] float32, ranks 0-1, 3 at 6 all_reduce [4096] float32",
        2,
        "called all_reduce [8] float32 as collective 6, and 3 ranks (0-1, 3) all_reduce [4096] float32",
    )


@pytest.mark.parametrize("ranks", [{0: begun(6), 2: begun(6, {6: SMALL})}, {0: begun(6), 1: begun(5), 2: begun(6)}])
def test_of_two_ranks_that_differ_and_of_ranks_that_lag_none_is_named(ranks: dict[int, list[Collective]]) -> None:
    found = compared(ranks)
    assert found is not None
    assert found.odd is None
    assert "at collective " in found.text


def test_two_against_two_name_nobody() -> None:
    found = compared({0: begun(6), 1: begun(6), 2: begun(6, {6: SMALL}), 3: begun(6, {6: SMALL})})
    assert found is not None
    assert (found.odd, found.text.count("ranks")) == (None, 2)


def test_ranks_whose_newest_collectives_do_not_overlap_are_shown_with_them() -> None:
    found = compared({0: begun(40, first=33), 1: begun(12, first=5)})
    assert found == ComparedCollectives(
        "rank 0 was at collective 40 all_reduce [4096] float32, rank 1 at 12 all_reduce [4096] float32"
    )


def test_the_group_in_which_ranks_differ_is_named() -> None:
    pair = {"group": "1 pair"}
    ranks = {rank: [*begun(3), at(2, **pair)] for rank in (0, 1, 3)}
    found = compared({**ranks, 2: [*begun(3), at(2, "broadcast", **pair)]})
    assert found is not None
    assert found.odd == 2
    assert found.text.startswith("rank 2 was at group 1 pair's collective 2 broadcast")


def test_nothing_is_known_of_operations_between_two_ranks() -> None:
    assert compared({0: [at(3, "send 0->1", between_two=True)], 1: []}) is None


def failed(rank: int, *collectives: Collective) -> Failure:
    return structs.replace(fails(rank, GLOO_CLOSED, frames=(C10D,)), collectives=collectives)


def judged(*failures: Failure) -> Verdict:
    return judge(Evidence(generation=1, restarts=0, failures=failures, lost_nodes=(), gave_up="", hosts=("a",)))


def test_the_verdict_on_closed_connections_names_the_rank_with_another_collective() -> None:
    failures = [failed(rank, *begun(6, {6: SMALL} if rank == 2 else None)) for rank in range(WORLD)]
    for order in (failures, failures[::-1]):
        verdict = judged(*order)
        assert (verdict.code, named(verdict)) == ("HF225", 2)
        assert "called all_reduce [8] float32 as collective 6, and 3 ranks (0-1, 3) all_reduce [4096]" in verdict.cause
        assert verdict.collectives.startswith("rank 2 was at collective 6 all_reduce [8] float32, ranks 0-1, 3 at 6 ")


def test_the_verdict_on_closed_connections_in_one_collective_has_its_number() -> None:
    verdict = judged(*(failed(rank, *begun(6)) for rank in (0, 1, 3)))
    assert verdict.collectives == "ranks 0-1, 3 were at collective 6 all_reduce [4096] float32"
    assert verdict.code != "HF225"
