"""Connects this process to the coordinator: hosts it where the endpoint is ours to bind, otherwise dials it.

Knows sockets and the order of the attempts. The agent machine decides when to try again and when to give up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from holdfast.agent.events import DialFailed
from holdfast.coordinator.coordinator_machine import CoordinatorMachine
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
from holdfast.protocol.messages import FromAgent, FromCoordinator
from holdfast.protocol.options import RunOptions
from holdfast.protocol.policy import NodeSpec
from holdfast.protocol.rank_progress import Examine
from holdfast.runtime.coordinator_service import CoordinatorService
from holdfast.runtime.journal import Journal

if TYPE_CHECKING:
    from holdfast.rendezvous.bind import Claim
    from holdfast.runtime.elected_client import ElectedClient


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

    async def reach(self, node: NodeSpec) -> CoordinatorLink | DialFailed:
        """Make one attempt. The link has to be started; a DialFailed says whether another attempt can help."""
        try:
            return await self._reach(node)
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

    async def _reach(self, node: NodeSpec) -> CoordinatorLink:
        options = self._options
        if options.etcd is not None or options.third_party is not None:
            return await self._meet_by_election(node)
        if self.coordinator is None:
            if options.standalone and options.job.max_nodes == 1:
                await self._host(None)  # no other node can join: no socket at all
            elif (place := await self._claim()) is not None:
                await self._host(place)
        if self.coordinator is not None:
            return self.coordinator.connect_locally()
        from holdfast.runtime.connection import dial

        return await dial(options.endpoint, options.job, node, options.token)

    async def _meet_by_election(self, node: NodeSpec) -> CoordinatorLink:
        if self._elected is None:
            from holdfast.rendezvous.elections import election_for
            from holdfast.runtime.elected_client import ElectedClient

            election = election_for(self._options)
            assert election is not None
            self._elected = ElectedClient(self._options, election, self._judge, self._journal, self._say, self._examine)
        return await self._elected.reach(node)

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
