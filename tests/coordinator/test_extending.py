"""The doors: what an extension may do to a job, and what its faults do not."""

from __future__ import annotations

from math import inf
from typing import Any

import msgspec
import pytest
from msgspec import structs

from holdfast.coordinator.coordinator_events import LinkOpened
from holdfast.coordinator.extending import FAULT_PAUSE_S, FAULTS_NOTED_MAX, OPEN_MAX
from holdfast.coordinator.stop_delay import PLACES_S
from holdfast.coordinator.world import Phase
from holdfast.protocol import messages as msg
from holdfast.protocol.extension import (
    Announce,
    AnswerRequest,
    CoordinatorExtension,
    DrainBegan,
    DrainEnded,
    Ended,
    EndGeneration,
    Figures,
    Happened,
    Job,
    MemberLost,
    Observed,
    Order,
    Orders,
    RankPlace,
    SafePointAgreed,
    SafePointRefused,
    SaveAtSafePoint,
    Started,
    StartFollows,
    StopDelayed,
    ToNode,
    UserRequest,
)
from holdfast.protocol.outcome import Evidence, Failure
from holdfast.protocol.rank_progress import Finding, HangKind, RankProgress, Stage, Standing
from tests.coordinator.coordinator_harness import CoordinatorHarness, gathering, regrouping, running, steps
from tests.support.simulator.nodes import simple_judge


class Word(msgspec.Struct, frozen=True, array_like=True):
    text: str


class About(msgspec.Struct, frozen=True):
    text: str = ""


class Probe(CoordinatorExtension):
    """Orders what the test wants, and remembers what it was told."""

    questions = {"probe": About}
    messages = Word

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.requests: list[UserRequest] = []
        self.words: list[tuple[str, str]] = []
        self.events: list[Happened] = []
        self.progress: list[str] = []
        self.orders: list[Order] = []
        """Given at the next opportunity."""
        self.at_s = inf
        self.broken = ""
        """The method that raises."""
        self.stays_due = False
        self.observation = Observed()
        self.figures = Figures()

    def _given(self, method: str) -> Orders:
        if method == self.broken:
            raise KeyError(method)
        given, self.orders = self.orders, []
        return given

    def asked(self, now: float, request: UserRequest) -> Orders:
        self.requests.append(request)
        return self._given("asked")

    def heard(self, now: float, member: str, message: Word) -> Orders:
        self.words.append((member, message.text))
        return self._given("heard")

    def happened(self, now: float, event: Happened) -> Orders:
        self.events.append(event)
        return self._given("happened")

    def progressed(self, now: float, member: str) -> Orders:
        self.progress.append(member)
        return self._given("progressed")

    def observed(self, now: float) -> Observed:
        if self.broken == "observed":
            raise KeyError("observed")
        return self.observation

    def due_s(self) -> float:
        self._given("due_s") if self.broken == "due_s" else None
        return self.at_s

    def due(self, now: float) -> Orders:
        self.at_s = self.at_s if self.stays_due else inf
        return self._given("due")

    def view(self, now: float) -> Figures:
        if self.broken == "view":
            raise KeyError("view")
        return structs.replace(self.figures, job={"words": len(self.words)})


class Listed:
    """The probe's line in the list."""

    name = "probe"
    questions = ("probe",)
    follows = True

    def __init__(self) -> None:
        self.made: Any = None

    def coordinator(self, job: Job) -> Probe:
        self.made = Probe(job)
        return self.made  # type: ignore[no-any-return]


def probed(state: Any = running, **options: Any) -> tuple[CoordinatorHarness, Probe]:
    listed = Listed()
    harness: CoordinatorHarness = state(extensions=[listed], **options)
    return harness, listed.made


HUNG = Finding(kind=HangKind.HUNG, code="HF240", text="rank 1 sleeps", culprits=(1,))


def times_out(harness: CoordinatorHarness) -> None:
    """A collective of rank 0 has waited in vain."""
    said = "RuntimeError: [unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation to complete"
    failure = Failure(rank=0, local_rank=0, host="n1", pid=1, exit_code=1, message=said)
    harness.say(1, msg.WorkersFailed(1, (failure,)))


def test_a_request_is_answered_now_or_later_and_once() -> None:
    harness, probe = probed()
    harness.ask("probe", 2, number=7, text="why")
    (request,) = probe.requests
    assert (request.question, request.by, request.about, harness.answers) == ("probe", "somebody", About("why"), [])
    probe.orders = [AnswerRequest(request.number, b"[1]"), AnswerRequest(request.number, b"[2]")]
    harness.extend(1, "probe", Word("because"))
    assert (probe.words, harness.answers) == ([("n1#1", "because")], [(2, msg.Answer(7, b"[1]"))])


def test_what_has_not_joined_learns_nothing() -> None:
    harness, probe = probed()
    harness.give(LinkOpened(9, "10.0.0.9", "10.0.0.1"))
    harness.ask("probe", 9)
    harness.extend(9, "probe", Word("hello"))
    assert (harness.answers, probe.requests, probe.words) == ([(9, msg.Answer(1))], [], [])


