"""The shell of a coordinator that may get a successor; and the link of an agent to it, which also serves the voter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from holdfast.agent.voter import HeardOf, Linked, Unlinked
from holdfast.authority.voter_events import (
    Deposed,
    NoWitness,
    ProveCaller,
    ProveVoterGone,
    VoterGone,
    WitnessOpened,
)
from holdfast.authority.voters import Voters
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.coordinator_commands import Command, StepDown
from holdfast.journal import Journal
from holdfast.protocol.charter import Poll, Renew, Seat
from holdfast.protocol.messages import ContestEndpoint, CoordinatorAt, FromAgent, FromCoordinator, Joined
from holdfast.protocol.options import Endpoint
from holdfast.runtime.connection import Connection
from holdfast.runtime.coordinator_service import CoordinatorService, LocalLink
from holdfast.runtime.voter_service import Errands, VoterService

Outgoing = Connection[FromCoordinator]


class OtherVoters(Protocol):
    """The voter beside this coordinator, as far as the coordinator needs it. It speaks with the other voters."""

    def poll_came(self, poll: Poll, reply: Callable[[FromCoordinator], None]) -> None: ...

    def stepped_down(self, command: StepDown) -> None: ...

    async def find_caller(self, contest: ContestEndpoint) -> Deposed | None: ...

    async def prove_gone(self, seat: Seat) -> bool: ...


class ReplicatedService(CoordinatorService):
    """Runs a coordinator whose authority is a majority of voters."""

    def __init__(
        self,
        machine: Coordinator,
        voters: Voters,
        journal: Journal,
        say: Callable[[str], None],
        client: OtherVoters,
    ) -> None:
        self.voters = voters
        self.errands = Errands()
        """Tasks of this coordinator, which end with it."""
        self._client = client
        super().__init__(machine, journal, say)

    def heard(self, number: int, message: FromAgent) -> None:
        # A candidate that is an agent of this coordinator asks over the link that it has. The voter answers it.
        if not isinstance(message, Poll):
            super().heard(number, message)
        elif (link := self._links.get(number)) is not None:
            self._client.poll_came(message, link.send)

    def witness_opened(self, connection: Outgoing, seat: Seat, on_closed: Callable[[], None]) -> None:
        number = self._add(connection)

        def closed(reason: str) -> None:
            self.link_closed(number, reason)
            on_closed()

        connection.start(lambda message: self._witness_heard(number, message), closed)
        self._driver.feed(WitnessOpened(number, seat))

    def no_witness(self, endpoint: Endpoint) -> None:
        self._driver.feed(NoWitness(endpoint.host, endpoint.port))

    def _witness_heard(self, number: int, message: FromCoordinator) -> None:
        # We have dialled the witness, so its messages are decoded as a coordinator's. It sends those of an agent alone.
        if isinstance(message, FromAgent):
            self.heard(number, message)

    def deposed(self, event: Deposed) -> None:
        self._driver.feed(event)

    def announce(self, message: FromCoordinator) -> None:
        """Send this to every remote agent."""
        for number in self._remote:
            self._links[number].send(message)

    def cut(self, reason: str) -> None:
        self.errands.cancel()
        super().cut(reason)

    def _execute(self, command: Command) -> None:
        match command:
            case StepDown():
                self._client.stepped_down(command)
            case ProveCaller(contest):
                self.errands.start(self._prove_caller(contest))
            case ProveVoterGone(seat):
                self.errands.start(self._prove(seat))
            case _:
                super()._execute(command)

    async def _prove_caller(self, contest: ContestEndpoint) -> None:
        deposed = await self._client.find_caller(contest)
        if deposed is not None:
            self._driver.feed(deposed)

    async def _prove(self, seat: Seat) -> None:
        if await self._client.prove_gone(seat):
            self._driver.feed(VoterGone(seat.name))


class WatchedLink:
    """The agent's link to a coordinator that may get a successor. The agent's voter gets the Renews, the place to which
    the coordinator has moved, and the gain and loss of the link."""

    def __init__(self, link: Outgoing | LocalLink, voter: VoterService) -> None:
        self.term = 0
        self.up = True
        self._link = link
        self._voter = voter
        self._joined = False
        self._heard_of_another = False
        """The coordinator has sent where another one is: the end of the link is then no sign of its death."""
        self._stepped_down = False

    def stepped_down(self) -> None:
        """Ignore a Joined from now on: the coordinator in this process has stepped down. Its Joined may still be on its
        way, and must not link the voter to it."""
        self._stepped_down = isinstance(self._link, LocalLink)

    def start(self, on_message: Callable[[FromCoordinator], None], on_closed: Callable[[str], None]) -> None:
        self._link.start(partial(self._heard, on_message), partial(self._closed, on_closed))

    def send(self, message: FromAgent) -> None:
        self._link.send(message)

    def close(self, reason: str = "closed here") -> None:
        self._lost(closed=False)
        self._link.close(reason)

    def _heard(self, on_message: Callable[[FromCoordinator], None], message: FromCoordinator) -> None:
        match message:
            case Renew():
                self._voter.renew_came(message, self._link.send)
            case CoordinatorAt(term, address, port):
                self._heard_of_another = True
                self._voter.feed(HeardOf(term, address, port))
            case Joined(term=term):
                self.term, self._joined = term, True
                if not self._stepped_down:
                    self._voter.feed(Linked(term))
                on_message(message)
            case _:
                on_message(message)

    def _closed(self, on_closed: Callable[[str], None], reason: str) -> None:
        ended = isinstance(self._link, Connection) and self._link.ended_by_peer
        self._lost(closed=ended and not self._heard_of_another)
        on_closed(reason)

    def _lost(self, *, closed: bool) -> None:
        if not self.up:
            return
        self.up = False
        if self._joined and not isinstance(self._link, LocalLink):  # that coordinator says itself when it steps down
            self._voter.feed(Unlinked(self.term, closed))
