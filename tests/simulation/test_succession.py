"""Simulated jobs whose nodes elect a successor. HOLDFAST_SEEDS=first:end runs others than the ordinary ones;
`make soak-seeds` runs 50,000.

Each safety rule is broken on purpose, and a seed is named whose job then breaks a promise.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest

from holdfast.agent.voter import Voter, VoterState
from holdfast.authority.voters import Voters
from holdfast.coordinator.coordinator_commands import Command
from holdfast.coordinator.formation import Gathering
from holdfast.coordinator.previous_generation import LostPart
from holdfast.protocol.charter import Charter, CharterPosition, Poll, majority
from holdfast.protocol.policy import Grow, Limits, Note
from tests.support.simulator.checkers import BrokenPromiseError, SuccessionChecker
from tests.support.simulator.cluster import SimOptions
from tests.support.simulator.faults import FaultOptions
from tests.support.simulator.succession import SuccessionCluster
from tests.support.simulator.sweep import SUCCESSION, draw_succession, parse_seeds, report, run_seeds, run_succession

FIRST, END = parse_seeds(os.environ.get("HOLDFAST_SEEDS", "0:60"))
CHUNKS = 4
STEP = max(1, -(-(END - FIRST) // CHUNKS))
MENDED = (
    199,
    233,
    285,
    311,
    345,
    358,
    370,
    456,
    542,
    579,
    1441,
    1547,
    1732,
    1756,
    1821,
    1945,
    2014,
    2594,
    2665,
    3099,
    3812,
    4000,
    5071,
    8155,
    9023,
    10807,
    14819,
    16911,
    24764,
)
"""Seeds beyond the ordinary ones that have found something."""
TORN = (54, 113, 210, 224, 264)
"""The same, of `nemesis`."""
PAIRS = (*range(8), 56, 65, 118)
"""Of `pair`: the last ones have found something."""


@pytest.mark.parametrize("first", range(FIRST, END, STEP))
def test_every_promise_holds(first: int) -> None:
    tally = run_seeds(first, min(first + STEP, END), SUCCESSION)
    assert not tally.failures, report(tally)


@pytest.mark.parametrize("seed", MENDED)
def test_what_was_mended_stays_mended(seed: int) -> None:
    tally = run_seeds(seed, seed + 1, SUCCESSION)
    assert not tally.failures, report(tally)


@pytest.mark.parametrize("seed", TORN)
def test_what_is_torn_while_it_decides_keeps_every_promise(seed: int) -> None:
    cluster = nemesis(seed)
    cluster.run()
    assert cluster.coordinators > 2


@pytest.mark.parametrize("seed", PAIRS)
def test_two_nodes_and_a_witness_keep_every_promise(seed: int) -> None:
    cluster = pair(seed)
    cluster.run()
    assert cluster.succeeded()


def test_successors_are_elected_and_continue() -> None:
    """Nothing of it would break a promise if there were no successors."""
    seen: Counter[str] = Counter()

    class Counting(SuccessionCluster):
        def trace(self, who: str, what: object) -> None:
            if isinstance(what, Note):
                seen[what.event] += 1
            super().trace(who, what)

    for seed in range(1, 13):
        run_succession(seed, build=Counting)
    assert min(seen[event] for event in ("votes", "elected", "steps_down", "resumed", "regrouped")) > 0, seen


def test_one_seed_gives_one_history() -> None:
    first, second = (run_succession(3, story_lines_max=None) for _ in range(2))
    assert list(first.story) == list(second.story)


# --- each rule is needed ----------------------------------------------------------------------------------------------


class VotesTwice(Voter):
    """More than one vote in a term."""

    def _would_vote(self, poll: Poll) -> bool:
        free = self.stage not in (VoterState.FOLLOWING, VoterState.LEADING)
        return free and poll.term >= self.term and poll.held >= self.held


class VotesForOlder(Voter):
    """A vote for a candidate whose charter is older."""

    def _would_vote(self, poll: Poll) -> bool:
        free = self.stage not in (VoterState.FOLLOWING, VoterState.LEADING)
        return free and poll.term > self.term


class LeavesGoneOut(Voter):
    """A candidate does without the voters whose process has ended."""

    def _elected_by(self, names: Collection[str]) -> bool:
        return self.charter is not None and self.charter.carried_by(names, self._gone)


class AsksTheNewOnly(Voter):
    """While the voters change, those before are not asked."""

    def _elected_by(self, names: Collection[str]) -> bool:
        return self.charter is not None and majority(self.charter.voters, names)


class StartsAtOnce(Voters):
    """It orders what no majority knows."""

    def release(self, now: float, commands: Sequence[Command]) -> list[Command]:
        out = super().release(now, commands)
        held, self._held = self._held, []
        return out + held


class WaitsForNoFence(Voters):
    """It forms a generation while the old one may live."""

    def gathers(self, now: float, gathering: Gathering) -> Mapping[int, LostPart]:
        gathering.not_before_s = now
        return super().gathers(now, gathering)


class NeverStepsDown(Voters):
    """It needs no majority to stay."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._charters.authority_s = lambda now: now  # type: ignore[method-assign]


