"""Backend `etcd` where the servers have no API v3: a real etcd behind a proxy that answers as one of before v3 would."""

from __future__ import annotations

import base64
import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.processes_etcd.conftest import LOOK_EVERY_S, READY_S, Etcd
from tests.processes_etcd.jobs import UNTIL_TOLD, by, finish
from tests.support.limits import limit_s, until

NOTICE = "does not serve API v3 (/v3/); API v2 is used instead"


class OldServer(ThreadingHTTPServer):
    """Passes /v2 on to `behind` and knows nothing else."""

    daemon_threads = False  # closing waits for them

    def __init__(self, behind: int) -> None:
        super().__init__(("127.0.0.1", 0), _OldHandler)
        self.behind = behind

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class _OldHandler(BaseHTTPRequestHandler):
    server: OldServer

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self.path.startswith("/v2/"):
            self._reply(404, "text/plain; charset=utf-8", b"404 page not found\n")
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=limit_s(5))
        try:
            kept = {name: self.headers[name] for name in ("Content-Type", "Authorization") if name in self.headers}
            connection.request(self.command, self.path, body, kept)
            answer = connection.getresponse()
            self._reply(answer.status, answer.getheader("Content-Type", ""), answer.read())
        finally:
            connection.close()

    do_GET = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815 - http.server's names

    def _reply(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        """Not on the screen of the tests."""


@contextmanager
def old_server(etcd: Etcd) -> Iterator[OldServer]:
    with OldServer(etcd.ports[0]) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_a_job_goes_by_v2_and_says_so_once(job_folder, etcd: Etcd) -> None:
    with old_server(etcd) as old:
        script = job_folder.script(UNTIL_TOLD)
        agents = [job_folder.start(*by("etcd", old.endpoint, "2"), "--rdzv-id", "old", script) for _ in range(2)]
        job_folder.wait(2, "up", world=2)
        assert "/holdfast/old/coordinator" in etcd.ctl("ls", "--recursive", "/", api="2")
        assert etcd.ctl("get", "--prefix", "/", "--keys-only").strip() == ""
        finish(job_folder)
        assert [agent.end() for agent in agents] == [0, 0], agents[0].text
        for agent in agents:
            assert agent.text.count(NOTICE) == 1, agent.text
            assert old.endpoint in next(line for line in agent.text.splitlines() if NOTICE in line)


def test_neither_api(job_folder, etcd_without_v2: Etcd) -> None:
    with old_server(etcd_without_v2) as old:
        code, agent = job_folder.run(*by("etcd", old.endpoint, "1"), job_folder.script("meet()"), limit_s=10)
        assert code == 2, agent.text
        assert "HF120" in agent.text
        assert "serves neither API v3 (its JSON gateway) nor v2" in agent.text
        assert "Traceback" not in agent.text
        assert job_folder.trail("up") == []


# --- API v2 with users: its own, kept apart from those of v3 ----------------------------------------------------------


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


def test_right_wrong_and_no_password(job_folder, etcd: Etcd) -> None:
    admin(etcd, "users/root", {"user": "root", "password": "secret"})
    admin(etcd, "enable", {})
    everything = {"kv": {"read": ["/*"], "write": ["/*"]}}
    admin(etcd, "roles/guest", {"role": "guest", "revoke": everything})
    (job_folder.folder / "good").write_text("secret\n")
    (job_folder.folder / "bad").write_text("wrong\n")
    script = job_folder.script("meet()")
    for given in ((), ("user=root", "password_file=bad"), ("user=nobody", "password_file=good")):
        code, agent = job_folder.run(*by("etcd-v2", etcd.endpoint, "1", *given), script, limit_s=10)
        assert code == 2, agent.text
        assert "HF120" in agent.text
        assert "refuses user and password" in agent.text
        assert "Traceback" not in agent.text
    assert job_folder.trail("up") == []
    args = by("etcd-v2", etcd.endpoint, "2", "user=root", "password_file=good")
    agents = [job_folder.start(*args, script) for _ in range(2)]
    assert [agent.end() for agent in agents] == [0, 0], agents[0].text
    assert len(job_folder.trail("up", world=2)) == 2
