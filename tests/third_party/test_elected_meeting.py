"""A third party's call that never comes back costs an attempt, not the agent."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from holdfast.core.errors import EtcdError, EtcdUnreachableError
from holdfast.core.options import CommandKind, Endpoint, LogOptions, RunOptions, ThirdPartyOptions, WorkerCommand
from holdfast.core.policy import JobSpec, Limits, NodeSpec
from holdfast.rendezvous.elections import ValueElection, address_of_default_route
from holdfast.rendezvous.third_party import Backend, Place, SharedValue
from holdfast.runtime import etcd_meeting
from holdfast.runtime.journal import Journal
from tests.support.limits import limit_s
from tests.support.simulator.cluster import simple_judge


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
    monkeypatch.setattr(etcd_meeting, "SEEK_S_MAX", 0.1)
    backend = HangingBackend()
    place = ThirdPartyOptions(endpoint="somewhere", conf={})
    options = RunOptions(
        job=JobSpec(run_id="job", min_nodes=1, max_nodes=1, backend="hanging"),
        limits=Limits(),
        nproc=1,
        command=WorkerCommand(kind=CommandKind.PROGRAM, target="true"),
        logs=LogOptions(log_dir=None),
        endpoint=Endpoint(host="", port=0),
        third_party=place,
    )

    async def attempt() -> None:
        election = ValueElection("hanging", backend, place, "job")
        meeting = etcd_meeting.ElectedMeeting(options, election, simple_judge, Journal(None), print)
        try:
            await meeting.reach(NodeSpec(member="a#1", host="a", nproc=1))
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
    place = ThirdPartyOptions(endpoint="somewhere", conf={})
    options = RunOptions(
        job=JobSpec(run_id="job", min_nodes=1, max_nodes=1, backend="refusing"),
        limits=Limits(),
        nproc=1,
        command=WorkerCommand(kind=CommandKind.PROGRAM, target="true"),
        logs=LogOptions(log_dir=None),
        endpoint=Endpoint(host="", port=0),
        local_addr="127.0.0.1",
        third_party=place,
    )

    async def attempt() -> EtcdError:
        election = ValueElection("refusing", backend, place, "job")
        meeting = etcd_meeting.ElectedMeeting(options, election, simple_judge, Journal(None), print)
        node = NodeSpec(member="a#1", host="a", nproc=1)
        try:
            if met:
                (await meeting.reach(node)).close()
                meeting._step_down("the test takes it")
            backend.value.refuses = True
            with pytest.raises(EtcdError) as caught:
                await meeting.reach(node)
            return caught.value
        finally:
            await meeting.close()

    assert isinstance(asyncio.run(attempt()), EtcdUnreachableError) is met


def test_this_machines_address_is_a_number() -> None:
    import ipaddress

    assert ipaddress.ip_address(address_of_default_route())
