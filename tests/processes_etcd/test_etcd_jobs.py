"""Jobs whose coordinator is elected by a real etcd: forming, taking over, stepping down, ending."""

from __future__ import annotations

import signal
import time

from tests.processes.conftest import is_alive
from tests.processes_etcd.conftest import LOOK_EVERY_S, Etcd
from tests.processes_etcd.jobs import BOTH, LEASE_S, LEASE_S_MAX, UNTIL_TOLD, by, finish, hosts, keys, started
from tests.support.limits import limit_s, until


@BOTH
def test_three_meet_and_leave_nothing_behind(job_folder, etcd, backend: str) -> None:
    script = job_folder.script("meet()")
    agents = [job_folder.start(*by(backend, etcd.endpoint, "3"), "--rdzv-id", "a/b c", script) for _ in range(3)]
    assert [agent.end() for agent in agents] == [0, 0, 0], agents[0].text
    assert sorted((each["rank"], each["world"]) for each in job_folder.trail("up")) == [(0, 3), (1, 3), (2, 3)]
    assert len(hosts(agents)) == 1
    assert keys(etcd) == ""
    assert "/holdfast/" not in etcd.ctl("ls", "--recursive", "/", api="2")


@BOTH
def test_another_takes_over_from_a_killed_leader(job_folder, etcd, backend: str) -> None:
    script = job_folder.script(UNTIL_TOLD)
    agents = [job_folder.start(*by(backend, etcd.endpoint, "1:2"), script) for _ in range(2)]
    job_folder.wait(2, "up", world=2)
    (leader,) = hosts(agents)
    leader.signal(signal.SIGKILL)
    job_folder.wait(1, "up", world=1)
    finish(job_folder)
    rest = [agent for agent in agents if agent is not leader]
    assert [agent.end() for agent in rest] == [0], rest[0].text
    generations = started(agents)
    assert len(generations) > 1
    assert generations == sorted(set(generations)), "a generation was started twice"
    assert keys(etcd) == ""
    job_folder.all_gone()


def test_a_leader_that_slept_is_fenced(job_folder, etcd) -> None:
    script = job_folder.script(UNTIL_TOLD)
    agents = [job_folder.start(*by("etcd", etcd.endpoint, "2:3"), script) for _ in range(3)]
    first = job_folder.wait(3, "up", world=3)
    (leader,) = hosts(agents)
    leader.signal(signal.SIGSTOP)
    job_folder.wait(2, "up", world=2)
    old = {each["pid"] for each in first if job_folder.agents[int(each["agent"])] is not leader}
    assert not any(map(is_alive, old)), "two generations beside each other"
    leader.signal(signal.SIGCONT)
    until(lambda: not any(is_alive(each["pid"]) for each in first), "the sleeper's workers are gone", 2)
    job_folder.wait(6, "up", world=3)
    finish(job_folder)
    assert [agent.end() for agent in agents] == [0, 0, 0], leader.text
    generations = started(agents)
    assert generations == sorted(set(generations)), "a generation was started twice"
    assert leader.events("steps_down")
    assert len(hosts(agents)) == 2
    assert hosts(agents)[1] is not leader


def test_etcd_changes_its_leader_and_no_worker_notices(job_folder, etcd_cluster) -> None:
    etcd = etcd_cluster
    script = job_folder.script(UNTIL_TOLD)
    args = by("etcd", etcd.endpoint, "2", f"endpoints={etcd.endpoints}", f"lease_ttl={LEASE_S}")
    agents = [job_folder.start(*args, script) for _ in range(2)]
    job_folder.wait(2, "up", world=2)
    etcd.kill(etcd.leader())
    time.sleep(LEASE_S + 2)  # longer than the lease: it has been renewed by the servers that are left
    finish(job_folder)
    assert [agent.end() for agent in agents] == [0, 0], agents[0].text
    assert len(job_folder.trail("up")) == 2
    assert not any(agent.events("steps_down") for agent in agents)


def test_two_jobs_on_one_etcd(job_folder, etcd) -> None:
    script = job_folder.script("meet()")
    pairs = [
        [job_folder.start(*by("etcd", etcd.endpoint, "2"), "--rdzv-id", job, script) for _ in range(2)] for job in "ab"
    ]
    assert [agent.end() for pair in pairs for agent in pair] == [0] * 4
    assert [len(hosts(pair)) for pair in pairs] == [1, 1]
    assert {each["world"] for each in job_folder.trail("up")} == {2}


