"""A witness: votes and keeps the charter for any number of jobs, so that two nodes survive the loss of one. A shell.

Each job (run id) has a Voter of its own, which never becomes the coordinator. The coordinator connects to the witness
and keeps the connection; candidates and agents that look for the coordinator come for one question.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from holdfast.agent.voter import LeaderAddress, Unlinked, Voter
from holdfast.inherited import raise_limit
from holdfast.journal import Journal
from holdfast.protocol.charter import Renew
from holdfast.protocol.codec import PROTOCOL_VERSION
from holdfast.protocol.messages import FromAgent
from holdfast.protocol.policy import Limits
from holdfast.protocol.session import SHOWN_CHARS_MAX, Accepted, Hello
from holdfast.rendezvous.bind import Claim
from holdfast.runtime.listener import AgentConnection, Listener
from holdfast.runtime.voter_service import VoterService, answer_guest

JOBS_MAX = 1000
"""Number of jobs above which those without a connection are forgotten, the oldest first."""
IDLE_S_MAX = 24 * 3600.0
"""Time without a connection after which a job is forgotten (s)."""
SWEEP_S = 60.0
NAME_BYTES = 4


@dataclass(slots=True, eq=False)
class _Job:
    """One job, as this witness knows it."""

    voter: VoterService
    links: int = 0
    """Number of open connections."""
    idle_since_s: float = 0.0
    """The time at which the last connection ended, or the job was first seen (s of the loop's clock)."""

    def where(self) -> LeaderAddress | None:
        """The place of its coordinator: of the first voter of its charter, or of a candidate that got this vote
        since. None: unknown."""
        machine = self.voter.machine
        charter, leader = machine.charter, machine.leader
        if charter is None or not charter.voters or (leader is not None and leader.term > charter.position.term):
            return leader
        first = charter.voters[0]
        return LeaderAddress(first.address, first.port, charter.position.term)


class Witness:
    """Serves the jobs at these sockets, until `close`."""

    def __init__(
        self, place: Claim, token: bytes | None, limits: Limits, host: str, say: Callable[[str], None]
    ) -> None:
        self._limits = limits
        self._host = host
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[str, _Job] = {}
        """Jobs by run id, the newest last."""
        self._listener = Listener(place.sockets, None, token, self._arrived, say, answer=self._answer)
        self._sweeping: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        raise_limit()
        await self._listener.start()
        self._sweep()

    def close(self) -> None:
        self._listener.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        for job in self._jobs.values():
            job.voter.stop()

    def _answer(self, hello: Hello) -> Accepted:
        job = self._jobs.get(hello.run_id) or self._begin(hello.run_id)
        where = job.where() or LeaderAddress("", 0, 0)
        name = job.voter.machine.name
        return Accepted(PROTOCOL_VERSION, True, where.address, where.port, name, witness=True)

    def _begin(self, run_id: str) -> _Job:
        # The name is used for one job and one life of it here: a voter that has forgotten its votes must not be taken
        # for the one that gave them.
        name = f"{self._host}#{os.urandom(NAME_BYTES).hex()}"
        machine = Voter(name, self._limits, self._loop.time(), stands=False)
        job = self._jobs[run_id] = _Job(VoterService(machine, Journal(None)), idle_since_s=self._loop.time())
        self._say(f"witness of job {run_id[:SHOWN_CHARS_MAX]!r}")
        if len(self._jobs) > JOBS_MAX:
            self._forget()
        return job

    def _arrived(self, connection: AgentConnection, hello: Hello) -> None:
        job = self._jobs.get(hello.run_id)
        if job is None:  # forgotten in this moment
            connection.close("please connect again")
            return
        job.links += 1
        guest = _Guest(job, connection)
        guest.timer = self._loop.call_later(self._limits.unjoined_s, connection.close, "it asked nothing")
        connection.start(guest.heard, partial(self._left, guest))

    def _left(self, guest: _Guest, _: str) -> None:
        guest.ended()
        guest.job.links -= 1
        guest.job.idle_since_s = self._loop.time()

    def _sweep(self) -> None:
        self._sweeping = self._loop.call_later(SWEEP_S, self._sweep)
        self._forget()

    def _forget(self) -> None:
        before_s = self._loop.time() - IDLE_S_MAX
        idle = [(job.idle_since_s, run_id) for run_id, job in self._jobs.items() if not job.links]
        surplus = len(self._jobs) - JOBS_MAX
        for number, (since_s, run_id) in enumerate(sorted(idle)):
            if since_s < before_s or number < surplus:
                self._jobs.pop(run_id).voter.stop()


class _Guest:
    """One connection to a witness."""

    def __init__(self, job: _Job, connection: AgentConnection) -> None:
        self.job = job
        self.timer: asyncio.TimerHandle | None = None
        """Ends the connection if it asks nothing; None: it has turned out to be the coordinator's."""
        self._connection = connection
        self._term = 0
        """The term of the coordinator at the other end; 0: it is none."""

    def heard(self, message: FromAgent) -> None:
        if isinstance(message, Renew):
            self._cancel_timer()
            self._term = message.term
            self.job.voter.renew_came(message, self._connection.send)
        elif not answer_guest(self.job.voter, self.job.where, self._connection, message):
            self._connection.close("this is a witness")

    def ended(self) -> None:
        self._cancel_timer()
        if self._term:
            self.job.voter.feed(Unlinked(self._term, closed=self._connection.ended_by_peer))

    def _cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
