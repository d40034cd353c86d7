"""Metrics and health checks of this agent: `--metrics`, `--health`. No decision depends on them.

Journal, workers ──► Vitals (vitals.py), once a second ──► pages ──► Server (server.py), in its thread
"""

from __future__ import annotations

import socket
import time

from holdfast.detached import run_detached
from holdfast.extensions.metrics.server import HttpResponse, Pages, Server
from holdfast.extensions.metrics.vitals import Vitals, health
from holdfast.listening import bind_named
from holdfast.protocol.errors import MissingPackageError, PortInUseError
from holdfast.protocol.options import Endpoint
from holdfast.runtime.node_extension import Node, NodeExtension, Send


class OnNode(NodeExtension):
    def __init__(self, node: Node, send: Send) -> None:
        """Raises PortInUseError and MissingPackageError."""
        super().__init__(node, send)
        self._vitals = Vitals(node.run_id, node.host, node.progress, node.job_view, node.fault)
        self._server = serve(node, self._vitals)
        node.listen(self._vitals.heard)
        self._vitals.start()

    async def reported(self) -> None:
        self._vitals.close()
        if self._server is not None:
            await run_detached(self._server.close)


def serve(node: Node, vitals: Vitals) -> Server | None:
    """Start the server. Returns None if only a variable of torchrun requested a port, and that port is in use."""
    options = node.options
    wanted: dict[Endpoint, Pages] = {}
    if options.metrics is not None:
        wanted[options.metrics] = metrics_pages(vitals)
    if options.health is not None:
        wanted[options.health] = {**wanted.get(options.health, {}), **health_pages(vitals)}
    doors: list[tuple[socket.socket, Pages]] = []
    try:
        for place, pages in wanted.items():
            what = [name for name, at in (("metrics", options.metrics), ("health", options.health)) if at == place]
            try:
                sock = bind_named(place, " and ".join(f"--{name}" for name in what))
            except PortInUseError as error:
                if not options.health_if_free or what != ["health"]:
                    raise
                node.say(f"no health check is served (TORCHELASTIC_HEALTH_CHECK_PORT): {error}")
                continue
            doors.append((sock, pages))
            address = str(Endpoint(host=place.host, port=sock.getsockname()[1]))
            node.write("serving", what=what, address=address)
            if place.port == 0:
                node.say(f"{' and '.join(what)} at http://{address}")
    except PortInUseError:
        for sock, _ in doors:
            sock.close()
        raise
    if not doors:
        return None
    server = Server(doors)
    server.start()
    return server


def metrics_pages(vitals: Vitals) -> Pages:
    try:
        from holdfast.extensions.metrics.exposition import CONTENT_TYPE, Metrics
    except Exception as error:  # another package's: one that is broken, too old or half removed raises anything
        missing = isinstance(error, ModuleNotFoundError) and error.name == "prometheus_client"
        why = "needs prometheus-client"
        if not missing:
            why = f"cannot import prometheus-client ({type(error).__name__}: {error})"
        raise MissingPackageError(f"--metrics {why}: pip install 'holdfast[metrics]'") from error
    metrics = Metrics(lambda: vitals.facts)
    return {"/metrics": lambda: HttpResponse(200, CONTENT_TYPE, metrics.text())}


def health_pages(vitals: Vitals) -> Pages:
    import json

    def page(key: str) -> HttpResponse:
        state = health(vitals.facts, time.monotonic())
        return HttpResponse(200 if state[key] else 503, "application/json", json.dumps(state).encode() + b"\n")

    def alive() -> HttpResponse:
        return page("alive")

    return {"/": alive, "/health": alive, "/healthz": alive, "/livez": alive, "/readyz": lambda: page("ready")}
