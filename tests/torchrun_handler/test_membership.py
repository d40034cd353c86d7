"""What torchrun's thread and ours say to each other: real memberships on loopback, without torchrun, torch or workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from holdfast.protocol.errors import RendezvousConfigError
from holdfast.protocol.outcome import OutcomeKind
from holdfast.torchrun_handler.member import FormedGeneration, HandlerMembership, OverError, options_from
from tests.support.limits import limit_s, until

WAIT_S = 20.0
SETTLE_S = limit_s(0.5)
"""Two threads of one process ask to join well within it; what is formed below the maximum waits for it to pass."""


class Parameters:
    """As torch hands them over."""

    local_addr = None
    run_id = "job"

    def __init__(self, endpoint: str, nodes: str, conf: dict[str, Any]) -> None:
        least, _, most = nodes.partition(":")
        self.endpoint, self.min_nodes, self.max_nodes = endpoint, int(least), int(most or least)
        self.config = {"timeout": 900, **conf}


class Torchrun:
    """A torchrun agent with nothing but its rendezvous."""

    def __init__(self, endpoint: str, nodes: str, conf: dict[str, Any]) -> None:
        self.said: list[str] = []
        self.membership = HandlerMembership(options_from(Parameters(endpoint, nodes, conf)), self.said.append)
        self.generations: list[FormedGeneration] = []

    def next(self) -> Future[FormedGeneration]:
        """As next_rendezvous, in a thread of its own."""
        answer: Future[FormedGeneration] = Future()

        def ask() -> None:
            try:
                formed = self.membership.next()
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                answer.set_exception(error)
                return
            self.generations.append(formed)
            answer.set_result(formed)

        threading.Thread(target=ask, name="torchrun").start()
        return answer

    def regroups(self) -> None:
        until(lambda: self.membership.regroup, lambda: f"no word; said {self.said}", WAIT_S)


Start = Callable[..., Torchrun]


@pytest.fixture
def start(free_port: Callable[[], int]) -> Iterator[Start]:
    endpoint = f"127.0.0.1:{free_port()}"
    made: list[Torchrun] = []

    def one(nodes: str, **conf: Any) -> Torchrun:
        agent = Torchrun(endpoint, nodes, {"settle": limit_s(5), **conf})
        made.append(agent)
        return agent

    yield one
    for agent in reversed(made):
        agent.membership._leave()
        for formed in agent.generations:
            if formed.listening is not None:
                formed.listening.close()


def places(*answers: Future[FormedGeneration]) -> list[FormedGeneration]:
    return [answer.result(limit_s(WAIT_S)) for answer in answers]


def refused(answer: Future[FormedGeneration]) -> OverError:
    """Why there is no further generation."""
    error = answer.exception(limit_s(WAIT_S))
    assert isinstance(error, OverError)
    return error


def test_two_nodes_and_a_failure_in_one(start: Start) -> None:
    a, b = start("2"), start("2")
    first = places(a.next(), b.next())
    assert sorted(each.group_rank for each in first) == [0, 1]
    assert {each.group_world_size for each in first} == {2}
    assert len({(each.generation, each.master_addr, each.master_port) for each in first}) == 1
    assert [each.listening is not None for each in sorted(first, key=lambda each: each.group_rank)] == [True, False]
    assert not a.membership.regroup
    again = a.next()  # its torchrun has stopped its workers and starts them anew
    b.regroups()
    assert not again.done(), "while the other's workers are alive nothing is formed"
    second = places(again, b.next())
    assert {each.generation for each in second} == {2}
    assert second[0].group_rank == first[0].group_rank
    assert second[0].master_port != first[0].master_port
    assert not a.membership.regroup
    assert not b.membership.regroup


def test_a_third_node_is_taken_in(start: Start) -> None:
    a, b, c = (start("1:3", settle=SETTLE_S) for _ in range(3))
    places(a.next(), b.next())
    third = c.next()
    a.regroups()
    b.regroups()
    formed = places(a.next(), b.next(), third)
    assert sorted(each.group_rank for each in formed) == [0, 1, 2]
    assert any("joins the next generation" in text for text in c.said)


def test_a_node_that_goes_is_formed_without(start: Start) -> None:
    a, b = (start("1:2", settle=SETTLE_S) for _ in range(2))
    places(a.next(), b.next())
    b.membership._leave()
    a.regroups()
    (alone,) = places(a.next())
    assert (alone.group_rank, alone.group_world_size) == (0, 1)


def test_the_end_of_all(start: Start) -> None:
    a, b = start("2"), start("2")
    places(a.next(), b.next())
    ends = [threading.Thread(target=each.membership.end, name="torchrun") for each in (a, b)]
    for end in ends:
        end.start()
    for end in ends:
        end.join(limit_s(WAIT_S))
        assert not end.is_alive()
    assert a.membership.over
    assert not [thread.name for thread in threading.enumerate() if thread.name == "holdfast-member"]
    with pytest.raises(OverError) as caught:
        a.membership.next()
    assert caught.value.outcome.kind is OutcomeKind.SUCCEEDED


@pytest.mark.parametrize("first", ["close", "restart"])
def test_the_end_of_one_by_failure_ends_all(start: Start, first: str) -> None:
    """Also where the other had begun to start anew at the same moment."""
    a, b = start("1:2"), start("1:2")
    places(a.next(), b.next())
    close = threading.Thread(target=a.membership.end, args=("ChildFailedError",), name="torchrun")
    answer = b.next() if first == "restart" else None
    if answer is not None:
        a.regroups()
    close.start()
    b.regroups()
    answer = answer or b.next()
    error = refused(answer)
    assert error.outcome.kind is OutcomeKind.PREEMPTED
    assert "failed on" in error.last_stop
    close.join(limit_s(WAIT_S))
    assert not close.is_alive()


def test_too_few(start: Start) -> None:
    error = refused(start("2", join_timeout=1).next())
    assert (error.outcome.kind, error.outcome.code) == (OutcomeKind.NO_QUORUM, "HF301")
    assert "1 of at least 2 nodes came within 1 s" in error.outcome.message


def test_nobody_at_the_endpoint(start: Start) -> None:
    error = refused(start("2", join_timeout=1, is_host=0).next())
    assert (error.outcome.kind, error.outcome.code) == (OutcomeKind.NO_QUORUM, "HF302")
    assert "connection refused (tried for 1 s)" in error.outcome.message


def test_another_job_at_the_endpoint(start: Start) -> None:
    a, b = start("1"), start("2")
    places(a.next())
    error = refused(b.next())
    assert error.outcome.kind is OutcomeKind.REFUSED
    assert "--nnodes 1" in error.outcome.message
    assert "--nnodes 2" in error.outcome.message
    assert "holdfast" in error.outcome.message, "an agent of `holdfast run` names another backend, so it is refused too"


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", "secret")
    options = options_from(Parameters("", "1:4", {"join_timeout": 30, "is_host": "true", "bogus": 1}))
    assert str(options.endpoint) == "localhost:29400"
    assert (options.limits.join_s, options.is_host, options.token) == (30.0, True, b"secret")
    (notice,) = options.notices
    assert "bogus has no effect with backend holdfast" in notice
    with pytest.raises(RendezvousConfigError, match="join_timeout=soon"):
        options_from(Parameters("", "1", {"join_timeout": "soon"}))
