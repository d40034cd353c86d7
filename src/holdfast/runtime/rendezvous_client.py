"""Connects this agent to the coordinator: hosts it where the endpoint is ours to bind, otherwise dials it.

`RendezvousClient` knows sockets and the order of the attempts. The agent machine decides when to try again and when to
give up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from holdfast.agent.events import Dialed, DialFailed
from holdfast.authority.sole import Sole
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.ending import Judge
from holdfast.journal import Journal
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
from holdfast.protocol.extension import CoordinatorHalf
from holdfast.protocol.options import RunOptions
from holdfast.protocol.policy import NodeSpec
from holdfast.runtime.coordinator_service import CoordinatorLink, CoordinatorService

if TYPE_CHECKING:
    from holdfast.rendezvous.bind import Claim
    from holdfast.runtime.leadership import ElectedClient
    from holdfast.runtime.succession import SuccessionClient

FINAL = (PortInUseError, RefusedError, EtcdError, MissingPackageError, RendezvousConfigError)
"""Errors after which no further attempt can help, except those in PASSING."""
PASSING = (NoAnswerError, EtcdUnreachableError)
"""Errors after which another attempt may help, although their base class is in FINAL."""


class RendezvousClient:
    """The client of one agent. Holds the coordinator while this process hosts it."""

    def __init__(
        self,
        options: RunOptions,
        judge: Judge,
        journal: Journal,
        say: Callable[[str], None],
        extensions: Sequence[CoordinatorHalf] = (),
    ) -> None:
        self._options = options
        self._extensions = extensions
        self._judge = judge
        self._journal = journal
        self._say = say
        self._elected: ElectedClient | None = None
        self._succeeding: SuccessionClient | None = None
        self._hosted: CoordinatorService | None = None

    @property
    def coordinator(self) -> CoordinatorService | None:
        """The coordinator in this process. One that was elected through a storage is not here: others can lead beside
        it."""
        return self._hosted if self._succeeding is None else self._succeeding.service

    @property
    def leading(self) -> CoordinatorService | None:
        """The coordinator in this process, also one that was elected through a storage, while it leads."""
        return self.coordinator or (None if self._elected is None else self._elected.leading)

    async def connect(self, node: NodeSpec) -> CoordinatorLink | DialFailed:
        """Make one attempt. The caller has to start the link. A DialFailed says whether another attempt can help."""
        try:
            return await self._connect(node)
        except InternalError:  # a fault of ours: to try again would hide it
            raise
        except HoldfastError as error:
            final = isinstance(error, FINAL) and not isinstance(error, PASSING)
            return DialFailed(error.code, error.exit_code, str(error), final)
        except OSError as error:
            text = f"cannot bind the endpoint {self._options.endpoint}: {error.strerror or error}"
            return DialFailed(PortInUseError.code, PortInUseError.exit_code, text, final=True)

    def dialed(self) -> Dialed:
        """The event for the agent's machine: a link is up."""
        local = self.coordinator is not None
        if self._succeeding is None:
            return Dialed(local)
        return Dialed(local and not self._succeeding.replaceable, self._succeeding.port, self._succeeding.term)

    def leaves(self) -> None:
        """Prevent that this agent becomes the coordinator, because it ends soon."""
        if self._succeeding is not None:
            self._succeeding.leaves()

    def store_opened(self, port: int) -> None:
        """Pipe clients of the store that connect to the endpoint itself to this port: the store of this generation
        listens there."""
        if self.coordinator is not None and self.coordinator.proxy is not None:
            self.coordinator.proxy.set_target("127.0.0.1", port)

    async def close(self) -> None:
        if self._hosted is not None:
            await self._hosted.close()
        if self._succeeding is not None:
            await self._succeeding.close()
        if self._elected is not None:
            await self._elected.close()

    async def _connect(self, node: NodeSpec) -> CoordinatorLink:
        options = self._options
        if options.is_elected:
            return await self._connect_by_election(node)
        if options.succession:
            return await self._connect_to_successor(node)
        if self.coordinator is None:
            if options.standalone and options.job.max_nodes == 1:
                await self._host(None)  # no other node can join: no socket at all
            else:
                from holdfast.rendezvous.bind import claim_endpoint

                place = await claim_endpoint(options)
                self._journal.write("claim", endpoint=str(place.endpoint), host=place.is_host, reason=place.reason)
                if place.is_host:
                    await self._host(place)
        if self.coordinator is not None:
            return self.coordinator.connect_locally()
        from holdfast.runtime.connection import dial

        return await dial(options.endpoint, options.job, node, options.token)

    async def _connect_by_election(self, node: NodeSpec) -> CoordinatorLink:
        if self._elected is None:
            from holdfast.rendezvous.election_for import election_for
            from holdfast.runtime.leadership import ElectedClient

            election = election_for(self._options)
            assert election is not None
            self._elected = ElectedClient(
                self._options, election, self._judge, self._journal, self._say, self._extensions
            )
        return await self._elected.connect(node)

    async def _connect_to_successor(self, node: NodeSpec) -> CoordinatorLink:
        if self._succeeding is None:
            from holdfast.runtime.succession import SuccessionClient

            self._succeeding = SuccessionClient(self._options, self._judge, self._journal, self._say, self._extensions)
        return await self._succeeding.connect(node)

    async def _host(self, place: Claim | None) -> None:
        options = self._options
        static = options.job.fixed_ranks and options.share_store
        now = asyncio.get_running_loop().time()
        machine = Coordinator(
            options.job,
            options.limits,
            self._judge,
            now,
            Sole(options.limits, now),
            fixed_master=(options.endpoint.host, place.port) if static and place is not None else None,
            extensions=self._extensions,
        )
        service = CoordinatorService(machine, self._journal, self._say)
        if place is not None:
            await service.listen(place, options.token, static=static)
        self._hosted = service
