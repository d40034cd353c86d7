"""The soak's checker passes a good history and catches every kind of broken one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soak import checker
from soak.figures import BEGIN_AND_END, BETWEEN, figures, lost, pauses, quantile
from soak.ledger import Event, Life, Record, Snapshot, Step

SAMPLES, BATCH, EVERY = 24, 4, 3
STEP_S = 1.0


class Story:
    """A made-up run: generations one after the other, each from a snapshot on."""

    def __init__(self) -> None:
        self.record = Record([], [], [Event(0.0, "start"), Event(0.0, "end")], SAMPLES)
        self.now = 10.0

    def generation(
        self, name: str, world: int, steps: int, base: Snapshot | None = None, after: tuple[str, int] = ("", 0)
    ) -> list[Life]:
        """`steps` steps, a snapshot every EVERY; the processes end half a second after the last step.

        `after`: the generation, and its step, whose state it has in memory.
        """
        looked_s = self.now
        lives = [
            Life(f"node{rank + 1}", 100 + rank, rank, world, self.now - 1, self.now, name, looked_s=looked_s)
            for rank in range(world)
        ]
        parent = base
        number = after[1] or (base.step if base else 0)
        for life in lives:
            life.base, life.base_step, life.after = (base.id if base else ""), number, after[0]
        for _ in range(steps):
            number += 1
            epoch, offset = divmod((number - 1) * BATCH, SAMPLES)
            ids = list(range(offset, offset + BATCH))
            for life in lives:
                own = ids[life.rank :: world]
                step = Step(number, epoch, offset, own, self.now, self.now + 0.9 * STEP_S, (len(ids), sum(ids)))
                life.steps[number] = step
            self.now += STEP_S
            if number % EVERY == 0:
                parent = self.snapshot(name, number, parent)
        for life in lives:
            life.alive_s = self.now + 0.5
        self.now += 2.0
        self.record.lives += lives
        return lives

    def snapshot(self, generation: str, step: int, parent: Snapshot | None) -> Snapshot:
        epoch, offset = divmod(step * BATCH, SAMPLES)
        ids = [each % SAMPLES for each in range(step * BATCH)]
        made = Snapshot(
            f"s{step}{generation}",
            parent.id if parent else "",
            step,
            epoch,
            offset,
            generation,
            self.now,
            (len(ids), sum(ids)),
        )
        self.record.snapshots.append(made)
        return made

    @property
    def last(self) -> Snapshot:
        return self.record.snapshots[-1]

    def broken(self) -> set[str]:
        return {violation.rule for violation in checker.check(self.record)}


@pytest.fixture
def story() -> Story:
    """Two generations of other sizes, more than an epoch; two steps of the first are lost with it, and done again."""
    made = Story()
    made.generation("a", world=2, steps=5)
    made.generation("b", world=3, steps=9, base=made.last)
    return made


def test_a_good_history_passes(story: Story) -> None:
    assert checker.check(story.record) == []


def test_what_did_not_survive_is_told_from_what_did(story: Story) -> None:
    told = figures(story.record)
    assert (told.steps, told.steps_lost, told.generations) == (12, 2, 2)
    assert told.effective_s == pytest.approx(12 * 0.9 * STEP_S)


def test_steps_behind_the_last_snapshot_survive_in_memory() -> None:
    made = Story()
    made.generation("a", world=3, steps=5)
    made.generation("b", world=2, steps=2, base=made.last, after=("a", 5))
    made.generation("c", world=3, steps=3, base=made.last, after=("b", 7))
    assert checker.check(made.record) == []
    assert (figures(made.record).steps, figures(made.record).steps_lost) == (9, 1)
    made.record.lives[0].steps[5].ids.pop()
    assert "once" in made.broken()


def test_a_step_that_waited_for_a_fault_to_pass_was_not_all_training(story: Story) -> None:
    for life in story.record.lives[2:]:
        life.steps[12].ended_s = life.steps[12].began_s + 100.0
    assert figures(story.record).effective_s == pytest.approx((11 + 2) * 0.9 * STEP_S)


def test_a_lost_sample(story: Story) -> None:
    story.record.lives[2].steps[5].ids.pop()
    assert "once" in story.broken()


def test_a_sample_that_is_lost_without_anybody_counting_it(story: Story) -> None:
    """All ledgers and the ranks' own sum agree that it was not there."""
    for life in story.record.lives[2:]:
        step = life.steps[5]
        if 16 in step.ids:
            step.ids.remove(16)
    for life in story.record.lives[2:]:
        life.steps[5].seen = (3, 17 + 18 + 19)
    count, total = story.last.tally
    story.record.snapshots = [replace(each, tally=(count - 1, total - 16)) for each in story.record.snapshots]
    found = [str(violation) for violation in checker.check(story.record)]
    assert found == ["once: epoch 0: 1 samples are lost: [16]"]


