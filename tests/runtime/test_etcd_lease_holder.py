"""The lease on our own clock: what may be done on it, and that it never comes back to life."""

from __future__ import annotations

import asyncio

from holdfast.protocol.errors import EtcdUnreachableError
from holdfast.rendezvous.elections import Memory
from holdfast.runtime.leadership import LeaseHolder
from tests.support.limits import limit_s


class FakeEtcd:
    """An Api and its Leader lease in one. `answers` are taken from the front; the last one stays."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.answers = list(answers)
        self.previous_leader: Memory | None = None
        self.said: list[object] = []
        self.closed = False

    def renew(self) -> bool:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.said.append("renew")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def remember(self, memory: Memory) -> bool:
        self.said.append(memory)
        return True

    def resign(self, memory: Memory | None) -> None:
        self.said.append(("resign", memory))

    def leader(self) -> None:
        return None

    def take(self, me: object) -> None:
        return None

    def close(self) -> None:
        self.closed = True


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


MEMORY = Memory(run_id="j", generation=1, workers_may_live_s=1.5)


def lease_holder(etcd: FakeEtcd, ttl_s: float = 5.0) -> tuple[LeaseHolder, Clock]:
    clock = Clock()
    return LeaseHolder(etcd, etcd, ttl_s, clock.now_s, clock), clock


def test_fresh_then_held_then_over_and_over_for_good() -> None:
    made, clock = lease_holder(FakeEtcd(True))
    assert made.fresh()
    clock.now_s += 2.0
    assert (made.fresh(), made.holds()) == (False, True)
    clock.now_s += 1.9
    assert made.holds()
    clock.now_s += 0.1
    assert not made.holds(), "a second before etcd can give it to anybody else"
    clock.now_s -= 3.0
    assert not made.holds()
    assert "4.0 s" in made.over


def test_the_tail_covers_the_fence_from_the_last_answer_on_a_fresh_lease() -> None:
    made, _ = lease_holder(FakeEtcd(True))
    assert made.workers_may_live_s(4.5) == 1.5  # answers until 2.0 into the lease, workers until 6.5, the key until 5.0
    assert lease_holder(FakeEtcd(True), 10.0)[0].workers_may_live_s(4.5) == 0.0


def run(etcd: FakeEtcd, ttl_s: float, until: str) -> LeaseHolder:
    async def live() -> LeaseHolder:
        made = LeaseHolder(etcd, etcd, ttl_s, _boot_s())
        news = asyncio.Event()
        made.start(news.set)
        async with asyncio.timeout(limit_s(20)):
            while not (made.over if until == "over" else etcd.said.count("renew") > 2):
                await news.wait()
                news.clear()
        await asyncio.to_thread(made.leave, MEMORY)
        return made

    return asyncio.run(live())


def _boot_s() -> float:
    from holdfast.runtime.leadership import clock_s

    return clock_s()


def test_renewed_until_it_resigns() -> None:
    etcd = FakeEtcd(True, EtcdUnreachableError("away"), True)
    made = run(etcd, limit_s(2), "renewed")
    assert etcd.said[-1] == ("resign", MEMORY)
    assert etcd.closed
    assert made.over == "resigned"


def test_a_key_that_is_gone_ends_it_at_once_and_nothing_more_is_written() -> None:
    etcd = FakeEtcd(True, False)
    made = run(etcd, limit_s(2), "over")
    assert "run out" in made.over
    assert etcd.said == ["renew", "renew"]
    assert etcd.closed


def test_a_key_is_given_back_by_a_holder_that_was_never_started() -> None:
    etcd = FakeEtcd(True)
    lease_holder(etcd)[0].leave(None, forget=True)
    assert etcd.said == [("resign", None)]
    assert etcd.closed
