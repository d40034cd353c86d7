"""Who may become a member and who is none any more: identities, ranks, leases, links on which nobody joins."""

from __future__ import annotations

import pytest
from msgspec import structs

from holdfast.coordinator.admission import LAST_WORDS_S, Admission, Admit, Deny
from holdfast.coordinator.coordinator_state import Heard, LinkOpened, Member, Phase, Tell
from holdfast.coordinator.membership import LINKS_PER_ADDRESS_MAX, Liveness
from holdfast.protocol import messages as msg
from holdfast.protocol.policy import JobSpec, Limits, NodeSpec, Tick
from tests.coordinator.coordinator_harness import LIMITS, CoordinatorHarness, running


def job(*, fixed_ranks: bool) -> JobSpec:
    return JobSpec(run_id="t", min_nodes=3, max_nodes=3, backend="static", fixed_ranks=fixed_ranks)


def join(name: str, rank: int | None = None, nproc: int = 1) -> msg.Join:
    return msg.Join(NodeSpec(member=name, host=name.partition("#")[0], nproc=nproc, node_rank=rank))


def member(joined: msg.Join, *, link: int = 1, last_heard_s: float = 0.0, leaving: str = "") -> Member:
    return Member(joined.node, link, "10.0.0.7", "10.0.0.0", 1, 0.0, last_heard_s, leaving)


def test_an_identity_is_used_once() -> None:
    admission = Admission(job(fixed_ranks=False))
    first = join("a#1")
    assert admission.consider(1, first, [], 0.0) == Admit(1, first, 0.0)
    decision = admission.consider(2, join("a#1"), [], 9.0)
    assert isinstance(decision, Deny)
    assert decision.problem == "the identity a#1 was used before; an agent must come with a new one"
    assert isinstance(admission.consider(3, join("a#2"), [], 9.0), Admit)


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (join("a#1", 3), "--node-rank 3 does not exist in a job of 3 nodes"),
        (join("a#1", -1), "--node-rank -1 does not exist in a job of 3 nodes"),
        (join("a#1", 0, nproc=0), "a#1 offers 0 workers"),
    ],
)
def test_what_cannot_be(asked: msg.Join, problem: str) -> None:
    decision = Admission(job(fixed_ranks=True)).consider(1, asked, [], 0.0)
    assert isinstance(decision, Deny)
    assert decision.problem == problem


NODE = NodeSpec(member="a#1", host="a", nproc=2)


@pytest.mark.parametrize(
    "asked",
    [
        join("a#1", nproc=10**9),
        msg.Join(NODE, last_generation=2**64 - 1),
        msg.Join(NODE, last_generation=-1),
        msg.Join(NODE, 7, 0.0, msg.Running(8, 0, 1, 0)),
        msg.Join(NODE, 7, 0.0, msg.Running(0, 0, 1, 0)),
        msg.Join(NODE, 7, 0.0, msg.Running(7, 3, 3, 0)),
        msg.Join(NODE, 7, 0.0, msg.Running(7, -1, 3, 0)),
        msg.Join(NODE, 7, 0.0, msg.Running(7, 0, 3, -1)),
        msg.Join(NODE, 7, 0.0, msg.Running(7, 0, 3, 0, done=(0, 2))),
    ],
)
def test_numbers_that_cannot_be_are_refused(asked: msg.Join) -> None:
    """One of them would stop everybody: a rank is kept for each worker, and a generation has to fit into messages."""
    decision = Admission(job(fixed_ranks=False)).consider(1, asked, [], 0.0)
    assert isinstance(decision, Deny)


def test_wishes_are_no_claims() -> None:
    admission = Admission(job(fixed_ranks=False))
    holder = member(join("a#1", 1))
    assert isinstance(admission.consider(2, join("b#1", 1), [holder], 0.0), Admit)


def held_claim() -> tuple[Admission, Member, msg.Join]:
    """b claims rank 1 at 10 s, which a holds that spoke at 9 s."""
    admission = Admission(job(fixed_ranks=True))
    holder, second = member(join("a#1", 1), last_heard_s=9.0), join("b#1", 1)
    assert admission.consider(2, second, [holder], 10.0) is None
    assert admission.settle([holder]) is None, "nothing is known of the holder yet"
    return admission, holder, second


