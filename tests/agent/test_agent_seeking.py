"""How an agent looks for the coordinator: pauses, when it gives up, and which node it has lost."""

from __future__ import annotations

from msgspec import structs

from holdfast.agent.commands import Dial, Exit, KillTree, Say
from holdfast.agent.events import Dialed, DialFailed, LinkLost, TreeGone
from holdfast.protocol.machines import Tick
from holdfast.protocol.messages import Join
from holdfast.protocol.outcome import OutcomeKind
from tests.agent.agent_desk import LIMITS, assign, dialing, idle


def test_pauses_between_attempts_grow_to_the_limit() -> None:
    desk = dialing()
    times = []
    while desk.now < 8.0:
        desk.give(DialFailed("HF302", 1, "connection refused", final=False))
        due = desk.machine.next_deadline()
        assert due is not None
        times.append(round(due - desk.now, 3))
        desk.now = due
        desk.give(Tick())
        if not desk.has(Dial):  # it was time to say something
            desk.now += times[-1]
            desk.give(Tick())
    assert times[:4] == [0.1, 0.2, 0.4, 0.5]
    assert max(times) == LIMITS.connect_retry_max_s


def test_it_gives_up_at_the_join_deadline_and_says_why() -> None:
    desk = dialing()
    while desk.machine.outcome is None:
        desk.give(DialFailed("HF110", 2, "no such host", final=False))
        due = desk.machine.next_deadline()
        if due is not None:
            desk.now = due
            desk.give(Tick())
    assert desk.now == 60.0
    outcome = desk.machine.outcome
    assert (outcome.kind, outcome.code, outcome.exit_code) == (OutcomeKind.NO_QUORUM, "HF110", 2)
    assert outcome.message == "no such host (tried for 60 s)"


def test_the_node_that_had_the_coordinator_is_named_with_its_ranks() -> None:
    desk = idle()
    desk.hear(structs.replace(assign(1), led_by="b (ranks 2-3)"))
    said = [command.text for command in desk.give(LinkLost("connection reset")) if isinstance(command, Say)]
    assert said == ["lost the coordinator on b (ranks 2-3): connection reset; trying to reach it again"]
    desk.give(Tick())
    desk.give(Dialed())
    (join,) = desk.sent()
    assert isinstance(join, Join)
    assert join.led_by == "b (ranks 2-3)"
    desk.give(LinkLost("connection reset"))
    while desk.machine.outcome is None:
        desk.give(DialFailed("HF302", 1, "connection refused", final=False))
        due = desk.machine.next_deadline()
        if due is not None:
            desk.now = due
            desk.give(TreeGone(1) if desk.has(KillTree) else Tick())
    outcome = desk.machine.outcome
    assert outcome.message == "lost b (ranks 2-3), which had the coordinator: it did not come back within 60 s"
    assert outcome.verdict.lost_nodes == ("b (ranks 2-3)",)


def test_a_final_refusal_is_not_repeated() -> None:
    desk = dialing()
    desk.give(DialFailed("HF111", 2, "another job", final=True))
    assert desk.has(Exit)