class AnswersWithoutAge(Voters):
    """Its answers prolong what it has started, although no majority confirms it."""

    def age_s(self, now: float) -> float:
        return 0.0


class CountsTheNewOnly(Voters):
    """A charter counts without a majority of the voters before."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        charters = self._charters

        def count() -> None:
            position, voters = charters.charter.position, charters.charter.voters
            held = [name for name, voter in charters._voters.items() if voter.held >= position or not charters.elects]
            charters.counts = not voters or majority(voters, held, charters._gone)
            charters.settled = charters.settled or charters.counts

        charters._count = count  # type: ignore[method-assign]


def breaking(*rules: type) -> type[SuccessionCluster]:
    """A cluster whose machines break these rules."""
    voters = [rule for rule in rules if issubclass(rule, Voter)]
    authorities = [rule for rule in rules if issubclass(rule, Voters)]

    class Breaking(SuccessionCluster):
        voter_class = voters[0] if voters else Voter
        authority_class = authorities[0] if authorities else Voters

    return Breaking


LIMITS = Limits(join_s=60.0, last_call_s=4.0, stop_grace_s=0.5, lease_s=3.0, fence_s=2.0, ping_interval_s=0.5)


def nemesis(seed: int, *rules: type) -> SuccessionCluster:
    """A small job: while its coordinators decide they crash, or the network is torn. Machines break these rules."""
    faults = FaultOptions(
        span_s=30.0,
        leader_moments=200,
        moment_tears=True,
        leader_cuts=1,
        freezes=1,
        lags=seed // 2 % 3,
        worker_failures=4,
        agent_kills=1,
    )
    nodes = 3 + seed % 3
    options = SimOptions(
        min_nodes=1 + seed // 5 % 2,
        max_nodes=nodes,
        nproc_max=1,
        max_restarts=100,
        work_s=40.0,
        delay_s_max=(0.005, 0.05, 0.2)[seed // 3 % 3],
        limits=LIMITS,
        grow=Grow.NOW,
        faults=faults,
    )
    return breaking(*rules)(seed, nodes, options, witnesses=seed // 9 % 2, fixed_ports=True)


def pair(seed: int) -> SuccessionCluster:
    """Two nodes and a witness. Each node is alone again and again; then only the witness remembers what it does."""
    faults = FaultOptions(
        span_s=60.0,
        leader_moments=(0, 30, 100)[seed % 3],
        moment_tears=seed // 3 % 2 == 1,
        leader_crashes=2,
        leader_cuts=seed // 2 % 2,
        cuts=seed // 4 % 2,
        freezes=seed // 8 % 2,
        lags=seed // 16 % 2,
        worker_failures=2,
        agent_kills=1,
    )
    options = SimOptions(
        min_nodes=1,
        max_nodes=2,
        nproc_max=1,
        max_restarts=100,
        work_s=40.0,
        delay_s_max=(0.005, 0.05)[seed // 5 % 2],
        limits=LIMITS,
        grow=Grow.NOW,
        faults=faults,
    )
    fixed = seed // 11 % 2 == 1
    return SuccessionCluster(seed, 2, options, endpoints=1 + seed // 7 % 2, witnesses=1, fixed_ports=fixed)


def duel(seed: int, *rules: type) -> SuccessionCluster:
    """Many elections on a slow network, so that several candidates stand."""
    nodes = 5 + 2 * (seed % 2)
    options = SimOptions(
        min_nodes=3,
        max_nodes=nodes,
        nproc_max=1,
        max_restarts=100,
        work_s=60.0,
        delay_s_max=0.2,
        limits=LIMITS,
        grow=Grow.NOW,
        faults=FaultOptions(span_s=40.0, leader_moments=400, leader_crashes=6),
    )
    return breaking(*rules)(seed, nodes, options, fixed_ports=True)


def drawn(seed: int, *rules: type) -> SuccessionCluster:
    """One of the ordinary jobs."""
    return draw_succession(seed, story_lines_max=0, build=breaking(*rules))


BROKEN = [
    pytest.param(drawn, (AnswersWithoutAge,), (1, 9, 22), "still runs generation", id="a Pong without age"),
    pytest.param(drawn, (NeverStepsDown,), (33, 38, 63), "still runs generation", id="no step-down"),
    pytest.param(nemesis, (VotesForOlder,), (65, 120, 225, 227), "counts after", id="a vote for an older charter"),
    pytest.param(duel, (VotesTwice,), (153, 194, 276, 291), "both elected in term", id="two votes in a term"),
    pytest.param(
        nemesis, (StartsAtOnce,), (54, 94, 144, 181), "both start generation", id="a start before the charter counts"
    ),
    pytest.param(nemesis, (WaitsForNoFence,), (64, 68, 118, 145), "still runs generation", id="no wait for the fence"),
    pytest.param(
        nemesis, (AsksTheNewOnly, CountsTheNewOnly), (112, 130, 144, 181), "counts after", id="only the new voters"
    ),
    pytest.param(
        nemesis, (LeavesGoneOut,), (22, 72, 181), "counts after|both elected|still running", id="ended voters left out"
    ),
]


@pytest.mark.parametrize(("job", "rules", "seeds", "words"), BROKEN)
def test_each_rule_is_needed(
    job: Callable[..., SuccessionCluster], rules: tuple[type, ...], seeds: tuple[int, ...], words: str
) -> None:
    """Several seeds, since a change of the machines changes their stories: one of them must find it."""
    problems: list[str] = []
    for seed in seeds:
        try:
            job(seed, *rules).run()
        except BrokenPromiseError as error:
            problems.append(str(error).partition("\n")[0])
            if re.search(words, problems[-1]):
                job(seed).run()  # with the rule all is well
                return
    pytest.fail(f"no seed finds it: {problems}")


# --- the checker ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("coordinator", "newer", "words"),
    [
        pytest.param(
            3, Charter(CharterPosition(1, 2), (), generation=2, restarts=1), "both decide in term 1", id="leaders"
        ),
        pytest.param(
            2, Charter(CharterPosition(1, 1), (), generation=2, restarts=1), "number=1. counts after", id="position"
        ),
        pytest.param(
            2, Charter(CharterPosition(1, 2), (), generation=1, restarts=1), "1, 1. counts after .2, 1", id="number"
        ),
        pytest.param(2, Charter(CharterPosition(1, 2), (), generation=2), "2, 0. counts after .2, 1", id="restarts"),
    ],
)
def test_the_checker_finds_what_must_not_be(coordinator: int, newer: Charter, words: str) -> None:
    checker, charter = SuccessionChecker(), Charter(CharterPosition(1, 1), (), generation=2, restarts=1)
    checker.leads(2, None, 1)
    checker.wrote(2, charter)
    checker.leads(3, charter, 2)
    checker.committed(2, 1, charter)
    with pytest.raises(BrokenPromiseError, match=words):
        checker.committed(coordinator, 1, newer)