@pytest.mark.parametrize(
    ("most", "has"),
    [(1, "was started for one node (a; --rdzv-id none)"), (2, "has all its 2 nodes (a, b; --rdzv-id none)")],
)
def test_a_node_for_which_there_is_no_place(most: int, has: str) -> None:
    spec = structs.replace(job(fixed_ranks=False), max_nodes=most, min_nodes=1, run_id="none")
    holders = [member(join(f"{name}#1"), last_heard_s=1.0) for name in "ab"[:most]]
    admission = Admission(spec, other_line=lambda _: "arguments")
    assert admission.consider(9, join("c#1"), holders, 2.0) is None
    for holder in holders:
        holder.last_heard_s = 9.0
    decision = admission.settle(holders)
    assert isinstance(decision, Deny)
    assert decision.problem == (
        f"The job {has}. For more, raise --nnodes everywhere; for another job, use another port and --rdzv-id"
    )


def test_a_ghost_is_replaced_when_it_is_gone() -> None:
    admission, _, second = held_claim()
    assert admission.settle([]) == Admit(2, second, 10.0)
    assert admission.settle([]) is None, "a claim is settled once"
    assert "b#1" in admission.identities


def test_a_holder_that_speaks_keeps_its_rank() -> None:
    admission, holder, second = held_claim()
    holder.last_heard_s = 12.0
    decision = admission.settle([holder])
    assert isinstance(decision, Deny)
    assert decision.join == second
    assert (
        decision.problem
        == "--node-rank 1 is taken by a#1 (10.0.0.7); b#1 needs another --node-rank; another job needs another port"
    )
    assert admission.settle([holder]) is None
    assert isinstance(admission.consider(3, join("b#1", 2), [holder], 13.0), Admit), "a denied identity was not used"


def test_last_words_of_a_holder_do_not_deny() -> None:
    """It may have died with messages on their way."""
    admission, holder, second = held_claim()
    holder.last_heard_s = 10.9
    assert admission.settle([holder]) is None
    assert admission.settle([]) == Admit(2, second, 10.0)


def test_an_agents_own_ghost_does_not_deny() -> None:
    """A healed network delivers what the old link held, after the agent has joined on a new one."""
    admission = Admission(job(fixed_ranks=True))
    ghost, again = member(join("a.net#1.1", 1), last_heard_s=9.0), join("a.net#1.2", 1)
    assert admission.consider(2, again, [ghost], 10.0) is None
    ghost.last_heard_s = 15.0
    assert admission.settle([ghost]) is None
    assert admission.settle([]) == Admit(2, again, 10.0)


def test_one_admitted_from_a_claim_was_last_heard_when_it_claimed() -> None:
    """It may have died while it waited: its admission is no sign of life that could deny another claim."""
    admission, _, second = held_claim()
    assert admission.consider(3, join("c#1", 1), [member(join("a#1", 1))], 11.0) is None
    admitted = admission.settle([])
    assert isinstance(admitted, Admit)
    late = member(second, link=2, last_heard_s=admitted.heard_s)
    assert admission.settle([late]) is None


def test_a_holder_that_is_leaving_does_not_deny() -> None:
    admission, holder, second = held_claim()
    holder.leaving, holder.last_heard_s = "SIGTERM", 12.0
    assert admission.settle([holder]) is None
    assert admission.settle([]) == Admit(2, second, 10.0)


def test_a_claim_goes_with_its_link() -> None:
    admission, _, _ = held_claim()
    admission.withdraw(2)
    admission.withdraw(99)
    assert admission.settle([]) is None


def test_of_two_claims_only_one_is_granted() -> None:
    admission, holder, second = held_claim()
    third = join("c#1", 1)
    assert admission.consider(3, third, [holder], 11.0) is None
    assert admission.settle([]) == Admit(2, second, 10.0)
    assert admission.settle([member(second, link=2, last_heard_s=10.5)]) is None


def test_no_rank_means_rank_0() -> None:
    admission = Admission(job(fixed_ranks=True))
    assert admission.consider(2, join("b#1", 0), [member(join("a#1"))], 1.0) is None


# --- who has been silent too long, by our own clock and only while we were listening ----------------------------------


SHORT = Limits(lease_s=6.0, ping_interval_s=1.0)


def heard(name: str, last_heard_s: float) -> Member:
    return Member(NodeSpec(member=name, host=name, nproc=1), 1, "10.0.0.1", "10.0.0.0", 1, 0.0, last_heard_s)


def names(members: list[Member]) -> list[str]:
    return [one.name for one in members]


def test_a_lease_runs_out_only_after_its_whole_length() -> None:
    liveness = Liveness(SHORT, looked_s=100.0)
    members = [heard("talks", 100.0), heard("silent", 95.0)]
    assert names(liveness.silent(members, 100.9)) == []
    assert liveness.next_look_s() == 101.0, "the next look is when its lease runs out, not later"
    assert names(liveness.silent(members, 101.0)) == ["silent"]


def test_it_looks_four_times_in_a_lease() -> None:
    liveness = Liveness(SHORT, looked_s=10.0)
    assert liveness.next_look_s() == 11.5
    liveness.silent([], 11.5)
    assert liveness.next_look_s() == 13.0


