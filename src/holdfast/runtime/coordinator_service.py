"""The shell of a coordinator in this process: passes messages between its links and its machine.

Remote agents connect through the Listener; the agent of this process through a LocalLink, without a socket. Knows
nothing of how this process came to host the coordinator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.coordinator_commands import Command, Conclude, DropLink, Tell
from holdfast.coordinator.coordinator_events import Event, Heard, LinkClosed, LinkOpened
from holdfast.inherited import raise_limit
from holdfast.journal import Journal
from holdfast.protocol.errors import HoldfastError
from holdfast.protocol.messages import Finish, FromAgent, FromCoordinator, Ping
from holdfast.protocol.outcome import fault_outcome
from holdfast.protocol.policy import Note, Tick
from holdfast.runtime.driver import Driver

if TYPE_CHECKING:
    from holdfast.rendezvous.bind import Claim
    from holdfast.runtime.listener import AgentConnection, Listener, StoreProxy

LINGER_S = 5.0
"""Limit for the members to receive the outcome and disconnect after the end of the job (s)."""


class CoordinatorLink(Protocol):
    """An agent's link to the coordinator."""

    def start(self, on_message: Callable[[FromCoordinator], None], on_closed: Callable[[str], None]) -> None: ...

    def send(self, message: FromAgent) -> None: ...

    def close(self, reason: str = ...) -> None: ...


class AgentLink(Protocol):
    """The coordinator's connection to one agent."""

    def send(self, message: FromCoordinator) -> None: ...

    def close(self, reason: str) -> None: ...


class LocalLink:
    """The link between an agent and the coordinator in one process. Both directions go through the loop, in order."""

    def __init__(self, service: CoordinatorService, number: int) -> None:
        self._service = service
        self._number = number
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._on_message: Callable[[FromCoordinator], None] | None = None
        self._on_closed: Callable[[str], None] | None = None
        self.to_agent = _ToAgent(self)

    def start(self, on_message: Callable[[FromCoordinator], None], on_closed: Callable[[str], None]) -> None:
        self._on_message, self._on_closed = on_message, on_closed

    def send(self, message: FromAgent) -> None:
        """Send from the agent to the coordinator."""
        if self._open:
            self._loop.call_soon(self._service.heard, self._number, message)

    def close(self, reason: str = "closed here") -> None:
        """Close the link from the agent's side."""
        if self._open:
            self._open = False
            self._loop.call_soon(self._service.link_closed, self._number, reason)

    def deliver(self, message: FromCoordinator) -> None:
        """Give the agent a message of the coordinator."""
        if self._open and self._on_message is not None:
            self._on_message(message)

    def cut(self, reason: str) -> None:
        """Report to the agent that the coordinator has closed the link."""
        if self._open and self._on_closed is not None:
            self._open = False
            self._on_closed(reason)


class _ToAgent:
    """The coordinator's end of a LocalLink."""

    def __init__(self, link: LocalLink) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()

    def send(self, message: FromCoordinator) -> None:
        self._loop.call_soon(self._link.deliver, message)

    def close(self, reason: str) -> None:
        self._loop.call_soon(self._link.cut, reason)


