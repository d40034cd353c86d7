"""Who may become a member: identities used once, fixed ranks held by one."""

from __future__ import annotations

import pytest

from holdfast.coordinator.admission import Admission, Admit, Deny
from holdfast.coordinator.coordinator_state import Member
from holdfast.protocol.messages import Join, Running
from holdfast.protocol.policy import JobSpec, NodeSpec


def job(*, fixed_ranks: bool) -> JobSpec:
    return JobSpec(run_id="t", min_nodes=3, max_nodes=3, backend="static", fixed_ranks=fixed_ranks)


def join(name: str, rank: int | None = None, nproc: int = 1) -> Join:
    return Join(NodeSpec(member=name, host=name.partition("#")[0], nproc=nproc, node_rank=rank))


def member(joined: Join, *, link: int = 1, last_heard_s: float = 0.0, leaving: str = "") -> Member:
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
def test_what_cannot_be(asked: Join, problem: str) -> None:
    decision = Admission(job(fixed_ranks=True)).consider(1, asked, [], 0.0)
    assert isinstance(decision, Deny)
    assert decision.problem == problem


NODE = NodeSpec(member="a#1", host="a", nproc=2)


@pytest.mark.parametrize(
    "asked",
    [
        join("a#1", nproc=10**9),
        Join(NODE, last_generation=2**64 - 1),
        Join(NODE, last_generation=-1),
        Join(NODE, 7, 0.0, Running(8, 0, 1, 0)),
        Join(NODE, 7, 0.0, Running(0, 0, 1, 0)),
        Join(NODE, 7, 0.0, Running(7, 3, 3, 0)),
        Join(NODE, 7, 0.0, Running(7, -1, 3, 0)),
        Join(NODE, 7, 0.0, Running(7, 0, 3, -1)),
        Join(NODE, 7, 0.0, Running(7, 0, 3, 0, done=(0, 2))),
    ],
)
def test_numbers_that_cannot_be_are_refused(asked: Join) -> None:
    """One of them would stop everybody: a rank is kept for each worker, and a generation has to fit into messages."""
    decision = Admission(job(fixed_ranks=False)).consider(1, asked, [], 0.0)
    assert isinstance(decision, Deny)


def test_wishes_are_no_claims() -> None:
    admission = Admission(job(fixed_ranks=False))
    holder = member(join("a#1", 1))
    assert isinstance(admission.consider(2, join("b#1", 1), [holder], 0.0), Admit)


def held_claim() -> tuple[Admission, Member, Join]:
    """b claims rank 1 at 10 s, which a holds that spoke at 9 s."""
    admission = Admission(job(fixed_ranks=True))
    holder, second = member(join("a#1", 1), last_heard_s=9.0), join("b#1", 1)
    assert admission.consider(2, second, [holder], 10.0) is None
    assert admission.settle([holder]) is None, "nothing is known of the holder yet"
    return admission, holder, second


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
    assert decision.problem == "--node-rank 1 is taken by a#1 (10.0.0.7); b#1 came second. Two jobs need two ports"
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