def test_our_own_pause_is_not_held_against_anybody() -> None:
    liveness = Liveness(SHORT, looked_s=100.0)
    members = [heard("a", 99.5), heard("b", 98.0)]
    assert names(liveness.silent(members, 160.0)) == [], "we slept for a minute: their words may lie in our sockets"
    members[0].last_heard_s = 160.1
    for look in range(1, 4):
        assert names(liveness.silent(members, 160.0 + 1.5 * look)) == []
    assert names(liveness.silent(members, 166.0)) == ["b"], "one who stays silent afterwards is lost"


def test_a_pardon_is_no_sign_of_life() -> None:
    """Who claims the rank of a ghost must not be told that the ghost has spoken."""
    liveness = Liveness(SHORT, looked_s=100.0)
    ghost = heard("ghost", 98.0)
    liveness.silent([ghost], 160.0)
    assert ghost.last_heard_s == 98.0


def test_ordinary_unpunctuality_is_no_pause() -> None:
    liveness = Liveness(SHORT, looked_s=100.0)
    assert names(liveness.silent([heard("silent", 94.0)], 102.9)) == ["silent"]


# --- links on which nobody joins, and members that never end: neither may stay for ever -------------------------------


def test_a_link_that_does_not_join_is_dropped() -> None:
    harness = running()
    harness.give(LinkOpened(9, "10.0.0.9", "10.0.0.1"))
    harness.wait(LIMITS.unjoined_s - 1)
    assert harness.dropped == []
    harness.wait(2)
    assert harness.dropped == [9]
    assert len(harness.machine.members) == 2


def test_so_is_one_beside_a_claim_that_waits() -> None:
    """Somebody who waits for a rank that another holds has asked to join: it is not dropped."""
    harness = CoordinatorHarness(fixed_ranks=True)
    for link, name in ((1, "a#1"), (2, "b#1")):
        harness.give(LinkOpened(link, "10.0.0.1", "10.0.0.9"))
        harness.say(link, msg.Join(NodeSpec(member=name, host=name[0], nproc=1, node_rank=0)))
    harness.give(LinkOpened(3, "10.0.0.9", "10.0.0.1"))
    harness.now += LIMITS.lease_s / 2  # nobody speaks
    harness.give(Tick())
    assert not harness.dropped
    assert harness.machine.next_deadline() is not None


def test_a_report_that_takes_the_place_of_a_ping_is_answered_as_one() -> None:
    harness = running()
    machine, now = harness.machine, harness.now
    assert machine.handle(now, Heard(1, msg.Progress(1, (), ping=7))) == [Tell(1, msg.Pong(7))]
    assert machine.handle(now, Heard(1, msg.Progress(1, ()))) == []


def test_a_claim_is_denied_at_the_first_ping_of_its_holder() -> None:
    harness = CoordinatorHarness(fixed_ranks=True)
    harness.join(1, 2)
    harness.now = LAST_WORDS_S + 0.1
    due_s = harness.machine.next_deadline()
    assert due_s is not None
    assert due_s > harness.now, "no Tick comes first"
    harness.say(1, msg.Ping(1))
    assert isinstance(harness.last(2), msg.Refuse)


def test_the_local_link_stays() -> None:
    harness = CoordinatorHarness()
    harness.give(LinkOpened(1, "127.0.0.1", "127.0.0.1", local=True))
    harness.wait(LIMITS.unjoined_s * 2)
    assert harness.dropped == []


def test_one_address_has_a_bounded_number_of_them() -> None:
    harness = CoordinatorHarness()
    for link in range(LINKS_PER_ADDRESS_MAX + 3):
        harness.give(LinkOpened(link, "10.0.0.66", "10.0.0.1"))
    assert harness.dropped == [0, 1, 2], "the oldest go"
    harness.give(LinkOpened(99_999, "10.0.0.7", "10.0.0.1"))
    assert len(harness.dropped) == 3, "others may come"


def test_workers_of_an_earlier_generation_are_not_waited_for_for_ever() -> None:
    harness = CoordinatorHarness(least=1, most=2)
    harness.give(LinkOpened(1, "10.0.0.1", "10.0.0.9"))
    harness.say(1, msg.Join(NodeSpec(member="n1#1", host="n1", nproc=1), 7, 0.0, msg.Running(7, 0, 2, 0)))
    harness.join(2)
    harness.wait(LIMITS.stop_grace_s + LIMITS.stop_slack_s + LIMITS.settle_s + 2)
    assert 1 in harness.dropped
    assert isinstance(harness.last(2), msg.Assign), "the others go on"
    assert harness.machine.phase is Phase.PREPARING
