"""Nobody comes: how long is waited, and what is said then."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.limits import until


def test_a_missing_peer(site, endpoint: str) -> None:
    args = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-conf", "join_timeout=1")
    code, agent = site.run(*args, site.script("note('up')"))
    assert code == 1, agent.text
    assert "HF301" in agent.text
    assert "1 of at least 2 nodes" in agent.text
    assert "here: " in agent.text
    assert len(agent.text.splitlines()) <= 3
    assert site.trail() == []


def test_a_missing_host(site, endpoint: str) -> None:
    conf = ("--rdzv-conf", "join_timeout=1,is_host=0")
    args = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, *conf)
    code, agent = site.run(*args, site.script("note('up')"))
    assert code == 1, agent.text
    assert "HF302" in agent.text
    assert endpoint in agent.text
    assert "refused" in agent.text


def test_a_host_that_does_not_resolve(site) -> None:
    args = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "no-such-host.invalid:29400")
    code, agent = site.run(*args, "--rdzv-conf", "join_timeout=1", site.script("note('up')"))
    assert code == 2, agent.text
    assert "HF110" in agent.text
    assert "no-such-host.invalid" in agent.text
    assert "does not resolve" in agent.text


def test_two_agents_with_one_node_rank(site, free_port: Callable[[], int]) -> None:
    args = ("--nnodes", "3", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    script = site.script("meet()")
    host = site.start(*args, "--node-rank", "0", script)
    first = site.start(*args, "--node-rank", "1", script)
    site.joined(2)
    second = site.start(*args, "--node-rank", "1", script)
    assert second.end() == 2, second.text
    assert "--node-rank 1 is taken" in second.text
    third = site.start(*args, "--node-rank", "2", script)
    assert [agent.end() for agent in (host, first, third)] == [0, 0, 0], host.text


def test_two_agents_that_both_are_node_0(site, free_port: Callable[[], int]) -> None:
    args = ("--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    script = site.script("meet()")
    site.start(*args, script)
    site.joined(1)
    second = site.start(*args, script)
    assert second.end() == 2, second.text
    assert "Traceback" not in second.text


def test_the_endpoint_comes_up_later(site, endpoint: str) -> None:
    args = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
    script = site.script("meet()")
    guest = site.start(*args, "--rdzv-conf", "is_host=0", script)
    until(lambda: guest.begun and guest.events("claim"), lambda: guest.text)
    host = site.start(*args, script)
    assert (host.end(), guest.end()) == (0, 0), host.text + guest.text
