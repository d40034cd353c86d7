"""Connects this agent to the coordinator: hosts it where the endpoint is ours to bind, otherwise dials it.

`RendezvousClient` knows sockets and the order of the attempts. The agent machine decides when to try again and when to
give up. `CoordinatorService` is the hosted coordinator's shell: it passes messages between links and machine. Remote
agents connect through the Listener; the agent of this process through a LocalLink, without a socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from holdfast.agent.events import DialFailed
from holdfast.coordinator.coordinator_machine import CoordinatorMachine
from holdfast.coordinator.coordinator_state import (
    Command,
    Conclude,
    DropLink,
    Event,
    Heard,
    LinkClosed,
    LinkOpened,
    Tell,
)
from holdfast.coordinator.ending import Judge
from holdfast.coordinator.monitor import cannot_tell
from holdfast.protocol.errors import (
    EtcdError,
    EtcdUnreachableError,
    HoldfastError,
    InternalError,
    MissingPackageError,
    NoAnswerError,
    PortInUseError,
    RefusedError,
    RendezvousConfigError,
)
from holdfast.protocol.messages import Ask, Finish, FromAgent, FromCoordinator, Looked
from holdfast.protocol.options import RunOptions
from holdfast.protocol.outcome import fault_outcome
from holdfast.protocol.policy import NodeSpec, Note, Tick
from holdfast.protocol.rank_progress import Examine
from holdfast.runtime.control_handlers import Answers
from holdfast.runtime.driver import Driver
from holdfast.runtime.inherited import raise_limit
from holdfast.runtime.run_folder import Journal

if TYPE_CHECKING:
    from holdfast.rendezvous.bind import Claim
    from holdfast.runtime.leadership import ElectedClient
    from holdfast.runtime.listener import AgentConnection, Listener, StoreProxy

FINAL = (PortInUseError, RefusedError, EtcdError, MissingPackageError, RendezvousConfigError)
PASSING = (NoAnswerError, EtcdUnreachableError)
"""After these errors another attempt may help, whatever their class."""


class CoordinatorLink(Protocol):
    """An agent's link to the coordinator."""

    def start(self, on_message: Callable[[FromCoordinator], None], on_closed: Callable[[str], None]) -> None: ...

    def send(self, message: FromAgent) -> None: ...

    def close(self, reason: str = ...) -> None: ...


class RendezvousClient:
    """The client of one agent. Holds the coordinator while this process hosts it."""

    def __init__(
        self,
        options: RunOptions,
        judge: Judge,
        journal: Journal,
        say: Callable[[str], None],
        examine: Examine = cannot_tell,
    ) -> None:
        self._options = options
        self._examine = examine
        self._judge = judge
        self._journal = journal
        self._say = say
        self._elected: ElectedClient | None = None
        self.coordinator: CoordinatorService | None = None
        """The coordinator that is bound to the endpoint, so that no other can lead beside it. An elected one is not
        here."""

    async def connect(self, node: NodeSpec) -> CoordinatorLink | DialFailed:
        """Make one attempt. The link has to be started; a DialFailed says whether another attempt can help."""
        try:
            return await self._connect(node)
        except InternalError:
            raise
        except HoldfastError as error:
            final = isinstance(error, FINAL) and not isinstance(error, PASSING)
            return DialFailed(error.code, error.exit_code, str(error), final)
        except OSError as error:
            text = f"cannot bind the endpoint {self._options.endpoint}: {error.strerror or error}"
            return DialFailed(PortInUseError.code, PortInUseError.exit_code, text, final=True)

    def store_opened(self, port: int) -> None:
        """The store of this generation listens at this port: clients that connect to the endpoint itself are piped
        there."""
        if self.coordinator is not None and self.coordinator.proxy is not None:
            self.coordinator.proxy.set_target("127.0.0.1", port)

    async def close(self) -> None:
        if self.coordinator is not None:
            await self.coordinator.close()
        if self._elected is not None:
            await self._elected.close()

    async def _connect(self, node: NodeSpec) -> CoordinatorLink:
        options = self._options
        if options.etcd is not None or options.third_party is not None:
            return await self._connect_by_election(node)
        if self.coordinator is None:
            if options.standalone and options.job.max_nodes == 1:
                await self._host(None)  # no other node can join: no socket at all
            elif (place := await self._claim()) is not None:
                await self._host(place)
        if self.coordinator is not None:
            return self.coordinator.connect_locally()
        from holdfast.runtime.connection import dial

        return await dial(options.endpoint, options.job, node, options.token)

    async def _connect_by_election(self, node: NodeSpec) -> CoordinatorLink:
        if self._elected is None:
            from holdfast.rendezvous.elections import election_for
            from holdfast.runtime.leadership import ElectedClient

            election = election_for(self._options)
            assert election is not None
            self._elected = ElectedClient(self._options, election, self._judge, self._journal, self._say, self._examine)
        return await self._elected.connect(node)

    async def _claim(self) -> Claim | None:
        """The endpoint, if it is ours; None: dial it."""
        from holdfast.rendezvous.bind import claim

        options = self._options
        wanted = options.is_host
        if wanted is None and options.job.fixed_ranks and options.node_rank:
            wanted = False  # static: the endpoint is node 0's, also where two nodes share a machine
        if _is_numeric_or_local(options.endpoint.host):
            place = claim(options.endpoint, standalone=options.standalone, is_host=wanted)
        else:
            from holdfast.runtime.driver import run_detached

            place = await run_detached(lambda: claim(options.endpoint, standalone=options.standalone, is_host=wanted))
        self._journal.write("claim", endpoint=str(place.endpoint), host=place.is_host, reason=place.reason)
        return place if place.is_host else None

    async def _host(self, place: Claim | None) -> None:
        options = self._options
        static = options.job.fixed_ranks and options.share_store
        machine = CoordinatorMachine(
            options.job,
            options.limits,
            self._judge,
            asyncio.get_running_loop().time(),
            fixed_master=(options.endpoint.host, place.port) if static and place is not None else None,
            examine=self._examine,
        )
        service = CoordinatorService(machine, self._journal, self._say)
        if place is not None:
            await service.listen(place, options.token, static=static)
        self.coordinator = service


