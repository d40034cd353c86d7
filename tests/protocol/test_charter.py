"""Who votes, and how many losses that survives: counted by trying every loss."""

from __future__ import annotations

from itertools import combinations

import pytest

from holdfast.protocol.charter import VOTERS_MAX, Seat, electorate, majority


def voters_of(agents: int, witnesses: int) -> tuple[list[Seat], list[Seat]]:
    """The nodes' seats, with a vote or without, and the voters."""
    count = electorate(agents, witnesses)
    nodes = [Seat(f"n{number}#1", f"n{number}", "10.0.0.1", 1) for number in range(agents)]
    watching = [Seat(f"w{number}#1", f"w{number}", "10.0.0.2", 1, witness=True) for number in range(witnesses)]
    return nodes, [*nodes[: count.agents], *watching[: count.witnesses]]


def elects(voters: list[Seat], lost: tuple[Seat, ...]) -> bool:
    """Whether those that are left elect one of them, which is no witness."""
    left = [seat for seat in voters if seat not in lost]
    return any(not seat.witness for seat in left) and majority(voters, [seat.name for seat in left])


@pytest.mark.parametrize("witnesses", range(10))
@pytest.mark.parametrize("agents", range(1, 10))
def test_so_many_losses_leave_a_majority_whichever_nodes_they_are(agents: int, witnesses: int) -> None:
    nodes, voters = voters_of(agents, witnesses)
    count = electorate(agents, witnesses)
    assert len(voters) == sum(count) <= VOTERS_MAX
    assert sum(count) % 2 == 1
    if sum(count) == 1:
        assert agents == 1 or (agents, witnesses) == (2, 0)
        assert count.losses == 0
        return
    assert all(elects(voters, lost) for lost in combinations(nodes, count.losses))
    assert not all(elects(voters, lost) for lost in combinations(nodes, count.losses + 1))


@pytest.mark.parametrize("agents", range(1, 10))
def test_a_witness_more_never_survives_less(agents: int) -> None:
    losses = [electorate(agents, witnesses).losses for witnesses in range(10)]
    assert losses == sorted(losses)
