"""API v2 with users: its own, kept apart from those of v3."""

from __future__ import annotations

import base64
import http.client
import json
import time
from http import HTTPStatus
from typing import Any

from tests.processes_etcd.conftest import LOOK_EVERY_S, READY_S, Etcd
from tests.processes_etcd.jobs import by
from tests.support.limits import limit_s, until


def admin(etcd: Etcd, path: str, body: dict[str, Any]) -> None:
    """PUT to the v2 auth API; while there is no leader, or auth is just coming up, etcd says 500."""
    login = base64.b64encode(b"root:secret").decode()
    headers = {"Content-Type": "application/json", "Authorization": f"Basic {login}"}

    def done() -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", etcd.ports[0], timeout=limit_s(5))
        connection.request("PUT", f"/v2/auth/{path}", json.dumps(body).encode(), headers)
        answer = connection.getresponse()
        said = answer.read()
        connection.close()
        if answer.status in (HTTPStatus.OK, HTTPStatus.CREATED):
            return True
        assert answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR, said
        time.sleep(LOOK_EVERY_S)
        return False

    until(done, f"etcd to take {path}", READY_S)


def test_right_wrong_and_no_password(site, etcd: Etcd) -> None:
    admin(etcd, "users/root", {"user": "root", "password": "secret"})
    admin(etcd, "enable", {})
    everything = {"kv": {"read": ["/*"], "write": ["/*"]}}
    admin(etcd, "roles/guest", {"role": "guest", "revoke": everything})
    (site.folder / "good").write_text("secret\n")
    (site.folder / "bad").write_text("wrong\n")
    script = site.script("meet()")
    for given in ((), ("user=root", "password_file=bad"), ("user=nobody", "password_file=good")):
        code, agent = site.run(*by("etcd-v2", etcd.endpoint, "1", *given), script, limit_s=10)
        assert code == 2, agent.text
        assert "HF120" in agent.text
        assert "refuses user and password" in agent.text
        assert "Traceback" not in agent.text
    assert site.trail("up") == []
    args = by("etcd-v2", etcd.endpoint, "2", "user=root", "password_file=good")
    agents = [site.start(*args, script) for _ in range(2)]
    assert [agent.end() for agent in agents] == [0, 0], agents[0].text
    assert len(site.trail("up", world=2)) == 2