def test_a_repeated_sample(story: Story) -> None:
    story.record.lives[2].steps[5].ids.append(0)
    assert "once" in story.broken()


def test_a_rank_without_a_part_in_a_step(story: Story) -> None:
    del story.record.lives[4].steps[12]
    assert "once" in story.broken()


def test_a_state_that_counted_something_else(story: Story) -> None:
    story.record.snapshots[-1] = replace(story.last, tally=(1, 1))
    assert story.broken() == {"once"}


def test_a_step_number_that_goes_back(story: Story) -> None:
    steps = story.record.lives[2].steps
    story.record.lives[2].steps = dict(sorted(steps.items(), key=lambda item: (item[0] == 5, item[0])))
    assert story.broken() == {"order"}


def test_a_snapshot_that_grew_from_a_later_one(story: Story) -> None:
    first, second, *rest = story.record.snapshots
    story.record.snapshots = [replace(first, step=second.step), second, *rest]
    assert "order" in story.broken()


def test_a_generation_that_goes_back_behind_a_snapshot(story: Story) -> None:
    story.generation("c", world=2, steps=12, base=story.record.snapshots[0])
    assert "order" in story.broken()


def test_a_snapshot_without_its_parent(story: Story) -> None:
    del story.record.snapshots[1]
    assert "chain" in story.broken()


def test_a_snapshot_of_an_unknown_generation(story: Story) -> None:
    story.record.snapshots.append(replace(story.last, id="x", generation="nobody's", parent=""))
    assert "chain" in story.broken()


def test_a_snapshot_that_is_its_own_ancestor(story: Story) -> None:
    story.record.snapshots[0] = replace(story.record.snapshots[0], parent=story.last.id)
    assert "chain" in story.broken()


def test_no_snapshot_at_all(story: Story) -> None:
    story.record.snapshots.clear()
    assert "chain" in story.broken()


def test_two_generations_that_train_at_once(story: Story) -> None:
    for step in story.record.lives[0].steps.values():
        if step.number == 5:
            step.ended_s = story.record.lives[2].steps[4].began_s + 0.1
    assert "alone" in story.broken()


def test_a_worker_that_lives_on_beside_the_next_generation(story: Story) -> None:
    story.record.lives[1].alive_s = story.record.lives[2].steps[4].ended_s + 0.1
    assert story.broken() == {"alone"}


def test_nobody_ends_the_worker_of_an_agent_that_stands_still(story: Story) -> None:
    first_s = story.record.lives[2].steps[4].began_s
    story.record.lives[1].alive_s = story.record.lives[2].steps[4].ended_s + 1.0
    stopped = {"kind": "agent stopped", "node": 2, "at_s": 1.0, "lasts_s": 3.0, "pause_s": 0.0}
    story.record.events.insert(1, Event(first_s, "fault", stopped))
    assert checker.check(story.record) == []
    story.record.lives[1].alive_s = first_s + 3.0 + checker.STOPPED_AGENT_GRACE_S + 0.1
    assert story.broken() == {"alone"}


def test_a_snapshot_of_a_side_that_should_have_stopped(story: Story) -> None:
    late = story.record.lives[2].steps[4].began_s + 0.1
    story.record.snapshots[0] = replace(story.record.snapshots[0], written_s=late)
    assert story.broken() == {"late"}


def leave(story: Story, after: int) -> list[Life]:
    """The second generation leaves on purpose."""
    lives = story.record.lives[2:]
    for life in lives:
        life.steps = {number: step for number, step in life.steps.items() if number <= after}
        life.finished = True
    story.record.snapshots = [each for each in story.record.snapshots if each.step <= after]
    return lives


def test_ranks_that_leave_together_with_what_they_have_done(story: Story) -> None:
    leave(story, after=9)
    assert checker.check(story.record) == []


def test_a_rank_that_leaves_a_step_ahead(story: Story) -> None:
    first, second, _ = leave(story, after=9)
    first.steps[10] = replace(first.steps[9], number=10)
    second.finished = False
    assert story.broken() == {"drain"}


