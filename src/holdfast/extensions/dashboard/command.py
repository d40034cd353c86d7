"""`holdfast dashboard`: a job, running or ended, as a page in the browser, or the list of all.

The page's server is the package dashboard, which reads by means of other commands: it is imported by name, when its
packages are known to be there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from holdfast.cli.printing import Parser, print_json
from holdfast.protocol.errors import NoRunError, UsageError
from holdfast.protocol.options import Endpoint
from holdfast.runs.finding import of_one_job, run_folders
from holdfast.runtime import running

SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
"""Variables of which one is set where there is a browser outside of the terminal."""


class Served(TypedDict):
    """The page is served until Ctrl-C."""

    link: str
    """The page's address, with the password."""
    pid: int


JSON_FORMS = {"dashboard": ((Served,),)}


def main_dashboard(argv: Sequence[str]) -> int:
    """Run `holdfast dashboard` with these arguments. Returns the exit status. Raises HoldfastError."""
    import asyncio
    import webbrowser
    from importlib import import_module
    from threading import Thread

    from holdfast.cli.resolve import serving_place
    from holdfast.extensions.dashboard.credentials import Credentials, import_packages, login_link
    from holdfast.listening import bind_named
    from holdfast.text import is_loopback

    chosen = dashboard_parser().parse_args(argv)
    import_packages()
    try:
        place = serving_place(chosen.port)
    except ValueError as error:
        raise UsageError(f"--port {chosen.port}: {error}") from None
    name, folders, pid = job_of(chosen.run)
    credentials = Credentials.make(once=is_loopback(place.host))
    # Takes a moment, in which nobody should wait for the page: so it is before the link.
    web_app = import_module("holdfast.dashboard.web_app")
    with contextlib.closing(bind_named(place, "--port")) as sock:
        link = login_link(Endpoint(host=place.host, port=sock.getsockname()[1]), credentials.token)
        if chosen.json:
            print_json(Served(link=link, pid=os.getpid()), indent=None)
        else:
            print(f"dashboard {link}\n(Ctrl-C ends it; a running job goes on)", flush=True)
        if not chosen.no_open and any(map(os.environ.get, SCREENS)):
            # A browser in a terminal, or one that BROWSER names, may not return before its user leaves it.
            Thread(target=webbrowser.open, args=(link,), daemon=True).start()
        asyncio.run(web_app.show(sock, credentials, name, folders, pid))
    return 0


def dashboard_parser() -> Parser:
    made = Parser(prog="holdfast dashboard", description="Show a job, running or ended, as a page in the browser.")
    made.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="run id, its beginning, or run folder; by default the only running job, else a list of all",
    )
    made.add_argument("--port", default="0", metavar="[HOST:]PORT", help="where to serve; by default a free port here")
    made.add_argument("--no-open", action="store_true", help="print the link, and open no browser")
    made.add_json("print the link as a line of JSON")
    return made


def job_of(run: str | None) -> tuple[str, list[Path], int | None]:
    """The name of the job, its run folders here, and the pid of its agent if it has no folder; an empty name: all jobs.
    Raises NoRunError."""
    if run is None and len({entry.job for entry in running.entries()}) != 1:
        return "", [], None
    try:
        folders = run_folders(run)
    except NoRunError:
        entries = of_one_job(run, running.entries())
        if not entries:
            raise
        return entries[0].run_id, [], entries[0].pid
    return str(folders[0]), folders, None
