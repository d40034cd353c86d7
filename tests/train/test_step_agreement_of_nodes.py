"""The agreement of ranks on several nodes on each step, in thousands of random orders of messages, news and losses.

The agreement and its files are real. Links, the exchange of gradients, and the coordinator are doubles in one thread: in
each turn one rank or one message gets on. Whoever is lost, and whenever, all that live go on from one step, and none of
them has completed a later one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from random import Random

import pytest

from holdfast.train import step_agreement
from holdfast.train.step_agreement import Decision, Speaker, StepAgreement, StepEntry, is_known

SEEDS, PARTS = 3000, 2
STEPS = 3
TURNS_MAX = 20_000
OF = "this world"


class Killed(Exception):  # noqa: N818 - no error: the rank is lost at this point
    """This rank is lost while it speaks."""


@dataclass
class FakeLink:
    """One side of a connection. Messages arrive in order, each at any later time."""

    may_die: Callable[[], None]
    newest: int = 0
    ended: bool = False
    lost: bool = False
    coming: list[int] = field(default_factory=list)
    other: FakeLink | None = None

    def say(self, step: int) -> None:
        self.may_die()
        assert self.other is not None
        self.other.coming.append(step)
        self.may_die()

    def end(self) -> None:
        self.say(-1)

    def close(self) -> None:
        assert self.other is not None
        self.other.lost = True

    def arrive(self) -> None:
        step = self.coming.pop(0)
        if step < 0:
            self.ended = True
        else:
            self.newest = max(self.newest, step)


class Where(Enum):
    """What a rank does next."""

    BACKWARD = "it waits for gradients"
    HOOK = "it has announced the step"
    OPTIMIZER = "it completes the step"
    OPEN = "it waits for the next generation with an open step"
    WAITS = "it waits for the next generation"


@dataclass
class Rank:
    number: int
    node: int
    agreement: StepAgreement
    links: list[FakeLink]
    where: Where = Where.BACKWARD
    done: int = 0
    """Complete steps."""
    sent: int = 1
    """Its part of the gradients of this step is on its way, or there."""
    decided: int = 0
    knows_of_loss: bool = False

    @property
    def waits(self) -> bool:
        return self.where in (Where.OPEN, Where.WAITS)


class Job:
    """All ranks of one generation, and what becomes of them."""

    def __init__(self, folder: Path, rng: Random) -> None:
        self.rng = rng
        self.losses_left = rng.randint(1, 4)
        self.p_kill = rng.choice((0.002, 0.01, 0.05))
        nodes, per_node = rng.randint(2, 4), rng.randint(1, 3)
        links: dict[int, list[FakeLink]] = {0: []}
        for node in range(1, nodes):
            near, far = FakeLink(self.may_die), FakeLink(self.may_die)
            near.other, far.other = far, near
            links[0].append(near)
            links[node] = [far]
        self.ranks = [
            Rank(
                node * per_node + at,
                node,
                StepAgreement(
                    str(folder / f"{node}.steps"),
                    at,
                    per_node,
                    Speaker(links[node], decides=node == 0) if at == 0 else None,
                    one_node=False,
                ),
                links[node] if at == 0 else [],
            )
            for node in range(nodes)
            for at in range(per_node)
        ]
        self.living = list(self.ranks)
        self.told: dict[int, Decision] | None = None
        """Of the next generation, since all were sent into it; None: some rank does not wait for it."""
        self.open_steps = {True: 0, False: 0}
        """Those that were completed, and those that were given up."""
        self.members: list[Rank] = []
        """Its ranks."""

    @property
    def over(self) -> bool:
        """All that live are in the next generation, or have made all steps, or none lives."""
        if not self.living or self.told is None:
            return all(each.done >= STEPS for each in self.living)
        return len(self.told) == len(self.members) and all(each.where is Where.WAITS for each in self.living)

    def may_die(self) -> None:
        if self.losses_left and self.rng.random() < self.p_kill:
            raise Killed

    def turn(self) -> None:
        rank = self.rng.choice(self.living)
        try:
            self.may_die()
            self.go_on(rank)
        except Killed:
            self.lose(rank)
        waiting = [link for each in self.ranks for link in each.links if link.coming]
        if waiting and self.rng.random() < 0.5:
            self.rng.choice(waiting).arrive()
        lost = len(self.living) < len(self.ranks)
        if lost and self.told is None and all(each.waits for each in self.living):
            self.told, self.members = {}, list(self.living)

    def lose(self, rank: Rank) -> None:
        """This rank, or all on its node. The others learn of it at any later time."""
        self.losses_left -= 1
        whole = self.rng.random() < 0.5
        gone = [each for each in self.living if each is rank or (whole and each.node == rank.node)]
        self.living = [each for each in self.living if each not in gone]
        for each in gone:
            for link in each.links:
                link.close()
        self.told = None  # whoever was sent on comes back

    def go_on(self, rank: Rank) -> None:
        step = rank.done + 1
        if len(self.living) < len(self.ranks) and self.rng.random() < 0.2:
            rank.knows_of_loss = True
        match rank.where:
            case Where.BACKWARD if rank.knows_of_loss and self.rng.random() < 0.5:
                rank.where = Where.WAITS  # the exchange has failed
            case Where.BACKWARD if step <= STEPS and all(each.sent >= step for each in self.ranks):
                rank.agreement.announce(step)
                rank.where = Where.HOOK
            case Where.HOOK:
                self.enter(rank, step)
            case Where.OPTIMIZER:
                rank.done, rank.sent = step, step + 1
                left = rank.knows_of_loss or self.told is not None
                rank.where = Where.WAITS if left else Where.BACKWARD
            case Where.WAITS | Where.OPEN if self.told is not None:
                self.told[rank.number] = Decision(OF, rank.decided)
                if rank.where is Where.OPEN and len(self.told) == len(self.members):
                    known = is_known(Decision(OF, step), self.told.values())
                    self.open_steps[known] += 1
                    rank.where, rank.decided = (Where.OPTIMIZER, step) if known else (Where.WAITS, rank.decided)

    def enter(self, rank: Rank, step: int) -> None:
        match rank.agreement.look(step, lambda: rank.knows_of_loss):
            case StepEntry.DONE:
                rank.where, rank.decided = Where.OPTIMIZER, step
            case StepEntry.OPEN:
                rank.where = Where.OPEN
            case other:
                assert other is None

    def close(self) -> None:
        for each in self.ranks:
            each.agreement.end(lost=True)


@pytest.mark.parametrize("part", range(PARTS))
def test_all_that_live_go_on_from_one_step_and_none_has_completed_a_later_one(tmp_path: Path, part: int) -> None:
    tmp_path.chmod(0o700)
    seen = {"open steps that others knew": 0, "open steps that were void": 0, "jobs without survivors": 0}
    for seed in range(part, SEEDS, PARTS):
        job = Job(tmp_path, Random(f"steps {seed}"))
        for _ in range(TURNS_MAX):
            if job.over:
                break
            job.turn()
        assert job.over, f"seed {seed}: {job.living}"
        assert len({each.done for each in job.living}) <= 1, f"seed {seed}: {job.living}"
        seen["jobs without survivors"] += not job.living
        seen["open steps that others knew"] += job.open_steps[True]
        seen["open steps that were void"] += job.open_steps[False]
        job.close()
    assert all(count > SEEDS / PARTS / 100 for count in seen.values()), seen


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[StepAgreement, StepAgreement]]:
    """Two nodes of one rank."""
    tmp_path.chmod(0o700)
    near, far = FakeLink(lambda: None), FakeLink(lambda: None)
    near.other, far.other = far, near

    def delivered(_: float) -> None:
        for each in (near, far):
            while each.coming:
                each.arrive()
        time.sleep(0.0005)

    made = [
        StepAgreement(
            str(tmp_path / f"{node}"), 0, 1, Speaker([link], decides=not node, await_news=delivered), one_node=False
        )
        for node, link in enumerate((near, far))
    ]
    yield made[0], made[1]
    for each in made:
        each.end(lost=True)


def test_a_node_that_agrees_on_no_more_steps_holds_no_other_up(two: tuple[StepAgreement, StepAgreement]) -> None:
    first, second = two
    second._speaker.close(lost=False)  # type: ignore[union-attr]
    assert first.enters(1, lambda: False) is StepEntry.UNKNOWN


def test_a_node_that_never_comes_ends_the_agreement(
    two: tuple[StepAgreement, StepAgreement], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_agreement, "SILENCE_S", 0.05)
    assert two[0].enters(1, lambda: False) is StepEntry.UNKNOWN


def test_a_decision_of_another_world_says_nothing() -> None:
    assert not is_known(Decision("b", 5), [Decision("a", 9), Decision("b", 4)])
    assert is_known(Decision("b", 5), [Decision("a", 0), Decision("b", 5)])
