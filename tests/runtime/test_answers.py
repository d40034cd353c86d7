"""The coordinator's answers to commands, with links that only remember what they were sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from holdfast.coordinator.coordinator_state import HostAsked, LinkOpened, QuitAsked, SaveAgreed, SaveAsked
from holdfast.protocol.messages import Answer, Ask, FromCoordinator, Look, Looked, Profile, Profiled
from holdfast.protocol.questions import ANSWER_BYTES_MAX, Question, stacks_body, stacks_view, status_body
from holdfast.protocol.rank_progress import (
    Frame,
    JobView,
    NodeView,
    RankProfile,
    RankSample,
    RankView,
    StacksView,
    Stage,
)
from holdfast.runtime import control_handlers as answers
from holdfast.runtime.control_handlers import Answers
from tests.coordinator.coordinator_desk import Desk, gathering, running
from tests.support.limits import limit_s


class Line:
    def __init__(self) -> None:
        self.sent: list[FromCoordinator] = []
        self.answered = asyncio.Event()

    def send(self, message: FromCoordinator) -> None:
        self.sent.append(message)
        if isinstance(message, Answer):
            self.answered.set()

    @property
    def answer(self) -> Any:
        (found,) = [message for message in self.sent if isinstance(message, Answer)]
        return msgspec.json.decode(found.body)


class Bench:
    """A coordinator in this state, and its lines 1 and 2."""

    def __init__(self, state: Callable[[], Desk]) -> None:
        self.desk = state()
        self.lines = {1: Line(), 2: Line()}
        self.fed: list[QuitAsked | HostAsked] = []
        self.faulty: list[str] = []
        self.journal: list[tuple[str, dict[str, Any]]] = []
        self.answers = Answers(self.desk.machine, self.lines, self.fed.append, self.faults, self.written)

    def written(self, event: str, **fields: Any) -> None:
        self.journal.append((event, fields))

    def faults(self, what: str, error: Exception) -> None:
        self.faulty.append(f"{what}: {error}")

    def look(self) -> int:
        (found,) = [message for message in self.lines[1].sent if isinstance(message, Look)]
        return found.number

    def looked(self, link: int, *frames: Frame) -> bool:
        sample = RankSample(0, 100 + link, "S", 0.5, frames)
        return self.answers.looked(link, Looked(self.desk.machine.generation, self.look(), (sample,)))


async def test_status() -> None:
    bench = Bench(running)
    bench.answers.asked(2, Ask(7, Question.STATUS))
    (answer,) = bench.lines[2].sent
    assert isinstance(answer, Answer)
    assert answer.number == 7
    assert msgspec.json.decode(answer.body, type=JobView).world_size == 2
    assert not bench.lines[1].sent


@pytest.mark.parametrize(("question", "drain"), [(Question.STOP, True), (Question.KILL, False)])
async def test_the_end_is_the_machines_to_order(question: Question, drain: bool) -> None:
    bench = Bench(running)
    bench.answers.asked(1, Ask(1, question, "somebody"))
    assert bench.lines[1].answer == {"nodes": 2}
    await asyncio.sleep(0)
    assert bench.fed == [QuitAsked(drain, "somebody")]


async def test_a_host_of_the_job_may_leave_but_not_the_coordinators() -> None:
    bench = Bench(running)
    leader, other = bench.desk.machine.members.values()
    leader.node = msgspec.structs.replace(leader.node, hosts_coordinator=True)
    first, second = leader.node, other.node
    wanted = [(second.host, 1, ""), (first.host, 0, "coordinator"), ("nowhere", 0, "no node of this job")]
    for number, (host, nodes, words) in enumerate(wanted):
        bench.lines[1].sent.clear()
        bench.answers.asked(1, Ask(number, Question.EXCLUDE, "somebody", host, 60.0))
        told = bench.lines[1].answer
        assert (told["nodes"], words in told["refused"], bool(words)) == (nodes, True, bool(told["refused"]))
    await asyncio.sleep(0)
    assert bench.fed == [HostAsked(Question.EXCLUDE, second.host, "somebody", 60.0)]


async def test_stacks_of_all_nodes() -> None:
    bench = Bench(running)
    bench.answers.asked(2, Ask(5, Question.STACKS))
    here, there = Frame("a.py", 1, "f"), Frame("b.py", 2, "g")
    assert bench.looked(1, here)
    assert not [message for message in bench.lines[2].sent if isinstance(message, Answer)]
    assert bench.looked(2, there)
    told = bench.lines[2].answer
    assert [(rank["rank"], rank["host"], rank["stack"]) for rank in told["ranks"]] == [(0, "n1", 0), (1, "n2", 1)]
    assert told["silent"] == []
    assert bench.looked(2, there), "an answer that comes too late is nobody else's either"


async def test_a_node_that_is_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "LOOK_S_MAX", 0.01)
    bench = Bench(running)
    bench.answers.asked(1, Ask(1, Question.STACKS))
    await asyncio.wait_for(bench.lines[1].answered.wait(), limit_s(10))
    assert bench.lines[1].answer["silent"] == ["n1", "n2"]


async def test_a_node_that_is_gone_is_not_waited_for() -> None:
    bench = Bench(running)
    bench.answers.asked(1, Ask(1, Question.STACKS))
    bench.looked(1)
    bench.answers.link_closed(2)
    assert [rank["rank"] for rank in bench.lines[1].answer["ranks"]] == [0]


async def test_without_workers_there_are_no_stacks() -> None:
    bench = Bench(gathering)
    bench.desk.join(1)
    bench.answers.asked(1, Ask(1, Question.STACKS))
    assert bench.lines[1].answer["ranks"] == []


@pytest.mark.parametrize("question", Question)
async def test_who_has_not_joined_learns_and_ends_nothing(question: Question) -> None:
    bench = Bench(running)
    bench.lines[9] = Line()
    bench.desk.give(LinkOpened(9, "10.0.0.9", "10.0.0.1"))
    bench.answers.asked(9, Ask(1, question, "a stranger"))
    assert bench.lines[9].sent == [Answer(1, b"")]
    assert bench.fed == []
    assert not any(isinstance(message, Look) for line in bench.lines.values() for message in line.sent)


async def test_looks_of_the_machine_are_the_machines() -> None:
    assert not Bench(running).answers.looked(1, Looked(1, 3))


def test_an_answer_fits_into_a_frame() -> None:
    ranks = tuple(
        RankView(rank=number, local_rank=0, stage=Stage.STEPPING, steps=10**9, step_s=0.1, own_s=0.1, age_s=0.1)
        for number in range(60_000)
    )
    node = NodeView(member="a#1", host="a", group_rank=0, state="running", heard_s=0.0, ranks=ranks)
    view = JobView(
        run_id="x", phase="running", generation=1, restarts=0, restarts_max=0, world_size=60_000,
        since_s=0, job_s=0, training_s=0, nodes=(node,),
    )  # fmt: skip
    body = status_body(view)
    assert len(body) <= ANSWER_BYTES_MAX
    assert msgspec.json.decode(body, type=JobView).nodes[0].host == "a"
    frames = tuple(Frame("/a/rather/long/path/to/a/file.py", number, "function") for number in range(63))
    for count in (2000, 20_000):
        seen = [
            ("a", rank, RankSample(0, rank, "S", 0.0, (Frame("own.py", rank, "f"), *frames))) for rank in range(count)
        ]
        body = stacks_body(stacks_view("x", 1, count, seen))
        assert len(body) <= ANSWER_BYTES_MAX
        told = msgspec.json.decode(body, type=StacksView)
        assert told.stacks[told.ranks[-1].stack][0] == Frame("own.py", told.ranks[-1].rank, "f")
    assert len(told.ranks) >= 5000


async def test_a_view_that_cannot_be_made_is_an_empty_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(now: float) -> JobView:
        raise KeyError(now)

    bench = Bench(running)
    monkeypatch.setattr(bench.desk.machine, "view", broken)
    bench.answers.asked(1, Ask(4, Question.STATUS, "me"))
    assert bench.lines[1].sent == [Answer(4, b"")]
    assert bench.faulty[0].startswith("status: ")


async def test_only_the_wanted_ranks_are_profiled_and_what_they_gave_is_told() -> None:
    bench = Bench(running)
    bench.answers.asked(1, Ask(7, Question.PROFILE, "somebody", ranks=(1,), steps=5))
    (order,) = bench.lines[2].sent
    assert isinstance(order, Profile)
    assert (order.local_ranks, order.steps) == ((0,), 5)
    assert bench.lines[1].sent == []
    assert [(event, told["by"]) for event, told in bench.journal] == [("coordinator.profile_asked", "somebody")]
    assert bench.answers.looked(2, Profiled(1, order.number, (RankProfile(0, ("/x",), why="no"), RankProfile(9))))
    (rank,) = bench.lines[1].answer["ranks"]
    assert (rank["rank"], rank["files"], rank["why"], bench.lines[1].answer["name"]) == (1, ["/x"], "no", order.name)


@pytest.mark.parametrize(("ranks", "text"), [((0, 7), "no rank 7 runs now; there are 2 ranks"), ((), "no ranks")])
async def test_profiles_that_cannot_be(ranks: tuple[int, ...], text: str) -> None:
    bench = Bench(running)
    bench.answers.asked(1, Ask(7, Question.PROFILE, ranks=ranks, steps=5))
    assert text in bench.lines[1].answer["refused"]


async def test_a_node_that_is_lost_gives_no_profile() -> None:
    bench = Bench(running)
    bench.answers.asked(1, Ask(7, Question.PROFILE, ranks=(1,), steps=5))
    bench.answers.link_closed(2)
    assert (bench.lines[1].answer["ranks"], bench.lines[1].answer["silent"]) == ([], [])


async def test_a_save_is_answered_once_by_the_machine() -> None:
    bench = Bench(running)
    for link in (1, 2):
        bench.answers.asked(link, Ask(7, Question.SAVE, "somebody"))
    await asyncio.sleep(0)
    assert bench.fed == [SaveAsked("somebody")], "both wait for the same"
    bench.answers.save_agreed(SaveAgreed(4))
    bench.answers.save_agreed(SaveAgreed(0, "too late"))
    assert [bench.lines[link].answer for link in (1, 2)] == [{"nodes": 2, "refused": ""}] * 2