def test_ranks_that_leave_without_saving(story: Story) -> None:
    first, *_ = leave(story, after=10)
    assert story.broken() == {"drain"}
    first.unsaved.append(10)
    assert checker.check(story.record) == [], "the disk was full"


@pytest.mark.parametrize(
    ("event", "rule"),
    [
        (Event(5.0, "left behind", {"node": 1, "processes": ["python train.py"]}), "leak"),
        (Event(5.0, "leftovers", {"node": 1, "processes": ["python train.py"], "shared_memory": []}), "leak"),
        (Event(5.0, "leftovers", {"node": 1, "processes": [], "shared_memory": ["torch_1"]}), "leak"),
        (Event(5.0, "leftovers", {"node": 0, "temporary": ["holdfast-1"]}), "leak"),
        (Event(5.0, "stands still", {"limit_s": 60.0}), "stands"),
        (Event(5.0, "not in time", {"limit_s": 60.0, "what": "all nodes to train together"}), "stands"),
        (Event(5.0, "agent ended", {"node": 2, "told": False, "code": 1}), "stands"),
    ],
)
def test_what_the_rig_saw(story: Story, event: Event, rule: str) -> None:
    story.record.events.insert(1, event)
    assert story.broken() == {rule}


def test_an_agent_may_refuse_to_start_on_a_full_disk_but_not_end_on_one(story: Story) -> None:
    full = {"kind": "disk full", "node": 0, "at_s": 1.0, "lasts_s": 5.0, "pause_s": 0.0}
    ended = Event(7.0, "agent ended", {"node": 2, "told": False, "code": 2})
    story.record.events[1:1] = [Event(4.0, "fault", full), Event(6.0, "agent started", {"node": 2}), ended]
    assert checker.check(story.record) == []
    story.record.events[2] = Event(3.0, "agent started", {"node": 2})
    assert story.broken() == {"stands"}


def test_a_disk_is_full_until_the_rig_has_emptied_it(story: Story) -> None:
    full = {"kind": "disk full", "node": 0, "at_s": 1.0, "lasts_s": 1.0, "pause_s": 0.0}
    over = Event(6.5, "over", {"kind": "disk full", "node": 0})
    ended = Event(7.0, "agent ended", {"node": 2, "told": False, "code": 2})
    story.record.events[1:1] = [Event(4.0, "fault", full), Event(6.0, "agent started", {"node": 2}), over, ended]
    assert checker.check(story.record) == []
    story.record.events.remove(over)
    assert story.broken() == {"stands"}


def test_a_run_that_was_cut_short(story: Story) -> None:
    story.record.events.pop()
    assert story.broken() == {"stands"}


# --- figures ----------------------------------------------------------------------------------------------------------


def fault(t: float, kind: str = "k", lasts_s: float = 0.0) -> Event:
    return Event(t, "fault", {"kind": kind, "node": 1, "at_s": t, "lasts_s": lasts_s, "pause_s": 0.0})


def test_a_pause_is_counted_from_the_fault_to_the_next_step() -> None:
    trained = [1.0, 2.0, 3.0, 8.0, 9.0]
    assert pauses([fault(3.0)], trained) == {"k": [5.0]}
    assert pauses([fault(5.0)], trained) == {"k": [3.0]}, "a pause that was there already counts from the fault"


def test_a_pause_after_the_next_fault_is_that_ones() -> None:
    trained = [float(t) for t in range(1, 11)] + [20.0, 21.0]
    assert pauses([fault(2.0, "a"), fault(9.5, "b")], trained) == {"a": [1.0], "b": [10.0]}


def test_a_fault_after_which_nothing_was_trained_has_no_pause() -> None:
    assert pauses([fault(5.0)], [1.0, 2.0]) == {}


def test_all_that_was_not_training_is_lost_to_a_fault_or_between_steps() -> None:
    steps = [(2.0, 3.0), (3.01, 4.01), (9.0, 10.0), (10.02, 15.02), (15.5, 16.5)]
    told = lost([fault(3.5, "a"), fault(10.5, "b")], steps, longest_s=2.0, begin_s=0.0, end_s=17.0)
    assert told == pytest.approx({BEGIN_AND_END: 2.5, BETWEEN: 0.03, "a": 4.99, "b": 3.0 + 0.48})
    effective_s = 1.0 + 1.0 + 1.0 + 2.0 + 1.0
    assert sum(told.values()) == pytest.approx(17.0 - effective_s)


def test_quantiles() -> None:
    assert [quantile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.95)] == [1.0, 2.0, 3.0]