class CoordinatorService:
    """Runs a Coordinator behind the sockets of a claim."""

    def __init__(self, machine: Coordinator, journal: Journal, say: Callable[[str], None]) -> None:
        self._journal = journal
        self._say = say
        self._links: dict[int, AgentLink] = {}
        """Every open link, by its number."""
        self._remote: set[int] = set()
        """Numbers of the links of remote agents."""
        self._number = 0
        """The number of the newest link."""
        self._loop = asyncio.get_running_loop()
        self._alone = asyncio.Event()
        """Set while no remote agent is connected."""
        self._alone.set()
        self._listener: Listener | None = None
        self._driver: Driver[Event, Command] = Driver(machine, Tick(), self._execute, on_fault=self._broken)
        self._driver.feed(Tick())
        self.machine = machine
        self.proxy: StoreProxy | None = None

    async def listen(self, claim: Claim, token: bytes | None, *, static: bool) -> None:
        """Accept remote agents. `static`: clients of the store connect to the same port and are piped to the store."""
        # A job of one node needs no network, so it does not load it.
        from holdfast.runtime.listener import Listener, StoreProxy

        raise_limit()
        if static:
            self.proxy = StoreProxy(self._say)
        self._listener = Listener(
            claim.sockets,
            self.machine.job,
            token,
            lambda connection, _: self.connected(connection),
            self._say,
            other=self.proxy.take if self.proxy is not None else None,
        )
        await self._listener.start()

    def connect_locally(self) -> LocalLink:
        """The link of this process's own agent."""
        link = LocalLink(self, self._number + 1)  # the number that `_add` gives
        number = self._add(link.to_agent)
        self._driver.feed(LinkOpened(number, "127.0.0.1", "127.0.0.1", local=True))
        return link

    def connected(self, connection: AgentConnection) -> None:
        """Take the connection of a remote agent."""
        number = self._add(connection)
        self._remote.add(number)
        self._alone.clear()
        # It delivers nothing before the loop's next turn: the machine hears of the link first.
        connection.start(partial(self.heard, number), partial(self.link_closed, number))
        self._driver.feed(LinkOpened(number, connection.peer_address, connection.local_address))

    def heard(self, number: int, message: FromAgent) -> None:
        """Handle a message that arrived on this link."""
        link = self._links.get(number)
        if link is None:
            return
        # Nearly all messages of a large job are pings. Those that need no decision skip the queue of the driver.
        if isinstance(message, Ping) and not self._driver.stopped:
            pong = self.machine.pong(self._loop.time(), number, message)
            if pong is not None:
                link.send(pong)
                return
        self._driver.feed(Heard(number, message))

    def link_closed(self, number: int, reason: str) -> None:
        if self._forget(number):
            self._driver.feed(LinkClosed(number, reason))

    async def close(self) -> None:
        """End the coordinator. If the job is over, wait first until every member has received the outcome; if the job
        continues without us, end at once."""
        if self.machine.outcome is not None:
            try:
                async with asyncio.timeout(LINGER_S):
                    await self._alone.wait()
            except TimeoutError:
                self._journal.write("linger_over", links=len(self._remote))
        self.cut("the coordinator ends")
        if self._listener is not None:
            self._listener.close()
        if self.proxy is not None:
            await self.proxy.close()

    def cut(self, reason: str) -> None:
        """Handle nothing more, and close all links."""
        self._driver.stop()
        for link in list(self._links.values()):
            link.close(reason)
        self._links.clear()

    def _add(self, link: AgentLink) -> int:
        self._number += 1
        self._links[self._number] = link
        return self._number

    def _forget(self, number: int) -> bool:
        """Remove a link that was closed. Returns whether it was open."""
        self._remote.discard(number)
        if not self._remote:
            self._alone.set()
        return self._links.pop(number, None) is not None

    def _broken(self, error: HoldfastError, event: Event) -> None:
        """End the job, because the machine has failed at an event: cut off the sender of the event, and send all others
        that the job is over."""
        self._journal.write("coordinator.fault", error=str(error))
        if isinstance(event, Heard) and (sender := self._links.pop(event.link, None)) is not None:
            sender.close("its message broke the coordinator")
        finish = Finish(fault_outcome(error))
        for link in self._links.values():
            link.send(finish)

    def _execute(self, command: Command) -> None:
        match command:
            case Tell(number, message):
                link = self._links.get(number)
                if link is not None:
                    link.send(message)
            case DropLink(number, reason):
                link = self._links.get(number)
                if link is not None:
                    # Forgotten before it ends: the machine has cut it, and must not hear of its end.
                    self._links.pop(number)
                    link.close(reason)
            case Note(event, fields):
                self._journal.write(f"coordinator.{event}", **fields)
            case Conclude(outcome):
                self._journal.write("coordinator.concluded", kind=outcome.kind.value, exit_code=outcome.exit_code)
