"""All of etcd is away for longer than the lease, in the middle of a job, and comes back."""

from __future__ import annotations

import signal
import time

from tests.processes.conftest import is_alive, until
from tests.processes_etcd.conftest import LOOK_EVERY_S, Etcd
from tests.processes_etcd.jobs import BOTH, UNTIL_TOLD, by, finish, hosts, keys, started
from tests.support.limits import limit_s

LEASE_S = round(limit_s(1))


def living(site) -> dict[str, set[int]]:
    """The workers that are alive, by their generation's store. Who is in the trail and alive after it was read was
    alive when it was read."""
    found: dict[str, set[int]] = {}
    for each in site.trail("up"):
        if is_alive(each["pid"]):
            found.setdefault(each["port"], set()).add(each["pid"])
    return found


@BOTH
def test_the_job_goes_on_and_never_beside_itself(site, etcd: Etcd, backend: str) -> None:
    script = site.script(UNTIL_TOLD)
    args = by(backend, etcd.endpoint, "2", f"lease_ttl={LEASE_S}", f"lease={1.5 * LEASE_S:g}")
    agents = [site.start(*args, script) for _ in range(2)]
    first = site.wait(2, "up", world=2)
    most = 1

    def formed_anew() -> bool:
        nonlocal most
        alive = living(site)
        most = max(most, len(alive))
        fresh = set().union(*alive.values()) - {each["pid"] for each in first}
        return len(fresh) == 2

    def all_stopped() -> bool:
        assert not formed_anew(), "nobody can be elected without etcd"
        time.sleep(LOOK_EVERY_S)
        return not living(site)

    etcd.servers[0].send_signal(signal.SIGSTOP)
    until(all_stopped, "nobody is in charge, and no worker is left")
    until(lambda: hosts(agents)[0].events("steps_down"), "the leader to step down")
    assert not living(site)
    etcd.servers[0].send_signal(signal.SIGCONT)
    until(formed_anew, lambda: "\n".join(agent.text for agent in agents))
    assert most == 1, "two generations beside each other"
    finish(site)
    assert [agent.end() for agent in agents] == [0, 0], agents[0].text
    generations = started(agents)
    assert generations == sorted(set(generations)), "a generation was started twice"
    assert keys(etcd) == ""
    site.all_gone()