def test_an_unknown_question_is_refused_and_an_unknown_extension_not_heard() -> None:
    harness, _ = probed()
    harness.ask("weather")
    assert harness.refusal() == "there is no question 'weather'"
    harness.extend(1, "weather", Word("rain"))
    assert harness.dropped == []


def test_a_question_that_does_not_fit_is_refused_and_a_message_that_does_not_is_the_nodes_error() -> None:
    harness, probe = probed()
    harness.say(1, msg.Ask(1, "probe", "somebody", b'{"text": 7'))
    assert "probe cannot be asked like this" in harness.refusal()
    harness.say(1, msg.Extended("probe", b"\x91\x07"))
    assert (harness.dropped, probe.words) == ([1], [])


def test_texts_of_both_are_safe_for_a_console() -> None:
    harness, probe = probed()
    harness.ask("probe", text="\x1b[2Jgone")
    harness.extend(1, "probe", Word("\x1b[2Jgone"))
    assert (probe.requests[0].about.text, probe.words[0][1]) == ("gone", "gone")


def test_it_may_tell_nodes_announce_and_end_a_generation() -> None:
    harness, probe = probed(max_restarts=1)
    harness.told.clear()
    stop = EndGeneration(msg.StopReason.HUNG, "enough")
    probe.orders = [ToNode("n2#1", Word("go")), ToNode("nobody#1", Word("go")), Announce("all goes"), stop]
    harness.ask("probe")
    assert harness.ordered(2, Word) == Word("go")
    assert [message for _, message in harness.told[:2]] == [msg.Notice("all goes")] * 2
    assert (harness.machine.phase, harness.noted("stopping")[0]["text"]) == (Phase.STOPPING, "enough")


@pytest.mark.parametrize("state", [gathering, regrouping])
def test_what_the_phase_does_not_allow_is_not_done(state: Any) -> None:
    harness, probe = probed(state)
    if state is gathering:
        harness.join(1)
    phase = harness.machine.phase
    probe.orders = [SaveAtSafePoint("somebody"), Announce("hello")]
    if state is gathering:
        probe.orders.append(EndGeneration(msg.StopReason.HUNG, "enough"))
    harness.ask("probe")
    assert harness.machine.phase is phase
    assert probe.events[-1] == SafePointRefused(f"no generation runs: the job is {phase.value}")


def test_it_gets_the_end_of_a_save_and_what_becomes_of_generations() -> None:
    harness, probe = probed(max_restarts=1)
    assert probe.events == [StartFollows(1), Started(1)]
    probe.events.clear()
    probe.orders = [SaveAtSafePoint("somebody")]
    harness.ask("probe")
    harness.both_say(msg.Held(1, 4, saves=True))
    assert probe.events == [DrainBegan(1), DrainEnded(1), SafePointAgreed(5)]
    harness.fail(2)
    harness.both_say(msg.Stopped(1))
    harness.prepare(1, 2)
    assert probe.events[3:] == [Ended(1), StartFollows(2), Started(2)]


def test_a_regroup_is_another_generation_and_the_loss_of_a_member_is_told() -> None:
    harness, probe = probed(least=1, max_restarts=2)
    harness.can_go_on(1, 2)
    harness.dropped.clear()
    harness.say(
        2, msg.Join(next(m.node for m in harness.machine.members.values() if m.link == 2))
    )  # a member joins once
    harness.prepare(1)
    assert probe.events[2:] == [MemberLost("n2#1"), Ended(1), Started(2)]


def test_it_is_called_when_it_is_due() -> None:
    harness, probe = probed()
    harness.ask("probe")
    number = probe.requests[0].number
    probe.at_s = harness.now + 3.0
    harness.say(1, msg.Extended("probe", b"\x91\xa1x"))
    probe.orders = [AnswerRequest(number, b"3")]
    harness.wait(2.9)
    assert harness.answers == []
    harness.wait(0.2)
    assert harness.answer() == 3


@pytest.mark.parametrize("method", ["asked", "heard", "happened", "progressed", "observed", "due", "due_s", "view"])
def test_a_fault_of_it_ends_no_job_and_its_requests_are_refused(method: str) -> None:
    harness, probe = probed(max_restarts=1)
    harness.ask("probe", 2)
    probe.broken = method
    probe.at_s = harness.now + 1.0
    harness.extend(1, "probe", Word("hello"))
    harness.ask("probe", 1)
    steps(harness, 10)
    harness.wait(2.0)
    assert harness.machine.view(harness.now).phase == "running"
    harness.fail(2)
    assert harness.machine.phase is Phase.STOPPING
    assert {note["what"] for note in harness.noted("observer_fault")} == {"probe"}
    assert "KeyError" in harness.refusal(2)


