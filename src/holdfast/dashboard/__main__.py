"""The dashboard's process beside a coordinator: `python -m holdfast.dashboard`. extensions/dashboard/node.py starts it.

Descriptor 3 is the socket to the agent, 4 the listening socket. Messages (seqpacket.py):

    agent → here   {"agent": pid, "run_id", "folder", "credentials"}   the first one
                   {"do": "finish", "outcome"}                 the job has ended: the browsers get this
    here → agent   {"is": "up"}                                it serves
                   {"is": "used"}                              the login link was used
                   {"is": "unusable", "text"}                  it cannot run here: a package cannot be imported
                   {"is": "fault", "text"}                     a fault of ours ends this process
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import traceback

import msgspec

from holdfast import seqpacket
from holdfast.dashboard.feed import JobFeeds
from holdfast.dashboard.job_source import ShownJob
from holdfast.extensions.dashboard.credentials import LISTENING_FD, Credentials, import_packages
from holdfast.protocol.errors import MissingPackageError
from holdfast.protocol.outcome import Outcome
from holdfast.supervisor.service_process import CONTROL_FD

TEXT_CHARACTERS_MAX = 8000
"""End of the traceback that the agent gets when this process fails."""
NICENESS = 5
"""Niceness of this process: training has priority."""


def main() -> None:
    """Serve until the job or its agent ends.

    Signals that end whole sessions are ignored: users watch on this page how the job stops after them.
    """
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    os.nice(NICENESS)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write("holdfast-dash")
    control = socket.socket(fileno=CONTROL_FD)
    first = seqpacket.receive(control)
    if first is not None:
        try:
            import_packages()
            asyncio.run(_serve(control, first[0]))
        except MissingPackageError as error:
            _send(control, "unusable", text=str(error))
        except BaseException:
            _send(control, "fault", text=traceback.format_exc()[-TEXT_CHARACTERS_MAX:])
            raise


async def _serve(control: socket.socket, about: seqpacket.Message) -> None:
    from holdfast.dashboard.web_app import serve  # lazily: its packages may not be there

    source = ShownJob(about["folder"] or about["run_id"], [about["folder"]], pid=about["agent"])
    loop, ending = asyncio.get_running_loop(), asyncio.Event()
    outcome: Outcome | None = None

    def on_packet() -> None:
        """The second packet is the last one: the job's outcome, or the end of the socket because the agent is gone."""
        nonlocal outcome
        packet = seqpacket.receive(control)
        if packet is not None and "outcome" in packet[0]:
            outcome = msgspec.convert(packet[0]["outcome"], Outcome)
        loop.remove_reader(control)
        ending.set()

    async def ended(feeds: JobFeeds) -> None:
        control.setblocking(False)
        loop.add_reader(control, on_packet)
        _send(control, "up")
        await ending.wait()
        if outcome is not None:
            await feeds.finish(outcome)

    await serve(
        socket.socket(fileno=LISTENING_FD),
        msgspec.convert(about["credentials"], Credentials),
        [source],
        on_used=lambda: _send(control, "used"),
        until=ended,
    )


def _send(control: socket.socket, what: str, **more: str) -> None:
    with contextlib.suppress(OSError):
        seqpacket.send(control, {"is": what, **more})


if __name__ == "__main__":
    main()