def test_a_leader_that_is_asked_to_leave_hands_over(job_folder, etcd) -> None:
    script = job_folder.script(UNTIL_TOLD)
    agents = [job_folder.start(*by("etcd", etcd.endpoint, "1:2"), script) for _ in range(2)]
    job_folder.wait(2, "up", world=2)
    (leader,) = hosts(agents)
    leader.signal(signal.SIGTERM)
    assert leader.end() == 143
    job_folder.wait(1, "up", world=1)
    finish(job_folder)
    assert next(agent for agent in agents if agent is not leader).end() == 0
    assert keys(etcd) == ""


# --- what cannot be -------------------------------------------------------------------------------------------------


@BOTH
def test_no_etcd(job_folder, free_port, backend: str) -> None:
    patience = "timeout=1" if backend == "etcd" else "join_timeout=1"
    args = ("--rdzv-backend", backend, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-conf", patience)
    code, agent = job_folder.run(*args, job_folder.script("meet()"))
    assert code == 2, agent.text
    assert "HF121" in agent.text
    assert "no etcd answers" in agent.text
    assert "Traceback" not in agent.text


@BOTH
def test_garbage_under_the_key(job_folder, etcd, backend: str) -> None:
    put = ("put",) if backend == "etcd" else ("set",)
    etcd.ctl(*put, "/holdfast/none/coordinator", "not ours", api="3" if backend == "etcd" else "2")
    code, agent = job_folder.run(*by(backend, etcd.endpoint, "1:2"), "--rdzv-id", "none", job_folder.script("meet()"))
    assert code == 2, agent.text
    assert "HF120" in agent.text
    assert "'not ours'" in agent.text


def test_v2_disabled(job_folder, etcd_without_v2) -> None:
    code, agent = job_folder.run(*by("etcd-v2", etcd_without_v2.endpoint, "1:2"), job_folder.script("meet()"))
    assert code == 2, agent.text
    assert "--enable-v2" in agent.text


def test_passwords(job_folder, etcd_without_v2) -> None:
    etcd = etcd_without_v2
    etcd.ctl("user", "add", "root:secret")
    etcd.ctl("user", "grant-role", "root", "root")
    etcd.ctl("auth", "enable")
    (job_folder.folder / "good").write_text("secret\n")
    (job_folder.folder / "bad").write_text("wrong\n")
    script = job_folder.script("meet()")
    for given in ((), ("user=root", "password_file=bad")):
        code, agent = job_folder.run(*by("etcd", etcd.endpoint, "1", *given), script)
        assert code == 2, agent.text
        assert "refuses user and password" in agent.text
    code, agent = job_folder.run(*by("etcd", etcd.endpoint, "1", "user=root", "password_file=good"), script)
    assert code == 0, agent.text


# --- all of etcd is away for longer than the lease, in the middle of a job, and comes back ----------------------------


OUTAGE_LEASE_S = min(LEASE_S_MAX, round(limit_s(4)))


def living(job_folder) -> dict[str, set[int]]:
    """The workers that are alive, by their generation's store. Who is in the trail and alive after it was read was
    alive when it was read."""
    found: dict[str, set[int]] = {}
    for each in job_folder.trail("up"):
        if is_alive(each["pid"]):
            found.setdefault(each["port"], set()).add(each["pid"])
    return found


@BOTH
def test_the_job_goes_on_and_never_beside_itself(job_folder, etcd: Etcd, backend: str) -> None:
    script = job_folder.script(UNTIL_TOLD)
    args = by(backend, etcd.endpoint, "2", f"lease_ttl={OUTAGE_LEASE_S}", f"lease={1.5 * OUTAGE_LEASE_S:g}")
    agents = [job_folder.start(*args, script) for _ in range(2)]
    first = job_folder.wait(2, "up", world=2)
    most = 1

    def formed_anew() -> bool:
        nonlocal most
        alive = living(job_folder)
        most = max(most, len(alive))
        fresh = set().union(*alive.values()) - {each["pid"] for each in first}
        return len(fresh) == 2

    def all_stopped() -> bool:
        assert not formed_anew(), "nobody can be elected without etcd"
        time.sleep(LOOK_EVERY_S)
        return not living(job_folder)

    etcd.servers[0].send_signal(signal.SIGSTOP)
    until(all_stopped, "nobody is in charge, and no worker is left")
    until(lambda: hosts(agents)[0].events("steps_down"), "the leader to step down")
    assert not living(job_folder)
    etcd.servers[0].send_signal(signal.SIGCONT)
    until(formed_anew, lambda: "\n".join(agent.text for agent in agents))
    assert most == 1, "two generations beside each other"
    finish(job_folder)
    assert [agent.end() for agent in agents] == [0, 0], agents[0].text
    generations = started(agents)
    assert generations == sorted(set(generations)), "a generation was started twice"
    assert keys(etcd) == ""
    job_folder.all_gone()
