"""The shells around a Voter: its timers, its questions to other voters, and the port at which others reach this agent.

`VoterService` runs the machine. `Reception` accepts the connections to an agent: those of agents that look for the
coordinator go to it if it runs in this process; candidates get their answer, callers learn where the coordinator is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from holdfast.agent.voter import (
    AnswerPoll,
    AskVote,
    Command,
    Event,
    HeardOf,
    Lead,
    LeaderAddress,
    PollCame,
    RenewCame,
    SendRenewed,
    Voter,
    VoterState,
)
from holdfast.inherited import raise_limit
from holdfast.journal import Journal
from holdfast.protocol.charter import Poll, Polled, Renew, Renewed, Succession
from holdfast.protocol.codec import PROTOCOL_VERSION
from holdfast.protocol.messages import ContestEndpoint, CoordinatorAt, FromAgent
from holdfast.protocol.options import RunOptions
from holdfast.protocol.policy import Note, Tick
from holdfast.protocol.session import Accepted, Hello
from holdfast.rendezvous.bind import Claim
from holdfast.runtime.connection import seen_from_here
from holdfast.runtime.driver import Driver
from holdfast.runtime.listener import AgentConnection, Listener


class Errands:
    """Tasks that end by themselves. A fault in one reaches the loop's exception handler, which ends the agent."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself does not keep it alive
        task.add_done_callback(self._done)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            context = {"message": "a task of the rendezvous failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)


class VoterService:
    """Runs a Voter. `ask` starts a question to another voter, `lead` starts the coordinator in this process: a witness
    does neither."""

    def __init__(
        self,
        machine: Voter,
        journal: Journal,
        ask: Callable[[AskVote], None] | None = None,
        lead: Callable[[Succession], None] | None = None,
    ) -> None:
        self.machine = machine
        self.news = asyncio.Event()
        """Set when it knows of another coordinator, or leads itself. Cleared by the code that waits for it."""
        self._journal = journal
        self._ask = ask
        self._lead = lead
        self._renewals: deque[Callable[[Renewed], None]] = deque()
        """Senders of the answers to Renews, in the order in which the Renews came."""
        self._candidates: dict[int, Callable[[Polled], None]] = {}
        """Senders of the answers to candidates, by the number of the question."""
        self._asked = 0
        """The number of the newest question of a candidate."""
        self._known: LeaderAddress | None = None
        """The coordinator that was known after the last event."""
        self._driver: Driver[Event, Command] = Driver(machine, Tick(), self._execute, after=self._look)

    @property
    def electing(self) -> bool:
        """Whether this voter has lost a coordinator that its voters may replace."""
        return self.machine.elects(asyncio.get_running_loop().time())

    def feed(self, event: Event) -> None:
        self._driver.feed(event)

    def renew_came(self, renew: Renew, answer: Callable[[Renewed], None]) -> None:
        self._renewals.append(answer)
        self.feed(RenewCame(renew))

    def poll_came(self, poll: Poll, answer: Callable[[Polled], None]) -> None:
        self._asked += 1
        self._candidates[self._asked] = answer
        self.feed(PollCame(self._asked, poll))

    def stop(self) -> None:
        self._driver.stop()

    def _execute(self, command: Command) -> None:
        match command:
            case SendRenewed(renewed):
                self._renewals.popleft()(renewed)
            case AskVote():
                assert self._ask is not None
                self._ask(command)
            case AnswerPoll(number, polled):
                self._candidates.pop(number)(polled)
            case Lead(succession):
                assert self._lead is not None
                self._lead(succession)
                self.news.set()
            case Note(event, fields):
                self._journal.write(f"agent.{event}", **fields)

    def _look(self) -> None:
        if self.machine.leader != self._known:
            self._known = self.machine.leader
            self.news.set()


class Reception:
    """Accepts the connections of others to this agent: at its own port, and at every endpoint of the job that is this
    machine's.

    `connected` gets the connections while a coordinator runs in this process; None: there is none. `where` returns the
    place of a coordinator in another process, as far as this agent knows it.
    """

    def __init__(
        self,
        options: RunOptions,
        voter: VoterService,
        where: Callable[[], LeaderAddress | None],
        say: Callable[[str], None],
    ) -> None:
        self.connected: Callable[[AgentConnection], None] | None = None
        self.leading: Callable[[Accepted], Accepted] = lambda accepted: accepted
        """Adds the coordinator's term and origin to our answer, while a coordinator runs in this process."""
        self._options = options
        self._voter = voter
        self._where = where
        self._say = say
        self._listeners: list[Listener] = []
        self._guests: dict[AgentConnection, asyncio.TimerHandle] = {}
        """Connections that came for one question, each with the timer that ends it if it asks nothing."""

    async def listen(self, place: Claim) -> None:
        """Accept connections at these sockets, until `close`."""
        raise_limit()
        options = self._options
        listener = Listener(
            place.sockets, options.job, options.token, self._arrived, self._say, answer=lambda _: self._answer()
        )
        self._listeners.append(listener)
        await listener.start()

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        for guest in list(self._guests):
            guest.close("this agent ends")

    def _answer(self) -> Accepted:
        name = self._voter.machine.name
        if self.connected is not None:
            return self.leading(Accepted(PROTOCOL_VERSION, name=name))
        where = self._where()
        if where is None:
            return Accepted(PROTOCOL_VERSION, absent=True, name=name)
        return Accepted(PROTOCOL_VERSION, absent=True, address=where.address, port=where.port, name=name)

    def _arrived(self, connection: AgentConnection, _: Hello) -> None:
        # One that was answered before a coordinator began here was sent elsewhere, and comes for one question at most.
        if self.connected is not None and not connection.accepted.absent:
            self.connected(connection)
            return
        limit_s = self._options.limits.unjoined_s
        timer = asyncio.get_running_loop().call_later(limit_s, connection.close, "it asked nothing")
        self._guests[connection] = timer
        connection.start(lambda message: self._heard(connection, message), lambda _: self._left(connection))

    def _left(self, connection: AgentConnection) -> None:
        self._guests.pop(connection).cancel()

    def _heard(self, connection: AgentConnection, message: FromAgent) -> None:
        if not answer_guest(self._voter, self._where, connection, message):
            connection.close("no coordinator is here")


def answer_guest(
    voter: VoterService, where: Callable[[], LeaderAddress | None], connection: AgentConnection, message: FromAgent
) -> bool:
    """Answer a candidate, or a coordinator that calls. Returns False for any other message."""
    match message:
        case Poll():
            voter.poll_came(message, connection.send)
        case ContestEndpoint(term, address, port):
            voter.feed(HeardOf(term, seen_from_here(address, connection.peer_address), port))
            # Only a voter that is linked knows that its coordinator still lives.
            known = where()
            linked = voter.machine.stage in (VoterState.FOLLOWING, VoterState.LEADING)
            if known is not None and known.term > term and linked:
                connection.send(CoordinatorAt(known.term, known.address, known.port))
            connection.close("the call is over")
        case _:
            return False
    return True
