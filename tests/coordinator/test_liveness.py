"""Who has been silent too long, by our own clock and only while we were listening."""

from __future__ import annotations

from holdfast.coordinator.coordinator_state import Member
from holdfast.coordinator.membership import Liveness
from holdfast.protocol.policy import Limits, NodeSpec

LIMITS = Limits(lease_s=6.0, ping_interval_s=1.0)


def member(name: str, last_heard_s: float) -> Member:
    return Member(NodeSpec(member=name, host=name, nproc=1), 1, "10.0.0.1", "10.0.0.0", 1, 0.0, last_heard_s)


def names(members: list[Member]) -> list[str]:
    return [one.name for one in members]


def test_a_lease_runs_out_only_after_its_whole_length() -> None:
    liveness = Liveness(LIMITS, looked_s=100.0)
    members = [member("talks", 100.0), member("silent", 95.0)]
    assert names(liveness.silent(members, 100.9)) == []
    assert liveness.next_look_s() == 101.0, "the next look is when its lease runs out, not later"
    assert names(liveness.silent(members, 101.0)) == ["silent"]


def test_it_looks_four_times_in_a_lease() -> None:
    liveness = Liveness(LIMITS, looked_s=10.0)
    assert liveness.next_look_s() == 11.5
    liveness.silent([], 11.5)
    assert liveness.next_look_s() == 13.0


def test_our_own_pause_is_not_held_against_anybody() -> None:
    liveness = Liveness(LIMITS, looked_s=100.0)
    members = [member("a", 99.5), member("b", 98.0)]
    assert names(liveness.silent(members, 160.0)) == [], "we slept for a minute: their words may lie in our sockets"
    members[0].last_heard_s = 160.1
    for look in range(1, 4):
        assert names(liveness.silent(members, 160.0 + 1.5 * look)) == []
    assert names(liveness.silent(members, 166.0)) == ["b"], "one who stays silent afterwards is lost"


def test_a_pardon_is_no_sign_of_life() -> None:
    """Who claims the rank of a ghost must not be told that the ghost has spoken."""
    liveness = Liveness(LIMITS, looked_s=100.0)
    ghost = member("ghost", 98.0)
    liveness.silent([ghost], 160.0)
    assert ghost.last_heard_s == 98.0


def test_ordinary_unpunctuality_is_no_pause() -> None:
    liveness = Liveness(LIMITS, looked_s=100.0)
    assert names(liveness.silent([member("silent", 94.0)], 102.9)) == ["silent"]