def _is_numeric_or_local(host: str) -> bool:
    """Whether the host needs no resolver, hence no thread."""
    return host == "localhost" or ":" in host or host.replace(".", "").isdecimal()


# --- the hosted coordinator -------------------------------------------------------------------------------------------

LINGER_S = 5.0
"""After the end of the job: how long members may take to receive the outcome and disconnect."""


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
        """A message of the coordinator."""
        if self._open and self._on_message is not None:
            self._on_message(message)

    def cut(self, reason: str) -> None:
        """The coordinator has closed the link."""
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
    """Runs a CoordinatorMachine behind the sockets of a claim."""

    def __init__(self, machine: CoordinatorMachine, journal: Journal, say: Callable[[str], None]) -> None:
        self._journal = journal
        self._say = say
        self._links: dict[int, AgentLink] = {}
        self._remote: set[int] = set()
        self._number = 0
        self._alone = asyncio.Event()
        self._alone.set()
        self._listener: Listener | None = None
        self._driver: Driver[Event, Command] = Driver(machine, Tick(), self._execute, on_fault=self._broken)
        self._driver.feed(Tick())
        self.machine = machine
        self._answers = Answers(machine, self._links, self._driver.feed, journal.fault)
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
            lambda connection, _: self._connected(connection),
            self._say,
            other=self.proxy.take if self.proxy is not None else None,
        )
        await self._listener.start()

    def connect_locally(self) -> LocalLink:
        """The link of this process's own agent."""
        self._number += 1
        link = LocalLink(self, self._number)
        self._links[self._number] = link.to_agent
        self._driver.feed(LinkOpened(self._number, "127.0.0.1", "127.0.0.1", local=True))
        return link

    def heard(self, number: int, message: FromAgent) -> None:
        if number not in self._links:
            return
        match message:
            case Ask():
                self._answers.asked(number, message)
            case Looked() if self._answers.looked(number, message):
                pass
            case _:
                self._driver.feed(Heard(number, message))

    def link_closed(self, number: int, reason: str) -> None:
        if self._forget(number):
            self._answers.link_closed(number)
            self._driver.feed(LinkClosed(number, reason))

    async def close(self) -> None:
        """End the coordinator: at once while the job continues without us, else when every member has received the
        outcome."""
        if self.machine.outcome is not None:
            try:
                async with asyncio.timeout(LINGER_S):
                    await self._alone.wait()
            except TimeoutError:
                self._journal.write("linger_over", links=len(self._remote))
        self._driver.stop()
        self._answers.close()
        for link in list(self._links.values()):
            link.close("the coordinator ends")
        self._links.clear()
        if self._listener is not None:
            self._listener.close()
        if self.proxy is not None:
            await self.proxy.close()

    def _connected(self, connection: AgentConnection) -> None:
        self._number += 1
        number = self._number
        self._links[number] = connection
        self._remote.add(number)
        self._alone.clear()
        connection.start(lambda message: self.heard(number, message), lambda reason: self.link_closed(number, reason))
        self._driver.feed(LinkOpened(number, connection.peer_address, connection.local_address))

    def _forget(self, number: int) -> bool:
        self._remote.discard(number)
        if not self._remote:
            self._alone.set()
        return self._links.pop(number, None) is not None

    def _broken(self, error: HoldfastError, event: Event) -> None:
        """The machine cannot continue: cut off the sender of the event that broke it, and tell all others that the job
        is over."""
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
                    self._links.pop(number)
                    link.close(reason)
            case Note(event, fields):
                self._journal.write(f"coordinator.{event}", **fields)
            case Conclude(outcome):
                self._journal.write("coordinator.concluded", kind=outcome.kind.value, exit_code=outcome.exit_code)
