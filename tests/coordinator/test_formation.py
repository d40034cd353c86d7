"""Who forms the next world, when, and in which order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.coordinator.formation import (
    Candidate,
    Decision,
    FormNow,
    Gathering,
    NoQuorum,
    WaitUntil,
    all_places,
    assignments,
    decide,
    natural,
    seat,
)
from holdfast.protocol.policy import JobSpec, Limits, NodeSpec

LIMITS = Limits(join_s=600.0, settle_s=2.0, last_call_s=30.0)


def job(least: int, most: int, *, fixed_ranks: bool = False) -> JobSpec:
    return JobSpec(run_id="t", min_nodes=least, max_nodes=most, backend="c10d", fixed_ranks=fixed_ranks)


def node(
    host: str, *, nproc: int = 1, role: str = "default", rank: int | None = None, coordinator: bool = False
) -> NodeSpec:
    return NodeSpec(
        member=f"{host}#1", host=host, nproc=nproc, role=role, node_rank=rank, hosts_coordinator=coordinator
    )


def seated(nodes: list[NodeSpec], previous: str = "", most: int = 8, *, fixed_ranks: bool = False) -> str:
    """Hosts by group rank, for nodes that arrived in the order given."""
    candidates = [Candidate(spec, arrival) for arrival, spec in enumerate(nodes, 1)]
    seats = seat(candidates, [f"{host}#1" for host in previous.split()], job(1, most, fixed_ranks=fixed_ranks))
    return " ".join(spec.host for spec in seats)


# --- decide -----------------------------------------------------------------------------------------------------------

ENOUGH, TOO_FEW, ALL = 2, 1, 4


@pytest.mark.parametrize(
    ("present", "quorum_s", "now", "expected"),
    [
        pytest.param(TOO_FEW, None, 0.0, WaitUntil(600.0, ""), id="too few: until the join deadline"),
        pytest.param(TOO_FEW, None, 599.9, WaitUntil(600.0, ""), id="too few, deadline near"),
        pytest.param(TOO_FEW, None, 600.0, NoQuorum(""), id="too few, deadline reached"),
        pytest.param(ALL, 1.0, 1.0, FormNow(""), id="all: at once"),
        pytest.param(ALL + 1, 1.0, 1.0, FormNow(""), id="more than all: at once"),
        pytest.param(ENOUGH, 10.0, 10.0, WaitUntil(12.0, ""), id="enough: settle"),
        pytest.param(ENOUGH, 10.0, 11.9, WaitUntil(12.0, ""), id="enough, not settled"),
        pytest.param(ENOUGH, 10.0, 12.0, FormNow(""), id="enough and settled"),
        pytest.param(ENOUGH, 5.0, 700.0, FormNow(""), id="the join deadline does not matter once there are enough"),
    ],
)
def test_the_first_formation(present: int, quorum_s: float | None, now: float, expected: Decision) -> None:
    gathering = Gathering(
        present=present, began_s=0.0, last_arrival_s=10.0, quorum_s=quorum_s, not_before_s=0.0, regroup=False
    )
    decision = decide(job(2, 4), LIMITS, gathering, now)
    assert type(decision) is type(expected)
    assert getattr(decision, "deadline_s", None) == getattr(expected, "deadline_s", None)


def test_arrivals_put_it_off_but_never_beyond_the_last_call() -> None:
    """Somebody new every second: each one would be given time to be followed by another, but it ends."""
    for now in range(5, 35):
        gathering = Gathering(
            present=2, began_s=0.0, last_arrival_s=float(now), quorum_s=5.0, not_before_s=0.0, regroup=False
        )
        assert isinstance(decide(job(2, 90), LIMITS, gathering, float(now)), WaitUntil)
    gathering = Gathering(present=2, began_s=0.0, last_arrival_s=35.0, quorum_s=5.0, not_before_s=0.0, regroup=False)
    assert isinstance(decide(job(2, 90), LIMITS, gathering, 35.0), FormNow)


@pytest.mark.parametrize(
    ("present", "quorum_s", "not_before_s", "expected"),
    [
        pytest.param(ENOUGH, 90.0, 0.0, FormNow(""), id="nobody waits for strangers"),
        pytest.param(ENOUGH, 90.0, 105.0, WaitUntil(105.0, ""), id="back-off"),
        pytest.param(ALL, 90.0, 105.0, WaitUntil(105.0, ""), id="back-off even if all are here"),
        pytest.param(TOO_FEW, None, 105.0, WaitUntil(690.0, ""), id="too few: the join deadline, not the back-off"),
    ],
)
def test_regrouping(present: int, quorum_s: float | None, not_before_s: float, expected: Decision) -> None:
    gathering = Gathering(
        present=present,
        began_s=90.0,
        last_arrival_s=99.0,
        quorum_s=quorum_s,
        not_before_s=not_before_s,
        regroup=True,
    )
    decision = decide(job(2, 4), LIMITS, gathering, 100.0)
    assert type(decision) is type(expected)
    assert getattr(decision, "deadline_s", None) == getattr(expected, "deadline_s", None)


def test_reasons_are_for_people() -> None:
    gathering = Gathering(present=1, began_s=0.0, last_arrival_s=0.0, quorum_s=None, not_before_s=0.0, regroup=False)
    assert decide(job(2, 4), LIMITS, gathering, 1.0).reason == "1 of 2 to 4 nodes are here"
    assert decide(job(4, 4), LIMITS, gathering, 1.0).reason == "1 of 4 nodes are here"
    assert decide(job(2, 4), LIMITS, gathering, 600.0).reason == "1 of at least 2 nodes came within 600 s"


@given(
    present=st.integers(0, 6),
    quorum=st.booleans(),
    regroup=st.booleans(),
    times=st.lists(st.floats(0, 1000), min_size=4, max_size=4),
    now=st.floats(0, 2000),
)
def test_whoever_waits_waits_for_the_future(
    present: int, quorum: bool, regroup: bool, times: list[float], now: float
) -> None:
    """A deadline that has passed would make the shell spin."""
    began_s, last_arrival_s, quorum_s, not_before_s = times
    gathering = Gathering(
        present=present,
        began_s=began_s,
        last_arrival_s=last_arrival_s,
        quorum_s=quorum_s if quorum else None,
        not_before_s=not_before_s,
        regroup=regroup,
    )
    decision = decide(job(2, 4), LIMITS, gathering, now)
    assert not isinstance(decision, WaitUntil) or decision.deadline_s > now


# --- seat -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arrivals", "previous", "expected"),
    [
        pytest.param("a b c", "", "a b c", id="by name"),
        pytest.param("c b a", "", "a b c", id="whatever the order of arrival"),
        pytest.param("n10 n9 n2", "", "n2 n9 n10", id="numbers by value"),
        pytest.param("c b a", "c a b", "c a b", id="who stays keeps its place"),
        pytest.param("a c d", "a b c", "a d c", id="a newcomer fills the hole"),
        pytest.param("a c", "a b c", "a c", id="the world shrinks: the last moves up"),
        pytest.param("b c", "a b c", "c b", id="a hole at 0 is filled by whom the world has no place for any more"),
        pytest.param("d e", "a b c", "d e", id="all new"),
        pytest.param("a d b", "b a", "b a d", id="a newcomer goes to the end of a larger world"),
        pytest.param("b d e", "a b c", "d b e", id="two holes, by name"),
    ],
)
def test_places_are_sticky(arrivals: str, previous: str, expected: str) -> None:
    assert seated([node(host) for host in arrivals.split()], previous) == expected


@pytest.mark.parametrize(
    ("nodes", "previous", "expected"),
    [
        pytest.param([node("a", rank=2), node("b"), node("c")], "", "b c a", id="a wish is honoured"),
        pytest.param([node("a", rank=7), node("b")], "", "a b", id="a wish beyond the world is not"),
        pytest.param([node("a", rank=1), node("b", rank=1), node("c")], "", "b a c", id="of two, the first to come"),
        pytest.param([node("b", rank=0), node("a")], "a", "a b", id="an incumbent's place is not for wishing"),
        pytest.param([node("a"), node("z", coordinator=True)], "", "z a", id="the coordinator's node gets 0"),
        pytest.param([node("a", rank=0), node("z", coordinator=True)], "", "a z", id="unless somebody wished for it"),
        pytest.param([node("a"), node("z", coordinator=True)], "a", "a z", id="or keeps it"),
        pytest.param([node("b", rank=0), node("a", rank=1)], "", "b a", id="wishes beat names"),
    ],
)
def test_wishes_and_the_coordinators_node(nodes: list[NodeSpec], previous: str, expected: str) -> None:
    assert seated(nodes, previous) == expected


def test_more_than_max_come_incumbents_stay_then_by_arrival() -> None:
    assert seated([node(host) for host in ["e", "d", "c", "b", "a"]], "b a", most=3) == "b a e"


def test_fixed_ranks_are_law() -> None:
    nodes = [node("a", rank=2), node("b", rank=0, nproc=2), node("c", rank=1)]
    assert seated(nodes, "a b c", most=3, fixed_ranks=True) == "b c a"
    assert seated([node("a", rank=1), node("b")], most=2, fixed_ranks=True) == "b a", "no rank given means 0"


@pytest.mark.parametrize(
    "ordered",
    [["n1", "n2", "n10"], ["a", "a1", "b"], ["gpu-2-9", "gpu-2-10", "gpu-10-1"], ["1", "a"], ["007", "8"]],
)
def test_natural_order(ordered: list[str]) -> None:
    shuffled = ordered[1:] + ordered[:1]
    assert sorted(shuffled, key=natural) == ordered


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_every_node_knows_which_one_has_the_coordinator() -> None:
    seats = [node("a", nproc=2), node("b", nproc=3, coordinator=True), node("c")]
    places = assignments(seats, all_places(seats), generation=1, restart_count=0, local_world=False)
    assert {place.led_by for place in places.values()} == {"b (ranks 2-4)"}
    seats = [node("a"), node("c")]
    none = assignments(seats, all_places(seats), generation=1, restart_count=0, local_world=False)
    assert {place.led_by for place in none.values()} == {""}


def test_ranks_are_prefix_sums_over_uneven_nodes() -> None:
    seats = [node("a", nproc=2), node("b", nproc=1), node("c", nproc=3)]
    given_places = assignments(seats, all_places(seats), generation=4, restart_count=1, local_world=False)
    places = [given_places[f"{host}#1"] for host in "abc"]
    assert [place.rank_base for place in places] == [0, 2, 3]
    assert [place.group_rank for place in places] == [0, 1, 2]
    assert [place.hosts_store for place in places] == [True, False, False]
    assert {(p.world_size, p.group_world_size, p.generation, p.restart_count) for p in places} == {(6, 3, 4, 1)}


def test_roles_count_for_themselves() -> None:
    seats = [node("a", nproc=2, role="actor"), node("b", nproc=3, role="learner"), node("c", nproc=4, role="actor")]
    given_places = assignments(seats, all_places(seats), generation=1, restart_count=0, local_world=True)
    places = [given_places[f"{host}#1"] for host in "abc"]
    assert [(p.role_rank_base, p.role_world_size) for p in places] == [(0, 6), (0, 3), (2, 6)]
    assert [p.rank_base for p in places] == [0, 2, 5]
    assert all(p.local_world for p in places)


def test_ranks_have_no_gap_where_workers_are_missing() -> None:
    seats = [node("a", nproc=2, coordinator=True), node("b", nproc=3), node("c", nproc=1)]
    places = {"a#1": (1,), "b#1": (0, 1, 2), "c#1": ()}
    given = assignments(seats, places, generation=3, restart_count=1, local_world=False)
    assert [given[f"{host}#1"].rank_base for host in "abc"] == [0, 1, 4]
    assert [given[f"{host}#1"].local_ranks for host in "abc"] == [(1,), None, ()]
    assert {(place.world_size, place.group_world_size) for place in given.values()} == {(4, 2)}
    assert {place.led_by for place in given.values()} == {"a (rank 0)"}


HOSTS = st.sampled_from("abcdefgh")
NODES = st.builds(
    node,
    host=HOSTS,
    nproc=st.integers(1, 4),
    role=st.sampled_from(["default", "actor"]),
    rank=st.none() | st.integers(0, 9),
    coordinator=st.booleans(),
)


@given(
    nodes=st.lists(NODES, min_size=1, max_size=8, unique_by=lambda spec: spec.host),
    previous=st.lists(HOSTS, max_size=8, unique=True),
    most=st.integers(1, 9),
)
def test_whatever_comes_the_world_is_sound(nodes: list[NodeSpec], previous: list[str], most: int) -> None:
    old = [f"{host}#1" for host in previous[:most]]
    seats = seat([Candidate(spec, arrival) for arrival, spec in enumerate(nodes)], old, job(1, most))
    assert len(seats) == min(len(nodes), most)
    assert len({spec.member for spec in seats}) == len(seats)
    for at, spec in enumerate(seats):
        if spec.member in old and old.index(spec.member) < len(seats):
            assert old.index(spec.member) == at, "an incumbent lost a place that still exists"
    staying = [name for name in old if any(spec.member == name for spec in nodes)]
    assert {spec.member for spec in seats} >= set(staying[:most])

    places = assignments(seats, all_places(seats), generation=1, restart_count=0, local_world=False)
    ranks = [p.rank_base + i for spec in seats for p in [places[spec.member]] for i in range(spec.nproc)]
    assert ranks == list(range(sum(spec.nproc for spec in seats)))
    for role in {spec.role for spec in seats}:
        own = [(places[spec.member], spec.nproc) for spec in seats if spec.role == role]
        assert [p.role_rank_base + i for p, n in own for i in range(n)] == list(range(own[0][0].role_world_size))


# --- switches ---------------------------------------------------------------------------------------------------------


def under(host: str, switches: str, *, coordinator: bool = False) -> NodeSpec:
    return NodeSpec(
        member=f"{host}#1", host=host, nproc=1, switches=tuple(switches.split()), hosts_coordinator=coordinator
    )


def test_nodes_of_one_switch_are_neighbours_and_those_of_the_coordinator_s_first() -> None:
    nodes = [
        under("n1", "core pod2 leaf3"),
        under("n2", "core pod1 leaf1"),
        under("n3", "core pod2 leaf4"),
        under("n4", "core pod1 leaf2"),
        under("n5", "core pod2 leaf4", coordinator=True),
        under("n6", "core pod1 leaf10"),
        under("n7", "core pod2 leaf3"),
    ]
    assert seated(nodes) == "n5 n3 n1 n7 n2 n4 n6"


def test_nodes_of_one_block_are_neighbours() -> None:
    nodes = [
        under("n1", "b10"),
        under("n2", "b2", coordinator=True),
        under("n3", "b10"),
        under("n4", "b2"),
        under("n5", "b9"),
    ]
    assert seated(nodes) == "n2 n4 n5 n1 n3"


def test_a_node_that_replaces_a_lost_one_moves_no_other() -> None:
    nodes = [under("n1", "s1"), under("n3", "s2"), under("n4", "s2"), under("n9", "s1")]
    assert seated(nodes, previous="n1 n2 n3 n4", most=4) == "n1 n9 n3 n4"
