"""Observation of this agent from outside, off by default: torchelastic's events, metrics, health checks.

    with observing(options, journal, say, node=…, look=…, view=…): run the job

Expensive modules are imported only when they are needed. No decision depends on this package.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from holdfast.protocol.errors import MissingPackageError, PortInUseError
from holdfast.protocol.options import Endpoint, RunOptions
from holdfast.protocol.rank_progress import JobView, RankProgress
from holdfast.runtime.run_folder import Journal

if TYPE_CHECKING:
    import socket

    from holdfast.metrics.server import HttpResponse, Pages, Server
    from holdfast.metrics.vitals import Vitals

Look = Callable[[], tuple[RankProgress, ...]]
View = Callable[[], JobView | None]


@contextlib.contextmanager
def observing(
    options: RunOptions, journal: Journal, say: Callable[..., None], *, node: str, look: Look, view: View
) -> Iterator[None]:
    """Active while the job runs. `look` returns the progress of this node's workers, `view` the coordinator's view.

    Raises PortInUseError and MissingPackageError before it begins.
    """
    if options.event_log_handler == "console":
        from holdfast.metrics.torch_events import TorchEvents

        journal.listen(TorchEvents(options, lambda line: say(line, prefix="")).heard)
    if options.metrics is None and options.health is None:
        yield
        return
    from holdfast.metrics.vitals import Vitals

    vitals = Vitals(options.job.run_id, node, look, view, journal.fault)
    server = serve(options, vitals, journal, say)
    journal.listen(vitals.heard)
    vitals.start()
    try:
        yield
    finally:
        vitals.close()
        if server is not None:
            server.close()


def serve(options: RunOptions, vitals: Vitals, journal: Journal, say: Callable[..., None]) -> Server | None:
    """The started server; None: the only port was requested by a variable of torchrun and is in use."""
    from holdfast.metrics.server import Server, bind

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
                sock = bind(place, " and ".join(f"--{name}" for name in what))
            except PortInUseError as error:
                if not options.health_if_free or what != ["health"]:
                    raise
                say(f"no health check is served (TORCHELASTIC_HEALTH_CHECK_PORT): {error}")
                continue
            doors.append((sock, pages))
            address = str(Endpoint(host=place.host, port=sock.getsockname()[1]))
            journal.write("serving", what=what, address=address)
            if place.port == 0:
                say(f"{' and '.join(what)} at http://{address}")
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
        from holdfast.metrics.exposition import CONTENT_TYPE, Metrics
    except ModuleNotFoundError as error:
        raise MissingPackageError("--metrics needs prometheus-client: pip install 'holdfast[metrics]'") from error
    from holdfast.metrics.server import HttpResponse

    metrics = Metrics(lambda: vitals.facts)
    return {"/metrics": lambda: HttpResponse(200, CONTENT_TYPE, metrics.text())}


def health_pages(vitals: Vitals) -> Pages:
    import json

    from holdfast.metrics.server import HttpResponse
    from holdfast.metrics.vitals import health

    def page(key: str) -> HttpResponse:
        told = health(vitals.facts, time.monotonic())
        return HttpResponse(200 if told[key] else 503, "application/json", json.dumps(told).encode() + b"\n")

    def alive() -> HttpResponse:
        return page("alive")

    return {"/": alive, "/health": alive, "/healthz": alive, "/livez": alive, "/readyz": lambda: page("ready")}