def test_one_that_stays_due_and_fails_is_called_after_a_pause() -> None:
    harness, probe = probed()
    probe.stays_due = True
    probe.broken, probe.at_s = "due", harness.now + 1.0
    harness.say(1, msg.Extended("probe", b"\x91\xa1x"))
    harness.wait(FAULT_PAUSE_S)
    assert len(harness.noted("observer_fault")) == 1
    harness.wait(2.0)
    assert len(harness.noted("observer_fault")) == 2


def test_the_faults_of_one_are_not_noted_for_ever() -> None:
    harness, probe = probed()
    probe.broken = "progressed"
    for number in range(2 * FAULTS_NOTED_MAX):
        steps(harness, number + 1, links=(1,))
    notes = harness.noted("observer_fault")
    assert (len(notes), len(probe.progress)) == (FAULTS_NOTED_MAX, 2 * FAULTS_NOTED_MAX)
    assert "further faults are not noted" in str(notes[-1]["error"])


def test_it_follows_new_steps_and_stages_and_nothing_else() -> None:
    harness, probe = probed()
    steps(harness, 10)
    steps(harness, 10, links=(1,))
    steps(harness, 20, links=(2,))
    assert probe.progress == ["n1#1", "n2#1", "n2#1"]
    throughput = probe.job.throughput
    assert throughput is not None
    assert [pace.steps for pace in throughput.ranks] == [10, 20]


def test_what_it_knows_when_a_generation_ends_is_in_the_verdict() -> None:
    judged: list[Evidence] = []
    harness, probe = probed(judge=lambda evidence: judged.append(evidence) or simple_judge(evidence))
    probe.observation = Observed(HUNG)
    harness.fail(1)
    harness.both_say(msg.Stopped(1))
    assert judged[0].hang == HUNG
    assert harness.machine.outcome is not None
    assert harness.machine.outcome.code == HUNG.code


def test_a_generation_that_is_ended_for_one_worker_names_it_to_its_node() -> None:
    harness, probe = probed(max_restarts=1)
    culprit = Failure(rank=1, local_rank=0, host="n2", pid=7, exit_code=-9)
    probe.orders = [EndGeneration(msg.StopReason.HUNG, "enough", culprit)]
    harness.ask("probe")
    stop = harness.last(2)
    assert isinstance(stop, msg.Stop)
    assert stop.hung == 1
    harness.both_say(msg.Stopped(1))
    assert harness.noted("verdict")[0]["cause"] == "exit code -9"


def test_it_is_told_at_once_that_the_stop_waits_and_what_for() -> None:
    harness, probe = probed()
    probe.observation = Observed(complete=False)
    times_out(harness)
    assert probe.events[-1] == StopDelayed(1, harness.now + PLACES_S, seeks_places=True)
    assert harness.machine.phase is Phase.RUNNING
    probe.observation = Observed()
    harness.extend(1, "probe", Word("found"))
    assert harness.machine.phase is Phase.RUNNING, "rank 1 may report, too"
    harness.wait(PLACES_S)
    assert harness.machine.phase is Phase.STOPPING


def test_where_nobody_finds_the_missing_ranks_the_stop_does_not_wait_for_them() -> None:
    harness, _ = probed()
    times_out(harness)
    assert harness.machine.phase is Phase.STOPPING


def test_its_notices_and_places_are_a_part_of_the_view() -> None:
    harness, probe = probed()
    probe.figures = Figures(
        notices=("rank 1 sleeps",), places={1: RankPlace(Standing.HUNG, "in sleep")}, stands_still=True
    )
    for number in (50, 100, 150):
        harness.wait(10.0)
        harness.both_say(msg.Progress(1, (RankProgress(0, Stage.STEPPING, number),), number, 1000))
    view = harness.machine.view(harness.now)
    assert view.notices == ("rank 1 sleeps",)
    assert [(rank.standing, rank.place) for node in view.nodes for rank in node.ranks] == [
        (None, ""),
        (Standing.HUNG, "in sleep"),
    ]
    assert view.left_s == 0.0
    probe.figures = Figures()
    assert harness.machine.view(harness.now).left_s > 0.0


def test_what_cannot_be_made_refuses_its_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(listed: Listed, job: Job) -> Probe:
        raise ImportError("no such file")

    monkeypatch.setattr(Listed, "coordinator", broken)
    harness, _ = probed()
    harness.ask("probe")
    assert "no such file" in harness.refusal()
    assert harness.machine.phase is Phase.RUNNING


def test_the_number_of_open_requests_is_bounded() -> None:
    harness, probe = probed()
    for number in range(OPEN_MAX + 1):
        harness.ask("probe", 1 + number % 2, number=number)
    assert len(probe.requests) == OPEN_MAX
    assert "try again" in harness.refusal(1 + OPEN_MAX % 2)


def test_its_figures_are_a_part_of_the_view() -> None:
    harness, _ = probed()
    harness.extend(1, "probe", Word("hello"))
    assert harness.machine.view(harness.now).more == {"probe": {"words": 1}}
