"""`holdfast witness --bind HOST:PORT`: a process that votes when the coordinator of a job is lost.

Knows the options and the signals; runtime/witness_service.py does the work.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import TYPE_CHECKING, TypedDict

from holdfast.cli import say
from holdfast.cli.printing import Parser, print_json
from holdfast.inherited import forget_secrets, read_token
from holdfast.protocol.errors import EndpointError
from holdfast.protocol.options import Endpoint
from holdfast.protocol.policy import Limits
from holdfast.rendezvous.bind import Claim, claim
from holdfast.rendezvous.conf import limits_from_conf, parse_endpoint

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


class Listening(TypedDict):
    """The witness listens."""

    endpoint: str
    """The address, HOST:PORT."""
    pid: int


JSON_FORMS = {"witness": ((Listening,),)}


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="holdfast witness",
        description="Vote for jobs whose coordinator is lost, so that a job of two nodes survives the loss of one. "
        "Run it on a machine that is none of the job's nodes, and name it in --rdzv-endpoint of all nodes: "
        "NODE,OTHER,WITNESS:PORT. One witness serves any number of jobs. "
        "With a job token it needs the same one (HOLDFAST_TOKEN).",
    )
    made.add_argument("--bind", required=True, metavar="HOST:PORT", help="listen there")
    made.add_argument("--token-file", metavar="FILE", help="the token of the jobs, as in --rdzv-conf token_file")
    made.add_argument(
        "--lease",
        metavar="SECONDS",
        help="as in --rdzv-conf lease of the jobs, if they set it: a coordinator is lost after that",
    )
    made.add_json("print a line of JSON as soon as it listens")
    return made


def main(argv: Sequence[str]) -> int:
    """Run a witness until a signal ends it. Returns the exit status. Raises HoldfastError."""
    given = parser().parse_args(argv)
    endpoint = parse_endpoint(given.bind, None)
    limits = limits_from_conf("c10d", {"lease": given.lease} if given.lease else {}, Limits())
    token = read_token(given.token_file, os.environ)
    forget_secrets()
    try:
        claimed = claim(endpoint)
    except OSError as error:
        raise EndpointError(f"cannot listen at {endpoint}: {error.strerror or error}") from None
    if not claimed.is_host:
        raise EndpointError(f"cannot listen at {endpoint}: {claimed.reason}")
    here = Endpoint(host=endpoint.host, port=claimed.port)
    asyncio.run(serve(claimed, here, token, limits, as_json=given.json))
    return 0


async def serve(claimed: Claim, endpoint: Endpoint, token: bytes | None, limits: Limits, *, as_json: bool) -> None:
    from holdfast.runtime.witness_service import Witness

    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(signum, ended.set)
    host = socket.gethostname().partition(".")[0]
    witness = Witness(claimed, token, limits, host, say)
    await witness.start()
    if as_json:
        print_json(Listening(endpoint=str(endpoint), pid=os.getpid()), indent=None)
    say(f"a witness listens at {endpoint}")
    await ended.wait()
    witness.close()
