"""Services outside the job, ports, and what has words of a network without being one."""

from __future__ import annotations

import http.server
import socket
import ssl
import threading
import time
import urllib.request
from pathlib import Path

from .parts import every, one, rank


def port() -> int:
    """A port that nothing listens at."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@one(1, "HF238")
def server_is_busy() -> None:
    class Busy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(503)

    server = http.server.HTTPServer(("127.0.0.1", 0), Busy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/resolve/main/config.json")


@one(1, "HF238")
def server_refuses() -> None:
    import requests

    requests.get(f"http://127.0.0.1:{port()}/api/models", timeout=5)


@one(1, "HF238")
def name_does_not_resolve() -> None:
    urllib.request.urlopen("https://hub.company.invalid/weights.bin", timeout=5)


@one(0, "HF238")
def token_is_missing() -> None:
    import requests

    answer = requests.Response()
    answer.status_code, answer.reason, answer.url = 401, "Unauthorized", "https://hub.company.org/llama/config.json"
    answer.raise_for_status()


@one(1, "HF238")
def certificate_is_unknown() -> None:
    raise ssl.SSLCertVerificationError(
        1, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to get local issuer certificate"
    )


class OperationalError(Exception):
    pass


@one(1, "HF238")
def database_goes_away() -> None:
    raise OperationalError(2013, "Lost connection to MySQL server during query")


@one(1, "HF238 HF201", says="Redis")
def cache_times_out() -> None:
    class TimeoutError(Exception):  # noqa: A001
        pass

    raise TimeoutError("Timeout reading from socket: Redis at features-cache:6379")


@every("1", "HF213")
def port_of_a_dashboard_is_taken() -> None:
    number = 20000 + int(Path("/proc/self/stat").read_text().split()[3]) % 9000
    if rank() == 1:
        time.sleep(0.7)
    listener = socket.create_server(("127.0.0.1", number))
    time.sleep(20)
    listener.close()


@every("1", "HF201", says="feature 12")
def peer_hears_of_it_first() -> None:
    """Rank 0 talks to rank 1 by a connection of its own, and fails before rank 1 has."""
    path = f"\0holdfast-bench-{Path('/proc/self/stat').read_text().split()[3]}"
    with socket.socket(socket.AF_UNIX) as ours:
        if rank() == 1:
            ours.bind(path)
            ours.listen()
            peer, _ = ours.accept()
            try:
                raise ValueError("feature 12 has the wrong length")
            finally:
                peer.close()
                time.sleep(0.3)
        for _ in range(100):
            try:
                ours.connect(path)
                break
            except OSError:
                time.sleep(0.05)
        if not ours.recv(1):
            raise ConnectionResetError("rank 1 closed the connection")
