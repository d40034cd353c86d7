"""A lease made of a value that can only be compared and swapped: two nodes, one clock that the test moves."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from holdfast.journal import Journal
from holdfast.protocol.errors import (
    BackendError,
    BackendUnreachableError,
    EtcdError,
    EtcdUnreachableError,
    HoldfastError,
)
from holdfast.protocol.options import CommandKind, Endpoint, LogOptions, RunOptions, SharedValueOptions, WorkerCommand
from holdfast.protocol.policy import JobSpec, Limits, NodeSpec
from holdfast.rendezvous.elections import Leader, Memory, address_of_default_route
from holdfast.rendezvous.third_party import (
    Backend,
    Place,
    SharedValue,
    ValueApi,
    ValueElection,
    ValueLeaderLease,
    ValueWatch,
)
from holdfast.runtime import leadership
from tests.support.limits import limit_s
from tests.support.simulator.nodes import simple_judge

LEASE_S = 5.0


class Storage(SharedValue):
    """In memory. `lose_answers`: so many swaps are made and their answers lost."""

    def __init__(self) -> None:
        self.value: bytes | None = None
        self.lose_answers = 0
        self.history: list[bytes] = []

    def read(self) -> bytes | None:
        return self.value

    def swap(self, old: bytes | None, new: bytes) -> bool:
        if (self.value or None) != (old or None):
            return False
        self.value = new
        self.history.append(new)
        if self.lose_answers:
            self.lose_answers -= 1
            raise TimeoutError("timed out")
        return True


class Node:
    def __init__(self, storage: SharedValue, name: str, run_id: str = "job") -> None:
        self.now_s = 100.0
        self.me = Leader(run_id=run_id, address="127.0.0.1", port=1, identity=name)
        self.api = ValueApi("mine", storage, run_id, ValueWatch(LEASE_S, lambda: self.now_s))

    def take(self) -> ValueLeaderLease | None:
        return self.api.take(self.me)


@pytest.fixture
def storage() -> Storage:
    return Storage()


def test_the_first_is_in_charge_and_the_second_sees_it(storage: Storage) -> None:
    a, b = Node(storage, "a"), Node(storage, "b")
    leader_lease = a.take()
    assert leader_lease is not None
    assert leader_lease.previous_leader is None
    assert b.take() is None
    assert b.api.leader() == a.me


def test_a_value_that_changes_is_never_taken(storage: Storage) -> None:
    a, b = Node(storage, "a"), Node(storage, "b")
    leader_lease = a.take()
    assert leader_lease is not None
    for _ in range(5):
        b.now_s += LEASE_S - 0.1
        assert b.api.leader() == a.me
        assert b.take() is None
        assert leader_lease.renew()
    assert len(set(storage.history)) == len(storage.history), "no two values are alike"


def test_a_lease_after_it_was_first_seen_unchanged_another_takes_over(storage: Storage) -> None:
    a, b = Node(storage, "a"), Node(storage, "b")
    leader_lease = a.take()
    assert leader_lease is not None
    assert leader_lease.remember(Memory(run_id="job", generation=7, workers_may_live_s=1.5))
    b.now_s += 1000.0  # it has not looked: how old the value is it cannot know
    assert b.api.leader() == a.me
    b.now_s += LEASE_S
    assert b.api.leader() is None
    after = b.take()
    assert after is not None
    assert after.previous_leader == Memory(run_id="job", generation=7, workers_may_live_s=1.5)
    assert not leader_lease.renew()
    assert not leader_lease.remember(Memory(run_id="job", generation=9, workers_may_live_s=0.0))
    leader_lease.resign(None)
    assert a.api.leader() == b.me, "whoever has lost it changes nothing any more"


def test_of_two_that_see_it_expire_one_takes_it(storage: Storage) -> None:
    a, b, c = Node(storage, "a"), Node(storage, "b"), Node(storage, "c")
    assert a.take() is not None
    for node in (b, c):
        node.api.leader()
        node.now_s += LEASE_S
    assert [b.take() is not None, c.take() is not None] == [True, False]


def test_given_back_it_is_free_at_once_and_remembered(storage: Storage) -> None:
    a, b = Node(storage, "a"), Node(storage, "b")
    leader_lease = a.take()
    assert leader_lease is not None
    leader_lease.resign(Memory(run_id="job", generation=3, workers_may_live_s=4.5))
    assert b.api.leader() is None
    after = b.take()
    assert after is not None
    assert after.previous_leader == Memory(run_id="job", generation=3, workers_may_live_s=4.5)
    after.resign(None)
    assert not storage.value
    assert b.api.leader() is None


@pytest.mark.parametrize("again", ["renew", "remember", "resign"])
def test_a_lost_answer_does_not_cost_the_lease_holder(storage: Storage, again: str) -> None:
    leader_lease = Node(storage, "a").take()
    assert leader_lease is not None
    storage.lose_answers = 1
    with pytest.raises(BackendUnreachableError):
        leader_lease.renew()
    if again == "renew":
        assert leader_lease.renew()
    if again == "remember":
        assert leader_lease.remember(Memory(run_id="job", generation=2, workers_may_live_s=0.0))
    assert again == "resign" or leader_lease.renew()
    leader_lease.resign(None)
    assert not storage.value


def test_giving_back_with_a_lost_answer(storage: Storage) -> None:
    leader_lease = Node(storage, "a").take()
    assert leader_lease is not None
    storage.lose_answers = 1
    with pytest.raises(BackendUnreachableError):
        leader_lease.resign(None)
    leader_lease.resign(None)
    assert not storage.value


@pytest.mark.parametrize("value", [b"hello", b"{}", b"x" * 5000, b"\xff\xfe"])
def test_garbage_is_named_and_left_alone(storage: Storage, value: bytes) -> None:
    storage.value = value
    for question in (Node(storage, "a").api.leader, Node(storage, "a").take):
        with pytest.raises(BackendError, match=r"mine has .*that holdfast did not write"):
            question()
    assert storage.value == value


def test_another_jobs_value(storage: Storage) -> None:
    assert Node(storage, "a", "other").take() is not None
    with pytest.raises(BackendError, match="of the job 'other', not of 'job'"):
        Node(storage, "b").api.leader()


class Broken(Storage):
    def __init__(self, answer: object) -> None:
        super().__init__()
        self.answer = answer

    def read(self) -> bytes | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer if not isinstance(self.answer, bool) else None  # type: ignore[return-value]

    def swap(self, old: bytes | None, new: bytes) -> bool:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ("text", BackendError, r"read\(\) must return bytes or None, not 'text'"),
        (True, BackendError, r"swap\(\) must return True or False, not None"),
        (ZeroDivisionError("oh"), BackendError, "mine failed: ZeroDivisionError: oh"),
        (ConnectionRefusedError(111, "Connection refused"), BackendUnreachableError, "mine: Connection refused"),
        (TimeoutError(), BackendUnreachableError, "mine: TimeoutError"),
    ],
)
def test_whose_fault_it_is(answer: object, kind: type[HoldfastError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        Node(Broken(answer), "a").take()
    assert type(caught.value) is kind


# --- a third party's call that never comes back costs an attempt, not the agent ---------------------------------------


PLACE = SharedValueOptions(endpoint="somewhere", conf={})
OPTIONS = RunOptions(
    job=JobSpec(run_id="job", min_nodes=1, max_nodes=1, backend="mine"),
    limits=Limits(),
    nproc=1,
    command=WorkerCommand(kind=CommandKind.PROGRAM, target="true"),
    logs=LogOptions(log_dir=None),
    endpoint=Endpoint(host="", port=0),
    local_addr="127.0.0.1",
    shared_value=PLACE,
)


def client(backend: Backend) -> leadership.ElectedClient:
    election = ValueElection("mine", backend, PLACE, "job")
    return leadership.ElectedClient(OPTIONS, election, simple_judge, Journal(None), print)


class Hanging(SharedValue):
    def __init__(self, until: threading.Event) -> None:
        self.until = until

    def read(self) -> bytes | None:
        self.until.wait(limit_s(60))
        return None

    def swap(self, old: bytes | None, new: bytes) -> bool:
        return False


class HangingBackend(Backend):
    def __init__(self) -> None:
        self.until = threading.Event()

    def open(self, place: Place) -> SharedValue:
        return Hanging(self.until)


def test_a_call_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(leadership, "SEEK_S_MAX", 0.1)
    backend = HangingBackend()

    async def attempt() -> None:
        meeting = client(backend)
        try:
            await meeting.connect(NodeSpec(member="a#1", host="a", nproc=1))
        finally:
            await meeting.close()

    try:
        with pytest.raises(EtcdUnreachableError, match=r"within 0\.1 s"):
            asyncio.run(attempt())
    finally:
        backend.until.set()


class Refusing(SharedValue):
    """Works until it is told to refuse."""

    def __init__(self) -> None:
        self.value: bytes | None = None
        self.refuses = False

    def read(self) -> bytes | None:
        if self.refuses:
            raise RuntimeError("no space left")
        return self.value

    def swap(self, old: bytes | None, new: bytes) -> bool:
        if self.refuses:
            raise RuntimeError("no space left")
        if self.value != old:
            return False
        self.value = new
        return True


class RefusingBackend(Backend):
    def __init__(self) -> None:
        self.value = Refusing()

    def open(self, place: Place) -> SharedValue:
        return self.value


@pytest.mark.parametrize("met", [False, True])
def test_what_the_storage_refuses_is_final_before_the_job_was_reached_only(met: bool) -> None:
    backend = RefusingBackend()

    async def attempt() -> EtcdError:
        meeting = client(backend)
        node = NodeSpec(member="a#1", host="a", nproc=1)
        try:
            if met:
                (await meeting.connect(node)).close()
                meeting._step_down("the test takes it")
            backend.value.refuses = True
            with pytest.raises(EtcdError) as caught:
                await meeting.connect(node)
            return caught.value
        finally:
            await meeting.close()

    assert isinstance(asyncio.run(attempt()), EtcdUnreachableError) is met


def test_this_machines_address_is_a_number() -> None:
    import ipaddress

    assert ipaddress.ip_address(address_of_default_route())
