"""A third party's call that never comes back costs an attempt, not the agent."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from holdfast.core.errors import EtcdUnreachableError
from holdfast.core.options import CommandKind, Endpoint, LogOptions, RunOptions, ThirdPartyOptions, WorkerCommand
from holdfast.core.policy import JobSpec, Limits, NodeSpec
from holdfast.rendezvous.elections import ValueElection, address_of_default_route
from holdfast.rendezvous.third_party import Backend, Place, SharedValue
from holdfast.runtime import etcd_meeting
from holdfast.runtime.journal import Journal
from holdfast.testing.cluster import simple_judge
from tests.support.limits import limit_s


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


def test_this_machines_address_is_a_number() -> None:
    import ipaddress

    assert ipaddress.ip_address(address_of_default_route())
