"""Faults at random, one on top of the other, for a while: whatever happened, no two generations lived at once, and
when all is well again all nodes train."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.network.fleet import FENCE_S, LEASE_S, SHORT_LEASE, Fleet, until

SEED = int(os.environ.get("CHAOS_SEED", "7"))
CHAOS_S = float(os.environ.get("CHAOS_S", "12"))
NODES = (1, 2, 3, 4)


@pytest.mark.slow
@pytest.mark.timeout(CHAOS_S + 150)
def test_faults_at_random(fleet) -> None:
    job: Fleet = fleet(len(NODES))
    # A coordinator whose machine was lost knows of no predecessor, unless somebody tells it. One that is cut off tells
    # nobody, and has stopped after a fence.
    job.c10d("2:4", conf=f"{SHORT_LEASE},settle={FENCE_S:g},last_call_timeout={LEASE_S * 20:.0f}")
    job.start_all(NODES)
    job.trains(NODES)
    rng = random.Random(SEED)
    end = time.monotonic() + CHAOS_S
    unplugged: set[int] = set()
    log = []
    while time.monotonic() < end:
        number = rng.choice(NODES)
        what = rng.choice(("kill", "crash", "unplug", "plug", "plug", "agent"))
        log.append(f"{time.monotonic():.2f} {what} {number}")
        if what == "plug":
            job.hosts.plug(number)
            unplugged.discard(number)
        elif what == "unplug":
            job.hosts.unplug(number)
            unplugged.add(number)
        elif what == "agent":
            for agent in running(job, number):
                agent.signal(signal.SIGKILL)
                until(lambda agent=agent: not agent.program.running, job.story)
            job.start(number)
        else:
            if what == "crash":
                job.hosts.crash(number)
                unplugged.add(number)
            else:
                job.hosts[number].kill()
            time.sleep(rng.uniform(0.0, 1.0))
            job.hosts[number].boot()
            job.start(number)
        time.sleep(rng.uniform(0.0, 2.0))
    for number in unplugged:
        job.hosts.plug(number)
    since_s = time.monotonic()
    print("\n".join(log))
    try:
        all_train(job, since_s)
        job.check()
    finally:
        print(job.story())
    job.finish_all([agent for agent in job.agents if agent.program.running])


def running(job: Fleet, number: int) -> list:
    return [agent for agent in job.agents if agent.host.number == number and agent.program.running]


def all_train(job: Fleet, since_s: float) -> None:
    """The newest generation has all nodes and is still at work a second later; who gave up meanwhile is told."""
    names = {f"node{number}" for number in NODES}

    def good() -> bool:
        newest = job.generations[-1]
        return newest.hosts == names and newest.complete and newest.last_s() > since_s + 1.0

    until(good, lambda: f"all to train\n{job.story()}")
